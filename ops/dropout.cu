// dropout on a GPU: a thread takes the eight elements that share a counter.
#include "core/cuda/launch.cuh"
#include "core/cuda/random.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

constexpr int kEach = 8;  // elements a counter serves

template <class T>
__global__ void dropout_kernel(const T* x, T* y, Index first, Index n, float scale, std::uint32_t rate,
                               RandomKey drawn) {
  const RandomKey key = now(drawn);
  const Index counters = (first + n + kEach - 1) / kEach;
  for (Index c = first / kEach + first_element(); c < counters; c += element_step()) {
    const auto at = static_cast<std::uint64_t>(c);
    const auto words = philox<7>({static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(at >> 32),
                                  static_cast<std::uint32_t>(key.stream), static_cast<std::uint32_t>(key.stream >> 32)},
                                 key.seed);
    for (int k = 0; k < kEach; ++k) {
      const Index i = c * kEach + k - first;
      if (i >= 0 && i < n)
        y[i] = static_cast<T>(drop_bits(words, static_cast<std::uint32_t>(k)) >= rate ? static_cast<float>(x[i]) * scale
                                                                                      : 0.0f);
    }
  }
}

}  // namespace

template <class T, class At> void dropout(At where, const T* x, T* y, Index first, Index n, double p, RandomKey key) {
  const std::uint32_t rate = drop_rate(p);
  launch("dropout", where, dropout_kernel<T>, blocks_for(n / kEach + 2), kThreads, 0, x, y, first, n,
         static_cast<float>(keep_scale(rate)), rate, key);
}

HILT_GPU_KERNEL(dropout)

}  // namespace hilt::kernels
