// Counts attended pairs of tiles, lists for every key tile the query tiles that need it, and joins
// tilings.
#include <mutex>
#include <numeric>
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/plan.h"

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

std::shared_ptr<const Tiling> join(std::span<const Tiling* const> all) {
  const Tiling& one = *all[0];
  for (const Tiling* t : all)
    if (t->q_token != one.q_token || t->q_names() != one.q_names() || t->causal != one.causal ||
        t->q_ranks() != one.q_ranks() || !t->k_a.empty())
      return nullptr;
  auto out = std::make_shared<Tiling>();
  out->grid = one.grid, out->causal = one.causal;
  out->q_token = one.q_token, out->q_name = one.q_name, out->q_rank = one.q_rank;
  std::vector<std::int32_t> tiles_before;
  for (const Tiling* t : all) {
    const std::int32_t rows = narrow(out->k_token.size());
    tiles_before.push_back(narrow(out->k_tile.size()));
    for (const Tiling::Range& r : t->k_tile) out->k_tile.push_back({rows + r.begin, rows + r.end});
    const auto add = [](std::vector<std::int32_t>& to, const std::vector<std::int32_t>& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    add(out->k_token, t->k_token), add(out->k_name, t->k_names());
    if (one.causal) add(out->k_rank, t->k_ranks());
  }
  out->q_tile = common_tiles(all);
  std::vector<std::size_t> within(all.size());  // the tile of each that holds ours
  for (const Tiling::Range& r : out->q_tile) {
    out->keys_begin.push_back(narrow(out->keys.size()));
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Tiling& t = *all[i];
      while (t.q_tile[within[i]].end < r.end) ++within[i];
      for (auto e = t.keys_begin[within[i]]; e < t.keys_begin[within[i] + 1]; ++e) {
        const Tiling::Ref ref{t.keys[at(e)].tile + tiles_before[i], t.keys[at(e)].partial};
        out->keys.push_back(ref);
        ++(ref.partial ? out->tiles_partial : out->tiles_full);
      }
    }
  }
  for (const Tiling* t : all) out->pairs += t->pairs;
  out->keys_begin.push_back(narrow(out->keys.size()));
  transpose_tiles(*out);
  return out;
}

}  // namespace

const Tiling* joined_tiling(const PlanPart& part, std::span<const std::int32_t> tilings) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const auto [entry, fresh] = part.joined.try_emplace({tilings.begin(), tilings.end()});
  if (fresh) {
    std::vector<const Tiling*> all;
    for (const std::int32_t i : tilings) all.push_back(&part.tilings[at(i)]);
    entry->second = join(all);
  }
  return entry->second.get();
}

}  // namespace hilt
