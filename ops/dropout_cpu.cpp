// Dropout from counters: element i of a stream is the same on any thread and any instruction set.
#include "ops/isa.h"
#include "ops/kernels.h"

namespace hilt::kernels {

template <class T, class At> void dropout(At, const T* x, T* y, Index first, Index n, double p, RandomKey key) {
  using W = wide_t<T>;
  constexpr Index kBlock = 64;  // counters at a time: sixteen vectors' worth of independent rounds
  const std::uint32_t rate = drop_rate(p);
  const W scale = static_cast<W>(keep_scale(rate));
  for (Index i = 0; i < n;) {
    std::uint32_t words[kBlock * 4];
    const Index counter = (first + i) / 8;
    for (Index c = 0; c < kBlock; ++c) {
      const auto at = static_cast<std::uint64_t>(counter + c);
      const auto bits =
          philox<7>({static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(at >> 32),
                     static_cast<std::uint32_t>(key.stream), static_cast<std::uint32_t>(key.stream >> 32)},
                    key.seed);
      for (Index k = 0; k < 4; ++k) words[c * 4 + k] = bits[static_cast<std::size_t>(k)];
    }
    const Index skip = (first + i) % 8, count = n - i < kBlock * 8 - skip ? n - i : kBlock * 8 - skip;
    for (Index j = 0; j < count; ++j) {
      const std::uint32_t bits = words[(skip + j) / 2] >> (skip + j) % 2 * 16 & 0xffff;
      y[i + j] = static_cast<T>(bits >= rate ? static_cast<W>(x[i + j]) * scale : W{0});
    }
    i += count;
  }
}

HILT_CPU_KERNEL(dropout)

}  // namespace hilt::kernels
