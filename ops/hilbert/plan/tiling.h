#pragma once
#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <vector>
#include "curve.h"

namespace [[gnu::visibility("default")]] hilt {

/// One attended set, cut into tiles. Queries and keys stand in lists of tokens; a tile is a run of
/// at most kTile queries against a run of at most kTile keys. Kernels read nothing but this.
struct Tiling {
  static constexpr Index kTile = 128;  // the most rows of a tile
  /// [begin, end).
  struct Range {
    std::int32_t begin, end;  // the first, and the one behind the last
  };
  /// A tile of the other side; partial tiles consult attends(), full ones need not.
  struct Ref {
    std::int32_t tile;  // its number
    bool partial;       // some pairs do not attend
  };

  std::vector<std::int32_t> q_token, k_token;  // rows of the tensors; with in_order, positions
  std::vector<std::int32_t> q_name, k_name;  // the tokens behind them, where others: dropout's masks are drawn by them
  /// 1 where a set that a head merges before this one has the row too; empty: all are, or none is.
  std::vector<std::int32_t> q_known, k_known;
  Grid grid = {};                           // where the tokens lie, for score terms; without cells: on none
  std::vector<Range> q_tile, k_tile;        // runs of q_token, k_token; each list is covered once, in order
  std::vector<std::int32_t> keys_begin;     // [q tiles + 1]: the key tiles of q tile i are keys[keys_begin[i] ..)
  std::vector<Ref> keys;                    // ascending
  std::vector<std::int32_t> queries_begin;  // [k tiles + 1]: the same, transposed
  std::vector<Ref> queries;                 // ascending
  /// Runs of queries and keys outside of which nothing attends and inside, but for causality, all.
  struct Group {
    Range q, k;  // rows of each side
  };
  std::vector<Group> group;  // all of them

  // What attends() compares; empty vectors mean no such test. A union has several boxes: a key
  // attends that is in one of them, and lists of axes have so many values an entry.
  std::int32_t boxes = 1;                            // of the union; 1: no union
  bool causal = false;                               // rank of key <= rank of query
  std::vector<std::int32_t> q_rank, k_rank;          // where those are not the names
  std::vector<std::int32_t> k_a, q_a_low, q_a_high;  // q_a_low <= k_a <= q_a_high
  std::vector<std::int32_t> k_b, q_b_low, q_b_high;  // the same on a second axis
  std::vector<std::int32_t> k_c, q_c_low, q_c_high;  // and on a third

  /// What has an entry a query, and what has one a key; empty where there is no such test or name.
  static constexpr std::array kQueryLists{&Tiling::q_token,  &Tiling::q_name,   &Tiling::q_rank,
                                          &Tiling::q_a_low,  &Tiling::q_a_high, &Tiling::q_b_low,
                                          &Tiling::q_b_high, &Tiling::q_c_low,  &Tiling::q_c_high};
  /// The same of keys.
  static constexpr std::array kKeyLists{&Tiling::k_token, &Tiling::k_name, &Tiling::k_rank,
                                        &Tiling::k_a,     &Tiling::k_b,    &Tiling::k_c};

  /// The tokens of queries.
  const std::vector<std::int32_t>& q_names() const { return q_name.empty() ? q_token : q_name; }
  const std::vector<std::int32_t>& k_names() const { return k_name.empty() ? k_token : k_name; }  // the tokens of keys
  /// What causality compares, of queries.
  const std::vector<std::int32_t>& q_ranks() const { return q_rank.empty() ? q_names() : q_rank; }
  /// What causality compares, of keys.
  const std::vector<std::int32_t>& k_ranks() const { return k_rank.empty() ? k_names() : k_rank; }

  Index tiles_full = 0, tiles_partial = 0;  // entries of `keys`, by kind
  Index pairs = 0;                          // (query, key) pairs that attend

  /// Where a tiling lies: lists count from these rows of q and k, names from the token at row k.
  struct Place {
    std::int32_t row = 0, q = 0, k = 0;  // row of the batch
    /// Number i of a list as Places has it.
    [[gnu::always_inline]] static constexpr Place at(const Place* list, Index n, bool each_row, Index i) {
      if (n == 0) return {static_cast<std::int32_t>(i), 0, 0};
      if (!each_row) return list[i];
      return {static_cast<std::int32_t>(i / n), list[i % n].q, list[i % n].k};
    }
    friend auto operator<=>(const Place&, const Place&) = default;
  };
  /// The places of one tiling, each computed for itself.
  struct Places {
    std::vector<Place> list;  // empty: the start of the row
    bool each_row = true;     // those of one row, the same in every row of the batch

    [[gnu::always_inline]] Index count(Index batch) const {  // how many, for so many rows of the batch
      const auto n = std::ssize(list);
      return !each_row ? n : list.empty() ? batch : batch * n;
    }
    /// Number i.
    [[gnu::always_inline]] Place at(Index i) const { return Place::at(list.data(), std::ssize(list), each_row, i); }
    bool are_rows() const { return each_row && list.empty(); }  // one in each row, from its start on

    struct OnDevice;
    mutable std::shared_ptr<OnDevice> device_images;  // see OnDevice
  };
  /// Of compact() lists: where kernels that own queries add up gradients of keys. Shares of an
  /// entry e of `keys` follow each other from share[share_begin[e]] on; of an entry that tiles of a
  /// run have in common, the last's.
  struct Share {
    std::int32_t rows;  ///< which of several parts of all keys these keys are in
    std::int32_t end;   ///< of the entry's keys, those before this one
    std::int32_t turn;  ///< of the turns[rows] runs that add to that part, the number of this one
    bool last;          ///< ends the turn
    bool first;         ///< has keys that come in no turn before, those of k_first
  };
  std::vector<std::int32_t> share_begin;  // [entries]
  std::vector<Share> share;               // in order of turns
  std::vector<std::int32_t> turns;        // by part of the keys
  std::vector<std::uint8_t> k_first;      // [entries of k_token]
  bool every_key = false;                 // some query meets it
  /// Of compact() lists: tiles of queries, at most kRun, that a kernel takes together. Of several,
  /// one entry of `keys` after the other is the same tile for all whose lists are so long.
  static constexpr int kRun = 2;
  std::vector<Range> runs;  // of query tiles
  /// Of compact() lists whose pairs are taken one by one: where in pair_list those of a tile of
  /// keys begin, -1 where whole products are taken; empty: everywhere. One tile of queries meets
  /// them; attends() knows nothing of them.
  std::vector<std::int32_t> pair_begin;
  /// By query: how many keys, and which of the tile; then by key: how many queries, and of each
  /// which of its tile, and as which of its keys.
  std::vector<std::uint8_t> pair_list;
  mutable std::array<std::shared_ptr<const Tiling>, 2> compacted;  // its compact() lists, by `by_pairs`, once made

  /// The same lists in the memory of GPUs, made when a kernel first needs them.
  struct OnDevice;
  mutable std::shared_ptr<OnDevice> device_images;  // see OnDevice
};

}  // namespace hilt
