#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace hilt {

/// A float format of 16 bits by its definition: a table of its values, and rounding as a search in
/// it. Shares no thought with dtype.h, and is 30 times slower.
class Half {
 public:
  Half(int exponent_bits, int mantissa_bits) : mantissa_bits_(mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
    for (int magnitude = 0; magnitude <= infinity;
         ++magnitude) {  // at infinity's place what the pattern would mean as a number
      const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
      const int leading = exponent > 0 ? 1 << mantissa_bits : 0;
      values_.push_back(std::ldexp(leading + mantissa, std::max(exponent, 1) - bias - mantissa_bits));
    }
  }
  std::uint16_t infinity() const { return static_cast<std::uint16_t>(values_.size() - 1); }
  bool is_nan(std::uint16_t bits) const { return (bits & 0x7fff) > infinity(); }
  std::uint16_t quiet_bit() const { return static_cast<std::uint16_t>(1 << (mantissa_bits_ - 1)); }
  /// The number a pattern means; not for NaN.
  double value(std::uint16_t bits) const {
    const std::uint16_t magnitude = bits & 0x7fff;
    const double x = magnitude == infinity() ? HUGE_VAL : values_[magnitude];
    return bits & 0x8000 ? -x : x;
  }
  /// To nearest, ties to the even pattern; from half way to the number that infinity stands for on,
  /// infinity. Of NaN, a quiet NaN.
  std::uint16_t nearest(double x) const {
    if (std::isnan(x)) return infinity() | quiet_bit();
    const double magnitude = std::abs(x);
    auto bits =
        static_cast<std::uint16_t>(std::upper_bound(values_.begin(), values_.end(), magnitude) - values_.begin() - 1);
    if (bits < infinity()) {
      const double middle = (values_[bits] + values_[bits + 1u]) / 2;
      if (magnitude > middle || (magnitude == middle && bits % 2 == 1)) ++bits;
    }
    return static_cast<std::uint16_t>(bits | (std::signbit(x) ? 0x8000 : 0));
  }

 private:
  int mantissa_bits_;
  std::vector<double> values_;  // of the patterns without a sign, rising
};

inline const Half& half_f16() {
  static const Half half(5, 10);
  return half;
}
inline const Half& half_bf16() {
  static const Half half(8, 7);
  return half;
}

}  // namespace hilt
