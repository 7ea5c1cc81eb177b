// Which tiles of scores one attended set touches in each order, and pictures of it.
#include "arrangement.h"

#include <algorithm>

#include "../program/report/grid.h"
#include "../program/report/text.h"

namespace compare {
namespace {

constexpr Index kTile = hilt::Tiling::kTile;
constexpr Index kMostWalked = 1 << 14;  // cells: beyond, a picture of the walk is gray
constexpr Index kTones = 5;             // neighbouring tiles differ
constexpr Index kMostResolved = 128;    // cells or tiles a side
std::size_t at(Index i) { return static_cast<std::size_t>(i); }

const char* name_of(hilt::Order::Kind kind) {
  constexpr const char* names[] = {"row", "snake", "morton", "tiles", "hilbert"};
  return names[static_cast<std::size_t>(kind)];
}

Arrangement standing_in(hilt::Order::Kind kind, const hilt::Permutation& order) {
  return {.order = name_of(kind), .token_at = order.token_at, .position_of = order.position_of};
}

}  // namespace

Arrangement arrangement_of(const hilt::Plan& plan) {
  Arrangement a = standing_in(plan.spec().order.kind, plan.order());
  a.stats = plan.stats();
  if (plan.tilings().empty()) return a;
  const hilt::Tiling& t = plan.tilings()[0];
  a.rows = static_cast<Index>(t.q_tile.size()), a.columns = static_cast<Index>(t.k_tile.size());
  a.tiles.resize(at(a.rows * a.columns));
  for (Index i = 0; i < a.rows; ++i)
    for (auto e = at(t.keys_begin[at(i)]); e < at(t.keys_begin[at(i + 1)]); ++e)
      a.tiles[at(i * a.columns + t.keys[e].tile)] = t.keys[e].partial ? 1 : 2;
  return a;
}

Arrangement rearranged(const hilt::Plan& plan, const AttendedSets& sets, hilt::Order::Kind kind) {
  hilt::Order order = plan.spec().order;
  order.kind = kind;
  Arrangement a = standing_in(kind, *hilt::permutation(order, plan.length()));
  a.rows = a.columns = (plan.length() + kTile - 1) / kTile;
  const auto extent = [&](Index tile) { return std::min(kTile, plan.length() - tile * kTile); };
  std::vector<std::int32_t> held(at(a.rows * a.columns));
  for (const KeyLists& set : sets.sets) {
    std::ranges::fill(held, 0);
    for (std::size_t t = 0; t + 1 < set.begin.size(); ++t)
      for (std::size_t i = set.begin[t]; i < set.begin[t + 1]; ++i)
        if (i == set.begin[t] || set.key[i] != set.key[i - 1])  // a key listed twice is one pair of the tile
          ++held[at(a.position_of[t] / kTile * a.columns + a.position_of[at(set.key[i])] / kTile)];
    for (std::size_t tile = 0; tile < held.size(); ++tile) {
      const Index size = extent(static_cast<Index>(tile) / a.columns) * extent(static_cast<Index>(tile) % a.columns);
      const std::uint8_t state = held[tile] == 0 ? 0 : held[tile] < size ? 1 : 2;
      if (&set == &sets.sets[0]) a.tiles.push_back(state);
      a.stats.full += state == 2, a.stats.partial += state == 1, ++a.stats.total;
      a.stats.pairs += held[tile], a.stats.tile_pairs += state > 0 ? size : 0;
    }
  }
  return a;
}

bool order_changes_nothing(const hilt::PlanSpec& spec) {
  if (spec.causality == hilt::Causality::curve) return false;
  if (spec.order.scope == hilt::Order::Scope::order_only) return true;
  return std::ranges::all_of(spec.pattern, [&](const hilt::Branch& b) {
    const bool inside_segments = b.kind == hilt::Branch::Kind::segment && b.dilation == 1 &&
                                 spec.order.scope == hilt::Order::Scope::chunked && spec.order.chunk == b.size;
    return b.is_order_only() || inside_segments;
  });
}

std::string order_verdict(const std::vector<Arrangement>& orders) {
  const auto find = [&](const char* name) -> const Arrangement& {
    return *std::ranges::find(orders, name, &Arrangement::order);
  };
  const Arrangement &row = find("row"), &hilbert = find("hilbert");
  const double ratio = static_cast<double>(row.touched()) / static_cast<double>(std::max<Index>(hilbert.touched(), 1));
  std::string text;
  if (row.touched() > hilbert.touched())
    text = report::format("Hilbert order helps: it touches %.2f x fewer tiles than row order", ratio);
  else if (row.touched() < hilbert.touched())
    text = report::format("Hilbert order loses: it touches %.2f x more tiles than row order", 1 / ratio);
  else text = "Hilbert order does nothing for the work: it touches as many tiles as row order";
  if (row.touched() == hilbert.touched() && hilbert.stats.partial != row.stats.partial)
    text += ", " + std::to_string(hilbert.stats.partial) + " of them partial instead of " +
            std::to_string(row.stats.partial);
  std::string equal, better;
  for (const Arrangement& a : orders)
    if (a.order != "hilbert" && a.order != "row") {
      std::string* const list = a.touched() < hilbert.touched()    ? &better
                                : a.touched() == hilbert.touched() ? &equal
                                                                   : nullptr;
      if (list) *list += (list->empty() ? "" : ", ") + a.order;
    }
  if (!better.empty()) text += "; better than it: " + better;
  if (!equal.empty()) text += "; as good as it: " + equal;
  return text + ".";
}

Index example_token(const hilt::Plan& plan) {
  const hilt::Grid grid = plan.grid();
  return std::clamp<Index>(grid.height / 2 * grid.width + grid.width / 2 - 1, 0, plan.length() - 1);
}

std::string figure_of_order(const hilt::Plan& plan, Index token, const Arrangement& a) {
  const Index width = plan.grid().width, height = plan.grid().height * plan.grid().frames, length = plan.length();
  constexpr double kSide = 150, kGap = 12;
  const double scale = kSide / static_cast<double>(std::max(width, height));
  report::Svg svg(2 * kSide + kGap + 2, kSide + 2, a.order + " order",
                  "Left, the tokens on their grid, walked in order and toned by tiles of 128, with the keys of token " +
                      std::to_string(token) + " outlined. Right, the scores in tiles: " + std::to_string(a.stats.full) +
                      " full, " + std::to_string(a.stats.partial) + " partial, " +
                      std::to_string(a.stats.total - a.touched()) + " empty.");
  svg.rect(1, 1, scale * static_cast<double>(width), scale * static_cast<double>(height), "frame");
  if (length <= kMostWalked)
    for (Index tone = 0; tone < kTones; ++tone) {
      std::string walk;
      for (Index begin = tone * kTile; begin < length; begin += kTones * kTile)
        walk += report::walk_path(a.token_at, at(begin), at(begin + kTile), width);
      svg.path(walk, "curve t" + std::to_string(tone), 1, 1, scale);
    }
  const auto attends = [&](Index x, Index y) {
    return y * width + x < length && plan.attends(0, token, y * width + x) > 0;
  };
  svg.path(report::outline_path(width, height, attends), "outline", 1, 1, scale);
  const double left = kSide + kGap;
  svg.rect(left, 1, kSide, kSide, "frame");
  const Index pool = (std::max(a.rows, a.columns) + kMostResolved - 1) / std::max<Index>(kMostResolved, 1);
  if (pool == 0) return svg.str();
  const Index rows = (a.rows + pool - 1) / pool, columns = (a.columns + pool - 1) / pool;
  // Pooled tiles show the most that one of them holds.
  const auto state = [&](Index x, Index y) {
    std::uint8_t most = 0;
    for (Index i = y * pool; i < std::min((y + 1) * pool, a.rows); ++i)
      for (Index j = x * pool; j < std::min((x + 1) * pool, a.columns); ++j)
        most = std::max(most, a.tiles[at(i * a.columns + j)]);
    return most;
  };
  for (int wanted : {1, 2})
    svg.path(report::cells_path(columns, rows, [&](Index x, Index y) { return state(x, y) == wanted; }),
             wanted == 1 ? "cell part" : "cell full", left, 1, kSide / static_cast<double>(std::max(rows, columns)));
  return svg.str();
}

}  // namespace compare
