#pragma once
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
/// a dense tensor is one run, a transposed one a loop. `rows` outer steps of `run` elements each.
template <std::size_t N> struct Runs {
  using Offsets = std::array<Index, N>;
  struct Axis {
    Index extent;
    Offsets stride;
  };
  Index rows = 1, run = 1;
  Offsets step{};  // of each operand along the run

  Runs(const Shape& shape, const std::array<Strides, N>& strides) {
    // From the innermost axis out; one joins the previous if its step is one past the end of that.
    for (int axis = shape.rank() - 1; axis >= 0; --axis) {
      const Index extent = shape[axis];
      if (extent == 1) continue;
      Offsets s{};
      for (std::size_t k = 0; k < N; ++k) s[k] = strides[k][static_cast<std::size_t>(axis)];
      if (axes_ > 0) {
        Axis& inner = axis_[axes_ - 1];
        bool joins = true;
        for (std::size_t k = 0; k < N; ++k) joins = joins && s[k] == inner.stride[k] * inner.extent;
        if (joins) {
          inner.extent *= extent;
          continue;
        }
      }
      axis_[axes_++] = {extent, s};
    }
    if (axes_ > 0) run = axis_[0].extent, step = axis_[0].stride;
    for (std::size_t a = 1; a < axes_; ++a) rows *= axis_[a].extent;
    if (shape.numel() == 0) rows = 0;
  }

  /// The merged axes, the innermost first; none of a single element.
  std::span<const Axis> axes() const { return std::span(axis_).first(axes_); }

  /// f(offsets) for each row of [first, last): where in each operand its run begins.
  template <class F> void for_rows(Index first, Index last, F&& f) const {
    std::array<Index, Shape::kMaxRank> at{};
    Offsets offset{};
    Index rest = first;
    for (std::size_t a = 1; a < axes_; ++a) {
      at[a] = rest % axis_[a].extent;
      rest /= axis_[a].extent;
      for (std::size_t k = 0; k < N; ++k) offset[k] += at[a] * axis_[a].stride[k];
    }
    for (Index row = first; row < last; ++row) {
      f(offset);
      for (std::size_t a = 1; a < axes_; ++a) {
        for (std::size_t k = 0; k < N; ++k) offset[k] += axis_[a].stride[k];
        if (++at[a] < axis_[a].extent) break;
        for (std::size_t k = 0; k < N; ++k) offset[k] -= axis_[a].extent * axis_[a].stride[k];
        at[a] = 0;
      }
    }
  }

  /// f(offsets, count) over all elements, on several threads, in pieces of at most `piece`.
  template <class F> void for_pieces(Index piece, F&& f) const {
    if (run >= piece) {
      const Index per_row = (run + piece - 1) / piece;
      parallel_for(rows * per_row, 1, [&](Index begin, Index end) {
        for (Index i = begin; i < end; ++i)
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

 private:
  std::array<Axis, Shape::kMaxRank> axis_{};
  std::size_t axes_ = 0;
};

namespace cuda {

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

}  // namespace cuda
}  // namespace hilt
