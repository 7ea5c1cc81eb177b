// layer_norm and rms_norm on a GPU. Forward and dx: a block owns a row. dw and db: a block owns a run of rows and 32 columns, its warps
// take rows in turn, and what they come to is added in a fixed order; the runs are summed afterwards.
#include "core/cuda/reduce.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

constexpr int kRowWarps = 8;

template <class T>
__global__ void norm_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, Index cols, float epsilon) {
  const Index row = blockIdx.x;
  x += row * cols, y += row * cols;
  const auto total = [&](auto f) {
    float sum = 0;
    for (Index i = threadIdx.x; i < cols; i += blockDim.x) sum += f(static_cast<float>(x[i]));
    return block_reduce<Sum>(sum, 0.0f);
  };
  const float n = static_cast<float>(cols);
  const float center = mean ? total([](float v) { return v; }) / n : 0.0f;
  const float square = total([=](float v) { return (v - center) * (v - center); }) / n;
  const float scale = 1 / sqrtf(square + epsilon);
  for (Index i = threadIdx.x; i < cols; i += blockDim.x) {
    const float h = (static_cast<float>(x[i]) - center) * scale * static_cast<float>(w[i]);
    y[i] = static_cast<T>(b ? h + static_cast<float>(b[i]) : h);
  }
  if (threadIdx.x != 0) return;
  if (mean) mean[row] = center;
  rstd[row] = scale;
}

template <class T>
__global__ void norm_dx_kernel(const T* x, const T* w, const float* mean, const float* rstd, const T* dy, T* dx, Index cols) {
  const Index row = blockIdx.x;
  x += row * cols, dy += row * cols, dx += row * cols;
  const float center = mean ? mean[row] : 0.0f, scale = rstd[row], n = static_cast<float>(cols);
  // Rounded by itself: as part of a fused multiply-add it would not cancel against the mean of its likes.
  const auto slope_at = [=](Index i) { return __fmul_rn(static_cast<float>(dy[i]), static_cast<float>(w[i])); };
  float along = 0, level = 0;
  for (Index i = threadIdx.x; i < cols; i += blockDim.x) {
    const float slope = slope_at(i);
    along += slope * ((static_cast<float>(x[i]) - center) * scale);
    level += slope;
  }
  along = block_reduce<Sum>(along, 0.0f) / n;
  level = mean ? block_reduce<Sum>(level, 0.0f) / n : 0.0f;
  for (Index i = threadIdx.x; i < cols; i += blockDim.x) {
    const float slope = slope_at(i), hat = (static_cast<float>(x[i]) - center) * scale;
    dx[i] = static_cast<T>(scale * (slope - level - hat * along));
  }
}

template <class T>
__global__ void norm_dw_kernel(const T* x, const float* mean, const float* rstd, const T* dy, float* dw, float* db, Index rows, Index cols,
                               Index per_piece) {
  __shared__ float part[2][kRowWarps][kWarp];
  const Index column = static_cast<Index>(blockIdx.x) * kWarp + threadIdx.x % kWarp, piece = blockIdx.y;
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Index end = min((piece + 1) * per_piece, rows);
  float w = 0, b = 0;
  if (column < cols)
    for (Index r = piece * per_piece + warp; r < end; r += kRowWarps) {
      const float g = static_cast<float>(dy[r * cols + column]);
      if (dw) w += g * ((static_cast<float>(x[r * cols + column]) - (mean ? mean[r] : 0.0f)) * rstd[r]);
      b += g;
    }
  part[0][warp][lane] = w, part[1][warp][lane] = b;
  __syncthreads();
  if (warp != 0 || column >= cols) return;
  for (int i = 1; i < kRowWarps; ++i) w += part[0][i][lane], b += part[1][i][lane];
  if (dw) dw[piece * cols + column] = w;
  if (db) db[piece * cols + column] = b;
}

}  // namespace

template <class T>
void norm(Cuda where, const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, Index rows, Index cols, double epsilon) {
  launch("norm", where, norm_kernel<T>, dim3(static_cast<unsigned>(rows)), row_threads(cols), 0, x, w, b, y, mean, rstd, cols,
         static_cast<float>(epsilon));
}

template <class T>
void norm_backward(Cuda where, const T* x, const T* w, const float* mean, const float* rstd, const T* dy, T* dx, float* dw, float* db, Index rows,
                   Index cols, Index pieces) {
  if (rows == 0 || cols == 0) return;
  if (dx) launch("norm", where, norm_dx_kernel<T>, dim3(static_cast<unsigned>(rows)), row_threads(cols), 0, x, w, mean, rstd, dy, dx, cols);
  if (!dw && !db) return;
  const dim3 grid(static_cast<unsigned>((cols + kWarp - 1) / kWarp), static_cast<unsigned>(pieces));
  launch("norm", where, norm_dw_kernel<T>, grid, kRowWarps * kWarp, 0, x, mean, rstd, dy, dw, db, rows, cols, (rows + pieces - 1) / pieces);
}

template void norm(Cuda, const float*, const float*, const float*, float*, float*, float*, Index, Index, double);
template void norm_backward(Cuda, const float*, const float*, const float*, const float*, const float*, float*, float*, float*, Index, Index, Index);
template void norm(Cuda, const bf16*, const bf16*, const bf16*, bf16*, float*, float*, Index, Index, double);
template void norm_backward(Cuda, const bf16*, const bf16*, const float*, const float*, const bf16*, bf16*, float*, float*, Index, Index, Index);
template void norm(Cuda, const f16*, const f16*, const f16*, f16*, float*, float*, Index, Index, double);
template void norm_backward(Cuda, const f16*, const f16*, const float*, const float*, const f16*, f16*, float*, float*, Index, Index, Index);

}  // namespace hilt::kernels
