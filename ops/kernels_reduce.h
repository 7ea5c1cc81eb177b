#pragma once
#include "core/dispatch.h"

namespace hilt::kernels {

/// How a sum over the middle axis is cut: blocks of columns that stay in L1, and pieces of so many rows.
struct SumPieces {
  static constexpr Index kPiece = 1 << 15;  // elements one thread reduces before it hands on a partial result
  static constexpr Index kColumns = 256;
  Index block, rows, pieces, blocks;
  [[gnu::always_inline]] SumPieces(Index n, Index inner)
      : block(inner < kColumns ? inner : kColumns),
        rows(block > 0 ? kPiece / block : 1),
        pieces(n > rows ? (n + rows - 1) / rows : 1),
        blocks(block > 0 ? (inner + block - 1) / block : 0) {}
};

// x: dense [outer, n, inner]; y: [outer, inner]. Sums are built in f32 (f64 for f64) over fixed pieces of the middle
// axis, and the pieces in order in f64, so that they depend on the shape alone. partial: [outer, pieces, inner].
template <Isa I, class T>
void sum(CpuAt<I>, const T* x, T* y, double* partial, Index outer, Index n, Index inner, double factor);
template <Isa I, class T> void max(CpuAt<I>, const T* x, T* y, Index outer, Index n, Index inner);

}  // namespace hilt::kernels
