#pragma once
#include "../program/report/report.h"
#include "exact.h"

// Private to compare_gradients and curves: a pattern as tiles of scores, the tokens standing in
// some order.

namespace compare {

struct Arrangement {
  std::string order;
  hilt::PlanPtr plan;
  hilt::Permutation walk;  // the order that the tokens of a row stand in; of documents, that of each
  hilt::TileStats stats;   // of all distinct sets

  Index touched() const { return stats.full + stats.partial; }
};

/// The plan in row, snake, morton, tiles and hilbert order, as far as they walk all its grids.
std::vector<Arrangement> arrangements_of(const hilt::Plan& plan);

/// As Arrangement::walk; but the rows as they come where the plan gains nothing by an order.
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
report::Json picture_of(const Arrangement& arrangement);

}  // namespace compare
