#pragma once
#include <algorithm>
#include <vector>
#include "../shape.h"

// Reading the texts of orders, patterns and options, and text from files.

namespace [[gnu::visibility("default")]] hilt {

/// `text` cut at every separator; one empty part for an empty text.
std::vector<std::string_view> split_text(std::string_view text, char separator);
/// What stands before and behind the first separator; behind is nothing where there is none.
inline std::pair<std::string_view, std::string_view> cut_text(std::string_view text, char separator) {
  const std::size_t at = std::min(text.find(separator), text.size());
  return {text.substr(0, at), text.substr(std::min(at + 1, text.size()))};
}

/// The names that a misspelt one may stand for, whatever its case: at most four that begin with it;
/// else the nearest if at most two edits, or a third of its length, are needed; else none.
std::vector<std::string_view> near_names(std::string_view name, std::span<const std::string_view> names);
/// "; did you mean A, B or C?" for near_names, each after `prefix`; empty if none is near.
std::string did_you_mean(std::string_view name, std::span<const std::string_view> names, std::string_view prefix = "");

/// Where `name` stands in `names`; an error, opened by `what`, lists them and what is near.
std::size_t find_name(const char* what, std::string_view name, std::span<const std::string_view> names);

/// Decimal digits alone, at least `low`; `what` names the thing in the error.
Index read_index(const char* what, std::string_view text, Index low);

/// The character at `at`, which moves behind it. Nothing where the text is not UTF-8; overlong
/// forms, surrogates and numbers above U+10FFFF are not.
std::optional<char32_t> next_utf8(std::string_view text, std::size_t& at);
void append_utf8(std::string& text, char32_t c);  // as UTF-8
/// Text from a file, for one line of an error: its first bytes, \xNN unless printable ASCII.
std::string shown(std::string_view text, std::size_t most = 60);

}  // namespace hilt
