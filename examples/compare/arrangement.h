#pragma once
#include <hilt/hilt.h>

#include <string>
#include <vector>

#include "exact.h"

// Private to compare_gradients and curves: an attended set as tiles of scores, its tokens standing
// in some order.

namespace compare {

struct Arrangement {
  std::string order;
  std::vector<std::int32_t> token_at, position_of;
  Index rows = 0, columns = 0;      // tiles of queries, of keys
  std::vector<std::uint8_t> tiles;  // rows x columns, of the first set: 0 empty, 1 partial, 2 full
  hilt::TileStats stats;            // of all distinct sets

  Index touched() const { return stats.full + stats.partial; }
};

inline constexpr hilt::Order::Kind kOrders[] = {hilt::Order::Kind::row, hilt::Order::Kind::snake,
                                                hilt::Order::Kind::morton, hilt::Order::Kind::tiles,
                                                hilt::Order::Kind::hilbert};

/// The tiles that kernels work on, as the plan lists them.
Arrangement arrangement_of(const hilt::Plan& plan);
/// The very sets that a plan attends to, counted pair by pair, were its tokens to stand in another
/// order.
Arrangement rearranged(const hilt::Plan& plan, const AttendedSets& sets, hilt::Order::Kind kind);

/// Whether the attended set is the same whatever the order.
bool order_changes_nothing(const hilt::PlanSpec& spec);
/// In words, without markup: whether Hilbert order helps, does nothing or loses against row order,
/// and what is best.
std::string order_verdict(const std::vector<Arrangement>& orders);

/// Left the tokens on their grid, walked in order, with the keys of one token outlined; right the
/// tiles.
std::string figure_of_order(const hilt::Plan& plan, Index token, const Arrangement& arrangement);
/// A token in the middle of the grid, for that figure.
Index example_token(const hilt::Plan& plan);

}  // namespace compare
