// A layer in one op: y = x w + b, and onto a residual stream y = r + x w + b. The product starts from b and r instead of 0.
//
//      dx = dy w^T        dw = x^T dy        db = sum over rows of dy        dr = dy        keeps x and w
#include "core/tape.h"
#include "ops/gemm.h"
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {
namespace {

Tensor as_rows(const Tensor& x) { return reshape(x, {x.dim(-1) > 0 ? x.numel() / x.dim(-1) : 0, x.dim(-1)}); }

template <class T>
kernels::MatrixRef<const T> matrix(const Tensor& x) { return {x.data<T>(), x.stride(-2), x.stride(-1)}; }

struct LinearOp final : Function {
  Shape b_shape;
  std::string_view name() const override { return "linear"; }

  Tensor forward(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& r) {
    b_shape = b.shape();
    if (wants(1)) save(x);
    if (wants(0)) save(w);
    // On the CPU 16-bit factors multiply and add up in f32; the result is rounded once.
    const DType type = x.device().is_cpu() && size_of(x.dtype()) == 2 ? DType::f32 : x.dtype();
    const auto ready = [&](const Tensor& t) { return t ? dense(to(t, type)) : t; };
    const Tensor rows = ready(as_rows(x)), weight = ready(w), bias = ready(b), residual = r ? ready(as_rows(r)) : r;
    Tensor y = empty(x.shape().with(-1, w.dim(1)), type, x.device());
    visit("linear", y, [&]<class T>(auto where) {
      const auto run = [&](auto device) {
        kernels::Start<T> start;
        if (bias) start.bias = bias.data<T>();
        if (residual) start.residual = matrix<T>(residual);
        kernels::gemm_onto<T>(device, rows.dim(0), w.dim(1), w.dim(0), matrix<T>(rows), matrix<T>(weight), {y.mutable_data<T>(), w.dim(1), 1}, start);
      };
      if constexpr (is_cuda<decltype(where)>) run(where);
      else if constexpr (sizeof(T) >= sizeof(float)) run(Cpu{});
    });
    return to(y, x.dtype());
  }

  std::vector<Tensor> backward(const Tensor& dy) override {
    std::vector<Tensor> d(4);
    const Tensor g = as_rows(dy);
    if (wants(0)) d[0] = matmul(dy, transpose(saved(wants(1) ? 1 : 0)));
    if (wants(1)) d[1] = matmul(transpose(as_rows(saved(0))), g);
    if (wants(2)) d[2] = sum_to(g, b_shape);
    if (wants(3)) d[3] = dy;
    return d;
  }
};

Tensor checked(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& r) {
  check_alike("linear", "x", x, "w", w);
  check(x.rank() >= 1 && w.rank() == 2 && x.dim(-1) == w.dim(0), "linear: x ", x.shape(), " and w ", w.shape(), " must be [.., in] and [in, out]");
  if (b) check_alike("linear", "x", x, "b", b);
  if (b) check(b.shape() == Shape{w.dim(1)}, "linear: b ", b.shape(), " must have one entry for each of the ", w.dim(1), " columns of w");
  if (r) check_alike("linear", "x", x, "residual", r);
  if (r) check(r.shape() == x.shape().with(-1, w.dim(1)), "linear: the residual ", r.shape(), " must have the shape of x w, ", x.shape().with(-1, w.dim(1)));
  if (x.rank() == 1) return squeeze(checked(unsqueeze(x, 0), w, b, r ? unsqueeze(r, 0) : r), 0);
  check(is_floating(x.dtype()), "linear: needs tensors of floats, got ", x.dtype());
  if (x.numel() > 0 && w.numel() > 0) return apply(LinearOp{}, x, w, b, r);
  const Tensor product = matmul(x, w);
  const Tensor y = b ? add(product, b) : product;
  return r ? add(r, y) : y;
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b) { return checked(x, w, b, {}); }
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& residual) { return checked(x, w, b, residual); }

}  // namespace hilt
