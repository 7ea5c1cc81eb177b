// reorder and restore: tokens along an order, and back home.
//
//      y[:, i] = x[:, token_at[i]]        x[:, t] = y[:, position_of[t]]        each is the other's backward
#include <list>
#include <mutex>
#include "ops/hilbert/attention.h"
#include "ops/ops.h"

namespace hilt {
namespace {

struct Reorder final : Function {
  Tensor index, inverse;
  int axis = 1;
  std::string_view label;
  std::string_view name() const override { return label; }
  Tensor forward(const Tensor& x) { return gather(x, axis, index); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {gather(dy, axis, inverse)}; }
};

/// To bring an index to a GPU is to wait, so those used last stay there.
Tensor index_on(Device device, const std::vector<std::int32_t>& index) {
  const auto made = [&] { return moved(from_values(index, {static_cast<Index>(index.size())}), device); };
  if (device.is_cpu()) return made();
  struct Kept {
    Device device;
    std::vector<std::int32_t> index;
    Tensor there;
  };
  constexpr std::size_t kKept = 16, kKeptTokens = std::size_t{16} << 20;
  static std::mutex mutex;
  static auto& recent = *new std::list<Kept>;  // outlives every device
  const std::lock_guard lock(mutex);
  for (auto at = recent.begin(); at != recent.end(); ++at)
    if (at->device == device && at->index == index) {
      recent.splice(recent.begin(), recent, at);
      return at->there;
    }
  recent.push_front({device, index, made()});
  std::size_t tokens = 0;
  for (const Kept& k : recent) tokens += k.index.size();
  for (; recent.size() > kKept || (recent.size() > 2 && tokens > kKeptTokens); recent.pop_back())
    tokens -= recent.back().index.size();
  return recent.front().there;
}

Tensor reordered(std::string_view label, const Tensor& x, const std::vector<std::int32_t>& index,
                 const std::vector<std::int32_t>& inverse, int axis) {
  Reorder fn;
  fn.label = label;
  fn.axis = checked_axis(label.data(), axis, x.rank());
  check(x.dim(fn.axis) == static_cast<Index>(index.size()), label, ": axis ", axis, " of ", x.shape(), " has ",
        x.dim(fn.axis), " tokens, the order ", index.size());
  fn.index = index_on(x.device(), index);
  fn.inverse = index_on(x.device(), inverse);
  return apply(std::move(fn), x);
}

}  // namespace

Tensor reorder(const Tensor& x, const Permutation& order, int axis) {
  return reordered("reorder", x, order.token_at, order.position_of, axis);
}
Tensor restore(const Tensor& y, const Permutation& order, int axis) {
  return reordered("restore", y, order.position_of, order.token_at, axis);
}

}  // namespace hilt
