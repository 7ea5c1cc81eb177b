#pragma once
#include "core/parallel.h"
#include "core/tensor.h"
#include "ops/hilbert/attention.h"
#include "ops/hilbert/plan/attends.h"

// Private: an attended set as dense blocks, for the modes that multiply with library GEMMs.

namespace hilt {

/// Rows whose keys stand in several groups: what is known of a row's part is put together.
struct Chains {
  Index n = 0, longest = 0;  // such rows of groups, and the groups of the longest
  Tensor members, home;      // i64 [n * longest]: groups, padded with `groups`; [groups]: itself, or groups + chain
};

/// The rows of groups, n each, of some heads.
struct GroupRows {
  Tensor index, heads;  // i64 [groups * n]; [heads]: to pick; undefined where that is all of them in order
  Tensor present;       // u8 [groups, n, 1]: queries that have a key; undefined where all are
  Index groups = 0, n = 0;
  Index length = 0, all_heads = 0;  // of the tensor
  Index rows = 0;                   // of the batch, where groups count through all of them; else 0
  bool in_place = false;            // the index is 0, 1, 2 ..: nothing to gather
};

/// The groups of one tiling at all its places, for the heads that use it. What pads one is masked.
struct GroupBatch : GroupShape {
  std::vector<Index> heads;                  // query heads
  GroupRows queries, keys;                   // of tensors
  std::vector<std::int32_t> row;             // of the batch, of each group; empty: every row has them
  std::vector<std::int32_t> q_name, k_name;  // what dropout calls these tokens
  Tensor mask;                               // u8 [groups, q, k]; undefined where every pair attends
  Tensor answers;                            // of queries that have a key, one of each chain
  Chains chains;
  std::vector<Tiling::Sites> grids;  // where tokens lie
  std::vector<std::int32_t> first;   // the token at its start, of each group: of its document
};

/// The batches of all tilings that attend at all; kept for a GPU, which would wait for them.
std::shared_ptr<const std::vector<GroupBatch>> group_batches(const PlanPtr& plan, Index kv_heads, Index branch,
                                                             Device device);

/// f(query, group, row)(key), of their tokens, for all pairs: i32 [rows, groups, q, k], where g is.
template <class F> Tensor of_pairs(const GroupBatch& g, Index rows, F&& f) {
  Tensor x = empty({rows, g.groups, g.q, g.k}, DType::i32);
  std::int32_t* const out = x.mutable_data<std::int32_t>();
  const Index queries = g.groups * g.q;
  parallel_for(rows * queries, 64, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      const Index query = i % queries, group = query / g.q;
      const auto of_key = f(g.q_name[at(query)], at(group), i / queries);
      for (Index j = 0; j < g.k; ++j) out[i * g.k + j] = narrow(of_key(g.k_name[at(group * g.k + j)]));
    }
  });
  return moved(x, g.queries.index.device());
}

/// [B, L, H, D] -> [B, heads, groups, n, D]; B is 1 where groups count through all rows.
Tensor gather_rows(const Tensor& x, const GroupRows& picks);
/// Back: added into zeros of [B, L, H, D]. What is not `present` is zero, and gets no gradient,
/// were it NaN.
Tensor scatter_rows(const Tensor& x, const GroupRows& picks);

/// From scores [B, heads, groups, q, k]: the weights of the keys that a query attends to, zero for
/// the others; and their log-sum-exp [B, heads, groups, q, 1], once a query, else zero.
/// `may_mask`: scores of -inf may leave a query without keys.
Tensor softmax(const Tensor& scores, const GroupBatch& g, bool may_mask = false);
Tensor logsumexp(const Tensor& scores, const GroupBatch& g, bool may_mask = false);

/// The dropout multipliers, 0 or 1 / (1 - p), of [B, heads, groups, q, k].
Tensor dropout_multipliers(const GroupBatch& g, Index batch, Index all_heads, const AttentionOptions& options,
                           DType dtype);

}  // namespace hilt
