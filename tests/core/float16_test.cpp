// f16 and bf16, every pattern of bits, against a table searched for the nearest value.
#include "core/dtype.h"
#include <gtest/gtest.h>
#include <bit>
#include <cmath>
#include <limits>
#include "core/dtype.h"
#include "tests/support/half.h"
#include "tests/support/scale.h"

namespace hilt {
namespace {

std::uint32_t pattern(float x) { return std::bit_cast<std::uint32_t>(x); }
float number(std::uint32_t bits) { return std::bit_cast<float>(bits); }

template <class T> struct Of;
template <> struct Of<f16> {
  static const Half& half() { return half_f16(); }
};
template <> struct Of<bf16> {
  static const Half& half() { return half_bf16(); }
};

template <class T> T from_bits(std::uint32_t bits) {
  T x;
  x.bits = static_cast<std::uint16_t>(bits);
  return x;
}

template <class T> class Float16 : public testing::Test {};
using Formats = testing::Types<f16, bf16>;
TYPED_TEST_SUITE(Float16, Formats);

TYPED_TEST(Float16, EveryPatternWidensToItsValueAndComesBack) {
  const Half& half = Of<TypeParam>::half();
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto b = static_cast<std::uint16_t>(bits);
    const float x = from_bits<TypeParam>(bits);
    if (half.is_nan(b)) {
      ASSERT_TRUE(std::isnan(x)) << bits;
      // Sign and payload survive; NaN is quiet afterwards.
      ASSERT_EQ(TypeParam(x).bits, b | half.quiet_bit()) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(x), half.value(b)) << bits;
      ASSERT_EQ(std::signbit(x), bits >= 0x8000) << bits;
      ASSERT_EQ(TypeParam(x).bits, bits);
    }
  }
}

TYPED_TEST(Float16, RoundsToNearestEvenAroundEveryPatternAndEveryMiddle) {
  const Half& half = Of<TypeParam>::half();
  long checked = 0;
  for (std::uint32_t bits = 0; bits < half.infinity(); ++bits) {
    const double low = half.value(static_cast<std::uint16_t>(bits));
    const double high = bits + 1 < half.infinity() ? half.value(static_cast<std::uint16_t>(bits + 1))
                                                   : 2 * low - half.value(static_cast<std::uint16_t>(bits - 1));
    for (const double exact : {low, (low + high) / 2}) {
      ASSERT_EQ(static_cast<double>(static_cast<float>(exact)), exact);
      const std::uint32_t at = pattern(static_cast<float>(exact));
      for (std::uint32_t u = at < 3 ? 0 : at - 3; u <= at + 3; ++u)
        for (const std::uint32_t sign : {0u, 0x80000000u}) {
          ASSERT_EQ(TypeParam(number(u | sign)).bits, half.nearest(number(u | sign))) << std::hex << (u | sign);
          ++checked;
        }
    }
  }
  EXPECT_GE(checked, 800000);
}

TYPED_TEST(Float16, RoundsSampledFloatsOfAllPatterns) {
  const Half& half = Of<TypeParam>::half();
  const std::uint64_t stride = scaled<std::uint64_t>(509, 65521);  // primes: no bit is favored
  std::uint16_t last = 0;
  for (std::uint64_t u = 0; u < std::uint64_t{1} << 32; u += stride) {
    const float x = number(static_cast<std::uint32_t>(u));
    const std::uint16_t got = TypeParam(x).bits;
    if (std::isnan(x)) {
      ASSERT_TRUE(half.is_nan(got) && (got & half.quiet_bit()) && got >> 15 == u >> 31) << std::hex << u;
      continue;
    }
    ASSERT_EQ(got, half.nearest(x)) << std::hex << u;
    if (u < 0x80000000u) {
      ASSERT_GE(got, last) << std::hex << u;
      last = got;
    }
  }
}

TYPED_TEST(Float16, KeepsTheOrderOfAllFloatsBetweenItsSmallestAndLargest) {
  // Right on both sides of every middle (above) and rising everywhere between: right everywhere.
  const Half& half = Of<TypeParam>::half();
  const double largest = half.value(static_cast<std::uint16_t>(half.infinity() - 1));
  const std::uint32_t first = pattern(static_cast<float>(half.value(1) / 4)),
                      end = pattern(static_cast<float>(largest * 4));
  const std::uint32_t stride = scaled(std::is_same_v<TypeParam, f16> ? 1u : 7u, 4099u);
  std::uint16_t last = 0;
  std::uint32_t falls = 0;
  for (std::uint32_t u = first; u < end; u += stride) {
    const std::uint16_t got = TypeParam(number(u)).bits;
    falls += got < last;
    last = got;
  }
  EXPECT_EQ(falls, 0u);
}

TYPED_TEST(Float16, OverflowsToInfinityHalfAStepBeyondTheLargest) {
  const Half& half = Of<TypeParam>::half();
  const double largest = half.value(static_cast<std::uint16_t>(half.infinity() - 1));
  const double step = largest - half.value(static_cast<std::uint16_t>(half.infinity() - 2));
  const auto limit = static_cast<float>(largest + step / 2);
  EXPECT_EQ(TypeParam(std::nextafter(limit, 0.0f)).bits, half.infinity() - 1);
  EXPECT_EQ(TypeParam(limit).bits, half.infinity());
  EXPECT_EQ(TypeParam(-limit).bits, half.infinity() | 0x8000);
  EXPECT_EQ(TypeParam(std::numeric_limits<float>::infinity()).bits, half.infinity());
}

TEST(Float16Goldens, KnownNumbers) {
  EXPECT_EQ(f16(1.0f).bits, 0x3c00);
  EXPECT_EQ(f16(-2.0f).bits, 0xc000);
  EXPECT_EQ(f16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(f16(0x1p-24f).bits, 0x0001);
  EXPECT_EQ(f16(0x1p-25f).bits, 0x0000);
  EXPECT_EQ(f16(0x1.000002p-25f).bits, 0x0001);
  EXPECT_EQ(f16(0.1f).bits, 0x2e66);
  EXPECT_EQ(f16(-0.0f).bits, 0x8000);
  EXPECT_EQ(bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bf16(0.1f).bits, 0x3dcd);
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(bf16(number(0x7f800001)).bits, 0x7fc0);  // a NaN whose payload lies in the lower half stays one
  EXPECT_EQ(bf16(number(0xffbfffff)).bits, 0xffff);
}

// Arithmetic happens in float: the types offer nothing that could narrow by accident.
static_assert(!std::is_convertible_v<float, f16> && !std::is_convertible_v<float, bf16> &&
              std::is_convertible_v<f16, float>);
static_assert(sizeof(f16) == 2 && sizeof(bf16) == 2 && std::is_trivially_copyable_v<f16> &&
              std::is_trivially_copyable_v<bf16>);

TEST(DType, NamesSizesAndKinds) {
  const char* names[] = {"f64", "f32", "bf16", "f16", "i64", "i32", "u8"};
  const std::size_t sizes[] = {8, 4, 2, 2, 8, 4, 1};
  std::size_t n = 0;
  for (DType t : kAllDTypes) {
    EXPECT_EQ(name_of(t), names[n]);
    EXPECT_EQ(size_of(t), sizes[n]);
    EXPECT_EQ(is_floating(t), n < 4);
    EXPECT_EQ(static_cast<std::size_t>(t), n);
    ++n;
  }
  EXPECT_EQ(n, 7u);
}

static_assert(dtype_of<double> == DType::f64 && dtype_of<float> == DType::f32 && dtype_of<bf16> == DType::bf16 &&
              dtype_of<f16> == DType::f16 && dtype_of<std::int64_t> == DType::i64 &&
              dtype_of<std::int32_t> == DType::i32 && dtype_of<std::uint8_t> == DType::u8);
static_assert(std::is_same_v<wide_t<f16>, float> && std::is_same_v<wide_t<bf16>, float> &&
              std::is_same_v<wide_t<double>, double> && std::is_same_v<wide_t<std::int64_t>, std::int64_t>);

}  // namespace
}  // namespace hilt
