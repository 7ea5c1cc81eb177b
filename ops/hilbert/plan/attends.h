#pragma once
#include "tiling.h"

// The mask, the only one. Lists: a Tiling, or what a GPU sees of one.

namespace hilt {

/// What is compared of a query and of a key. Where a tiling has no such test, zeros pass.
struct QueryBounds {
  std::int32_t rank = 0, a_low = 0, a_high = 0, b_low = 0, b_high = 0;
};
struct KeyPlace {
  std::int32_t rank = 0, a = 0, b = 0;
};

/// Of query i, an index into q_token.
template <class Lists> [[gnu::always_inline]] constexpr QueryBounds bounds_of(const Lists& t, std::size_t i) {
  QueryBounds q;
  if (!t.q_rank.empty()) q.rank = t.q_rank[i];
  if (!t.k_a.empty()) q.a_low = t.q_a_low[i], q.a_high = t.q_a_high[i];
  if (!t.k_b.empty()) q.b_low = t.q_b_low[i], q.b_high = t.q_b_high[i];
  return q;
}
/// Of key j, an index into k_token.
template <class Lists> [[gnu::always_inline]] constexpr KeyPlace place_of(const Lists& t, std::size_t j) {
  KeyPlace k;
  if (!t.q_rank.empty()) k.rank = t.k_rank[j];
  if (!t.k_a.empty()) k.a = t.k_a[j];
  if (!t.k_b.empty()) k.b = t.k_b[j];
  return k;
}
[[gnu::always_inline]] constexpr bool attends(const QueryBounds& q, const KeyPlace& k) {
  return k.rank <= q.rank && k.a >= q.a_low && k.a <= q.a_high && k.b >= q.b_low && k.b <= q.b_high;
}

/// Whether query i of a tiling attends to key j. Holds for the pairs of listed tiles; a tile that
/// is not listed has none.
template <class Lists> [[gnu::always_inline]] constexpr bool attends(const Lists& t, std::size_t i, std::size_t j) {
  return attends(bounds_of(t, i), place_of(t, j));
}

/// How many pairs of these runs attend. They must all be of listed tiles.
Index count_pairs(const Tiling& t, Tiling::Range q, Tiling::Range k);
/// Fills queries and queries_begin from keys and keys_begin.
void transpose_tiles(Tiling& t);

}  // namespace hilt
