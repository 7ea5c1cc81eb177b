// Views: other shapes and strides on the same storage. Forward moves no data (but for reshape where
// strides force a copy, and contiguous and to, which exist to copy); backward is the inverse view
// of dy, and keeps nothing.
//
//      y = reshape x        dx = reshape dy            y = permute x    dx = permute dy by the inverse
//      y = slice x          dx = dy within zeros       y = expand x     dx = sum of dy over what was repeated
#include <algorithm>
#include "core/tape.h"
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {
namespace {

// Strides that read x in the new shape without moving it, or none. Walks both shapes from the
// right, matching groups of axes with equal products; a group works if x steps evenly through it.
std::optional<Strides> strides_for(const Tensor& x, const Shape& shape) {
  if (x.is_contiguous()) return contiguous_strides(shape);
  Strides out = contiguous_strides(shape);
  int to = shape.rank() - 1;
  for (int from = x.rank() - 1; from >= 0;) {
    const Index step = x.stride(from);
    Index group = x.dim(from);
    for (--from; from >= 0 && (x.dim(from) == 1 || x.stride(from) == step * group); --from) group *= x.dim(from);
    Index taken = 1;
    for (; to >= 0 && taken < group; --to) {
      out[static_cast<std::size_t>(to)] = step * taken;
      taken *= shape[to];
    }
    if (taken != group) return std::nullopt;
  }
  return out;
}

struct Reshape final : Function {
  Shape from, shape;
  std::string_view name() const override { return "reshape"; }
  Tensor forward(const Tensor& x) {
    if (const auto strides = strides_for(x, shape)) return as_strided(x, shape, *strides, x.offset());
    return as_strided(clone(x), shape, contiguous_strides(shape), 0);
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {reshape(dy, from)}; }
};

struct Permute final : Function {
  std::vector<int> axes;
  std::string_view name() const override { return "permute"; }
  Tensor forward(const Tensor& x) {
    Shape shape;
    Strides strides{};
    for (int axis : axes) {
      strides[static_cast<std::size_t>(shape.rank())] = x.stride(axis);
      shape.push_back(x.dim(axis));
    }
    return as_strided(x, shape, strides, x.offset());
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    std::vector<int> inverse(axes.size());
    for (std::size_t i = 0; i < axes.size(); ++i) inverse[static_cast<std::size_t>(axes[i])] = static_cast<int>(i);
    return {permute(dy, inverse)};
  }
};

Tensor sliced(const Tensor& x, int axis, Index begin, Index count, Index step) {
  Strides strides = x.strides();
  strides[static_cast<std::size_t>(axis)] *= step;
  const Shape shape = x.shape().with(axis, count);
  return as_strided(x, shape, strides, x.offset() + (shape.numel() > 0 ? begin * x.stride(axis) : 0));
}

struct Slice final : Function {
  Shape from;
  int axis = 0;
  Index begin = 0, count = 0, step = 1;
  std::string_view name() const override { return "slice"; }
  Tensor forward(const Tensor& x) {
    from = x.shape();
    return sliced(x, axis, begin, count, step);
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    Tensor dx = zeros(from, dy.dtype(), dy.device());
    Tensor window = sliced(dx, axis, begin, count, step);
    copy(window, dy);
    return {dx};
  }
};

struct Expand final : Function {
  Shape from, shape;
  std::string_view name() const override { return "expand"; }
  Tensor forward(const Tensor& x) {
    from = x.shape();
    return broadcast_to("expand", x, shape);
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {sum_to(dy, from)}; }
};

struct Contiguous final : Function {
  std::string_view name() const override { return "contiguous"; }
  Tensor forward(const Tensor& x) { return clone(x); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {dy}; }
};

Tensor converted(const Tensor& x, DType dtype) {
  Tensor y = empty(x.shape(), dtype, x.device());
  copy(y, x);
  return y;
}

struct To final : Function {
  DType from = DType::f32, dtype = DType::f32;
  std::string_view name() const override { return "to"; }
  Tensor forward(const Tensor& x) {
    from = x.dtype();
    return converted(x, dtype);
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {converted(dy, from)}; }
};

struct Move final : Function {
  Device from, device;
  std::string_view name() const override { return "to"; }
  Tensor forward(const Tensor& x) {
    from = x.device();
    return moved(x, device);
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {moved(dy, from)}; }
};

}  // namespace

Tensor reshape(const Tensor& x, const Shape& shape) {
  check(x.numel() == shape.numel(), "reshape: ", x.shape(), " has ", x.numel(), " elements, ", shape, " has ",
        shape.numel());
  Reshape fn;
  fn.from = x.shape();
  fn.shape = shape;
  return apply(std::move(fn), x);
}

Tensor reshape(const Tensor& x, std::initializer_list<Index> shape) {
  Index others = 1;
  for (Index d : shape)
    if (d != -1) others = checked_mul(others, d, "reshape");
  check(std::ranges::count(shape, -1) <= 1, "reshape: two extents are -1; one alone follows from the others");
  Shape whole;
  for (Index d : shape) {
    check(d != -1 || (others > 0 && x.numel() % others == 0), "reshape: ", x.shape(), " has ", x.numel(),
          " elements, no multiple of ", others, ", the extents beside -1");
    whole.push_back(d == -1 ? x.numel() / others : d);
  }
  return reshape(x, whole);
}

Tensor permute(const Tensor& x, std::span<const int> axes) {
  check(static_cast<int>(axes.size()) == x.rank(), "permute: ", axes.size(), " axes for a tensor of rank ", x.rank());
  Permute fn;
  for (int axis : axes) fn.axes.push_back(checked_axis("permute", axis, x.rank()));
  for (int axis = 0; axis < x.rank(); ++axis)
    check(std::ranges::count(fn.axes, axis) == 1, "permute: axis ", axis, " of ", x.shape(),
          " must be named exactly once");
  return apply(std::move(fn), x);
}

Tensor transpose(const Tensor& x, int a, int b) {
  std::vector<int> axes;
  for (int axis = 0; axis < x.rank(); ++axis) axes.push_back(axis);
  std::swap(axes[static_cast<std::size_t>(checked_axis("transpose", a, x.rank()))],
            axes[static_cast<std::size_t>(checked_axis("transpose", b, x.rank()))]);
  return permute(x, axes);
}

Tensor slice(const Tensor& x, int axis, Index begin, Index end, Index step) {
  Slice fn;
  fn.axis = checked_axis("slice", axis, x.rank());
  const Index n = x.dim(fn.axis);
  const Index first = begin < 0 ? begin + n : begin, last = end < 0 ? end + n : end;
  check(step >= 1, "slice: step ", step, " must be at least 1");
  check(0 <= first && first <= last && last <= n, "slice: ", begin, " to ", end, " is not a range of axis ", axis,
        ", which has ", n);
  fn.begin = first;
  fn.count = (last - first + step - 1) / step;
  fn.step = step;
  return apply(std::move(fn), x);
}

Tensor expand(const Tensor& x, const Shape& shape) {
  Expand fn;
  fn.shape = shape;
  return apply(std::move(fn), x);
}

Tensor squeeze(const Tensor& x, int axis) {
  const int gone = checked_axis("squeeze", axis, x.rank());
  check(x.dim(gone) == 1, "squeeze: axis ", axis, " of ", x.shape(), " must have extent 1");
  Shape shape;
  for (int a = 0; a < x.rank(); ++a)
    if (a != gone) shape.push_back(x.dim(a));
  return reshape(x, shape);
}

Tensor select(const Tensor& x, int axis, Index i) {
  const int along = checked_axis("select", axis, x.rank());
  const Index n = x.dim(along);
  check(i >= -n && i < n, "select: ", i, " of axis ", axis, ", which has ", n);
  const Index at = i < 0 ? i + n : i;
  return squeeze(slice(x, along, at, at + 1), along);
}

Tensor unsqueeze(const Tensor& x, int axis) {
  const int at = checked_axis("unsqueeze", axis, x.rank() + 1);
  Shape shape;
  for (int a = 0; a <= x.rank(); ++a) {
    if (a == at) shape.push_back(1);
    if (a < x.rank()) shape.push_back(x.dim(a));
  }
  return reshape(x, shape);
}

std::vector<Tensor> split(const Tensor& x, std::span<const Index> extents, int axis) {
  const int along = checked_axis("split", axis, x.rank());
  Index total = 0;
  for (Index extent : extents) {
    check(extent >= 0, "split: extent ", extent, " is negative");
    total = checked_add(total, extent, "split");
  }
  check(total == x.dim(along), "split: extents add up to ", total, ", axis ", axis, " of ", x.shape(), " has ",
        x.dim(along));
  std::vector<Tensor> parts;
  Index begin = 0;
  for (Index extent : extents) {
    parts.push_back(slice(x, along, begin, begin + extent));
    begin += extent;
  }
  return parts;
}

Tensor contiguous(const Tensor& x) { return x.is_contiguous() ? x : apply(Contiguous{}, x); }

Tensor to(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  if (!is_floating(dtype) || !is_floating(x.dtype())) return converted(x, dtype);  // integers have no gradient
  To fn;
  fn.dtype = dtype;
  return apply(std::move(fn), x);
}

Tensor to(const Tensor& x, Device device) {
  if (device == x.device()) return x;
  check(kHasCuda, "to: cannot move from ", x.device(), " to ", device, ": built without CUDA");
  if (!is_floating(x.dtype())) return moved(x, device);
  Move fn;
  fn.device = device;
  return apply(std::move(fn), x);
}

Tensor detach(const Tensor& x) { return as_strided(x, x.shape(), x.strides(), x.offset()); }

}  // namespace hilt
