#pragma once
#include "exact.h"
#include "lesson.h"

// Private to compare_gradients: the attention everyone writes first.

namespace compare {

/// L x L scores, a mask, a softmax, a product: no plan, no tiles; the tape differentiates it. The
/// mask is made once, before.
class Dense {
 public:
  Dense(const Problem& problem, const AttendedSets& sets);
  hilt::Tensor forward(const hilt::Tensor& q, const hilt::Tensor& k, const hilt::Tensor& v) const;

 private:
  Index kv_heads_, group_;
  double scale_;
  hilt::Tensor bias_;     // log of how often a key is listed: 0 where once, -inf where not; [heads or 1, L, L]
                          // by key head
  hilt::Tensor present_;  // [heads or 1, L, 1]: 0 for rows without keys, undefined if there are none
  hilt::Tensor dropout_;  // multipliers; undefined without dropout
};

}  // namespace compare
