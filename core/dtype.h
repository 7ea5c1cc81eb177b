#pragma once
#include <cstddef>
#include <ostream>
#include <string_view>
#include "float16.h"

namespace [[gnu::visibility("default")]] hilt {

/// What elements are stored as; bf16 and f16 are computed in f32.
enum class DType : unsigned char { f64, f32, bf16, f16, i64, i32, u8 };
/// In the order of their values.
inline constexpr DType kAllDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16,
                                       DType::i64, DType::i32, DType::u8};

template <class T> struct DTypeOf;  // the DType of a C++ type
template <> struct DTypeOf<double> { static constexpr DType value = DType::f64; };
template <> struct DTypeOf<float> { static constexpr DType value = DType::f32; };
template <> struct DTypeOf<bf16> { static constexpr DType value = DType::bf16; };
template <> struct DTypeOf<f16> { static constexpr DType value = DType::f16; };
template <> struct DTypeOf<std::int64_t> { static constexpr DType value = DType::i64; };
template <> struct DTypeOf<std::int32_t> { static constexpr DType value = DType::i32; };
template <> struct DTypeOf<std::uint8_t> { static constexpr DType value = DType::u8; };
template <class T> inline constexpr DType dtype_of = DTypeOf<T>::value;  // the DType of T

constexpr std::size_t size_of(DType t) {  // bytes of an element
  constexpr std::size_t sizes[] = {8, 4, 2, 2, 8, 4, 1};
  return sizes[static_cast<int>(t)];
}
constexpr bool is_floating(DType t) { return t <= DType::f16; }  // has gradients
constexpr std::string_view name_of(DType t) {
  constexpr std::string_view names[] = {"f64", "f32", "bf16", "f16", "i64", "i32", "u8"};
  return names[static_cast<int>(t)];
}
inline std::ostream& operator<<(std::ostream& os, DType t) { return os << name_of(t); }

/// The type arithmetic is done in: what a 16-bit float widens to, itself otherwise.
template <class T> struct Wide { using type = T; };
template <> struct Wide<bf16> { using type = float; };
template <> struct Wide<f16> { using type = float; };
template <class T> using wide_t = typename Wide<T>::type;  // Wide<T>::type

}  // namespace hilt
