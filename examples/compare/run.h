#pragma once
#include "lesson.h"

// Private to compare_gradients: one forward and one backward pass under a profiling tape, of a mode
// or of the dense baseline.

namespace compare {

/// The attention everyone writes first. L x L scores, a mask, a softmax, a product: no plan, no
/// tiles; the tape differentiates it. The mask is made once, before.
class Dense {
 public:
  Dense(const Problem& problem, const AttendedSets& sets);
  hilt::Tensor forward(const hilt::Tensor& q, const hilt::Tensor& k, const hilt::Tensor& v) const;

 private:
  Index kv_heads_;
  double scale_;
  // By key head, or once for all heads.
  hilt::Tensor bias_;     // [.., L, L]: log of how often a key is listed, 0 where once, -inf where not
  hilt::Tensor present_;  // [.., L, 1]: 0 for rows without keys, undefined if there are none
  hilt::Tensor dropout_;  // multipliers; undefined without dropout
  hilt::ScoreTerms terms_;
  hilt::Tensor apart_;  // [L, L]: minus the distance, for slopes
  hilt::Tensor entry_;  // [L * L], of relative
};

struct Run : Measured {
  std::array<hilt::Tensor, kTensors.size()> result;  // on the CPU
};

/// `dense` is the baseline if that is the mode, else null.
Run run_once(const Problem& problem, const std::string& mode, const Dense* dense);

}  // namespace compare
