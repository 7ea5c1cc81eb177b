#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>
#include "core/tensor.h"

// How results are compared with each other, where nothing may differ or little may.

namespace hilt {

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return std::ranges::equal(
      a, b, [](double x, double y) { return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y); });
}
inline bool same_bits(const Tensor& x, const Tensor& y) { return same_bits(x.to_vector(), y.to_vector()); }

/// The largest difference; infinities must be equal.
inline double off(const Tensor& x, const Tensor& y) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> a = x.to_vector(), b = y.to_vector();
  double worst = x.shape() == y.shape() ? 0 : kInfinity;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (a[i] != b[i]) worst = std::max(worst, std::isnan(a[i] - b[i]) ? kInfinity : std::abs(a[i] - b[i]));
  return worst;
}

}  // namespace hilt
