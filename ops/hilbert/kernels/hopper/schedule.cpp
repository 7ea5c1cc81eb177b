// Ranks are counted owner by owner. An owner goes to tiles where it is early first: those before it
// have long been there, and those after it find its part where they begin. Owners that meet most
// tiles, and far more than others, come last: whoever came after them would wait at each tile.
#include "ops/hilbert/kernels/hopper/schedule.h"
#include <algorithm>
#include <span>
#include "ops/hilbert/kernels/hopper/kernels.h"
#include "ops/hilbert/plan/attends.h"

namespace hilt::kernels {
namespace hopper {
namespace {

constexpr std::int32_t kCell = Visits::kCell;

/// Tiles of queries, ascending.
std::vector<Tiling::Range> tiles_of(const VisitSide& queries, std::int32_t rows) {
  std::vector<Tiling::Range> out;
  for (const VisitSide::Owner& own : queries.owner)
    for (std::int32_t row = 0; row < own.rows; row += rows)
      out.push_back({own.row + row, own.row + std::min(own.rows, row + rows)});
  std::ranges::sort(out, {}, &Tiling::Range::begin);
  return out;
}

/// Adds a step of an owner; what belongs to the tile of the one before joins it.
void append(Schedule& out, const VisitSide::Owner& own, const std::vector<Tiling::Range>& tiles, std::int32_t row,
            const std::array<std::uint16_t, 2>& cell) {
  const bool begins = std::ssize(out.meeting) == own.first;
  Index tile = begins ? 0 : out.meeting.back().tile;  // or, as a rule, the next
  if (!begins && tiles[at(tile)].end <= row) ++tile;
  if (row < tiles[at(tile)].begin || row >= tiles[at(tile)].end)
    tile = std::ranges::upper_bound(tiles, row, {}, &Tiling::Range::begin) - tiles.begin() - 1;
  const Tiling::Range rows = tiles[at(tile)];
  if (begins || out.meeting.back().tile != tile)
    out.meeting.push_back({rows.begin, rows.end - rows.begin, 0, narrow(tile)});
  out.meeting.back().cell[at((row - rows.begin) / kCell)] = cell;
}

std::uint32_t masked_halves(const Schedule::Meeting& m, Index queries) {
  std::uint32_t out = 0;
  for (std::uint32_t half = 0; half < 2; ++half)
    for (Index step = 0; step < queries / kCell; ++step)
      if (m.cell[at(step)][half] != Visits::kFull) out |= Schedule::kMasked << half;
  return out;
}

}  // namespace

Schedule schedule_of(const Visits& visits, Index queries) {
  Schedule out;
  const std::vector<Tiling::Range> tiles = tiles_of(visits.queries, narrow(queries));
  std::vector<std::uint32_t> ranks(tiles.size());
  std::vector<VisitSide::Owner> all = visits.keys.owner;  // that with most steps first
  const Index usual = all.empty() ? 0 : all[all.size() / 2].steps, half = std::ssize(tiles) * queries / kCell / 2;
  std::ranges::stable_partition(all, [&](const auto& own) { return own.steps <= std::max(2 * usual, half); });
  for (VisitSide::Owner own : all) {
    const auto its = visits.keys.of(own);
    own.first = narrow(out.meeting.size());
    for (const VisitSide::Visit& v : its)
      for (std::int32_t row = 0; row < v.rows; row += kCell) append(out, own, tiles, v.row + row, v.cell);
    const auto met = std::span(out.meeting).subspan(at(own.first));
    for (Schedule::Meeting& m : met) m.turn = ranks[at(m.tile)]++ << Schedule::kRankShift | masked_halves(m, queries);
    std::ranges::sort(met, {}, [](const auto& m) { return (Index{m.turn >> Schedule::kRankShift} << 32) - m.row; });
    own.visits = own.steps = narrow(met.size());
    out.complete = out.complete && !met.empty();
    out.owner.push_back(own);
  }
  for (Schedule::Meeting& m : out.meeting) {
    if (m.turn >> Schedule::kRankShift == ranks[at(m.tile)] - 1) m.turn |= Schedule::kLast;
    out.masked += (m.turn & 3 * Schedule::kMasked) != 0, out.partial += m.rows < queries;
  }
  out.tiles = std::ssize(tiles), out.complete = out.complete && std::ranges::count(ranks, 0u) == 0;
  return out;
}

}  // namespace hopper

std::array<Index, 4> hopper_sums(const Tiling& t, Index dim) {
  const VisitSide &queries = visits(t).queries, &keys = visits(t).keys;
  return {std::ssize(hopper::tiles_of(queries, dim <= 64 ? 128 : 64)) * hopper::kSumBytes, queries.parts, keys.parts,
          std::max(queries.made, keys.made) * Visits::kWords * 4};
}

}  // namespace hilt::kernels
