#pragma once
#include "plan.h"

namespace hilt {

/// The mask, the only one: whether query i of a tiling attends to key j, indices into q_token and k_token. Holds for
/// the pairs of listed tiles; a tile that is not listed has none.
[[gnu::always_inline]] inline bool attends(const Tiling& t, std::size_t i, std::size_t j) {
  if (!t.q_rank.empty() && t.k_rank[j] > t.q_rank[i]) return false;
  if (!t.k_a.empty() && (t.k_a[j] < t.q_a_low[i] || t.k_a[j] > t.q_a_high[i])) return false;
  if (!t.k_b.empty() && (t.k_b[j] < t.q_b_low[i] || t.k_b[j] > t.q_b_high[i])) return false;
  return true;
}

}  // namespace hilt
