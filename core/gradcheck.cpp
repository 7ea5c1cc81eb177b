// f has inputs x and output y, c is a random cotangent of y's shape:
//   numeric   (<c, f(x + h e)> - <c, f(x - h e)>) / 2 h      for each element e that an input shows
//   analytic  what Tape::backward(y, c) gives, added up over all inputs that show e
#include "core/gradcheck.h"
#include <cmath>
#include "core/random.h"
#include "core/strided.h"

namespace hilt {
namespace {

struct Moved {  // a number in the user's memory that moves, and is put back whatever happens
  double& x;
  const double old;
  ~Moved() { x = old; }
};

struct Analytic {  // what gradients of all inputs on one storage say of its elements, and which they show
  std::vector<double> derivative;
  std::vector<bool> shown;

  Analytic(const Storage& storage, const std::vector<Tensor>& inputs, const Gradients& g)
      : derivative(storage.bytes() / sizeof(double)), shown(derivative.size()) {
    std::vector<TensorId> counted;  // one tensor given twice has one gradient
    for (const Tensor& x : inputs) {
      if (x.storage() != storage || std::ranges::find(counted, x.id()) != counted.end()) continue;
      counted.push_back(x.id());
      const std::vector<double> dx = g.has(x) ? g[x].to_vector() : zeros_like(x).to_vector();
      const Runs<1> runs(x.shape(), {x.strides()});
      runs.for_rows(0, runs.rows, [&, from = dx.begin()](const auto& at) mutable {
        for (Index i = 0; i < runs.run; ++i) {
          const auto e = static_cast<std::size_t>(x.offset() + at[0] + i * runs.step[0]);
          derivative[e] += *from++, shown[e] = true;
        }
      });
    }
  }
};

}  // namespace

GradcheckResult gradcheck(const Composite& fn, const std::vector<Tensor>& inputs, const GradcheckOptions& options) {
  for (const Tensor& x : inputs) {
    check(bool(x), "gradcheck: undefined input");
    check(x.dtype() == DType::f64, "gradcheck: inputs must be f64, got ", x.dtype(),
          "; convert with to(x, DType::f64)");
  }
  check(options.step > 0, "gradcheck: step ", options.step, " must be above 0");
  const Tape::Pause alone;  // a tape around it records nothing, not even that a gradient was made
  Tape tape;
  for (const Tensor& x : inputs) tape.watch(x);
  const Tensor y = fn(inputs);
  const Tensor c = randn(y.shape(), {options.seed, 0}, DType::f64);
  const Gradients g = tape.backward(y, c);

  const Tape::Pause pause;
  const std::vector<double> cotangent = c.to_vector();
  const auto values = [&] { return fn(inputs).to_vector(); };
  {
    const std::vector<double> once = y.to_vector(), again = values();
    check(std::ranges::equal(once, again, [](double a, double b) { return a == b || (a != a && b != b); }),
          "gradcheck: fn gave two results for the same inputs; draw its random numbers from one key");
  }

  GradcheckResult result;
  for (std::size_t n = 0; n < inputs.size(); ++n) {
    Tensor x = inputs[n];
    const auto same = [&](const Tensor& other) { return other.storage() == x.storage(); };
    if (std::any_of(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(n), same)) continue;  // done already
    const Analytic analytic(x.storage(), inputs, g);
    double* const data = x.mutable_data<double>() - x.offset();
    for (std::size_t e = 0; e < analytic.shown.size(); ++e) {
      if (!analytic.shown[e]) continue;
      const Moved moved{data[e], data[e]};
      const double above = moved.old + options.step, below = moved.old - options.step;
      moved.x = above;
      const std::vector<double> up = values();
      moved.x = below;
      const std::vector<double> down = values();
      double change = 0;
      for (std::size_t i = 0; i < cotangent.size(); ++i) change += cotangent[i] * (up[i] - down[i]);
      const double numeric = change / (above - below), got = analytic.derivative[e];
      const double ratio = std::abs(got - numeric) / (options.absolute + options.relative * std::abs(numeric));
      ++result.checked;
      if (!(ratio <= 1)) result.ok = false;
      if (ratio <= result.worst || std::isnan(result.worst)) continue;
      result.worst = ratio;
      TextStream where;
      where.precision(12);
      where << "input " << n << ' ' << x.shape() << ", element " << e << " of its storage: analytic " << got
            << ", numeric " << numeric;
      result.where = where.str();
    }
  }
  return result;
}

}  // namespace hilt
