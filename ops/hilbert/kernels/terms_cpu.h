#pragma once
#include "ops/hilbert/kernels/rows_cpu.h"

// Score terms, a row of a tile at a time.

namespace hilt::kernels {
namespace {

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
  bool is_run = true;                 // of neighbouring tokens, in order

  KeyTerms(const Head& head_, Tiling::Range keys, const TermGradients& d_terms, TermSpace<W>& space_)
      : head(head_), d(d_terms), space(space_), key(t.k_names().data() + keys.begin), n(keys.end - keys.begin) {
    if (!terms) return;
    for (Index j = 0; j < n; ++j) {
      is_run = is_run && key[j] == key[0] + static_cast<std::int32_t>(j);
      const std::int32_t line = key[j] / kLineOfPairs;
      Index i = lines;
      while (i > 0 && space.line[i - 1] != line) --i;
      if (i == 0) space.line[lines++] = line;
    }
    if (terms->slopes) place(space.sites, terms->slopes_on_grid);
    if (terms->table) place(space.table_sites, terms->table_on_grid);
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
      const Site q = site_of(t.grid, terms->slopes_on_grid, query);
      for (Index j = 0; j < n; ++j) space.distance[j] = static_cast<W>(distance(q, space.sites.at(j)));
      for (Index j = 0; j < n; ++j) s[j] -= slope * space.distance[j];
    }
    if (terms->table) {
      const W* const table = static_cast<const W*>(terms->table) + h * terms->entries;
      const Site q = site_of(t.grid, terms->table_on_grid, query), reach = terms->reach;
      for (Index j = 0; j < n; ++j) space.entry[j] = entry(reach, q, space.table_sites.at(j));
      for (Index j = 0; j < n; ++j) s[j] += table[space.entry[j]];
    }
    int masked = 0;
    if (terms->bias.data)
      with_stored<W>(terms->bias.type, [&]<class B>() {
        const W* const bias = read(row_of<const B>(terms->bias, query), terms->bias.key);
        for (Index j = 0; j < n; ++j) {
          masked |= bias[j] == kMasked;
          s[j] = bias[j] == kMasked ? kMasked : s[j] + bias[j];
        }
      });
    return masked != 0;
  }
  /// Prefetches rows of the bias and of its gradient for a later query: they lie far apart, which
  /// no processor predicts. Inline, because GCC takes a call for one without effect.
  [[gnu::always_inline]] void fetch(std::int32_t query) const {
    fetch_row(terms->bias, query);
    fetch_row(d.bias, query);
  }
  bool masks(std::int32_t query, Index j) const {
    bool masked = false;
    if (terms->bias.data)
      with_stored<W>(terms->bias.type, [&]<class B>() {
        masked = static_cast<W>(row_of<const B>(terms->bias, query)[key[j] * terms->bias.key]) == kMasked;
      });
    return masked;
  }
  /// x = 0 where the bias masks.
  void drop(std::int32_t query, W* x) const {
    for (Index j = 0; j < n; ++j) x[j] = masks(query, j) ? 0 : x[j];
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
  static constexpr W kMasked = -std::numeric_limits<W>::infinity();
  void place(typename TermSpace<W>::Sites& to, bool on_grid) const {
    for (Index j = 0; j < n; ++j) {
      const Site s = site_of(t.grid, on_grid, key[j]);
      to.a[j] = s.a, to.b[j] = s.b, to.c[j] = s.c;
    }
  }
  /// A query's row of pairs, from the document's first key on.
  template <class X, class Void> X* row_of(const PairTensor<Void>& x, std::int32_t query) const {
    return x.template row<X>(b, h, first + query) + first * x.key;
  }
  /// f(j, element of key j) of a row of pairs.
  template <class B, class F> void each_key(B* row, Index step, F&& f) const {
    if (step == 0)
      for (Index j = 0; j < n; ++j) f(j, *row);
    else if (is_run && step == 1)
      for (Index j = 0; j < n; ++j) f(j, row[key[0] + j]);
    else
      for (Index j = 0; j < n; ++j) f(j, row[key[j] * step]);
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

}  // namespace
}  // namespace hilt::kernels
