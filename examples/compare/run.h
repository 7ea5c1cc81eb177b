#pragma once
#include "dense.h"
#include "lesson.h"

// Private to compare_gradients: one forward and one backward pass under a profiling tape.

namespace compare {

struct Run {
  std::array<hilt::Tensor, 4> result;  // o, dq, dk, dv
  double forward_ms = 0, backward_ms = 0;
  std::size_t saved = 0;  // by the tape, each block once
  std::size_t held = 0;   // bytes alive between the passes, beyond the inputs: what it costs to be able to go back
  std::size_t forward_peak = 0, backward_peak = 0;  // beyond the inputs
  std::vector<hilt::NodeReport> tape;               // live bytes are beyond the inputs
};

/// `dense` is the baseline if that is the mode, else null.
Run run_once(const Problem& problem, const std::string& mode, const Dense* dense);

double median(std::vector<double> x);
/// The most bytes a mode needs at once.
std::size_t bytes_needed(const Problem& problem, const std::string& mode);

}  // namespace compare
