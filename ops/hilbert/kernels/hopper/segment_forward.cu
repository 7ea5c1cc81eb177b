// Segment attention on Hopper, forward: every query of a group visits every key of it.
//
//   S = Q K^T     P = e^(c S - m)     O = P V / rowsum P     L = m + log rowsum P        in base 2 inside,
//   natural outside
//
// One block a multiprocessor works through tiles of 128 queries. Warpgroup 0 loads: a ring of Q, K
// and V tiles of 128 rows, each row gathered through the list of tokens, 16 bytes a lane and eight
// lanes a row, so that lines stay whole. Warpgroups 1 and 2 own 64 queries each: S by wgmma from
// shared memory, the softmax in registers, and P, which is already laid out as an operand, times V.
// Rows leave through a staging tile, whole lines at a time. The tokens of a group need no order
// inside it, and no permuted copy of anything exists.
//
// Lists: instead of whole groups, any tiling whose tiles all have 128 rows (dense causal, windows);
// partial tiles are masked by attends(). Ahead (long groups): the next S is multiplied while the
// softmax of this one runs. Turns (D = 64): the two warpgroups take turns at the exponentials.
// Merges: o is f32 and the state of an online softmax that goes on:
//
//   L' = log(e^L + e^L_here)     O' = e^(L - L') O + e^(L_here - L') O_here
#include "ops/hilbert/kernels/hopper/common.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;

constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(registers_fit(kThreads, kProducerRegisters, kConsumerRegisters));
constexpr int kTurnBarrier = 2;  // and 3: of the second warpgroup

struct ForwardProblem : Work {
  Operand q, k, o;
  const bf16* v;      // with the strides of k
  void* out;          // bf16, or f32 with kMerges
  float* lse;         // [B, H, L]
  bool fresh;         // with kMerges: there is nothing to merge with
  int heads_each;     // query heads that share a key head
  int queries, keys;  // of a group
};

template <int D> struct Layout {
  using Tile = hopper::Tile<D, kTile>;
  using Ring = hopper::Ring<D == 64 ? 4 : 2, Tile::kBytes>;
  static constexpr std::uint32_t kStaging = 16 * staging_pitch(D / 8);  // of a warp
  static constexpr std::uint32_t q = 0, k = q + Ring::kBytes, v = k + Ring::kBytes, staging = v + Ring::kBytes,
                                 barriers = staging + 8 * kStaging, size = barriers + 3 * Ring::kBarriers;
};
template <int D> struct Rings {
  using M = Layout<D>;
  typename M::Ring q, k;  // V lies behind K
  __device__ Rings(std::uint32_t base, bool loads)
      : q(base + M::q, base + M::barriers, loads), k(base + M::k, q.barriers + M::Ring::kBarriers, loads) {}
};

// ---- loads

/// The rows of Q of an item, then those of K and V, tile by tile.
template <int D, bool kLists>
__device__ __forceinline__ void load(const ForwardProblem& p, const Item& x, const Gather& gather, Rings<D>& to) {
  constexpr int kRows = kTile / 16;  // a thread's, of every tile
  int token[kRows];
  const auto copy_tile = [&](const auto& ring, const bf16* from, int stride) {
    ring.wait_empty();
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      gather.copy<typename Layout<D>::Tile>(ring.tile(), i, from + static_cast<std::int64_t>(token[i]) * stride);
    arrive_when_landed(ring.full());
  };
  const auto read_tokens = [&](const std::int32_t* list) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) token[i] = __ldg(list + gather.row + 16 * i);
  };
  read_tokens(p.lists.q_token.data() + x.group * p.queries + x.tile * kTile);
  copy_tile(to.q, p.q.at(x.batch, x.head) + gather.chunk * 8, p.q.token);
  to.q.next();
  const std::int64_t kv = p.k.offset(x.batch, x.head / p.heads_each) + gather.chunk * 8;
  const std::int32_t* const list = p.lists.k_token.data() + x.group * p.keys;
  for (int j = 0; j < x.visits; ++j) {
    read_tokens(list + p.visit<false, kLists>(x, j).tile * kTile);
    copy_tile(to.k, p.k.data + kv, p.k.token);
    copy_tile(to.k.behind(), p.v + kv, p.k.token);
    to.k.next();
  }
}

// ---- multiplies

/// Of the two rows a lane has.
struct OnlineSoftmax {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  float factor[2], shift[2];  // factor: what sums before this tile are multiplied with

  /// Row maxima of a tile of scores against those so far.
  __device__ __forceinline__ void raise_maxima(const float (&s)[64], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float a[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) a[c] = fmaxf(s[4 * c + 2 * h], s[4 * c + 2 * h + 1]);
#pragma unroll
      for (int c = 4; c < 16; ++c) a[c % 4] = fmaxf(a[c % 4], fmaxf(s[4 * c + 2 * h], s[4 * c + 2 * h + 1]));
      float m = fmaxf(fmaxf(a[0], a[1]), fmaxf(a[2], a[3]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      const bool rises = (m - top[h]) * scale > 0;
      const float next = rises ? m : top[h];
      factor[h] = rises ? exp2_fast((top[h] - m) * scale) : 1.0f;
      top[h] = next;
      shift[h] = next == -INFINITY ? 0.0f : next * scale;
    }
  }
  __device__ __forceinline__ void exponentiate(float (&s)[64], float scale) {
    float part[2][2] = {};
#pragma unroll
    for (int c = 0; c < 16; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float p = exp2_fast(fmaf(s[4 * c + 2 * h + j], scale, -shift[h]));
          s[4 * c + 2 * h + j] = p;
          part[h][j] += p;
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], factor[h], part[h][0] + part[h][1]);
  }
  template <int N> __device__ __forceinline__ void rescale(float (&o)[N]) const {
#pragma unroll
    for (int c = 0; c < N / 4; ++c)
      o[4 * c] *= factor[0], o[4 * c + 1] *= factor[0], o[4 * c + 2] *= factor[1], o[4 * c + 3] *= factor[1];
  }
};

/// The scores of one tile, its softmax, and the product with V.
template <int D, bool kAhead, bool kLists> struct Attend {
  using Tile = typename Layout<D>::Tile;
  using Ring = typename Layout<D>::Ring;
  static constexpr bool kTurns = kAhead && D == 64;
  const ForwardProblem& p;
  const Place at;
  Rings<D> from;

  __device__ __forceinline__ void my_turn() const {
    if constexpr (kTurns) named_sync(kTurnBarrier + at.half, kMultiplying);
  }
  __device__ __forceinline__ void your_turn() const {
    if constexpr (kTurns) named_arrive(kTurnBarrier + (at.half ^ 1), kMultiplying);
  }
  __device__ __forceinline__ void multiply_qk(float (&s)[64], const Ring& k) const {
    wgmma_begin();
    multiply_rows<Tile, Tile>(s, from.q.tile() + at.rows(), k.tile());
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_pv(float (&o)[D / 2], const std::uint32_t (&a)[8][4], const Ring& v,
                                              bool first) const {
    v.wait_full();
    wgmma_begin();
    multiply<Tile>(o, a, v.tile(), !first);
    wgmma_commit();
  }
  /// Takes what does not attend out of the scores of the j-th key tile; whether it is partial.
  __device__ __forceinline__ bool mask_partial(const Item& x, int j, float (&s)[64]) const {
    const Visit m = p.template visit<false, kLists>(x, j);
    if (m.partial) mask<true>(p.lists, x.tile * kTile + at.row, m.tile * kTile + at.quad() * 2, -INFINITY, s);
    return m.partial;
  }
  /// Whether the values of a partial tile are finite; each warpgroup looks at half of the rows.
  __device__ __forceinline__ void check_values(bool partial, const Ring& v, bool& finite) const {
    if (partial)
      finite = rows_are_finite<D>(v.tile() + at.rows(), Tile::kPanel, static_cast<int>(threadIdx.x) % kWarpgroup,
                                  kWarpgroup) &&
               finite;
  }

  __device__ __forceinline__ void tile_by_tile(const Item& x, float (&o)[D / 2], OnlineSoftmax& softmax, bool& finite) {
    float s[64];
    std::uint32_t a[8][4];
    for (int j = 0; j < x.visits; ++j) {
      const Ring v = from.k.behind();
      from.k.wait_full();
      multiply_qk(s, from.k);
      wgmma_wait<0>();
      settle(s);
      from.k.release();
      if (j + 1 == x.visits) from.q.release();
      const bool partial = mask_partial(x, j, s);
      softmax.raise_maxima(s, p.scale_log2);
      softmax.exponentiate(s, p.scale_log2);
      if (j > 0) softmax.rescale(o);
      pack(a, s);
      multiply_pv(o, a, v, j == 0);
      check_values(partial, v, finite);
      wgmma_wait<0>();
      settle(o);
      v.release();
      from.k.next();
    }
  }
  /// Scores of the next tile are multiplied while the softmax of this one runs.
  __device__ __forceinline__ void ahead(const Item& x, float (&o)[D / 2], OnlineSoftmax& softmax, bool& finite) {
    float s[64];
    std::uint32_t a[8][4];
    from.k.wait_full();
    my_turn();
    multiply_qk(s, from.k);
    your_turn();
    wgmma_wait<0>();
    settle(s);
    from.k.release();
    bool partial = mask_partial(x, 0, s);
    softmax.raise_maxima(s, p.scale_log2);
    softmax.exponentiate(s, p.scale_log2);
    pack(a, s);
    for (int j = 1; j < x.visits; ++j) {
      const Ring v = from.k.behind();
      from.k.next();
      from.k.wait_full();
      my_turn();
      multiply_qk(s, from.k);
      multiply_pv(o, a, v, j == 1);
      your_turn();
      wgmma_wait<1>();
      settle(s);
      from.k.release();
      check_values(partial, v, finite);
      partial = mask_partial(x, j, s);
      softmax.raise_maxima(s, p.scale_log2);
      softmax.exponentiate(s, p.scale_log2);
      wgmma_wait<0>();
      settle(o);
      settle(s);  // nothing is packed above the wait, or two copies of P would be alive
      v.release();
      pack(a, s);
      softmax.rescale(o);
    }
    const Ring v = from.k.behind();
    from.q.release();
    multiply_pv(o, a, v, x.visits == 1);
    check_values(partial, v, finite);
    wgmma_wait<0>();
    settle(o);
    v.release();
    from.k.next();
  }
};

/// O and L of 64 queries.
template <int D, bool kLists, bool kMerges>
__device__ __forceinline__ void store(const ForwardProblem& p, const Item& x, const Place& at, std::uint32_t base,
                                      const int (&token)[2], const float (&o)[D / 2], const OnlineSoftmax& softmax,
                                      bool finite) {
  using M = Layout<D>;
  const bool writes = !kMerges || !kLists || (finite && (p.fresh || x.visits > 0));
  float* const lse = p.lse + p.row(x) * p.length;
  const std::int64_t out = p.o.offset(x.batch, x.head);
  float share[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = softmax.sum[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    share[h] = kLists && total == 0 ? 0.0f : 1.0f / total;
    float l = (softmax.top[h] * p.scale_log2 + log2_fast(total)) * kLn2;
    if constexpr (kMerges) {
      float keep = 0;
      if (!p.fresh) l = merged(lse[token[h]], l, keep, share[h]);
      __syncwarp();  // all four lanes of a row have read
      if (writes)
        merge_row<D / 8>(static_cast<float*>(p.out) + out + static_cast<std::int64_t>(token[h]) * p.o.token, o, h,
                         share[h], keep, at.quad());
    }
    if (at.quad() == 0 && writes) lse[token[h]] = l;
  }
  if constexpr (!kMerges) {
    const int low = __shfl_sync(~0u, token[0], at.lane % 8 * 4), high = __shfl_sync(~0u, token[1], at.lane % 8 * 4);
    store_rows<D / 8>(base + M::staging + (threadIdx.x / 32 - 4) * M::kStaging, o, share[0], share[1],
                      static_cast<bf16*>(p.out) + out,
                      static_cast<std::int64_t>(at.lane % 16 < 8 ? low : high) * p.o.token);
  }
}

template <int D, bool kAhead, bool kLists, bool kMerges>
__global__ void __launch_bounds__(kThreads, 1) segment_forward_kernel(const __grid_constant__ ForwardProblem p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const std::uint32_t base = shared_address(memory);
  const int group = warpgroup();
  Rings<D> rings(base, group == 0);
  set_up_barriers(rings.q, rings.k, rings.k.behind());
  if (group == 0) {
    fewer_registers<kProducerRegisters>();
    const Gather gather;
    for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
      const Item x = p.item<false, kLists>(i);
      if (!kLists || x.visits > 0) load<D, kLists>(p, x, gather, rings);
    }
    return;
  }
  more_registers<kConsumerRegisters>();
  Attend<D, kAhead, kLists> attend{p, Place(group), rings};
  const Place& at = attend.at;
  if (at.half == 1) attend.your_turn();  // the first warpgroup begins
  for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
    const Item x = p.item<false, kLists>(i);
    int token[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      token[h] = __ldg(p.lists.q_token.data() + x.group * p.queries + x.tile * kTile + at.row + 8 * h);
    float o[D / 2];
    OnlineSoftmax softmax;
    bool finite = true;
    if (kLists && x.visits == 0) {
#pragma unroll
      for (float& y : o) y = 0;
    } else {
      attend.from.q.wait_full();
      if constexpr (kAhead) attend.ahead(x, o, softmax, finite);
      else attend.tile_by_tile(x, o, softmax, finite);
      attend.from.q.next();
    }
    if constexpr (kLists) finite = p.mark<kMerges>(x, finite);
    store<D, kLists, kMerges>(p, x, at, base, token, o, softmax, finite);
  }
  if (at.half == 0) attend.my_turn();
}

constexpr int kLong = 8;  // key tiles from which on working ahead pays

template <bool kLists> void run(Cuda where, const ForwardPass& f, const Work& w, const EqualGroups& g, bool ahead) {
  ForwardProblem p{w};
  p.q = operand_of(f.q), p.k = operand_of(f.k), p.v = static_cast<const bf16*>(f.v.data), p.o = operand_of(f.o);
  p.out = f.o.data, p.lse = static_cast<float*>(f.lse), p.fresh = f.fresh;
  p.heads_each = static_cast<int>(f.sizes.heads / f.sizes.kv_heads);
  p.queries = static_cast<int>(g.queries), p.keys = static_cast<int>(g.keys);
  with_type<bf16, float>(f.o.type, [&]<class O>() {
    constexpr bool kMerges = std::is_same_v<O, float>;
    // Parts of one attention are what ranks exchange rows between. With a block a tile, copies get
    // in wherever one ends, and uneven tiles are shared out as blocks end; leaving multiprocessors
    // free was slower.
    const bool stays = !kMerges || !ahead;
    const auto both = [&]<int D>() {
      start(
          where,
          ahead ? segment_forward_kernel<D, true, kLists, kMerges> : segment_forward_kernel<D, false, kLists, kMerges>,
          Layout<D>::size, p, stays);
    };
    f.sizes.dim == 64 ? both.template operator()<64>() : both.template operator()<128>();
  });
}

}  // namespace

void hopper::group_forward(Cuda where, const ForwardPass& f, const EqualGroups& g) {
  const Index visits = g.keys / kTile;
  run<false>(where, f, work_of(where, f, g.groups, g.queries / kTile, visits), g, visits >= kLong);
}

void hopper::list_forward(Cuda where, const ForwardPass& f, const Marks& marks) {
  const auto tiles = static_cast<Index>(f.tiling->q_tile.size());
  Work w = work_of(where, f, 1, tiles, 0);
  w.redo = marks.queries;
  run<true>(where, f, w, {}, static_cast<Index>(f.tiling->keys.size()) >= kLong * tiles);
}

}  // namespace hilt::kernels
