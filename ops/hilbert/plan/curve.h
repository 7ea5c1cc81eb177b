#pragma once
#include <compare>
#include <cstdint>
#include <vector>

#include "../../../core/shape.h"

// Space-filling curves: cell <-> position, by integers, without tables, in O(log side).

namespace [[gnu::visibility("default")]] hilt {

/// Width x height cells, so many frames. Token (z * height + y) * width + x is in cell (x, y, z).
struct Grid {
  Index width = 0, height = 0, frames = 1;  // sides, in cells
  bool named_frames = false;                // T x H x W was said, even of one frame
  /// Whether it has an axis of frames.
  bool has_frames() const { return named_frames || frames > 1; }
  /// The product of the sides, checked for overflow.
  Index cells() const;
  friend auto operator<=>(const Grid&, const Grid&) = default;
};

/// Column, row, frame.
struct Cell {
  Index x = 0, y = 0, z = 0;  // in this order: column, row, frame
  friend auto operator<=>(const Cell&, const Cell&) = default;
};

Cell cell_of(const Grid& grid, Index token);         // where a token lies
Index token_of(const Grid& grid, const Cell& cell);  // the token of a cell

/// The classic Hilbert curve on a square of 2^k cells a side: d2xy, and xy2d, its inverse.
Cell classic_cell(Index side, Index position);
Index classic_position(Index side, const Cell& cell);  // the inverse

/// For rectangles with one odd and one even side. unit: unit steps, by an even major side. near:
/// that only where the aspect is below 3; thin grids keep their locality and pay one diagonal step.
enum class Steps : unsigned char { near, unit };

/// The Hilbert curve on any grid: the classic one on a 2^k square, else the generalized one. Unit
/// steps cannot be asked of a box of three sides above 1 unless all are even.
Cell hilbert_cell(const Grid& grid, Index position, Steps steps = Steps::near);
Index hilbert_position(const Grid& grid, const Cell& cell, Steps steps = Steps::near);  // the inverse

/// The tokens below `limit` (at most 2^31 - 1) in curve order, by one walk that skips the others.
std::vector<std::int32_t> hilbert_walk(const Grid& grid, Index limit, Steps steps = Steps::near);

/// How many steps of the curve do not go to a cell that shares a side: by a walk if on an odd box.
Index non_unit_steps(const Grid& grid, Steps steps = Steps::near);

/// Morton code of (x, y), sides below 2^31: the bits of x in even places, those of y in odd ones.
std::uint64_t morton_code(const Cell& cell);
Cell morton_cell(std::uint64_t code);  // the inverse, on one frame

}  // namespace hilt
