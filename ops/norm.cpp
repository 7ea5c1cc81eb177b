// Normalisation along the last axis, of n elements, with h the normalised row:
//      layer_norm   h = (x - mean) rstd    y = h w + b      dx = rstd (g - mean(g) - h mean(g h)),  g = dy w
//      rms_norm     h = x rstd             y = h w          dx = rstd (g - h mean(g h))
//      dw = sum over rows of dy h          db = sum over rows of dy          keeps x, w and each row's mean and rstd
#include "core/strided.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"
#include "ops/rows.h"

namespace hilt {
namespace {

constexpr Index kRowPieces = 16;      // partial sums of dw and db: fixed, so that threads do not change the result
constexpr Index kGpuRowPieces = 128;  // enough blocks for a whole GPU

struct Norm final : Function {
  const bool centered;
  const double epsilon;
  Norm(bool has_mean, double e) : centered(has_mean), epsilon(e) {}
  std::string_view name() const override { return centered ? "layer_norm" : "rms_norm"; }

  Tensor forward(const Tensor& in, const Tensor& weight, const Tensor& bias) {
    const Tensor x = dense(in), w = dense(weight), b = bias ? dense(bias) : bias;
    const Index cols = x.dim(-1), rows = cols > 0 ? x.numel() / cols : 0;
    const DType stat = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
    Tensor y = empty_like(x), rstd = empty({rows}, stat, x.device()), mean = centered ? empty_like(rstd) : Tensor();
    visit(name().data(), x, [&]<class T>(auto where) {
      using W = wide_t<T>;
      const T* const level = b ? b.data<T>() : nullptr;
      W *const means = centered ? mean.mutable_data<W>() : nullptr, *const scales = rstd.mutable_data<W>();
      const kernels::Norm<T> op{{rows, cols},        x.data<T>(), w.data<T>(), level,
                                y.mutable_data<T>(), means,       scales,      epsilon};
      kernels::along_rows(where, "norm", op);
    });
    if (wants_any()) save(x), save(w), save(mean), save(rstd);
    return y;
  }

  std::vector<Tensor> backward(const Tensor& gradient) override {
    const Tensor &x = saved(0), &w = saved(1), &mean = saved(2), &rstd = saved(3), dy = dense(gradient);
    const Index cols = x.dim(-1), rows = cols > 0 ? x.numel() / cols : 0;
    std::vector<Tensor> d(3);  // of x, w and b
    if (wants(0)) d[0] = empty_like(x);
    visit(name().data(), x, [&]<class T>(auto where) {
      using W = wide_t<T>;
      const auto to_write = [](Tensor& t) { return t ? t.mutable_data<T>() : nullptr; };
      const kernels::NormBackward<T> op{
          {rows, cols},   x.data<T>(),  w.data<T>(),   centered ? mean.data<W>() : nullptr,
          rstd.data<W>(), dy.data<T>(), to_write(d[0])};
      if constexpr (is_cuda<decltype(where)>) {
        if (op.dx) kernels::along_rows(where, "norm", op);
        Tensor partial = empty({2, kGpuRowPieces, wants(1) || wants(2) ? cols : 0}, DType::f64, x.device());
        for (std::size_t i = 1; i < d.size(); ++i)
          if (wants(i)) d[i] = empty({cols}, x.dtype(), x.device());
        kernels::norm_columns(where, op, to_write(d[1]), to_write(d[2]), partial.mutable_data<double>(), kGpuRowPieces);
      } else {
        const Index pieces = wants(1) || wants(2) ? kRowPieces : std::min(kRowPieces, 1 + rows * cols / kWorthATask);
        const Index per_piece = (rows + pieces - 1) / pieces;  // a few rows are one, where nothing sums them
        const auto sums = [&](bool wanted) { return wanted ? zeros({kRowPieces, cols}, rstd.dtype()) : Tensor(); };
        Tensor dw = sums(wants(1)), db = sums(wants(2));
        W *const sum_w = dw ? dw.mutable_data<W>() : nullptr, *const sum_b = db ? db.mutable_data<W>() : nullptr;
        parallel_each(pieces, 1, [&](Index piece) {
          kernels::norm_rows_backward(where, op, std::min(piece * per_piece, rows),
                                      std::min((piece + 1) * per_piece, rows), sum_w ? sum_w + piece * cols : nullptr,
                                      sum_b ? sum_b + piece * cols : nullptr);
        });
        if (wants(1)) d[1] = to(sum(dw, {0}), w.dtype());
        if (wants(2)) d[2] = to(sum(db, {0}), w.dtype());
      }
    });
    return d;
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
  return apply(Norm(true, epsilon), x, weight, bias);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  const Tensor w = weight ? weight : ones({x.dim(-1)}, x.dtype(), x.device());
  check_norm("rms_norm", x, "weight", w, epsilon);
  return apply(Norm(false, epsilon), x, w, Tensor{});
}

}  // namespace hilt
