// Rotary embedding: the pair (x_i, x_{i + D/2}) at position l turns by the angle l base^(-2i/D).
//      y_i = x_i cos - x_{i+D/2} sin       y_{i+D/2} = x_i sin + x_{i+D/2} cos
//      dx is dy turned back; nothing is kept
#include <cmath>
#include "core/recent.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

struct Angles {
  std::vector<std::int64_t> positions;
  Index half;
  double base;
  DType type;
  Device device;
  auto operator<=>(const Angles&) const = default;
};

/// [2, L, D / 2]: cosines, sines.
Tensor make_table(const Angles& a) {
  const auto length = std::ssize(a.positions);
  std::vector<double> table(static_cast<std::size_t>(2 * length * a.half));
  for (Index i = 0; i < a.half; ++i) {
    const double speed = std::pow(a.base, -static_cast<double>(i) / static_cast<double>(a.half));
    for (Index l = 0; l < length; ++l) {
      const double angle = static_cast<double>(a.positions[static_cast<std::size_t>(l)]) * speed;
      table[static_cast<std::size_t>(l * a.half + i)] = std::cos(angle);
      table[static_cast<std::size_t>((length + l) * a.half + i)] = std::sin(angle);
    }
  }
  const Lasting lasting;
  return moved(converted(from_values(table, {std::ssize(table)}, DType::f64), a.type), a.device);
}

/// Layers turn by the same angles: the last tables are kept, as to bring one to a GPU is to wait.
Tensor table_of(const Angles& angles) {
  static auto& recent = *new Recent<Angles, Tensor>(8);  // outlives every device
  return recent.get(angles, [&] { return make_table(angles); });
}

/// The first `turning` heads turned, by minus the angles where the sign is -1.
Tensor turned(const Tensor& in, const Tensor& table, Index turning, int sign) {
  const Tensor x = dense(in);
  Tensor y = empty_like(x);
  if (x.numel() == 0) return y;
  const Index length = x.dim(-3), heads = x.dim(-2), dim = x.dim(-1);
  visit("rotary", x, [&]<class T>(auto where) {
    const kernels::Rotation by{x.numel() / (length * heads * dim), length, heads, dim, turning, sign};
    kernels::rotate(where, by, table.data<wide_t<T>>(), x.data<T>(), y.mutable_data<T>());
  });
  return y;
}

}  // namespace

Tensor rotary(const Tensor& x, double base, const std::optional<Tensor>& positions, std::optional<Index> heads) {
  check(bool(x) && x.rank() >= 3 && x.dim(-1) % 2 == 0, "rotary: needs [.., length, heads, an even dim], got ",
        x ? x.shape() : Shape{});
  check_floats("rotary", x);
  check(base > 1, "rotary: base ", base, " must be above 1");
  const Index length = x.dim(-3), half = x.dim(-1) / 2;
  const Tensor where = positions ? *positions : arange(length);
  check(where.shape() == Shape{length} && !is_floating(where.dtype()), "rotary: positions must be integers [", length,
        "], got ", where.dtype(), where.shape());
  const Index turning = heads.value_or(x.dim(-2));
  check(turning >= 0 && turning <= x.dim(-2), "rotary: ", turning, " heads to turn of ", x.dim(-2));
  const DType type = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Tensor table = table_of({where.to_vector<std::int64_t>(), half, base, type, x.device()});
  return apply_linear(
      "rotary", x, [=](const Tensor& in) { return turned(in, table, turning, 1); },
      [=](const Tensor& dy) { return turned(dy, table, turning, -1); });
}

}  // namespace hilt
