// Rows along an order and back, each the other's backward: orders of plans, and those that come
// with the call. Kernels follow these. On a GPU, where a set is defined along positions alone, rows
// are gathered, the plan serves them in row order, and results return to their tokens.
//
//      gathered[b, i] = x[b, pi(b, i)]        y[b, t] = computed[b, rho(b, t)]
#include "core/recent.h"
#include "core/strided.h"
#include "ops/helpers.h"
#include "ops/hilbert/call.h"
#include "ops/hilbert/plan/tiles.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {

TakesOrder order_taken(const Plan& plan, const AttentionOptions& o, Device where) {
  const PlanSpec& spec = plan.spec();
  const bool is_empty = o.permutation && o.permutation.numel() == 0;
  if (!plan.takes_order() || plan.order_forced() || is_empty) return TakesOrder::no;
  const bool looks_at_tokens = spec.causality == Causality::token || spec.queries || o.dropout > 0 || o.terms.slopes ||
                               o.terms.relative || o.terms.bias;  // not at positions alone
  if (where.is_cuda() && !looks_at_tokens) return TakesOrder::gathered;
  return o.backward == Backward::fused && !spec.queries ? TakesOrder::followed : TakesOrder::in_plan;
}
const Plan& followed_plan(const Plan& plan) {
  PlanSpec spec = plan.spec();
  if (std::exchange(spec.causality, Causality::none) != Causality::token) return plan;
  return *plan.memo().get<PlanPtr>({}, [&] { return make_plan(spec); });
}

void check_permutation(const char* op, const Plan& plan, const Tensor& permutation, const Tensor& q) {
  if (!plan.takes_order())
    return check(!permutation, op, ": a permutation goes with order=given, and the plan has an order, ",
                 to_string(plan.spec().order));
  check(bool(permutation), op, ": the plan is of order=given, so each call brings a permutation, [length] or ",
        "[batch, length]");
  const Shape one{plan.length()}, each{q.dim(0), plan.length()};
  check(permutation.dtype() == DType::i32 || permutation.dtype() == DType::i64, op, ": the permutation is ",
        permutation.dtype(), "; expected i32 or i64");
  check(permutation.shape() == one || permutation.shape() == each, op, ": the permutation is ", permutation.shape(),
        "; expected ", one, " or ", each);
  check(permutation.device() == q.device(), op, ": the permutation is on ", permutation.device(), ", q on ",
        q.device());
}

static DocumentList documents_of(const Plan& plan, Index row) {
  const auto& lists = plan.spec().documents;
  return lists.empty() ? DocumentList{} : lists[lists.size() == 1 ? 0 : at(row)];
}

/// The permutation of a row on the host, which for a GPU's waits; checked.
static std::vector<std::int32_t> row_of(const Call& call, Index row) {
  constexpr std::int64_t kLow = std::numeric_limits<std::int32_t>::min(), kHigh = ~kLow;
  const Tensor& all = call.options.permutation;
  const Tensor one = dense(to(moved(all.rank() == 1 ? all : slice(all, 0, row, row + 1), {}), DType::i64));
  std::vector<std::int32_t> out;
  for (const std::int64_t token : std::span(one.data<std::int64_t>(), at(one.numel())))
    out.push_back(narrow(std::clamp(token, kLow, kHigh)));
  (void)inverse_within(out, documents_of(*call.plan, row), row);
  return out;
}
Call following(Call call) {
  const bool on_cpu = call.options.permutation.device().is_cpu();
  std::vector<std::int32_t> token_at;
  for (Index row = 0; on_cpu && row < call.batch; ++row)
    std::ranges::copy(row_of(call, row), std::back_inserter(token_at));
  call.token_at = on_cpu ? index_of(token_at) : to(GivenOrder(call).token_at, DType::i32);
  call.causal = call.plan->spec().causality == Causality::token;
  call.plan = PlanPtr(call.plan, &followed_plan(*call.plan));
  return call;
}

PlanPtr plan_along(const Call& call, Index row) {
  PlanSpec spec = call.plan->spec();
  spec.given = row_of(call, std::max<Index>(row, 0));
  if (row >= 0 && spec.documents.size() > 1) spec.documents = {documents_of(*call.plan, row)};
  return make_plan(spec);
}

/// The number of each token's document, those behind the last sharing one: i32 [rows, L] on a GPU,
/// where it stays, for work that is recorded brings nothing from the host. None: a row is whole.
static Tensor document_numbers(const Plan& plan, Device device) {
  if (plan.spec().documents.empty() || plan.parts().empty()) return {};
  return plan.parts()[0].memo.get<Tensor>({device.index}, [&] {
    std::vector<std::int32_t> of;
    const auto rows = std::ssize(plan.spec().documents);
    for (Index row = 0; row < rows; ++row) {
      std::int32_t number = 0;
      for (const Document& d : documents_of(plan, row)) of.insert(of.end(), at(d.length), number++);
      of.resize(at((row + 1) * plan.length()), number);
    }
    const Lasting lasting;
    return moved(from_values(of, {rows, plan.length()}), device);
  });
}

GivenOrder::GivenOrder(const Call& call) : each(call.options.permutation.rank() == 2) {
  const Device device = call.options.permutation.device();
  const Index length = call.plan->length(), all = (each ? call.batch : 1) * length;
  const Tensor wide = dense(to(call.options.permutation, DType::i64)), document = document_numbers(*call.plan, device);
  token_at = empty({all}, DType::i64, device), position_of = full({all}, -1, DType::i64, device);
  kernels::Inversion how{wide.data<std::int64_t>(), all, each ? call.batch : document ? document.dim(0) : 1, length};
  if (document) how.document = document.data<std::int32_t>(), how.documents = document.numel();
  if constexpr (kHasCuda)
    kernels::invert(cuda_of(device), how, token_at.mutable_data<std::int64_t>(),
                    position_of.mutable_data<std::int64_t>());
}

/// Rows of x along an axis of tokens, or where `each` of the batch and that axis, by this index.
static Tensor picked(const Tensor& in, int axis, const Tensor& index, bool each) {
  if (!each || in.numel() == 0) return gather(in, axis, index);
  const Tensor x = contiguous(transpose(in, 1, axis));
  const Tensor rows = reshape(x, {index.numel(), x.numel() / index.numel()});
  return contiguous(transpose(reshape(gather(rows, 0, index), x.shape()), 1, axis));
}
static Tensor moved_rows(std::string_view label, const Tensor& x, int axis, const Tensor& there, const Tensor& back,
                         bool each) {
  if (!x) return x;
  return apply_linear(
      label, x, [=](const Tensor& in) { return picked(in, axis, there, each); },
      [=](const Tensor& dy) { return picked(dy, axis, back, each); });
}

Tensor GivenOrder::along(const Tensor& x, int axis) const {
  return moved_rows("reorder", x, axis, token_at, position_of, each);
}
Tensor GivenOrder::home(const Tensor& y, int axis) const {
  return moved_rows("restore", y, axis, position_of, token_at, each);
}

// ---- orders of plans ----------------------------------------------------------------------------

/// To bring an index to a GPU is to wait, so those used last stay there.
static Tensor index_on(Device device, const std::vector<std::int32_t>& index) {
  if (device.is_cpu()) return index_of(index);
  constexpr std::size_t kKept = 16, kKeptBytes = std::size_t{64} << 20, kPair = 2;  // an order and its inverse
  static auto& recent = *new Recent<std::pair<Device, std::vector<std::int32_t>>, Tensor>(kKept, kKeptBytes, kPair);
  const auto made = [&] {
    const Lasting lasting;
    return index_of(index, device);
  };
  return recent.get({device, index}, made, [](const Tensor& x) { return x.bytes(); });
}

static Tensor reordered(std::string_view label, const Tensor& x, const std::vector<std::int32_t>& index,
                        const std::vector<std::int32_t>& inverse, int axis) {
  const int along = checked_axis(label.data(), axis, x.rank());
  check(x.dim(along) == std::ssize(index), label, ": axis ", axis, " of ", x.shape(), " has ", x.dim(along),
        " tokens, the order ", index.size());
  return moved_rows(label, x, along, index_on(x.device(), index), index_on(x.device(), inverse), false);
}

Tensor reorder(const Tensor& x, const Permutation& order, int axis) {
  return reordered("reorder", x, order.token_at, order.position_of, axis);
}
Tensor restore(const Tensor& y, const Permutation& order, int axis) {
  return reordered("restore", y, order.position_of, order.token_at, axis);
}

}  // namespace hilt
