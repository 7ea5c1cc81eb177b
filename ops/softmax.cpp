// Along the last axis, with the maximum taken off first so that nothing overflows.
//      y = softmax(x) = e^x / sum e^x       dx = y (dy - sum y dy)          keeps y
//      y = log_softmax(x) = x - L           dx = dy - e^y sum dy            keeps y
//      L = logsumexp(x) = log sum e^x       dx = dL e^(x - L)               keeps x: L rounds, so it is formed again
// A row of -inf alone has softmax NaN (0 / 0) and logsumexp -inf.
#include "ops/helpers.h"
#include "ops/ops.h"
#include "ops/rows.h"

namespace hilt {
namespace {

/// An op whose kernels are F and its gradient B. Where a row has one result, it keeps x, else y.
template <template <class> class F, template <class> class B, bool kOneResult> struct AlongRows final : Function {
  const char* const label;
  explicit AlongRows(const char* op) : label(op) {}
  std::string_view name() const override { return label; }
  template <class T> static kernels::RowOp<T> rows_of(const Tensor& x) {
    return {without_last(x.shape()).numel(), x.dim(-1)};
  }

  Tensor forward(const Tensor& in) {
    const Tensor x = dense(in);
    Tensor y = kOneResult ? empty(without_last(x.shape()), x.dtype(), x.device()) : empty_like(x);
    visit(label, x, [&]<class T>(auto where) {
      kernels::along_rows(where, label, F<T>{{rows_of<T>(x), x.data<T>(), y.mutable_data<T>()}});
    });
    if (wants(0)) save(kOneResult ? x : y);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& gradient) override {
    const Tensor &kept = saved(0), dy = dense(gradient);
    Tensor dx = empty_like(kept);
    visit(label, kept, [&]<class T>(auto where) {
      kernels::along_rows(where, label, B<T>{{rows_of<T>(kept), kept.data<T>(), dy.data<T>(), dx.mutable_data<T>()}});
    });
    return {dx};
  }
};

template <template <class> class F, template <class> class B, bool kOneResult = false>
Tensor along_rows(const char* op, const Tensor& x) {
  check(bool(x) && x.rank() >= 1, op, ": needs at least one axis, got ", x ? x.shape() : Shape{});
  check_floats(op, x);
  return apply(AlongRows<F, B, kOneResult>(op), x);
}

}  // namespace

Tensor softmax(const Tensor& x) { return along_rows<kernels::Softmax, kernels::SoftmaxBackward>("softmax", x); }
Tensor log_softmax(const Tensor& x) {
  return along_rows<kernels::LogSoftmax, kernels::LogSoftmaxBackward>("log_softmax", x);
}
Tensor logsumexp(const Tensor& x) {
  return along_rows<kernels::LogSumExp, kernels::LogSumExpBackward, true>("logsumexp", x);
}

}  // namespace hilt
