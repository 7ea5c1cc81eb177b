#pragma once

#include "ops/isa.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Vectors and their multiply-add. For files named *_cpu.cpp and *_cpu.h alone.

namespace hilt::kernels {
namespace {

template <class T> struct VectorOf { using type [[gnu::vector_size(kVectorBytes)]] = T; };
template <class T> using Vector = typename VectorOf<T>::type;

/// Two bf16 of a factor that are multiplied and added up at once, the first in the low half: where
/// the processor does so, factors consist of them (E below), else of the W that sums are of.
using Bf16x2 = std::uint32_t;
template <class E> constexpr bool kPacked = std::is_same_v<E, Bf16x2>;
template <class E> using Sum = std::conditional_t<kPacked<E>, float, E>;
template <class E> Index packed(Index n) { return kPacked<E> ? (n + 1) / 2 : n; }

template <class E>
[[gnu::always_inline]] inline void multiply_add(Vector<Sum<E>>& sum, E left, const Vector<E>& right) {
  sum += left * right;
}
#ifdef __AVX512BF16__  // asm would keep g++ from holding all sums in registers
template <>
[[gnu::always_inline]] inline void multiply_add<Bf16x2>(Vector<float>& sum, Bf16x2 left, const Vector<Bf16x2>& right) {
  sum = (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(Vector<Bf16x2>{} + left), (__m512bh)right);
}
#endif

}  // namespace
}  // namespace hilt::kernels
