#pragma once
#include <utility>
#include "core/cuda/launch.cuh"
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
  Index first_row, n_rows;  // of the batch
  Heads heads;              // the listed ones
  int n_heads;
  Terms terms;
  float cap, inverse_cap;
  bool bias_has_rows_of_q;  // else of tokens
};

/// The problem of the rows of the batch from this one on.
inline Problem problem_of(Cuda where, const AttentionPass& pass, Index first_row) {
  Problem p{};
  p.sizes = pass.sizes, p.t = on_device(*pass.tiling, where);
  p.first_row = first_row, p.n_rows = pass.sizes.batch, p.n_heads = static_cast<int>(pass.n_heads);
  for (int i = 0; i < p.n_heads; ++i) p.heads.at[i] = static_cast<std::int16_t>(pass.heads[i]);
  if (!pass.terms) return p;
  p.terms = *pass.terms;
  p.cap = static_cast<float>(p.terms.cap), p.inverse_cap = static_cast<float>(1 / p.terms.cap);
  // Where not all tokens ask, a query's row is that of q; the host's list of these says the same.
  p.bias_has_rows_of_q = std::exchange(p.terms.bias.query_row, nullptr) != nullptr;
  return p;
}

/// Whether a listed head reads this key head.
__device__ inline bool reads_any(const Problem& p, Index kv_head) {
  const Index each = p.sizes.heads / p.sizes.kv_heads;
  for (int i = 0; i < p.n_heads; ++i)
    if (p.heads.at[i] / each == kv_head) return true;
  return false;
}
/// M of weights that survive dropout.
inline float multiplier_of(const AttentionSizes& s) { return static_cast<float>(keep_scale(s.dropout)); }
/// Whether the weight of query i and key j of the lists survives dropout, for a head of row b of
/// the batch.
__device__ inline bool survives(const Problem& p, Index b, Index h, int i, int j) {
  const AttentionSizes& s = p.sizes;
  const auto head = static_cast<std::uint32_t>((s.first_batch + b) * s.heads + s.first_head + h);
  const auto t = static_cast<std::uint32_t>(p.t.q_name[i]), u = static_cast<std::uint32_t>(p.t.k_name[j]);
  return attention_keeps(cuda::now(s.key), head, t, u, s.dropout);
}

}  // namespace hilt::kernels
