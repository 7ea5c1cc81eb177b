#pragma once
#include "pattern.h"

namespace hilt {

/// How the blocks of a `blocks` branch are laid out for kernels: query blocks and key blocks, each
/// once. Work for neighbors in a list runs together, and a key block of both is gathered once.
struct BlockLayout {
  WorkOrder used = WorkOrder::row;  // never automatic
  std::vector<std::int32_t> queries, keys;
};
/// pairs: sorted, within n x n.
BlockLayout lay_out_blocks(WorkOrder wanted, const BlockPairs& pairs, Index n);

/// Key blocks gathered when kTogether query blocks in a row share them: what `automatic` minimizes.
inline constexpr std::size_t kTogether = 4;
Index blocks_gathered(const BlockLayout& layout, const BlockPairs& pairs);

}  // namespace hilt
