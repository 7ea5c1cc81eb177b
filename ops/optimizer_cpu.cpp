// AdamW and SGD over dense spans; 16-bit weights may have a wide master, from which they are
// rounded.
#include "ops/isa.h"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {
template <class W> [[gnu::always_inline]] inline W root(W x) {
  if constexpr (sizeof(W) == 8) return __builtin_sqrt(x);
  else return __builtin_sqrtf(x);
}
}  // namespace

template <Isa I, class T>
void adamw(CpuAt<I>, const AdamWStep& s, T* __restrict w, const T* __restrict dw, wide_t<T>* __restrict m,
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
  if (exact) {
    for (Index i = 0; i < n; ++i) {
      exact[i] = step(exact[i], static_cast<W>(dw[i]), m[i], v[i]);
      w[i] = static_cast<T>(exact[i]);
    }
  } else {
    for (Index i = 0; i < n; ++i) w[i] = static_cast<T>(step(static_cast<W>(w[i]), static_cast<W>(dw[i]), m[i], v[i]));
  }
}

template <Isa I, class T>
void sgd(CpuAt<I>, double lr, double decay, double momentum, T* __restrict w, const T* __restrict dw,
         wide_t<T>* __restrict u, Index n) {
  using W = wide_t<T>;
  const W rate = static_cast<W>(lr), pull = static_cast<W>(decay), mu = static_cast<W>(momentum);
  if (u) {
    for (Index i = 0; i < n; ++i) {
      u[i] = mu * u[i] + (static_cast<W>(dw[i]) + pull * static_cast<W>(w[i]));
      w[i] = static_cast<T>(static_cast<W>(w[i]) - rate * u[i]);
    }
  } else {
    for (Index i = 0; i < n; ++i)
      w[i] = static_cast<T>(static_cast<W>(w[i]) - rate * (static_cast<W>(dw[i]) + pull * static_cast<W>(w[i])));
  }
}

template <Isa I, class T> double sum_of_squares(CpuAt<I>, const T* x, Index n) {
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

template void adamw(CpuAt<kIsa>, const AdamWStep&, double*, const double*, double*, double*, double*, Index);
template void adamw(CpuAt<kIsa>, const AdamWStep&, float*, const float*, float*, float*, float*, Index);
template void adamw(CpuAt<kIsa>, const AdamWStep&, bf16*, const bf16*, float*, float*, float*, Index);
template void adamw(CpuAt<kIsa>, const AdamWStep&, f16*, const f16*, float*, float*, float*, Index);
template void sgd(CpuAt<kIsa>, double, double, double, double*, const double*, double*, Index);
template void sgd(CpuAt<kIsa>, double, double, double, float*, const float*, float*, Index);
template void sgd(CpuAt<kIsa>, double, double, double, bf16*, const bf16*, float*, Index);
template void sgd(CpuAt<kIsa>, double, double, double, f16*, const f16*, float*, Index);
template double sum_of_squares(CpuAt<kIsa>, const double*, Index);
template double sum_of_squares(CpuAt<kIsa>, const float*, Index);
template double sum_of_squares(CpuAt<kIsa>, const bf16*, Index);
template double sum_of_squares(CpuAt<kIsa>, const f16*, Index);

}  // namespace hilt::kernels
