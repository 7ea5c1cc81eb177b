// Tilings as one: keys behind each other, queries cut wherever one of them cuts; documents of a row
// behind each other.
#include "ops/hilbert/kernels/joined.h"
#include <algorithm>
#include <map>
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
  out->grid = one.grid, out->q_tile = common_tiles(all);
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

// ---- documents ----------------------------------------------------------------------------------
namespace {

/// One place of one part of a plan.
struct Document {
  Tiling::Place at;
  const PlanPart* part;
};

/// What the tilings of some documents compare: a short one may need less than a long one.
struct Compared {
  std::int32_t boxes = 1;
  std::array<bool, 3> axis{};
  bool q_rank = false, k_rank = false;  // where they are not the names
  Compared(std::span<const Document> documents, std::size_t tiling) {
    for (const Document& d : documents) {
      const Tiling& t = d.part->tilings[tiling];
      boxes = std::max(boxes, t.boxes);
      q_rank = q_rank || !t.q_rank.empty(), k_rank = k_rank || !t.k_rank.empty();
      for (std::size_t a = 0; a < axis.size(); ++a) axis[a] = axis[a] || !t.axis[a].key.empty();
    }
  }
};
/// A tiling that compares all of that, and attends to what it did.
Tiling filled(Tiling t, const Compared& all) {
  if (all.q_rank && t.q_rank.empty()) t.q_rank = t.q_names();
  if (all.k_rank && t.k_rank.empty()) t.k_rank = t.k_names();
  for (std::size_t a = 0; a < all.axis.size(); ++a) {
    const auto fill = [&](std::vector<std::int32_t>& list, std::size_t entries) {
      std::vector<std::int32_t> out(entries * at(all.boxes), 0);
      for (std::size_t i = 0; !list.empty() && i < out.size(); ++i)
        out[i] = list[i / at(all.boxes) * at(t.boxes) + std::min(i % at(all.boxes), at(t.boxes) - 1)];
      list = std::move(out);
    };
    if (!all.axis[a]) continue;
    fill(t.axis[a].key, t.k_token.size());
    fill(t.axis[a].low, t.q_token.size()), fill(t.axis[a].high, t.q_token.size());
  }
  t.boxes = all.boxes;
  return t;
}

/// The tiles of all, none of which has pairs with another's.
Tiling lined_up(std::span<const Document> documents, std::size_t tiling) {
  const Compared compared(documents, tiling);
  Tiling out;
  for (const Document& d : documents) {
    const Tiling t = filled(d.part->tilings[tiling], compared);
    const auto tiles_before = narrow(out.k_tile.size());
    add_all_queries(out, t, {d.at.q, d.at.k, 0});
    add_all_keys(out, t, {d.at.k, d.at.k, 0});
    for (std::size_t i = 0; i < t.q_tile.size(); ++i) {
      for (const Tiling::Ref ref : t.met.of(i))
        out.met.add(ref.tile + tiles_before, ref.tile + tiles_before + 1, ref.partial);
      out.met.end_list();
    }
    out.pairs += t.pairs;
  }
  return out;
}

std::vector<PlanPart> rows_made(const Plan& plan) {
  std::map<std::int32_t, std::vector<Document>> rows;
  for (const PlanPart& part : plan.parts())
    for (const Tiling::Place& place : part.places.list) rows[place.row].push_back({place, &part});
  std::vector<PlanPart> out;
  for (auto& [row, documents] : rows) {
    std::ranges::sort(documents, {}, &Document::at);
    PlanPart& made = out.emplace_back(PlanPart{plan.length(), plan.queries()});
    if (rows.size() > 1 || !plan.parts()[0].places.each_row) made.places = {{{row, 0, 0}}, false};
    for (std::size_t i = 0; i < plan.parts()[0].tilings.size(); ++i) made.tilings.push_back(lined_up(documents, i));
  }
  return out;
}

}  // namespace

std::span<const PlanPart> row_parts(const Plan& plan) {
  const std::span<const PlanPart> parts = plan.parts();
  for (Index head = 0; head < plan.heads(); ++head)
    if (plan.tilings_of(head).size() != 1) return parts;
  if (parts.empty() || parts[0].places.list.empty()) return parts;
  return parts[0].memo.get<std::vector<PlanPart>>({}, [&] { return rows_made(plan); });
}

}  // namespace hilt
