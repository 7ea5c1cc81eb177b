#pragma once
#include "ops/hilbert/plan/tiling.h"

namespace hilt {

/// The same pairs in fewer products: a tile of queries meets the keys that some of its queries ask
/// for, listed one by one, instead of whole tiles of keys. Queries stand as they did or, where that
/// saves a tenth, by where their keys begin on the axes, in tiles of at most 128; a key stands in
/// k_token once for every list it is in. A tile keeps its whole tiles of keys where lists would not
/// save a fifth. Made when first asked for, and kept with t.
///
/// by_pairs: for kernels that can take pairs one by one where that costs less, see
/// Tiling::pair_list.
///
/// `share` says how sums over queries are shared, for kernels that own queries: it has no transpose
/// (queries, queries_begin) and no groups.
const Tiling& compact(const Tiling& t, bool by_pairs = false);

}  // namespace hilt
