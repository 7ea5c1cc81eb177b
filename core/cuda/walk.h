#pragma once
#include "core/strided.h"

// Private to core and ops: how kernels find element i of several tensors of one shape.

namespace hilt::cuda {

/// The merged axes of N operands, innermost first, as a kernel parameter. Divides by 32 bits
/// wherever the element count allows, which a GPU does several times faster.
template <int N> struct Walk {
  Index elements = 0;
  int axes = 0;
  Index extent[Shape::kMaxRank] = {};
  Index stride[Shape::kMaxRank][N] = {};

  explicit Walk(const Shape& shape, const Runs<N>& runs) : elements(shape.numel()) {
    for (const auto& axis : runs.axes()) {
      extent[axes] = axis.extent;
      for (int k = 0; k < N; ++k) stride[axes][k] = axis.stride[static_cast<std::size_t>(k)];
      ++axes;
    }
  }
  bool is_flat() const {  // every operand lies in row-major order without gaps
    bool flat = axes <= 1;
    for (int k = 0; k < N && axes == 1; ++k) flat = flat && stride[0][k] == 1;
    return flat;
  }
  constexpr void at(Index i, Index (&offset)[N]) const {  // where element i of each operand is
    for (int k = 0; k < N; ++k) offset[k] = 0;
    constexpr Index k32 = Index{1} << 32;
    for (int a = 0; a < axes; ++a) {
      Index rest = 0, here = i;
      if (a + 1 < axes) {
        rest = elements < k32 ? static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(extent[a]) : i / extent[a];
        here = i - rest * extent[a];
      }
      for (int k = 0; k < N; ++k) offset[k] += here * stride[a][k];
      i = rest;
    }
  }
};

}  // namespace hilt::cuda
