#pragma once
#include <compare>
#include <cstdint>
#include <string>
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

std::string to_string(const Grid& grid);  // HEIGHTxWIDTH, or FRAMESxHEIGHTxWIDTH

/// Column, row, frame.
struct Cell {
  Index x = 0, y = 0, z = 0;  // in this order: column, row, frame
  friend auto operator<=>(const Cell&, const Cell&) = default;
};

Cell cell_of(const Grid& grid, Index token);         // where a token lies
Index token_of(const Grid& grid, const Cell& cell);  // the token of a cell

/// For rectangles with one odd and one even side. unit: unit steps, by an even major side. near:
/// that only where the aspect is below 3; thin grids keep their locality and pay one diagonal step.
enum class Steps : unsigned char { near, unit };

/// The Hilbert curve on any grid, on a 2^k square the classic one. Unit steps cannot be asked of a
/// box of three sides above 1 unless all are even.
Cell hilbert_cell(const Grid& grid, Index position, Steps steps = Steps::near);
Index hilbert_position(const Grid& grid, const Cell& cell, Steps steps = Steps::near);  // the inverse

/// The tokens below `limit` (at most 2^31 - 1) in curve order, by one walk that skips the others.
std::vector<std::int32_t> hilbert_walk(const Grid& grid, Index limit, Steps steps = Steps::near);

}  // namespace hilt
