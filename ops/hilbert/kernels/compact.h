#pragma once
#include "ops/hilbert/plan/tiling.h"

namespace hilt {

/// The pairs of a tiling in fewer products, for kernels that own queries: a tile of queries has
/// the keys that some of its queries ask for, listed one by one, instead of whole tiles of keys.
/// Queries stand as they did or, where that saves a tenth, by where their keys begin on the axes,
/// in tiles of at most 128; a key stands in k_token once for every list it is in. A tile keeps its
/// whole tiles of keys where lists would not save a fifth. Its lists are stored; `met` is empty.
struct Compact : Tiling {
  std::vector<std::int32_t> keys_begin;  // [q tiles + 1]: the key tiles of q tile i are keys[keys_begin[i] ..)
  std::vector<Ref> keys;                 // ascending

  /// Where gradients of keys are added up. Shares of an entry e of `keys` follow each other from
  /// share[share_begin[e]] on; of an entry that tiles of a run have in common, the last's.
  struct Share {
    std::int32_t rows;  // which of several parts of all keys these keys are in
    std::int32_t end;   // of the entry's keys, those before this one
    std::int32_t turn;  // of the turns[rows] runs that add to that part, the number of this one
    bool last;          // ends the turn
    bool first;         // has keys that come in no turn before, those of k_first
  };
  std::vector<std::int32_t> share_begin;  // [entries]
  std::vector<Share> share;               // in order of turns
  std::vector<std::int32_t> turns;        // by part of the keys
  std::vector<std::uint8_t> k_first;      // [entries of k_token]
  bool every_key = false;                 // some query attends to it

  /// Tiles of queries, at most kRun, that a kernel takes together. Of several, one entry of `keys`
  /// after the other is the same tile for all whose lists are so long.
  static constexpr int kRun = 2;
  std::vector<Range> runs;  // of query tiles
  /// The entry of a run that is taken after `visit` others, -1 behind the last.
  [[gnu::always_inline]] std::int32_t entry_of(Range run, std::int32_t visit) const {
    for (std::int32_t i = run.end; i-- > run.begin;)
      if (keys_begin.data()[i] + visit < keys_begin.data()[i + 1]) return keys_begin.data()[i] + visit;
    return -1;
  }

  /// For lists whose pairs are taken one by one: where in pair_list those of a tile of keys begin,
  /// -1 where whole products are taken; empty: everywhere. One tile of queries has them;
  /// attends() knows nothing of them.
  std::vector<std::int32_t> pair_begin;
  /// By query: how many keys, and which of the tile; then by key: how many queries, and of each
  /// which of its tile, and as which of its keys.
  std::vector<std::uint8_t> pair_list;
  /// Those of a tile of keys, or null.
  [[gnu::always_inline]] const std::uint8_t* pairs_of(std::int32_t tile) const {
    return pair_begin.empty() || pair_begin.data()[tile] < 0 ? nullptr : pair_list.data() + pair_begin.data()[tile];
  }
};

/// Made when first asked for, and kept with t. by_pairs: for kernels that can take pairs one by one
/// where that costs less, see Compact::pair_list.
const Compact& compact(const Tiling& t, bool by_pairs = false);

/// Some tilings of a part, which has the memo, as one, for kernels that own queries: a row reads
/// the keys of one after the other, and a key stands in k_token once for each. Null where they list
/// other queries.
const Tiling* joined_tiling(const Memo& memo, std::span<const Tiling> tilings, std::span<const std::int32_t> which);

}  // namespace hilt
