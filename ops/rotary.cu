// rotary on a GPU: a warp turns the heads of a token, a thread N neighbouring pairs at a time.
#include <limits>
#include "core/cuda/pack.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

template <int N, class T> __global__ void rotate_kernel(Rotation by, const float* table, const T* x, T* y) {
  const int half = static_cast<int>(by.dim / 2), packs = static_cast<int>(by.heads) * half / N;
  const float turn = static_cast<float>(by.sign);
  for (Index token = first_element() / kWarp; token < by.outer * by.length; token += element_step() / kWarp) {
    const float *const cosines = table + token % by.length * half, *const sines = cosines + by.length * half;
    const Index row = token * by.heads * by.dim;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x % kWarp); i < packs; i += kWarp) {
      const int head = i * N / half, d = i * N % half;
      const Index first = row + head * by.dim + d, second = first + half;
      Floats<N> a = load<N>(x + first), b = load<N>(x + second);
      if (head < by.turning) {
        const Floats<N> c = load<N>(cosines + d), s = load<N>(sines + d), from = a;
        for (int e = 0; e < N; ++e) {
          a.x[e] = from[e] * c[e] - b[e] * (s[e] * turn);
          b.x[e] = from[e] * (s[e] * turn) + b[e] * c[e];
        }
      }
      store(y + first, a), store(y + second, b);
    }
  }
}

}  // namespace

template <class T, class At> void rotate(At where, const Rotation& by, const wide_t<T>* table, const T* x, T* y) {
  check(by.heads * by.dim <= std::numeric_limits<int>::max(), "rotary: ", by.heads, " heads of ", by.dim,
        " are too much for one token");
  const bool whole = by.dim / 2 % kPack<T> == 0 && is_aligned(x, y, table);
  launch("rotary", where, whole ? rotate_kernel<kPack<T>, T> : rotate_kernel<1, T>,
         blocks_for(by.outer * by.length * kWarp), kThreads, 0, by, table, x, y);
}

HILT_GPU_KERNEL(rotate)

}  // namespace hilt::kernels
