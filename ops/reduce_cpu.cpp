// Sums and maxima over the middle of [outer, n, inner], by pieces of fixed size, in order, in f64.
#include "core/strided.h"
#include "ops/isa.h"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

constexpr Index kPiece = SumPieces::kPiece, kColumns = SumPieces::kColumns;

// The sum of n elements, over 4 vectors of partial sums so that additions do not wait; every so
// often those are added up in f64, so that none grows long enough to lose digits.
template <class T> double row_sum(const T* x, Index n) {
  using W = wide_t<T>;
  constexpr int kWidth = 4 * kLanes<W>;
  constexpr Index kRun = 4096;
  static_assert(kRun % kWidth == 0);
  double total = 0;
  for (Index begin = 0; begin < n; begin += kRun) {
    const Index end = n - begin < kRun ? n : begin + kRun;
    W part[kWidth] = {};
    Index i = begin;
    for (; i + kWidth <= end; i += kWidth)
      for (int l = 0; l < kWidth; ++l) part[l] += static_cast<W>(x[i + l]);
    for (int l = 0; i < end; ++i, ++l) part[l] += static_cast<W>(x[i]);
    for (W p : part) total += static_cast<double>(p);
  }
  return total;
}

// acc[c] = sum over rows of x[row, c], for the columns of one block.
template <class T> void column_sums(const T* x, Index rows, Index stride, Index columns, double* acc) {
  using W = wide_t<T>;
  W part[kColumns] = {};
  for (Index r = 0; r < rows; ++r)
    for (Index c = 0; c < columns; ++c) part[c] += static_cast<W>(x[r * stride + c]);
  for (Index c = 0; c < columns; ++c) acc[c] = static_cast<double>(part[c]);
}

template <class T> T larger(T a, T b) { return b > a || b != b ? b : a; }  // NaN wins

}  // namespace

template <class T, class At>
void sum(At, const T* x, T* y, double* partial, Index outer, Index n, Index inner, double factor) {
  const SumPieces cut(n, inner);
  const Index tasks = outer * cut.pieces * cut.blocks, per_task = (n < cut.rows ? n : cut.rows) * cut.block;
  parallel_each(tasks, kPiece / (per_task + 1) + 1, [=](Index task) {
    const Index b = task % cut.blocks, p = task / cut.blocks % cut.pieces, o = task / cut.blocks / cut.pieces;
    const Index c0 = b * cut.block, columns = inner - c0 < cut.block ? inner - c0 : cut.block;
    const Index r0 = p * cut.rows, rows = n - r0 < cut.rows ? n - r0 : cut.rows;
    double* const out = partial + (o * cut.pieces + p) * inner + c0;
    if (inner == 1) *out = row_sum(x + o * n + r0, rows);
    else column_sums(x + (o * n + r0) * inner + c0, rows, inner, columns, out);
  });
  parallel_each(outer * inner, kPiece, [=](Index i) {
    double s = 0;
    for (Index p = 0; p < cut.pieces; ++p) s += partial[(i / inner * cut.pieces + p) * inner + i % inner];
    y[i] = static_cast<T>(static_cast<wide_t<T>>(s * factor));
  });
}

template <class T, class At> void max(At, const T* x, T* y, Index outer, Index n, Index inner) {
  using W = wide_t<T>;
  const SumPieces cut(n, inner);
  parallel_each(outer * cut.blocks, kPiece / (n * cut.block + 1) + 1, [=](Index task) {
    const Index o = task / cut.blocks, c0 = task % cut.blocks * cut.block;
    const Index columns = inner - c0 < cut.block ? inner - c0 : cut.block;
    const T* const from = x + o * n * inner + c0;
    W top[kColumns];
    for (Index c = 0; c < columns; ++c) top[c] = static_cast<W>(from[c]);
    for (Index r = 1; r < n; ++r)
      for (Index c = 0; c < columns; ++c) top[c] = larger(top[c], static_cast<W>(from[r * inner + c]));
    for (Index c = 0; c < columns; ++c) y[o * inner + c0 + c] = static_cast<T>(top[c]);
  });
}

HILT_CPU_KERNEL(sum)
HILT_CPU_KERNEL(max)

}  // namespace hilt::kernels
