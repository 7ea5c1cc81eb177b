// Losses made of other ops.
//      mse = mean (y - t)^2
//      bce = mean t softplus(-x) + (1 - t) softplus(x)       no term overflows or cancels
//      nll = - sum of log_probs[target] / how many count
#include "ops/helpers.h"

namespace hilt {

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

}  // namespace hilt
