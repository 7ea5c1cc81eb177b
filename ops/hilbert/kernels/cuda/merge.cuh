#pragma once
#include "core/cuda/launch.cuh"
#include "ops/math.h"

// Private: how the kernels' parts of one softmax come together, natural outside; and the powers
// that they are made of inside.

namespace hilt::kernels {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// In base 2, as the hardware has them.
struct FastPowers {
  static constexpr float kFromE = kLog2e, kToE = kLn2;  // bring exponents there, and back
  static __device__ __forceinline__ float exp(float x) { return cuda::exp2_fast(x); }
  static __device__ __forceinline__ float log(float x) { return cuda::log2_fast(x); }
};
/// In base e, to the last places of f32.
struct TruePowers {
  static constexpr float kFromE = 1, kToE = 1;
  static __device__ __forceinline__ float exp(float x) { return math::exp(x); }
  static __device__ __forceinline__ float log(float x) { return math::log(x); }
};

/// The log-sum-exp of a part and of what was there before; keep and share: what O of either is
/// multiplied with.
template <class Powers = FastPowers>
__device__ __forceinline__ float merged(float there, float here, float& keep, float& share) {
  const float top = fmaxf(there, here), known = top == -INFINITY ? 0.0f : top;
  const float a = Powers::exp((there - known) * Powers::kFromE), b = Powers::exp((here - known) * Powers::kFromE),
              both = a + b;
  keep = both == 0 ? 0.0f : a / both;
  share *= both == 0 ? 0.0f : b / both;
  return known + Powers::log(both) * Powers::kToE;
}

}  // namespace hilt::kernels
