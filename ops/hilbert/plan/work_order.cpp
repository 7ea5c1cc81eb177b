// Orders of query and key blocks: along the diagonal, the Hilbert curve, or what gathers least.
#include "ops/hilbert/plan/tiles.h"

namespace hilt {
namespace {

/// Query blocks by the mean of their key blocks: the pairs gather along the diagonal.
BlockLayout diagonal(const BlockPairs& pairs, Index n) {
  std::vector<double> mean(at(n)), count(at(n));
  for (const auto& [i, j] : pairs) mean[at(i)] += j, ++count[at(i)];
  for (std::size_t i = 0; i < mean.size(); ++i) mean[i] = count[i] > 0 ? mean[i] / count[i] : static_cast<double>(i);
  BlockLayout out{WorkOrder::diagonal, query_run(0, n), query_run(0, n)};
  std::ranges::stable_sort(out.queries, {}, [&](std::int32_t i) { return mean[at(i)]; });
  return out;
}

/// Both as a walk along the Hilbert curve over pairs finds them first; those without pairs last.
BlockLayout along_curve(const BlockPairs& pairs, Index n) {
  const Grid grid{n, n};
  std::vector<std::pair<Index, std::size_t>> walk;
  for (std::size_t e = 0; e < pairs.size(); ++e)
    walk.emplace_back(hilbert_position(grid, {pairs[e].second, pairs[e].first}), e);
  std::ranges::sort(walk);
  const auto blocks = [&](auto side) {
    std::vector<std::int32_t> out;
    std::vector<bool> seen(at(n));
    const auto append_once = [&](std::int32_t block) {
      if (!seen[at(block)]) out.push_back(block);
      seen[at(block)] = true;
    };
    for (const auto& [position, e] : walk) append_once(pairs[e].*side);
    std::ranges::for_each(query_run(0, n), append_once);
    return out;
  };
  return {WorkOrder::hilbert, blocks(&BlockPairs::value_type::first), blocks(&BlockPairs::value_type::second)};
}

}  // namespace

BlockLayout lay_out_blocks(WorkOrder wanted, const BlockPairs& pairs, Index n) {
  if (wanted == WorkOrder::diagonal) return diagonal(pairs, n);
  if (wanted == WorkOrder::hilbert) return along_curve(pairs, n);
  BlockLayout best{WorkOrder::row, query_run(0, n), query_run(0, n)};
  if (wanted == WorkOrder::automatic)
    for (WorkOrder other : {WorkOrder::diagonal, WorkOrder::hilbert}) {
      BlockLayout candidate = lay_out_blocks(other, pairs, n);
      if (blocks_gathered(candidate, pairs) < blocks_gathered(best, pairs)) best = std::move(candidate);
    }
  return best;
}

Index blocks_gathered(const BlockLayout& layout, const BlockPairs& pairs) {
  constexpr std::size_t kTogether = 4;
  Index gathered = 0;
  std::vector<std::int32_t> wanted;
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
