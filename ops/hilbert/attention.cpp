// The public calls: which mode runs, and the table of modes.
#include "ops/hilbert/attention.h"
#include <algorithm>
#include <array>
#include "core/io/text.h"
#include "ops/hilbert/modes.h"
#include "ops/ops.h"

namespace hilt {
namespace {

template <class Op> Op op_of(const Call& call) {
  Op op;
  op.call = call;
  return op;
}

/// A mode, and how it runs on q, k, v and on one packed projection.
struct Mode {
  BackwardMode about;
  Tensor (*run)(const Call&, const Tensor& q, const Tensor& k, const Tensor& v);
  Tensor (*run_packed)(const Call&, const Tensor& qkv);
};
template <class Op> constexpr Mode one_op(BackwardMode about) {
  return {about,
          [](const Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
            return apply(op_of<Op>(call), in_rows(q), in_rows(k), in_rows(v));
          },
          [](const Call& call, const Tensor& qkv) { return apply(op_of<Op>(call), in_rows(qkv)); }};
}
constexpr std::array kModes{
    Mode{{Backward::taped, "taped", "each step is an op on the tape"},
         [](const Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
           return taped(call, q, k, v, false).o;
         },
         [](const Call& call, const Tensor& qkv) {
           const auto axis = [&](Index i) { return squeeze(slice(qkv, 2, i, i + 1), 2); };
           return taped(call, axis(0), axis(1), axis(2), false).o;
         }},
    one_op<detail::Hybrid>({Backward::hybrid, "hybrid", "one op; its backward is six formulas in library products"}),
    one_op<detail::Fused>({Backward::fused, "fused", "one op; its backward is a kernel"}),
};
constexpr auto kAbout = [] {
  std::array<BackwardMode, kModes.size()> about{};
  for (std::size_t i = 0; i < about.size(); ++i) about[i] = kModes[i].about;
  return about;
}();
const Mode& mode_of(Backward mode) { return kModes[static_cast<std::size_t>(mode)]; }

constexpr std::size_t kRemembered = 64;

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

}  // namespace

std::span<const BackwardMode> backward_modes() { return kAbout; }
Backward parse_backward(std::string_view text) {
  std::array<std::string_view, kModes.size()> names;
  std::ranges::transform(kAbout, names.begin(), &BackwardMode::name);
  return kAbout[find_name("backward", text, names)].mode;
}
std::string_view name_of(Backward mode) { return mode_of(mode).about.name; }
const std::vector<Fallback>& attention_fallbacks() { return fallbacks(); }
void clear_attention_fallbacks() { fallbacks().clear(); }

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                 const AttentionOptions& options) {
  const Call call = call_of(plan, options, q, k, v);
  const std::array<Tensor, 3> in{q, k, v};
  return mode_of(mode_for(call, in)).run(call, q, k, v);
}

Tensor attention(const Tensor& qkv, const PlanPtr& plan, const AttentionOptions& options) {
  check(bool(qkv) && qkv.rank() == 5 && qkv.dim(2) == 3,
        "attention: packed q, k, v must be [batch, length, 3, heads, dim], got ", qkv.shape());
  const std::array<Tensor, 3> part = detail::OneOp::parts(qkv);
  const Call call = call_of(plan, options, part[0], part[1], part[2]);
  return mode_of(mode_for(call, part)).run_packed(call, qkv);
}

AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                                   const AttentionOptions& options) {
  const Tape::Pause pause;
  const Call call = call_of(plan, options, q, k, v);
  const std::array<Tensor, 3> in{q, k, v};
  if (mode_for(call, in) != Backward::taped) return kernel_forward(call, in_rows(q), in_rows(k), in_rows(v));
  const Taped part = taped(call, q, k, v, true);
  const Tensor lse = permute(squeeze(part.lse, -1), {0, 2, 1});
  return {part.o, contiguous(to(lse, q.dtype() == DType::f64 ? DType::f64 : DType::f32))};
}

}  // namespace hilt
