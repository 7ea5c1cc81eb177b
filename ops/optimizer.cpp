// Optimiser steps and gradient clipping: they write to parameters, so no tape listens.
//      adamw   m = b1 m + (1 - b1) dw        v = b2 v + (1 - b2) dw^2
//              w = w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)
#include <numeric>
#include "core/strided.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {

constexpr Index kSquares = 1 << 14;

static void check_rate(double lr, double weight_decay) {
  check(std::isfinite(lr) && lr >= 0, "adamw_step: learning rate ", lr, " must be finite and not negative");
  check(std::isfinite(weight_decay) && weight_decay >= 0, "adamw_step: weight decay ", weight_decay,
        " must be finite and not negative");
}

static void check_update(const AdamWUpdate& u) {
  const Tensor& w = *u.w;
  check_alike("adamw_step", "w", w, "dw", u.dw);
  check(w.shape() == u.dw.shape(), "adamw_step: w is ", w.shape(), ", its gradient is ", u.dw.shape());
  check(w.is_contiguous(), "adamw_step: w ", w.shape(), " must be dense: it is written in place");
  const bool narrow = size_of(w.dtype()) == 2;
  const DType type = narrow ? DType::f32 : w.dtype();
  const auto check_state = [&](const char* name, const Tensor& state) {
    check(bool(state) && state.shape() == w.shape() && state.dtype() == type && state.device() == w.device() &&
              state.is_contiguous(),
          "adamw_step: ", name, " must be a dense ", type, w.shape(), " on ", w.device(), ", got ", state.dtype(),
          state.shape());
  };
  check_state("m", *u.m);
  check_state("v", *u.v);
  check(!u.master || narrow, "adamw_step: a master copy is for 16-bit parameters, w is ", w.dtype());
  if (u.master) check_state("master", *u.master);
}

void adamw_step(Tensor& w, const Tensor& dw, Tensor& m, Tensor& v, Index step, const AdamW& o, Tensor* master) {
  const AdamWUpdate one{&w, dw, &m, &v, master, o.weight_decay};
  adamw_step({&one, 1}, step, o);
}

void adamw_step(std::span<const AdamWUpdate> updates, Index step, const AdamW& o, const Clip& clip) {
  check_rate(o.lr, o.weight_decay);
  for (const AdamWUpdate& u : updates) check_rate(o.lr, u.weight_decay), check_update(u);
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
  detail::List<Tensor> gradients;
  for (const AdamWUpdate& u : updates) gradients.push_back(dense(u.dw));
  detail::List<kernels::AdamWPart> parts;  // of one type, on one GPU
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
  double* sum = sums.mutable_data<double>();  // of the next tensor
  double total = 0;
  std::vector<kernels::SquaresPart> parts;
  std::vector<Tensor> kept;  // until their kernel has been started
  for (const Tensor& gradient : all) {
    const Tensor x = kept.emplace_back(dense(gradient));
    parts.push_back({x.raw(), sum, x.numel(), x.dtype()});
    visit("global_norm", x, [&]<class T>(auto where) {
      if constexpr (!is_cuda<decltype(where)>) {
        const T* const p = x.data<T>();
        parallel_each(pieces_of(x), 1, [&](Index i) {
          sum[i] = kernels::sum_of_squares(where, p + i * kSquares, std::min(kSquares, x.numel() - i * kSquares));
        });
        total += std::accumulate(sum, sum + pieces_of(x), 0.0);
      }
    });
    sum += pieces_of(x);
  }
  check(!loss || (loss.numel() == 1 && loss.device() == device), "norm_of: the loss must be one number on ", device);
  const Tensor exact_loss = loss ? to(loss, device.is_cpu() ? DType::f64 : DType::f32) : loss;
  if constexpr (kHasCuda)
    if (device.is_cuda()) {
      kernels::sums_of_squares(cuda_of(device), parts, kSquares);
      kernels::norm_of_sums(cuda_of(device), sums.data<double>(), pieces, loss ? exact_loss.data<float>() : nullptr,
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
