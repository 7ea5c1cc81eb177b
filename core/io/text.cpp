// Cuts and numbers of option strings, proposals for misspelt names by edit distance, one decoder of
// UTF-8, and text from files made fit for one line of an error.
#include "core/io/text.h"
#include <bit>
#include <limits>
#include <numeric>

namespace hilt {

static std::size_t edit_distance(std::string_view a, std::string_view b) {
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

static std::string lower_case(std::string_view text) {  // of ASCII letters alone, whatever the locale
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

std::vector<std::string_view> split_text(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::vector<std::string_view> near_names(std::string_view name, std::span<const std::string_view> names) {
  constexpr std::size_t kMost = 4, kEdits = 2;
  const std::string typed = lower_case(name);
  std::vector<std::string_view> begun;
  std::string_view nearest;
  std::size_t least = std::numeric_limits<std::size_t>::max();
  for (std::string_view n : names) {
    const std::string known = lower_case(n);
    if (!typed.empty() && known.starts_with(typed) && begun.size() < kMost) begun.push_back(n);
    const std::size_t edits = edit_distance(known, typed);
    // Something of the name must stay: any letter is one edit from any other.
    if (edits < least && edits <= std::max(kEdits, typed.size() / 3) && edits < std::max(known.size(), typed.size()))
      least = edits, nearest = n;
  }
  if (begun.empty() && !nearest.empty()) begun.push_back(nearest);
  return begun;
}

std::string did_you_mean(std::string_view name, std::span<const std::string_view> names, std::string_view prefix) {
  const std::vector<std::string_view> near = near_names(name, names);
  std::string text;
  for (std::size_t i = 0; i < near.size(); ++i)
    text.append(i == 0 ? "; did you mean " : i + 1 < near.size() ? ", " : " or ").append(prefix).append(near[i]);
  return near.empty() ? text : text + '?';
}

std::size_t find_name(const char* what, std::string_view name, std::span<const std::string_view> names) {
  const auto found = std::ranges::find(names, name);
  if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  std::string list;
  for (std::string_view n : names) list += (list.empty() ? "" : ", ") + std::string(n);
  fail(what, ": '", name, "' is not one of ", list, did_you_mean(name, names));
}

Index read_index(const char* what, std::string_view text, Index low) {
  const std::optional<Index> n = number_in<Index>(text);
  check(n.has_value(), what, ": '", text, "' is not a whole number");
  check(*n >= low, what, ": ", *n, " must be at least ", low);
  return *n;
}

std::optional<char32_t> next_utf8(std::string_view text, std::size_t& at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  constexpr std::array<char32_t, 4> kLeast{0, 0x80, 0x800, 0x10000};  // of a form of so many bytes more
  const auto ones = static_cast<std::size_t>(std::countl_one(byte(at))), more = ones > 0 ? ones - 1 : 0;
  if (ones == 1 || more >= kLeast.size() || at + more >= text.size()) return std::nullopt;
  char32_t c = byte(at) & (0xffu >> ones);
  for (std::size_t i = 1; i <= more; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return std::nullopt;
    c = c << 6 | (byte(at + i) & 0x3fu);
  }
  if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000) || c < kLeast[more]) return std::nullopt;
  at += more + 1;
  return c;
}

void append_utf8(std::string& text, char32_t c) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (c < 0x80) return put(c);
  const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  constexpr std::array<char32_t, 4> kLead{0, 0xc0, 0xe0, 0xf0};
  put(kLead[static_cast<std::size_t>(more)] | c >> (6 * more));
  for (int i = more - 1; i >= 0; --i) put(0x80u | (c >> (6 * i) & 0x3fu));
}

std::string shown(std::string_view text, std::size_t most) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const char c : text.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= ' ' && byte < 0x7f) out += c;
    else (out += "\\x") += {kHex[byte >> 4], kHex[byte & 15]};
  }
  return text.size() > most ? out + ".." : out;
}

}  // namespace hilt
