// AdamW and SGD over dense spans; 16-bit weights may be rounded from a wide master.
#include "ops/isa.h"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {
template <class W> [[gnu::always_inline]] inline W root(W x) {
  if constexpr (sizeof(W) == 8) return __builtin_sqrt(x);
  else return __builtin_sqrtf(x);
}
}  // namespace

template <class T, class At>
void adamw(At, const AdamWStep& s, T* __restrict w, const T* __restrict dw, wide_t<T>* __restrict m,
           wide_t<T>* __restrict v, wide_t<T>* __restrict exact, Index n) {
  using W = wide_t<T>;
  const W b1 = static_cast<W>(s.beta1), b2 = static_cast<W>(s.beta2), a1 = static_cast<W>(1 - s.beta1),
          a2 = static_cast<W>(1 - s.beta2);
  const W shrink = static_cast<W>(s.shrink), rate = static_cast<W>(s.lr * s.correction1),
          c2 = static_cast<W>(s.correction2);
  const W epsilon = static_cast<W>(s.epsilon), scale = static_cast<W>(s.scale);
  const auto step = [=](W weight, W raw, W& mean, W& square) {
    const W g = raw * scale;
    mean = b1 * mean + a1 * g;
    square = b2 * square + a2 * g * g;
    return weight - (shrink * weight + rate * mean / (root(square * c2) + epsilon));
  };
  if (exact)
    for (Index i = 0; i < n; ++i) {
      exact[i] = step(exact[i], static_cast<W>(dw[i]), m[i], v[i]);
      w[i] = static_cast<T>(exact[i]);
    }
  else
    for (Index i = 0; i < n; ++i) w[i] = static_cast<T>(step(static_cast<W>(w[i]), static_cast<W>(dw[i]), m[i], v[i]));
}

template <class T, class At> double sum_of_squares(At, const T* x, Index n) {
  constexpr int kWidth = 4 * kLanes<double>;
  double part[kWidth] = {};
  Index i = 0;
  for (; i + kWidth <= n; i += kWidth)
    for (int l = 0; l < kWidth; ++l) {
      const auto v = static_cast<double>(static_cast<wide_t<T>>(x[i + l]));
      part[l] += v * v;
    }
  for (int l = 0; i < n; ++i, ++l) {
    const auto v = static_cast<double>(static_cast<wide_t<T>>(x[i]));
    part[l] += v * v;
  }
  double total = 0;
  for (double p : part) total += p;
  return total;
}

HILT_CPU_KERNEL(adamw)
HILT_CPU_KERNEL(sum_of_squares)

}  // namespace hilt::kernels
