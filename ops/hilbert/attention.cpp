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
#include "ops/hilbert/attention.h"
#include <array>
#include <cmath>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include "core/io/text.h"
#include "ops/hilbert/call.h"
#include "ops/hilbert/groups.h"
#include "ops/ops.h"

namespace hilt {
namespace {

constexpr std::array<std::string_view, 3> kModes{"taped", "hybrid", "fused"};
constexpr std::size_t kRemembered = 64;

Tensor constant(double value, const Tensor& like) { return full({}, value, like.dtype(), like.device()); }
const double kMinusInfinity = -std::numeric_limits<double>::infinity();

// ---- taped --------------------------------------------------------------------------------------

/// What one branch gives: o [B, L, H, D], and where branches merge or the caller asks, lse [B, L,
/// H, 1].
struct Part {
  Tensor o, lse;
};

Part taped_branch(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, Index branch, bool with_lse) {
  Part sum;
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

Part taped(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, bool with_lse) {
  if (size_of(q.dtype()) == 2) {  // 16 bits are for storage: scores do not fit f16, nor do weights bf16
    const Part part = taped(call, to(q, DType::f32), to(k, DType::f32), to(v, DType::f32), with_lse);
    return {to(part.o, q.dtype()), part.lse};
  }
  const Index branches = branch_count(*call.plan);
  if (branches == 1) return taped_branch(call, q, k, v, 0, with_lse);
  // Merge: O = sum_i e^(L_i - L) O_i with L = log sum_i e^L_i, which is a softmax over the
  // branches.
  std::vector<Tensor> o, lse;
  for (Index branch = 0; branch < branches; ++branch) {
    const Part part = taped_branch(call, q, k, v, branch, true);
    o.push_back(part.o);
    lse.push_back(part.lse);
  }
  const Tensor each = cat(lse, -1);  // [B, L, H, branches]
  const Tensor total = max(detach(each), {-1}, true);
  const Tensor silent = greater(constant(std::numeric_limits<float>::lowest(), total), total);  // every branch is empty
  const Tensor weight =
      softmax(each);  // NaN where all are silent; those rows are 0 below, and no branch asks for their gradient
  Part merged;
  for (Index branch = 0; branch < branches; ++branch) {
    const Tensor term = mul(slice(weight, -1, branch, branch + 1), o[static_cast<std::size_t>(branch)]);
    merged.o = merged.o ? add(merged.o, term) : term;
  }
  merged.o = where(silent, constant(0, merged.o), merged.o);
  if (with_lse) merged.lse = unsqueeze(logsumexp(each), -1);
  return merged;
}

// ---- what hybrid and fused share: the forward kernel and what it keeps --------------------------

AttentionResult kernel_forward(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
  SoftmaxState state = blank_state(call, q, call.plan->tilings(), false);
  attend(call, call.plan->tilings(), q, k, v, state);
  return {to(state.o, q.dtype()), state.lse};
}

struct OneOp : Function {
  Call call;
  bool packed = false;

  Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v) {
    const AttentionResult r = kernel_forward(call, q, k, v);
    keep({q, k, v, r.o, r.lse});
    return r.o;
  }
  Tensor forward(const Tensor& qkv) {
    packed = true;
    const auto part = parts(qkv);
    const AttentionResult r = kernel_forward(call, part[0], part[1], part[2]);
    keep({qkv, r.o, r.lse});
    return r.o;
  }

  /// q, k, v inside [B, L, 3, H, D].
  static std::array<Tensor, 3> parts(const Tensor& qkv) {
    std::array<Tensor, 3> out;
    for (Index i = 0; i < 3; ++i)
      out[static_cast<std::size_t>(i)] = as_strided(qkv, {qkv.dim(0), qkv.dim(1), qkv.dim(3), qkv.dim(4)},
                                                    {qkv.stride(0), qkv.stride(1), qkv.stride(3), qkv.stride(4)},
                                                    qkv.offset() + (qkv.numel() > 0 ? i * qkv.stride(2) : 0));
    return out;
  }

 protected:
  struct Kept {
    std::array<Tensor, 3> qkv;
    const Tensor &o, &lse;
  };
  Kept kept() const {
    if (packed) return {parts(saved(0)), saved(1), saved(2)};
    return {{saved(0), saved(1), saved(2)}, saved(3), saved(4)};
  }
  /// Gradients laid out as the inputs were, zero and in the accumulator's type.
  std::vector<Tensor> blank(const Kept& x) const {
    const DType type = x.lse.dtype();
    if (packed) return {zeros(saved(0).shape(), type, saved(0).device())};
    const auto zero = [type](const Tensor& like) { return zeros(like.shape(), type, like.device()); };
    return {zero(x.qkv[0]), zero(x.qkv[1]), zero(x.qkv[2])};
  }
  std::vector<Tensor> finished(std::vector<Tensor> dx, DType type) const {
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] = wants(i) ? to(dx[i], type) : Tensor{};
    return dx;
  }
  std::vector<Tensor> fused_backward(const Tensor& d_o) const;
  /// By a kernel that makes whole gradients, where a GPU has one for this call; else nothing.
  std::vector<Tensor> backward_at_once(const Kept& x, const Tensor& d_o) const;

 private:
  void keep(std::initializer_list<Tensor> tensors) {
    if (!wants_any()) return;
    for (const Tensor& t : tensors) save(t);
  }
};

bool all_finite(std::span<const Tensor> tensors) { return std::isfinite(global_norm(tensors)); }

// ---- hybrid -------------------------------------------------------------------------------------

struct Hybrid final : OneOp {
  std::string_view name() const override { return "attention (hybrid)"; }

  std::vector<Tensor> backward(const Tensor& cotangent) override {
    const Kept x = kept();
    const std::array<Tensor, 4> read{x.qkv[0], x.qkv[1], x.qkv[2], cotangent};
    if (!all_finite(read)) return fused_backward(cotangent);  // 0 x NaN: see mode_for()
    const DType wide = x.lse.dtype();                         // 16 bits are for storage
    const Tensor q = to(x.qkv[0], wide), k = to(x.qkv[1], wide), v = to(x.qkv[2], wide), d_o = to(cotangent, wide);
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
};

// ---- fused --------------------------------------------------------------------------------------

std::vector<Tensor> OneOp::backward_at_once(const Kept& x, const Tensor& d_o) const {
  const auto& [q, k, v] = x.qkv;
  std::vector<Tensor> dx;
  const auto blank = [&](bool covers) {
    if (packed) dx = {blank_like(saved(0), covers)};
    else dx = {blank_like(q, covers), blank_like(k, covers), blank_like(v, covers)};
    return packed ? parts(dx[0]) : std::array<Tensor, 3>{dx[0], dx[1], dx[2]};
  };
  if (!gradients_at_once(call, call.plan->tilings(), q, k, v, x.o, d_o, x.lse, blank)) dx.clear();
  return dx;
}

std::vector<Tensor> OneOp::fused_backward(const Tensor& cotangent) const {
  const Kept x = kept();
  const auto& [q, k, v] = x.qkv;
  const Tensor d_o = in_rows(cotangent);
  if (std::vector<Tensor> dx = backward_at_once(x, d_o); !dx.empty()) return finished(std::move(dx), q.dtype());
  std::vector<Tensor> dx = blank(x);
  std::array<Tensor, 3> d = packed ? parts(dx[0]) : std::array<Tensor, 3>{dx[0], dx[1], dx[2]};
  add_gradients(call, call.plan->tilings(), q, k, v, d_o, x.lse, delta_of(call, x.o, d_o, x.lse.dtype()), d);
  d = {};  // shares dx, which finished() frees as it converts
  return finished(std::move(dx), q.dtype());
}

struct Fused final : OneOp {
  std::string_view name() const override { return "attention (fused)"; }
  std::vector<Tensor> backward(const Tensor& d_o) override { return fused_backward(d_o); }
};

// ---- choosing -----------------------------------------------------------------------------------

std::vector<Fallback>& fallbacks() {
  thread_local std::vector<Fallback> list;
  return list;
}

bool has_masks(const Plan& plan) {
  for (const Tiling& t : plan.tilings())
    if (t.tiles_partial > 0 || t.group.size() == 1) return true;
  return false;
}

bool attends_at_all(const Plan& plan) {
  for (const Tiling& t : plan.tilings())
    if (!t.group.empty()) return true;
  return plan.length() == 0;
}

/// The mode that will run. taped and hybrid multiply masked weights, which are zero, with every key
/// and value of a group; where one of those is not finite the product would carry NaN into rows
/// that must not see it, and the kernels, which select, take over.
Backward mode_for(const Call& call, std::span<const Tensor> inputs) {
  const Backward asked = call.options.backward;
  const char* reason = nullptr;
  if (asked == Backward::taped && !attends_at_all(*call.plan))
    reason = "no token attends to any: there is no op to tape";
  else if (asked != Backward::fused && has_masks(*call.plan) && !all_finite(inputs))
    reason = "q, k or v has NaN or infinity, which a product with a masked zero would spread";
  if (!reason) return asked;
  check(!call.options.strict, "attention: ", name_of(asked), " would fall back to fused: ", reason);
  if (fallbacks().size() == kRemembered) fallbacks().erase(fallbacks().begin());
  fallbacks().push_back({asked, Backward::fused, reason});
  return Backward::fused;
}

Call call_of(const PlanPtr& plan, const AttentionOptions& options, const Tensor& q, const Tensor& k, const Tensor& v) {
  check(plan != nullptr, "attention: no plan; make one with make_plan");
  return checked_call("attention", plan, options, plan->length(), q, k, v);
}

template <class Op, class... In> Tensor as_one_op(const Call& call, const In&... inputs) {
  Op op;
  op.call = call;
  return apply(std::move(op), inputs...);
}

}  // namespace

Backward parse_backward(std::string_view text) { return static_cast<Backward>(find_name("backward", text, kModes)); }
std::string_view name_of(Backward mode) { return kModes[static_cast<std::size_t>(mode)]; }
const std::vector<Fallback>& attention_fallbacks() { return fallbacks(); }
void clear_attention_fallbacks() { fallbacks().clear(); }

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                 const AttentionOptions& options) {
  const Call call = call_of(plan, options, q, k, v);
  const std::array<Tensor, 3> in{q, k, v};
  switch (mode_for(call, in)) {
    case Backward::taped: return taped(call, q, k, v, false).o;
    case Backward::hybrid: return as_one_op<Hybrid>(call, in_rows(q), in_rows(k), in_rows(v));
    case Backward::fused: break;
  }
  return as_one_op<Fused>(call, in_rows(q), in_rows(k), in_rows(v));
}

Tensor attention(const Tensor& qkv, const PlanPtr& plan, const AttentionOptions& options) {
  check(bool(qkv) && qkv.rank() == 5 && qkv.dim(2) == 3,
        "attention: packed q, k, v must be [batch, length, 3, heads, dim], got ", qkv.shape());
  const std::array<Tensor, 3> part = OneOp::parts(qkv);
  const Call call = call_of(plan, options, part[0], part[1], part[2]);
  switch (mode_for(call, part)) {
    case Backward::taped: {
      const auto axis = [&](Index i) { return squeeze(slice(qkv, 2, i, i + 1), 2); };
      return taped(call, axis(0), axis(1), axis(2), false).o;
    }
    case Backward::hybrid: return as_one_op<Hybrid>(call, in_rows(qkv));
    case Backward::fused: break;
  }
  return as_one_op<Fused>(call, in_rows(qkv));
}

AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                                   const AttentionOptions& options) {
  const Tape::Pause pause;
  const Call call = call_of(plan, options, q, k, v);
  const std::array<Tensor, 3> in{q, k, v};
  if (mode_for(call, in) != Backward::taped) return kernel_forward(call, in_rows(q), in_rows(k), in_rows(v));
  const Part part = taped(call, q, k, v, true);
  const Tensor lse = permute(squeeze(part.lse, -1), {0, 2, 1});
  return {part.o, contiguous(to(lse, q.dtype() == DType::f64 ? DType::f64 : DType::f32))};
}

// ---- what it takes ------------------------------------------------------------------------------

// Counted off the code above. One S is [B, heads, groups, q, k]; temporaries live to the end of
// their expression.
AttentionMemory attention_memory(const Plan& plan, Index batch, Index kv_heads, Index dim, DType dtype, Backward mode) {
  const auto element = static_cast<double>(size_of(dtype));
  const double stat = dtype == DType::f64 ? 8.0 : 4.0;
  const double rows = static_cast<double>(batch * plan.length()), heads = static_cast<double>(plan.heads());
  const double q = rows * heads * static_cast<double>(dim), kv = 2 * rows * static_cast<double>(kv_heads * dim),
               row = rows * heads;
  const bool narrow = size_of(dtype) == 2;
  AttentionMemory m;
  const double kept = q * element + row * stat;  // o and lse
  if (mode == Backward::fused) {
    m.saved = static_cast<std::size_t>(kept);
    m.peak = static_cast<std::size_t>(kept + row * stat + (q + kv) * stat + (narrow ? q * element : 0));
    return m;
  }
  double scores = 0, largest = 0, gathered = 0, gathered_most = 0, masks = 0;
  std::map<std::pair<Index, Index>, double> sizes;  // groups of one size are multiplied together
  for (const auto& [index, users_of] : users(plan, -1)) {
    sizes.clear();
    double here = 0;
    bool in_place = !narrow && kv_heads == plan.heads();
    const Tiling& t = plan.tilings()[static_cast<std::size_t>(index)];
    const bool masked = t.tiles_partial > 0 ||
                        static_cast<Index>(t.keys.size()) < static_cast<Index>(t.q_tile.size() * t.k_tile.size());
    for (const Tiling::Group& g : t.group) {
      const Index nq = g.q.end - g.q.begin, nk = g.k.end - g.k.begin;
      const double pairs = static_cast<double>(nq) * static_cast<double>(nk);
      sizes[{nq, nk}] += pairs;
      if (masked && (t.group.size() == 1 || t.tiles_partial > 0)) masks += pairs;
      here += static_cast<double>(batch) * static_cast<double>(users_of.size()) *
              static_cast<double>((nq + 2 * nk) * dim) * stat;
    }
    for (const auto& [size, pairs] : sizes) {
      const double s = pairs * static_cast<double>(batch) * static_cast<double>(users_of.size()) * stat;
      scores += s;
      largest = std::max(largest, s);
    }
    for (std::size_t i = 0; i < t.q_token.size(); ++i)
      in_place = in_place && t.q_token[i] == static_cast<std::int32_t>(i);
    if (in_place && sizes.size() == 1 && t.k_token.size() == t.q_token.size()) here = 0;
    gathered += here;
    gathered_most = std::max(gathered_most, here);
  }
  if (mode == Backward::hybrid) {
    m.saved = static_cast<std::size_t>(kept);
    m.peak = static_cast<std::size_t>(kept + 4 * largest + masks + 2 * gathered_most + (q + kv) * stat + q * stat +
                                      (narrow ? (3 * q + kv) * stat : 0));
    return m;
  }
  const double branches = static_cast<double>(branch_count(plan));
  const double merge = branches > 1 ? scores + branches * q * stat : 0;  // logsumexp keeps S; the merge keeps each part
  m.saved = static_cast<std::size_t>(scores + gathered + masks + merge);
  m.peak = static_cast<std::size_t>(scores + 2 * largest + gathered + masks + merge + q * stat);
  return m;
}

// ---- along the order and back -------------------------------------------------------------------
namespace {

struct Move final : Function {
  Tensor index, inverse;
  int axis = 1;
  std::string_view label;
  std::string_view name() const override { return label; }
  Tensor forward(const Tensor& x) { return gather(x, axis, index); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {gather(dy, axis, inverse)}; }
};

/// To bring an index to a GPU is to wait, so those used last stay there.
Tensor index_on(Device device, const std::vector<std::int32_t>& index) {
  const auto made = [&] { return moved(from_values(index, {static_cast<Index>(index.size())}), device); };
  if (device.is_cpu()) return made();
  struct Kept {
    Device device;
    std::vector<std::int32_t> index;
    Tensor there;
  };
  constexpr std::size_t kKept = 16, kKeptTokens = std::size_t{16} << 20;
  static std::mutex mutex;
  static auto& recent = *new std::list<Kept>;  // outlives every device
  const std::lock_guard lock(mutex);
  for (auto at = recent.begin(); at != recent.end(); ++at)
    if (at->device == device && at->index == index) {
      recent.splice(recent.begin(), recent, at);
      return at->there;
    }
  recent.push_front({device, index, made()});
  std::size_t tokens = 0;
  for (const Kept& k : recent) tokens += k.index.size();
  for (; recent.size() > kKept || (recent.size() > 2 && tokens > kKeptTokens); recent.pop_back())
    tokens -= recent.back().index.size();
  return recent.front().there;
}

Tensor move(std::string_view label, const Tensor& x, const std::vector<std::int32_t>& index,
            const std::vector<std::int32_t>& inverse, int axis) {
  Move fn;
  fn.label = label;
  fn.axis = checked_axis(label.data(), axis, x.rank());
  check(x.dim(fn.axis) == static_cast<Index>(index.size()), label, ": axis ", axis, " of ", x.shape(), " has ",
        x.dim(fn.axis), " tokens, the order ", index.size());
  fn.index = index_on(x.device(), index);
  fn.inverse = index_on(x.device(), inverse);
  return apply(std::move(fn), x);
}

}  // namespace

Tensor reorder(const Tensor& x, const Permutation& order, int axis) {
  return move("reorder", x, order.token_at, order.position_of, axis);
}
Tensor restore(const Tensor& y, const Permutation& order, int axis) {
  return move("restore", y, order.position_of, order.token_at, axis);
}

}  // namespace hilt
