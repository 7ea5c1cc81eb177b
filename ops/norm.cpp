// Normalisation along the last axis, of n elements, with h the normalised row:
//      layer_norm   h = (x - mean) rstd    y = h w + b      dx = rstd (g - mean(g) - h mean(g h)),  g = dy w
//      rms_norm     h = x rstd             y = h w          dx = rstd (g - h mean(g h))
//      dw = sum over rows of dy h          db = sum over rows of dy          keeps x, w and each row's mean and rstd
#include "core/parallel.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

constexpr Index kRowPieces = 16;      // partial sums of dw and db: fixed, so that threads do not change the result
constexpr Index kGpuRowPieces = 128;  // enough blocks for a whole GPU

struct Norm final : Function {
  bool centered = true;
  double epsilon = 1e-5;
  std::string_view name() const override { return centered ? "layer_norm" : "rms_norm"; }

  Tensor forward(const Tensor& x, const Tensor& w) { return run(x, w, nullptr); }
  Tensor forward(const Tensor& x, const Tensor& w, const Tensor& b) { return run(x, w, &b); }

  Tensor run(const Tensor& in, const Tensor& weight, const Tensor* bias) {
    const Tensor x = dense(in), w = dense(weight), b = bias ? dense(*bias) : Tensor{};
    const Index cols = x.dim(-1), rows = cols > 0 ? x.numel() / cols : 0;
    const DType stat = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
    Tensor y = empty_like(x), mean = empty({centered ? rows : 0}, stat, x.device()),
           rstd = empty({rows}, stat, x.device());
    visit(name().data(), x, [&]<class T>(auto where) {
      using W = wide_t<T>;
      kernels::norm(where, x.data<T>(), w.data<T>(), bias ? b.data<T>() : nullptr, y.mutable_data<T>(),
                    centered ? mean.mutable_data<W>() : nullptr, rstd.mutable_data<W>(), rows, cols, epsilon);
    });
    if (wants_any())
      for (const Tensor& t : {x, w, mean, rstd}) save(t);
    return y;
  }

  std::vector<Tensor> backward(const Tensor& gradient) override {
    const Tensor &x = saved(0), &w = saved(1), &mean = saved(2), &rstd = saved(3);
    const Tensor dy = dense(gradient);
    const Index cols = x.dim(-1), rows = cols > 0 ? x.numel() / cols : 0;
    Tensor dx = wants(0) ? empty_like(x) : Tensor{};
    if (x.device().is_cuda()) return on_gpu(x, w, mean, rstd, dy, dx, rows, cols);
    const Index pieces = kRowPieces, per_piece = (rows + pieces - 1) / pieces;
    Tensor dw = zeros({pieces, wants(1) ? cols : 0}, rstd.dtype(), x.device()),
           db = zeros({pieces, wants(2) ? cols : 0}, rstd.dtype(), x.device());
    visit(name().data(), x, [&]<class T>(auto where) {
      using W = wide_t<T>;
      T* const px = dx ? dx.mutable_data<T>() : nullptr;
      W *const pw = dw.mutable_data<W>(), *const pb = db.mutable_data<W>();
      if constexpr (!is_cuda<decltype(where)>)
        parallel_for(pieces, 1, [&](Index begin, Index end) {
          for (Index piece = begin; piece < end; ++piece) {
            const Index r = std::min(piece * per_piece, rows), n = std::min(per_piece, rows - r);
            kernels::norm_rows_backward(
                where, x.data<T>() + r * cols, w.data<T>(), centered ? mean.data<W>() + r : nullptr, rstd.data<W>() + r,
                dy.data<T>() + r * cols, px ? px + r * cols : nullptr, wants(1) ? pw + piece * cols : nullptr,
                wants(2) ? pb + piece * cols : nullptr, n, cols);
          }
        });
    });
    std::vector<Tensor> out{dx, wants(1) ? to(sum(dw, {0}), w.dtype()) : Tensor{}};
    if (centered) out.push_back(wants(2) ? to(sum(db, {0}), w.dtype()) : Tensor{});
    return out;
  }

 private:
  std::vector<Tensor> on_gpu(const Tensor& x, const Tensor& w, const Tensor& mean, const Tensor& rstd, const Tensor& dy,
                             Tensor& dx, Index rows, Index cols) {
    Tensor dw = wants(1) ? empty({cols}, x.dtype(), x.device()) : Tensor{},
           db = centered && wants(2) ? empty({cols}, x.dtype(), x.device()) : Tensor{};
    Tensor partial = empty({2, kGpuRowPieces, dw || db ? cols : 0}, DType::f32, x.device());
    visit(name().data(), x, [&]<class T>(auto where) {
      const auto to = [](Tensor& t) { return t ? t.mutable_data<T>() : nullptr; };
      if constexpr (is_cuda<decltype(where)>)
        kernels::norm_backward(where, x.data<T>(), w.data<T>(), centered ? mean.data<float>() : nullptr,
                               rstd.data<float>(), dy.data<T>(), to(dx), to(dw), to(db), partial.mutable_data<float>(),
                               rows, cols, kGpuRowPieces);
    });
    return centered ? std::vector{dx, dw, db} : std::vector{dx, dw};
  }
};

void check_norm(const char* op, const Tensor& x, const char* name, const Tensor& w, double epsilon) {
  check(epsilon >= 0, op, ": epsilon ", epsilon, " must not be negative");
  check_alike(op, "x", x, name, w);
  check(x.rank() >= 1, op, ": needs at least one axis, got ", x.shape());
  check(w.shape() == Shape{x.dim(-1)}, op, ": ", name, " ", w.shape(), " must have one entry for each of the ",
        x.dim(-1), " columns of ", x.shape());
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double epsilon) {
  check_norm("layer_norm", x, "weight", weight, epsilon);
  check_norm("layer_norm", x, "bias", bias, epsilon);
  Norm fn;
  fn.epsilon = epsilon;
  return apply(std::move(fn), x, weight, bias);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  check_norm("rms_norm", x, "weight", weight, epsilon);
  Norm fn;
  fn.centered = false;
  fn.epsilon = epsilon;
  return apply(std::move(fn), x, weight);
}

}  // namespace hilt
