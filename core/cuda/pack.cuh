#pragma once
#include <cstdint>
#include "core/cuda/launch.cuh"

// For .cu files: several neighbours in one access.

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

}  // namespace hilt::cuda
