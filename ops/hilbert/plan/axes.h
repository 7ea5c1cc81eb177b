#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <span>
#include <vector>
#include "pattern.h"

// Private: the keys of a query on an axis of slides and windows, and a tree to find tiles by it.

namespace hilt {

struct Interval {
  Index low, high;
  bool has(Index i) const { return low <= i && i <= high; }
};

/// One axis of a branch, `cells` numbered class by class: a query has an interval of numbers.
class AxisRule {
 public:
  AxisRule(const Branch& b, std::size_t axis, Index cells)
      : kind_(b.kind),
        size_(b.extent(axis)),
        cells_(cells),
        axis_(b.axes[axis]),
        apart_((cells + axis_.dilation - 1) / axis_.dilation) {}

  Index number(Index cell) const { return cell % axis_.dilation * apart_ + cell / axis_.dilation; }
  Index cell(Index number) const { return number / apart_ + number % apart_ * axis_.dilation; }

  /// The numbers of the keys of a query; low > high if there are none.
  Interval keys_of(Index cell) const {
    if (kind_ == Branch::Kind::window2d || kind_ == Branch::Kind::window3d) {
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
    const bool slides =
        kind_ == Branch::Kind::slide || kind_ == Branch::Kind::slide2d || kind_ == Branch::Kind::slide3d;
    Index center = std::min(i / s * s + (axis_.causal ? s - 1 : s / 2), n - 1);
    if (axis_.causal) return {center - (slides ? size_ : size_ - 1), i};
    const Index reach = slides ? size_ : size_ / 2;
    if (!slides) center = std::max(std::min(center, n - 1 - reach), std::min(reach, n - 1));
    return {center - reach, center + reach};
  }

  Branch::Kind kind_;
  Index size_, cells_;
  Branch::Axis axis_;
  Index apart_;  // numbers from class to class
};

struct Box {
  std::array<Interval, 3> side{};
  bool empty = true;

  void cover(const Box& x) {
    if (x.empty) return;
    for (std::size_t a = 0; a < 3 && !empty; ++a)
      side[a] = {std::min(side[a].low, x.side[a].low), std::max(side[a].high, x.side[a].high)};
    if (empty) *this = x;
  }
  bool overlaps(const Box& x) const {
    bool all = !empty && !x.empty;
    for (std::size_t a = 0; a < 3; ++a) all = all && side[a].low <= x.side[a].high && x.side[a].low <= side[a].high;
    return all;
  }
};

/// Tiles in their order, in a binary tree whose nodes cover those below.
class BoxTree {
 public:
  explicit BoxTree(std::span<const Box> leaves) : first_(std::bit_ceil(leaves.size())), node_(2 * first_) {
    std::ranges::copy(leaves, node_.begin() + static_cast<std::ptrdiff_t>(first_));
    for (std::size_t i = first_ - 1; i > 0; --i) node_[i] = node_[2 * i], node_[i].cover(node_[2 * i + 1]);
  }
  /// Calls found(leaf), ascending, for the leaves that overlap any of these boxes.
  template <class F> void find(std::span<const Box> boxes, F&& found, std::size_t at = 1) const {
    if (std::ranges::none_of(boxes, [&](const Box& b) { return b.overlaps(node_[at]); })) return;
    if (at >= first_) return found(static_cast<Index>(at - first_));
    find(boxes, found, 2 * at), find(boxes, found, 2 * at + 1);
  }

 private:
  std::size_t first_;
  std::vector<Box> node_;
};

}  // namespace hilt
