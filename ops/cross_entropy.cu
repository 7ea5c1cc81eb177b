// Cross-entropy on a GPU. A block owns a row of logits; what the rows lose is summed by one block in a fixed order. Nothing is read back:
// the count of targets that matter and the incoming gradient are used where they lie. A target outside 0..classes-1 makes the loss NaN.
#include "core/cuda/reduce.cuh"
#include "ops/kernels.h"
#include "ops/math.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

constexpr int kSumThreads = 1024;

template <class T>
__global__ void loss_rows_kernel(const T* x, const std::int64_t* target, Index ignore, float* lse, double* loss, Index classes) {
  const Index row = blockIdx.x;
  x += row * classes;
  float top = -INFINITY;
  for (Index i = threadIdx.x; i < classes; i += blockDim.x) top = fmaxf(top, static_cast<float>(x[i]));
  top = block_reduce<Larger>(top, -INFINITY);
  const float shift = top - top == 0 ? top : 0;
  float sum = 0;
  for (Index i = threadIdx.x; i < classes; i += blockDim.x) sum += math::exp(static_cast<float>(x[i]) - shift);
  const float l = shift + math::log(block_reduce<Sum>(sum, 0.0f));
  if (threadIdx.x != 0) return;
  lse[row] = l;
  const std::int64_t t = target[row];
  loss[row] = t == ignore ? 0.0 : t >= 0 && t < classes ? static_cast<double>(l) - static_cast<double>(static_cast<float>(x[t])) : static_cast<double>(NAN);
}

template <class T>
__global__ void loss_sum_kernel(const double* loss, const std::int64_t* target, Index ignore, T* y, float* share, Index rows) {
  double total = 0, count = 0;
  for (Index r = threadIdx.x; r < rows; r += blockDim.x) total += loss[r], count += target[r] == ignore ? 0 : 1;
  total = block_reduce<Sum>(total, 0.0);
  count = block_reduce<Sum>(count, 0.0);
  if (threadIdx.x != 0) return;
  *y = static_cast<T>(static_cast<float>(count > 0 ? total / count : 0));
  *share = static_cast<float>(count > 0 ? 1 / count : 0);
}

template <class T>
__global__ void loss_backward_kernel(const T* x, const float* lse, const std::int64_t* target, Index ignore, const T* dy, const float* share, T* dx,
                                     Index classes) {
  const Index row = blockIdx.x;
  x += row * classes, dx += row * classes;
  const std::int64_t t = target[row];
  const float scale = t == ignore ? 0.0f : static_cast<float>(*dy) * *share, l = lse[row];
  for (Index i = threadIdx.x; i < classes; i += blockDim.x)
    dx[i] = static_cast<T>(scale == 0 ? 0.0f : scale * (math::exp(static_cast<float>(x[i]) - l) - (i == t ? 1.0f : 0.0f)));
}

}  // namespace

template <class T>
void cross_entropy(Cuda where, const T* x, const std::int64_t* target, Index ignore, T* y, float* lse, double* loss, float* share, Index rows,
                   Index classes) {
  launch("cross_entropy", where, loss_rows_kernel<T>, dim3(static_cast<unsigned>(rows)), row_threads(classes), 0, x, target, ignore, lse, loss,
         classes);
  launch("cross_entropy", where, loss_sum_kernel<T>, dim3(1), kSumThreads, 0, loss, target, ignore, y, share, rows);
}
template <class T>
void cross_entropy_backward(Cuda where, const T* x, const float* lse, const std::int64_t* target, Index ignore, const T* dy, const float* share,
                            T* dx, Index rows, Index classes) {
  launch("cross_entropy", where, loss_backward_kernel<T>, dim3(static_cast<unsigned>(rows)), row_threads(classes), 0, x, lse, target, ignore, dy,
         share, dx, classes);
}

template void cross_entropy(Cuda, const float*, const std::int64_t*, Index, float*, float*, double*, float*, Index, Index);
template void cross_entropy(Cuda, const bf16*, const std::int64_t*, Index, bf16*, float*, double*, float*, Index, Index);
template void cross_entropy(Cuda, const f16*, const std::int64_t*, Index, f16*, float*, double*, float*, Index, Index);
template void cross_entropy_backward(Cuda, const float*, const float*, const std::int64_t*, Index, const float*, const float*, float*, Index, Index);
template void cross_entropy_backward(Cuda, const bf16*, const float*, const std::int64_t*, Index, const bf16*, const float*, bf16*, Index, Index);
template void cross_entropy_backward(Cuda, const f16*, const float*, const std::int64_t*, Index, const f16*, const float*, f16*, Index, Index);

}  // namespace hilt::kernels
