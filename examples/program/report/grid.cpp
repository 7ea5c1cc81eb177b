// Sets of cells, their borders, and walks through them, as SVG paths of few strokes.
#include "grid.h"

namespace report {

using Index = std::int64_t;

static void move_to(std::string& path, Index x, Index y, const char* half_x = "", const char* half_y = "") {
  path += "M" + std::to_string(x) + half_x + " " + std::to_string(y) + half_y;
}

/// Strokes along a row, or down a column, over runs of in(); `half` drops a row's to its middle.
template <class F> static void runs(std::string& path, Index count, Index line, bool down, const char* half, F&& in) {
  for (Index i = 0; i < count; ++i) {
    if (!in(i)) continue;
    const Index begin = i;
    while (i < count && in(i)) ++i;
    if (down) move_to(path, line, begin);
    else move_to(path, begin, line, "", half);
    path += (down ? "v" : "h") + std::to_string(i - begin);
  }
}

/// Strokes between neighbours of different labels, on lines from `first` to as far from the end.
template <class F> static std::string borders(Index width, Index height, Index first, F&& label) {
  std::string path;
  for (Index y = first; y <= height - first; ++y)
    runs(path, width, y, false, "", [&](Index x) { return label(x, y - 1) != label(x, y); });
  for (Index x = first; x <= width - first; ++x)
    runs(path, height, x, true, "", [&](Index y) { return label(x - 1, y) != label(x, y); });
  return path;
}

std::string cells_path(Index width, Index height, const std::function<bool(Index, Index)>& in) {
  std::string path;
  for (Index y = 0; y < height; ++y) runs(path, width, y, false, ".5", [&](Index x) { return in(x, y); });
  return path;
}

std::string edges_path(Index width, Index height, const std::function<Index(Index, Index)>& label) {
  return borders(width, height, 1, label);
}

std::string outline_path(Index width, Index height, const std::function<bool(Index, Index)>& in) {
  return borders(width, height, 0,
                 [&](Index x, Index y) { return x >= 0 && x < width && y >= 0 && y < height && in(x, y); });
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
