// Counts attended pairs of tiles, takes entries of tilings for others, and joins tilings.
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/plan.h"
#include "ops/hilbert/plan/tiles.h"

namespace hilt {

void Tiling::Lists::add(std::int32_t first, std::int32_t end, bool is_partial) {
  (is_partial ? partial : full) += end - first;
  const bool own = std::ssize(run) > begin.back();
  if (own && run.back().end == first && run.back().partial == is_partial) run.back().end = end;
  else run.push_back({first, end, is_partial});
}

void Tiling::Lists::end_list() {
  if (std::cmp_greater(run.size(), std::numeric_limits<std::int32_t>::max()))
    fail_with(Code::memory, "plan: ", run.size(), " runs of tiles; a list can name 2147483647");
  begin.push_back(narrow(run.size()));
}

Tiling::Lists Tiling::Lists::transposed(std::size_t tiles) const {
  std::vector<std::vector<Run>> runs(tiles);
  for (Index i = 0; i < count(); ++i)
    for (const Ref ref : of(at(i))) {
      std::vector<Run>& its = runs[at(ref.tile)];
      if (!its.empty() && its.back().end == i && its.back().partial == ref.partial) ++its.back().end;
      else its.push_back({narrow(i), narrow(i + 1), ref.partial});
    }
  Lists out;
  for (const std::vector<Run>& its : runs) {
    for (const Run& r : its) out.add(r.begin, r.end, r.partial);
    out.end_list();
  }
  return out;
}

/// Pairs whose key ranks no higher than the query, in linear time where both lists ascend.
static Index count_by_rank(const Tiling& t, Tiling::Range q, Tiling::Range k) {
  Index n = 0;
  if (t.q_ranks().counts_up() && t.k_ranks().counts_up()) {
    const Index first = t.k_ranks()[at(k.begin)], keys = k.end - k.begin;
    for (auto i = q.begin; i < q.end; ++i) n += std::clamp<Index>(t.q_ranks()[at(i)] - first + 1, 0, keys);
    return n;
  }
  const auto sorted = [](const TokenList& ranks, Tiling::Range r) {
    std::vector<std::int32_t> some(at(r.end - r.begin));
    for (auto i = r.begin; i < r.end; ++i) some[at(i - r.begin)] = ranks[at(i)];
    if (!std::ranges::is_sorted(some)) std::ranges::sort(some);
    return some;
  };
  const std::vector<std::int32_t> keys = sorted(t.k_ranks(), k);
  auto end = keys.begin();
  for (const std::int32_t rank : sorted(t.q_ranks(), q)) {
    while (end != keys.end() && *end <= rank) ++end;
    n += end - keys.begin();
  }
  return n;
}

Index count_pairs(const Tiling& t, Tiling::Range q, Tiling::Range k) {
  // Causal segments and dense: most of what is counted in a long plan.
  if (t.causal && t.axis[0].key.empty()) return count_by_rank(t, q, k);
  Index n = 0;
  for (std::int32_t i = q.begin; i < q.end; ++i) {
    const QueryBounds bounds = bounds_of(t, at(i));
    for (std::int32_t j = k.begin; j < k.end; ++j)
      n += t.boxes == 1 ? attends(bounds, place_of(t, at(j))) : attends(t, at(i), at(j));
  }
  return n;
}

static void add_list(TokenList& to, const TokenList& from, const TokenList& entries, std::int32_t by) {
  if (from.counts_up() && entries.counts_up() && !entries.empty() && !from.empty())
    return to.append(from[at(entries[0])] + by, entries.size());
  for (const std::int32_t i : entries) to.push_back(from[at(i)] + by);
}
static void add_axis(std::vector<std::int32_t>& to, const std::vector<std::int32_t>& from, const TokenList& entries,
                     Index boxes, std::int32_t by) {
  if (from.empty()) return;
  for (const std::int32_t i : entries)
    for (Index box = 0; box < boxes; ++box) to.push_back(from[at(i * boxes + box)] + by);
}

/// One side of a tiling.
template <class List> struct Side { List &token, &name, &rank; };
static void add_side(const Side<TokenList>& to, const Side<const TokenList>& from, const TokenList& entries,
                     const Moved& by) {
  const bool named = !to.name.empty() || !from.name.empty() || by.row != by.name;
  if (named && to.name.empty()) to.name = to.token;
  if (named) add_list(to.name, from.name.empty() ? from.token : from.name, entries, by.name);
  add_list(to.token, from.token, entries, by.row);
  if (!from.rank.empty()) add_list(to.rank, from.rank, entries, 0);
}

void add_queries(Tiling& to, const Tiling& from, const TokenList& entries, const Moved& by) {
  to.causal = from.causal, to.boxes = from.boxes;
  add_side({to.q_token, to.q_name, to.q_rank}, {from.q_token, from.q_name, from.q_rank}, entries, by);
  for (std::size_t a = 0; a < from.axis.size(); ++a) {
    add_axis(to.axis[a].low, from.axis[a].low, entries, from.boxes, a == 0 ? by.number : 0);
    add_axis(to.axis[a].high, from.axis[a].high, entries, from.boxes, a == 0 ? by.number : 0);
  }
}

void add_keys(Tiling& to, const Tiling& from, const TokenList& entries, const Moved& by) {
  to.causal = from.causal, to.boxes = from.boxes;
  add_side({to.k_token, to.k_name, to.k_rank}, {from.k_token, from.k_name, from.k_rank}, entries, by);
  for (std::size_t a = 0; a < from.axis.size(); ++a)
    add_axis(to.axis[a].key, from.axis[a].key, entries, from.boxes, a == 0 ? by.number : 0);
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

std::unique_ptr<const Tiling> join(std::span<const Tiling* const> all) {
  const Tiling& one = *all[0];
  for (const Tiling* t : all)
    if (t->q_token != one.q_token || t->q_names() != one.q_names() || t->causal != one.causal ||
        t->q_ranks() != one.q_ranks() || !t->axis[0].key.empty())
      return nullptr;
  auto out = std::make_unique<Tiling>();
  out->grid = one.grid, out->q_tile = common_tiles(all);
  add_queries(*out, one, all_of(one.q_token));
  std::vector<std::int32_t> tiles_before;
  for (const Tiling* t : all) {
    const std::int32_t rows = narrow(out->k_token.size());
    tiles_before.push_back(narrow(out->k_tile.size()));
    for (const Tiling::Range& r : t->k_tile) out->k_tile.push_back({rows + r.begin, rows + r.end});
    add_keys(*out, *t, all_of(t->k_token));
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
