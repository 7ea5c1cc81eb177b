#pragma once
#include "core/cuda/pack.cuh"
#include "core/tensor.h"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/cuda/on_device.h"

// Private: one attention call as the kernels for any GPU see it, passed by value; and score terms
// there: the formulas of kernels/terms.h, a pair a lane, and sums of their gradients that have one
// owner each, so that their order is fixed. A block that owns queries adds up what slopes, tables
// and elements of a bias get; what a whole row or column of a bias gets is summed by the block that
// owns the query or the key.

namespace hilt::kernels {

constexpr Index kMaxHeads = 1024;  // that travel with a launch
struct Problem {
  AttentionSizes sizes;
  TilingView t;
  Index first_row, n_rows;        // of the batch
  std::int16_t heads[kMaxHeads];  // the listed ones
  int n_heads;
  Terms terms;
  float cap, inverse_cap;
  bool bias_has_rows_of_q;  // else of tokens
};

/// The problem of the rows of the batch from this one on.
inline Problem problem_of(Cuda where, const AttentionPass& pass, Index first_row) {
  Problem p{};
  p.sizes = pass.sizes, p.t = lists_of(pass, where);
  p.first_row = first_row, p.n_rows = pass.sizes.batch, p.n_heads = static_cast<int>(pass.n_heads);
  for (int i = 0; i < p.n_heads; ++i) p.heads[i] = static_cast<std::int16_t>(pass.heads[i]);
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
    if (p.heads[i] / each == kv_head) return true;
  return false;
}
/// Whether the weight of query i and key j of the lists survives dropout, for a head of row b of
/// the batch.
__device__ inline bool survives(const Problem& p, Index b, Index h, int i, int j) {
  const AttentionSizes& s = p.sizes;
  const auto head = static_cast<std::uint32_t>((s.first_batch + b) * s.heads + s.first_head + h);
  const auto t = static_cast<std::uint32_t>(p.t.q_name[i]), u = static_cast<std::uint32_t>(p.t.k_name[j]);
  return attention_keeps(cuda::now(s.key), head, t, u, s.dropout);
}

/// A query or a key as terms see it: its cell, its name, its row or column of a bias.
struct TermSide {
  Site cell;
  std::int32_t name, line;
  /// That of another lane. All lanes.
  __device__ __forceinline__ TermSide of_lane(int lane) const {
    const auto get = [&](std::int32_t x) { return __shfl_sync(~0u, x, lane); };
    return {{get(cell.a), get(cell.b), get(cell.c)}, get(name), get(line)};
  }
  __device__ __forceinline__ Site site(bool on_grid) const { return on_grid ? cell : Site{0, 0, name}; }
};
/// Entry i of the queries or keys of a tiling.
template <bool kKeys> __device__ __forceinline__ TermSide side_of(const Problem& p, int i) {
  const std::int32_t name = (kKeys ? p.t.k_name : p.t.q_name)[i];
  TermSide x{{}, name, !kKeys && p.bias_has_rows_of_q ? p.t.q_token[i] : name};
  if (p.terms.slopes_on_grid || p.terms.table_on_grid) x.cell = site_of(p.t.grids, true, name);
  return x;
}

/// A pair of a head.
struct TermPair {
  int b, h;
  const TermSide &q, &k;
};

/// A score with its terms, and what their gradients ask for. masked: by the bias.
struct Termed {
  float s, cap_slope = 1, distance = 0;
  std::int32_t entry = 0;
  bool masked = false;
};
/// z: c q . k; T: the type of q, and of a bias that is not f32.
template <class T> __device__ __forceinline__ Termed termed(const Problem& p, const TermPair& pair, float z) {
  const Terms& terms = p.terms;
  const auto& [b, h, q, k] = pair;
  Termed x{z};
  if (p.cap != 0) {
    const Capped<float> c = capped(z, p.cap, p.inverse_cap);
    x.s = c.s, x.cap_slope = c.slope;
  }
  if (terms.slopes) {
    const bool on_grid = terms.slopes_on_grid;
    x.distance = static_cast<float>(distance(q.site(on_grid), k.site(on_grid)));
    x.s -= static_cast<const float*>(terms.slopes)[h] * x.distance;
  }
  if (terms.table) {
    if (const Site* const points = terms.points_of(b))
      x.entry = entry<Index>(terms.reach, points[q.name], points[k.name]);
    else x.entry = entry<int>(terms.reach, q.site(terms.table_on_grid), k.site(terms.table_on_grid));
    x.s += static_cast<const float*>(terms.table)[h * terms.entries + x.entry];
  }
  if (terms.bias.data) {
    const Index at = terms.bias.offset(b, h, q.line) + k.line * terms.bias.key;
    const float bias = terms.bias.type == DType::f32 ? static_cast<const float*>(terms.bias.data)[at]
                                                     : static_cast<float>(static_cast<const T*>(terms.bias.data)[at]);
    x.s += bias, x.masked = bias == -INFINITY;
  }
  return x;
}

/// Where a pass adds up gradients of terms. Slopes and table have no one owner: a warp that owns
/// queries adds to a share of its own, and add_shares() adds these up.
struct TermSums {
  TermGradients to;
  float* share = nullptr;  // [heads, shares, entries + 1], zeros before; the last is of distances
  Index shares = 0, entries = 0;
  __device__ float* share_of(Index h, Index i) const { return share + (h * shares + i) * (entries + 1); }
  /// Whether bias gets a sum of each row, of each column, else an element a pair.
  constexpr bool by_row() const { return to.bias.data && to.bias.key == 0; }
  constexpr bool by_column() const { return to.bias.data && to.bias.key != 0 && to.bias.query == 0; }
  constexpr bool by_pair() const { return to.bias.data && to.bias.key != 0 && to.bias.query != 0; }
  __device__ float* bias_at(const TermPair& x) const {
    return static_cast<float*>(to.bias.data) + to.bias.offset(x.b, x.h, x.q.line) + x.k.line * to.bias.key;
  }
};
/// A warp's share, and its lanes' sums over distances.
struct TermShare {
  float* entries = nullptr;
  float d_distance = 0;
};
/// add(entry, sum) of what lanes have for an entry each, those who are `there`: where several have
/// the same one, they add up first, in their order. All lanes.
template <class Add>
__device__ __forceinline__ void add_by_entry(bool there, std::int32_t entry, float x, const Add& add) {
  const unsigned all = __ballot_sync(~0u, there), peers = __match_any_sync(~0u, there ? entry : -1);
  float sum = x;
  if (__all_sync(~0u, !there || peers == all)) {
    sum = cuda::warp_reduce<cuda::Sum>(x);
  } else {
    unsigned rest = there ? peers & (peers - 1) : 0;  // all but the first, who adds
    while (__any_sync(~0u, rest != 0)) {
      const float other = __shfl_sync(~0u, x, rest != 0 ? __ffs(static_cast<int>(rest)) - 1 : 0);
      if (rest != 0) sum += other, rest &= rest - 1;
    }
  }
  if (there && static_cast<int>(threadIdx.x) % cuda::kWarp == __ffs(static_cast<int>(peers)) - 1) add(entry, sum);
}
/// Takes dS of a pair a lane, 0 where it does not attend, for a warp that owns the queries. All
/// lanes.
__device__ __forceinline__ void collect(const TermSums& sums, TermShare& share, const TermPair& pair, const Termed& x,
                                        bool attends, float ds) {
  share.d_distance = fmaf(ds, x.distance, share.d_distance);
  if (sums.by_pair() && attends) *sums.bias_at(pair) += ds;
  if (!sums.to.table) return;
  add_by_entry(attends, x.entry, ds, [&](int entry, float sum) { share.entries[entry] += sum; });
  __syncwarp();  // the next one's may be of another lane
}
__device__ __forceinline__ void collect_distances(const TermSums& sums, const TermShare& share) {
  const float sum = cuda::warp_reduce<cuda::Sum>(share.d_distance);
  if (sums.to.slopes && threadIdx.x % cuda::kWarp == 0) share.entries[sums.entries] += sum;
}

/// run(pass, its first row of the batch) for heads and rows of the batch, as many heads at a time
/// as a kernel parameter holds: one by one where they add to the same elements of a bias's
/// gradient.
template <class F> void each_alone(const AttentionPass& pass, const TermSums& sums, const F& run) {
  const PairTensor<void>& bias = sums.to.bias;
  const Index heads = sums.by_pair() && bias.head == 0 ? 1 : kMaxHeads;
  AttentionPass part = pass;
  if (sums.by_pair() && bias.batch == 0) part.sizes.batch = 1;
  for (Index row = 0; row < pass.sizes.batch; row += part.sizes.batch)
    for (Index h = 0; h < pass.n_heads; h += heads) {
      part.heads = pass.heads + h, part.n_heads = std::min(heads, pass.n_heads - h);
      run(part, row);
    }
}

/// The most blocks of a head where they take turns.
inline Index blocks_of_head(Cuda where, const AttentionPass& pass) {
  return std::max<Index>(4 * cuda::properties(where.device).multiprocessors / pass.sizes.heads, 1);
}
constexpr Index kShareBytes = Index{64} << 20;

/// Says where gradients of terms go, and makes the shares of a head's blocks, at most so many.
inline Tensor shares_of_terms(Cuda where, const BackwardPass& b, Index of_block, TermSums& sums, Index& blocks) {
  if (b.d_terms) sums.to = *b.d_terms, sums.to.bias.query_row = nullptr;
  if (!sums.to.slopes && !sums.to.table) return {};
  sums.entries = sums.to.table ? b.terms->entries : 0;
  blocks = std::min(blocks, kShareBytes / (b.sizes.heads * of_block * (sums.entries + 1) * 4) + 1);
  sums.shares = blocks * of_block;
  Tensor memory = zeros({b.sizes.heads, sums.shares, sums.entries + 1}, DType::f32, {Device::Kind::cuda, where.device});
  sums.share = memory.mutable_data<float>();
  return memory;
}
/// dslopes and dtable of all shares, in their order (backward.cu).
void add_shares(Cuda where, const TermSums& sums, Index heads);

}  // namespace hilt::kernels
