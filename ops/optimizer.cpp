// Optimiser steps and gradient clipping: they write to parameters, so no tape listens.
//      adamw   m = b1 m + (1 - b1) dw        v = b2 v + (1 - b2) dw^2
//              w = w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)
#include <cmath>
#include <numeric>
#include "core/strided.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {

constexpr Index kSquares = 1 << 14;

static void check_state(const char* op, const char* name, const Tensor& state, const Tensor& w, DType dtype) {
  check(bool(state) && state.shape() == w.shape() && state.dtype() == dtype && state.device() == w.device() &&
            state.is_contiguous(),
        op, ": ", name, " must be a dense ", dtype, w.shape(), " on ", w.device(), ", got ", state.dtype(),
        state.shape());
}

static void check_rate(const char* op, double lr, double weight_decay) {
  check(std::isfinite(lr) && lr >= 0, op, ": learning rate ", lr, " must be finite and not negative");
  check(std::isfinite(weight_decay) && weight_decay >= 0, op, ": weight decay ", weight_decay,
        " must be finite and not negative");
}

static void check_parameter(const char* op, const Tensor& w, const Tensor& dw) {
  check_alike(op, "w", w, "dw", dw);
  check(w.shape() == dw.shape(), op, ": w is ", w.shape(), ", its gradient is ", dw.shape());
  check(w.is_contiguous(), op, ": w ", w.shape(), " must be dense: it is written in place");
}

void adamw_step(Tensor& w, const Tensor& dw, Tensor& m, Tensor& v, Index step, const AdamW& o, Tensor* master) {
  const AdamWUpdate one{&w, dw, &m, &v, master, o.weight_decay};
  adamw_step({&one, 1}, step, o);
}

void adamw_step(std::span<const AdamWUpdate> updates, Index step, const AdamW& o, const Clip& clip) {
  check_rate("adamw_step", o.lr, o.weight_decay);
  for (const AdamWUpdate& u : updates) {
    check_rate("adamw_step", o.lr, u.weight_decay);
    check_parameter("adamw_step", *u.w, u.dw);
    const bool narrow = size_of(u.w->dtype()) == 2;
    const DType state = narrow ? DType::f32 : u.w->dtype();
    check_state("adamw_step", "m", *u.m, *u.w, state);
    check_state("adamw_step", "v", *u.v, *u.w, state);
    check(!u.master || narrow, "adamw_step: a master copy is for 16-bit parameters, w is ", u.w->dtype());
    if (u.master) check_state("adamw_step", "master", *u.master, *u.w, state);
  }
  check(step >= 1, "adamw_step: step ", step, " must count from 1");
  check(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "adamw_step: betas ", o.beta1, " and ", o.beta2,
        " must be in [0, 1)");
  check(std::isfinite(o.epsilon) && o.epsilon >= 0, "adamw_step: epsilon ", o.epsilon,
        " must be finite and not negative");
  check(clip.max >= 0, "adamw_step: the largest norm ", clip.max, " must not be negative");
  check(std::isfinite(clip.scale) && clip.scale > 0, "adamw_step: the scale ", clip.scale, " must be positive");
  check(clip.max == 0 || clip.norm, "adamw_step: to clip to ", clip.max, " it needs the norm (norm_of)");
  for (const AdamWUpdate& u : updates)
    check(!clip.norm ||
              (clip.norm.numel() == 1 && clip.norm.dtype() == DType::f64 && clip.norm.device() == u.w->device()),
          "adamw_step: the norm must be one f64 on ", u.w->device());
  const auto t = static_cast<double>(step);
  kernels::AdamWStep s{
      o.lr,          o.beta1, o.beta2, o.epsilon, 0, 1 / (1 - std::pow(o.beta1, t)), 1 / (1 - std::pow(o.beta2, t)),
      1 / clip.scale};
  if (clip.norm && clip.norm.device().is_cpu()) {
    const double norm = clip.norm.item();
    if (!std::isfinite(norm)) return;
    if (clip.max > 0 && norm * s.scale > clip.max) s.scale = clip.max / norm;
  }
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
        if (i + 1 < updates.size() && updates[i + 1].w->dtype() == w.dtype() &&
            updates[i + 1].w->device() == w.device())
          return;
        kernels::adamw_all<T>(where, s, clip.norm ? clip.norm.data<double>() : nullptr, clip.max, parts);
        parts.clear();
      } else {
        parallel_for(w.numel(), kSquares, [&](Index begin, Index end) {
          kernels::adamw(where, s, pw + begin, pg + begin, pm + begin, pv + begin, exact ? exact + begin : nullptr,
                         end - begin);
        });
      }
    });
  }
}

// Pieces are summed one by one, and their sums in order: the same for any number of threads.
Tensor norm_of(std::span<const Tensor> all, const Tensor& loss) {
  const Device device = !all.empty() ? all[0].device() : loss ? loss.device() : Device{};
  const auto pieces_of = [](const Tensor& x) { return (x.numel() + kSquares - 1) / kSquares; };
  Index pieces = 0;
  for (const Tensor& x : all) {
    check(bool(x) && x.device() == device, "global_norm: gradients must be tensors on one device");
    pieces += pieces_of(x);
  }
  Tensor sums = empty({pieces}, DType::f64, device), norm = empty({}, DType::f64, device);
  double* const sum = sums.mutable_data<double>();
  double total = 0;
  std::vector<kernels::SquaresPart> on_gpu;  // of one type
  std::vector<Tensor> kept;                  // until their kernel has been started
  for (Index k = 0, first = 0, started = 0; k < std::ssize(all); ++k) {
    const auto at = static_cast<std::size_t>(k);
    const Tensor x = dense(all[at]);
    visit("global_norm", x, [&]<class T>(auto where) {
      const T* const p = x.data<T>();
      if constexpr (is_cuda<decltype(where)>) {
        on_gpu.push_back({p, x.numel()});
        kept.push_back(x);
        if (at + 1 < all.size() && all[at + 1].dtype() == x.dtype()) return;
        kernels::sums_of_squares<T>(where, on_gpu, sum + started, kSquares);
        started = first + pieces_of(x);
        on_gpu.clear(), kept.clear();
      } else {
        parallel_each(pieces_of(x), 1, [&](Index i) {
          sum[first + i] =
              kernels::sum_of_squares(where, p + i * kSquares, std::min(kSquares, x.numel() - i * kSquares));
        });
        total += std::accumulate(sum + first, sum + first + pieces_of(x), 0.0);
      }
    });
    first += pieces_of(x);
  }
  check(!loss || (loss.numel() == 1 && loss.device() == device), "norm_of: the loss must be one number on ", device);
  const Tensor exact_loss = loss ? to(loss, device.is_cpu() ? DType::f64 : DType::f32) : loss;
  if constexpr (kHasCuda)
    if (device.is_cuda()) {
      kernels::norm_of_sums(cuda_of(device), sum, pieces, loss ? exact_loss.data<float>() : nullptr,
                            norm.mutable_data<double>());
      return norm;
    }
  *norm.mutable_data<double>() = loss && !std::isfinite(exact_loss.item()) ? std::nan("") : std::sqrt(total);
  return norm;
}

double global_norm(std::span<const Tensor> gradients) { return norm_of(gradients).item(); }

double clip_grad_norm(std::span<Tensor> gradients, double max_norm) {
  check(max_norm > 0, "clip_grad_norm: max_norm ", max_norm, " must be positive");
  const double norm = global_norm(gradients);
  if (!std::isfinite(norm)) {
    std::size_t i = 0;
    while (i < gradients.size() && std::isfinite(global_norm(gradients.subspan(i, 1)))) ++i;
    fail_with(Code::not_a_number, "clip_grad_norm: the norm is ", norm,
              "; the first gradient that is not finite is number ", i, i < gradients.size() ? ", of shape " : "",
              i < gradients.size() ? gradients[i].shape() : Shape{});
  }
  if (norm > max_norm)
    for (Tensor& g : gradients) g = mul(g, max_norm / norm);
  return norm;
}

}  // namespace hilt
