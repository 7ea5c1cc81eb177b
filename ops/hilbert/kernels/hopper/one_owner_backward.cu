// Attention on Hopper, backward, in one pass, where one owner of keys has all the keys of each of
// its queries (segments, small windows): dQ is final when it is written. No atomics, no f32 copy of
// it in memory, the same bits every time.
//
//   S^T = K Q^T      P^T = e^(c S^T - L)      dP^T = V dO^T      dS^T = P^T (dP^T - Delta)
//   dV += P^T dO     dK += dS^T Q             A from registers: S^T and dP^T lie there as operands do
//   dQ  = dS K                                dS^T crosses shared memory, the only thing that does
//
// Warpgroup 0 loads; warpgroups 1 and 2 own 64 keys each; queries come in steps of 64, those of the
// query heads that share a key head one head after the other. Delta is formed inside, as the sum of
// P dP over the keys, all of which are here: O is not even read.
#include "ops/hilbert/kernels/hopper/common.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;

// Named barriers of the two multiplying warpgroups: delta is summed, and dS of the steps before was
// read; dS is written.
constexpr int kReadBarrier = 2, kWrittenBarrier = 3;

template <int D_> struct Layout {
  static constexpr int D = D_;
  static constexpr bool kBehind = false;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kTogether = D <= 64 ? 2 : 1;  // steps; then a warpgroup forms dQ of one, or half of its columns
  static constexpr int kStages = D <= 64 ? 4 : 2;
  using Keys = Tile<D, kTile>;
  using Queries = Tile<D, kCell>;
  using OwnedRing = Ring<2, 2 * Keys::kBytes>;  // K and V of two owners in flight
  using StreamedRing = Ring<kStages, 2 * Queries::kBytes>;
  static constexpr std::uint32_t kScoreBytes = kCell * kTile * 2;  // dS of a step
  static constexpr std::uint32_t kRowBytes = kCell * 4;            // of a statistic
  using Items = Records<OwnedRing::kStages>;
  static constexpr std::uint32_t owned = 0, streamed = owned + OwnedRing::kBytes, ds = streamed + StreamedRing::kBytes,
                                 lse = ds + kTogether * kScoreBytes, part = lse + kStages * kRowBytes,
                                 total = part + 2 * 8 * kRowBytes, items = total + 8 * kRowBytes,
                                 turns = items + Items::kBytes, barriers = turns + 8,
                                 size = barriers + OwnedRing::kBarriers + StreamedRing::kBarriers;
};
// ---- loads

template <class M> struct Loader {
  const OnePass& p;
  Rings<M> to;
  const Gather<M::D> gather;
  Walk walk;
  int key = -1, query = -1;  // tokens of this thread, for what is loaded next

  __device__ __forceinline__ void fetch_queries() { query = gather.fetch(p.lists.q_token, walk.take()); }
  /// Q and dO, and L.
  __device__ __forceinline__ void load_queries(const Item& x, int head) {
    using Queries = typename M::Queries;
    to.streamed.wait_empty();
    gather.template copy_held<Queries>(to.streamed.tile(), query, {p.q, x.batch, head});
    gather.template copy_held<Queries>(to.streamed.tile() + Queries::kBytes, query, {p.d_o, x.batch, head});
    if (gather.mine < kCell)
      copy_4(to.lse() + static_cast<std::uint32_t>(gather.mine) * 4,
             p.lse + p.row(x.batch, head) * p.length + max(query, 0), query >= 0);
    announce(to.streamed.full());
    to.streamed.next();
  }
  __device__ __forceinline__ Item item(int i) const { return p.item(i); }
  /// Loads what is known early of the next item.
  __device__ __forceinline__ void begin(const Item& x) {
    key = gather.fetch(p.lists.k_token, {x.row, x.rows});
    walk = Walk(p, x);
    fetch_queries();
  }
  __device__ __forceinline__ void load(const Item& x) {
    using Keys = typename M::Keys;
    if (x.steps > 0) {
      gather.template copy_held<Keys>(to.owned.tile(), key, {p.k, x.batch, x.head});
      gather.template copy_held<Keys>(to.owned.tile() + Keys::kBytes, key, {p.v, x.batch, x.head});
    }
    announce(to.owned.full());
    to.owned.next();
    if (x.steps == 0) return;
    const int steps = (x.steps + M::kTogether - 1) / M::kTogether * M::kTogether;  // an empty one makes up a pair
    for (int i = x.first_head; i < x.last_head; ++i)
      for (int step = 0; step < steps; ++step) {
        load_queries(x, p.query_head[i]);
        if (step + 1 == steps && i + 1 == x.last_head) return;
        if (step + 1 == steps) walk = Walk(p, x);
        fetch_queries();
      }
  }
};

// ---- multiplies

template <class E, class M> struct Multiplier {
  static constexpr int D = M::D, kColumns = D < 64 ? D : 64;  // of dQ, that a warpgroup forms
  const OnePass& p;
  const Lane at;
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
    store_shared(part + my_row + at_lane, make_float2(z[0], z[1]));
    named_sync(kReadBarrier, kMultiplying);
    float a = 0, b = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < 8; ++w) {
      const float2 u = load_shared<float2>(part + w * M::kRowBytes + at_lane);
      a += u.x, b += u.y;
    }
    store_shared(total + at_lane, make_float2(a, b));
    __syncwarp();
    turn ^= 1;
    return total;
  }

  /// One step: dV and dK are issued, not waited for; dS^T stands at `ds`. kBehind: those of the
  /// step before still run, and its stage is let go here.
  template <bool kBehind>
  __device__ __forceinline__ void visit(const Step& step, std::uint32_t k_tile, std::uint32_t ds, float (&dk)[D / 2],
                                        float (&dv)[D / 2]) {
    using Keys = typename M::Keys;
    using Queries = typename M::Queries;
    const typename M::StreamedRing before = from.streamed;
    if constexpr (kBehind) from.streamed.next();
    const bool full = step.cell(at.half) == Visits::kFull;
    const std::uint32_t word = word_of(p, step, at);
    float s[32], t[32];
    const std::uint32_t own = k_tile + at.rows(), q_tile = from.streamed.tile(), d_o_tile = q_tile + Queries::kBytes;
    from.streamed.wait_full();
    wgmma_begin();
    multiply_rows<E, Keys, Queries>(s, own, q_tile);
    wgmma_commit();
    multiply_rows<E, Keys, Queries>(t, own + Keys::kBytes, d_o_tile);
    wgmma_commit();
    wgmma_wait<1>();
    fence_operand(s);
    if constexpr (kBehind) {
      fence_operand(dv);
      fence_operand(dk);
      before.release();
    }
    const std::uint32_t column = static_cast<std::uint32_t>(at.quad()) * 8;  // of bytes
    for_scores(ByColumn{from.lse() + column},
               [&](int i, float l) { s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -(l * kLog2e))); });
    wgmma_wait<0>();
    fence_operand(t);
    if (!full) mask(s, 0, word, 0.0f), mask(t, 0, word, 0.0f);
    for_scores(ByColumn{sum_delta(s, t) + column}, [&](int i, float d) { t[i] = s[i] * (t[i] - d); });
    std::uint32_t a[4][4], b[4][4];
    pack<E>(a, s);
    pack<E>(b, t);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_matrix(ds + swizzled(static_cast<std::uint32_t>(at.half * 64 + at.warp * 16 + at.lane % 16),
                                 static_cast<std::uint32_t>(2 * k + at.lane / 16)),
                   b[k][0], b[k][1], b[k][2], b[k][3]);
    fence_for_wgmma();
    wgmma_begin();
    multiply<E, Queries>(dv, a, d_o_tile, 1);
    multiply<E, Queries>(dk, b, q_tile, 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_tile(float (&dk)[D / 2], float (&dv)[D / 2]) {
    wgmma_wait<0>();
    fence_operand(dv);
    fence_operand(dk);
    from.streamed.release();
    from.streamed.next();
  }
  /// dQ = dS K of a step, of columns from `column` on, once dS is written.
  __device__ __forceinline__ void form_dq(int i, const Step& step, int column, std::uint32_t ds, std::uint32_t k_panel,
                                          float (&dk)[D / 2], float (&dv)[D / 2]) {
    const Item its = from.items.read();
    const int head = p.query_head[i], batch = its.batch;
    float dq[kColumns / 2];
    Half* to[2];
    named_sync(kWrittenBarrier, kMultiplying);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma<E, 1, 1>(dq, operand(ds, along_rows(k), 0), operand(k_panel, along_rows(k), 0), k > 0);
    wgmma_commit();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.warp * 16 + at.lane / 4 + 8 * h;
      to[h] = row < step.rows
                  ? p.dq + p.dq_rows.offset(batch, head, __ldg(p.lists.q_token.data() + step.row + row)) + column
                  : nullptr;
    }
    wgmma_wait<0>();
    fence_operand(dq);
    finish_tile(dk, dv);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (p.redo_queries && to[h] && !is_finite(dq, h))
        p.redo_query(batch, head, step.row + at.warp * 16 + at.lane / 4 + 8 * h);
      store_row<E, kColumns / 8>(to[h], dq, h, p.scale, at.quad(), p.chunks - column / 8);
    }
  }

  /// The next steps of the i-th head, and dQ of them.
  __device__ __forceinline__ void visit_steps(int i, Walk& walk, float (&dk)[D / 2], float (&dv)[D / 2]) {
    const std::uint32_t ds = from.base + M::ds, k_tile = from.owned.tile();
    const Step step = walk.take();
    if constexpr (M::kTogether == 2) {
      const Step other = walk.take();
      visit<false>(step, k_tile, ds, dk, dv);
      visit<true>(other, k_tile, ds + M::kScoreBytes, dk, dv);
      form_dq(i, at.half == 0 ? step : other, 0, ds + static_cast<std::uint32_t>(at.half) * M::kScoreBytes, k_tile, dk,
              dv);
    } else {
      visit<false>(step, k_tile, ds, dk, dv);
      form_dq(i, step, at.half * 64, ds, k_tile + static_cast<std::uint32_t>(at.half) * M::Keys::kPanel, dk, dv);
    }
  }
  /// Items: dQ of their queries and, of their keys, dK and dV.
  __device__ __forceinline__ void run() {
    for (bool more = true; more;) {
      float dk[D / 2], dv[D / 2];
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
      from.owned.wait_full();
      {
        const Item its = from.items.read();
        more = its.number >= 0;
        for (int i = its.first_head; i < its.last_head; ++i) {
          Walk walk(p, from.items.read());
#pragma unroll 1
          while (walk.left > 0) visit_steps(i, walk, dk, dv);
        }
      }
      from.owned.release();
      from.owned.next();
      const Item x = from.items.read();
      from.items.next();
      store_keys<E, true>(p, x, at.half, at.row, at.quad(), dk, dv);
    }
  }
};

template <class E, class M>
__global__ void __launch_bounds__(kThreads, 1) one_owner_backward_kernel(const __grid_constant__ OnePass p) {
  run_block<Loader<M>, M>(p, [&](const Lane& at, const Rings<M>& rings) {
    Multiplier<E, M> multiplier{p, at, rings};
    multiplier.run();
  });
}

}  // namespace

template <class E, int D> void hopper::one_owner_backward(Cuda where, const BackwardPass& b, const Marks& marks) {
  if constexpr (D <= 128)
    for_portions<true>(where, b, marks, true, [&](const Work& work) {
      OnePass p = one_pass_of(work, b, marks);
      PartSums parts;
      if (p.part_rows != 0) {
        parts = part_sums(work, b, marks.sums, b.sizes.kv_heads, b.dk, b.dv);
        parts.token = p.lists.k_token;
        p.dk = marks.sums, p.dv = const_cast<float*>(parts.sums[1]), p.dk_rows = rows_of(parts, work);
      }
      start(where, one_owner_backward_kernel<E, Layout<D>>, Layout<D>::size, p);
      if (p.part_rows != 0) add_parts(where, parts);
    });
}

template void hopper::one_owner_backward<HILT_TYPE, HILT_DIM>(Cuda, const BackwardPass&, const Marks&);

}  // namespace hilt::kernels
