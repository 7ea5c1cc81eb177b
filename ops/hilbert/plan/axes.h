#pragma once
#include <algorithm>
#include "pattern.h"

// Private: the keys of a query on an axis of slides and windows.

namespace hilt {

struct Interval {
  Index low, high;
  bool has(Index i) const { return low <= i && i <= high; }
};

/// One axis of a branch, `cells` numbered class by class: a query has an interval of numbers.
class AxisRule {
 public:
  AxisRule(const Branch& b, std::size_t axis, Index cells)
      : window_(b.is_window()),
        slides_(b.slides()),
        size_(b.extent(axis)),
        cells_(cells),
        axis_(b.axes[axis]),
        apart_((cells + axis_.dilation - 1) / axis_.dilation) {}

  Index number(Index cell) const { return cell % axis_.dilation * apart_ + cell / axis_.dilation; }
  Index cell(Index number) const { return number / apart_ + number % apart_ * axis_.dilation; }

  /// The numbers of the keys of a query; low > high if there are none.
  Interval keys_of(Index cell) const {
    if (window_) {
      const Index begin = (cell + axis_.shift) / size_ * size_ - axis_.shift;
      return {std::max<Index>(begin, 0), axis_.causal ? cell : std::min(begin + size_, cells_) - 1};
    }
    const Index base = cell % axis_.dilation * apart_, i = cell / axis_.dilation;
    const Index n = (cells_ - cell % axis_.dilation + axis_.dilation - 1) / axis_.dilation;
    const Interval keys = around(i, n);
    return {base + std::max<Index>(keys.low, 0), base + std::min(keys.high, n - 1)};
  }

 private:
  /// The keys of query i in a class of n cells, borders aside.
  Interval around(Index i, Index n) const {
    const Index s = axis_.stride;
    Index center = std::min(i / s * s + (axis_.causal ? s - 1 : s / 2), n - 1);
    if (axis_.causal) return {center - (slides_ ? size_ : size_ - 1), i};
    const Index reach = slides_ ? size_ : size_ / 2;
    if (!slides_) center = std::max(std::min(center, n - 1 - reach), std::min(reach, n - 1));
    return {center - reach, center + reach};
  }

  bool window_, slides_;
  Index size_, cells_;
  Branch::Axis axis_;
  Index apart_;  // numbers from class to class
};

}  // namespace hilt
