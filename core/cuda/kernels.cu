// What tensors need of a GPU: filling, copying, converting, random numbers, adding up gradients. A
// thread takes element after element, neighbours its neighbours, dense ones 16 bytes at a time.
#include <cstring>
#include "core/convert.h"
#include "core/cuda/kernels.h"
#include "core/cuda/pack.cuh"

namespace hilt::kernels {
namespace {

using namespace cuda;

__global__ void write_word_kernel(std::uint32_t* to, std::uint32_t word) { *to = word; }

template <class T> __global__ void fill_kernel(T* out, Index n, T value) {
  for (Index i = first_element(); i < n; i += element_step()) out[i] = value;
}

template <class T> __global__ void count_up_kernel(T* out, Index n) {
  for (Index i = first_element(); i < n; i += element_step()) out[i] = convert<T>(i);
}

// One kernel a destination type; the source's is looked at once an element.
template <class To>
__global__ void copy_kernel(To* to, const void* from, DType from_type, const __grid_constant__ Walk<2> walk) {
  for (Index i = first_element(); i < walk.elements; i += element_step()) {
    Index at[2];
    walk.at(i, at);
    to[at[0]] = with_type(from_type, [&]<class From>() { return convert<To>(static_cast<const From*>(from)[at[1]]); });
  }
}

// f32 <-> bf16 or f16, dense: what a training step converts. 8 elements a thread.
constexpr int kConverted = 8;
template <class To, class From> __global__ void convert_kernel(To* to, const From* from, Index packs) {
  for (Index i = first_element(); i < packs; i += element_step())
    store(to + i * kConverted, load<kConverted>(from + i * kConverted));
}

__device__ double uniform(std::uint32_t bits) { return (bits >> 8) * 0x1p-24; }

template <class T>
__global__ void draw_kernel(Draw what, T* out, Index n, RandomKey drawn, Index low, std::uint64_t span) {
  const RandomKey key = now(drawn);
  constexpr double kTwoPi = 6.283185307179586;
  for (Index i = first_element(); i < n; i += element_step()) {
    const auto at = static_cast<std::uint64_t>(i);
    const auto bits = philox({static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(at >> 32),
                              static_cast<std::uint32_t>(key.stream), static_cast<std::uint32_t>(key.stream >> 32)},
                             key.seed);
    if (what == Draw::integer) {
      const std::uint64_t wide = (std::uint64_t{bits[0]} << 32) | bits[1];
      out[i] = convert<T>(low + static_cast<Index>(wide % span));
    } else if (what == Draw::uniform) {
      out[i] = static_cast<T>(static_cast<wide_t<T>>(uniform(bits[0])));
    } else {
      const double radius = sqrt(-2 * log(1 - uniform(bits[0])));  // 1 - u is never 0
      out[i] = static_cast<T>(static_cast<wide_t<T>>(radius * cos(kTwoPi * uniform(bits[1]))));
    }
  }
}

template <int N, class T> __global__ void accumulate_kernel(const T* a, const T* b, T* out, Index n) {
  for (Index i = first_element() * N; i < n; i += element_step() * N) {
    Floats<N> x = load<N>(a + i);
    const Floats<N> y = load<N>(b + i);
    for (int e = 0; e < N; ++e) x.x[e] += y[e];
    store(out + i, x);
  }
}

}  // namespace

int write_word(Cuda where, std::uint32_t* to, std::uint32_t word) {
  cudaLaunchConfig_t config{};
  config.gridDim = config.blockDim = dim3(1);
  config.stream = static_cast<cudaStream_t>(where.stream);
  return cudaLaunchKernelEx(&config, write_word_kernel, to, word);
}

void fill(Cuda where, void* out, DType type, Index n, double value) {
  with_type(type, [&]<class T>() {
    const T v = convert<T>(value);
    const T zero{};
    if (std::memcmp(&v, &zero, sizeof v) == 0) clear(where, out, static_cast<std::size_t>(n) * sizeof v);
    else launch("full", where, fill_kernel<T>, blocks_for(n), kThreads, 0, static_cast<T*>(out), n, v);
  });
}

void count_up(Cuda where, void* out, DType type, Index n) {
  with_type(type, [&]<class T>() {
    launch("arange", where, count_up_kernel<T>, blocks_for(n), kThreads, 0, static_cast<T*>(out), n);
  });
}

void copy_elements(Cuda where, void* to, DType to_type, const void* from, DType from_type, const Walk<2>& walk) {
  if (walk.elements == 0) return;
  if (walk.is_flat() && to_type == from_type)
    return within(where, to, from, static_cast<std::size_t>(walk.elements) * size_of(to_type));
  const auto whole = [&]<class To, class From>() {
    launch("copy", where, convert_kernel<To, From>, blocks_for(walk.elements / kConverted), kThreads, 0,
           static_cast<To*>(to), static_cast<const From*>(from), walk.elements / kConverted);
  };
  if (walk.is_flat() && walk.elements % kConverted == 0 && is_aligned(to) && is_aligned(from)) {
    if (to_type == DType::bf16 && from_type == DType::f32) return whole.template operator()<bf16, float>();
    if (to_type == DType::f32 && from_type == DType::bf16) return whole.template operator()<float, bf16>();
    if (to_type == DType::f16 && from_type == DType::f32) return whole.template operator()<f16, float>();
    if (to_type == DType::f32 && from_type == DType::f16) return whole.template operator()<float, f16>();
  }
  with_type(to_type, [&]<class To>() {
    launch("copy", where, copy_kernel<To>, blocks_for(walk.elements), kThreads, 0, static_cast<To*>(to), from,
           from_type, walk);
  });
}

void draw(Cuda where, Draw what, void* out, DType type, Index n, RandomKey key, Index low, std::uint64_t span) {
  with_type(type, [&]<class T>() {
    launch("random", where, draw_kernel<T>, blocks_for(n), kThreads, 0, what, static_cast<T*>(out), n, key, low, span);
  });
}

template <class T, class At> void accumulate(At where, const T* a, const T* b, T* out, Index n) {
  const auto run = [&]<int N>() {
    launch("accumulate", where, accumulate_kernel<N, T>, blocks_for(n, N), kThreads, 0, a, b, out, n);
  };
  if (n % kPack<T> == 0 && is_aligned(a) && is_aligned(b) && is_aligned(out)) run.template operator()<kPack<T>>();
  else run.template operator()<1>();
}
HILT_GPU_KERNEL(accumulate)

}  // namespace hilt::kernels
