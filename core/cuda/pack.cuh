#pragma once
#include "core/cuda/launch.cuh"

// For .cu files: several neighbours in one access; reductions within a warp and a block, in a fixed
// order: always the same bits; and kernels that take a matrix row by row.

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

// ---- rows ---------------------------------------------------------------------------------------
// A short row belongs to a warp, which needs no barrier, a long one to a block; elements come in
// packs where number and addresses allow.
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
