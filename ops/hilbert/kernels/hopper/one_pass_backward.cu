// Attention on Hopper, backward, in one pass over the scores, for any number of owners of keys. A
// block owns 128 keys of a key head (64 a warpgroup): K and V stay in shared memory, dK and dV in
// registers. It meets tiles of queries, 128 of them at head dim 64, else 64:
//
//   S^T = K Q^T      P^T = e^(c S^T - L)      dP^T = V dO^T      dS^T = P^T (dP^T - Delta)
//   dV += P^T dO     dK += dS^T Q             A from registers
//   dQ  = dS K                                dS^T crosses shared memory
//
// dQ of a tile has a part from each owner that meets it. The parts are added up in f32 in global
// memory, each by one bulk operation, in the order of their ranks (schedule.h): the first is
// stored, the last takes the sum back, adds its own and writes rows. So the bits are the same every
// time, nothing is cleared before but the counts of parts, and nothing is converted behind. An
// owner waits only for owners that blocks took before it, and these are taken from one counter: no
// wait is for a block that does not run, nor goes in a circle.
//
// Warpgroup 0: two warps load, through the lists of tokens; of two others a thread each adds, one a
// buffer of dQ, so that two operations are under way. Warpgroups 1 and 2 multiply, 64 keys each.
// dQ of a meeting is formed in the next one, when both have long stored their dS. A tile of dQ lies
// as the registers of those who multiply do, thread by thread: who takes it back has the same.
#include <cstddef>
#include "ops/hilbert/kernels/hopper/common.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;

constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(registers_fit(kThreads, kProducerRegisters, kConsumerRegisters));
constexpr int kAdders = 2;                          // warps, the first ones
constexpr int kLoaders = 2;                         // warps behind them
constexpr int kMultipliers = kMultiplying / kWarp;  // warps
constexpr std::uint32_t kMeetingBytes = sizeof(Schedule::Meeting);

struct Backward : Work {
  Operand q, k, v, d_o;
  Half *dq, *dk, *dv;
  Operand dq_rows, dk_rows;
  const float *lse, *delta;
  std::uint32_t* redo_queries;  // as redo, [batch, heads, tiles of queries]
  const int4* meeting;          // two words each
  float* sums;                  // of dQ, [batch, heads, tiles] of kSumBytes
  std::uint32_t* added;         // [batch, heads, tiles]: how many parts of a sum are there; zero before
  int tiles;
  Dispatch order;
  bool mapped;         // so are these:
  CUtensorMap map[4];  // of Q, dO, K and V
};

/// Places that are filled and emptied one after the other: two barriers each, of which uses count
/// phases.
template <int N> struct Places {
  static constexpr std::uint32_t kBytes = 16 * N;
  std::uint32_t at;
  __device__ __forceinline__ std::uint32_t full(unsigned use) const { return at + 8 * (use % N); }
  __device__ __forceinline__ std::uint32_t empty(unsigned use) const { return full(use) + 8 * N; }
  __device__ __forceinline__ bool is_full(unsigned use) const { return barrier_passed(full(use), use / N & 1); }
  __device__ __forceinline__ bool is_empty(unsigned use) const { return barrier_passed(empty(use), ~(use / N) & 1); }
  __device__ __forceinline__ void wait_full(unsigned use) const { barrier_wait(full(use), use / N & 1); }
  __device__ __forceinline__ void wait_empty(unsigned use) const { barrier_wait(empty(use), ~(use / N) & 1); }
  /// Of places that are offered from the first use on: two uses ahead of who takes them, a wait
  /// would take one phase for another.
  __device__ __forceinline__ bool is_offered(unsigned use) const { return barrier_passed(empty(use), use / N & 1); }
  __device__ __forceinline__ void wait_offered(unsigned use) const { barrier_wait(empty(use), use / N & 1); }
  /// By a warp.
  __device__ __forceinline__ void fill(unsigned use) const { say(full(use)); }
  __device__ __forceinline__ void release(unsigned use) const { say(empty(use)); }
  __device__ void set_up(int fills, int releases) const {
    for (unsigned i = 0; i < N; ++i) barrier_init(full(i), fills), barrier_init(empty(i), releases);
  }

 private:
  static __device__ __forceinline__ void say(std::uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
  }
};

template <int D_> struct Layout {
  static constexpr int D = D_;
  static constexpr int kQueries = D == 64 ? 128 : 64;  // of a tile
  static constexpr int kSteps = kQueries / kCell;
  // Of the chunks of eight queries of a tile, whose L and Delta are fetched before the product that
  // comes before their use: as many as there are registers for.
  static constexpr int kEarlyL = 8, kEarlyDelta = D == 64 ? 0 : 4;
  using Keys = Tile<D, kTile>;
  using Queries = Tile<D, kQueries>;
  static constexpr std::uint32_t kItems = 4;                          // records
  static constexpr std::uint32_t kSlopePanel = kTile * kPanelRow;     // dS^T of 64 queries
  static constexpr std::uint32_t kSlopeBytes = kSteps * kSlopePanel;  // of a tile
  static constexpr std::uint32_t kPartBytes = kSumBytes / 2;          // what a warpgroup has of dQ of a tile
  static_assert(kPartBytes == kWarpgroup * 32 * 4);
  static constexpr std::uint32_t kRowBytes = kQueries * 4;  // of a statistic
  static constexpr std::uint32_t keys = 0, values = keys + Keys::kBytes, queries = values + Keys::kBytes,
                                 slopes = queries + 2 * 2 * Queries::kBytes, sums = slopes + 2 * kSlopeBytes,
                                 rows = sums + 2 * kSumBytes, meetings = rows + 2 * 2 * kRowBytes,
                                 items = meetings + 2 * 2 * kMeetingBytes, barriers = items + kItems * sizeof(Item),
                                 size =
                                     barriers + Places<kItems>::kBytes + 2 * Places<1>::kBytes + 3 * Places<2>::kBytes;
  static_assert(size <= kMostShared);
};

/// A block's shared memory. Uses of tiles count meetings, those of keys items that meet any.
template <class M> struct Room {
  std::uint32_t base;
  Places<M::kItems> item;
  Places<1> key, value;
  Places<2> query, slope, sum;  // Q and dO; dS; dQ
  __device__ explicit Room(std::uint32_t at)
      : base(at),
        item{at + M::barriers},
        key{item.at + item.kBytes},
        value{key.at + key.kBytes},
        query{value.at + value.kBytes},
        slope{query.at + query.kBytes},
        sum{slope.at + slope.kBytes} {}
  __device__ void set_up() const {
    if (threadIdx.x == 0) {
      item.set_up(1, kAdders + kLoaders + kMultipliers);
      key.set_up(kLoaders, kMultipliers), value.set_up(kLoaders, kMultipliers);
      query.set_up(kLoaders, kMultipliers), slope.set_up(kMultipliers, kMultipliers);
      sum.set_up(kMultipliers, 1);  // who adds says that a buffer is empty
      barrier_init_done();
    }
    __syncthreads();
  }
  __device__ std::uint32_t q(unsigned use) const { return base + M::queries + use % 2 * (2 * M::Queries::kBytes); }
  __device__ std::uint32_t d_o(unsigned use) const { return q(use) + M::Queries::kBytes; }
  __device__ std::uint32_t ds(unsigned use) const { return base + M::slopes + use % 2 * M::kSlopeBytes; }
  __device__ std::uint32_t dq(unsigned use) const { return base + M::sums + use % 2 * kSumBytes; }
  __device__ std::uint32_t lse(unsigned use) const { return base + M::rows + use % 2 * (2 * M::kRowBytes); }
  __device__ std::uint32_t delta(unsigned use) const { return lse(use) + M::kRowBytes; }
  /// What is met, and behind it what is met next.
  __device__ std::uint32_t meeting(unsigned use) const { return base + M::meetings + use % 2 * (2 * kMeetingBytes); }
  __device__ std::uint32_t record(unsigned use) const { return base + M::items + use % M::kItems * sizeof(Item); }
  __device__ __forceinline__ void write(unsigned use, const Item& x) const {
    const int4* const from = reinterpret_cast<const int4*>(&x);
#pragma unroll
    for (std::uint32_t i = 0; i < sizeof(Item) / 16; ++i) store_shared_16(record(use) + 16 * i, from[i]);
  }
  __device__ __forceinline__ Item read(unsigned use) const {
    Item x;
    int4* const to = reinterpret_cast<int4*>(&x);
#pragma unroll
    for (std::uint32_t i = 0; i < sizeof(Item) / 16; ++i) to[i] = load_shared_16(record(use) + 16 * i);
    return x;
  }
};

// ---- loads

/// What rows are loaded from, and where to.
struct Source {
  std::uint32_t tile;
  const Operand& rows;
  const CUtensorMap& map;
};

/// A warp that loads half of a tile's rows: through the list of tokens, eight lanes a row, or,
/// where its tokens follow each other, by the copy engine.
struct HalfGather {
  int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp - kAdders;
  int chunk = lane % 8;
  /// Each thread fetches the token of one row of every 32: row mine() + 32 j.
  template <int N> __device__ int mine(int j) const { return 32 * (N * warp + j) + lane; }
  template <int N>
  __device__ __forceinline__ void fetch(int (&held)[N], std::span<const std::int32_t> list, int first, int rows) const {
#pragma unroll
    for (int j = 0; j < N; ++j) held[j] = mine<N>(j) < rows ? __ldg(list.data() + first + mine<N>(j)) : -1;
  }
  template <int N> __device__ __forceinline__ bool follow(const int (&held)[N], int first) const {
    bool all = first >= 0;
#pragma unroll
    for (int j = 0; j < N; ++j) all = all && held[j] == first + 32 * j + lane;
    return __all_sync(~0u, all);
  }
  /// Half of a tile of each source; copies that are no group's yet, or that a barrier expects.
  template <class T, int N, int K>
  __device__ __forceinline__ void load(const Backward& p, const int (&held)[N], const Source (&from)[K], int batch,
                                       int head, std::uint32_t barrier) const {
    static_assert(T::kRows == 64 * N);
    const std::uint32_t half = static_cast<std::uint32_t>(warp) * (T::kPanel / 2);
    const int first = __shfl_sync(~0u, held[0], 0);
    if (p.mapped && follow(held, first)) {
      if (lane == 0) {
        barrier_expect_more(barrier, K * T::kBytes / 2);
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
          for (int panel = 0; panel < T::kPanels; ++panel)
            box_load(from[k].tile + static_cast<std::uint32_t>(panel) * T::kPanel + half, from[k].map, 64 * panel, head,
                     first, batch, barrier);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Half* const base = from[k].rows.at(batch, head) + chunk * 8;
#pragma unroll
      for (int j = 0; j < N; ++j)
#pragma unroll 2
        for (int i = 0; i < 8; ++i) {
          const int token = __shfl_sync(~0u, held[j], 4 * i + lane / 8);
          const Half* const line = base + static_cast<std::int64_t>(max(token, 0)) * from[k].rows.token;
          const std::uint32_t to =
              from[k].tile + half + static_cast<std::uint32_t>(32 * j) * kPanelRow +
              swizzled(static_cast<std::uint32_t>(4 * i + lane / 8), static_cast<std::uint32_t>(chunk));
#pragma unroll
          for (int panel = 0; panel < T::kPanels; ++panel)
            copy_16(to + static_cast<std::uint32_t>(panel) * T::kPanel, line + panel * 64,
                    token >= 0 && panel * 8 + chunk < p.chunks);
        }
    }
  }
};

/// Registers are scarce: what an item is stays in its record until all of it is loaded.
template <class M> struct Loader {
  static constexpr int kHeld = M::kQueries / 64;  // of 32 rows
  const Backward& p;
  const Room<M> room;
  const HalfGather gather;
  unsigned items = 0, keys = 0, tiles = 0;  // so far
  __device__ __forceinline__ Item item_of(int call, int owner) const {
    Item x{};
    int slot;
    p.slots.split(call, x.batch, slot);
    x.head = p.head[slot], x.first_head = p.first_head[slot], x.last_head = p.first_head[slot + 1];
    const int4* const from = reinterpret_cast<const int4*>(p.side.owner.data()) + 3 * owner;
    const int4 a = __ldg(from), b = __ldg(from + 1);
    x.row = a.x, x.rows = a.y, x.visit = a.z, x.steps = b.x, x.tile = b.y, x.tiles = b.z;
    return x;
  }
  /// The next item, for all roles; below 0 after the last. It is not asked for earlier: others wait
  /// for whoever has an item and does not begin it.
  __device__ __forceinline__ void take() {
    if (threadIdx.x == kAdders * kWarp) {
      room.item.wait_empty(items);
      int i, call = 0, owner = 0;
      do i = atomicAdd(p.taken, 1);
      while (i < p.order.size && !p.order.at(i, call, owner));
      if (i < p.order.size) room.write(items, item_of(call, owner));
      else store_shared(room.record(items), -1);
      barrier_arrive(room.item.full(items));
    }
    __syncwarp();
    room.item.wait_full(items);
  }
  /// A number of the item's, by where it stands.
  __device__ __forceinline__ int its(std::size_t where) const {
    return load_shared(room.record(items) + static_cast<std::uint32_t>(where));
  }
  template <int kBehind> __device__ __forceinline__ void landed() const {
    wait_for_copies<kBehind>();
    fence_for_wgmma();
  }
  __device__ __forceinline__ void load_queries(int head, const int (&query)[kHeld], const int4* met,
                                               const int4* next) const {
    const int batch = its(offsetof(Item, batch));
    room.query.wait_empty(tiles);
    gather.template load<typename M::Queries, kHeld, 2>(
        p, query, {{room.q(tiles), p.q, p.map[0]}, {room.d_o(tiles), p.d_o, p.map[1]}}, batch, head,
        room.query.full(tiles));
    const std::int64_t row = p.row(batch, head) * p.length;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const auto to = room.lse(tiles) + static_cast<std::uint32_t>(gather.mine<kHeld>(i)) * 4;
      const std::int64_t from = row + max(query[i], 0);
      copy_4(to, p.lse + from, query[i] >= 0);
      copy_4(to + M::kRowBytes, p.delta + from, query[i] >= 0);
    }
    if (gather.lane < 2 && gather.warp == 0) {
      const auto to = room.meeting(tiles) + static_cast<std::uint32_t>(gather.lane) * 16;
      copy_16(to, met + gather.lane, true);
      copy_16(to + kMeetingBytes, next + gather.lane, true);
    }
    close_copies();
  }
  __device__ __forceinline__ void load_keys() {
    const int batch = its(offsetof(Item, batch)), head = its(offsetof(Item, head));
    int key[2];
    gather.fetch(key, p.lists.k_token, its(offsetof(Item, row)), its(offsetof(Item, rows)));
    room.value.wait_empty(keys);
    gather.template load<typename M::Keys, 2, 1>(p, key, {{room.base + M::values, p.v, p.map[3]}}, batch, head,
                                                 room.value.full(keys));
    close_copies();
    room.key.wait_empty(keys);
    gather.template load<typename M::Keys, 2, 1>(p, key, {{room.base + M::keys, p.k, p.map[2]}}, batch, head,
                                                 room.key.full(keys));
    close_copies();
    landed<2>(), room.query.fill(tiles);
    landed<1>(), room.value.fill(keys);
    landed<0>(), room.key.fill(keys);
    ++keys;
  }
  __device__ __forceinline__ void load() {
    const int first = its(offsetof(Item, visit)), steps = its(offsetof(Item, steps)),
              last_head = its(offsetof(Item, last_head));
    const auto meeting = [&](int i) { return p.meeting + 2 * static_cast<std::int64_t>(i); };
    int query[kHeld];
    const auto fetch = [&](int i) {
      const int4 tile = __ldg(meeting(i));
      gather.fetch(query, p.lists.q_token, tile.x, tile.y);
    };
    fetch(first);
    bool begins = true;
    for (int i = its(offsetof(Item, first_head)); i < last_head; ++i)
#pragma unroll 1
      for (int n = 0; n < steps; ++n) {
        const int met = first + n, next = n + 1 == steps ? first : met + 1;  // again for the next head
        load_queries(p.query_head[i], query, meeting(met), meeting(next));
        fetch(next);
        if (begins) load_keys();
        else landed<0>(), room.query.fill(tiles);
        ++tiles, begins = false;
      }
  }
  __device__ __forceinline__ void run() {
    for (take(); its(offsetof(Item, number)) >= 0; take()) {
      if (its(offsetof(Item, steps)) > 0) load();
      room.item.release(items++);
    }
  }
};

// ---- adds

/// One thread, that takes every second part of dQ.
template <class M> struct Adder {
  const Backward& p;
  const Room<M> room;
  unsigned tiles = 0;  // so far, of all
  bool offered = false;

  static __device__ bool takes_back(std::uint32_t turn) {
    return (turn & Schedule::kLast) && turn >> Schedule::kRankShift > 0;
  }
  /// A buffer is empty, but for what is taken back to it.
  __device__ __forceinline__ void offer(std::uint32_t turn, unsigned use) {
    if (!offered && !takes_back(turn)) barrier_arrive(room.sum.empty(use)), offered = true;
  }
  __device__ __forceinline__ void add(const int4& met, const int4* behind, std::int64_t line) {
    const auto turn = static_cast<std::uint32_t>(met.w), rank = turn >> Schedule::kRankShift;
    const std::int64_t tile = line + met.z;
    std::uint8_t* const sum = reinterpret_cast<std::uint8_t*>(p.sums) + tile * kSumBytes;
    const std::uint32_t part = room.dq(tiles);
    offer(turn, tiles);
    offered = false;
    if (rank > 0) {  // asked before the part is there
      while (load_acquire(p.added + tile) != rank) {}
      fence_for_bulk();
    }
    if (takes_back(turn)) {
      barrier_expect(room.sum.empty(tiles), kSumBytes);
      bulk_load(part, sum, kSumBytes, room.sum.empty(tiles));
    }
    const std::uint32_t next = behind ? static_cast<std::uint32_t>(__ldg(&behind->w)) : 0;
    room.sum.wait_full(tiles);
    if (!(turn & Schedule::kLast)) {
#ifdef HILT_RANDOM_DELAYS  // of tests: parts come when they like
      __nanosleep(static_cast<std::uint32_t>(clock64() * 2654435761u) >> 20);
#endif
      if (rank == 0) bulk_store(sum, part, kSumBytes);
      else bulk_add(sum, part, kSumBytes);
      close_bulk();
      wait_for_bulk_reads();
    }
    if (behind) offer(next, tiles + 2);
    if (!(turn & Schedule::kLast)) {
      wait_for_bulk();
      fence_for_bulk();
      count_release(p.added + tile);
    }
  }
  __device__ __forceinline__ void run(unsigned buffer) {
    for (unsigned items = 0;; ++items) {
      room.item.wait_full(items);
      const Item x = room.read(items);
      if (x.number < 0) return;
      const int4* const first = p.meeting + 2 * static_cast<std::int64_t>(x.visit);
      for (int i = x.first_head; i < x.last_head; ++i) {
        const std::int64_t line = p.row(x.batch, p.query_head[i]) * p.tiles;
        for (int n = 0; n < x.steps; ++n, ++tiles)
          if (tiles % 2 == buffer) add(__ldg(first + 2 * n), n + 2 < x.steps ? first + 2 * (n + 2) : nullptr, line);
      }
      barrier_arrive(room.item.empty(items));
    }
  }
};

// ---- multiplies

template <class E, class M> struct Multiplier {
  static constexpr int D = M::D, kQueries = M::kQueries, kChunks = kQueries / 8;
  using Keys = typename M::Keys;
  using Queries = typename M::Queries;
  using Scores = float[kQueries / 2];
  using Sums = float[D / 2];
  using Part = float[32];  // of dQ
  const Backward& p;
  const Place at;
  const Room<M> room;
  unsigned items = 0, keys = 0, tiles = 0;  // so far

  /// A statistic of the queries of a tile, the first chunks in registers.
  template <int kEarly> struct Column {
    std::uint32_t at;
    float2 early[kEarly > 0 ? kEarly : 1];
    __device__ __forceinline__ void fetch(std::uint32_t from) {
      at = from;
#pragma unroll
      for (int c = 0; c < kEarly; ++c) early[c] = load_shared_pair(at + static_cast<std::uint32_t>(c) * 32);
    }
    __device__ __forceinline__ float2 operator()(int c) const {
      return c < kEarly ? early[c < kEarly ? c : 0] : load_shared_pair(at + static_cast<std::uint32_t>(c) * 32);
    }
  };
  using L = Column<M::kEarlyL>;
  using Delta = Column<M::kEarlyDelta>;
  __device__ __forceinline__ std::uint32_t column() const { return static_cast<std::uint32_t>(at.quad()) * 8; }

  /// Bits of the mask of a step.
  __device__ __forceinline__ std::uint32_t word_of(int step, std::uint32_t meeting) const {
    const auto cells = static_cast<std::uint32_t>(load_shared(meeting + 16 + 4 * static_cast<std::uint32_t>(step)));
    const std::uint32_t cell = cells >> 16 * at.half & 0xffff;
    if (cell < Visits::kMasks) return cell == Visits::kFull ? ~0u : 0;
    return __ldg(p.mask + (cell - Visits::kMasks) * kWarpgroup + threadIdx.x % kWarpgroup);
  }

  // Products are begun here and waited for elsewhere. What comes from shared memory for their sums
  // is fetched before: behind a product it would wait for it.
  __device__ __forceinline__ void begin_scores(Scores& s, L& l) const {
    l.fetch(room.lse(tiles) + column());
    wgmma_begin();
    multiply_rows<E, Keys, Queries>(s, room.base + M::keys + at.rows(), room.q(tiles));
    wgmma_commit();
  }
  __device__ __forceinline__ void begin_slopes(Scores& t, Delta& delta) const {
    delta.fetch(room.delta(tiles) + column());
    wgmma_begin();
    multiply_rows<E, Keys, Queries>(t, room.base + M::values + at.rows(), room.d_o(tiles));
    wgmma_commit();
  }
  __device__ __forceinline__ void weigh(Scores& s, const L& l, std::uint32_t turn) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float2 x = l(c);
      const float y[2] = {-(x.x * kLog2e), -(x.y * kLog2e)};
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * c + i] = exp2_fast(fmaf(s[4 * c + i], p.scale_log2, y[i % 2]));
    }
    if (turn & Schedule::kMasked << at.half) {
#pragma unroll
      for (int step = 0; step < M::kSteps; ++step) mask(s, 32 * step, word_of(step, room.meeting(tiles)), 0.0f);
    }
  }
  /// dQ of what lies in a buffer of dS: 64 queries, or 64 columns, a warpgroup.
  __device__ __forceinline__ void begin_dq(Part& x, unsigned use) const {
    const auto half = static_cast<std::uint32_t>(at.half);
    const std::uint32_t ds = room.ds(use) + (D == 64 ? half * M::kSlopePanel : 0),
                        k = room.base + M::keys + (D == 64 ? 0 : half * Keys::kPanel);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i)
      wgmma<E, 1, 1>(x, operand(ds, along_rows(i), 0), operand(k, along_rows(i), 0), i > 0);
    wgmma_commit();
  }
  /// To who adds, or, as the last, to the rows.
  __device__ __forceinline__ void hand_over(Part& x, unsigned use, std::uint32_t turn, int number, bool offered) const {
    const std::uint32_t part =
        room.dq(use) + static_cast<std::uint32_t>(at.half) * M::kPartBytes + threadIdx.x % kWarpgroup * 16;
    if (!offered) room.sum.wait_offered(use);
    if (turn & Schedule::kLast) {
      if (turn >> Schedule::kRankShift > 0) {
#pragma unroll
        for (std::uint32_t c = 0; c < 8; ++c) {
          const int4 y = load_shared_16(part + c * (kWarpgroup * 16));
          x[4 * c] += __int_as_float(y.x), x[4 * c + 1] += __int_as_float(y.y);
          x[4 * c + 2] += __int_as_float(y.z), x[4 * c + 3] += __int_as_float(y.w);
        }
      }
      store_queries(x, number);
    } else {
#pragma unroll
      for (std::uint32_t c = 0; c < 8; ++c)
        store_shared_16(part + c * (kWarpgroup * 16),
                        make_int4(__float_as_int(x[4 * c]), __float_as_int(x[4 * c + 1]), __float_as_int(x[4 * c + 2]),
                                  __float_as_int(x[4 * c + 3])));
    }
  }
  __device__ __forceinline__ void announce(unsigned use) const {
    fence_for_wgmma();
    room.sum.fill(use);
  }
  /// Rows of dQ, of an item's meeting.
  __device__ __forceinline__ void store_queries(const Part& x, int number) const {
    const Item its = room.read(items);
    const int slot = number / its.steps, head = p.query_head[its.first_head + slot],
              column = D == 64 ? 0 : at.half * 64;
    const int4 met = __ldg(p.meeting + 2 * (static_cast<std::int64_t>(its.visit) + number - slot * its.steps));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (D == 64 ? at.half * 64 : 0) + at.warp * 16 + at.lane / 4 + 8 * h;
      Half* const to =
          row < met.y ? p.dq + p.dq_rows.offset(its.batch, head, __ldg(p.lists.q_token.data() + met.x + row)) + column
                      : nullptr;
      if (p.redo_queries && to && !is_finite(x, h)) redo_query(its.batch, head, met.x + row);
      store_row<E, 8>(to, x, h, p.scale, at.quad(), p.chunks - column / 8);
    }
  }
  /// Has the plain kernel redo the tile that a row of queries is of; rare, so it may look for it.
  __device__ __forceinline__ void redo_query(int batch, int head, int row) const {
    int tile = 0;
    while (p.lists.q_tile[static_cast<std::size_t>(tile)].end <= row) ++tile;
    p.redo_queries[p.row(batch, head) * static_cast<std::int64_t>(p.lists.q_tile.size()) + tile] = kWholeTile;
    *p.any = 1;
  }
  __device__ __forceinline__ void store_keys(const Sums& dk, const Sums& dv) const {
    const Item x = room.read(items);
    bool finite = true;
    Half *to_k[2], *to_v[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.row + 8 * h;
      const bool there = row < x.rows;
      const std::int64_t to =
          there ? p.dk_rows.offset(x.batch, x.head, __ldg(p.lists.k_token.data() + x.row + row)) : 0;
      to_k[h] = there ? p.dk + to : nullptr, to_v[h] = there ? p.dv + to : nullptr;
      if (p.redo && there) finite = finite && is_finite(dk, h) && is_finite(dv, h);
    }
    p.template mark<false>(x, at.half, finite);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_row<E, D / 8>(to_k[h], dk, h, p.scale, at.quad(), p.chunks);
      store_row<E, D / 8>(to_v[h], dv, h, 1.0f, at.quad(), p.chunks);
    }
  }

  /// What goes on from meeting to meeting of an item.
  struct State {
    std::uint32_t turn = 0, before = 0;  // of this one, and of the one before, whose dQ is not yet formed
    int number = 0;
  };
  /// One meeting, whose weights and dP are there: its dS, dV and dK, dQ of the one before, and
  /// weights and dP of the next.
  template <bool kLast>
  __device__ __forceinline__ void meet(State& its, Scores& s, Scores& t, Delta& delta, Sums& dk, Sums& dv) {
    const unsigned use = tiles, other = tiles - 1;
    const bool follows = its.number > 0;
    // Waiting where a barrier has long passed costs its latency: ask where nothing depends on it.
    const bool next_there = !kLast && room.query.is_full(use + 1), slope_empty = room.slope.is_empty(use),
               slope_full = follows && room.slope.is_full(other), sum_offered = follows && room.sum.is_offered(other);
    std::uint32_t next = 0;
    if constexpr (!kLast)
      next = static_cast<std::uint32_t>(agreed(load_shared(room.meeting(use) + kMeetingBytes + 12)));
    std::uint32_t a[kQueries / 16][4], b[kQueries / 16][4];
    const std::uint32_t ds = room.ds(use);
#pragma unroll
    for (int k = kQueries / 16 - 1; k >= 0; --k) {  // sixteen queries at a time, so that s and t give way to a and b
#pragma unroll
      for (int c = 2 * k; c < 2 * k + 2; ++c) {
        const float2 x = delta(c);
        t[4 * c] = s[4 * c] * (t[4 * c] - x.x), t[4 * c + 1] = s[4 * c + 1] * (t[4 * c + 1] - x.y);
        t[4 * c + 2] = s[4 * c + 2] * (t[4 * c + 2] - x.x), t[4 * c + 3] = s[4 * c + 3] * (t[4 * c + 3] - x.y);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[k][i] = pack_pair<E>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]),
        b[k][i] = pack_pair<E>(t[8 * k + 2 * i], t[8 * k + 2 * i + 1]);
      if (k == kQueries / 16 - 1 && !slope_empty) room.slope.wait_empty(use);
      store_matrix(ds + static_cast<std::uint32_t>(k / 4) * M::kSlopePanel +
                       swizzled(static_cast<std::uint32_t>(at.half * 64 + at.warp * 16 + at.lane % 16),
                                static_cast<std::uint32_t>(2 * (k % 4) + at.lane / 16)),
                   b[k][0], b[k][1], b[k][2], b[k][3]);
    }
    fence_for_wgmma();
    room.slope.fill(use);
    wgmma_begin();
    multiply<E, Queries>(dv, a, room.d_o(use), 1);
    multiply<E, Queries>(dk, b, room.q(use), 1);
    wgmma_commit();
    if (follows && !slope_full) room.slope.wait_full(other);
    Part x;
    begin_dq(x, other);  // of nothing at the first meeting, and thrown away: cheaper than this code twice
    wgmma_wait<1>();
    settle(dv);
    settle(dk);
    room.query.release(use);
    wgmma_wait<0>();
    settle(x);
    if (follows) {
      room.slope.release(other);
      hand_over(x, other, its.before, its.number - 1, sum_offered);
    }
    tiles = static_cast<unsigned>(agreed(static_cast<int>(use + 1)));
    if constexpr (kLast) {
      if (follows) announce(other);
    } else {
      // Fresh names: a wgmma that overwrites its sums still reads them where the compiler looks.
      Scores s_next, t_next;
      L l;
      if (!next_there) room.query.wait_full(tiles);
      begin_scores(s_next, l);
      begin_slopes(t_next, delta);
      wgmma_wait<1>();
      settle(s_next);
      weigh(s_next, l, next);
      if (follows) announce(other);
      wgmma_wait<0>();
      settle(t_next);
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) s[i] = s_next[i], t[i] = t_next[i];
    }
    its.before = its.turn, its.turn = next, ++its.number;
  }
  /// dK and dV of an item, with all that it meets.
  __device__ __forceinline__ void meet_all(int meetings, Sums& dk, Sums& dv) {
    State its;
    Scores s, t;
    Delta delta;
    {
      L l;
      room.query.wait_full(tiles);
      its.turn = static_cast<std::uint32_t>(agreed(load_shared(room.meeting(tiles) + 12)));
      room.key.wait_full(keys);
      begin_scores(s, l);
      room.value.wait_full(keys);
      begin_slopes(t, delta);
      wgmma_wait<1>();
      settle(s);
      weigh(s, l, its.turn);
      wgmma_wait<0>();
      settle(t);
    }
#pragma unroll 1
    while (its.number + 1 < meetings) meet<false>(its, s, t, delta, dk, dv);
    room.value.release(keys);
    meet<true>(its, s, t, delta, dk, dv);
    Part x;
    const unsigned other = tiles - 1;
    room.slope.wait_full(other);
    begin_dq(x, other);
    wgmma_wait<0>();
    settle(x);
    room.slope.release(other);
    room.key.release(keys++);
    hand_over(x, other, its.before, its.number - 1, false);
    announce(other);
  }
  __device__ __forceinline__ void run() {
    for (;; ++items) {
      room.item.wait_full(items);
      int meetings;
      {
        const Item x = room.read(items);
        if (agreed(x.number) < 0) return;
        meetings = agreed(x.steps * (x.last_head - x.first_head));
      }
      Sums dk, dv;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
      if (meetings > 0) meet_all(meetings, dk, dv);
      store_keys(dk, dv);
      room.item.release(items);
    }
  }
};

template <class E, class M>
__global__ void __launch_bounds__(kThreads, 1) one_pass_backward_kernel(const __grid_constant__ Backward p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const int group = warpgroup();
  const Room<M> room(shared_address(memory));
  room.set_up();
  if (group == 0) {
    fewer_registers<kProducerRegisters>();
    const unsigned warp = threadIdx.x / kWarp;
    if (warp >= kAdders) {
      Loader<M> loader{p, room};
      loader.run();
    } else if (threadIdx.x % kWarp == 0) {
      Adder<M> adder{p, room};
      adder.run(warp);
    }
    return;
  }
  more_registers<kConsumerRegisters>();
  Multiplier<E, M> multiplier{p, Place(group), room};
  multiplier.run();
}

/// Boxes of 64 columns and so many rows of one head; false where the driver makes no such map.
bool make_map(CUtensorMap& map, const Operand& x, DType type, const AttentionSizes& s, Index heads, int rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const auto status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(f) : nullptr;
  }();
  if (!encode) return false;
  constexpr cuuint64_t kTokens = 1 << 30;  // lists name none that is not there
  const auto wide = [](Index i) { return static_cast<cuuint64_t>(i); };
  const cuuint64_t sizes[] = {wide(s.dim), wide(heads), kTokens, wide(s.batch)};
  const cuuint64_t strides[] = {wide(2 * x.head), wide(2 * x.token), wide(2 * x.batch)};
  const cuuint32_t box[] = {64, 1, static_cast<cuuint32_t>(rows), 1}, each[] = {1, 1, 1, 1};
  return encode(&map, type == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                const_cast<Half*>(x.data), sizes, strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

template <class E, int D>
void hopper::one_pass_backward(Cuda where, const BackwardPass& b, const Marks& marks, const PartialSums& sums) {
  if constexpr (D <= 128) {
    using M = Layout<D>;
    Backward p{work_of<true>(where, b, marks, 0)};
    const ScheduleView& schedule = schedule_on_device(*b.tiling, where, M::kQueries);
    p.side.owner = schedule.owner;
    p.order = Dispatch(b.sizes.batch * p.slots.d, std::ssize(schedule.owner),
                       std::ssize(schedule.meeting) * (b.sizes.heads / b.sizes.kv_heads),
                       properties(where.device).multiprocessors);
    p.meeting = reinterpret_cast<const int4*>(schedule.meeting.data());
    p.tiles = static_cast<int>(schedule.tiles), p.sums = sums.of_queries, p.added = sums.added, p.taken = sums.taken;
    p.q = operand_of(b.q), p.k = operand_of(b.k), p.v = operand_of(b.v), p.d_o = operand_of(b.d_o);
    const auto map = [&](int i, const Operand& x, Index heads, int rows) {
      return make_map(p.map[i], x, b.q.type, b.sizes, heads, rows);
    };
    p.mapped = map(0, p.q, b.sizes.heads, M::kQueries / 2) && map(1, p.d_o, b.sizes.heads, M::kQueries / 2) &&
               map(2, p.k, b.sizes.kv_heads, kTile / 2) && map(3, p.v, b.sizes.kv_heads, kTile / 2);
    p.dq = static_cast<Half*>(b.dq.data), p.dk = static_cast<Half*>(b.dk.data), p.dv = static_cast<Half*>(b.dv.data);
    p.dq_rows = operand_of(b.dq), p.dk_rows = operand_of(b.dk), p.redo_queries = marks.queries;
    p.lse = static_cast<const float*>(b.lse), p.delta = static_cast<const float*>(b.delta);
    start(where, one_pass_backward_kernel<E, M>, M::size, p);
  }
}

template void hopper::one_pass_backward<HILT_TYPE, HILT_DIM>(Cuda, const BackwardPass&, const Marks&,
                                                             const PartialSums&);

}  // namespace hilt::kernels
