// Where cells lie on a picture, and their levels as text.
#include "grid.h"
#include <algorithm>
#include <array>
#include <cmath>

namespace report {

using Index = std::int64_t;

Sheet::Sheet(const std::vector<Frame>& frames) {
  double area = 0;
  for (const Frame& f : frames) area += static_cast<double>((f.width + 1) * (f.height + 1));
  const Index most = static_cast<Index>(std::ceil(std::sqrt(area))), side = 2 * most;  // of a shelf, of a piece
  std::vector<std::array<Index, 2>> places;
  Index left = 0, top = 0, shelf = 0, width = 0;  // in shelves from the top, each from the left
  for (const Frame& f : frames) {
    const std::size_t first = places.size();
    places.resize(first + static_cast<std::size_t>(f.cells));
    for (Index y0 = 0; y0 < f.height; y0 += side)
      for (Index x0 = 0; x0 < f.width; x0 += side) {
        const Index x1 = std::min(x0 + side, f.width), y1 = std::min(y0 + side, f.height);
        if (left > 0 && left + x1 - x0 > most) left = 0, top += shelf + 1, shelf = 0;
        for (Index y = y0; y < y1; ++y)
          for (Index x = x0; x < x1 && y * f.width + x < f.cells; ++x)
            places[first + static_cast<std::size_t>(y * f.width + x)] = {left + x - x0, top + y - y0};
        left += x1 - x0 + 1, shelf = std::max(shelf, y1 - y0), width = std::max(width, left - 1);
      }
  }
  columns = width, rows = top + shelf;
  for (const Index height = rows; columns * rows > kMostCells; ++pool)
    columns = width / (pool + 1) + 1, rows = height / (pool + 1) + 1;
  for (const auto& [x, y] : places) cell.push_back(static_cast<std::size_t>(y / pool * columns + x / pool));
}

std::string packed(std::span<const std::uint8_t> levels) {
  std::string text;
  for (std::size_t i = 0; i < levels.size(); i += 2)
    text += static_cast<char>(63 + 8 * levels[i] + (i + 1 < levels.size() ? levels[i + 1] : 0));
  return text;
}

}  // namespace report
