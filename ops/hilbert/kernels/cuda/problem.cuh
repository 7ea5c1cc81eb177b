#pragma once
#include "core/cuda/launch.cuh"
#include "core/cuda/random.cuh"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/cuda/on_device.h"

// Private: one attention call as the kernels for any GPU see it, passed by value.

namespace hilt::kernels {

constexpr Index kMaxHeads = 1024;  // that travel with a launch
struct Heads {
  std::int16_t at[kMaxHeads];
};

struct Problem {
  AttentionSizes sizes;
  TilingView t;
  PlacesView places;
  Index n_places;
  Heads heads;  // the listed ones
  int n_heads;
};

inline Problem problem_of(Cuda where, const AttentionPass& pass) {
  Problem p{pass.sizes, on_device(*pass.tiling, where), {}, pass.place_count(), {}, static_cast<int>(pass.n_heads)};
  if (pass.places) p.places = on_device(*pass.places, where);
  for (int i = 0; i < p.n_heads; ++i) p.heads.at[i] = static_cast<std::int16_t>(pass.heads[i]);
  return p;
}

/// M of weights that survive dropout.
inline float multiplier_of(const AttentionSizes& s) { return static_cast<float>(keep_scale(s.dropout)); }
/// Whether the weight of query i and key j of the lists survives dropout.
__device__ inline bool survives(const Problem& p, Tiling::Place at, Index h, int i, int j) {
  const AttentionSizes& s = p.sizes;
  const auto head = static_cast<std::uint32_t>((s.first_batch + at.row) * s.heads + s.first_head + h);
  const auto t = static_cast<std::uint32_t>(at.k + p.t.q_name[i]), u = static_cast<std::uint32_t>(at.k + p.t.k_name[j]);
  return attention_keeps(cuda::now(s.key), head, t, u, s.dropout);
}

}  // namespace hilt::kernels
