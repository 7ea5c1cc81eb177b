// Segment attention on Hopper, backward, in one pass. A block owns a group's 128 keys (or 256, in
// two passes over its queries), which every query of the group meets, so dQ is final when it is
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
constexpr int kBothGroups = 2 * kWarpgroup;
// Named barriers of the two multiplying warpgroups: delta is summed, dS is written, dS was read.
constexpr int kDeltaBarrier = 1, kWrittenBarrier = 2, kReadBarrier = 3;

struct Backward {
  Operand q, k, o, d_o;
  const bf16* v;  // with the strides of k
  bf16 *dq, *dk, *dv;
  Operand dq_rows, dk_rows;
  const float* lse;
  const std::int32_t *q_token, *k_token;
  int length, heads, queries, keys, items;
  float scale_log2, scale;
  Divisor n_heads, groups;
  std::int16_t head[kHeads];
};

template <int D, int Passes, bool Inside, int Stages> struct Layout {
  static constexpr int kGroups = 2;                // K and V of two groups in flight
  static constexpr int kScores = D == 64 ? 2 : 1;  // dS tiles
  static constexpr int kPanels = D / 64;
  static constexpr std::uint32_t kKeyPanel = kTile * kPanelRow, kQueryPanel = kQueries * kPanelRow;
  static constexpr std::uint32_t kKeyBytes = kTile * D * 2, kQueryBytes = kQueries * D * 2,
                                 kScoreBytes = kQueries * kTile * 2;
  static constexpr std::uint32_t kRowBytes = kQueries * 4;  // of a statistic
  static constexpr std::uint32_t kv = 0, ring = kv + kGroups * 2 * kKeyBytes, o = ring + Stages * 2 * kQueryBytes,
                                 ds = o + (Inside ? 0 : kQueryBytes), lse = ds + kScores * kScoreBytes,
                                 delta = lse + Stages * kRowBytes, part = delta + Stages * kRowBytes,
                                 total = part + (Inside ? 2 * 8 * kRowBytes : 0),
                                 barriers = total + (Inside ? 8 * kRowBytes : 0),
                                 size = barriers + 8 * (2 * kGroups + 2 * Stages);
};

struct Item {
  int head, group, batch;
};
__device__ __forceinline__ Item item_of(const Backward& p, int i) {
  Item x;
  int rest, slot;
  p.n_heads.split(i, rest, slot);
  p.groups.split(rest, x.batch, x.group);
  x.head = p.head[slot];
  return x;
}

template <int D, int Passes, bool Inside, int Stages>
__global__ void __launch_bounds__(kThreads, 1) segment_backward_kernel(const __grid_constant__ Backward p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  using M = Layout<D, Passes, Inside, Stages>;
  constexpr int kPanels = M::kPanels, kGroups = M::kGroups;
  const std::uint32_t base = shared_address(memory), ring = base + M::ring, ds_tiles = base + M::ds,
                      lse_rows = base + M::lse, delta_rows = base + M::delta;
  const std::uint32_t kv_full = base + M::barriers, kv_empty = kv_full + 8 * kGroups, full = kv_empty + 8 * kGroups,
                      empty = full + 8 * Stages;
  const int thread = static_cast<int>(threadIdx.x), group = warpgroup(), tiles = p.queries / kQueries;
  if (thread == 0) {
    constexpr int kWarps = 8;  // that release a tile
    for (std::uint32_t i = 0; i < kGroups; ++i)
      barrier_init(kv_full + 8 * i, kWarpgroup), barrier_init(kv_empty + 8 * i, kWarps);
    for (std::uint32_t i = 0; i < Stages; ++i)
      barrier_init(full + 8 * i, kWarpgroup), barrier_init(empty + 8 * i, kWarps);
    barrier_init_done();
  }
  __syncthreads();

  if (group == 0) {  // ---- loads
    fewer_registers<kProducerRegisters>();
    // Lane j of warp y holds the token of row 16 (j / 4) + 4 y + j % 4 (lanes below 16 for tiles of
    // 64 rows), and a shuffle hands it on to the eight lanes that copy that row. Tokens are fetched
    // a tile early.
    const int lane = thread % 32, warp = thread / 32, mine = 16 * (lane / 4) + 4 * warp + lane % 4, chunk = lane % 8,
              row = 4 * warp + lane / 8;
    const std::uint32_t at = swizzled(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(chunk));
    Ring<kGroups> kv(1);
    Ring<Stages> queries(1);
    int unpublished = -1;  // a stage whose delta is still to be formed
    float its_lse = 0;
    // Delta of a tile, from this thread's own chunks of O and dO; then the tile is published by one
    // ordinary arrival.
    const auto publish = [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = 0;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          const std::uint32_t here =
              static_cast<std::uint32_t>(panel) * M::kQueryPanel + at + static_cast<std::uint32_t>(i) * 16 * kPanelRow;
          const uint4 x = load_shared_16(base + M::o + here),
                      y = load_shared_16(ring + static_cast<std::uint32_t>(unpublished) * 2 * M::kQueryBytes +
                                         M::kQueryBytes + here);
          const std::uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
          for (int e = 0; e < 4; ++e)
            sum = fmaf(__uint_as_float(a[e] << 16), __uint_as_float(b[e] << 16),
                       fmaf(__uint_as_float(a[e] & 0xffff0000u), __uint_as_float(b[e] & 0xffff0000u), sum));
        }
        for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (chunk == 0)
          asm volatile(
              "st.shared.f32 [%0], %1;" ::"r"(delta_rows + static_cast<std::uint32_t>(unpublished) * M::kRowBytes +
                                              static_cast<std::uint32_t>(row + 16 * i) * 4),
              "f"(sum)
              : "memory");
      }
      if (lane < 16)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(lse_rows + static_cast<std::uint32_t>(unpublished) * M::kRowBytes +
                                                     static_cast<std::uint32_t>(mine) * 4),
                     "f"(its_lse)
                     : "memory");
      fence_for_wgmma();
      barrier_arrive(full + 8 * unpublished);
      unpublished = -1;
    };
    const auto wait = [&](std::uint32_t barrier,
                          std::uint32_t parity) {  // never with a tile unpublished, for which the others may be waiting
      if constexpr (!Inside)
        if (unpublished >= 0 && !__all_sync(~0u, barrier_test(barrier, parity))) copies_wait<0>(), publish();
      barrier_wait(barrier, parity);
    };
    Item next = item_of(p, static_cast<int>(blockIdx.x));
    int key_token = __ldg(p.k_token + next.group * p.keys + mine),
        query_token = __ldg(p.q_token + next.group * p.queries + mine % kQueries);
    for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
      const Item x = next;
      const int step = static_cast<int>(gridDim.x);
      next = item_of(p, i + step < p.items ? i + step : i);
      const bf16 *const k = p.k.at(x.batch, x.head) + chunk * 8, *const q = p.q.at(x.batch, x.head) + chunk * 8,
                        *const d_o = p.d_o.at(x.batch, x.head) + chunk * 8;
      const std::int64_t to_v = p.v - p.k.data;
      const float* const lse = p.lse + (static_cast<std::int64_t>(x.batch) * p.heads + x.head) * p.length;
      for (int pass = 0; pass < Passes; ++pass) {
        wait(kv_empty + 8 * kv.stage, kv.parity);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const bf16* const line =
              k + static_cast<std::int64_t>(__shfl_sync(~0u, key_token, 4 * j + lane / 8)) * p.k.token;
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            const std::uint32_t to = base + static_cast<std::uint32_t>(kv.stage) * 2 * M::kKeyBytes +
                                     static_cast<std::uint32_t>(panel) * M::kKeyPanel + at +
                                     static_cast<std::uint32_t>(j) * 16 * kPanelRow;
            copy_16(to, line + panel * 64);
            copy_16(to + M::kKeyBytes, line + to_v + panel * 64);
          }
        }
        arrive_when_landed(kv_full + 8 * kv.stage);
        key_token =
            __ldg(p.k_token + (pass + 1 < Passes ? x.group * p.keys + kTile * (pass + 1) : next.group * p.keys) + mine);
        kv.next();
        for (int tile = 0; tile < tiles; ++tile) {
          wait(empty + 8 * queries.stage, queries.parity);
          const std::uint32_t to_tile = ring + static_cast<std::uint32_t>(queries.stage) * 2 * M::kQueryBytes + at;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const std::int64_t token = __shfl_sync(~0u, query_token, 4 * j + lane / 8);
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
              const std::uint32_t to = to_tile + static_cast<std::uint32_t>(panel) * M::kQueryPanel +
                                       static_cast<std::uint32_t>(j) * 16 * kPanelRow;
              copy_16(to, q + token * p.q.token + panel * 64);
              copy_16(to + M::kQueryBytes, d_o + token * p.d_o.token + panel * 64);
            }
          }
          const int following = tile + 1 < tiles ? x.group * p.queries + (tile + 1) * kQueries
                                                 : (pass + 1 < Passes ? x.group : next.group) * p.queries;
          if constexpr (Inside) {
            if (lane < 16)
              copy_4(lse_rows + static_cast<std::uint32_t>(queries.stage) * M::kRowBytes +
                         static_cast<std::uint32_t>(mine) * 4,
                     lse + query_token);
            arrive_when_landed(full + 8 * queries.stage);
          } else {
            copies_commit();
            if (unpublished >= 0) copies_wait<1>(), publish();
            unpublished = queries.stage;
            const bf16* const o = p.o.at(x.batch, x.head) + chunk * 8;
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
              for (int panel = 0; panel < kPanels; ++panel)
                copy_16(base + M::o + static_cast<std::uint32_t>(panel) * M::kQueryPanel + at +
                            static_cast<std::uint32_t>(j) * 16 * kPanelRow,
                        o + static_cast<std::int64_t>(__shfl_sync(~0u, query_token, 4 * j + lane / 8)) * p.o.token +
                            panel * 64);
            copies_commit();
            if (lane < 16) its_lse = __ldg(lse + query_token);
          }
          query_token = __ldg(p.q_token + following + mine % kQueries);
          queries.next();
        }
      }
    }
    if constexpr (!Inside)
      if (unpublished >= 0) copies_wait<0>(), publish();
    return;
  }

  // ---- multiplies
  more_registers<kConsumerRegisters>();
  const int half = group - 1, lane = thread % 32, warp = thread / 32 % 4, quad = lane % 4, all_warp = half * 4 + warp;
  const std::uint32_t key_rows = static_cast<std::uint32_t>(half) * 64 * kPanelRow;
  Ring<kGroups> kv(0);
  Ring<Stages> queries(0);
  std::uint32_t turn = 0;  // which copy of the partial sums of delta
  float dk[D / 2], dv[D / 2];
  const auto release = [&](std::uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  const auto next_tile = [&] {
    release(empty + 8 * queries.stage);
    queries.next();
  };
  // One tile of 64 queries: dV and dK are issued, not waited for; dS^T stands at `ds`. kBehind:
  // those of the tile before still run, and its stage is let go here.
  const auto meet = [&]<bool kBehind>(std::uint32_t k_tile, std::uint32_t ds, bool first, std::bool_constant<kBehind>) {
    const std::uint32_t before = empty + 8 * queries.stage;
    if constexpr (kBehind) queries.next();
    float s[32], t[32];
    const std::uint32_t v_tile = k_tile + M::kKeyBytes,
                        q_tile = ring + static_cast<std::uint32_t>(queries.stage) * 2 * M::kQueryBytes,
                        d_o_tile = q_tile + M::kQueryBytes;
    const std::uint32_t row_bytes = static_cast<std::uint32_t>(queries.stage) * M::kRowBytes;
    barrier_wait(full + 8 * queries.stage, queries.parity);
    fence_for_wgmma();
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      wgmma<0, 0>(s, operand(k_tile + key_rows, along_columns(k, M::kKeyPanel), 0),
                  operand(q_tile, along_columns(k, M::kQueryPanel), 0), k > 0);
    wgmma_commit();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      wgmma<0, 0>(t, operand(v_tile + key_rows, along_columns(k, M::kKeyPanel), 0),
                  operand(d_o_tile, along_columns(k, M::kQueryPanel), 0), k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    settle(s);
    if constexpr (kBehind) {
      settle(dv);
      settle(dk);
      release(before);
    }
    const std::uint32_t column = static_cast<std::uint32_t>(quad) * 8;  // bytes: a lane has two queries of every eight
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float2 l = load_shared_pair(lse_rows + row_bytes + static_cast<std::uint32_t>(c) * 32 + column);
      const float l0 = l.x * kLog2e, l1 = l.y * kLog2e;
      s[4 * c] = exp2_fast(fmaf(s[4 * c], p.scale_log2, -l0)),
            s[4 * c + 1] = exp2_fast(fmaf(s[4 * c + 1], p.scale_log2, -l1));
      s[4 * c + 2] = exp2_fast(fmaf(s[4 * c + 2], p.scale_log2, -l0)),
                s[4 * c + 3] = exp2_fast(fmaf(s[4 * c + 3], p.scale_log2, -l1));
    }
    wgmma_wait<0>();
    settle(t);
    std::uint32_t delta_at = delta_rows + row_bytes;
    if constexpr (Inside) {  // sums over the eight lanes that share a pair of queries, halving what a lane
                             // has at each step; then over the eight warps
      const bool b4 = lane & 16, b3 = lane & 8, b2 = lane & 4;
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
      const std::uint32_t part = base + M::part + turn * 8 * M::kRowBytes,
                          total = base + M::total + static_cast<std::uint32_t>(all_warp) * M::kRowBytes;
      const std::uint32_t at_lane = static_cast<std::uint32_t>(lane) * 8;
      store_shared_pair(part + static_cast<std::uint32_t>(all_warp) * M::kRowBytes + at_lane, z[0], z[1]);
      named_sync(kDeltaBarrier, kBothGroups);
      float a = 0, b = 0;
#pragma unroll
      for (std::uint32_t w = 0; w < 8; ++w) {
        const float2 u = load_shared_pair(part + w * M::kRowBytes + at_lane);
        a += u.x, b += u.y;
      }
      store_shared_pair(total + at_lane, a, b);
      __syncwarp();
      delta_at = total;
      turn ^= 1;
    }
    std::uint32_t a[4][4], b[4][4];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float2 d = load_shared_pair(delta_at + static_cast<std::uint32_t>(c) * 32 + column);
      t[4 * c] = s[4 * c] * (t[4 * c] - d.x), t[4 * c + 1] = s[4 * c + 1] * (t[4 * c + 1] - d.y);
      t[4 * c + 2] = s[4 * c + 2] * (t[4 * c + 2] - d.x), t[4 * c + 3] = s[4 * c + 3] * (t[4 * c + 3] - d.y);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int x = 0; x < 4; ++x)
        a[k][x] = pack_bf16(s[8 * k + 2 * x], s[8 * k + 2 * x + 1]),
        b[k][x] = pack_bf16(t[8 * k + 2 * x], t[8 * k + 2 * x + 1]);
      store_matrix(ds + swizzled(static_cast<std::uint32_t>(half * 64 + warp * 16 + lane % 16),
                                 static_cast<std::uint32_t>(2 * k + lane / 16)),
                   b[k][0], b[k][1], b[k][2], b[k][3]);
    }
    fence_for_wgmma();
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma<1>(dv, a[k], operand(d_o_tile, along_rows(k), M::kQueryPanel), k > 0 ? 1 : !first);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<1>(dk, b[k], operand(q_tile, along_rows(k), M::kQueryPanel), k > 0 ? 1 : !first);
    wgmma_commit();
  };
  const auto finish_tile = [&] {
    wgmma_wait<0>();
    settle(dv);
    settle(dk);
    next_tile();
  };
  const auto next_keys = [&] {
    release(kv_empty + 8 * kv.stage);
    kv.next();
  };
  for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
    const Item x = item_of(p, i);
    const auto query_row = [&](int query) {
      return p.dq + x.batch * p.dq_rows.batch + static_cast<std::int64_t>(x.head) * p.dq_rows.head +
             static_cast<std::int64_t>(__ldg(p.q_token + x.group * p.queries + query)) * p.dq_rows.token;
    };
    const auto store_keys = [&](int first) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = __ldg(p.k_token + x.group * p.keys + first + half * 64 + warp * 16 + lane / 4 + 8 * h);
        const std::int64_t to = x.batch * p.dk_rows.batch + static_cast<std::int64_t>(x.head) * p.dk_rows.head +
                                static_cast<std::int64_t>(token) * p.dk_rows.token;
        store_row<D / 8>(p.dk + to, dk, h, p.scale, quad);
        store_row<D / 8>(p.dv + to, dv, h, 1.0f, quad);
      }
    };
    if constexpr (D == 64) {
      float dq[Passes][32];
#pragma unroll
      for (int pass = 0; pass < Passes; ++pass) {
        const std::uint32_t k_tile = base + static_cast<std::uint32_t>(kv.stage) * 2 * M::kKeyBytes;
        barrier_wait(kv_full + 8 * kv.stage, kv.parity);
        fence_for_wgmma();
        const auto pair = [&](int number,
                              float(&sum)[32]) {  // two tiles of queries; then warpgroup w forms dQ of tile w
          constexpr bool kBehind = Passes == 1;   // with two there are no registers left for it
          if constexpr (kBehind) {
            meet(k_tile, ds_tiles, number == 0, std::false_type{});
            meet(k_tile, ds_tiles + M::kScoreBytes, false, std::true_type{});
          } else {
#pragma unroll 1
            for (int u = 0; u < 2; ++u) {
              meet(k_tile, ds_tiles + static_cast<std::uint32_t>(u) * M::kScoreBytes, number == 0 && u == 0,
                   std::false_type{});
              finish_tile();
            }
          }
          named_sync(kWrittenBarrier, kBothGroups);
          wgmma_begin();
#pragma unroll
          for (int k = 0; k < 8; ++k)
            wgmma<1, 1>(sum, operand(ds_tiles + static_cast<std::uint32_t>(half) * M::kScoreBytes, along_rows(k), 0),
                        operand(k_tile, along_rows(k), 0), k > 0 ? 1 : pass > 0);
          wgmma_commit();
          bf16 *to0 = nullptr, *to1 = nullptr;
          if (pass == Passes - 1) {
            const int query = (2 * number + half) * kQueries + warp * 16 + lane / 4;
            to0 = query_row(query), to1 = query_row(query + 8);
          }
          wgmma_wait<0>();
          settle(sum);
          if constexpr (kBehind) finish_tile();
          if constexpr (!Inside)
            named_sync(kReadBarrier, kBothGroups);  // inside, the next tile's delta barrier says as much
          if (pass == Passes - 1) store_row<8>(to0, sum, 0, p.scale, quad), store_row<8>(to1, sum, 1, p.scale, quad);
        };
        if constexpr (Passes == 1) {
#pragma unroll 1
          for (int number = 0; number < tiles / 2; ++number) pair(number, dq[0]);
        } else {
          pair(0, dq[0]);
          pair(1, dq[1]);
        }
        next_keys();
        store_keys(pass * kTile);
      }
    } else {
      const std::uint32_t k_tile = base + static_cast<std::uint32_t>(kv.stage) * 2 * M::kKeyBytes;
      barrier_wait(kv_full + 8 * kv.stage, kv.parity);
      fence_for_wgmma();
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        meet(k_tile, ds_tiles, tile == 0, std::false_type{});
        named_sync(kWrittenBarrier, kBothGroups);
        float sum[32];  // dQ of 64 queries, this warpgroup's half of the columns
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 8; ++k)
          wgmma<1, 1>(sum, operand(ds_tiles, along_rows(k), 0),
                      operand(k_tile + static_cast<std::uint32_t>(half) * M::kKeyPanel, along_rows(k), 0), k > 0);
        wgmma_commit();
        const int query = tile * kQueries + warp * 16 + lane / 4;
        bf16 *const to0 = query_row(query) + half * 64, *const to1 = query_row(query + 8) + half * 64;
        wgmma_wait<0>();
        settle(sum);
        finish_tile();
        if constexpr (!Inside) named_sync(kReadBarrier, kBothGroups);
        store_row<8>(to0, sum, 0, p.scale, quad);
        store_row<8>(to1, sum, 1, p.scale, quad);
      }
      next_keys();
      store_keys(0);
    }
  }
}

}  // namespace

void hopper::one_group_backward(Cuda where, const BackwardPass& b, const EqualGroups& g) {
  const AttentionSizes& sizes = b.sizes;
  const TilingView& view = on_device(*b.tiling, where);
  const auto rows_of = [](const Output& x) { return operand_of({nullptr, x.batch, x.token, x.head}); };
  Backward p{};
  p.q = operand_of(b.q.rows<const bf16>()), p.k = operand_of(b.k.rows<const bf16>()),
  p.o = operand_of(b.o.rows<const bf16>()), p.d_o = operand_of(b.d_o.rows<const bf16>());
  p.v = static_cast<const bf16*>(b.v.data);
  p.dq = static_cast<bf16*>(b.dq.data), p.dk = static_cast<bf16*>(b.dk.data), p.dv = static_cast<bf16*>(b.dv.data);
  p.dq_rows = rows_of(b.dq), p.dk_rows = rows_of(b.dk);
  p.lse = static_cast<const float*>(b.lse), p.q_token = view.q_token.data(), p.k_token = view.k_token.data();
  p.length = static_cast<int>(sizes.length), p.heads = static_cast<int>(sizes.heads);
  p.queries = static_cast<int>(g.queries), p.keys = static_cast<int>(g.keys),
  p.items = static_cast<int>(sizes.batch * b.n_heads * g.groups);
  p.scale = static_cast<float>(sizes.scale), p.scale_log2 = p.scale * kLog2e;
  p.n_heads = Divisor(static_cast<std::uint32_t>(b.n_heads)), p.groups = Divisor(static_cast<std::uint32_t>(g.groups));
  for (Index i = 0; i < b.n_heads; ++i) p.head[i] = static_cast<std::int16_t>(b.heads[i]);
  const int blocks = std::min(properties(where.device).multiprocessors, p.items);
  const auto run = [&](auto kernel, std::size_t shared) {
    launch("attention", where, kernel, dim3(static_cast<unsigned>(blocks)), kThreads, shared, p);
  };
  constexpr std::size_t kMostShared = 227 << 10;
  static_assert(Layout<128, 1, true, 2>::size <= kMostShared && Layout<64, 2, false, 4>::size <= kMostShared);
  if (sizes.dim == 128) run(segment_backward_kernel<128, 1, true, 2>, Layout<128, 1, true, 2>::size);
  else if (g.keys == kTile) run(segment_backward_kernel<64, 1, true, 4>, Layout<64, 1, true, 4>::size);
  else run(segment_backward_kernel<64, 2, false, 4>, Layout<64, 2, false, 4>::size);
}

}  // namespace hilt::kernels
