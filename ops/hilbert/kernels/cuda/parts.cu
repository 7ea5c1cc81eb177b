// What the parts of an owner summed up (VisitSide::part), added in the order of parts: by a warp a
// row, of which lane i has the i-th part's statistic.
#include "core/cuda/pack.cuh"
#include "ops/hilbert/kernels/cuda/kernels.h"
#include "ops/hilbert/kernels/cuda/merge.cuh"

namespace hilt::kernels {
namespace {

using namespace cuda;
static_assert(Visits::kParts <= kWarp);

template <class E, bool kMerges>
__global__ void __launch_bounds__(kThreads) parts_kernel(const __grid_constant__ PartSums p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, which = static_cast<int>(blockIdx.y);
  const Rows<E> to = p.to[which].rows<E>();
  const Rows<const float> before = p.before[which].rows<const float>();
  const auto rows = static_cast<Index>(p.token.size());
  for (Index i = first_element() / kWarp; i < p.batch * p.n_heads * rows; i += element_step() / kWarp) {
    const Index row = i % rows, b = i / rows / p.n_heads, h = p.head[i / rows % p.n_heads],
                first = (b * p.heads + h) * p.parts * rows + row;
    const std::int32_t token = p.token[static_cast<std::size_t>(row)];
    float weight = 1, share = 1, keep = p.known && p.known[row] == 0 ? 0.0f : 1.0f;
    if constexpr (kMerges) {
      const float mine = lane < p.parts ? p.lse[first + lane * rows] : -INFINITY, top = warp_reduce<Larger>(mine),
                  known = top == -INFINITY ? 0.0f : top;
      if (p.marked && top != top) continue;
      weight = FastPowers::exp((mine - known) * kLog2e);
      const float total = warp_reduce<Sum>(weight);
      share = total == 0 ? 0.0f : 1 / total;
      float l = known + FastPowers::log(total) * kLn2;
      keep = 0;
      float* const lse = p.to_lse + (b * p.heads + h) * p.length + token;
      if (!p.fresh) {
        if (total == 0 && before.data == p.to[0].data) continue;
        l = merged(*lse, l, keep, share);
        __syncwarp();  // all have read
      }
      if (lane == 0) *lse = l;
    }
    const float* const sums = p.sums[which] + first * p.dim;
    for (int c = 0; c < p.dim; c += kWarp) {
      const int column = c + lane;
      float sum = 0;
      for (int part = 0; part < p.parts; ++part) {
        const float its = kMerges ? __shfl_sync(~0u, weight, part) : 1.0f;
        if (column < p.dim) sum = fmaf(its, sums[part * rows * p.dim + column], sum);
      }
      if (column >= p.dim || (p.marked && sum != sum)) continue;
      sum *= share;
      if (before.data && keep != 0) sum = fmaf(keep, before.at(b, token, h)[column], sum);
      to.at(b, token, h)[column] = static_cast<E>(sum);
    }
  }
}

}  // namespace

void add_parts(Cuda where, const PartSums& p) {
  const auto rows = p.batch * p.n_heads * static_cast<Index>(p.token.size());
  const dim3 blocks(blocks_for(rows * kWarp).x, p.to[1].data ? 2u : 1u);
  with_type<bf16, f16, float>(p.to[0].type, [&]<class E>() {
    launch("attention", where, p.lse ? parts_kernel<E, true> : parts_kernel<E, false>, blocks, kThreads, 0, p);
  });
}

}  // namespace hilt::kernels
