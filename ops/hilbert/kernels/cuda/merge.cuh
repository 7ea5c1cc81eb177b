#pragma once
#include "core/cuda/powers.cuh"

// Private: how the kernels' parts of one softmax come together. In base 2 inside, natural outside.

namespace hilt::kernels {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// The log-sum-exp of a part and of what was there before; keep and share: what O of either is
/// multiplied with.
__device__ __forceinline__ float merged(float there, float here, float& keep, float& share) {
  const float top = fmaxf(there, here), known = top == -INFINITY ? 0.0f : top;
  const float a = cuda::exp2_fast((there - known) * kLog2e), b = cuda::exp2_fast((here - known) * kLog2e), both = a + b;
  keep = both == 0 ? 0.0f : a / both;
  share *= both == 0 ? 0.0f : b / both;
  return known + cuda::log2_fast(both) * kLn2;
}

}  // namespace hilt::kernels
