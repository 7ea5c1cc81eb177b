#pragma once
#include <memory>
#include <vector>
#include "ops/hilbert/plan/plan.h"
#include "ops/hilbert/attention.h"
#include "core/tensor.h"

// Private: an attended set as dense blocks, for the modes that multiply with library GEMMs.

namespace hilt {

/// Groups of one tiling that have one size, for the heads that use it: a batch of dense products.
/// All members are constants, of no interest to a tape.
struct GroupBatch {
  Index groups = 0, q = 0, k = 0;               // how many, and queries and keys of each
  std::vector<Index> heads;                     // query heads
  Tensor q_index, k_index;                      // i64 [groups * q], [groups * k]: tokens
  std::vector<std::int32_t> q_name, k_name;     // what dropout calls these tokens
  bool q_in_place = false, k_in_place = false;  // the index is 0, 1, 2 ..: nothing to gather
  Tensor q_heads, k_heads;                      // i64 [heads]: to pick; undefined where that is all of them in order
  Tensor mask;                                  // u8 [groups, q, k]; undefined where every pair attends
  Tensor empty;         // u8 [groups, q, 1]: queries without a key; undefined where there is none
  Tensor softmax_mask;  // mask, but such a query sees everything: its softmax is defined, and dropped
};

/// The batches of all tilings of a plan, those of a head in the order of its branches.
struct TilingBatches {
  std::int32_t tiling;
  std::vector<Index> heads;
  bool covers = false;  // every token is a query with a key
  std::vector<GroupBatch> batches;
};
/// Tensors are made on `device`, and kept for the next call where that is a GPU, which would wait
/// for them.
std::shared_ptr<const std::vector<TilingBatches>> group_batches(const PlanPtr& plan, Index kv_heads, Index branch,
                                                                Device device);

/// [B, L, H, D] -> [B, heads, groups, q, D], and the keys' version.
Tensor gather_queries(const Tensor& x, const GroupBatch& g);
Tensor gather_keys(const Tensor& x, const GroupBatch& g);
/// Back: added into zeros of [B, L, H, D].
Tensor scatter_queries(const Tensor& x, const GroupBatch& g, Index length, Index heads);
Tensor scatter_keys(const Tensor& x, const GroupBatch& g, Index length, Index heads);

/// The dropout multipliers, 0 or 1 / (1 - p), of [B, heads, groups, q, k].
Tensor dropout_multipliers(const GroupBatch& g, Index batch, Index all_heads, const AttentionOptions& options,
                           DType dtype);

}  // namespace hilt
