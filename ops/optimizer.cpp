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

/// Of each tensor; those on a GPU are waited for once.
std::vector<double> sums_of_squares(std::span<const Tensor> all) {
  const auto pieces_of = [](const Tensor& x) { return (x.numel() + kPiece - 1) / kPiece; };
  Index most = 0;
  for (const Tensor& x : all) {
    check(bool(x) && x.device() == all[0].device(), "global_norm: gradients must be tensors on one device");
    most += pieces_of(x);
  }
  std::vector<double> part(static_cast<std::size_t>(most)), out;
  std::vector<kernels::SquaresPart> on_gpu;  // of one type
  std::vector<Tensor> kept;                  // until their kernel has been started
  Tensor sums;
  Index first = 0, started = 0;
  for (std::size_t k = 0; k < all.size(); ++k) {
    const Tensor x = dense(all[k]);
    visit("global_norm", x, [&]<class T>(auto where) {
      const T* const p = x.data<T>();
      if constexpr (is_cuda<decltype(where)>) {
        if (!sums) sums = empty({most}, DType::f64, x.device());
        on_gpu.push_back({p, x.numel()});
        kept.push_back(x);
        if (k + 1 < all.size() && all[k + 1].dtype() == x.dtype()) return;
        kernels::sums_of_squares<T>(where, on_gpu, sums.mutable_data<double>() + started, kPiece);
        started = first + pieces_of(x);
        on_gpu.clear(), kept.clear();
      } else {
        parallel_for(pieces_of(x), 1, [&](Index begin, Index end) {
          for (Index i = begin; i < end; ++i)
            part[static_cast<std::size_t>(first + i)] = kernels::sum_of_squares(where, p + i * kPiece, std::min(kPiece, x.numel() - i * kPiece));
        });
      }
    });
    first += pieces_of(x);
  }
  if (sums) part = sums.to_vector();
  auto next = part.begin();
  for (const Tensor& x : all) {
    out.push_back(0);
    for (Index i = 0; i < pieces_of(x); ++i) out.back() += *next++;
  }
  return out;
}

}  // namespace

void adamw_step(Tensor& w, const Tensor& dw, Tensor& m, Tensor& v, Index step, const AdamW& o, Tensor* master) {
  const AdamWUpdate one{&w, dw, &m, &v, master, o.weight_decay};
  adamw_step({&one, 1}, step, o);
}

void adamw_step(std::span<const AdamWUpdate> updates, Index step, const AdamW& o) {
  for (const AdamWUpdate& u : updates) {
    check_parameter("adamw_step", *u.w, u.dw);
    const bool narrow = size_of(u.w->dtype()) == 2;
    const DType state = narrow ? DType::f32 : u.w->dtype();
    check_state("adamw_step", "m", *u.m, *u.w, state);
    check_state("adamw_step", "v", *u.v, *u.w, state);
    check(!u.master || narrow, "adamw_step: a master copy is for 16-bit parameters, w is ", u.w->dtype());
    if (u.master) check_state("adamw_step", "master", *u.master, *u.w, state);
  }
  check(step >= 1, "adamw_step: step ", step, " must count from 1");
  check(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "adamw_step: betas ", o.beta1, " and ", o.beta2, " must be in [0, 1)");
  const auto t = static_cast<double>(step);
  kernels::AdamWStep s{o.lr, o.beta1, o.beta2, o.epsilon, 0, 1 / (1 - std::pow(o.beta1, t)), 1 / (1 - std::pow(o.beta2, t))};
  // All memory is there before the first number is written: without it, nothing has changed.
  std::vector<Tensor> gradients;
  for (const AdamWUpdate& u : updates) gradients.push_back(dense(u.dw));
  std::vector<kernels::AdamWPart> parts;  // of one type, on one GPU
  parts.reserve(updates.size());
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const AdamWUpdate& u = updates[i];
    Tensor& w = *u.w;
    s.shrink = o.lr * u.weight_decay;
    visit("adamw_step", w, [&]<class T>(auto where) {
      using W = wide_t<T>;
      T* const pw = w.mutable_data<T>();
      const T* const pg = gradients[i].data<T>();
      W *const pm = u.m->mutable_data<W>(), *const pv = u.v->mutable_data<W>();
      W* const exact = u.master ? u.master->mutable_data<W>() : nullptr;
      if constexpr (is_cuda<decltype(where)>) {
        parts.push_back({pw, pg, pm, pv, exact, w.numel(), s.shrink});
        if (i + 1 < updates.size() && updates[i + 1].w->dtype() == w.dtype() && updates[i + 1].w->device() == w.device()) return;
        kernels::adamw<T>(where, s, parts);
        parts.clear();
      } else {
        parallel_for(w.numel(), kPiece, [&](Index begin, Index end) {
          kernels::adamw(where, s, pw + begin, pg + begin, pm + begin, pv + begin, exact ? exact + begin : nullptr, end - begin);
        });
      }
    });
  }
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
  for (double s : sums_of_squares(gradients)) total += s;
  return std::sqrt(total);
}

double clip_grad_norm(std::span<Tensor> gradients, double max_norm) {
  check(max_norm > 0, "clip_grad_norm: max_norm ", max_norm, " must be positive");
  const double norm = global_norm(gradients);
  if (!std::isfinite(norm)) {
    std::size_t i = 0;
    for (double s : sums_of_squares(gradients)) {
      if (!std::isfinite(s)) break;
      ++i;
    }
    fail_with(Code::not_a_number, "clip_grad_norm: the norm is ", norm, "; the first gradient that is not finite is number ", i,
              i < gradients.size() ? ", of shape " : "", i < gradients.size() ? gradients[i].shape() : Shape{});
  }
  if (norm > max_norm)
    for (Tensor& g : gradients) g = mul(g, max_norm / norm);
  return norm;
}

}  // namespace hilt
