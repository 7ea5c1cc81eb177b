// Optimizer steps on a GPU: a thread an element with its state, dozens of tensors in one launch.
#include <cmath>
#include <limits>
#include "core/cuda/pack.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

/// The tensors of one launch, as many as 4 KiB of parameters hold; each has its own run of blocks.
template <class P, int kMost> struct Parts {
  int count = 0;
  int first_block[kMost + 1] = {};
  P part[kMost];

  /// start(parts) for all of these, as many at a time as there is room for.
  template <class F> static void in_launches(std::span<const P> all, Index elements_of_block, F&& start) {
    Parts some;
    for (const P& p : all) {
      const Index begin = some.first_block[some.count], blocks = (p.n + elements_of_block - 1) / elements_of_block;
      if (some.count == kMost || begin + blocks > std::numeric_limits<int>::max()) start(some), some.count = 0;
      some.part[some.count] = p;
      some.first_block[some.count + 1] = some.first_block[some.count] + static_cast<int>(blocks);
      ++some.count;
    }
    start(some);
  }
  dim3 grid() const { return dim3(static_cast<unsigned>(first_block[count])); }
  /// The last one that begins at or before this block.
  __device__ int mine() const {
    int at = 0, end = count;
    while (end - at > 1) {
      const int middle = (at + end) / 2;
      (first_block[middle] <= static_cast<int>(blockIdx.x) ? at : end) = middle;
    }
    return at;
  }
};
constexpr Index kUpdated = 8 * kThreads;  // elements of a block

using Updates = Parts<AdamWPart, 56>;
using Squares = Parts<SquaresPart, 192>;
struct Rates {
  float b1, b2, a1, a2, rate, c2, epsilon, scale;
  const double* norm;
  double max_norm;
};

template <class T> __global__ void adamw_kernel(const __grid_constant__ Rates s, const __grid_constant__ Updates all) {
  const int at = all.mine();
  const AdamWPart& p = all.part[at];
  float scale = s.scale;
  const float shrink = static_cast<float>(p.shrink);
  if (s.norm) {
    const double norm = *s.norm;
    if (!isfinite(norm)) return;
    if (s.max_norm > 0 && norm * s.scale > s.max_norm) scale = static_cast<float>(s.max_norm / norm);
  }
  const Index begin = (blockIdx.x - all.first_block[at]) * kUpdated, stop = min(begin + kUpdated, p.n);
  T* const w = static_cast<T*>(p.w);
  const T* const dw = static_cast<const T*>(p.dw);
#pragma unroll 4
  for (Index i = begin + threadIdx.x; i < stop; i += kThreads) {
    const float g = static_cast<float>(dw[i]) * scale, weight = p.exact ? p.exact[i] : static_cast<float>(w[i]);
    const float mean = s.b1 * p.m[i] + s.a1 * g, square = s.b2 * p.v[i] + s.a2 * g * g;
    const float next = weight - (shrink * weight + s.rate * mean / (sqrtf(square * s.c2) + s.epsilon));
    p.m[i] = mean, p.v[i] = square;
    if (p.exact) p.exact[i] = next;
    w[i] = static_cast<T>(next);
  }
}

template <class T> __global__ void squares_kernel(const __grid_constant__ Squares all, double* sums, Index piece) {
  const int at = all.mine();
  const T* const x = static_cast<const T*>(all.part[at].x);
  const Index begin = (blockIdx.x - all.first_block[at]) * piece, end = min(begin + piece, all.part[at].n);
  double sum = 0;
#pragma unroll 4
  for (Index i = begin + threadIdx.x; i < end; i += kThreads) {
    const double v = static_cast<double>(static_cast<float>(x[i]));
    sum += v * v;
  }
  sum = block_reduce<Sum>(sum, 0.0);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
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
  const auto f = [](double x) { return static_cast<float>(x); };
  const Rates rates{f(s.beta1),       f(s.beta2),   f(1 - s.beta1), f(1 - s.beta2), f(s.lr * s.correction1),
                    f(s.correction2), f(s.epsilon), f(s.scale),     norm,           max_norm};
  Updates::in_launches(all, kUpdated, [&](const Updates& some) {
    launch("adamw_step", where, adamw_kernel<T>, some.grid(), kThreads, 0, rates, some);
  });
}
template <class T, class At>
void sums_of_squares(At where, std::span<const SquaresPart> all, double* sums, Index piece) {
  Squares::in_launches(all, piece, [&](const Squares& some) {
    launch("global_norm", where, squares_kernel<T>, some.grid(), kThreads, 0, some, sums, piece);
    sums += some.first_block[some.count];
  });
}

void norm_of_sums(Cuda where, const double* sums, Index pieces, const float* loss, double* norm) {
  launch("global_norm", where, norm_kernel, dim3(1), kThreads, 0, sums, pieces, loss, norm);
}

HILT_GPU_KERNEL(adamw_all)
HILT_GPU_KERNEL(sums_of_squares)

}  // namespace hilt::kernels
