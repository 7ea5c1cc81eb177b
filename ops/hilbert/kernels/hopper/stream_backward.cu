// Attention on Hopper, backward, for any number of keys: two passes over the scores, so that every
// sum stays with its owner. Nothing is added from two sides, and the bits are the same every time.
//
//   keys       a block owns 128 keys (64 a warpgroup), queries stream by in steps of 64, dO after Q
//                  S^T = K Q^T     P^T = e^(c S^T - L)     dP^T = V dO^T     dS^T = P^T (dP^T - Delta)
//                  dV += P^T dO    dK += dS^T Q
//   queries    a block owns 128 queries (64 a warpgroup), keys stream by in steps of 64, V with K
//                  S = Q K^T       P = e^(c S - L)         dP = dO V^T       dS = P (dP - Delta)
//                  dQ += dS K
//
// Both are one kernel: what a block owns and what streams by are two pairs of rows, (K, V) and (Q,
// dO), and P and dS are operands of the next products right where they were computed. Warpgroup 0
// gathers rows through the lists of tokens. Delta comes from a pass before. The query heads that
// share a key head stream by one after the other.
//
// Head dims beyond 128: there are not the registers for dK and dV of one's keys. A block owns 64
// keys (kSplit). One warpgroup makes S and P, and sums dV; the other gets P from it, thread by
// thread, and makes dP and dS, and sums dK.
//
// Adds: to f32 sums of passes before, where a row has any; every row has one owner.
#include "ops/hilbert/kernels/hopper/terms.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;

// Named barriers of the two warpgroups, with kSplit: P of a step is there; it was taken.
constexpr int kGivenBarrier = 8, kTakenBarrier = 9;

/// Two operands whose rows belong together: (K, V) or (Q, dO), and the list of their tokens.
struct Operands {
  Source a, b;
  std::span<const std::int32_t> token;
};

struct Pass : Work {
  Operands own, stream;
  void *to_a, *to_b;  // gradients of what is owned, of 16 bits or, where `wide`, f32; dQ alone for queries
  Operand to;
  const float *before_a, *before_b;  // with kAdds: the sums so far, or null
  Operand before;
  const std::int32_t* known;  // the owned rows that have any; null: all
  bool wide;
  const float *lse, *delta;  // [B, H, L]
  int heads_each;            // query heads that share a key head
  ScoreTerms terms;
};

template <int D_, bool kKeys_, Extra kExtra> struct Layout {
  static constexpr int D = D_;
  static constexpr bool kKeys = kKeys_, kSplit = kKeys && D > 128, kBehind = false;
  static constexpr bool kTerms = kExtra == Extra::terms, kDrops = kExtra >= Extra::drops;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kOwned = kSplit ? kCell : kTile;  // rows
  // A stage has both tiles of a step; or, where they are too large, one: V, let go first, before K.
  static constexpr int kTiles = D <= 128 ? 2 : 1;
  static constexpr bool kTurned = !kKeys && kTiles == 1;
  static constexpr int kStages = D <= 64    ? 6
                                 : D <= 128 ? 3
                                 : kSplit   ? 4
                                            : (D == 192 ? 5 : 3) - (kTerms ? 1 + (D == 192) : 0);
  using OwnedTile = Tile<D, kOwned>;
  using StreamedTile = Tile<D, kCell>;
  using OwnedRing =
      Ring<D <= 64 || (!kTerms && D <= 128) || (kSplit && !kTerms && D == 192) ? 2 : 1, 2 * OwnedTile::kBytes>;
  using StreamedRing = Ring<kStages, kTiles * StreamedTile::kBytes>;
  using Items = Records<OwnedRing::kStages>;
  static constexpr std::uint32_t kRowBytes = kCell * 4;  // of a statistic: L with Q, Delta with dO
  static constexpr std::uint32_t kStepBytes = 16;        // its row and mask, what is known of it, and of the next one
  // With terms: what they see of streamed rows, tables, and where warps add up slopes.
  static constexpr std::uint32_t kSiteBytes = kTerms ? kCell * kPlanes * 4 : 0, kTable = kTerms ? kTableBytes<D> : 0,
                                 kScratch = kTerms && !kKeys ? TermCollector<D>::kBytes : 0;
  static constexpr std::uint32_t owned = 0, streamed = owned + OwnedRing::kBytes,
                                 statistic = streamed + StreamedRing::kBytes,
                                 steps = statistic + (kKeys ? kStages * kTiles * kRowBytes : 0),
                                 sites = steps + kStages * kStepBytes, tables = sites + kStages * kSiteBytes,
                                 scratch = tables + OwnedRing::kStages * kTable,
                                 given = scratch + kMultiplying / kWarp * kScratch,
                                 items = given + (kSplit ? kWarpgroup * (kTerms ? 9 : 5) * 16 : 0),
                                 turns = items + Items::kBytes, barriers = turns + 8,
                                 size = barriers + OwnedRing::kBarriers + StreamedRing::kBarriers;
};
template <class M> struct Stages : Rings<M> {
  using Rings<M>::Rings, Rings<M>::base, Rings<M>::streamed;
  /// The stage of a step's second tile.
  __device__ auto second() const {
    auto other = streamed;
    if constexpr (M::kTiles == 1) other.next();
    return other;
  }
  __device__ void wait_for_step() const {
    streamed.wait_full();
    if constexpr (M::kTiles == 1) second().wait_full();
  }
  __device__ std::uint32_t statistic() const { return streamed.row(base + M::statistic, M::kTiles * M::kRowBytes); }
  /// What is known of this step, or 1: of the next one, early.
  __device__ std::uint32_t known(std::uint32_t next) const {
    return load_shared<std::uint32_t>(this->steps(streamed) + 8 + 4 * next);
  }
};

/// The cells of a step, or kRun and how many steps from it on are full.
constexpr std::uint32_t kRun = 1u << 31;
static_assert(Visits::kMasks < kRun >> 16);

/// An item, or with kSplit a half of one, which has no steps where it has no rows.
template <class M> __device__ __forceinline__ Item item_of(const Work& p, int i) {
  Item x = p.item(M::kSplit ? i / 2 : i);
  if constexpr (M::kSplit)
    if (x.part = i % 2; x.part == 1 && x.rows <= kCell) x.steps = 0;
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
  Stages<M> to;
  const Gather<M::D> gather;
  Walk walk;
  int owned = -1, streamed = -1;  // tokens of this thread, for what is loaded next
  int row = 0, mask = 0;          // of the next step
  std::uint32_t known = 0;        // see kRun
  bool whole = false;             // every row of it is there

  __device__ __forceinline__ void fetch_step() {
    const int full = M::kTiles == 2 && !M::kTerms ? walk.full(1) : 0;
    const Step step = walk.take();
    known = full > 1 ? kRun | static_cast<std::uint32_t>(full) : step.cells;
    streamed = gather.fetch(p.stream.token, step), row = step.row, mask = step.mask;
    whole = step.rows == kCell;
  }
  __device__ __forceinline__ void begin(const Item& x) {
    owned = gather.fetch(p.own.token, {x.row + x.part * kCell, x.rows - x.part * kCell});
    walk = Walk(p, x);
    fetch_step();
  }
  __device__ __forceinline__ Item item(int i) const { return item_of<M>(p, i); }
  __device__ __forceinline__ void load(const Item& x) {
    load_owned(x);
    load_stream(x);
  }
  /// Loads an item's own rows.
  __device__ __forceinline__ void load_owned(const Item& x) {
    using OwnedTile = typename M::OwnedTile;
    if (x.steps > 0) {
      const std::uint32_t tile = to.owned.tile(), full = to.owned.full();
      const bool all = x.rows - x.part * kCell >= M::kOwned;
      gather.template copy_held<OwnedTile>(tile, owned, {p.own.a, x.batch, x.head}, all, full);
      gather.template copy_held<OwnedTile>(tile + OwnedTile::kBytes, owned, {p.own.b, x.batch, x.head}, all, full);
    }
    if constexpr (M::kTerms)  // of keys, the first head's
      copy_table(p.terms, M::kKeys ? p.query_head[x.first_head] : x.head, to.table(), !M::kKeys);
    announce(to.owned.full());
    to.owned.next();
  }
  /// And the tiles that stream by, with L and Delta of queries.
  __device__ __forceinline__ void load_stream(const Item& x) {
    for_heads<M::kKeys>(p, x, [&](int head, bool last) {
      const std::int64_t statistics = p.row(x.batch, head) * p.length;
      const HeadRows a{p.stream.a, x.batch, head}, b{p.stream.b, x.batch, head};
      for (int i = 0; i < x.steps; ++i) {
        const int held = streamed;
        const bool its_whole = whole;
        int4 its{row, mask, static_cast<int>(known), 0};
        if (walk.left > 0) fetch_step();
        else if (!last) walk = Walk(p, x), fetch_step();
        int token[Gather<M::D>::kOfStep];
        gather.hand_out(held, token);
        const auto copy_tile = [&](int second, const HeadRows& from, const float* statistic) {
          const auto place = static_cast<std::uint32_t>(M::kTiles == 2 ? second : 0);
          gather.template copy<typename M::StreamedTile>(to.streamed.tile() + place * M::StreamedTile::kBytes, token,
                                                         from, its_whole, to.streamed.full());
          if (M::kTerms && second == M::kTurned && gather.mine < kCell)  // beside what S is of
            copy_site<kCell>(p.terms, to.sites(to.streamed), gather.mine, its.x + (held >= 0 ? gather.mine : 0),
                             held >= 0);
          if (M::kKeys && gather.mine < kCell)
            copy_4(to.statistic() + place * M::kRowBytes + static_cast<std::uint32_t>(gather.mine) * 4,
                   statistic + statistics + max(held, 0), held >= 0);
        };
        to.streamed.wait_empty();
        its.w = static_cast<int>(known);
        if (threadIdx.x == 0) store_shared(to.steps(to.streamed), its);
        copy_tile(0, M::kTurned ? b : a, p.lse);
        if constexpr (M::kTiles == 1) {
          announce(to.streamed.full());
          to.streamed.next();
          to.streamed.wait_empty();
        }
        copy_tile(1, M::kTurned ? a : b, p.delta);
        announce(to.streamed.full());
        to.streamed.next();
      }
    });
  }
};

// ---- multiplies

/// Adds to da and db (sums for the first and second of the owned pair) what a step gives; lse and
/// delta: of owned queries. kSplit: one of the two sums alone, in da.
template <class E, class M, int N> struct Accumulate {
  static constexpr int D = M::D;
  static constexpr bool kDrops = M::kDrops, kTerms = M::kTerms;
  using OwnedTile = typename M::OwnedTile;
  using StreamedTile = typename M::StreamedTile;
  const Pass& p;
  const Lane& at;  // kSplit: both warpgroups at the same rows
  const int role;  // kSplit: 0 sums dK, 1 dV
  Stages<M>& from;
  const ByRow &lse, &delta;
  float (&da)[D / 2];
  float (&db)[N];
  const int (&step_row)[1];
  const RowSite (&owned)[2];  // with kTerms: rows, and where their gradients go
  TermCollector<D>& collected;

  __device__ __forceinline__ auto of(std::uint32_t streamed, const ByRow& owned) const {
    if constexpr (M::kKeys) return ByColumn{streamed + static_cast<std::uint32_t>(at.quad()) * 8};
    else return owned;
  }
  /// Those of a step, whose streamed rows' sites lie there, and a query head.
  __device__ __forceinline__ LaneTerms<E, !M::kKeys, kCell> terms(const Item& x, int head, std::uint32_t sites) const {
    return {p.terms, x.batch, head, owned, sites, from.table(), p.lists.q_token, x.row + at.row, step_row};
  }
  __device__ __forceinline__ std::uint32_t scratch() const {
    return from.base + M::scratch + static_cast<std::uint32_t>(at.half * 4 + at.warp) * M::kScratch;
  }
  /// Where this warp adds up the gradients of slopes and tables.
  __device__ __forceinline__ float* share(int head) const {
    const TermSums& sums = p.terms.sums;
    return sums.share ? sums.share_of(head, (static_cast<Index>(blockIdx.x) * 8 + at.half * 4 + at.warp) * kWarpShares)
                      : nullptr;
  }
  /// What dS of a step adds to the gradients of terms.
  __device__ __forceinline__ void collect(const Item& x, int head, const float (&ds)[32], std::uint32_t sites) const {
    if constexpr (M::kKeys) {
      if (p.terms.sums.by_column()) collected.add_rows(ds);
    } else {
      collected.add(terms(x, head, sites), ds, scratch(), share(head));
    }
  }
  /// At the end of a query head: sums over its steps.
  __device__ __forceinline__ void close(const Item& x, int head) const {
    const TermSums& sums = p.terms.sums;
    if (M::kKeys ? sums.by_column() && (!M::kSplit || role == 0) : sums.by_row()) {
      collected.close_rows();
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (at.quad() == 0 && at.row + 8 * h < x.rows) {
          const PairTensor<void>& to = sums.to.bias;
          float* const base = static_cast<float*>(to.data);
          if constexpr (M::kKeys) base[to.offset(x.batch, head, 0) + owned[h].name * to.key] += collected.row[h];
          else base[to.offset(x.batch, head, terms(x, head, 0).line_of(h, 0, owned[h].name))] += collected.row[h];
        }
      collected.row[0] = collected.row[1] = 0;
    }
    if constexpr (!M::kKeys) {
      const auto give = [&](float& x, Index entry) {
        const float sum = warp_reduce<Sum>(x);
        if (at.lane == 0) share(head)[entry] += sum;
        x = 0;
      };
      if (sums.to.slopes) give(collected.distance, sums.entries);
      if (sums.to.table) give(collected.end[0], 0), give(collected.end[1], sums.entries - 1);
    }
  }
  /// Before another head's item: what was added up near goes to its head, -1: to none.
  __device__ __forceinline__ void empty(int head) const {
    TermCollector<D>::empty(p.terms.sums, scratch(), head >= 0 ? share(head) : nullptr);
  }
  /// P, and what else dS of a step depends on; with kSplit, from the thread that made it.
  struct alignas(16) Given {
    std::uint32_t weights[4][4], word, survive, unused[2], slope[kTerms ? 16 : 4];
    static constexpr std::uint32_t kPieces = kTerms ? 9 : 5;
  };
  /// f(where it lies, piece) once it may be moved, and says so.
  template <class F> __device__ __forceinline__ void move(int waits, int says, Given& x, const F& f) const {
    named_sync(waits, kMultiplying);
#pragma unroll
    for (std::uint32_t i = 0; i < Given::kPieces; ++i)
      f(shared<uint4>(from.base + M::given + (i * kWarpgroup + threadIdx.x % kWarpgroup) * 16),
        reinterpret_cast<uint4*>(&x)[i]);
    named_arrive(says, kMultiplying);
  }
  __device__ __forceinline__ void skip() const {
    for (int i = 0; i < 2; i += M::kTiles) from.streamed.release(), from.streamed.next();
  }
  /// A step, or `n` that are full; `ahead`: what is known of the one behind. own_row, head: with
  /// kDrops, where owned rows begin, and which head it is. kValues: dV alone, in da.
  template <bool kMasked, bool kValues = false>
  __device__ __forceinline__ void run(const Item& x, const Step& step, int n, bool first, std::uint32_t& ahead,
                                      int own_row, int head) const {
    constexpr bool kBoth = M::kKeys && !M::kSplit, kGets = M::kSplit && !kValues;
    const std::uint32_t own = from.owned.tile() + (M::kSplit ? 0 : at.rows());
    Given its;
    its.word = kMasked && !kGets ? word_of(p, step, at) : ~0u, its.survive = ~0u;
#pragma unroll 1
    for (int row = step.row;; row += kCell) {
      float s[32], t[32];
      const auto next = from.second(), here = M::kTurned ? next : from.streamed,
                 there = M::kTurned ? from.streamed : next;
      const std::uint32_t a = here.tile(), b = M::kTiles == 2 ? a + StreamedTile::kBytes : there.tile(),
                          lse_at = from.statistic(), sites = from.sites(here);
      if constexpr (!kGets) {
        wgmma_begin();
        multiply_rows<E, OwnedTile, StreamedTile>(s, own, a);
        wgmma_commit();
      }
      from.streamed = next;
      const std::uint32_t delta_at = M::kTiles == 2 ? lse_at + M::kRowBytes : from.statistic();
      const auto multiply_second = [&] {
        wgmma_begin();
        multiply_rows<E, OwnedTile, StreamedTile>(t, own + OwnedTile::kBytes, b);
        wgmma_commit();
      };
      constexpr bool kLate = kValues || (kTerms && D > 64 && !kGets);  // not for dV; and terms want its registers
      if constexpr (!kLate) multiply_second();
      if (kDrops && !kGets && (!kTerms || p.drops != 0))
        its.survive = survivors<!M::kKeys, true>(p, now(p.key), p.stream_of(x.batch, head), own_row, row, at);
      if constexpr (kDrops && !M::kKeys) its.survive = swap_bits(its.survive, 15, 0xaaaa);
      if constexpr (!kGets) {
        wgmma_wait<kLate ? 0 : 1>();
        fence_operand(s);
        if constexpr (kTerms) its.word &= terms(x, head, sites).add(s, p.scale, &its.slope);
        for_scores(of(lse_at, lse), [&](int i, float l) { s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -(l * kLog2e))); });
      }
      if constexpr (kValues) {
        here.release();
        if (kDrops || step.cell(at.half) != Visits::kFull) mask(s, 0, its.word, 0.0f);
        pack<E>(its.weights, s);
        move(kTakenBarrier, kGivenBarrier, its, [](uint4& there, const uint4& here) { there = here; });
        if constexpr (kDrops) keep_pairs(its.weights, 0, swap_bits(its.survive, 15, 0xaaaa));
        wgmma_begin();
        multiply<E, StreamedTile>(da, its.weights, b, !first);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(da);
        there.release();
        from.streamed.next();
        return;
      }
      if constexpr (kGets) {
        move(kGivenBarrier, kTakenBarrier, its, [](const uint4& there, uint4& here) { here = there; });
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float2 weight = unpack_pair<E>(its.weights[i / 4][i % 4]);
          s[2 * i] = weight.x, s[2 * i + 1] = weight.y;
        }
      }
      if constexpr (kLate) multiply_second();
      wgmma_wait<0>();
      fence_operand(t);
      if constexpr (kDrops) mask(t, 0, its.survive, 0.0f);
      for_scores(of(delta_at, delta),
                 [&](int i, float d) { t[i] = s[i] * (kDrops ? fmaf(t[i], p.survivor, -d) : t[i] - d); });
      if constexpr (M::kTiles == 1) there.release();  // with Delta
      if constexpr (kDrops && kBoth) mask(s, 0, its.survive, 0.0f);
      if constexpr (kMasked || kTerms) {
        if constexpr (kBoth) mask(s, 0, its.word, 0.0f);
        mask(t, 0, its.word, 0.0f);
      }
      std::uint32_t slopes[4][4];
      if constexpr (kBoth) pack<E>(its.weights, s);
      if constexpr (kTerms) collect(x, head, t, sites), terms(x, head, sites).through_cap(t, its.slope);
      pack<E>(slopes, t);
      wgmma_begin();
      if constexpr (kBoth) multiply<E, StreamedTile>(db, its.weights, b, !first);
      multiply<E, StreamedTile>(da, slopes, a, !first);
      wgmma_commit();
      wgmma_wait<0>();
      fence_operand(da);
      if constexpr (kBoth) fence_operand(db);
      here.release();
      from.streamed.next();
      if (kMasked || kTerms || M::kTiles == 1 || --n == 0) return;
      first = false;
      from.wait_for_step();
      ahead = from.known(1);
    }
  }
};

/// The gradients of what is owned; with kSplit one of the two, by role.
template <class E, class M, bool kAdds, int N>
__device__ __forceinline__ void store(const Pass& p, const Item& x, const Lane& at, int role, const int (&token)[2],
                                      float (&da)[M::D / 2], float (&db)[N], bool finite) {
  constexpr int kChunks = M::D / 8;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool is_part = kAdds && p.part_rows != 0, there = token[h] >= 0 && (!kAdds || finite || is_part);
    const int row = is_part ? p.sum_row(x, at.row + 8 * h) : max(token[h], 0);
    const std::int64_t to = p.to.offset(x.batch, x.head, row),
                       from = kAdds ? p.before.offset(x.batch, x.head, max(token[h], 0)) : 0;
    const bool known = kAdds && there && (!p.known || __ldg(p.known + x.row + at.row + 8 * h) != 0);
    const auto put = [&](void* base, const float* before, auto& sums, float scale) {
      if constexpr (kAdds) {
        if (is_part && !finite) scale = NAN;  // which its row's sum is then
        add_row<kChunks>(sums, h, scale, before + from, known && before ? 1.0f : 0.0f, at.quad(), p.chunks);
        scale = 1;
      }
      put_row<E, kChunks>(base, there ? to : -1, kAdds && p.wide, sums, h, scale, at.quad(), p.chunks);
    };
    if constexpr (M::kSplit)
      put(role == 0 ? p.to_a : p.to_b, role == 0 ? p.before_a : p.before_b, da, role == 0 ? p.scale : p.survivor);
    else put(p.to_a, p.before_a, da, p.scale);
    if constexpr (M::kKeys && !M::kSplit) put(p.to_b, p.before_b, db, p.survivor);
  }
}

template <class E, class M, bool kAdds>
__global__ void __launch_bounds__(kThreads, 1) stream_backward_kernel(const __grid_constant__ Pass p) {
  constexpr int D = M::D;
  run_block<Loader<M>, M>(p, [&](Lane at, Stages<M> rings) {
    const int role = at.half;
    float da[D / 2], db[M::kKeys && !M::kSplit ? D / 2 : 4];
    int shared_head = -1;  // whose shares lie near
    if (M::kSplit && role == 0) named_arrive(kTakenBarrier, kMultiplying);
    for (bool more = true; more;) {
      rings.owned.wait_full();
      bool first = true;
      int token[2];
      {
        const Item x = rings.items.read();
        more = x.number >= 0;
        if constexpr (M::kSplit) at.row += (x.part - at.half) * kCell, at.half = x.part;
        ByRow lse{}, delta{};  // of owned queries
        RowSite owned[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = at.row + 8 * h;
          token[h] = row < x.rows ? __ldg(p.own.token.data() + x.row + row) : -1;
          if (!M::kKeys && token[h] >= 0) {
            const std::int64_t statistics = p.row(x.batch, x.head) * p.length + token[h];
            lse.x[h] = __ldg(p.lse + statistics), delta.x[h] = __ldg(p.delta + statistics);
          }
          if constexpr (M::kTerms) owned[h] = p.terms.own_site(x, row);
        }
        TermCollector<D> collected;
        int step_row[1] = {};
        const Accumulate<E, M, sizeof(db) / 4> accumulate{p,  at, role,     rings, lse,      delta,
                                                          da, db, step_row, owned, collected};
        if constexpr (M::kTerms && !M::kKeys)
          if (!more || x.head != shared_head) accumulate.empty(shared_head), shared_head = x.head;
        const int heads = M::kKeys ? x.last_head - x.first_head : 1, own_row = x.row + at.half * kCell;
        int head = 0;
        std::uint32_t known = 0;  // of a step, read with the one before
        int slot = x.first_head, in_head = 0;
#pragma unroll 1
        for (int all = heads * x.steps, left = all; left > 0;) {
          rings.wait_for_step();
          if (left == all) known = warp_uniform(rings.known(0));
          std::uint32_t ahead = rings.known(1);
          const bool runs = known & kRun;
          const int n = runs ? static_cast<int>(known & ~kRun) : 1;
          const std::uint32_t cells = runs ? Step::kAllFull : known;
          Step step{0, 0, cells};
          if (M::kDrops || step.cell(at.half) == Visits::kCompare) {
            const auto its = load_shared<int4>(rings.steps(rings.streamed));
            step.row = its.x, step.mask = its.y;
            if constexpr (M::kTerms) step_row[0] = its.x;
          }
          if constexpr (M::kDrops) {
            if (in_head == 0) in_head = x.steps, head = M::kKeys ? p.query_head[slot++] : x.head;
            in_head -= n;
          }
          const int cell = step.cell(at.half);
          if (cell == Visits::kEmpty) accumulate.skip();
          else if (M::kSplit && role == 1) accumulate.template run<true, true>(x, step, n, first, ahead, own_row, head);
          else if (!M::kTerms && cell == Visits::kFull)
            accumulate.template run<false>(x, step, n, first, ahead, own_row, head);
          else accumulate.template run<true>(x, step, n, first, ahead, own_row, head);
          first = first && cell == Visits::kEmpty;
          left -= n;
          known = warp_uniform(ahead);
          if constexpr (M::kTerms)
            if (in_head == 0) accumulate.close(x, head);
        }
      }
      rings.owned.release();
      rings.owned.next();
      if (first) {
#pragma unroll
        for (float& y : da) y = 0;
#pragma unroll
        for (float& y : db) y = 0;
      }
      const Item x = rings.items.read();
      rings.items.next();
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
    if (M::kSplit && role == 1) named_sync(kTakenBarrier, kMultiplying);
  });
}

}  // namespace

/// The two passes over a tiling.
template <class E, int D> void hopper::stream_backward(Cuda where, const BackwardPass& b, const Marks& marks) {
  TermSums sums;
  Index most = properties(where.device).multiprocessors;
  const Tensor shares = shares_of_terms(where, b, kMultiplying / kWarp * kWarpShares, sums, most);
  const auto run = [&]<class M>(AttentionPass part, int first_batch, const Output& to_a, void* to_b,
                                const Input& before_a, const void* before_b) {
    if (!to_a.data) return;
    part.tiling = &walked(b, M::kKeys);
    const TilingView& view = lists_of(part, where);
    const Operands keys{source_of(b.k, part, true), source_of(b.v, part, true), view.k_token};
    const Operands queries{source_of(b.q, part, false), source_of(b.d_o, part, false), view.q_token};
    const std::span<const std::int32_t> known = M::kKeys ? view.k_known : view.q_known;
    // Rows' sums of terms' gradients are an owner's alone.
    for_portions<M::kKeys>(where, part, marks, !b.d_terms, [&](const Work& work) {
      Pass p{work};
      p.first_batch = first_batch;
      if (M::kSplit) p.items *= 2;
      p.own = M::kKeys ? keys : queries, p.stream = M::kKeys ? queries : keys, p.to_a = to_a.data, p.to_b = to_b,
      p.to = operand_of(to_a);
      p.before_a = static_cast<const float*>(before_a.data), p.before_b = static_cast<const float*>(before_b);
      p.before = operand_of(before_a), p.wide = to_a.type == DType::f32;
      p.known = b.listed && !known.empty() ? known.data() : nullptr;
      PartSums parts;
      if (p.part_rows != 0) {
        parts = part_sums(work, b, marks.sums, M::kKeys ? b.sizes.kv_heads : b.sizes.heads, to_a,
                          M::kKeys ? b.dv : Output{});
        parts.token = p.own.token, parts.known = p.known;
        parts.before[0] = before_a, parts.before[1] = b.dv_before;
        p.to_a = marks.sums, p.to_b = const_cast<float*>(parts.sums[1]), p.to = rows_of(parts, work);
        p.before_a = p.before_b = nullptr, p.wide = true;
      }
      p.lse = static_cast<const float*>(b.lse), p.delta = static_cast<const float*>(b.delta);
      p.heads_each = static_cast<int>(b.sizes.heads / b.sizes.kv_heads);
      if constexpr (M::kTerms) {
        p.terms = score_terms<D>(where, part, !M::kKeys), p.scale_log2 = kLog2e;  // scores have their scale
        p.terms.sums = sums;
        if (b.d_terms) p.taken = nullptr;  // so that what a block adds up is the same every time
      }
      const auto kernel =
          p.wide || p.before_a ? stream_backward_kernel<E, M, true> : stream_backward_kernel<E, M, false>;
      start(where, kernel, M::size, p, M::kTerms || !p.wide || !p.side.busy || p.part_rows != 0, most);
      if (p.part_rows != 0) add_parts(where, parts);
    });
  };
  const auto both = [&]<Extra kExtra>() {
    run.template operator()<Layout<D, true, kExtra>>(b, 0, b.dk, b.dv.data, b.dk_before, b.dv_before.data);
    each_alone(b, sums, [&](const AttentionPass& part, Index first_row) {
      run.template operator()<Layout<D, false, kExtra>>(part, static_cast<int>(first_row), b.dq, nullptr, b.dq_before,
                                                        nullptr);
    });
  };
  using enum Extra;
  with_extra<D, none, drops_any, terms>(extra_of(b, false, false), both);
  add_shares(where, sums, b.sizes.heads);
}

template void hopper::stream_backward<HILT_TYPE, HILT_DIM>(Cuda, const BackwardPass&, const Marks&);

}  // namespace hilt::kernels
