// The masks of cells for which a plan has no room: made for a call, from what attends() compares,
// laid out as Visits says. A block goes through the visits of an owner, half of it through those of
// one of its halves. And lists along an order that came with the call.
#include "core/cuda/launch.cuh"
#include "ops/hilbert/kernels/cuda/kernels.h"
#include "ops/hilbert/kernels/cuda/on_device.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

constexpr int kHalf = static_cast<int>(Visits::kWords), kBoth = 2 * kHalf;  // threads

template <bool kQueries, bool kBoxes>  // unions
__global__ void __launch_bounds__(kBoth)
    masks_kernel(const __grid_constant__ TilingView t, std::span<const VisitSide::Owner> owner,
                 std::span<const VisitSide::Visit> visit, std::uint32_t* masks, std::int32_t* taken) {
  const int half = static_cast<int>(threadIdx.x) / kHalf, thread = static_cast<int>(threadIdx.x) % kHalf,
            lane = thread % kWarp, row = half * static_cast<int>(Visits::kCell) + thread / kWarp * 16 + lane / 4;
  if (taken && blockIdx.x == 0 && threadIdx.x == 0) *taken = 0;
  const auto side = [&](int i, auto&& with) {
    if constexpr (kBoxes) with(static_cast<std::size_t>(i));
    else if constexpr (kQueries) with(bounds_of(t, static_cast<std::size_t>(i)));
    else with(place_of(t, static_cast<std::size_t>(i)));
  };
  for (std::size_t i = blockIdx.x; i < owner.size(); i += gridDim.x) {
    const VisitSide::Owner own = owner[i];
    for (int v = own.first; v < own.first + own.visits; ++v) {
      const VisitSide::Visit its = visit[static_cast<std::size_t>(v)];
      if (its.cell[half] != Visits::kCompare) continue;
      std::uint32_t word = 0;
      for (int h = 0; h < 2; ++h) {
        if (row + 8 * h >= own.rows) continue;
        side(own.row + row + 8 * h, [&](const auto& mine) {
#pragma unroll
          for (int c = 0; c < 16; ++c) {
            const int column = c / 2 * 8 + lane % 4 * 2 + c % 2;
            if (column >= its.rows) continue;
            const auto other = static_cast<std::size_t>(its.row + column);
            bool both;
            if constexpr (kBoxes) both = kQueries ? attends(t, mine, other) : attends(t, other, mine);
            else if constexpr (kQueries) both = attends(mine, place_of(t, other));
            else both = attends(bounds_of(t, other), mine);
            word |= static_cast<std::uint32_t>(both) << (16 * h + c);
          }
        });
      }
      masks[(its.mask + half) * kHalf + thread] = word;
    }
  }
}

__global__ void order_kernel(std::span<const std::int32_t> row, const std::int32_t* along, std::int32_t length,
                             std::span<const Tiling::Sites> grids, RowSite* site, std::int32_t* token) {
  for (Index i = first_element(); i < std::ssize(row); i += element_step()) {
    token[i] = max(along[row[i]], 0) % length;  // whatever a wrong order says
    site[i] = row_site(grids, token[i]);
  }
}

}  // namespace

void make_masks(Cuda where, const AttentionPass& pass, std::span<const VisitSide::Owner> owner, bool queries_own,
                std::uint32_t* masks, std::int32_t* taken) {
  const TilingView& lists = lists_of(pass, where);
  const VisitsView& visits = visits_on_device(*pass.tiling, where);
  const auto blocks = std::min<Index>(std::ssize(owner), Index{8} * properties(where.device).multiprocessors);
  const auto run = [&](auto kernel, const VisitsView::Side& side) {
    launch("attention", where, kernel, dim3(static_cast<unsigned>(blocks)), kBoth, 0, lists, owner, side.visit, masks,
           taken);
  };
  const bool boxes = pass.tiling->boxes > 1;
  if (queries_own) run(boxes ? masks_kernel<true, true> : masks_kernel<true, false>, visits.queries);
  else run(boxes ? masks_kernel<false, true> : masks_kernel<false, false>, visits.keys);
}

OrderedLists::OrderedLists(Cuda where, AttentionPass& pass) {
  if (!pass.along) return;
  lists = on_device(*pass.tiling, where), lists.causal = lists.causal || pass.causal, pass.ordered = this;
  const auto order = [&](auto& row, auto& name, auto& rank, auto& site) {
    const Index n = std::ssize(row);
    Tensor& to = memory.emplace_back(empty({n, 5}, DType::i32, {Device::Kind::cuda, where.device}));
    auto* const sites_of = reinterpret_cast<RowSite*>(to.mutable_raw());
    auto* const tokens = reinterpret_cast<std::int32_t*>(sites_of + n);
    launch("attention", where, order_kernel, blocks_for(n), kThreads, 0, row, pass.along, narrow(pass.sizes.queries),
           lists.grids, sites_of, tokens);
    row = name = {tokens, row.size()}, site = {sites_of, row.size()};
    if (pass.causal) rank = name;  // else positions, of a set that is causal along them
  };
  order(lists.q_token, lists.q_name, lists.q_rank, sites.queries);
  order(lists.k_token, lists.k_name, lists.k_rank, sites.keys);
}

}  // namespace hilt::kernels
