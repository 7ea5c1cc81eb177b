// Hilbert attention: one plan, one predicate, three ways to differentiate.
//
//      S = c Q K^T       P = e^(S - L), L = log sum e^S over A(t)       O = (M P) V
//      M: dropout's multipliers, else 1
//      dV = (M P)^T dO       dP = dO V^T       Delta = rowsum(dO O)       dS = P (M dP - Delta)       dQ = c dS K
//      dK = c dS^T Q
//
//   taped   each step is an op on the tape; nobody wrote a backward pass       keeps S, P and every operand of every op
//   hybrid  one op; its backward is the six formulas in library GEMMs          keeps q, k, v, o, L
//   fused   one op; its backward is one kernel                                 keeps q, k, v, o, L
//
// Read them in this order: each line of hybrid is a stage of the kernel that fused calls.
#include "ops/hilbert/modes.h"
#include <cmath>
#include <limits>
#include "ops/hilbert/groups.h"
#include "ops/ops.h"

namespace hilt {
namespace {

Tensor constant(double value, const Tensor& like) { return full({}, value, like.dtype(), like.device()); }
const double kMinusInfinity = -std::numeric_limits<double>::infinity();

// ---- taped --------------------------------------------------------------------------------------

Taped taped_branch(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, Index branch, bool with_lse) {
  Taped sum;
  Tensor answered;  // 1 for every query that has a key
  const auto gather_in = [](Tensor& total, const Tensor& more) { total = total ? add(total, more) : more; };
  const auto tilings = group_batches(call.plan, call.kv_heads, branch, q.device());
  for (const TilingBatches& tiling : *tilings) {
    for (const GroupBatch& g : tiling.batches) {
      Tensor s = mul(matmul(gather_queries(q, g), transpose(gather_keys(k, g))), call.scale);
      if (g.mask) s = where(g.softmax_mask, s, constant(kMinusInfinity, s));
      Tensor p = softmax(s);
      if (call.options.dropout > 0)
        p = mul(p, dropout_multipliers(g, call.batch, call.heads(), call.options, p.dtype()));
      Tensor o = matmul(p, gather_keys(v, g));
      if (g.empty) o = where(g.empty, constant(0, o), o);
      gather_in(sum.o, scatter_queries(o, g, call.length, call.heads()));
      if (!with_lse) continue;
      gather_in(sum.lse, scatter_queries(unsqueeze(logsumexp(s), -1), g, call.length, call.heads()));
      Tensor present = ones({1, static_cast<Index>(g.heads.size()), g.groups, g.q, 1}, DType::f32, q.device());
      if (g.empty) present = where(g.empty, constant(0, present), present);
      gather_in(answered, scatter_queries(present, g, call.length, call.heads()));
    }
  }
  if (!sum.o) sum.o = zeros(q.shape(), q.dtype(), q.device());
  if (with_lse && sum.lse)
    sum.lse = where(greater(answered, constant(0, answered)), sum.lse, constant(kMinusInfinity, q));
  if (with_lse && !sum.lse) sum.lse = full(q.shape().with(-1, 1), kMinusInfinity, q.dtype(), q.device());
  return sum;
}

}  // namespace

Taped taped(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, bool with_lse) {
  if (size_of(q.dtype()) == 2) {  // 16 bits are for storage: scores do not fit f16, nor do weights bf16
    const Taped part = taped(call, to(q, DType::f32), to(k, DType::f32), to(v, DType::f32), with_lse);
    return {to(part.o, q.dtype()), part.lse};
  }
  const Index branches = branch_count(*call.plan);
  if (branches == 1) return taped_branch(call, q, k, v, 0, with_lse);
  // Merge: O = sum_i e^(L_i - L) O_i with L = log sum_i e^L_i, which is a softmax over the
  // branches.
  std::vector<Tensor> o, lse;
  for (Index branch = 0; branch < branches; ++branch) {
    const Taped part = taped_branch(call, q, k, v, branch, true);
    o.push_back(part.o);
    lse.push_back(part.lse);
  }
  const Tensor each = cat(lse, -1);  // [B, L, H, branches]
  const Tensor total = max(detach(each), {-1}, true);
  const Tensor silent = greater(constant(std::numeric_limits<float>::lowest(), total), total);  // every branch is empty
  const Tensor weight =
      softmax(each);  // NaN where all are silent; those rows are 0 below, and no branch asks for their gradient
  Taped merged;
  for (Index branch = 0; branch < branches; ++branch) {
    const Tensor term = mul(slice(weight, -1, branch, branch + 1), o[static_cast<std::size_t>(branch)]);
    merged.o = merged.o ? add(merged.o, term) : term;
  }
  merged.o = where(silent, constant(0, merged.o), merged.o);
  if (with_lse) merged.lse = unsqueeze(logsumexp(each), -1);
  return merged;
}

// ---- hybrid: the forward kernel of fused (OneOp in call.h), and its backward in library products
// ------

bool all_finite(std::span<const Tensor> tensors) { return std::isfinite(global_norm(tensors)); }

std::vector<Tensor> detail::Hybrid::backward(const Tensor& cotangent) {
  const BackwardInputs x = kept(cotangent);
  const std::array<Tensor, 4> read{x.q, x.k, x.v, cotangent};
  if (!all_finite(read)) return fused_backward(cotangent);  // 0 x NaN: see attention.cpp
  const DType wide = x.lse.dtype();                         // 16 bits are for storage
  const Tensor q = to(x.q, wide), k = to(x.k, wide), v = to(x.v, wide), d_o = to(cotangent, wide);
  const Tensor lse = unsqueeze(permute(x.lse, {0, 2, 1}), -1);  // [B, L, H, 1]
  const Tensor delta = sum(mul(d_o, to(x.o, wide)), {-1}, true);
  Tensor dq = zeros_like(q), dk = zeros_like(k), dv = zeros_like(v);
  for (Index branch = 0; branch < branch_count(*call.plan); ++branch) {
    const auto tilings = group_batches(call.plan, call.kv_heads, branch, q.device());
    for (const TilingBatches& tiling : *tilings)
      for (const GroupBatch& g : tiling.batches) {
        const Tensor Q = gather_queries(q, g), K = gather_keys(k, g), V = gather_keys(v, g),
                     dO = gather_queries(d_o, g);
        const Tensor none = constant(0, q);
        const Tensor cQ = mul(Q, call.scale);
        Tensor P = exp(sub(matmul(cQ, transpose(K)), gather_queries(lse, g)));  // P  = e^(c Q K^T - L)
        if (g.mask) P = where(g.mask, P, none);
        Tensor dP = matmul(dO, transpose(V)), MP = P;  // dP = dO V^T
        if (call.options.dropout > 0) {
          const Tensor M = dropout_multipliers(g, call.batch, call.heads(), call.options, P.dtype());
          dP = mul(M, dP), MP = mul(M, P);
        }
        const Tensor dS = mul(P, sub(dP, gather_queries(delta, g)));  // dS = P (dP - Delta)
        const Tensor cdQ = mul(matmul(dS, K), call.scale);            // dQ = c dS K
        dq = add(dq, scatter_queries(cdQ, g, call.length, call.heads()));
        dk = add(dk, scatter_keys(matmul(transpose(dS), cQ), g, call.length, call.kv_heads));  // dK = c dS^T Q
        dv = add(dv, scatter_keys(matmul(transpose(MP), dO), g, call.length, call.kv_heads));  // dV = P^T dO
      }
  }
  if (!packed) return finished({dq, dk, dv}, cotangent.dtype());
  return finished({cat({unsqueeze(dq, 2), unsqueeze(dk, 2), unsqueeze(dv, 2)}, 2)}, cotangent.dtype());
}

// ---- fused
// ---------------------------------------------------------------------------------------

// The kernel of run_backward() in call.h goes through the same lines, tile by tile.
std::vector<Tensor> detail::Fused::backward(const Tensor& dO) { return fused_backward(dO); }

}  // namespace hilt
