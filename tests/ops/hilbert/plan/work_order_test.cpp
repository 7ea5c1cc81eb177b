// A layout of blocks has every block once, gathers no more than promised, and changes no set.
#include "ops/hilbert/plan/tiles.h"
#include <gtest/gtest.h>
#include <algorithm>
#include <set>
#include "core/random.h"
#include "ops/hilbert/plan/plan.h"

using namespace hilt;

namespace {

constexpr WorkOrder kAll[] = {WorkOrder::row, WorkOrder::diagonal, WorkOrder::hilbert, WorkOrder::automatic};

/// Query block i wants the key blocks around a place of its own, in no order.
BlockPairs scattered(Index n) {
  const std::vector<double> place = rand({n}, {11, 0}).to_vector();
  BlockPairs pairs;
  for (Index i = 0; i < n; ++i) {
    const auto center = static_cast<Index>(place[static_cast<std::size_t>(i)] * static_cast<double>(n));
    for (Index j = std::max<Index>(0, center - 1); j <= std::min(n - 1, center + 1); ++j)
      pairs.emplace_back(static_cast<std::int32_t>(i), static_cast<std::int32_t>(j));
  }
  return pairs;
}
std::vector<BlockPairs> lists(Index n) {
  return {{}, local_blocks(n, 1), dilated_blocks(n, {3, 5}), global_local_blocks(n, 1, 1), scattered(n)};
}

TEST(WorkOrder, EveryLayoutHasEveryBlockOnce) {
  for (Index n : {1, 2, 7, 32})
    for (const BlockPairs& pairs : lists(n))
      for (WorkOrder order : kAll) {
        const BlockLayout layout = lay_out_blocks(order, pairs, n);
        for (const auto& list : {layout.queries, layout.keys}) {
          EXPECT_EQ(static_cast<Index>(list.size()), n);
          EXPECT_EQ(std::set(list.begin(), list.end()).size(), list.size());
        }
        EXPECT_NE(layout.used, WorkOrder::automatic);
      }
}

TEST(WorkOrder, ByHand) {
  // Query 0 wants key 3, query 1 key 0, query 2 keys 2 and 3, query 3 nothing.
  const BlockPairs pairs{{0, 3}, {1, 0}, {2, 2}, {2, 3}};
  EXPECT_EQ(lay_out_blocks(WorkOrder::row, pairs, 4).queries, (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(lay_out_blocks(WorkOrder::diagonal, pairs, 4).queries,
            (std::vector<std::int32_t>{1, 2, 0, 3}));  // means 0, 2.5, 3, and 3 stays at 3
  const BlockLayout curve = lay_out_blocks(WorkOrder::hilbert, pairs, 4);
  EXPECT_EQ(curve.queries.back(), 3);                                              // without pairs, last
  EXPECT_EQ(blocks_gathered(lay_out_blocks(WorkOrder::row, pairs, 4), pairs), 3);  // four together: 0, 2, 3
}

TEST(WorkOrder, AutomaticGathersTheFewest) {
  for (const BlockPairs& pairs : lists(64)) {
    const Index chosen = blocks_gathered(lay_out_blocks(WorkOrder::automatic, pairs, 64), pairs);
    for (WorkOrder order : kAll) EXPECT_LE(chosen, blocks_gathered(lay_out_blocks(order, pairs, 64), pairs));
  }
  // Neighbors in the list want neighbors: nothing to gain, so nothing moves. Scattered ones are
  // brought together.
  EXPECT_EQ(lay_out_blocks(WorkOrder::automatic, local_blocks(64, 1), 64).used, WorkOrder::row);
  const BlockPairs pairs = scattered(64);
  const BlockLayout row = lay_out_blocks(WorkOrder::row, pairs, 64),
                    chosen = lay_out_blocks(WorkOrder::automatic, pairs, 64);
  EXPECT_LT(3 * blocks_gathered(chosen, pairs), 2 * blocks_gathered(row, pairs));
}

TEST(WorkOrder, TheSetStays) {
  for (Index length : {100, 256})
    for (Causality causality : {Causality::none, Causality::token, Causality::curve}) {
      PlanSpec spec;
      spec.length = length;
      spec.causality = causality;
      spec.order = parse_order("hilbert", length);
      spec.pattern = {blocks(16, scattered((length + 15) / 16))};
      const Plan row(spec);
      for (WorkOrder order : kAll) {
        spec.work_order = order;
        const Plan plan(spec);
        EXPECT_EQ(plan.stats().pairs, row.stats().pairs);
        EXPECT_EQ(plan.empty_rows(), row.empty_rows());
        Index pairs = 0;  // as the tiles have it
        for (const Tiling& t : plan.tilings()) {
          pairs += t.pairs;
          for (std::size_t i = 0; i < t.q_tile.size(); ++i)
            for (std::int32_t last = -1; const Tiling::Ref ref : t.met.of(i)) {
              EXPECT_GT(ref.tile, last);
              last = ref.tile;
            }
        }
        EXPECT_EQ(pairs, row.stats().pairs);
      }
    }
}

}  // namespace
