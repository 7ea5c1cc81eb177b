#pragma once
#include "core/cuda/pack.cuh"

// For .cu files: kernels that take a matrix row by row. A short row belongs to a warp, which needs
// no barrier, a long one to a block; elements come in packs where number and addresses allow.

namespace hilt::cuda {

constexpr int kRowWarps = 4;  // of a block whose rows belong to warps

template <int kElements, bool kByWarp> struct Row {
  static constexpr int N = kElements;
  static constexpr bool kRereads = false;  // what was written stays cheaper to form again
  Index index, cols;
  Index first, step;

  __device__ explicit Row(Index columns) : cols(columns) {
    if constexpr (kByWarp)
      index = static_cast<Index>(blockIdx.x) * kRowWarps + threadIdx.x / kWarp, first = threadIdx.x % kWarp * N,
      step = kWarp * N;
    else index = blockIdx.x, first = threadIdx.x * N, step = blockDim.x * N;
  }
  template <class T> __device__ T* of(T* x) const { return x + index * cols; }
  /// a b, rounded by itself: fused, a term would not cancel against the mean of its likes.
  __device__ static float product(float a, float b) { return __fmul_rn(a, b); }
  /// f(i) for each of this thread's packs, which begins at column i.
  template <class F> __device__ void each(F f) const {
    for (Index i = first; i < cols; i += step) f(i);
  }
  template <class Op> __device__ float reduce(float x, float identity) const {
    if constexpr (kByWarp) return warp_reduce<Op>(x);
    else return block_reduce<Op>(x, identity);
  }
  /// The sum over the row of f(x[i], ..).
  template <class F, class... T> __device__ float sum(F f, const T*... x) const {
    float total = 0;
    each([&](Index i) {
      const auto add = [&](const auto&... packs) {
        for (int e = 0; e < N; ++e) total += f(packs[e]...);
      };
      add(load<N>(x + i)...);
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
  /// to[i] = f(x[i], ..), each by the thread that owns it.
  template <class Y, class F, class... T> __device__ void map(Y* to, F f, const T*... x) const {
    each([&](Index i) {
      const auto mapped = [&](const auto&... packs) {
        Floats<N> y;
        for (int e = 0; e < N; ++e) y.x[e] = f(packs[e]...);
        return y;
      };
      store(to + i, mapped(load<N>(x + i)...));
    });
  }
  __device__ bool owns(Index i) const { return i / N * N % step == first; }
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
