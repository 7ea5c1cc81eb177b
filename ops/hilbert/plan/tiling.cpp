// Counts attended pairs of tiles, and lists for every key tile the query tiles that need it.
#include <algorithm>
#include <numeric>
#include "ops/hilbert/plan/attends.h"

namespace hilt {

Index count_pairs(const Tiling& t, Tiling::Range q, Tiling::Range k) {
  const bool by_rank_alone = t.k_a.empty() && t.k_b.empty();  // causal segments: most of what is counted in a long plan
  Index n = 0;
  for (std::int32_t i = q.begin; i < q.end; ++i) {
    const QueryBounds bounds = bounds_of(t, static_cast<std::size_t>(i));
    if (by_rank_alone)
      n += std::count_if(t.k_rank.begin() + k.begin, t.k_rank.begin() + k.end,
                         [&](std::int32_t rank) { return rank <= bounds.rank; });
    else
      for (std::int32_t j = k.begin; j < k.end; ++j) n += attends(bounds, place_of(t, static_cast<std::size_t>(j)));
  }
  return n;
}

void transpose_tiles(Tiling& t) {
  std::vector<std::int32_t> n(t.k_tile.size() + 1);
  for (const Tiling::Ref& ref : t.keys) ++n[static_cast<std::size_t>(ref.tile) + 1];
  std::partial_sum(n.begin(), n.end(), n.begin());
  t.queries_begin = n;
  t.queries.resize(t.keys.size());
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1]; ++e) {
      const Tiling::Ref ref = t.keys[static_cast<std::size_t>(e)];
      t.queries[static_cast<std::size_t>(n[static_cast<std::size_t>(ref.tile)]++)] = {static_cast<std::int32_t>(i),
                                                                                      ref.partial};
    }
}

}  // namespace hilt
