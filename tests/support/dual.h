#pragma once
#include <algorithm>
#include <cmath>
#include <concepts>
#include <numbers>

// Numbers that know more than their value. A formula written once as a template over its scalar
// gives, besides the value in double or float: with Dual its derivative, exactly and without a step
// size; with Bounded how far rounding may carry it; with Dual<Bounded> both. Constants are made
// explicitly, T(0.5), so that a float formula stays one.

namespace hilt::judge {

// The functions of every scalar, found here for double and float, by argument for the others.
using std::abs, std::cos, std::erf, std::exp, std::log, std::pow, std::sin, std::sqrt, std::tanh;
template <std::floating_point T> T sigmoid(T x) { return 1 / (1 + exp(-x)); }

/// x + dx e with e^2 = 0.
template <class S> struct Dual {
  S x{0}, dx{0};

  Dual() = default;
  explicit Dual(double constant) : x(static_cast<S>(constant)) {}
  Dual(S value, S slope) : x(value), dx(slope) {}

  friend Dual operator-(const Dual& a) { return {-a.x, -a.dx}; }
  friend Dual operator+(const Dual& a, const Dual& b) { return {a.x + b.x, a.dx + b.dx}; }
  friend Dual operator-(const Dual& a, const Dual& b) { return {a.x - b.x, a.dx - b.dx}; }
  friend Dual operator*(const Dual& a, const Dual& b) { return {a.x * b.x, a.dx * b.x + a.x * b.dx}; }
  friend Dual operator/(const Dual& a, const Dual& b) {
    const S y = a.x / b.x;
    return {y, (a.dx - y * b.dx) / b.x};
  }
  Dual& operator+=(const Dual& b) { return *this = *this + b; }
  friend bool operator<(const Dual& a, const Dual& b) { return a.x < b.x; }
  friend bool operator>(const Dual& a, const Dual& b) { return b < a; }
};

/// A number that rounding reached by some path: its value, the error of that path to first order in
/// units of the type's rounding u (Wilkinson's running error: every operation adds |its result| to
/// the errors it inherits), and the sum of the absolute values of the terms it is made of, which is
/// what rounded intermediates can move it by.
struct Bounded {
  double x = 0, error = 0, size = 0;

  Bounded() = default;
  explicit Bounded(double constant) : x(constant), size(std::abs(constant)) {
    if (static_cast<double>(static_cast<float>(constant)) != constant) error = size;
  }
  Bounded(double value, double error_, double size_) : x(value), error(error_), size(size_) {}

  friend Bounded operator-(const Bounded& a) { return {-a.x, a.error, a.size}; }
  friend Bounded operator+(const Bounded& a, const Bounded& b) {
    const double y = a.x + b.x;
    return {y, a.error + b.error + std::abs(y), a.size + b.size};
  }
  friend Bounded operator-(const Bounded& a, const Bounded& b) { return a + -b; }
  friend Bounded operator*(const Bounded& a, const Bounded& b) {
    const double y = a.x * b.x;
    return {y, std::abs(a.x) * b.error + std::abs(b.x) * a.error + std::abs(y), a.size * b.size};
  }
  friend Bounded operator/(const Bounded& a, const Bounded& b) {
    const double y = a.x / b.x;
    return {y, (a.error + std::abs(y) * b.error) / std::abs(b.x) + std::abs(y), a.size * b.size / (b.x * b.x)};
  }
  Bounded& operator+=(const Bounded& b) { return *this = *this + b; }
  friend bool operator<(const Bounded& a, const Bounded& b) { return a.x < b.x; }
  friend bool operator>(const Bounded& a, const Bounded& b) { return b < a; }

  /// y = f(a) for a library function, itself good to one unit in the last place.
  static Bounded through(const Bounded& a, double y, double slope) {
    return {y, std::abs(slope) * a.error + 2 * std::abs(y), std::abs(y)};
  }
};

// ---- functions ----------------------------------------------------------------------------------
inline Bounded exp(const Bounded& a) { return Bounded::through(a, std::exp(a.x), std::exp(a.x)); }
inline Bounded log(const Bounded& a) { return Bounded::through(a, std::log(a.x), 1 / a.x); }
inline Bounded sqrt(const Bounded& a) { return Bounded::through(a, std::sqrt(a.x), 0.5 / std::sqrt(a.x)); }
inline Bounded sin(const Bounded& a) { return Bounded::through(a, std::sin(a.x), std::cos(a.x)); }
inline Bounded cos(const Bounded& a) { return Bounded::through(a, std::cos(a.x), std::sin(a.x)); }
inline Bounded tanh(const Bounded& a) {
  const double y = std::tanh(a.x);
  return Bounded::through(a, y, 1 - y * y);
}
inline Bounded sigmoid(const Bounded& a) {
  const double y = 1 / (1 + std::exp(-a.x));
  return Bounded::through(a, y, y * (1 - y));
}
inline Bounded erf(const Bounded& a) {
  return Bounded::through(a, std::erf(a.x), 2 * std::numbers::inv_sqrtpi * std::exp(-a.x * a.x));
}
inline Bounded abs(const Bounded& a) { return {std::abs(a.x), a.error, a.size}; }
inline Bounded pow(const Bounded& a, const Bounded& b) {
  const double y = std::pow(a.x, b.x);
  const double by_a = a.error == 0 ? 0 : std::abs(b.x * std::pow(a.x, b.x - 1)) * a.error;
  const double by_b = b.error == 0 ? 0 : std::abs(y * std::log(a.x)) * b.error;
  return {y, by_a + by_b + 2 * std::abs(y), std::abs(y)};
}

template <class S> Dual<S> exp(const Dual<S>& a) {
  const S y = exp(a.x);
  return {y, y * a.dx};
}
template <class S> Dual<S> log(const Dual<S>& a) { return {log(a.x), a.dx / a.x}; }
template <class S> Dual<S> sqrt(const Dual<S>& a) {
  const S y = sqrt(a.x);
  return {y, a.dx / (S(2) * y)};
}
template <class S> Dual<S> sin(const Dual<S>& a) { return {sin(a.x), cos(a.x) * a.dx}; }
template <class S> Dual<S> cos(const Dual<S>& a) { return {cos(a.x), -sin(a.x) * a.dx}; }
template <class S> Dual<S> tanh(const Dual<S>& a) {
  const S y = tanh(a.x);
  return {y, a.dx * (S(1) - y * y)};
}
template <class S> Dual<S> sigmoid(const Dual<S>& a) {
  const S y = sigmoid(a.x);
  return {y, a.dx * (y * (S(1) - y))};
}
template <class S> Dual<S> erf(const Dual<S>& a) {
  return {erf(a.x), a.dx * S(2 * std::numbers::inv_sqrtpi) * exp(-(a.x * a.x))};
}
template <class S> Dual<S> abs(const Dual<S>& a) { return S(0) > a.x ? -a : a; }
/// The plain number.
inline double value_of(std::floating_point auto a) { return static_cast<double>(a); }
inline double value_of(const Bounded& a) { return a.x; }
template <class S> double value_of(const Dual<S>& a) { return value_of(a.x); }

/// The slope along b is asked for only where b moves: a may be negative under a constant power.
template <class S> Dual<S> pow(const Dual<S>& a, const Dual<S>& b) {
  const S y = pow(a.x, b.x), less = static_cast<S>(value_of(b.x) - 1);
  S slope = value_of(a.dx) == 0 ? S(0) : b.x * pow(a.x, less) * a.dx;
  if (value_of(b.dx) != 0) slope = slope + y * log(a.x) * b.dx;
  return {y, slope};
}

}  // namespace hilt::judge
