#include "core/text.h"
#include <algorithm>
#include <charconv>
#include <numeric>

namespace hilt {
namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substitute, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::vector<std::string_view> split_text(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::string_view nearest_name(std::string_view name, std::span<const std::string_view> names) {
  return *std::ranges::min_element(names, {}, [&](std::string_view n) { return edit_distance(n, name); });
}

std::size_t find_name(const char* what, std::string_view name, std::span<const std::string_view> names) {
  const auto found = std::ranges::find(names, name);
  if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  std::string list;
  for (std::string_view n : names) list += (list.empty() ? "" : ", ") + std::string(n);
  fail(what, ": '", name, "' is not one of ", list, "; did you mean ", nearest_name(name, names), "?");
}

Index read_index(const char* what, std::string_view text, Index low) {
  Index n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  check(!text.empty() && error == std::errc{} && end == text.data() + text.size(), what, ": '", text, "' is not a whole number");
  check(n >= low, what, ": ", n, " must be at least ", low);
  return n;
}

}  // namespace hilt
