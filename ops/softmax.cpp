// Along the last axis, with the maximum taken off first so that nothing overflows.
//
//      y = softmax(x) = e^x / sum e^x       dx = y (dy - sum y dy)          keeps y
//      y = log_softmax(x) = x - L           dx = dy - e^y sum dy            keeps y
//      L = logsumexp(x) = log sum e^x       dx = dL e^(x - L)               keeps x: L rounds, so it is formed again
//
// A row of -inf alone has softmax NaN (0 / 0) and logsumexp -inf.
#include "core/tape.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

Index rows_of(const Tensor& x) { return x.dim(-1) > 0 ? x.numel() / x.dim(-1) : 0; }

void check_rows(const char* op, const Tensor& x) {
  check(bool(x) && x.rank() >= 1, op, ": needs at least one axis, got ", x ? x.shape() : Shape{});
  check(is_floating(x.dtype()), op, ": needs a tensor of floats, got ", x.dtype());
}

struct Softmax final : Function {
  bool log = false;
  std::string_view name() const override { return log ? "log_softmax" : "softmax"; }
  Tensor forward(const Tensor& in) {
    const Tensor x = dense(in);
    Tensor y = empty_like(x);
    visit("softmax", x, [&]<class T>(auto where) {
      if (log) kernels::log_softmax(where, x.data<T>(), y.mutable_data<T>(), rows_of(x), x.dim(-1));
      else kernels::softmax(where, x.data<T>(), y.mutable_data<T>(), rows_of(x), x.dim(-1));
    });
    if (wants(0)) save(y);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& gradient) override {
    const Tensor& y = saved(0);
    const Tensor dy = dense(gradient);
    Tensor dx = empty_like(y);
    visit("softmax", y, [&]<class T>(auto where) {
      if (log)
        kernels::log_softmax_backward(where, y.data<T>(), dy.data<T>(), dx.mutable_data<T>(), rows_of(y), y.dim(-1));
      else kernels::softmax_backward(where, y.data<T>(), dy.data<T>(), dx.mutable_data<T>(), rows_of(y), y.dim(-1));
    });
    return {dx};
  }
};

struct LogSumExp final : Function {
  std::string_view name() const override { return "logsumexp"; }
  Tensor forward(const Tensor& in) {
    const Tensor x = dense(in);
    Shape shape;
    for (int a = 0; a + 1 < x.rank(); ++a) shape.push_back(x.dim(a));
    Tensor y = empty(shape, x.dtype(), x.device());
    visit("logsumexp", x, [&]<class T>(auto where) {
      kernels::logsumexp(where, x.data<T>(), y.mutable_data<T>(), y.numel(), x.dim(-1));
    });
    if (wants(0)) save(x);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& gradient) override {
    const Tensor& x = saved(0);
    const Tensor dy = dense(gradient);
    Tensor dx = empty_like(x);
    visit("logsumexp", x, [&]<class T>(auto where) {
      kernels::logsumexp_backward(where, x.data<T>(), dy.data<T>(), dx.mutable_data<T>(), rows_of(x), x.dim(-1));
    });
    return {dx};
  }
};

Tensor softmax_or_log(const char* op, const Tensor& x, bool log) {
  check_rows(op, x);
  Softmax fn;
  fn.log = log;
  return apply(std::move(fn), x);
}

}  // namespace

Tensor softmax(const Tensor& x) { return softmax_or_log("softmax", x, false); }
Tensor log_softmax(const Tensor& x) { return softmax_or_log("log_softmax", x, true); }
Tensor logsumexp(const Tensor& x) {
  check_rows("logsumexp", x);
  return apply(LogSumExp{}, x);
}

}  // namespace hilt
