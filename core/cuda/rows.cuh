#pragma once
#include "core/cuda/pack.cuh"

// For .cu files: kernels that take a matrix row by row. A short row belongs to a warp, which needs
// no barrier, a long one to a block; elements come in packs where number and addresses allow.

namespace hilt::cuda {

constexpr int kRowWarps = 4;  // of a block whose rows belong to warps

template <int kElements, bool kByWarp> struct Row {
  static constexpr int N = kElements;
  Index index, cols;
  Index first, step;

  __device__ explicit Row(Index columns) : cols(columns) {
    if constexpr (kByWarp)
      index = static_cast<Index>(blockIdx.x) * kRowWarps + threadIdx.x / kWarp, first = threadIdx.x % kWarp * N,
      step = kWarp * N;
    else index = blockIdx.x, first = threadIdx.x * N, step = blockDim.x * N;
  }
  /// f(i) for each of this thread's packs, which begins at column i.
  template <class F> __device__ void each(F f) const {
    for (Index i = first; i < cols; i += step) f(i);
  }
  template <class Op> __device__ float reduce(float x, float identity) const {
    if constexpr (kByWarp) return warp_reduce<Op>(x);
    else return block_reduce<Op>(x, identity);
  }
  /// The sum over the row of f(i, e), element e of the pack at i, which `prepare(i)` loads.
  template <class Prepare, class F> __device__ float sum(Prepare prepare, F f) const {
    float total = 0;
    each([&](Index i) {
      const auto pack = prepare(i);
      for (int e = 0; e < N; ++e) total += f(pack, e);
    });
    return reduce<Sum>(total, 0.0f);
  }
  template <class T> __device__ float max(const T* x) const {
    float top = -INFINITY;
    each([&](Index i) {
      const Floats<N> v = load<N>(x + i);
      for (int e = 0; e < N; ++e) top = Larger::of(top, v[e]);
    });
    return reduce<Larger>(top, -INFINITY);
  }
  __device__ bool leads() const { return first == 0; }
};

/// f.operator()<Row>(grid, threads) with the kind of row that fits; aligned: operands, or null.
template <class T, class F> void with_rows(Index rows, Index cols, bool aligned, F f) {
  const auto pick = [&]<int N>() {
    if (cols <= 8 * kWarp * N)
      f.template operator()<Row<N, true>>(dim3(static_cast<unsigned>((rows + kRowWarps - 1) / kRowWarps)),
                                          kRowWarps * kWarp);
    else f.template operator()<Row<N, false>>(dim3(static_cast<unsigned>(rows)), row_threads(cols / N));
  };
  if (cols % kPack<T> == 0 && aligned) pick.template operator()<kPack<T>>();
  else pick.template operator()<1>();
}

}  // namespace hilt::cuda
