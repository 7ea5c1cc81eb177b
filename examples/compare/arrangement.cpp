// Which tiles of scores one attended set touches in each order, and pictures of it.
#include "arrangement.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "../program/report/grid.h"
#include "../program/report/text.h"

namespace compare {
namespace {

constexpr Index kTile = hilt::Tiling::kTile;
constexpr Index kMostWalked = 1 << 14;  // cells: beyond, a picture of the walk is gray
constexpr Index kTones = 5;             // neighbouring tiles differ
constexpr Index kMostResolved = 128;    // cells or tiles a side

hilt::Permutation permutation_of(const hilt::Plan& plan, hilt::Order::Kind kind) {
  std::vector<std::int32_t> token_at;
  for (const auto& [first, one] : alone(plan)) {
    hilt::Order order = one->spec().order;
    order.kind = kind;
    for (const std::int32_t t : hilt::permutation(order, one->length())->token_at)
      token_at.push_back(static_cast<std::int32_t>(first) + t);
  }
  while (std::ssize(token_at) < plan.length()) token_at.push_back(static_cast<std::int32_t>(token_at.size()));
  return hilt::make_permutation(std::move(token_at));
}

Arrangement standing_in(hilt::Order::Kind kind, const hilt::Permutation& order) {
  return {.order = hilt::to_string(hilt::Order{.kind = kind}),
          .token_at = order.token_at,
          .position_of = order.position_of};
}

}  // namespace

std::vector<hilt::Order::Kind> orders_of(const hilt::Plan& plan) {
  std::vector<hilt::Order::Kind> kinds;
  for (const hilt::Order::Kind kind : kOrders)
    if (std::ranges::all_of(alone(plan), [&](const auto& d) { return hilt::walks(kind, d.second->spec().order.grid); }))
      kinds.push_back(kind);
  return kinds;
}

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
  Arrangement a = standing_in(kind, permutation_of(plan, kind));
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

hilt::Permutation order_in_force(const hilt::Plan& plan) {
  return plan.spec().documents.empty() ? plan.order() : permutation_of(plan, plan.spec().order.kind);
}

hilt::Grid shown_grid(const hilt::Plan& plan) {
  return plan.spec().documents.empty() ? plan.grid() : hilt::fold(plan.length());
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
  const hilt::Grid grid = shown_grid(plan);
  return std::clamp<Index>(grid.height / 2 * grid.width + grid.width / 2 - 1, 0, plan.length() - 1);
}

report::Json picture_of(const hilt::Plan& plan, Index token, const Arrangement& a) {
  const hilt::Grid grid = shown_grid(plan);
  const Index width = grid.width, height = grid.height * grid.frames, length = plan.length();
  const auto attends = [&](Index x, Index y) {
    return y * width + x < length && plan.attends(0, token, y * width + x) > 0;
  };
  const auto cell = [&](std::size_t i) { return report::Json{a.token_at[i] % width, a.token_at[i] / width}; };
  report::Json out{{"order", a.order},
                   {"width", width},
                   {"height", height},
                   {"token", token},
                   {"walk", report::Json::array()},
                   {"outline", report::outline_path(width, height, attends)},
                   {"first", cell(0)},
                   {"last", cell(at(length - 1))}};
  for (Index tone = 0; tone < kTones && length <= kMostWalked; ++tone) {
    std::string walk;
    for (Index begin = tone * kTile; begin < length; begin += kTones * kTile)
      walk += report::walk_path(a.token_at, at(begin), at(begin + kTile), width);
    out["walk"].push_back(walk);
  }
  const Index pool = std::max<Index>(1, (std::max(a.rows, a.columns) + kMostResolved - 1) / kMostResolved);
  const Index rows = (a.rows + pool - 1) / pool, columns = (a.columns + pool - 1) / pool;
  // Pooled tiles show the most that one of them holds.
  const auto state = [&](Index x, Index y) {
    std::uint8_t most = 0;
    for (Index i = y * pool; i < std::min((y + 1) * pool, a.rows); ++i)
      for (Index j = x * pool; j < std::min((x + 1) * pool, a.columns); ++j)
        most = std::max(most, a.tiles[at(i * a.columns + j)]);
    return most;
  };
  const auto tiles = [&](int wanted) {
    return report::cells_path(columns, rows, [&](Index x, Index y) { return state(x, y) == wanted; });
  };
  out["tiles"] = {{"side", std::max(columns, rows)}, {"partial", tiles(1)}, {"full", tiles(2)}};
  out["count"] = {{"full", a.stats.full},
                  {"partial", a.stats.partial},
                  {"total", a.stats.total},
                  {"touched", a.stats.touched()},
                  {"useful", a.stats.useful()},
                  {"tiles", a.touched()},
                  {"neighbours", near_neighbours(a, width)}};
  return out;
}

double near_neighbours(const Arrangement& a, Index width) {
  const auto length = static_cast<Index>(a.position_of.size());
  Index pairs = 0, near = 0;
  const auto count = [&](Index t, Index u) {
    ++pairs;
    near += a.position_of[at(t)] / kTile == a.position_of[at(u)] / kTile;
  };
  for (Index t = 0; t < length; ++t) {
    if (t % width + 1 < width && t + 1 < length) count(t, t + 1);
    if (t + width < length) count(t, t + width);
  }
  return pairs ? static_cast<double>(near) / static_cast<double>(pairs) : 1;
}

}  // namespace compare
