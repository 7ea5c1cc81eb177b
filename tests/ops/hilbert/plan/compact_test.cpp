// Lists of keys for tiles of queries: the same pairs as the tiling they are made from, in fewer
// products, and turns in which every row of keys is added to by one tile of queries at a time.
#include "ops/hilbert/plan/compact.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/plan.h"

using namespace hilt;

namespace {

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

PlanSpec spec_of(Index length, const std::string& order, const std::string& pattern,
                 Causality causality = Causality::none) {
  PlanSpec s;
  s.length = length;
  s.order = parse_order(order, length);
  s.pattern = parse_pattern(pattern);
  s.causality = causality;
  return s;
}

struct Work {
  Index products = 0;  // pairs of listed tiles
  std::vector<std::pair<std::int32_t, std::int32_t>> pairs;
};
/// What listed tiles hold; full ones attend throughout.
Work work_of(const Tiling& t) {
  Work w;
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1]; ++e) {
      const Tiling::Ref ref = t.keys[at(e)];
      const Tiling::Range q = t.q_tile[i], k = t.k_tile[at(ref.tile)];
      w.products += Index{q.end - q.begin} * (k.end - k.begin);
      Index pairs = 0;
      for (auto a = q.begin; a < q.end; ++a)
        for (auto b = k.begin; b < k.end; ++b)
          if (attends(t, at(a), at(b))) ++pairs, w.pairs.emplace_back(t.q_token[at(a)], t.k_token[at(b)]);
      EXPECT_GT(pairs, 0) << "tile of queries " << i << " lists an empty tile of keys";
      EXPECT_EQ(ref.partial, pairs < Index{q.end - q.begin} * (k.end - k.begin));
    }
  std::ranges::sort(w.pairs);
  return w;
}

std::vector<std::int32_t> ascending(std::vector<std::int32_t> list) {
  std::ranges::sort(list);
  return list;
}

/// Tiles are of at most kTile, and cover their lists once, in order.
void judge_tiles(const std::vector<Tiling::Range>& tiles, std::size_t listed) {
  std::int32_t end = 0;
  for (const Tiling::Range& r : tiles) {
    EXPECT_EQ(r.begin, end);
    EXPECT_TRUE(r.end > r.begin && r.end - r.begin <= Tiling::kTile);
    end = r.end;
  }
  EXPECT_EQ(at(end), listed);
}

/// From the last tile of queries to the first, every share is the next turn of its rows, and a
/// token of keys is always among the same rows.
void judge_shares(const Tiling& t) {
  std::vector<std::int32_t> turn(t.turns.size());
  std::map<std::int32_t, std::int32_t> rows_of;
  for (std::size_t i = t.q_tile.size(); i-- > 0;)
    for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1]; ++e) {
      const Tiling::Range k = t.k_tile[at(t.keys[at(e)].tile)];
      std::size_t s = at(t.share_begin[at(e)]);
      for (auto from = k.begin; from < k.end; from = t.share[s++].end) {
        const Tiling::Share share = t.share[s];
        ASSERT_TRUE(share.end > from && share.end <= k.end);
        EXPECT_EQ(share.turn, turn[at(share.rows)]++);
        for (auto j = from; j < share.end; ++j)
          EXPECT_EQ(rows_of.try_emplace(t.k_token[at(j)], share.rows).first->second, share.rows);
      }
    }
  EXPECT_EQ(turn, t.turns);
}

}  // namespace

TEST(Compact, HoldsThePairsOfTheTilingInNoMoreProducts) {
  std::vector<PlanSpec> specs;
  for (const char* order : {"row", "hilbert"})
    for (const Causality causality : {Causality::none, Causality::token, Causality::curve}) {
      for (const char* pattern : {"dense", "segment:16", "segment:100", "segment:300,dilation=4", "slide:5", "slide:90",
                                  "neighborhood:33", "segment:64+slide:9"})
        specs.push_back(spec_of(700, order, pattern, causality));
      for (const char* pattern : {"window2d:3x5", "window2d:8x8", "slide2d:2x3", "neighborhood2d:5x7"})
        specs.push_back(
            spec_of(24 * 28, std::string(order) == "row" ? "snake:24x28" : "hilbert:24x28", pattern, causality));
    }
  specs.push_back(spec_of(700, "hilbert", "dense"));
  specs.back().pattern[0].kind = Branch::Kind::blocks;
  specs.back().pattern[0].size = 20;
  for (std::int32_t i = 0; i < 35; ++i)
    specs.back().pattern[0].pairs.insert(specs.back().pattern[0].pairs.end(), {{0, i}, {i, i}, {i, i / 2}});
  for (const PlanSpec& s : specs) {
    const Plan plan(s);
    for (const Tiling& t : plan.tilings()) {
      SCOPED_TRACE(to_string(s.order) + " " + to_string(s.pattern) + " " + std::string(name_of(s.causality)));
      const Tiling& lists = compact(t);
      EXPECT_EQ(&lists, &compact(t)) << "made twice";
      judge_tiles(lists.q_tile, t.q_token.size());
      judge_tiles(lists.k_tile, lists.k_token.size());
      EXPECT_EQ(ascending(lists.q_token), ascending(t.q_token));
      const Work whole = work_of(t), compacted = work_of(lists);
      EXPECT_EQ(compacted.pairs, whole.pairs);
      EXPECT_EQ(lists.pairs, t.pairs);
      EXPECT_LE(compacted.products, whole.products);
      judge_shares(lists);
    }
  }
}

TEST(Compact, ListsWhatSmallPatchesAskFor) {
  const auto keys_a_query = [](const char* order, const char* pattern, Index length) {
    const Plan plan(spec_of(length, order, pattern));
    const double keys = static_cast<double>(work_of(compact(plan.tilings()[0])).products) / static_cast<double>(length),
                 whole = static_cast<double>(plan.stats().tile_pairs) / static_cast<double>(length);
    std::cout << "  " << order << ", " << pattern << ": " << keys << " keys a query, in whole tiles " << whole << '\n';
    return keys;
  };
  EXPECT_LE(keys_a_query("hilbert:56x56", "neighborhood2d:7x7", 3136), 105);
  EXPECT_LE(keys_a_query("hilbert:64x64", "neighborhood2d:7x7", 4096), 105);
  // Rows of the grid are far apart: queries change places.
  EXPECT_LE(keys_a_query("snake:64x64", "neighborhood2d:7x7", 4096), 105);
  EXPECT_LE(keys_a_query("row:64x64", "neighborhood2d:17x17", 4096), 405);
  EXPECT_LE(keys_a_query("row:64x64", "slide2d:2x2,dilation=2", 4096), 80);
  for (const char* order : {"row:63x63", "hilbert:63x63"})
    EXPECT_EQ(keys_a_query(order, "window2d:7x7", 3969), 49) << "a window is a tile";
  EXPECT_LE(keys_a_query("hilbert:128x128", "neighborhood2d:17x17", 16384), 405);
  EXPECT_LE(keys_a_query("row", "slide:144", 4096), 350);
}
