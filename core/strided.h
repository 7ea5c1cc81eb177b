#pragma once
#include <algorithm>
#include "parallel.h"

// Private to core and ops: loops over indices, and over tensors of one shape, each with strides.

namespace hilt {

/// f(i) for each i of [0, n), on several threads, `grain` of them at a time.
template <class F> [[gnu::always_inline]] inline void parallel_each(Index n, Index grain, F f) {
  parallel_for(n, grain, [f](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) f(i);
  });
}

/// The axes of a common shape, neighbours merged wherever every operand steps through them evenly:
/// a dense tensor is one run, a transposed one a loop. `rows` outer steps of `run` elements each. A
/// parameter of GPU kernels too.
template <std::size_t N> struct Runs {
  using Offsets = std::array<Index, N>;
  Index elements, rows = 0, run = 1;
  Offsets step{};  // of each operand along the run
  int axes = 0;    // the merged ones, the innermost first; none of a single element
  Index extent[Shape::kMaxRank] = {};
  Index stride[Shape::kMaxRank][N] = {};

  Runs(const Shape& shape, const std::array<Strides, N>& strides) : elements(shape.numel()) {
    // From the innermost axis out; one joins the previous if its step is one past the end of that.
    for (int axis = shape.rank() - 1; axis >= 0; --axis) {
      if (shape[axis] == 1) continue;
      bool joins = axes > 0;
      for (std::size_t k = 0; k < N; ++k) {
        const Index s = stride[axes][k] = strides[k][static_cast<std::size_t>(axis)];
        joins = joins && s == stride[axes - 1][k] * extent[axes - 1];
      }
      if (joins) extent[axes - 1] *= shape[axis];
      else extent[axes++] = shape[axis];
    }
    if (axes > 0) run = extent[0], step = std::to_array(stride[0]);
    if (elements > 0) rows = elements / run;
  }

  bool is_flat() const {  // every operand lies in row-major order without gaps
    return axes == 0 || (axes == 1 && std::ranges::count(step, 1) == std::ssize(step));
  }
  /// Where element i of each operand is. Divides by 32 bits wherever the element count allows,
  /// which a GPU does several times faster.
  constexpr void at(Index i, Index (&offset)[N]) const {
    for (std::size_t k = 0; k < N; ++k) offset[k] = 0;
    constexpr Index k32 = Index{1} << 32;
    for (int a = 0; a < axes; ++a) {
      Index rest = 0, here = i;
      if (a + 1 < axes) {
        rest = elements < k32 ? static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(extent[a]) : i / extent[a];
        here = i - rest * extent[a];
      }
      for (std::size_t k = 0; k < N; ++k) offset[k] += here * stride[a][k];
      i = rest;
    }
  }

  /// f(offsets) for each row of [first, last): where in each operand its run begins.
  template <class F> void for_rows(Index first, Index last, F&& f) const {
    Index at[Shape::kMaxRank] = {}, rest = first;
    Offsets offset{};
    for (int a = 1; a < axes; ++a) {
      at[a] = rest % extent[a];
      rest /= extent[a];
      for (std::size_t k = 0; k < N; ++k) offset[k] += at[a] * stride[a][k];
    }
    for (Index row = first; row < last; ++row) {
      f(offset);
      for (int a = 1; a < axes; ++a) {
        for (std::size_t k = 0; k < N; ++k) offset[k] += stride[a][k];
        if (++at[a] < extent[a]) break;
        for (std::size_t k = 0; k < N; ++k) offset[k] -= extent[a] * stride[a][k];
        at[a] = 0;
      }
    }
  }

  /// f(offsets, count) over all elements, on several threads, in pieces of at most `piece`.
  template <class F> void for_pieces(Index piece, F&& f) const {
    if (run >= piece) {
      const Index per_row = (run + piece - 1) / piece;
      parallel_each(rows * per_row, 1, [&](Index i) {
        for_rows(i / per_row, i / per_row + 1, [&](Offsets o) {
          const Index from = i % per_row * piece;
          for (std::size_t k = 0; k < N; ++k) o[k] += from * step[k];
          f(o, std::min(piece, run - from));
        });
      });
    } else {
      parallel_for(rows, std::max<Index>(1, piece / std::max<Index>(run, 1)),
                   [&](Index begin, Index end) { for_rows(begin, end, [&](const Offsets& o) { f(o, run); }); });
    }
  }
};

}  // namespace hilt
