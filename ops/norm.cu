// layer_norm and rms_norm on a GPU: a warp or a block owns a row, and of dw and db a block a run of
// rows and some columns; a last kernel adds the runs in order.
#include "core/cuda/rows.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

constexpr int kWarps = 8;  // of a block that sums over rows

template <class R, class T> __global__ void norm_kernel(NormRows<T> in, T* y, float* mean, float* rstd, float epsilon) {
  const R row(in.cols);
  if (row.index >= in.rows) return;
  const T *const x = in.x + row.index * in.cols, *const w = in.w, *const b = in.b;
  y += row.index * in.cols;
  const auto values = [&](Index i) { return load<R::N>(x + i); };
  const float n = static_cast<float>(in.cols);
  const float center = mean ? row.sum(values, [](const auto& v, int e) { return v[e]; }) / n : 0.0f;
  const float square = row.sum(values, [=](const auto& v, int e) { return (v[e] - center) * (v[e] - center); }) / n;
  const float scale = 1 / sqrtf(square + epsilon);
  row.each([&](Index i) {
    auto v = load<R::N>(x + i);
    const auto slope = load<R::N>(w + i), level = b ? load<R::N>(b + i) : Floats<R::N>{};
    for (int e = 0; e < R::N; ++e) v.x[e] = (v[e] - center) * scale * slope[e] + level[e];
    store(y + i, v);
  });
  if (!row.leads()) return;
  if (mean) mean[row.index] = center;
  rstd[row.index] = scale;
}

template <class R, class T> __global__ void norm_dx_kernel(NormKept<T> kept, const T* dy, T* dx) {
  const R row(kept.cols);
  if (row.index >= kept.rows) return;
  const Index at = row.index * kept.cols;
  const T *const x = kept.x + at, *const w = kept.w;
  dy += at, dx += at;
  const float center = kept.mean ? kept.mean[row.index] : 0.0f, scale = kept.rstd[row.index];
  const float n = static_cast<float>(kept.cols);
  struct Here {
    Floats<R::N> slope, hat;
  };
  const auto here = [&](Index i) {
    const auto v = load<R::N>(x + i), g = load<R::N>(dy + i), weight = load<R::N>(w + i);
    Here h;
    for (int e = 0; e < R::N; ++e) {
      // Rounded by itself: fused, it would not cancel against the mean of its likes.
      h.slope.x[e] = __fmul_rn(g[e], weight[e]);
      h.hat.x[e] = (v[e] - center) * scale;
    }
    return h;
  };
  float along = 0, level = 0;
  row.each([&](Index i) {
    const Here h = here(i);
    for (int e = 0; e < R::N; ++e) along += h.slope[e] * h.hat[e], level += h.slope[e];
  });
  along = row.template reduce<Sum>(along, 0.0f) / n;
  level = kept.mean ? row.template reduce<Sum>(level, 0.0f) / n : 0.0f;
  row.each([&](Index i) {
    Here h = here(i);
    for (int e = 0; e < R::N; ++e) h.slope.x[e] = scale * (h.slope[e] - level - h.hat[e] * along);
    store(dx + i, h.slope);
  });
}

// partial: [2, pieces, cols] for dw and db. A thread has C neighbouring columns.
template <int C, class T>
__global__ void norm_dw_kernel(NormKept<T> kept, const T* dy, float* partial, Index per_piece) {
  const Index cols = kept.cols;
  __shared__ float part[2][kWarps][kWarp * C];
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Index column = (static_cast<Index>(blockIdx.x) * kWarp + lane) * C, piece = blockIdx.y;
  const Index end = min((piece + 1) * per_piece, kept.rows);
  float w[C] = {}, b[C] = {};
  if (column < cols) {
#pragma unroll 4
    for (Index r = piece * per_piece + warp; r < end; r += kWarps) {
      const auto g = load<C>(dy + r * cols + column), v = load<C>(kept.x + r * cols + column);
      const float center = kept.mean ? kept.mean[r] : 0.0f, scale = kept.rstd[r];
      for (int e = 0; e < C; ++e) w[e] += g[e] * ((v[e] - center) * scale), b[e] += g[e];
    }
  }
  for (int e = 0; e < C; ++e) part[0][warp][lane * C + e] = w[e], part[1][warp][lane * C + e] = b[e];
  __syncthreads();
  const Index here = static_cast<Index>(blockIdx.x) * kWarp * C + threadIdx.x;
  if (threadIdx.x >= kWarp * C || here >= cols) return;
  for (int k = 0; k < 2; ++k) {
    float sum = 0;
    for (int i = 0; i < kWarps; ++i) sum += part[k][i][threadIdx.x];
    partial[(k * static_cast<Index>(gridDim.y) + piece) * cols + here] = sum;
  }
}

// blockIdx.y: 0 for dw, 1 for db, either of which may be null.
template <class T> __global__ void norm_pieces_kernel(const float* partial, T* dw, T* db, Index pieces, Index cols) {
  __shared__ double part[kWarps][kWarp];
  T* const to = blockIdx.y == 0 ? dw : db;
  if (!to) return;
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Index column = static_cast<Index>(blockIdx.x) * kWarp + lane;
  double sum = 0;
  if (column < cols)
    for (Index p = warp; p < pieces; p += kWarps)
      sum += static_cast<double>(partial[(blockIdx.y * pieces + p) * cols + column]);
  part[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= cols) return;
  for (int i = 1; i < kWarps; ++i) sum += part[i][lane];
  to[column] = static_cast<T>(static_cast<float>(sum));
}

unsigned blocks(Index columns, Index each) { return static_cast<unsigned>((columns + each - 1) / each); }

}  // namespace

template <class T, class At>
void norm(At where, const NormRows<T>& in, T* y, wide_t<T>* mean, wide_t<T>* rstd, double epsilon) {
  with_rows<T>(in.rows, in.cols, is_aligned(in.x, in.w, in.b, y), [&]<class R>(dim3 grid, int threads) {
    launch("norm", where, norm_kernel<R, T>, grid, threads, 0, in, y, mean, rstd, static_cast<float>(epsilon));
  });
}

template <class T, class At>
void norm_backward(At where, const NormKept<T>& kept, const T* dy, T* dx, T* dw, T* db, float* partial, Index pieces) {
  const Index rows = kept.rows, cols = kept.cols;
  if (dx)
    with_rows<T>(rows, cols, is_aligned(kept.x, kept.w, dy, dx), [&]<class R>(dim3 grid, int threads) {
      launch("norm", where, norm_dx_kernel<R, T>, grid, threads, 0, kept, dy, dx);
    });
  if (!dw && !db) return;
  const auto sum_rows = [&]<int C>() {
    launch("norm", where, norm_dw_kernel<C, T>, dim3(blocks(cols, kWarp * C), static_cast<unsigned>(pieces)),
           kWarps * kWarp, 0, kept, dy, partial, (rows + pieces - 1) / pieces);
  };
  constexpr int kColumns = 4;
  if (cols % kColumns == 0 && is_aligned(kept.x) && is_aligned(dy)) sum_rows.template operator()<kColumns>();
  else sum_rows.template operator()<1>();
  launch("norm", where, norm_pieces_kernel<T>, dim3(blocks(cols, kWarp), 2), kWarps * kWarp, 0, partial, dw, db, pieces,
         cols);
}

HILT_GPU_KERNEL(norm)
HILT_GPU_KERNEL(norm_backward)

}  // namespace hilt::kernels
