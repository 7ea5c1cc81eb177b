// Along the last axis, with the maximum taken off first so that nothing overflows.
//      y = softmax(x) = e^x / sum e^x       dx = y (dy - sum y dy)          keeps y
//      y = log_softmax(x) = x - L           dx = dy - e^y sum dy            keeps y
//      L = logsumexp(x) = log sum e^x       dx = dL e^(x - L)               keeps x: L rounds, so it is formed again
// A row of -inf alone has softmax NaN (0 / 0) and logsumexp -inf.
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

Index rows_of(const Tensor& x) { return x.dim(-1) > 0 ? x.numel() / x.dim(-1) : 0; }

enum class Kind { softmax, log_softmax, logsumexp };
constexpr const char* kNames[] = {"softmax", "log_softmax", "logsumexp"};  // by Kind

struct AlongRows final : Function {
  const Kind kind;
  explicit AlongRows(Kind k) : kind(k) {}
  std::string_view name() const override { return kNames[static_cast<int>(kind)]; }
  Tensor forward(const Tensor& in) {
    const Tensor x = dense(in);
    Tensor y = kind == Kind::logsumexp ? empty(without_last(x.shape()), x.dtype(), x.device()) : empty_like(x);
    const Index rows = rows_of(x), cols = x.dim(-1);
    visit(kNames[static_cast<int>(kind)], x, [&]<class T>(auto where) {
      const T* const from = x.data<T>();
      T* const to = y.mutable_data<T>();
      if (kind == Kind::softmax) kernels::softmax(where, from, to, rows, cols);
      else if (kind == Kind::log_softmax) kernels::log_softmax(where, from, to, rows, cols);
      else kernels::logsumexp(where, from, to, y.numel(), cols);
    });
    if (wants(0)) save(kind == Kind::logsumexp ? x : y);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& gradient) override {
    const Tensor &kept = saved(0), dy = dense(gradient);
    Tensor dx = empty_like(kept);
    const Index rows = rows_of(kept), cols = kept.dim(-1);
    visit(kNames[static_cast<int>(kind)], kept, [&]<class T>(auto where) {
      const T *const from = kept.data<T>(), *const g = dy.data<T>();
      T* const to = dx.mutable_data<T>();
      if (kind == Kind::softmax) kernels::softmax_backward(where, from, g, to, rows, cols);
      else if (kind == Kind::log_softmax) kernels::log_softmax_backward(where, from, g, to, rows, cols);
      else kernels::logsumexp_backward(where, from, g, to, rows, cols);
    });
    return {dx};
  }
};

Tensor along_rows(const Tensor& x, Kind kind) {
  const char* const op = kNames[static_cast<int>(kind)];
  check(bool(x) && x.rank() >= 1, op, ": needs at least one axis, got ", x ? x.shape() : Shape{});
  check_floats(op, x);
  return apply(AlongRows(kind), x);
}

}  // namespace

Tensor softmax(const Tensor& x) { return along_rows(x, Kind::softmax); }
Tensor log_softmax(const Tensor& x) { return along_rows(x, Kind::log_softmax); }
Tensor logsumexp(const Tensor& x) { return along_rows(x, Kind::logsumexp); }

}  // namespace hilt
