#pragma once

// For .cu files: powers and logarithms of two as the hardware has them.

namespace hilt::cuda {

/// 2^x and log2 x, to two units in the last place; subnormals count as zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hilt::cuda
