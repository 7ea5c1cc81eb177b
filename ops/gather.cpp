// Picking rows along one axis, and its transpose, adding rows into place.
//      y = gather(x, index)          y[.., i, ..] = x[.., index[i], ..]       dx = scatter_add(dy, index)
//      y = scatter_add(x, index)     y[.., index[i], ..] += x[.., i, ..]      dx = gather(dy, index)
//      y = take_along(x, index)      gather of single elements: of x as one axis, at index plus where its line begins
//      y = cat(x_0, x_1, ..)         dx_i = the slice of dy that x_i fills    stack: a cat of unsqueezed ones
//      y = pad(x)                    dx = dy without the padding
// They keep the index only. Rows are added in its order, whatever the number of threads.
#include <cstring>
#include "core/strided.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {

constexpr Index kColumns = 64;  // of one task of a scatter: a cache line or more of any type

/// The index into x as dense i64, every entry in [0, extent).
static Tensor checked_index(const char* op, const Tensor& x, const Tensor& index, Index extent) {
  check(index.device() == x.device(), op, ": the index is on ", index.device(), ", x on ", x.device(),
        "; move one with to()");
  check(bool(index) && !is_floating(index.dtype()) && index.dtype() != DType::u8, op,
        ": indices must be i32 or i64, got ", index.dtype());
  const Tensor wide = dense(to(index, DType::i64));
  if (wide.device().is_cuda()) return wide;  // to look would be to wait; the kernel takes care
  const std::int64_t* const at = wide.data<std::int64_t>();
  for (Index i = 0; i < wide.numel(); ++i)
    check(at[i] >= 0 && at[i] < extent, op, ": index ", at[i], " at position ", i, " is outside 0..", extent - 1);
  return wide;
}

static Tensor gathered(const Tensor& in, int axis, const Tensor& index) {
  const Tensor x = dense(in);
  Tensor y = empty(x.shape().with(axis, index.numel()), x.dtype(), x.device());
  const AroundAxis from(x.shape(), axis);
  const Index n = index.numel();
  const auto row = static_cast<std::size_t>(from.inner) * size_of(x.dtype());
  const std::int64_t* const at = index.data<std::int64_t>();
  const std::byte* const src = x.raw();
  std::byte* const dst = y.mutable_raw();
  if constexpr (kHasCuda)
    if (x.device().is_cuda()) {
      kernels::gather(cuda_of(x.device()), src, at, dst, from.outer, n, from.extent, static_cast<Index>(row));
      return y;
    }
  parallel_each(from.outer * n, kWorthATask / (from.inner + 1) + 1, [&](Index i) {
    std::memcpy(dst + static_cast<std::size_t>(i) * row,
                src + static_cast<std::size_t>(i / n * from.extent + at[i % n]) * row, row);
  });
  return y;
}

static Tensor scattered(const Tensor& in, int axis, const Tensor& index, Index extent) {
  const Tensor x = dense(in);
  const AroundAxis from(x.shape(), axis);
  const Shape shape = x.shape().with(axis, extent);
  const bool narrow = size_of(x.dtype()) == 2;  // add up in f32, round once
  Tensor sum =
      x.device().is_cuda() ? empty(shape, x.dtype(), x.device()) : zeros(shape, narrow ? DType::f32 : x.dtype());
  const Index blocks = (from.inner + kColumns - 1) / kColumns;
  const std::int64_t* const at = index.data<std::int64_t>();
  visit("scatter_add", x, [&]<class T>(auto where) {
    const T* const src = x.data<T>();
    if constexpr (is_cuda<decltype(where)>)
      return kernels::scatter_add(where, src, at, sum.mutable_data<T>(), from.outer, from.extent, extent, from.inner);
    auto* const dst = sum.mutable_data<wide_t<T>>();
    parallel_each(from.outer * blocks, kWorthATask / (from.extent * kColumns + 1) + 1, [&](Index task) {
      const Index o = task / blocks, c0 = task % blocks * kColumns, c1 = std::min(c0 + kColumns, from.inner);
      for (Index i = 0; i < from.extent; ++i) {
        const T* const add = src + (o * from.extent + i) * from.inner;
        auto* const to = dst + (o * extent + at[i]) * from.inner;
        for (Index c = c0; c < c1; ++c) to[c] += static_cast<wide_t<T>>(add[c]);
      }
    });
  });
  return to(sum, x.dtype());
}

static Tensor pick(const char* op, const Tensor& x, int axis, const Tensor& index) {
  const Tensor rows = checked_index(op, x, index, x.dim(axis));
  return apply_linear(
      "gather", x, [=](const Tensor& in) { return gathered(in, axis, rows); },
      [=, extent = x.dim(axis)](const Tensor& dy) { return scattered(dy, axis, rows, extent); });
}

Tensor gather(const Tensor& x, int axis, const Tensor& index) {
  check(index.rank() == 1, "gather: the index must have one axis, got shape ", index.shape());
  return pick("gather", x, checked_axis("gather", axis, x.rank()), index);
}

Tensor flip(const Tensor& x, const Axes& axes) {
  Tensor y = x;
  for (int axis : axes) {
    const Index n = x.dim(checked_axis("flip", axis, x.rank()));
    y = gather(y, axis, static_cast<double>(n - 1) - arange(n, DType::i64, x.device()));
  }
  return y;
}

Tensor take_along(const Tensor& x, int axis, const Tensor& index) {
  const int along = checked_axis("take_along", axis, x.rank());
  check(index.rank() == x.rank() && index.shape().with(along, 1) == x.shape().with(along, 1), "take_along: x is ",
        x.shape(), ", the index ", index.shape(), "; they may differ along axis ", axis, " alone");
  const AroundAxis lines(x.shape(), along);
  const Tensor at =
      reshape(checked_index("take_along", x, index, lines.extent), {lines.outer, index.dim(along), lines.inner});
  const auto counted = [&](Index n, Index step) {
    return mul(arange(n, DType::i64, x.device()), static_cast<double>(step));
  };
  const Tensor from = reshape(counted(lines.outer, lines.extent * lines.inner), {lines.outer, 1, 1});
  Tensor place = at * static_cast<double>(lines.inner) + (from + counted(lines.inner, 1));
  if (x.device().is_cuda()) place = where((at >= 0) & (at < static_cast<double>(lines.extent)), place, -1.0);
  return reshape(gather(reshape(x, x.numel()), 0, reshape(place, place.numel())), index.shape());
}

Tensor scatter_add(const Tensor& x, int axis, const Tensor& index, Index extent) {
  const int along = checked_axis("scatter_add", axis, x.rank());
  check(index.rank() == 1 && index.dim(0) == x.dim(along), "scatter_add: axis ", axis, " of ", x.shape(), " has ",
        x.dim(along), " rows, the index has shape ", index.shape());
  check(extent >= 0, "scatter_add: extent ", extent, " is negative");
  visit("scatter_add", x, []<class T>(auto) {});
  const Tensor rows = checked_index("scatter_add", x, index, extent);
  return apply_linear(
      "scatter_add", x, [=](const Tensor& in) { return scattered(in, along, rows, extent); },
      [=](const Tensor& dy) { return gathered(dy, along, rows); });
}

Tensor embedding(const Tensor& table, const Tensor& ids) {
  check(table.rank() == 2, "embedding: the table must be [tokens, width], got ", table.shape());
  Shape shape = ids.shape();
  shape.push_back(table.dim(1));
  return reshape(pick("embedding", table, 0, ids), shape);
}

Tensor one_hot(const Tensor& ids, Index classes, DType dtype) {
  check(bool(ids) && !is_floating(ids.dtype()), "one_hot: ids must be integers, got ",
        ids ? name_of(ids.dtype()) : "an undefined tensor");
  return to(unsqueeze(to(ids, DType::i64), -1) == arange(classes, DType::i64, ids.device()), dtype);
}

Tensor tril(const Tensor& x, Index diagonal) {
  check(x.rank() >= 2, "tril: needs rows and columns, got shape ", x.shape());
  const Tensor row = arange(x.dim(-2), DType::i64, x.device()), column = arange(x.dim(-1), DType::i64, x.device());
  return where(column <= unsqueeze(row, -1) + static_cast<double>(diagonal), x, 0.0);
}

// ---- joining along an axis ----------------------------------------------------------------------
namespace {

struct Cat final : Function {
  int axis = 0;
  std::vector<Index> extents;
  std::string_view name() const override { return "cat"; }
  Tensor forward(std::span<const Tensor> parts) {
    Index total = 0, begin = 0;
    for (const Tensor& part : parts) total = checked_add(total, extents.emplace_back(part.dim(axis)), "cat");
    Tensor y = empty(parts[0].shape().with(axis, total), parts[0].dtype(), parts[0].device());
    for (const Tensor& part : parts) {
      Tensor window = rows_of(y, axis, begin, part.dim(axis));
      copy(window, part);
      begin += part.dim(axis);
    }
    return y;
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return split(dy, extents, axis); }
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
