// The lists of a tiling in a GPU's memory: packed in one block, copied once, kept with it.
#include "ops/hilbert/kernels/cuda/on_device.h"
#include <cstring>
#include <map>
#include <mutex>
#include "core/cuda/context.h"
#include "core/tensor.h"

namespace hilt {

struct Tiling::OnDevice {
  template <class View> struct Image {
    Tensor memory;
    View view;
  };
  std::map<int, Image<TilingView>> lists;  // by device
  std::map<int, Image<VisitsView>> visits;
};
struct Tiling::Places::OnDevice {
  std::map<int, Tensor> by_device;
};

namespace {

constexpr std::size_t kAlignment = 16;
std::mutex images_mutex;  // of all tilings

/// All lists in one block of memory, one copy.
class Packer {
 public:
  template <class X> void add(const std::vector<X>& list) {
    at_.push_back(bytes_.size());
    bytes_.resize((bytes_.size() + list.size() * sizeof(X) + kAlignment - 1) / kAlignment * kAlignment);
    if (!list.empty()) std::memcpy(bytes_.data() + at_.back(), list.data(), list.size() * sizeof(X));
  }
  Tensor upload(Cuda where) const {
    Tensor t = empty({std::ssize(bytes_)}, DType::u8, {Device::Kind::cuda, where.device});
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

void each_list(const Tiling& t, TilingView& v, auto&& visit) {
  visit(t.q_token, v.q_token), visit(t.k_token, v.k_token), visit(t.q_names(), v.q_name), visit(t.k_names(), v.k_name);
  visit(t.q_known, v.q_known), visit(t.k_known, v.k_known), visit(t.q_tile, v.q_tile), visit(t.k_tile, v.k_tile);
  visit(t.keys_begin, v.keys_begin), visit(t.keys, v.keys), visit(t.queries_begin, v.queries_begin),
      visit(t.queries, v.queries);
  v.causal = t.causal;
  visit(t.q_ranks(), v.q_rank), visit(t.k_ranks(), v.k_rank), visit(t.k_a, v.k_a), visit(t.q_a_low, v.q_a_low),
      visit(t.q_a_high, v.q_a_high);
  visit(t.k_b, v.k_b), visit(t.q_b_low, v.q_b_low), visit(t.q_b_high, v.q_b_high);
  visit(t.k_c, v.k_c), visit(t.q_c_low, v.q_c_low), visit(t.q_c_high, v.q_c_high);
}

void each_list(const Visits& x, VisitsView& v, auto&& visit) {
  visit(x.queries.owner, v.queries.owner), visit(x.queries.visit, v.queries.visit);
  visit(x.keys.owner, v.keys.owner), visit(x.keys.visit, v.keys.visit);
  visit(x.mask, v.mask);
}

/// The image for a device, copied there from what `made` returns where there is none yet.
template <class View, class Make>
const View& image_of(const Tiling& t, Cuda where,
                     std::map<int, Tiling::OnDevice::Image<View>> Tiling::OnDevice::*images, Make&& made) {
  const std::lock_guard lock(images_mutex);
  if (!t.device_images) t.device_images = std::make_shared<Tiling::OnDevice>();
  auto& by_device = (*t.device_images).*images;
  if (const auto found = by_device.find(where.device); found != by_device.end()) return found->second.view;
  Tiling::OnDevice::Image<View> image{};
  Packer pack;
  const auto& lists = made(image.view);
  each_list(lists, image.view, [&](const auto& list, auto&) { pack.add(list); });
  image.memory = pack.upload(where);
  each_list(lists, image.view, [&](const auto& list, auto& span) { pack.find(image.memory, list, span); });
  return by_device.emplace(where.device, std::move(image)).first->second.view;
}

}  // namespace

const TilingView& on_device(const Tiling& t, Cuda where) {
  return image_of<TilingView>(t, where, &Tiling::OnDevice::lists, [&](TilingView& view) -> const Tiling& {
    view.boxes = t.boxes, view.grid = t.grid;
    return t;
  });
}

PlacesView on_device(const Tiling::Places& places, Cuda where) {
  PlacesView view{nullptr, static_cast<std::int32_t>(places.list.size()), places.each_row};
  if (places.list.empty()) return view;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (!places.device_images) places.device_images = std::make_shared<Tiling::Places::OnDevice>();
  Tensor& memory = places.device_images->by_device[where.device];
  if (!memory) {
    Packer pack;
    pack.add(places.list);
    memory = pack.upload(where);
  }
  view.list = reinterpret_cast<const Tiling::Place*>(memory.raw());
  return view;
}

const VisitsView& visits_on_device(const Tiling& t, Cuda where) {
  Visits made;
  return image_of<VisitsView>(t, where, &Tiling::OnDevice::visits, [&](VisitsView& view) -> const Visits& {
    made = visits_of(t);
    view.mixed = made.mixed, view.one_owner = made.one_owner, view.eights = made.eights;
    // A step of 64 takes about a fifth longer than half of one of 128.
    const auto wide = [](const VisitSide& side) { return 5 * side.cells_wide <= 6 * side.cells; };
    view.queries.wide = wide(made.queries), view.keys.wide = wide(made.keys);
    const auto busy = [](const VisitSide& side) { return side.cells >= 32 * std::ssize(side.owner); };
    view.queries.busy = busy(made.queries), view.keys.busy = busy(made.keys);
    const auto uneven = [](const VisitSide& side) {
      return !side.owner.empty() && 4 * side.owner[0].steps > 5 * side.owner[side.owner.size() / 2].steps;  // sorted
    };
    view.queries.uneven = uneven(made.queries), view.keys.uneven = uneven(made.keys);
    const auto longest = [](const VisitSide& side) {
      Index all = 1;
      for (const VisitSide::Owner& o : side.owner) all += o.steps;
      return side.owner.empty() ? 0 : static_cast<double>(side.owner[0].steps) / static_cast<double>(all);
    };
    view.queries.longest = longest(made.queries), view.keys.longest = longest(made.keys);
    view.queries.portion = made.queries.portion, view.keys.portion = made.keys.portion;
    view.queries.made = made.queries.made, view.keys.made = made.keys.made;
    return made;
  });
}

}  // namespace hilt
