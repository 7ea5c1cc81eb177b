// The lists of a tiling in a GPU's memory: packed in one block, copied once, kept with it.
#include "ops/hilbert/kernels/cuda/on_device.h"
#include "core/cuda/context.h"
#include "ops/hilbert/plan/attends.h"

namespace hilt {
namespace {

struct Lists {
  const Tiling& t;
  Tiling::Lists queries = t.met.transposed(t.k_tile.size());
};
void each_list(const Lists& lists, TilingView& v, auto&& visit) {
  const Tiling& t = lists.t;
  visit(t.q_token, v.q_token), visit(t.k_token, v.k_token), visit(t.q_names(), v.q_name), visit(t.k_names(), v.k_name);
  visit(t.q_known, v.q_known), visit(t.k_known, v.k_known), visit(t.q_tile, v.q_tile), visit(t.k_tile, v.k_tile);
  visit(t.met.begin, v.keys_begin), visit(t.met.run, v.keys);
  visit(lists.queries.begin, v.queries_begin), visit(lists.queries.run, v.queries);
  visit(t.q_ranks(), v.q_rank), visit(t.k_ranks(), v.k_rank), visit(t.grids, v.grids);
  for (std::size_t i = 0; i < t.axis.size(); ++i)
    visit(t.axis[i].key, v.axis[i].key), visit(t.axis[i].low, v.axis[i].low), visit(t.axis[i].high, v.axis[i].high);
}

void each_list(const Visits& x, VisitsView& v, auto&& visit) {
  const auto visit_side = [&](const VisitSide& side, VisitsView::Side& view) {
    visit(side.owner, view.owner), visit(side.part, view.part), visit(side.visit, view.visit);
  };
  visit_side(x.queries, v.queries), visit_side(x.keys, v.keys), visit_side(x.threes, v.threes);
  visit(x.mask, v.mask);
}

void each_list(const Sites& x, SitesView& v, auto&& visit) { visit(x.queries, v.queries), visit(x.keys, v.keys); }

using kernels::hopper::Schedule;
void each_list(const Schedule& x, ScheduleView& v, auto&& visit) {
  v.tiles = x.tiles;
  visit(x.owner, v.owner), visit(x.meeting, v.meeting);
}

/// What `made` returns for a view, copied to a device, once; once for each `which`, where a tiling
/// has several.
template <class View, class Make>
const View& image_of(const Tiling& t, Cuda where, Make&& made, std::int32_t which = 0) {
  const auto copied = [&] {
    std::pair<Tensor, View> image{};  // lists lie in its memory
    std::vector<std::byte> bytes;
    std::vector<std::size_t> begin;
    const auto& lists = made(image.second);
    each_list(lists, image.second, [&]<class X>(const auto& list, std::span<const X>&) {
      begin.push_back(bytes.size());
      bytes.resize(bytes.size() + (list.size() * sizeof(X) + 15) / 16 * 16);  // each is aligned
      std::ranges::copy(list, reinterpret_cast<X*>(bytes.data() + begin.back()));
    });
    const Lasting lasting;
    image.first = empty({std::ssize(bytes)}, DType::u8, {Device::Kind::cuda, where.device});
    cuda::to_device(cuda_of(image.first.device()), image.first.mutable_raw(), bytes.data(), bytes.size());
    each_list(lists, image.second, [&, i = std::size_t{}]<class X>(const auto& list, std::span<const X>& view) mutable {
      view = {reinterpret_cast<const X*>(image.first.raw() + begin[i++]), list.size()};
    });
    return image;
  };
  return t.memo.get<std::pair<Tensor, View>>({where.device, which}, copied).second;
}

}  // namespace

const TilingView& on_device(const Tiling& t, Cuda where) {
  return image_of<TilingView>(t, where, [&](TilingView& view) {
    view.causal = t.causal, view.boxes = t.boxes;
    return Lists{t};
  });
}

const VisitsView& visits_on_device(const Tiling& t, Cuda where) {
  return image_of<VisitsView>(t, where, [&](VisitsView& view) -> const Visits& {
    const Visits& made = visits(t);
    view.mixed = made.mixed, view.eights = made.eights;
    const auto describe = [](const VisitSide& side, VisitsView::Side& its) {
      const std::vector<VisitSide::Owner>& owner = side.part.empty() ? side.owner : side.part;  // sorted
      Index all = 1;
      for (const VisitSide::Owner& o : owner) all += o.steps;
      its.wide = 5 * side.cells_wide <= 6 * side.cells;  // a step of 64 takes a fifth longer than half of one of 128
      its.busy = side.cells >= 32 * std::ssize(owner);
      its.steps = owner.empty() ? 0 : owner[0].steps;
      its.uneven = !owner.empty() && 4 * its.steps > 5 * owner[owner.size() / 2].steps;
      its.longest = static_cast<double>(its.steps) / static_cast<double>(all);
      its.portion = side.portion, its.made = side.made, its.parts = side.parts;
    };
    describe(made.queries, view.queries), describe(made.keys, view.keys), describe(made.threes, view.threes);
    return made;
  });
}

const SitesView& sites_on_device(const Tiling& t, Cuda where) {
  return image_of<SitesView>(t, where, [&](SitesView&) {
    Sites x;
    for (const std::int32_t name : t.q_names()) x.queries.push_back(row_site(t.grids, name));
    for (const std::int32_t name : t.k_names()) x.keys.push_back(row_site(t.grids, name));
    return x;
  });
}

const ScheduleView& schedule_on_device(const Tiling& t, Cuda where, Index queries) {
  const auto made = [&](ScheduleView&) { return kernels::hopper::schedule_of(visits(t), queries); };
  return image_of<ScheduleView>(t, where, made, static_cast<std::int32_t>(queries));
}

}  // namespace hilt
