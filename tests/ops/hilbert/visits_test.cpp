// What kernels walk against the tiling it was made from, pair by pair in both directions, and how
// few masks and visits are left.
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/hopper/visits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/plan.h"

using namespace hilt;

namespace {

PlanPtr plan_of(Index length, const std::string& pattern, const std::string& order, Causality causality,
                DilationMode mode = DilationMode::all_queries) {
  PlanSpec s;
  s.length = length, s.pattern = parse_pattern(pattern);
  s.order = parse_order(order, behind_prefix(s.pattern, length));
  s.causality = causality, s.dilation_mode = mode;
  return make_plan(s);
}
std::size_t at(Index i) { return static_cast<std::size_t>(i); }

using Pairs = std::vector<std::pair<std::int32_t, std::int32_t>>;  // of list places: query, key; sorted

Pairs pairs_of(const Tiling& t) {
  Pairs out;
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    for (const Tiling::Ref ref : t.met.of(i)) {
      const Tiling::Range k = t.k_tile[at(ref.tile)];
      for (auto q = t.q_tile[i].begin; q < t.q_tile[i].end; ++q)
        for (auto j = k.begin; j < k.end; ++j)
          if (!ref.partial || attends(t, at(q), at(j))) out.emplace_back(q, j);
    }
  std::ranges::sort(out);
  return out;
}

/// The pairs that owners of one side, or their parts, walk over, and whether what lies beyond their
/// rows is as promised.
Pairs pairs_of(const Tiling& t, const Visits& v, const VisitSide& side, const std::vector<VisitSide::Owner>& owners) {
  const bool by_keys = &side == &v.keys;
  const std::size_t halves = &side == &v.threes ? 3 : 2;
  Pairs out;
  std::int32_t before = std::numeric_limits<std::int32_t>::max();
  for (const VisitSide::Owner& own : owners) {
    if (own.steps > 0) {
      EXPECT_EQ(own.front.row, side.visit[at(own.first)].row);
      EXPECT_EQ(own.front.rows, side.visit[at(own.first)].rows);
    } else {
      EXPECT_EQ(own.front.rows, 0) << "a walk begins there";
    }
    EXPECT_LE(own.steps, before) << "not the longest first";
    before = own.steps;
    std::int32_t steps = 0;
    for (auto e = own.first; e < own.first + own.visits; ++e) {
      const VisitSide::Visit& visit = side.visit[at(e)];
      for (std::int32_t first = 0; first < visit.rows; first += 64, ++steps)
        for (std::size_t half = 0; half < halves; ++half) {
          const auto cell = half < 2 ? visit.cell[half] : visit.mask;
          for (std::int32_t thread = 0; thread < 128; ++thread)
            for (std::int32_t bit = 0; bit < 32; ++bit) {
              const std::int32_t row = 64 * static_cast<std::int32_t>(half) + thread / 32 * 16 + thread % 32 / 4 +
                                       bit / 16 * 8,
                                 column = first + bit % 16 / 2 * 8 + thread % 4 * 2 + bit % 2;
              const bool inside = row < own.rows && column < visit.rows;
              const auto q = by_keys ? visit.row + column : own.row + row,
                         k = by_keys ? own.row + row : visit.row + column;
              bool attended = cell == Visits::kFull;
              if (cell == Visits::kCompare) attended = inside && attends(t, at(q), at(k));
              if (cell >= Visits::kMasks)
                attended = v.mask[at(cell - Visits::kMasks) * Visits::kWords + at(thread)] >> bit & 1;
              if (attended && !inside) ADD_FAILURE() << "what is not there attends";
              if (attended && inside) out.emplace_back(q, k);
            }
        }
    }
    EXPECT_EQ(steps, own.steps);
  }
  std::ranges::sort(out);
  return out;
}

struct Set {
  Index length;
  const char *pattern, *order;
  Causality causality = Causality::none;
  DilationMode mode = DilationMode::all_queries;
};

TEST(Visits, ShortListsAreTheSameSetInFewerCells) {
  struct Case {
    Set set;
    bool queries, keys;  // where these own, lists of the other side save a fifth
  };
  const Case cases[] = {
      {{3136, "neighborhood2d:7x7", "hilbert:56x56"}, true, true},
      {{2048, "neighborhood2d:7x7", "row:16x128"}, true, true},
      {{1028, "neighborhood2d:7x7,prefix=4", "hilbert:32x32", Causality::curve}, true, true},
      {{1000, "slide2d:3x2", "hilbert:25x40"}, true, true},
      {{2048, "neighborhood3d:3x5x5", "hilbert:8x16x16"}, true, true},
      {{6000, "neighborhood3d:3x5x5", "hilbert:15x20x20"}, true, true},  // 1 MB has no room for its own masks
      {{1500, "neighborhood2d:5x5|slide:4", "hilbert:30x50"}, true, true},
      {{1500, "slide:20", "row"}, true, true},
      {{2304, "neighborhood2d:21x21", "hilbert:48x48"}, false, false},
      {{1024, "window2d:16x16", "row:32x32"}, false, false},
      {{1000, "segment:40", "row", Causality::token}, false, false},
      {{2048, "slide:144", "row"}, false, false},
  };
  for (const auto& [set, queries, keys] : cases) {
    SCOPED_TRACE(testing::Message() << set.pattern << ' ' << set.order << ' ' << set.length);
    const PlanPtr plan = plan_of(set.length, set.pattern, set.order, set.causality, set.mode);
    const Tiling& t = plan->tilings()[0];
    const auto named = [](const Tiling& its, Pairs pairs) {  // by rows of the tensors
      for (auto& [q, k] : pairs) q = its.q_token[at(q)], k = its.k_token[at(k)];
      std::ranges::sort(pairs);
      return pairs;
    };
    const Pairs want = named(t, pairs_of(t));
    for (const bool by_keys : {false, true}) {
      const Tiling& lists = with_short_lists(t, by_keys);
      ASSERT_EQ(&lists != &t, by_keys ? keys : queries);
      if (&lists == &t) continue;
      const Visits& made = visits(lists);
      const VisitSide& owned = by_keys ? made.keys : made.queries;
      EXPECT_TRUE(named(lists, pairs_of(lists, made, owned, owned.owner)) == want);
      EXPECT_TRUE(named(lists, pairs_of(lists)) == want);
      const auto cells = [&](const Tiling& its) { return (by_keys ? visits(its).keys : visits(its).queries).cells; };
      EXPECT_LE(5 * cells(lists), 4 * cells(t));
      EXPECT_EQ(owned.made, 0) << "cells are compared in each call";
      const auto ends = [](const std::vector<Tiling::Range>& tiles) {
        std::vector<std::int32_t> out;
        for (const Tiling::Range& r : tiles) out.push_back(r.end);
        return out;
      };
      EXPECT_EQ(ends(by_keys ? lists.k_tile : lists.q_tile), ends(by_keys ? t.k_tile : t.q_tile)) << "marks name them";
    }
  }
}

TEST(Visits, CoverWhatTheTilingLists) {
  const Set sets[] = {
      {300, "dense", "row"},
      {300, "dense", "row", Causality::token},
      {1024, "dense", "hilbert", Causality::token},
      {777, "dense", "snake", Causality::curve},
      {1000, "segment:64", "hilbert"},
      {1000, "segment:64,tail=borrow", "hilbert"},
      {1000, "segment:100,shift=37,tail=borrow", "hilbert", Causality::token},
      {1000, "segment:300,shift=37,tail=borrow", "hilbert", Causality::curve},
      {1004, "segment:64,tail=borrow,prefix=4", "hilbert"},
      {1000, "segment:130,tail=borrow|slide:9", "row", Causality::token},
      {1000, "slide:200,causal=1", "row"},
      {333, "slide:900", "hilbert", Causality::token},
      {1, "slide:3", "row"},
      {1000, "neighborhood:1501", "row", Causality::token},
      {1000, "segment:40", "row", Causality::token},
      {700, "segment:100", "hilbert"},
      {1024, "segment:256,dilation=8", "row"},
      {1024, "segment:256,dilation=8", "row", Causality::none, DilationMode::residue},
      {900, "segment:256,dilation=3,offset=2", "row", Causality::token, DilationMode::longnet},
      {640, "slide:33", "hilbert"},
      {640, "neighborhood:101", "row", Causality::token},
      {1024, "neighborhood2d:7x7", "hilbert:32x32"},
      {900, "slide2d:3x2", "tiles:30x30/8x16", Causality::token},
      {1024, "window2d:8x8", "hilbert:32x32"},
      {700, "dense,prefix=5", "hilbert", Causality::curve},
      {1004, "segment:64,prefix=4", "hilbert"},
      {800, "segment:256,dilation=3,offset=2,prefix=70", "row", Causality::token, DilationMode::longnet},
      {1028, "neighborhood2d:7x7,prefix=4", "hilbert:32x32"},
      {1224, "window2d:8x8,prefix=200", "hilbert:32x32", Causality::token},
  };
  for (const Set& set : sets)
    for (const std::size_t most : {std::size_t{1} << 20, std::size_t{2} * 128 * 4, std::size_t{0}}) {
      SCOPED_TRACE(testing::Message() << set.pattern << ' ' << set.order << ' ' << set.length << " bytes " << most);
      const PlanPtr plan = plan_of(set.length, set.pattern, set.order, set.causality, set.mode);
      const Tiling& t = plan->tilings()[0];
      const Visits v = visits_of(t, most);
      const Pairs want = pairs_of(t);
      for (const bool by_keys : {false, true}) {
        const VisitSide& side = by_keys ? v.keys : v.queries;
        EXPECT_TRUE(pairs_of(t, v, side, side.owner) == want);
        EXPECT_TRUE(side.part.empty() || pairs_of(t, v, side, side.part) == want);
      }
      EXPECT_TRUE(v.threes.owner.empty() || pairs_of(t, v, v.threes, v.threes.owner) == want);
      EXPECT_LE(v.mask.size() * 4, most);
    }
}

// What ranks leave that come with the call: no cell is full or has a mask before they are there.
TEST(Visits, CompareEachCellWhereRanksComeWithTheCall) {
  for (const char* pattern : {"dense", "segment:64", "segment:1024", "slide:70", "segment:96,dilation=3"}) {
    SCOPED_TRACE(pattern);
    const PlanPtr plan = plan_of(1000, pattern, "given", Causality::none, DilationMode::all_queries);
    const Tiling& t = plan->tilings()[0];
    const Tiling& any = kernels::with_ranks_of_call(t);
    EXPECT_EQ(any.met.full, 0);
    EXPECT_EQ(any.met.partial, t.met.full + t.met.partial);
    const Visits& v = visits(any);
    const Pairs want = pairs_of(t);
    for (const VisitSide* side : {&v.queries, &v.keys}) {
      EXPECT_TRUE(pairs_of(any, v, *side, side->owner) == want);
      EXPECT_TRUE(side->part.empty() || pairs_of(any, v, *side, side->part) == want);
      for (const VisitSide::Visit& visit : side->visit)
        for (const std::uint16_t cell : visit.cell) EXPECT_TRUE(cell == Visits::kEmpty || cell == Visits::kCompare);
    }
    EXPECT_TRUE(v.mask.empty() && v.mixed);
  }
}

// Owners of 192 rows, where that saves a tenth of the stages.
TEST(Visits, ComeByThreeHalves) {
  const auto check = [](const Set& set, bool threes, std::size_t most = std::size_t{1} << 20) {
    SCOPED_TRACE(testing::Message() << set.pattern << ' ' << set.order << ' ' << set.length);
    const PlanPtr plan = plan_of(set.length, set.pattern, set.order, set.causality, set.mode);
    const Tiling& t = plan->tilings()[0];
    const Visits v = visits_of(t, most);
    ASSERT_EQ(v.threes.owner.empty(), !threes);
    if (!threes) return;
    EXPECT_TRUE(pairs_of(t, v, v.threes, v.threes.owner) == pairs_of(t));
    for (const VisitSide::Owner& own : v.threes.owner)
      EXPECT_TRUE(t.q_tile[at(own.tile)].begin <= own.row &&
                  t.q_tile[at(own.tile + own.tiles - 1)].end >= own.row + own.rows);
  };
  check({1024, "dense", "row"}, true);  // the last has one half
  check({1024, "dense", "row", Causality::token}, true);
  check({2048, "slide:511", "row", Causality::token}, true);
  check({4096, "segment:1024", "row"}, true);
  check({1024, "segment:128", "row"}, false);
  check({1000, "dense", "row"}, false);
  check({1024, "dense", "hilbert"}, false);
  check({1024, "dense", "row", Causality::token}, false, 0);  // cells are compared
  BlockPairs all;
  for (Index i = 0; i < 7; ++i)
    for (Index j = 0; j < 7; ++j) all.emplace_back(i, j);
  PlanSpec blocked{.length = 1000};  // the last block has 104 rows and no pair
  blocked.pattern = {blocks(128, all)}, blocked.order = parse_order("row", 1000);
  EXPECT_TRUE(visits_of(make_plan(blocked)->tilings()[0]).threes.owner.empty());
}

// Few owners with many steps have parts: as many each, of about as many steps, numbered.
TEST(Visits, CutFewOwnersWithManySteps) {
  const auto check = [](const PlanPtr& plan, Index queries, Index keys) {
    const Tiling& t = plan->tilings()[0];
    for (const std::size_t most : {std::size_t{1} << 20, std::size_t{0}}) {
      const Visits v = visits_of(t, most);
      const Pairs want = pairs_of(t);
      for (const bool by_keys : {false, true}) {
        const VisitSide& side = by_keys ? v.keys : v.queries;
        EXPECT_TRUE(most == 0 || side.parts == (by_keys ? keys : queries)) << side.parts;  // 0: owners are single tiles
        EXPECT_TRUE(pairs_of(t, v, side, side.owner) == want);
        if (side.parts == 1) {
          EXPECT_TRUE(side.part.empty());
          continue;
        }
        EXPECT_EQ(std::ssize(side.part), side.parts * std::ssize(side.owner));
        EXPECT_TRUE(pairs_of(t, v, side, side.part) == want);
        std::set<std::pair<std::int32_t, std::int32_t>> seen;
        for (const VisitSide::Owner& part : side.part) {
          EXPECT_LT(part.number, side.parts);
          EXPECT_TRUE(seen.emplace(part.row, part.number).second);
          EXPECT_LE(part.steps, (side.owner[0].steps / side.parts + 3) / 2 * 2);
        }
      }
    }
  };
  check(plan_of(4096, "segment:2048,dilation=64", "hilbert", Causality::none), 1, 8);
  check(plan_of(4096, "segment:2048,dilation=64", "row", Causality::token), 1, 8);
  check(plan_of(16384, "segment:2048,dilation=64", "row", Causality::none), 1, 4);  // two full owners of 128 steps
  check(plan_of(1024, "dense", "row", Causality::token), 1, 1);
  const auto few = [](Index length, std::vector<std::int32_t> queries) {
    PlanSpec s;
    s.length = length, s.pattern = parse_pattern("dense"), s.order = parse_order("row", length);
    s.causality = Causality::token, s.queries = std::move(queries);
    return make_plan(s);
  };
  const auto last = [&](Index length, Index queries) { return few(length, query_run(length - queries, queries)); };
  check(last(8192, 1), 4, 1);
  check(last(4000, 1), 1, 1);   // of 63 steps
  check(last(4352, 64), 2, 1);  // of 34 steps each
  check(last(6400, 1), 3, 1);   // of 34 steps, whole pairs, the last of 32
  check(last(8192, 100), 4, 1);
  std::vector<std::int32_t> both = query_run(0, 128), late = query_run(8064, 128);  // of two steps, and of 128
  both.insert(both.end(), late.begin(), late.end());
  check(few(8192, both), 4, 1);
}

std::size_t masks(const Visits& v) { return v.mask.size() / Visits::kWords; }

// Masks that a call makes are numbered from 0 in each portion of owners, two a visit, and fit it.
TEST(Visits, NumberTheMasksThatACallMakes) {
  const Tiling& t = plan_of(2048, "segment:777", "hilbert", Causality::token)->tilings()[0];
  for (const Index portion : {Visits::kPortion, Index{40}}) {
    const Visits v = visits_of(t, 0, portion);
    for (const VisitSide* side : {&v.queries, &v.keys}) {
      ASSERT_GE(side->portion.size(), portion == 40 ? 4u : 2u);
      EXPECT_EQ(side->portion.front(), 0);
      EXPECT_EQ(side->portion.back(), std::ssize(side->owner));
      Index most = 0;
      for (std::size_t i = 0; i + 1 < side->portion.size(); ++i) {
        std::int32_t next = 0;
        for (auto o = side->portion[i]; o < side->portion[i + 1]; ++o) {
          const VisitSide::Owner& own = side->owner[at(o)];
          for (auto e = own.first; e < own.first + own.visits; ++e)
            if (const auto& visit = side->visit[at(e)]; std::ranges::count(visit.cell, Visits::kCompare) > 0) {
              EXPECT_EQ(visit.mask, next);
              EXPECT_LE(visit.rows, Visits::kCell);
              next += 2;
            }
          EXPECT_EQ(own.front.mask, side->visit[at(own.first)].mask);
        }
        most = std::max<Index>(most, next);
      }
      EXPECT_EQ(side->made, most);
      EXPECT_LE(most, portion);
    }
  }
}

// Few masks are left of many partial tiles, and few visits of many full ones.
TEST(Visits, KeepEqualMasksOnce) {
  const Visits causal = visits_of(plan_of(8192, "dense", "row", Causality::token)->tilings()[0]);
  EXPECT_EQ(masks(causal), 2u);  // a triangle, and it transposed
  EXPECT_LE(causal.queries.visit.size(), 3u * 64);
  const Visits dense = visits_of(plan_of(8192, "dense", "hilbert", Causality::none)->tilings()[0]);
  EXPECT_EQ(masks(dense), 0u);
  EXPECT_EQ(dense.queries.visit.size(), 64u);
  EXPECT_FALSE(dense.mixed);
  const Tiling& window = plan_of(16384, "neighborhood2d:17x17", "hilbert:128x128", Causality::none)->tilings()[0];
  const Visits around = visits_of(window);
  EXPECT_GT(window.met.partial, 1000);
  EXPECT_LT(around.mask.size() * 4, std::size_t{128} << 10);
  EXPECT_TRUE(around.mixed);
  EXPECT_LT(around.queries.cells, 4 * window.met.partial * 2 / 3);
}

// Small groups share an owner; a query whose keys one owner has is final where that one is done.
TEST(Visits, PackSmallGroups) {
  const auto visits = [](const char* pattern, Index length, Causality causality = Causality::none) {
    return visits_of(plan_of(length, pattern, "row", causality)->tilings()[0]);
  };
  EXPECT_EQ(visits("segment:64", 1024).queries.owner.size(), 8u);
  EXPECT_EQ(visits("segment:16", 1024).queries.owner.size(), 8u);
  EXPECT_EQ(visits("segment:100", 1000).queries.owner.size(), 10u);
  for (const char* pattern : {"segment:16", "segment:64", "segment:100", "segment:128"})
    for (const Causality causality : {Causality::none, Causality::token})
      EXPECT_TRUE(visits(pattern, 1000, causality).one_owner) << pattern;
  EXPECT_FALSE(visits("segment:129", 1000).one_owner);
  EXPECT_FALSE(visits("dense", 1024).one_owner);
  EXPECT_TRUE(visits("segment:16", 1024).mixed);
  EXPECT_FALSE(visits("segment:100", 1000).mixed);
}

}  // namespace

// By them a kernel draws dropout's bits, eight at a time.
TEST(Visits, KnowKeysInRunsOfEight) {
  const auto eights = [](Index length, const char* pattern, const char* order) {
    return visits_of(plan_of(length, pattern, order, Causality::token)->tilings()[0]).eights;
  };
  EXPECT_TRUE(eights(1003, "dense", "row"));
  EXPECT_TRUE(eights(1000, "segment:96", "row"));
  EXPECT_TRUE(eights(1024, "slide:40", "row:32x32"));
  EXPECT_FALSE(eights(1000, "segment:100", "row")) << "the second segment begins at 100";
  EXPECT_FALSE(eights(1024, "segment:128,dilation=2", "row"));
  EXPECT_FALSE(eights(1024, "dense", "hilbert:32x32"));
}

// 64 along a curve are 8 rows of 8.
TEST(Visits, KnowKeysInRunsOfEightWhereTheyAscend) {
  for (const Causality causality : {Causality::none, Causality::token}) {
    const PlanPtr plan = plan_of(1024, "neighborhood2d:7x7", "hilbert:32x32", causality);
    const Tiling& t = plan->tilings()[0];
    const Tiling& ascends = with_ascending_keys(t);
    EXPECT_TRUE(visits_of(ascends).eights);
    EXPECT_EQ(&ascends, &with_ascending_keys(t)) << "made once";
    EXPECT_EQ(ascends.q_token, t.q_token);
    for (std::size_t tile = 0; tile < t.k_tile.size(); ++tile) {
      std::vector<std::int32_t> had, has;
      for (std::int32_t j = t.k_tile[tile].begin; j < t.k_tile[tile].end; ++j)
        had.push_back(t.k_token[std::size_t(j)]), has.push_back(ascends.k_token[std::size_t(j)]);
      EXPECT_TRUE(std::ranges::is_permutation(had, has));
    }
    for (std::size_t i = 0; i < t.q_token.size(); i += 7)
      for (std::size_t tile = 0; tile < t.k_tile.size(); ++tile) {
        Index before = 0, now = 0;
        for (std::int32_t j = t.k_tile[tile].begin; j < t.k_tile[tile].end; ++j)
          before += attends(t, i, std::size_t(j)) * (1 + t.k_token[std::size_t(j)]),
              now += attends(ascends, i, std::size_t(j)) * (1 + ascends.k_token[std::size_t(j)]);
        EXPECT_EQ(now, before);
      }
  }
}
