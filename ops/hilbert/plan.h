#pragma once
#include <array>
#include <memory>
#include <optional>
#include <span>
#include "pattern.h"

// A plan: an attended set made ready for kernels. Built once, immutable, shared.

namespace [[gnu::visibility("default")]] hilt {

/// What a plan is made from.
struct PlanSpec {
  Index length = 0;
  Index heads = 1;
  Order order;
  Pattern pattern = {Branch{}};
  DilationMode dilation_mode = DilationMode::all_queries;
  Causality causality = Causality::none;
  WorkOrder work_order = WorkOrder::row;  // of blocks
  friend auto operator<=>(const PlanSpec&, const PlanSpec&) = default;
};

/// One attended set, cut into tiles. Queries and keys stand in lists of tokens; a tile is a run of at most kTile
/// queries against a run of at most kTile keys. Kernels read nothing but this.
struct Tiling {
  static constexpr Index kTile = 128;
  struct Range { std::int32_t begin, end; };
  /// A tile of the other side; partial tiles consult attends(), full ones need not.
  struct Ref {
    std::int32_t tile;
    bool partial;
  };

  std::vector<std::int32_t> q_token, k_token;
  std::vector<Range> q_tile, k_tile;        // runs of q_token, k_token; each list is covered once, in order
  std::vector<std::int32_t> keys_begin;     // [q tiles + 1]: the key tiles of q tile i are keys[keys_begin[i] ..)
  std::vector<Ref> keys;                    // ascending
  std::vector<std::int32_t> queries_begin;  // [k tiles + 1]: the same, transposed
  std::vector<Ref> queries;
  /// Runs of queries and keys outside of which nothing attends: what taped and hybrid multiply as dense blocks.
  struct Group { Range q, k; };
  std::vector<Group> group;

  // What attends() compares; empty vectors mean no such test.
  std::vector<std::int32_t> q_rank, k_rank;                          // causal: k_rank <= q_rank
  std::vector<std::int32_t> k_a, q_a_low, q_a_high;                  // q_a_low <= k_a <= q_a_high
  std::vector<std::int32_t> k_b, q_b_low, q_b_high;                  // the same on a second axis

  Index tiles_full = 0, tiles_partial = 0;
  Index pairs = 0;          // (query, key) pairs that attend
  Index empty_queries = 0;  // queries with no key at all
};

/// Tile counts of one arrangement; total counts the q tiles x k tiles of all of them, touched or not.
struct TileStats {
  Index full = 0, partial = 0, total = 0;
  Index pairs = 0;         // that attend
  Index tile_pairs = 0;    // that touched tiles hold: useful = pairs / tile_pairs
  double touched() const { return total ? static_cast<double>(full + partial) / static_cast<double>(total) : 0; }
  double useful() const { return tile_pairs ? static_cast<double>(pairs) / static_cast<double>(tile_pairs) : 1; }
};

class Plan {
 public:
  explicit Plan(PlanSpec spec);

  const PlanSpec& spec() const { return spec_; }
  Index length() const { return spec_.length; }
  Index heads() const { return spec_.heads; }
  /// The order that is in force: the identity where the set does not depend on it and nothing is gained, or by HILT_FORCE_ORDER.
  const Permutation& order() const { return *order_; }
  bool order_forced() const { return forced_; }
  Grid grid() const { return grid_; }

  /// The attended sets of a head, to be merged.
  std::span<const std::int32_t> tilings_of(Index head) const;
  const std::vector<Tiling>& tilings() const { return tilings_; }
  /// u is in A(t) of this head, how often. From the definitions, not from the tiles: slow, for tests and pages.
  Index attends(Index head, Index t, Index u) const;
  /// Tokens whose list is empty for some head.
  Index empty_rows() const;

  /// Counts over the distinct sets: heads that share one count once. stats_for says what they would be if the same pattern were arranged otherwise. For a pattern
  /// that depends on positions another order is another set: the counts are then of that set.
  TileStats stats() const;
  TileStats stats_for(Order::Kind kind) const;

  /// Bytes of the plan itself.
  std::size_t bytes() const;

 private:
  PlanSpec spec_;
  std::shared_ptr<const Permutation> order_;
  bool forced_ = false;
  Grid grid_;
  std::vector<Tiling> tilings_;
  std::vector<std::int32_t> head_begin_, head_tilings_;
};
using PlanPtr = std::shared_ptr<const Plan>;

/// Builds, or finds among the most recently used, the plan for a spec. Safe from any thread.
PlanPtr make_plan(const PlanSpec& spec);

/// Among the orders that leave the attended set unchanged, the one with the fewest tiles.
struct OrderChoice {
  Order order;
  std::vector<std::pair<Order, TileStats>> considered;
};
OrderChoice choose_order(PlanSpec spec);

}  // namespace hilt
