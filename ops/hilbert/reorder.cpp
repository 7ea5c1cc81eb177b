// reorder and restore: tokens along an order, and back.
//
//      y[:, i] = x[:, token_at[i]]        x[:, t] = y[:, position_of[t]]        each is the other's backward
#include "core/recent.h"
#include "ops/helpers.h"
#include "ops/hilbert/attention.h"
#include "ops/ops.h"

namespace hilt {

/// To bring an index to a GPU is to wait, so those used last stay there.
static Tensor index_on(Device device, const std::vector<std::int32_t>& index) {
  const auto made = [&] {
    const Lasting lasting;
    return moved(from_values(index, {std::ssize(index)}), device);
  };
  if (device.is_cpu()) return made();
  constexpr std::size_t kKept = 16, kKeptBytes = std::size_t{64} << 20, kPair = 2;  // an order and its inverse
  static auto& recent = *new Recent<std::pair<Device, std::vector<std::int32_t>>, Tensor>(kKept, kKeptBytes, kPair);
  return recent.get({device, index}, made, [](const Tensor& x) { return x.bytes(); });
}

static Tensor reordered(std::string_view label, const Tensor& x, const std::vector<std::int32_t>& index,
                        const std::vector<std::int32_t>& inverse, int axis) {
  const int along = checked_axis(label.data(), axis, x.rank());
  check(x.dim(along) == std::ssize(index), label, ": axis ", axis, " of ", x.shape(), " has ", x.dim(along),
        " tokens, the order ", index.size());
  const Tensor there = index_on(x.device(), index), back = index_on(x.device(), inverse);
  return apply_linear(
      label, x, [=](const Tensor& in) { return gather(in, along, there); },
      [=](const Tensor& dy) { return gather(dy, along, back); });
}

Tensor reorder(const Tensor& x, const Permutation& order, int axis) {
  return reordered("reorder", x, order.token_at, order.position_of, axis);
}
Tensor restore(const Tensor& y, const Permutation& order, int axis) {
  return reordered("restore", y, order.position_of, order.token_at, axis);
}

}  // namespace hilt
