// Rotary embedding: the pair (x_i, x_{i + D/2}) at position l turns by the angle l base^(-2i/D).
//
//      y_i = x_i cos - x_{i+D/2} sin       y_{i+D/2} = x_i sin + x_{i+D/2} cos       dx is dy turned back; nothing is kept
#include <cmath>
#include "core/tape.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

struct Rotary final : Function {
  Tensor table;  // [2, L, D / 2]: cosines, sines
  std::string_view name() const override { return "rotary"; }
  Tensor turned(const Tensor& in, int sign) const {
    const Tensor x = dense(in);
    Tensor y = empty_like(x);
    if (x.numel() == 0) return y;
    const Index length = x.dim(-3), heads = x.dim(-2), dim = x.dim(-1);
    visit("rotary", x, [&]<class T>(auto where) {
      kernels::rotate(where, x.data<T>(), table.data<wide_t<T>>(), y.mutable_data<T>(), x.numel() / (length * heads * dim), length, heads, dim, sign);
    });
    return y;
  }
  Tensor forward(const Tensor& x) { return turned(x, 1); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {turned(dy, -1)}; }
};

}  // namespace

Tensor rotary(const Tensor& x, double base, const std::optional<Tensor>& positions) {
  check(bool(x) && x.rank() >= 3 && x.dim(-1) % 2 == 0, "rotary: needs [.., length, heads, an even dim], got ", x ? x.shape() : Shape{});
  check(is_floating(x.dtype()), "rotary: needs a tensor of floats, got ", x.dtype());
  check(base > 1, "rotary: base ", base, " must be above 1");
  const Index length = x.dim(-3), half = x.dim(-1) / 2;
  const Tensor where = positions ? *positions : arange(length);
  check(where.shape() == Shape{length} && !is_floating(where.dtype()), "rotary: positions must be integers [", length, "], got ", where.dtype(), where.shape());
  const std::vector<std::int64_t> at = where.to_vector<std::int64_t>();
  std::vector<double> table(static_cast<std::size_t>(2 * length * half));
  for (Index l = 0; l < length; ++l)
    for (Index i = 0; i < half; ++i) {
      const double angle = static_cast<double>(at[static_cast<std::size_t>(l)]) * std::pow(base, -static_cast<double>(i) / static_cast<double>(half));
      table[static_cast<std::size_t>(l * half + i)] = std::cos(angle);
      table[static_cast<std::size_t>((length + l) * half + i)] = std::sin(angle);
    }
  Rotary fn;
  fn.table = from_values(table, {2, length, half}, x.dtype() == DType::f64 ? DType::f64 : DType::f32);
  fn.table = moved(fn.table, x.device());
  return apply(std::move(fn), x);
}

}  // namespace hilt
