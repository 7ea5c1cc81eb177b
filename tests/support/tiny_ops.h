#pragma once
#include <cmath>
#include <span>
#include <vector>
#include "core/random.h"
#include "core/tape.h"

// The smallest differentiable ops, enough to build any graph: for tests of the tape that must not
// depend on ops/. Each returns its gradients the awkward way that some real op does.

namespace hilt::tiny {

template <class F> Tensor map(const Tensor& x, F f) {
  std::vector<double> v = x.to_vector();
  for (double& e : v) e = f(e);
  return from_values(v, x.shape(), x.dtype());
}
template <class F> Tensor zip(const Tensor& a, const Tensor& b, F f) {
  std::vector<double> v = a.to_vector();
  const std::vector<double> w = b.to_vector();
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = f(v[i], w[i]);
  return from_values(v, a.shape(), a.dtype());
}
inline Tensor times(const Tensor& a, const Tensor& b) {
  return zip(a, b, [](double x, double y) { return x * y; });
}

/// a + b; hands one tensor to both inputs.
struct Add final : Function {
  std::string_view name() const override { return "add"; }
  Tensor forward(const Tensor& a, const Tensor& b) {
    return zip(a, b, [](double x, double y) { return x + y; });
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {dy, dy}; }
};
inline Tensor add(const Tensor& a, const Tensor& b) { return apply(Add{}, a, b); }

/// a b; saves what the wanted gradients need and no more.
struct Mul final : Function {
  std::string_view name() const override { return "mul"; }
  Tensor forward(const Tensor& a, const Tensor& b) {
    if (wants(0)) save(b);
    if (wants(1)) save(a);
    return times(a, b);
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    return {wants(0) ? times(dy, saved(0)) : Tensor{}, wants(1) ? times(dy, saved(wants(0) ? 1 : 0)) : Tensor{}};
  }
};
inline Tensor mul(const Tensor& a, const Tensor& b) { return apply(Mul{}, a, b); }

/// c x; saves nothing.
struct Scale final : Function {
  double c = 1;

  explicit Scale(double factor) : c(factor) {}
  std::string_view name() const override { return "scale"; }
  Tensor forward(const Tensor& x) {
    return map(x, [this](double e) { return c * e; });
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {forward(dy)}; }
};
inline Tensor scale(const Tensor& x, double c) { return apply(Scale(c), x); }

/// x^2; saves its input.
struct Square final : Function {
  std::string_view name() const override { return "square"; }
  Tensor forward(const Tensor& x) {
    if (wants(0)) save(x);
    return times(x, x);
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    return {zip(dy, saved(0), [](double d, double x) { return 2 * x * d; })};
  }
};
inline Tensor square(const Tensor& x) { return apply(Square{}, x); }

/// e^x; saves its output.
struct Exp final : Function {
  std::string_view name() const override { return "exp"; }
  Tensor forward(const Tensor& x) {
    const Tensor y = map(x, [](double e) { return std::exp(e); });
    if (wants(0)) save(y);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {times(dy, saved(0))}; }
};
inline Tensor exp(const Tensor& x) { return apply(Exp{}, x); }

/// The sum of all elements, rank 0; its gradient is one number repeated by strides of zero.
struct Sum final : Function {
  Shape shape;
  std::string_view name() const override { return "sum"; }
  Tensor forward(const Tensor& x) {
    shape = x.shape();
    double s = 0;
    for (double e : x.to_vector()) s += e;
    return full({}, s, x.dtype());
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {broadcast_to("sum", dy, shape)}; }
};
inline Tensor sum(const Tensor& x) { return apply(Sum{}, x); }

/// A matrix with its axes exchanged: a view, and so is its gradient.
struct Transpose final : Function {
  std::string_view name() const override { return "transpose"; }
  Tensor forward(const Tensor& x) {
    return as_strided(x, {x.dim(1), x.dim(0)}, {x.stride(1), x.stride(0)}, x.offset());
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {forward(dy)}; }
};
inline Tensor transpose(const Tensor& x) { return apply(Transpose{}, x); }

/// The sum of any number of tensors; each input gets the incoming gradient itself.
struct Total final : Function {
  std::size_t inputs = 0;
  std::string_view name() const override { return "total"; }
  Tensor forward(std::span<const Tensor> in) {
    inputs = in.size();
    Tensor y = clone(in[0]);
    for (const Tensor& t : in.subspan(1)) y = zip(y, t, [](double x, double e) { return x + e; });
    return y;
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return std::vector<Tensor>(inputs, dy); }
};
inline Tensor total(std::span<const Tensor> in) {
  return hilt::apply(Total{}, in);
}  // unqualified, a span would find std::apply

/// <w, x> for weights w that get no gradient; hands out the saved w itself, which is only right for
/// a cotangent of 1.
struct Dot final : Function {
  std::string_view name() const override { return "dot"; }
  Tensor forward(const Tensor& x, const Tensor& w) {
    save(w);
    double s = 0;
    for (double e : times(x, w).to_vector()) s += e;
    return full({}, s, x.dtype());
  }
  std::vector<Tensor> backward(const Tensor&) override { return {saved(0), Tensor{}}; }
};
inline Tensor dot(const Tensor& x, const Tensor& w) { return apply(Dot{}, x, w); }

/// Zeroes about half of x and doubles the rest, by numbers that depend on key alone.
struct Drop final : Function {
  RandomKey key;
  explicit Drop(RandomKey k) : key(k) {}
  std::string_view name() const override { return "drop"; }
  Tensor forward(const Tensor& x) {
    return zip(x, rand(x.shape(), key, DType::f64), [](double e, double u) { return u < 0.5 ? 0 : 2 * e; });
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {forward(dy)}; }
};
inline Tensor drop(const Tensor& x, RandomKey key) { return apply(Drop(key), x); }
inline Tensor drop(const Tensor& x, Generator& g) { return drop(x, g.next()); }

inline Tensor vec(std::vector<double> v, DType dtype = DType::f64) {
  return from_values(v, {static_cast<Index>(v.size())}, dtype);
}

}  // namespace hilt::tiny
