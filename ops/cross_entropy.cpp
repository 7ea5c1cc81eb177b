// The loss of a classifier, softmax and logarithm in one.
//      loss = mean over the targets that count of  L_r - x[r, target_r],      L_r = log sum_c e^x[r, c]
//      dx[r, c] = (e^(x[r, c] - L_r) - [c == target_r]) dloss / count         keeps x and L
// The loss of 16-bit logits is f32. Rows whose target is `ignore` do not count; of none it is 0.
#include <numeric>
#include "core/strided.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

struct CrossEntropy final : Function {
  Tensor targets;  // i64 [rows]; -1 where ignored
  Index count = 0, ignore = -1;
  Tensor share;  // on a GPU: 1 / count
  std::string_view name() const override { return "cross_entropy"; }

  Tensor forward(const Tensor& logits) {
    const Tensor x = dense(logits);
    const Index rows = targets.numel(), classes = x.dim(-1);
    const DType stat = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
    Tensor y = empty({}, stat, x.device()), lse = empty({rows}, stat, x.device()),
           losses = empty({rows}, DType::f64, x.device());
    const std::int64_t* const target = targets.data<std::int64_t>();
    double* const loss = losses.mutable_data<double>();
    visit("cross_entropy", x, [&]<class T>(auto where) {
      using W = wide_t<T>;
      const T* const px = x.data<T>();
      W *const pl = lse.mutable_data<W>(), *const mean = y.mutable_data<W>();
      if constexpr (is_cuda<decltype(where)>) {
        share = empty_like(y);
        const kernels::Logits<T> in{px, rows, classes, target, ignore};
        kernels::cross_entropy(where, in, mean, pl, loss, share.mutable_data<W>());
      } else {
        parallel_each(rows, kWorthATask / classes + 1, [&](Index r) {
          const T* const row = px + r * classes;
          pl[r] = kernels::row_logsumexp(where, row, classes);
          const double l = static_cast<double>(pl[r]);
          loss[r] = target[r] >= 0 ? l - static_cast<double>(static_cast<W>(row[target[r]])) : 0;
        });
        const double total = std::accumulate(loss, loss + rows, 0.0);
        *mean = static_cast<W>(count > 0 ? total / static_cast<double>(count) : 0);
      }
    });
    if (wants(0)) save(x), save(lse);
    return y;
  }

  std::vector<Tensor> backward(const Tensor& dy) override {
    const Tensor &x = saved(0), &lse = saved(1);
    const Index rows = targets.numel(), classes = x.dim(-1);
    Tensor dx = empty_like(x);
    const std::int64_t* const target = targets.data<std::int64_t>();
    visit("cross_entropy", x, [&]<class T>(auto where) {
      using W = wide_t<T>;
      const T* const px = x.data<T>();
      const W* const pl = lse.data<W>();
      T* const out = dx.mutable_data<T>();
      if constexpr (is_cuda<decltype(where)>) {
        const kernels::Logits<T> in{px, rows, classes, target, ignore};
        kernels::cross_entropy_backward(where, in, pl, dy.data<W>(), share.data<W>(), out);
      } else {
        const double scale = count > 0 ? dy.item() / static_cast<double>(count) : 0;
        parallel_each(rows, kWorthATask / classes + 1, [&](Index r) {
          kernels::row_cross_entropy_backward(where, px + r * classes, pl[r], target[r], target[r] >= 0 ? scale : 0,
                                              out + r * classes, classes);
        });
      }
    });
    return {dx};
  }
};

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, Index ignore) {
  check(bool(logits) && logits.rank() >= 1 && logits.dim(-1) >= 1, "cross_entropy: logits must be [.., classes], got ",
        logits.shape());
  check(bool(targets) && (targets.dtype() == DType::i64 || targets.dtype() == DType::i32),
        "cross_entropy: targets must be i32 or i64, got ", targets.dtype());
  const Index classes = logits.dim(-1);
  check(targets.rank() == logits.rank() - 1 && targets.numel() == logits.numel() / classes, "cross_entropy: targets ",
        targets.shape(), " must have the shape of logits ", logits.shape(), " without the last axis");
  check(targets.device() == logits.device(), "cross_entropy: targets are on ", targets.device(), ", logits on ",
        logits.device(), "; move one with to()");
  CrossEntropy fn;
  if (logits.device().is_cuda()) {  // to look at the targets would be to wait; the kernel takes care
    fn.targets = dense(to(targets, DType::i64));
    fn.ignore = ignore;
    return apply(std::move(fn), logits);
  }
  fn.targets = clone(to(targets, DType::i64));
  std::int64_t* const target = fn.targets.mutable_data<std::int64_t>();
  for (Index i = 0; i < fn.targets.numel(); ++i) {
    const bool counts = target[i] != ignore;
    check(!counts || (target[i] >= 0 && target[i] < classes), "cross_entropy: target ", target[i], " at position ", i,
          " is outside 0..", classes - 1);
    fn.count += counts;
    if (!counts) target[i] = -1;
  }
  return apply(std::move(fn), logits);
}

}  // namespace hilt
