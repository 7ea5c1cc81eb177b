#pragma once
#include "ops/hilbert/kernels/terms_cpu.h"
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

/// Keys by the counters that decide for them, see attention_bits(): neighbours often share one.
struct Counters {
  Index keys = 0, runs = 0;
  std::uint32_t block[kTile];   // of a run: key / 8
  std::int32_t run[kTile];      // of a key
  std::uint32_t number[kTile];  // of its eight
  void add(std::int32_t token) {
    const auto key = static_cast<std::uint32_t>(token);
    if (runs == 0 || block[runs - 1] != key / 8) block[runs++] = key / 8;
    run[keys] = static_cast<std::int32_t>(runs - 1), number[keys++] = key % 8;
  }
};

/// What a thread needs for a row.
template <class W> struct alignas(kLine) RowSpace {
  W multiplier[kTile];
  Lane<W> keep[kTile];
  TermSpace<W> terms;
};
template <class W> RowSpace<W>* row_space(Carver& c, Index entries) {
  auto* const row = c.take<RowSpace<W>>(1);
  W* const table = c.take<W>(entries * kSpread);
  if (row) row->terms.table = table, row->terms.entries = entries;
  return row;
}

/// A tile of keys that queries of one head meet, and what is told of a row of their scores.
template <class E> struct KeyTile {
  using W = Sum<E>;
  const Head& head;
  RowSpace<W>& space;
  std::int32_t number;
  Tiling::Range range = head.t.k_tile.data()[number];
  Index n = range.end - range.begin;
  const std::uint8_t* listed = pairs_of(head.t, number);  // its pairs, or null
  KeyTerms<W> terms;
  Counters counters;

  KeyTile(const Head& head_, std::int32_t tile, const TermGradients& d_terms, RowSpace<W>& space_)
      : head(head_), space(space_), number(tile), terms(head, range, d_terms, space.terms) {
    if (head.pass.sizes.dropout > 0 && !listed)
      for (Index j = 0; j < n; ++j) count(j);
  }
  /// Asks for the rows of this tile, or of another.
  [[gnu::always_inline]] void fetch(const Input& x, std::int32_t tile) const {
    const Tiling::Range r = head.t.k_tile.data()[tile];
    prefetch(head.of_keys(x, tile), r.end - r.begin);
  }
  std::int32_t token(Index q) const { return head.t.q_names().data()[q]; }
  /// What dropout multiplies the weights of query q with, of its list or of all keys: 0, or what makes
  /// up for the weights that are dropped. Null without dropout.
  const W* multipliers_of(Index q, const std::uint8_t* list) {
    const AttentionSizes& s = head.pass.sizes;
    if (s.dropout == 0) return nullptr;
    if (list) counters.keys = counters.runs = 0;
    for (Index i = 0; list && i < *list; ++i) count(list[1 + i]);
    const auto row = static_cast<std::uint32_t>((s.first_batch + head.place.row) * s.heads + s.first_head + head.h),
               t = static_cast<std::uint32_t>(head.place.k + token(q));
    std::uint32_t words[4][kTile];
    for (Index r = 0; r < counters.runs; ++r) {
      const auto bits = attention_bits(s.key, row, t, counters.block[r]);
      words[0][r] = bits[0], words[1][r] = bits[1], words[2][r] = bits[2], words[3][r] = bits[3];
    }
    const W kept = static_cast<W>(keep_scale(s.dropout));
    for (Index j = 0; j < counters.keys; ++j) {
      const std::uint32_t of_eight = counters.number[j], word = words[of_eight / 2][counters.run[j]];
      space.multiplier[j] = (word >> of_eight % 2 * 16 & 0xffff) >= s.dropout ? kept : 0;
    }
    return space.multiplier;
  }
  /// What query q attends to, as mask() says it, or null: to all.
  const Lane<W>* mask_of(Index q, bool partial) const {
    if (!partial || listed) return nullptr;
    mask(head.t, q, range, space.keep);
    return space.keep;
  }
  bool pairs(Index q, Index j, bool partial) const {
    if (terms && terms.masks(token(q), j)) return false;
    return !partial || attends(head.t, static_cast<std::size_t>(q), static_cast<std::size_t>(range.begin + j));
  }

 private:
  void count(Index j) { counters.add(head.place.k + head.t.k_names().data()[range.begin + j]); }
};

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
    if constexpr (kPacked<E>)
      p = math::detail::polynomial(r, 9.582853e-3f, 5.5906425e-2f, 2.4024099e-1f, 6.9312419e-1f, 1.0f);
    else  // to 1.9e-9
      p = math::detail::polynomial(r, 1.5345812e-4f, 1.3399931e-3f, 9.6184890e-3f, 5.5503288e-2f, 2.4022647e-1f,
                                   6.9314721e-1f, 1.0f);
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
