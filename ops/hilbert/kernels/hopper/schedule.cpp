// Ranks are counted owner by owner. An owner goes to tiles where it is early first: those before it
// have long been there, and those after it find its part where they begin. Owners that meet most
// tiles, and far more than others, come last: whoever came after them would wait at each tile.
#include "ops/hilbert/kernels/hopper/schedule.h"
#include "ops/hilbert/kernels/hopper/kernels.h"
#include "ops/hilbert/plan/attends.h"

namespace hilt {
namespace {

/// Tiles of queries, ascending.
std::vector<Tiling::Range> tiles_of(const VisitSide& queries, std::int32_t rows) {
  std::vector<Tiling::Range> out;
  for (const VisitSide::Owner& own : queries.owner)
    for (std::int32_t row = 0; row < own.rows; row += rows)
      out.push_back({own.row + row, own.row + std::min(own.rows, row + rows)});
  std::ranges::sort(out, {}, &Tiling::Range::begin);
  return out;
}

}  // namespace

kernels::hopper::Schedule kernels::hopper::schedule_of(const Visits& visits, Index queries) {
  Schedule out;
  const std::vector<Tiling::Range> tiles = tiles_of(visits.queries, narrow(queries));
  std::vector<std::uint32_t> ranks(tiles.size());
  std::vector<VisitSide::Owner> all = visits.keys.owner;  // that with most steps first
  const Index usual = all.empty() ? 0 : all[all.size() / 2].steps,
              half = std::ssize(tiles) * queries / Visits::kCell / 2;
  std::ranges::stable_partition(all, [&](const auto& own) { return own.steps <= std::max(2 * usual, half); });
  for (VisitSide::Owner own : all) {
    const auto its = visits.keys.of(own);
    own.first = narrow(out.meeting.size());
    Index tile = 0;
    for (const VisitSide::Visit& v : its)
      for (Index row = v.row; row < v.row + v.rows; row += Visits::kCell) {
        if (tiles[at(tile)].end <= row) ++tile;  // as a rule it is the same, or the next
        if (row < tiles[at(tile)].begin || row >= tiles[at(tile)].end)
          tile = std::ranges::upper_bound(tiles, row, {}, &Tiling::Range::begin) - tiles.begin() - 1;
        const auto [begin, end] = tiles[at(tile)];
        if (std::ssize(out.meeting) == own.first || out.meeting.back().tile != tile)
          out.meeting.push_back({begin, end - begin, 0, narrow(tile)});
        out.meeting.back().cell[at((row - begin) / Visits::kCell)] = v.cell;
      }
    const auto met = std::span(out.meeting).subspan(at(own.first));
    for (Schedule::Meeting& m : met) {
      m.turn = ranks[at(m.tile)]++ << Schedule::kRankShift;
      for (std::uint32_t h : {0u, 1u})
        if (m.cell[0][h] != Visits::kFull || (queries > Visits::kCell && m.cell[1][h] != Visits::kFull))
          m.turn |= Schedule::kMasked << h;
    }
    std::ranges::sort(met, {}, [](const auto& m) { return (Index{m.turn >> Schedule::kRankShift} << 32) - m.row; });
    own.visits = own.steps = narrow(met.size());
    out.owner.push_back(own);
  }
  for (Schedule::Meeting& m : out.meeting)
    if (m.turn >> Schedule::kRankShift == ranks[at(m.tile)] - 1) m.turn |= Schedule::kLast;
  out.tiles = std::ssize(tiles);
  return out;
}

std::array<Index, 4> kernels::hopper_sums(const Tiling& t, Index dim) {
  const VisitSide &queries = visits(t).queries, &keys = visits(t).keys;
  return {std::ssize(tiles_of(queries, dim <= 64 ? 128 : 64)) * hopper::kSumBytes, queries.parts, keys.parts,
          std::max(queries.made, keys.made) * Visits::kWords * 4};
}

}  // namespace hilt
