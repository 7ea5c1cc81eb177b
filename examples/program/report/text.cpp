// Numbers with units and three digits.
#include "text.h"
#include <cmath>
#include <cstdarg>
#include <cstdio>

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

}  // namespace report
