#pragma once
#include <cmath>
#include <numbers>
#include "core/dispatch.h"
#include "core/random.h"
#include "core/strided.h"

// Private to core: the few kernels that tensors themselves need on a GPU.

namespace hilt::kernels {

/// Writes one word; returns the runtime's status. Shows that a GPU can be used at all.
int write_word(Cuda, std::uint32_t* to, std::uint32_t word);

/// Element by element from the second operand of the walk to the first, converting.
void copy_elements(Cuda, void* to, DType to_type, const void* from, DType from_type, const Runs<2>& walk);

/// The numbers of core/random.h: uniform floats, normal floats, integers low + bits mod span.
struct Draw {
  enum class Law { uniform, normal, integer } law;
  RandomKey key;
  Index low = 0;
  std::uint64_t span = 1;

  template <class T> constexpr T at(Index i) const {  // element i, the same on every device
    const auto low_word = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const auto n = static_cast<std::uint64_t>(i);
    const auto bits =
        philox({low_word(n), low_word(n >> 32), low_word(key.stream), low_word(key.stream >> 32)}, key.seed);
    const auto share = [](std::uint32_t word) { return (word >> 8) * 0x1p-24; };
    const auto rounded = [](auto x) { return static_cast<T>(static_cast<wide_t<T>>(x)); };
    if (law == Law::integer) {
      const std::uint64_t wide = (std::uint64_t{bits[0]} << 32) | bits[1];
      return rounded(low + static_cast<Index>(wide % span));  // bias below 2^-32 for spans below 2^32
    }
    if (law == Law::uniform) return rounded(share(bits[0]));
    const double radius = std::sqrt(-2 * std::log(1 - share(bits[0])));  // 1 - u is never 0
    return rounded(radius * std::cos(2 * std::numbers::pi * share(bits[1])));
  }
};
struct Constant {
  double value;
  template <class T> constexpr T at(Index) const { return convert<T>(value); }
};
struct Count {
  template <class T> constexpr T at(Index i) const { return convert<T>(i); }
};

/// Element i of n, dense, is f.at<T>(i).
template <class F> void generate(Cuda, const F& f, void* out, DType type, Index n);
template <class F> void generate(const char* op, Tensor& t, const F& f) {  // all of a dense tensor, on any device
  if constexpr (kHasCuda)
    if (t.device().is_cuda()) return generate(cuda_of(t.device()), f, t.mutable_raw(), t.dtype(), t.numel());
  visit_any(op, t, [&]<class T>(Cpu) {
    T* const out = t.mutable_data<T>();
    parallel_each(t.numel(), 1 << 12, [out, f](Index i) { out[i] = f.template at<T>(i); });
  });
}

/// out = a + b, rounded once; out may be a.
template <class T, class At> void accumulate(At, const T* a, const T* b, T* out, Index n);

}  // namespace hilt::kernels
