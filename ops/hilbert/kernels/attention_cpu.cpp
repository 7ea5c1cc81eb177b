// Attention on tiles: at most 128 queries meet up to 128 keys, as compact() lists them; rows are
// gathered from where the tokens lie, padded and widened to f32 (f64).
//
//   forward    a task is some query tiles of one head; key tiles in ascending order, which every query tile shares:
//                  S = (c Q) K^T     m' = max(m, rowmax S)     P = e^(S - m')     l = e^(m - m') l + rowsum P
//                  O = e^(m - m') O + (M P) V                  and at the end     O / l     L = m + log l
//   backward   a task is a run of query tiles of one head; the tiles of keys that they meet:
//                  S = (c Q) K^T     P = e^(S - L)      dP = dO V^T     dS = P (M dP - Delta)
//                  dQ += c dS K                                         stays with the task
//                  dV += (M P)^T dO     dK += dS^T (c Q)                task after task, in the order of their turns
//
// So all sums have one order, whatever the number of threads. M: dropout's multipliers. Matrix work
// is product() below, of bf16 by the hardware where it has that; where compact() lists the pairs of
// a tile, they are taken one by one instead, and a row of S, P or dS has those of its query alone.
//
// A masked score is -inf, its P and dS are set to 0, not multiplied. But 0 x NaN is NaN, so a row
// that is not finite never enters a product that sums over rows: it is taken out, zeros take its
// place, and the pairs that do attend are added one by one.
#include <sched.h>
#include <new>
#include "core/parallel.h"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/terms_cpu.h"
#include "ops/hilbert/kernels/compact.h"

namespace hilt::kernels {
namespace {

constexpr Index kTile = Tiling::kTile;
constexpr Index kLine = 64;  // bytes of a cache line

template <class W> struct VectorOf { using type [[gnu::vector_size(kVectorBytes)]] = W; };
template <class W> using Vector = typename VectorOf<W>::type;
template <class W> using Bits = decltype(Vector<W>{} < Vector<W>{});  // integers of the same size
template <class W> using Lane = std::conditional_t<sizeof(W) == 8, std::int64_t, std::int32_t>;
template <class W> constexpr W kMinusInfinity = -std::numeric_limits<W>::infinity();

template <class W> Vector<W>& vector_at(W* x) { return *reinterpret_cast<Vector<W>*>(x); }
template <class W> const Vector<W>& vector_at(const W* x) { return *reinterpret_cast<const Vector<W>*>(x); }
template <class W> Index whole_vectors(Index n) { return (n + kLanes<W> - 1) / kLanes<W> * kLanes<W>; }

/// Two bf16 of a factor that are multiplied and added up at once, the first in the low half: where
/// the processor does so, factors consist of them (E below), else of the W that sums are of.
using Bf16x2 = std::uint32_t;
template <class E> constexpr bool kPacked = std::is_same_v<E, Bf16x2>;
template <class E> using Sum = std::conditional_t<kPacked<E>, float, E>;
template <class E> Index packed(Index n) { return kPacked<E> ? (n + 1) / 2 : n; }
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
template <class E> Left<E> transposed(Tile<E> x) { return {x.at, 1, x.pitch}; }

template <class E>
[[gnu::always_inline]] inline void multiply_add(Vector<Sum<E>>& sum, E left, const Vector<E>& right) {
  if constexpr (kPacked<E>) asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(Vector<E>{} + left), "v"(right));
  else sum += left * right;
}

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
    const E *left = a.at, *right = b.at;
    for (Index k = 0; k < n; ++k, left += a.step, right += b.pitch) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) multiply_add<E>(sum[r][v], left[r * a.row], vector_at(right + v * kLanes<E>));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) vector_at(c.row(r) + v * kLanes<W>) = kPacked<E> ? a.factor * sum[r][v] : sum[r][v];
  }
  if constexpr (R > 1)
    if (rows > 0) block_rows<R / 2, V>(a, b, c, rows, n, add);
}

/// C (+)= A B: `rows` x `columns`, `n` terms each, whole vectors, V at a time, the rest by halves.
template <int V = kColumns, class E>
void product(Left<E> a, Tile<E> b, Tile<Sum<E>> c, Index rows, Index n, Index columns, bool add = false) {
  constexpr Index kStep = V * kLanes<E>;
  for (; whole_vectors<E>(columns) >= kStep; columns -= kStep, b.at += kStep, c.at += kStep)
    block_rows<kSums / V, V>(a, b, c, rows, packed<E>(n), add);
  if constexpr (V > 1)
    if (columns > 0) product<V / 2>(a, b, c, rows, n, columns, add);
}

/// out[c][r] = x[r][c] for whole vectors of both; rows from `rows` on are zero.
template <class W, int... Lane>
void transpose(Tile<W> x, Index rows, Index columns, Tile<W> out, std::integer_sequence<int, Lane...>) {
  constexpr int N = kLanes<W>;
  for (Index r0 = 0; r0 < rows; r0 += N)
    for (Index c0 = 0; c0 < columns; c0 += N) {
      Vector<W> line[N], next[N];
      for (int i = 0; i < N; ++i) line[i] = r0 + i < rows ? vector_at(x.row(r0 + i) + c0) : Vector<W>{};
      for (int step = 1; step < N; step *= 2) {  // each shuffles rows i and i + N/2 like two halves of a deck
        for (int i = 0; i < N / 2; ++i) {
          next[2 * i] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2)...);
          next[2 * i + 1] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2 + N / 2)...);
        }
        for (int i = 0; i < N; ++i) line[i] = next[i];
      }
      for (int i = 0; i < N; ++i) vector_at(out.row(c0 + i) + r0) = line[i];
    }
}
template <class W> void transpose(Tile<W> x, Index rows, Index columns, Tile<W> out) {
  transpose(x, rows, columns, out, std::make_integer_sequence<int, kLanes<W>>());
}

// ---- two at once --------------------------------------------------------------------------------

using Halves [[gnu::vector_size(kVectorBytes)]] = std::uint16_t;
constexpr int kHalves = kLanes<std::uint16_t>;

/// {a, b} rounded to nearest even.
template <class E> [[gnu::always_inline]] inline Halves rounded(const Vector<Sum<E>>& a, const Vector<Sum<E>>& b) {
  Halves x;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(x) : "v"(a), "v"(b));
  return x;
}
/// to[i] = {a[i], b[i]}
template <int... Lane>
[[gnu::always_inline]] inline void interleave(Halves a, Halves b, Bf16x2* to, std::integer_sequence<int, Lane...>) {
  const Halves low = __builtin_shufflevector(a, b, (Lane % 2 * kHalves + Lane / 2)...);
  const Halves high = __builtin_shufflevector(a, b, (Lane % 2 * kHalves + Lane / 2 + kHalves / 2)...);
  __builtin_memcpy(to, &low, sizeof low), __builtin_memcpy(to + kHalves / 2, &high, sizeof high);
}
/// to[i] = {x[i], x[i + half of all]}
template <int... Lane>
[[gnu::always_inline]] inline void interleave(Halves x, Bf16x2* to, std::integer_sequence<int, Lane...>) {
  const Halves y = __builtin_shufflevector(x, x, (Lane % 2 * (kHalves / 2) + Lane / 2)...);
  __builtin_memcpy(to, &y, sizeof y);
}
constexpr auto kEachHalf = std::make_integer_sequence<int, kHalves>();

/// A tile of sums where a left factor takes their place, see pack_row(); written by memcpy alone.
template <class E> Tile<E> factor(Tile<Sum<E>> x) { return {reinterpret_cast<E*>(x.at), x.pitch}; }
/// A row of n sums becomes one of a left factor, in place; where n is odd, 0 comes after it.
template <class E> void pack_row(Sum<E>* row, Index n) {
  if constexpr (kPacked<E>) {
    if (n % 2 != 0) row[n] = 0;
    for (Index j = 0; j < n; j += 2 * kLanes<E>) {
      const Halves x = rounded<E>(vector_at(row + j), vector_at(row + j + kLanes<E>));
      __builtin_memcpy(row + j / 2, &x, sizeof x);
    }
  }
}
/// to[j] = {a[j], b[j]}, or {a[j], 0} without b, for n of them; `to` may be a.
template <class E> void pack_columns(const Sum<E>* a, const Sum<E>* b, Index n, Sum<E>* to) {
  for (Index j = 0; j < n; j += kLanes<E>)
    interleave(rounded<E>(vector_at(a + j), b ? vector_at(b + j) : Vector<Sum<E>>{}), reinterpret_cast<Bf16x2*>(to + j),
               kEachHalf);
}

// ---- pairs one by one ---------------------------------------------------------------------------

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

// ---- rows in and out ----------------------------------------------------------------------------

template <class T> struct Source {
  Rows<T> rows;
  Index b, h, dim;
  const std::int32_t* token;
  T* row(Index i) const { return rows.at(b, token[i], h); }
};

/// Asks for rows that are wanted soon: what all tasks share is seldom in a thread's own cache.
template <class T> void prefetch(const Source<T>& x, Index n) {
  for (Index i = 0; i < n; ++i)
    for (Index d = 0; d < x.dim; d += kLine / static_cast<Index>(sizeof(T))) __builtin_prefetch(x.row(i) + d);
}

constexpr Index kAhead = 16;  // rows, asked for before they are read: no prefetcher sees strides

/// `count` elements of a row, from whole vectors of E or less: then zeros follow.
template <class E, class T> [[gnu::always_inline]] inline Vector<E> load(const T* from, Index count) {
  constexpr Index kWhole = kPacked<E> ? 2 * kLanes<E> : kLanes<E>;
  Vector<E> line{};
  if constexpr (kPacked<E> || std::is_same_v<T, E>) {
    if (count >= kWhole) __builtin_memcpy(&line, from, sizeof line);
    else __builtin_memcpy(&line, from, static_cast<std::size_t>(count) * sizeof(T));
  } else {
    E wide[kWhole] = {};
    if (count >= kWhole)
      for (int l = 0; l < kWhole; ++l) wide[l] = static_cast<E>(from[l]);
    else
      for (Index l = 0; l < count; ++l) wide[l] = static_cast<E>(from[l]);
    line = std::bit_cast<Vector<E>>(wide);
  }
  return line;
}
/// out = factor x, or x itself packed; zeros pad whole vectors. Whether all of it is finite.
template <class T, class E> bool gather(const Source<const T>& x, Index n, Sum<E> factor, Tile<E> out) {
  constexpr Index kWhole = kPacked<E> ? 2 * kLanes<E> : kLanes<E>;
  Bits<E> not_finite{};
  for (Index i = 0; i < n; ++i) {
    const T* const from = x.row(i);
    if (i + kAhead < n)
      for (Index d = 0; d < x.dim; d += kLine / static_cast<Index>(sizeof(T)))
        __builtin_prefetch(x.row(i + kAhead) + d, 0, 2);
    const auto piece = [&](Index d, Index count) {
      Vector<E> y = load<E>(from + d, count);
      if constexpr (kPacked<E>) {  // 1 added to an exponent of ones alone reaches the bit above it
        not_finite |= std::bit_cast<Bits<E>>(((y & 0x7fff7fffu) + 0x00800080u) & 0x80008000u);
      } else {
        y *= factor;
        not_finite |= std::bit_cast<Bits<E>>(y - y);  // 0 or NaN
      }
      vector_at(out.row(i) + (kPacked<E> ? d / 2 : d)) = y;
    };
    Index d = 0;
    for (; d + kWhole <= x.dim; d += kWhole) piece(d, kWhole);
    if (d < x.dim) piece(d, x.dim - d);
  }
  bool finite = true;
  for (int l = 0; l < kLanes<E>; ++l) finite = finite && not_finite[l] == 0;
  return finite;
}

/// Sums over rows meet rows packed by twos: out[i][d] = {x[2i][d], x[2i + 1][d]}; the last with 0.
inline void pack_rows(Tile<Bf16x2> x, Index rows, Index dim, Tile<Bf16x2> out) {
  for (Index i = 0; i < rows; i += 2)
    for (Index d = 0; d < packed<Bf16x2>(dim); d += kLanes<Bf16x2>) {
      const Vector<Bf16x2> a = vector_at(x.row(i) + d);
      const Vector<Bf16x2> b = i + 1 < rows ? vector_at(x.row(i + 1) + d) : Vector<Bf16x2>{};
      interleave(std::bit_cast<Halves>(a), std::bit_cast<Halves>(b), out.row(i / 2) + 2 * d, kEachHalf);
    }
}
template <class W> void pack_rows(Tile<W>, Index, Index, Tile<W>) {}  // those of W are as they are

/// Rows of a tile that are not finite and were replaced by zeros.
struct NonFinite {
  Index n = 0;
  std::int32_t row[kTile];
};

template <class E> void replace_non_finite(Tile<E> x, Index rows, Index dim, NonFinite& replaced) {
  for (Index r = 0; r < rows; ++r) {
    Sum<E> sum = 0;
    for (Index d = 0; d < dim; ++d) {
      const Sum<E> element = plain(x)(r, d);
      sum += element - element;
    }
    if (sum == 0) continue;
    replaced.row[replaced.n++] = static_cast<std::int32_t>(r);
    for (Index d = 0; d < packed<E>(dim); ++d) x.row(r)[d] = 0;
  }
}

/// What product() left out: C[r] += A(r, k) factor x[k] for the replaced rows k that pair with r.
template <class T, class E, class W, class Pairs>
void add_non_finite(const NonFinite& replaced, Left<E> a, const Source<const T>& x, W factor, Tile<W> c, Index rows,
                    Pairs&& pairs) {
  for (Index i = 0; i < replaced.n; ++i)
    for (Index r = 0; r < rows; ++r)
      if (pairs(r, replaced.row[i]))
        for (Index d = 0; d < x.dim; ++d)
          c.row(r)[d] += a(r, replaced.row[i]) * (factor * static_cast<W>(x.row(replaced.row[i])[d]));
}

// ---- scores -------------------------------------------------------------------------------------

/// keep[j] = -1 for the keys j that query i attends to, else 0: attends(), a row at a time.
template <class I> void mask(const Tiling& t, Index i, Tiling::Range k, I* keep) {
  const Index n = k.end - k.begin;
  for (Index j = 0; j < n; ++j) keep[j] = t.boxes > 1 ? 0 : -1;
  for (std::size_t box = 0; t.boxes > 1 && box < static_cast<std::size_t>(t.boxes); ++box) {  // a union
    const QueryBounds bounds = bounds_of(t, static_cast<std::size_t>(i), box);
    for (Index j = 0; j < n; ++j) keep[j] |= -attends(bounds, place_of(t, static_cast<std::size_t>(k.begin + j), box));
  }
  if (t.boxes > 1) return;
  const auto only = [&](const std::int32_t* key, std::int32_t low, std::int32_t high) {
    for (Index j = 0; j < n; ++j) keep[j] &= -((key[k.begin + j] >= low) & (key[k.begin + j] <= high));
  };
  if (t.causal) only(t.k_ranks().data(), std::numeric_limits<std::int32_t>::min(), t.q_ranks().data()[i]);
  for (const Tiling::Axis& axis : t.axis)
    if (!axis.key.empty()) only(axis.key.data(), axis.low.data()[i], axis.high.data()[i]);
}

/// The keys of a tile by the counters that decide for them: neighbours often share one.
struct Counters {
  Index runs = 0;
  std::uint32_t block[kTile];   // of a run: key / 8
  std::int32_t run[kTile];      // of a key
  std::uint32_t number[kTile];  // of its eight
};
inline void count_keys(const std::int32_t* keys, std::int32_t first, Index n, Counters& c) {
  for (Index j = 0; j < n; ++j) {
    const auto key = static_cast<std::uint32_t>(first + keys[j]);
    if (c.runs == 0 || c.block[c.runs - 1] != key / 8) c.block[c.runs++] = key / 8;
    c.run[j] = static_cast<std::int32_t>(c.runs - 1), c.number[j] = key % 8;
  }
}

/// The same of the keys that one row lists.
inline void count_listed(const std::int32_t* keys, std::int32_t first, const std::uint8_t* list, Counters& c) {
  std::int32_t of_row[kTile];
  for (Index i = 0; i < *list; ++i) of_row[i] = keys[list[1 + i]];
  c.runs = 0;
  count_keys(of_row, first, *list, c);
}

/// M of one row: 0, or what makes up for the weights that are dropped.
template <class W>
void multipliers(const AttentionSizes& s, Index b, Index h, std::int32_t token, const Counters& keys, Index n, W* m) {
  const auto head = static_cast<std::uint32_t>((s.first_batch + b) * s.heads + s.first_head + h),
             t = static_cast<std::uint32_t>(token);
  std::uint32_t words[4][kTile];
  for (Index r = 0; r < keys.runs; ++r) {
    const auto bits = attention_bits(s.key, head, t, keys.block[r]);
    words[0][r] = bits[0], words[1][r] = bits[1], words[2][r] = bits[2], words[3][r] = bits[3];
  }
  const W kept = static_cast<W>(keep_scale(s.dropout));
  for (Index j = 0; j < n; ++j) {
    const std::uint32_t word = words[keys.number[j] / 2][keys.run[j]];
    m[j] = (word >> keys.number[j] % 2 * 16 & 0xffff) >= s.dropout ? kept : 0;
  }
}

template <int Width, class W, class Op, int... Lane>
W fold(Vector<W> x, Op op, std::integer_sequence<int, Lane...> lanes) {
  if constexpr (Width == 0) return x[0];
  else return fold<Width / 2, W>(op(x, __builtin_shufflevector(x, x, ((Lane + Width) % kLanes<W>)...)), op, lanes);
}
template <class W, class Op> W fold(Vector<W> x, Op op) {
  return fold<kLanes<W> / 2, W>(x, op, std::make_integer_sequence<int, kLanes<W>>());
}

/// e^x of weights, in fewer steps: x is not above 88; below the normal numbers is 0, NaN stays.
/// Factors that get 8 bits are right to 2.8e-6.
template <class E> [[gnu::always_inline]] inline Vector<Sum<E>> weight(Vector<Sum<E>> x) {
  using W = Sum<E>;
  if constexpr (sizeof(W) == 8) {
    for (int l = 0; l < kLanes<W>; ++l) x[l] = math::exp(x[l]);
    return x;
  } else {
    constexpr float kRound = 12582912.0f + 127.0f;  // leaves the nearest integer, biased as an exponent, in low bits
    constexpr float kLog2e = 1.44269504088896341f, kTiny = -87.336545f;
    const Vector<W> shifted = x * kLog2e + kRound, r = x * kLog2e - (shifted - kRound);
    Vector<W> p;  // 2^r, |r| <= 1/2
    if constexpr (kPacked<E>) {
      p = 9.582853e-3f * r + 5.5906425e-2f;
      p = p * r + 2.4024099e-1f;
      p = p * r + 6.9312419e-1f;
    } else {
      p = 1.5345812e-4f * r + 1.3399931e-3f;  // to 1.9e-9
      p = p * r + 9.6184890e-3f;
      p = p * r + 5.5503288e-2f;
      p = p * r + 2.4022647e-1f;
      p = p * r + 6.9314721e-1f;
    }
    p = p * r + 1.0f;
    const auto two_n = std::bit_cast<Vector<W>>(std::bit_cast<Bits<W>>(shifted) << 23);
    return x < kTiny ? Vector<W>{} : p * two_n;
  }
}

/// One row of an online softmax: s becomes e^(s - m), and l and o follow. n: whole vectors.
template <class E, class W> void online_softmax(W* s, Index n, W& m, W& l, W* o, Index dim) {
  const auto larger = [](Vector<W> a, Vector<W> b) { return b > a ? b : a; };
  Vector<W> top = Vector<W>{} + m, sum{};
  for (Index j = 0; j < n; j += kLanes<W>) top = larger(top, vector_at(s + j));
  const W before = m;
  m = fold<W>(top, larger);
  const W shift = m == kMinusInfinity<W> ? 0 : m;  // no key yet: all weights are 0
  for (Index j = 0; j < n; j += kLanes<W>) {
    vector_at(s + j) = weight<E>(vector_at(s + j) - shift);
    sum += vector_at(s + j);
  }
  if (m != before && l != 0) {
    const W factor = math::exp(before - shift);
    l *= factor;
    for (Index d = 0; d < dim; d += kLanes<W>) vector_at(o + d) *= factor;
  }
  l += fold<W>(sum, [](Vector<W> a, Vector<W> b) { return a + b; });
}

// ---- memory and threads -------------------------------------------------------------------------

/// Hands out pieces of a block of memory, or, without one, counts what it will need.
struct Carver {
  std::byte* block = nullptr;
  Index used = 0;

  template <class X> X* take(Index n) {
    X* const piece = block ? reinterpret_cast<X*>(block + used) : nullptr;
    used += (n * static_cast<Index>(sizeof(X)) + kLine - 1) / kLine * kLine;
    return piece;
  }
  template <class W> Tile<W> tile(Index rows, Index columns) {
    constexpr Index line = kLine / static_cast<Index>(sizeof(W));
    const Index pitch = (((columns + line - 1) / line) | 1) * line;
    return {take<W>(rows * pitch), pitch};
  }
};
template <class Space> Index bytes_of(Index dim, Index entries) {
  Carver counter;
  Space(counter, dim, entries);
  return counter.used;
}

/// Scratch. A thread keeps a small one for its next pass: the system takes longer over it than a
/// pass over a few tokens.
class Memory {
 public:
  explicit Memory(Index bytes) {
    if (spare.bytes_ >= bytes) {
      swap(spare);
    } else {
      block = static_cast<std::byte*>(::operator new (static_cast<std::size_t>(bytes), std::align_val_t{kLine}));
      bytes_ = bytes;
    }
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (bytes_ > spare.bytes_ && bytes_ <= kMostKept) swap(spare);
    ::operator delete (block, std::align_val_t{kLine});
  }
  std::byte* block = nullptr;

 private:
  static constexpr Index kMostKept = Index{2} << 20;
  Memory() = default;
  void swap(Memory& other) {
    std::byte* const its = other.block;
    const Index bytes = other.bytes_;
    other.block = block, other.bytes_ = bytes_, block = its, bytes_ = bytes;
  }
  static thread_local Memory spare;
  Index bytes_ = 0;
};
thread_local Memory Memory::spare;

/// So few pairs of numbers are multiplied before another thread has woken.
constexpr Index kAlone = Index{1} << 19;

/// Tasks [0, n) of a pass, which workers take in ascending order, each with a Space of its own: no
/// task can fail, so one may wait for an earlier one. products: of matrices, in the pass. entries:
/// of a table that gets a gradient.
template <class Space> class Tasks {
 public:
  Tasks(const AttentionPass& pass, Index n, Index products, Index entries)
      : workers(is_small(pass, products) ? 1
                : thread_count() < n     ? thread_count()
                                         : n),
        n_(n),
        dim_(pass.sizes.dim),
        entries_(entries),
        bytes_(bytes_of<Space>(pass.sizes.dim, entries)),
        memory_(workers * bytes_) {}
  Space space_of(Index worker) const {
    Carver carver{memory_.block + worker * bytes_};
    return Space(carver, dim_, entries_);
  }
  bool take(Index& task) { return (task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED)) < n_; }

  const Index workers;

 private:
  static bool is_small(const AttentionPass& p, Index products) {
    return products * p.place_count() * p.n_heads * p.tiling->pairs * p.sizes.dim < kAlone;
  }
  const Index n_, dim_, entries_, bytes_;
  const Memory memory_;
  Index next_ = 0;
};

// ---- forward ------------------------------------------------------------------------------------

template <class E>
constexpr Index kGroup = kPacked<E> ? 8 : 4;  // query tiles that share a key tile once it is gathered
constexpr Index kSlab = 64;                   // queries whose scores stay in the L1 cache

template <class E> struct ForwardSpace {
  using W = Sum<E>;
  struct Queries {
    Tile<E> q;
    Tile<W> wide_q, o;
    W *m, *l;
  };
  ForwardSpace(Carver& c, Index dim, Index entries)
      : k_t(c.tile<E>(whole_vectors<E>(packed<E>(dim)), kTile)),
        v(c.tile<E>(kTile, dim)),
        rows(v),
        wide_k(c.tile<W>(kTile, dim)),
        s(c.tile<W>(kSlab, kTile)),
        multiplier(c.take<W>(kTile)),
        keep(c.take<Lane<W>>(kTile)),
        terms(c, entries) {
    for (Queries& x : queries) {
      x.q = c.tile<E>(kTile, packed<E>(dim)), x.o = c.tile<W>(kTile, dim);
      x.m = c.take<W>(kTile), x.l = c.take<W>(kTile);
      if constexpr (kPacked<E>) x.wide_q = c.tile<W>(kTile, dim);
      else x.wide_q = x.q;
    }
    if constexpr (kPacked<E>) rows = c.tile<E>(kTile, packed<E>(dim)), wide_v = c.tile<W>(kTile, dim);
    else wide_v = v;
  }
  Tile<E> k_t, v, rows;  // rows: as they come, before they are turned or packed
  Tile<W> wide_k, wide_v, s;
  W* multiplier;
  Lane<W>* keep;  // of a row: 0 where it does not attend
  TermSpace<W> terms;
  Queries queries[kGroup<E>];
};

/// Query tiles [begin, end) of head h, at one place; T: of the inputs, O: of the results.
template <class T, class O, class E>
void forward_tiles(const ForwardPass& f, const Compact& t, Tiling::Place place, Index h, Index begin, Index end,
                   const ForwardSpace<E>& space) {
  using W = Sum<E>;
  const AttentionSizes& sizes = f.sizes;
  const Index dim = sizes.dim, wide = whole_vectors<W>(dim), kv_head = h / (sizes.heads / sizes.kv_heads),
              b = place.row;
  const auto q = f.q.rows<const T>().from(place.q), k = f.k.rows<const T>().from(place.k),
             v = f.v.rows<const T>().from(place.k);
  const auto o = f.o.rows<O>().from(place.q);
  const W scale = static_cast<W>(sizes.scale);
  W* const lse = static_cast<W*>(f.lse) + (b * sizes.heads + h) * sizes.queries + place.q;
  std::int32_t next[kGroup<E>];  // of its list of key tiles
  for (Index g = 0; g < end - begin; ++g) {
    const Tiling::Range range = t.q_tile.data()[begin + g];
    const auto& x = space.queries[g];
    const Source<O> state{o, b, h, dim, t.q_token.data() + range.begin};
    gather(Source<const T>{q, b, h, dim, state.token}, range.end - range.begin, scale, x.q);
    for (Index i = 0; i < range.end - range.begin; ++i) {
      x.m[i] = f.fresh ? kMinusInfinity<W> : lse[state.token[i]];
      x.l[i] = x.m[i] == kMinusInfinity<W> ? 0 : 1;
      const Index held = x.l[i] != 0 ? dim : 0;
      for (Index d = held; d < wide; ++d) x.o.row(i)[d] = 0;
      for (Index d = 0; d < held; ++d) x.o.row(i)[d] = static_cast<W>(state.row(i)[d]);
    }
    next[g] = t.keys_begin.data()[begin + g];
  }
  bool wide_q[kGroup<E>] = {};  // is there
  for (;;) {
    constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
    std::int32_t tile = kNone;
    for (Index g = 0; g < end - begin; ++g)
      if (next[g] < t.keys_begin.data()[begin + g + 1] && t.keys.data()[next[g]].tile < tile)
        tile = t.keys.data()[next[g]].tile;
    if (tile == kNone) break;

    const Tiling::Range keys = t.k_tile.data()[tile];
    const Index n = keys.end - keys.begin;
    const Source<const T> k_rows{k, b, kv_head, dim, t.k_token.data() + keys.begin},
        v_rows{v, b, kv_head, dim, k_rows.token};
    const std::uint8_t* listed = pairs_of(t, tile);
    if (listed) gather(k_rows, n, W{1}, space.wide_k);
    else gather(k_rows, n, W{1}, space.rows), transpose(space.rows, n, packed<E>(dim), space.k_t);
    NonFinite in_v;
    Counters counters;
    const std::int32_t* const names = t.k_names().data() + keys.begin;
    if (sizes.dropout > 0 && !listed) count_keys(names, place.k, n, counters);
    const KeyTerms<T> terms(f.terms, t, keys, place.k, space.terms);
    if (listed) {
      gather(v_rows, n, W{1}, space.wide_v);
    } else {
      if (!gather(v_rows, n, W{1}, space.rows)) replace_non_finite(space.rows, n, dim, in_v);
      pack_rows(space.rows, n, dim, space.v);
    }

    if (tile + 1 < static_cast<std::int32_t>(t.k_tile.size())) {  // most often the next one
      const Tiling::Range ahead = t.k_tile.data()[tile + 1];
      const std::int32_t* const token = t.k_token.data() + ahead.begin;
      prefetch(Source<const T>{k, b, kv_head, dim, token}, ahead.end - ahead.begin);
      prefetch(Source<const T>{v, b, kv_head, dim, token}, ahead.end - ahead.begin);
    }

    for (Index g = 0; g < end - begin; ++g) {
      if (next[g] == t.keys_begin.data()[begin + g + 1] || t.keys.data()[next[g]].tile != tile) continue;
      const bool partial = t.keys.data()[next[g]++].partial;
      const auto& x = space.queries[g];
      const Tiling::Range range = t.q_tile.data()[begin + g];
      for (Index first = 0; first < range.end - range.begin; first += kSlab) {
        const Index left = range.end - range.begin - first, rows = left < kSlab ? left : kSlab,
                    q0 = range.begin + first;
        const Tile<W> acc = x.o.from(first);
        if (terms)
          for (Index r = 0; r < rows; ++r) terms.fetch({}, b, h, t.q_names().data()[q0 + r]);
        const std::uint8_t *const lists = listed, *list = listed;
        if (kPacked<E> && listed && !wide_q[g])
          wide_q[g] = true, gather(Source<const T>{q, b, h, dim, t.q_token.data() + range.begin},
                                   range.end - range.begin, scale, x.wide_q);
        if (listed) listed = pair_dots(x.wide_q.from(first), space.wide_k, listed, rows, wide, space.s);
        else product(plain(x.q.from(first), scale), space.k_t, space.s, rows, dim, n);
        for (Index r = 0; r < rows; ++r, list += list ? 1 + *list : 0) {
          W* const s = space.s.row(r);
          const Index met = list ? *list : n;
          if (met == 0) continue;
          if (terms) terms.add(b, h, t.q_names().data()[q0 + r], s);
          if (partial && !list) {
            mask(t, q0 + r, keys, space.keep);
            for (Index j = 0; j < whole_vectors<W>(n); j += kLanes<W>)
              vector_at(s + j) = vector_at(space.keep + j) != 0 ? vector_at(s + j) : Vector<W>{} + kMinusInfinity<W>;
          }
          for (Index j = met; j < whole_vectors<W>(met); ++j) s[j] = kMinusInfinity<W>;
          online_softmax<E>(s, whole_vectors<W>(met), x.m[first + r], x.l[first + r], acc.row(r), dim);
          if (sizes.dropout > 0) {
            if (list) count_listed(names, place.k, list, counters);
            multipliers(sizes, b, h, place.k + t.q_names().data()[q0 + r], counters, met, space.multiplier);
            for (Index j = 0; j < met; ++j) s[j] *= space.multiplier[j];
          }
          if (!list) pack_row<E>(s, met);
        }
        const Left<E> weights = plain(factor<E>(space.s));
        if (listed) pair_sums(space.s, space.wide_v, lists, rows, wide, acc, true);
        else product(weights, space.v, acc, rows, n, dim, true);
        add_non_finite(in_v, weights, v_rows, W{1}, acc, rows, [&](Index r, Index j) {
          if (terms && terms.masks(b, h, t.q_names().data()[q0 + r], j)) return false;
          return !partial || attends(t, static_cast<std::size_t>(q0 + r), static_cast<std::size_t>(keys.begin + j));
        });
      }
    }
  }
  for (Index g = 0; g < end - begin; ++g) {
    const Tiling::Range range = t.q_tile.data()[begin + g];
    const auto& x = space.queries[g];
    const Source<O> result{o, b, h, dim, t.q_token.data() + range.begin};
    for (Index i = 0; i < range.end - range.begin; ++i) {
      const W share = x.l[i] == 0 ? W{0} : 1 / x.l[i];
      O* const to = result.row(i);
      for (Index d = 0; d < dim; ++d) to[d] = static_cast<O>(x.o.row(i)[d] * share);
      lse[result.token[i]] = x.m[i] + math::log(x.l[i]);
    }
  }
}

// ---- backward -----------------------------------------------------------------------------------

template <class E> struct BackwardSpace {
  using W = Sum<E>;
  /// As they come; as sums over them want them, packed by twos, or the same; as pairs want them.
  struct Rows {
    Tile<E> at, packed_rows;
    Tile<W> wide;
    Rows() = default;
    Rows(Carver& c, Index dim) : at(c.tile<E>(kTile, packed<E>(dim))), packed_rows(at) {
      if constexpr (kPacked<E>) packed_rows = c.tile<E>(kTile / 2, dim), wide = c.tile<W>(kTile, dim);
      else wide = at;
    }
  };
  struct Queries {
    Rows q, d_o;
    Tile<W> dq;
    W* delta;
  };
  BackwardSpace(Carver& c, Index dim, Index entries)
      : k(c, dim),
        k_t(c.tile<E>(whole_vectors<E>(packed<E>(dim)), kTile)),
        v_t(c.tile<E>(whole_vectors<E>(packed<E>(dim)), kTile)),
        dk(c.tile<W>(kTile, dim)),
        dv(c.tile<W>(kTile, dim)),
        p(c.tile<W>(kTile, kTile)),
        ds(c.tile<W>(kTile, kTile)),
        multiplier(c.take<W>(kTile)),
        keep(c.take<Lane<W>>(kTile)),
        terms(c, entries) {
    for (Queries& x : queries) x = {{c, dim}, {c, dim}, c.tile<W>(kTile, dim), c.take<W>(kTile)};
  }
  Rows k;
  Tile<E> k_t, v_t;
  Tile<W> dk, dv, p, ds;
  W* multiplier;
  Lane<W>* keep;  // of a row: 0 where it does not attend
  TermSpace<W> terms;
  Queries queries[Compact::kRun];
};

/// One row: p = e^(s - L) and dS = p (M dP - Delta), in place of s and dP; 0 where `keep` is. m is
/// null without dropout, keep where all attend. n: whole vectors.
template <class E, class W>
void softmax_backward(W* s, W* dp, const W* m, const Lane<W>* keep, Index n, W lse, W delta) {
  for (Index j = 0; j < n; j += kLanes<W>) {
    const Bits<W> in = keep ? vector_at(keep + j) : ~Bits<W>{};
    const Vector<W> p = weight<E>(vector_at(s + j) - lse), kept = m ? vector_at(m + j) : Vector<W>{} + 1;
    const Vector<W> ds = p * (kept * vector_at(dp + j) - delta), weights = kept * p;
    vector_at(dp + j) = std::bit_cast<Vector<W>>(std::bit_cast<Bits<W>>(ds) & in);
    vector_at(s + j) = std::bit_cast<Vector<W>>(std::bit_cast<Bits<W>>(weights) & in);
  }
}

/// P and dS as left factors of sums over their rows; dS becomes one of sums over its columns.
template <class E> struct TransposedFactors { Left<E> p, ds; };
template <class E> TransposedFactors<E> transposed_factors(Tile<Sum<E>> p, Tile<Sum<E>> ds, Index rows, Index n) {
  if constexpr (!kPacked<E>) return {transposed(p), transposed(ds)};
  for (Index r = 0; r < rows; r += 2) {  // two rows of P take the place of the first, those of dS of the second
    const bool two = r + 1 < rows;
    pack_columns<E>(p.row(r), two ? p.row(r + 1) : nullptr, n, p.row(r));
    pack_columns<E>(ds.row(r), two ? ds.row(r + 1) : nullptr, n, p.row(r + 1));
    pack_row<E>(ds.row(r), n);
    if (two) pack_row<E>(ds.row(r + 1), n);
  }
  const Tile<E> twos{factor<E>(p).at, 2 * p.pitch}, twos_of_ds{factor<E>(p).row(1), 2 * p.pitch};
  return {transposed(twos), transposed(twos_of_ds)};
}

/// Sums of several tasks come in one order: place `turn` waits until those before it are done.
void wait_for(const std::int32_t* done, std::int32_t turn) {
  while (__atomic_load_n(done, __ATOMIC_ACQUIRE) != turn) sched_yield();
}

/// to += factor x, or = where is_first(row).
template <class W, class First>
void add_rows(const Source<W>& to, Tile<W> x, Index begin, Index end, W factor, First&& is_first) {
  for (Index i = begin; i < end; ++i) {
    W *const sum = to.row(i), *const term = x.row(i);
    const bool first = is_first(i);
    Index d = 0;
    for (; d + kLanes<W> <= to.dim; d += kLanes<W>) {
      Vector<W> line{};
      if (!first) __builtin_memcpy(&line, sum + d, sizeof line);
      line += factor * vector_at(term + d);
      __builtin_memcpy(sum + d, &line, sizeof line);
    }
    for (; d < to.dim; ++d) sum[d] = (first ? 0 : sum[d]) + factor * term[d];
  }
}

template <class W> void set_zero(Tile<W> x, Index rows, Index wide) {
  for (Index r = 0; r < rows; ++r)
    for (Index d = 0; d < wide; d += kLanes<W>) vector_at(x.row(r) + d) = Vector<W>{};
}

struct Done {
  std::int32_t* shares;  // [places, Hk, parts of the keys]: how many runs have added to dk and dv
  std::int32_t* heads;   // [entries of keys]: how many have been added to a shared bias, or null
};

/// Query tiles of a run at place `number`, of head h, after `before` of `sharing` of its key head.
template <class T, class E>
void backward_run(const BackwardPass& pass, const Compact& t, const TermGradients& d_terms, Done done, Index number,
                  Index h, Index before, Index sharing, Index earlier, Tiling::Range run, bool direct,
                  const BackwardSpace<E>& space) {
  using W = Sum<E>;
  const AttentionSizes& sizes = pass.sizes;
  const Tiling::Place place = pass.place(number);
  const Index dim = sizes.dim, wide = whole_vectors<W>(dim), kv_head = h / (sizes.heads / sizes.kv_heads),
              b = place.row, first_row = (b * sizes.heads + h) * sizes.queries + place.q;
  const auto q = pass.q.rows<const T>().from(place.q), d_o = pass.d_o.rows<const T>().from(place.q);
  const auto k = pass.k.rows<const T>().from(place.k), v = pass.v.rows<const T>().from(place.k);
  const auto dq = pass.dq.rows<W>().from(place.q), dk = pass.dk.rows<W>().from(place.k),
             dv = pass.dv.rows<W>().from(place.k);
  const auto o = pass.o.rows<const T>().from(place.q);
  const W* const lse = static_cast<const W*>(pass.lse) + first_row;
  const W* const delta = pass.delta ? static_cast<const W*>(pass.delta) + first_row : nullptr;
  const W scale = static_cast<W>(sizes.scale), of_q = kPacked<E> ? 1 : scale;
  const std::int32_t* const lists = t.keys_begin.data();
  const auto rows_of = [&](const auto& x, std::int32_t tile) {
    return Source<std::remove_pointer_t<decltype(x.data)>>{x, b, h, dim,
                                                           t.q_token.data() + t.q_tile.data()[tile].begin};
  };
  bool finite[Compact::kRun] = {}, wide_rows[Compact::kRun] = {};  // wide_rows: those are there
  for (std::int32_t visit = 0;; ++visit) {
    std::int32_t lead = -1;  // the last that meets this tile of keys
    for (std::int32_t i = run.begin; i < run.end; ++i)
      if (visit < lists[i + 1] - lists[i]) lead = i;
    if (lead < 0) break;
    const Tiling::Range keys = t.k_tile.data()[t.keys.data()[lists[lead] + visit].tile];
    const Index n = keys.end - keys.begin;
    const Source<const T> k_rows{k, b, kv_head, dim, t.k_token.data() + keys.begin},
        v_rows{v, b, kv_head, dim, k_rows.token};
    const Source<W> dk_rows{dk, b, kv_head, dim, k_rows.token}, dv_rows{dv, b, kv_head, dim, k_rows.token};
    NonFinite in_k;
    Counters counters;
    const std::int32_t* const names = t.k_names().data() + keys.begin;
    const std::uint8_t* const listed = pairs_of(t, t.keys.data()[lists[lead] + visit].tile);
    if (sizes.dropout > 0 && !listed) count_keys(names, place.k, n, counters);
    prefetch(dk_rows, n), prefetch(dv_rows, n);
    if (listed) {  // by one tile of queries: dv comes when v has gone
      gather(v_rows, n, W{1}, space.dv), gather(k_rows, n, W{1}, space.k.wide);
    } else {
      gather(v_rows, n, W{1}, space.k.at), transpose(space.k.at, n, packed<E>(dim), space.v_t);
      const bool finite_k = gather(k_rows, n, W{1}, space.k.at);
      transpose(space.k.at, n, packed<E>(dim), space.k_t);
      if (!finite_k) replace_non_finite(space.k.at, n, dim, in_k);
      pack_rows(space.k.at, n, dim, space.k.packed_rows);
    }
    if (visit + 1 < lists[lead + 1] - lists[lead]) {
      const Tiling::Range ahead = t.k_tile.data()[t.keys.data()[lists[lead] + visit + 1].tile];
      const std::int32_t* const token = t.k_token.data() + ahead.begin;
      prefetch(Source<const T>{k, b, kv_head, dim, token}, ahead.end - ahead.begin);
      prefetch(Source<const T>{v, b, kv_head, dim, token}, ahead.end - ahead.begin);
    }
    const KeyTerms<T> terms(pass.terms, t, keys, place.k, space.terms);
    std::int32_t* const pair_count = done.heads ? done.heads + lists[lead] + visit : nullptr;
    if (pair_count) wait_for(pair_count, static_cast<std::int32_t>(earlier));

    bool add = false;
    for (std::int32_t i = run.begin; i < run.end; ++i) {
      if (visit >= lists[i + 1] - lists[i]) continue;
      const auto& x = space.queries[i - run.begin];
      const bool partial = t.keys.data()[lists[i] + visit].partial;
      const Index q0 = t.q_tile.data()[i].begin, rows = t.q_tile.data()[i].end - q0;
      const Source<const T> q_rows = rows_of(q, i), d_o_rows = rows_of(d_o, i);
      bool& asked = finite[i - run.begin];
      if (!asked) {  // the first time, and where zeros took the place of what is asked for again
        asked = gather(q_rows, rows, of_q, x.q.at);
        asked = gather(d_o_rows, rows, W{1}, x.d_o.at) && asked;
        if (asked) pack_rows(x.q.at, rows, dim, x.q.packed_rows), pack_rows(x.d_o.at, rows, dim, x.d_o.packed_rows);
        for (Index r = 0; r < rows; ++r)
          x.delta[r] = delta ? delta[q_rows.token[r]] : dot(o.at(b, q_rows.token[r], h), d_o_rows.row(r), dim);
      }
      if (terms)
        for (Index r = 0; r < rows; ++r) terms.fetch(d_terms, b, h, t.q_names().data()[q0 + r]);
      const std::uint8_t *list = listed, *by_key = nullptr;
      if (listed) {
        if (kPacked<E> && !wide_rows[i - run.begin]) {
          wide_rows[i - run.begin] = true;
          gather(q_rows, rows, scale, x.q.wide), gather(d_o_rows, rows, W{1}, x.d_o.wide);
        }
        by_key = pair_dots(x.q.wide, space.k.wide, listed, rows, wide, space.p);
        pair_dots(x.d_o.wide, space.dv, listed, rows, wide, space.ds);
      } else {
        product(plain(x.q.at, scale), space.k_t, space.p, rows, dim, n);
        product(plain(x.d_o.at), space.v_t, space.ds, rows, dim, n);
      }
      for (Index r = 0; r < rows; ++r, list += list ? 1 + *list : 0) {
        const Index of_row = list ? *list : n;
        W *const p = space.p.row(r), *const ds = space.ds.row(r);
        const std::int32_t token = q_rows.token[r], name = t.q_names().data()[q0 + r];
        const bool masked = terms && terms.add(b, h, name, p);
        if (sizes.dropout > 0 && list) count_listed(names, place.k, list, counters);
        if (sizes.dropout > 0) multipliers(sizes, b, h, place.k + name, counters, of_row, space.multiplier);
        if (partial && !list) mask(t, q0 + r, keys, space.keep);
        softmax_backward<E>(p, ds, sizes.dropout > 0 ? space.multiplier : nullptr,
                            partial && !list ? space.keep : nullptr, whole_vectors<W>(of_row), lse[token], x.delta[r]);
        if (masked) terms.drop(b, h, name, p), terms.drop(b, h, name, ds);
        if (terms) terms.collect(d_terms, b, h, name, ds);
      }
      if (listed) {
        pair_sums(space.ds, space.k.wide, listed, rows, wide, x.dq, visit > 0);
        pair_sums_transposed(space.p, x.d_o.wide, by_key, n, wide, space.dv);
        pair_sums_transposed(space.ds, x.q.wide, by_key, n, wide, space.dk);
        continue;
      }
      const auto [p_t, ds_t] = transposed_factors<E>(space.p, space.ds, rows, n);
      const Left<E> ds = plain(factor<E>(space.ds));
      const auto pairs = [&](Index row, Index j) {
        if (terms && terms.masks(b, h, t.q_names().data()[q0 + row], j)) return false;
        return !partial || attends(t, static_cast<std::size_t>(q0 + row), static_cast<std::size_t>(keys.begin + j));
      };
      const auto pairs_transposed = [&](Index j, Index row) { return pairs(row, j); };
      NonFinite in_q, in_d_o;
      if (!asked) {
        replace_non_finite(x.q.at, rows, dim, in_q), replace_non_finite(x.d_o.at, rows, dim, in_d_o);
        pack_rows(x.q.at, rows, dim, x.q.packed_rows), pack_rows(x.d_o.at, rows, dim, x.d_o.packed_rows);
      }
      product(p_t, x.d_o.packed_rows, space.dv, n, rows, dim, add);
      add_non_finite(in_d_o, p_t, d_o_rows, W{1}, space.dv, n, pairs_transposed);
      product(ds_t, x.q.packed_rows, space.dk, n, rows, dim, add);
      add_non_finite(in_q, ds_t, q_rows, of_q, space.dk, n, pairs_transposed);
      product(ds, space.k.packed_rows, x.dq, rows, n, dim, visit > 0);
      add_non_finite(in_k, ds, k_rows, W{1}, x.dq, rows, pairs);
      add = true;
    }
    if (pair_count) __atomic_store_n(pair_count, static_cast<std::int32_t>(earlier + 1), __ATOMIC_RELEASE);

    std::int32_t from = 0, to = 0;
    for (const Compact::Share* share = t.share.data() + t.share_begin.data()[lists[lead] + visit]; from < n;
         ++share, from = to) {
      to = share->end - keys.begin;
      std::int32_t* const count = done.shares + (number * sizes.kv_heads + kv_head) * std::ssize(t.turns) + share->rows;
      const std::int32_t turn = static_cast<std::int32_t>(share->turn * sharing + before);
      wait_for(count, turn);
      const bool writes = direct && before == 0 && share->first;
      const auto is_first = [&](Index j) { return writes && t.k_first.data()[keys.begin + j] != 0; };
      add_rows(dk_rows, space.dk, from, to, kPacked<E> && !listed ? scale : W{1}, is_first);
      add_rows(dv_rows, space.dv, from, to, W{1}, is_first);
      if (terms) terms.add_columns(d_terms, b, h, from, to);
      if (share->last) __atomic_store_n(count, turn + 1, __ATOMIC_RELEASE);
    }
  }
  for (std::int32_t i = run.begin; i < run.end; ++i) {
    const Tile<W> x = space.queries[i - run.begin].dq;
    const Index rows = t.q_tile.data()[i].end - t.q_tile.data()[i].begin;
    if (lists[i] == lists[i + 1]) set_zero(x, rows, wide);
    add_rows(rows_of(dq, i), x, 0, rows, scale, [&](Index) { return direct; });
  }
}

// ---- passes -------------------------------------------------------------------------------------

/// Heads of a token lie together. The last group of tiles first: causal ones have the most keys.
template <class T, class E> void attention_forward(Cuda, const ForwardPass& f, const Decision& how) {
  using W = Sum<E>;
  const Compact& t = *how.lists;
  const auto tiles = std::ssize(t.q_tile), places = f.place_count();
  Index group = kGroup<E>;  // smaller where that would leave threads without work
  while (group > 1 && places * f.n_heads * tiles < 4 * group * thread_count()) group /= 2;
  const Index groups = (tiles + group - 1) / group;
  const auto forward = f.o.type == f.q.type ? forward_tiles<T, T, E> : forward_tiles<T, W, E>;
  Tasks<ForwardSpace<E>> tasks(f, places * f.n_heads * groups, 2, 0);
  const auto work = [&](Index worker, Index) {
    const ForwardSpace<E> space = tasks.space_of(worker);
    for (Index task; tasks.take(task);) {
      const Index begin = (groups - 1 - task / f.n_heads % groups) * group;
      forward(f, t, f.place(task / f.n_heads / groups), f.heads[task % f.n_heads], begin,
              begin + group < tiles ? begin + group : tiles, space);
    }
  };
  if (tasks.workers == 1) work(0, 1);  // nobody to share with
  else parallel_for(tasks.workers, 1, work);
}

template <class T> void attention_delta(Cuda, const DeltaPass& x) {
  const AttentionSizes& s = x.sizes;
  const auto o = x.o.rows<const T>(), d_o = x.d_o.rows<const T>();
  auto* const delta = static_cast<Stat<T>*>(x.delta);
  parallel_for(s.batch * s.queries * s.heads, kTile, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {  // as rows lie in memory
      const Index h = i % s.heads, t = i / s.heads % s.queries, b = i / s.heads / s.queries;
      delta[(b * s.heads + h) * s.queries + t] = dot(o.at(b, t, h), d_o.at(b, t, h), s.dim);
    }
  });
}

template <class T, class E> void attention_backward(Cuda, const BackwardPass& x, const Decision& how) {
  const AttentionSizes& s = x.sizes;
  const Compact& t = *how.lists;
  const auto runs = std::ssize(t.runs), turns = std::ssize(t.turns);
  const Index places = x.place_count(), sums = places * s.kv_heads * turns, heads_each = s.heads / s.kv_heads;
  const TermGradients d_terms = x.d_terms ? *x.d_terms : TermGradients{};
  const bool shared = is_shared(d_terms.bias, s);
  const Index counts = sums + s.heads + 1 + (shared ? std::ssize(t.keys) : 0);
  const Memory memory(counts * static_cast<Index>(sizeof(std::int32_t)));
  auto* const done = reinterpret_cast<std::int32_t*>(memory.block);
  for (Index i = 0; i < counts; ++i) done[i] = 0;
  const Done so_far{done, shared && !x.places ? done + sums + s.heads + 1 : nullptr};
  Tasks<BackwardSpace<E>> tasks(x, places * x.n_heads * runs, 5, d_terms.table ? x.terms->entries : 0);
  const auto go_back = [&](Index task, const BackwardSpace<E>& space) {
    const Index number = task / runs / x.n_heads, run = task / x.n_heads % runs, i = task % x.n_heads, h = x.heads[i];
    Index before = 0, sharing = 1;
    while (before < i && x.heads[i - before - 1] / heads_each == h / heads_each) ++before;
    while (i + sharing < x.n_heads && x.heads[i + sharing] / heads_each == h / heads_each) ++sharing;
    std::int32_t *const head_done = done + sums + h, *const task_done = done + sums + s.heads;
    if (x.terms) space.terms.clear();
    // Documents of several rows may overlap in a bias that has no rows: one task after the other.
    if (shared && x.places) wait_for(task_done, static_cast<std::int32_t>(task));
    backward_run<T>(x, t, d_terms, so_far, number, h, before, before + sharing, number * x.n_heads + i,
                    t.runs.data()[runs - 1 - run], how.direct, space);
    if (shared && x.places) __atomic_store_n(task_done, static_cast<std::int32_t>(task + 1), __ATOMIC_RELEASE);
    if (!d_terms.slopes && !d_terms.table) return;
    const auto turn = static_cast<std::int32_t>(number * runs + run);
    wait_for(head_done, turn);
    space.terms.finish(d_terms, h);
    __atomic_store_n(head_done, turn + 1, __ATOMIC_RELEASE);
  };
  const auto work = [&](Index worker, Index) {
    const BackwardSpace<E> space = tasks.space_of(worker);
    for (Index task; tasks.take(task);) go_back(task, space);
  };
  if (tasks.workers == 1) work(0, 1);
  else parallel_for(tasks.workers, 1, work);
}

}  // namespace

template <Isa I> Kernels kernels_at(CpuAt<I>, DType type) {
  Kernels on;
  on.route_forward = [](Cuda, const ForwardPass& f) { return route(Cpu{}, f); };
  on.route_backward = [](Cuda, const BackwardPass& b, bool whole) { return route(Cpu{}, b, whole); };
  with_type<double, float, bf16, f16>(type, [&]<class T>() {
    using W = Stat<T>;
    on.forward = attention_forward<T, W>, on.delta = attention_delta<T>, on.backward = attention_backward<T, W>;
    if constexpr (I == Isa::avx512 && std::is_same_v<T, bf16>)
      if (active_isa() == Isa::avx512_bf16)
        on.forward = attention_forward<T, Bf16x2>, on.backward = attention_backward<T, Bf16x2>;
  });
  return on;
}
template Kernels kernels_at(CpuAt<kIsa>, DType);

}  // namespace hilt::kernels
