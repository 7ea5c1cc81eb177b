#pragma once
#include "../../../core/tensor.h"

// Orders that come from data: points in the plane or in space, along a curve through their cells.

namespace [[gnu::visibility("default")]] hilt {

/// A permutation of the rows of points and its inverse: i64 [N], where the points are.
struct PointOrder {
  Tensor token_at{};     // pi: position -> row
  Tensor position_of{};  // rho: row -> position
};

/// The rows of xyz [N, 2 or 3] by (code of the point's cell, row), document after document. Kinds:
/// `morton`, interleaved bits, x in the lowest; `hilbert`, the classic curve in the plane and
/// Skilling's transform in space; `morton-trans`, `hilbert-trans`, with the axes in reverse order.
/// Cells are 2^bits a side; bits: 1..31 in the plane, 1..20 in space.
/// Floats are scaled to their document's bounding cube, whose side is its longest, in f64: the cell
/// is min(floor((x - min) / side 2^bits), 2^bits - 1), or 0 where the side is. Integers are cells.
/// The first row with no cell, NaN or 2^1022 and above is refused and named. On a GPU, which nobody
/// waits for, such rows are -1 in both lists, with positions at the end of their document, and a
/// gather by them gives NaN. documents: the rows of each, which those behind them follow as they
/// are, whatever they hold; none: one has all. On a GPU their number and a code fit 64 bits.
PointOrder order_of_points(const Tensor& xyz, std::string_view kind = "hilbert", int bits = 16,
                           const std::vector<Index>& documents = {});

}  // namespace hilt
