// Joining along an axis.
//      y = cat(x_0, x_1, ..)     dx_i = the slice of dy that x_i fills
//      y = stack(x_0, ..)        a cat of unsqueezed ones
//      y = pad(x)                dx = dy without the padding                  nothing is kept
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {
namespace {

struct Cat final : Function {
  int axis = 0;
  std::vector<Index> extents;
  std::string_view name() const override { return "cat"; }
  Tensor forward(std::span<const Tensor> parts) {
    Index total = 0;
    for (const Tensor& part : parts) {
      extents.push_back(part.dim(axis));
      total = checked_add(total, part.dim(axis), "cat");
    }
    Tensor y = empty(parts[0].shape().with(axis, total), parts[0].dtype(), parts[0].device());
    Index begin = 0;
    for (const Tensor& part : parts) {
      Tensor window = rows_of(y, axis, begin, part.dim(axis));
      copy(window, part);
      begin += part.dim(axis);
    }
    return y;
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    std::vector<Tensor> dx;
    Index begin = 0;
    for (Index extent : extents) {
      dx.push_back(wants(dx.size()) ? rows_of(dy, axis, begin, extent) : Tensor{});
      begin += extent;
    }
    return dx;
  }
};

}  // namespace

Tensor cat(std::span<const Tensor> parts, int axis) {
  check(!parts.empty(), "cat: needs at least one tensor");
  Cat fn;
  fn.axis = checked_axis("cat", axis, parts[0].rank());
  for (const Tensor& part : parts) {
    check_alike("cat", "the first part", parts[0], "another", part);
    check(part.rank() == parts[0].rank() && part.shape().with(fn.axis, 0) == parts[0].shape().with(fn.axis, 0),
          "cat: parts ", parts[0].shape(), " and ", part.shape(), " differ along another axis than ", axis);
  }
  return hilt::apply(std::move(fn), parts);  // qualified: std::apply would take a span too
}

Tensor stack(std::span<const Tensor> parts, int axis) {
  check(!parts.empty(), "stack: needs at least one tensor");
  const int at = checked_axis("stack", axis, parts[0].rank() + 1);
  std::vector<Tensor> slabs;
  for (const Tensor& part : parts) {
    check(part.shape() == parts[0].shape(), "stack: parts ", parts[0].shape(), " and ", part.shape(),
          " must have one shape");
    slabs.push_back(unsqueeze(part, at));
  }
  return cat(slabs, at);
}

Tensor pad(const Tensor& x, int axis, Index before, Index after, double value) {
  const int along = checked_axis("pad", axis, x.rank());
  check(before >= 0 && after >= 0, "pad: ", before, " before and ", after,
        " after must not be negative; use slice to cut");
  const auto window = [=, extent = x.dim(along)](const Tensor& of) { return rows_of(of, along, before, extent); };
  return apply_linear(
      "pad", x,
      [=](const Tensor& in) {
        const Index total = checked_add(checked_add(before, in.dim(along), "pad"), after, "pad");
        Tensor y = full(in.shape().with(along, total), value, in.dtype(), in.device()), part = window(y);
        copy(part, in);
        return y;
      },
      window);
}

}  // namespace hilt
