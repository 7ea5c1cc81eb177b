// The softmax family on a GPU, in f32. A warp or a block owns a row, reduces it in a fixed order,
// and reads it again for each pass, from the cache after the first.
#include "core/cuda/rows.cuh"
#include "ops/kernels.h"
#include "ops/math.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

/// log sum e^x = shift + rest; in two parts, for what is far from zero.
struct RowLse {
  float shift, rest;
};
template <class R, class T> __device__ float sum_of_exp(const R& row, const T* x, float shift) {
  return row.sum([=](Index i) { return load<R::N>(x + i); },
                 [=](const auto& v, int e) { return math::exp(v[e] - shift); });
}
template <class R, class T> __device__ RowLse row_lse(const R& row, const T* x) {
  const float top = row.max(x);
  const float shift = top - top == 0 ? top : 0;  // a row of -inf, or one with +inf, keeps its meaning
  return {shift, math::log(sum_of_exp(row, x, shift))};
}

/// to = f(a, b), element by element.
template <class R, class T, class F> __device__ void map_row(const R& row, const T* a, const T* b, T* to, F f) {
  row.each([&](Index i) {
    auto v = load<R::N>(a + i);
    const auto u = load<R::N>(b + i);
    for (int e = 0; e < R::N; ++e) v.x[e] = f(v[e], u[e]);
    store(to + i, v);
  });
}

template <class R, class T> __global__ void softmax_kernel(const T* x, T* y, Index rows, Index cols) {
  const R row(cols);
  if (row.index >= rows) return;
  x += row.index * cols, y += row.index * cols;
  const float top = row.max(x);
  const float scale = 1 / sum_of_exp(row, x, top);
  map_row(row, x, x, y, [=](float v, float) { return math::exp(v - top) * scale; });
}

template <class R, class T>
__global__ void softmax_backward_kernel(const T* y, const T* dy, T* dx, Index rows, Index cols) {
  const R row(cols);
  if (row.index >= rows) return;
  y += row.index * cols, dy += row.index * cols, dx += row.index * cols;
  struct Both {
    Floats<R::N> y, dy;
  };
  const float dot = row.sum(
      [=](Index i) {
        return Both{load<R::N>(y + i), load<R::N>(dy + i)};
      },
      [](const Both& v, int e) { return v.y[e] * v.dy[e]; });
  map_row(row, y, dy, dx, [=](float p, float g) { return p * (g - dot); });
}

template <class R, class T> __global__ void log_softmax_kernel(const T* x, T* y, Index rows, Index cols) {
  const R row(cols);
  if (row.index >= rows) return;
  x += row.index * cols, y += row.index * cols;
  const RowLse lse = row_lse(row, x);
  map_row(row, x, x, y, [=](float v, float) { return (v - lse.shift) - lse.rest; });
}

template <class R, class T>
__global__ void log_softmax_backward_kernel(const T* y, const T* dy, T* dx, Index rows, Index cols) {
  const R row(cols);
  if (row.index >= rows) return;
  y += row.index * cols, dy += row.index * cols, dx += row.index * cols;
  const float total = row.sum([=](Index i) { return load<R::N>(dy + i); }, [](const auto& g, int e) { return g[e]; });
  map_row(row, y, dy, dx, [=](float v, float g) { return g - math::exp(v) * total; });
}

template <class R, class T> __global__ void logsumexp_kernel(const T* x, T* y, Index rows, Index cols) {
  const R row(cols);
  if (row.index >= rows) return;
  const RowLse lse = row_lse(row, x + row.index * cols);
  if (row.leads()) y[row.index] = static_cast<T>(lse.shift + lse.rest);
}

template <class R, class T>
__global__ void logsumexp_backward_kernel(const T* x, const T* dy, T* dx, Index rows, Index cols) {
  const R row(cols);
  if (row.index >= rows) return;
  x += row.index * cols, dx += row.index * cols;
  const RowLse lse = row_lse(row, x);
  const float g = static_cast<float>(dy[row.index]);
  map_row(row, x, x, dx, [=](float v, float) { return g * math::exp((v - lse.shift) - lse.rest); });
}

}  // namespace

template <class T, class At> void softmax(At where, const T* x, T* y, Index rows, Index cols) {
  with_rows<T>(rows, cols, is_aligned(x, y), [&]<class R>(dim3 grid, int threads) {
    launch("softmax", where, softmax_kernel<R, T>, grid, threads, 0, x, y, rows, cols);
  });
}
template <class T, class At> void softmax_backward(At where, const T* y, const T* dy, T* dx, Index rows, Index cols) {
  with_rows<T>(rows, cols, is_aligned(y, dy, dx), [&]<class R>(dim3 grid, int threads) {
    launch("softmax", where, softmax_backward_kernel<R, T>, grid, threads, 0, y, dy, dx, rows, cols);
  });
}
template <class T, class At> void log_softmax(At where, const T* x, T* y, Index rows, Index cols) {
  with_rows<T>(rows, cols, is_aligned(x, y), [&]<class R>(dim3 grid, int threads) {
    launch("log_softmax", where, log_softmax_kernel<R, T>, grid, threads, 0, x, y, rows, cols);
  });
}
template <class T, class At>
void log_softmax_backward(At where, const T* y, const T* dy, T* dx, Index rows, Index cols) {
  with_rows<T>(rows, cols, is_aligned(y, dy, dx), [&]<class R>(dim3 grid, int threads) {
    launch("log_softmax", where, log_softmax_backward_kernel<R, T>, grid, threads, 0, y, dy, dx, rows, cols);
  });
}
template <class T, class At> void logsumexp(At where, const T* x, T* y, Index rows, Index cols) {
  with_rows<T>(rows, cols, is_aligned(x), [&]<class R>(dim3 grid, int threads) {
    launch("logsumexp", where, logsumexp_kernel<R, T>, grid, threads, 0, x, y, rows, cols);
  });
}
template <class T, class At> void logsumexp_backward(At where, const T* x, const T* dy, T* dx, Index rows, Index cols) {
  with_rows<T>(rows, cols, is_aligned(x, dx), [&]<class R>(dim3 grid, int threads) {
    launch("logsumexp", where, logsumexp_backward_kernel<R, T>, grid, threads, 0, x, dy, dx, rows, cols);
  });
}

HILT_GPU_KERNEL(softmax)
HILT_GPU_KERNEL(softmax_backward)
HILT_GPU_KERNEL(log_softmax)
HILT_GPU_KERNEL(log_softmax_backward)
HILT_GPU_KERNEL(logsumexp)
HILT_GPU_KERNEL(logsumexp_backward)

}  // namespace hilt::kernels
