// Losses and noise. Cross-entropy is softmax and logarithm in one; other losses are made of ops.
//      cross_entropy = mean over the targets that count of  L_r - x[r, target_r],      L_r = log sum_c e^x[r, c]
//      dx[r, c] = (e^(x[r, c] - L_r) - [c == target_r]) dloss / count         keeps x and L
// The loss of 16-bit logits is f32. Rows whose target is `ignore` do not count; of none it is 0.
//      mse = mean (y - t)^2
//      bce = mean t softplus(-x) + (1 - t) softplus(x)       no term overflows or cancels
//      nll = - sum of log_probs[target] / how many count
//      dropout = x m / (1 - p), m = 1 with probability 1 - p         dx = dy m / (1 - p)
// p is rounded to a multiple of 2^-16; the mask decides by 16 bits of Philox with 7 rounds, eight
// of a counter. It is a function of the key: drawn again in backward, never kept.
#include <numeric>
#include "core/parallel.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"
#include "ops/rows.h"

namespace hilt {
namespace {

struct CrossEntropy final : Function {
  Tensor targets;               // i64 [rows]
  Index count = 0, ignore = 0;  // on the CPU: how many are not `ignore`
  Tensor share;                 // on a GPU: 1 / count
  std::string_view name() const override { return "cross_entropy"; }

  Tensor forward(const Tensor& logits) {
    const Tensor x = dense(logits);
    const Index rows = targets.numel();
    const DType stat = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
    Tensor y = empty({}, stat, x.device()), lse = empty({rows}, stat, x.device()),
           losses = empty({rows}, DType::f64, x.device());
    const std::int64_t* const target = targets.data<std::int64_t>();
    double* const loss = losses.mutable_data<double>();
    visit("cross_entropy", x, [&]<class T>(auto where) {
      using W = wide_t<T>;
      kernels::along_rows(
          where, "cross_entropy",
          kernels::CrossEntropy<T>{{rows, x.dim(-1)}, x.data<T>(), target, ignore, lse.mutable_data<W>(), loss});
      if constexpr (is_cuda<decltype(where)>) {
        share = empty_like(y);
        kernels::mean_loss(where, loss, target, ignore, y.mutable_data<W>(), share.mutable_data<W>(), rows);
      } else {
        const double total = std::accumulate(loss, loss + rows, 0.0);
        *y.mutable_data<W>() = static_cast<W>(count > 0 ? total / static_cast<double>(count) : 0);
      }
    });
    if (wants(0)) save(x), save(lse);
    return y;
  }

  std::vector<Tensor> backward(const Tensor& dy) override {
    const Tensor &x = saved(0), &lse = saved(1);
    Tensor dx = empty_like(x);
    visit("cross_entropy", x, [&]<class T>(auto where) {
      using W = wide_t<T>;
      const double scale = count > 0 ? dy.item() / static_cast<double>(count) : 0;  // a GPU counts by itself
      const W each = static_cast<W>(scale), whole = 1;
      const auto* const target = targets.data<std::int64_t>();
      kernels::CrossEntropyBackward<T> op{
          {targets.numel(), x.dim(-1)}, x.data<T>(), target, ignore, lse.data<W>(), &each, &whole,
          dx.mutable_data<T>()};
      if constexpr (is_cuda<decltype(where)>) op.dy = dy.data<W>(), op.share = share.data<W>();
      kernels::along_rows(where, "cross_entropy", op);
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
  fn.targets = dense(to(targets, DType::i64));
  fn.ignore = ignore;
  const std::int64_t* const target = fn.targets.data<std::int64_t>();
  // On a GPU to look at the targets would be to wait; the kernel takes care.
  for (Index i = 0; i < fn.targets.numel() && logits.device().is_cpu(); ++i) {
    if (target[i] == ignore) continue;
    check(target[i] >= 0 && target[i] < classes, "cross_entropy: target ", target[i], " at position ", i,
          " is outside 0..", classes - 1);
    ++fn.count;
  }
  return apply(std::move(fn), logits);
}

static void check_targets(const char* op, const char* name, const Tensor& y, const Tensor& target) {
  check_alike(op, name, y, "the target", target);
  check_floats(op, y);
  check(y.shape() == target.shape(), op, ": ", name, " is ", y.shape(), ", the target ", target.shape());
}

Tensor mse(const Tensor& y, const Tensor& target) {
  check_targets("mse", "y", y, target);
  return mean(square(widened(y) - widened(target)));
}

Tensor bce(const Tensor& logits, const Tensor& targets) {
  check_targets("bce", "logits", logits, targets);
  const Tensor x = widened(logits), t = widened(targets);
  return mean(t * softplus(-x) + (1 - t) * softplus(x));
}

Tensor nll(const Tensor& log_probs, const Tensor& targets, Index ignore) {
  check_floats("nll", log_probs);
  check(log_probs.rank() >= 1 && targets.shape() == without_last(log_probs.shape()), "nll: log_probs are ",
        log_probs.shape(), ", the targets ", targets.shape());
  const Tensor counts = targets != static_cast<double>(ignore);
  const Tensor at = unsqueeze(where(counts, targets, 0.0), -1);
  const Tensor picked = where(counts, squeeze(widened(take_along(log_probs, -1, at)), -1), 0.0);
  const Tensor count = to(sum(counts), picked.dtype());
  return -sum(picked) / maximum(count, 1.0);
}

// ---- noise --------------------------------------------------------------------------------------
/// x under its mask; `rows` of the whole, where x is a part of it.
static Tensor masked(const Tensor& in, double p, RandomKey key, const std::vector<Index>& rows) {
  const Tensor x = dense(in);
  Tensor y = empty_like(x);
  visit("dropout", x, [&]<class T>(auto where) {
    const T* const from = x.data<T>();
    T* const to = y.mutable_data<T>();
    // Elements [0, n) of x from `at` on are elements [first, first + n) of the whole.
    const auto run = [&](Index at, Index first, Index n) {
      if constexpr (is_cuda<decltype(where)>) kernels::dropout(where, from + at, to + at, first, n, p, key);
      else
        parallel_for(n, kWorthATask, [&](Index begin, Index end) {
          kernels::dropout(where, from + at + begin, to + at + begin, first + begin, end - begin, p, key);
        });
    };
    if (rows.empty()) return run(0, 0, x.numel());
    const auto count = std::ssize(rows), columns = x.numel() / count;
    for (Index begin = 0, end = 1; begin < count; begin = end, ++end) {  // runs of neighbours
      while (end < count && rows[static_cast<std::size_t>(end)] == rows[static_cast<std::size_t>(end) - 1] + 1) ++end;
      run(begin * columns, rows[static_cast<std::size_t>(begin)] * columns, (end - begin) * columns);
    }
  });
  return y;
}

Tensor dropout(const Tensor& x, double p, RandomKey key, std::vector<Index> rows) {
  check(p >= 0 && p < 1, "dropout: p ", p, " must be in [0, 1)");
  check_floats("dropout", x);
  check(rows.empty() || x.numel() % std::ssize(rows) == 0, "dropout: ", rows.size(), " rows do not divide ", x.shape());
  const auto mask = [=, rows = std::move(rows)](const Tensor& of) { return masked(of, p, key, rows); };
  return apply_linear("dropout", x, mask, mask);
}

}  // namespace hilt
