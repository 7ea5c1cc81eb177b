#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

// Scalar maths that compilers turn into vector code: no branch, no table, no call. f32 here; f64, the referee, is std::.
// Special values as in IEEE: NaN in, NaN out; overflow to infinity, underflow through subnormals to 0.
//
//      exp(x) = 2^n e^r,  n = round(x / ln 2),  |r| <= ln 2 / 2,  e^r by its series to r^7 (next term 5e-9)
//      log(x) = e ln 2 + 2 atanh(s),  x = 2^e m,  m in [sqrt 1/2, sqrt 2),  s = (m - 1)/(m + 1), series to s^9
//      tanh(x) = d / (d + 2),  d = e^2x - 1 without cancellation
//      erfc(t) = u e^(-t^2 + P(u)),  u = 2 / (2 + t),  t >= 0;  P, of degree 10, fitted by Chebyshev to 1.2e-8
//
// Always inline: this header is compiled for several instruction sets (ops/isa.h).

namespace hilt::math {

template <class T> constexpr bool kIsDouble = sizeof(T) == 8;

namespace detail {
/// 2^n for n in [-252, 254], in two steps, so that results beyond the range of one exponent round once.
[[gnu::always_inline]] inline float scale(float x, std::int32_t n) {
  const std::int32_t half = n >> 1;
  return x * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((n - half + 127) << 23);
}
struct Reduced { float r; std::int32_t n; };
[[gnu::always_inline]] inline Reduced reduce(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  x = x < -104.0f ? -104.0f : x;         // e^-104 is 0, e^89 infinity
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  return {r, std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound)};
}
/// e^r - 1 for |r| <= ln 2 / 2.
[[gnu::always_inline]] inline float small_expm1(float r) {
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  return p * (r * r) + r;
}
}  // namespace detail

template <class T>
[[gnu::always_inline]] inline T exp(T x) {
  if constexpr (kIsDouble<T>) return std::exp(x);
  else {
    const auto [r, n] = detail::reduce(x);
    return detail::scale(1.0f + detail::small_expm1(r), n);
  }
}

template <class T>
[[gnu::always_inline]] inline T log(T x) {
  if constexpr (kIsDouble<T>) return std::log(x);
  else {
    const bool tiny = x < 1.17549435e-38f;
    const float up = tiny ? x * 8388608.0f : x;
    const auto bits = std::bit_cast<std::int32_t>(up);
    const std::int32_t e = (bits - 0x3f3504f3) >> 23;  // so that m lies around 1
    const float m = std::bit_cast<float>(bits - (e << 23));
    const float exponent = static_cast<float>(tiny ? e - 23 : e);
    const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float p = 1.0f / 9;
    p = p * z + 1.0f / 7;
    p = p * z + 1.0f / 5;
    p = p * z + 1.0f / 3;
    const float y = exponent * 0.693145751953125f + (2.0f * s + (2.0f * s * z * p + exponent * 1.42860682030941723e-6f));
    const float special = x == 0.0f ? -__builtin_inff() : x < 0.0f ? __builtin_nanf("") : x;  // 0, negative, infinity, NaN
    return x > 0.0f && x < __builtin_inff() ? y : special;
  }
}

template <class T>
[[gnu::always_inline]] inline T tanh(T x) {
  if constexpr (kIsDouble<T>) return std::tanh(x);
  else {
    const float a = x < 0.0f ? -x : x, bounded = a > 10.0f ? 10.0f : a;  // tanh 10 is 1
    const auto [r, n] = detail::reduce(2.0f * bounded);
    const float two_n = std::bit_cast<float>((n + 127) << 23);
    const float d = two_n * detail::small_expm1(r) + (two_n - 1.0f);
    const float t = d / (d + 2.0f);
    return x != x ? x : x < 0.0f ? -t : x == 0.0f ? x : t;
  }
}

template <class T>
[[gnu::always_inline]] inline T sigmoid(T x) {
  return T{1} / (T{1} + exp(-x));
}

/// Phi(x), the normal distribution function.
template <class T>
[[gnu::always_inline]] inline T normal_cdf(T x) {
  if constexpr (kIsDouble<T>) return 0.5 * std::erfc(-x * 0.70710678118654752440);
  else {
    const float t = (x < 0.0f ? -x : x) * 0.70710678118654752f;
    const float u = 2.0f / (2.0f + t);
    float p = -0.1454878521f;
    p = p * u + 0.9917797858f;
    p = p * u - 2.83550114f;
    p = p * u + 4.304063504f;
    p = p * u - 3.610702805f;
    p = p * u + 1.70203502f;
    p = p * u - 0.7254690582f;
    p = p * u + 0.2291107523f;
    p = p * u + 0.3540243067f;
    p = p * u + 1.001720688f;
    p = p * u - 1.265573201f;
    const float tail = 0.5f * u * exp(p - t * t);
    return x < 0.0f ? tail : 1.0f - tail;
  }
}

}  // namespace hilt::math
