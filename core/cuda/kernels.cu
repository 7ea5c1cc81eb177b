// What tensors need of a GPU: filling, copying, converting, random numbers, adding up gradients. A
// thread takes element after element, neighbours its neighbours, dense ones 16 bytes at a time.
#include "core/cuda/kernels.h"
#include "core/cuda/pack.cuh"

namespace hilt::kernels {
namespace {

using namespace cuda;

__global__ void write_word_kernel(std::uint32_t* to, std::uint32_t word) { *to = word; }

template <class T, class F> __global__ void generate_kernel(F f, T* out, Index n) {
  if constexpr (std::is_same_v<F, Draw>) f.key = now(f.key);
  for (Index i = first_element(); i < n; i += element_step()) out[i] = f.template at<T>(i);
}

// One kernel a destination type; the source's is looked at once an element.
template <class To>
__global__ void copy_kernel(To* to, const void* from, DType from_type, const __grid_constant__ Runs<2> walk) {
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

template <class F> void generate(Cuda where, const F& f, void* out, DType type, Index n) {
  with_type(type, [&]<class T>() {
    launch("generate", where, generate_kernel<T, F>, blocks_for(n), kThreads, 0, f, static_cast<T*>(out), n);
  });
}
template void generate(Cuda, const Constant&, void*, DType, Index);
template void generate(Cuda, const Count&, void*, DType, Index);
template void generate(Cuda, const Draw&, void*, DType, Index);

void copy_elements(Cuda where, void* to, DType to_type, const void* from, DType from_type, const Runs<2>& walk) {
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

template <class T, class At> void accumulate(At where, const T* a, const T* b, T* out, Index n) {
  const auto run = [&]<int N>() {
    launch("accumulate", where, accumulate_kernel<N, T>, blocks_for(n, N), kThreads, 0, a, b, out, n);
  };
  if (n % kPack<T> == 0 && is_aligned(a) && is_aligned(b) && is_aligned(out)) run.template operator()<kPack<T>>();
  else run.template operator()<1>();
}
HILT_GPU_KERNEL(accumulate)

}  // namespace hilt::kernels
