// Linear algebra: products, and layers made of one.
//
// y = a b over the last two axes, batched over the leading ones, which broadcast.
//      da = dy b^T        db = a^T dy        summed over the batches a factor was repeated for; keeps a and b
// A factor is read in place if one of its last two strides is 1: a transposed view costs nothing.
// Where b is one matrix for the whole batch (a weight), a's batch is just more rows: one product.
//
// A layer in one op: y = x w + b, and onto a residual stream y = r + x w + b. The product starts
// from b and r instead of 0.
//      dx = dy w^T        dw = x^T dy        db = sum over rows of dy        dr = dy        keeps x and w
// y = gelu_tanh(h), h = x w + b: the same with dh = dy gelu_tanh'(h) for dy; keeps h too. A GPU
// applies gelu as it writes the product of 16-bit factors, and sums dy as it multiplies by it.
#include "core/strided.h"
#include "ops/gemm/gemm.h"
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {
namespace {

/// x if one of its last two axes has stride 1 and the other steps over it, else a dense copy.
Tensor readable(Tensor x) {
  const auto unit = [&](int axis, int other) {
    return x.stride(axis) == 1 && (x.dim(other) == 1 || x.stride(other) >= x.dim(axis));
  };
  return unit(-1, -2) || unit(-2, -1) ? std::move(x) : clone(x);
}

/// The leading axes.
Shape lead(const Tensor& x) { return Shape(std::span(x.shape().begin(), x.shape().end() - 2)); }

/// Where the factors of each product begin, of batches that `shape` broadcasts to; none is empty.
std::array<detail::List<Index>, 2> offsets(const Shape& shape, const Tensor& x, const Tensor& y) {
  const auto strides = [&](const Tensor& t) {
    return broadcast_to("matmul", as_strided(t, lead(t), t.strides(), t.offset()), shape).strides();
  };
  const Runs<2> runs(shape, {strides(x), strides(y)});
  std::array<detail::List<Index>, 2> found;
  runs.for_rows(0, runs.rows, [&](const std::array<Index, 2>& at) {
    for (std::size_t f = 0; f < 2; ++f)
      for (Index i = 0; i < runs.run; ++i) found[f].push_back(at[f] + i * runs.step[f]);
  });
  return found;
}

Tensor product(const Tensor& x, const Tensor& y) {
  const Index m = x.dim(-2), k = x.dim(-1), n = y.dim(-1);
  const DType factors = kernels::factor_type(x), type = kernels::product_type(x);
  const Tensor a = readable(to(x, factors)), b = readable(to(y, factors));
  const Shape batches = broadcast("matmul", lead(x), lead(y));
  Shape shape = batches;
  shape.push_back(m), shape.push_back(n);
  if (k == 0 || shape.numel() == 0) return zeros(shape, x.dtype(), x.device());
  Tensor out = empty(shape, type, x.device());
  kernels::BatchSteps steps{.batch = batches.numel(), .c = m * n};
  std::array<detail::List<Index>, 2> from;
  if (steps.batch > 1) from = offsets(batches, a, b), steps.a = from[0].data(), steps.b = from[1].data();
  kernels::visit_factors("matmul", a, [&]<class T, class At>(At where) {
    kernels::gemm_batched<T>(where, steps, m, n, k, kernels::matrix<T>(a), kernels::matrix<T>(b),
                             {out.mutable_data<kernels::product_t<T, At>>(), n, 1});
  });
  return to(out, x.dtype());
}

struct Matmul final : Function {
  Shape a_shape, b_shape;
  bool b_by_columns = false;  // as a transposed weight is; db comes like that too, and goes back without a copy
  std::string_view name() const override { return "matmul"; }

  Tensor forward(const Tensor& a, const Tensor& b) {
    a_shape = a.shape(), b_shape = b.shape();
    b_by_columns = b.stride(-2) == 1 && b.dim(-1) > 1;
    if (wants(1)) save(a);
    if (wants(0)) save(b);
    return times(a, b);
  }

  std::vector<Tensor> backward(const Tensor& dy) override {
    Tensor da, db;
    if (wants(0)) da = sum_to(times(dy, transpose(saved(wants(1) ? 1 : 0))), a_shape);
    if (wants(1) && folds()) {
      const Tensor x = as_rows(saved(0)), g = as_rows(dy);
      db = reshape(b_by_columns ? transpose(product(transpose(g), x)) : product(transpose(x), g), b_shape);
    } else if (wants(1)) db = sum_to(product(transpose(saved(0)), dy), b_shape);
    return {da, db};
  }

 private:
  Tensor times(const Tensor& a, const Tensor& b) const {
    return folds() ? reshape(product(as_rows(a), as_rows(b)), a.shape().with(-1, b.dim(-1))) : product(a, b);
  }
  bool folds() const {
    return a_shape.rank() > 2 && b_shape.rank() <= a_shape.rank() && a_shape.numel() > 0 && b_shape.numel() > 0 &&
           b_shape.numel() == b_shape[-2] * b_shape[-1];
  }
};

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  check_alike("matmul", "a", a, "b", b);
  check(a.rank() >= 2 && b.rank() >= 2, "matmul: needs two matrices or batches of them, got ", a.shape(), " and ",
        b.shape());
  check(a.dim(-1) == b.dim(-2), "matmul: a ", a.shape(), " has ", a.dim(-1), " columns, b ", b.shape(), " has ",
        b.dim(-2), " rows");
  for (int axis = -3; - axis <= std::min(a.rank(), b.rank()); --axis)
    check(a.dim(axis) == b.dim(axis) || a.dim(axis) == 1 || b.dim(axis) == 1, "matmul: a ", a.shape(), " and b ",
          b.shape(), " do not broadcast: axis ", axis, " has ", a.dim(axis), " and ", b.dim(axis));
  visit("matmul", a, []<class T>(auto) {});
  return apply(Matmul{}, a, b);
}

// ---- layers -------------------------------------------------------------------------------------
namespace {

struct LinearOp final : Function {
  bool gelu = false;
  Shape b_shape;
  std::string_view name() const override { return gelu ? "linear_gelu_tanh" : "linear"; }

  Tensor forward(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& r) {
    b_shape = b.shape();
    if (wants(1)) save(x);
    if (wants(0)) save(w);
    const DType factors = kernels::factor_type(x), type = kernels::product_type(x);
    const Tensor rows = dense(to(as_rows(x), factors)), weight = dense(to(w, factors)),
                 bias = b ? dense(to(b, type)) : b, residual = r ? dense(to(as_rows(r), type)) : r;
    Tensor y = empty(x.shape().with(-1, w.dim(1)), type, x.device()), before;
    bool active = false;
    kernels::visit_factors("linear", rows, [&]<class T, class At>(At where) {
      using Y = kernels::product_t<T, At>;
      kernels::Extras<Y> extras;
      if (bias) extras.bias = bias.data<Y>();
      if (residual) extras.residual = kernels::matrix<Y>(residual);
      const auto multiply = [&] {
        return kernels::gemm_onto<T>(where, rows.dim(0), w.dim(1), w.dim(0), kernels::matrix<T>(rows),
                                     kernels::matrix<T>(weight), {y.mutable_data<Y>(), w.dim(1), 1}, extras);
      };
      if (is_cuda<At> && sizeof(T) == 2 && gelu) {  // in f32 its gelu has five times the error of ours
        if (wants_any()) before = empty_like(y), extras.before = before.mutable_data<Y>();
        extras.gelu = true;
        active = multiply();
        extras.gelu = false, extras.before = nullptr;
      }
      if (!active) multiply();
    });
    if (gelu && !active) before = y, y = gelu_tanh(y);
    if (gelu && wants_any()) save(to(before, x.dtype()));
    return to(y, x.dtype());
  }

  std::vector<Tensor> backward(const Tensor& gradient) override {
    std::vector<Tensor> d(4);
    const Tensor dy = gelu ? gelu_tanh_backward(saved(std::size_t{wants(0)} + wants(1)), gradient) : gradient;
    const Tensor g = as_rows(dy);
    if (wants(0)) d[0] = matmul(dy, transpose(saved(wants(1) ? 1 : 0)));
    if (!(wants(1) && wants(2) && with_sums(as_rows(saved(0)), g, d[1], d[2]))) {
      if (wants(1)) d[1] = matmul(transpose(as_rows(saved(0))), g);
      if (wants(2)) d[2] = sum_to(g, b_shape);
    }
    if (wants(3)) d[3] = dy;
    return d;
  }

  // dw = x^T dy and db in one product, where a GPU can.
  bool with_sums(const Tensor& x, const Tensor& dy, Tensor& dw, Tensor& db) const {
    if (!dy.device().is_cuda()) return false;
    const Tensor rows = dense(x), g = dense(dy);
    Tensor w = empty({rows.dim(1), g.dim(1)}, g.dtype(), g.device()), b = empty(b_shape, g.dtype(), g.device());
    bool done = false;
    kernels::visit_factors("linear", g, [&]<class T, class At>(At where) {
      using Y = kernels::product_t<T, At>;
      kernels::Extras<Y> extras;
      extras.sums = b.mutable_data<Y>();
      done = kernels::gemm_onto<T>(where, rows.dim(1), g.dim(1), rows.dim(0), kernels::matrix<T>(transpose(rows)),
                                   kernels::matrix<T>(g), {w.mutable_data<Y>(), w.dim(1), 1}, extras);
    });
    if (done) dw = w, db = b;
    return done;
  }
};

Tensor checked(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& r, bool gelu = false) {
  check_alike("linear", "x", x, "w", w);
  check(x.rank() >= 1 && w.rank() == 2 && x.dim(-1) == w.dim(0), "linear: x ", x.shape(), " and w ", w.shape(),
        " must be [.., in] and [in, out]");
  if (b) check_alike("linear", "x", x, "b", b);
  if (b)
    check(b.shape() == Shape{w.dim(1)}, "linear: b ", b.shape(), " must have one entry for each of the ", w.dim(1),
          " columns of w");
  if (r) check_alike("linear", "x", x, "residual", r);
  if (r)
    check(r.shape() == x.shape().with(-1, w.dim(1)), "linear: the residual ", r.shape(),
          " must have the shape of x w, ", x.shape().with(-1, w.dim(1)));
  if (x.rank() == 1) return squeeze(checked(unsqueeze(x, 0), w, b, r ? unsqueeze(r, 0) : r, gelu), 0);
  check(is_floating(x.dtype()), "linear: needs tensors of floats, got ", x.dtype());
  LinearOp fn;
  fn.gelu = gelu;
  if (x.numel() > 0 && w.numel() > 0) return apply(std::move(fn), x, w, b, r);
  const Tensor xw = matmul(x, w), y = b ? add(xw, b) : xw;
  return r ? add(r, y) : gelu ? gelu_tanh(y) : y;
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& residual) {
  return checked(x, w, b, residual);
}
Tensor linear_gelu_tanh(const Tensor& x, const Tensor& w, const Tensor& b) { return checked(x, w, b, {}, true); }

}  // namespace hilt
