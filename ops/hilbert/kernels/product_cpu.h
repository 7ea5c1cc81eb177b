#pragma once
#include "ops/hilbert/kernels/compact.h"
#include "ops/vectors.h"

// Tiles of vectors and their products, whole or of listed pairs. For attention_cpu.cpp alone, as
// all files named _cpu.h here.

namespace hilt::kernels {
namespace {

constexpr Index kTile = Tiling::kTile;
constexpr Index kLine = 64;  // bytes of a cache line

template <class W> using Bits = decltype(Vector<W>{} < Vector<W>{});  // integers of the same size
template <class W> using Lane = std::conditional_t<sizeof(W) == 8, std::int64_t, std::int32_t>;
template <class W> constexpr auto kEach = std::make_integer_sequence<int, kLanes<W>>();
template <class W> constexpr W kMinusInfinity = -std::numeric_limits<W>::infinity();

template <class W> Index whole_vectors(Index n) { return (n + kLanes<W> - 1) / kLanes<W> * kLanes<W>; }

inline float half(Bf16x2 x, Index i) { return std::bit_cast<float>(i % 2 ? x & 0xffff0000u : x << 16); }

/// Rows of whole vectors, an odd number of cache lines apart: a column meets all sets of the L1.
template <class W> struct Tile {
  W* at = nullptr;
  Index pitch = 0;
  W* row(Index r) const { return at + r * pitch; }
  Tile from(Index r) const { return {row(r), pitch}; }
};

// ---- the tile product ---------------------------------------------------------------------------

/// The left factor: element (r, k) is at[r * row + k * step], two of them where they are packed.
template <class E> struct Left {
  const E* at;
  Index row, step;
  Sum<E> factor = 1;  // of packed products: rounding c Q would cost as much as rounding Q did
  Sum<E> operator()(Index r, Index k) const {
    if constexpr (kPacked<E>) return half(at[r * row + k / 2 * step], k);
    else return at[r * row + k * step];
  }
};
template <class E> Left<E> plain(Tile<E> x, Sum<E> factor = 1) { return {x.at, x.pitch, 1, factor}; }

// Sums in registers: enough to hide the latency of a multiply-add, and room is left for factors.
constexpr int kSums = kManyVectors ? 16 : 12;
constexpr int kColumns = kManyVectors ? 4 : 2;  // vectors

/// V columns of vectors of C (+)= A B: R rows at a time, sums in registers, the rest by halves.
template <int R, int V, class E>
[[gnu::noinline]] void block_rows(Left<E> a, Tile<E> b, Tile<Sum<E>> c, Index rows, Index n, bool add) {
  using W = Sum<E>;
  for (; rows >= R; rows -= R, a.at += R * a.row, c.at += R * c.pitch) {
    Vector<W> sum[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = add ? vector_at(c.row(r) + v * kLanes<W>) : Vector<W>{};
    add_products<R, V, E>(sum, a.at, a.row, a.step, b.at, b.pitch, n);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) vector_at(c.row(r) + v * kLanes<W>) = kPacked<E> ? a.factor * sum[r][v] : sum[r][v];
  }
  if constexpr (R > 1)
    if (rows > 0) block_rows<R / 2, V>(a, b, c, rows, n, add);
}

/// out[c][r] = x[r][c] for whole vectors of both; rows from `rows` on are zero.
template <class W> void transpose(Tile<W> x, Index rows, Index columns, Tile<W> out) {
  constexpr int N = kLanes<W>;
  for (Index r0 = 0; r0 < rows; r0 += N)
    for (Index c0 = 0; c0 < columns; c0 += N) {
      Vector<W> line[N];
      for (int i = 0; i < N; ++i) line[i] = r0 + i < rows ? vector_at(x.row(r0 + i) + c0) : Vector<W>{};
      turn<W>(line);
      for (int i = 0; i < N; ++i) vector_at(out.row(c0 + i) + r0) = line[i];
    }
}

/// A processor's tiles, where E are pairs; a test emulates them. g++ 12 has intrinsics that do not
/// say what they read. `shapes` has of tile i the bytes of a row at 16 + 2 i, and rows at 48 + i.
template <class E> struct AmxTiles {
  static void begin(const std::uint8_t (&shapes)[kLine]) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  template <int To> static void clear() { asm volatile("tilezero %%tmm%c0" ::"i"(To)); }
  template <int To> static void load(const void* from, Index words) {
    asm volatile("tileloadd (%0, %1, 4), %%tmm%c2" ::"r"(from), "r"(words), "i"(To) : "memory");
  }
  template <int From> static void store(void* to, Index words) {
    asm volatile("tilestored %%tmm%c2, (%0, %1, 4)" ::"r"(to), "r"(words), "i"(From) : "memory");
  }
  template <int To, int A, int B> static void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(A), "i"(B));
  }
  static void end() { asm volatile("tilerelease"); }
};
/// product() of n pairs by tiles (AMX) of 16 rows of 64 bytes: sums in tile 0, factors in 1 and 2,
/// those of the last pairs, up to 16, in 3 and 4.
template <class E>
[[gnu::noinline]] void tile_product(Left<E> a, Tile<E> b, Tile<float> c, Index rows, Index n, Index columns, bool add) {
  using P = AmxTiles<E>;
  constexpr Index N = kLanes<E>, kPairs = kTile / 2;
  alignas(kLine) E turned[N * kPairs];
  const Index last = (n - 1) / N * N;
  for (Index r = 0; r < rows; r += N) {
    const Index height = rows - r < N ? rows - r : N, rest = n - last;
    alignas(kLine) std::uint8_t shapes[kLine] = {1};
    for (int i = 0; i < 5; ++i) shapes[16 + 2 * i] = static_cast<std::uint8_t>(i == 3 ? 4 * rest : kLine);
    for (int i = 0; i < 5; ++i) shapes[48 + i] = static_cast<std::uint8_t>(i == 2 ? N : i == 4 ? rest : height);
    P::begin(shapes);
    Tile<E> left{const_cast<E*>(a.at) + r * a.row, a.row};
    if (a.step != 1) transpose<E>({left.at, a.step}, n, N, {turned, kPairs}), left = {turned, kPairs};
    for (Index j = 0; j < columns; j += N) {
      float* const to = c.row(r) + j;
      if (add) P::template load<0>(to, c.pitch);
      else P::template clear<0>();
      for (Index k = 0; k < last; k += N) {
        P::template load<1>(left.at + k, left.pitch), P::template load<2>(b.row(k) + j, b.pitch);
        P::template add_product<0, 1, 2>();
      }
      P::template load<3>(left.at + last, left.pitch), P::template load<4>(b.row(last) + j, b.pitch);
      P::template add_product<0, 3, 4>(), P::template store<0>(to, c.pitch);
      for (Index i = 0; a.factor != 1 && i < height; ++i) vector_at(to + i * c.pitch) *= a.factor;
    }
  }
  P::end();
}

/// C (+)= A B: `rows` x `columns`, `n` terms each, whole vectors, V at a time, the rest by halves.
template <int V = kColumns, class E>
void product(Left<E> a, Tile<E> b, Tile<Sum<E>> c, Index rows, Index n, Index columns, bool add = false) {
  constexpr Index kStep = V * kLanes<E>;
  if constexpr (kPacked<E> && V == kColumns)
    if (n > 0 && active_isa() == Isa::avx512_amx) return tile_product(a, b, c, rows, packed<E>(n), columns, add);
  for (; whole_vectors<E>(columns) >= kStep; columns -= kStep, b.at += kStep, c.at += kStep)
    block_rows<kSums / V, V>(a, b, c, rows, packed<E>(n), add);
  if constexpr (V > 1)
    if (columns > 0) product<V / 2>(a, b, c, rows, n, columns, add);
}

// ---- two at once --------------------------------------------------------------------------------

using Halves [[gnu::vector_size(kVectorBytes)]] = std::uint16_t;
constexpr int kHalves = kLanes<std::uint16_t>;

/// out[i][j] = {x[2 i][j], x[2 i + 1][j]} for rows of so many packed words, the last with 0. Row i
/// of out may be row 2 i of x: words are written from the last on.
template <class E, int... Lane>
void pair_rows(Tile<E> x, Index rows, Index words, Tile<E> out, std::integer_sequence<int, Lane...>) {
  for (Index r = 0; r < rows; r += 2)
    for (Index d = (words - 1) / kLanes<E> * kLanes<E>; d >= 0; d -= kLanes<E>) {
      Halves a, b{};
      __builtin_memcpy(&a, x.row(r) + d, sizeof a);
      if (r + 1 < rows) __builtin_memcpy(&b, x.row(r + 1) + d, sizeof b);
      const Halves low = __builtin_shufflevector(a, b, (Lane % 2 * kHalves + Lane / 2)...);
      const Halves high = __builtin_shufflevector(a, b, (Lane % 2 * kHalves + Lane / 2 + kHalves / 2)...);
      E* const to = out.row(r / 2) + 2 * d;
      __builtin_memcpy(to, &low, sizeof low), __builtin_memcpy(to + kLanes<E>, &high, sizeof high);
    }
}

/// A tile of sums where a left factor takes their place, see pack_row(); written by memcpy alone.
template <class E> Tile<E> factor(Tile<Sum<E>> x) { return {reinterpret_cast<E*>(x.at), x.pitch}; }
/// A row of n sums becomes one of a left factor, in place; where n is odd, 0 comes after it.
template <class E> void pack_row(Sum<E>* row, Index n) {
  if constexpr (kPacked<E>) {
    if (n % 2 != 0) row[n] = 0;
    for (Index j = 0; j < n; j += 2 * kLanes<E>) {
      const Vector<E> x = rounded<E>(vector_at(row + j), vector_at(row + j + kLanes<E>));
      __builtin_memcpy(row + j / 2, &x, sizeof x);
    }
  }
}

// ---- listed pairs of a tile, one by one ---------------------------------------------------------

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
    const Vector<W> all = sums_of<N, W>(sum, kEach<W>);
    __builtin_memcpy(out, &all, N * sizeof(W));
  }
  if constexpr (N > 1) dots<W, N / 2>(row, x, at, n, wide, out);
}

/// to (+)= the sum of n rows of x, of which weight(i) row(i) is one, V vectors at a time.
template <int V = 8, class W, class F, class R>
[[gnu::always_inline]] inline void weighted_rows(Index n, F&& weight, R&& row, Tile<W> x, W* to, Index wide, bool add) {
  for (; wide >= V * kLanes<W>; wide -= V * kLanes<W>, x.at += V * kLanes<W>, to += V * kLanes<W>) {
    Vector<W> sum[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[v] = add ? vector_at(to + v * kLanes<W>) : Vector<W>{};
    for (Index i = 0; i < n; ++i) {
      const W factor = weight(i), *const from = x.row(row(i));
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[v] += factor * vector_at(from + v * kLanes<W>);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) vector_at(to + v * kLanes<W>) = sum[v];
  }
  if constexpr (V > 1)
    if (wide > 0) weighted_rows<V - 1>(n, weight, row, x, to, wide, add);
}

/// s[r][i] = a[r] . b[key i of r's list]. Where the lists end, as of the next two.
template <class W>
[[gnu::noinline]] const std::uint8_t* pair_dots(Tile<W> a, Tile<W> b, const std::uint8_t* list, Index rows, Index wide,
                                                Tile<W> s) {
  for (Index r = 0; r < rows; list += 1 + *list, ++r) dots(a.row(r), b, list + 1, Index{*list}, wide, s.row(r));
  return list;
}
/// out[r] (+)= sum over r's list of s[r][i] x[key i]; of keys: out[j] (+)= sum over the queries r
/// of key j, whose i-th it is, of s[r][i] x[r]. Where the lists end.
template <bool kOfKeys = false, class W>
[[gnu::noinline]] const std::uint8_t* pair_sums(Tile<W> s, Tile<W> x, const std::uint8_t* list, Index rows, Index wide,
                                                Tile<W> out, bool add) {
  constexpr Index kBytes = kOfKeys ? 2 : 1;  // of a pair
  for (Index r = 0; r < rows; list += 1 + kBytes * *list, ++r) {
    const auto other = [&](Index i) { return Index{list[1 + kBytes * i]}; };
    const auto weight = [&](Index i) { return kOfKeys ? s.row(other(i))[list[2 + kBytes * i]] : s.row(r)[i]; };
    weighted_rows(Index{*list}, weight, other, x, out.row(r), wide, add);
  }
  return list;
}

}  // namespace
}  // namespace hilt::kernels
