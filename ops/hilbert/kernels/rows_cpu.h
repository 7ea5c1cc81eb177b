#pragma once
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/product_cpu.h"

// Rows of tensors as tiles, and what happens to those that are not finite.

namespace hilt::kernels {
namespace {

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

/// How wide a row of those is: pack_rows() writes whole vectors.
template <class E> Index packed_width(Index dim) { return kPacked<E> ? 2 * whole_vectors<E>(packed<E>(dim)) : dim; }
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

}  // namespace
}  // namespace hilt::kernels
