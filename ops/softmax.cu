// The softmax family on a GPU. A block owns a row: its threads read neighbouring columns, and maximum and sum are reduced in a fixed
// order. Arithmetic is f32; a row is read again for each pass, from the cache after the first.
#include "core/cuda/reduce.cuh"
#include "ops/kernels.h"
#include "ops/math.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

template <class T>
__device__ float row_max(const T* x, Index cols) {
  float top = -INFINITY;
  for (Index i = threadIdx.x; i < cols; i += blockDim.x) top = fmaxf(top, static_cast<float>(x[i]));
  return block_reduce<Larger>(top, -INFINITY);
}
template <class F>
__device__ float row_sum(Index cols, F f) {
  float sum = 0;
  for (Index i = threadIdx.x; i < cols; i += blockDim.x) sum += f(i);
  return block_reduce<Sum>(sum, 0.0f);
}
/// log sum e^x = shift + rest; in two parts, for what is far from zero.
struct RowLse { float shift, rest; };
template <class T>
__device__ RowLse row_lse(const T* x, Index cols) {
  const float top = row_max(x, cols);
  const float shift = top - top == 0 ? top : 0;  // a row of -inf, or one with +inf, keeps its meaning
  return {shift, math::log(row_sum(cols, [=](Index i) { return math::exp(static_cast<float>(x[i]) - shift); }))};
}

template <class T>
__global__ void softmax_kernel(const T* x, T* y, Index cols) {
  x += blockIdx.x * cols, y += blockIdx.x * cols;
  const float top = row_max(x, cols);
  const float scale = 1 / row_sum(cols, [=](Index i) { return math::exp(static_cast<float>(x[i]) - top); });
  for (Index i = threadIdx.x; i < cols; i += blockDim.x) y[i] = static_cast<T>(math::exp(static_cast<float>(x[i]) - top) * scale);
}

template <class T>
__global__ void softmax_backward_kernel(const T* y, const T* dy, T* dx, Index cols) {
  y += blockIdx.x * cols, dy += blockIdx.x * cols, dx += blockIdx.x * cols;
  const float dot = row_sum(cols, [=](Index i) { return static_cast<float>(y[i]) * static_cast<float>(dy[i]); });
  for (Index i = threadIdx.x; i < cols; i += blockDim.x) dx[i] = static_cast<T>(static_cast<float>(y[i]) * (static_cast<float>(dy[i]) - dot));
}

template <class T>
__global__ void log_softmax_kernel(const T* x, T* y, Index cols) {
  x += blockIdx.x * cols, y += blockIdx.x * cols;
  const RowLse lse = row_lse(x, cols);
  for (Index i = threadIdx.x; i < cols; i += blockDim.x) y[i] = static_cast<T>((static_cast<float>(x[i]) - lse.shift) - lse.rest);
}

template <class T>
__global__ void log_softmax_backward_kernel(const T* y, const T* dy, T* dx, Index cols) {
  y += blockIdx.x * cols, dy += blockIdx.x * cols, dx += blockIdx.x * cols;
  const float total = row_sum(cols, [=](Index i) { return static_cast<float>(dy[i]); });
  for (Index i = threadIdx.x; i < cols; i += blockDim.x)
    dx[i] = static_cast<T>(static_cast<float>(dy[i]) - math::exp(static_cast<float>(y[i])) * total);
}

template <class T>
__global__ void logsumexp_kernel(const T* x, T* y, Index cols) {
  const RowLse lse = row_lse(x + blockIdx.x * cols, cols);
  if (threadIdx.x == 0) y[blockIdx.x] = static_cast<T>(lse.shift + lse.rest);
}

template <class T>
__global__ void logsumexp_backward_kernel(const T* x, const T* dy, T* dx, Index cols) {
  x += blockIdx.x * cols, dx += blockIdx.x * cols;
  const RowLse lse = row_lse(x, cols);
  const float g = static_cast<float>(dy[blockIdx.x]);
  for (Index i = threadIdx.x; i < cols; i += blockDim.x)
    dx[i] = static_cast<T>(g * math::exp((static_cast<float>(x[i]) - lse.shift) - lse.rest));
}

dim3 a_block_a_row(Index rows) { return dim3(static_cast<unsigned>(rows)); }

}  // namespace

template <class T> void softmax(Cuda where, const T* x, T* y, Index rows, Index cols) {
  launch("softmax", where, softmax_kernel<T>, a_block_a_row(rows), row_threads(cols), 0, x, y, cols);
}
template <class T> void softmax_backward(Cuda where, const T* y, const T* dy, T* dx, Index rows, Index cols) {
  launch("softmax", where, softmax_backward_kernel<T>, a_block_a_row(rows), row_threads(cols), 0, y, dy, dx, cols);
}
template <class T> void log_softmax(Cuda where, const T* x, T* y, Index rows, Index cols) {
  launch("log_softmax", where, log_softmax_kernel<T>, a_block_a_row(rows), row_threads(cols), 0, x, y, cols);
}
template <class T> void log_softmax_backward(Cuda where, const T* y, const T* dy, T* dx, Index rows, Index cols) {
  launch("log_softmax", where, log_softmax_backward_kernel<T>, a_block_a_row(rows), row_threads(cols), 0, y, dy, dx, cols);
}
template <class T> void logsumexp(Cuda where, const T* x, T* y, Index rows, Index cols) {
  launch("logsumexp", where, logsumexp_kernel<T>, a_block_a_row(rows), row_threads(cols), 0, x, y, cols);
}
template <class T> void logsumexp_backward(Cuda where, const T* x, const T* dy, T* dx, Index rows, Index cols) {
  launch("logsumexp", where, logsumexp_backward_kernel<T>, a_block_a_row(rows), row_threads(cols), 0, x, dy, dx, cols);
}

template void softmax(Cuda, const float*, float*, Index, Index);
template void softmax_backward(Cuda, const float*, const float*, float*, Index, Index);
template void log_softmax(Cuda, const float*, float*, Index, Index);
template void log_softmax_backward(Cuda, const float*, const float*, float*, Index, Index);
template void logsumexp(Cuda, const float*, float*, Index, Index);
template void logsumexp_backward(Cuda, const float*, const float*, float*, Index, Index);
template void softmax(Cuda, const bf16*, bf16*, Index, Index);
template void softmax_backward(Cuda, const bf16*, const bf16*, bf16*, Index, Index);
template void log_softmax(Cuda, const bf16*, bf16*, Index, Index);
template void log_softmax_backward(Cuda, const bf16*, const bf16*, bf16*, Index, Index);
template void logsumexp(Cuda, const bf16*, bf16*, Index, Index);
template void logsumexp_backward(Cuda, const bf16*, const bf16*, bf16*, Index, Index);
template void softmax(Cuda, const f16*, f16*, Index, Index);
template void softmax_backward(Cuda, const f16*, const f16*, f16*, Index, Index);
template void log_softmax(Cuda, const f16*, f16*, Index, Index);
template void log_softmax_backward(Cuda, const f16*, const f16*, f16*, Index, Index);
template void logsumexp(Cuda, const f16*, f16*, Index, Index);
template void logsumexp_backward(Cuda, const f16*, const f16*, f16*, Index, Index);

}  // namespace hilt::kernels
