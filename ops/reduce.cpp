// Reductions over any set of axes.
//      y = sum x         dx = dy, repeated
//      y = mean x        dx = dy / n, repeated
//      y = max x         dx = dy / (how many equal y) where x == y, else 0          keeps x and y
//      y = cumsum x      dx = cumsum dy from the other end
// Whatever the axes, the kernels see [outer, n, inner] and reduce the middle: adjacent axes merge,
// and a set of axes that does not merge is brought to the end by a copy.
#include <algorithm>
#include <cmath>
#include <numeric>
#include "core/strided.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

struct Reduction {
  std::vector<bool> reduced;  // by axis
  Shape kept, with_ones;      // of the result, without and with keepdim
  std::vector<int> order;     // the kept axes, then the reduced ones
  Index n = 1;                // elements behind one result

  Reduction(const char* op, const Shape& shape, const Axes& axes)
      : reduced(static_cast<std::size_t>(shape.rank()), axes.empty()) {
    for (int axis : axes) {
      const auto a = static_cast<std::size_t>(checked_axis(op, axis, shape.rank()));
      check(!reduced[a], op, ": axis ", axis, " is named twice");
      reduced[a] = true;
    }
    for (int a = 0; a < shape.rank(); ++a) {
      const bool gone = reduced[static_cast<std::size_t>(a)];
      with_ones.push_back(gone ? 1 : shape[a]);
      if (gone) n *= shape[a];
      else kept.push_back(shape[a]);
    }
    for (bool gone : {false, true})
      for (int a = 0; a < shape.rank(); ++a)
        if (reduced[static_cast<std::size_t>(a)] == gone) order.push_back(a);
  }
};

struct Middle {  // x as dense [outer, n, inner] with the reduced axes in the middle
  Tensor x;
  Index outer = 1, n = 1, inner = 1;

  Middle(const Tensor& in, const Reduction& plan) {
    int stage = 0;  // axes so far: 0 kept, 1 reduced, 2 kept again, 3 reduced again
    for (int a = 0; a < in.rank(); ++a) {
      if (in.dim(a) == 1) continue;
      const bool gone = plan.reduced[static_cast<std::size_t>(a)];
      if (gone != (stage % 2 == 1)) ++stage;
      if (stage < 3) (stage == 0 ? outer : stage == 1 ? n : inner) *= in.dim(a);
    }
    if (stage < 3) {
      x = dense(in);
      return;
    }
    x = dense(permute(in, plan.order));
    outer = plan.kept.numel(), n = plan.n, inner = 1;
  }
};

Tensor summed(const Tensor& in, const Reduction& plan, double factor) {
  Tensor y = empty(plan.with_ones, in.dtype(), in.device());
  const Middle m(in, plan);
  visit("sum", in, [&]<class T>(auto where) {
    Tensor partial = empty({m.outer, kernels::SumPieces(m.n, m.inner).pieces, m.inner}, DType::f64, in.device());
    kernels::sum(where, m.x.data<T>(), y.mutable_data<T>(), partial.mutable_data<double>(), m.outer, m.n, m.inner,
                 factor);
  });
  return y;
}

/// op over the reduced axes by halves: for ops whose order does not matter, or may be a tree.
Tensor folded(const Tensor& x, const Reduction& plan, Tensor (*op)(const Tensor&, const Tensor&), double neutral) {
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
  Reduction plan;
  explicit Max(Reduction p) : plan(std::move(p)) {}

  std::string_view name() const override { return "max"; }
  Tensor forward(const Tensor& x) {
    Tensor y = empty(plan.with_ones, x.dtype(), x.device());
    const Middle m(x, plan);
    visit("max", x,
          [&]<class T>(auto where) { kernels::max(where, m.x.data<T>(), y.mutable_data<T>(), m.outer, m.n, m.inner); });
    if (wants(0)) save(x), save(y);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    const Tensor &x = saved(0), &y = saved(1);
    Tensor is_top = empty_like(x);  // 1 where x is the maximum; NaN is the maximum of a row that has one
    visit("max", x, [&]<class T>(auto where) {
      const Tensor a = dense(x), b = dense(broadcast_to("max", y, x.shape()));
      const T *px = a.data<T>(), *py = b.data<T>();
      T* const out = is_top.mutable_data<T>();
      if constexpr (is_cuda<decltype(where)>) return kernels::equals(where, px, py, out, x.numel());
      for (Index i = 0; i < x.numel(); ++i) {
        const wide_t<T> u = px[i], v = py[i];
        out[i] = static_cast<T>(wide_t<T>(u == v || (u != u && v != v)));
      }
    });
    return {mul(is_top, div(dy, summed(is_top, plan, 1)))};
  }
};

Tensor finish(const Tensor& y, const Shape& kept, bool keepdim) { return keepdim ? y : reshape(y, kept); }

Tensor sum_or_mean(const char* op, const Tensor& x, const Axes& axes, bool keepdim, bool is_mean) {
  check_floats(op, x);
  const Reduction plan(op, x.shape(), axes);
  // The mean of nothing is 0 / 0, here 0 times infinity.
  const double factor = is_mean ? 1.0 / static_cast<double>(plan.n) : 1;
  const Tensor y = apply_linear(
      op, x, [=](const Tensor& in) { return summed(in, plan, factor); },
      [=, from = x.shape()](const Tensor& dy) { return broadcast_to("sum", is_mean ? mul(dy, factor) : dy, from); });
  return finish(y, plan.kept, keepdim);
}

Tensor largest(const char* op, const Tensor& x, const Axes& axes, bool keepdim) {
  check_floats(op, x);
  Max fn(Reduction(op, x.shape(), axes));
  check(fn.plan.n > 0, op, ": ", x.shape(), " has no elements along the reduced axes; there is no ",
        op[1] == 'a' ? "maximum" : "minimum", " of nothing");
  const Shape kept = fn.plan.kept;
  return finish(apply(std::move(fn), x), kept, keepdim);
}

}  // namespace

Tensor sum(const Tensor& x, const Axes& axes, bool keepdim) {
  if (!x || is_floating(x.dtype())) return sum_or_mean("sum", x, axes, keepdim, false);
  const Reduction plan("sum", x.shape(), axes);
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
  const Reduction plan("prod", x.shape(), axes);
  return reshape(to(folded(widened(x), plan, mul, 1), x.dtype()), keepdim ? plan.with_ones : plan.kept);
}

Tensor var(const Tensor& x, const Axes& axes, bool keepdim, Index correction) {
  check_floats("var", x);
  const double count = static_cast<double>(Reduction("var", x.shape(), axes).n - correction);
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
  if (axes.empty()) return reshape(dy, shape);
  return reshape(sum(dy, axes), shape);
}

Tensor argmin(const Tensor& x) {
  check(x.rank() >= 1 && x.dim(-1) > 0, "argmin: needs a last axis with elements, got shape ", x.shape());
  const Tape::Pause pause;
  return argmax(neg(x));
}

Tensor argmax(const Tensor& x) {
  check(x.rank() >= 1 && x.dim(-1) > 0, "argmax: needs a last axis with elements, got shape ", x.shape());
  Tensor y = empty(without_last(x.shape()), DType::i64, x.device());
  const Tensor rows = dense(x);
  visit("argmax", x, [&]<class T>(auto where) {
    std::int64_t* const out = y.mutable_data<std::int64_t>();
    if constexpr (is_cuda<decltype(where)>) return kernels::argmax(where, rows.data<T>(), out, y.numel(), x.dim(-1));
    for (Index r = 0; r < y.numel(); ++r) {
      const T* const row = rows.data<T>() + r * x.dim(-1);
      out[r] = std::max_element(row, row + x.dim(-1),
                                [](T a, T b) {
                                  return wide_t<T>(a) < wide_t<T>(b) ||
                                         (std::isnan(wide_t<T>(a)) && !std::isnan(wide_t<T>(b)));
                                }) -
               row;
    }
  });
  return y;
}

}  // namespace hilt
