#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

// Private to examples/: grids of cells as pictures, where cells lie and their levels as text. What
// a picture takes is bounded, whatever it shows.

namespace report {

/// A grid, of which there are so many cells, row by row.
struct Frame {
  std::int64_t width = 0, height = 0, cells = 0;
};

/// Frames side by side, a cell apart, about as high as wide; what is long and thin is cut into
/// pieces first. pool x pool cells are one of the picture, so that it has at most kMostCells.
struct Sheet {
  explicit Sheet(const std::vector<Frame>& frames);
  static constexpr std::int64_t kMostCells = 6400;

  std::int64_t columns = 0, rows = 0, pool = 1;
  std::vector<std::size_t> cell;  // of every cell, frame by frame: which of columns x rows, row by row
};

/// Levels 0 .. 7 of cells, two to a character: the character less 63 is 8 x the first + the second.
std::string packed(std::span<const std::uint8_t> levels);

}  // namespace report
