// Which tiles of scores one attended set touches in each order, and pictures of it.
#include "arrangement.h"
#include <nlohmann/json.hpp>

namespace compare {
namespace {

constexpr Index kTile = hilt::Tiling::kTile;
constexpr Index kMostWalked = 4096;   // cells: beyond, a picture has the tones of tiles alone
constexpr Index kTones = 5;           // neighbouring tiles differ
constexpr Index kMostResolved = 128;  // tiles a side
constexpr std::uint8_t kBlank = 7;    // the level of cells without a token

/// The order of the tokens of a row; of documents, that of each.
hilt::Permutation walk_of(const hilt::Plan& plan) {
  std::vector<std::int32_t> token_at = hilt::query_run(0, plan.length());
  for (const auto& [first, one] : alone(plan)) {
    Index place = first + one->spec().outside();
    const auto behind = static_cast<std::int32_t>(place);
    for (const std::int32_t t : hilt::permutation(one->spec().order, first + one->length() - place)->token_at)
      token_at[at(place++)] = behind + t;
  }
  return hilt::make_permutation(std::move(token_at));
}

}  // namespace

hilt::Permutation order_in_force(const hilt::Plan& plan) {
  return plan.spec().documents.empty() ? plan.order() : walk_of(plan);
}

std::vector<Arrangement> arrangements_of(const hilt::Plan& plan) {
  std::vector<Arrangement> all;
  using Kind = hilt::Order::Kind;
  for (const Kind kind : {Kind::row, Kind::snake, Kind::morton, Kind::tiles, Kind::hilbert}) {
    if (!std::ranges::all_of(alone(plan),
                             [&](const auto& d) { return hilt::walks(kind, d.second->spec().order.grid); }))
      continue;
    hilt::PlanSpec spec = plan.spec();
    spec.order.kind = kind;
    const hilt::PlanPtr other = hilt::make_plan(spec);
    all.push_back({hilt::to_string(hilt::Order{.kind = kind}), other, walk_of(*other), other->stats()});
  }
  return all;
}

report::Sheet sheet_of(const hilt::Plan& plan) {
  std::vector<report::Frame> frames;
  const auto add = [&](const hilt::Grid& g, Index tokens) {
    for (Index first = 0; first < tokens; first += g.width * g.height)
      frames.push_back({g.width, g.height, std::min(g.width * g.height, tokens - first)});
  };
  Index end = 0;
  for (const auto& [first, one] : alone(plan)) {
    const Index before = one->spec().outside();
    if (before > 0) add({before, 1}, before);
    add(one->grid(), one->length() - before), end = first + one->length();
  }
  if (end < plan.length()) add(hilt::fold(plan.length() - end), plan.length() - end);
  return report::Sheet(frames);
}

std::vector<Index> tiles_on(const report::Sheet& sheet, const std::vector<std::int32_t>& position_of) {
  std::vector<Index> tile(at(sheet.columns * sheet.rows), -1);
  for (std::size_t t = position_of.size(); t-- > 0;)
    tile[sheet.cell[t]] = position_of[t] / kTile;  // the first of a cell stays
  return tile;
}

bool order_changes_nothing(const hilt::PlanSpec& spec) {
  if (spec.causality == hilt::Causality::curve) return false;
  if (spec.order.scope == hilt::Order::Scope::order_only) return true;
  return std::ranges::all_of(spec.pattern, [&](const hilt::Branch& b) {
    const bool inside = b.kind == hilt::Branch::Kind::segment && b.dilation == 1 && b.axes[0] == hilt::Branch::Axis{} &&
                        spec.order.scope == hilt::Order::Scope::chunked && spec.order.chunk == b.size;
    return b.is_order_only() || inside;
  });
}

std::string order_verdict(const std::vector<Arrangement>& orders) {
  const Arrangement &row = orders.front(), &hilbert = orders.back();
  const double ratio = static_cast<double>(row.touched()) / static_cast<double>(std::max<Index>(hilbert.touched(), 1));
  std::string text = "Hilbert order does nothing for the work: it touches as many tiles as row order";
  if (ratio > 1) text = report::format("Hilbert order helps: it touches %.2f x fewer tiles than row order", ratio);
  if (row.touched() < hilbert.touched())
    text = report::format("Hilbert order loses: it touches %.2f x more tiles than row order", 1 / ratio);
  if (row.touched() == hilbert.touched() && hilbert.stats.partial != row.stats.partial)
    text += ", " + std::to_string(hilbert.stats.partial) + " of them partial instead of " +
            std::to_string(row.stats.partial);
  for (const bool equal : {false, true}) {
    std::string list;
    for (const Arrangement& a : orders)
      if (&a != &row && &a != &hilbert && (equal ? a.touched() == hilbert.touched() : a.touched() < hilbert.touched()))
        list += (list.empty() ? equal ? "; as good as it: " : "; better than it: " : ", ") + a.order;
    text += list;
  }
  return text + ".";
}

std::string table_line(const Arrangement& a) {
  return report::format("%-8s %6ld %8ld %9ld %9s %9s", a.order.c_str(), a.stats.full, a.stats.partial, a.stats.total,
                        report::percent(a.stats.touched()).c_str(), report::percent(a.stats.useful()).c_str());
}

/// A token in the middle of a grid.
static Index example_token(const hilt::Plan& plan) {
  Index token = 0;
  for (const auto& [first, one] : alone(plan)) {
    const hilt::Grid g = one->grid();
    const Index middle = one->spec().outside() + (g.frames / 2 * g.height + g.height / 2) * g.width + g.width / 2 - 1;
    token = first + std::clamp<Index>(middle, 0, std::max<Index>(one->length(), 1) - 1);
    if (2 * (first + one->length()) > plan.length()) break;  // the document in the middle
  }
  return token;
}

/// The share of neighbours on the grid that stand in one tile of 128: how local an order is.
static double near_neighbours(const Arrangement& a) {
  Index pairs = 0, near = 0;
  for (const auto& [first, one] : alone(*a.plan)) {
    const Index width = one->grid().width, frame = width * one->grid().height;
    const Index behind = first + one->spec().outside(), cells = first + one->length() - behind;
    const auto meet = [&](Index t, Index u) {
      if (u >= cells) return;
      ++pairs;
      near += a.walk.position_of[at(behind + t)] / kTile == a.walk.position_of[at(behind + u)] / kTile;
    };
    for (Index t = 0; t < cells; ++t) {
      if ((t + 1) % width) meet(t, t + 1);
      if ((t + width) % frame >= width) meet(t, t + width);
      meet(t, t + frame);
    }
  }
  return pairs ? static_cast<double>(near) / static_cast<double>(pairs) : 1;
}

/// The tiles of the first set: a level for each of at most so many a side, 0 empty, 1 partial, 2
/// full. Pooled tiles show the most that one of them holds. Documents lie down the diagonal.
static report::Json tiles_of(const hilt::Plan& plan) {
  std::vector<const hilt::Tiling*> tilings;
  Index rows = 0, columns = 0, row = 0, column = 0;
  const auto documents = alone(plan);
  for (const auto& [first, one] : documents) {
    if (one->tilings().empty()) continue;
    tilings.push_back(&one->tilings()[0]);
    rows += std::ssize(tilings.back()->q_tile), columns += std::ssize(tilings.back()->k_tile);
  }
  const Index pool = std::max<Index>(1, (std::max(rows, columns) + kMostResolved - 1) / kMostResolved);
  rows = (rows + pool - 1) / pool, columns = (columns + pool - 1) / pool;
  std::vector<std::uint8_t> most(at(rows * columns), 0);
  for (const hilt::Tiling* t : tilings) {
    for (std::size_t i = 0; i < t->q_tile.size(); ++i, ++row)
      for (const hilt::Tiling::Ref ref : t->met.of(i)) {
        std::uint8_t& held = most[at(row / pool * columns + (column + ref.tile) / pool)];
        held = std::max<std::uint8_t>(held, ref.partial ? 1 : 2);
      }
    column += std::ssize(t->k_tile);
  }
  return {{"columns", columns}, {"rows", rows}, {"cells", report::packed(most)}};
}

report::Json picture_of(const Arrangement& a) {
  const hilt::Plan& plan = *a.plan;
  const report::Sheet sheet = sheet_of(plan);
  const Index token = example_token(plan);
  std::vector<std::uint8_t> keys(at(sheet.columns * sheet.rows), 0), tones;
  for (Index t = 0; t < plan.length(); ++t) keys[sheet.cell[at(t)]] |= plan.attends(0, token, t) > 0;
  report::Json out{{"order", a.order},
                   {"columns", sheet.columns},
                   {"rows", sheet.rows},
                   {"token", token},
                   {"keys", report::packed(keys)},
                   {"first", sheet.cell[at(a.walk.token_at.front())]},
                   {"last", sheet.cell[at(a.walk.token_at.back())]}};
  if (plan.length() <= kMostWalked && sheet.pool == 1) {
    std::string walk;  // the cell of each place, two characters from ! to ~
    for (const std::int32_t t : a.walk.token_at)
      walk += static_cast<char>('!' + sheet.cell[at(t)] / 94), walk += static_cast<char>('!' + sheet.cell[at(t)] % 94);
    out["walk"] = walk;
  } else {
    for (const Index tile : tiles_on(sheet, a.walk.position_of))
      tones.push_back(tile < 0 ? kBlank : static_cast<std::uint8_t>(tile % kTones));
    out["tones"] = report::packed(tones);
  }
  out["tiles"] = tiles_of(plan);
  out["count"] = {{"full", a.stats.full},
                  {"partial", a.stats.partial},
                  {"total", a.stats.total},
                  {"touched", a.stats.touched()},
                  {"useful", a.stats.useful()},
                  {"tiles", a.touched()},
                  {"neighbours", near_neighbours(a)}};
  return out;
}

}  // namespace compare
