#pragma once
#include "../../core/comm/comm.h"
#include "attention.h"
#include "ranks/shards.h"

namespace [[gnu::visibility("default")]] hilt {

/// Attention over ranks. q [B, l, H, D], k and v [B, l, Hk, D] are the rows of this rank, in the
/// order of shard->shards().positions(rank); so is o, as one rank would have computed it, to
/// rounding. Backward runs fused. Every rank calls it, and plays its tape, in the same order.
Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v, const ShardPlanPtr& shard, const Comm& comm,
                      const AttentionOptions& options = {});
/// Forward alone, with the log-sum-exp of every row.
AttentionResult ring_attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const ShardPlanPtr& shard,
                                        const Comm& comm, const AttentionOptions& options = {});

/// Throws on every rank, naming the first difference, unless all have the same plan and sizes.
void agree_on(const ShardPlan& shard, const Comm& comm, Index batch, Index kv_heads, Index dim, DType dtype,
              const AttentionOptions& options);

/// One rank's rows of a whole tensor [B, L, ...] whose rows are tokens, and the whole of all rows.
Tensor rows_of_rank(const Tensor& whole, const ShardPlan& shard, int rank);
Tensor whole_of_rows(const Tensor& rows, const ShardPlan& shard, const Comm& comm);  // all rows, on every rank

}  // namespace hilt
