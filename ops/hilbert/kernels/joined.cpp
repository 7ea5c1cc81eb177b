// Tilings as one: keys behind each other, queries cut wherever one of them cuts.
#include "ops/hilbert/kernels/joined.h"
#include <algorithm>
#include <memory>
#include "ops/hilbert/plan/attends.h"

namespace hilt {
namespace {

/// What several tilings list of queries, cut wherever one of them cuts.
std::vector<Tiling::Range> common_tiles(std::span<const Tiling* const> all) {
  std::vector<std::int32_t> ends;
  for (const Tiling* t : all)
    for (const Tiling::Range& r : t->q_tile) ends.push_back(r.end);
  std::ranges::sort(ends);
  ends.erase(std::ranges::unique(ends).begin(), ends.end());
  std::vector<Tiling::Range> tiles;
  for (const std::int32_t end : ends) tiles.push_back({tiles.empty() ? 0 : tiles.back().end, end});
  return tiles;
}

std::unique_ptr<const Tiling> join(std::span<const Tiling* const> all) {
  const Tiling& one = *all[0];
  for (const Tiling* t : all)
    if (t->q_token != one.q_token || t->q_names() != one.q_names() || t->causal != one.causal ||
        t->q_ranks() != one.q_ranks() || !t->axis[0].key.empty())
      return nullptr;
  auto out = std::make_unique<Tiling>();
  add_all_queries(*out, one);
  out->grids = one.grids, out->q_tile = common_tiles(all);
  std::vector<std::int32_t> tiles_before;
  for (const Tiling* t : all) {
    tiles_before.push_back(narrow(out->k_tile.size()));
    add_all_keys(*out, *t);
    out->pairs += t->pairs;
  }
  std::vector<std::size_t> within(all.size());  // the tile of each that holds ours
  for (const Tiling::Range& r : out->q_tile) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Tiling& t = *all[i];
      while (t.q_tile[within[i]].end < r.end) ++within[i];
      for (const Tiling::Ref ref : t.met.of(within[i]))
        out->met.add(ref.tile + tiles_before[i], ref.tile + tiles_before[i] + 1, ref.partial);
    }
    out->met.end_list();
  }
  return out;
}

}  // namespace

const Tiling* joined_tiling(const PlanPart& part, std::span<const std::int32_t> tilings) {
  return part.memo
      .get<std::unique_ptr<const Tiling>>({tilings.begin(), tilings.end()},
                                          [&] {
                                            std::vector<const Tiling*> all;
                                            for (const std::int32_t i : tilings) all.push_back(&part.tilings[at(i)]);
                                            return join(all);
                                          })
      .get();
}

}  // namespace hilt
