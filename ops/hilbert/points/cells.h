#pragma once
#include "core/dispatch.h"
#include "ops/hilbert/points/points.h"

// Private: the cell of a point and its code, on a CPU and on a GPU.

namespace hilt::kernels {

#ifndef __CUDACC__  // which does so by itself
#define HILT_UNROLL _Pragma("GCC unroll 12")
#else
#define HILT_UNROLL
#endif

constexpr unsigned levels_at_once(unsigned axes) { return axes == 2 ? 4 : 3; }

struct Cells {
  unsigned bits;
  std::array<unsigned, 3> axis{0, 1, 2};                 // which stands where in the code
  const std::uint32_t* spread = nullptr;                 // the bits of a byte, as far apart as there are axes
  const std::uint16_t* table = nullptr;                  // see tabulated(); none: bits interleaved
  double count = static_cast<double>(Index{1} << bits);  // a side
  double side = count, low[3] = {};                      // of the cube that they divide; at first integers are cells
};

template <class T> constexpr bool has_cell(const Cells& cells, T coordinate) {
  const double at = static_cast<double>(coordinate);
  return is_floating(dtype_of<T>) ? -0x1p1022 < at && at < 0x1p1022 : 0 <= at && at < cells.count;  // no side overflows
}

/// The codes of neighbouring points, step by step together: none waits for another's look-up.
/// What is left of a cell's bits stands in front of the digits found.
template <unsigned axes, unsigned points, class T>
constexpr std::array<std::uint64_t, points> codes_of(const Cells& cells, const T* x) {
  constexpr unsigned kLevels = levels_at_once(axes), kWidth = axes * kLevels, kDigits = (1u << kWidth) - 1;
  const unsigned steps = cells.table ? (cells.bits + kLevels - 1) / kLevels : 0,
                 unused = steps > 0 ? (steps * kLevels - cells.bits) * axes : 64 - axes * cells.bits;
  std::array<std::uint64_t, points> code{};
  unsigned cell[axes * points]{}, entry[points]{};
  HILT_UNROLL
  for (unsigned i = 0; i < axes * points; ++i) {
    const double at = (static_cast<double>(x[i]) - cells.low[i % axes]) / cells.side * cells.count;
    cell[i] = static_cast<unsigned>(static_cast<Index>(std::min(at, cells.count - 1)));
  }
  HILT_UNROLL
  for (unsigned i = 0; i < points; ++i) {
    HILT_UNROLL
    for (unsigned bit = 0; bit < cells.bits; bit += 8) {
      std::uint64_t byte = 0;
      HILT_UNROLL
      for (unsigned a = 0; a < axes; ++a)
        byte |= std::uint64_t{cells.spread[cell[axes * i + cells.axis[a]] >> bit & 255]} << a;
      code[i] |= byte << bit * axes;
    }
    code[i] <<= 64 - axes * cells.bits;
  }
  for (unsigned n = 0; n < steps; ++n) {
    HILT_UNROLL
    for (unsigned i = 0; i < points; ++i) {
      entry[i] = cells.table[(entry[i] & ~kDigits) | static_cast<unsigned>(code[i] >> (64 - kWidth))];
      code[i] = code[i] << kWidth | (entry[i] & kDigits);
    }
  }
  HILT_UNROLL
  for (unsigned i = 0; i < points; ++i) code[i] >>= unused;
  return code;
}

/// order_of_points() of dense f64, or of i64, which are cells. Documents begin at bounds; the last
/// is the end. `table`: how long that of the cells is, which lies on a CPU.
PointOrder order_of_points(Cuda where, const Tensor& xyz, Cells cells, std::size_t table, std::vector<Index> bounds);

}  // namespace hilt::kernels
