// Matrix products on one thread, compiled for this instruction set.
// With AVX2, AVX-512 or NEON: kRows x kPanel sums of C live in registers while one column of A at
// a time meets one row of B. Both are packed. B, kAcross columns by kDepth rows in panels of kPanel
// columns, stays in the L2 cache and passes by kRows rows of A, which stay in L1. Of a few rows
// nothing is packed: B is read once, as it lies. Each element of C adds up in the order of k. Where
// the processor multiplies bf16 by twos, an element E of a factor is two terms, see vectors.h.
// Below that, Eigen, by -DEigen=Eigen_<isa> a namespace of each copy's own.
#include <Eigen/Core>
#include "ops/gemm/gemm.h"
#include "ops/vectors.h"

namespace hilt::kernels {
namespace {

template <class T> struct NarrowOf { using type [[gnu::vector_size(kVectorBytes / 2)]] = T; };
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

template <class E> using Stored = std::conditional_t<kPacked<E>, bf16, E>;
template <class E> [[maybe_unused]] constexpr Index kTerms = kPacked<E> ? 2 : 1;
/// Where the terms of an E are stored: at x and at next, 0 where that is null.
template <class E> struct Terms {
  const Stored<E>*x, *next;
  /// The k-th E of `depth` terms that lie `step` apart.
  Terms(const Stored<E>* at, Index step, Index k, Index depth)
      : x(at + k * kTerms<E> * step), next((k + 1) * kTerms<E> <= depth ? x + step : nullptr) {}
  E operator()(Index i = 0) const {
    if constexpr (kPacked<E>) return x[i].bits | (next ? E{next[i].bits} << 16 : 0);
    else return x[i];
  }
  /// Those from i on side by side, as many as a vector has lanes, 0 from `count` on.
  [[gnu::always_inline]] Vector<E> side_by_side(Index i, Index count) const {
    if (count < kLanes<E>) {
      Vector<E> line{};
      for (Index l = 0; l < count; ++l) line[l] = (*this)(i + l);
      return line;
    }
    if constexpr (kPacked<E>) {
      typename NarrowOf<std::uint16_t>::type low, high{};
      __builtin_memcpy(&low, x + i, sizeof low);
      if (next) __builtin_memcpy(&high, next + i, sizeof high);
      return __builtin_convertvector(low, Vector<E>) | __builtin_convertvector(high, Vector<E>) << 16;
    } else return loose(x + i);
  }
};

/// C [R, columns] (+)= A B for packed rows of A and a packed panel of B.
template <int R, int V, class E, class T = Sum<E>>
[[gnu::noinline]] void tile(Index depth, const E* a, const E* b, MatrixRef<T> c, Index columns, bool add) {
  Vector<T> sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      sum[r][v] = Vector<T>{};
      __builtin_prefetch(c.data + r * c.row + v * kLanes<T>, 1);
    }
  for (Index k = 0; k < depth; ++k, a += kRows, b += kPanel<T>) {
    Vector<E> right[V];
    for (int v = 0; v < V; ++v) right[v] = aligned(b + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) multiply_add<E>(sum[r][v], a[r], right[v]);
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
template <int R, class E>
void some_rows(Index rows, Index depth, const E* a, const E* b, MatrixRef<Sum<E>> c, Index columns, bool add) {
  if (rows == R)
    return columns > kLanes<E> ? tile<R, kVectors>(depth, a, b, c, columns, add)
                               : tile<R, 1>(depth, a, b, c, columns, add);
  if constexpr (R > 1) some_rows<R - 1>(rows, depth, a, b, c, columns, add);
}

/// to[k][i] = from[i][k], as many each way as a vector has lanes, but only `rows` are read; rows of
/// `to` are kApart apart. Each step shuffles rows i and i + N/2 like two halves of a deck.
template <Index kApart, class E, int... Lane>
[[gnu::always_inline]] inline void transpose(const Stored<E>* from, Index pitch, Index rows, E* to,
                                             std::integer_sequence<int, Lane...>) {
  constexpr int N = kLanes<E>;
  Vector<E> line[N], next[N];
  for (int i = 0; i < N; ++i) __builtin_memcpy(&line[i], from + (i < rows ? i : 0) * pitch, sizeof line[i]);
  for (int step = 1; step < N; step *= 2) {
    for (int i = 0; i < N / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2)...);
      next[2 * i + 1] = __builtin_shufflevector(line[i], line[i + N / 2], (Lane % 2 * N + Lane / 2 + N / 2)...);
    }
    for (int i = 0; i < N; ++i) line[i] = next[i];
  }
  for (int i = 0; i < N; ++i) loose(to + i * kApart) = line[i];
}

/// A panel of B: [packed depth, kPanel], zeros beyond its columns.
template <class E> void pack_right(MatrixRef<const Stored<E>> b, Index depth, Index columns, E* to) {
  Index k = 0;
  if (columns == kPanel<E> && b.row == 1 && b.column != 1)
    for (; (k + kLanes<E>)*kTerms<E> <= depth; k += kLanes<E>)
      for (int v = 0; v < kVectors; ++v)
        transpose<kPanel<E>>(b.data + k * kTerms<E> + v * kLanes<E> * b.column, b.column, kLanes<E>,
                             to + k * kPanel<E> + v * kLanes<E>, std::make_integer_sequence<int, kLanes<E>>());
  for (; k < packed<E>(depth); ++k) {
    const Terms<E> row(b.data, b.row, k, depth);
    E* const line = to + k * kPanel<E>;
    if (b.column == 1)
      for (Index j = 0; j < kPanel<E>; j += kLanes<E>) aligned(line + j) = row.side_by_side(j, columns - j);
    else
      for (Index j = 0; j < kPanel<E>; ++j) line[j] = j < columns ? row(j * b.column) : E{0};
  }
}

/// Rows of the next tile where `left` are left: at most kRows, and none much shorter than others.
[[maybe_unused]] Index next_rows(Index left) {
  const Index tiles = (left + kRows - 1) / kRows;
  return (left + tiles - 1) / tiles;
}

/// At most kRows rows of A, which has so many `more`: [packed depth, kRows], where what lies beyond
/// the rows is not used. The next ones are asked for: too far apart for the processor to guess.
template <class E> void pack_left(MatrixRef<const Stored<E>> a, Index rows, Index more, Index depth, E* to) {
  constexpr Index kRead = kPacked<E> ? kLanes<E> : kRows;  // side by side
  Index k = 0;
  if (a.column == 1) {
    for (; (k + kLanes<E>)*kTerms<E> <= depth; k += kLanes<E>) {
      const Stored<E>* const at = a.data + k * kTerms<E>;
      for (Index i = 0; i < rows; ++i) __builtin_prefetch(at + (rows + i) * a.row, 0, 2);
      for (Index r = (kRows - 1) / kLanes<E> * kLanes<E>; r >= 0; r -= kLanes<E>)  // downwards: a store may spill over
        if (r < rows)
          transpose<kRows>(at + r * a.row, a.row, rows - r, to + k * kRows + r,
                           std::make_integer_sequence<int, kLanes<E>>());
    }
  } else if (rows + more >= kRead) {
    for (; k < packed<E>(depth); ++k) {
      const Terms<E> column(a.data, a.column, k, depth);
      if constexpr (kPacked<E>) loose(to + k * kRows) = column.side_by_side(0, kRead);
      else __builtin_memcpy(to + k * kRows, column.x, kRows * sizeof(E));
      for (Index i = 0; i < kTerms<E>; ++i) __builtin_prefetch(column.x + i * a.column + 2 * kRows, 0, 2);
    }
  }
  for (; k < packed<E>(depth); ++k)
    for (Index i = 0; i < rows; ++i) to[k * kRows + i] = Terms<E>(a.data + i * a.row, a.column, k, depth)();
}

/// C (+)= A B for few rows, which packing B would cost more than: four pass by sums in L1.
constexpr Index kFewRows = 3, kFewAcross = 1024;
template <class E, class T = Sum<E>>
void few_rows(Index m, Index n, Index k, MatrixRef<const Stored<E>> a, const Stored<E>* b, Index b_row, MatrixRef<T> c,
              bool add) {
  alignas(64) T sums[kFewRows][kFewAcross];
  for (Index j0 = 0; j0 < n; j0 += kFewAcross) {
    const Index columns = n - j0 < kFewAcross ? n - j0 : kFewAcross;
    for (Index p = 0; p < k; p += kDepth * kTerms<E>) {
      const Index depth = k - p < kDepth * kTerms<E> ? k - p : kDepth * kTerms<E>;
      __builtin_memset(sums, 0, sizeof sums);
      const auto rows_of_b = [&]<int... I>(Index at, std::integer_sequence<int, I...>) {
        const Terms<E> right[]{Terms<E>(b + p * b_row + j0, b_row, at + I, depth)...};
        for (Index r = 0; r < m; ++r) {
          const E left[]{Terms<E>(a.data + r * a.row + p * a.column, a.column, at + I, depth)()...};
          for (Index j = 0; j < columns; j += kLanes<T>) {
            Vector<T> x = aligned(sums[r] + j);
            (multiply_add<E>(x, left[I], right[I].side_by_side(j, columns - j)), ...);
            aligned(sums[r] + j) = x;
          }
        }
      };
      Index at = 0;
      for (; at + 4 <= packed<E>(depth); at += 4) rows_of_b(at, std::make_integer_sequence<int, 4>());
      for (; at < packed<E>(depth); ++at) rows_of_b(at, std::make_integer_sequence<int, 1>());
      for (Index r = 0; r < m; ++r)
        for (Index j = 0; j < columns; ++j) {
          T& to = c.data[r * c.row + j0 + j];
          to = add || p > 0 ? to + sums[r][j] : sums[r][j];
        }
    }
  }
}

/// The same where the columns of B lie as rows: a square of a vector's lanes is turned at a time.
template <class E, class T = Sum<E>>
void few_rows_of_columns(Index m, Index n, Index k, MatrixRef<const Stored<E>> a, const Stored<E>* b, Index b_column,
                         MatrixRef<T> c, bool add) {
  constexpr Index N = kLanes<E>;
  alignas(64) E square[N * N] = {};
  for (Index j = 0; j < n; j += N)
    for (Index p = 0; p < k; p += kDepth * kTerms<E>) {
      const Index columns = n - j < N ? n - j : N, depth = k - p < kDepth * kTerms<E> ? k - p : kDepth * kTerms<E>;
      const Stored<E>* const from = b + j * b_column + p;
      Vector<T> sum[kFewRows] = {};
      for (Index at = 0; at < packed<E>(depth); at += N) {
        const Index deep = packed<E>(depth) - at < N ? packed<E>(depth) - at : N;
        if ((at + N) * kTerms<E> <= depth)
          transpose<N>(from + at * kTerms<E>, b_column, columns, square, std::make_integer_sequence<int, N>());
        else
          for (Index i = 0; i < columns * deep; ++i)
            square[i % deep * N + i / deep] = Terms<E>(from + i / deep * b_column, 1, at + i % deep, depth)();
        for (Index i = 0; i < deep; ++i)
          for (Index r = 0; r < m; ++r)
            multiply_add<E>(sum[r], Terms<E>(a.data + r * a.row + p * a.column, a.column, at + i, depth)(),
                            aligned(square + i * N));
      }
      for (Index r = 0; r < m; ++r)
        for (Index i = 0; i < columns; ++i) {
          T& to = c.data[r * c.row + j + i];
          to = add || p > 0 ? to + sum[r][i] : sum[r][i];
        }
    }
}

template <class E>
void tiled(Index m, Index n, Index k, MatrixRef<const Stored<E>> a, MatrixRef<const Stored<E>> b, MatrixRef<Sum<E>> c,
           bool add, E* right) {
  alignas(64) E left[kDepth * kRows + kLanes<E>];
  const auto least = [](Index x, Index y) { return x < y ? x : y; };
  for (Index j0 = 0; j0 < n; j0 += kAcross<E>)
    for (Index p = 0; p < k; p += kDepth * kTerms<E>) {
      const Index across = least(kAcross<E>, n - j0), depth = least(kDepth * kTerms<E>, k - p), deep = packed<E>(depth);
      for (Index i = 0, rows = 0; i < m; i += rows) {
        rows = next_rows(m - i);
        pack_left<E>({a.data + i * a.row + p * a.column, a.row, a.column}, rows, m - i - rows, depth, left);
        for (Index j = 0; j < across; j += kPanel<E>) {
          const Index columns = least(kPanel<E>, across - j);
          E* const panel = right + (rows < m ? j * deep : 0);  // where nobody comes after, all take one place, in L1
          if (i == 0) pack_right<E>({b.data + p * b.row + (j0 + j) * b.column, b.row, b.column}, depth, columns, panel);
          some_rows<kRows, E>(rows, deep, left, panel, {c.data + i * c.row + j0 + j, c.row, 1}, columns, add || p > 0);
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
void cpu_gemm(At, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<wide_t<T>> c,
              bool add, void* scratch) {
  constexpr bool kIsPacked = std::is_same_v<T, bf16>;
  if constexpr (At::kIsa == Isa::avx512 || (At::kIsa != Isa::base && !kIsPacked)) {
    using E = std::conditional_t<kIsPacked, Bf16x2, T>;
    if (m <= kFewRows && b.column == 1) few_rows<E>(m, n, k, a, b.data, b.row, c, add);
    else if (m <= kFewRows && b.row == 1) few_rows_of_columns<E>(m, n, k, a, b.data, b.column, c, add);
    else tiled<E>(m, n, k, a, b, c, add, static_cast<E*>(scratch));
  } else if constexpr (!kIsPacked) {
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
HILT_KERNEL(cpu_gemm, bf16, CpuAt<kIsa>)

}  // namespace hilt::kernels
