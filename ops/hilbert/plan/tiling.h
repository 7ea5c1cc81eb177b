#pragma once
#include <cstdint>
#include <memory>
#include <vector>
#include "../../../core/shape.h"

namespace [[gnu::visibility("default")]] hilt {

/// One attended set, cut into tiles. Queries and keys stand in lists of tokens; a tile is a run of
/// at most kTile queries against a run of at most kTile keys. Kernels read nothing but this.
struct Tiling {
  static constexpr Index kTile = 128;
  struct Range {
    std::int32_t begin, end;
  };
  /// A tile of the other side; partial tiles consult attends(), full ones need not.
  struct Ref {
    std::int32_t tile;
    bool partial;
  };

  std::vector<std::int32_t> q_token, k_token;  // rows of the tensors; with in_order, positions
  std::vector<std::int32_t> q_name,
      k_name;  // the tokens behind them, where those are others: what dropout's masks are drawn by
  std::vector<Range> q_tile, k_tile;        // runs of q_token, k_token; each list is covered once, in order
  std::vector<std::int32_t> keys_begin;     // [q tiles + 1]: the key tiles of q tile i are keys[keys_begin[i] ..)
  std::vector<Ref> keys;                    // ascending
  std::vector<std::int32_t> queries_begin;  // [k tiles + 1]: the same, transposed
  std::vector<Ref> queries;
  /// Runs of queries and keys outside of which nothing attends: what taped and hybrid multiply as
  /// dense blocks.
  struct Group {
    Range q, k;
  };
  std::vector<Group> group;

  // What attends() compares; empty vectors mean no such test.
  std::vector<std::int32_t> q_rank, k_rank;          // causal: k_rank <= q_rank
  std::vector<std::int32_t> k_a, q_a_low, q_a_high;  // q_a_low <= k_a <= q_a_high
  std::vector<std::int32_t> k_b, q_b_low, q_b_high;  // the same on a second axis

  const std::vector<std::int32_t>& q_names() const { return q_name.empty() ? q_token : q_name; }
  const std::vector<std::int32_t>& k_names() const { return k_name.empty() ? k_token : k_name; }

  Index tiles_full = 0, tiles_partial = 0;
  Index pairs = 0;          // (query, key) pairs that attend
  Index empty_queries = 0;  // queries with no key at all

  /// The same lists in the memory of GPUs, made when a kernel first needs them.
  struct OnDevice;
  mutable std::shared_ptr<OnDevice> device_images;
};

}  // namespace hilt
