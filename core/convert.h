#pragma once
#include <limits>
#include <type_traits>
#include "dtype.h"

// Private to core: one element from one type to another, the same on every device.

namespace hilt {

/// Floats round to nearest even. Floats to integers saturate, NaN is 0; integers keep low bits.
template <class To, class From> constexpr To convert(From x) {
  if constexpr (std::is_same_v<To, From>) return x;
  else if constexpr (std::is_same_v<To, bf16> || std::is_same_v<To, f16>) return To(static_cast<float>(x));
  else if constexpr (std::is_integral_v<To> && !std::is_integral_v<From>) {
    // Out of range is undefined in C++.
    const double v = static_cast<double>(x);
    constexpr double low = static_cast<double>(std::numeric_limits<To>::min());
    constexpr double high = static_cast<double>(std::numeric_limits<To>::max());
    if (v >= high) return std::numeric_limits<To>::max();
    return v > low ? static_cast<To>(v) : v <= low ? std::numeric_limits<To>::min() : To{0};
  } else return static_cast<To>(x);
}

/// f.operator()<T>() for the type that a tag names.
template <class F> constexpr auto with_type(DType type, F&& f) {
  switch (type) {
    case DType::f64: return f.template operator()<double>();
    case DType::f32: return f.template operator()<float>();
    case DType::bf16: return f.template operator()<bf16>();
    case DType::f16: return f.template operator()<f16>();
    case DType::i64: return f.template operator()<std::int64_t>();
    case DType::i32: return f.template operator()<std::int32_t>();
    case DType::u8: break;
  }
  return f.template operator()<std::uint8_t>();
}

}  // namespace hilt
