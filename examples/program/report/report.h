#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// Private to examples/: numbers as people read them, grids of cells as pictures, and pages.

namespace report {

[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

std::string bytes(double n);  // 512 B, 4.19 MB, 17.2 GB: powers of 1000, three digits
inline std::string bytes(std::size_t n) { return bytes(static_cast<double>(n)); }
std::string count(double n);          // 512, 4.19 k, 17.2 G
std::string milliseconds(double ms);  // 0.412 ms, 38.1 ms, 1.24 s
std::string percent(double share);    // 6.25 %
std::string scientific(double x);     // 1.2e-07, and 0 as 0

/// A grid, of which there are so many cells, row by row.
struct Frame {
  std::int64_t width = 0, height = 0, cells = 0;
};

/// Where cells lie on a picture, which is bounded, whatever it shows. Frames side by side, a cell
/// apart, about as high as wide; what is long and thin is cut into pieces first. pool x pool cells
/// are one of the picture, so that it has at most kMostCells.
struct Sheet {
  explicit Sheet(const std::vector<Frame>& frames);
  static constexpr std::int64_t kMostCells = 6400;

  std::int64_t columns = 0, rows = 0, pool = 1;
  std::vector<std::size_t> cell;  // of every cell, frame by frame: which of columns x rows, row by row
};

/// Levels 0 .. 7 of cells, two to a character: the character less 63 is 8 x the first + the second.
std::string packed(std::span<const std::uint8_t> levels);

using Json = nlohmann::ordered_json;

/// A page is a template, which has all markup, with the program's JSON in a <script> where the
/// template says {{{}}}; figures.js fills the one from the other in the reader's browser.
std::string page(std::string_view text, const Json& data);

/// JSON has no infinity: a number that is not finite is null, and shown as a dash.
Json number(double x);

}  // namespace report
