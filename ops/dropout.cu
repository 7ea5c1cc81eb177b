// dropout on a GPU: a thread takes the eight elements that share a counter, at once where it can.
#include "core/cuda/pack.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

constexpr int kEach = 8;  // elements a counter serves

/// kWhole: every counter serves eight elements, which lie in whole accesses.
template <bool kWhole, class T>
__global__ void dropout_kernel(const T* x, T* y, Index first, Index n, float scale, std::uint32_t rate,
                               RandomKey drawn) {
  const RandomKey key = now(drawn);
  const Index counters = (first + n + kEach - 1) / kEach;
  for (Index c = first / kEach + first_element(); c < counters; c += element_step()) {
    const auto at = static_cast<std::uint64_t>(c);
    const Index begin = c * kEach - first;
    const auto has = [&](int k) { return begin + k >= 0 && begin + k < n; };
    Floats<kEach> values{};
    if constexpr (kWhole) values = load<kEach>(x + begin);
    else
      for (int k = 0; k < kEach; ++k)
        if (has(k)) values.x[k] = static_cast<float>(x[begin + k]);
    const auto words = philox<7>({static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(at >> 32),
                                  static_cast<std::uint32_t>(key.stream), static_cast<std::uint32_t>(key.stream >> 32)},
                                 key.seed);
    for (int k = 0; k < kEach; ++k)
      values.x[k] = drop_bits(words, static_cast<std::uint32_t>(k)) >= rate ? values[k] * scale : 0.0f;
    if constexpr (kWhole) store(y + begin, values);
    else
      for (int k = 0; k < kEach; ++k)
        if (has(k)) y[begin + k] = static_cast<T>(values[k]);
  }
}

}  // namespace

template <class T, class At> void dropout(At where, const T* x, T* y, Index first, Index n, double p, RandomKey key) {
  const std::uint32_t rate = drop_rate(p);
  const bool whole = first % kEach == 0 && n % kEach == 0 && is_aligned(x, y);
  launch("dropout", where, whole ? dropout_kernel<true, T> : dropout_kernel<false, T>, blocks_for(n / kEach + 2),
         kThreads, 0, x, y, first, n, static_cast<float>(keep_scale(rate)), rate, key);
}

HILT_GPU_KERNEL(dropout)

}  // namespace hilt::kernels
