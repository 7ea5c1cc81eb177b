// Reductions over any set of axes.
//      y = sum x         dx = dy, repeated
//      y = mean x        dx = dy / n, repeated
//      y = max x         dx = dy / (how many equal y) where x == y, else 0          keeps x and y
//      y = cumsum x      dx = cumsum dy from the other end
// Whatever the axes, the kernels see [outer, n, inner] and reduce the middle: adjacent axes merge,
// and a set of axes that does not merge is brought to the end by a copy.
#include <numeric>
#include "core/strided.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

struct Reduced {           // a shape without some axes
  Shape kept, with_ones;   // of the result, without and with keepdim
  std::vector<int> order;  // the kept axes, then the reduced ones
  bool in_place = true;    // the reduced axes stand together: x is [outer, n, inner]; else in this order, inner 1
  Index outer = 1, n = 1, inner = 1;

  Reduced(const char* op, const Shape& shape, const Axes& axes) {
    std::vector<bool> gone(static_cast<std::size_t>(shape.rank()), axes.empty());
    for (int axis : axes) {
      const auto a = static_cast<std::size_t>(checked_axis(op, axis, shape.rank()));
      check(!gone[a], op, ": axis ", axis, " is named twice");
      gone[a] = true;
    }
    int stage = 0;  // of the axes so far: 0 kept, 1 reduced, 2 kept again, 3 reduced again
    for (int a = 0; a < shape.rank(); ++a) {
      const bool goes = gone[static_cast<std::size_t>(a)];
      with_ones.push_back(goes ? 1 : shape[a]);
      if (!goes) kept.push_back(shape[a]);
      if (shape[a] != 1 && goes != (stage % 2 == 1)) ++stage;
      (goes ? n : stage == 0 ? outer : inner) *= shape[a];
    }
    if (stage > 2) in_place = false, outer *= inner, inner = 1;
    for (bool goes : {false, true})
      for (int a = 0; a < shape.rank(); ++a)
        if (gone[static_cast<std::size_t>(a)] == goes) order.push_back(a);
  }
};

/// The sum or the largest over the reduced axes, times the factor.
enum class Reduce { sum, max };
Tensor reduced(Reduce how, const Tensor& in, const Reduced& plan, double factor = 1) {
  Tensor y = empty(plan.with_ones, in.dtype(), in.device());
  const Tensor x = dense(plan.in_place ? in : permute(in, plan.order));
  visit(how == Reduce::sum ? "sum" : "max", in, [&]<class T>(auto where) {
    Tensor partial =
        empty({plan.outer, kernels::SumPieces(plan.n, plan.inner).pieces, plan.inner}, DType::f64, in.device());
    const kernels::Reduction<T> of{
        x.data<T>(), y.mutable_data<T>(), partial.mutable_data<double>(), plan.outer, plan.n, plan.inner, factor};
    how == Reduce::sum ? kernels::sum(where, of) : kernels::max(where, of);
  });
  return y;
}

/// op over the reduced axes by halves: for ops whose order does not matter, or may be a tree.
Tensor folded(const Tensor& x, const Reduced& plan, Tensor (*op)(const Tensor&, const Tensor&), double neutral) {
  Shape shape = plan.kept;
  shape.push_back(plan.n);
  Tensor y = reshape(permute(x, plan.order), shape);
  do {
    const Index n = y.dim(-1), more = n == 0 ? 2 : n % 2, half = (n + more) / 2;
    if (more > 0) y = pad(y, -1, 0, more, neutral);
    y = op(slice(y, -1, 0, half), slice(y, -1, half, n + more));
  } while (y.dim(-1) != 1);
  return y;
}

struct Max final : Function {
  Reduced plan;
  explicit Max(Reduced p) : plan(std::move(p)) {}

  std::string_view name() const override { return "max"; }
  Tensor forward(const Tensor& x) {
    Tensor y = reduced(Reduce::max, x, plan);
    if (wants(0)) save(x), save(y);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    const Tensor is_top = same(saved(0), saved(1));
    return {mul(is_top, div(dy, reduced(Reduce::sum, is_top, plan)))};
  }
};

Tensor finish(const Tensor& y, const Shape& kept, bool keepdim) { return keepdim ? y : reshape(y, kept); }

Tensor sum_or_mean(const char* op, const Tensor& x, const Axes& axes, bool keepdim, bool is_mean) {
  check_floats(op, x);
  const Reduced plan(op, x.shape(), axes);
  // The mean of nothing is 0 / 0, here 0 times infinity.
  const double factor = is_mean ? 1.0 / static_cast<double>(plan.n) : 1;
  const Tensor y = apply_linear(
      op, x, [=](const Tensor& in) { return reduced(Reduce::sum, in, plan, factor); },
      [=, from = x.shape()](const Tensor& dy) { return broadcast_to("sum", is_mean ? mul(dy, factor) : dy, from); });
  return finish(y, plan.kept, keepdim);
}

Tensor largest(const char* op, const Tensor& x, const Axes& axes, bool keepdim) {
  check_floats(op, x);
  const Reduced plan(op, x.shape(), axes);
  check(plan.n > 0, op, ": ", x.shape(), " has no elements along the reduced axes; there is no ",
        op[1] == 'a' ? "maximum" : "minimum", " of nothing");
  return finish(apply(Max(plan), x), plan.kept, keepdim);
}

}  // namespace

Tensor sum(const Tensor& x, const Axes& axes, bool keepdim) {
  if (!x || is_floating(x.dtype())) return sum_or_mean("sum", x, axes, keepdim, false);
  const Reduced plan("sum", x.shape(), axes);
  const Index most = x.device().is_cuda() ? 1 << 22 : 1 << 16;  // at a time: a mask is eight times as large in i64
  for (int a = 0; x.numel() > most; ++a)
    if (const Index n = x.dim(a); n > 1) {
      const Tensor one = sum(slice(x, a, 0, n / 2), axes, true), other = sum(slice(x, a, n / 2, n), axes, true);
      return finish(plan.with_ones[a] == 1 ? one + other : cat({one, other}, a), plan.kept, keepdim);
    }
  return reshape(folded(to(x, DType::i64), plan, add, 0), keepdim ? plan.with_ones : plan.kept);
}
Tensor mean(const Tensor& x, const Axes& axes, bool keepdim) { return sum_or_mean("mean", x, axes, keepdim, true); }

Tensor max(const Tensor& x, const Axes& axes, bool keepdim) { return largest("max", x, axes, keepdim); }
Tensor min(const Tensor& x, const Axes& axes, bool keepdim) {
  check_floats("min", x);
  return neg(largest("min", neg(x), axes, keepdim));
}

Tensor prod(const Tensor& x, const Axes& axes, bool keepdim) {
  check_floats("prod", x);
  const Reduced plan("prod", x.shape(), axes);
  return reshape(to(folded(widened(x), plan, mul, 1), x.dtype()), keepdim ? plan.with_ones : plan.kept);
}

Tensor var(const Tensor& x, const Axes& axes, bool keepdim, Index correction) {
  check_floats("var", x);
  const double count = static_cast<double>(Reduced("var", x.shape(), axes).n - correction);
  const Tensor wide = widened(x);  // x - mean would round to few bits
  const Tensor squares = sum(square(wide - mean(wide, axes, true)), axes, keepdim);
  return to(squares / std::max(0.0, count), x.dtype());
}

static Tensor running_sum(const Tensor& in, bool reverse) {  // along the last axis
  const Tensor x = dense(in);
  Tensor y = empty_like(x);
  const Index n = x.dim(-1), rows = n > 0 ? x.numel() / n : 0;
  visit("cumsum", x, [&]<class T>(auto where) {
    const T* const from = x.data<T>();
    T* const to = y.mutable_data<T>();
    if constexpr (is_cuda<decltype(where)>) return kernels::cumsum(where, from, to, rows, n, reverse);
    parallel_each(rows, kWorthATask / (n + 1) + 1,
                  [=](Index r) { kernels::cumsum_row(from + r * n, to + r * n, n, reverse); });
  });
  return y;
}

Tensor cumsum(const Tensor& x, int axis) {
  check_floats("cumsum", x);
  const int along = checked_axis("cumsum", axis, x.rank());
  const Tensor y = apply_linear(
      "cumsum", transpose(x, along, -1), [](const Tensor& in) { return running_sum(in, false); },
      [](const Tensor& dy) { return running_sum(dy, true); });
  return transpose(y, along, -1);
}

TopK topk(const Tensor& x, Index k) {
  check_floats("topk", x);
  check(x.rank() >= 1 && k >= 0 && k <= x.dim(-1), "topk: there are no ", k, " largest along the last axis of ",
        x.shape());
  const Tensor dense_x = dense(x);
  const Index n = x.dim(-1), rows = without_last(x.shape()).numel();
  Tensor indices = empty(x.shape().with(-1, k), DType::i64, x.device());
  if (indices.numel() > 0)
    visit("topk", x, [&]<class T>(auto where) {
      const T* const from = dense_x.data<T>();
      std::int64_t* const out = indices.mutable_data<std::int64_t>();
      if constexpr (is_cuda<decltype(where)>) return kernels::topk(where, from, out, rows, n, k);
      parallel_each(rows, kWorthATask / (n + 1) + 1, [=](Index row) {
        std::vector<Index> order(static_cast<std::size_t>(n));
        std::iota(order.begin(), order.end(), Index{0});
        std::partial_sort(order.begin(), order.begin() + k, order.end(),
                          [=](Index i, Index j) { return kernels::comes_before(from + row * n, i, j); });
        std::copy_n(order.begin(), k, out + row * k);
      });
    });
  return {take_along(x, -1, indices), indices};
}

Tensor sum_to(const Tensor& dy, const Shape& shape) {
  if (dy.shape() == shape) return dy;
  Axes axes;
  const int extra = dy.rank() - shape.rank();
  for (int a = 0; a < dy.rank(); ++a)
    if (a < extra || (shape[a - extra] == 1 && dy.dim(a) != 1)) axes.push_back(a);
  return reshape(axes.empty() ? dy : sum(dy, axes), shape);
}

static Tensor place_of_largest(const char* op, const Tensor& x, bool negated) {
  check(x.rank() >= 1 && x.dim(-1) > 0, op, ": needs a last axis with elements, got shape ", x.shape());
  const Tape::Pause pause;
  Tensor y = empty(without_last(x.shape()), DType::i64, x.device());
  const Tensor rows = dense(negated ? neg(x) : x);
  const Index n = x.dim(-1);
  visit("argmax", x, [&]<class T>(auto where) {
    std::int64_t* const out = y.mutable_data<std::int64_t>();
    if constexpr (is_cuda<decltype(where)>) return kernels::argmax(where, rows.data<T>(), out, y.numel(), n);
    const auto is_less = [](wide_t<T> a, wide_t<T> b) { return a < b || (a != a && b == b); };
    for (Index r = 0; r < y.numel(); ++r) {
      const T* const row = rows.data<T>() + r * n;
      out[r] = std::max_element(row, row + n, is_less) - row;
    }
  });
  return y;
}
Tensor argmax(const Tensor& x) { return place_of_largest("argmax", x, false); }
Tensor argmin(const Tensor& x) { return place_of_largest("argmin", x, true); }

}  // namespace hilt
