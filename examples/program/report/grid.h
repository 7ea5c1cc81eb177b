#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Private to examples/: pictures of grids in SVG path data; runs of equal cells are one stroke.

namespace report {

/// Cells (x, y) for which in(x, y) holds, as horizontal strokes: draw with stroke-width 1.
std::string cells_path(std::int64_t width, std::int64_t height,
                       const std::function<bool(std::int64_t, std::int64_t)>& in);
std::string outline_path(std::int64_t width, std::int64_t height,
                         const std::function<bool(std::int64_t, std::int64_t)>& in);
/// The lines between neighbouring cells whose label(x, y) differs.
std::string edges_path(std::int64_t width, std::int64_t height,
                       const std::function<std::int64_t(std::int64_t, std::int64_t)>& label);
/// A walk through cells given as token numbers y * width + x, through the middles of cells.
std::string walk_path(const std::vector<std::int32_t>& tokens, std::size_t begin, std::size_t end, std::int64_t width);

}  // namespace report
