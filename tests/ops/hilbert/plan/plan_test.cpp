// Plans pair by pair against the definitions of the sets; tile counts, leaks, the cache, and a
// million tokens.
#include "ops/hilbert/plan/plan.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/parallel.h"
#include "ops/hilbert/kernels/compact.h"
#include "ops/hilbert/plan/attends.h"
#include "tests/support/heap.h"
#include "tests/support/reference.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

using namespace hilt;

namespace {

using Kind = Order::Kind;

PlanSpec spec_of(Index length, const char* pattern, const std::string& order = "row",
                 Causality causality = Causality::none, DilationMode mode = DilationMode::all_queries,
                 Index heads = 1) {
  PlanSpec s;
  s.length = length;
  s.heads = heads;
  s.pattern = parse_pattern(pattern);
  s.order = parse_order(order, behind_prefix(s.pattern, length));
  s.causality = causality;
  s.dilation_mode = mode;
  return s;
}

/// The keys of every query of a head: "0 1 | 0 1 | 2", one bar between queries; a key twice is
/// named twice.
std::string keys_of(const Plan& plan, Index head = 0) {
  std::ostringstream s;
  for (Index t = 0; t < plan.length(); ++t) {
    if (t > 0) s << " |";
    for (Index u = 0; u < plan.length(); ++u)
      for (Index i = 0; i < plan.attends(head, t, u); ++i) s << ' ' << u;
  }
  return s.str().substr(s.str().empty() ? 0 : 1);
}

ref::Attended set_of(PlanSpec s) {
  Order order = s.order;
  if (order.scope == Order::Scope::per_segment) order = with_segment(order, s.pattern[0].size);
  return ref::Attended(s, ref::order_of(order, behind_prefix(s.pattern, s.length)));
}

std::string error_of(const PlanSpec& s) {
  try {
    (void)Plan(s);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::usage);
    return e.what();
  }
  return "(no error)";
}

double percent(double share) { return std::round(share * 10000) / 100; }

}  // namespace

// ---- small sets, by hand from the definitions ---------------------------------------------------

TEST(Plan, CountsThePairsOfACausalSetAlongACurve) {
  PlanSpec spec;
  spec.length = 200, spec.order = parse_order("hilbert", 200), spec.causality = Causality::token;
  EXPECT_EQ(make_plan(spec)->stats().pairs, 200 * 201 / 2);
}

TEST(Plan, SmallSetsByHand) {
  const auto keys = [](Index length, const char* pattern, const char* order = "row",
                       Causality causality = Causality::none, DilationMode mode = DilationMode::all_queries) {
    return keys_of(Plan(spec_of(length, pattern, order, causality, mode)));
  };
  EXPECT_EQ(keys(3, "dense"), "0 1 2 | 0 1 2 | 0 1 2");
  EXPECT_EQ(keys(3, "dense", "row", Causality::token), "0 | 0 1 | 0 1 2");
  // The last segment is short; a segment longer than the sequence is one.
  EXPECT_EQ(keys(5, "segment:2"), "0 1 | 0 1 | 2 3 | 2 3 | 4");
  EXPECT_EQ(keys(3, "segment:100"), "0 1 2 | 0 1 2 | 0 1 2");
  // j mod r == o inside the segment, not along the sequence.
  EXPECT_EQ(keys(6, "segment:3,dilation=2"), "0 2 | 0 2 | 0 2 | 3 5 | 3 5 | 3 5");
  EXPECT_EQ(keys(6, "segment:3,dilation=2,offset=1"), "1 | 1 | 1 | 4 | 4 | 4");
  EXPECT_EQ(keys(4, "segment:2,dilation=5"), "0 | 0 | 2 | 2");
  // An offset beyond a short last segment, or beyond every segment, leaves queries without keys.
  EXPECT_EQ(keys(5, "segment:4,dilation=2,offset=1"), "1 3 | 1 3 | 1 3 | 1 3 |");
  EXPECT_EQ(keys(5, "segment:2,dilation=4,offset=3"), "| | | |");
  // Modes.
  EXPECT_EQ(keys(6, "segment:6,dilation=2", "row", Causality::none, DilationMode::longnet),
            "0 2 4 | | 0 2 4 | | 0 2 4 |");
  EXPECT_EQ(keys(6, "segment:6,dilation=2,offset=1", "row", Causality::token, DilationMode::longnet),
            "| 1 | | 1 3 | | 1 3 5");
  EXPECT_EQ(keys(6, "segment:6,dilation=2", "row", Causality::none, DilationMode::residue),
            "0 2 4 | 1 3 5 | 0 2 4 | 1 3 5 | 0 2 4 | 1 3 5");
  EXPECT_EQ(keys(5, "segment:3,dilation=2", "row", Causality::none, DilationMode::residue), "0 2 | 1 | 0 2 | 3 | 4");
  // Branches: a key that both list counts twice.
  EXPECT_EQ(keys(4, "segment:2+segment:4,dilation=2"), "0 0 1 2 | 0 0 1 2 | 0 2 2 3 | 0 2 2 3");
  // Windows over positions.
  EXPECT_EQ(keys(4, "slide:1"), "0 1 | 0 1 2 | 1 2 3 | 2 3");
  EXPECT_EQ(keys(3, "slide:0"), "0 | 1 | 2");
  EXPECT_EQ(keys(5, "neighborhood:3"), "0 1 2 | 0 1 2 | 1 2 3 | 2 3 4 | 2 3 4");
  // Windows over the grid, 2 rows of 3; 4 tokens fold to 2 rows of 2.
  EXPECT_EQ(keys(6, "window2d:2x2", "row:2x3"), "0 1 3 4 | 0 1 3 4 | 2 5 | 0 1 3 4 | 0 1 3 4 | 2 5");
  EXPECT_EQ(keys(6, "slide2d:0x1", "row:2x3"), "0 1 | 0 1 2 | 1 2 | 3 4 | 3 4 5 | 4 5");
  EXPECT_EQ(keys(6, "neighborhood2d:1x3", "row:2x3"), "0 1 2 | 0 1 2 | 0 1 2 | 3 4 5 | 3 4 5 | 3 4 5");
  EXPECT_EQ(keys(4, "slide2d:0x1"), "0 1 | 0 1 | 2 3 | 2 3");
}

TEST(Plan, AxesByHand) {
  const auto keys = [](Index length, const char* pattern, const char* order = "row") {
    return keys_of(Plan(spec_of(length, pattern, order)));
  };
  // Two classes, of the even and of the odd cells.
  EXPECT_EQ(keys(7, "slide:1,dilation=2"), "0 2 | 1 3 | 0 2 4 | 1 3 5 | 2 4 6 | 3 5 | 4 6");
  EXPECT_EQ(keys(7, "neighborhood:3,dilation=2"), "0 2 4 | 1 3 5 | 0 2 4 | 1 3 5 | 2 4 6 | 1 3 5 | 2 4 6");
  // Three queries share the center of the second, the last two that of the last.
  EXPECT_EQ(keys(5, "slide:1,stride=3"), "0 1 2 | 0 1 2 | 0 1 2 | 3 4 | 3 4");
  EXPECT_EQ(keys(5, "neighborhood:3,stride=3"), "0 1 2 | 0 1 2 | 0 1 2 | 2 3 4 | 2 3 4");
  // Causal: the last of the three is the center, and nobody sees beyond itself; a query may see
  // nothing.
  EXPECT_EQ(keys(4, "slide:1,causal=1"), "0 | 0 1 | 1 2 | 2 3");
  EXPECT_EQ(keys(4, "neighborhood:2,causal=1"), "0 | 0 1 | 1 2 | 2 3");
  EXPECT_EQ(keys(5, "slide:1,stride=3,causal=1"), "| 1 | 1 2 | 3 | 3 4");
  EXPECT_EQ(keys(7, "neighborhood:2,dilation=2,stride=2,causal=1"), "0 | 1 | 0 2 | 1 3 | 4 | 3 5 | 4 6");
  // One row of 2 frames, rows and columns each; causal on frames alone.
  EXPECT_EQ(keys(8, "slide3d:1x0x1,causal=1x0x0", "row:2x2x2"),
            "0 1 | 0 1 | 2 3 | 2 3 | 0 1 4 5 | 0 1 4 5 | 2 3 6 7 | 2 3 6 7");
  EXPECT_EQ(keys(8, "neighborhood3d:1x1x1", "hilbert:2x2x2"), "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7");
  EXPECT_EQ(keys(8, "window3d:2x1x2", "hilbert:2x2x2"),
            "0 1 4 5 | 0 1 4 5 | 2 3 6 7 | 2 3 6 7 | 0 1 4 5 | 0 1 4 5 | 2 3 6 7 | 2 3 6 7");
  EXPECT_EQ(keys(4, "slide3d:1x1x1"), "0 1 2 3 | 0 1 2 3 | 0 1 2 3 | 0 1 2 3");
  // Shifted, the first is short and nothing wraps around.
  EXPECT_EQ(keys(6, "segment:3,shift=1"), "0 1 | 0 1 | 2 3 4 | 2 3 4 | 2 3 4 | 5");
  EXPECT_EQ(keys(6, "segment:4,dilation=2,shift=3"), "| 1 3 | 1 3 | 1 3 | 1 3 | 5");
  EXPECT_EQ(keys(6, "window2d:2x2,shift=1x0", "row:2x3"), "0 1 | 0 1 | 2 | 3 4 | 3 4 | 5");
  EXPECT_EQ(keys(4, "window2d:2x2,shift=0x1"), "0 2 | 1 3 | 0 2 | 1 3");
  EXPECT_EQ(keys(4, "window2d:2x2,causal=1x0"), "0 1 | 0 1 | 0 1 2 3 | 0 1 2 3");
  // The last segment has keys of the one before, whose queries have none of its.
  EXPECT_EQ(keys(5, "segment:3,tail=borrow"), "0 1 2 | 0 1 2 | 0 1 2 | 2 3 4 | 2 3 4");
  EXPECT_EQ(keys(6, "segment:3,tail=borrow"), keys(6, "segment:3"));
  EXPECT_EQ(keys(2, "segment:3,tail=borrow"), "0 1 | 0 1");
  EXPECT_EQ(keys(6, "segment:3,shift=2,tail=borrow"), "0 | 1 2 3 | 1 2 3 | 1 2 3 | 3 4 5 | 3 4 5");
}

TEST(Plan, PrefixesByHand) {
  const auto keys = [](Index length, const char* pattern, const char* order = "row",
                       Causality causality = Causality::none, DilationMode mode = DilationMode::all_queries) {
    return keys_of(Plan(spec_of(length, pattern, order, causality, mode)));
  };
  // Two rows of two cells behind token 0, which meets all once and is met by all once.
  EXPECT_EQ(keys(5, "window2d:1x2,prefix=1", "hilbert:2x2"), "0 1 2 3 4 | 0 1 2 | 0 1 2 | 0 3 4 | 0 3 4");
  EXPECT_EQ(keys(5, "window2d:1x2,prefix=1", "row:2x2", Causality::token), "0 | 0 1 | 0 1 2 | 0 3 | 0 3 4");
  EXPECT_EQ(keys(5, "segment:2,prefix=2"), "0 1 2 3 4 | 0 1 2 3 4 | 0 1 2 3 | 0 1 2 3 | 0 1 4");
  // Keys of two branches count twice, those of a prefix once, also for queries that no branch asks.
  EXPECT_EQ(keys(3, "dense+dense,prefix=1"), "0 1 2 | 0 1 1 2 2 | 0 1 1 2 2");
  EXPECT_EQ(keys(4, "slide:0|segment:2,prefix=1"), "0 1 2 3 | 0 1 2 | 0 1 2 | 0 3");
  EXPECT_EQ(keys(5, "segment:4,dilation=2,prefix=1", "row", Causality::none, DilationMode::longnet),
            "0 1 2 3 4 | 0 1 3 | 0 | 0 1 3 | 0");
  EXPECT_EQ(keys(5, "blocks:2@local:0,prefix=1"), "0 1 2 3 4 | 0 1 2 | 0 1 2 | 0 3 4 | 0 3 4");
  // Along the curve 1 3 4 2 of the cells behind it.
  EXPECT_EQ(keys(5, "dense,prefix=1", "hilbert:2x2", Causality::curve), "0 | 0 1 | 0 1 2 3 4 | 0 1 3 | 0 1 3 4");
  // All but one may be of it.
  EXPECT_EQ(keys(2, "slide:0,prefix=1", "hilbert", Causality::token), "0 | 0 1");
  EXPECT_EQ(Plan(spec_of(5, "dense,prefix=1", "hilbert:2x2")).order().token_at,
            (std::vector<std::int32_t>{0, 1, 3, 4, 2}));
}

// Tiles of a prefix are its own, full, and the others are those of the tokens behind it.
TEST(Plan, APrefixLeavesTheTilesBehindItAsTheyAre) {
  for (const char* pattern : {"window2d:16x16", "slide2d:3x3", "neighborhood:31", "segment:128", "blocks:64@local:1"}) {
    const Plan alone(spec_of(1024, pattern, "hilbert:32x32")),
        all(spec_of(1028, (pattern + std::string(",prefix=4")).c_str(), "hilbert:32x32"));
    const Tiling &one = alone.tilings()[0], &with = all.tilings()[0];
    const auto tiles = std::ssize(one.q_tile);
    EXPECT_EQ(with.met.partial, one.met.partial) << pattern;
    EXPECT_EQ(with.met.full, one.met.full + tiles + std::ssize(one.k_tile) + 1) << pattern;
    EXPECT_EQ(with.boxes, one.boxes);
    for (Index i = 0; i < tiles; ++i) {
      EXPECT_EQ(with.q_tile[static_cast<std::size_t>(i + 1)].begin, one.q_tile[static_cast<std::size_t>(i)].begin + 4);
      const Tiling::Ref first = *with.met.of(static_cast<std::size_t>(i + 1)).begin();
      EXPECT_TRUE(first.tile == 0 && !first.partial) << pattern;
    }
  }
}

TEST(Plan, UnionsByHand) {
  const auto keys = [](Index length, const char* pattern, const char* order = "row",
                       Causality causality = Causality::none, DilationMode mode = DilationMode::all_queries) {
    return keys_of(Plan(spec_of(length, pattern, order, causality, mode)));
  };
  // A key in both counts once, and in two merged branches twice.
  EXPECT_EQ(keys(4, "slide:1|segment:2"), "0 1 | 0 1 2 | 1 2 3 | 2 3");
  EXPECT_EQ(keys(4, "slide:0|segment:2+segment:4,dilation=4"), "0 0 1 | 0 0 1 | 0 2 3 | 0 2 3");
  EXPECT_EQ(keys(3, "segment:1|dense", "row", Causality::token), "0 | 0 1 | 0 1 2");
  // Global tokens and a sliding window; a prefix and what follows.
  EXPECT_EQ(keys(6, "blocks:1@global_local:1:0|slide:1"), "0 1 2 3 4 5 | 0 1 2 | 0 1 2 3 | 0 2 3 4 | 0 3 4 5 | 0 4 5");
  EXPECT_EQ(keys(4, "segment:4,dilation=4|slide:0"), "0 | 0 1 | 0 2 | 0 3");
  EXPECT_EQ(keys(6, "segment:3,dilation=2,offset=1|slide2d:1x0", "row:2x3"),
            "0 1 3 | 1 4 | 1 2 5 | 0 3 4 | 1 4 | 2 4 5");
  EXPECT_EQ(keys(4, "segment:4,dilation=2|slide:1", "row", Causality::none, DilationMode::longnet),
            "0 1 2 | 0 1 2 | 0 1 2 3 | 2 3");
  EXPECT_EQ(keys(4, "segment:4,dilation=2|segment:2", "row", Causality::none, DilationMode::residue),
            "0 1 2 | 0 1 3 | 0 2 3 | 1 2 3");
  // Both boxes together may fill a tile.
  const Plan halves(spec_of(128, "segment:64,dilation=2|segment:64,dilation=2,offset=1"));
  EXPECT_EQ(halves.stats().partial, 1);
  const Plan whole(spec_of(128, "segment:128,dilation=2|segment:128,dilation=2,offset=1"));
  EXPECT_EQ(whole.stats().full, 1);
  PlanSpec first = spec_of(4, "dense");
  first.pattern[0].joined = true;
  EXPECT_EQ(error_of(first), "plan: the first branch, dense, has no other to be joined to");
  BlockPairs comb;
  for (std::int32_t j = 0; j < 130; j += 2) comb.emplace_back(0, j);
  PlanSpec many = spec_of(130, "dense|dense");
  many.pattern[1] = blocks(1, comb), many.pattern[1].joined = true;
  EXPECT_EQ(error_of(many), "plan: blocks:1(65 pairs): a row of its list has 65 runs of blocks; in a union at most 64");
}

TEST(Plan, SmallSetsAlongAnOrder) {
  const auto keys = [](Index length, const char* pattern, const char* order, Causality causality = Causality::none) {
    return keys_of(Plan(spec_of(length, pattern, order, causality)));
  };
  // Snake on rows of three: positions 0 1 2 5 4 3.
  EXPECT_EQ(keys(6, "segment:2", "snake:2x3"), "0 1 | 0 1 | 2 5 | 3 4 | 3 4 | 2 5");
  // A quarter of the 4 x 4 curve is a 2 x 2 square: 0 1 4 5.
  EXPECT_EQ(keys(16, "segment:4", "hilbert:4x4").substr(0, 21), "0 1 4 5 | 0 1 4 5 | 2");
  // Causality is of tokens whatever the order, unless the curve's is asked for by name.
  EXPECT_EQ(keys(6, "segment:2", "snake:2x3", Causality::token), "0 | 0 1 | 2 | 3 | 3 4 | 2 5");
  EXPECT_EQ(keys(6, "segment:2", "snake:2x3", Causality::curve), "0 | 0 1 | 2 | 3 4 | 4 | 2 5");
  // Scopes: per segment, the set is the one without an order; order-only likewise.
  const std::string plain = keys(16, "segment:4", "row");
  EXPECT_EQ(keys(16, "segment:4", "hilbert:4x4,scope=segment"), plain);
  EXPECT_EQ(keys(16, "segment:4", "hilbert:4x4,scope=order-only"), plain);
  EXPECT_NE(keys(16, "segment:4", "hilbert:4x4"), plain);
  // With a dilation the order inside a segment picks other keys.
  EXPECT_NE(keys(16, "segment:8,dilation=2", "hilbert,scope=segment"), keys(16, "segment:8,dilation=2", "row"));
}

TEST(Plan, HeadsByHand) {
  // Offset `head`: h mod r.
  PlanSpec s = spec_of(4, "segment:4,dilation=2,offset=head");
  s.heads = 3;
  const Plan by_head(s);
  EXPECT_EQ(keys_of(by_head, 0), "0 2 | 0 2 | 0 2 | 0 2");
  EXPECT_EQ(keys_of(by_head, 1), "1 3 | 1 3 | 1 3 | 1 3");
  EXPECT_EQ(keys_of(by_head, 2), keys_of(by_head, 0));
  // Head groups of 5 heads and 3 branches: 2, 2, 1; offsets 0 mod 1, 1 mod 2, 2 mod 4.
  s = spec_of(4, "segment:2+segment:4,dilation=2+segment:4,dilation=4");
  s.heads = 5;
  s.dilation_mode = DilationMode::head_groups;
  const Plan groups(s);
  const std::string expected[] = {"0 1 | 0 1 | 2 3 | 2 3", "| 1 3 | | 1 3", "| | 2 |"};
  for (const auto& [head, branch] : std::map<Index, std::size_t>{{0, 0}, {1, 0}, {2, 1}, {3, 1}, {4, 2}})
    EXPECT_EQ(keys_of(groups, head), expected[branch]) << head;
}

TEST(Plan, HeadGroupsCoverEveryHeadOnce) {
  for (Index heads = 1; heads <= 12; ++heads)
    for (Index branches = 1; branches <= heads; ++branches) {
      PlanSpec s = spec_of(64, "segment:1");
      s.heads = heads;
      s.dilation_mode = DilationMode::head_groups;
      s.pattern.clear();
      for (Index i = 0; i < branches; ++i) s.pattern.push_back(parse_pattern("segment:" + std::to_string(i + 1))[0]);
      const Plan plan(s);
      Index last = 0;
      std::map<Index, Index> size;
      for (Index h = 0; h < heads; ++h) {
        ASSERT_EQ(plan.tilings_of(h).size(), 1u) << heads << " heads, " << branches << " branches";
        Index own = 0;
        for (Index u = 0; u < 64; ++u) own += plan.attends(h, 0, u);
        ASSERT_GE(own, last);
        ++size[last = own];
      }
      ASSERT_EQ(std::ssize(size), branches);
      for (const auto& [branch, n] : size) ASSERT_EQ(n, heads / branches + (branch - 1 < heads % branches ? 1 : 0));
    }
}

TEST(Plan, BlockListsAreAUnion) {
  PlanSpec s = spec_of(7, "dense");
  s.pattern = {blocks(2, {{0, 0}, {0, 3}, {3, 1}})};
  EXPECT_EQ(keys_of(Plan(s)), "0 1 6 | 0 1 6 | | | | | 2 3");
  s.pattern = {blocks(2, {{3, 1}, {0, 3}, {0, 0}})};  // in whatever order they are listed
  EXPECT_EQ(keys_of(Plan(s)), "0 1 6 | 0 1 6 | | | | | 2 3");
  s.pattern = {blocks(2, {{0, 0}, {0, 0}})};  // a pair listed twice: one set, or refused
  const std::string error = error_of(s);
  if (error == "(no error)") { EXPECT_EQ(keys_of(Plan(s)), "0 1 | 0 1 | | | | |"); }
  s.pattern = {blocks(2, {})};
  EXPECT_EQ(Plan(s).empty_rows(), 7);
  EXPECT_EQ(Plan(s).stats().pairs, 0);
}

// ---- everything a plan says, on longer sequences ------------------------------------------------

TEST(Plan, AgreesWithTheDefinitionsOnLongSequences) {
  Index judged = 0;
  for (const Index length : {Index{500}, Index{1024}, scaled<Index>(1700, 700)})
    for (const char* pattern : {"dense",
                                "segment:128",
                                "segment:100",
                                "segment:300,dilation=3,offset=1",
                                "segment:128+segment:512,dilation=4+segment:5000,dilation=16",
                                "slide:200",
                                "slide:5",
                                "neighborhood:129",
                                "window2d:16x16",
                                "slide2d:8x8",
                                "neighborhood2d:17x17",
                                "neighborhood2d:5x9",
                                "segment:128,shift=40",
                                "segment:300,shift=40,tail=borrow",
                                "slide:30,dilation=7,stride=5",
                                "neighborhood:9,dilation=40",
                                "neighborhood2d:5x3,dilation=4x2,stride=3",
                                "slide2d:3x2,dilation=5,causal=1x0",
                                "window2d:8x16,shift=3x5",
                                "neighborhood3d:1x5x5,dilation=1x3x3",
                                "blocks:128@global_local:1:0|slide:100",
                                "window2d:8x8|segment:100,dilation=7|slide:3",
                                "slide2d:2x2,dilation=3|blocks:50@dilated:2/5+segment:200"})
      for (const char* order : {"row", "hilbert", "morton", "tiles", "snake", "hilbert,chunk=96"})
        for (const Causality causality : {Causality::none, Causality::token, Causality::curve}) {
          if (judged++ % scaled(3, 12) != 0) continue;
          if (std::string(pattern).find("d:") != std::string::npos && length != 1024)
            continue;  // a fold that is no full square
          const DilationMode mode = static_cast<DilationMode>(judged % 4);
          const PlanSpec s =
              spec_of(length, pattern, order, causality, mode, mode == DilationMode::head_groups ? 3 : 1);
          const ref::PlanFault fault = ref::judge(Plan(s), set_of(s));
          EXPECT_EQ(fault.what, "") << fault.details << "; " << pattern << ", " << order << ", " << length << ' '
                                    << name_of(causality) << ' ' << name_of(mode);
        }
}

TEST(Plan, DoesNotDependOnThreads) {
  const int before = thread_count();
  const PlanSpec s = spec_of(5000, "segment:128+segment:1024,dilation=8", "hilbert", Causality::token);
  set_thread_count(1);
  const Plan one(s);
  set_thread_count(4);
  const Plan four(s);
  set_thread_count(before);
  ASSERT_EQ(one.tilings().size(), four.tilings().size());
  for (std::size_t i = 0; i < one.tilings().size(); ++i) {
    const Tiling &a = one.tilings()[i], &b = four.tilings()[i];
    EXPECT_EQ(a.q_token, b.q_token);
    EXPECT_TRUE(a.met == b.met);
  }
}

// ---- what an order does, and does not -----------------------------------------------------------

TEST(Plan, AnOrderChangesASetOrOnlyItsTiles) {
  const Index side = scaled<Index>(32, 16);
  const std::string grid = std::to_string(side) + 'x' + std::to_string(side);
  for (const char* pattern : {"dense", "window2d:4x4", "slide2d:2x2", "neighborhood2d:5x5"})
    for (const std::string& order : {"hilbert:" + grid, "morton:" + grid, "snake:" + grid, "tiles:" + grid + "/8x8",
                                     "hilbert:" + grid + ",chunk=64"}) {
      const PlanSpec plain = spec_of(side * side, pattern, "row:" + grid),
                     ordered = spec_of(side * side, pattern, order);
      EXPECT_EQ(keys_of(Plan(plain)), keys_of(Plan(ordered))) << pattern << ' ' << order;
    }
  for (const char* pattern : {"segment:16", "slide:3", "neighborhood:7"}) {
    EXPECT_NE(keys_of(Plan(spec_of(256, pattern, "row"))), keys_of(Plan(spec_of(256, pattern, "hilbert")))) << pattern;
    EXPECT_EQ(keys_of(Plan(spec_of(256, pattern, "row"))),
              keys_of(Plan(spec_of(256, pattern, "hilbert,scope=order-only"))))
        << pattern;
  }
}

TEST(Plan, ForcedRowOrder) {
  const PlanSpec s = spec_of(256, "segment:16", "hilbert:16x16"), row = spec_of(256, "segment:16", "row:16x16");
  const PlanPtr before = make_plan(s);
  EXPECT_FALSE(before->order_forced());
  {
    const Setting forced("HILT_FORCE_ORDER", "row");
    const PlanPtr plan = make_plan(s);  // a plan that the cache holds must not come back
    EXPECT_TRUE(plan->order_forced());
    EXPECT_EQ(keys_of(*plan), keys_of(Plan(row)));
    for (Index i = 0; i < 256; ++i) ASSERT_EQ(plan->order().token_at[static_cast<std::size_t>(i)], i);
  }
  const PlanPtr after = make_plan(s);
  EXPECT_FALSE(after->order_forced());
  EXPECT_EQ(keys_of(*after), keys_of(*before));
  const Setting wrong("HILT_FORCE_ORDER", "hilbert");
  EXPECT_THROW((void)Plan(s), Error);
}

TEST(Plan, EveryFieldChangesSomething) {
  PlanSpec base = spec_of(96, "segment:25,dilation=3,offset=1", "hilbert:8x12", Causality::token);
  base.heads = 4;
  const auto all = [](const PlanSpec& s) {
    const Plan plan(s);
    std::string text = std::to_string(plan.length()) + '/' + std::to_string(plan.heads());
    for (Index h = 0; h < plan.heads(); ++h) text += '\n' + keys_of(plan, h);
    return text;
  };
  std::set<std::string> seen{all(base)};
  std::size_t changes = 0;
  const auto changed = [&](auto change) {
    PlanSpec s = base;
    change(s);
    EXPECT_NE(s, base);
    EXPECT_TRUE(seen.insert(all(s)).second) << "change " << changes << " changes nothing";
    ++changes;
  };
  changed([](PlanSpec& s) { s.length = 95, s.order.grid = {}; });
  changed([](PlanSpec& s) { s.heads = 3; });
  changed([](PlanSpec& s) { s.order.kind = Kind::row; });
  changed([](PlanSpec& s) { s.order.kind = Kind::snake; });
  changed([](PlanSpec& s) { s.order.kind = Kind::morton; });
  changed([](PlanSpec& s) { s.order.kind = Kind::tiles, s.order.tile_height = 4, s.order.tile_width = 4; });
  changed([](PlanSpec& s) { s.order.kind = Kind::tiles, s.order.tile_height = 2, s.order.tile_width = 4; });
  changed([](PlanSpec& s) { s.order.grid = {8, 12}; });
  changed([](PlanSpec& s) { s.order.grid = {32, 3}; });
  changed([](PlanSpec& s) { s.order.scope = Order::Scope::per_segment; });
  changed([](PlanSpec& s) { s.order.scope = Order::Scope::chunked, s.order.chunk = 48; });
  changed([](PlanSpec& s) { s.order.scope = Order::Scope::chunked, s.order.chunk = 72; });
  changed([](PlanSpec& s) { s.pattern[0].size = 23; });
  changed([](PlanSpec& s) { s.pattern[0].dilation = 2; });
  changed([](PlanSpec& s) { s.pattern[0].offset = 2; });
  changed([](PlanSpec& s) { s.pattern[0].offset_by_head = true; });
  changed([](PlanSpec& s) { s.pattern.push_back(s.pattern[0]); });
  changed([](PlanSpec& s) { s.pattern = parse_pattern("dense"); });
  changed([](PlanSpec& s) { s.pattern = parse_pattern("slide:5"); });
  changed([](PlanSpec& s) { s.pattern = parse_pattern("neighborhood:11"); });
  changed([](PlanSpec& s) { s.pattern = parse_pattern("window2d:4x3"); });
  changed([](PlanSpec& s) { s.pattern = parse_pattern("window2d:3x4"); });
  changed([](PlanSpec& s) { s.pattern = parse_pattern("slide2d:2x3"); });
  changed([](PlanSpec& s) { s.pattern = parse_pattern("neighborhood2d:3x5"); });
  changed([](PlanSpec& s) { s.pattern = {blocks(16, {{0, 0}, {3, 2}})}; });
  changed([](PlanSpec& s) { s.pattern = {blocks(16, {{0, 0}, {3, 1}})}; });
  changed([](PlanSpec& s) { s.dilation_mode = DilationMode::longnet; });
  changed([](PlanSpec& s) { s.dilation_mode = DilationMode::head_groups; });
  changed([](PlanSpec& s) { s.dilation_mode = DilationMode::residue; });
  changed([](PlanSpec& s) { s.causality = Causality::none; });
  changed([](PlanSpec& s) { s.causality = Causality::curve; });
}

// ---- published tile counts, and the leak of a mask on positions ---------------------------------

namespace {

/// Keys of a token, by the definitions again: nothing of Attended, whose tables would not fit.
using KeysOf = std::function<void(Index, const std::function<void(Index)>&)>;

/// |dy| and |dx| at most r, on a square.
KeysOf around(Index side, Index r) {
  return [=](Index t, const std::function<void(Index)>& visit) {
    const Index x = t % side, y = t / side;
    for (Index v = std::max<Index>(y - r, 0); v <= std::min(y + r, side - 1); ++v)
      for (Index u = std::max<Index>(x - r, 0); u <= std::min(x + r, side - 1); ++u) visit(v * side + u);
  };
}
/// k x k cells, clamped inside the square.
KeysOf neighborhood(Index side, Index k) {
  return [=](Index t, const std::function<void(Index)>& visit) {
    const Index x = std::clamp(t % side, k / 2, side - 1 - k / 2), y = std::clamp(t / side, k / 2, side - 1 - k / 2);
    for (Index v = y - k / 2; v <= y + k / 2; ++v)
      for (Index u = x - k / 2; u <= x + k / 2; ++u) visit(v * side + u);
  };
}
KeysOf window(Index width, Index side) {
  return [=](Index t, const std::function<void(Index)>& visit) {
    const Index x = t % width / side * side, y = t / width / side * side;
    for (Index v = y; v < y + side; ++v)
      for (Index u = x; u < x + side; ++u) visit(v * width + u);
  };
}

struct Figure {
  const char* pattern;
  Index side;
  const char* order;
  KeysOf keys;
  double percent;  // of 128 x 128 tiles touched, as published
  int decimals;
};

}  // namespace

TEST(Plan, TileFiguresOfTheDefinitions) {
  const std::vector<Figure> figures = {
      {"slide2d:8x8", 128, "row", around(128, 8), 12.84, 2},
      {"slide2d:8x8", 128, "hilbert", around(128, 8), 5.90, 2},
      {"slide2d:8x8", 128, "morton", around(128, 8), 6.18, 2},
      {"slide2d:8x8", 128, "tiles", around(128, 8), 6.18, 2},
      {"slide2d:8x8", 256, "row", around(256, 8), 6.53, 2},
      {"slide2d:8x8", 256, "hilbert", around(256, 8), 1.58, 2},
      {"window2d:16x16", 128, "row", window(128, 16), 12.5, 1},
      {"window2d:16x16", 128, "hilbert", window(128, 16), 1.56, 2},
      {"slide2d:3x3", 56, "row", around(56, 3), 19.0, 1},
      {"slide2d:3x3", 56, "hilbert", around(56, 3), 24.5, 1},
      // The same windows clamped inside the grid: a little more, and the same conclusion.
      {"neighborhood2d:17x17", 128, "row", neighborhood(128, 17), 13.28, 2},
      {"neighborhood2d:17x17", 128, "hilbert", neighborhood(128, 17), 6.21, 2},
      {"neighborhood2d:7x7", 56, "row", neighborhood(56, 7), 19.36, 2},
      {"neighborhood2d:7x7", 56, "hilbert", neighborhood(56, 7), 24.48, 2},
  };
  for (const Figure& f : figures) {
    const std::string grid = std::to_string(f.side) + "x" + std::to_string(f.side), order = f.order;
    const Index length = f.side * f.side;
    const PlanSpec s = spec_of(length, f.pattern, (order + ":" + grid + (order == "tiles" ? "/8x16" : "")).c_str());
    const ref::TileShare share = ref::tile_share(ref::order_of(s.order, length), Tiling::kTile, f.keys);
    const TileStats stats = make_plan(s)->stats();
    const double unit = std::pow(10, f.decimals);
    std::cout << f.pattern << " on " << grid << ", " << order << ": reference " << percent(share.touched) << " %, plan "
              << percent(stats.touched()) << " %, stated " << f.percent << " %\n";
    EXPECT_NEAR(stats.touched(), share.touched, 1e-12) << f.pattern << ' ' << grid << ' ' << order;
    EXPECT_NEAR(std::round(share.touched * 100 * unit) / unit, f.percent, 1e-9)
        << f.pattern << ' ' << grid << ' ' << order;
  }
}

TEST(Plan, DenseCausalHasMorePartialTilesAlongTheCurve) {
  const KeysOf causal = [](Index t, const std::function<void(Index)>& visit) {
    for (Index u = 0; u <= t; ++u) visit(u);
  };
  for (const auto& [order, stated] : {std::pair{"row:64x64", 3.0}, {"hilbert:64x64", 20.0}}) {
    const ref::TileShare share = ref::tile_share(ref::order_of(parse_order(order, 4096), 4096), Tiling::kTile, causal);
    const PlanSpec s = spec_of(4096, "dense", order, Causality::token);
    const TileStats stats = make_plan(s)->stats();
    std::cout << "dense causal, " << order << ": partial " << percent(share.partial) << " % of all tiles, stated "
              << stated << " %\n";
    EXPECT_NEAR(static_cast<double>(stats.partial) / static_cast<double>(stats.total), share.partial, 1e-12);
    EXPECT_NEAR(std::round(share.partial * 100), stated, 0.5);
  }
}

TEST(Plan, AMaskOnPositionsWouldLeak) {
  // The share of all pairs inside segments of 128 positions that a triangle over positions would
  // show to a query although the key is a later token. The plan with causality `token` shows none
  // of them, and all the others.
  const Index length = 4096, w = 128;
  const PlanSpec s = spec_of(length, "segment:128", "hilbert:64x64", Causality::token);
  const ref::Pi pi = ref::order_of(s.order, length);
  ASSERT_TRUE(pi.independent);
  Index leaked = 0, all = 0, allowed = 0;
  for (Index p = 0; p < length; ++p)
    for (Index k = p / w * w; k < (p / w + 1) * w; ++k) {
      const std::int32_t t = pi.token_at[static_cast<std::size_t>(p)], u = pi.token_at[static_cast<std::size_t>(k)];
      ++all;
      leaked += k <= p && u > t;
      allowed += u <= t;
    }
  std::cout << "leak of a mask on positions: " << percent(static_cast<double>(leaked) / static_cast<double>(all))
            << " % of all segment pairs\n";
  EXPECT_NEAR(100.0 * static_cast<double>(leaked) / static_cast<double>(all), 24.7, 0.05);
  const Plan plan(s);
  EXPECT_EQ(plan.stats().pairs, allowed);
  Index later = 0;
  for (const Tiling& g : plan.tilings())
    for (std::size_t i = 0; i < g.q_tile.size(); ++i)
      for (const Tiling::Ref ref : g.met.of(i)) {
        const Tiling::Range k = g.k_tile[static_cast<std::size_t>(ref.tile)];
        for (std::int32_t a = g.q_tile[i].begin; a < g.q_tile[i].end; ++a)
          for (std::int32_t b = k.begin; b < k.end; ++b)
            if (!ref.partial) later += g.k_token[static_cast<std::size_t>(b)] > g.q_token[static_cast<std::size_t>(a)];
      }
  EXPECT_EQ(later, 0) << "keys after their query in tiles that are not masked";
}

TEST(Plan, PairsOnAxesAreThoseThatAttend) {
  for (const char* pattern :
       {"slide:3", "slide:4,dilation=3", "slide:5,stride=2,causal=1", "neighborhood:7,dilation=2",
        "segment:13,tail=borrow", "slide2d:0x3", "window2d:4x3,shift=1x2", "window2d:4x4,causal=1",
        "neighborhood2d:3x5,dilation=2x1", "slide2d:1x2,causal=1x0", "slide2d:2x1|window2d:4x4"})
    for (const char* order : {"row:9x11", "hilbert:9x11"})
      for (const Causality causality : {Causality::none, Causality::token})
        for (const bool some : {false, true}) {
          PlanSpec s = spec_of(99, pattern, order, causality);
          if (some) s.queries = {0, 3, 4, 40, 41, 97};
          const Plan plan(s);
          Index pairs = 0;
          for (const std::int32_t t : s.queries.value_or(query_run(0, 99)))
            for (Index u = 0; u < 99; ++u) pairs += plan.attends(0, t, u);
          EXPECT_EQ(plan.stats().pairs, pairs) << pattern << ", " << order << ", " << name_of(causality) << some;
        }
}

TEST(Plan, StatsOfEveryOrderAreThoseOfItsTiles) {
  const Index length = scaled<Index>(1920, 768);
  const std::string grid = length == 1920 ? "40x48" : "24x32";
  for (const char* pattern : {"neighborhood2d:5x5", "window2d:8x8", "slide2d:3x3", "segment:64", "slide:20"})
    for (const Causality causality : {Causality::none, Causality::token})
      for (const std::string& order :
           {"row:" + grid, "snake:" + grid, "morton:" + grid, "hilbert:" + grid, "tiles:" + grid + "/8x16"}) {
        const PlanSpec s = spec_of(length, pattern, order, causality);
        const TileStats own = make_plan(s)->stats();
        const std::string where = std::string(pattern) + ' ' + order + ' ' + std::string(name_of(causality));
        if (s.pattern[0].kind == Branch::Kind::segment) continue;  // cut into tiles segment by segment: not a lattice
        const ref::Attended set = set_of(s);
        const ref::TileShare share =
            ref::tile_share(ref::order_of(s.order, length), Tiling::kTile, [&](Index t, const auto& visit) {
              for (const auto& key : set.keys(0, t)) visit(key.token);
            });
        EXPECT_NEAR(own.touched(), share.touched, 1e-12) << where;
      }
}

TEST(Plan, ChoosesTheOrderWithTheFewestTiles) {
  for (const auto& [pattern, side] : {std::pair{"neighborhood2d:9x9", Index{40}},
                                      {"neighborhood2d:7x7", 28},
                                      {"window2d:16x16", 32},
                                      {"slide2d:1x20", 32}}) {
    const std::string grid = "row:" + std::to_string(side) + "x" + std::to_string(side);
    const PlanSpec s = spec_of(side * side, pattern, grid.c_str());
    const OrderChoice choice = choose_order(s);
    ASSERT_GE(choice.considered.size(), 5u);
    std::set<Kind> kinds;
    double fewest = 2;
    const ref::Attended set = set_of(s);
    for (const auto& [order, stats] : choice.considered) {
      kinds.insert(order.kind);
      fewest = std::min(fewest, stats.touched());
      PlanSpec other = s;
      other.order = order;
      EXPECT_EQ(ref::judge(Plan(other), set).what, "")
          << "considered an order that changes the set: " << to_string(order);
      const ref::TileShare share =
          ref::tile_share(ref::order_of(order, s.length), Tiling::kTile, [&](Index t, const auto& visit) {
            for (const auto& key : set.keys(0, t)) visit(key.token);
          });
      EXPECT_NEAR(stats.touched(), share.touched, 1e-12) << to_string(order);
    }
    EXPECT_EQ(kinds.size(), 5u);
    PlanSpec chosen = s;
    chosen.order = choice.order;
    EXPECT_NEAR(make_plan(chosen)->stats().touched(), fewest, 1e-12) << pattern;
  }
  // Where the set depends on the order only orders that leave it alone may be proposed.
  const PlanSpec s = spec_of(1024, "segment:64", "hilbert:32x32");
  for (const auto& [order, stats] : choose_order(s).considered) {
    PlanSpec other = s;
    other.order = order;
    EXPECT_EQ(keys_of(Plan(other)), keys_of(Plan(s))) << to_string(order);
  }
}

TEST(Plan, AutoIsTheChosenOrderAndKeepsTheSet) {
  for (const Causality causality : {Causality::none, Causality::token, Causality::curve})
    for (const auto& [pattern, grid] : {std::pair{"slide2d:2x2", ":32x32"},
                                        {"window2d:16x16", ":64x16"},
                                        {"dense", ""},
                                        {"dense", ":4x8x8"},
                                        {"segment:64", ""},
                                        {"slide:40", ":4x8x8"},
                                        {"blocks:64@local:1", ":32x32"}}) {
      const Index length = std::string(grid) == ":4x8x8" ? 256 : 1024;
      const PlanSpec as_they_come = spec_of(length, pattern, ("row" + std::string(grid)).c_str(), causality),
                     asked = spec_of(length, pattern, ("auto" + std::string(grid)).c_str(), causality);
      const PlanPtr plan = make_plan(asked);
      const std::string where = to_string(plan->spec().order) + ' ' + pattern;
      EXPECT_EQ(make_plan(asked), plan) << where;
      EXPECT_EQ(plan->spec().order, choose_order(as_they_come).order) << where;
      EXPECT_EQ(ref::judge(*plan, set_of(as_they_come)).what, "") << where;
      for (const auto& [order, stats] : choose_order(asked).considered)
        EXPECT_LE(plan->stats().touched(), stats.touched()) << where;
    }
  EXPECT_EQ(make_plan(spec_of(128 * 128, "slide2d:4x4", "auto:128x128"))->spec().order.kind, Kind::hilbert);
  EXPECT_EQ(make_plan(spec_of(1024, "segment:64", "auto"))->spec().order, Order{});
  EXPECT_THROW((void)build_permutation(parse_order("auto", 16), 16), Error);
}
TEST(Plan, ProposesNoOrderThatMovesBlocks) {
  const PlanSpec s = spec_of(256, "blocks:16@global_local:1:1", "hilbert:16x16");
  EXPECT_EQ(choose_order(s).considered.size(), 1u);
  EXPECT_EQ(choose_order(s).order, s.order);
}

// ---- the cache ----------------------------------------------------------------------------------

TEST(PlanCache, OneSpecOnePlan) {
  const PlanSpec s = spec_of(300, "segment:64", "hilbert", Causality::token);
  const PlanPtr plan = make_plan(s);
  EXPECT_EQ(make_plan(s), plan);
  EXPECT_EQ(make_plan(spec_of(300, "segment:64", "hilbert", Causality::token)), plan);
  // Each in one field only, all of one length: a cache keyed by less would mix them up.
  std::set<const Plan*> plans{plan.get()};
  std::vector<PlanPtr> kept;
  const auto another = [&](const PlanSpec& other) {
    kept.push_back(make_plan(other));
    EXPECT_TRUE(plans.insert(kept.back().get()).second);
    EXPECT_EQ(kept.back()->spec(), other);
  };
  another(spec_of(300, "segment:65", "hilbert", Causality::token));
  another(spec_of(300, "segment:64,dilation=2", "hilbert", Causality::token));
  another(spec_of(300, "segment:64,dilation=2,offset=1", "hilbert", Causality::token));
  another(spec_of(300, "segment:64", "morton", Causality::token));
  another(spec_of(300, "segment:64", "hilbert:20x15", Causality::token));
  another(spec_of(300, "segment:64", "hilbert:15x20", Causality::token));
  another(spec_of(300, "segment:64", "hilbert,chunk=64", Causality::token));
  another(spec_of(300, "segment:64", "hilbert", Causality::none));
  another(spec_of(300, "segment:64", "hilbert", Causality::token, DilationMode::longnet));
  another(spec_of(300, "segment:64", "hilbert", Causality::token, DilationMode::all_queries, 2));
  another(spec_of(301, "segment:64", "hilbert", Causality::token));
  PlanSpec listed = s;
  listed.pattern = {blocks(64, {{0, 0}, {1, 1}})};
  another(listed);
  listed.pattern = {blocks(64, {{0, 0}, {1, 2}})};
  another(listed);
}

TEST(PlanCache, IsSafeFromAnyThread) {
  std::vector<PlanSpec> specs;
  for (Index i = 0; i < 24; ++i)
    specs.push_back(
        spec_of(64 + 8 * i, i % 2 ? "segment:32" : "slide:9", i % 3 ? "hilbert" : "morton", Causality::token));
  std::vector<std::string> expected;
  for (const PlanSpec& s : specs) expected.push_back(keys_of(Plan(s)));
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 8; ++thread)
      threads.emplace_back([&, thread] {
        for (int i = 0; i < scaled(400, 60); ++i) {
          const std::size_t which = static_cast<std::size_t>(i * (thread + 1) + thread) % specs.size();
          const PlanPtr plan = make_plan(specs[which]);
          if (plan->spec() != specs[which] || plan->length() != specs[which].length) ++wrong;
          if (i % 40 == 0 && keys_of(*plan) != expected[which]) ++wrong;
        }
      });
  }
  EXPECT_EQ(wrong, 0);
}

TEST(PlanCache, DoesNotGrowWithoutBound) {
  // Many different plans; what is kept must not follow their number.
  const auto in_use = [] { return mallinfo2().uordblks + mallinfo2().hblkhd; };
  (void)make_plan(spec_of(3000, "segment:128", "hilbert"));
  std::size_t after_some = 0;
  const Index some = scaled<Index>(400, 100);
  for (Index i = 0; i < 3 * some; ++i) {
    if (i == some) after_some = in_use();
    (void)make_plan(spec_of(3000 + i, "segment:128", "hilbert"));
  }
  EXPECT_LT(in_use(), after_some + (std::size_t{48} << 20));
}

// ---- size ---------------------------------------------------------------------------------------

// What took a million tokens' square of steps would not end before the suite's time is out.
TEST(Plan, AMillionTokensInMemoryOfTheirNumber) {
  const Threads one(1);  // whose allocations are counted
  const Index length = scaled<Index>(1'000'000, 100'000);
  for (const char* order : {"row", "hilbert", "hilbert:1000x1000"}) {
    if (length != 1'000'000 && std::string(order).ends_with("1000")) continue;
    for (const Causality causality : {Causality::none, Causality::token}) {
      const PlanSpec s = spec_of(length, "segment:1024", order, causality);
      const std::int64_t before = heap::held;
      const long made_before = heap::made;
      heap::most_held = before;
      const Plan plan(s);
      const std::int64_t grown = heap::held - before, most = heap::most_held - before;
      const long made = heap::made - made_before;
      std::cout << length << " tokens, segment:1024, " << order << ", causality " << name_of(causality) << ": "
                << "bytes() " << plan.bytes() / 1000000 << " MB, heap grew " << grown / 1000000 << " MB, by "
                << most / 1000000 << " MB while it was made, in " << made << " allocations, " << plan.stats().full
                << " full and " << plan.stats().partial << " partial tiles\n";
      EXPECT_LT(plan.bytes(), 200'000'000u);
      EXPECT_LT(grown, 200'000'000);
      // 22 bytes a token and 75,004 allocations are the most that was seen; a list for each token
      // would be more.
      EXPECT_LT(most, 40 * length);
      EXPECT_LT(made, length / 8);
      if (order != std::string("row")) {
        EXPECT_GT(plan.bytes(), static_cast<std::size_t>(length) * 8);
      }  // lists of tokens
      Index pairs = 0;
      for (Index begin = 0; begin < length; begin += 1024) {
        const Index n = std::min<Index>(1024, length - begin);
        pairs += causality == Causality::none ? n * n
                                              : n * (n + 1) / 2;  // a causal triangle has that many pairs in any order
      }
      EXPECT_EQ(plan.stats().pairs, pairs);
      EXPECT_EQ(plan.empty_rows(), 0);
    }
  }
}

// ---- what is refused ----------------------------------------------------------------------------

TEST(Plan, RefusesWhatMakesNoSense) {
  const auto with = [](const char* pattern, auto change) {
    PlanSpec s = spec_of(64, pattern, "hilbert:8x8");
    change(s);
    return error_of(s);
  };
  const auto nothing = [](PlanSpec&) {};
  const std::pair<const char*, std::string> refused[] = {
      {"heads 0", with("dense", [](PlanSpec& s) { s.heads = 0; })},
      {"length -1", with("dense", [](PlanSpec& s) { s.length = -1; })},
      {"no branch", with("dense", [](PlanSpec& s) { s.pattern.clear(); })},
      {"segment 0", with("segment:4", [](PlanSpec& s) { s.pattern[0].size = 0; })},
      {"segment -1", with("segment:4", [](PlanSpec& s) { s.pattern[0].size = -1; })},
      {"dilation 0", with("segment:4", [](PlanSpec& s) { s.pattern[0].dilation = 0; })},
      {"offset -1", with("segment:4", [](PlanSpec& s) { s.pattern[0].offset = -1; })},
      {"offset = dilation", with("segment:4", [](PlanSpec& s) { s.pattern[0].dilation = s.pattern[0].offset = 2; })},
      {"slide -1", with("slide:1", [](PlanSpec& s) { s.pattern[0].size = -1; })},
      {"neighborhood 4", with("neighborhood:5", [](PlanSpec& s) { s.pattern[0].size = 4; })},
      {"shift 4 of 4", with("segment:4", [](PlanSpec& s) { s.pattern[0].axes[0].shift = 4; })},
      {"shift -1", with("window2d:4x4", [](PlanSpec& s) { s.pattern[0].axes[1].shift = -1; })},
      {"stride 0", with("slide:4", [](PlanSpec& s) { s.pattern[0].axes[0].stride = 0; })},
      {"a dense axis", with("dense", [](PlanSpec& s) { s.pattern[0].axes[2].causal = true; })},
      {"a dilated window", with("window2d:4x4", [](PlanSpec& s) { s.pattern[0].axes[0].dilation = 2; })},
      {"a slide that borrows", with("slide:4", [](PlanSpec& s) { s.pattern[0].axes[0].borrows = true; })},
      {"a dilated tail", with("segment:4,dilation=2,tail=borrow", nothing)},
      {"a causal tail", with("segment:4,tail=borrow", [](PlanSpec& s) { s.pattern[0].axes[0].causal = true; })},
      {"a shifted slide", with("slide:4", [](PlanSpec& s) { s.pattern[0].axes[0].shift = 1; })},
      {"neighborhood3d 2", with("neighborhood3d:1x2x1", nothing)},
      {"window2d 0", with("window2d:2x2", [](PlanSpec& s) { s.pattern[0].rows = 0; })},
      {"blocks of 0", with("dense",
                           [](PlanSpec& s) {
                             s.pattern = {Branch{.kind = Branch::Kind::blocks, .size = 0, .pairs = {{0, 0}}}};
                           })},
      {"query block beyond", with("dense",
                                  [](PlanSpec& s) {
                                    s.pattern = {blocks(16, {{4, 0}})};
                                  })},
      {"key block beyond", with("dense",
                                [](PlanSpec& s) {
                                  s.pattern = {blocks(16, {{0, 4}})};
                                })},
      {"key block -1", with("dense",
                            [](PlanSpec& s) {
                              s.pattern = {Branch{.kind = Branch::Kind::blocks, .size = 16, .pairs = {{0, -1}}}};
                            })},
      {"scope=segment without segments",
       with("slide:3", [](PlanSpec& s) { s.order.scope = Order::Scope::per_segment; })},
      {"more groups than heads",
       with("segment:4+segment:8", [](PlanSpec& s) { s.dilation_mode = DilationMode::head_groups; })},
      {"grid of another length", with("dense",
                                      [](PlanSpec& s) {
                                        s.order.grid = {8, 7};
                                      })},
  };
  for (const auto& [what, message] : refused) {
    EXPECT_NE(message, "(no error)") << what;
    std::cout << "  " << what << ": " << message << '\n';
  }
  EXPECT_EQ(with("neighborhood2d:3x3,dilation=1x4", nothing),
            "plan: neighborhood2d:3x3,dilation=1x4: 3 keys do not fit the smallest class of an axis, 2 of 8 cells");
  EXPECT_EQ(error_of(spec_of(63, "window2d:3x3", "hilbert")),
            "plan: window2d:3x3 compares places on a grid, and 63 tokens fold to 8 rows of 8, which is no full square; "
            "name the grid with the order, as in row:HxW or hilbert:HxW");
  EXPECT_NE(error_of(spec_of(32, "slide3d:0x1x1", "row,chunk=16")).find("fold to 4 rows of 8"), std::string::npos);
  EXPECT_EQ(error_of(spec_of(8, "slide2d:1x1", "hilbert:2x2x2")),
            "plan: slide2d:1x1 looks at one frame, the grid has 2; use the 3-D kind");
  for (const auto& [length, order] : {std::pair<Index, const char*>{64, "hilbert"}, {63, "row:7x9"}, {1, "row"}})
    for (const char* pattern : {"window2d:3x3", "slide3d:0x1x1"})
      EXPECT_EQ(error_of(spec_of(length, pattern, order)), "(no error)") << length << pattern;
  EXPECT_EQ(with("segment:4,dilation=8", nothing), "(no error)");  // one key a segment is legal
  EXPECT_EQ(with("slide:4+dense", [](PlanSpec& s) { s.pattern[0].prefix = 2; }),
            "plan: slide:4,prefix=2: a prefix is of the whole pattern: its last branch has it, and no other");
  for (const Index n : {Index{64}, Index{1} << 40})
    EXPECT_EQ(
        with("slide:1", [&](PlanSpec& s) { s.pattern[0].prefix = n; }),
        "pattern (slide:1,prefix=" + std::to_string(n) + "): a row has 64 tokens, none of which is behind its prefix");
  EXPECT_EQ(with("dense", [](PlanSpec& s) { s.heads = Index{1} << 40; }), "plan: heads 1099511627776 must be 1..65535");
  const auto packed = [](const char* pattern, const Document& d) {
    PlanSpec s = spec_of(64, pattern);
    s.documents = {{d}};
    return error_of(s);
  };
  EXPECT_EQ(packed("slide:1,prefix=4", 4),
            "plan: slide:1,prefix=4: document 0 of row 0 has 4 tokens, none of which is behind its prefix");
  EXPECT_EQ(packed("window2d:2x2,prefix=4", Grid{4, 15}), "(no error)");  // 60 cells and 4 tokens
  EXPECT_EQ(packed("window2d:2x2,prefix=5", Grid{4, 15}),
            "plan: the documents of row 0 hold 65 tokens, but a row has 64");
}

TEST(Plan, ANeighborhoodLargerThanItsAxisIsTheAxisOrRefused) {
  for (const auto& [pattern, expected] :
       {std::pair{"neighborhood:7",
                  "0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5"},
        {"neighborhood2d:3x5", "0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5 | 0 1 2 3 4 5"},
        {"neighborhood2d:1x5", "0 1 2 | 0 1 2 | 0 1 2 | 3 4 5 | 3 4 5 | 3 4 5"}}) {
    const PlanSpec s = spec_of(6, pattern, "row:2x3");
    if (error_of(s) == "(no error)") { EXPECT_EQ(keys_of(Plan(s)), expected) << pattern; }
  }
}

TEST(Plan, NoTokensOrOne) {
  for (const char* pattern :
       {"dense", "segment:4", "segment:4,dilation=8,offset=3", "slide:2", "window2d:2x2", "slide2d:1x1"})
    for (const char* order : {"row", "hilbert", "hilbert,chunk=3"})
      for (const Index length : {0, 1}) {
        const Plan plan(spec_of(length, pattern, order, Causality::token));
        EXPECT_EQ(plan.length(), length);
        const bool has_key = length == 1 && std::string(pattern).find("offset") == std::string::npos;
        EXPECT_EQ(plan.stats().pairs, has_key) << pattern;
        EXPECT_EQ(plan.empty_rows(), length == 1 && !has_key);
      }
}

// A dense set is one run of tiles a tile of queries, two where it is causal, and tokens that stand
// as they come need no list.
TEST(Plan, OfMillionsOfDenseTokensIsRunsOfTiles) {
  constexpr std::int64_t kMost = 20'000'000;
  struct Case {
    Index length;
    Causality causality;
    const char* order = "row";
  };
  for (const Case& c : {Case{1 << 20, Causality::none}, Case{1 << 20, Causality::token}, Case{1 << 22, Causality::none},
                        Case{1 << 22, Causality::token}, Case{1 << 20, Causality::none, "hilbert"}}) {
    SCOPED_TRACE(testing::Message() << c.length << " tokens, causal " << name_of(c.causality));
    const PlanSpec spec = spec_of(c.length, "dense", c.order, c.causality);
    const std::int64_t before = heap::held;
    heap::most_held = before;
    const Plan plan(spec);
    const std::int64_t held = heap::held - before, most = heap::most_held - before;
    const bool causal = c.causality != Causality::none;
    std::cout << "  " << c.length << " tokens along " << c.order << (causal ? ", causal: " : ": ") << held
              << " bytes, at most " << most << " on the way\n";
    EXPECT_LE(held, kMost);
    EXPECT_LE(plan.bytes(), static_cast<std::size_t>(kMost));
    if (c.order == std::string("row")) { EXPECT_LE(most, kMost); }
    const Index tiles = c.length / Tiling::kTile;
    EXPECT_EQ(std::ssize(plan.tilings()[0].met.run), causal ? 2 * tiles - 1 : tiles);
    const TileStats stats = plan.stats();
    EXPECT_EQ(stats.full, causal ? tiles * (tiles - 1) / 2 : tiles * tiles);
    EXPECT_EQ(stats.partial, causal ? tiles : 0);
    EXPECT_EQ(stats.pairs, causal ? c.length * (c.length + 1) / 2 : c.length * c.length);
    EXPECT_EQ(stats.tile_pairs, (stats.full + stats.partial) * Tiling::kTile * Tiling::kTile);
  }
}

// Whatever allocation fails while a plan is made: an error of ours that says so.
TEST(Plan, BeyondMemoryIsAnError) {
  PlanSpec documents = spec_of(600, "slide2d:2x2", "row", Causality::token);
  documents.documents = {parse_documents("16x16,8x8")};
  for (const PlanSpec& spec :
       {spec_of(1000, "dense", "hilbert", Causality::token), spec_of(1024, "neighborhood2d:5x5", "hilbert:32x32"),
        spec_of(1000, "segment:100+segment:200,dilation=2", "row", Causality::curve), documents})
    for (const bool remembered : {false, true}) {
      long n = 0;
      for (bool met = true; met;) {
        if (remembered) permutation_cache().clear();
        PlanSpec copy = spec;
        copy.heads = 1 + n % 7;  // one that make_plan() has not
        heap::failing = {heap::Of::everything, ++n};
        try {
          if (remembered) (void)make_plan(copy);
          else (void)Plan(std::move(copy));
        } catch (const Error& e) {
          heap::failing.of = heap::Of::nothing;
          EXPECT_EQ(e.code(), Code::memory) << e.what();
        }
        met = std::exchange(heap::failing, {}).met;
      }
      EXPECT_GT(n, 10);
    }
}

// Two threads with two plans do not wait for each other: each makes what is kept beside its plan
// while the other has not ended.
TEST(Memo, WhoMakesKeepsNobodyWaiting) {
  const Plan one(spec_of(1000, "dense")), two(spec_of(1000, "dense"));
  std::atomic<int> inside = 0;
  int met[2] = {};
  const auto work = [&](const Plan& plan, int& most) {
    const auto make = [&] {
      ++inside;
      for (long looks = 0; inside < 2 && looks < 50'000'000; ++looks) std::this_thread::yield();
      return inside.load();
    };
    most = plan.tilings()[0].memo.get<int>({}, make);
  };
  std::thread other(work, std::cref(two), std::ref(met[1]));
  work(one, met[0]);
  other.join();
  EXPECT_EQ(met[0], 2);
  EXPECT_EQ(met[1], 2);
}

TEST(Memo, EachIsMadeOnce) {
  const Memo memo;
  std::atomic<int> made = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (std::int32_t key = 0; key < 100; ++key)
        EXPECT_EQ(memo.get<std::string>({key, 7}, [&] { return ++made, std::to_string(key); }), std::to_string(key));
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(made, 100);
  EXPECT_EQ(memo.get<int>({1, 7}, [] { return 5; }), 5) << "another type is another thing";
  EXPECT_EQ(Memo(memo).get<int>({1, 7}, [] { return 6; }), 6) << "a copy begins empty";
  EXPECT_THROW(memo.get<long>({}, []() -> long { throw 1; }), int);
  EXPECT_EQ(memo.get<long>({}, [] { return 3L; }), 3) << "what failed is made again";
}

// Branches that list the same queries are one tiling for kernels that own queries, a key as
// often as branches have it; rows that a branch before has are known.
TEST(Plan, BranchesJoined) {
  constexpr const char* kBranches = "segment:100+segment:300,dilation=3+segment:900,dilation=9";
  for (const Causality causality : {Causality::none, Causality::token}) {
    const Plan plan(spec_of(1800, kBranches, "hilbert", causality));
    ASSERT_TRUE(plan.heads_agree());
    const auto its = plan.tilings_of(0);
    const Tiling* const joined = joined_tiling(plan.parts()[0].memo, plan.tilings(), its);
    ASSERT_NE(joined, nullptr);
    EXPECT_EQ(joined, joined_tiling(plan.parts()[0].memo, plan.tilings(), its)) << "made once";
    std::map<std::pair<std::int32_t, std::int32_t>, Index> times;
    Index pairs = 0;
    for (std::size_t i = 0; i < joined->q_tile.size(); ++i)
      for (const auto [tile, partial] : joined->met.of(i)) {
        const Tiling::Range k = joined->k_tile[static_cast<std::size_t>(tile)];
        for (auto q = static_cast<std::size_t>(joined->q_tile[i].begin); std::cmp_less(q, joined->q_tile[i].end); ++q)
          for (auto j = static_cast<std::size_t>(k.begin); std::cmp_less(j, k.end); ++j)
            if (!partial || attends(*joined, q, j)) ++times[{joined->q_token[q], joined->k_token[j]}], ++pairs;
      }
    EXPECT_EQ(pairs, joined->pairs);
    for (Index t = 0; t < plan.length(); t += 7)
      for (Index u = 0; u < plan.length(); ++u) {
        const auto found = times.find({static_cast<std::int32_t>(t), static_cast<std::int32_t>(u)});
        ASSERT_EQ(found == times.end() ? 0 : found->second, plan.attends(0, t, u)) << t << ' ' << u;
      }
    std::set<std::int32_t> before;  // keys; queries are all known
    for (const std::int32_t i : its) {
      const Tiling& t = plan.tilings()[static_cast<std::size_t>(i)];
      EXPECT_TRUE(t.q_known.empty());
      for (std::size_t j = 0; j < t.k_known.size(); ++j)
        EXPECT_EQ(t.k_known[j], before.contains(t.k_token[j])) << "tiling " << i << " key " << j;
      EXPECT_EQ(t.k_known.empty(), i == its[0]);
      before.insert(t.k_token.begin(), t.k_token.end());
    }
  }
  const Plan apart(spec_of(1800, kBranches, "row", Causality::none, DilationMode::residue));
  EXPECT_EQ(joined_tiling(apart.parts()[0].memo, apart.tilings(), apart.tilings_of(0)), nullptr);
  const Plan sparse(spec_of(1800, kBranches, "row", Causality::none, DilationMode::longnet));
  EXPECT_EQ(joined_tiling(sparse.parts()[0].memo, sparse.tilings(), sparse.tilings_of(0)), nullptr);
  EXPECT_FALSE(sparse.tilings()[0].q_known.empty());
  PlanSpec more(spec_of(3, "dense+dense"));  // queries than keys
  more.cross = 500;
  const Plan crossed(more);
  for (const std::int32_t i : crossed.tilings_of(0))
    EXPECT_EQ(crossed.tilings()[static_cast<std::size_t>(i)].q_token.size(), 500u);
  EXPECT_NE(joined_tiling(crossed.parts()[0].memo, crossed.tilings(), crossed.tilings_of(0)), nullptr);
  const Plan grouped(spec_of(1800, kBranches, "row", Causality::none, DilationMode::head_groups, 3));
  EXPECT_FALSE(grouped.heads_agree());
}
