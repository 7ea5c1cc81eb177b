// The lists of a tiling in a GPU's memory: packed in one block, copied once, kept with it.
#include "ops/hilbert/kernels/cuda/on_device.h"
#include <algorithm>
#include <cstring>
#include "core/cuda/context.h"
#include "core/tensor.h"
#include "ops/hilbert/kernels/terms.h"
#include "ops/hilbert/plan/attends.h"

namespace hilt {

namespace {

constexpr std::size_t kAlignment = 16;

/// A view of lists, and the memory of a GPU where they lie.
template <class View> struct Image {
  Tensor memory;
  View view;
};

/// All lists in one block of memory, one copy.
class Packer {
 public:
  template <class X> void add(const std::vector<X>& list) {
    at_.push_back(bytes_.size());
    bytes_.resize((bytes_.size() + list.size() * sizeof(X) + kAlignment - 1) / kAlignment * kAlignment);
    if (!list.empty()) std::memcpy(bytes_.data() + at_.back(), list.data(), list.size() * sizeof(X));
  }
  void add(const TokenList& list) { add(list.values()); }
  Tensor upload(Cuda where) const {
    const Lasting lasting;
    const Device device{Device::Kind::cuda, where.device};
    Tensor t = empty({std::ssize(bytes_)}, DType::u8, device);
    cuda::to_device(cuda_of(device), t.mutable_raw(), bytes_.data(), bytes_.size());
    return t;
  }
  template <class X> void find(const Tensor& memory, const auto& list, std::span<const X>& view) {
    view = {reinterpret_cast<const X*>(memory.raw() + at_[next_++]), list.size()};
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::size_t> at_;
  std::size_t next_ = 0;
};

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
  visit(x.owner, v.owner), visit(x.meeting, v.meeting);
}

/// What `made` returns for a view, copied to a device, once; once for each `which`, where a tiling
/// has several.
template <class View, class Make>
const View& image_of(const Tiling& t, Cuda where, Make&& made, std::int32_t which = 0) {
  const auto copied = [&] {
    Image<View> image{};
    Packer pack;
    const auto& lists = made(image.view);
    each_list(lists, image.view, [&](const auto& list, auto&) { pack.add(list); });
    image.memory = pack.upload(where);
    each_list(lists, image.view, [&](const auto& list, auto& span) { pack.find(image.memory, list, span); });
    return image;
  };
  return t.memo.get<Image<View>>({where.device, which}, copied).view;
}

}  // namespace

bool are_paired(const Visits& v) {
  const std::vector<VisitSide::Owner>& owner = v.keys.owner;  // sorted by steps
  if (owner.empty() || owner.size() % 2 != 0 || owner[0].steps > kPairSteps || v.keys.portion.size() > 2) return false;
  const auto first_rows = [&](const VisitSide::Owner& o) {
    std::vector<std::int32_t> rows;
    for (const VisitSide::Visit& visit : std::span(v.keys.visit).subspan(at(o.first), at(o.visits)))
      for (std::int32_t row = 0; row < visit.rows; row += Visits::kCell) rows.push_back(visit.row + row);
    return rows;
  };
  std::vector<std::int32_t> visited, all;
  for (std::size_t i = 0; i < owner.size(); i += 2) {
    const std::vector<std::int32_t> rows = first_rows(owner[i]);
    if (rows != first_rows(owner[i + 1])) return false;
    visited.insert(visited.end(), rows.begin(), rows.end());
  }
  for (const VisitSide::Owner& q : v.queries.owner)
    for (std::int32_t row = 0; row < q.rows; row += Visits::kCell) all.push_back(q.row + row);
  std::ranges::sort(visited);
  std::ranges::sort(all);
  return visited == all;
}

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
    // A step of 64 takes about a fifth longer than half of one of 128.
    const auto wide = [](const VisitSide& side) { return 5 * side.cells_wide <= 6 * side.cells; };
    view.queries.wide = wide(made.queries), view.keys.wide = wide(made.keys);
    const auto describe = [](const VisitSide& side, VisitsView::Side& its) {
      const std::vector<VisitSide::Owner>& owner = side.part.empty() ? side.owner : side.part;  // sorted
      Index all = 1;
      for (const VisitSide::Owner& o : owner) all += o.steps;
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
    const auto sites = [&](const TokenList& names) {
      std::vector<RowSite> list;
      for (const std::int32_t name : names) {
        const bool on_grid = !t.grids.empty();
        const kernels::Site at = kernels::site_of(t.grids, on_grid, name);
        list.push_back({name, on_grid ? at.b << 16 | at.c : 0, at.a, 0});
      }
      return list;
    };
    return Sites{sites(t.q_names()), sites(t.k_names())};
  });
}

const Schedule& schedule(const Tiling& t, Index queries) {
  return t.memo.get<Schedule>({narrow(queries)}, [&] { return kernels::hopper::schedule_of(visits(t), queries); });
}
const ScheduleView& schedule_on_device(const Tiling& t, Cuda where, Index queries) {
  const auto made = [&](ScheduleView& view) -> const Schedule& {
    view.tiles = schedule(t, queries).tiles;
    return schedule(t, queries);
  };
  return image_of<ScheduleView>(t, where, made, static_cast<std::int32_t>(queries));
}

}  // namespace hilt
