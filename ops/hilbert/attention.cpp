// The public calls: which mode runs, and the table of modes.
#include "ops/hilbert/attention.h"
#include "core/io/text.h"
#include "ops/hilbert/call.h"
#include "ops/ops.h"

namespace hilt {
namespace {

using detail::OneOp;

/// q, k and v, or one packed projection.
using Inputs = std::span<const Tensor>;

constexpr std::array kModes{
    BackwardMode{Backward::taped, "taped", "each step is an op on the tape"},
    BackwardMode{Backward::hybrid, "hybrid", "one op; its backward is six formulas in library products"},
    BackwardMode{Backward::fused, "fused", "one op; its backward is a kernel"},
};

AttentionResult run_taped(const Call& call, Inputs in, bool with_lse) {
  const auto axis = [&](Index i) { return squeeze(slice(in[0], 2, i, i + 1), 2); };
  const AttentionResult part =
      in.size() == 3 ? taped(call, in[0], in[1], in[2], with_lse) : taped(call, axis(0), axis(1), axis(2), with_lse);
  if (!with_lse) return {part.o, {}};
  const Tensor lse = permute(squeeze(part.lse, -1), {0, 2, 1});
  return {part.o, contiguous(to(lse, part.o.dtype() == DType::f64 ? DType::f64 : DType::f32))};
}

template <class F> bool any_tiling(const Plan& plan, F&& f) {
  return std::ranges::any_of(plan.parts(), [&](const PlanPart& part) { return std::ranges::any_of(part.tilings, f); });
}
bool has_masks(const Plan& plan) {
  return any_tiling(plan, [](const Tiling& t) { return t.pairs > 0 && group_shape(t).pairs() > t.pairs; });
}
bool attends_at_all(const Plan& plan) {
  return plan.length() == 0 || any_tiling(plan, [](const Tiling& t) { return t.pairs > 0; });
}

/// The mode that will run. taped and hybrid multiply masked weights with every key and value of a
/// group; where one of those is not finite, the kernels, which select, take over.
Backward mode_for(const Call& call, Inputs inputs) {
  const Backward asked = call.options.backward;
  const char* reason = nullptr;
  if (asked == Backward::taped && !attends_at_all(*call.plan))
    reason = "no token attends to any: there is no op to tape";
  else if (asked != Backward::fused && !all_finite(inputs) && (call.options.terms.bias || has_masks(*call.plan)))
    reason = "q, k or v has NaN or infinity, which a product with a masked zero would spread";
  else if (asked != Backward::fused && has_nonfinite_terms(call.options.terms))
    reason = "a score term has NaN or infinity, which a product with a masked zero would spread";
  if (!reason) return asked;
  check(!call.options.strict, "attention: ", name_of(asked), " would fall back to fused: ", reason);
  remember(Fallback{asked, Backward::fused, reason});
  return Backward::fused;
}

Call call_of(const PlanPtr& plan, const AttentionOptions& options, const std::array<Tensor, 3>& in,
             const char* op = "attention") {
  const auto& [q, k, v] = in;
  check(plan != nullptr, "attention: no plan; make one with make_plan");
  const bool fits = q && k && q.rank() == 4 && k.rank() == 4 && k.dim(1) == plan->length();
  const PlanPtr asked = fits ? plan_of_queries(plan, q.dim(1)) : plan;
  return checked_call(op, asked, options, asked->queries(), asked->length(), q, k, v);
}

/// Sequence b of x, which has a plan of its own; all of a batch of one. None stays none.
Tensor sequence_of(const Tensor& x, Index b) { return !x || x.dim(0) <= 1 ? x : slice(x, 0, b, b + 1); }

/// f(b, its plan, its options) of every sequence of a call in which each has a plan of its own, one
/// after the other.
template <class F> void each_sequence(const Call& call, const Tensor& q, const Tensor& k, F&& f) {
  for (Index b = 0; b < std::max<Index>(q.dim(0), 1); ++b) {
    AttentionOptions own = call.options;
    own.first_batch += b, own.permutation = {};
    own.terms.bias = sequence_of(own.terms.bias, b), own.terms.points = sequence_of(own.terms.points, b);
    f(b, call.plan->takes_order() ? plan_along(call, b) : plan_of_sequence(call.plan, q, k, b), own);
  }
}
Tensor joined(const std::vector<Tensor>& parts) { return parts.size() == 1 ? parts[0] : cat(parts, 0); }

/// A call whose plan has its set and its order.
AttentionResult run_mode(const Call& call, Inputs in, bool with_lse) {
  const Backward mode = mode_for(call, in);
  if (mode == Backward::taped) return run_taped(call, in, with_lse);
  const bool fused = mode == Backward::fused;
  const std::vector<Tensor> y = hilt::apply<OneOp, std::span<const Tensor>>(
      OneOp(call, with_lse, fused ? "attention (fused)" : "attention (hybrid)",
            fused ? detail::fused_backward : detail::hybrid_backward),
      OneOp::inputs(call, in));
  return {y[0], with_lse ? y[1] : Tensor()};
}

AttentionResult run(Call call, Inputs in, bool with_lse) {
  const TakesOrder takes = order_taken(*call.plan, call.options, in[0].device());
  if (takes == TakesOrder::followed) return run_mode(following(std::move(call)), in, with_lse);
  if (takes == TakesOrder::no && !call.plan->looks_at_data()) return run_mode(call, in, with_lse);
  if (takes == TakesOrder::gathered) {
    const GivenOrder order(call);
    std::vector<Tensor> along;
    for (const Tensor& x : in) along.push_back(order.along(x));
    Tensor out = std::exchange(call.out, {});
    call.given = {order.along(call.given.o), order.along(call.given.lse, 2)};
    const AttentionResult r = run_mode(call, along, with_lse);
    const Tensor o = order.home(r.o);
    if (out) copy(out, o);
    return {o, order.home(r.lse, 2)};
  }
  const auto [q, k, v] = OneOp::parts(in);
  const bool in_plan = takes == TakesOrder::in_plan, one_order = in_plan && call.options.permutation.rank() == 1;
  if (in_plan && !call.given.o && call.options.backward == Backward::hybrid && !call.plan->spec().queries) {
    const Tape::Pause pause;
    call.given = kernel_forward(following(call), in_rows(q), in_rows(k), in_rows(v));  // as fused
  }
  if (one_order) call.plan = plan_along(call, -1);
  if (one_order) return run_mode(call, in, with_lse);
  std::vector<Tensor> o, lse;
  each_sequence(call, q, k, [&](Index b, const PlanPtr& own, const AttentionOptions& how) {
    std::vector<Tensor> its;
    for (const Tensor& x : in) its.push_back(sequence_of(x, b));
    Call one = call_of(own, how, OneOp::parts(its));
    one.out = sequence_of(call.out, b);
    one.given = {sequence_of(call.given.o, b), sequence_of(call.given.lse, b)};
    const AttentionResult r = run(one, its, with_lse);
    o.push_back(r.o), lse.push_back(r.lse);
  });
  return {joined(o), with_lse ? joined(lse) : Tensor()};
}

}  // namespace

PlanPtr plan_of_queries(const PlanPtr& plan, Index count) {
  check(plan != nullptr, "attention: no plan; make one with make_plan");
  if (plan->spec().queries || plan->spec().cross || count == plan->length()) return plan;
  PlanSpec spec = plan->spec();
  if (count > spec.length) spec.cross = count;
  else spec.queries = query_run(spec.length - count, count);
  return make_plan(spec);
}

std::span<const BackwardMode> backward_modes() { return kModes; }
Backward parse_backward(std::string_view text) {
  std::array<std::string_view, kModes.size()> names;
  std::ranges::transform(kModes, names.begin(), &BackwardMode::name);
  return kModes[find_name("backward", text, names)].mode;
}
std::string_view name_of(Backward mode) { return kModes[static_cast<std::size_t>(mode)].name; }
const std::vector<Fallback>& attention_fallbacks() { return seen<Fallback>(); }
void clear_attention_fallbacks() { seen<Fallback>().clear(); }

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                 const AttentionOptions& options) {
  const std::array in{q, k, v};
  return run(call_of(plan, options, in), in, false).o;
}

Tensor attention(const Tensor& qkv, const PlanPtr& plan, const AttentionOptions& options) {
  check(bool(qkv) && qkv.rank() == 5 && qkv.dim(2) == 3,
        "attention: packed q, k, v must be [batch, length, 3, heads, dim], got ", qkv.shape());
  return run(call_of(plan, options, OneOp::parts({&qkv, 1})), {&qkv, 1}, false).o;
}

void attention_into(Tensor& o, const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                    const AttentionOptions& options) {
  const std::array in{q, k, v};
  Call call = call_of(plan, options, in, "attention_into");
  check(bool(o) && o.shape() == q.shape() && o.dtype() == q.dtype() && o.device() == q.device(),
        "attention_into: o must be ", q.dtype(), q.shape(), " on ", q.device(), ", as q is");
  for (int axis = 0; axis < 4; ++axis)
    check(axis < 3 ? o.stride(axis) > 0 || o.dim(axis) < 2 : o.stride(axis) == 1 || o.dim(axis) < 2,
          "attention_into: o has stride ", o.stride(axis), " at axis ", axis,
          "; its rows lie apart, and their elements one after the other");
  const auto judge = [&](const Tensor& x) {
    check(!x || !Tape::current() || !Tape::current()->knows(x),
          "attention_into: a tape knows an input, and no gradient goes through memory that is given; use attention(), ",
          "or detach()");
    check(!x || x.storage() != o.storage(), "attention_into: o shares memory with an input");
  };
  std::ranges::for_each(in, judge), std::ranges::for_each(term_inputs(options.terms), judge);
  call.out = o, call.options.backward = Backward::fused;
  (void)run(std::move(call), in, false);
}

AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                                   const AttentionOptions& options) {
  const std::array in{q, k, v};
  return run(call_of(plan, options, in), in, true);
}

std::vector<Tensor> attention_gradients(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionResult& given,
                                        const AttentionResult& d, const PlanPtr& plan, const AttentionOptions& options,
                                        unsigned wanted) {
  const std::array in{q, k, v};
  std::vector<Tensor> x(in.begin(), in.end());
  std::ranges::copy(term_inputs(options.terms), std::back_inserter(x));
  Tape tape;
  for (std::size_t i = 0; i < x.size(); ++i)
    if (wanted >> i & 1 && x[i]) tape.watch(x[i]);
    else x[i] = {};
  Call call = call_of(plan, options, in);
  call.given = given;
  const AttentionResult r = run(std::move(call), in, d.lse || plan->looks_at_data());
  Gradients g;
  if (d.lse && tape.knows(r.o)) g = tape.backward(add(sum(mul(r.o, d.o)), to(sum(mul(r.lse, d.lse)), r.o.dtype())));
  else if (tape.knows(r.o)) g = tape.backward(r.o, d.o);
  for (Tensor& t : x)
    if (t) t = g.has(t) ? g[t] : zeros_like(t);
  return x;
}

// Weights are what attention makes of values that are one at one key and zero at the others.
std::vector<RowWeights> attention_weights(const Tensor& q, const Tensor& k, const PlanPtr& plan,
                                          std::span<const Index> rows, const AttentionOptions& options) {
  const Tape::Pause pause;
  AttentionOptions how = options;
  how.dropout = 0, how.backward = Backward::fused;
  const Call all = call_of(plan, how, {q, k, k}, "attention_weights");
  std::vector<RowWeights> out;
  if (plan->looks_at_data() || order_taken(*all.plan, all.options, q.device()) != TakesOrder::no) {
    each_sequence(all, q, k, [&](Index b, const PlanPtr& own, const AttentionOptions& its) {
      for (RowWeights& w : attention_weights(sequence_of(q, b), sequence_of(k, b), own, rows, its))
        w.batch = b, out.push_back(std::move(w));
    });
    return out;
  }
  PlanSpec spec = all.plan->spec();
  const auto place = [&](Index token) { return spec.in_order ? all.plan->order().position_of[at(token)] : token; };
  std::vector<Index> asking, of_bias;  // each row among all tokens, and its row of the bias
  for (const Index row : rows) {
    check(row >= (asking.empty() ? 0 : asking.back() + 1) && row < all.queries, "attention_weights: row ", row,
          " is not among the ", all.queries, " of q, or comes twice or late");
    asking.push_back(row);
    of_bias.push_back(spec.in_order && !spec.queries ? all.plan->order().token_at[at(row)] : row);
  }
  const auto picked = [&](const Tensor& x, int axis, const std::vector<Index>& which) {
    return gather(x, axis, index_of(which, q.device()));
  };
  const DType wide = q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor some = to(picked(q, 1, asking), wide), keys = to(k, wide);
  how = all.options;
  if (Tensor& bias = how.terms.bias) bias = to(bias.dim(2) > 1 ? picked(bias, 2, of_bias) : bias, wide);
  if (spec.queries)
    for (Index& row : asking) row = (*spec.queries)[at(row)];
  if (spec.cross) spec.cross = std::ssize(rows);
  else spec.queries.emplace(asking.begin(), asking.end());
  const auto part = std::make_shared<const Plan>(spec);
  std::vector<Tensor> each;
  for (Index first = 0; first < spec.length; first += all.dim) {
    std::vector<double> one(at(spec.length * all.dim));
    for (Index u = first; u < std::min(spec.length, first + all.dim); ++u) one[at(u * all.dim + u - first)] = 1;
    const Tensor v = moved(from_values(one, {1, spec.length, 1, all.dim}, wide), q.device());
    each.push_back(attention(some, keys, expand(v, keys.shape()), part, how));
  }
  const std::vector<double> weight = each.empty() ? std::vector<double>() : cat(each, 3).to_vector();
  for (Index b = 0, i = 0; b < all.batch; ++b)
    for (std::size_t row = 0; row < rows.size(); ++row)
      for (Index h = 0; h < all.heads(); ++h, i += std::ssize(each) * all.dim) {
        RowWeights& w = out.emplace_back(RowWeights{b, rows[row], h, {}, {}});
        for (Index token = 0; token < spec.length; ++token)
          if (part->attends(h, asking[row], place(token), b) > 0)
            w.keys.push_back(static_cast<std::int32_t>(token)), w.weights.push_back(weight[at(i + place(token))]);
      }
  return out;
}

}  // namespace hilt
