#pragma once
#include <cstdint>
#include "core/cuda/launch.cuh"

// For .cu files: several neighbours in one access; reductions within a warp and a block, in a fixed
// order: always the same bits.

namespace hilt::cuda {

template <class T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Pack { T x[N]; };
/// Elements of an access of 16 bytes, the widest there is.
template <class T> constexpr int kPack = 16 / static_cast<int>(sizeof(T));

template <class... P> bool is_aligned(const P*... p) {
  return ((reinterpret_cast<std::uintptr_t>(p) % 16 == 0) && ...);
}

/// N elements as floats.
template <int N> struct Floats {
  float x[N];
  __device__ float operator[](int i) const { return x[i]; }
};
template <int N, class T> __device__ inline Floats<N> load(const T* from) {
  const auto pack = *reinterpret_cast<const Pack<T, N>*>(from);
  Floats<N> out;
  for (int e = 0; e < N; ++e) out.x[e] = static_cast<float>(pack.x[e]);
  return out;
}
template <int N, class T> __device__ inline void store(T* to, const Floats<N>& values) {
  Pack<T, N> pack;
  for (int e = 0; e < N; ++e) pack.x[e] = static_cast<T>(values.x[e]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

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
