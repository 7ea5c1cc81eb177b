// Matrix products on one thread, compiled for this instruction set.
// With AVX2, AVX-512 or NEON: kRows x kPanel sums of C live in registers while one column of A at
// a time meets one row of B. Both are packed. B, kAcross columns by kDepth rows in panels of kPanel
// columns, stays in the L2 cache and passes by kRows rows of A, which stay in L1. Of a few rows
// nothing is packed: B is read once, as it lies. Each element of C adds up in the order of k.
// Below that, Eigen, by -DEigen=Eigen_<isa> a namespace of each copy's own.
#include <Eigen/Core>
#include "ops/gemm/gemm.h"
#include "ops/isa.h"

namespace hilt::kernels {
namespace {

template <class T> struct VectorOf { using type [[gnu::vector_size(kVectorBytes)]] = T; };
template <class T> using Vector = typename VectorOf<T>::type;
template <class T> struct LooseOf { using type [[gnu::vector_size(kVectorBytes), gnu::aligned(alignof(T))]] = T; };
template <class T> using Loose = typename LooseOf<T>::type;

// 28 sums and two vectors of B in 32 registers, 16 where A takes registers too; 12 and two in 16.
constexpr int kRows = kIsa == Isa::avx512 ? 14 : kIsa == Isa::neon ? 8 : 6;
constexpr int kVectors = 2;
constexpr Index kDepth = 256;  // 14 x 256 floats are 14 KiB
template <class T> constexpr Index kPanel = kVectors* kLanes<T>;
/// 768 KiB of an L2 cache of 1 MiB or more, as with AVX-512; 256 KiB of a smaller one.
template <class T> constexpr Index kAcross = (kIsa == Isa::avx512 ? 3072 : 1024) / static_cast<Index>(sizeof(T));
static_assert(kDepth * kAcross<float> * static_cast<Index>(sizeof(float)) <= kGemmScratch &&
              kAcross<double> % kPanel<double> == 0);

template <class T> Vector<T>& aligned(T* x) { return *reinterpret_cast<Vector<T>*>(x); }
template <class T> const Vector<T>& aligned(const T* x) { return *reinterpret_cast<const Vector<T>*>(x); }
template <class T> Loose<T>& loose(T* x) { return *reinterpret_cast<Loose<T>*>(x); }
template <class T> const Loose<T>& loose(const T* x) { return *reinterpret_cast<const Loose<T>*>(x); }

/// C [R, columns] (+)= A B for packed rows of A and a packed panel of B.
template <int R, int V, class T>
[[gnu::noinline]] void tile(Index depth, const T* a, const T* b, MatrixRef<T> c, Index columns, bool add) {
  Vector<T> sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      sum[r][v] = Vector<T>{};
      __builtin_prefetch(c.data + r * c.row + v * kLanes<T>, 1);
    }
  for (Index k = 0; k < depth; ++k, a += kRows, b += kPanel<T>) {
    Vector<T> right[V];
    for (int v = 0; v < V; ++v) right[v] = aligned(b + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[r][v] += a[r] * right[v];
  }
  T line[V * kLanes<T>];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    T* const to = c.data + r * c.row;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      if (columns < V * kLanes<T>) loose(line + v * kLanes<T>) = sum[r][v];
      else if (add) loose(to + v * kLanes<T>) += sum[r][v];
      else loose(to + v * kLanes<T>) = sum[r][v];
    }
    if (columns < V * kLanes<T>)
      for (Index j = 0; j < columns; ++j) to[j] = add ? to[j] + line[j] : line[j];
  }
}

/// `rows` of them, at most R.
template <int R, class T>
void some_rows(Index rows, Index depth, const T* a, const T* b, MatrixRef<T> c, Index columns, bool add) {
  if (rows == R)
    return columns > kLanes<T> ? tile<R, kVectors>(depth, a, b, c, columns, add)
                               : tile<R, 1>(depth, a, b, c, columns, add);
  if constexpr (R > 1) some_rows<R - 1>(rows, depth, a, b, c, columns, add);
}

/// to[k][i] = from[i][k], as many each way as a vector has lanes, but only `rows` are read; rows of
/// `to` are kApart apart. Each step shuffles rows i and i + N/2 like two halves of a deck.
template <Index kApart, class T, int... Lane>
[[gnu::always_inline]] inline void transpose(const T* from, Index pitch, Index rows, T* to,
                                             std::integer_sequence<int, Lane...>) {
  constexpr int N = kLanes<T>;
  Vector<T> line[N], next[N];
  for (int i = 0; i < N; ++i) line[i] = loose(from + (i < rows ? i : 0) * pitch);
  for (int step = 1; step < N; step *= 2) {
    for (int i = 0; i < N / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2)...);
      next[2 * i + 1] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2 + N / 2)...);
    }
    for (int i = 0; i < N; ++i) line[i] = next[i];
  }
  for (int i = 0; i < N; ++i) loose(to + i * kApart) = line[i];
}

/// A panel of B: [depth, kPanel], zeros beyond its columns.
template <class T> void pack_right(MatrixRef<const T> b, Index depth, Index columns, T* to) {
  const bool whole = columns == kPanel<T>;
  Index k = 0;
  if (whole && b.column == 1) {
    for (; k < depth; ++k)
      for (int v = 0; v < kVectors; ++v)
        aligned(to + k * kPanel<T> + v * kLanes<T>) = loose(b.data + k * b.row + v * kLanes<T>);
  } else if (whole && b.row == 1) {
    for (; k + kLanes<T> <= depth; k += kLanes<T>)
      for (int v = 0; v < kVectors; ++v)
        transpose<kPanel<T>>(b.data + k + v * kLanes<T> * b.column, b.column, kLanes<T>,
                             to + k * kPanel<T> + v * kLanes<T>, std::make_integer_sequence<int, kLanes<T>>());
  }
  for (; k < depth; ++k)
    for (Index j = 0; j < kPanel<T>; ++j) to[k * kPanel<T> + j] = j < columns ? b.data[k * b.row + j * b.column] : T{0};
}

/// Rows of the next tile where `left` are left: at most kRows, and none much shorter than others.
[[maybe_unused]] Index next_rows(Index left) {
  const Index tiles = (left + kRows - 1) / kRows;
  return (left + tiles - 1) / tiles;
}

/// At most kRows rows of A, which has so many `more`: [depth, kRows], where what lies beyond the
/// rows is not used. The next ones are asked for: too far apart for the processor to guess.
template <class T> void pack_left(MatrixRef<const T> a, Index rows, Index more, Index depth, T* to) {
  Index k = 0;
  if (a.column == 1) {
    for (; k + kLanes<T> <= depth; k += kLanes<T>) {
      for (Index i = 0; i < rows; ++i) __builtin_prefetch(a.data + (rows + i) * a.row + k, 0, 2);
      for (Index r = (kRows - 1) / kLanes<T> * kLanes<T>; r >= 0; r -= kLanes<T>)  // downwards: a store may spill over
        if (r < rows)
          transpose<kRows>(a.data + r * a.row + k, a.row, rows - r, to + k * kRows + r,
                           std::make_integer_sequence<int, kLanes<T>>());
    }
  } else if (rows + more >= kRows) {
    for (; k < depth; ++k) {
      __builtin_memcpy(to + k * kRows, a.data + k * a.column, kRows * sizeof(T));
      __builtin_prefetch(a.data + k * a.column + 2 * kRows, 0, 2);
    }
  }
  for (; k < depth; ++k)
    for (Index i = 0; i < rows; ++i) to[k * kRows + i] = a.data[i * a.row + k * a.column];
}

/// C (+)= A B for few rows, which packing B would cost more than: four pass by sums in L1.
constexpr Index kFewRows = 3, kFewAcross = 1024;
template <class T>
void few_rows(Index m, Index n, Index k, MatrixRef<const T> a, const T* b, Index b_row, MatrixRef<T> c, bool add) {
  alignas(64) T sums[kFewRows][kFewAcross];
  for (Index j0 = 0; j0 < n; j0 += kFewAcross) {
    const Index columns = n - j0 < kFewAcross ? n - j0 : kFewAcross;
    for (Index p = 0; p < k; p += kDepth) {
      const Index end = k - p < kDepth ? k : p + kDepth;
      for (Index r = 0; r < m; ++r) __builtin_memset(sums[r], 0, static_cast<std::size_t>(columns) * sizeof(T));
      const auto rows_of_b = [&]<int N>(Index at, std::integral_constant<int, N>) {
        const T* const line = b + at * b_row + j0;
        for (Index r = 0; r < m; ++r) {
          T left[N];
          for (int i = 0; i < N; ++i) left[i] = a.data[r * a.row + (at + i) * a.column];
          T* const sum = sums[r];
          Index j = 0;
          for (; j + kLanes<T> <= columns; j += kLanes<T>) {
            Vector<T> x = aligned(sum + j);
            for (int i = 0; i < N; ++i) x += left[i] * loose(line + i * b_row + j);
            aligned(sum + j) = x;
          }
          for (; j < columns; ++j)
            for (int i = 0; i < N; ++i) sum[j] += left[i] * line[i * b_row + j];
        }
      };
      Index at = p;
      for (; at + 4 <= end; at += 4) rows_of_b(at, std::integral_constant<int, 4>());
      for (; at < end; ++at) rows_of_b(at, std::integral_constant<int, 1>());
      for (Index r = 0; r < m; ++r)
        for (Index j = 0; j < columns; ++j) {
          T& to = c.data[r * c.row + j0 + j];
          to = add || p > 0 ? to + sums[r][j] : sums[r][j];
        }
    }
  }
}

/// The same where the columns of B lie as rows: a square of a vector's lanes is turned at a time.
template <class T>
void few_rows_of_columns(Index m, Index n, Index k, MatrixRef<const T> a, const T* b, Index b_column, MatrixRef<T> c,
                         bool add) {
  constexpr Index N = kLanes<T>;
  alignas(64) T square[N * N] = {};
  for (Index j = 0; j < n; j += N)
    for (Index p = 0; p < k; p += kDepth) {
      const Index columns = n - j < N ? n - j : N, end = k - p < kDepth ? k : p + kDepth;
      Vector<T> sum[kFewRows] = {};
      for (Index at = p; at < end; at += N) {
        const Index deep = end - at < N ? end - at : N;
        const T* const from = b + j * b_column + at;
        if (deep == N) transpose<N>(from, b_column, columns, square, std::make_integer_sequence<int, kLanes<T>>());
        else
          for (Index i = 0; i < columns * deep; ++i)
            square[i % deep * N + i / deep] = from[i / deep * b_column + i % deep];
        for (Index i = 0; i < deep; ++i)
          for (Index r = 0; r < m; ++r) sum[r] += a.data[r * a.row + (at + i) * a.column] * aligned(square + i * N);
      }
      for (Index r = 0; r < m; ++r)
        for (Index i = 0; i < columns; ++i) {
          T& to = c.data[r * c.row + j + i];
          to = add || p > 0 ? to + sum[r][i] : sum[r][i];
        }
    }
}

template <class T>
void tiled(Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add, T* right) {
  alignas(64) T left[kDepth * kRows + kLanes<T>];
  const auto least = [](Index x, Index y) { return x < y ? x : y; };
  for (Index j0 = 0; j0 < n; j0 += kAcross<T>)
    for (Index p = 0; p < k; p += kDepth) {
      const Index across = least(kAcross<T>, n - j0), depth = least(kDepth, k - p);
      for (Index i = 0, rows = 0; i < m; i += rows) {
        rows = next_rows(m - i);
        pack_left<T>({a.data + i * a.row + p * a.column, a.row, a.column}, rows, m - i - rows, depth, left);
        for (Index j = 0; j < across; j += kPanel<T>) {
          const Index columns = least(kPanel<T>, across - j);
          T* const panel = right + (rows < m ? j * depth : 0);  // where nobody comes after, all take one place, in L1
          if (i == 0) pack_right<T>({b.data + p * b.row + (j0 + j) * b.column, b.row, b.column}, depth, columns, panel);
          some_rows<kRows, T>(rows, depth, left, panel, {c.data + i * c.row + j0 + j, c.row, 1}, columns, add || p > 0);
        }
      }
    }
}

// ---- Eigen --------------------------------------------------------------------------------------
template <class T> using Dense = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T> using Ref = Eigen::Map<const Dense<T>, 0, Eigen::OuterStride<>>;

// f(M) with M a row-major map of the matrix, or the transpose of one.
template <class T, class F> void with(MatrixRef<const T> m, Index rows, Index columns, F f) {
  if (m.column == 1) f(Ref<T>(m.data, rows, columns, Eigen::OuterStride<>(m.row)));
  else f(Ref<T>(m.data, columns, rows, Eigen::OuterStride<>(m.column)).transpose());
}

}  // namespace

template <class T, class At>
void cpu_gemm(At, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add,
              T* scratch) {
  if constexpr (At::kIsa != Isa::base) {
    if (m <= kFewRows && b.column == 1) few_rows<T>(m, n, k, a, b.data, b.row, c, add);
    else if (m <= kFewRows && b.row == 1) few_rows_of_columns<T>(m, n, k, a, b.data, b.column, c, add);
    else tiled<T>(m, n, k, a, b, c, add, scratch);
  } else {
    Eigen::Map<Dense<T>, 0, Eigen::OuterStride<>> out(c.data, m, n, Eigen::OuterStride<>(c.row));
    with<T>(a, m, k, [&](const auto& A) {
      with<T>(b, k, n, [&](const auto& B) {
        if (!add) out.setZero();  // a sum begins with +0, as in tiles: a product of 0 may be -0
        out.noalias() += A * B;
      });
    });
  }
}

HILT_KERNEL(cpu_gemm, float, CpuAt<kIsa>)
HILT_KERNEL(cpu_gemm, double, CpuAt<kIsa>)

}  // namespace hilt::kernels
