// The masks of cells for which a plan has no room: made for a call, from what attends() compares,
// laid out as Visits says. A block goes through the visits of an owner, half of it through those of
// one of its halves.
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

}  // namespace

void make_masks(Cuda where, const Tiling& tiling, std::span<const VisitSide::Owner> owner, bool queries_own,
                std::uint32_t* masks, std::int32_t* taken) {
  const TilingView& lists = on_device(tiling, where);
  const VisitsView& visits = visits_on_device(tiling, where);
  const auto blocks = std::min<Index>(std::ssize(owner), Index{8} * properties(where.device).multiprocessors);
  const auto run = [&](auto kernel, const VisitsView::Side& side) {
    launch("attention", where, kernel, dim3(static_cast<unsigned>(blocks)), kBoth, 0, lists, owner, side.visit, masks,
           taken);
  };
  const bool boxes = tiling.boxes > 1;
  if (queries_own) run(boxes ? masks_kernel<true, true> : masks_kernel<true, false>, visits.queries);
  else run(boxes ? masks_kernel<false, true> : masks_kernel<false, false>, visits.keys);
}

}  // namespace hilt::kernels
