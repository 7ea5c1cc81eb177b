#pragma once
#include <array>
#include <memory>
#include <optional>
#include <span>
#include "pattern.h"
#include "tiling.h"

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
  /// Activations stand in curve order: row i of q, k, v and o is token order().token_at[i]. The set
  /// of pairs of tokens is the same.
  bool in_order = false;
  friend auto operator<=>(const PlanSpec&, const PlanSpec&) = default;
};

/// Tile counts of one arrangement; total counts the q tiles x k tiles of all of them, touched or
/// not.
struct TileStats {
  Index full = 0, partial = 0, total = 0;
  Index pairs = 0;       // that attend
  Index tile_pairs = 0;  // that touched tiles hold: useful = pairs / tile_pairs
  double touched() const { return total ? static_cast<double>(full + partial) / static_cast<double>(total) : 0; }
  double useful() const { return tile_pairs ? static_cast<double>(pairs) / static_cast<double>(tile_pairs) : 1; }
};

class Plan {
 public:
  explicit Plan(PlanSpec spec);

  const PlanSpec& spec() const { return spec_; }
  Index length() const { return spec_.length; }
  Index heads() const { return spec_.heads; }
  /// The order in use. It is the identity if the set does not depend on it and it would gain
  /// nothing, or if HILT_FORCE_ORDER says so.
  const Permutation& order() const { return *order_; }
  bool order_forced() const { return forced_; }
  Grid grid() const { return grid_; }

  /// The attended sets of a head, to be merged.
  std::span<const std::int32_t> tilings_of(Index head) const;
  const std::vector<Tiling>& tilings() const { return tilings_; }
  /// How often the token of row u is in A(the token of row t) of this head; without in_order, rows
  /// are tokens. From the definitions, not from the tiles: slow, for tests and pages.
  Index attends(Index head, Index t, Index u) const;
  /// Rows whose list is empty for some head.
  Index empty_rows() const;

  /// Counts over the distinct sets: a set that several heads share counts once. stats_for gives the
  /// counts of the same pattern in another order. If the pattern depends on positions, another
  /// order is another set, and the counts are of that set.
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
