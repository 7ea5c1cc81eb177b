#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>
#include <type_traits>

namespace [[gnu::visibility("default")]] hilt {

// Storage types of 16 bits; arithmetic happens in float. All of it is always_inline, as it is
// compiled for wider instruction sets too (dispatch.h): no copy of those may serve an older one.

/// The upper half of a float: 8 exponent bits, 7 of mantissa. Conversion rounds to nearest even.
struct bf16 {
  std::uint16_t bits = 0;  // as stored

  bf16() = default;
  [[gnu::always_inline]] constexpr explicit bf16(float x) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    const auto u = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const std::uint32_t quiet_nan = (u >> 16) | 0x40u;
    bits = static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
#endif
  }
  [[gnu::always_inline]] constexpr operator float() const {  // exact
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// IEEE half: 5 exponent bits, 10 of mantissa, subnormals kept. Conversion rounds to nearest even.
struct f16 {
  std::uint16_t bits = 0;  // as stored

  f16() = default;
  [[gnu::always_inline]] constexpr explicit f16(float x) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    const auto u = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (u >> 16) & 0x8000u;
    const std::uint32_t magnitude = u & 0x7fffffffu;
    // Normal result: rebias the exponent by 15 - 127 and round away 13 bits of mantissa.
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal result: adding 0.5 lets the FPU align and round; the low bits are then the half.
    const std::uint32_t tiny = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    std::uint32_t half = magnitude < (113u << 23) ? tiny : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
    half = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : half;
    bits = static_cast<std::uint16_t>(sign | half);
#endif
  }
  [[gnu::always_inline]] constexpr operator float() const {  // exact
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#else
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    const std::uint32_t magnitude = bits & 0x7fffu;
    // Shifted into place the exponent is 112 too small; times 2^112 also renormalises subnormals.
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    const std::uint32_t finite = std::bit_cast<std::uint32_t>(scaled);
    const std::uint32_t special = 0x7f800000u | (magnitude << 13);
    return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : finite));
#endif
  }
};

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

/// Bytes of an element: a digit for each type, from the right.
constexpr std::size_t size_of(DType t) { return 0x1482248 >> 4 * static_cast<int>(t) & 15; }
constexpr bool is_floating(DType t) { return t <= DType::f16; }  // has gradients
constexpr std::string_view name_of(DType t) {
  constexpr std::string_view names[] = {"f64", "f32", "bf16", "f16", "i64", "i32", "u8"};
  return names[static_cast<int>(t)];
}
inline std::ostream& operator<<(std::ostream& os, DType t) { return os << name_of(t); }

/// The type arithmetic is done in: what a 16-bit float widens to, itself otherwise.
template <class T> using wide_t = std::conditional_t<sizeof(T) == 2, float, T>;

}  // namespace hilt
