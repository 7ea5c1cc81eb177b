// Counts attended pairs of tiles, and lists for every key tile the query tiles that need it.
#include <algorithm>
#include <numeric>
#include "ops/hilbert/plan/attends.h"

namespace hilt {

/// Pairs whose key ranks no higher than the query, in linear time where both lists ascend.
static Index count_by_rank(const Tiling& t, Tiling::Range q, Tiling::Range k) {
  const auto sorted = [](const std::vector<std::int32_t>& ranks, Tiling::Range r) {
    std::vector<std::int32_t> some(ranks.begin() + r.begin, ranks.begin() + r.end);
    if (!std::ranges::is_sorted(some)) std::ranges::sort(some);
    return some;
  };
  const std::vector<std::int32_t> keys = sorted(t.k_ranks(), k);
  Index n = 0;
  auto end = keys.begin();
  for (const std::int32_t rank : sorted(t.q_ranks(), q)) {
    while (end != keys.end() && *end <= rank) ++end;
    n += end - keys.begin();
  }
  return n;
}

Index count_pairs(const Tiling& t, Tiling::Range q, Tiling::Range k) {
  // Causal segments and dense: most of what is counted in a long plan.
  if (t.causal && t.k_a.empty()) return count_by_rank(t, q, k);
  Index n = 0;
  for (std::int32_t i = q.begin; i < q.end; ++i) {
    const QueryBounds bounds = bounds_of(t, at(i));
    for (std::int32_t j = k.begin; j < k.end; ++j)
      n += t.boxes == 1 ? attends(bounds, place_of(t, at(j))) : attends(t, at(i), at(j));
  }
  return n;
}

void transpose_tiles(Tiling& t) {
  std::vector<std::int32_t> n(t.k_tile.size() + 1);
  for (const Tiling::Ref& ref : t.keys) ++n[at(ref.tile) + 1];
  std::partial_sum(n.begin(), n.end(), n.begin());
  t.queries_begin = n;
  t.queries.resize(t.keys.size());
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1]; ++e) {
      const Tiling::Ref ref = t.keys[at(e)];
      t.queries[at(n[at(ref.tile)]++)] = {narrow(i), ref.partial};
    }
}

}  // namespace hilt
