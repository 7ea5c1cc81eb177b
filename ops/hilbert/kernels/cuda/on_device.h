#pragma once
#include <span>
#include "core/dispatch.h"
#include "ops/hilbert/plan/tiling.h"

// Private: a tiling where a GPU's kernels can read it.

namespace hilt {

/// The lists of a Tiling, in a GPU's memory, under the same names; passed to kernels by value.
struct TilingView {
  std::span<const std::int32_t> q_token, k_token, q_name, k_name;
  std::span<const Tiling::Range> q_tile, k_tile;
  std::span<const std::int32_t> keys_begin;
  std::span<const Tiling::Ref> keys;
  std::span<const std::int32_t> queries_begin;
  std::span<const Tiling::Ref> queries;
  std::span<const std::int32_t> q_rank, k_rank;
  std::span<const std::int32_t> k_a, q_a_low, q_a_high;
  std::span<const std::int32_t> k_b, q_b_low, q_b_high;
};

/// Copied there by the first call, kept as long as the tiling.
const TilingView& on_device(const Tiling& t, Cuda where);

}  // namespace hilt
