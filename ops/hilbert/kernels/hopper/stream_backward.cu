// Attention of long groups on Hopper, backward: groups of more keys than one block can hold. Two
// passes over the scores, so that every sum stays with its owner: nothing is added from two sides,
// and the bits are the same every time.
//
//   keys       a block owns 128 keys (64 a warpgroup), queries stream by in tiles of 64, dO beside Q
//                  S^T = K Q^T     P^T = e^(c S^T - L)     dP^T = V dO^T     dS^T = P^T (dP^T - Delta)
//                  dV += P^T dO    dK += dS^T Q
//   queries    a block owns 128 queries (64 a warpgroup), keys stream by in tiles of 64, V beside K
//                  S = Q K^T       P = e^(c S - L)         dP = dO V^T       dS = P (dP - Delta)
//                  dQ += dS K
//
// Both are one kernel: what a block owns and what streams by are two pairs of rows, (K, V) and (Q,
// dO), and P and dS are operands of the next products right where they were computed. Warpgroup 0
// gathers rows through the lists of tokens. Delta comes from a pass before.
//
// Lists: instead of whole groups, any tiling whose tiles all have 128 rows; partial tiles are
// masked by attends(). Adds: gradients are f32 and there already; every row has one owner, who adds
// to it.
#include "ops/hilbert/kernels/hopper/common.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;

constexpr int kStream = 64;  // streamed rows of a tile
constexpr int kFiniteBarrier = 1;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(registers_fit(kThreads, kProducerRegisters, kConsumerRegisters));

/// Two operands whose rows stand beside each other: (K, V) or (Q, dO), and the list of their
/// tokens.
struct Pair {
  Operand a, b;
  const std::int32_t* token;
  int rows;  // of a group
};

struct Pass {
  Pair own, stream;
  void *to_a, *to_b;  // gradients of what is owned, bf16 or, with kAdds, f32; dQ alone for queries
  Operand to;
  const float *lse, *delta;  // [B, H, L]
  int length, heads, items;
  float scale_log2, scale;
  Divisor tiles, n_heads, groups;
  TilingView lists;    // with kLists
  std::int32_t* redo;  // [batch, heads, owned tiles]: set where the plain kernel has to do a tile again
  std::int16_t head[kHeads];
};

template <int D> struct Layout {
  static constexpr int kOwned = 2;  // owned tiles in flight
  static constexpr int kStages = D == 64 ? 6 : 3;
  static constexpr int kPanels = D / 64;
  static constexpr std::uint32_t kOwnPanel = kTile * kPanelRow, kStreamPanel = kStream * kPanelRow;
  static constexpr std::uint32_t kOwnBytes = kTile * D * 2, kStreamBytes = kStream * D * 2, kRowBytes = kStream * 4;
  static constexpr std::uint32_t own = 0, ring = own + kOwned * 2 * kOwnBytes, lse = ring + kStages * 2 * kStreamBytes,
                                 delta = lse + kStages * kRowBytes, barriers = delta + kStages * kRowBytes,
                                 size = barriers + 8 * (2 * kOwned + 2 * kStages);
};

struct Item {
  int tile, head, group, batch, first, stream_tiles;
};  // first: of the list of tiles it meets
template <bool kKeys, bool kLists> __device__ __forceinline__ Item item_of(const Pass& p, int i) {
  Item x;
  int rest, slot;
  p.tiles.split(i, rest, x.tile);
  x.first = 0, x.stream_tiles = p.stream.rows / kStream;
  if constexpr (kLists) {  // causal ones: the longest first
    if constexpr (!kKeys) x.tile = static_cast<int>(p.tiles.d) - 1 - x.tile;
    const std::int32_t* const begin = (kKeys ? p.lists.queries_begin : p.lists.keys_begin).data() + x.tile;
    x.first = __ldg(begin);
    x.stream_tiles = (__ldg(begin + 1) - x.first) * (kTile / kStream);
  }
  p.n_heads.split(rest, rest, slot);
  p.groups.split(rest, x.batch, x.group);
  x.head = p.head[slot];
  return x;
}

/// The streamed tile number `tile` of an item: where its rows begin in their list, and whether
/// pairs are masked.
struct Streamed {
  int row;
  bool partial;
};
template <bool kKeys, bool kLists>
__device__ __forceinline__ Streamed streamed(const Pass& p, const Item& x, int tile) {
  if constexpr (!kLists) return {x.group * p.stream.rows + tile * kStream, false};
  const Meeting m = meeting(kKeys ? p.lists.queries : p.lists.keys, x.first + tile / (kTile / kStream));
  return {m.tile * kTile + tile % (kTile / kStream) * kStream, m.partial};
}

/// kKeys: keys are owned; else queries are.
template <int D, bool kKeys, bool kLists, bool kAdds>
__global__ void __launch_bounds__(kThreads, 1) stream_backward_kernel(const __grid_constant__ Pass p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  using M = Layout<D>;
  constexpr int kPanels = M::kPanels, kOwned = M::kOwned, kStages = M::kStages;
  const std::uint32_t base = shared_address(memory), ring = base + M::ring, lse_rows = base + M::lse,
                      delta_rows = base + M::delta;
  const std::uint32_t own_full = base + M::barriers, own_empty = own_full + 8 * kOwned, full = own_empty + 8 * kOwned,
                      empty = full + 8 * kStages;
  const int thread = static_cast<int>(threadIdx.x), group = warpgroup();
  if (thread == 0) {
    constexpr int kWarps = 8;  // that release a tile
    for (std::uint32_t i = 0; i < kOwned; ++i)
      barrier_init(own_full + 8 * i, kWarpgroup), barrier_init(own_empty + 8 * i, kWarps);
    for (std::uint32_t i = 0; i < kStages; ++i)
      barrier_init(full + 8 * i, kWarpgroup), barrier_init(empty + 8 * i, kWarps);
    barrier_init_done();
  }
  __syncthreads();

  if (group == 0) {  // ---- loads: eight lanes a row, a lane 16 bytes of every 128
    fewer_registers<kProducerRegisters>();
    const int row = thread / 8, chunk = thread % 8;
    const std::uint32_t at = swizzled(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(chunk));
    Ring<kOwned> own(1);
    Ring<kStages> stream(1);
    for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
      const Item x = item_of<kKeys, kLists>(p, i);
      if (kLists && x.stream_tiles == 0) continue;
      {
        const bf16 *const a = p.own.a.at(x.batch, x.head) + chunk * 8, *const b =
                                                                           p.own.b.at(x.batch, x.head) + chunk * 8;
        const std::int32_t* const list = p.own.token + x.group * p.own.rows + x.tile * kTile + row;
        barrier_wait(own_empty + 8 * own.stage, own.parity);
#pragma unroll 4
        for (int j = 0; j < kTile / 16; ++j) {
          const std::int64_t token = __ldg(list + 16 * j);
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            const std::uint32_t to = base + static_cast<std::uint32_t>(own.stage) * 2 * M::kOwnBytes +
                                     static_cast<std::uint32_t>(panel) * M::kOwnPanel + at +
                                     static_cast<std::uint32_t>(j) * 16 * kPanelRow;
            copy_16(to, a + token * p.own.a.token + panel * 64);
            copy_16(to + M::kOwnBytes, b + token * p.own.b.token + panel * 64);
          }
        }
        arrive_when_landed(own_full + 8 * own.stage);
        own.next();
      }
      const bf16 *const a = p.stream.a.at(x.batch, x.head) + chunk * 8, *const b =
                                                                            p.stream.b.at(x.batch, x.head) + chunk * 8;
      const std::int64_t statistics = (static_cast<std::int64_t>(x.batch) * p.heads + x.head) * p.length;
      for (int tile = 0; tile < x.stream_tiles; ++tile) {
        const std::int32_t* const list = p.stream.token + streamed<kKeys, kLists>(p, x, tile).row;
        int token[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) token[j] = __ldg(list + row + 16 * j);
        const int own_token = kKeys && thread < kStream ? __ldg(list + thread) : 0;
        barrier_wait(empty + 8 * stream.stage, stream.parity);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            const std::uint32_t to = ring + static_cast<std::uint32_t>(stream.stage) * 2 * M::kStreamBytes +
                                     static_cast<std::uint32_t>(panel) * M::kStreamPanel + at +
                                     static_cast<std::uint32_t>(j) * 16 * kPanelRow;
            copy_16(to, a + static_cast<std::int64_t>(token[j]) * p.stream.a.token + panel * 64);
            copy_16(to + M::kStreamBytes, b + static_cast<std::int64_t>(token[j]) * p.stream.b.token + panel * 64);
          }
        if (kKeys && thread < kStream) {
          const std::uint32_t to =
              static_cast<std::uint32_t>(stream.stage) * M::kRowBytes + static_cast<std::uint32_t>(thread) * 4;
          copy_4(lse_rows + to, p.lse + statistics + own_token);
          copy_4(delta_rows + to, p.delta + statistics + own_token);
        }
        arrive_when_landed(full + 8 * stream.stage);
        stream.next();
      }
    }
    return;
  }

  // ---- multiplies
  more_registers<kConsumerRegisters>();
  const int half = group - 1, lane = thread % 32, warp = thread / 32 % 4, quad = lane % 4;
  const std::uint32_t own_rows = static_cast<std::uint32_t>(half) * 64 * kPanelRow;
  Ring<kOwned> own(0);
  Ring<kStages> stream(0);
  float da[D / 2], db[kKeys ? D / 2 : 1];  // sums for the first and second of the owned pair
  const auto release = [&](std::uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
    const Item x = item_of<kKeys, kLists>(p, i);
    if (kAdds && kLists && x.stream_tiles == 0) continue;
    bool finite = true;
    int token[2];
    float lse[2] = {}, delta[2] = {};  // of owned queries
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      token[h] = __ldg(p.own.token + x.group * p.own.rows + x.tile * kTile + half * 64 + warp * 16 + lane / 4 + 8 * h);
      if constexpr (!kKeys) {
        const std::int64_t statistics = (static_cast<std::int64_t>(x.batch) * p.heads + x.head) * p.length + token[h];
        lse[h] = __ldg(p.lse + statistics) * kLog2e, delta[h] = __ldg(p.delta + statistics);
      }
    }
    const std::uint32_t a_tile = base + static_cast<std::uint32_t>(own.stage) * 2 * M::kOwnBytes,
                        b_tile = a_tile + M::kOwnBytes;
    if (kLists && x.stream_tiles == 0) {
#pragma unroll
      for (float& y : da) y = 0;
#pragma unroll
      for (float& y : db) y = 0;
    } else {
      barrier_wait(own_full + 8 * own.stage, own.parity);
      fence_for_wgmma();
    }
#pragma unroll 1
    for (int tile = 0; tile < x.stream_tiles; ++tile) {
      float s[32], t[32];
      const std::uint32_t stream_a = ring + static_cast<std::uint32_t>(stream.stage) * 2 * M::kStreamBytes,
                          stream_b = stream_a + M::kStreamBytes;
      barrier_wait(full + 8 * stream.stage, stream.parity);
      fence_for_wgmma();
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
        wgmma<0, 0>(s, operand(a_tile + own_rows, along_columns(k, M::kOwnPanel), 0),
                    operand(stream_a, along_columns(k, M::kStreamPanel), 0), k > 0);
      wgmma_commit();
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
        wgmma<0, 0>(t, operand(b_tile + own_rows, along_columns(k, M::kOwnPanel), 0),
                    operand(stream_b, along_columns(k, M::kStreamPanel), 0), k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      settle(s);
      const std::uint32_t statistics =
          static_cast<std::uint32_t>(stream.stage) * M::kRowBytes + static_cast<std::uint32_t>(quad) * 8;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float l[2][2];  // by row and column of the four scores
        if constexpr (kKeys) {
          const float2 y = load_shared_pair(lse_rows + statistics + static_cast<std::uint32_t>(c) * 32);
          l[0][0] = l[1][0] = y.x * kLog2e, l[0][1] = l[1][1] = y.y * kLog2e;
        } else {
          l[0][0] = l[0][1] = lse[0], l[1][0] = l[1][1] = lse[1];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            s[4 * c + 2 * h + j] = exp2_fast(fmaf(s[4 * c + 2 * h + j], p.scale_log2, -l[h][j]));
      }
      wgmma_wait<0>();
      settle(t);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float d[2][2];
        if constexpr (kKeys) {
          const float2 y = load_shared_pair(delta_rows + statistics + static_cast<std::uint32_t>(c) * 32);
          d[0][0] = d[1][0] = y.x, d[0][1] = d[1][1] = y.y;
        } else {
          d[0][0] = d[0][1] = delta[0], d[1][0] = d[1][1] = delta[1];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int j = 0; j < 2; ++j) t[4 * c + 2 * h + j] = s[4 * c + 2 * h + j] * (t[4 * c + 2 * h + j] - d[h][j]);
      }
      if constexpr (kLists) {
        const Streamed now = streamed<kKeys, kLists>(p, x, tile);
        if (now.partial) {
          const int first_row = x.tile * kTile + half * 64 + warp * 16 + lane / 4, first_column = now.row + quad * 2;
          mask<!kKeys>(p.lists, first_row, first_column, 0.0f, s);
          mask<!kKeys>(p.lists, first_row, first_column, 0.0f, t);
          const int both = 2 * kWarpgroup, share = thread - kWarpgroup;
          finite = rows_are_finite<D>(stream_a, M::kStreamPanel, share, both) && finite;
          finite = rows_are_finite<D>(stream_b, M::kStreamPanel, share, both) && finite;
        }
      }
      std::uint32_t weights[4][4], slopes[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int y = 0; y < 4; ++y) {
          if constexpr (kKeys) weights[k][y] = pack_bf16(s[8 * k + 2 * y], s[8 * k + 2 * y + 1]);
          slopes[k][y] = pack_bf16(t[8 * k + 2 * y], t[8 * k + 2 * y + 1]);
        }
      wgmma_begin();
      if constexpr (kKeys) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<1>(db, weights[k], operand(stream_b, along_rows(k), M::kStreamPanel), k > 0 ? 1 : tile > 0);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<1>(da, slopes[k], operand(stream_a, along_rows(k), M::kStreamPanel), k > 0 ? 1 : tile > 0);
      wgmma_commit();
      wgmma_wait<0>();
      settle(da);
      if constexpr (kKeys) settle(db);
      release(empty + 8 * stream.stage);
      stream.next();
    }
    if (!kLists || x.stream_tiles > 0) {
      release(own_empty + 8 * own.stage);
      own.next();
    }
    if constexpr (kLists) {
      // A tile is added once, by this kernel or by the plain one: both warpgroups must agree on
      // which.
      if constexpr (kAdds) finite = named_all(kFiniteBarrier, 2 * kWarpgroup, finite);
      const std::int64_t row_of_tiles = static_cast<std::int64_t>(x.batch) * p.heads + x.head;
      if (!finite) p.redo[row_of_tiles * p.tiles.d + x.tile] = 1;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t to = x.batch * p.to.batch + static_cast<std::int64_t>(x.head) * p.to.head +
                              static_cast<std::int64_t>(token[h]) * p.to.token;
      if constexpr (kAdds) {
        if (!finite) continue;
        merge_row<D / 8>(static_cast<float*>(p.to_a) + to, da, h, p.scale, 1.0f, quad);
        if constexpr (kKeys) merge_row<D / 8>(static_cast<float*>(p.to_b) + to, db, h, 1.0f, 1.0f, quad);
      } else {
        store_row<D / 8>(static_cast<bf16*>(p.to_a) + to, da, h, p.scale, quad);
        if constexpr (kKeys) store_row<D / 8>(static_cast<bf16*>(p.to_b) + to, db, h, 1.0f, quad);
      }
    }
  }
}

constexpr int kLong = 1024;  // rows that stream by from which on a block is worth starting for one tile

/// The two passes over a tiling: groups of it, or lists.
template <bool kLists> void both_passes(Cuda where, const BackwardPass& b, const EqualGroups& g, const Marks& marks) {
  const AttentionSizes& sizes = b.sizes;
  const TilingView& view = on_device(*b.tiling, where);
  const auto read = [](const Input& x) { return operand_of(x.rows<const bf16>()); };
  const Pair keys{read(b.k), read(b.v), view.k_token.data(), static_cast<int>(g.keys)};
  const Pair queries{read(b.q), read(b.d_o), view.q_token.data(), static_cast<int>(g.queries)};
  with_type<bf16, float>(b.dq.type, [&]<class O>() {
    constexpr bool kAdds = std::is_same_v<O, float>;
    const auto run = [&](const Pair& own, const Pair& stream, const Output& to_a, void* to_b, std::int32_t* redo,
                         auto kernel, std::size_t shared) {
      Pass p{};
      p.own = own, p.stream = stream, p.to_a = to_a.data, p.to_b = to_b,
      p.to = operand_of({nullptr, to_a.batch, to_a.token, to_a.head});
      p.lse = static_cast<const float*>(b.lse), p.delta = static_cast<const float*>(b.delta);
      p.lists = view, p.redo = redo;
      p.length = static_cast<int>(sizes.length), p.heads = static_cast<int>(sizes.heads);
      p.items = static_cast<int>(sizes.batch * b.n_heads * g.groups) * (own.rows / kTile);
      p.scale = static_cast<float>(sizes.scale), p.scale_log2 = p.scale * kLog2e;
      p.tiles = Divisor(static_cast<std::uint32_t>(own.rows / kTile)),
      p.n_heads = Divisor(static_cast<std::uint32_t>(b.n_heads)),
      p.groups = Divisor(static_cast<std::uint32_t>(g.groups));
      for (Index i = 0; i < b.n_heads; ++i) p.head[i] = static_cast<std::int16_t>(b.heads[i]);
      // What is added to is a part of an attention that ranks exchange rows between: a block a
      // tile, as in segment_forward.cu.
      const bool stays = !kAdds || stream.rows < kLong;
      const int blocks = stays ? std::min(properties(where.device).multiprocessors, p.items) : p.items;
      launch("attention", where, kernel, dim3(static_cast<unsigned>(blocks)), kThreads, shared, p);
    };
    const auto both = [&]<int D>() {
      static_assert(Layout<D>::size <= 227 << 10);
      run(keys, queries, b.dk, b.dv.data, marks.keys, stream_backward_kernel<D, true, kLists, kAdds>, Layout<D>::size);
      run(queries, keys, b.dq, nullptr, marks.queries, stream_backward_kernel<D, false, kLists, kAdds>,
          Layout<D>::size);
    };
    sizes.dim == 64 ? both.template operator()<64>() : both.template operator()<128>();
  });
}

}  // namespace

void hopper::group_backward(Cuda where, const BackwardPass& b, const EqualGroups& g) {
  both_passes<false>(where, b, g, {});
}

void hopper::list_backward(Cuda where, const BackwardPass& b, const Marks& marks) {
  const EqualGroups all{1, kTile * static_cast<Index>(b.tiling->q_tile.size()),
                        kTile * static_cast<Index>(b.tiling->k_tile.size())};
  both_passes<true>(where, b, all, marks);
}

}  // namespace hilt::kernels
