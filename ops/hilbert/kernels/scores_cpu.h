#pragma once
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/product_cpu.h"
#include "ops/math.h"

// A row of scores: masks, dropout, softmax.

namespace hilt::kernels {
namespace {

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
    for (Index j = 0; j < n; ++j)
      keep[j] &= -(((key[k.begin + j] >= low) & (key[k.begin + j] <= high)) | (key[k.begin + j] == kTaken));
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

}  // namespace
}  // namespace hilt::kernels
