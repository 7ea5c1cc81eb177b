// Cross-entropy on a GPU. A warp or a block owns a row of logits; one block sums what rows lose, in
// order. Nothing is read back. A target outside 0..classes-1 makes the loss NaN.
#include "core/cuda/rows.cuh"
#include "ops/kernels.h"
#include "ops/math.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

constexpr int kSumThreads = 1024;

// Maximum and sum in one pass: where a new maximum comes up, the sum so far is scaled down to it.
template <class R, class T> __global__ void loss_rows_kernel(Logits<T> in, float* lse, double* loss) {
  const R row(in.classes);
  if (row.index >= in.rows) return;
  const T* const x = in.x + row.index * in.classes;
  float top = -INFINITY, sum = 0;
  const auto shift_to = [](float from, float to) {
    return from == to ? 1.0f : math::exp(from - to);
  };  // of two infinities too
  row.each([&](Index i) {
    const auto v = load<R::N>(x + i);
    float here = top;
    for (int e = 0; e < R::N; ++e) here = Larger::of(here, v[e]);
    if (here == -INFINITY) return;
    sum *= shift_to(top, here), top = here;
    for (int e = 0; e < R::N; ++e) sum += shift_to(v[e], top);
  });
  const float highest = row.template reduce<Larger>(top, -INFINITY);
  sum = row.template reduce<Sum>(sum * shift_to(top, highest), 0.0f);
  if (!row.leads()) return;
  const float l = highest == -INFINITY ? highest : highest + math::log(sum);
  lse[row.index] = l;
  const std::int64_t t = in.target[row.index];
  const bool counts = t >= 0 && t < in.classes;
  loss[row.index] = t == in.ignore ? 0.0
                    : counts       ? static_cast<double>(l) - static_cast<double>(static_cast<float>(x[t]))
                                   : static_cast<double>(NAN);
}

__global__ void loss_sum_kernel(const double* loss, const std::int64_t* target, Index ignore, float* y, float* share,
                                Index rows) {
  double total = 0, count = 0;
  for (Index r = threadIdx.x; r < rows; r += blockDim.x) total += loss[r], count += target[r] == ignore ? 0 : 1;
  total = block_reduce<Sum>(total, 0.0);
  count = block_reduce<Sum>(count, 0.0);
  if (threadIdx.x != 0) return;
  *y = static_cast<float>(count > 0 ? total / count : 0);
  *share = static_cast<float>(count > 0 ? 1 / count : 0);
}

template <class R, class T>
__global__ void loss_backward_kernel(Logits<T> in, const float* lse, const float* dy, const float* share, T* dx) {
  const R row(in.classes);
  if (row.index >= in.rows) return;
  const T* const x = in.x + row.index * in.classes;
  dx += row.index * in.classes;
  const std::int64_t t = in.target[row.index];
  const float scale = t == in.ignore ? 0.0f : *dy * *share, l = lse[row.index];
  row.each([&](Index i) {
    auto v = load<R::N>(x + i);
    for (int e = 0; e < R::N; ++e)
      v.x[e] = scale == 0 ? 0.0f : scale * (math::exp(v[e] - l) - (i + e == t ? 1.0f : 0.0f));
    store(dx + i, v);
  });
}

}  // namespace

template <class T, class At>
void cross_entropy(At where, const Logits<T>& in, float* mean, float* lse, double* loss, float* share) {
  with_rows<T>(in.rows, in.classes, is_aligned(in.x), [&]<class R>(dim3 grid, int threads) {
    launch("cross_entropy", where, loss_rows_kernel<R, T>, grid, threads, 0, in, lse, loss);
  });
  launch("cross_entropy", where, loss_sum_kernel, dim3(1), kSumThreads, 0, loss, in.target, in.ignore, mean, share,
         in.rows);
}
template <class T, class At>
void cross_entropy_backward(At where, const Logits<T>& in, const float* lse, const float* dy, const float* share,
                            T* dx) {
  with_rows<T>(in.rows, in.classes, is_aligned(in.x, dx), [&]<class R>(dim3 grid, int threads) {
    launch("cross_entropy", where, loss_backward_kernel<R, T>, grid, threads, 0, in, lse, dy, share, dx);
  });
}

HILT_GPU_KERNEL(cross_entropy)
HILT_GPU_KERNEL(cross_entropy_backward)

}  // namespace hilt::kernels
