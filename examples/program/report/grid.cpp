// Sets of cells, their borders, and walks through them, as SVG paths of few strokes.
#include "grid.h"

namespace report {
namespace {

using Index = std::int64_t;

void move_to(std::string& path, Index x, Index y, const char* half_x = "", const char* half_y = "") {
  path += "M" + std::to_string(x) + half_x + " " + std::to_string(y) + half_y;
}

/// Horizontal strokes from run to run of cells where in() holds; `half` drops them to the middle of
/// the row.
template <class F> void runs(std::string& path, Index width, Index y, const char* half, F&& in) {
  for (Index x = 0; x < width; ++x) {
    if (!in(x)) continue;
    const Index begin = x;
    while (x < width && in(x)) ++x;
    move_to(path, begin, y, "", half);
    path += "h" + std::to_string(x - begin);
  }
}
template <class F> void columns(std::string& path, Index height, Index x, F&& in) {
  for (Index y = 0; y < height; ++y) {
    if (!in(y)) continue;
    const Index begin = y;
    while (y < height && in(y)) ++y;
    move_to(path, x, begin);
    path += "v" + std::to_string(y - begin);
  }
}

}  // namespace

std::string cells_path(Index width, Index height, const std::function<bool(Index, Index)>& in) {
  std::string path;
  for (Index y = 0; y < height; ++y) runs(path, width, y, ".5", [&](Index x) { return in(x, y); });
  return path;
}

std::string edges_path(Index width, Index height, const std::function<Index(Index, Index)>& label) {
  std::string path;
  for (Index y = 1; y < height; ++y) runs(path, width, y, "", [&](Index x) { return label(x, y - 1) != label(x, y); });
  for (Index x = 1; x < width; ++x) columns(path, height, x, [&](Index y) { return label(x - 1, y) != label(x, y); });
  return path;
}

std::string outline_path(Index width, Index height, const std::function<bool(Index, Index)>& in) {
  const auto inside = [&](Index x, Index y) { return x >= 0 && x < width && y >= 0 && y < height && in(x, y); };
  std::string path;
  for (Index y = 0; y <= height; ++y)
    runs(path, width, y, "", [&](Index x) { return inside(x, y - 1) != inside(x, y); });
  for (Index x = 0; x <= width; ++x)
    columns(path, height, x, [&](Index y) { return inside(x - 1, y) != inside(x, y); });
  return path;
}

std::string walk_path(const std::vector<std::int32_t>& tokens, std::size_t begin, std::size_t end, Index width) {
  std::string path;
  for (std::size_t i = begin; i < end && i < tokens.size(); ++i) {
    const Index x = tokens[i] % width, y = tokens[i] / width;
    if (i == begin) {
      move_to(path, x, y, ".5", ".5");
      continue;
    }
    const Index dx = x - tokens[i - 1] % width, dy = y - tokens[i - 1] / width;
    // Straight runs are one command.
    std::size_t j = i;
    while (j + 1 < end && j + 1 < tokens.size() && tokens[j + 1] - tokens[j] == dy * width + dx &&
           tokens[j + 1] / width - tokens[j] / width == dy)
      ++j;
    const Index n = static_cast<Index>(j - i) + 1;
    if (dy == 0) path += "h" + std::to_string(n * dx);
    else if (dx == 0) path += "v" + std::to_string(n * dy);
    else path += "l" + std::to_string(n * dx) + " " + std::to_string(n * dy);
    i = j;
  }
  return path;
}

}  // namespace report
