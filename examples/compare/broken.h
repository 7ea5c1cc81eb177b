#pragma once
#include "exact.h"

// Private to compare_gradients: attention with one mistake in it, to see what each mistake does and
// how it is found.

namespace compare {

/// The mistakes people make.
enum class Mistake { none, no_delta, scaled_twice, position_for_token, no_rescale, half_of_the_keys, no_mask };
inline constexpr std::array<const char*, 7> kMistakes{
    "none", "no_delta", "scaled_twice", "position_for_token", "no_rescale", "half_of_the_keys", "no_mask"};

/// What one mistake does to the first sequence and the heads of the first key head.
struct Broken {
  Mistake mistake;
  std::array<Error, 4> error;                    // o, dq, dk, dv
  std::array<std::vector<double>, 4> deviation;  // |x - exact| of every element of that part
  Index query = 0;                               // the one whose first feature suffers most from no_rescale
  double slope = 0, difference = 0;              // of its first feature: the gradient, and a finite difference
  double row_sum = 0;                            // the largest |sum of a row of dS|
};

/// Every mistake, judged as a mode would be; `exact`, `naive` and `terms` are of the whole problem.
/// Empty where that would take more than a few seconds.
std::vector<Broken> break_it(const ExactProblem& whole, const AttendedSets& sets, const hilt::Permutation& order,
                             const Tensors& exact, const Tensors& naive, const Tensors& terms, double rounding);

}  // namespace compare
