#pragma once
#include "ops/hilbert/kernels/cuda/mma_sync.cuh"
#include "ops/hilbert/kernels/cuda/merge.cuh"
#include "ops/hilbert/kernels/cuda/kernels.h"
#include "ops/hilbert/kernels/cuda/terms.cuh"

// What the forward and backward kernels on the tensor cores of any GPU share: tiles in shared
// memory, products of them, who attends to whom.
//
// A block owns a tile, at most kTile rows of one list. The rows of the other list come in
// chunks, which stream through two stages of shared memory: while one is worked on the next is
// copied, row by row through the list of tokens. A warp has the scores of 16 or 32 owned rows and
// all rows of a chunk in registers, laid out as mma_sync.cuh says: s[c][2 h + j] is of row
// lane / 4 + 8 h and column 8 c + 2 (lane % 4) + j. Score terms (terms.cuh) are added to them
// there, in kernels of their own, with fewer scores a lane.

namespace hilt::kernels::tensor_cores {

using namespace cuda;

constexpr int kTile = static_cast<int>(Tiling::kTile);

// ---- operands -----------------------------------------------------------------------------------

/// Rows of one head of one sequence.
template <class T> struct HeadRows {
  T* data = nullptr;
  int stride = 0;
  __device__ __forceinline__ T* row(std::int64_t token) const { return data + token * stride; }
};
/// Rows of one tensor; strides in elements.
template <class T> struct Operand {
  T* data;
  std::int64_t batch;
  int token, head;
  __device__ HeadRows<T> at(Index b, Index h) const { return {data + b * batch + h * head, token}; }
};
template <class T> Operand<T> operand_of(const Rows<T>& x) {
  return {x.data, x.batch, static_cast<int>(x.token), static_cast<int>(x.head)};
}

/// f.operator()<W, kTerms>() for the width of tiles that holds a head dim; columns from the dim on
/// are zero.
template <class F> void with_width(Index dim, bool terms, F&& f) {
  if (terms) dim <= 64 ? f.template operator()<64, true>() : f.template operator()<128, true>();
  else if (dim <= 32) f.template operator()<32, false>();
  else if (dim <= 64) f.template operator()<64, false>();
  else if (dim <= 96) f.template operator()<96, false>();
  else f.template operator()<128, false>();
}
// ---- tiles in shared memory ---------------------------------------------------------------------

/// Rows of W elements in pieces of 16 bytes. Where a piece stands in its row is turned from row to
/// row (XOR), so that eight rows' pieces of one column, which is what a matrix load reads, lie in
/// different banks: 128 bytes repeat every row at W = 64 and 128, every two at 32 and 96.
template <int W> struct Tile {
  static constexpr int kPieces = W / 8;
  static constexpr std::uint32_t kPitch = 2 * W;
  static __device__ __forceinline__ int turn(int row) { return kPieces % 8 == 0 ? row % 8 : row / 2 % 4; }
  static __device__ __forceinline__ std::uint32_t at(int row, int piece) {
    return static_cast<std::uint32_t>(row) * kPitch + static_cast<std::uint32_t>(piece ^ turn(row)) * 16;
  }
};

/// Where a lane points to load the four matrices of a 16 x 16 block: rows row + 0 .. 15, columns 16
/// k + 0 .. 15.
template <int W> class Pointer {
 public:
  /// In the order upper left, lower left, upper right, lower right: a left factor; or, transposed,
  /// two right factors side by side.
  static __device__ __forceinline__ Pointer by_columns() {
    return Pointer(static_cast<int>(threadIdx.x) % 16, static_cast<int>(threadIdx.x) / 16 % 2);
  }
  /// Upper left, upper right, lower left, lower right: two right factors whose columns are the rows
  /// of the block.
  static __device__ __forceinline__ Pointer by_rows() {
    return Pointer(static_cast<int>(threadIdx.x) % 8 + static_cast<int>(threadIdx.x) / 16 % 2 * 8,
                   static_cast<int>(threadIdx.x) / 8 % 2);
  }
  /// row: a multiple of 8.
  __device__ __forceinline__ std::uint32_t at(std::uint32_t tile, int row, int k) const {
    return tile + row_ + static_cast<std::uint32_t>(row) * Tile<W>::kPitch +
           (static_cast<std::uint32_t>(k) * 32 ^ turn_);
  }

 private:
  __device__ __forceinline__ Pointer(int row, int piece)
      : row_(static_cast<std::uint32_t>(row) * Tile<W>::kPitch),
        turn_(static_cast<std::uint32_t>(piece ^ Tile<W>::turn(row)) * 16) {}
  std::uint32_t row_, turn_;
};

/// Starts copying rows token[0, n) of two tensors, or of a alone, into two tiles of so many rows;
/// zeros beyond n and dim. All threads of the block.
template <int W, int kRows, int kThreads, class T>
__device__ __forceinline__ void fetch(std::uint32_t to_a, std::uint32_t to_b, HeadRows<const T> a, HeadRows<const T> b,
                                      const std::int32_t* token, int n, int dim) {
  constexpr int kPieces = Tile<W>::kPieces;
  static_assert(kRows * kPieces % kThreads == 0);
#pragma unroll 4
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int x = i * kThreads + static_cast<int>(threadIdx.x), row = x / kPieces, piece = x % kPieces;
    const bool copy = row < n && piece * 8 < dim;
    const std::int64_t t = copy ? __ldg(token + row) : 0;
    const int column = copy ? piece * 8 : 0;
    copy_16_or_zero(to_a + Tile<W>::at(row, piece), a.row(t) + column, copy);
    if (b.data) copy_16_or_zero(to_b + Tile<W>::at(row, piece), b.row(t) + column, copy);
  }
}

// ---- products -----------------------------------------------------------------------------------

/// s = A B^T of M x 16 rows at a and N x 8 rows at b.
template <class T, int W, int M, int N>
__device__ __forceinline__ void multiply(float (&s)[M][N][4], std::uint32_t a, std::uint32_t b) {
  const Pointer<W> left = Pointer<W>::by_columns(), right = Pointer<W>::by_rows();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int c = 0; c < N; ++c) s[m][c][0] = s[m][c][1] = s[m][c][2] = s[m][c][3] = 0;
#pragma unroll
  for (int k = 0; k < W / 16; ++k) {
    std::uint32_t x[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) load_matrices(x[m], left.at(a, 16 * m, k));
#pragma unroll
    for (int c = 0; c < N; c += 2) {
      std::uint32_t y[4];
      load_matrices(y, right.at(b, 8 * c, k));
#pragma unroll
      for (int m = 0; m < M; ++m) mma<T>(s[m][c], x[m], y[0], y[1]), mma<T>(s[m][c + 1], x[m], y[2], y[3]);
    }
  }
}

/// sum += w B of M x 16 x (8 N) weights and 8 N rows at b.
template <class T, int W, int M, int N>
__device__ __forceinline__ void add_weighted(float (&sum)[M][W / 8][4], const float (&w)[M][N][4], std::uint32_t b) {
  const Pointer<W> right = Pointer<W>::by_columns();
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    std::uint32_t x[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[m][i] = pack_pair<T>(w[m][2 * k + i / 2][i % 2 * 2], w[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int d = 0; d < W / 16; ++d) {
      std::uint32_t y[4];
      load_transposed(y, right.at(b, 16 * k, d));
#pragma unroll
      for (int m = 0; m < M; ++m) mma<T>(sum[m][2 * d], x[m], y[0], y[1]), mma<T>(sum[m][2 * d + 1], x[m], y[2], y[3]);
    }
  }
}

/// 0 where all are finite, else NaN.
template <int M, int N> __device__ __forceinline__ float zero_if_finite(const float (&x)[M][N][4]) {
  float zero = 0;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int c = 0; c < N; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) zero = fmaf(x[m][c][i], 0.0f, zero);
  return zero;
}

// ---- chunks, and who attends to whom ------------------------------------------------------------

/// Rows [first, first + n) of the streamed list, all of one tile; n = 0: there are no more.
struct Chunk {
  int first = 0, n = 0;
  bool partial = false;
};

/// Tiles, chunk by chunk.
template <int kRows> class Walk {
 public:
  __device__ __forceinline__ Walk(Tiling::Refs refs, std::span<const Tiling::Range> tiles)
      : at_(refs.begin()), end_(refs.end()), tiles_(tiles.data()) {}
  __device__ __forceinline__ Chunk next() {
    while (rows_.begin == rows_.end) {
      if (at_ == end_) return {};
      const Tiling::Ref ref = *at_;
      partial_ = ref.partial, rows_ = tiles_[ref.tile], ++at_;
    }
    const Chunk c{rows_.begin, min(rows_.end - rows_.begin, kRows), partial_};
    rows_.begin += c.n;
    return c;
  }

 private:
  Tiling::Refs::Iterator at_, end_;
  const Tiling::Range* tiles_;
  Tiling::Range rows_{0, 0};
  bool partial_ = false;
};

/// Where a lane's scores of 16 x (8 N) stand in the lists: rows row and row + 8 of the owned one,
/// columns column + 8 c + j of the chunk. Rows and columns beyond the last are taken for the last,
/// so that nothing is read beyond the lists; no score of theirs counts.
struct Place {
  int first_row, row, last_row, column;
  Chunk chunk;
  __device__ __forceinline__ int row_at(int h) const { return first_row + min(row + 8 * h, last_row); }
  __device__ __forceinline__ int column_at(int c, int j) const {
    return chunk.first + min(column + 8 * c + j, chunk.n - 1);
  }
  __device__ __forceinline__ bool has_row(int h) const { return row + 8 * h <= last_row; }
  __device__ __forceinline__ bool has_column(int c, int j) const { return column + 8 * c + j < chunk.n; }
  /// Whether every score of so many rows of the warp counts.
  __device__ __forceinline__ bool is_whole(int rows, int columns) const {
    return !chunk.partial && chunk.n == columns && row / 16 * 16 + rows <= last_row + 1;
  }
};

// A bit a score: 4 c + 2 h + j. Loops stay loops: they run before there are scores, and their code
// is not worth its room in the cache.

/// The scores that count: of rows and columns there are and, in partial tiles, of pairs that
/// attend. The others are not even sure to be finite: a row of zeros scores 0, and e^(0 - L)
/// overflows where L is far below. kQueries: rows are queries, columns keys.
template <bool kQueries, int N> __device__ __forceinline__ unsigned attending(const TilingView& t, const Place& x) {
  using Row = std::conditional_t<kQueries, QueryBounds, KeyPlace>;
  const auto row_at = [&](int h) -> Row {
    if constexpr (kQueries) return bounds_of<2>(t, static_cast<std::size_t>(x.row_at(h)));
    else return place_of<2>(t, static_cast<std::size_t>(x.row_at(h)));
  };
  Row rows[2]{};
  if (x.chunk.partial) rows[0] = row_at(0), rows[1] = row_at(1);
  unsigned bits = 0;
#pragma unroll 2
  for (int c = 0; c < N; ++c)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      bool both[2] = {true, true};
      if (x.chunk.partial) {
        const auto i = static_cast<std::size_t>(x.column_at(c, j));
        if constexpr (kQueries) {
          const KeyPlace k = place_of<2>(t, i);
          both[0] = attends(rows[0], k), both[1] = attends(rows[1], k);
        } else {
          const QueryBounds q = bounds_of<2>(t, i);
          both[0] = attends(q, rows[0]), both[1] = attends(q, rows[1]);
        }
      }
      if (x.has_column(c, j)) bits |= (both[0] ? 1u : 0u) << (4 * c + j) | (both[1] ? 1u : 0u) << (4 * c + 2 + j);
    }
  constexpr unsigned kRow = 0x33333333;  // of the first row; the second's are two to the left
  return bits & ((x.has_row(0) ? kRow : 0) | (x.has_row(1) ? kRow << 2 : 0));
}
/// All of them.
template <int N> constexpr unsigned kEvery = ~0u >> (32 - 4 * N);

/// The scores whose weights survive dropout.
template <bool kQueries, int N>
__device__ __forceinline__ unsigned surviving(const Problem& p, Index b, Index h, const Place& x) {
  unsigned bits = 0;
#pragma unroll 1
  for (int i = 0; i < 4 * N; ++i) {
    const int row = x.row_at(i / 2 % 2), column = x.column_at(i / 4, i % 2);
    bits |= (survives(p, Tiling::Place{static_cast<std::int32_t>(b), 0, 0}, h, kQueries ? row : column,
                      kQueries ? column : row)
                 ? 1u
                 : 0u)
            << i;
  }
  return bits;
}
/// x = otherwise where a bit is not set: whatever stood there, NaN too, is gone.
template <int N, int M>
__device__ __forceinline__ void mask_out(float (&x)[M][N][4], const unsigned (&bits)[M], float otherwise) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 0; i < 4 * N; ++i)
      if (!(bits[m] >> i & 1)) x[m][i / 4][i % 4] = otherwise;
}
/// x is multiplied by zero where a bit is not set: what dropout drops attends all the same, and NaN
/// stays NaN.
template <int N, int M> __device__ __forceinline__ void drop(float (&x)[M][N][4], const unsigned (&bits)[M]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) x[m][i / 4][i % 4] *= bits[m] >> i & 1 ? 1.0f : 0.0f;
}

/// f(c, i, pair) for the scores s[c][i] that a lane has of 16 rows and a chunk of 32. kQueries:
/// rows are queries. All lanes.
template <bool kQueries, class F>
__device__ __forceinline__ void each_score(const Problem& p, Index b, Index h, const Place& place, F&& f) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Tiling::Place at{static_cast<std::int32_t>(b), 0, 0};
  const TermSide mine = side_of<!kQueries>(p, at, place.row_at(0)), below = side_of<!kQueries>(p, at, place.row_at(1)),
                 column = side_of<kQueries>(p, at, place.chunk.first + min(lane, place.chunk.n - 1));
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const TermSide other = column.of_lane(8 * c + place.column + j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const TermSide& row = half == 0 ? mine : below;
        f(c, 2 * half + j, TermPair{b, h, kQueries ? row : other, kQueries ? other : row});
      }
    }
}

// ---- results ------------------------------------------------------------------------------------

/// In: word i of column block c in w[c], for lane i of four. Out: all four words of block i.
__device__ __forceinline__ void transpose_four(std::uint32_t (&w)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c & step) continue;
      const bool upper = lane & step;
      const std::uint32_t got = __shfl_xor_sync(~0u, upper ? w[c] : w[c + step], step);
      if (upper) w[c] = got;
      else w[c + step] = got;
    }
}

/// to[column] = value(c, j) for the columns that a lane has of one row: four lanes exchange theirs
/// and write 16 bytes each. All lanes of the warp come here; those without a row write nothing.
template <int W, class T, class Value>
__device__ __forceinline__ void write_row(T* to, bool writes, int dim, Value&& value) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int c = 0; c < W / 8; c += 4) {
    std::uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = pack_pair<T>(value(c + i, 0), value(c + i, 1));
    transpose_four(w);
    const int column = (c + lane) * 8;
    if (writes && column < dim) *reinterpret_cast<uint4*>(to + column) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
/// The same in f32, where four lanes' pairs already fill 32 bytes.
template <int W, class Value>
__device__ __forceinline__ void write_row(float* to, bool writes, int dim, Value&& value) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int c = 0; c < W / 8; ++c)
    if (writes && 8 * c < dim)
      *reinterpret_cast<float2*>(to + 8 * c + 2 * lane) = make_float2(value(c, 0), value(c, 1));
}

/// Whether this block's tile came out finite. If not, it is marked for the plain kernel, and not to
/// be written. All threads.
__device__ __forceinline__ bool is_finite_or_marked(float zero, std::uint32_t* mark, std::int32_t* any) {
  if (!mark) return true;
  const bool finite = __syncthreads_and(zero == 0.0f);
  if (!finite && threadIdx.x == 0) *mark = kWholeTile, *any = 1;
  return finite;
}

}  // namespace hilt::kernels::tensor_cores
