// Attention on Hopper, backward, in one pass over the scores, for any number of owners of keys. A
// block owns 128 keys of a key head (64 a warpgroup): K and V stay in shared memory, dK and dV in
// registers. It meets tiles of queries, 128 of them to head dim 64, else 64:
//
//   S^T = K Q^T      P^T = e^(c S^T - L)      dP^T = V dO^T      dS^T = P^T (dP^T - Delta)
//   dV += P^T dO     dK += dS^T Q             A from registers
//   dQ  = dS K                                dS^T crosses shared memory
//
// dQ of a tile has a part from each owner that meets it. The parts are added up in f32 in global
// memory, each by one bulk operation, in the order of their ranks (schedule.h): the first is
// stored, the last takes the sum back, adds its own and writes rows. So the bits are the same every
// time, nothing is cleared before but the counts of parts, and nothing is converted behind. An
// owner waits only for owners before it, and blocks take these one by one from a counter: no wait
// is for a block that does not run, nor goes in a circle.
//
// Warpgroup 0: one warp takes items, says what they meet, and loads Q, L and K; another loads dO,
// Delta and V; of two others a thread each adds, one a buffer of dQ, so that two operations are
// under way. Warpgroups 1 and 2 multiply, 64 keys each. dQ of a meeting is formed in the next one,
// when both have long stored their dS. A tile of dQ lies as the registers of those who multiply do,
// thread by thread: who takes it back has the same.
#include "ops/hilbert/kernels/hopper/terms.cuh"

namespace hilt::kernels {
namespace {

using namespace kernels::hopper;
using Meeting = Schedule::Meeting;
static_assert(kHeads <= 256 && Schedule::kRankShift >= 6);

constexpr int kProducerRegisters = 40;
constexpr int kMultipliers = kMultiplying / kWarp;  // warps

struct AddedUp : OnePass {
  const Meeting* meeting;
  float* sums;           // of dQ, [batch, heads, tiles] of kDqBytes
  std::uint32_t* added;  // [batch, heads, tiles]: how many parts of a sum are there; zero before
  int tiles;
  Dispatch order;
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
  /// For places that are offered from the first use on: two uses ahead of the taker, a wait would
  /// take one phase for another.
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

/// With distances, tokens count up on both sides, so that none need be read.
template <int D_, Extra kExtra> struct Layout {
  static constexpr int D = D_;
  static constexpr bool kDistances = kExtra == Extra::distances, kCaps = kExtra == Extra::cap,
                        kDrops = kExtra == Extra::drops;
  static constexpr int kQueries = D <= 64 ? 128 : 64;  // of a tile
  static constexpr int kSteps = kQueries / kCell;
  using Keys = Tile<D, kTile>;
  using Queries = Tile<D, kQueries>;
  // The adder follows two meetings behind; six would do.
  static constexpr std::uint32_t kMeetings = 8;
  static constexpr std::uint32_t kSlopePanel = kTile * kPanelRow;     // dS^T of 64 queries
  static constexpr std::uint32_t kSlopeBytes = kSteps * kSlopePanel;  // of a tile
  static constexpr int kColumns = D < 64 ? D : 64;                    // of dQ, that a warpgroup forms
  static constexpr std::uint32_t kPartBytes = kWarpgroup * kColumns * 2, kDqBytes = 2 * kPartBytes;  // of a tile
  static_assert(kDqBytes <= kSumBytes);
  static constexpr std::uint32_t kRowBytes = kQueries * 4;  // of a statistic
  static constexpr std::uint32_t keys = 0, values = keys + Keys::kBytes, queries = values + Keys::kBytes,
                                 slopes = queries + 2 * 2 * Queries::kBytes, sums = slopes + 2 * kSlopeBytes,
                                 rows = sums + 2 * kDqBytes, meetings = rows + 2 * 2 * kRowBytes,
                                 barriers = meetings + kMeetings * sizeof(Meeting),
                                 size = barriers + Places<kMeetings>::kBytes + 2 * Places<1>::kBytes +
                                        4 * Places<2>::kBytes;
  static_assert(size <= kMostShared);
};

/// A block's shared memory. Uses of tiles count meetings, those of keys items.
template <class M> struct Room {
  std::uint32_t base;
  Places<M::kMeetings> meeting;
  Places<1> key, value;
  Places<2> query, d_out, slope, sum;  // Q; dO; dS; dQ
  __device__ explicit Room(std::uint32_t at)
      : base(at),
        meeting{at + M::barriers},
        key{meeting.at + meeting.kBytes},
        value{key.at + key.kBytes},
        query{value.at + value.kBytes},
        d_out{query.at + query.kBytes},
        slope{d_out.at + d_out.kBytes},
        sum{slope.at + slope.kBytes} {}
  __device__ void set_up() const {
    if (threadIdx.x == 0) {
      meeting.set_up(1, 1), key.set_up(1, kMultipliers), value.set_up(1, kMultipliers);
      query.set_up(1, kMultipliers), d_out.set_up(1, kMultipliers), slope.set_up(kMultipliers, kMultipliers);
      sum.set_up(kMultipliers, 1);  // who adds says that a buffer is empty
      barrier_init_done();
    }
    __syncthreads();
  }
  __device__ std::uint32_t q(unsigned use) const { return base + M::queries + use % 2 * (2 * M::Queries::kBytes); }
  __device__ std::uint32_t d_o(unsigned use) const { return q(use) + M::Queries::kBytes; }
  __device__ std::uint32_t ds(unsigned use) const { return base + M::slopes + use % 2 * M::kSlopeBytes; }
  __device__ std::uint32_t dq(unsigned use) const { return base + M::sums + use % 2 * M::kDqBytes; }
  __device__ std::uint32_t lse(unsigned use) const { return base + M::rows + use % 2 * (2 * M::kRowBytes); }
  __device__ std::uint32_t delta(unsigned use) const { return lse(use) + M::kRowBytes; }
  __device__ std::uint32_t met(unsigned use) const {
    return base + M::meetings + use % M::kMeetings * static_cast<std::uint32_t>(sizeof(Meeting));
  }
  __device__ std::uint32_t turn(unsigned use) const {
    return static_cast<std::uint32_t>(load_shared<int>(met(use) + 8));
  }
  __device__ __forceinline__ Meeting read(unsigned use) const { return load_shared<Meeting>(met(use)); }
};

__device__ __forceinline__ Item item_of(const AddedUp& p, int i) {
  Item x{};
  int call, owner;
  p.order.at(i, call, owner);
  p.fill(x, call, owner);
  return x;
}

// ---- loads

/// A warp that loads Q, L and K, and leads; or dO, Delta and V, and follows.
template <class M, bool kLeads> struct Loader {
  const AddedUp& p;
  const Room<M> room;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  unsigned tiles = 0, keys = 0;  // so far

  /// Rows through the list of tokens, as Gather does; of every 32 rows a lane fetches a token.
  /// Whole tiles of tokens that count up come by the copy engine.
  template <class T, int N>
  __device__ __forceinline__ void gather(std::uint32_t tile, const int (&token)[N], const Source& from, int batch,
                                         int head, bool whole, std::uint32_t barrier) const {
    static_assert(T::kRows == 32 * N);
    if (whole && from.mapped) {
      if (lane == 0)
#pragma unroll
        for (int row = 0; row < T::kRows; row += kCell)
          load_boxes<T>(tile + static_cast<std::uint32_t>(row) * kPanelRow, {from, batch, head}, token[0] + row,
                        barrier);
      close_copies();
      return;
    }
    constexpr int kTogether = 4, kLanes = Gather<M::D>::kLanes;  // as many addresses as there are registers for
    const int chunk = lane % kLanes;
    const Half* const base = from.at(batch, head) + chunk * 8;
    const auto row_of = [&](int i) { return Gather<M::D>::kOfWarp * i + lane / kLanes; };
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll 1
      for (int group = 0; group < kLanes; group += kTogether) {
        int its[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) its[i] = __shfl_sync(~0u, token[j], row_of(group + i));
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Half* const line = base + static_cast<std::int64_t>(max(its[i], 0)) * from.token;
          const auto row = static_cast<std::uint32_t>(row_of(group + i));
          const std::uint32_t to =
              tile + static_cast<std::uint32_t>(32 * j) * kPanelRow + swizzled(row, static_cast<std::uint32_t>(chunk));
#pragma unroll
          for (int panel = 0; panel < T::kPanels; ++panel)
            copy_16(to + static_cast<std::uint32_t>(panel) * T::kPanel, line + panel * 64,
                    its[i] >= 0 && panel * 8 + chunk < p.chunks);
        }
      }
    close_copies();
  }
  template <int N>
  __device__ __forceinline__ void fetch(int (&token)[N], std::span<const std::int32_t> list, int first,
                                        int rows) const {
#pragma unroll
    for (int j = 0; j < N; ++j) token[j] = 32 * j + lane < rows ? __ldg(list.data() + first + 32 * j + lane) : -1;
  }
  template <int kBehind, class P> __device__ __forceinline__ void landed(const P& place, unsigned use) const {
    wait_for_copies<kBehind>();
    fence_for_wgmma();
    place.fill(use);
  }
  __device__ __forceinline__ void load(const Meeting& x) {
    int token[M::kQueries / 32];
    fetch(token, p.lists.q_token, x.row, x.rows);
    const auto& place = kLeads ? room.query : room.d_out;
    place.wait_empty(tiles);
    const std::int64_t row = p.row(x.batch(), x.head()) * p.length;
#pragma unroll
    for (int j = 0; j < M::kQueries / 32; ++j)
      copy_4((kLeads ? room.lse(tiles) : room.delta(tiles)) + static_cast<std::uint32_t>(32 * j + lane) * 4,
             (kLeads ? p.lse : p.delta) + row + max(token[j], 0), token[j] >= 0);
    gather<typename M::Queries>(kLeads ? room.q(tiles) : room.d_o(tiles), token, kLeads ? p.q : p.d_o, x.batch(),
                                x.head(), x.rows == M::kQueries, place.full(tiles));
    if (x.turn & Meeting::kFirst) load_keys(item_of(p, x.item), place);
    else landed<0>(place, tiles);
    ++tiles;
  }
  __device__ __forceinline__ void load_keys(const Item& x, const Places<2>& before) {
    int token[kTile / 32];
    fetch(token, p.lists.k_token, x.row, x.rows);
    const auto& place = kLeads ? room.key : room.value;
    place.wait_empty(keys);
    gather<typename M::Keys>(room.base + (kLeads ? M::keys : M::values), token, kLeads ? p.k : p.v, x.batch, x.head,
                             x.rows == kTile, place.full(keys));
    landed<1>(before, tiles);
    landed<0>(place, keys++);
  }
  __device__ __forceinline__ void tell(unsigned use, const Meeting& x) const {
    if (lane == 0) store_shared(room.met(use), x);
    room.meeting.fill(use);
  }
  /// All that an item meets, one query head after the other.
  __device__ __forceinline__ void lead(int item, int call, int owner) {
    Item its{};
    p.fill(its, call, owner);
    std::uint32_t first = Meeting::kFirst;
#pragma unroll 1
    for (int i = its.first_head; i < its.last_head; ++i)
#pragma unroll 1
      for (int n = 0; n < its.steps; ++n) {
        Meeting x = p.meeting[its.visit + n];
        const int head = p.query_head[i];
        x.turn |= first | (n + 1 == its.steps && i + 1 == its.last_head ? Meeting::kEnd : 0);
        x.tile += static_cast<int>(p.row(its.batch, head)) * p.tiles, x.place = its.batch << 8 | head, x.item = item;
        tell(tiles, x);
        load(x);
        first = 0;
      }
  }
  __device__ __forceinline__ void run() {
    if constexpr (kLeads) {
      for (;;) {  // not asked for earlier: others wait for whoever has an item and does not begin it
        int item = lane == 0 ? atomicAdd(p.taken, 1) : 0, call, owner;
        item = __shfl_sync(~0u, item, 0);
        if (item >= p.order.size) break;
        if (p.order.at(item, call, owner)) lead(item, call, owner);
      }
      Meeting stop{};
      stop.turn = Meeting::kStop;
      tell(tiles, stop), tell(tiles + 1, stop);  // each to one of those who add
    } else {
      for (;;) {
        room.meeting.wait_full(tiles);
        const Meeting x = room.read(tiles);
        if (x.turn & Meeting::kStop) return;
        load(x);
      }
    }
  }
};

// ---- adds

/// One thread, that takes every second part of dQ.
template <class M> struct Adder {
  const AddedUp& p;
  const Room<M> room;

  static __device__ bool takes_back(std::uint32_t turn) {
    return (turn & Schedule::kLast) && turn >> Schedule::kRankShift > 0;
  }
  /// A buffer is empty, but for what is taken back to it.
  __device__ __forceinline__ Meeting offer(unsigned use) const {
    room.meeting.wait_full(use);
    const Meeting x = room.read(use);
    if (!takes_back(x.turn)) barrier_arrive(room.sum.empty(use));
    return x;
  }
  __device__ __forceinline__ void run(unsigned use) const {
    for (Meeting x = offer(use); !(x.turn & Meeting::kStop); use += 2) {
      const std::uint32_t rank = x.turn >> Schedule::kRankShift, part = room.dq(use);
      std::uint8_t* const sum =
          reinterpret_cast<std::uint8_t*>(p.sums) + static_cast<std::int64_t>(x.tile) * M::kDqBytes;
      std::uint32_t* const added = p.added + x.tile;
      if (rank > 0) {  // asked before the part is there
        while (load_acquire(added) != rank) {}
        fence_for_bulk();
      }
      if (takes_back(x.turn)) {
        barrier_expect(room.sum.empty(use), M::kDqBytes);
        bulk_load(part, sum, M::kDqBytes, room.sum.empty(use));
      }
      room.sum.wait_full(use);
      const bool adds = !(x.turn & Schedule::kLast);
      if (adds) {
        if (rank == 0) bulk_store(sum, part, M::kDqBytes);
        else bulk_add(sum, part, M::kDqBytes);
        close_bulk();
        wait_for_bulk_reads();
      }
      x = offer(use + 2);
      if (adds) {
        wait_for_bulk();
        fence_for_bulk();
        count_release(added);
      }
    }
  }
};

// ---- multiplies

template <class E, class M> struct Multiplier {
  static constexpr int D = M::D, kQueries = M::kQueries, kChunks = kQueries / 8;
  using Keys = typename M::Keys;
  using Queries = typename M::Queries;
  using Scores = float[kQueries / 2];
  // Between two meetings, as operand A or in f32, whichever leaves registers enough.
  static constexpr bool kPacked = kQueries == 128;
  using Operands = std::uint32_t[kQueries / 16][4];
  using Weights = std::conditional_t<kPacked, Operands, Scores>;
  using Sums = float[D / 2];
  using Part = float[M::kColumns / 2];  // of dQ
  const AddedUp& p;
  const int half;  // of the keys
  const Room<M> room;
  int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  unsigned keys = 0, tiles = 0;      // so far
  int own = 0;                       // with kDistances or kDrops, the row of an item's first key
  std::uint32_t survive[M::kSteps];  // with kDrops, of the weights that are there

  /// This thread, for addresses that are computed where they are used: the compiler would keep them
  /// all, in registers that there are not.
  struct Here {
    int thread;
    __device__ std::uint32_t column() const { return static_cast<std::uint32_t>(thread % 4) * 8; }
    __device__ int quad() const { return thread % 4; }
    __device__ int row() const { return thread / 32 * 16 + thread % 32 / 4; }
    __device__ std::uint32_t part() const { return static_cast<std::uint32_t>(thread) * 16; }
    /// Where this lane stores k-step k of dS^T.
    __device__ std::uint32_t slope(int half, int k) const {
      return swizzled(static_cast<std::uint32_t>(half * 64 + thread / 32 * 16 + thread % 16),
                      static_cast<std::uint32_t>(2 * k + thread % 32 / 16));
    }
  };
  __device__ __forceinline__ Here here() const {
    Here x{thread};
    asm volatile("" : "+r"(x.thread));
    return x;
  }
  __device__ std::uint32_t rows() const { return static_cast<std::uint32_t>(half) * 64 * kPanelRow; }

  /// L of the first queries of a tile, in chunks of eight, is fetched before the product that comes
  /// before its use, and would be waited for: as many as there are registers for.
  static constexpr int kEarly = 8;
  using Early = float2[kEarly];

  /// Bits of the mask of a step.
  __device__ __forceinline__ std::uint32_t word_of(int step) const {
    const auto cells = load_shared<std::uint32_t>(room.met(tiles) + 16 + 4 * static_cast<unsigned>(step));
    return hopper::word_of(p, {0, kCell, cells}, Lane(half + 1));
  }

  // Products are begun here and waited for elsewhere.
  __device__ __forceinline__ void begin_scores(Scores& s, Early& l) const {
    const std::uint32_t lse = room.lse(tiles) + here().column();
#pragma unroll
    for (int c = 0; c < kEarly; ++c) l[c] = load_shared<float2>(lse + static_cast<std::uint32_t>(c) * 32);
    wgmma_begin();
    multiply_rows<E, Keys, Queries>(s, room.base + M::keys + rows(), room.q(tiles));
    wgmma_commit();
  }
  __device__ __forceinline__ void begin_slopes(Scores& t) const {
    wgmma_begin();
    multiply_rows<E, Keys, Queries>(t, room.base + M::values + rows(), room.d_o(tiles));
    wgmma_commit();
  }
  /// What survives of a meeting's weights.
  __device__ __forceinline__ void find_survivors() {
    const Meeting x = room.read(tiles);
#pragma unroll
    for (int step = 0; step < M::kSteps; ++step)
      survive[step] = survivors<false, false>(p, now(p.key), p.stream_of(x.batch(), x.head()), own + half * kCell,
                                              x.row + step * kCell, Lane(half + 1));
  }
  __device__ __forceinline__ void weigh(Weights& weights, Scores& s, const Early& l, std::uint32_t turn) const {
    if constexpr (M::kCaps) cap_scores(s, p.scale, p.cap, p.inverse_cap);
    const std::uint32_t lse = room.lse(tiles) + here().column();
    float slope = 0, apart = 0;  // of a lane's first score
    if constexpr (M::kDistances) {
      const Here at = here();
      slope = -kLog2e * __ldg(p.slopes + (load_shared<int>(room.met(tiles) + 24) & 0xff));
      apart =
          static_cast<float>(p.apart + load_shared<int>(room.met(tiles)) - own + 2 * at.quad() - half * 64 - at.row());
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float2 x = c < kEarly ? l[c % kEarly] : load_shared<float2>(lse + static_cast<std::uint32_t>(c) * 32);
      const float y[2] = {-(x.x * kLog2e), -(x.y * kLog2e)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float less = y[i % 2];
        if constexpr (M::kDistances)
          less = fmaf(slope, fabsf(apart + static_cast<float>(8 * c + i % 2 - i / 2 * 8)), less);
        s[4 * c + i] = exp2_fast(fmaf(s[4 * c + i], p.scale_log2, less));
      }
    }
    if (turn & Schedule::kMasked << half) {
#pragma unroll
      for (int step = 0; step < M::kSteps; ++step) mask(s, 32 * step, word_of(step), 0.0f);
    }
    if constexpr (kPacked) pack<E>(weights, s);
    else memcpy(weights, s, sizeof(s));
  }
  /// The slope of the cap where a score has weight p: it was log p + L.
  __device__ __forceinline__ float slope_of(float weight, float lse) const {
    return cap_slope(fminf(fmaxf(fmaf(log2_fast(fmaxf(weight, 1e-30f)), kLn2, lse), -p.cap), p.cap), p.inverse_cap);
  }
  /// dQ of what lies in a buffer of dS: 64 queries, or 64 columns, a warpgroup.
  __device__ __forceinline__ void begin_dq(Part& x, unsigned use) const {
    const auto mine = static_cast<std::uint32_t>(half);
    const std::uint32_t ds = room.ds(use) + (D <= 64 ? mine * M::kSlopePanel : 0),
                        k = room.base + M::keys + (D <= 64 ? 0 : mine * Keys::kPanel);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i)
      wgmma<E, 1, 1>(x, operand(ds, along_rows(i), 0), operand(k, along_rows(i), 0), i > 0);
    wgmma_commit();
  }
  /// To who adds, or, as the last, to the rows.
  __device__ __forceinline__ void hand_over(Part& x, unsigned use, std::uint32_t turn, bool offered) const {
    const std::uint32_t part = room.dq(use) + static_cast<std::uint32_t>(half) * M::kPartBytes + here().part();
    if (!offered) room.sum.wait_offered(use);
    if (turn & Schedule::kLast) {
      if (turn >> Schedule::kRankShift > 0) {
#pragma unroll
        for (std::uint32_t c = 0; c < M::kColumns / 8; ++c) {
          const auto y = load_shared<float4>(part + c * (kWarpgroup * 16));
          x[4 * c] += y.x, x[4 * c + 1] += y.y, x[4 * c + 2] += y.z, x[4 * c + 3] += y.w;
        }
      }
      store_queries(x, room.read(use));
    } else {
#pragma unroll
      for (std::uint32_t c = 0; c < M::kColumns / 8; ++c)
        store_shared(part + c * (kWarpgroup * 16), make_float4(x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]));
    }
  }
  __device__ __forceinline__ void announce(unsigned use) const {
    fence_for_wgmma();
    room.sum.fill(use);
  }
  /// Rows of dQ.
  __device__ __forceinline__ void store_queries(const Part& x, const Meeting& met) const {
    const Here at = here();
    const int column = D <= 64 ? 0 : half * 64;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (D <= 64 ? half * 64 : 0) + at.row() + 8 * h;
      Half* const to =
          row < met.rows
              ? p.dq + p.dq_rows.offset(met.batch(), met.head(), __ldg(p.lists.q_token.data() + met.row + row)) + column
              : nullptr;
      if (p.redo_queries && to && !is_finite(x, h)) p.redo_query(met.batch(), met.head(), met.row + row);
      store_row<E, M::kColumns / 8>(to, x, h, p.scale, at.quad(), p.chunks - column / 8);
    }
  }

  /// One meeting, whose weights and dP are there: its dS, dV and dK, dQ of the one before, and
  /// weights and dP of the next. turn: its own; before: of the one before, whose dQ is not yet
  /// formed.
  template <bool kLast>
  __device__ __forceinline__ void attend_tile(std::uint32_t& turn, std::uint32_t& before, Weights& weights, Scores& t,
                                              Sums& dk, Sums& dv) {
    const unsigned use = tiles, other = tiles - 1;
    const bool follows = !(turn & Meeting::kFirst);
    // Waiting where a barrier has long passed costs its latency: ask where nothing depends on it.
    const bool q_there = !kLast && room.query.is_full(use + 1), d_o_there = !kLast && room.d_out.is_full(use + 1),
               slope_empty = room.slope.is_empty(use), slope_full = follows && room.slope.is_full(other),
               sum_offered = follows && room.sum.is_offered(other);
    Operands a, b;
    const Here at = here();
    const std::uint32_t ds = room.ds(use), delta = room.delta(use) + at.column(), lse = room.lse(use) + at.column();
    if constexpr (M::kDrops)
#pragma unroll
      for (int step = 0; step < M::kSteps; ++step) mask(t, 32 * step, survive[step], 0.0f);
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {  // sixteen queries at a time, so that t gives way to b
#pragma unroll
      for (int c = 2 * k; c < 2 * k + 2; ++c) {
        const float2 x = load_shared<float2>(delta + static_cast<std::uint32_t>(c) * 32);
        const float2 l = M::kCaps ? load_shared<float2>(lse + static_cast<std::uint32_t>(c) * 32) : float2{};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float2 p;
          if constexpr (kPacked) p = unpack_pair<E>(weights[c / 2][c % 2 * 2 + h]);
          else p = {weights[4 * c + 2 * h], weights[4 * c + 2 * h + 1]};
          float &its = t[4 * c + 2 * h], &next = t[4 * c + 2 * h + 1];
          if constexpr (M::kDrops) its *= this->p.survivor, next *= this->p.survivor;
          its = p.x * (its - x.x), next = p.y * (next - x.y);
          if constexpr (M::kCaps) its *= slope_of(p.x, l.x), next *= slope_of(p.y, l.y);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kPacked) a[k][i] = weights[k][i];
        else a[k][i] = pack_pair<E>(weights[8 * k + 2 * i], weights[8 * k + 2 * i + 1]);
        b[k][i] = pack_pair<E>(t[8 * k + 2 * i], t[8 * k + 2 * i + 1]);
      }
      if (k == 0 && !slope_empty) room.slope.wait_empty(use);
      store_matrix(ds + static_cast<std::uint32_t>(k / 4) * M::kSlopePanel + at.slope(half, k % 4), b[k][0], b[k][1],
                   b[k][2], b[k][3]);
    }
    fence_for_wgmma();
    room.slope.fill(use);
    if constexpr (M::kDrops)
#pragma unroll
      for (int step = 0; step < M::kSteps; ++step) keep_pairs(a, 4 * step, swap_bits(survive[step], 15, 0xaaaa));
    wgmma_begin();
    multiply<E, Queries>(dv, a, room.d_o(use), 1);
    multiply<E, Queries>(dk, b, room.q(use), 1);
    wgmma_commit();
    if (follows && !slope_full) room.slope.wait_full(other);
    Part x;
    begin_dq(x, other);  // of nothing at the first meeting, and thrown away: cheaper than this code twice
    wgmma_wait<1>();
    fence_operand(dv);
    fence_operand(dk);
    room.query.release(use), room.d_out.release(use);
    wgmma_wait<0>();
    fence_operand(x);
    if (follows) {
      room.slope.release(other);
      hand_over(x, other, before, sum_offered);
    }
    tiles = warp_uniform(use + 1);
    before = turn;
    if constexpr (kLast) {
      if (follows) announce(other);
    } else {
      // Fresh names: a wgmma that overwrites its sums still reads them where the compiler looks.
      Scores s_next, t_next;
      Weights weights_next;
      Early l;
      if (!q_there) room.query.wait_full(tiles);
      turn = room.turn(tiles);
      begin_scores(s_next, l);
      if (!d_o_there) room.d_out.wait_full(tiles);
      begin_slopes(t_next);
      if constexpr (M::kDrops) find_survivors();
      turn = warp_uniform(turn);
      wgmma_wait<1>();
      fence_operand(s_next);
      weigh(weights_next, s_next, l, turn);
      if (follows) announce(other);
      wgmma_wait<0>();
      fence_operand(t_next);
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) t[i] = t_next[i];
      memcpy(weights, weights_next, sizeof(weights));
    }
  }
  /// dK and dV of an item, with all that it meets; turn: of the first.
  __device__ __forceinline__ void meet_all(std::uint32_t turn, Sums& dk, Sums& dv) {
    std::uint32_t before = 0;
    Weights weights;
    Scores t;
    {
      Scores s;
      Early l;
      room.query.wait_full(tiles);
      room.key.wait_full(keys);
      begin_scores(s, l);
      room.d_out.wait_full(tiles);
      room.value.wait_full(keys);
      begin_slopes(t);
      if constexpr (M::kDrops) find_survivors();
      wgmma_wait<1>();
      fence_operand(s);
      weigh(weights, s, l, turn);
      wgmma_wait<0>();
      fence_operand(t);
    }
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
#pragma unroll 1
    while (!(turn & Meeting::kEnd)) attend_tile<false>(turn, before, weights, t, dk, dv);
    room.value.release(keys);
    attend_tile<true>(turn, before, weights, t, dk, dv);
    Part x;
    const unsigned other = tiles - 1;
    room.slope.wait_full(other);
    begin_dq(x, other);
    wgmma_wait<0>();
    fence_operand(x);
    room.slope.release(other);
    room.key.release(keys++);
    hand_over(x, other, before, false);
    announce(other);
  }
  __device__ __forceinline__ void run() {
    for (;;) {
      room.meeting.wait_full(tiles);
      const auto turn = warp_uniform(room.turn(tiles));
      if (turn & Meeting::kStop) return;
      if constexpr (M::kDistances || M::kDrops) own = item_of(p, room.read(tiles).item).row;
      Sums dk, dv;
      meet_all(turn, dk, dv);
      const Here at = here();
      store_keys<E, false>(p, item_of(p, room.read(tiles - 1).item), half, half * 64 + at.row(), at.quad(), dk, dv);
    }
  }
};

template <class E, class M>
__global__ void __launch_bounds__(kThreads, 1) one_pass_backward_kernel(const __grid_constant__ AddedUp p) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const int group = warpgroup();
  const Room<M> room(shared_address(memory));
  room.set_up();
  if (group == 0) {
    fewer_registers<kProducerRegisters>();
    const unsigned warp = threadIdx.x / kWarp;
    if (warp == 0) {
      Loader<M, true>{p, room}.run();
    } else if (warp == 1) {
      Loader<M, false>{p, room}.run();
    } else if (threadIdx.x % kWarp == 0) {
      Adder<M>{p, room}.run(warp - 2);
    }
    return;
  }
  more_registers<registers_left(kThreads, kProducerRegisters)>();
  Multiplier<E, M> multiplier{p, group - 1, room};
  multiplier.run();
}

}  // namespace

template <class E, int D>
void hopper::one_pass_backward(Cuda where, const BackwardPass& b, const Marks& marks, const PartialSums& sums) {
  const auto run = [&]<Extra kExtra>() {
    using M = Layout<D, kExtra>;
    AddedUp p{one_pass_of(work_of<true>(where, b, marks, 0), b, marks)};
    const ScheduleView& schedule = schedule_on_device(*b.tiling, where, M::kQueries);
    p.side.owner = schedule.owner;
    p.order = Dispatch(b.sizes.batch * p.slots.d, std::ssize(schedule.owner),
                       std::ssize(schedule.meeting) * (b.sizes.heads / b.sizes.kv_heads),
                       properties(where.device).multiprocessors);
    p.meeting = schedule.meeting.data();
    p.tiles = static_cast<int>(schedule.tiles), p.sums = sums.of_queries, p.added = sums.added, p.taken = sums.taken;
    if (M::kCaps) p.scale_log2 = kLog2e;  // scores have their scale
    start(where, one_pass_backward_kernel<E, M>, M::size, p);
  };
  using enum Extra;
  if constexpr (D <= 128) with_extra<D, none, distances, cap, drops>(extra_of(b, true, true), run);
}

template void hopper::one_pass_backward<HILT_TYPE, HILT_DIM>(Cuda, const BackwardPass&, const Marks&,
                                                             const PartialSums&);

}  // namespace hilt::kernels
