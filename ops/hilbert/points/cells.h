#pragma once
#include "core/dispatch.h"
#include "ops/hilbert/points/points.h"

// Private: the cell of a point and its code, on a CPU and on a GPU.

namespace hilt::kernels {

constexpr unsigned levels_at_once(unsigned axes) { return axes == 2 ? 4 : 3; }

struct Cells {
  unsigned bits;
  std::array<unsigned, 3> axis{0, 1, 2};                 // which stands where in the code
  const std::uint16_t* table = nullptr;                  // see tabulated()
  double count = static_cast<double>(Index{1} << bits);  // a side
  double side = count, low[3] = {};                      // of the cube that they divide; at first integers are cells
};

template <class T> constexpr bool has_cell(const Cells& cells, T coordinate) {
  const double at = static_cast<double>(coordinate);
  return is_floating(dtype_of<T>) ? -0x1p1022 < at && at < 0x1p1022 : 0 <= at && at < cells.count;  // no side overflows
}

template <unsigned axes, class T> constexpr std::uint64_t code_of(const Cells& cells, const T* x) {
  constexpr unsigned kLevels = levels_at_once(axes), kWidth = axes * kLevels, kDigits = (1u << kWidth) - 1;
  const unsigned missing = (kLevels - cells.bits % kLevels) % kLevels;  // of whole look-ups: the finest levels
  unsigned cell[axes]{}, entry = 0;
  for (unsigned a = 0; a < axes; ++a) {
    const unsigned from = cells.axis[a];
    const double at = (static_cast<double>(x[from]) - cells.low[from]) / cells.side * cells.count;
    cell[a] = static_cast<unsigned>(static_cast<Index>(std::min(at, cells.count - 1))) << missing;
  }
  std::uint64_t code = 0;
  for (unsigned level = cells.bits + missing; level > 0; level -= kLevels) {
    unsigned below = 0;
    for (unsigned a = 0; a < axes; ++a) below |= (cell[a] >> (level - kLevels) & ((1u << kLevels) - 1)) << a * kLevels;
    entry = cells.table[(entry & ~kDigits) | below];
    code = code << kWidth | (entry & kDigits);
  }
  return code >> missing * axes;
}

/// order_of_points() of dense f64, or of i64, which are cells. Documents begin at bounds; the last
/// is their end. `table`: that of the cells, on a CPU.
PointOrder order_of_points(Cuda where, const Tensor& xyz, Cells cells, const std::vector<std::uint16_t>& table,
                           const std::vector<Index>& bounds);

}  // namespace hilt::kernels
