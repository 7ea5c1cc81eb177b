#pragma once
#include "core/cuda/launch.cuh"

// For .cu files: reductions within a warp and a block, in a fixed order: always the same bits.

namespace hilt::cuda {

struct Sum {
  template <class T> __device__ static T of(T a, T b) { return a + b; }
};
/// The larger; NaN wins.
struct Larger {
  template <class T> __device__ static T of(T a, T b) { return b > a || b != b ? b : a; }
};

/// Every lane gets the result.
template <class Op, class T> __device__ inline T warp_reduce(T x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x = Op::of(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

/// Every thread of a block of whole warps gets the result.
template <class Op, class T> __device__ inline T block_reduce(T x, T identity) {
  __shared__ T part[kWarp];
  x = warp_reduce<Op>(x);
  if (blockDim.x == kWarp) return x;
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  __syncthreads();  // the last result may still be read
  if (lane == 0) part[warp] = x;
  __syncthreads();
  return warp_reduce<Op>(lane < blockDim.x / kWarp ? part[lane] : identity);
}

/// Threads for a block that owns a row of so many columns.
inline int row_threads(Index columns) {
  return columns <= 128 ? 32 : columns <= 1024 ? 128 : columns <= 8192 ? 256 : 1024;
}

}  // namespace hilt::cuda
