#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

// Scalar maths that compilers turn into vector code: no branch, no table, no call. f32 here; f64,
// the referee, is std::. Special values as in IEEE: NaN in, NaN out; overflow to infinity,
// underflow through subnormals to 0.
//      exp(x) = 2^n e^r,  n = round(x / ln 2),  |r| <= ln 2 / 2,  e^r = 1 + r + r^2 P(r)
//      log(x) = e ln 2 + f - f^2 / 2 + f^3 P(f),  x = 2^e (1 + f),  1 + f in [2/3, 4/3)
//      tanh(x) = d / (d + 2),  d = e^2x - 1 without cancellation
//      Phi(x) = 1 - tail,  tail = erfc(t) / 2 = u e^(-t^2) P(u),  t = |x| / sqrt 2,  u = 2 / (2 + t);
//      mirrored for x < 0
// tests/tools/fit_math.py found the polynomials and prints their errors.
// Always inline: this header is compiled for several instruction sets (ops/isa.h). A GPU has an
// exponential of its own.

namespace hilt::math {

template <class T> constexpr bool kIsDouble = sizeof(T) == 8;

namespace detail {
/// The polynomial with these coefficients, from the highest power down; x may be a vector.
template <class X, class... C> [[gnu::always_inline]] constexpr X polynomial(X x, float first, C... rest) {
  X sum = X{} + first;
  ((sum = sum * x + rest), ...);
  return sum;
}
/// x 2^n for n in [-252, 254], in two steps: results beyond the range of one exponent round once.
[[gnu::always_inline]] constexpr float scale(float x, std::int32_t n) {
  const std::int32_t half = n >> 1;
  return x * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((n - half + 127) << 23);
}
constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.42860682030941723e-6f;  // the first times n < 2^9 is exact
struct Reduced {
  float r;
  std::int32_t n;
};
[[gnu::always_inline]] constexpr Reduced reduce(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  return {(x - n * kLn2High) - n * kLn2Low, std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound)};
}
[[gnu::always_inline]] constexpr float small_expm1(float r) {  // e^r - 1 for |r| <= ln 2 / 2
  return polynomial(r, 0.001392617612f, 0.008363173075f, 0.04166655466f, 0.1666657703f, 0.5f) * (r * r) + r;
}
}  // namespace detail

template <class T> [[gnu::always_inline]] constexpr T exp(T x) {
  if constexpr (kIsDouble<T>) return std::exp(x);
  else {
#ifdef __CUDA_ARCH__
    return ::expf(x);
#endif
    x = x < -104.0f ? -104.0f : x;  // e^-104 is 0, e^89 infinity
    x = x > 89.0f ? 89.0f : x;
    const auto [r, n] = detail::reduce(x);
    return detail::scale(1.0f + detail::small_expm1(r), n);
  }
}

template <class T> [[gnu::always_inline]] constexpr T log(T x) {
  if constexpr (kIsDouble<T>) return std::log(x);
  else {
    const bool tiny = x < 1.17549435e-38f;                                       // subnormal
    const auto bits = std::bit_cast<std::uint32_t>(tiny ? x * 8388608.0f : x);   // those of a negative x wrap
    const std::int32_t e = static_cast<std::int32_t>(bits - 0x3f2aaaabU) >> 23;  // 2/3
    const float f = std::bit_cast<float>(bits - (static_cast<std::uint32_t>(e) << 23)) - 1.0f;
    const float exponent = static_cast<float>(tiny ? e - 23 : e);
    const float p = detail::polynomial(f, 0.1133061739f, -0.1242220058f, 0.1091565479f, -0.1228872161f, 0.1429186718f,
                                       -0.1667331625f, 0.1999994835f, -0.2499994419f, 0.3333333333f);
    const float y = exponent * detail::kLn2High + (f + (f * f * (f * p - 0.5f) + exponent * detail::kLn2Low));
    const float special = x == 0.0f  ? -__builtin_inff()
                          : x < 0.0f ? __builtin_nanf("")
                                     : x;  // 0, negative, infinity, NaN
    return x > 0.0f && x < __builtin_inff() ? y : special;
  }
}

template <class T> [[gnu::always_inline]] constexpr T tanh(T x) {
  if constexpr (kIsDouble<T>) return std::tanh(x);
  else {
    const float a = __builtin_fabsf(x);
    const auto [r, n] = detail::reduce(2.0f * (a > 10.0f ? 10.0f : a));  // tanh 10 is 1
    const float two_n = std::bit_cast<float>((n + 127) << 23);
    const float d = two_n * detail::small_expm1(r) + (two_n - 1.0f);
    return __builtin_copysignf(d / (d + 2.0f), x);
  }
}

/// 1 / (1 + e^-x), which for negative x is e^x / (1 + e^x): small results keep their precision.
template <class T> [[gnu::always_inline]] constexpr T sigmoid(T x) {
  const T e = exp(x < 0 ? x : -x);
#ifdef __CUDA_ARCH__
  return __fdividef(x < 0 ? e : T{1}, T{1} + e);  // good to two units in the last place, at a fifth of the price
#else
  return (x < 0 ? e : T{1}) / (T{1} + e);
#endif
}

/// Phi(x), the normal distribution function, and its derivative.
template <class T> struct Normal { T cdf, density; };
template <class T> [[gnu::always_inline]] constexpr Normal<T> normal(T x) {
  const T e = exp(T(-0.5) * x * x), density = e * T(0.39894228040143267794);  // 1 / sqrt(2 pi)
  if constexpr (kIsDouble<T>) return {0.5 * std::erfc(-x * 0.70710678118654752440), density};
  else {
    const float u = 1.0f / (1.0f + __builtin_fabsf(x) * 0.35355339059327376f);  // 1 / sqrt 8
    const float tail =
        u * e *
        detail::polynomial(u, 0.009383233864f, -0.07841634149f, 0.2518518783f, -0.3818384896f, 0.2468614852f,
                           -0.06704179321f, 0.1183847076f, 0.1182453243f, 0.1415428523f, 0.1410271397f);
    return {x < 0.0f ? tail : 1.0f - tail, density};
  }
}

}  // namespace hilt::math
