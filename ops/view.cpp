// Views: other shapes and strides on the same storage. Forward moves no data (but reshape where
// strides force it, contiguous and to); backward is the inverse view of dy, and keeps nothing.
//      y = reshape x        dx = reshape dy            y = permute x    dx = permute dy by the inverse
//      y = slice x          dx = dy within zeros       y = expand x     dx = sum of dy over what was repeated
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {

// Strides that read x in the new shape without moving it, or none. Walks both shapes from the
// right, matching groups of axes with equal products; a group works if x steps evenly through it.
static std::optional<Strides> strides_for(const Tensor& x, const Shape& shape) {
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

Tensor reshape(const Tensor& x, const Shape& shape) {
  check(x.numel() == shape.numel(), "reshape: ", x.shape(), " has ", x.numel(), " elements, ", shape, " has ",
        shape.numel());
  return apply_linear(
      "reshape", x,
      [shape](const Tensor& in) {
        if (const auto strides = strides_for(in, shape)) return as_strided(in, shape, *strides, in.offset());
        return as_strided(clone(in), shape, contiguous_strides(shape), 0);
      },
      [from = x.shape()](const Tensor& dy) { return reshape(dy, from); });
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
  detail::List<int> from, inverse(axes.size());
  for (int axis : axes) from.push_back(checked_axis("permute", axis, x.rank()));
  for (int axis = 0; axis < x.rank(); ++axis) {
    check(std::ranges::count(from, axis) == 1, "permute: axis ", axis, " of ", x.shape(),
          " must be named exactly once");
    inverse[static_cast<std::size_t>(axis)] = static_cast<int>(std::ranges::find(from, axis) - from.begin());
  }
  return apply_linear(
      "permute", x,
      [from](const Tensor& in) {
        Shape shape;
        Strides strides{};
        for (int axis : from) {
          strides[static_cast<std::size_t>(shape.rank())] = in.stride(axis);
          shape.push_back(in.dim(axis));
        }
        return as_strided(in, shape, strides, in.offset());
      },
      [inverse](const Tensor& dy) { return permute(dy, inverse); });
}

Tensor transpose(const Tensor& x, int a, int b) {
  const auto turn = [a = checked_axis("transpose", a, x.rank()),
                     b = checked_axis("transpose", b, x.rank())](const Tensor& in) {
    Strides strides = in.strides();
    std::swap(strides[static_cast<std::size_t>(a)], strides[static_cast<std::size_t>(b)]);
    return as_strided(in, in.shape().with(a, in.dim(b)).with(b, in.dim(a)), strides, in.offset());
  };
  return apply_linear("permute", x, turn, turn);
}

Tensor slice(const Tensor& x, int axis, Index begin, Index end, Index step) {
  const int along = checked_axis("slice", axis, x.rank());
  const Index n = x.dim(along);
  const Index first = begin < 0 ? begin + n : begin, last = end < 0 ? end + n : end;
  check(step >= 1, "slice: step ", step, " must be at least 1");
  check(0 <= first && first <= last && last <= n, "slice: ", begin, " to ", end, " is not a range of axis ", axis,
        ", which has ", n);
  const auto window = [=, count = (last - first + step - 1) / step](const Tensor& of) {
    return rows_of(of, along, first, count, step);
  };
  return apply_linear("slice", x, window, [window, from = x.shape()](const Tensor& dy) {
    Tensor dx = zeros(from, dy.dtype(), dy.device()), part = window(dx);
    copy(part, dy);
    return dx;
  });
}

Tensor expand(const Tensor& x, const Shape& shape) {
  return apply_linear(
      "expand", x, [shape](const Tensor& in) { return broadcast_to("expand", in, shape); },
      [from = x.shape()](const Tensor& dy) { return sum_to(dy, from); });
}

Tensor repeat(const Tensor& x, int axis, Index times) {
  const int along = checked_axis("repeat", axis, x.rank());
  check(times >= 0, "repeat: ", times, " times");
  const AroundAxis lines(x.shape(), along);
  const Index line = lines.extent * lines.inner;
  const Tensor many = expand(reshape(x, {lines.outer, 1, line}), {lines.outer, times, line});
  return reshape(many, x.shape().with(along, checked_mul(times, lines.extent, "repeat")));
}

Tensor squeeze(const Tensor& x, int axis) {
  const int gone = checked_axis("squeeze", axis, x.rank());
  check(x.dim(gone) == 1, "squeeze: axis ", axis, " of ", x.shape(), " must have extent 1");
  detail::List<Index> extents(x.shape().begin(), x.shape().end());
  extents.erase(extents.begin() + gone);
  return reshape(x, Shape(extents));
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
  detail::List<Index> extents(x.shape().begin(), x.shape().end());
  extents.insert(extents.begin() + at, 1);
  return reshape(x, Shape(extents));
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
  for (Index extent : extents) parts.push_back(slice(x, along, begin, begin + extent)), begin += extent;
  return parts;
}

Tensor contiguous(const Tensor& x) {
  return x.is_contiguous() ? x : apply_linear("contiguous", x, clone, [](const Tensor& dy) { return dy; });
}

Tensor to(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  if (!is_floating(dtype) || !is_floating(x.dtype())) return converted(x, dtype);  // integers have no gradient
  return apply_linear(
      "to", x, [dtype](const Tensor& in) { return converted(in, dtype); },
      [from = x.dtype()](const Tensor& dy) { return converted(dy, from); });
}

Tensor to(const Tensor& x, Device device) {
  if (device == x.device()) return x;
  check(kHasCuda, "to: cannot move from ", x.device(), " to ", device, ": built without CUDA");
  if (!is_floating(x.dtype())) return moved(x, device);
  return apply_linear(
      "to", x, [device](const Tensor& in) { return moved(in, device); },
      [from = x.device()](const Tensor& dy) { return moved(dy, from); });
}

Tensor detach(const Tensor& x) { return as_strided(x, x.shape(), x.strides(), x.offset()); }

}  // namespace hilt
