#pragma once
#include <hilt/hilt.h>

#include <array>
#include <vector>

// Private to compare_gradients: attention and its gradients in plain loops, straight from the
// definition. It shares no code with what it judges: the set comes from Plan::attends(), one pair
// at a time; the rest are the formulas.

namespace compare {

using hilt::Index;

/// The keys of every row of one attended set; a key that is listed twice stands twice.
struct KeyLists {
  std::vector<std::size_t> begin;  // [length + 1]
  std::vector<std::int32_t> key;
};

/// The sets of a plan: most heads share one.
struct AttendedSets {
  std::vector<KeyLists> sets;
  std::vector<std::size_t> of_head;
  const KeyLists& head(Index h) const { return sets[of_head[static_cast<std::size_t>(h)]]; }
};
AttendedSets attended_sets(const hilt::Plan& plan);

/// All dense and in row-major order: q, d_o [batch, length, heads, dim], k, v [batch, length,
/// kv_heads, dim].
struct ExactProblem {
  Index batch, length, heads, kv_heads, dim;
  double scale, dropout;
  hilt::RandomKey key;
  std::vector<double> q, k, v, d_o;
};

/// o, dq, dk, dv.
using Four = std::array<std::vector<double>, 4>;

/// The formulas in f64; of f64 inputs, in long double.
Four exact_attention(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype);
/// The same loops in `dtype`: f64 and f32 throughout, bf16 and f16 with every intermediate stored
/// in 16 bits.
Four naive_attention(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype);
/// For every element the size of the terms it is the sum of, added up as independent rounding
/// errors are: the root of the sum of squares. It does not vanish where the terms cancel. A weight
/// e^(S - L) counts the terms of S and L too, but in 16 bits, where those are kept in f32.
Four term_sizes(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype);

/// Whether dropout keeps a weight, by its documented definition; multipliers are 0 or 1 / (1 - p).
double dropout_multiplier(const hilt::RandomKey& key, Index head, Index t, Index u, double p);

}  // namespace compare
