#pragma once
#include <cstdlib>
#include <string_view>

/// `full`, or what a slow judge has time for: sanitizers run the suite with HILT_TEST_SCALE=small.
template <class T> T scaled(T full, T small) {
  const char* text = std::getenv("HILT_TEST_SCALE");
  return text && std::string_view(text) == "small" ? small : full;
}
