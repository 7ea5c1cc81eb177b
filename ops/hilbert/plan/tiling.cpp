// Lists of tiles, attended pairs of tiles, and entries of tilings that others take.
#include <limits>
#include <utility>
#include "core/error.h"
#include "ops/hilbert/plan/attends.h"

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
    for (Index box = 0; box < boxes; ++box) {
      const std::int32_t x = from[at(i * boxes + box)];
      to.push_back(x == kTaken ? x : x + by);
    }
}

namespace {

/// Where a tiling has what it says of one side.
struct SideFields {
  TokenList Tiling::*token, Tiling::*name, Tiling::*rank;
  std::vector<Tiling::Range> Tiling::*tile;
  std::vector<std::int32_t> Tiling::*known;
  std::vector<std::vector<std::int32_t> Tiling::Axis::*> on_axis;
};
const SideFields kQuerySide{&Tiling::q_token, &Tiling::q_name,  &Tiling::q_rank,
                            &Tiling::q_tile,  &Tiling::q_known, {&Tiling::Axis::low, &Tiling::Axis::high}};
const SideFields kKeySide{&Tiling::k_token, &Tiling::k_name,  &Tiling::k_rank,
                          &Tiling::k_tile,  &Tiling::k_known, {&Tiling::Axis::key}};

void add_entries(const SideFields& side, Tiling& to, const Tiling& from, const TokenList& entries, const Moved& by) {
  const TokenList &token = from.*side.token, &name = from.*side.name;
  to.causal = from.causal, to.boxes = from.boxes;
  const bool named = !(to.*side.name).empty() || !name.empty() || by.row != by.name;
  if (named && (to.*side.name).empty()) to.*side.name = to.*side.token;
  if (named) add_list(to.*side.name, name.empty() ? token : name, entries, by.name);
  add_list(to.*side.token, token, entries, by.row);
  if (!(from.*side.rank).empty()) add_list(to.*side.rank, from.*side.rank, entries, 0);
  for (std::size_t a = 0; a < from.axis.size(); ++a)
    for (const auto list : side.on_axis)
      add_axis(to.axis[a].*list, from.axis[a].*list, entries, from.boxes, a == 0 ? by.number : 0);
}
void add_all(const SideFields& side, Tiling& to, const Tiling& from, const Moved& by) {
  const auto before = narrow((to.*side.token).size());
  for (const Tiling::Range& r : from.*side.tile) (to.*side.tile).push_back({before + r.begin, before + r.end});
  TokenList all;
  all.append(0, (from.*side.token).size());
  add_entries(side, to, from, all, by);
}

}  // namespace

void add_queries(Tiling& to, const Tiling& from, const TokenList& entries, const Moved& by) {
  add_entries(kQuerySide, to, from, entries, by);
}
void add_keys(Tiling& to, const Tiling& from, const TokenList& entries, const Moved& by) {
  add_entries(kKeySide, to, from, entries, by);
}
void add_all_queries(Tiling& to, const Tiling& from, const Moved& by) { add_all(kQuerySide, to, from, by); }
void add_all_keys(Tiling& to, const Tiling& from, const Moved& by) { add_all(kKeySide, to, from, by); }

Tiling with_lists(const Tiling& t, const Selection* queries, const Selection* keys, Tiling::Lists met) {
  Tiling out;
  for (const auto& [side, rows] : {std::pair(&kQuerySide, queries), std::pair(&kKeySide, keys)}) {
    if (rows) {
      add_entries(*side, out, t, rows->entries, {});
      add_axis(out.*side->known, t.*side->known, rows->entries, 1, 0);
      out.*side->tile = rows->tiles;
    } else {
      add_all(*side, out, t, {});
      out.*side->known = t.*side->known;
    }
  }
  out.grids = t.grids, out.met = std::move(met), out.pairs = t.pairs;
  return out;
}

}  // namespace hilt
