// Numbers with units and three digits, places on pictures, and JSON that ends no <script>.
#include "report.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace report {

static std::string with_prefix(double n, const char* unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P"};
  int prefix = 0;
  while (std::abs(n) >= 999.5 && prefix < 5) n /= 1000, ++prefix;
  const int decimals = prefix == 0 && n == std::floor(n) ? 0 : std::abs(n) < 9.995 ? 2 : std::abs(n) < 99.95 ? 1 : 0;
  const std::string unit_text = std::string(kPrefixes[prefix]) + unit;
  return format("%.*f%s%s", decimals, n, unit_text.empty() ? "" : " ", unit_text.c_str());
}

std::string format(const char* pattern, ...) {
  char text[512];
  std::va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

std::string bytes(double n) { return with_prefix(n, "B"); }
std::string count(double n) { return with_prefix(n, ""); }
std::string milliseconds(double ms) {
  if (ms >= 999.5) return format("%.2f s", ms / 1000);
  return format(ms < 0.9995 ? "%.3f ms" : ms < 9.995 ? "%.2f ms" : ms < 99.95 ? "%.1f ms" : "%.0f ms", ms);
}
std::string percent(double share) {
  return format(share >= 0.9995 || share == 0 ? "%.0f %%" : share < 0.1 ? "%.2f %%" : "%.1f %%", 100 * share);
}
std::string scientific(double x) { return x == 0 ? "0" : format("%.1e", x); }

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

Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

std::string page(std::string_view text, const Json& data) {
  std::string json = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  for (auto at = json.find('<'); at != json.npos; at = json.find('<', at)) json.replace(at, 1, "\\u003c");
  constexpr std::string_view kHere = "{{{}}}";
  const std::size_t here = text.find(kHere);
  return std::string(text.substr(0, here)) + json + std::string(text.substr(here + kHere.size()));
}

}  // namespace report
