// Attention on Hopper, forward: owners of up to 128, or 192, queries visit keys that a plan lists.
//
//   S = Q K^T     P = e^(c S - m)     O = P V / rowsum P     L = m + log rowsum P        in base 2 inside,
//   natural outside
//
// One block a multiprocessor works through owners. Warpgroup 0 loads: a ring of Q, K and V tiles,
// each row gathered through the list of tokens, 16 bytes a lane and eight lanes a row, so that
// lines stay whole; 64 rows whose tokens count up, by the copy engine. The other warpgroups own
// 64 queries each: S by wgmma from shared memory, masked by the bits of its cells where those are
// not full, the softmax in registers, and P, which is already laid out as an operand, times V. The
// next S is multiplied while the softmax of this one runs, and to head dim 64 these warpgroups
// take turns at the exponentials. The tokens of a group need no order inside it, and no permuted
// copy of anything exists.
//
// A stage has one or two steps of 64 keys: two keep the tensor cores busier, one leaves out more.
// To head dim 64 exponentials bound a warpgroup: where all rows come by the copy engine, loaders
// need few registers, and three warpgroups multiply, for 192 queries.
//
// Merges: the state of an online softmax goes on, or ends here: O so far is f32, O' f32 or final.
//
//   L' = log(e^L + e^L_here)     O' = e^(L - L') O + e^(L_here - L') O_here
#include "ops/hilbert/kernels/hopper/terms.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;

constexpr int kSoftmaxBarrier = 8;  // and 9 and 10: of other warpgroups

struct ForwardProblem : Work {
  Source q, k, v;
  Operand o;
  void* out;   // of 16 bits, or f32 where `wide`
  float* lse;  // [B, H, L]
  // With kMerges: whether out is f32, what there is to merge with, or null; L alone is read where
  // `fresh` is not said.
  const float* before;
  Operand before_rows;
  bool wide, fresh;
  Divisor heads_each;  // query heads that share a key head
  ScoreTerms terms;
};

template <int D_, int kKeys, Extra kExtra, int kHalves_ = 2> struct Layout {
  static constexpr int D = D_, kSteps = kKeys / kCell, kHalves = kHalves_;
  static constexpr int kProducerRegisters = kHalves == 3 ? 32 : 72;
  static constexpr bool kTerms = kExtra == Extra::terms, kDrops = kExtra >= Extra::drops, kAny = kExtra > Extra::drops,
                        kDistances = kExtra == Extra::distances, kCaps = kExtra == Extra::cap;
  using Queries = Tile<D, kHalves * kCell>;
  using Keys = Tile<D, kKeys>;
  using OwnedRing = Ring<D <= (kTerms ? 128 : 192) ? 2 : 1, Queries::kBytes, kHalves>;
  using StreamedRing = Ring<(64 << 10) / Keys::kBytes, Keys::kBytes, kHalves>;
  using Items = Records<OwnedRing::kStages>;
  static constexpr std::uint32_t kFull = 2 * kSteps * 16, kStepBytes = kFull + 16;  // of a stage
  static constexpr std::uint32_t kSiteBytes = kTerms ? kKeys * kPlanes * 4 : 0, kTable = kTerms ? kTableBytes<D> : 0;
  static constexpr bool kBehind = true;  // V lies behind K
  static constexpr std::uint32_t owned = 0, streamed = owned + OwnedRing::kBytes,
                                 items = streamed + 2 * StreamedRing::kBytes, steps = items + Items::kBytes,
                                 sites = steps + StreamedRing::kStages * kStepBytes,
                                 tables = sites + StreamedRing::kStages * kSiteBytes,
                                 turns = tables + OwnedRing::kStages * kTable, barriers = turns + 8,
                                 size = barriers + OwnedRing::kBarriers + 2 * StreamedRing::kBarriers;
};
// ---- loads

template <class M> struct Loader {
  const ForwardProblem& p;
  Rings<M> to;
  const Gather<M::D> gather;
  Walk walk;
  int query = -1, key = -1;  // tokens of this thread, for what is loaded next
  struct Stage {
    Step step[M::kSteps];
    int full = 0, row = -1;  // full stages from it on, of one visit; where this thread's row stands in its list, if any
  } stage;

  __device__ __forceinline__ void fetch_stage() {
    stage.full = walk.full(M::kSteps, M::kHalves);
#pragma unroll
    for (Step& step : stage.step) step = walk.take();
    stage.row = gather.row_of(stage.step[0], M::kSteps == 2 ? stage.step[M::kSteps - 1] : Step{});
    key = stage.row >= 0 ? __ldg(p.lists.k_token.data() + stage.row) : -1;
  }
  __device__ __forceinline__ void begin(const Item& x) {
    walk = Walk(p, x);
    query = gather.fetch(p.lists.q_token, {x.row, x.rows});
    fetch_stage();
  }
  __device__ __forceinline__ Item item(int i) const { return p.item(i); }
  /// Loads the rows of Q of an item, and those of K and V, stage by stage.
  __device__ __forceinline__ void load(const Item& x) {
    using Keys = typename M::Keys;
    const HeadRows q{p.q, x.batch, x.head};
    if constexpr (M::kHalves == 3) {
      for (int row = 0; threadIdx.x == 0 && row < x.rows; row += kCell)
        load_boxes<typename M::Queries>(to.owned.tile() + static_cast<std::uint32_t>(row) * kPanelRow, q, query + row,
                                        to.owned.full());
    } else if (x.steps > 0) {
      gather.template copy_held<typename M::Queries>(to.owned.tile(), query, q, x.rows == kTile, to.owned.full());
    }
    if constexpr (M::kTerms) copy_table(p.terms, x.head, to.table(), true);
    announce(to.owned.full());
    to.owned.next();
    int kv_head, rest;
    p.heads_each.split(x.head, kv_head, rest);
    const HeadRows k{p.k, x.batch, kv_head}, v{p.v, x.batch, kv_head};
    for (int step = 0; step < x.steps; step += M::kSteps) {
      const Stage its = stage;
      const int held = key;
      stage = {};
      if (walk.left > 0) fetch_stage();
      to.streamed.wait_empty();
      constexpr int kRows = Gather<M::D>::kOfStep;
      int token[kRows * M::kSteps];
      gather.hand_out(held, token);
      bool whole = its.step[0].rows == kCell;
      if (const int rows = its.step[M::kSteps - 1].rows; rows > 0) {
        whole = whole && rows == kCell;
      } else {  // no key attends there: the first step's rows once more
#pragma unroll
        for (int i = 0; i < kRows; ++i) token[kRows * (M::kSteps - 1) + i] = token[i];
      }
      const auto copy = [&](const auto& ring, const HeadRows& x) {
        gather.template copy<Keys, M::kHalves == 2>(ring.tile(), token, x, whole, ring.full());
      };
      copy(to.streamed, k);
      if (threadIdx.x == 0) {  // the next stage's steps too, which are then known before it is full
        const std::uint32_t at = to.steps(to.streamed);
#pragma unroll
        for (std::uint32_t i = 0; i < M::kSteps; ++i)
          store_shared(at + i * 16, its.step[i]), store_shared(at + (M::kSteps + i) * 16, stage.step[i]);
        store_shared(at + M::kFull, its.full);
      }
      if constexpr (M::kTerms)
        if (gather.mine < Keys::kRows)
          copy_site<Keys::kRows>(p.terms, to.sites(to.streamed), gather.mine, its.row, its.row >= 0);
      announce(to.streamed.full());
      const auto values = to.streamed.behind();
      values.wait_empty();
      copy(values, v);
      announce(values.full());
      to.streamed.next();
    }
  }
};

// ---- multiplies

/// The softmax of the two rows that a lane has.
struct OnlineSoftmax {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  float factor[2], shift[2];  // factor: what sums before this tile are multiplied with

  /// Row maxima of a tile of scores against those so far.
  template <int N> __device__ __forceinline__ void raise_maxima(const float (&s)[N], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float a[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
      for (int c = 0; c < N / 4; ++c) a[c % 4] = fmaxf(a[c % 4], fmaxf(s[4 * c + 2 * h], s[4 * c + 2 * h + 1]));
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
  template <int N> __device__ __forceinline__ void exponentiate(float (&s)[N], float scale) {
    float part[2][2] = {};
#pragma unroll
    for (int c = 0; c < N / 4; ++c)
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

/// The scores of a warpgroup's 64 queries, stage by stage, their softmax, and the product with V.
template <class E, class M> struct Attend {
  static constexpr int D = M::D, kParts = M::kSteps, kScores = 32 * kParts;
  static constexpr bool kDrops = M::kDrops, kPlaces = kDrops || M::kDistances;
  using KeyRing = typename M::StreamedRing;
  const ForwardProblem& p;
  const Lane at;
  Rings<M> from;
  // The stage at hand: where it is, what it is, and the words of its steps that are masked.
  KeyRing k = from.streamed;
  enum class Pairs { none, some, all } pairs;
  int cell[kParts];
  int full = 0;        // how many stages from it on are full, as far as that is known
  int2 ahead[kParts];  // cells of the stage behind it, if it was looked at
  std::uint32_t word[kParts];
  // Where rows begin; with kDistances, what a score loses by a token; with kDrops, what survives.
  int row[kParts], own = 0;
  float slope = 0;
  std::uint32_t head = 0, survive[kParts];
  RandomKey key = now(p.key);
  // With kTerms: an item's batch and head, and the lane's queries.
  int its_batch = 0, its_head = 0, its_row = 0;
  RowSite query[2];

  static constexpr bool kTurns = D <= 64;
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (kTurns) named_sync(kSoftmaxBarrier + at.half, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kTurns) named_arrive(kSoftmaxBarrier + (at.half + 1) % M::kHalves, 2 * kWarpgroup);
  }

  /// Takes the next stage, when its keys are there.
  __device__ __forceinline__ void take() {
    k = from.streamed;
    from.streamed.next();
    k.wait_full();
  }
  /// And looks at a stage. What it has was read with the one before, if that was looked at.
  __device__ __forceinline__ void look(bool is_first) {
    const std::uint32_t steps = from.steps(k);
    bool any = false, all = true;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const std::uint32_t its = steps + static_cast<std::uint32_t>(i) * 16;
      if (is_first) ahead[i] = load_shared<int2>(its + 8);
      const Step step{0, kCell, static_cast<std::uint32_t>(warp_uniform(ahead[i].x)), warp_uniform(ahead[i].y)};
      ahead[i] = load_shared<int2>(its + kParts * 16 + 8);
      cell[i] = step.cell(at.half), word[i] = word_of(p, step, at);
      any = any || cell[i] != Visits::kEmpty, all = all && step.is_full(M::kHalves);
      if constexpr (kPlaces) row[i] = load_shared<int>(its);
    }
    pairs = all ? Pairs::all : any ? Pairs::some : Pairs::none;
    full = all ? max(warp_uniform(load_shared<int>(steps + M::kFull)), 1) : 0;
  }
  __device__ __forceinline__ void add_terms(float (&s)[kScores]) const {
    if constexpr (M::kCaps) cap_scores(s, p.scale, p.cap, p.inverse_cap);
    if constexpr (M::kTerms)
      LaneTerms<E, true, M::Keys::kRows>{p.terms,      its_batch,       its_head, query, from.sites(k),
                                         from.table(), p.lists.q_token, its_row,  row}
          .add(s, p.scale, nullptr);
  }
  /// What distances take of scores that are not scaled yet: products go on from there. One
  /// instruction a score where all keys of a stage stand before all queries.
  __device__ __forceinline__ void begin_scores(float (&s)[kScores]) const {
    const int apart = p.apart + own;
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        s[i] = f(static_cast<float>(apart + at.row % kCell + i / 2 % 2 * 8 - row[i / 32] - 2 * at.quad()),
                 static_cast<float>(column_of(i)));
    };
    if (apart - row[0] >= kCell && apart - row[kParts - 1] >= kCell)
      each([&](float first, float column) { return fmaf(slope, column, -slope * first); });
    else each([&](float first, float column) { return -slope * fabsf(first - column); });
    fence_operand(s);
  }
  __device__ __forceinline__ void multiply_qk(float (&s)[kScores]) const {
    wgmma_begin();
    multiply_rows<E, typename M::Queries, typename M::Keys, M::kDistances>(s, from.owned.tile() + at.rows(), k.tile());
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_pv(float (&o)[D / 2], const std::uint32_t (&a)[2 * kScores / 16][4],
                                              const KeyRing& v, bool first) const {
    v.wait_full();
    wgmma_begin();
    multiply<E, typename M::Keys>(o, a, v.tile(), !first);
    wgmma_commit();
  }

  /// A stage in which this warpgroup has no pair.
  __device__ __forceinline__ void skip_turn() const {
    wait_turn();
    pass_turn();
    k.release();
    k.behind().wait_full();
    k.behind().release();
  }
  /// S of the stage taken and its weights; beside S, with kBehind, P V of the stage at v. Stages
  /// that are full have no code for masks between their products.
  template <bool kBehind, bool kMasked>
  __device__ __forceinline__ void weigh(const KeyRing& v, float (&s)[kScores], std::uint32_t (&a)[2 * kScores / 16][4],
                                        float (&o)[D / 2], OnlineSoftmax& softmax, bool first) {
    if constexpr (M::kDistances) begin_scores(s);
    wait_turn();
    multiply_qk(s);
    if constexpr (kBehind) multiply_pv(o, a, v, first);
    pass_turn();
    const bool drops = kDrops && (!M::kTerms || p.drops != 0);
    const auto find_survivors = [&] {
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        survive[i] = survivors<true, M::kAny>(p, M::kAny ? now(p.key) : key, head, own, row[i], at);
    };
    if (M::kAny && drops) find_survivors();
    wgmma_wait<kBehind>();
    fence_operand(s);
    add_terms(s);
    k.release();
    if (kBehind ? kMasked : pairs == Pairs::some)
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (cell[i] != Visits::kFull) mask(s, 32 * i, word[i], -INFINITY);
    softmax.raise_maxima(s, p.scale_log2);
    if constexpr (kDrops && !M::kAny) find_survivors();
    softmax.exponentiate(s, p.scale_log2);
    if constexpr (kBehind) {
      wgmma_wait<0>();
      fence_operand(o);
      fence_operand(s);  // nothing is packed above the wait, or two copies of P would be alive
      v.release();
    }
    pack<E>(a, s);
    if (drops)
#pragma unroll
      for (int i = 0; i < kParts; ++i) keep_pairs(a, 4 * i, survive[i]);
    if (kBehind || !first) softmax.rescale(o);
  }
  /// P V alone, of the stage whose scores were packed last.
  __device__ __forceinline__ void finish(const KeyRing& v, const std::uint32_t (&a)[2 * kScores / 16][4],
                                         float (&o)[D / 2], bool first) const {
    multiply_pv(o, a, v, first);
    wgmma_wait<0>();
    fence_operand(o);
    v.release();
  }
  /// All stages of an item. Whether there was any for this warpgroup: else o is not touched.
  __device__ __forceinline__ bool run(const Item& x, float (&o)[D / 2], OnlineSoftmax& softmax) {
    if constexpr (kPlaces) own = x.row + at.half * kCell, head = p.stream_of(x.batch, x.head);
    if constexpr (M::kDistances) slope = __ldg(p.slopes + x.head) / p.scale;
    if constexpr (M::kTerms) {
      its_batch = x.batch, its_head = x.head, its_row = x.row + at.row;
#pragma unroll
      for (int h = 0; h < 2; ++h) query[h] = p.terms.own_site(x, at.row + 8 * h);
    }
    float s[kScores];
    std::uint32_t a[2 * kScores / 16][4];
    KeyRing v = k;                      // of the stage whose weights are packed
    bool first = true, packed = false;  // no product with V was begun; one is to be
    bool looked = false;
    for (int left = x.steps; left > 0;) {
      take();
      look(!looked);
      looked = full <= 1;
      left -= kParts * max(full, 1);
      if (pairs == Pairs::none) {
        if (packed) finish(v, a, o, first), first = packed = false;
        skip_turn();
        continue;
      }
      bool done = true;  // with the stage at hand
      if (!packed) {
        weigh<false, true>(v, s, a, o, softmax, first);
        v = k.behind(), packed = true, full = max(full - 1, 0);
      } else if (full == 0) {
        weigh<true, true>(v, s, a, o, softmax, first);
        v = k.behind(), first = false;
      } else {
        done = false;
      }
#pragma unroll 1
      for (; full > 0; --full) {
        if (done) take();  // a run is of one visit
        for (int& its : row) its += done ? M::Keys::kRows : 0;
        weigh<true, false>(v, s, a, o, softmax, first);
        v = k.behind(), first = false, done = true;
      }
    }
    if (packed) finish(v, a, o, first), first = false;
    return !first;
  }
};

/// O and L of 64 queries.
template <class E, int D, bool kMerges>
__device__ __forceinline__ void store(const ForwardProblem& p, const Item& x, const Lane& at, const int (&token)[2],
                                      float (&o)[D / 2], const OnlineSoftmax& softmax, bool writes) {
  float* const lse = p.lse + p.row(x.batch, x.head) * p.length;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = softmax.sum[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    float share = total == 0 ? 0.0f : p.survivor / total;
    float l = (softmax.top[h] * p.scale_log2 + log2_fast(total)) * kLn2;
    const bool there = token[h] >= 0 && writes;
    const std::int64_t to = p.o.offset(x.batch, x.head, max(token[h], 0));
    if constexpr (kMerges) {
      float keep = 0;
      if (!p.fresh && there) l = merged(lse[token[h]], l, keep, share);
      __syncwarp();  // all four lanes of a row have read
      const float* const before = p.before + p.before_rows.offset(x.batch, x.head, max(token[h], 0));
      add_row<D / 8>(o, h, share, before, p.before ? keep : 0.0f, at.quad(), p.chunks);
      share = 1;
    }
    put_row<E, D / 8>(p.out, there ? to : -1, kMerges && p.wide, o, h, share, at.quad(), p.chunks);
    if (at.quad() == 0 && there) lse[token[h]] = l;
  }
}

template <class E, class M, bool kMerges>
__global__ void __launch_bounds__((1 + M::kHalves) * kWarpgroup, 1)
    forward_kernel(const __grid_constant__ ForwardProblem p) {
  run_block<Loader<M>, M, M::kHalves>(p, [&](const Lane& at, const Rings<M>& rings) {
    Attend<E, M> attend{p, at, rings};
    Rings<M>& from = attend.from;
    if (at.half == M::kHalves - 1) attend.pass_turn();  // the first warpgroup begins
    for (bool more = true; more;) {
      float o[M::D / 2];
      OnlineSoftmax softmax;
      bool any = false;
      int token[2];
      from.owned.wait_full();
      {
        const Item its = from.items.read();
        more = its.number >= 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = at.row + 8 * h;
          token[h] = row >= its.rows               ? -1
                     : kMerges && p.part_rows != 0 ? p.sum_row(its, row)
                                                   : __ldg(p.lists.q_token.data() + its.row + row);
        }
        any = attend.run(its, o, softmax);
      }
      from.owned.release();
      from.owned.next();
      if (!any) {
#pragma unroll
        for (float& y : o) y = 0;
      }
      const Item x = from.items.read();
      from.items.next();
      bool finite = true;
      if (p.redo) finite = (token[0] < 0 || is_finite(o, 0)) && (token[1] < 0 || is_finite(o, 1));
      finite = p.template mark<false>(x, at.half, finite);
      const bool stays = kMerges && p.before == p.out && !any;  // as it was
      const bool is_part = kMerges && p.part_rows != 0;
      if (is_part && !finite) softmax.sum[0] = softmax.sum[1] = NAN;  // which its row's sum is then
      store<E, M::D, kMerges>(p, x, at, token, o, softmax, !kMerges || is_part || (finite && !stays));
    }
    if (at.half == 0) attend.wait_turn();
  });
}

}  // namespace

template <class E, int D> void hopper::forward(Cuda where, const ForwardPass& f, const Marks& marks) {
  const Source q = source_of(f.q, f, false), k = source_of(f.k, f, true), v = source_of(f.v, f, true);
  const VisitsView& visits = visits_on_device(*f.tiling, where);
  const bool narrow = f.o.type != DType::f32,
             alone = narrow && f.fresh && f.sizes.scale > 1e-6;  // slopes over the scale must be in f32
  const bool threes = D <= 64 && extra_of(f, alone, visits.eights) < Extra::drops && narrow && visits.queries.wide &&
                      !visits.threes.owner.empty() && q.mapped && k.mapped && v.mapped;
  const auto with = [&](const Work& work) {
    ForwardProblem p{work};
    p.q = q, p.k = k, p.v = v;
    p.o = operand_of(f.o);
    p.out = f.o.data, p.lse = static_cast<float*>(f.lse), p.fresh = f.fresh, p.wide = f.o.type == DType::f32;
    p.before = static_cast<const float*>(f.before.data), p.before_rows = operand_of(f.before);
    PartSums parts;
    if (p.part_rows != 0) {
      parts = part_sums(work, f, marks.sums, f.sizes.heads, f.o);
      parts.lse = parts.sums[1], parts.token = p.lists.q_token, parts.before[0] = f.before;
      parts.to_lse = p.lse, parts.length = p.length, parts.fresh = p.fresh;
      p.out = marks.sums, p.lse = const_cast<float*>(parts.lse), p.o = rows_of(parts, work);
      p.length = static_cast<int>(parts.parts * p.part_rows);
      p.before = nullptr, p.fresh = p.wide = true;
    }
    p.heads_each = Divisor(f.sizes.heads / f.sizes.kv_heads);
    const auto run = [&]<class M>() {
      constexpr bool kMerges = !M::kDistances && !M::kCaps;
      const auto kernel = p.wide || !p.fresh ? forward_kernel<E, M, kMerges> : forward_kernel<E, M, false>;
      start(where, kernel, M::size, p, !p.wide || !p.side.busy || p.part_rows != 0, kItems,
            (1 + M::kHalves) * kWarpgroup);
    };
    const auto with_steps = [&]<Extra kExtra>() {
      if constexpr (kExtra == Extra::terms) p.terms = score_terms<D>(where, f, true);
      if (kExtra == Extra::terms || kExtra == Extra::cap) p.scale_log2 = kLog2e;  // scores have their scale
      if constexpr (D <= 64 && kExtra < Extra::drops)
        if (threes) return run.template operator()<Layout<D, 2 * kCell, kExtra, 3>>();
      // There are registers for what is looked up of 64 keys.
      const bool looks_up = f.terms && (f.terms->table || f.terms->slopes_on_grid);
      if constexpr (D <= (kExtra == Extra::terms ? 64 : 128))
        if (p.side.wide && !looks_up) return run.template operator()<Layout<D, 2 * kCell, kExtra>>();
      run.template operator()<Layout<D, kCell, kExtra>>();
    };
    using enum Extra;
    with_extra<D, none, distances, cap, drops, drops_any, terms>(extra_of(f, alone && !p.wide, visits.eights),
                                                                 with_steps);
    if (p.part_rows != 0) add_parts(where, parts);
  };
  for_portions<false>(where, f, marks, !threes, with, threes);
}

template void hopper::forward<HILT_TYPE, HILT_DIM>(Cuda, const ForwardPass&, const Marks&);

}  // namespace hilt::kernels
