// Optimiser steps and gradient clipping: they write to parameters, so no tape listens.
//
//      adamw   m = b1 m + (1 - b1) dw        v = b2 v + (1 - b2) dw^2
//              w = w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)
//      sgd     g = dw + decay w              u = momentum u + g               w = w - lr u
#include <cmath>
#include <limits>
#include "core/parallel.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

constexpr Index kPiece = 1 << 14;

void check_state(const char* op, const char* name, const Tensor& state, const Tensor& w, DType dtype) {
  check(bool(state) && state.shape() == w.shape() && state.dtype() == dtype && state.device() == w.device() && state.is_contiguous(), op, ": ", name,
        " must be a dense ", dtype, w.shape(), " on ", w.device(), ", got ", state.dtype(), state.shape());
}

void check_parameter(const char* op, const Tensor& w, const Tensor& dw) {
  check_alike(op, "w", w, "dw", dw);
  check(w.shape() == dw.shape(), op, ": w is ", w.shape(), ", its gradient is ", dw.shape());
  check(w.is_contiguous(), op, ": w ", w.shape(), " must be dense: it is written in place");
}

double sum_of_squares(const Tensor& in) {
  const Tensor x = dense(in);
  const Index pieces = (x.numel() + kPiece - 1) / kPiece;
  std::vector<double> part(static_cast<std::size_t>(pieces));
  visit("global_norm", x, [&]<class T>(auto where) {
    const T* const p = x.data<T>();
    if constexpr (is_cuda<decltype(where)>) {
      Tensor sums = empty({pieces}, DType::f64, x.device());
      kernels::sums_of_squares(where, p, sums.mutable_data<double>(), x.numel(), kPiece);
      part = sums.to_vector();
    } else
    parallel_for(pieces, 1, [&](Index begin, Index end) {
      for (Index i = begin; i < end; ++i)
        part[static_cast<std::size_t>(i)] = kernels::sum_of_squares(where, p + i * kPiece, std::min(kPiece, x.numel() - i * kPiece));
    });
  });
  double total = 0;
  for (double s : part) total += s;
  return total;
}

}  // namespace

void adamw_step(Tensor& w, const Tensor& gradient, Tensor& m, Tensor& v, Index step, const AdamW& o, Tensor* master) {
  check_parameter("adamw_step", w, gradient);
  const bool narrow = size_of(w.dtype()) == 2;
  const DType state = narrow ? DType::f32 : w.dtype();
  check_state("adamw_step", "m", m, w, state);
  check_state("adamw_step", "v", v, w, state);
  check(!master || narrow, "adamw_step: a master copy is for 16-bit parameters, w is ", w.dtype());
  if (master) check_state("adamw_step", "master", *master, w, state);
  check(step >= 1, "adamw_step: step ", step, " must count from 1");
  check(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "adamw_step: betas ", o.beta1, " and ", o.beta2, " must be in [0, 1)");
  const Tensor dw = dense(gradient);
  const auto t = static_cast<double>(step);
  const kernels::AdamWStep s{o.lr, o.beta1, o.beta2, o.epsilon, o.lr * o.weight_decay,
                             1 / (1 - std::pow(o.beta1, t)), 1 / (1 - std::pow(o.beta2, t))};
  visit("adamw_step", w, [&]<class T>(auto where) {
    using W = wide_t<T>;
    T* const pw = w.mutable_data<T>();
    const T* const pg = dw.data<T>();
    W *const pm = m.mutable_data<W>(), *const pv = v.mutable_data<W>();
    W* const exact = master ? master->mutable_data<W>() : nullptr;
    if constexpr (is_cuda<decltype(where)>) kernels::adamw(where, s, pw, pg, pm, pv, exact, w.numel());
    else parallel_for(w.numel(), kPiece, [&](Index begin, Index end) {
      kernels::adamw(where, s, pw + begin, pg + begin, pm + begin, pv + begin, exact ? exact + begin : nullptr, end - begin);
    });
  });
}

void sgd_step(Tensor& w, const Tensor& gradient, double lr, double weight_decay, double momentum, Tensor* velocity) {
  check_parameter("sgd_step", w, gradient);
  check(momentum >= 0 && momentum < 1, "sgd_step: momentum ", momentum, " must be in [0, 1)");
  check((momentum > 0) == (velocity != nullptr), "sgd_step: momentum ", momentum, velocity ? " makes no use of a velocity" : " needs a velocity");
  const Tensor dw = dense(gradient);
  if (velocity) check_state("sgd_step", "velocity", *velocity, w, size_of(w.dtype()) == 2 ? DType::f32 : w.dtype());
  visit("sgd_step", w, [&]<class T>(auto where) {
    using W = wide_t<T>;
    T* const pw = w.mutable_data<T>();
    const T* const pg = dw.data<T>();
    W* const pu = velocity ? velocity->mutable_data<W>() : nullptr;
    if constexpr (is_cuda<decltype(where)>) kernels::sgd(where, lr, weight_decay, momentum, pw, pg, pu, w.numel());
    else parallel_for(w.numel(), kPiece, [&](Index begin, Index end) {
      kernels::sgd(where, lr, weight_decay, momentum, pw + begin, pg + begin, pu ? pu + begin : nullptr, end - begin);
    });
  });
}

double global_norm(std::span<const Tensor> gradients) {
  double total = 0;
  for (const Tensor& g : gradients) total += sum_of_squares(g);
  return std::sqrt(total);
}

double clip_grad_norm(std::span<Tensor> gradients, double max_norm) {
  check(max_norm > 0, "clip_grad_norm: max_norm ", max_norm, " must be positive");
  const double norm = global_norm(gradients);
  if (!std::isfinite(norm)) {
    std::size_t i = 0;
    while (i < gradients.size() && std::isfinite(sum_of_squares(gradients[i]))) ++i;
    fail_with(Code::not_a_number, "clip_grad_norm: the norm is ", norm, "; the first gradient that is not finite is number ", i,
              i < gradients.size() ? ", of shape " : "", i < gradients.size() ? gradients[i].shape() : Shape{});
  }
  if (norm > max_norm)
    for (Tensor& g : gradients) g = mul(g, max_norm / norm);
  return norm;
}

}  // namespace hilt
