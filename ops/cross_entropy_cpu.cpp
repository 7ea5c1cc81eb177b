// One row of logits: log sum e^x with the maximum taken off first, and the gradient from it.
#include "ops/isa.h"
#include "ops/kernels.h"
#include "ops/math.h"

namespace hilt::kernels {

template <class T, class At> wide_t<T> row_logsumexp(At, const T* x, Index n) {
  using W = wide_t<T>;
  constexpr int kWidth = 2 * kLanes<W>;
  W top = static_cast<W>(x[0]);
  for (Index i = 1; i < n; ++i) top = top > static_cast<W>(x[i]) ? top : static_cast<W>(x[i]);
  const W shift = top - top == 0 ? top : 0;  // a row of -inf, or one with +inf, keeps its meaning
  W part[kWidth] = {};
  Index i = 0;
  for (; i + kWidth <= n; i += kWidth)
    for (int l = 0; l < kWidth; ++l) part[l] += math::exp(static_cast<W>(x[i + l]) - shift);
  for (int l = 0; i < n; ++i, ++l) part[l] += math::exp(static_cast<W>(x[i]) - shift);
  W total = 0;
  for (W p : part) total += p;
  return shift + math::log(total);
}

template <class T, class At>
void row_cross_entropy_backward(At, const T* x, wide_t<T> lse, Index target, double scale, T* dx, Index n) {
  using W = wide_t<T>;
  const W s = static_cast<W>(scale);
  if (s == 0) {
    for (Index i = 0; i < n; ++i) dx[i] = static_cast<T>(W{0});
    return;
  }
  for (Index i = 0; i < n; ++i) dx[i] = static_cast<T>(s * math::exp(static_cast<W>(x[i]) - lse));
  if (target >= 0) dx[target] = static_cast<T>(s * (math::exp(static_cast<W>(x[target]) - lse) - W{1}));
}

HILT_CPU_KERNEL(row_logsumexp)
HILT_CPU_KERNEL(row_cross_entropy_backward)

}  // namespace hilt::kernels
