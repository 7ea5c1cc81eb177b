// A layer in one op: y = x w + b, and onto a residual stream y = r + x w + b. The product starts
// from b and r instead of 0.
//      dx = dy w^T        dw = x^T dy        db = sum over rows of dy        dr = dy        keeps x and w
// y = gelu_tanh(h), h = x w + b: the same with dh = dy gelu_tanh'(h) for dy; keeps h too. A GPU
// applies gelu as it writes the product of 16-bit factors, and sums dy as it multiplies by it.
#include "ops/gemm/gemm.h"
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {
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
    bool done = false;
    if (dy.device().is_cuda())
      visit("linear", dy, [&]<class T>(auto where) {
        if constexpr (is_cuda<decltype(where)>) {
          const Tensor rows = dense(x), g = dense(dy);
          Tensor w = empty({rows.dim(1), g.dim(1)}, g.dtype(), g.device()), b = empty(b_shape, g.dtype(), g.device());
          kernels::Extras<T> extras;
          extras.sums = b.mutable_data<T>();
          done = kernels::gemm_onto<T>(where, rows.dim(1), g.dim(1), rows.dim(0), kernels::matrix<T>(transpose(rows)),
                                       kernels::matrix<T>(g), {w.mutable_data<T>(), w.dim(1), 1}, extras);
          if (done) dw = w, db = b;
        }
      });
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
  const Tensor product = matmul(x, w);
  const Tensor y = b ? add(product, b) : product;
  return r ? add(r, y) : gelu ? gelu_tanh(y) : y;
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b) { return checked(x, w, b, {}); }
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& residual) {
  return checked(x, w, b, residual);
}
Tensor linear_gelu_tanh(const Tensor& x, const Tensor& w, const Tensor& b) { return checked(x, w, b, {}, true); }

}  // namespace hilt
