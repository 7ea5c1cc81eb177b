// Lists of keys for tiles of queries: the same pairs as the tiling they are made from, in fewer
// products, and turns in which every row of keys is added to by one tile of queries at a time.
#include "ops/hilbert/kernels/compact.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
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
void add_tile(const Tiling& t, std::size_t i, Tiling::Ref ref, Work& w) {
  const Tiling::Range q = t.q_tile[i], k = t.k_tile[at(ref.tile)];
  w.products += Index{q.end - q.begin} * (k.end - k.begin);
  const std::size_t before = w.pairs.size();
  for (auto a = q.begin; a < q.end; ++a)
    for (auto b = k.begin; b < k.end; ++b)
      if (attends(t, at(a), at(b))) w.pairs.emplace_back(t.q_token[at(a)], t.k_token[at(b)]);
  const auto pairs = static_cast<Index>(w.pairs.size() - before);
  EXPECT_GT(pairs, 0) << "tile of queries " << i << " lists an empty tile of keys";
  EXPECT_EQ(ref.partial, pairs < Index{q.end - q.begin} * (k.end - k.begin));
}
Work work_of(const Tiling& t) {
  Work w;
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    for (const Tiling::Ref ref : t.met.of(i)) add_tile(t, i, ref, w);
  std::ranges::sort(w.pairs);
  return w;
}
/// Where pairs are listed, what the lists hold.
Work work_of(const Compact& t) {
  Work w;
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1]; ++e) {
      const Tiling::Ref ref = t.keys[at(e)];
      if (t.pair_begin.empty() || t.pair_begin[at(ref.tile)] < 0) {
        add_tile(t, i, ref, w);
        continue;
      }
      const Tiling::Range q = t.q_tile[i], k = t.k_tile[at(ref.tile)];
      const std::uint8_t* list = t.pair_list.data() + t.pair_begin[at(ref.tile)];
      std::vector<std::array<Index, 3>> by_row, by_key;  // query, key, which of the query's keys
      for (Index a = 0; a < q.end - q.begin; ++a)
        for (Index n = *list++, slot = 0; slot < n; ++slot) by_row.push_back({a, *list++, slot});
      for (Index b = 0; b < k.end - k.begin; ++b)
        for (Index n = *list++; n > 0; --n, list += 2) by_key.push_back({list[0], b, list[1]});
      std::ranges::sort(by_key);
      EXPECT_EQ(by_row, by_key);  // ascending, too
      EXPECT_EQ(std::ranges::count(t.keys, ref.tile, &Tiling::Ref::tile), 1) << "of one tile of queries";
      for (const auto& [a, b, slot] : by_row)
        w.pairs.emplace_back(t.q_token[at(q.begin + a)], t.k_token[at(k.begin + b)]);
      w.products += std::ssize(by_row);
    }
  std::ranges::sort(w.pairs);
  return w;
}

std::vector<std::int32_t> ascending(const TokenList& tokens) {
  std::vector<std::int32_t> list = tokens.values();
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

/// From the last run to the first, a run has the next turn of each part of the keys that it meets,
/// ended by its last share of it; a token of keys is always in the same part, and first once.
void judge_shares(const Compact& t) {
  std::vector<std::int32_t> turn(t.turns.size());
  std::map<std::int32_t, std::int32_t> rows_of;
  std::map<std::int32_t, Index> firsts;
  for (std::size_t run = t.runs.size(); run-- > 0;) {
    std::map<std::int32_t, bool> ended;
    const std::size_t first = at(t.runs[run].begin), end = at(t.runs[run].end);
    for (std::int32_t visit = 0;; ++visit) {
      std::int32_t e = -1;
      for (std::size_t i = first; i < end; ++i)
        if (visit < t.keys_begin[i + 1] - t.keys_begin[i]) e = t.keys_begin[i] + visit;
      if (e < 0) break;
      const Tiling::Range k = t.k_tile[at(t.keys[at(e)].tile)];
      std::size_t s = at(t.share_begin[at(e)]);
      for (auto from = k.begin; from < k.end; from = t.share[s++].end) {
        const Compact::Share share = t.share[s];
        ASSERT_TRUE(share.end > from && share.end <= k.end);
        EXPECT_EQ(share.turn, turn[at(share.rows)]);
        EXPECT_FALSE(ended[share.rows]) << "its turn is over";
        ended[share.rows] = share.last;
        for (auto j = from; j < share.end; ++j) {
          EXPECT_EQ(rows_of.try_emplace(t.k_token[at(j)], share.rows).first->second, share.rows);
          const bool known = !firsts.try_emplace(t.k_token[at(j)]).second;
          EXPECT_EQ(known, !(share.first && t.k_first[at(j)])) << "the first is written, others are added";
        }
      }
    }
    for (const auto& [rows, over] : ended) {
      EXPECT_TRUE(over);
      ++turn[at(rows)];
    }
  }
  EXPECT_EQ(turn, t.turns);
}

}  // namespace

TEST(Compact, HoldsThePairsOfTheTilingInNoMoreProducts) {
  std::vector<PlanSpec> specs;
  for (const char* order : {"row", "hilbert"})
    for (const Causality causality : {Causality::none, Causality::token, Causality::curve}) {
      for (const char* pattern :
           {"dense", "segment:7", "segment:16", "segment:100", "segment:300,dilation=4", "segment:9,dilation=4",
            "slide:5", "slide:90", "neighborhood:33", "segment:64+slide:9"})
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
      const Work whole = work_of(t);
      for (const bool by_pairs : {false, true}) {
        const Compact& lists = compact(t, by_pairs);
        EXPECT_EQ(&lists, &compact(t, by_pairs)) << "made twice";
        judge_tiles(lists.q_tile, t.q_token.size());
        judge_tiles(lists.k_tile, lists.k_token.size());
        EXPECT_EQ(ascending(lists.q_token), ascending(t.q_token));
        const Work compacted = work_of(lists);
        EXPECT_EQ(compacted.pairs, whole.pairs);
        EXPECT_EQ(lists.pairs, t.pairs);
        EXPECT_LE(compacted.products, whole.products);
        EXPECT_TRUE(by_pairs || lists.pair_list.empty());
        judge_shares(lists);
      }
    }
  }
}

TEST(Compact, TakesFewKeysAQueryInPairs) {
  const auto listed = [](const char* order, const char* pattern, Causality causality = Causality::none) {
    const Plan plan(spec_of(4096, order, pattern, causality));
    const Compact& t = compact(plan.tilings()[0], true);
    std::cout << "  " << order << ", " << pattern << ": tiles of "
              << static_cast<double>(t.q_token.size()) / static_cast<double>(t.q_tile.size()) << " queries, "
              << static_cast<double>(t.k_token.size()) / static_cast<double>(t.q_token.size())
              << " keys listed a query, " << t.pair_list.size() << " bytes of pairs\n";
    return !t.pair_list.empty();
  };
  EXPECT_TRUE(listed("row:64x64", "neighborhood2d:3x3"));
  EXPECT_TRUE(listed("hilbert", "segment:32", Causality::token));
  EXPECT_TRUE(listed("row", "segment:2,dilation=2"));
  EXPECT_TRUE(listed("hilbert:64x64", "neighborhood2d:9x9"));
  EXPECT_FALSE(listed("row", "segment:128")) << "products of whole tiles cost less";
  EXPECT_FALSE(listed("row", "dense"));
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
