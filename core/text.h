#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>
#include "shape.h"

// Private to the library: reading the little languages of orders, patterns and options.

namespace hilt {

/// `text` cut at every separator; one empty part for an empty text.
std::vector<std::string_view> split_text(std::string_view text, char separator);

/// The name nearest to a misspelt one, by insertions, deletions and substitutions.
std::string_view nearest_name(std::string_view name, std::span<const std::string_view> names);

/// Where `name` stands in `names`; an error lists them and proposes the nearest. `what` opens the message.
std::size_t find_name(const char* what, std::string_view name, std::span<const std::string_view> names);

/// Decimal digits alone, at least `low`; `what` names the thing in the error.
Index read_index(const char* what, std::string_view text, Index low);

}  // namespace hilt
