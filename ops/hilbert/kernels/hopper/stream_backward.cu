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
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(registers_fit(kThreads, kProducerRegisters, kConsumerRegisters));

/// Two operands whose rows stand beside each other: (K, V) or (Q, dO), and the list of their
/// tokens.
struct Pair {
  Operand a, b;
  const std::int32_t* token;
  int rows;  // of a group
};

struct Pass : Work {
  Pair own, stream;
  void *to_a, *to_b;  // gradients of what is owned, bf16 or, with kAdds, f32; dQ alone for queries
  Operand to;
  const float *lse, *delta;  // [B, H, L]
};

template <int D> struct Layout {
  static constexpr int kStages = D == 64 ? 6 : 3;
  using Own = Tile<D, kTile>;
  using Stream = Tile<D, kStream>;
  using OwnRing = Ring<2, 2 * Own::kBytes>;
  using StreamRing = Ring<kStages, 2 * Stream::kBytes>;
  static constexpr std::uint32_t kRowBytes = kStream * 4;  // of a statistic
  static constexpr std::uint32_t own = 0, stream = own + OwnRing::kBytes, lse = stream + StreamRing::kBytes,
                                 delta = lse + kStages * kRowBytes, barriers = delta + kStages * kRowBytes,
                                 size = barriers + OwnRing::kBarriers + StreamRing::kBarriers;
};
template <int D> struct Rings {
  using M = Layout<D>;
  const std::uint32_t base;
  typename M::OwnRing own;
  typename M::StreamRing stream;
  __device__ Rings(std::uint32_t at, bool loads)
      : base(at),
        own(base + M::own, base + M::barriers, loads),
        stream(base + M::stream, own.barriers + M::OwnRing::kBarriers, loads) {}
  __device__ std::uint32_t lse() const { return stream.row(base + M::lse, M::kRowBytes); }
  __device__ std::uint32_t delta() const { return stream.row(base + M::delta, M::kRowBytes); }
};

/// The streamed tile number `tile` of an item: where its rows begin in their list, and whether
/// pairs are masked.
struct Streamed {
  int row;
  bool partial;
};
template <bool kKeys, bool kLists>
__device__ __forceinline__ Streamed streamed(const Pass& p, const Item& x, int tile) {
  if constexpr (!kLists) return {x.group * p.stream.rows + tile * kStream, false};
  const Visit v = p.visit<kKeys, kLists>(x, tile / (kTile / kStream));
  return {v.tile * kTile + tile % (kTile / kStream) * kStream, v.partial};
}

// ---- loads

/// The tile that a block owns.
template <int D>
__device__ __forceinline__ void load_owned(const Pass& p, const Item& x, const Gather& gather, Rings<D>& to) {
  const bf16* const a = p.own.a.at(x.batch, x.head) + gather.chunk * 8;
  const bf16* const b = p.own.b.at(x.batch, x.head) + gather.chunk * 8;
  const std::int32_t* const list = p.own.token + x.group * p.own.rows + x.tile * kTile + gather.row;
  to.own.wait_empty();
#pragma unroll 4
  for (int i = 0; i < kTile / 16; ++i) {
    const std::int64_t token = __ldg(list + 16 * i);
    gather.copy<typename Layout<D>::Own>(to.own.tile(), i, a + token * p.own.a.token, b + token * p.own.b.token);
  }
  arrive_when_landed(to.own.full());
  to.own.next();
}

/// The tiles that stream by, and of queries L and Delta.
template <int D, bool kKeys, bool kLists>
__device__ __forceinline__ void load_stream(const Pass& p, const Item& x, const Gather& gather, Rings<D>& to) {
  const int thread = static_cast<int>(threadIdx.x);
  const bf16* const a = p.stream.a.at(x.batch, x.head) + gather.chunk * 8;
  const bf16* const b = p.stream.b.at(x.batch, x.head) + gather.chunk * 8;
  const std::int64_t statistics = p.row(x) * p.length;
  for (int tile = 0; tile < x.visits * (kTile / kStream); ++tile) {
    const std::int32_t* const list = p.stream.token + streamed<kKeys, kLists>(p, x, tile).row;
    int token[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) token[i] = __ldg(list + gather.row + 16 * i);
    const int own_token = kKeys && thread < kStream ? __ldg(list + thread) : 0;
    to.stream.wait_empty();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      gather.copy<typename Layout<D>::Stream>(to.stream.tile(), i,
                                              a + static_cast<std::int64_t>(token[i]) * p.stream.a.token,
                                              b + static_cast<std::int64_t>(token[i]) * p.stream.b.token);
    if (kKeys && thread < kStream) {
      copy_4(to.lse() + static_cast<std::uint32_t>(thread) * 4, p.lse + statistics + own_token);
      copy_4(to.delta() + static_cast<std::uint32_t>(thread) * 4, p.delta + statistics + own_token);
    }
    arrive_when_landed(to.stream.full());
    to.stream.next();
  }
}

// ---- multiplies

/// Adds to da and db (sums for the first and second of the owned pair) what the streamed tile of
/// this stage gives; lse and delta: of owned queries.
template <int D, bool kKeys, bool kLists, int N>
__device__ __forceinline__ void accumulate(const Pass& p, const Item& x, int tile, const Place& at,
                                           const Rings<D>& from, const ByRow& lse, const ByRow& delta,
                                           float (&da)[D / 2], float (&db)[N], bool& finite) {
  using Own = typename Layout<D>::Own;
  using Stream = typename Layout<D>::Stream;
  float s[32], t[32];
  const std::uint32_t own = from.own.tile() + at.rows(), a = from.stream.tile(), b = a + Stream::kBytes;
  from.stream.wait_full();
  wgmma_begin();
  multiply_rows<Own, Stream>(s, own, a);
  wgmma_commit();
  multiply_rows<Own, Stream>(t, own + Own::kBytes, b);
  wgmma_commit();
  wgmma_wait<1>();
  settle(s);
  const auto of = [&](std::uint32_t streamed, const ByRow& owned) {
    if constexpr (kKeys) return ByColumn{streamed + static_cast<std::uint32_t>(at.quad()) * 8};
    else return owned;
  };
  for_scores(of(from.lse(), lse), [&](int i, float l) { s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -(l * kLog2e))); });
  wgmma_wait<0>();
  settle(t);
  for_scores(of(from.delta(), delta), [&](int i, float d) { t[i] = s[i] * (t[i] - d); });
  if constexpr (kLists) {
    const Streamed now = streamed<kKeys, kLists>(p, x, tile);
    if (now.partial) {
      const int first_row = x.tile * kTile + at.row, first_column = now.row + at.quad() * 2;
      mask<!kKeys>(p.lists, first_row, first_column, 0.0f, s, t);
      const int share = static_cast<int>(threadIdx.x) - kWarpgroup;
      finite = rows_are_finite<D>(a, Stream::kPanel, share, kMultiplying) && finite;
      finite = rows_are_finite<D>(b, Stream::kPanel, share, kMultiplying) && finite;
    }
  }
  std::uint32_t weights[4][4], slopes[4][4];
  if constexpr (kKeys) pack(weights, s);
  pack(slopes, t);
  wgmma_begin();
  if constexpr (kKeys) multiply<Stream>(db, weights, b, tile > 0);
  multiply<Stream>(da, slopes, a, tile > 0);
  wgmma_commit();
  wgmma_wait<0>();
  settle(da);
  if constexpr (kKeys) settle(db);
  from.stream.release();
}

/// The gradients of what is owned.
template <int D, bool kKeys, bool kAdds, int N>
__device__ __forceinline__ void store(const Pass& p, const Item& x, const Place& at, const int (&token)[2],
                                      const float (&da)[D / 2], const float (&db)[N], bool finite) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int64_t to = p.to.offset(x.batch, x.head, token[h]);
    if constexpr (kAdds) {
      if (!finite) continue;
      merge_row<D / 8>(static_cast<float*>(p.to_a) + to, da, h, p.scale, 1.0f, at.quad());
      if constexpr (kKeys) merge_row<D / 8>(static_cast<float*>(p.to_b) + to, db, h, 1.0f, 1.0f, at.quad());
    } else {
      store_row<D / 8>(static_cast<bf16*>(p.to_a) + to, da, h, p.scale, at.quad());
      if constexpr (kKeys) store_row<D / 8>(static_cast<bf16*>(p.to_b) + to, db, h, 1.0f, at.quad());
    }
  }
}

/// kKeys: keys are owned; else queries are.
template <int D, bool kKeys, bool kLists, bool kAdds>
__global__ void __launch_bounds__(kThreads, 1) stream_backward_kernel(const __grid_constant__ Pass p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const int group = warpgroup();
  Rings<D> rings(shared_address(memory), group == 0);
  set_up_barriers(rings.own, rings.stream);
  if (group == 0) {
    fewer_registers<kProducerRegisters>();
    const Gather gather;
    for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
      const Item x = p.item<kKeys, kLists>(i);
      if (kLists && x.visits == 0) continue;
      load_owned<D>(p, x, gather, rings);
      load_stream<D, kKeys, kLists>(p, x, gather, rings);
    }
    return;
  }
  more_registers<kConsumerRegisters>();
  const Place at(group);
  float da[D / 2], db[kKeys ? D / 2 : 1];
  for (int i = static_cast<int>(blockIdx.x); i < p.items; i += static_cast<int>(gridDim.x)) {
    const Item x = p.item<kKeys, kLists>(i);
    if (kAdds && kLists && x.visits == 0) continue;
    bool finite = true;
    int token[2];
    ByRow lse{}, delta{};  // of owned queries
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      token[h] = __ldg(p.own.token + x.group * p.own.rows + x.tile * kTile + at.row + 8 * h);
      if constexpr (!kKeys) {
        const std::int64_t statistics = p.row(x) * p.length + token[h];
        lse.x[h] = __ldg(p.lse + statistics), delta.x[h] = __ldg(p.delta + statistics);
      }
    }
    if (kLists && x.visits == 0) {
#pragma unroll
      for (float& y : da) y = 0;
#pragma unroll
      for (float& y : db) y = 0;
    } else {
      rings.own.wait_full();
    }
#pragma unroll 1
    for (int tile = 0; tile < x.visits * (kTile / kStream); ++tile) {
      accumulate<D, kKeys, kLists>(p, x, tile, at, rings, lse, delta, da, db, finite);
      rings.stream.next();
    }
    if (!kLists || x.visits > 0) {
      rings.own.release();
      rings.own.next();
    }
    if constexpr (kLists) finite = p.mark<kAdds>(x, finite);
    store<D, kKeys, kAdds>(p, x, at, token, da, db, finite);
  }
}

constexpr int kLong = 1024;  // rows that stream by from which on a block is worth starting for one tile

/// The two passes over a tiling: groups of it, or lists.
template <bool kLists> void both_passes(Cuda where, const BackwardPass& b, const EqualGroups& g, const Marks& marks) {
  const TilingView& view = on_device(*b.tiling, where);
  const Pair keys{operand_of(b.k), operand_of(b.v), view.k_token.data(), static_cast<int>(g.keys)};
  const Pair queries{operand_of(b.q), operand_of(b.d_o), view.q_token.data(), static_cast<int>(g.queries)};
  with_type<bf16, float>(b.dq.type, [&]<class O>() {
    constexpr bool kAdds = std::is_same_v<O, float>;
    const auto run = [&](const Pair& own, const Pair& stream, const Output& to_a, void* to_b, std::int32_t* redo,
                         auto kernel, std::size_t shared) {
      Pass p{work_of(where, b, g.groups, own.rows / kTile, stream.rows / kTile)};
      p.own = own, p.stream = stream, p.to_a = to_a.data, p.to_b = to_b, p.to = operand_of(to_a), p.redo = redo;
      p.lse = static_cast<const float*>(b.lse), p.delta = static_cast<const float*>(b.delta);
      // What is added to is a part of an attention that ranks exchange rows between: a block a
      // tile, as in segment_forward.cu.
      start(where, kernel, shared, p, !kAdds || stream.rows < kLong);
    };
    const auto both = [&]<int D>() {
      static_assert(Layout<D>::size <= kMostShared);
      run(keys, queries, b.dk, b.dv.data, marks.keys, stream_backward_kernel<D, true, kLists, kAdds>, Layout<D>::size);
      run(queries, keys, b.dq, nullptr, marks.queries, stream_backward_kernel<D, false, kLists, kAdds>,
          Layout<D>::size);
    };
    b.sizes.dim == 64 ? both.template operator()<64>() : both.template operator()<128>();
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
