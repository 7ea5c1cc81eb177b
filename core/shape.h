#pragma once
#include <array>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <ostream>
#include <span>
#include <string_view>
#include "error.h"

namespace [[gnu::visibility("default")]] hilt {

using Index = std::int64_t;  // sizes, offsets and counts

// Arithmetic on sizes. Those of a user or a file may be anything: overflow is an error, not a wrap.
/// a b; throws Code::usage, begun by `what`, where that overflows.
template <class... Parts> Index checked_mul(Index a, Index b, const Parts&... what) {
  Index r = 0;
  if (__builtin_mul_overflow(a, b, &r)) [[unlikely]]
    fail(what..., ": ", a, " x ", b, " overflows 64 bits");
  return r;
}
template <class... Parts> Index checked_add(Index a, Index b, const Parts&... what) {  // a + b, checked
  Index r = 0;
  if (__builtin_add_overflow(a, b, &r)) [[unlikely]]
    fail(what..., ": ", a, " + ", b, " overflows 64 bits");
  return r;
}

/// The number that all of the text is; nothing where it is none, or none of this type.
template <class Number> std::optional<Number> number_in(std::string_view text) {
  Number x{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(x) : std::nullopt;
}

/// Up to six extents, kept inline: copying a Shape never allocates. Extents are not negative and
/// their product fits an Index; both are checked once, here, so that nobody downstream has to.
class Shape {
 public:
  static constexpr int kMaxRank = 6;  // the most axes

  Shape() = default;
  /// One axis: zeros(3) is zeros({3}).
  template <std::signed_integral I> Shape(I dim) { push_back(dim); }
  Shape(std::initializer_list<Index> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const Index> dims) {
    check(dims.size() <= kMaxRank, "Shape: rank ", dims.size(), " exceeds ", kMaxRank);
    for (Index d : dims) push_back(d);
  }

  int rank() const { return rank_; }      // how many axes
  Index numel() const { return numel_; }  // product of the extents
  /// Axis i; negative counts from the end.
  Index operator[](int i) const { return dims_[place(i)]; }
  std::size_t place(int i) const {  // which axis that is, counted from the front
    check(i >= -rank_ && i < rank_, "Shape: axis ", i, " of a tensor of rank ", rank_);
    return static_cast<std::size_t>(i < 0 ? i + rank_ : i);
  }
  const Index* begin() const { return dims_.data(); }        // of the extents
  const Index* end() const { return dims_.data() + rank_; }  // behind the last extent

  void push_back(Index d) {  // one more axis, the innermost
    check(rank_ < kMaxRank, "Shape: rank exceeds ", kMaxRank);
    check(d >= 0, "Shape: extent ", d, " of axis ", rank_, " is negative");
    dims_[static_cast<std::size_t>(rank_++)] = d;
    // With a zero among them the others still have to multiply safely: strides come from them.
    extent_ = checked_mul(extent_, d > 0 ? d : 1, "Shape");
    numel_ = d == 0 ? 0 : numel_ * d;
  }
  Shape with(int i, Index d) const {  // the same shape with axis i replaced
    Shape s;
    const int axis = i < 0 ? i + rank_ : i;
    for (int a = 0; a < rank_; ++a) s.push_back(a == axis ? d : begin()[a]);
    return s;
  }

  friend bool operator==(const Shape& a, const Shape& b) { return a.rank_ == b.rank_ && a.dims_ == b.dims_; }
  friend std::ostream& operator<<(std::ostream& os, const Shape& s) {
    os << '[';
    for (int i = 0; i < s.rank_; ++i) os << (i ? ", " : "") << std::to_string(s[i]);
    return os << ']';
  }

 private:
  std::array<Index, kMaxRank> dims_{};
  Index numel_ = 1, extent_ = 1;
  int rank_ = 0;
};

/// Elements to skip for one step along each axis. Zero repeats (expand); never negative.
using Strides = std::array<Index, Shape::kMaxRank>;

inline Strides contiguous_strides(const Shape& shape) {  // of a dense row-major tensor
  Strides strides{};
  Index step = 1;
  for (auto i = static_cast<std::size_t>(shape.rank()); i-- > 0; step *= shape.begin()[i] > 0 ? shape.begin()[i] : 1)
    strides[i] = step;
  return strides;
}

/// Axis as 0..rank-1, accepting negatives; an error names op and the range.
inline int checked_axis(const char* op, int axis, int rank) {
  check(axis >= -rank && axis < rank, op, ": axis ", axis, " is outside ", -rank, "..", rank - 1,
        " of a tensor of rank ", rank);
  return axis < 0 ? axis + rank : axis;
}

/// The shape both broadcast to: axes align at the end, an extent of 1 repeats.
inline Shape broadcast(const char* op, const Shape& a, const Shape& b) {
  const int rank = a.rank() > b.rank() ? a.rank() : b.rank();
  Shape out;
  for (int i = rank; i >= 1; --i) {
    const Index x = i <= a.rank() ? a[-i] : 1, y = i <= b.rank() ? b[-i] : 1;
    check(x == y || x == 1 || y == 1, op, ": shapes ", a, " and ", b, " do not broadcast: axis ", -i, " has ", x,
          " and ", y);
    out.push_back(x == 1 ? y : x);
  }
  return out;
}

}  // namespace hilt
