// Rotary embedding: the pair (x_i, x_{i + D/2}) at position l turns by the angle l base^(-2i/D).
//      y_i = x_i cos - x_{i+D/2} sin       y_{i+D/2} = x_i sin + x_{i+D/2} cos
//      dx is dy turned back; nothing is kept
// Coordinates of a point turn a part of a head each, as they would a head so wide.
#include "core/recent.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

struct Angles {
  std::vector<double> positions;
  Index half;
  double base;
  DType type;
  Device device;
  auto operator<=>(const Angles&) const = default;
};

/// [2, positions, half]: cosines, sines.
Tensor make_table(const Angles& a) {
  std::vector<double> speeds;
  for (Index i = 0; i < a.half; ++i)
    speeds.push_back(std::pow(a.base, -static_cast<double>(i) / static_cast<double>(a.half)));
  const Tape::Pause pause;
  const Tensor angles = from_values(a.positions, {std::ssize(a.positions), 1}) * from_values(speeds, {a.half});
  const Lasting lasting;
  return moved(converted(cat({cos(angles), sin(angles)}, 0), a.type), a.device);
}

/// Turned, by minus the angles where the sign is -1.
Tensor turned(const Tensor& in, const Tensor& table, kernels::Rotation by) {
  const Tensor x = dense(in);
  Tensor y = empty_like(x);
  if (x.numel() == 0) return y;
  visit("rotary", x, [&]<class T>(auto where) {
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
  const Index length = x.dim(-3), all = x.dim(-2), dim = x.dim(-1);
  const Tensor where = positions ? *positions : arange(length);
  const bool points = where.rank() == 2 || where.rank() == 3;
  const Index axes = points ? where.dim(-1) : 1, rows = points ? where.numel() / std::max<Index>(axes, 1) : length;
  const Index outer = rows * all * dim > 0 ? x.numel() / (rows * all * dim) : 0;
  check(points ? where.dim(-2) == length && axes <= 3 && (where.rank() == 2 || rows * all * dim == x.numel())
               : where.shape() == Shape{length} && !is_floating(where.dtype()),
        "rotary: positions must be integers [", length, "] or points [", length, ", axes] or [batch, ", length,
        ", axes], got ", where.dtype(), where.shape());
  check(axes > 0 && dim % (2 * axes) == 0, "rotary: ", dim, " dims of a head are no ", axes,
        " parts of even size, one an axis");
  const Index turning = heads.value_or(all);
  check(turning >= 0 && turning <= all, "rotary: ", turning, " heads to turn of ", all);
  const DType type = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Angles angles{where.to_vector(), dim / axes / 2, base, type, x.device()};
  check(std::ranges::all_of(angles.positions, [](double p) { return std::isfinite(p); }),
        "rotary: a position is not finite");
  // Layers turn by the same angles: the last tables are kept, as to bring one to a GPU is to wait.
  static auto& recent = *new Recent<Angles, Tensor>(8);  // outlives every device
  const Tensor table = recent.get(angles, [&] { return make_table(angles); });
  kernels::Rotation by{outer, rows, all * axes, dim / axes, turning * axes, axes, 1}, back = by;
  back.sign = -1;
  return apply_linear(
      "rotary", x, [=](const Tensor& in) { return turned(in, table, by); },
      [=](const Tensor& dy) { return turned(dy, table, back); });
}

}  // namespace hilt
