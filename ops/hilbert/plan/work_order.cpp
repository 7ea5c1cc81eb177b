// Orders of query and key blocks: along the diagonal, the Hilbert curve, or what gathers least.
#include "ops/hilbert/plan/work_order.h"
#include <algorithm>
#include <utility>
#include "ops/hilbert/plan/curve.h"
#include "ops/hilbert/plan/plan.h"

namespace hilt {
namespace {

using Blocks = std::vector<std::int32_t>;

/// Query blocks by the mean of their key blocks: the pairs gather along the diagonal.
BlockLayout diagonal(const BlockPairs& pairs, Index n) {
  std::vector<double> sum(static_cast<std::size_t>(n)), count(sum.size());
  for (const auto& [i, j] : pairs) sum[static_cast<std::size_t>(i)] += j, ++count[static_cast<std::size_t>(i)];
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = count[i] > 0 ? sum[i] / count[i] : static_cast<double>(i);
  BlockLayout out{WorkOrder::diagonal, query_run(0, n), query_run(0, n)};
  std::ranges::stable_sort(
      out.queries, [&](auto a, auto b) { return sum[static_cast<std::size_t>(a)] < sum[static_cast<std::size_t>(b)]; });
  return out;
}

/// Both as a walk along the Hilbert curve over pairs finds them first; those without pairs last.
BlockLayout along_curve(const BlockPairs& pairs, Index n) {
  const Grid grid{n, n};
  std::vector<std::pair<Index, std::size_t>> walk;
  for (std::size_t e = 0; e < pairs.size(); ++e)
    walk.emplace_back(hilbert_position(grid, {pairs[e].second, pairs[e].first}), e);
  std::ranges::sort(walk);
  BlockLayout out{WorkOrder::hilbert, {}, {}};
  std::vector<char> seen_query(static_cast<std::size_t>(n)), seen_key(seen_query);
  const auto append_once = [](Blocks& list, std::vector<char>& seen, std::int32_t block) {
    if (!std::exchange(seen[static_cast<std::size_t>(block)], 1)) list.push_back(block);
  };
  for (const auto& [position, e] : walk) {
    append_once(out.queries, seen_query, pairs[e].first);
    append_once(out.keys, seen_key, pairs[e].second);
  }
  for (std::int32_t block : query_run(0, n))
    append_once(out.queries, seen_query, block), append_once(out.keys, seen_key, block);
  return out;
}

}  // namespace

BlockLayout lay_out_blocks(WorkOrder wanted, const BlockPairs& pairs, Index n) {
  switch (wanted) {
    case WorkOrder::row: break;
    case WorkOrder::diagonal: return diagonal(pairs, n);
    case WorkOrder::hilbert: return along_curve(pairs, n);
    case WorkOrder::automatic: {
      BlockLayout best = lay_out_blocks(WorkOrder::row, pairs, n);
      for (WorkOrder other : {WorkOrder::diagonal, WorkOrder::hilbert}) {
        BlockLayout candidate = lay_out_blocks(other, pairs, n);
        if (blocks_gathered(candidate, pairs) < blocks_gathered(best, pairs)) best = std::move(candidate);
      }
      return best;
    }
  }
  return {WorkOrder::row, query_run(0, n), query_run(0, n)};
}

Index blocks_gathered(const BlockLayout& layout, const BlockPairs& pairs) {
  Index gathered = 0;
  Blocks wanted;
  for (std::size_t begin = 0; begin < layout.queries.size(); begin += kTogether) {
    wanted.clear();
    for (std::size_t i = begin; i < std::min(begin + kTogether, layout.queries.size()); ++i) {
      const auto of_block = std::ranges::equal_range(pairs, layout.queries[i], {}, &BlockPairs::value_type::first);
      for (const auto& pair : of_block) wanted.push_back(pair.second);
    }
    std::ranges::sort(wanted);
    gathered += std::unique(wanted.begin(), wanted.end()) - wanted.begin();
  }
  return gathered;
}

}  // namespace hilt
