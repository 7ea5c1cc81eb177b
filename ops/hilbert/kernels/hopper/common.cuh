#pragma once
#include "ops/hilbert/kernels/hopper/sm90.cuh"
#include "core/cuda/launch.cuh"
#include "ops/hilbert/kernels/hopper/kernels.h"
#include "ops/hilbert/kernels/cuda/merge.cuh"
#include "ops/hilbert/kernels/cuda/on_device.h"

// What the Hopper attention kernels share.

namespace hilt::kernels::hopper {

using namespace cuda;
using namespace cuda::hopper;

constexpr int kTile = 128;                           // rows of an owner's tile
constexpr int kCell = 64;                            // rows of a step
constexpr int kMultiplying = 2 * kWarpgroup;         // threads of the two warpgroups that multiply, 64 rows each
constexpr int kThreads = kWarpgroup + kMultiplying;  // the first warpgroup loads
constexpr int kFiniteBarrier = 1;                    // of all that multiply, and 4 to 6 of each warpgroup
constexpr int kTurnBarrier = 7;                      // of all that load
constexpr std::size_t kMostShared = 227 << 10;       // bytes a block can have
using Half = std::uint16_t;                          // a number of 16 bits, whatever its type

// ---- what a launch is told ---------------------------------------------------------------------

/// Rows of one tensor, of results their strides alone; in elements.
struct Operand {
  const Half* data;
  std::int64_t batch;
  int token, head;
  __device__ std::int64_t offset(int b, int h, int t = 0) const {
    return b * batch + static_cast<std::int64_t>(h) * head + static_cast<std::int64_t>(t) * token;
  }
  __device__ const Half* at(int b, int h) const { return data + offset(b, h); }
};
template <class Void> Operand operand_of(const AnyRows<Void>& x) {
  return {static_cast<const Half*>(x.data), x.batch, static_cast<int>(x.token), static_cast<int>(x.head)};
}
/// Rows that are read: gathered or, 64 at a time of tokens that count up, by the copy engine.
struct Source : Operand {
  bool mapped;
  CUtensorMap map;  // boxes of 64 columns and 64 rows, of one head
};
/// A source's rows of one head and batch.
struct HeadRows {
  const Source& of;
  int batch, head;
  const Half* base = of.at(batch, head);
};
/// Mapped where the pass's list of tokens counts up and the driver makes such a map.
inline Source source_of(const Input& x, const AttentionPass& a, bool keys) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const auto status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(f) : nullptr;
  }();
  Source s{operand_of(x)};
  if (!encode || a.along || !(keys ? a.tiling->k_token : a.tiling->q_token).counts_up()) return s;
  constexpr cuuint64_t kMost = 1 << 30;  // lists and items name no token and batch that is not there
  const auto wide = [](Index i) { return static_cast<cuuint64_t>(i); };
  const Index heads = keys ? a.sizes.kv_heads : a.sizes.heads;
  const cuuint64_t sizes[] = {wide(a.sizes.dim), wide(heads), kMost, kMost};
  const cuuint64_t strides[] = {wide(2 * x.head), wide(2 * x.token), wide(2 * x.batch)};
  const cuuint32_t box[] = {64, 1, kCell, 1}, each[] = {1, 1, 1, 1};
  s.mapped = encode(&s.map, x.type == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                    4, const_cast<Half*>(s.data), sizes, strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  return s;
}

/// What a block works through: an owner's rows for a head and a batch. Keys are owned for a key
/// head, and visited by the query heads first .. last - 1 of the launch's list.
struct alignas(16) Item {
  int number;  // of a part; below 0: there is none, and nothing to do
  int head, batch, first_head, last_head;
  int row, rows, visit, steps, tile, tiles;
  int part;                                            // which half of an owner
  int front_row, front_rows, front_cells, front_mask;  // the first visit
};

/// 64 rows of the other side, and the cells of the owner's halves.
struct alignas(16) Step {
  int row = 0, rows = 0;
  std::uint32_t cells = 0;  // of two
  int mask = 0;             // see Visit
  __device__ int cell(int half) const { return half == 2 ? mask : static_cast<int>(cells >> 16 * half & 0xffff); }
  static constexpr std::uint32_t kAllFull = Visits::kFull << 16 | Visits::kFull;
  __device__ bool is_full(int halves = 2) const { return cells == kAllFull && (halves < 3 || mask == Visits::kFull); }
};

/// The items of a launch, and what they visit.
struct Work {
  int length, heads, items, chunks;  // chunks: of 16 bytes a row
  float scale, scale_log2;
  TilingView lists;
  VisitsView::Side side;
  const std::uint32_t *mask, *made;  // of the plan, and of this call
  std::uint32_t drops;               // a rate, see drop_rate(); 0: none
  bool eights;                       // see Visits; else every weight has its own call of the generator
  std::uint32_t first_stream;        // of the first head of the first batch
  float survivor;                    // what survives is multiplied with it
  RandomKey key;
  const float* slopes;  // of each head
  int apart;            // by so much the first query's token is larger than the first key's
  float cap, inverse_cap;
  int part_rows;                        // that a part's sums have, of all owners; 0: owners are whole
  std::span<const Tiling::Range> tile;  // on the owners' side
  std::uint32_t* redo;                  // Marks of these; null: none
  std::int32_t* any;
  std::int32_t* taken;  // items that blocks took beyond their first ones; null: every block knows its own
  // Sections of as many calls (a head of a batch) as keep what they read in the L2 cache; the
  // longest items of a section first.
  int last_section;  // where it begins
  Divisor section, calls, last_calls, slots;
  std::int16_t head[kHeads], first_head[kHeads + 1], query_head[kHeads];
  int n_heads;      // of `head`
  int first_batch;  // of the launch

  __device__ __forceinline__ Item item(int i) const {
    Item x{};
    int its_section, rest, owner, call;
    section.split(i, its_section, rest);
    if (i >= last_section) last_calls.split(i - last_section, owner, call);
    else calls.split(rest, owner, call);
    fill(x, its_section * static_cast<int>(calls.d) + call, owner);
    return x;
  }
  /// What a call's owner is.
  __device__ __forceinline__ void fill(Item& x, int call, int owner) const {
    int slot;
    slots.split(call, x.batch, slot);
    x.batch += first_batch, x.head = head[slot], x.first_head = first_head[slot], x.last_head = first_head[slot + 1];
    const int4* const from = reinterpret_cast<const int4*>(side.owner.data()) + 3 * owner;
    const int4 a = __ldg(from), b = __ldg(from + 1), c = __ldg(from + 2);
    x.row = a.x, x.rows = a.y, x.visit = a.z, x.steps = b.x, x.tile = b.y, x.tiles = b.z, x.number = b.w;
    x.front_row = c.x, x.front_rows = c.y, x.front_cells = c.z, x.front_mask = c.w;
  }
  /// The row of [batch, heads, ..].
  __device__ std::int64_t row(int batch, int h) const { return static_cast<std::int64_t>(batch) * heads + h; }
  __device__ std::uint32_t stream_of(int b, int h) const { return first_stream + static_cast<unsigned>(row(b, h)); }
  /// The row of the parts' sums where row `i` of an owner goes.
  __device__ int sum_row(const Item& x, int i) const { return x.number * part_rows + x.row + i; }
  /// Says of an owner's half whether it is finite, for all of a warpgroup's threads, or of both;
  /// else marks its rows.
  template <bool kBoth> __device__ __forceinline__ bool mark(const Item& x, int half, bool finite) const {
    if (!redo) return true;
    finite = kBoth ? named_all(kFiniteBarrier, kMultiplying, finite) : named_all(4 + half, kWarpgroup, finite);
    if (finite) return true;
    const int first = x.row + half * kCell, end = first + kCell;
    for (int its = x.tile + static_cast<int>(threadIdx.x) % kWarpgroup; its < x.tile + x.tiles; its += kWarpgroup) {
      if (tile[its].begin >= end || first >= tile[its].end) continue;
      std::uint32_t* const to = redo + row(x.batch, x.head) * static_cast<std::int64_t>(tile.size()) + its;
      const bool front = first <= tile[its].begin;
      reinterpret_cast<std::uint16_t*>(to)[front ? 0 : 1] =
          static_cast<std::uint16_t>(front ? min(end, tile[its].end) - tile[its].begin : tile[its].end - first);
    }
    *any = 1;
    return false;
  }
};

/// Goes through the steps of an item; beyond them steps are empty.
struct Walk {
  const int4* next = nullptr;
  int left = 0, row = 0, rows = 0, mask = 0;
  std::uint32_t cells = 0;
  Walk() = default;
  __device__ Walk(const Work& w, const Item& x)
      : next(reinterpret_cast<const int4*>(w.side.visit.data()) + x.visit),
        left(x.steps),
        row(x.front_row),
        rows(x.front_rows),
        mask(x.front_mask),
        cells(static_cast<std::uint32_t>(x.front_cells)) {}
  __device__ __forceinline__ Step take() {
    if (left == 0) return {};
    const Step s{row, min(rows, kCell), cells, mask};
    row += kCell, rows -= kCell, --left;
    if (left > 0 && rows <= 0) {
      const int4 v = __ldg(++next);
      row = v.x, rows = v.y, cells = static_cast<std::uint32_t>(v.z), mask = v.w;
    }
    return s;
  }
  /// How many times `steps` steps are left of this visit, if these are full.
  __device__ __forceinline__ int full(int steps, int halves = 2) const {
    return Step{0, 0, cells, mask}.is_full(halves) ? rows / (steps * kCell) : 0;
  }
};

/// The work of one portion of owners, or of their parts, if they have any. kKeys: keys are owned;
/// threes: see Visits.
template <bool kKeys>
Work work_of(Cuda where, const AttentionPass& a, const Marks& marks, std::size_t portion, bool parts = false,
             bool threes = false) {
  const AttentionSizes& s = a.sizes;
  const VisitsView& visits = visits_on_device(*a.tiling, where);
  Work w{};
  w.length = static_cast<int>(s.queries), w.heads = static_cast<int>(s.heads), w.chunks = static_cast<int>(s.dim / 8);
  w.scale = static_cast<float>(s.scale), w.scale_log2 = w.scale * kLog2e;
  w.lists = lists_of(a, where), w.mask = visits.mask.data();
  w.side = kKeys ? visits.keys : threes ? visits.threes : visits.queries;
  const auto first = static_cast<std::size_t>(w.side.portion[portion]);
  w.side.owner = w.side.owner.subspan(first, static_cast<std::size_t>(w.side.portion[portion + 1]) - first);
  if (parts && w.side.parts > 1)
    w.side.owner = w.side.part, w.part_rows = static_cast<int>((kKeys ? w.lists.k_token : w.lists.q_token).size());
  w.made = marks.masks;
  w.tile = kKeys ? w.lists.k_tile : w.lists.q_tile, w.redo = kKeys ? marks.keys : marks.queries, w.any = marks.any;
  if (w.side.uneven && marks.taken) w.taken = marks.taken + kKeys;
  Index slots = 0;
  const Index each = s.heads / s.kv_heads;
  for (Index i = 0; i < a.n_heads; ++i) {
    const Index head = a.heads[i], owner = kKeys ? head / each : head;
    if (slots == 0 || w.head[slots - 1] != owner)
      w.first_head[slots] = static_cast<std::int16_t>(i), w.head[slots++] = static_cast<std::int16_t>(owner);
    w.query_head[i] = static_cast<std::int16_t>(head);
    w.first_head[slots] = static_cast<std::int16_t>(i + 1);
  }
  constexpr Index kInCache = 8 << 20;
  const auto owners = static_cast<Index>(w.side.owner.size());
  // Owners of a call that work at the same time visit much the same rows.
  const Index all = s.batch * slots, each_reads = 4 * kCell * std::max<Index>(w.side.steps, 1) * s.dim;
  const bool alone = w.side.busy && !w.side.uneven;  // a call's owners after each other
  // Where they differ, a section keeps all multiprocessors busy as long as its longest item takes.
  const auto enough = static_cast<Index>(2 * properties(where.device).multiprocessors * w.side.longest);
  const Index calls = alone ? 1 : std::clamp<Index>(std::max(kInCache / each_reads, enough), 1, all),
              whole = (all - 1) / calls;
  w.items = static_cast<int>(all * owners), w.last_section = static_cast<int>(whole * calls * owners);
  w.section = Divisor(calls * owners), w.calls = Divisor(calls), w.last_calls = Divisor(all - whole * calls);
  w.slots = Divisor(slots), w.n_heads = static_cast<int>(slots);
  w.eights = visits.eights && !a.along;
  w.drops = s.dropout, w.survivor = static_cast<float>(keep_scale(s.dropout)), w.key = s.key;
  w.first_stream = static_cast<std::uint32_t>(s.first_batch * s.heads + s.first_head);
  if (!a.terms) return w;
  w.slopes = static_cast<const float*>(a.terms->slopes), w.apart = a.tiling->q_names()[0] - a.tiling->k_names()[0];
  if (a.terms->cap != 0) w.cap = static_cast<float>(a.terms->cap), w.inverse_cap = static_cast<float>(1 / a.terms->cap);
  return w;
}
/// run(work) for each portion of owners, once the masks that a plan had no room for are made. All
/// but the largest plans have one portion.
template <bool kKeys, class F>
void for_portions(Cuda where, const AttentionPass& a, const Marks& marks, bool parts, const F& run,
                  bool threes = false) {
  const VisitsView& visits = visits_on_device(*a.tiling, where);
  const VisitsView::Side& side = kKeys ? visits.keys : visits.queries;
  for (std::size_t i = 0; i + 1 < side.portion.size(); ++i) {
    const Work w = work_of<kKeys>(where, a, marks, i, parts, threes);
    if (side.made > 0) make_masks(where, a, w.side.owner, !kKeys, marks.masks, w.taken);
    run(w);
  }
}
/// The sums of a launch's parts, which lie in `room`, and the one or two results they go to.
inline PartSums part_sums(const Work& w, const AttentionPass& a, float* room, Index heads, const Output& to,
                          const Output& second = {}) {
  PartSums p{};
  p.parts = w.side.parts, p.heads = heads, p.dim = a.sizes.dim, p.batch = a.sizes.batch, p.n_heads = w.n_heads;
  std::copy(w.head, w.head + w.n_heads, p.head);
  const Index all = p.batch * heads * p.parts * w.part_rows;
  p.sums[0] = room, p.sums[1] = room + all * p.dim, p.to[0] = to, p.to[1] = second;
  p.marked = w.redo != nullptr;
  return p;
}
/// Their rows as a launch's results.
inline Operand rows_of(const PartSums& p, const Work& w) {
  const Index each = p.parts * w.part_rows * p.dim;
  return {nullptr, p.heads * each, static_cast<int>(p.dim), static_cast<int>(each)};
}
/// What the kernels of one pass backward are told.
struct OnePass : Work {
  Source q, k, v, d_o;
  Operand dq_rows, dk_rows;
  Half* dq;
  void *dk, *dv;  // of 16 bits, those of parts f32
  const float *lse, *delta;
  std::uint32_t* redo_queries;  // as redo, [batch, heads, tiles of queries]
  /// Has the plain kernel redo the tile that a row of queries is of; rare, so it may look for it.
  __device__ __forceinline__ void redo_query(int b, int h, int query) const {
    int its = 0;
    while (lists.q_tile[static_cast<std::size_t>(its)].end <= query) ++its;
    redo_queries[row(b, h) * static_cast<std::int64_t>(lists.q_tile.size()) + its] = kWholeTile;
    *any = 1;
  }
};
inline OnePass one_pass_of(const Work& work, const BackwardPass& b, const Marks& marks) {
  OnePass p{work};
  p.q = source_of(b.q, b, false), p.d_o = source_of(b.d_o, b, false);
  p.k = source_of(b.k, b, true), p.v = source_of(b.v, b, true);
  p.dq_rows = operand_of(b.dq), p.dk_rows = operand_of(b.dk);
  p.dq = static_cast<Half*>(b.dq.data), p.dk = b.dk.data, p.dv = b.dv.data;
  p.lse = static_cast<const float*>(b.lse), p.delta = static_cast<const float*>(b.delta);
  p.redo_queries = marks.queries;
  return p;
}
/// run.operator()<it>(), of these that a head dim has.
template <int D, Extra... kExtras, class F> void with_extra(Extra it, const F& run) {
  const auto if_it_is = [&]<Extra kExtra>() {
    if constexpr (D <= 128 || kExtra == Extra::none || kExtra == Extra::terms)
      if (it == kExtra) run.template operator()<kExtra>();
  };
  (if_it_is.template operator()<kExtras>(), ...);
}
/// Blocks that stay work through all items, one a multiprocessor; else every item has its own.
/// Parts of one attention, which are merged or added, are what ranks exchange rows between: with a
/// block an item, copies get in wherever one ends. Leaving multiprocessors free was slower.
template <class Problem>
void start(Cuda where, void (*kernel)(Problem), std::size_t shared, Problem p, bool stays = true, Index most = kItems,
           int threads = kThreads) {
  const Index items = p.items,
              blocks = stays ? std::min({Index{properties(where.device).multiprocessors}, items, most}) : items;
  launch("attention", where, kernel, dim3(static_cast<unsigned>(blocks)), threads, shared, p);
}

// ---- work items and tiles in shared memory, from producer to consumer ---------------------------

/// The items of a block, one after the other, for all threads that load: the first is its own.
/// Where items differ, the next is taken when this one is loaded: else a long one would hold it up.
struct Turns {
  const Work& w;
  std::uint32_t slot;  // in shared memory, for two numbers
  int last = static_cast<int>(blockIdx.x);
  std::uint32_t turn = 0;
  /// Below 0 after the last one.
  __device__ __forceinline__ int next() {
    if (w.taken) {
      if (threadIdx.x == 0) store_shared(slot + 4 * turn, static_cast<int>(gridDim.x) + atomicAdd(w.taken, 1));
      named_sync(kTurnBarrier, kWarpgroup);
      last = load_shared<int>(slot + 4 * turn), turn ^= 1;
    } else {
      last += static_cast<int>(gridDim.x);
    }
    return last < w.items ? last : -1;
  }
};

/// Work items for the consumer, which reads one when its owner's tile has landed, and again for its
/// results, when that tile may be another one already.
template <int kTiles> struct Records {
  static constexpr std::uint32_t kSlots = kTiles + 2, kBytes = kSlots * sizeof(Item);
  std::uint32_t first, slot = 0;
  __device__ void next() { slot = slot + 1 == kSlots ? 0 : slot + 1; }
  /// The producer writes it, once the stage for its tile is empty.
  __device__ __forceinline__ void write(const Item& x) {
    if (threadIdx.x == 0) store_shared(first + slot * sizeof(Item), x);
    next();
  }
  __device__ __forceinline__ Item read() const {
    Item x = load_shared<Item>(first + slot * sizeof(Item));
    x.number = warp_uniform(x.number), x.steps = warp_uniform(x.steps), x.part = warp_uniform(x.part);
    x.first_head = warp_uniform(x.first_head), x.last_head = warp_uniform(x.last_head);
    return x;
  }
};

/// A tile of kRows rows of D numbers, see swizzled().
template <int D, int kRows_> struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kPanels = (D + 63) / 64, kSteps = D / 16;
  static constexpr std::uint32_t kPanel = kRows * kPanelRow, kBytes = kPanels * kPanel;
};

/// 64 rows of a tile, of a head's tokens from `first` on, by one thread and the copy engine. What
/// lies beyond the columns is zero.
template <class Tile>
__device__ __forceinline__ void load_boxes(std::uint32_t tile, const HeadRows& x, int first, std::uint32_t barrier) {
  barrier_expect_more(barrier, Tile::kPanels * kCell * kPanelRow);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
    box_load(tile + static_cast<std::uint32_t>(panel) * Tile::kPanel, x.of.map, 64 * panel, x.head, first, x.batch,
             barrier);
}

/// A ring of stages, each with a barrier for "full" and one for "empty", and where one role stands
/// in it: a stage, and the parity of its phase. The producer waits for "empty", which passes
/// directly in the first round; the consumer waits for "full".
template <int kStages_, std::uint32_t kStageBytes, int kHalves = 2> struct Ring {
  static constexpr int kStages = kStages_;
  static constexpr std::uint32_t kBytes = kStages * kStageBytes, kBarriers = 16 * kStages;
  std::uint32_t stages, barriers, parity;
  int stage = 0;
  __device__ Ring(std::uint32_t at, std::uint32_t its_barriers, bool loads)
      : stages(at), barriers(its_barriers), parity(loads) {}
  __device__ void set_up() const {
    constexpr int kLoad = kWarpgroup + 1, kMultiply = kHalves * kWarpgroup / kWarp;  // see announce() and release()
    for (std::uint32_t i = 0; i < kStages; ++i)
      barrier_init(barriers + 8 * i, kLoad), barrier_init(barriers + 8 * (kStages + i), kMultiply);
  }
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  /// The ring that lies behind this one, at the same stage.
  __device__ Ring behind() const {
    Ring other = *this;
    other.stages += kBytes, other.barriers += kBarriers;
    return other;
  }
  __device__ std::uint32_t tile() const { return stages + static_cast<std::uint32_t>(stage) * kStageBytes; }
  /// This stage's among rows of `bytes` each, from `first` on, that belong to the stages.
  __device__ std::uint32_t row(std::uint32_t first, std::uint32_t bytes) const {
    return first + static_cast<std::uint32_t>(stage) * bytes;
  }
  __device__ std::uint32_t full() const { return barriers + 8 * static_cast<std::uint32_t>(stage); }
  __device__ std::uint32_t empty() const { return full() + 8 * kStages; }
  __device__ void wait_empty() const { barrier_wait(empty(), parity); }
  __device__ void wait_full() const {
    barrier_wait(full(), parity);
    fence_for_wgmma();
  }
  __device__ void release() const {
    __syncwarp();
    if (static_cast<int>(threadIdx.x) % kWarp == 0) barrier_arrive(empty());
  }
};
/// What a thread that loads says: a stage is full once its copies so far have landed. One of them
/// may have written too, what items and steps are, and says so itself.
__device__ __forceinline__ void announce(std::uint32_t full) {
  arrive_when_landed(full);
  if (threadIdx.x == 0) barrier_arrive(full);
}

/// A block's shared memory: tiles that it owns, those that stream by, and its items.
template <class M> struct Rings {
  std::uint32_t base;
  typename M::OwnedRing owned;
  typename M::StreamedRing streamed;
  typename M::Items items;
  __device__ Rings(std::uint32_t at, bool loads)
      : base(at),
        owned(base + M::owned, base + M::barriers, loads),
        streamed(base + M::streamed, owned.barriers + M::OwnedRing::kBarriers, loads),
        items{base + M::items} {}
  /// The steps of a stage; L of streamed queries.
  __device__ std::uint32_t steps(const typename M::StreamedRing& stage) const {
    return stage.row(base + M::steps, M::kStepBytes);
  }
  __device__ std::uint32_t lse() const { return streamed.row(base + M::lse, M::kRowBytes); }
  /// With terms: the table of an item's head, and what they see of a stage's rows.
  __device__ std::uint32_t table() const { return owned.row(base + M::tables, M::kTable); }
  __device__ std::uint32_t sites(const typename M::StreamedRing& stage) const {
    return stage.row(base + M::sites, M::kSiteBytes);
  }
};

/// What a block loads: loader.load(item) for each, and one more stage of its owners' tiles that
/// says that there is no other. begin(item) fetches early.
template <class M, class Loader> __device__ __forceinline__ void load_items(Loader loader) {
  auto& to = loader.to;
  Turns turns{loader.p, to.base + M::turns};
  const auto item = [&](int i) { return i >= 0 ? loader.item(i) : Item{.number = -1}; };
  Item x = item(turns.last);
  loader.begin(x);
  while (x.number >= 0) {
    Item next;
    if (!loader.p.taken) next = item(turns.next());
    to.owned.wait_empty();
    to.items.write(x);
    loader.load(x);
    if (loader.p.taken) next = item(turns.next());
    loader.begin(x = next);
  }
  to.owned.wait_empty();
  to.items.write(x);
  announce(to.owned.full());
}

/// A thread that loads: eight share a row, or four a short one, 16 bytes of every 128 a thread, so
/// that lines stay whole; it has rows row + kApart i of a tile. What is beyond the rows or columns
/// there are is zero.
template <int D> struct Gather {
  static constexpr int kLanes = D < 64 ? D / 8 : 8, kOfWarp = kWarp / kLanes, kApart = kWarpgroup / kLanes;
  static constexpr int kOfStep = kCell / kApart;  // a thread's rows of a step
  int row = static_cast<int>(threadIdx.x) / kLanes, chunk = static_cast<int>(threadIdx.x) % kLanes;
  std::uint32_t at = swizzled(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(chunk));
  int chunks;  // of a row
  __device__ explicit Gather(int of_row) : chunks(of_row) {}

  // Each thread fetches one token of up to 128 rows, early; a shuffle hands it on to the lanes that
  // copy that row.
  int lane = static_cast<int>(threadIdx.x) % kWarp,
      mine = kApart * (lane / kOfWarp) + kOfWarp * (static_cast<int>(threadIdx.x) / kWarp) + lane % kOfWarp;
  /// This thread's of a step's rows, or of more: the token of row `mine`, -1 beyond them.
  __device__ __forceinline__ int fetch(std::span<const std::int32_t> list, const Step& rows) const {
    return mine < rows.rows ? __ldg(list.data() + rows.row + mine) : -1;
  }
  /// Where row `mine` of a tile of two steps of 64 rows stands in its list, -1 beyond them.
  __device__ __forceinline__ int row_of(const Step& a, const Step& b) const {
    const bool second = mine >= kCell;
    const int i = mine % kCell;
    return i < (second ? b.rows : a.rows) ? (second ? b.row : a.row) + i : -1;
  }
  /// The tokens of rows row + kApart i of a tile, from what each thread holds.
  template <int kRows> __device__ __forceinline__ void hand_out(int held, int (&token)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) token[i] = __shfl_sync(~0u, held, kOfWarp * i + lane / kLanes);
  }
  /// Those rows, to a stage whose barrier is `full`; whole: all rows of the tile are there.
  template <class Tile, bool kGathers = true, int kRows>
  __device__ __forceinline__ void copy(std::uint32_t tile, const int (&token)[kRows], const HeadRows& x, bool whole,
                                       std::uint32_t full) const {
    if (!kGathers || (whole && x.of.mapped)) {
      if (threadIdx.x == 0)
#pragma unroll
        for (int i = 0; i < kRows; i += kOfStep)
          load_boxes<Tile>(tile + static_cast<std::uint32_t>(i) * kApart * kPanelRow, x, token[i], full);
      return;
    }
    const Half* const mine = x.base + chunk * 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Half* const line = mine + static_cast<std::int64_t>(max(token[i], 0)) * x.of.token;
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel)
        copy_16(tile + static_cast<std::uint32_t>(panel) * Tile::kPanel + at +
                    static_cast<std::uint32_t>(i) * kApart * kPanelRow,
                line + panel * 64, token[i] >= 0 && panel * 8 + chunk < chunks);
    }
  }
  /// The same from what each thread holds, once.
  template <class Tile>
  __device__ __forceinline__ void copy_held(std::uint32_t tile, int held, const HeadRows& x, bool whole = false,
                                            std::uint32_t full = 0) const {
    int token[Tile::kRows / kApart];
    hand_out(held, token);
    copy<Tile>(tile, token, x, whole, full);
  }
};

/// A thread that multiplies: of the 64 rows of its warpgroup (`half` of a tile) it has `row` and
/// row + 8 of the tile, and of every eight columns two.
struct Lane {
  int half, lane, warp, row;
  __device__ explicit Lane(int group) : half(group - 1) {
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread % 32, warp = thread / 32 % 4, row = half * 64 + warp * 16 + lane / 4;
  }
  /// Which of the four lanes with the same rows; not kept, for registers are scarce.
  __device__ int quad() const { return static_cast<int>(threadIdx.x) % 4; }
  __device__ std::uint32_t rows() const { return static_cast<std::uint32_t>(half) * 64 * kPanelRow; }
};

/// What a block does, if it has the registers and the memory: the first warpgroup loads, the others
/// multiply(where they are, rings), 64 rows each.
template <class Loader, class M, int kHalves = 2, class Problem, class Multiply>
__device__ __forceinline__ void run_block(const Problem& p, const Multiply& multiply) {
  static_assert(M::size <= kMostShared);
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const int group = warpgroup();
  const decltype(Loader::to) rings(shared_address(memory), group == 0);
  if (threadIdx.x == 0) {
    rings.owned.set_up(), rings.streamed.set_up();
    if constexpr (M::kBehind) rings.streamed.behind().set_up();
    barrier_init_done();
  }
  __syncthreads();
  if (group == 0) {
    fewer_registers<M::kProducerRegisters>();
    load_items<M>(Loader{p, rings, Gather<M::D>(p.chunks)});
    return;
  }
  more_registers<registers_left((1 + kHalves) * kWarpgroup, M::kProducerRegisters)>();
  multiply(Lane(group), rings);
}

// ---- products ----------------------------------------------------------------------------------

/// d = A B^T, of the 64 rows at a and those of B; with kAdds, d += A B^T.
template <class E, class A, class B, bool kAdds = false, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N], std::uint32_t a, std::uint32_t b) {
#pragma unroll
  for (int k = 0; k < A::kSteps; ++k)
    wgmma<E, 0, 0>(d, operand(a, along_columns(k, A::kPanel), 0), operand(b, along_columns(k, B::kPanel), 0),
                   kAdds || k > 0);
}
/// d += A B, or d = A B where accumulate is 0; A in registers, the columns of B in blocks of up to
/// 128.
template <class E, class B, int K, int N>
__device__ __forceinline__ void multiply(float (&d)[N], const std::uint32_t (&a)[K][4], std::uint32_t b,
                                         int accumulate) {
  constexpr int kBlock = N < 64 ? N : 64;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    wgmma<E, 1>(reinterpret_cast<float(&)[kBlock]>(d), a[k], operand(b, along_rows(k), B::kPanel),
                k > 0 ? 1 : accumulate);
    if constexpr (N > kBlock)
      wgmma<E, 1>(reinterpret_cast<float(&)[N - kBlock]>(d[kBlock]), a[k],
                  operand(b + 2 * B::kPanel, along_rows(k), B::kPanel), k > 0 ? 1 : accumulate);
  }
}
/// Scores as the operand A of the next product.
template <class E, int K, int N> __device__ __forceinline__ void pack(std::uint32_t (&a)[K][4], const float (&s)[N]) {
  static_assert(N == 8 * K);
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int x = 0; x < 4; ++x) a[k][x] = pack_pair<E>(s[8 * k + 2 * x], s[8 * k + 2 * x + 1]);
}

/// The column of a lane's score i of a cell, from its first on; i / 2 % 2 is which row.
constexpr int column_of(int i) { return i % 32 / 4 * 8 + i % 2; }
/// f(i, L or Delta of score i) for the 32 that a lane has of 64 x 64 scores. The statistic is that
/// of their columns, in shared memory, or of their rows; it comes by four scores.
struct ByColumn {
  std::uint32_t at;  // of the lane's first pair
  __device__ __forceinline__ float4 operator()(int c) const {
    const float2 y = load_shared<float2>(at + static_cast<std::uint32_t>(c) * 32);
    return {y.x, y.y, y.x, y.y};
  }
};
struct ByRow {
  float x[2];
  __device__ __forceinline__ float4 operator()(int) const { return {x[0], x[0], x[1], x[1]}; }
};
template <class Statistic, class F> __device__ __forceinline__ void for_scores(const Statistic& of, const F& f) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float4 y = of(c);
    f(4 * c, y.x), f(4 * c + 1, y.y), f(4 * c + 2, y.z), f(4 * c + 3, y.w);
  }
}

// ---- masks and results -------------------------------------------------------------------------

/// The bits of a lane's 32 scores of a cell, as Visits lays them out. Words of masks are read
/// early, where their latency is hidden.
__device__ __forceinline__ std::uint32_t word_of(const Work& w, const Step& step, const Lane& at) {
  const int cell = step.cell(at.half), thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  if (cell <= Visits::kFull) return cell == Visits::kFull ? ~0u : 0;
  return __ldg(cell >= Visits::kMasks ? w.mask + (cell - Visits::kMasks) * kWarpgroup + thread
                                      : w.made + (step.mask + at.half) * kWarpgroup + thread);
}
/// x = masked where a bit of its word is missing: 32 scores from `first` on.
template <int N> __device__ __forceinline__ void mask(float (&x)[N], int first, std::uint32_t word, float masked) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int c = 0; c < 8; ++c)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (!(word & 1u << (16 * h + 2 * c + j))) x[first + 4 * c + 2 * h + j] = masked;
}

// ---- dropout -----------------------------------------------------------------------------------

/// In: piece p of lane l of 2 or 4 or 8 lanes, in nibbles, bytes or halves. Out: piece l of lane p.
__device__ __forceinline__ std::uint32_t swap_nibbles(std::uint32_t x, int lanes, bool odd) {
  const std::uint32_t other = __shfl_xor_sync(~0u, x, lanes);
  return odd ? (x & 0xf0f0f0f0) | (other >> 4 & 0x0f0f0f0f) : (x & 0x0f0f0f0f) | (other << 4 & 0xf0f0f0f0);
}
__device__ __forceinline__ std::uint32_t swap_pieces(std::uint32_t x, int lanes, unsigned order) {
  return __byte_perm(x, __shfl_xor_sync(~0u, x, lanes), order);
}
/// Bits of a mask change places with those `apart` above them.
__device__ __forceinline__ std::uint32_t swap_bits(std::uint32_t x, int apart, std::uint32_t mask) {
  const std::uint32_t other = (x ^ x >> apart) & mask;
  return x ^ other ^ other << apart;
}
/// Which weights of a lane's 32 of a cell survive, as a mask's word, or with kQueries (rows are
/// queries) as keep_pairs() wants them: swap_bits(x, 15, 0xaaaa) turns either way. Keys in runs of
/// eight have bits that one call of the generator makes: lanes with parts of the same runs make
/// four calls each and hand out what they found. `own`, `row`: where the rows of the owner's half
/// and of the step begin. Without kAny there is no branch: exponentials run beside it.
template <bool kQueries, bool kAny>
__device__ __forceinline__ std::uint32_t survivors(const Work& w, const RandomKey& key, std::uint32_t head, int own,
                                                   int row, const Lane& at) {
  const auto name = [&](std::span<const std::int32_t> list, int i) {
    return static_cast<std::uint32_t>(__ldg(list.data() + min(i, static_cast<int>(list.size()) - 1)));
  };
  const int r = at.lane / 4, first = own + 16 * at.warp;
  if (kAny && !w.eights) {
    std::uint32_t x = 0;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const int mine = first + r + i / 16 * 8, other = row + i % 16 / 2 * 8 + 2 * at.quad() + i % 2;
      const std::uint32_t t = name(w.lists.q_name, kQueries ? mine : other),
                          u = name(w.lists.k_name, kQueries ? other : mine);
      x |= static_cast<std::uint32_t>(attention_keeps(key, head, t, u, w.drops)) << i;
    }
    return kQueries ? swap_bits(x, 15, 0xaaaa) : x;
  }
  std::uint32_t query[2], run[2];  // a lane makes columns 16 quad .. of its two rows, or 2 lane .. of sixteen
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    query[i] = name(w.lists.q_name, kQueries ? first + r + 8 * i : row + 2 * at.lane + i);
    run[i] = name(w.lists.k_name, kQueries ? row + 16 * at.quad() + 8 * i : first + 8 * i) / 8;
  }
  // A decision is the smaller of the rate and the greater of rate - 1 and its bits, less rate - 1:
  // all that is taken away at once comes to rate - 1 here.
  const std::uint32_t below = w.drops - 1;
  std::uint32_t x = below;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const auto words = attention_bits(key, head, query[j], run[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        x += __vminu2(__vmaxu2(words[k], below * 0x10001), w.drops * 0x10001) << (4 * k + 2 * i + j);
    }
  if constexpr (kQueries) return swap_pieces(swap_nibbles(x, 1, at.lane & 1), 2, at.lane & 2 ? 0x3715 : 0x6240);
  x = swap_nibbles(swap_pieces(x, 4, at.lane & 4 ? 0x3276 : 0x5410), 8, at.lane & 8);
  x = swap_pieces(x, 16, at.lane & 16 ? 0x3715 : 0x6240);
  return swap_bits(x, 14, 0xcccc);
}

/// Drops weights packed by pairs whose bit is not set: of a[first + k][x] bit 4 k + x, and the
/// sixteenth above it. The ends of bytes are spread over halves.
template <int K> __device__ __forceinline__ void keep_pairs(std::uint32_t (&a)[K][4], int first, std::uint32_t bits) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    std::uint32_t both;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(both) : "r"(bits << (7 - n % 8)), "r"(n < 8 ? 0xaa88 : 0xbb99));
    a[first + n / 4][n % 4] &= both;
  }
}

/// Whether a lane's sums in row `h` of its pair are finite. A product multiplies what is masked by
/// zero, and 0 x NaN is NaN; and f16 is too narrow for some slopes: where sums are not finite, the
/// plain kernel redoes the tile.
template <int N> __device__ __forceinline__ bool is_finite(const float (&x)[N], int h) {
  float odd = 0;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) odd = fmaf(x[4 * i + 2 * h], 0.0f, fmaf(x[4 * i + 2 * h + 1], 0.0f, odd));
  return odd == 0;
}

/// One row of sums (row h of the pair a lane has), of which `chunks` of 8 are there: a quad writes
/// 64 bytes at a time. Where row is null nothing is written.
template <class E, int Chunks, int N>
__device__ __forceinline__ void store_row(Half* row, const float (&x)[N], int h, float scale, int quad, int chunks) {
#pragma unroll
  for (int g = 0; g < Chunks / 4; ++g) {
    std::uint32_t w[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      w[c] = pack_pair<E>(x[16 * g + 4 * c + 2 * h] * scale, x[16 * g + 4 * c + 2 * h + 1] * scale);
    transpose_four(w);
    if (row && 4 * g + quad < chunks)
      *reinterpret_cast<uint4*>(row + (4 * g + quad) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
/// One row of sums = scale sums + keep before, of an f32 row, which is not read where keep is 0.
template <int Chunks, int N>
__device__ __forceinline__ void add_row(float (&x)[N], int h, float scale, const float* before, float keep, int quad,
                                        int chunks) {
  const float2* const from = reinterpret_cast<const float2*>(before) + quad;
#pragma unroll
  for (int c = 0; c < Chunks; ++c) {
    const float2 y = keep != 0 && c < chunks ? from[4 * c] : float2{};
    x[4 * c + 2 * h] = fmaf(keep, y.x, scale * x[4 * c + 2 * h]);
    x[4 * c + 2 * h + 1] = fmaf(keep, y.y, scale * x[4 * c + 2 * h + 1]);
  }
}
/// One row of results, `to` behind `base`; below 0 nothing is written. In f32 a quad fills sectors.
template <class E, int Chunks, int N>
__device__ __forceinline__ void put_row(void* base, std::int64_t to, bool wide, const float (&x)[N], int h, float scale,
                                        int quad, int chunks) {
  if (!wide) return store_row<E, Chunks>(to >= 0 ? static_cast<Half*>(base) + to : nullptr, x, h, scale, quad, chunks);
  float2* const row = reinterpret_cast<float2*>(static_cast<float*>(base) + to) + quad;
#pragma unroll
  for (int c = 0; c < Chunks; ++c)
    if (to >= 0 && c < chunks) row[4 * c] = {x[4 * c + 2 * h] * scale, x[4 * c + 2 * h + 1] * scale};
}

/// dK and dV of an owner's half, of whose rows a lane has `first` and the eighth behind; with
/// kParts, maybe of a part.
template <class E, bool kParts, int N>
__device__ __forceinline__ void store_keys(const OnePass& p, const Item& x, int half, int first, int quad,
                                           float (&dk)[N], float (&dv)[N]) {
  const bool is_part = kParts && p.part_rows != 0;
  bool finite = true;
  std::int64_t to[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first + 8 * h;
    const bool there = row < x.rows;
    const int its = !there ? 0 : is_part ? p.sum_row(x, row) : __ldg(p.lists.k_token.data() + x.row + row);
    to[h] = there ? p.dk_rows.offset(x.batch, x.head, its) : -1;
    if (p.redo && there) finite = finite && is_finite(dk, h) && is_finite(dv, h);
  }
  p.template mark<false>(x, half, finite);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    put_row<E, N / 4>(p.dk, to[h], is_part, dk, h, p.scale, quad, p.chunks);
    put_row<E, N / 4>(p.dv, to[h], is_part, dv, h, p.survivor, quad, p.chunks);
  }
}

}  // namespace hilt::kernels::hopper
