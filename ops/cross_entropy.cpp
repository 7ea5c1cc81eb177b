// The loss of a classifier, softmax and logarithm in one.
//
//      loss = mean over the targets that count of  L_r - x[r, target_r],      L_r = log sum_c e^x[r, c]
//      dx[r, c] = (e^(x[r, c] - L_r) - [c == target_r]) dloss / count         keeps x and L
//
// Rows whose target is `ignore` count for nothing; if none counts the loss is 0 and so are its gradients.
#include "core/parallel.h"
#include "core/tape.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

constexpr Index kPiece = 1 << 14;  // elements worth a task

struct CrossEntropy final : Function {
  Tensor targets;  // i64 [rows]; -1 where ignored
  Index count = 0;
  std::string_view name() const override { return "cross_entropy"; }

  Tensor forward(const Tensor& logits) {
    const Tensor x = dense(logits);
    const Index rows = targets.numel(), classes = x.dim(-1);
    const DType stat = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
    Tensor lse = empty({rows}, stat, x.device());
    std::vector<double> loss(static_cast<std::size_t>(rows));
    const std::int64_t* const target = targets.data<std::int64_t>();
    visit("cross_entropy", x, [&]<class T>(auto where) {
      const T* const px = x.data<T>();
      auto* const pl = lse.mutable_data<wide_t<T>>();
      parallel_for(rows, kPiece / classes + 1, [&](Index begin, Index end) {
        for (Index r = begin; r < end; ++r) {
          pl[r] = kernels::row_logsumexp(where, px + r * classes, classes);
          if (target[r] >= 0)
            loss[static_cast<std::size_t>(r)] = static_cast<double>(pl[r]) - static_cast<double>(static_cast<wide_t<T>>(px[r * classes + target[r]]));
        }
      });
    });
    if (wants(0)) save(x), save(lse);
    double total = 0;
    for (double l : loss) total += l;
    return full({}, count > 0 ? total / static_cast<double>(count) : 0, logits.dtype(), logits.device());
  }

  std::vector<Tensor> backward(const Tensor& dy) override {
    const Tensor &x = saved(0), &lse = saved(1);
    const Index rows = targets.numel(), classes = x.dim(-1);
    const double scale = count > 0 ? dy.item() / static_cast<double>(count) : 0;
    Tensor dx = empty_like(x);
    const std::int64_t* const target = targets.data<std::int64_t>();
    visit("cross_entropy", x, [&]<class T>(auto where) {
      const T* const px = x.data<T>();
      const auto* const pl = lse.data<wide_t<T>>();
      T* const out = dx.mutable_data<T>();
      parallel_for(rows, kPiece / classes + 1, [&](Index begin, Index end) {
        for (Index r = begin; r < end; ++r)
          kernels::row_cross_entropy_backward(where, px + r * classes, pl[r], target[r], target[r] >= 0 ? scale : 0, out + r * classes, classes);
      });
    });
    return {dx};
  }
};

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, Index ignore) {
  check(bool(logits) && logits.rank() >= 1 && logits.dim(-1) >= 1, "cross_entropy: logits must be [.., classes], got ", logits.shape());
  check(bool(targets) && (targets.dtype() == DType::i64 || targets.dtype() == DType::i32), "cross_entropy: targets must be i32 or i64, got ",
        targets.dtype());
  const Index classes = logits.dim(-1);
  check(targets.rank() == logits.rank() - 1 && targets.numel() == logits.numel() / classes, "cross_entropy: targets ", targets.shape(),
        " must have the shape of logits ", logits.shape(), " without the last axis");
  CrossEntropy fn;
  fn.targets = clone(to(targets, DType::i64));
  std::int64_t* const target = fn.targets.mutable_data<std::int64_t>();
  for (Index i = 0; i < fn.targets.numel(); ++i) {
    if (target[i] == ignore) {
      target[i] = -1;
      continue;
    }
    check(target[i] >= 0 && target[i] < classes, "cross_entropy: target ", target[i], " at position ", i, " is outside 0..", classes - 1);
    ++fn.count;
  }
  return apply(std::move(fn), logits);
}

}  // namespace hilt
