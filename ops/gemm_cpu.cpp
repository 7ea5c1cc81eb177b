// Matrix products on one thread, compiled for this instruction set.
//
// With AVX2 or AVX-512: kRows x kPanel sums of C live in registers while one column of A at a time meets one row of B. B is packed, a
// panel of kPanel columns by kDepth rows, which stays in the L1 cache while all rows of A pass by; that alone costs a few per cent, and A
// is read where it lies. Only a transposed A, whose rows are columns in memory, is packed too, kBlock rows at a time.
// Each element of C adds up in one order, that of k, whatever m and n are.
//
// Below that, Eigen. The build passes -DEigen=Eigen_<isa>, so that each copy is a namespace of its own and no code for a wider processor
// leaks into another.
#include <Eigen/Core>
#include "ops/gemm.h"
#include "ops/isa.h"

namespace hilt::kernels {
namespace {

template <class T> struct VectorOf { using type [[gnu::vector_size(kVectorBytes)]] = T; };
template <class T> using Vector = typename VectorOf<T>::type;
/// The same at any address.
template <class T> struct LooseOf { using type [[gnu::vector_size(kVectorBytes), gnu::aligned(alignof(T))]] = T; };
template <class T> using Loose = typename LooseOf<T>::type;

// 28 sums and two vectors of B in 32 registers; 12 and two in 16. A multiply-add takes its element of A from memory.
constexpr int kRows = kIsa == Isa::avx512 ? 14 : 6;
constexpr int kVectors = 2;
constexpr Index kDepth = 256;  // 256 x 32 floats are 32 KiB
constexpr Index kBlock = kGemmBlock / kRows * kRows;
constexpr Index kAcross = 512;  // 392 x 512 floats are 784 KiB
template <class T> constexpr Index kPanel = kVectors * kLanes<T>;
static_assert(kDepth == kGemmDepth);

template <class T> Vector<T>& aligned(T* x) { return *reinterpret_cast<Vector<T>*>(x); }
template <class T> const Vector<T>& aligned(const T* x) { return *reinterpret_cast<const Vector<T>*>(x); }
template <class T> Loose<T>& loose(T* x) { return *reinterpret_cast<Loose<T>*>(x); }
template <class T> const Loose<T>& loose(const T* x) { return *reinterpret_cast<const Loose<T>*>(x); }

/// C [R, columns] (+)= A B for one packed panel: element (r, k) of A is a[r * row + k * step].
template <int R, int V, class T>
[[gnu::noinline]] void tile(Index depth, const T* a, Index row, Index step, const T* b, MatrixRef<T> c, Index columns, bool add) {
  Vector<T> sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      sum[r][v] = Vector<T>{};
      if (add) __builtin_prefetch(c.data + r * c.row + v * kLanes<T>, 1);  // there when the sums are
    }
  for (Index k = 0; k < depth; ++k, a += step, b += kPanel<T>) {
    Vector<T> right[V];
    for (int v = 0; v < V; ++v) right[v] = aligned(b + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * row] * right[v];
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
void some_rows(Index rows, Index depth, const T* a, Index row, Index step, const T* b, MatrixRef<T> c, Index columns, bool add) {
  if (rows == R) return columns > kLanes<T> ? tile<R, kVectors>(depth, a, row, step, b, c, columns, add) : tile<R, 1>(depth, a, row, step, b, c, columns, add);
  if constexpr (R > 1) some_rows<R - 1>(rows, depth, a, row, step, b, c, columns, add);
}

/// to[k][j] = b[j][k], as many each way as a vector has lanes; rows of `to` are a panel apart. Each step shuffles rows i and i + N/2 like two
/// halves of a deck.
template <class T, int... Lane>
[[gnu::always_inline]] inline void transpose(const T* b, Index pitch, T* to, std::integer_sequence<int, Lane...>) {
  constexpr int N = kLanes<T>;
  Vector<T> line[N], next[N];
  for (int i = 0; i < N; ++i) line[i] = loose(b + i * pitch);
  for (int step = 1; step < N; step *= 2) {
    for (int i = 0; i < N / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2)...);
      next[2 * i + 1] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2 + N / 2)...);
    }
    for (int i = 0; i < N; ++i) line[i] = next[i];
  }
  for (int i = 0; i < N; ++i) aligned(to + i * kPanel<T>) = line[i];
}

/// A panel of B: [depth, kPanel], zeros beyond its columns.
template <class T>
void pack_right(MatrixRef<const T> b, Index depth, Index columns, T* to) {
  const bool whole = columns == kPanel<T>;
  Index k = 0;
  if (whole && b.column == 1) {
    for (; k < depth; ++k)
      for (int v = 0; v < kVectors; ++v) aligned(to + k * kPanel<T> + v * kLanes<T>) = loose(b.data + k * b.row + v * kLanes<T>);
  } else if (whole && b.row == 1) {
    for (; k + kLanes<T> <= depth; k += kLanes<T>)
      for (int v = 0; v < kVectors; ++v)
        transpose(b.data + k + v * kLanes<T> * b.column, b.column, to + k * kPanel<T> + v * kLanes<T>, std::make_integer_sequence<int, kLanes<T>>());
  }
  for (; k < depth; ++k)
    for (Index j = 0; j < kPanel<T>; ++j) to[k * kPanel<T> + j] = j < columns ? b.data[k * b.row + j * b.column] : T{0};
}

/// Rows of the next tile where `left` are left: at most kRows, and none of them much shorter than the others.
Index next_rows(Index left) {
  const Index tiles = (left + kRows - 1) / kRows;
  return (left + tiles - 1) / tiles;
}

/// Rows of a transposed A, which lie side by side in memory: tile after tile [depth, kRows].
template <class T>
void pack_left(MatrixRef<const T> a, Index rows, Index depth, T* to) {
  for (Index r = 0, some = 0; r < rows; r += some, to += kRows * depth) {
    some = next_rows(rows - r);
    const T* from = a.data + r;
    if (r + kRows <= rows)  // what is beyond this tile's rows is not used
      for (Index k = 0; k < depth; ++k, from += a.column) __builtin_memcpy(to + k * kRows, from, kRows * sizeof(T));
    else
      for (Index k = 0; k < depth; ++k, from += a.column)
        for (Index i = 0; i < some; ++i) to[k * kRows + i] = from[i];
  }
}

/// C in blocks of kBlock x kAcross, which stay in the L2 cache while A and B pass by, kDepth at a time.
template <class T>
void tiled(Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add, T* scratch) {
  alignas(64) T panel[kDepth * kPanel<T>];
  const bool packs = a.column != 1;
  const auto least = [](Index x, Index y) { return x < y ? x : y; };
  for (Index i0 = 0; i0 < m; i0 += kBlock)
    for (Index j0 = 0; j0 < n; j0 += kAcross)
      for (Index p = 0; p < k; p += kDepth) {
        const Index rows = least(kBlock, m - i0), end = least(j0 + kAcross, n), depth = least(kDepth, k - p);
        const bool more = add || p > 0;
        const T* const left = a.data + i0 * a.row + p * a.column;
        if (packs) pack_left<T>({left, a.row, a.column}, rows, depth, scratch);
        for (Index j = j0; j < end; j += kPanel<T>) {
          const Index columns = least(kPanel<T>, end - j);
          pack_right<T>({b.data + p * b.row + j * b.column, b.row, b.column}, depth, columns, panel);
          const T* packed = scratch;
          for (Index i = 0, some = 0; i < rows; i += some, packed += kRows * depth) {
            some = next_rows(rows - i);
            const MatrixRef<T> to{c.data + (i0 + i) * c.row + j, c.row, 1};
            if (packs) some_rows<kRows, T>(some, depth, packed, Index{1}, Index{kRows}, panel, to, columns, more);
            else some_rows<kRows, T>(some, depth, left + i * a.row, a.row, Index{1}, panel, to, columns, more);
          }
        }
      }
}

// ---- Eigen -------------------------------------------------------------------------------------------
template <class T>
using Dense = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using Ref = Eigen::Map<const Dense<T>, 0, Eigen::OuterStride<>>;

// f(M) with M a row-major map of the matrix, or the transpose of one.
template <class T, class F>
void with(MatrixRef<const T> m, Index rows, Index columns, F f) {
  if (m.column == 1) f(Ref<T>(m.data, rows, columns, Eigen::OuterStride<>(m.row)));
  else f(Ref<T>(m.data, columns, rows, Eigen::OuterStride<>(m.column)).transpose());
}

}  // namespace

template <Isa I, class T>
void cpu_gemm(CpuAt<I>, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add, T* scratch) {
  if constexpr (I != Isa::base) {
    tiled<T>(m, n, k, a, b, c, add, scratch);
  } else {
    Eigen::Map<Dense<T>, 0, Eigen::OuterStride<>> out(c.data, m, n, Eigen::OuterStride<>(c.row));
    with<T>(a, m, k, [&](const auto& A) {
      with<T>(b, k, n, [&](const auto& B) {
        if (add) out.noalias() += A * B;
        else out.noalias() = A * B;
      });
    });
  }
}

template void cpu_gemm(CpuAt<kIsa>, Index, Index, Index, MatrixRef<const float>, MatrixRef<const float>, MatrixRef<float>, bool, float*);
template void cpu_gemm(CpuAt<kIsa>, Index, Index, Index, MatrixRef<const double>, MatrixRef<const double>, MatrixRef<double>, bool, double*);

}  // namespace hilt::kernels
