#pragma once
#include "ops/hilbert/kernels/hopper/sm90.cuh"
#include "core/cuda/launch.cuh"
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/kernels/hopper/kernels.h"
#include "ops/hilbert/kernels/cuda/merge.cuh"
#include "ops/hilbert/kernels/cuda/on_device.h"

// What the Hopper attention kernels share.

namespace hilt::kernels::hopper {

using namespace cuda;
using namespace cuda::hopper;

constexpr int kTile = 128;                           // rows of a tile, where nothing else is said
constexpr int kMultiplying = 2 * kWarpgroup;         // threads of the two warpgroups that multiply, 64 rows each
constexpr int kThreads = kWarpgroup + kMultiplying;  // the first warpgroup loads
constexpr int kFiniteBarrier = 1;                    // of those that multiply, see mark()
constexpr std::size_t kMostShared = 227 << 10;       // bytes a block can have

// ---- what a launch is told ---------------------------------------------------------------------

/// Rows of one tensor, of results their strides alone; in elements.
struct Operand {
  const bf16* data;
  std::int64_t batch;
  int token, head;
  __device__ std::int64_t offset(int b, int h, int t = 0) const {
    return b * batch + static_cast<std::int64_t>(h) * head + static_cast<std::int64_t>(t) * token;
  }
  __device__ const bf16* at(int b, int h) const { return data + offset(b, h); }
};
template <class Void> Operand operand_of(const AnyRows<Void>& x) {
  return {static_cast<const bf16*>(x.data), x.batch, static_cast<int>(x.token), static_cast<int>(x.head)};
}

/// What a block works through: a tile of `group`, a head, a batch, and the tiles of the other side
/// that it visits, from `first` in their list.
struct Item {
  int tile, head, group, batch, first, visits;
};
struct Visit {
  int tile;
  bool partial;
};

/// The items of a launch, of equal groups or (kLists) of any tiling whose tiles all have 128 rows.
/// kKeys: the tiles of items are of keys, and they visit queries; else the other way round.
struct Work {
  int length, heads, items, visits;  // visits: of an item, where they are equal
  float scale, scale_log2;
  TilingView lists;
  std::int32_t* redo;  // with lists, [batch, heads, tiles]: set where the plain kernel has to redo a tile
  Divisor tiles, n_heads, groups;
  std::int16_t head[kHeads];

  /// Of a group's only tile.
  __device__ __forceinline__ Item item(int i) const {
    Item x;
    int rest, slot;
    n_heads.split(i, rest, slot);
    groups.split(rest, x.batch, x.group);
    x.head = head[slot];
    return x;
  }
  template <bool kKeys, bool kLists> __device__ __forceinline__ Item item(int i) const {
    int rest, tile;
    tiles.split(i, rest, tile);
    Item x = item(rest);
    x.tile = tile, x.first = 0, x.visits = visits;
    if constexpr (kLists) {  // the last queries of causal ones have the most keys: longest first
      if constexpr (!kKeys) x.tile = static_cast<int>(tiles.d) - 1 - tile;
      const std::int32_t* const begin = (kKeys ? lists.queries_begin : lists.keys_begin).data() + x.tile;
      x.first = __ldg(begin), x.visits = __ldg(begin + 1) - x.first;
    }
    return x;
  }
  template <bool kKeys, bool kLists> __device__ __forceinline__ Visit visit(const Item& x, int e) const {
    static_assert(sizeof(Tiling::Ref) == 8);
    if constexpr (!kLists) return {e, false};
    const int2 y = __ldg(reinterpret_cast<const int2*>((kKeys ? lists.queries : lists.keys).data()) + (x.first + e));
    return {y.x, (y.y & 0xff) != 0};
  }
  /// Of [batch, heads, ..].
  __device__ std::int64_t row(const Item& x) const { return static_cast<std::int64_t>(x.batch) * heads + x.head; }
  /// Marks an item that is not finite. What is added to is added to once, by this kernel or by the
  /// plain one: both warpgroups must agree on which.
  template <bool kAdds> __device__ __forceinline__ bool mark(const Item& x, bool finite) const {
    if constexpr (kAdds) finite = named_all(kFiniteBarrier, kMultiplying, finite);
    if (!finite) redo[row(x) * tiles.d + x.tile] = 1;
    return finite;
  }
};
/// `tiles` and `visits`: of a group, of a tile.
inline Work work_of(Cuda where, const AttentionPass& a, Index groups, Index tiles, Index visits) {
  const auto divisor = [](Index d) { return Divisor(static_cast<std::uint32_t>(d)); };
  Work w{};
  w.length = static_cast<int>(a.sizes.length), w.heads = static_cast<int>(a.sizes.heads);
  w.items = static_cast<int>(a.sizes.batch * a.n_heads * groups * tiles), w.visits = static_cast<int>(visits);
  w.scale = static_cast<float>(a.sizes.scale), w.scale_log2 = w.scale * kLog2e;
  w.lists = on_device(*a.tiling, where);
  w.tiles = divisor(tiles), w.n_heads = divisor(a.n_heads), w.groups = divisor(groups);
  for (Index i = 0; i < a.n_heads; ++i) w.head[i] = static_cast<std::int16_t>(a.heads[i]);
  return w;
}
/// Blocks that stay work through all items, one a multiprocessor; else every item has its own.
template <class Problem>
void start(Cuda where, void (*kernel)(Problem), std::size_t shared, const Problem& p, bool stays = true) {
  const int blocks = stays ? std::min(properties(where.device).multiprocessors, p.items) : p.items;
  launch("attention", where, kernel, dim3(static_cast<unsigned>(blocks)), kThreads, shared, p);
}

// ---- tiles in shared memory, from who loads to who multiplies ----------------------------------

/// A tile of kRows rows of D numbers, see swizzled().
template <int D, int kRows> struct Tile {
  static constexpr std::uint32_t kPanel = kRows * kPanelRow, kBytes = D / 64 * kPanel;
  static constexpr int kPanels = D / 64, kSteps = D / 16;
};

/// A ring of stages, each with a barrier for "full" and one for "empty", and where one role stands
/// in it: a stage, and the parity of its phase. Who loads waits for "empty", which passes directly
/// in the first round; who multiplies waits for "full".
template <int kStages, std::uint32_t kStageBytes> struct Ring {
  static constexpr std::uint32_t kBytes = kStages * kStageBytes, kBarriers = 16 * kStages;
  std::uint32_t stages, barriers, parity;
  int stage = 0;
  __device__ Ring(std::uint32_t at, std::uint32_t its_barriers, bool loads)
      : stages(at), barriers(its_barriers), parity(loads) {}
  __device__ void set_up() const {
    constexpr int kWarps = kMultiplying / kWarp;  // that release a stage
    for (std::uint32_t i = 0; i < kStages; ++i)
      barrier_init(barriers + 8 * i, kWarpgroup), barrier_init(barriers + 8 * (kStages + i), kWarps);
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
template <class... Rings> __device__ __forceinline__ void set_up_barriers(const Rings&... rings) {
  if (threadIdx.x == 0) {
    (rings.set_up(), ...);
    barrier_init_done();
  }
  __syncthreads();
}

/// A thread that loads: eight share a row, 16 bytes of every 128 a thread, so that lines stay
/// whole; it has rows row + 16 i of a tile.
struct Gather {
  int row = static_cast<int>(threadIdx.x) / 8, chunk = static_cast<int>(threadIdx.x) % 8;
  std::uint32_t at = swizzled(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(chunk));

  /// Of each tensor one row, from `line` on, to tiles that follow each other.
  template <class Tile, class... Lines>
  __device__ __forceinline__ void copy(std::uint32_t tile, int i, const Lines*... line) const {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      std::uint32_t to =
          tile + static_cast<std::uint32_t>(panel) * Tile::kPanel + at + static_cast<std::uint32_t>(i) * 16 * kPanelRow;
      ((copy_16(to, line + panel * 64), to += Tile::kBytes), ...);
    }
  }
};

/// A thread that multiplies: of the 64 rows of its warpgroup (`half` of a tile) it has `row` and
/// row + 8 of the tile, and of every eight columns two.
struct Place {
  int half, lane, warp, row;
  __device__ explicit Place(int group) : half(group - 1) {
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread % 32, warp = thread / 32 % 4, row = half * 64 + warp * 16 + lane / 4;
  }
  /// Which of the four lanes with the same rows; not kept, for registers are scarce.
  __device__ int quad() const { return static_cast<int>(threadIdx.x) % 4; }
  __device__ std::uint32_t rows() const { return static_cast<std::uint32_t>(half) * 64 * kPanelRow; }
};

// ---- products ----------------------------------------------------------------------------------

/// d = A B^T, of the 64 rows at a and those of B.
template <class A, class B, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N], std::uint32_t a, std::uint32_t b) {
#pragma unroll
  for (int k = 0; k < A::kSteps; ++k)
    wgmma<0, 0>(d, operand(a, along_columns(k, A::kPanel), 0), operand(b, along_columns(k, B::kPanel), 0), k > 0);
}
/// d += A B, or d = A B where accumulate is 0; A in registers.
template <class B, int K, int N>
__device__ __forceinline__ void multiply(float (&d)[N], const std::uint32_t (&a)[K][4], std::uint32_t b,
                                         int accumulate) {
#pragma unroll
  for (int k = 0; k < K; ++k) wgmma<1>(d, a[k], operand(b, along_rows(k), B::kPanel), k > 0 ? 1 : accumulate);
}
/// Scores as the operand A of the next product.
template <int K, int N> __device__ __forceinline__ void pack(std::uint32_t (&a)[K][4], const float (&s)[N]) {
  static_assert(N == 8 * K);
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int x = 0; x < 4; ++x) a[k][x] = pack_bf16(s[8 * k + 2 * x], s[8 * k + 2 * x + 1]);
}

/// f(i, L or Delta of score i) for the 32 that a lane has of 64 x 64 scores. The statistic is that
/// of their columns, in shared memory, or of their rows; it comes by four scores.
struct ByColumn {
  std::uint32_t at;  // of the lane's first pair
  __device__ __forceinline__ float4 operator()(int c) const {
    const float2 y = load_shared_pair(at + static_cast<std::uint32_t>(c) * 32);
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

template <bool kQuery> __device__ __forceinline__ auto side_of(const TilingView& t, int i) {
  if constexpr (kQuery) return bounds_of(t, static_cast<std::size_t>(i));
  else return place_of(t, static_cast<std::size_t>(i));
}
__device__ __forceinline__ bool attends(const KeyPlace& k, const QueryBounds& q) { return hilt::attends(q, k); }
/// x, and others like it, = masked for the pairs that do not attend: rows row + 8 h, columns column
/// + 8 c + j of what a lane has of 64 x N scores. kQueries: rows are queries and columns keys; else
/// the other way round.
template <bool kQueries, int N, class... Scores>
__device__ __forceinline__ void mask(const TilingView& t, int row, int column, float masked, float (&x)[N],
                                     Scores&... others) {
  const auto row0 = side_of<kQueries>(t, row), row1 = side_of<kQueries>(t, row + 8);
#pragma unroll
  for (int c = 0; c < N / 4; ++c) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const auto y = side_of<!kQueries>(t, column + 8 * c + j);
      if (!attends(row0, y)) x[4 * c + j] = masked, ((others[4 * c + j] = masked), ...);
      if (!attends(row1, y)) x[4 * c + 2 + j] = masked, ((others[4 * c + 2 + j] = masked), ...);
    }
  }
}

/// Whether a thread's share of 64 rows of a tile is finite: `threads` threads share them. A product
/// multiplies what is masked by zero, and 0 x NaN is NaN: where this says no, the plain kernel
/// redoes the tile.
template <int D>
__device__ __forceinline__ bool rows_are_finite(std::uint32_t tile, std::uint32_t panel, int thread, int threads) {
  std::uint32_t odd = 0;  // two bf16: sums of x * 0
  for (int i = thread; i < 64 * D / 8; i += threads) {
    const uint4 v =
        load_shared_16(tile + static_cast<std::uint32_t>(i / 512) * panel + static_cast<std::uint32_t>(i % 512) * 16);
    for (const std::uint32_t w : {v.x, v.y, v.z, v.w})
      asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(odd) : "r"(w), "r"(0u));
  }
  return (odd & 0x7fff7fffu) == 0;
}

/// In: word j of chunk c in w[c] for lane j of a quad. Out: chunk `lane % 4`, all four words.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&w)[4], int quad) {
  const bool odd = quad & 1, high = quad & 2;
  std::uint32_t r = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  if (odd) w[0] = r;
  else w[1] = r;
  r = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  if (odd) w[2] = r;
  else w[3] = r;
  const std::uint32_t a = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
  if (high) w[0] = a, w[1] = b;
  else w[2] = a, w[3] = b;
}
/// One row of sums (row h of the pair a lane has) as bf16: a quad writes 64 bytes at a time.
template <int Chunks, int N>
__device__ __forceinline__ void store_row(bf16* row, const float (&x)[N], int h, float scale, int quad) {
#pragma unroll
  for (int g = 0; g < Chunks / 4; ++g) {
    std::uint32_t w[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      w[c] = pack_bf16(x[16 * g + 4 * c + 2 * h] * scale, x[16 * g + 4 * c + 2 * h + 1] * scale);
    transpose_quad(w, quad);
    *reinterpret_cast<uint4*>(row + (4 * g + quad) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
/// row = keep row + scale sums, in f32: a quad fills 32 bytes, a sector, at a time. Nothing is read
/// where keep is 0.
template <int Chunks, int N>
__device__ __forceinline__ void merge_row(float* row, const float (&x)[N], int h, float scale, float keep, int quad) {
  constexpr int kEach = 8;
#pragma unroll
  for (int g = 0; g < Chunks; g += kEach) {
    float2* const to = reinterpret_cast<float2*>(row + g * 8) + quad;
    float2 y[kEach] = {};
    if (keep != 0) {
#pragma unroll
      for (int c = 0; c < kEach; ++c) y[c] = to[4 * c];
    }
#pragma unroll
    for (int c = 0; c < kEach; ++c)
      to[4 * c] = make_float2(fmaf(keep, y[c].x, scale * x[4 * (g + c) + 2 * h]),
                              fmaf(keep, y[c].y, scale * x[4 * (g + c) + 2 * h + 1]));
  }
}

}  // namespace hilt::kernels::hopper
