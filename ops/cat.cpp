// Joining along an axis.
//
//      y = cat(x_0, x_1, ..)     dx_i = the slice of dy that x_i fills
//      y = stack(x_0, ..)        a cat of unsqueezed ones
//      y = pad(x)                dx = dy without the padding                  nothing is kept
#include "core/tape.h"
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {
namespace {

/// Rows [begin, begin + count) of x along an axis, sharing x's storage.
Tensor rows_of(const Tensor& x, int axis, Index begin, Index count) {
  const Shape shape = x.shape().with(axis, count);
  return as_strided(x, shape, x.strides(), x.offset() + (shape.numel() > 0 ? begin * x.stride(axis) : 0));
}

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

struct Pad final : Function {
  int axis = 0;
  Index before = 0, after = 0, extent = 0;
  double value = 0;
  std::string_view name() const override { return "pad"; }
  Tensor forward(const Tensor& x) {
    extent = x.dim(axis);
    const Index total = checked_add(checked_add(before, extent, "pad"), after, "pad");
    Tensor y = full(x.shape().with(axis, total), value, x.dtype(), x.device());
    Tensor window = rows_of(y, axis, before, extent);
    copy(window, x);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {rows_of(dy, axis, before, extent)}; }
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
  Pad fn;
  fn.axis = checked_axis("pad", axis, x.rank());
  check(before >= 0 && after >= 0, "pad: ", before, " before and ", after,
        " after must not be negative; use slice to cut");
  fn.before = before;
  fn.after = after;
  fn.value = value;
  return apply(std::move(fn), x);
}

}  // namespace hilt
