// Which owner adds to a tile of dQ when: visits are met once, ranks are the order of owners,
// and any number of blocks that take owners in order comes to an end.
#include "ops/hilbert/kernels/hopper/schedule.h"
#include <gtest/gtest.h>
#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/plan.h"

using namespace hilt;
using kernels::hopper::Dispatch;
using kernels::hopper::Schedule;
using kernels::hopper::schedule_of;

namespace {

struct Set {
  Index length;
  const char *pattern, *order;
  Causality causality = Causality::none;
};
const Set kSets[] = {
    {300, "dense", "row"},
    {1024, "dense", "row", Causality::token},
    {1000, "dense", "hilbert", Causality::token},
    {2048, "segment:512", "hilbert"},
    {900, "segment:300", "row", Causality::token},
    {640, "slide:100", "row"},
    {1024, "neighborhood2d:7x7", "hilbert:32x32"},
    {1000, "segment:100", "row"},
    {3000, "slide:100,prefix=200", "row"},
    {2000, "blocks:128@global_local:1:1", "row"},
};
Visits visits_of(const Set& s) {
  PlanSpec spec;
  spec.length = s.length, spec.pattern = parse_pattern(s.pattern), spec.order = parse_order(s.order, s.length);
  spec.causality = s.causality;
  return hilt::visits_of(make_plan(spec)->tilings()[0]);
}
std::uint32_t rank_of(const Schedule::Meeting& m) { return m.turn >> Schedule::kRankShift; }

/// (row of keys, first row of a step of queries, half) and its cell.
using Cells = std::map<std::tuple<std::int32_t, std::int32_t, int>, std::uint16_t>;

// Their parts of dQ come after all others, so that nobody waits for them.
TEST(Schedule, OwnersOfTokensThatMeetAllComeLast) {
  const Visits visits = visits_of({3000, "slide:100,prefix=200", "row"});
  const Schedule s = schedule_of(visits, 64);
  EXPECT_EQ(visits.keys.owner[0].row, 0);
  EXPECT_EQ(s.owner.back().row, 128);
  EXPECT_EQ(s.owner[s.owner.size() - 2].row, 0);
  EXPECT_GE(s.owner[0].row, 200);
}

TEST(Schedule, MeetsWhatVisitsHold) {
  for (const Set& set : kSets)
    for (const Index queries : {64, 128}) {
      SCOPED_TRACE(testing::Message() << set.pattern << ' ' << set.order << ' ' << set.length << ", " << queries);
      const Visits visits = visits_of(set);
      const Schedule s = schedule_of(visits, queries);
      Cells want, got;
      Index masked = 0, partial = 0;
      for (const VisitSide::Owner& own : visits.keys.owner)
        for (auto v = own.first; v < own.first + own.visits; ++v)
          for (std::int32_t row = 0; row < visits.keys.visit[at(v)].rows; row += 64)
            for (int half = 0; half < 2; ++half)
              if (const auto cell = visits.keys.visit[at(v)].cell[at(half)]; cell != Visits::kEmpty)
                want[{own.row, visits.keys.visit[at(v)].row + row, half}] = cell;
      for (const VisitSide::Owner& own : s.owner)
        for (auto v = own.first; v < own.first + own.steps; ++v) {
          const Schedule::Meeting& m = s.meeting[at(v)];
          EXPECT_LE(m.rows, queries);
          bool its_masked = false;
          for (int half = 0; half < 2; ++half) {
            bool full = true;
            for (std::int32_t step = 0; step < queries / 64; ++step) {
              const std::uint16_t cell = m.cell[at(step)][at(half)];
              full = full && cell == Visits::kFull;
              if (cell == Visits::kEmpty) continue;
              EXPECT_LT(64 * step, m.rows);
              EXPECT_TRUE(got.emplace(std::tuple{own.row, m.row + 64 * step, half}, cell).second) << "met twice";
            }
            EXPECT_EQ((m.turn & Schedule::kMasked << half) == 0, full);
            its_masked = its_masked || !full;
          }
          masked += its_masked, partial += m.rows < queries;
        }
      EXPECT_TRUE(want == got);
      const std::size_t tiles = queries == 128;
      EXPECT_EQ(visits.meetings[tiles], std::ssize(s.meeting));
      EXPECT_EQ(visits.masked[tiles], masked);
      EXPECT_EQ(visits.partial[tiles], partial);
    }
}

TEST(Schedule, RanksAreTheOrderOfOwners) {
  for (const Set& set : kSets)
    for (const Index queries : {64, 128}) {
      SCOPED_TRACE(testing::Message() << set.pattern << ' ' << set.order << ' ' << set.length << ", " << queries);
      const Visits visits = visits_of(set);
      const Schedule s = schedule_of(visits, queries);
      std::vector<std::uint32_t> ranks(at(s.tiles));
      std::vector<bool> ended(at(s.tiles));
      for (const VisitSide::Owner& own : s.owner) {
        const auto its = std::span(s.meeting).subspan(at(own.first), at(own.steps));
        EXPECT_TRUE(std::ranges::is_sorted(its, {}, rank_of)) << "it goes first where it is early";
        for (auto v = own.first; v < own.first + own.steps; ++v) {
          const Schedule::Meeting& m = s.meeting[at(v)];
          EXPECT_EQ(rank_of(m), ranks[at(m.tile)]++);
          EXPECT_FALSE(ended[at(m.tile)]) << "a part behind the last";
          ended[at(m.tile)] = m.turn & Schedule::kLast;
        }
      }
      EXPECT_EQ(std::ranges::count(ended, false), 0);
      EXPECT_TRUE(visits.complete[queries == 128]);
    }
}

/// 384 tokens that meet each other, but for these queries, and for keys behind so many tiles.
Visits without(Tiling::Range rows, std::int32_t keys) {
  PlanSpec spec;
  spec.length = 384, spec.pattern = parse_pattern("slide:384");
  Tiling t = make_plan(spec)->tilings()[0];
  for (std::int32_t row = rows.begin; row < rows.end; ++row) t.axis[0].low[at(row)] = 1, t.axis[0].high[at(row)] = 0;
  t.met = {};
  for (const Tiling::Range& tile : t.q_tile) {
    if (tile.begin < rows.begin || rows.end < tile.end)
      t.met.add(0, keys, tile.begin < rows.end && rows.begin < tile.end);
    t.met.end_list();
  }
  return hilt::visits_of(t);
}

// Their gradients would be written by nobody.
TEST(Schedule, KnowsOfOwnersThatMeetNobody) {
  const Visits all = without({0, 0}, 3), some = without({0, 0}, 2);
  EXPECT_TRUE(all.complete[0] && all.complete[1]);
  EXPECT_FALSE(some.complete[0] || some.complete[1]) << "the last keys";
}
TEST(Schedule, KnowsOfQueriesThatNobodyMeets) {
  const Visits tile = without({128, 256}, 3), half = without({128, 192}, 3);
  EXPECT_FALSE(tile.complete[0] || tile.complete[1]);
  EXPECT_FALSE(half.complete[0]);
  EXPECT_TRUE(half.complete[1]) << "its other half does";
  EXPECT_FALSE(half.one_owner);
}

/// Steps until all owners of all calls are through, each adding its parts in turn: 0 if nobody can
/// go on. Blocks take items as they stand; a part is there for the next owner `late` steps later.
Index steps_of(const Schedule& s, const Dispatch& order, std::size_t blocks, Index late = 1) {
  std::vector<std::pair<Index, const VisitSide::Owner*>> items;  // call, owner
  for (int i = 0, call = 0, owner = 0; i < order.size; ++i)
    if (order.at(i, call, owner)) items.emplace_back(call, &s.owner[at(owner)]);
  std::vector<std::pair<std::uint32_t, Index>> added(at(order.calls * s.tiles));  // parts, and since when
  struct Block {
    std::size_t item;
    std::int32_t met = 0;
  };
  std::vector<Block> running;
  std::size_t taken = 0;
  for (; taken < std::min(blocks, items.size()); ++taken) running.push_back({taken});
  Index steps = 0;
  for (Index idle = 0; !running.empty() && idle <= late; ++steps, ++idle) {
    for (Block& b : running) {
      const auto& [call, own] = items[b.item];
      if (b.met < own->steps) {
        const Schedule::Meeting& m = s.meeting[at(own->first + b.met)];
        auto& [parts, since] = added[at(call * s.tiles + m.tile)];
        if (parts != rank_of(m) || (parts > 0 && since + late > steps)) continue;
        ++parts, since = steps, ++b.met;
      }
      idle = -1;
      if (b.met == own->steps) b = {taken++};
    }
    std::erase_if(running, [&](const Block& b) { return b.item >= items.size(); });
  }
  return running.empty() ? steps : 0;
}

TEST(Schedule, OrdersHaveEveryOwnerOnceAndThoseOfACallInTheirOrder) {
  for (const Index calls : {1, 2, 7, 64})
    for (const Index owners : {1, 5, 32, 130})
      for (const Index steps : {1, 30, 700, 30000})
        for (const Index blocks : {1, 5, 132}) {
          const Dispatch order(calls, owners, steps, blocks);
          std::vector<int> next(at(calls));
          for (int i = 0, call = 0, owner = 0; i < order.size; ++i)
            if (order.at(i, call, owner)) { ASSERT_EQ(next[at(call)]++, owner); }
          EXPECT_EQ(std::ranges::count(next, owners), calls);
          EXPECT_LE(order.size, 4 * (calls + order.together) * (owners + order.stagger));
        }
}

TEST(Schedule, EndsWithAnyNumberOfBlocks) {
  for (const Set& set : kSets)
    for (const Index queries : {64, 128}) {
      const Schedule s = schedule_of(visits_of(set), queries);
      for (const Index calls : {1, 3, 14})
        for (const std::size_t blocks : {1, 2, 5, 132})
          for (const Index planned : {1, 5, 132})
            EXPECT_GT(steps_of(s, Dispatch(calls, std::ssize(s.owner), std::ssize(s.meeting), planned), blocks), 0)
                << set.pattern << ' ' << set.order << ' ' << set.length << ", " << queries << " queries, " << calls
                << " calls, " << blocks << " blocks of " << planned;
    }
}

// Owners of a call begin one after the other, so that blocks wait little: within a tenth of the
// work that each has.
TEST(Schedule, WaitsLittle) {
  for (const auto& [causality, calls, queries] : {std::tuple<Causality, Index, Index>{Causality::none, 64, 64},
                                                  {Causality::token, 64, 64},
                                                  {Causality::none, 128, 128},
                                                  {Causality::token, 128, 128}}) {
    const Schedule s = schedule_of(visits_of({4096, "dense", "row", causality}), queries);
    const Index meetings = std::ssize(s.meeting), blocks = 132, work = calls * meetings / blocks;
    const Index steps = steps_of(s, Dispatch(calls, std::ssize(s.owner), meetings, blocks), at(blocks), 2);
    EXPECT_LT(10 * steps, 11 * work) << name_of(causality) << ' ' << queries << ": " << steps << " of " << work;
  }
}

}  // namespace
