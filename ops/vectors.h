#pragma once

#include "ops/isa.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Vectors and their multiply-add, as all products of matrices are made of. For files named
// *_cpu.cpp and *_cpu.h alone.

namespace hilt::kernels {
namespace {

template <class T> struct VectorOf {
  using type [[gnu::vector_size(kVectorBytes)]] = T;
  using unaligned [[gnu::vector_size(kVectorBytes), gnu::aligned(alignof(T))]] = T;
};
template <class T> using Vector = typename VectorOf<T>::type;
template <class T> using Unaligned = typename VectorOf<T>::unaligned;

/// The vector at an address that is a multiple of its size, and at any.
template <class T> Vector<T>& vector_at(T* x) { return *reinterpret_cast<Vector<T>*>(x); }
template <class T> const Vector<T>& vector_at(const T* x) { return *reinterpret_cast<const Vector<T>*>(x); }
template <class T> Unaligned<T>& unaligned_at(T* x) { return *reinterpret_cast<Unaligned<T>*>(x); }
template <class T> const Unaligned<T>& unaligned_at(const T* x) { return *reinterpret_cast<const Unaligned<T>*>(x); }

/// Two bf16 of a factor that are multiplied and added up at once, the first in the low half: where
/// the processor does so, factors consist of them (E below), else of the W that sums are of.
using Bf16x2 = std::uint32_t;
template <class E> constexpr bool kPacked = std::is_same_v<E, Bf16x2>;
template <class E> using Sum = std::conditional_t<kPacked<E>, float, E>;
template <class E> Index packed(Index n) { return kPacked<E> ? (n + 1) / 2 : n; }

template <class E>
[[gnu::always_inline]] inline void multiply_add(Vector<Sum<E>>& sum, E left, const Vector<E>& right) {
#if defined __clang__ && (defined __FMA__ || defined __ARM_NEON)  // joins them in straight code alone
  sum = __builtin_elementwise_fma(left - Vector<E>{}, right, sum);
#else
  sum += left * right;
#endif
}
/// Sums as elements of a factor, where those are packed: to nearest even.
template <class E> Vector<E> rounded(const Vector<float>& low, const Vector<float>& high);
#ifdef __AVX512BF16__  // asm would keep g++ from holding all sums in registers
template <>
[[gnu::always_inline]] inline void multiply_add<Bf16x2>(Vector<float>& sum, Bf16x2 left, const Vector<Bf16x2>& right) {
  sum = (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(Vector<Bf16x2>{} + left), (__m512bh)right);
}
template <> inline Vector<Bf16x2> rounded<Bf16x2>(const Vector<float>& low, const Vector<float>& high) {
  return (Vector<Bf16x2>)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
#endif

/// The product of all products: sum[r][v] += left[r * row] right[v], V vectors, for n terms, each
/// `step` and `pitch` behind the one before. The sums stay in registers.
template <int R, int V, class E>
[[gnu::always_inline]] inline void add_products(Vector<Sum<E>> (&sum)[R][V], const E* left, Index row, Index step,
                                                const E* right, Index pitch, Index n) {
  for (Index k = 0; k < n; ++k, left += step, right += pitch) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) multiply_add<E>(sum[r][v], left[r * row], vector_at(right + v * kLanes<E>));
  }
}

/// Element j of line i becomes element i of line j: each step shuffles lines i, i + N/2 as a deck.
template <class E, int... Lane>
[[gnu::always_inline]] inline void turn(Vector<E> (&line)[kLanes<E>], std::integer_sequence<int, Lane...>) {
  constexpr int N = kLanes<E>;
  Vector<E> next[N];
  for (int step = 1; step < N; step *= 2) {
    for (int i = 0; i < N / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2)...);
      next[2 * i + 1] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2 + N / 2)...);
    }
    for (int i = 0; i < N; ++i) line[i] = next[i];
  }
}
template <class E> [[gnu::always_inline]] inline void turn(Vector<E> (&line)[kLanes<E>]) {
  turn<E>(line, std::make_integer_sequence<int, kLanes<E>>());
}

}  // namespace
}  // namespace hilt::kernels
