#pragma once
#include <string>

// Private to examples/: numbers as people read them.

namespace report {

[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

std::string bytes(double n);  // 512 B, 4.19 MB, 17.2 GB: powers of 1000, three digits
inline std::string bytes(std::size_t n) { return bytes(static_cast<double>(n)); }
std::string count(double n);          // 512, 4.19 k, 17.2 G
std::string milliseconds(double ms);  // 0.412 ms, 38.1 ms, 1.24 s
std::string percent(double share);    // 6.25 %
std::string scientific(double x);     // 1.2e-07, and 0 as 0

}  // namespace report
