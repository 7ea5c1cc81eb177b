// Hilbert attention: one plan, one predicate, three ways to differentiate.
//
//      S = c Q K^T       P = e^(S - L), L = log sum e^S over A(t)       O = (M P) V       M: dropout's, or 1
//      dV = (M P)^T dO       dP = dO V^T       Delta = rowsum(dO O)       dS = P (M dP - Delta)       dQ = c dS K
//      dK = c dS^T Q
//
// Read taped, hybrid, fused: each line of hybrid is a stage of the kernel that fused calls.
#include "ops/hilbert/call.h"
#include "ops/hilbert/modes/groups.h"
#include "ops/ops.h"

namespace hilt {
namespace {

void add_to(Tensor& total, const Tensor& more) { total = total ? add(total, more) : more; }

// ---- taped --------------------------------------------------------------------------------------

AttentionResult taped_branch(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, Index branch,
                             bool with_lse) {
  AttentionResult sum;
  Tensor answered;  // 1 for every query that has a key
  const auto batches = group_batches(call.plan, call.kv_heads, branch, q.device());
  for (const GroupBatch& g : *batches) {
    const Tensor s =
        with_terms(call, g, mul(matmul(gather_rows(q, g.queries), transpose(gather_rows(k, g.keys))), call.scale));
    const bool may_mask = bool(call.options.terms.bias);
    Tensor p = softmax(s, g, may_mask);
    if (call.options.dropout > 0) p = mul(p, dropout_multipliers(g, p.dim(0), call.heads(), call.options, p.dtype()));
    add_to(sum.o, scatter_rows(matmul(p, gather_rows(v, g.keys)), g.queries));
    if (!with_lse) continue;
    add_to(sum.lse, scatter_rows(logsumexp(s, g, may_mask), g.queries));
    Tensor present = ones({1, std::ssize(g.heads), g.groups, g.q, 1}, DType::f32, q.device());
    if (g.answers) present = mul(present, to(g.answers, DType::f32));
    add_to(answered, scatter_rows(present, g.queries));
  }
  if (!sum.o) sum.o = zeros(q.shape(), q.dtype(), q.device());
  if (with_lse && sum.lse)
    sum.lse = where(greater(answered, scalar_like(answered, 0)), sum.lse, scalar_like(q, kMinusInfinity));
  if (with_lse && !sum.lse) sum.lse = full(q.shape().with(-1, 1), kMinusInfinity, q.dtype(), q.device());
  return sum;
}

}  // namespace

AttentionResult taped(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, bool with_lse) {
  if (size_of(q.dtype()) == 2) {  // 16 bits are for storage: scores do not fit f16, nor do weights bf16
    Call wide = call;
    if (const Tensor& bias = call.options.terms.bias) wide.options.terms.bias = to(bias, DType::f32);
    const AttentionResult part = taped(wide, to(q, DType::f32), to(k, DType::f32), to(v, DType::f32), with_lse);
    return {to(part.o, q.dtype()), part.lse};
  }
  const Index branches = branch_count(*call.plan);
  const Tensor& sink = call.options.terms.sink;
  if (branches == 1 && !sink) return taped_branch(call, q, k, v, 0, with_lse);
  // O = sum_i e^(L_i - L) O_i, a softmax over the branches, and over the sink, whose O is zero.
  std::vector<Tensor> o, lse;
  for (Index branch = 0; branch < branches; ++branch) {
    const AttentionResult part = taped_branch(call, q, k, v, branch, true);
    o.push_back(part.o), lse.push_back(part.lse);
  }
  if (sink) lse.push_back(expand(reshape(sink, {1, 1, -1, 1}), lse[0].shape()));
  const Tensor each = cat(lse, -1);  // [B, L, H, branches]
  const Tensor total = max(detach(each), {-1}, true);
  const Tensor silent = greater(scalar_like(total, std::numeric_limits<float>::lowest()), total);  // all empty
  const Tensor some = where(silent, scalar_like(each, 0), each), weight = softmax(some);
  AttentionResult merged;
  for (Index branch = 0; branch < branches; ++branch)
    add_to(merged.o, mul(slice(weight, -1, branch, branch + 1), o[static_cast<std::size_t>(branch)]));
  if (with_lse) merged.lse = where(silent, scalar_like(each, kMinusInfinity), unsqueeze(logsumexp(some), -1));
  return merged;
}

// ---- hybrid: the forward kernel of fused (OneOp in call.h), its backward in library products ----

bool all_finite(std::span<const Tensor> tensors) { return std::isfinite(global_norm(tensors)); }

std::vector<Tensor> detail::hybrid_backward(const OneOp& op, std::span<const Tensor> given) {
  const Call& call = op.call;
  const BackwardInputs x = op.kept(given);
  const std::array read{x.q, x.k, x.v, x.d_o, x.d_lse ? x.d_lse : x.d_o};
  if (!all_finite(read)) return fused_backward(op, given);  // 0 x NaN: see attention.cpp
  const DType wide = x.lse.dtype();                         // 16 bits are for storage
  const Tensor q = to(x.q, wide), k = to(x.k, wide), v = to(x.v, wide), d_o = to(x.d_o, wide);
  const auto as_column = [](const Tensor& t) { return unsqueeze(permute(t, {0, 2, 1}), -1); };
  const Tensor lse = as_column(x.lse);  // [B, L, H, 1]
  const Tensor delta = sum(mul(d_o, to(x.o, wide)), {-1}, true);
  const Tensor less = x.d_lse ? sub(delta, as_column(x.d_lse)) : delta;
  Call wide_call = call;
  if (const Tensor& bias = call.options.terms.bias) wide_call.options.terms.bias = to(bias, wide);
  const TermTensors terms = term_inputs(wide_call.options.terms);
  TermTensors d_terms;
  Tensor dq = zeros_like(q), dk = zeros_like(k), dv = zeros_like(v);
  for (Index branch = 0; branch < branch_count(*call.plan); ++branch) {
    const auto batches = group_batches(call.plan, call.kv_heads, branch, q.device());
    for (const GroupBatch& g : *batches) {
      const Tensor Q = gather_rows(q, g.queries), K = gather_rows(k, g.keys), V = gather_rows(v, g.keys),
                   dO = gather_rows(d_o, g.queries);
      const Tensor none = scalar_like(q, 0);
      const Tensor cQ = mul(Q, call.scale);
      const Tensor z = matmul(cQ, transpose(K));
      std::optional<Tape> tape;  // what terms make of c Q K^T is differentiated as in taped
      if (has_pair_terms(call.options.terms)) {
        tape.emplace(), tape->watch(z);
        for (std::size_t i = 0; i < kTermTensors; ++i)
          if (x.terms[i]) tape->watch(terms[i]);
      }
      const Tensor S = with_terms(wide_call, g, z);
      std::optional<Tape::Pause> pause(std::in_place);
      Tensor P = exp(sub(S, gather_rows(lse, g.queries)));  // P  = e^(S - L)
      if (g.mask) P = where(g.mask, P, none);
      if (terms[kBiasTensor]) P = where(equal(S, kMinusInfinity), none, P);
      Tensor dP = matmul(dO, transpose(V)), MP = P;  // dP = dO V^T
      if (call.options.dropout > 0) {
        const Tensor M = dropout_multipliers(g, P.dim(0), call.heads(), call.options, P.dtype());
        dP = mul(M, dP), MP = mul(M, P);
      }
      Tensor dS = mul(P, sub(dP, gather_rows(less, g.queries)));  // dS = P (dP - Delta)
      pause.reset();
      if (tape) {
        const Gradients through = tape->backward(S, dS);
        for (std::size_t i = 0; i < kTermTensors; ++i)
          if (terms[i] && through.has(terms[i])) add_to(d_terms[i], through[terms[i]]);
        dS = through[z];
      }
      const Tensor cdQ = mul(matmul(dS, K), call.scale);  // dQ = c dS K
      dq = add(dq, scatter_rows(cdQ, g.queries));
      dk = add(dk, scatter_rows(matmul(transpose(dS), cQ), g.keys));  // dK = c dS^T Q
      dv = add(dv, scatter_rows(matmul(transpose(MP), dO), g.keys));  // dV = P^T dO
    }
  }
  d_terms = finished_terms(call, d_terms, x.terms, x.lse, permute(squeeze(less, -1), {0, 2, 1}));
  if (!op.packed) return op.finished({dq, dk, dv}, x.q.dtype(), d_terms);
  return op.finished({cat({unsqueeze(dq, 2), unsqueeze(dk, 2), unsqueeze(dv, 2)}, 2)}, x.q.dtype(), d_terms);
}

// ---- fused --------------------------------------------------------------------------------------

// The kernels that run_backward() calls go through the same lines, tile by tile.
std::vector<Tensor> detail::fused_backward(const OneOp& op, std::span<const Tensor> given) {
  const Call& call = op.call;
  BackwardInputs x = op.kept(given);
  x.d_o = in_rows(x.d_o);
  const BackwardRun run = decide_backward(call, x);
  std::vector<Tensor> dx = op.gradients_like_inputs(run);
  std::array<Tensor, 3> d = OneOp::parts(dx);
  TermTensors d_terms = term_sums(call, x.terms);
  run_backward(call, run, x, d, d_terms);  // dQ, dK, dV
  d = {};                                  // shares dx, which finished() frees as it converts
  d_terms = finished_terms(call, std::move(d_terms), x.terms, x.lse, x.delta);
  return op.finished(std::move(dx), x.q.dtype(), std::move(d_terms));
}

}  // namespace hilt
