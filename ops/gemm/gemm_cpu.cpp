// Matrix products on one thread, compiled for this instruction set.
// With AVX2, AVX-512 or NEON: kRows x kPanel sums of C live in registers while one column of A at
// a time meets one row of B. Both are packed. B, kAcross columns by kDepth rows in panels of kPanel
// columns, stays in the L2 cache and passes by kRows rows of A, which stay in L1. Factors that stay
// in L1 as they lie are read there, and so is B where it meets a few rows. Each element of C adds
// up in the order of k. Where the processor multiplies bf16 by twos, an element E of a factor is
// two terms, see vectors.h. Below that, Eigen.
#include "ops/gemm/gemm.h"
#include "ops/vectors.h"
#if !defined __AVX2__ && !defined __ARM_NEON
#include <Eigen/Core>
#endif

namespace hilt::kernels {
namespace {

#if defined __AVX2__ || defined __ARM_NEON
// 28 sums and two vectors of B in 32 registers, 16 where A takes registers too; 12 and two in 16.
constexpr int kRows = kIsa == Isa::avx512 ? 14 : kIsa == Isa::neon ? 8 : 6;
constexpr int kVectors = 2;
constexpr Index kDepth = 256;  // 14 x 256 floats are 14 KiB
template <class T> constexpr Index kPanel = kVectors* kLanes<T>;
/// 768 KiB of an L2 cache of 1 MiB or more, as with AVX-512; 256 KiB of a smaller one.
template <class T> constexpr Index kAcross = (kIsa == Isa::avx512 ? 3072 : 1024) / static_cast<Index>(sizeof(T));
static_assert(kDepth * kAcross<float> * static_cast<Index>(sizeof(float)) <= kGemmScratch &&
              kAcross<double> % kPanel<double> == 0);

constexpr Index least(Index x, Index y) { return x < y ? x : y; }

template <class E> using Stored = std::conditional_t<kPacked<E>, bf16, E>;
template <class E> constexpr Index kTerms = kPacked<E> ? 2 : 1;
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
      using Half [[gnu::vector_size(kVectorBytes / 2)]] = std::uint16_t;
      Half low, high{};
      __builtin_memcpy(&low, x + i, sizeof low);
      if (next) __builtin_memcpy(&high, next + i, sizeof high);
      return __builtin_convertvector(low, Vector<E>) | __builtin_convertvector(high, Vector<E>) << 16;
    } else return unaligned_at(x + i);
  }
};

/// `count` lines of a factor, each x.row behind the one before, its terms x.column apart, as panels
/// want them: term k of line i at to[k * kWidth + i]. What is there of lines from `count` on nobody
/// uses. `more` lines follow and may be read; they are asked for, too far apart for the processor
/// to guess. `to` has room for a vector behind it.
template <Index kWidth, class E> void pack(MatrixRef<const Stored<E>> x, Index count, Index more, Index depth, E* to) {
  constexpr int N = kLanes<E>;
  Index k = 0;
  if (x.column == 1)
    for (; (k + N) * kTerms<E> <= depth; k += N) {
      const Stored<E>* const at = x.data + k * kTerms<E>;
      for (Index i = 0; i < least(count, more); ++i) __builtin_prefetch(at + (count + i) * x.row, 0, 2);
      for (Index first = (kWidth - 1) / N * N; first >= 0; first -= N) {  // downwards: a store may spill over
        if (first >= count) continue;
        Vector<E> line[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i)
          __builtin_memcpy(&line[i], at + (first + i < count ? first + i : first) * x.row, sizeof line[i]);
        turn<E>(line);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) unaligned_at(to + (k + i) * kWidth + first) = line[i];
      }
    }
  for (; k < packed<E>(depth); ++k) {
    const Terms<E> lines(x.data, x.column, k, depth);
    E* const side = to + k * kWidth;
    if (x.row == 1) {
      for (Index i = 0; i < kWidth; i += N) unaligned_at(side + i) = lines.side_by_side(i, count + more - i);
      for (Index i = 0; i < kTerms<E>; ++i) __builtin_prefetch(lines.x + i * x.column + 2 * kWidth, 0, 2);
    } else {
      for (Index i = 0; i < count; ++i) side[i] = lines(i * x.row);
    }
  }
}

/// C (+)= A B of R rows, of which `rows` are stored, and of V vectors; packed, or as they lie.
template <int R, int V, class E>
[[gnu::noinline]] void tile(Index rows, Index depth, MatrixRef<const E> a, MatrixRef<const E> b, MatrixRef<Sum<E>> c,
                            Index columns, bool add) {
  using T = Sum<E>;
  constexpr int N = kLanes<T>;
  Vector<T> sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      sum[r][v] = Vector<T>{};
      __builtin_prefetch(c.data + r * c.row + v * N, 1);
    }
  add_products<R, V, E>(sum, a.data, a.row, a.column, b.data, b.row, depth);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    if (r == rows) break;
    T* const to = c.data + r * c.row;
    T line[V * N];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      if (columns < V * N) unaligned_at(line + v * N) = sum[r][v];
      else unaligned_at(to + v * N) = add ? unaligned_at(to + v * N) + sum[r][v] : sum[r][v];
    }
    if (columns < V * N)
      for (Index j = 0; j < columns; ++j) to[j] = add ? to[j] + line[j] : line[j];
  }
}
/// The tile of that many rows, or of one more: there is one for each even number.
template <int R = kRows, class E>
void tile_of(Index rows, Index depth, MatrixRef<const E> a, MatrixRef<const E> b, MatrixRef<Sum<E>> c, Index columns,
             bool add) {
  if constexpr (R > 2)
    if (rows <= R - 2) return tile_of<R - 2>(rows, depth, a, b, c, columns, add);
  if (columns > kLanes<E>) tile<R, kVectors>(rows, depth, a, b, c, columns, add);
  else tile<R, 1>(rows, depth, a, b, c, columns, add);
}
/// Rows of the next tile where `left` are left: an even number, about as many as in others.
Index next_rows(Index left) {
  const Index tiles = (left + kRows - 1) / kRows, each = (left + tiles - 1) / tiles;
  return least(left, each + each % 2);
}

/// C (+)= A B for few rows, which packing B would cost more than: four pass by sums in L1.
constexpr Index kFewRows = 3, kFewAcross = 1024;
template <class E> void few_rows(const CpuProduct<Stored<E>>& x) {
  using T = Sum<E>;
  alignas(64) T sums[kFewRows][kFewAcross];
  for (Index j0 = 0; j0 < x.n; j0 += kFewAcross) {
    const Index columns = least(kFewAcross, x.n - j0);
    for (Index p = 0; p < x.k; p += kDepth * kTerms<E>) {
      const Index depth = least(kDepth * kTerms<E>, x.k - p);
      for (Index r = 0; r < x.m; ++r)
        for (Index j = 0; j < columns; j += kLanes<T>) vector_at(sums[r] + j) = Vector<T>{};
      const auto rows_of_b = [&]<int... I>(Index at, std::integer_sequence<int, I...>) {
        const Terms<E> right[]{Terms<E>(x.b.data + p * x.b.row + j0, x.b.row, at + I, depth)...};
        for (Index r = 0; r < x.m; ++r) {
          const E left[]{Terms<E>(x.a.data + r * x.a.row + p * x.a.column, x.a.column, at + I, depth)()...};
          for (Index j = 0; j < columns; j += kLanes<T>) {
            Vector<T> sum = vector_at(sums[r] + j);
            (multiply_add<E>(sum, left[I], right[I].side_by_side(j, columns - j)), ...);
            vector_at(sums[r] + j) = sum;
          }
        }
      };
      Index at = 0;
      for (; at + 4 <= packed<E>(depth); at += 4) rows_of_b(at, std::make_integer_sequence<int, 4>());
      for (; at < packed<E>(depth); ++at) rows_of_b(at, std::make_integer_sequence<int, 1>());
      for (Index r = 0; r < x.m; ++r)
        for (Index j = 0; j < columns; ++j) {
          T& to = x.c.data[r * x.c.row + j0 + j];
          to = x.add || p > 0 ? to + sums[r][j] : sums[r][j];
        }
    }
  }
}

template <class E> void tiled(const CpuProduct<Stored<E>>& x, E* right) {
  alignas(64) E left[kDepth * kRows + kLanes<E>];
  constexpr Index kSize = sizeof(E), kInL1 = 16384 / kSize;
  const bool small = !kPacked<E> && x.k <= kDepth && x.m * x.k <= kInL1 && x.k * x.n <= kInL1;
  const bool aligned = x.b.column == 1 && (x.b.row | reinterpret_cast<Index>(x.b.data) / kSize) % kLanes<E> == 0;
  for (Index j0 = 0; j0 < x.n; j0 += kAcross<E>)
    for (Index p = 0; p < x.k; p += kDepth * kTerms<E>) {
      const Index across = least(kAcross<E>, x.n - j0), depth = least(kDepth * kTerms<E>, x.k - p),
                  deep = packed<E>(depth);
      for (Index i = 0, rows = 0; i < x.m; i += rows) {
        rows = next_rows(x.m - i);
        const Stored<E>* const a = x.a.data + i * x.a.row + p * x.a.column;
        MatrixRef<const E> a_here{reinterpret_cast<const E*>(a), x.a.row, x.a.column}, b_here;
        if (!small || rows % 2 != 0)  // a tile reads an even number of rows
          pack<kRows, E>({a, x.a.row, x.a.column}, rows, x.m - i - rows, depth, left), a_here = {left, 1, kRows};
        for (Index j = 0; j < across; j += kPanel<E>) {
          const Index columns = least(kPanel<E>, across - j);
          E* const panel = right + (rows < x.m ? j * deep : 0);  // where nobody comes after, all take one place, in L1
          const Stored<E>* const b = x.b.data + p * x.b.row + (j0 + j) * x.b.column;
          const bool packs = !small || !aligned || columns % kLanes<E> != 0;
          b_here = {packs ? panel : reinterpret_cast<const E*>(b), packs ? kPanel<E> : x.b.row, 1};
          if (i == 0 && packs)
            pack<kPanel<E>, E>({b, x.b.column, x.b.row}, columns, across - j - columns, depth, panel);
          tile_of(rows, deep, a_here, b_here, {x.c.data + i * x.c.row + j0 + j, x.c.row, 1}, columns, x.add || p > 0);
        }
      }
    }
}

template <class T> void multiply(const CpuProduct<T>& x, void* scratch) {
  using E = std::conditional_t<std::is_same_v<T, bf16>, Bf16x2, T>;
  if (x.m <= kFewRows && x.b.column == 1) few_rows<E>(x);
  else tiled<E>(x, static_cast<E*>(scratch));
}

#else
template <class T> using Dense = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T> using Ref = Eigen::Map<const Dense<T>, 0, Eigen::OuterStride<>>;

// f(M) with M a row-major map of the matrix, or the transpose of one.
template <class T, class F> void with(MatrixRef<const T> m, Index rows, Index columns, F f) {
  if (m.column == 1) f(Ref<T>(m.data, rows, columns, Eigen::OuterStride<>(m.row)));
  else f(Ref<T>(m.data, columns, rows, Eigen::OuterStride<>(m.column)).transpose());
}

template <class T> void multiply(const CpuProduct<T>& x, void*) {
  Eigen::Map<Dense<T>, 0, Eigen::OuterStride<>> out(x.c.data, x.m, x.n, Eigen::OuterStride<>(x.c.row));
  with<T>(x.a, x.m, x.k, [&](const auto& A) {
    with<T>(x.b, x.k, x.n, [&](const auto& B) {
      if (!x.add) out.setZero();  // a sum begins with +0, as in tiles: a product of 0 may be -0
      out.noalias() += A * B;
    });
  });
}
#endif

}  // namespace

template <class T, class At> void cpu_gemm(At, const CpuProduct<T>& x, void* scratch) {
  if constexpr (!std::is_same_v<T, bf16> || kIsa == Isa::avx512) multiply(x, scratch);
}

HILT_KERNEL(cpu_gemm, float, CpuAt<kIsa>)
HILT_KERNEL(cpu_gemm, double, CpuAt<kIsa>)
HILT_KERNEL(cpu_gemm, bf16, CpuAt<kIsa>)

}  // namespace hilt::kernels
