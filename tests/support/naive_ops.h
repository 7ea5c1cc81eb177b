#pragma once
#include <array>
#include <vector>
#include "core/shape.h"
#include "tests/support/dual.h"

// The formulas of ops.h as one writes them on paper: a loop over positions, one scalar at a time,
// in the order of the text. Templates over the scalar (see dual.h). No code of the library but
// Shape.

namespace hilt::judge {

/// A dense tensor of any scalar.
template <class T> struct Array {
  Shape shape;
  std::vector<T> values;

  Array() : Array(Shape{}) {}
  explicit Array(const Shape& s) : shape(s), values(static_cast<std::size_t>(s.numel()), T(0)) {}
  Index size() const { return shape.numel(); }
  T& operator[](Index i) { return values[static_cast<std::size_t>(i)]; }
  const T& operator[](Index i) const { return values[static_cast<std::size_t>(i)]; }
};
template <class T> using Arrays = std::vector<Array<T>>;

namespace naive {

using Position = std::array<Index, Shape::kMaxRank>;

/// f(position, its number in row-major order).
template <class F> void each(const Shape& shape, F f) {
  Position p{};
  for (Index n = 0; n < shape.numel(); ++n) {
    f(p, n);
    for (int i = shape.rank() - 1; i >= 0 && ++p[i] == shape[i]; --i) p[i] = 0;
  }
}
/// The number of the element at p, a position of a shape of `rank` axes that s broadcasts to.
inline Index place(const Shape& s, const Position& p, int rank) {
  Index at = 0;
  for (int i = 0; i < s.rank(); ++i) at = at * s[i] + (s[i] == 1 ? 0 : p[i + rank - s.rank()]);
  return at;
}
inline Index place(const Shape& s, const Position& p) { return place(s, p, s.rank()); }
inline Position with(Position p, int axis, Index i) {
  p[axis] = i;
  return p;
}

// ---- elementwise --------------------------------------------------------------------------------
template <class T, class F> Array<T> map(const Array<T>& x, F f) {
  Array<T> y(x.shape);
  for (Index i = 0; i < x.size(); ++i) y[i] = f(x[i]);
  return y;
}
template <class T, class F> Array<T> zip(const Array<T>& a, const Array<T>& b, F f) {
  Array<T> y(broadcast("naive", a.shape, b.shape));
  const int rank = y.shape.rank();
  each(y.shape, [&](const Position& p, Index n) { y[n] = f(a[place(a.shape, p, rank)], b[place(b.shape, p, rank)]); });
  return y;
}
template <class T> T gelu(const T& x) { return x * (T(0.5) * (T(1) + erf(x * T(std::numbers::sqrt2 / 2)))); }
template <class T> T gelu_tanh(const T& x) {
  return T(0.5) * x * (T(1) + tanh(T(std::sqrt(2 / std::numbers::pi)) * (x + T(0.044715) * (x * x * x))));
}

// ---- reductions ---------------------------------------------------------------------------------
inline Shape reduced(const Shape& s, const std::vector<int>& axes, bool keepdim) {
  Shape out;
  for (int i = 0; i < s.rank(); ++i) {
    const bool goes = axes.empty() || std::ranges::count(axes, i) + std::ranges::count(axes, i - s.rank()) > 0;
    if (!goes || keepdim) out.push_back(goes ? 1 : s[i]);
  }
  return out;
}
template <class T, class F>
Array<T> fold(const Array<T>& x, const std::vector<int>& axes, bool keepdim, const T& start, F f) {
  Array<T> y(reduced(x.shape, axes, true));
  std::ranges::fill(y.values, start);
  each(x.shape, [&](const Position& p, Index n) {
    T& into = y[place(y.shape, p)];
    into = f(into, x[n]);
  });
  y.shape = reduced(x.shape, axes, keepdim);
  return y;
}
template <class T> Array<T> sum(const Array<T>& x, const std::vector<int>& axes = {}, bool keepdim = false) {
  return fold(x, axes, keepdim, T(0), [](const T& a, const T& b) { return a + b; });
}
template <class T> Array<T> mean(const Array<T>& x, const std::vector<int>& axes = {}, bool keepdim = false) {
  const Array<T> y = sum(x, axes, keepdim);
  const double count = static_cast<double>(x.size()) / static_cast<double>(y.size());
  return map(y, [&](const T& a) { return a / T(count); });
}
template <class T> Array<T> max(const Array<T>& x, const std::vector<int>& axes = {}, bool keepdim = false) {
  return fold(x, axes, keepdim, T(-HUGE_VAL), [](const T& a, const T& b) { return b > a ? b : a; });
}

template <class T> Array<T> min(const Array<T>& x, const std::vector<int>& axes = {}, bool keepdim = false) {
  return fold(x, axes, keepdim, T(HUGE_VAL), [](const T& a, const T& b) { return b < a ? b : a; });
}
template <class T> Array<T> prod(const Array<T>& x, const std::vector<int>& axes = {}, bool keepdim = false) {
  return fold(x, axes, keepdim, T(1), [](const T& a, const T& b) { return a * b; });
}
template <class T> Array<T> var(const Array<T>& x, const std::vector<int>& axes, bool keepdim, double correction) {
  const Array<T> off = zip(x, mean(x, axes, true), [](const T& a, const T& b) { return (a - b) * (a - b); });
  const Array<T> y = sum(off, axes, keepdim);
  const double count = static_cast<double>(x.size()) / static_cast<double>(y.size()) - correction;
  return map(y, [&](const T& a) { return a / T(count); });
}
template <class T> Array<T> cumsum(const Array<T>& x, int axis) {
  Array<T> y(x.shape);
  each(x.shape, [&](const Position& p, Index n) {
    y[n] = p[axis] == 0 ? x[n] : y[place(y.shape, with(p, axis, p[axis] - 1))] + x[n];
  });
  return y;
}

// ---- along the last axis ------------------------------------------------------------------------
/// f(first element of a row) for each row.
template <class F> void rows(const Shape& s, F f) {
  if (s.numel() == 0) return;
  for (Index at = 0; at < s.numel(); at += s[-1]) f(at);
}
/// The largest of n, as a constant: it shifts, it does not move.
template <class T> T shift(const T* x, Index n) { return T(value_of(*std::max_element(x, x + n))); }

template <class T> Array<T> softmax(const Array<T>& x) {
  Array<T> y(x.shape);
  const Index n = x.shape[-1];
  rows(x.shape, [&](Index at) {
    const T top = shift(&x[at], n);
    T total(0);
    for (Index i = at; i < at + n; ++i) total += y[i] = exp(x[i] - top);
    for (Index i = at; i < at + n; ++i) y[i] = y[i] / total;
  });
  return y;
}
template <class T> Array<T> logsumexp(const Array<T>& x) {
  const Index n = x.shape[-1];
  Array<T> y(reduced(x.shape, {-1}, false));
  rows(x.shape, [&](Index at) {
    const T top = shift(&x[at], n);
    T total(0);
    for (Index i = at; i < at + n; ++i) total += exp(x[i] - top);
    y[at / n] = top + log(total);
  });
  return y;
}
template <class T> Array<T> log_softmax(const Array<T>& x) {
  Array<T> y(x.shape);
  const Index n = x.shape[-1];
  rows(x.shape, [&](Index at) {
    const T top = shift(&x[at], n);
    T total(0);
    for (Index i = at; i < at + n; ++i) total += exp(x[i] - top);
    for (Index i = at; i < at + n; ++i) y[i] = x[i] - top - log(total);
  });
  return y;
}
template <class T>
Array<T> layer_norm(const Array<T>& x, const Array<T>& weight, const Array<T>& bias, double epsilon) {
  Array<T> y(x.shape);
  const Index n = x.shape[-1];
  rows(x.shape, [&](Index at) {
    T mean(0), variance(0);
    for (Index i = at; i < at + n; ++i) mean += x[i];
    mean = mean / T(static_cast<double>(n));
    for (Index i = at; i < at + n; ++i) variance += (x[i] - mean) * (x[i] - mean);
    variance = variance / T(static_cast<double>(n));
    for (Index i = at; i < at + n; ++i)
      y[i] = (x[i] - mean) / sqrt(variance + T(epsilon)) * weight[i - at] + bias[i - at];
  });
  return y;
}
template <class T> Array<T> rms_norm(const Array<T>& x, const Array<T>& weight, double epsilon) {
  Array<T> y(x.shape);
  const Index n = x.shape[-1];
  rows(x.shape, [&](Index at) {
    T square(0);
    for (Index i = at; i < at + n; ++i) square += x[i] * x[i];
    square = square / T(static_cast<double>(n));
    for (Index i = at; i < at + n; ++i) y[i] = x[i] / sqrt(square + T(epsilon)) * weight[i - at];
  });
  return y;
}
/// x [.., L, H, D], a position for each of L.
template <class T> Array<T> rotary(const Array<T>& x, double base, const std::vector<double>& positions) {
  Array<T> y(x.shape);
  const int rank = x.shape.rank();
  const Index half = x.shape[-1] / 2;
  each(x.shape, [&](const Position& p, Index n) {
    const Index d = p[rank - 1];
    if (d >= half) return;
    const double angle =
        positions[p[rank - 3]] * std::pow(base, -2.0 * static_cast<double>(d) / static_cast<double>(2 * half));
    const T cosine = static_cast<T>(std::cos(angle)), sine = static_cast<T>(std::sin(angle));
    y[n] = x[n] * cosine - x[n + half] * sine;
    y[n + half] = x[n] * sine + x[n + half] * cosine;
  });
  return y;
}

// ---- linear algebra -----------------------------------------------------------------------------
template <class T> Array<T> matmul(const Array<T>& a, const Array<T>& b) {
  const auto batches = [](const Shape& s) { return Shape(std::span(s.begin(), s.end() - 2)); };
  Shape shape = broadcast("naive", batches(a.shape), batches(b.shape));
  shape.push_back(a.shape[-2]);
  shape.push_back(b.shape[-1]);
  Array<T> y(shape);
  const int rank = shape.rank();
  each(shape, [&](const Position& p, Index n) {
    for (Index k = 0; k < a.shape[-1]; ++k)
      y[n] += a[place(a.shape, with(p, rank - 1, k), rank)] * b[place(b.shape, with(p, rank - 2, k), rank)];
  });
  return y;
}

// ---- picking and placing ------------------------------------------------------------------------
template <class T> Array<T> gather(const Array<T>& x, int axis, const std::vector<Index>& index) {
  Array<T> y(x.shape.with(axis, static_cast<Index>(index.size())));
  each(y.shape, [&](const Position& p, Index n) { y[n] = x[place(x.shape, with(p, axis, index[p[axis]]))]; });
  return y;
}
template <class T> Array<T> scatter_add(const Array<T>& x, int axis, const std::vector<Index>& index, Index extent) {
  Array<T> y(x.shape.with(axis, extent));
  each(x.shape, [&](const Position& p, Index n) { y[place(y.shape, with(p, axis, index[p[axis]]))] += x[n]; });
  return y;
}
/// index in row-major order of `shape`, that of x but along the axis.
template <class T>
Array<T> take_along(const Array<T>& x, int axis, const std::vector<Index>& index, const Shape& shape) {
  Array<T> y(shape);
  each(shape, [&](const Position& p, Index n) {
    y[n] = x[place(x.shape, with(p, axis, index[static_cast<std::size_t>(n)]))];
  });
  return y;
}
/// ids in row-major order of `shape`.
template <class T> Array<T> embedding(const Array<T>& table, const std::vector<Index>& ids, Shape shape) {
  Array<T> y = gather(table, 0, ids);
  shape.push_back(table.shape[1]);
  y.shape = shape;
  return y;
}
template <class T> Array<T> cat(const Arrays<T>& parts, int axis) {
  Index extent = 0;
  for (const Array<T>& part : parts) extent += part.shape[axis];
  Array<T> y(parts[0].shape.with(axis, extent));
  Index from = 0;
  for (const Array<T>& part : parts) {
    each(part.shape, [&](const Position& p, Index n) { y[place(y.shape, with(p, axis, from + p[axis]))] = part[n]; });
    from += part.shape[axis];
  }
  return y;
}
template <class T> Array<T> slice(const Array<T>& x, int axis, Index begin, Index end, Index step = 1) {
  std::vector<Index> index;
  for (Index i = begin; i < end; i += step) index.push_back(i);
  return gather(x, axis, index);
}
template <class T> Array<T> pad(const Array<T>& x, int axis, Index before, Index after, double value) {
  Array<T> y(x.shape.with(axis, before + x.shape[axis] + after));
  std::ranges::fill(y.values, T(value));
  each(x.shape, [&](const Position& p, Index n) { y[place(y.shape, with(p, axis, before + p[axis]))] = x[n]; });
  return y;
}

// ---- losses -------------------------------------------------------------------------------------
template <class T> Array<T> cross_entropy(const Array<T>& logits, const std::vector<Index>& targets, Index ignore) {
  const Array<T> logs = log_softmax(logits);
  const Index classes = logits.shape[-1];
  Array<T> y{Shape{}};
  double kept = 0;
  for (Index row = 0; row < static_cast<Index>(targets.size()); ++row) {
    const Index target = targets[static_cast<std::size_t>(row)];
    if (target == ignore) continue;
    y[0] = y[0] - logs[row * classes + target];
    ++kept;
  }
  y[0] = y[0] / T(kept);
  return y;
}

template <class T> Array<T> nll(const Array<T>& logs, const std::vector<Index>& targets, Index ignore) {
  Array<T> y{Shape{}};
  double kept = 0;
  for (Index row = 0; row < static_cast<Index>(targets.size()); ++row)
    if (const Index target = targets[static_cast<std::size_t>(row)]; target != ignore)
      y[0] = y[0] - logs[row * logs.shape[-1] + target], ++kept;
  y[0] = y[0] / T(kept);
  return y;
}
template <class T> Array<T> mse(const Array<T>& a, const Array<T>& b) {
  return mean(zip(a, b, [](const T& u, const T& v) { return (u - v) * (u - v); }));
}
template <class T> Array<T> bce(const Array<T>& x, const Array<T>& t) {
  return mean(
      zip(x, t, [](const T& u, const T& v) { return v * log(T(1) + exp(-u)) + (T(1) - v) * log(T(1) + exp(u)); }));
}

// ---- views --------------------------------------------------------------------------------------
template <class T> Array<T> reshape(Array<T> x, const Shape& shape) {
  x.shape = shape;
  return x;
}
template <class T> Array<T> permute(const Array<T>& x, const std::vector<int>& axes) {
  Shape shape;
  for (int a : axes) shape.push_back(x.shape[a]);
  Array<T> y(shape);
  each(shape, [&](const Position& p, Index n) {
    Position from{};
    for (int i = 0; i < shape.rank(); ++i) from[axes[i]] = p[i];
    y[n] = x[place(x.shape, from)];
  });
  return y;
}
template <class T> Array<T> expand(const Array<T>& x, const Shape& shape) {
  return zip(x, Array<T>(shape), [](const T& a, const T&) { return a; });
}

}  // namespace naive
}  // namespace hilt::judge
