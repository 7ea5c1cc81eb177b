#pragma once
#include "ops/hilbert/kernels/rows_cpu.h"
#include "ops/math.h"

// A row of scores: its terms, masks, dropout, softmax.

namespace hilt::kernels {
namespace {

// ---- score terms --------------------------------------------------------------------------------

/// A table's sums stand in so many columns: additions to one entry in a row would wait.
constexpr Index kSpread = 8;
constexpr Index kLineOfPairs = 16;  // elements of a row of pairs that are fetched together

template <class T> Stat<T> dot(const T* a, const T* b, Index n) {
  using W = Stat<T>;
  W part[kLanes<W>] = {}, sum = 0;
  Index d = 0;
  for (; d + kLanes<W> <= n; d += kLanes<W>)
    for (int l = 0; l < kLanes<W>; ++l) part[l] += static_cast<W>(a[d + l]) * static_cast<W>(b[d + l]);
  for (; d < n; ++d) sum += static_cast<W>(a[d]) * static_cast<W>(b[d]);
  for (W p : part) sum += p;
  return sum;
}

/// What a thread needs: of the keys, of a row, of a head.
template <class W> struct alignas(kLine) TermSpace {
  struct Sites {
    std::int32_t a[kTile], b[kTile], c[kTile];
    Site at(Index j) const { return {a[j], b[j], c[j]}; }
  };
  Sites sites, table_sites;
  std::int32_t entry[kTile], line[kTile];  // line: those of a row of pairs that its keys lie in
  W distance[kTile], cap_slope[kTile], ones[kTile], column[kTile], pair[kTile];
  W slope, *table;  // table: [entries, kSpread]
  Index entries;    // of a table whose gradient is summed

  /// Before a task, and after it, in its turn.
  void clear() {
    slope = 0;
    for (Index i = 0; i < entries * kSpread; ++i) table[i] = 0;
  }
  void finish(const TermGradients& d, Index h) const {
    if (d.slopes) static_cast<W*>(d.slopes)[h] -= slope;
    for (Index i = 0; i < entries; ++i) {
      W sum = 0;
      for (Index c = 0; c < kSpread; ++c) sum += table[i * kSpread + c];
      static_cast<W*>(d.table)[h * entries + i] += sum;
    }
  }
};

/// The terms of the keys of one tile for one head; false without any.
template <class W> struct KeyTerms {
  const Head& head;
  TermGradients d;
  TermSpace<W>& space;
  const Terms* terms = head.pass.terms;
  const Tiling& t = head.t;
  const std::int32_t* key;  // tokens of the document
  Index n, b = head.place.row, h = head.h, lines = 0;
  std::int32_t first = head.place.k;  // token of the row where the document begins
  const Site* points = terms ? terms->points_of(b) : nullptr;
  bool is_run = true;  // of neighbouring tokens, in order

  KeyTerms(const Head& head_, const std::int32_t* keys, Index count, const TermGradients& d_terms, TermSpace<W>& space_)
      : head(head_), d(d_terms), space(space_), key(keys), n(count) {
    if (!terms) return;
    for (Index j = 0; j < n; ++j) {
      is_run = is_run && key[j] == key[0] + static_cast<std::int32_t>(j);
      const std::int32_t line = key[j] / kLineOfPairs;
      Index i = lines;
      while (i > 0 && space.line[i - 1] != line) --i;
      if (i == 0) space.line[lines++] = line;
    }
    if (terms->slopes) place(space.sites, terms->slopes_on_grid, nullptr);
    if (terms->table) place(space.table_sites, terms->table_on_grid, points);
    for (Index j = 0; j < n; ++j) space.ones[j] = 1, space.column[j] = 0;
  }
  explicit operator bool() const { return terms != nullptr; }

  /// s becomes cap(s) + terms. Whether a bias masks one.
  bool add(std::int32_t query, W* s) const {
    if (terms->cap != 0) {
      const W cap = static_cast<W>(terms->cap), inverse = static_cast<W>(1 / terms->cap);
      for (Index j = 0; j < n; ++j) {
        const Capped<W> x = capped(s[j], cap, inverse);
        s[j] = x.s, space.cap_slope[j] = x.slope == x.slope ? x.slope : 0;  // NaN, of a pair that may be masked
      }
    }
    if (terms->slopes) {
      const W slope = static_cast<const W*>(terms->slopes)[h];
      const Site q = site_of(t.grids, terms->slopes_on_grid, query);
      for (Index j = 0; j < n; ++j) space.distance[j] = static_cast<W>(distance(q, space.sites.at(j)));
      for (Index j = 0; j < n; ++j) s[j] -= slope * space.distance[j];
    }
    if (terms->table) {
      const W* const table = static_cast<const W*>(terms->table) + h * terms->entries;
      const Site q = points ? points[first + query] : site_of(t.grids, terms->table_on_grid, query),
                 reach = terms->reach;
      for (Index j = 0; j < (points ? n : 0); ++j) space.entry[j] = entry<Index>(reach, q, space.table_sites.at(j));
      for (Index j = points ? n : 0; j < n; ++j) space.entry[j] = entry<int>(reach, q, space.table_sites.at(j));
      for (Index j = 0; j < n; ++j) s[j] += table[space.entry[j]];
    }
    int masked = 0;
    if (terms->bias.data)
      with_stored<W>(terms->bias.type, [&]<class B>() {
        const W* const bias = read(row_of<const B>(terms->bias, query), terms->bias.key);
        for (Index j = 0; j < n; ++j) {
          masked |= bias[j] == kMinusInfinity<W>;
          s[j] = bias[j] == kMinusInfinity<W> ? kMinusInfinity<W> : s[j] + bias[j];
        }
      });
    return masked != 0;
  }
  /// Prefetches rows of the bias and of its gradient for a later query: they lie far apart, which
  /// no processor predicts. Inline, because GCC takes a call for one without effect.
  [[gnu::always_inline]] void fetch(std::int32_t query) const {
    fetch_row(terms->bias, query), fetch_row(d.bias, query);
  }
  bool masks(std::int32_t query, Index j) const {
    W x = 0;
    const Index at = key[j] * terms->bias.key;
    if (terms->bias.data)
      with_stored<W>(terms->bias.type, [&]<class B>() { x = row_of<const B>(terms->bias, query)[at]; });
    return x == kMinusInfinity<W>;
  }

  /// The gradients of the terms from ds of the row that add() was for; then ds becomes dz.
  void collect(std::int32_t query, W* ds) const {
    if (d.slopes) space.slope += dot(ds, space.distance, n);
    if (d.table)
      for (Index j = 0; j < n; ++j) space.table[space.entry[j] * kSpread + j % kSpread] += ds[j];
    if (d.bias.data && d.bias.key == 0) *row_of<W>(d.bias, query) += dot(ds, space.ones, n);
    else if (d.bias.data && d.bias.query == 0)
      for (Index j = 0; j < n; ++j) space.column[j] += ds[j];
    else if (d.bias.data) each_key(row_of<W>(d.bias, query), d.bias.key, [&](Index j, W& sum) { sum += ds[j]; });
    if (terms->cap != 0)
      for (Index j = 0; j < n; ++j) ds[j] *= space.cap_slope[j];
  }
  /// Sums of these keys' columns, in their turn.
  void add_columns(Index from, Index to) const {
    if (d.bias.data && d.bias.query == 0 && d.bias.key != 0)
      for (Index j = from; j < to; ++j) row_of<W>(d.bias, 0)[key[j] * d.bias.key] += space.column[j];
  }

 private:
  void place(typename TermSpace<W>::Sites& to, bool on_grid, const Site* from) const {
    for (Index j = 0; j < n; ++j) {
      const Site s = from ? from[first + key[j]] : site_of(t.grids, on_grid, key[j]);
      to.a[j] = s.a, to.b[j] = s.b, to.c[j] = s.c;
    }
  }
  /// A query's row of pairs, from the document's first key on.
  template <class X, class Void> X* row_of(const PairTensor<Void>& x, std::int32_t query) const {
    return x.template row<X>(b, h, first + query) + first * x.key;
  }
  /// f(j, element of key j) of a row of pairs.
  template <class B, class F> void each_key(B* row, Index step, F&& f) const {
    for (Index j = 0; j < n; ++j) f(j, row[is_run ? (key[0] + j) * step : key[j] * step]);
  }
  template <class B> const W* read(const B* row, Index step) const {
    if constexpr (std::is_same_v<B, W>)
      if (is_run && step == 1) return row + key[0];
    each_key(row, step, [&](Index j, const B& x) { space.pair[j] = static_cast<W>(x); });
    return space.pair;
  }
  template <class Void> [[gnu::always_inline]] void fetch_row(const PairTensor<Void>& x, std::int32_t query) const {
    if (!x.data || x.query == 0 || x.key != 1) return;
    const auto size = static_cast<Index>(size_of(x.type));
    const char* const row = static_cast<const char*>(x.data) + (x.offset(b, h, first + query) + first) * size;
    for (Index i = 0; i < lines; ++i) __builtin_prefetch(row + space.line[i] * kLineOfPairs * size, 0, 2);
  }
};

/// Whether several heads or sequences add to one element of a bias's gradient.
inline bool is_shared(const PairTensor<void>& d, const AttentionSizes& s) {
  return d.data && d.key != 0 && d.query != 0 && ((d.batch == 0 && s.batch > 1) || (d.head == 0 && s.heads > 1));
}

// ---- masks, dropout, softmax --------------------------------------------------------------------

/// keep[j] = -1 for the keys j that query i attends to, else 0: attends(), a row at a time.
template <class I> void mask(const Tiling& t, Index i, Tiling::Range k, I* keep) {
  const Index n = k.end - k.begin, boxes = t.boxes;
  I in[kTile], *const box_keeps = boxes == 1 ? keep : in;
  const auto only = [&](I* to, const std::int32_t* key, auto step, std::int32_t low, std::int32_t high) {
    for (Index j = 0; j < n; ++j)
      to[j] &= -((I(key[j * step] >= low) & I(key[j * step] <= high)) | I(key[j * step] == kTaken));
  };
  constexpr std::integral_constant<Index, 1> kOne;
  for (Index box = 0; box < boxes; ++box) {
    for (Index j = 0; j < n; ++j) box_keeps[j] = -1;
    for (const Tiling::Axis& axis : t.axis) {
      if (axis.key.empty()) continue;
      const std::int32_t *const key = axis.key.data() + k.begin * boxes + box, low = axis.low.data()[i * boxes + box],
                                high = axis.high.data()[i * boxes + box];
      boxes == 1 ? only(keep, key, kOne, low, high) : only(in, key, boxes, low, high);
    }
    for (Index j = 0; boxes > 1 && j < n; ++j) keep[j] = box == 0 ? in[j] : keep[j] | in[j];
  }
  if (t.causal) only(keep, t.k_ranks().data() + k.begin, kOne, INT32_MIN, t.q_ranks().data()[i]);
}

/// Keys by the counters that decide for them, see attention_bits(): neighbours often share one.
struct Counters {
  Index keys = 0, runs = 0;
  std::uint32_t block[kTile] = {};               // of a run: key / 8
  std::int32_t word[kTile], low_or_high[kTile];  // of a key: which of all words, and its bits of that
  void add(std::int32_t token) {
    const auto key = static_cast<std::uint32_t>(token);
    if (runs == 0 || block[runs - 1] != key / 8) block[runs++] = key / 8;
    word[keys] = static_cast<std::int32_t>(key % 8 / 2 * kTile + runs - 1), low_or_high[keys++] = key % 2 * 16;
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
  const std::uint8_t* listed = head.t.pairs_of(number);  // its pairs, or null
  const std::int32_t* key = head.k_name + range.begin;
  KeyTerms<W> terms;
  Counters counters;
  std::int32_t first = 0;  // of the keys that causality compares

  KeyTile(const Head& head_, std::int32_t tile, const TermGradients& d_terms, RowSpace<W>& space_)
      : head(head_), space(space_), number(tile), terms(head, key, n, d_terms, space.terms) {
    for (Index j = 0; head.pass.causal && j < n; ++j) first = j == 0 || key[j] < first ? key[j] : first;
    if (head.pass.sizes.dropout > 0 && !listed)
      for (Index j = 0; j < n; ++j) counters.add(head.place.k + key[j]);
  }
  /// What dropout multiplies the weights of query q with, of its list or of all keys: 0, or what
  /// makes up for the weights that are dropped. Null without dropout.
  const W* multipliers_of(Index q, const std::uint8_t* list) {
    const AttentionSizes& s = head.pass.sizes;
    if (s.dropout == 0) return nullptr;
    if (list) counters.keys = counters.runs = 0;
    for (Index i = 0; list && i < *list; ++i) counters.add(head.place.k + key[list[1 + i]]);
    const auto row = static_cast<std::uint32_t>((s.first_batch + head.place.row) * s.heads + s.first_head + head.h),
               t = static_cast<std::uint32_t>(head.place.k + head.q_name[q]);
    std::uint32_t words[4 * kTile];
    for (Index r = 0; r < whole_vectors<std::uint32_t>(counters.runs); ++r) {
      const auto bits = attention_bits(s.key, row, t, counters.block[r]);
      for (Index i = 0; i < 4; ++i) words[i * kTile + r] = bits[at(i)];
    }
    const W kept = static_cast<W>(keep_scale(s.dropout));
    for (Index j = 0; j < counters.keys; ++j) {  // without branches, which nobody would foresee
      const std::uint32_t bits = words[counters.word[j]] >> counters.low_or_high[j] & 0xffff;
      space.multiplier[j] = kept * static_cast<W>(bits >= s.dropout);
    }
    return space.multiplier;
  }
  /// What query q attends to, as mask() says it, or null: to all.
  const Lane<W>* mask_of(Index q, bool partial) const {
    if (!(partial || head.pass.causal) || listed) return nullptr;
    mask(head.t, q, range, space.keep);
    for (Index j = 0, t = head.q_name[q]; head.pass.causal && j < n; ++j) space.keep[j] &= -(key[j] <= t);
    return space.keep;
  }
  bool pairs(Index q, Index j, bool partial) const {
    if ((terms && terms.masks(head.q_name[q], j)) || (head.pass.causal && key[j] > head.q_name[q])) return false;
    return !partial || attends(head.t, static_cast<std::size_t>(q), static_cast<std::size_t>(range.begin + j));
  }
};

template <int Width, class W, class Op, int... Lane>
W fold(Vector<W> x, Op op, std::integer_sequence<int, Lane...> lanes) {
  if constexpr (Width == 0) return x[0];
  else return fold<Width / 2, W>(op(x, __builtin_shufflevector(x, x, ((Lane + Width) % kLanes<W>)...)), op, lanes);
}
template <class W, class Op> W fold(Vector<W> x, Op op) { return fold<kLanes<W> / 2, W>(x, op, kEach<W>); }

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
