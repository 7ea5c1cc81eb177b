// Attention on Hopper, backward, for any number of keys: two passes over the scores, so that every
// sum stays with its owner. Nothing is added from two sides, and the bits are the same every time.
//
//   keys       a block owns 128 keys (64 a warpgroup), queries stream by in steps of 64, dO after Q
//                  S^T = K Q^T     P^T = e^(c S^T - L)     dP^T = V dO^T     dS^T = P^T (dP^T - Delta)
//                  dV += P^T dO    dK += dS^T Q
//   queries    a block owns 128 queries (64 a warpgroup), keys stream by in steps of 64, V after K
//                  S = Q K^T       P = e^(c S - L)         dP = dO V^T       dS = P (dP - Delta)
//                  dQ += dS K
//
// Both are one kernel: what a block owns and what streams by are two pairs of rows, (K, V) and (Q,
// dO), and P and dS are operands of the next products right where they were computed. Warpgroup 0
// gathers rows through the lists of tokens. Delta comes from a pass before. The query heads that
// share a key head stream by one after the other.
//
// Head dims beyond 128: there are not the registers for dK and dV of one's keys. A block owns 64
// keys (kSplit), one warpgroup sums dK of them, the other dV.
//
// Adds: to f32 sums of passes before, where a row has any; every row has one owner.
#include "ops/hilbert/kernels/hopper/common.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;

/// Two operands whose rows belong together: (K, V) or (Q, dO), and the list of their tokens.
struct Pair {
  Operand a, b;
  std::span<const std::int32_t> token;
};

struct Pass : Work {
  Pair own, stream;
  void *to_a, *to_b;  // gradients of what is owned, of 16 bits or, where `wide`, f32; dQ alone for queries
  Operand to;
  const float *before_a, *before_b;  // with kAdds: the sums so far, or null
  Operand before;
  const std::int32_t* known;  // the owned rows that have any; null: all
  bool wide;
  const float *lse, *delta;  // [B, H, L]
  int heads_each;            // query heads that share a key head
};

template <int D_, bool kKeys_> struct Layout {
  static constexpr int D = D_;
  static constexpr bool kKeys = kKeys_, kSplit = kKeys && D > 128;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static_assert(registers_fit(kThreads, kProducerRegisters, kConsumerRegisters));
  static constexpr int kOwned = kSplit ? kCell : kTile;  // rows
  static constexpr int kStages = D == 64              ? 12
                                 : D <= 128           ? 6
                                 : kSplit || D == 192 ? 5
                                                      : 3;  // a tile of one operand each
  using Own = Tile<D, kOwned>;
  using Stream = Tile<D, kCell>;
  using OwnRing = Ring<D <= 128 || (kSplit && D == 192) ? 2 : 1, 2 * Own::kBytes>;
  using StreamRing = Ring<kStages, Stream::kBytes>;
  using Items = Records<OwnRing::kStages>;
  static constexpr std::uint32_t kRowBytes = kCell * 4;  // of a statistic: L with Q, Delta with dO
  static constexpr std::uint32_t own = 0, stream = own + OwnRing::kBytes, statistic = stream + StreamRing::kBytes,
                                 steps = statistic + kStages * kRowBytes, items = steps + kStages * 32,
                                 turns = items + Items::kBytes, barriers = turns + 8,
                                 size = barriers + OwnRing::kBarriers + StreamRing::kBarriers;
  static_assert(size <= kMostShared);
};
template <class M> struct Rings {
  const std::uint32_t base;
  typename M::OwnRing own;
  typename M::StreamRing stream;
  typename M::Items items;
  __device__ Rings(std::uint32_t at, bool loads)
      : base(at),
        own(base + M::own, base + M::barriers, loads),
        stream(base + M::stream, own.barriers + M::OwnRing::kBarriers, loads),
        items{base + M::items} {}
  /// Both tiles.
  __device__ void wait_for_step() const {
    auto second = stream;
    second.next();
    stream.wait_full();
    second.wait_full();
  }
  __device__ std::uint32_t statistic() const { return stream.row(base + M::statistic, M::kRowBytes); }
  __device__ std::uint32_t step() const { return stream.row(base + M::steps, 32); }
};

/// An item, or with kSplit a half of one, which has no steps where it has no rows.
template <class M> __device__ __forceinline__ Item item_of(const Work& p, int i) {
  Item x = p.item(M::kSplit ? i / 2 : i);
  if constexpr (M::kSplit)
    if (x.half = i % 2; x.half == 1 && x.rows <= kCell) x.steps = 0;
  return x;
}

/// f(head of the other side, whether it is the last) for all that an item meets.
template <bool kKeys, class F> __device__ __forceinline__ void for_heads(const Pass& p, const Item& x, const F& f) {
  if constexpr (kKeys)
    for (int i = x.first_head; i < x.last_head; ++i) f(static_cast<int>(p.query_head[i]), i + 1 == x.last_head);
  else f(x.head / p.heads_each, true);
}

// ---- loads

template <class M> struct Loader {
  const Pass& p;
  Rings<M> to;
  const Gather gather;
  Walk walk;
  const int4* visit = nullptr;    // of the next step
  int owned = -1, streamed = -1;  // tokens of this thread, for what is loaded next
  bool whole = false;             // every row of the next step is there

  __device__ __forceinline__ void fetch_step() {
    const Step step = walk.take();
    streamed = gather.fetch(p.stream.token, step), visit = step.from;
    whole = step.rows == kCell && p.chunks == M::D / 8;
  }
  __device__ __forceinline__ void begin(const Item& x) {
    owned = gather.fetch(p.own.token, x.row + x.half * kCell, x.rows - x.half * kCell);
    walk = Walk(p, x);
    fetch_step();
  }
  __device__ __forceinline__ void run() {
    for_items(
        p, to.base + M::turns, to.items, to.own, [&](int i) { return item_of<M>(p, i); },
        [&](const Item& x) { begin(x); },
        [&](const Item& x, const Item& next) { load_owned(x, next), load_stream(x), begin(next); });
  }
  /// Of an item its own rows.
  __device__ __forceinline__ void load_owned(const Item& x, const Item& next) {
    using Own = typename M::Own;
    to.own.wait_empty();
    to.items.write(next);
    if (x.steps > 0) {
      constexpr int kEach = M::kOwned / 16;
      const std::uint32_t tile = to.own.tile();
      const bool all = x.rows - x.half * kCell >= M::kOwned && p.chunks == M::D / 8;
      gather.copy_held<Own, kEach>(tile, owned, p.own.a.at(x.batch, x.head), p.own.a.token, all);
      gather.copy_held<Own, kEach>(tile + Own::kBytes, owned, p.own.b.at(x.batch, x.head), p.own.b.token, all);
    }
    announce(to.own.full());
    to.own.next();
  }
  /// And the tiles that stream by, with L and Delta of queries.
  __device__ __forceinline__ void load_stream(const Item& x) {
    for_heads<M::kKeys>(p, x, [&](int head, bool last) {
      const std::int64_t statistics = p.row(x.batch, head) * p.length;
      const Half *const a = p.stream.a.at(x.batch, head), *const b = p.stream.b.at(x.batch, head);
      for (int i = 0; i < x.steps; ++i) {
        const int held = streamed;
        const bool its_whole = whole;
        const int4* const its_visit = visit;
        visit = nullptr;
        if (walk.left > 0) fetch_step();
        else if (!last) walk = Walk(p, x), fetch_step();
        const auto copy_tile = [&](const Half* base, int stride, const float* statistic) {
          gather.copy_held<typename M::Stream, 4>(to.stream.tile(), held, base, stride, its_whole);
          if (M::kKeys && gather.mine < kCell)
            copy_4(to.statistic() + static_cast<std::uint32_t>(gather.mine) * 4, statistic + statistics + max(held, 0),
                   held >= 0);
          announce(to.stream.full());
          to.stream.next();
        };
        to.stream.wait_empty();
        if (threadIdx.x < 2) copy_step(to.step() + threadIdx.x * 16, p.side, threadIdx.x == 0 ? its_visit : visit);
        copy_tile(a, p.stream.a.token, p.lse);
        to.stream.wait_empty();
        copy_tile(b, p.stream.b.token, p.delta);
      }
    });
  }
};

// ---- multiplies

/// Adds to da and db (sums for the first and second of the owned pair) what a step gives; lse and
/// delta: of owned queries. kSplit: one of the two sums alone, in da.
template <class E, class M, bool kDrops, int N> struct Accumulate {
  static constexpr int D = M::D;
  using Own = typename M::Own;
  using Stream = typename M::Stream;
  const Pass& p;
  const Place& at;  // kSplit: both warpgroups at the same rows
  const int role;   // kSplit: 0 sums dK, 1 dV
  Rings<M>& from;
  const ByRow &lse, &delta;
  float (&da)[D / 2];
  float (&db)[N];

  __device__ __forceinline__ auto of(std::uint32_t streamed, const ByRow& owned) const {
    if constexpr (M::kKeys) return ByColumn{streamed + static_cast<std::uint32_t>(at.quad()) * 8};
    else return owned;
  }
  __device__ __forceinline__ void skip() const {
    for (int i = 0; i < 2; ++i) from.stream.release(), from.stream.next();
  }
  /// dV of a step: S^T alone.
  __device__ __forceinline__ void values(const Step& step, bool first) const {
    float s[32];
    const std::uint32_t own = from.own.tile(), lse_at = from.statistic();
    const int cell = step.cell(at.half);
    std::uint32_t word = 0;
    if (cell != Visits::kFull) word = word_of(p, step, at);
    wgmma_begin();
    multiply_rows<E, Own, Stream>(s, own, from.stream.tile());
    wgmma_commit();
    wgmma_wait<0>();
    settle(s);
    for_scores(of(lse_at, lse), [&](int i, float l) { s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -(l * kLog2e))); });
    from.stream.release();
    from.stream.next();
    if (cell != Visits::kFull) mask(s, 0, word, 0.0f);
    std::uint32_t weights[4][4];
    pack<E>(weights, s);
    wgmma_begin();
    multiply<E, Stream>(da, weights, from.stream.tile(), !first);
    wgmma_commit();
    wgmma_wait<0>();
    settle(da);
    from.stream.release();
    from.stream.next();
  }
  /// own, row, stream: with kDrops where rows begin, and which head it is.
  template <bool kMasked>
  __device__ __forceinline__ void run(const Step& step, bool first, int own_row, int row, std::uint32_t head) const {
    float s[32], t[32];
    const std::uint32_t own = from.own.tile() + (M::kSplit ? 0 : at.rows());
    std::uint32_t word = 0;
    if constexpr (kMasked) word = word_of(p, step, at);
    const auto stream_a = from.stream;
    const std::uint32_t a = from.stream.tile(), lse_at = from.statistic();
    wgmma_begin();
    multiply_rows<E, Own, Stream>(s, own, a);
    wgmma_commit();
    from.stream.next();
    const std::uint32_t b = from.stream.tile(), delta_at = from.statistic();
    wgmma_begin();
    multiply_rows<E, Own, Stream>(t, own + Own::kBytes, b);
    wgmma_commit();
    std::uint32_t survive = 0;
    if constexpr (kDrops) survive = survivors<!M::kKeys>(p, head, own_row, row, at);
    wgmma_wait<1>();
    settle(s);
    for_scores(of(lse_at, lse), [&](int i, float l) { s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -(l * kLog2e))); });
    wgmma_wait<0>();
    settle(t);
    constexpr bool kBoth = M::kKeys && !M::kSplit;
    if constexpr (!kBoth) from.stream.release();
    if constexpr (kDrops) mask(t, 0, survive, 0.0f);
    for_scores(of(delta_at, delta),
               [&](int i, float d) { t[i] = s[i] * (kDrops ? fmaf(t[i], p.survivor, -d) : t[i] - d); });
    if constexpr (kDrops && kBoth) mask(s, 0, survive, 0.0f);
    if constexpr (kMasked) {
      if constexpr (kBoth) mask(s, 0, word, 0.0f);
      mask(t, 0, word, 0.0f);
    }
    std::uint32_t weights[4][4], slopes[4][4];
    if constexpr (kBoth) pack<E>(weights, s);
    pack<E>(slopes, t);
    wgmma_begin();
    if constexpr (kBoth) multiply<E, Stream>(db, weights, b, !first);
    multiply<E, Stream>(da, slopes, a, !first);
    wgmma_commit();
    wgmma_wait<0>();
    settle(da);
    if constexpr (kBoth) settle(db), from.stream.release();
    stream_a.release();
    from.stream.next();
  }
};

/// Those of a lane's two owned rows; -1 beyond them.
__device__ __forceinline__ void tokens_of(const Pass& p, const Item& x, const Place& at, int (&token)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = at.row + 8 * h;
    token[h] = row < x.rows ? __ldg(p.own.token.data() + x.row + row) : -1;
  }
}
/// The gradients of what is owned; with kSplit one of the two, by role.
template <class E, class M, bool kAdds, int N>
__device__ __forceinline__ void store(const Pass& p, const Item& x, const Place& at, int role, const int (&token)[2],
                                      float (&da)[M::D / 2], float (&db)[N], bool finite) {
  constexpr int kChunks = M::D / 8;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool there = token[h] >= 0 && (!kAdds || finite);
    const std::int64_t to = p.to.offset(x.batch, x.head, max(token[h], 0)),
                       from = kAdds ? p.before.offset(x.batch, x.head, max(token[h], 0)) : 0;
    const bool known = kAdds && there && (!p.known || __ldg(p.known + x.row + at.row + 8 * h) != 0);
    const auto put = [&](void* base, const float* before, auto& sums, float scale) {
      if constexpr (kAdds) {
        add_row<kChunks>(sums, h, scale, before + from, known && before ? 1.0f : 0.0f, at.quad(), p.chunks);
        scale = 1;
        if (p.wide && there) store_wide_row<kChunks>(static_cast<float*>(base) + to, sums, h, at.quad(), p.chunks);
      }
      if (!kAdds || !p.wide)
        store_row<E, kChunks>(there ? static_cast<Half*>(base) + to : nullptr, sums, h, scale, at.quad(), p.chunks);
    };
    if constexpr (M::kSplit)
      put(role == 0 ? p.to_a : p.to_b, role == 0 ? p.before_a : p.before_b, da, role == 0 ? p.scale : 1.0f);
    else put(p.to_a, p.before_a, da, p.scale);
    if constexpr (M::kKeys && !M::kSplit) put(p.to_b, p.before_b, db, p.survivor);
  }
}

template <class E, class M, bool kAdds, bool kDrops>
__global__ void __launch_bounds__(kThreads, 1) stream_backward_kernel(const __grid_constant__ Pass p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  constexpr int D = M::D;
  const int group = warpgroup();
  Rings<M> rings(shared_address(memory), group == 0);
  set_up_barriers(rings.own, rings.stream);
  if (group == 0) {
    fewer_registers<M::kProducerRegisters>();
    Loader<M> loader{p, rings, Gather(p.chunks)};
    loader.run();
    return;
  }
  more_registers<M::kConsumerRegisters>();
  Place at(group);
  const int role = at.half;
  float da[D / 2], db[M::kKeys && !M::kSplit ? D / 2 : 4];
  for (bool more = true; more;) {
    rings.own.wait_full();
    bool first = true;
    {
      const Item x = rings.items.read();
      more = x.number >= 0;
      if constexpr (M::kSplit) at.row += (x.half - at.half) * kCell, at.half = x.half;
      ByRow lse{}, delta{};  // of owned queries
      if constexpr (!M::kKeys) {
        int token[2];
        tokens_of(p, x, at, token);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (token[h] >= 0) {
            const std::int64_t statistics = p.row(x.batch, x.head) * p.length + token[h];
            lse.x[h] = __ldg(p.lse + statistics), delta.x[h] = __ldg(p.delta + statistics);
          }
      }
      const Accumulate<E, M, kDrops, sizeof(db) / 4> accumulate{p, at, role, rings, lse, delta, da, db};
      const int heads = M::kKeys ? x.last_head - x.first_head : 1, own_row = x.row + at.half * kCell;
      StepRow step_row;
      std::uint32_t head = 0;
      std::uint32_t cells = 0;  // of a step, read with the one before
      int slot = x.first_head, in_head = 0;
#pragma unroll 1
      for (int all = heads * x.steps, left = all; left > 0; --left) {
        rings.wait_for_step();
        const std::uint32_t its = rings.step();
        if (left == all) cells = agreed_cells(read_cells(its));
        const Step step = step_of(its, cells, kDrops || Step{0, 0, cells}.cell(at.half) == Visits::kCompare);
        const std::uint32_t ahead = read_cells(its + 16);
        if constexpr (kDrops) {
          if (in_head == 0) {
            step_row = {}, in_head = x.steps;
            head =
                p.first_stream + static_cast<std::uint32_t>(p.row(x.batch, M::kKeys ? p.query_head[slot++] : x.head));
          }
          --in_head, step_row.go_on(step.row);
        }
        const int cell = step.cell(at.half);
        if (cell == Visits::kEmpty) accumulate.skip();
        else if (M::kSplit && role == 1) accumulate.values(step, first);
        else if (cell == Visits::kFull) accumulate.template run<false>(step, first, own_row, step_row.row, head);
        else accumulate.template run<true>(step, first, own_row, step_row.row, head);
        first = first && cell == Visits::kEmpty;
        cells = agreed_cells(ahead);
      }
    }
    rings.own.release();
    rings.own.next();
    if (first) {
#pragma unroll
      for (float& y : da) y = 0;
#pragma unroll
      for (float& y : db) y = 0;
    }
    const Item x = rings.items.read();
    rings.items.next();
    int token[2];
    tokens_of(p, x, at, token);
    bool finite = true;
    if (p.redo) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        finite = finite && (token[h] < 0 || is_finite(da, h));
        if constexpr (M::kKeys && !M::kSplit) finite = finite && (token[h] < 0 || is_finite(db, h));
      }
    }
    finite = p.template mark<M::kSplit>(x, at.half, finite);
    const bool stays = kAdds && p.before_a == p.to_a && first;  // as it was
    if (!stays) store<E, M, kAdds>(p, x, at, role, token, da, db, finite);
  }
}

}  // namespace

/// The two passes over a tiling.
template <class E, int D> void hopper::stream_backward(Cuda where, const BackwardPass& b, const Marks& marks) {
  const TilingView& view = on_device(*b.tiling, where);
  const Pair keys{operand_of(b.k), operand_of(b.v), view.k_token};
  const Pair queries{operand_of(b.q), operand_of(b.d_o), view.q_token};
  const auto run = [&]<class M>(const Pair& own, const Pair& stream, const Output& to_a, void* to_b,
                                const Input& before_a, const void* before_b, std::span<const std::int32_t> known) {
    if (!to_a.data) return;
    for_portions<M::kKeys>(where, b, marks, [&](const Work& work) {
      Pass p{work};
      if (M::kSplit) p.items *= 2;
      p.own = own, p.stream = stream, p.to_a = to_a.data, p.to_b = to_b, p.to = operand_of(to_a);
      p.before_a = static_cast<const float*>(before_a.data), p.before_b = static_cast<const float*>(before_b);
      p.before = operand_of(before_a), p.wide = to_a.type == DType::f32;
      p.known = b.listed && !known.empty() ? known.data() : nullptr;
      p.lse = static_cast<const float*>(b.lse), p.delta = static_cast<const float*>(b.delta);
      p.heads_each = static_cast<int>(b.sizes.heads / b.sizes.kv_heads);
      const auto with = [&](auto kernel) { start(where, kernel, M::size, p, !p.wide || !p.side.busy); };
      const auto adds = [&]<bool kAdds>() {
        if constexpr (D <= 128)
          if (p.drops) return with(stream_backward_kernel<E, M, kAdds, true>);
        with(stream_backward_kernel<E, M, kAdds, false>);
      };
      p.wide || p.before_a ? adds.template operator()<true>() : adds.template operator()<false>();
    });
  };
  run.template operator()<Layout<D, true>>(keys, queries, b.dk, b.dv.data, b.dk_before, b.dv_before.data, view.k_known);
  run.template operator()<Layout<D, false>>(queries, keys, b.dq, nullptr, b.dq_before, nullptr, view.q_known);
}

template void hopper::stream_backward<HILT_TYPE, HILT_DIM>(Cuda, const BackwardPass&, const Marks&);

}  // namespace hilt::kernels
