// The lists of a tiling in a GPU's memory: packed into one block, copied once, kept with the
// tiling.
#include "ops/hilbert/kernels/cuda/on_device.h"
#include <cstring>
#include <map>
#include <mutex>
#include "core/cuda/context.h"
#include "core/tensor.h"

namespace hilt {

struct Tiling::OnDevice {
  struct Image {
    Tensor memory;
    TilingView view;
  };
  std::map<int, Image> by_device;
};

namespace {

constexpr std::size_t kAlignment = 16;

/// All lists in one block of memory, one copy.
class Packer {
 public:
  template <class X> void add(const std::vector<X>& list) {
    at_.push_back(bytes_.size());
    bytes_.resize((bytes_.size() + list.size() * sizeof(X) + kAlignment - 1) / kAlignment * kAlignment);
    if (!list.empty()) std::memcpy(bytes_.data() + at_.back(), list.data(), list.size() * sizeof(X));
  }
  Tensor upload(Cuda where) const {
    Tensor t = empty({static_cast<Index>(bytes_.size())}, DType::u8, {Device::Kind::cuda, where.device});
    cuda::to_device(where, t.mutable_raw(), bytes_.data(), bytes_.size());
    return t;
  }
  template <class X> void find(const Tensor& memory, const std::vector<X>& list, std::span<const X>& view) {
    view = {reinterpret_cast<const X*>(memory.raw() + at_[next_++]), list.size()};
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::size_t> at_;
  std::size_t next_ = 0;
};

template <class Visit> void each_list(const Tiling& t, TilingView& v, Visit&& visit) {
  visit(t.q_token, v.q_token), visit(t.k_token, v.k_token), visit(t.q_names(), v.q_name), visit(t.k_names(), v.k_name),
      visit(t.q_tile, v.q_tile), visit(t.k_tile, v.k_tile);
  visit(t.keys_begin, v.keys_begin), visit(t.keys, v.keys), visit(t.queries_begin, v.queries_begin),
      visit(t.queries, v.queries);
  visit(t.q_rank, v.q_rank), visit(t.k_rank, v.k_rank), visit(t.k_a, v.k_a), visit(t.q_a_low, v.q_a_low),
      visit(t.q_a_high, v.q_a_high);
  visit(t.k_b, v.k_b), visit(t.q_b_low, v.q_b_low), visit(t.q_b_high, v.q_b_high);
}

}  // namespace

const TilingView& on_device(const Tiling& t, Cuda where) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (!t.device_images) t.device_images = std::make_shared<Tiling::OnDevice>();
  const auto [entry, fresh] = t.device_images->by_device.try_emplace(where.device);
  if (!fresh) return entry->second.view;
  try {
    Packer pack;
    TilingView& view = entry->second.view;
    each_list(t, view, [&](const auto& list, auto&) { pack.add(list); });
    entry->second.memory = pack.upload(where);
    each_list(t, view, [&](const auto& list, auto& span) { pack.find(entry->second.memory, list, span); });
    return view;
  } catch (...) {
    t.device_images->by_device.erase(entry);
    throw;
  }
}

}  // namespace hilt
