#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

// The model of names.h on a plain tape of numbers, one node each, as small programs do it. It knows
// nothing of Hilt.

namespace scalar {

using Number = int;  // where on the tape it stands
using Row = std::vector<Number>;

struct Tape {
  struct Node {
    Number a, b;
    double by_a, by_b;  // what a change of a, or of b, changes
  };
  std::vector<Node> nodes;
  std::vector<double> value, grad;

  Number put(double v, Number a = 0, double by_a = 0, Number b = 0, double by_b = 0) {
    nodes.push_back({a, b, by_a, by_b}), value.push_back(v);
    return static_cast<Number>(value.size()) - 1;
  }
  double of(Number x) const { return value[static_cast<std::size_t>(x)]; }
  Number add(Number a, Number b) { return put(of(a) + of(b), a, 1, b, 1); }
  Number mul(Number a, Number b) { return put(of(a) * of(b), a, of(b), b, of(a)); }
  Number scale(Number a, double c) { return put(of(a) * c, a, c); }
  Number power(Number a, double p) { return put(std::pow(of(a), p), a, p * std::pow(of(a), p - 1)); }
  Number exp(Number a) { return put(std::exp(of(a)), a, std::exp(of(a))); }
  Number log(Number a) { return put(std::log(of(a)), a, 1 / of(a)); }
  Number relu(Number a) { return put(std::max(of(a), 0.0), a, of(a) > 0); }
  Number sum(const Row& x) {
    Number s = x[0];
    for (std::size_t i = 1; i < x.size(); ++i) s = add(s, x[i]);
    return s;
  }
  void backward(Number loss) {
    grad.assign(value.size(), 0), grad[static_cast<std::size_t>(loss)] = 1;
    for (std::size_t i = nodes.size(); i-- > 0;) {
      grad[static_cast<std::size_t>(nodes[i].a)] += nodes[i].by_a * grad[i];
      grad[static_cast<std::size_t>(nodes[i].b)] += nodes[i].by_b * grad[i];
    }
  }
};

struct Model {
  static constexpr int kWidth = 16, kHeads = 4, kPositions = 16, kDim = kWidth / kHeads;
  Tape t;
  std::vector<Number> first;  // of each matrix
  std::vector<int> columns;
  std::vector<double> m, v;
  int steps = 0;

  Model(const std::vector<std::vector<float>>& start, const std::int64_t* wide) {
    for (const auto& w : start) {
      first.push_back(static_cast<Number>(t.value.size())), columns.push_back(static_cast<int>(*wide++));
      for (const float x : w) t.put(x);
    }
    m.resize(t.value.size()), v.resize(t.value.size());
  }
  Number weight(int w, int i, int j) const {
    const auto of = static_cast<std::size_t>(w);
    return first[of] + i * columns[of] + j;
  }
  template <class F> static Row row(int n, F f) {
    Row y(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) y[static_cast<std::size_t>(i)] = f(i);
    return y;
  }
  static int size(const Row& x) { return static_cast<int>(x.size()); }
  Row add(const Row& a, const Row& b) {
    return row(size(a), [&](int i) { return t.add(a[static_cast<std::size_t>(i)], b[static_cast<std::size_t>(i)]); });
  }
  Row times(const Row& x, int w) {
    return row(columns[static_cast<std::size_t>(w)], [&](int j) {
      return t.sum(row(size(x), [&](int i) { return t.mul(x[static_cast<std::size_t>(i)], weight(w, i, j)); }));
    });
  }
  Row norm(const Row& x) {
    const Number squares = t.sum(row(size(x), [&](int i) { return t.power(x[static_cast<std::size_t>(i)], 2); }));
    const Number by = t.power(t.add(t.scale(squares, 1.0 / size(x)), t.put(1e-5)), -0.5);
    return row(size(x), [&](int i) { return t.mul(x[static_cast<std::size_t>(i)], by); });
  }
  Row softmax(const Row& x) {
    double top = t.of(x[0]);
    for (const Number n : x) top = std::max(top, t.of(n));
    const Number less = t.put(-top);
    const Row e = row(size(x), [&](int i) { return t.exp(t.add(x[static_cast<std::size_t>(i)], less)); });
    const Number by = t.power(t.sum(e), -1);
    return row(size(x), [&](int i) { return t.mul(e[static_cast<std::size_t>(i)], by); });
  }

  /// One step; the loss before it.
  double step(const std::vector<std::int32_t>& name, double lr) {
    const std::size_t weights = m.size();
    t.nodes.resize(weights), t.value.resize(weights);
    std::vector<Row> qkv;
    Row losses;
    const int n = std::min(static_cast<int>(name.size()) - 1, kPositions);
    for (int p = 0; p < n; ++p) {
      const int letter = name[static_cast<std::size_t>(p)], next = name[static_cast<std::size_t>(p) + 1];
      Row x = norm(row(kWidth, [&](int i) { return t.add(weight(0, letter, i), weight(1, p, i)); }));
      qkv.push_back(times(norm(x), 2));
      const auto part = [&](int of, int which, int i) {
        return qkv[static_cast<std::size_t>(of)][static_cast<std::size_t>(which * kWidth + i)];
      };
      Row a;
      for (int h = 0; h < kHeads; ++h) {
        const Row chance = softmax(row(p + 1, [&](int u) {
          const auto pair = [&](int i) { return t.mul(part(p, 0, h * kDim + i), part(u, 1, h * kDim + i)); };
          return t.scale(t.sum(row(kDim, pair)), 1 / std::sqrt(kDim));
        }));
        for (int i = 0; i < kDim; ++i)
          a.push_back(t.sum(
              row(p + 1, [&](int u) { return t.mul(chance[static_cast<std::size_t>(u)], part(u, 2, h * kDim + i)); })));
      }
      x = add(x, times(a, 3));
      Row up = times(norm(x), 4);
      for (Number& i : up) i = t.relu(i);
      x = add(x, times(up, 5));
      losses.push_back(t.scale(t.log(softmax(times(x, 6))[static_cast<std::size_t>(next)]), -1.0 / n));
    }
    const Number loss = t.sum(losses);
    t.backward(loss);
    ++steps;
    for (std::size_t i = 0; i < weights; ++i) {
      m[i] = 0.85 * m[i] + 0.15 * t.grad[i], v[i] = 0.99 * v[i] + 0.01 * t.grad[i] * t.grad[i];
      t.value[i] -= lr * (m[i] / (1 - std::pow(0.85, steps))) / (std::sqrt(v[i] / (1 - std::pow(0.99, steps))) + 1e-8);
    }
    return t.of(loss);
  }
};

}  // namespace scalar
