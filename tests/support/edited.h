#pragma once
#include <random>
#include <string>
#include <string_view>

// For fuzzers of text: what is nearly right finds more than noise does.

namespace hilt {

/// The text after 1 to `most` edits: a letter of the alphabet put in or in place of another, or a
/// letter taken out.
inline std::string edited(std::string text, std::string_view alphabet, unsigned most, std::mt19937& random) {
  for (auto edits = random() % most + 1; edits > 0; --edits) {
    const std::size_t place = text.empty() ? 0 : random() % text.size();
    const char c = alphabet[random() % alphabet.size()];
    if (random() % 3 == 0 && !text.empty()) text.erase(place, 1);
    else if (random() % 2) text.insert(place, 1, c);
    else if (!text.empty()) text[place] = c;
  }
  return text;
}

}  // namespace hilt
