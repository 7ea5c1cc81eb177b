#pragma once
#include "../program/report/fill.h"
#include "../program/report/grid.h"
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

/// Those of them that walk every grid of a plan.
std::vector<hilt::Order::Kind> orders_of(const hilt::Plan& plan);
/// The tiles that kernels work on, as the plan lists them.
Arrangement arrangement_of(const hilt::Plan& plan);
/// The very sets that a plan attends to, counted pair by pair, were its tokens to stand in another
/// order.
Arrangement rearranged(const hilt::Plan& plan, const AttendedSets& sets, hilt::Order::Kind kind);

/// The order that the tokens of a row stand in; of documents, that of each.
hilt::Permutation order_in_force(const hilt::Plan& plan);
/// Where pictures show the tokens of a row: each document on its own grid, frame beside frame.
report::Sheet sheet_of(const hilt::Plan& plan);
/// The tile of 128 that the first token of each cell of a picture stands in, or -1.
std::vector<Index> tiles_on(const report::Sheet& sheet, const std::vector<std::int32_t>& position_of);
/// Whether the attended set is the same whatever the order.
bool order_changes_nothing(const hilt::PlanSpec& spec);
/// In words, without markup: whether Hilbert order helps, does nothing or loses against row order,
/// and what is best.
std::string order_verdict(const std::vector<Arrangement>& orders);
/// order, full, partial, of all, touched, useful: as columns of a table.
std::string table_line(const Arrangement& arrangement);

/// For the page: the tokens, walked in order, and the keys of one of them; the tiles; their counts.
report::Json picture_of(const hilt::Plan& plan, const Arrangement& arrangement);

}  // namespace compare
