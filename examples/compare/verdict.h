#pragma once
#include <cstddef>
#include <span>
#include <string>

// Private to compare_gradients: when a computed tensor counts as right.

namespace compare {

/// How far a tensor is from the exact one.
struct Error {
  double max_abs = 0;           // largest |x - exact|; infinite if an element is not a number
  double rel_l2 = 0;            // |x - exact| / |exact|, Euclidean
  std::size_t worst_index = 0;  // of max_abs, in row-major order
  double limit = 0;             // what max_abs may be, filled in by judge()
  double rel_limit = 0;         // what rel_l2 may be
  bool ok = true;
};

Error measure(std::span<const double> x, std::span<const double> exact);

/// The rule, for the largest error and for the relative error over the tensor alike:
///     err(x) <= 2 err(naive) + floor
/// naive is the textbook formula in x's own type: rounding is forgiven as far as nobody could do
/// without it. The floor is for where naive has luck: `rounding`, relative to what elements are the
/// sum of (see term_sizes). A gradient may vanish by cancellation, its terms are what gets rounded.
Error judge(std::span<const double> x, std::span<const double> exact, std::span<const double> terms, const Error& naive,
            double rounding);

}  // namespace compare
