#pragma once
#include "ops/hilbert/kernels/cuda/loop.cuh"

// To multiply on tensor cores (loop.cuh), as every GPU since sm_80 has them: bf16 and f16, head
// dims that are multiples of 16, to 128.
//
// While a chunk is worked on the next is copied, row by row through the list of tokens. Every 16 x
// 16 block of a chunk that a warp loads from shared memory serves as many products as it has blocks
// of 16 rows. Scores lie as mma_sync.cuh says, and weights are rounded to the operands' type where
// they stand: the scores of two products side by side are the left factor of the next.

namespace hilt::kernels {

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

/// Head dims to W, a warp with M blocks of 16 rows. Blocks: of a multiprocessor.
template <class T, int W, int M, int Chunk, int Blocks> struct TensorCores {
  using Type = T;
  using Stride = int;
  using Lanes = LanesOf<4, 2, 2 * M, Chunk, W, kTile / 16 / M * kWarp>;
  using Powers = FastPowers;
  static constexpr bool kFolds = true, kMarks = true;
  static constexpr float kLift = std::is_same_v<T, f16> ? 10 : 0;
  static constexpr int kBlocks = Blocks, kStages = 2, N = Chunk / 8;
  static constexpr std::uint32_t kPitch = Tile<W>::kPitch, kOwnedBytes = Lanes::kOwned * kPitch,
                                 kChunkBytes = Chunk * kPitch, kOwnBytes = 0;

  /// Starts copying rows token[0, n) of two tensors, or of a alone; zeros beyond n and dim. All
  /// threads.
  template <bool kStream>
  static __device__ __forceinline__ void fetch(std::uint32_t to_a, std::uint32_t to_b, HeadRows<const T, int> a,
                                               HeadRows<const T, int> b, const std::int32_t* token, int n, int dim) {
    constexpr int kPieces = Tile<W>::kPieces, kEach = (kStream ? Chunk : Lanes::kOwned) * kPieces / Lanes::kThreads;
    static_assert(Chunk * kPieces % Lanes::kThreads == 0);
#pragma unroll 4
    for (int i = 0; i < kEach; ++i) {
      const int x = i * Lanes::kThreads + static_cast<int>(threadIdx.x), row = x / kPieces, piece = x % kPieces;
      const bool copy = row < n && piece * 8 < dim;
      const std::int64_t t = copy ? __ldg(token + row) : 0;
      const int column = copy ? piece * 8 : 0;
      copy_16(shared_at(to_a) + Tile<W>::at(row, piece), a.row(t) + column, copy);
      if (b.data) copy_16(shared_at(to_b) + Tile<W>::at(row, piece), b.row(t) + column, copy);
    }
  }
  /// s = owned rows . streamed rows
  static __device__ __forceinline__ void multiply(typename Lanes::Scores& s, std::uint32_t own,
                                                  std::uint32_t streamed) {
    const Pointer<W> left = Pointer<W>::by_columns(), right = Pointer<W>::by_rows();
    const std::uint32_t a = shared_at(own + static_cast<std::uint32_t>(Lanes::warp_row()) * kPitch),
                        b = shared_at(streamed);
#pragma unroll
    for (auto& row : s)
#pragma unroll
      for (float& x : row) x = 0;
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
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            mma<T>(&s[2 * m][2 * (c + i)], &s[2 * m + 1][2 * (c + i)], x[m], y[2 * i], y[2 * i + 1]);
      }
    }
  }
  /// sum += weights x streamed rows, all of the chunk: weights are zero where a bit is not set.
  static __device__ __forceinline__ void add_weighted(typename Lanes::Sums& sum, const typename Lanes::Scores& w,
                                                      const Bits<Lanes>&, std::uint32_t streamed, int, std::uint32_t) {
    const Pointer<W> right = Pointer<W>::by_columns();
    const std::uint32_t b = shared_at(streamed);
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      std::uint32_t x[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const pair = &w[2 * m + i % 2][4 * k + i / 2 * 2];
          x[m][i] = pack_pair<T>(pair[0], pair[1]);
        }
#pragma unroll
      for (int d = 0; d < W / 16; ++d) {
        std::uint32_t y[4];
        load_transposed(y, right.at(b, 16 * k, d));
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            mma<T>(&sum[2 * m][4 * d + 2 * i], &sum[2 * m + 1][4 * d + 2 * i], x[m], y[2 * i], y[2 * i + 1]);
      }
    }
  }
  /// to[column] = value(c) for the columns that a lane has of one row: four lanes exchange theirs
  /// and write 16 bytes each. All lanes of the warp come here; those without a row write nothing.
  template <class Value> static __device__ __forceinline__ void write_row(T* to, bool writes, int dim, Value&& value) {
#pragma unroll
    for (int c = 0; c < W / 8; c += 4) {
      std::uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = pack_pair<T>(value(2 * (c + i)), value(2 * (c + i) + 1));
      transpose_four(w);
      const int column = (c + Lanes::lane() % 4) * 8;
      if (writes && column < dim) *reinterpret_cast<uint4*>(to + column) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
  /// The same in f32, where four lanes' pairs already fill 32 bytes.
  template <class Value>
  static __device__ __forceinline__ void write_row(float* to, bool writes, int dim, Value&& value) {
#pragma unroll
    for (int c = 0; c < W / 4; c += 2)
      if (const int d = Lanes::column(c); writes && d < dim)
        *reinterpret_cast<float2*>(to + d) = make_float2(value(c), value(c + 1));
  }
};

/// f.operator()<W, kTerms>() for the width of tiles that holds a head dim; columns from the dim on
/// are zero. Terms take registers, and code for each score that a lane has: fewer widths then.
template <class F> void with_width(Index dim, bool terms, F&& f) {
  if (terms) dim <= 64 ? f.template operator()<64, true>() : f.template operator()<128, true>();
  else if (dim <= 32) f.template operator()<32, false>();
  else if (dim <= 64) f.template operator()<64, false>();
  else if (dim <= 96) f.template operator()<96, false>();
  else f.template operator()<128, false>();
}

}  // namespace hilt::kernels
