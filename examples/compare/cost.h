#pragma once
#include "lesson.h"

// Private to compare_gradients: what a mode has to compute and to move, by formula.

namespace compare {

/// Matrix products alone, 2 m n k each; and bytes, as if nothing stayed in a cache from one use to
/// the next.
struct Cost {
  double forward_flops = 0, backward_flops = 0, bytes_moved = 0;
};

/// An op-by-op tape: every matmul, backward two more each; every op that is not a view reads its
/// inputs and writes its output.
Cost cost_of_tape(const std::vector<hilt::NodeReport>& tape);
/// The kernels: 4 D flops for every pair of a touched tile forward. Backward 10 D: the scores
/// again, then dP, dQ, dK, dV; the hybrid does so for every pair of a group. Bytes: each query tile
/// reads q, writes o and L, and reads k and v of every tile it touches.
Cost cost_of_kernel(const Problem& problem, const std::string& mode);
/// The most bytes the dense baseline needs at once.
std::size_t dense_peak(const Problem& problem);

}  // namespace compare
