// Segment attention on Hopper, backward, in one pass. A block owns a group's 128 keys (or 256, in
// two passes over its queries), which every query of the group visits, so dQ is final when it is
// written: no atomics, no f32 copy of it, the same bits every time.
//
//   S^T = K Q^T      P^T = e^(c S^T - L)      dP^T = V dO^T      dS^T = P^T (dP^T - Delta)
//   dV += P^T dO     dK += dS^T Q             A from registers: S^T and dP^T lie there as operands do
//   dQ  = dS K                                dS^T crosses shared memory, the only thing that does
//
// Warpgroup 0 loads; warpgroups 1 and 2 own 64 keys each; queries come in tiles of 64. Delta is
// formed either inside, as the sum of P dP over the keys, all of which are here (one pass: O is not
// even read), or by the loader from the rows of O and dO (two passes).
#include "ops/hilbert/kernels/hopper/common.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;

constexpr int kQueries = 64;  // of a tile
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(registers_fit(kThreads, kProducerRegisters, kConsumerRegisters));
// Named barriers of the two multiplying warpgroups: delta is summed, dS is written, dS was read.
constexpr int kDeltaBarrier = 1, kWrittenBarrier = 2, kReadBarrier = 3;

struct Backward : Work {
  Operand q, k, o, d_o;
  const bf16* v;  // with the strides of k
  bf16 *dq, *dk, *dv;
  Operand dq_rows, dk_rows;
  const float* lse;
  int queries, keys;  // of a group
};

template <int D_, int kPasses_, bool kInside_, int kStages> struct Layout {
  static constexpr int D = D_, kPasses = kPasses_;
  static constexpr bool kInside = kInside_;  // Delta
  using Keys = Tile<D, kTile>;
  using Queries = Tile<D, kQueries>;
  using KeyRing = Ring<2, 2 * Keys::kBytes>;  // K and V of two groups in flight
  using QueryRing = Ring<kStages, 2 * Queries::kBytes>;
  static constexpr std::uint32_t kScoreBytes = kQueries * kTile * 2, kScores = (D == 64 ? 2 : 1) * kScoreBytes;  // dS
  static constexpr std::uint32_t kRowBytes = kQueries * 4;  // of a statistic
  static constexpr std::uint32_t kv = 0, queries = kv + KeyRing::kBytes, o = queries + QueryRing::kBytes,
                                 ds = o + (kInside ? 0 : Queries::kBytes), lse = ds + kScores,
                                 delta = lse + kStages * kRowBytes, part = delta + kStages * kRowBytes,
                                 total = part + (kInside ? 2 * 8 * kRowBytes : 0),
                                 barriers = total + (kInside ? 8 * kRowBytes : 0),
                                 size = barriers + KeyRing::kBarriers + QueryRing::kBarriers;
};
template <class M> struct Rings {
  std::uint32_t base;
  typename M::KeyRing kv;
  typename M::QueryRing queries;
  __device__ Rings(std::uint32_t at, bool loads)
      : base(at),
        kv(base + M::kv, base + M::barriers, loads),
        queries(base + M::queries, kv.barriers + M::KeyRing::kBarriers, loads) {}
  __device__ std::uint32_t lse() const { return queries.row(base + M::lse, M::kRowBytes); }
  __device__ std::uint32_t delta() const { return queries.row(base + M::delta, M::kRowBytes); }
};

// ---- loads

/// Tokens are fetched a tile early: lane j of warp y holds the token of row 16 (j / 4) + 4 y +
/// j % 4 (lanes below 16 for tiles of 64 rows), and a shuffle hands it on to the eight lanes that
/// copy that row.
template <class M> struct Loader {
  const Backward& p;
  Rings<M> to;
  const Gather gather;
  const int lane = static_cast<int>(threadIdx.x) % 32,
            mine = 16 * (lane / 4) + 4 * (static_cast<int>(threadIdx.x) / 32) + lane % 4;
  int key_token = 0, query_token = 0;
  int unpublished = -1;  // a stage whose delta is still to be formed
  float its_lse = 0;

  __device__ __forceinline__ std::int64_t token_of(int held, int j) const {
    return __shfl_sync(~0u, held, 4 * j + lane / 8);
  }
  /// Delta of a tile, from this thread's own chunks of O and dO; then the tile is published by one
  /// ordinary arrival.
  __device__ __forceinline__ void publish() {
    Rings<M> its = to;
    its.queries.stage = unpublished;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = 0;
#pragma unroll
      for (int panel = 0; panel < M::Queries::kPanels; ++panel) {
        const std::uint32_t here = static_cast<std::uint32_t>(panel) * M::Queries::kPanel + gather.at +
                                   static_cast<std::uint32_t>(i) * 16 * kPanelRow;
        const uint4 x = load_shared_16(to.base + M::o + here),
                    y = load_shared_16(its.queries.tile() + M::Queries::kBytes + here);
        const std::uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sum = fmaf(__uint_as_float(a[e] << 16), __uint_as_float(b[e] << 16),
                     fmaf(__uint_as_float(a[e] & 0xffff0000u), __uint_as_float(b[e] & 0xffff0000u), sum));
      }
      for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (gather.chunk == 0) store_shared(its.delta() + static_cast<std::uint32_t>(gather.row + 16 * i) * 4, sum);
    }
    if (lane < 16) store_shared(its.lse() + static_cast<std::uint32_t>(mine) * 4, its_lse);
    fence_for_wgmma();
    barrier_arrive(its.queries.full());
    unpublished = -1;
  }
  /// Never with a tile unpublished, for which the others may be waiting.
  template <class Ring> __device__ __forceinline__ void wait_empty(const Ring& ring) {
    if constexpr (!M::kInside)
      if (unpublished >= 0 && !__all_sync(~0u, barrier_test(ring.empty(), ring.parity))) copies_wait<0>(), publish();
    ring.wait_empty();
  }
  __device__ __forceinline__ void load_keys(const Item& x) {
    const bf16* const k = p.k.at(x.batch, x.head) + gather.chunk * 8;
    const std::int64_t to_v = p.v - p.k.data;
    wait_empty(to.kv);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const bf16* const line = k + token_of(key_token, j) * p.k.token;
      gather.copy<typename M::Keys>(to.kv.tile(), j, line, line + to_v);
    }
    arrive_when_landed(to.kv.full());
    to.kv.next();
  }
  /// Q and dO, and L or, for Delta, O.
  __device__ __forceinline__ void load_queries(const Item& x) {
    const bf16* const q = p.q.at(x.batch, x.head) + gather.chunk * 8;
    const bf16* const d_o = p.d_o.at(x.batch, x.head) + gather.chunk * 8;
    const float* const lse = p.lse + p.row(x) * p.length;
    wait_empty(to.queries);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t token = token_of(query_token, j);
      gather.copy<typename M::Queries>(to.queries.tile(), j, q + token * p.q.token, d_o + token * p.d_o.token);
    }
    if constexpr (M::kInside) {
      if (lane < 16) copy_4(to.lse() + static_cast<std::uint32_t>(mine) * 4, lse + query_token);
      arrive_when_landed(to.queries.full());
    } else {
      copies_commit();
      if (unpublished >= 0) copies_wait<1>(), publish();
      unpublished = to.queries.stage;
      const bf16* const o = p.o.at(x.batch, x.head) + gather.chunk * 8;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        gather.copy<typename M::Queries>(to.base + M::o, j, o + token_of(query_token, j) * p.o.token);
      copies_commit();
      if (lane < 16) its_lse = __ldg(lse + query_token);
    }
    to.queries.next();
  }
  __device__ __forceinline__ void fetch_keys(const Item& x, int pass) {
    key_token = __ldg(p.lists.k_token.data() + x.group * p.keys + kTile * pass + mine);
  }
  __device__ __forceinline__ void fetch_queries(const Item& x, int tile) {
    query_token = __ldg(p.lists.q_token.data() + x.group * p.queries + tile * kQueries + mine % kQueries);
  }
  __device__ __forceinline__ void load(const Item& x, const Item& next) {
    const int tiles = p.queries / kQueries;
    for (int pass = 0; pass < M::kPasses; ++pass) {
      const bool more = pass + 1 < M::kPasses;
      load_keys(x);
      fetch_keys(more ? x : next, more ? pass + 1 : 0);
      for (int tile = 0; tile < tiles; ++tile) {
        load_queries(x);
        fetch_queries(tile + 1 < tiles || more ? x : next, tile + 1 < tiles ? tile + 1 : 0);
      }
    }
  }
};

// ---- multiplies

template <class M> struct Multiplier {
  static constexpr int D = M::D;
  const Backward& p;
  const Place at;
  Rings<M> from;
  std::uint32_t turn = 0;  // which copy of the partial sums of delta

  /// Delta, as sums of P dP over the eight lanes that share a pair of queries, halving what a lane
  /// has at each step, then over the eight warps; where it stands.
  __device__ __forceinline__ std::uint32_t sum_delta(const float (&s)[32], const float (&t)[32]) {
    const bool b4 = at.lane & 16, b3 = at.lane & 8, b2 = at.lane & 4;
    float e[8], f[4], z[2];
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float low = fmaf(s[4 * c + j], t[4 * c + j], s[4 * c + 2 + j] * t[4 * c + 2 + j]);
        const float high = fmaf(s[4 * c + 16 + j], t[4 * c + 16 + j], s[4 * c + 18 + j] * t[4 * c + 18 + j]);
        e[2 * c + j] = (b4 ? high : low) + __shfl_xor_sync(~0u, b4 ? low : high, 16);
      }
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = (b3 ? e[i + 4] : e[i]) + __shfl_xor_sync(~0u, b3 ? e[i] : e[i + 4], 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) z[i] = (b2 ? f[i + 2] : f[i]) + __shfl_xor_sync(~0u, b2 ? f[i] : f[i + 2], 4);
    const std::uint32_t my_row = static_cast<std::uint32_t>(at.half * 4 + at.warp) * M::kRowBytes,
                        part = from.base + M::part + turn * 8 * M::kRowBytes, total = from.base + M::total + my_row,
                        at_lane = static_cast<std::uint32_t>(at.lane) * 8;
    store_shared_pair(part + my_row + at_lane, z[0], z[1]);
    named_sync(kDeltaBarrier, kMultiplying);
    float a = 0, b = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < 8; ++w) {
      const float2 u = load_shared_pair(part + w * M::kRowBytes + at_lane);
      a += u.x, b += u.y;
    }
    store_shared_pair(total + at_lane, a, b);
    __syncwarp();
    turn ^= 1;
    return total;
  }

  /// One tile of 64 queries: dV and dK are issued, not waited for; dS^T stands at `ds`. kBehind:
  /// those of the tile before still run, and its stage is let go here.
  template <bool kBehind>
  __device__ __forceinline__ void visit(std::uint32_t k_tile, std::uint32_t ds, bool first, float (&dk)[D / 2],
                                        float (&dv)[D / 2]) {
    using Keys = typename M::Keys;
    using Queries = typename M::Queries;
    const typename M::QueryRing before = from.queries;
    if constexpr (kBehind) from.queries.next();
    float s[32], t[32];
    const std::uint32_t own = k_tile + at.rows(), q_tile = from.queries.tile(), d_o_tile = q_tile + Queries::kBytes;
    from.queries.wait_full();
    wgmma_begin();
    multiply_rows<Keys, Queries>(s, own, q_tile);
    wgmma_commit();
    multiply_rows<Keys, Queries>(t, own + Keys::kBytes, d_o_tile);
    wgmma_commit();
    wgmma_wait<1>();
    settle(s);
    if constexpr (kBehind) {
      settle(dv);
      settle(dk);
      before.release();
    }
    const std::uint32_t column = static_cast<std::uint32_t>(at.quad()) * 8;  // of bytes
    for_scores(ByColumn{from.lse() + column},
               [&](int i, float l) { s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -(l * kLog2e))); });
    wgmma_wait<0>();
    settle(t);
    std::uint32_t delta = from.delta();
    if constexpr (M::kInside) delta = sum_delta(s, t);
    for_scores(ByColumn{delta + column}, [&](int i, float d) { t[i] = s[i] * (t[i] - d); });
    std::uint32_t a[4][4], b[4][4];
    pack(a, s);
    pack(b, t);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_matrix(ds + swizzled(static_cast<std::uint32_t>(at.half * 64 + at.warp * 16 + at.lane % 16),
                                 static_cast<std::uint32_t>(2 * k + at.lane / 16)),
                   b[k][0], b[k][1], b[k][2], b[k][3]);
    fence_for_wgmma();
    wgmma_begin();
    multiply<Queries>(dv, a, d_o_tile, !first);
    multiply<Queries>(dk, b, q_tile, !first);
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_tile(float (&dk)[D / 2], float (&dv)[D / 2]) {
    wgmma_wait<0>();
    settle(dv);
    settle(dk);
    from.queries.release();
    from.queries.next();
  }
  /// dQ (+)= dS K of 64 queries from `query` on and of 64 columns, once dS is written; it leaves in
  /// the last pass.
  __device__ __forceinline__ void form_dq(const Item& x, int pass, int query, int column, std::uint32_t ds,
                                          std::uint32_t k_panel, float (&dq)[32], float (&dk)[D / 2],
                                          float (&dv)[D / 2]) {
    const bool last = pass == M::kPasses - 1;
    bf16* to[2] = {};
    named_sync(kWrittenBarrier, kMultiplying);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma<1, 1>(dq, operand(ds, along_rows(k), 0), operand(k_panel, along_rows(k), 0), k > 0 ? 1 : pass > 0);
    wgmma_commit();
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (last) {
        const int place = x.group * p.queries + query + at.warp * 16 + at.lane / 4 + 8 * h;
        to[h] = p.dq + p.dq_rows.offset(x.batch, x.head, __ldg(p.lists.q_token.data() + place)) + column;
      }
    wgmma_wait<0>();
    settle(dq);
    if constexpr (M::kPasses == 1) finish_tile(dk, dv);
    if constexpr (!M::kInside)
      named_sync(kReadBarrier, kMultiplying);  // inside, the next tile's delta barrier says as much
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (last) store_row<8>(to[h], dq, h, p.scale, at.quad());
  }
  __device__ __forceinline__ void store_keys(const Item& x, int pass, const float (&dk)[D / 2],
                                             const float (&dv)[D / 2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = __ldg(p.lists.k_token.data() + x.group * p.keys + pass * kTile + at.row + 8 * h);
      const std::int64_t to = p.dk_rows.offset(x.batch, x.head, token);
      store_row<D / 8>(p.dk + to, dk, h, p.scale, at.quad());
      store_row<D / 8>(p.dv + to, dv, h, 1.0f, at.quad());
    }
  }

  /// Two tiles of queries; then warpgroup w forms dQ of tile w.
  __device__ __forceinline__ void visit_pair(const Item& x, int pass, int number, std::uint32_t k_tile, float (&dq)[32],
                                             float (&dk)[D / 2], float (&dv)[D / 2]) {
    constexpr bool kBehind = M::kPasses == 1;  // with two there are no registers left for it
    const std::uint32_t ds = from.base + M::ds;
    if constexpr (kBehind) {
      visit<false>(k_tile, ds, number == 0, dk, dv);
      visit<true>(k_tile, ds + M::kScoreBytes, false, dk, dv);
    } else {
#pragma unroll 1
      for (int u = 0; u < 2; ++u) {
        visit<false>(k_tile, ds + static_cast<std::uint32_t>(u) * M::kScoreBytes, number == 0 && u == 0, dk, dv);
        finish_tile(dk, dv);
      }
    }
    form_dq(x, pass, (2 * number + at.half) * kQueries, 0, ds + static_cast<std::uint32_t>(at.half) * M::kScoreBytes,
            k_tile, dq, dk, dv);
  }
  /// One tile of queries; then each warpgroup forms half of the columns of its dQ.
  __device__ __forceinline__ void visit_one(const Item& x, int tile, std::uint32_t k_tile, float (&dk)[D / 2],
                                            float (&dv)[D / 2]) {
    float dq[32];
    visit<false>(k_tile, from.base + M::ds, tile == 0, dk, dv);
    form_dq(x, 0, tile * kQueries, at.half * 64, from.base + M::ds,
            k_tile + static_cast<std::uint32_t>(at.half) * M::Keys::kPanel, dq, dk, dv);
  }
  /// An item: dQ of its queries, and of its keys, pass by pass, dK and dV.
  __device__ __forceinline__ void differentiate_group(const Item& x) {
    const int tiles = p.queries / kQueries;
    float dk[D / 2], dv[D / 2], dq[M::kPasses][32];
#pragma unroll
    for (int pass = 0; pass < M::kPasses; ++pass) {
      const std::uint32_t k_tile = from.kv.tile();
      from.kv.wait_full();
      if constexpr (D == 128) {
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) visit_one(x, tile, k_tile, dk, dv);
      } else if constexpr (M::kPasses == 1) {
#pragma unroll 1
        for (int number = 0; number < tiles / 2; ++number) visit_pair(x, 0, number, k_tile, dq[0], dk, dv);
      } else {
        visit_pair(x, pass, 0, k_tile, dq[0], dk, dv);
        visit_pair(x, pass, 1, k_tile, dq[1], dk, dv);
      }
      from.kv.release();
      from.kv.next();
      store_keys(x, pass, dk, dv);
    }
  }
};

template <class M>
__global__ void __launch_bounds__(kThreads, 1) segment_backward_kernel(const __grid_constant__ Backward p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const int group = warpgroup(), step = static_cast<int>(gridDim.x);
  const Rings<M> rings(shared_address(memory), group == 0);
  set_up_barriers(rings.kv, rings.queries);
  if (group == 0) {
    fewer_registers<kProducerRegisters>();
    Loader<M> loader{p, rings};
    Item next = p.item(static_cast<int>(blockIdx.x));
    loader.fetch_keys(next, 0);
    loader.fetch_queries(next, 0);
    for (int i = static_cast<int>(blockIdx.x); i < p.items; i += step) {
      const Item x = next;
      next = p.item(i + step < p.items ? i + step : i);
      loader.load(x, next);
    }
    if constexpr (!M::kInside)
      if (loader.unpublished >= 0) copies_wait<0>(), loader.publish();
    return;
  }
  more_registers<kConsumerRegisters>();
  Multiplier<M> multiplier{p, Place(group), rings};
  for (int i = static_cast<int>(blockIdx.x); i < p.items; i += step) multiplier.differentiate_group(p.item(i));
}

}  // namespace

void hopper::one_group_backward(Cuda where, const BackwardPass& b, const EqualGroups& g) {
  Backward p{work_of(where, b, g.groups, 1, 1)};
  p.q = operand_of(b.q), p.k = operand_of(b.k), p.o = operand_of(b.o), p.d_o = operand_of(b.d_o);
  p.v = static_cast<const bf16*>(b.v.data);
  p.dq = static_cast<bf16*>(b.dq.data), p.dk = static_cast<bf16*>(b.dk.data), p.dv = static_cast<bf16*>(b.dv.data);
  p.dq_rows = operand_of(b.dq), p.dk_rows = operand_of(b.dk);
  p.lse = static_cast<const float*>(b.lse), p.queries = static_cast<int>(g.queries), p.keys = static_cast<int>(g.keys);
  const auto run = [&]<class M>(M) {
    static_assert(M::size <= kMostShared);
    start(where, segment_backward_kernel<M>, M::size, p);
  };
  if (b.sizes.dim == 128) run(Layout<128, 1, true, 2>{});
  else if (g.keys == kTile) run(Layout<64, 1, true, 4>{});
  else run(Layout<64, 2, false, 4>{});
}

}  // namespace hilt::kernels
