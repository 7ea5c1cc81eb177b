// Errors of a tensor, and the limit they must stay under: twice those of the naive formula in the
// same type, plus rounding.
#include "exact.h"
#include <limits>

namespace compare {

Error measure(std::span<const double> x, std::span<const double> exact) {
  Error e;
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double d =
        i < x.size() && std::isfinite(x[i]) ? std::abs(x[i] - exact[i]) : std::numeric_limits<double>::infinity();
    if (d > e.max_abs) e.max_abs = d, e.worst_index = i;
    difference += d * d;
    size += exact[i] * exact[i];
  }
  e.rel_l2 = difference == 0 ? 0 : std::sqrt(difference / std::max(size, std::numeric_limits<double>::min()));
  return e;
}

Error judge(std::span<const double> x, std::span<const double> exact, std::span<const double> terms, const Error& naive,
            double rounding) {
  double size = 0, largest_term = 0, size_of_terms = 0;
  for (double value : exact) size += value * value;
  for (double value : terms) {
    largest_term = std::max(largest_term, value);
    size_of_terms += value * value;
  }
  Error e = measure(x, exact);
  e.limit = 2 * naive.max_abs + rounding * largest_term;
  e.rel_limit =
      2 * naive.rel_l2 + rounding * std::sqrt(size_of_terms / std::max(size, std::numeric_limits<double>::min()));
  e.ok = x.size() == exact.size() && e.max_abs <= e.limit && e.rel_l2 <= e.rel_limit;
  return e;
}

}  // namespace compare
