#pragma once
#include "ops/hilbert/kernels/compact.h"
#include "ops/hilbert/kernels/product_cpu.h"

// Products of listed pairs of a tile alone, one by one.

namespace hilt::kernels {
namespace {

/// Adds the halves of each block of `Width` sums in two vectors: those of a, then those of b.
template <int Width, class W, int... Lane>
[[gnu::always_inline]] inline Vector<W> halve(Vector<W> a, Vector<W> b, std::integer_sequence<int, Lane...>) {
  constexpr auto from = [](int lane) {
    const int in = lane % Width, half = Width / 2;
    return lane - in + in % half + in / half * kLanes<W>;
  };
  return __builtin_shufflevector(a, b, from(Lane)...) + __builtin_shufflevector(a, b, (from(Lane) + Width / 2)...);
}
/// Element i of the result, block i of kLanes / N: the sum of x[i].
template <int N, class W, int... Lane>
[[gnu::always_inline]] inline Vector<W> sums_of(Vector<W>* x, std::integer_sequence<int, Lane...> lanes) {
  constexpr int L = kLanes<W>;
#pragma GCC unroll 8
  for (int i = 0; i < N / 2; ++i) x[i] = halve<L, W>(x[i], x[i + N / 2], lanes);
  if constexpr (N == 4) x[0] = halve<L / 2, W>(x[0], x[1], lanes);
  if constexpr (L / N >= 2) x[0] += __builtin_shufflevector(x[0], x[0], (Lane ^ 1)...);
  if constexpr (L / N >= 4) x[0] += __builtin_shufflevector(x[0], x[0], (Lane ^ 2)...);
  if constexpr (L / N >= 8) x[0] += __builtin_shufflevector(x[0], x[0], (Lane ^ 4)...);
  if constexpr (L / N >= 16) x[0] += __builtin_shufflevector(x[0], x[0], (Lane ^ 8)...);
  return __builtin_shufflevector(x[0], x[0], (Lane % N * (L / N))...);
}

/// out[j] = row . x[at[j]] for n of them, N at a time; `wide`: whole vectors.
template <class W, int N = (kLanes<W> < 4 ? 2 : 4)>
[[gnu::always_inline]] inline void dots(const W* row, Tile<W> x, const std::uint8_t* at, Index n, Index wide, W* out) {
  for (; n >= N; n -= N, at += N, out += N) {
    const W* to[N];
    Vector<W> sum[N] = {};
    for (int i = 0; i < N; ++i) to[i] = x.row(at[i]);
    for (Index d = 0; d < wide; d += kLanes<W>) {
      const Vector<W> left = vector_at(row + d);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sum[i] += left * vector_at(to[i] + d);
    }
    const Vector<W> all = sums_of<N, W>(sum, std::make_integer_sequence<int, kLanes<W>>());
    __builtin_memcpy(out, &all, N * sizeof(W));
  }
  if constexpr (N > 1) dots<W, N / 2>(row, x, at, n, wide, out);
}

/// out (+)= the sum of n rows of x, of which term(i) says {weight, row}, V vectors at a time.
template <int V = 8, class W, class Term>
[[gnu::always_inline]] inline void weighted_rows(Index n, Term&& term, Tile<W> x, W* out, Index wide, bool add) {
  for (; wide >= V * kLanes<W>; wide -= V * kLanes<W>, x.at += V * kLanes<W>, out += V * kLanes<W>) {
    Vector<W> sum[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[v] = add ? vector_at(out + v * kLanes<W>) : Vector<W>{};
    for (Index i = 0; i < n; ++i) {
      const auto [weight, r] = term(i);
      const W* const row = x.row(r);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[v] += weight * vector_at(row + v * kLanes<W>);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) vector_at(out + v * kLanes<W>) = sum[v];
  }
  if constexpr (V > 1)
    if (wide > 0) weighted_rows<V / 2>(n, term, x, out, wide, add);
}
template <class W> struct Weighted {
  W weight;
  Index row;
};

/// The lists of a tile of keys, Compact::pair_list, or null where whole products are taken.
inline const std::uint8_t* pairs_of(const Compact& t, std::int32_t tile) {
  return t.pair_begin.empty() || t.pair_begin.data()[tile] < 0 ? nullptr
                                                               : t.pair_list.data() + t.pair_begin.data()[tile];
}
/// s[r][i] = a[r] . b[key i of r's list]. Where the lists end, as of the next two.
template <class W>
[[gnu::noinline]] const std::uint8_t* pair_dots(Tile<W> a, Tile<W> b, const std::uint8_t* list, Index rows, Index wide,
                                                Tile<W> s) {
  for (Index r = 0; r < rows; list += 1 + *list, ++r) dots(a.row(r), b, list + 1, Index{*list}, wide, s.row(r));
  return list;
}
/// out[r] (+)= sum over r's list of s[r][i] x[key i]
template <class W>
[[gnu::noinline]] const std::uint8_t* pair_sums(Tile<W> s, Tile<W> x, const std::uint8_t* list, Index rows, Index wide,
                                                Tile<W> out, bool add) {
  for (Index r = 0; r < rows; list += 1 + *list, ++r)
    weighted_rows(
        Index{*list},
        [&](Index i) {
          return Weighted<W>{s.row(r)[i], list[1 + i]};
        },
        x, out.row(r), wide, add);
  return list;
}
/// out[j] = sum over the queries r of key j, whose i-th it is, of s[r][i] x[r]
template <class W>
[[gnu::noinline]] void pair_sums_transposed(Tile<W> s, Tile<W> x, const std::uint8_t* list, Index keys, Index wide,
                                            Tile<W> out) {
  for (Index j = 0; j < keys; list += 1 + 2 * *list, ++j)
    weighted_rows(
        Index{*list},
        [&](Index i) {
          return Weighted<W>{s.row(list[1 + 2 * i])[list[2 + 2 * i]], list[1 + 2 * i]};
        },
        x, out.row(j), wide, false);
}

}  // namespace
}  // namespace hilt::kernels
