// Segment attention on Hopper, forward: every query of a group meets every key of it.
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
struct ForwardProblem {
  Operand q, k, o;
  const bf16* v;  // with the strides of k
  void* out;      // bf16, or f32 with kMerges
  float* lse;     // [B, H, L]
  bool fresh;     // with kMerges: there is nothing to merge with
  const std::int32_t *q_token, *k_token;
  int length, heads, heads_each;  // heads_each: query heads that share a key head
  int queries, keys;              // of a group
  int key_tiles, items;
  float scale;         // times log2 e
  TilingView lists;    // with kLists
  std::int32_t* redo;  // [batch, heads, query tiles]: set where the plain kernel has to do a tile again
  Divisor query_tiles, n_heads, groups;
  std::int16_t head[kHeads];
};

template <int D> struct Layout {
  static constexpr int kStages = D == 64 ? 4 : 2;
  static constexpr int kPanels = D / 64;
  static constexpr std::uint32_t kBytes = kTile * D * 2;  // of a tile
  static constexpr std::uint32_t kPanel = kTile * kPanelRow;
  static constexpr std::uint32_t kStaging = 16 * staging_pitch(D / 8);  // of a warp
  static constexpr std::uint32_t q = 0, k = q + kStages * kBytes, v = k + kStages * kBytes,
                                 staging = v + kStages * kBytes, barriers = staging + 8 * kStaging,
                                 size = barriers + 6 * kStages * 8;
};

struct Item {
  int tile, head, group, batch, first, key_tiles;
};  // first: of the list of key tiles
template <bool kLists> __device__ __forceinline__ Item item_of(const ForwardProblem& p, int i) {
  Item x;
  int rest, slot;
  p.query_tiles.split(i, rest, x.tile);
  if constexpr (kLists)
    x.tile =
        static_cast<int>(p.query_tiles.d) - 1 - x.tile;  // causal ones have the most keys at the end: longest first
  x.first = kLists ? __ldg(p.lists.keys_begin.data() + x.tile) : 0;
  x.key_tiles = kLists ? __ldg(p.lists.keys_begin.data() + x.tile + 1) - x.first : p.key_tiles;
  p.n_heads.split(rest, rest, slot);
  p.groups.split(rest, x.batch, x.group);
  x.head = p.head[slot];
  return x;
}

/// Row maxima of one tile of scores against those so far; factor: what sums before it are
/// multiplied with.
__device__ __forceinline__ void raise_maxima(const float (&s)[64], float (&top)[2], float (&factor)[2],
                                             float (&shift)[2], float scale) {
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
__device__ __forceinline__ void exponentiate(float (&s)[64], float (&sum)[2], const float (&factor)[2],
                                             const float (&shift)[2], float scale) {
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
__device__ __forceinline__ void pack(std::uint32_t (&p)[8][4], const float (&s)[64]) {
#pragma unroll
  for (int k = 0; k < 8; ++k)
#pragma unroll
    for (int x = 0; x < 4; ++x) p[k][x] = pack_bf16(s[8 * k + 2 * x], s[8 * k + 2 * x + 1]);
}
template <int N> __device__ __forceinline__ void rescale(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int c = 0; c < N / 4; ++c)
    o[4 * c] *= factor[0], o[4 * c + 1] *= factor[0], o[4 * c + 2] *= factor[1], o[4 * c + 3] *= factor[1];
}

template <int D, bool kAhead, bool kTurns, bool kLists, bool kMerges>
__global__ void __launch_bounds__(kThreads, 1) segment_forward_kernel(const __grid_constant__ ForwardProblem p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  using M = Layout<D>;
  constexpr int kStages = M::kStages;
  const std::uint32_t base = shared_address(memory), q_tiles = base + M::q, k_tiles = base + M::k,
                      v_tiles = base + M::v;
  const std::uint32_t q_full = base + M::barriers, q_empty = q_full + 8 * kStages, k_full = q_empty + 8 * kStages,
                      k_empty = k_full + 8 * kStages, v_full = k_empty + 8 * kStages, v_empty = v_full + 8 * kStages;
  const int thread = static_cast<int>(threadIdx.x), group = warpgroup();
  if (thread == 0) {
    constexpr int kWarps = 8;  // that release a tile
    for (std::uint32_t i = 0; i < kStages; ++i) {
      for (std::uint32_t full : {q_full, k_full, v_full}) barrier_init(full + 8 * i, kWarpgroup);
      for (std::uint32_t empty : {q_empty, k_empty, v_empty}) barrier_init(empty + 8 * i, kWarps);
    }
    barrier_init_done();
  }
  __syncthreads();

  if (group == 0) {  // ---- loads
    fewer_registers<kProducerRegisters>();
    Ring<kStages> q_ring(1), k_ring(1);  // waits for "empty" pass at once in the first round
    constexpr int kRows = kTile / 16;    // a thread's, of every tile: eight threads share a row
    const int row = thread / 8, chunk = thread % 8;
    const std::uint32_t at = swizzled(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(chunk));
    const auto tokens = [&](int(&t)[kRows], const std::int32_t* list) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) t[i] = __ldg(list + row + 16 * i);
    };
    const auto gather = [&](const bf16* from, int stride, const int(&t)[kRows], std::uint32_t to) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bf16* const line = from + static_cast<std::int64_t>(t[i]) * stride;
#pragma unroll
        for (std::uint32_t panel = 0; panel < M::kPanels; ++panel)
          copy_16(to + panel * M::kPanel + at + static_cast<std::uint32_t>(i) * 16 * kPanelRow, line + panel * 64);
      }
    };
    for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
      const Item x = item_of<kLists>(p, i);
      if (kLists && x.key_tiles == 0) continue;
      int t[kRows];
      tokens(t, p.q_token + x.group * p.queries + x.tile * kTile);
      barrier_wait(q_empty + 8 * q_ring.stage, q_ring.parity);
      gather(p.q.at(x.batch, x.head) + chunk * 8, p.q.token, t,
             q_tiles + static_cast<std::uint32_t>(q_ring.stage) * M::kBytes);
      arrive_when_landed(q_full + 8 * q_ring.stage);
      q_ring.next();
      const std::int64_t kv =
          x.batch * p.k.batch + static_cast<std::int64_t>(x.head / p.heads_each) * p.k.head + chunk * 8;
      const std::int32_t* const list = p.k_token + x.group * p.keys;
      for (int j = 0; j < x.key_tiles; ++j) {
        tokens(t, list + (kLists ? meeting(p.lists.keys, x.first + j).tile : j) * kTile);
        barrier_wait(k_empty + 8 * k_ring.stage, k_ring.parity);
        gather(p.k.data + kv, p.k.token, t, k_tiles + static_cast<std::uint32_t>(k_ring.stage) * M::kBytes);
        arrive_when_landed(k_full + 8 * k_ring.stage);
        barrier_wait(v_empty + 8 * k_ring.stage, k_ring.parity);
        gather(p.v + kv, p.k.token, t, v_tiles + static_cast<std::uint32_t>(k_ring.stage) * M::kBytes);
        arrive_when_landed(v_full + 8 * k_ring.stage);
        k_ring.next();
      }
    }
    return;
  }

  // ---- multiplies
  more_registers<kConsumerRegisters>();
  const int half = group - 1, lane = thread % 32, warp = thread / 32 % 4;  // half: which 64 queries
  const int row = half * 64 + warp * 16 + lane / 4;
  Ring<kStages> q_ring(0), k_ring(0);
  float s[64], o[D / 2];
  std::uint32_t a[8][4];
  const auto landed = [&](std::uint32_t full, int stage, std::uint32_t parity) {
    barrier_wait(full + 8 * stage, parity);
    fence_for_wgmma();
  };
  const auto release = [&](std::uint32_t empty, int stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * stage);
  };
  const auto multiply_qk = [&](int stage) {
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      wgmma<0, 0>(s,
                  operand(q_tiles + static_cast<std::uint32_t>(q_ring.stage) * M::kBytes +
                              static_cast<std::uint32_t>(half) * 64 * kPanelRow,
                          along_columns(k, M::kPanel), 0),
                  operand(k_tiles + static_cast<std::uint32_t>(stage) * M::kBytes, along_columns(k, M::kPanel), 0),
                  k > 0);
    wgmma_commit();
  };
  const auto multiply_pv = [&](int stage, int accumulate) {
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k)
      wgmma<1>(o, a[k], operand(v_tiles + static_cast<std::uint32_t>(stage) * M::kBytes, along_rows(k), M::kPanel),
               k > 0 ? 1 : accumulate);
    wgmma_commit();
  };
  constexpr int kBoth = 2 * kWarpgroup, kFiniteBarrier = 3;  // 1 and 2: turns
  const auto my_turn = [&] {
    if constexpr (kTurns) named_sync(1 + half, kBoth);
  };
  const auto your_turn = [&] {
    if constexpr (kTurns) named_arrive(1 + (half ^ 1), kBoth);
  };
  if (kTurns && half == 1) named_arrive(1, kBoth);  // the first warpgroup begins

  for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
    const Item x = item_of<kLists>(p, i);
    int token[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) token[h] = __ldg(p.q_token + x.group * p.queries + x.tile * kTile + row + 8 * h);
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, factor[2], shift[2];
    bool finite = true;
    // Scores of the j-th key tile: what does not attend is taken out.
    const auto take_out = [&](int j) {
      if constexpr (kLists) {
        const Meeting m = meeting(p.lists.keys, x.first + j);
        if (m.partial) mask<true>(p.lists, x.tile * kTile + row, m.tile * kTile + lane % 4 * 2, -INFINITY, s);
      }
    };
    const auto look_at_values = [&](int j, int stage) {  // each warpgroup at half of the rows
      if constexpr (kLists)
        if (meeting(p.lists.keys, x.first + j).partial)
          finite = rows_are_finite<D>(v_tiles + static_cast<std::uint32_t>(stage) * M::kBytes +
                                          static_cast<std::uint32_t>(half) * 64 * kPanelRow,
                                      M::kPanel, thread % kWarpgroup, kWarpgroup) &&
                   finite;
    };
    if (kLists && x.key_tiles == 0) {
#pragma unroll
      for (float& y : o) y = 0;
    } else {
      landed(q_full, q_ring.stage, q_ring.parity);
      if constexpr (!kAhead) {
        for (int j = 0; j < x.key_tiles; ++j) {
          landed(k_full, k_ring.stage, k_ring.parity);
          multiply_qk(k_ring.stage);
          wgmma_wait<0>();
          settle(s);
          release(k_empty, k_ring.stage);
          if (j == x.key_tiles - 1) release(q_empty, q_ring.stage);
          take_out(j);
          raise_maxima(s, top, factor, shift, p.scale);
          my_turn();
          exponentiate(s, sum, factor, shift, p.scale);
          if (j > 0) rescale(o, factor);
          your_turn();
          pack(a, s);
          landed(v_full, k_ring.stage, k_ring.parity);
          multiply_pv(k_ring.stage, j > 0);
          look_at_values(j, k_ring.stage);
          wgmma_wait<0>();
          settle(o);
          release(v_empty, k_ring.stage);
          k_ring.next();
        }
      } else {
        landed(k_full, k_ring.stage, k_ring.parity);
        my_turn();
        multiply_qk(k_ring.stage);
        your_turn();
        wgmma_wait<0>();
        settle(s);
        release(k_empty, k_ring.stage);
        take_out(0);
        raise_maxima(s, top, factor, shift, p.scale);
        exponentiate(s, sum, factor, shift, p.scale);
        pack(a, s);
        for (int j = 1; j < x.key_tiles; ++j) {
          Ring<kStages> ahead = k_ring;
          ahead.next();
          landed(k_full, ahead.stage, ahead.parity);
          my_turn();
          multiply_qk(ahead.stage);
          landed(v_full, k_ring.stage, k_ring.parity);
          multiply_pv(k_ring.stage, j > 1);
          your_turn();
          wgmma_wait<1>();
          settle(s);
          release(k_empty, ahead.stage);
          look_at_values(j - 1, k_ring.stage);
          take_out(j);
          raise_maxima(s, top, factor, shift, p.scale);
          exponentiate(s, sum, factor, shift, p.scale);
          wgmma_wait<0>();
          settle(o);
          settle(s);  // nothing is packed above the wait, or two copies of P would be alive
          release(v_empty, k_ring.stage);
          pack(a, s);
          rescale(o, factor);
          k_ring = ahead;
        }
        release(q_empty, q_ring.stage);
        landed(v_full, k_ring.stage, k_ring.parity);
        multiply_pv(k_ring.stage, x.key_tiles > 1);
        look_at_values(x.key_tiles - 1, k_ring.stage);
        wgmma_wait<0>();
        settle(o);
        release(v_empty, k_ring.stage);
        k_ring.next();
      }
      q_ring.next();
    }
    if constexpr (kLists) {
      // A tile is merged once, by this kernel or by the plain one: both warpgroups must agree on
      // which.
      if constexpr (kMerges) finite = named_all(kFiniteBarrier, kBoth, finite);
      const std::int64_t row_of_tiles = static_cast<std::int64_t>(x.batch) * p.heads + x.head;
      if (!finite) p.redo[row_of_tiles * p.query_tiles.d + x.tile] = 1;
    }
    const bool writes = !kMerges || !kLists || (finite && (p.fresh || x.key_tiles > 0));
    float* const lse = p.lse + (static_cast<std::int64_t>(x.batch) * p.heads + x.head) * p.length;
    const std::int64_t out = x.batch * p.o.batch + static_cast<std::int64_t>(x.head) * p.o.head;
    float share[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      share[h] = kLists && total == 0 ? 0.0f : 1.0f / total;
      float l = (top[h] * p.scale + log2_fast(total)) * kLn2;
      if constexpr (kMerges) {
        float keep = 0;
        if (!p.fresh) l = merged(lse[token[h]], l, keep, share[h]);
        __syncwarp();  // all four lanes of a row have read
        if (writes)
          merge_row<D / 8>(static_cast<float*>(p.out) + out + static_cast<std::int64_t>(token[h]) * p.o.token, o, h,
                           share[h], keep, lane % 4);
      }
      if (lane % 4 == 0 && writes) lse[token[h]] = l;
    }
    if constexpr (kMerges) continue;
    const int low = __shfl_sync(~0u, token[0], lane % 8 * 4), high = __shfl_sync(~0u, token[1], lane % 8 * 4);
    store_rows<D / 8>(base + M::staging + static_cast<std::uint32_t>(half * 4 + warp) * M::kStaging, o, share[0],
                      share[1], static_cast<bf16*>(p.out) + out,
                      static_cast<std::int64_t>(lane % 16 < 8 ? low : high) * p.o.token);
  }
  if (kTurns && half == 0) named_sync(1, kBoth);
}

ForwardProblem problem(Cuda where, const ForwardPass& f) {
  const TilingView& view = on_device(*f.tiling, where);
  ForwardProblem p{};
  p.q = operand_of(f.q.rows<const bf16>()), p.k = operand_of(f.k.rows<const bf16>());
  p.v = static_cast<const bf16*>(f.v.data);
  p.o = operand_of({nullptr, f.o.batch, f.o.token, f.o.head});
  p.out = f.o.data, p.lse = static_cast<float*>(f.lse), p.fresh = f.fresh;
  p.q_token = view.q_token.data(), p.k_token = view.k_token.data();
  p.length = static_cast<int>(f.sizes.length), p.heads = static_cast<int>(f.sizes.heads),
  p.heads_each = static_cast<int>(f.sizes.heads / f.sizes.kv_heads);
  p.scale = static_cast<float>(f.sizes.scale) * kLog2e;
  p.n_heads = Divisor(static_cast<std::uint32_t>(f.n_heads));
  for (Index i = 0; i < f.n_heads; ++i) p.head[i] = static_cast<std::int16_t>(f.heads[i]);
  return p;
}

template <bool kLists> void run(Cuda where, const ForwardPass& f, const ForwardProblem& p, bool ahead) {
  with_type<bf16, float>(f.o.type, [&]<class O>() {
    constexpr bool kMerges = std::is_same_v<O, float>;
    // Parts of one attention are what ranks exchange rows between. With a block a tile, copies get
    // in wherever one ends, and uneven tiles are shared out as blocks end; leaving multiprocessors
    // free was slower.
    const bool stays = !kMerges || !ahead;
    const dim3 blocks(
        static_cast<unsigned>(stays ? std::min(properties(where.device).multiprocessors, p.items) : p.items));
    const auto start = [&](auto kernel, std::size_t shared) {
      launch("attention", where, kernel, blocks, kThreads, shared, p);
    };
    if (f.sizes.dim == 64)
      ahead ? start(segment_forward_kernel<64, true, true, kLists, kMerges>, Layout<64>::size)
            : start(segment_forward_kernel<64, false, false, kLists, kMerges>, Layout<64>::size);
    else
      ahead ? start(segment_forward_kernel<128, true, false, kLists, kMerges>, Layout<128>::size)
            : start(segment_forward_kernel<128, false, false, kLists, kMerges>, Layout<128>::size);
  });
}

constexpr int kLong = 8;  // key tiles from which on working ahead pays

}  // namespace

void hopper::group_forward(Cuda where, const ForwardPass& f, const EqualGroups& g) {
  ForwardProblem p = problem(where, f);
  p.queries = static_cast<int>(g.queries), p.keys = static_cast<int>(g.keys),
  p.key_tiles = static_cast<int>(g.keys / kTile);
  p.items = static_cast<int>(f.sizes.batch * f.n_heads * g.groups * (g.queries / kTile));
  p.query_tiles = Divisor(static_cast<std::uint32_t>(g.queries / kTile)),
  p.groups = Divisor(static_cast<std::uint32_t>(g.groups));
  run<false>(where, f, p, p.key_tiles >= kLong);
}

void hopper::list_forward(Cuda where, const ForwardPass& f, const Marks& marks) {
  ForwardProblem p = problem(where, f);
  const auto tiles = static_cast<Index>(f.tiling->q_tile.size());
  p.lists = on_device(*f.tiling, where), p.redo = marks.queries;
  p.items = static_cast<int>(f.sizes.batch * f.n_heads * tiles);
  p.query_tiles = Divisor(static_cast<std::uint32_t>(tiles)), p.groups = Divisor(1);
  run<true>(where, f, p, static_cast<Index>(f.tiling->keys.size()) >= kLong * tiles);
}

}  // namespace hilt::kernels
