// Optimizer steps on a GPU: a thread an element with its state, dozens of tensors in one launch.
#include <algorithm>
#include <cmath>
#include "core/cuda/pack.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

/// The tensors of one launch, as many as 4 KiB of parameters hold: blockIdx.y says whose a block
/// is.
template <class P, int kMost> struct Parts {
  P part[kMost];

  /// start(parts, grid) for all of these, of which a block takes so many elements at a time.
  template <class F> static void in_launches(std::span<const P> all, Index elements_of_block, F&& start) {
    constexpr Index kBlocks = 1024;  // of one tensor; they stride over what exceeds this
    for (std::size_t first = 0; first < all.size(); first += kMost) {
      const auto some = all.subspan(first, std::min(all.size() - first, std::size_t{kMost}));
      Parts parts;
      std::ranges::copy(some, parts.part);
      const Index longest = std::ranges::max(some, {}, &P::n).n,
                  blocks = std::min(kBlocks, (longest + elements_of_block - 1) / elements_of_block);
      start(parts, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(some.size())));
    }
  }
};
constexpr Index kUpdated = 8 * kThreads;  // elements of a block at a time

using Updates = Parts<AdamWPart, 56>;
using Squares = Parts<SquaresPart, 120>;

template <class T>
__global__ void adamw_kernel(const __grid_constant__ AdamWStep s, const double* norm_of_all, double max_norm,
                             const __grid_constant__ Updates all) {
  const AdamWPart& p = all.part[blockIdx.y];
  const AdamWElement<float> of(s);
  const float shrink = static_cast<float>(p.shrink);
  float scale = static_cast<float>(s.scale);
  if (norm_of_all) {
    const double norm = *norm_of_all;
    if (!isfinite(norm)) return;
    if (max_norm > 0 && norm * scale > max_norm) scale = static_cast<float>(max_norm / norm);
  }
  T* const w = static_cast<T*>(p.w);
  const T* const dw = static_cast<const T*>(p.dw);
#pragma unroll 4
  for (Index i = first_element(); i < p.n; i += element_step()) {
    const float weight = p.exact ? p.exact[i] : static_cast<float>(w[i]);
    const float next = of.next(weight, static_cast<float>(dw[i]) * scale, shrink, p.m[i], p.v[i]);
    if (p.exact) p.exact[i] = next;
    w[i] = static_cast<T>(next);
  }
}

__global__ void squares_kernel(const __grid_constant__ Squares all, Index piece) {
  const SquaresPart& p = all.part[blockIdx.y];
  for (Index k = blockIdx.x; k * piece < p.n; k += gridDim.x) {
    const Index end = min((k + 1) * piece, p.n);
    double sum = with_type(p.type, [&]<class T>() {
      double mine = 0;
#pragma unroll 4
      for (Index i = k * piece + threadIdx.x; i < end; i += kThreads) {
        const double v = static_cast<double>(static_cast<float>(static_cast<const T*>(p.x)[i]));
        mine += v * v;
      }
      return mine;
    });
    sum = block_reduce<Sum>(sum, 0.0);
    if (threadIdx.x == 0) p.sums[k] = sum;
  }
}

__global__ void norm_kernel(const double* sums, Index pieces, const float* loss, double* norm) {
  double sum = 0;
  for (Index i = threadIdx.x; i < pieces; i += kThreads) sum += sums[i];
  sum = block_reduce<Sum>(sum, 0.0);
  if (threadIdx.x == 0) *norm = loss && !isfinite(*loss) ? static_cast<double>(NAN) : sqrt(sum);
}

}  // namespace

template <class T, class At>
void adamw_all(At where, const AdamWStep& s, const double* norm, double max_norm, std::span<const AdamWPart> all) {
  Updates::in_launches(all, kUpdated, [&](const Updates& some, dim3 grid) {
    launch("adamw_step", where, adamw_kernel<T>, grid, kThreads, 0, s, norm, max_norm, some);
  });
}
void sums_of_squares(Cuda where, std::span<const SquaresPart> all, Index piece) {
  Squares::in_launches(all, piece, [&](const Squares& some, dim3 grid) {
    launch("global_norm", where, squares_kernel, grid, kThreads, 0, some, piece);
  });
}

void norm_of_sums(Cuda where, const double* sums, Index pieces, const float* loss, double* norm) {
  launch("global_norm", where, norm_kernel, dim3(1), kThreads, 0, sums, pieces, loss, norm);
}

HILT_GPU_KERNEL(adamw_all)

}  // namespace hilt::kernels
