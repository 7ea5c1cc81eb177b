#include "core/gradcheck.h"
#include <cmath>
#include <sstream>
#include "core/random.h"

namespace hilt {
namespace {

double dot(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to_vector<double>(), y = b.to_vector<double>();
  double s = 0;
  for (std::size_t i = 0; i < x.size(); ++i) s += x[i] * y[i];
  return s;
}

/// The storage element behind the k-th element of x in row-major order.
Index element(const Tensor& x, Index k) {
  Index at = x.offset();
  for (int axis = x.rank() - 1; axis >= 0; --axis) {
    at += k % x.dim(axis) * x.stride(axis);
    k /= x.dim(axis);
  }
  return at;
}

}  // namespace

GradcheckResult gradcheck(const Composite& fn, const std::vector<Tensor>& inputs, const GradcheckOptions& options) {
  for (const Tensor& x : inputs) check(x.dtype() == DType::f64, "gradcheck: inputs must be f64, got ", x.dtype());
  Tape tape;
  for (const Tensor& x : inputs) tape.watch(x);
  const Tensor y = fn(inputs);
  const Tensor dy = randn(y.shape(), {options.seed, 0}, DType::f64);
  const Gradients g = tape.backward(y, dy);

  GradcheckResult result;
  const Tape::Pause pause;
  for (std::size_t n = 0; n < inputs.size(); ++n) {
    // What moves is a storage element. Gradients of all inputs that show it (the same tensor again, a view, a repeat) add up.
    Tensor x = inputs[n];
    bool seen = false;
    for (std::size_t m = 0; m < n; ++m) seen = seen || inputs[m].storage() == x.storage();
    if (seen || x.numel() == 0) continue;
    const auto elements = static_cast<Index>(x.storage().bytes() / sizeof(double));
    std::vector<double> analytic(static_cast<std::size_t>(elements));
    std::vector<bool> shown(analytic.size());
    std::vector<TensorId> counted;
    for (const Tensor& other : inputs) {
      if (other.storage() != x.storage() || std::find(counted.begin(), counted.end(), other.id()) != counted.end()) continue;
      counted.push_back(other.id());
      const std::vector<double> d = g.has(other) ? g[other].to_vector<double>() : std::vector<double>(static_cast<std::size_t>(other.numel()));
      for (Index k = 0; k < other.numel(); ++k) {
        analytic[static_cast<std::size_t>(element(other, k))] += d[static_cast<std::size_t>(k)];
        shown[static_cast<std::size_t>(element(other, k))] = true;
      }
    }
    double* const data = x.mutable_data<double>() - x.offset();
    for (Index e = 0; e < elements; ++e) {
      if (!shown[static_cast<std::size_t>(e)]) continue;
      const double old = data[e];
      data[e] = old + options.step;
      const double up = dot(fn(inputs), dy);
      data[e] = old - options.step;
      const double down = dot(fn(inputs), dy);
      data[e] = old;
      const double numeric = (up - down) / (2 * options.step), got = analytic[static_cast<std::size_t>(e)];
      const double ratio = std::abs(got - numeric) / (options.absolute + options.relative * std::abs(numeric));
      ++result.checked;
      if (ratio <= result.worst) continue;
      result.worst = ratio;
      std::ostringstream where;
      where << "input " << n << " " << x.shape() << ", storage element " << e << ": analytic " << got << ", numeric " << numeric;
      result.where = where.str();
      if (!(ratio <= 1)) result.ok = false;
    }
  }
  return result;
}

}  // namespace hilt
