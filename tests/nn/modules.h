#pragma once
#include <gtest/gtest.h>
#include <cmath>
#include "core/gradcheck.h"
#include "nn/transformer.h"
#include "ops/ops.h"

// What tests of modules share: gradients with respect to every parameter, and comparisons that say
// where.

namespace hilt {

/// f64 normal numbers.
inline Tensor noise(const Shape& shape, std::uint64_t stream, double scale = 1) {
  return mul(randn(shape, {7, stream}, DType::f64), scale);
}
inline Tensor symbols(const Shape& shape, Index count, std::uint64_t stream) {
  return randint(0, count, shape, {9, stream});
}

/// Every parameter replaced by numbers that no initialisation would give.
template <class Module> Module shaken(Module module, double scale = 0.3) {
  std::uint64_t stream = 100;
  module.visit_parameters(
      "", [&](const std::string&, Tensor& p) { p = add(to(noise(p.shape(), ++stream, scale), p.dtype()), p); });
  return module;
}

/// Central differences over the inputs and every parameter of `module`; call(module, inputs) runs
/// it.
template <class Module, class Call>
GradcheckResult gradcheck_module(const Module& module, const std::vector<Tensor>& inputs, Call call) {
  std::vector<Tensor> all = inputs;
  Module copy = module;
  copy.visit_parameters("", [&](const std::string&, Tensor& p) { all.push_back(p); });
  return gradcheck(
      [&](std::span<const Tensor> in) {
        Module m = module;
        std::size_t i = inputs.size();
        m.visit_parameters("", [&](const std::string&, Tensor& p) { p = in[i++]; });
        return call(m, in.first(inputs.size()));
      },
      all);
}

/// Loss and gradients of every parameter, by name.
struct Slopes {
  double loss = 0;
  std::vector<std::pair<std::string, Tensor>> of;
};
template <class Loss> Slopes slopes_of(Transformer model, Loss loss_of) {
  Tape tape;
  watch_parameters(tape, model);
  const Tensor loss = loss_of(model);
  const Gradients g = tape.backward(loss);
  Slopes s;
  s.loss = loss.item();
  model.visit_parameters("", [&](const std::string& name, Tensor& p) {
    ASSERT_TRUE(g.has(p)) << name;
    s.of.emplace_back(name, g[p]);
  });
  return s;
}

/// The largest difference between two tensors of one shape, relative to the largest number of the
/// second.
inline double distance(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  const std::vector<double> x = a.to_vector(), y = b.to_vector();
  double worst = 0, largest = 1e-300;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!(std::fabs(x[i] - y[i]) <= worst)) worst = std::fabs(x[i] - y[i]);
    largest = std::max(largest, std::fabs(y[i]));
  }
  return worst / largest;
}
inline void expect_close(const Slopes& a, const Slopes& b, double tolerance) {
  EXPECT_NEAR(a.loss, b.loss, tolerance * std::fabs(b.loss));
  ASSERT_EQ(a.of.size(), b.of.size());
  for (std::size_t i = 0; i < a.of.size(); ++i)
    EXPECT_LE(distance(a.of[i].second, b.of[i].second), tolerance) << a.of[i].first;
}
inline void expect_same_bits(const Slopes& a, const Slopes& b) {
  EXPECT_EQ(a.loss, b.loss);
  ASSERT_EQ(a.of.size(), b.of.size());
  for (std::size_t i = 0; i < a.of.size(); ++i)
    EXPECT_EQ(a.of[i].second.to_vector(), b.of[i].second.to_vector()) << a.of[i].first;
}

}  // namespace hilt
