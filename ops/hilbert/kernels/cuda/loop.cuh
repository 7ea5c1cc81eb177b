#pragma once
#include "ops/hilbert/kernels/cuda/kernels.h"
#include "ops/hilbert/kernels/cuda/merge.cuh"
#include "ops/hilbert/kernels/cuda/mma_sync.cuh"
#include "ops/hilbert/kernels/cuda/terms.cuh"

// What attention on any GPU does whichever way it multiplies: who owns what, how rows stream by,
// who attends to whom, and where results go.
//
// A block owns rows of one tile of one list, for a head and a place. The rows of the tiles that
// they meet come in chunks, in ascending order. A warp has the scores of its rows and all rows of a
// chunk in registers, and so the sums of its rows.
//
// A Unit multiplies (plain.cuh: in f32, and selects; mma.cuh: on tensor cores). It is a type with
//     Type, Stride              of operands, and of what lies between their rows
//     Lanes                     which scores and sums a lane has
//     fetch(), multiply(), add_weighted(), write_row()
//     Powers                    of its base
//     kFolds                    without terms, the scale of scores rides on their power
//     kMarks                    it multiplies what is masked by zero, and marks what is not finite
//     kLift                     P is 2^kLift times as large in a backward pass
//     kStages                   of shared memory through which chunks stream

namespace hilt::kernels {

using namespace cuda;

constexpr int kTile = static_cast<int>(Tiling::kTile);

/// A byte of the block's shared memory.
__device__ __forceinline__ std::uint32_t shared_at(std::uint32_t byte) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  return shared_address(memory) + byte;
}

// ---- who has what -------------------------------------------------------------------------------

/// A row is shared by so many Lanes, which have Each columns side by side in turn. A lane has Rows
/// rows, of chunks of so many columns, and of sums of Width.
template <int Lanes, int Each, int Rows, int Chunk, int Width, int Threads> struct LanesOf {
  static constexpr int kLanes = Lanes, kEach = Each, kRows = Rows, kChunk = Chunk, kThreads = Threads,
                       kScores = Chunk / Lanes, kSums = Width / Lanes;  // of a row, a lane's
  static constexpr int kApart = kWarp / Lanes, kWarpRows = Rows * kApart, kOwned = Threads / kWarp * kWarpRows;
  static constexpr int kParts = kTile / kOwned;  // blocks of a tile
  using Scores = float[Rows][kScores];
  using Sums = float[Rows][kSums];
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  /// A block's row: the first of a warp; that which a lane has as its row r.
  static __device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) / kWarp * kWarpRows; }
  static __device__ __forceinline__ int row(int r) { return warp_row() + lane() / Lanes + kApart * r; }
  static __device__ __forceinline__ int column(int c) {
    return c / Each * (Each * Lanes) + lane() % Lanes * Each + c % Each;
  }
  /// The lane that asks for its row; others have the same.
  static __device__ __forceinline__ bool is_first() { return lane() % Lanes == 0; }
  /// Over a row, from what its lanes have. All lanes.
  static __device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }
  static __device__ __forceinline__ float top_of_row(float x) {
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
};

/// Rows of one head of one sequence.
template <class T, class Stride> struct HeadRows {
  T* data;
  Stride stride;
  __device__ __forceinline__ T* row(std::int64_t token) const { return data + token * stride; }
};
/// The rows of a head in one row of the batch. None stays none.
template <class Stride, class T>
__device__ __forceinline__ HeadRows<T, Stride> rows_of(const Rows<T>& x, Index b, Index h) {
  return {x.data ? x.at(b, 0, h) : nullptr, static_cast<Stride>(x.token)};
}

/// Rows [first, first + n) of a tile, for a head and a row of the batch; the tile's mark, or null.
struct OwnedRows {
  Index number;  // of what a head's blocks own
  int tile, first, n, head, row;
  std::uint32_t* mark;
  /// A row's entry in the list. Rows beyond the last are taken for the last, so that nothing is
  /// read beyond the lists.
  __device__ __forceinline__ int entry(int i) const { return first + min(i, n - 1); }
};

/// Where [B, H, Lq] has what belongs to a query head of its row of the batch.
__device__ __forceinline__ Index statistics_at(const Problem& p, const OwnedRows& own, int head) {
  return (own.row * p.sizes.heads + head) * p.sizes.queries;
}

/// Marks of tiles, [batch, heads, tiles], and whether there is any; null: none.
struct TileMarks {
  std::uint32_t* tile = nullptr;
  std::int32_t* any = nullptr;
};

/// What is number i of a head. Marks say what is asked for of a way that redoes tiles. Causal
/// lists: late queries and early keys have the most pairs, and begin.
template <class Unit, bool kKeys>
__device__ __forceinline__ OwnedRows own_of(const Problem& p, int head, const TileMarks& marks, Index i) {
  using L = typename Unit::Lanes;
  const std::span<const Tiling::Range> tiles = kKeys ? p.t.k_tile : p.t.q_tile;
  const Index parts = static_cast<Index>(tiles.size()) * L::kParts, row = p.first_row + i / parts;
  const int part = static_cast<int>(kKeys ? i % parts : parts - 1 - i % parts), tile = part / L::kParts;
  const Tiling::Range whole = tiles[tile];
  int begin = whole.begin + part % L::kParts * L::kOwned, end = min(whole.end, begin + L::kOwned);
  std::uint32_t* const mark =
      marks.tile ? marks.tile + (row * p.sizes.heads + head) * static_cast<Index>(tiles.size()) + tile : nullptr;
  if (!Unit::kMarks && mark) {
    const int front = static_cast<int>(*mark & 0xffff), back = static_cast<int>(*mark >> 16);
    if (back == 0) end = min(end, whole.begin + front);
    if (front == 0) begin = max(begin, whole.end - back);
  }
  return {i, tile, begin, end - begin, head, static_cast<int>(row), mark};
}
/// f(own) for all that this block owns of a head; all threads together. It lies in shared memory,
/// as registers are what large head dims are short of.
template <class Unit, bool kKeys, class F>
__device__ __forceinline__ void for_owned(const Problem& p, int head, const TileMarks& marks, F&& f) {
  if (!Unit::kMarks && marks.tile && *marks.any == 0) return;
  __shared__ OwnedRows own;
  const auto all = static_cast<Index>((kKeys ? p.t.k_tile : p.t.q_tile).size()) * Unit::Lanes::kParts * p.n_rows;
#pragma unroll 1
  for (Index i = blockIdx.x; i < all; i = own.number + gridDim.x) {
    __syncthreads();  // nobody reads what was there, or the next number, any more
    if (threadIdx.x == 0) own = own_of<Unit, kKeys>(p, head, marks, i);
    __syncthreads();
    if (own.n > 0) f(own);
  }
}

// ---- chunks -------------------------------------------------------------------------------------

/// Rows [first, first + n) of the streamed list, all of one tile; n = 0: there are no more.
struct Chunk {
  int first, n;
  bool partial;
};

/// Tiles, chunk by chunk.
struct Walk {
  Tiling::Refs::Iterator at, end;
  Tiling::Range rows;
  bool partial;
  __device__ __forceinline__ Chunk next(std::span<const Tiling::Range> tiles, int most) {
    while (rows.begin == rows.end) {
      if (at == end) return {0, 0, false};
      const Tiling::Ref ref = *at;
      partial = ref.partial, rows = tiles[ref.tile], ++at;
    }
    const Chunk c{rows.begin, min(rows.end - rows.begin, most), partial};
    rows.begin += c.n;
    return c;
  }
};

/// fetch(chunk, stage) and work(chunk, stage) for what a tile meets. Where there are two stages,
/// one is filled while the other is worked on. One thread walks, two chunks ahead. All threads.
template <class Unit, bool kKeys, class Fetch, class Work>
__device__ __forceinline__ void stream(const TilingView& t, int tile, Fetch&& fetch, Work&& work) {
  constexpr int kMost = Unit::Lanes::kChunk, kOther = Unit::kStages - 1;
  const auto& tiles = kKeys ? t.q_tile : t.k_tile;
  __shared__ Walk walk;
  __shared__ Chunk chunk[2];
  __syncthreads();  // nobody reads the chunks, or the rows of the head, before any more
  if (threadIdx.x == 0) {
    const Tiling::Refs refs = kKeys ? t.queries_of(tile) : t.keys_of(tile);
    walk = {refs.begin(), refs.end(), {0, 0}, false};
    chunk[0] = walk.next(tiles, kMost);
  }
  __syncthreads();
  if (kOther && chunk[0].n > 0) fetch(chunk[0], 0);
  if (threadIdx.x == 0) chunk[1] = walk.next(tiles, kMost);
  Chunk now = chunk[0];
  for (int at = 0; now.n > 0; at ^= 1, now = chunk[at]) {
    if (!kOther) fetch(now, 0);
    wait_for_copies();
    __syncthreads();  // everybody's copies have landed, and nobody reads the other stage any more
    if (kOther && chunk[at ^ 1].n > 0) fetch(chunk[at ^ 1], at ^ 1);
    if (threadIdx.x == 0) chunk[at] = walk.next(tiles, kMost);
    work(now, at & kOther);
    if (!kOther) __syncthreads();
  }
  wait_for_copies();
}

/// Shared memory, in bytes: tiles of so many owned Tensors; stages of chunks of two, with their
/// statistics; and what the way wants for itself.
template <class Unit, int Tensors, bool kStatistics> struct Memory {
  static constexpr std::uint32_t own_b = Unit::kOwnedBytes, stream_a = Tensors * Unit::kOwnedBytes,
                                 stream_b = stream_a + Unit::kChunkBytes, lse = stream_b + Unit::kChunkBytes,
                                 kStatistic = kStatistics ? Unit::Lanes::kChunk * 4 : 0, delta = lse + kStatistic,
                                 kStage = 2 * (Unit::kChunkBytes + kStatistic), own = stream_a + Unit::kStages * kStage,
                                 kSize = own + Unit::kOwnBytes;
};

// ---- who attends to whom ------------------------------------------------------------------------

/// Where a lane's scores stand in the lists: rows that a block owns, columns of a chunk. Those
/// beyond the last are taken for the last, and do not count.
template <class L> struct ScorePlaces {
  const OwnedRows& own;
  const Chunk& chunk;
  __device__ __forceinline__ int row_at(int r) const { return own.entry(L::row(r)); }
  __device__ __forceinline__ int column_at(int c) const { return chunk.first + min(L::column(c), chunk.n - 1); }
  __device__ __forceinline__ bool has_row(int r) const { return L::row(r) < own.n; }
  /// Whether every score of so many rows of the warp counts.
  __device__ __forceinline__ bool is_whole(int rows) const {
    return !chunk.partial && chunk.n == L::kChunk && L::warp_row() + rows <= own.n;
  }
};

/// A bit a score, row by row.
template <class L> struct Bits {
  static constexpr int kAll = L::kRows * L::kScores, kOfWord = kAll < 32 ? kAll : 32,
                       kRowsOfWord = kOfWord / L::kScores;
  static_assert(kAll % kOfWord == 0 && kRowsOfWord % 2 == 0);
  unsigned word[kAll / kOfWord];
  static constexpr unsigned bit(int r, int c) { return 1u << (r % kRowsOfWord * L::kScores + c); }
  __device__ __forceinline__ bool at(int r, int c) const { return word[r / kRowsOfWord] & bit(r, c); }
  __device__ __forceinline__ void clear(int r, int c) { word[r / kRowsOfWord] &= ~bit(r, c); }
  /// Sets the words to those that f(first row) returns.
  template <class F> __device__ __forceinline__ void fill(F&& f) {
#pragma unroll
    for (int w = 0; w < kAll / kOfWord; ++w) word[w] = f(w * kRowsOfWord);
  }
  __device__ __forceinline__ bool any() const {
    unsigned x = 0;
#pragma unroll
    for (const unsigned bits : word) x |= bits;
    return __any_sync(~0u, x != 0);
  }
};

// Loops stay loops: they run before there are scores, and their code is not worth its room in the
// cache.

/// The bits of rows r and r + 1: scores of pairs that attend.
template <bool kQueries, int kAxes, class L>
__device__ __forceinline__ unsigned attending(const TilingView& t, const ScorePlaces<L>& x, int r) {
  const auto side = [&]<bool kQuery>(int i, std::size_t box) {
    if constexpr (kQuery) return bounds_of<kAxes>(t, static_cast<std::size_t>(i), box);
    else return place_of<kAxes>(t, static_cast<std::size_t>(i), box);
  };
  const auto both = [](const auto& row, const auto& column) {
    if constexpr (kQueries) return attends(row, column);
    else return attends(column, row);
  };
  unsigned bits = 0;
  for (std::size_t box = 0; box < (kAxes > 2 ? static_cast<std::size_t>(t.boxes) : 1); ++box) {
    const auto upper = side.template operator()<kQueries>(x.row_at(r), box),
               lower = side.template operator()<kQueries>(x.row_at(r + 1), box);
#pragma unroll 4
    for (int c = 0; c < L::kScores; ++c) {
      const auto column = side.template operator()<!kQueries>(x.column_at(c), box);
      if (both(upper, column)) bits |= Bits<L>::bit(0, c);
      if (both(lower, column)) bits |= Bits<L>::bit(1, c);
    }
  }
  return bits;
}
/// The scores that count: of rows and columns there are and, in partial tiles, of pairs that
/// attend. The others are not even sure to be finite: a row of zeros scores 0, and e^(0 - L)
/// overflows where L is far below. kQueries: rows are queries, columns keys.
template <bool kQueries, class L>
__device__ __forceinline__ Bits<L> counting(const TilingView& t, const ScorePlaces<L>& x) {
  const bool wide = t.boxes > 1 || !t.axis[2].key.empty();
  unsigned columns = 0;
#pragma unroll
  for (int c = 0; c < L::kScores; ++c) columns |= L::column(c) < x.chunk.n ? Bits<L>::bit(0, c) : 0;
  Bits<L> bits;
  bits.fill([&](int first) {
    unsigned word = 0;
#pragma unroll 1
    for (int r = 0; r < Bits<L>::kRowsOfWord; r += 2) {
      const int row = first + r;
      unsigned two = (x.has_row(row) ? columns : 0) | (x.has_row(row + 1) ? columns << L::kScores : 0);
      if (x.chunk.partial) two &= wide ? attending<kQueries, 3>(t, x, row) : attending<kQueries, 2>(t, x, row);
      word |= two << (r * L::kScores);
    }
    return word;
  });
  return bits;
}
/// The scores whose weights survive dropout.
template <bool kQueries, class L>
__device__ __forceinline__ Bits<L> surviving(const Problem& p, int h, const ScorePlaces<L>& x) {
  Bits<L> bits;
  bits.fill([&](int first) {
    unsigned word = 0;
#pragma unroll 1
    for (int i = 0; i < Bits<L>::kOfWord; ++i) {
      const int row = x.row_at(first + i / L::kScores), column = x.column_at(i % L::kScores);
      word |= (survives(p, x.own.row, h, kQueries ? row : column, kQueries ? column : row) ? 1u : 0u) << i;
    }
    return word;
  });
  return bits;
}
/// x = otherwise where a bit is not set: whatever stood there, NaN too, is gone.
template <class L>
__device__ __forceinline__ void mask_out(typename L::Scores& x, const Bits<L>& bits, float otherwise) {
#pragma unroll
  for (int r = 0; r < L::kRows; ++r)
#pragma unroll
    for (int c = 0; c < L::kScores; ++c)
      if (!bits.at(r, c)) x[r][c] = otherwise;
}
/// x is multiplied by zero where a bit is not set: what dropout drops attends all the same, and NaN
/// stays NaN.
template <class L> __device__ __forceinline__ void drop(typename L::Scores& x, const Bits<L>& bits) {
#pragma unroll
  for (int r = 0; r < L::kRows; ++r)
#pragma unroll
    for (int c = 0; c < L::kScores; ++c) x[r][c] *= bits.at(r, c) ? 1.0f : 0.0f;
}

/// f(r, c, pair) for the scores that a lane has. kQueries: rows are queries. Rows of the warp, and
/// columns, are a lane each before they are shared. All lanes.
template <bool kQueries, class L, class F>
__device__ __forceinline__ void each_score(const Problem& p, int h, const ScorePlaces<L>& x, F&& f) {
  static_assert(L::kChunk == kWarp && L::kWarpRows <= kWarp);
  const TermSide columns = side_of<kQueries>(p, x.chunk.first + min(L::lane(), x.chunk.n - 1));
  constexpr bool kKeep = L::kRows == 2;  // sides of rows for all columns
  TermSide rows, other;
  if constexpr (kKeep) rows = side_of<!kQueries>(p, x.row_at(0)), other = side_of<!kQueries>(p, x.row_at(1));
  else rows = side_of<!kQueries>(p, x.own.entry(L::warp_row() + L::lane()));
  const auto row_of = [&](int r) { return !kKeep ? rows.of_lane(L::row(r) - L::warp_row()) : r == 0 ? rows : other; };
#pragma unroll
  for (int c = 0; c < L::kScores; ++c) {
    const TermSide column = columns.of_lane(L::column(c));
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const TermSide mine = row_of(r);
      f(r, c, TermPair{x.own.row, h, kQueries ? mine : column, kQueries ? column : mine});
    }
  }
}

// ---- results ------------------------------------------------------------------------------------

/// Rows that are written, of T or f32, and what was there before, or null.
template <class T> struct Results {
  Rows<T> to;  // one of these two
  Rows<float> wide;
  Rows<const float> before;
};
template <class T> Results<T> results_of(const Output& x, const Input& before) {
  Results<T> out{};
  if (x.type == DType::f32) out.wide = x.rows<float>();
  else out.to = x.rows<T>();
  out.before = before.rows<const float>();
  return out;
}

/// A row that a warp has a part of.
struct ResultRow {
  Index b, token, head;
  int dim;
  bool writes;
};
/// Writes times x sum + keep x before, which is not read where keep is 0. All lanes.
template <class Unit, class T, int N>
__device__ __forceinline__ void write_sum(const Results<T>& x, const ResultRow& at, const float (&sum)[N], float times,
                                          float keep) {
  const float* const before = keep != 0 && x.before.data ? x.before.at(at.b, at.token, at.head) : nullptr;
  const auto value = [&](int c) {
    const float here = times * sum[c];
    const int column = Unit::Lanes::column(c);
    return before && column < at.dim ? fmaf(keep, before[column], here) : here;
  };
  if (x.wide.data) Unit::write_row(x.wide.at(at.b, at.token, at.head), at.writes, at.dim, value);
  else Unit::write_row(x.to.at(at.b, at.token, at.head), at.writes, at.dim, value);
}

/// 0 where all are finite, else NaN.
template <int M, int N> __device__ __forceinline__ float zero_if_finite(const float (&x)[M][N]) {
  float zero = 0;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) zero = fmaf(x[m][n], 0.0f, zero);
  return zero;
}
/// Whether this block's tile came out finite. If not, it is marked for the way that selects, and
/// not to be written. All threads.
template <class Unit>
__device__ __forceinline__ bool is_finite_or_marked(float zero, const OwnedRows& own, const TileMarks& marks) {
  if (!Unit::kMarks || !own.mark) return true;
  const bool finite = __syncthreads_and(zero == 0.0f);
  if (!finite && threadIdx.x == 0) *own.mark = kWholeTile, *marks.any = 1;
  return finite;
}

// ---- starting -----------------------------------------------------------------------------------

/// A block for all that is owned, or at most so many for a head, which take turns.
template <class Unit> Index blocks_for_owned(const std::vector<Tiling::Range>& tiles, Index rows, Index most) {
  return std::min(std::ssize(tiles) * Unit::Lanes::kParts * rows, most);
}
inline dim3 grid_of(Index blocks, Index heads) {
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(heads));
}
/// Where tiles are redone, which is rare, few blocks look for marks.
template <class Unit> Index most_blocks(Cuda where, const AttentionPass& pass, const Marks& marks) {
  return !Unit::kMarks && marks.any ? blocks_of_head(where, pass) : Index{1} << 30;
}

}  // namespace hilt::kernels
