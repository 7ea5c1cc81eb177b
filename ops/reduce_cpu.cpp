// Sums and maxima over the middle of [outer, n, inner], by pieces of fixed size, in order, in f64.
#include "core/strided.h"
#include "ops/isa.h"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

constexpr Index kPiece = SumPieces::kPiece, kColumns = SumPieces::kColumns;

// Joins n elements in 4 vectors of partial results, so that operations do not wait; every so often
// those are joined in f64, so that no sum grows long enough to lose digits.
template <class Op, class T> double row_reduced(const T* x, Index n) {
  using W = wide_t<T>;
  constexpr int kWidth = 4 * kLanes<W>;
  constexpr Index kRun = 4096;
  static_assert(kRun % kWidth == 0);
  double total = Op::kStart;
  for (Index begin = 0; begin < n; begin += kRun) {
    const Index end = n - begin < kRun ? n : begin + kRun;
    W part[kWidth];
    for (W& p : part) p = static_cast<W>(Op::kStart);
    Index i = begin;
    for (; i + kWidth <= end; i += kWidth)
      for (int l = 0; l < kWidth; ++l) part[l] = Op::of(part[l], static_cast<W>(x[i + l]));
    for (int l = 0; i < end; ++i, ++l) part[l] = Op::of(part[l], static_cast<W>(x[i]));
    for (W p : part) total = Op::of(total, static_cast<double>(p));
  }
  return total;
}

// to[c] over rows of x[row, c], for the columns of one block.
template <class Op, class T> void reduce_columns(const T* x, Index rows, Index stride, Index columns, double* to) {
  using W = wide_t<T>;
  W part[kColumns];
  for (W& p : part) p = static_cast<W>(Op::kStart);
  for (Index r = 0; r < rows; ++r)
    for (Index c = 0; c < columns; ++c) part[c] = Op::of(part[c], static_cast<W>(x[r * stride + c]));
  for (Index c = 0; c < columns; ++c) to[c] = static_cast<double>(part[c]);
}

template <class Op, class T> void reduce(const Reduction<T>& of) {
  const auto [x, y, partial, outer, n, inner, factor] = of;
  const SumPieces cut(n, inner);
  const Index tasks = outer * cut.pieces * cut.blocks, per_task = (n < cut.rows ? n : cut.rows) * cut.block;
  parallel_each(tasks, kPiece / (per_task + 1) + 1, [=](Index task) {
    const Index b = task % cut.blocks, p = task / cut.blocks % cut.pieces, o = task / cut.blocks / cut.pieces;
    const Index c0 = b * cut.block, columns = inner - c0 < cut.block ? inner - c0 : cut.block;
    const Index r0 = p * cut.rows, rows = n - r0 < cut.rows ? n - r0 : cut.rows;
    double* const out = partial + (o * cut.pieces + p) * inner + c0;
    if (inner == 1) *out = row_reduced<Op>(x + o * n + r0, rows);
    else reduce_columns<Op>(x + (o * n + r0) * inner + c0, rows, inner, columns, out);
  });
  parallel_each(outer * inner, kPiece, [=](Index i) {
    double all = Op::kStart;
    for (Index p = 0; p < cut.pieces; ++p) all = Op::of(all, partial[(i / inner * cut.pieces + p) * inner + i % inner]);
    y[i] = static_cast<T>(static_cast<wide_t<T>>(all * factor));
  });
}

}  // namespace

template <class T, class At> void sum(At, const Reduction<T>& of) { reduce<AddUp>(of); }
template <class T, class At> void max(At, const Reduction<T>& of) { reduce<Largest>(of); }

HILT_CPU_KERNEL(sum)
HILT_CPU_KERNEL(max)

}  // namespace hilt::kernels
