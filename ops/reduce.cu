// Sums and maxima on a GPU over the middle of [outer, n, inner], a block a piece of SumPieces; a
// second kernel adds the pieces in order. With inner == 1 the threads of a block share one sum;
// else each has columns of its own, and rows are dealt out in turn.
#include "core/cuda/pack.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

template <class T>
__global__ void row_pieces_kernel(const T* x, double* partial, Index n, const __grid_constant__ SumPieces cut) {
  const Index piece = blockIdx.x % cut.pieces, o = blockIdx.x / cut.pieces;
  const Index begin = piece * cut.rows, end = min(begin + cut.rows, n);
  float sum[4] = {};
  Index i = begin + threadIdx.x;
  const Index step = blockDim.x;
  for (; i + 3 * step < end; i += 4 * step)
    for (int k = 0; k < 4; ++k) sum[k] += static_cast<float>(x[o * n + i + k * step]);
  for (int k = 0; i < end; i += step, ++k) sum[k] += static_cast<float>(x[o * n + i]);
  const double total =
      block_reduce<Sum>(static_cast<double>(sum[0] + sum[1]) + static_cast<double>(sum[2] + sum[3]), 0.0);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// A thread has C neighbouring columns. blockDim = threads side by side x rows at a time, 2^n.
template <int C, class T>
__global__ void column_pieces_kernel(const T* x, double* partial, Index n, Index inner, int across,
                                     const __grid_constant__ SumPieces cut) {
  __shared__ double part[C][kThreads];
  const Index blocks = (inner + across * C - 1) / (across * C);
  const Index block = blockIdx.x % blocks, piece = blockIdx.x / blocks % cut.pieces,
              o = blockIdx.x / blocks / cut.pieces;
  const Index column = (block * across + threadIdx.x % across) * C, end = min((piece + 1) * cut.rows, n);
  const int lines = blockDim.x / across;
  float sum[C] = {};
  if (column < inner) {
#pragma unroll 4
    for (Index r = piece * cut.rows + threadIdx.x / across; r < end; r += lines) {
      const Floats<C> v = load<C>(x + (o * n + r) * inner + column);
      for (int e = 0; e < C; ++e) sum[e] += v[e];
    }
  }
  for (int e = 0; e < C; ++e) part[e][threadIdx.x] = sum[e];
  __syncthreads();
  if (threadIdx.x >= across || column >= inner) return;
  for (int e = 0; e < C; ++e) {
    double total = 0;
    for (int l = 0; l < lines; ++l) total += part[e][l * across + threadIdx.x];
    partial[(o * cut.pieces + piece) * inner + column + e] = total;
  }
}

// A block has kWarp results; its warps take pieces in turn.
template <class T>
__global__ void add_pieces_kernel(const double* partial, T* y, Index results, Index pieces, Index inner,
                                  double factor) {
  __shared__ double part[kThreads / kWarp][kWarp];
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const Index i = static_cast<Index>(blockIdx.x) * kWarp + lane;
  double sum = 0;
  if (i < results)
    for (Index p = warp; p < pieces; p += warps) sum += partial[(i / inner * pieces + p) * inner + i % inner];
  part[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || i >= results) return;
  for (unsigned w = 1; w < warps; ++w) sum += part[w][lane];
  y[i] = static_cast<T>(static_cast<float>(sum * factor));
}

template <class T> __global__ void row_max_kernel(const T* x, T* y, Index n) {
  float top = -INFINITY;
  for (Index i = threadIdx.x; i < n; i += blockDim.x) top = Larger::of(top, static_cast<float>(x[blockIdx.x * n + i]));
  top = block_reduce<Larger>(top, -INFINITY);
  if (threadIdx.x == 0) y[blockIdx.x] = static_cast<T>(top);
}
template <class T> __global__ void column_max_kernel(const T* x, T* y, Index results, Index n, Index inner) {
  for (Index i = first_element(); i < results; i += element_step()) {
    const T* const from = x + i / inner * n * inner + i % inner;
    float top = static_cast<float>(from[0]);
    for (Index r = 1; r < n; ++r) top = Larger::of(top, static_cast<float>(from[r * inner]));
    y[i] = static_cast<T>(top);
  }
}

__device__ bool is_better(float v, float top) { return v > top || (top != top && v == v); }

// The first of equal maxima; NaN is passed over.
template <class T> __global__ void argmax_kernel(const T* x, std::int64_t* y, Index n) {
  __shared__ float value[kThreads];
  __shared__ Index place[kThreads];
  x += blockIdx.x * n;
  float top = -INFINITY;
  Index at = n;
  for (Index i = threadIdx.x; i < n; i += blockDim.x)
    if (at == n || is_better(static_cast<float>(x[i]), top)) top = static_cast<float>(x[i]), at = i;
  value[threadIdx.x] = top, place[threadIdx.x] = at;
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x >= half) continue;
    const float v = value[threadIdx.x + half];
    const Index p = place[threadIdx.x + half];
    if (p < n && (place[threadIdx.x] == n || is_better(v, value[threadIdx.x]) ||
                  (v == value[threadIdx.x] && p < place[threadIdx.x])))
      value[threadIdx.x] = v, place[threadIdx.x] = p;
  }
  if (threadIdx.x == 0) y[blockIdx.x] = place[0];
}

template <class T> __global__ void equals_kernel(const T* x, const T* y, T* out, Index elements) {
  for (Index i = first_element(); i < elements; i += element_step()) {
    const float a = static_cast<float>(x[i]), b = static_cast<float>(y[i]);
    out[i] = static_cast<T>(a == b || (a != a && b != b) ? 1.0f : 0.0f);
  }
}

template <class T> __global__ void cumsum_kernel(const T* x, T* y, Index rows, Index n, bool reverse) {
  for (Index r = first_element(); r < rows; r += element_step()) cumsum_row(x + r * n, y + r * n, n, reverse);
}

// Each element counts those before it, until they are k.
template <class T> __global__ void topk_kernel(const T* x, std::int64_t* y, Index elements, Index n, Index k) {
  for (Index e = first_element(); e < elements; e += element_step()) {
    Index place = 0;
    for (Index j = 0; j < n && place < k; ++j) place += comes_before(x + e / n * n, j, e % n);
    if (place < k) y[e / n * k + place] = e % n;
  }
}

}  // namespace

template <class T, class At>
void sum(At where, const T* x, T* y, double* partial, Index outer, Index n, Index inner, double factor) {
  if (outer * inner == 0) return;
  const SumPieces cut(n, inner);
  if (inner == 1) {
    launch("sum", where, row_pieces_kernel<T>, dim3(static_cast<unsigned>(outer * cut.pieces)),
           row_threads(n < cut.rows ? n : cut.rows), 0, x, partial, n, cut);
  } else {
    const auto columns = [&]<int C>() {
      int across = 1;
      while (across * C < inner && across < kThreads) across *= 2;
      const Index blocks = (inner + across * C - 1) / (across * C);
      launch("sum", where, column_pieces_kernel<C, T>, dim3(static_cast<unsigned>(outer * cut.pieces * blocks)),
             kThreads, 0, x, partial, n, inner, across, cut);
    };
    if (inner % 4 == 0 && is_aligned(x)) columns.template operator()<4>();
    else columns.template operator()<1>();
  }
  const Index results = outer * inner;
  launch("sum", where, add_pieces_kernel<T>, dim3(static_cast<unsigned>((results + kWarp - 1) / kWarp)),
         cut.pieces < kThreads / kWarp ? kWarp : kThreads, 0, partial, y, results, cut.pieces, inner, factor);
}

template <class T, class At> void max(At where, const T* x, T* y, Index outer, Index n, Index inner) {
  if (outer * inner == 0) return;
  if (inner == 1)
    launch("max", where, row_max_kernel<T>, dim3(static_cast<unsigned>(outer)), row_threads(n), 0, x, y, n);
  else
    launch("max", where, column_max_kernel<T>, blocks_for(outer * inner), kThreads, 0, x, y, outer * inner, n, inner);
}

template <class T, class At> void argmax(At where, const T* x, std::int64_t* y, Index rows, Index cols) {
  launch("argmax", where, argmax_kernel<T>, dim3(static_cast<unsigned>(rows)), kThreads, 0, x, y, cols);
}

template <class T, class At> void equals(At where, const T* x, const T* y, T* out, Index n) {
  launch("max", where, equals_kernel<T>, blocks_for(n), kThreads, 0, x, y, out, n);
}

template <class T, class At> void cumsum(At where, const T* x, T* y, Index rows, Index n, bool reverse) {
  if (rows > 0) launch("cumsum", where, cumsum_kernel<T>, blocks_for(rows), kThreads, 0, x, y, rows, n, reverse);
}
template <class T, class At> void topk(At where, const T* x, std::int64_t* y, Index rows, Index n, Index k) {
  launch("topk", where, topk_kernel<T>, blocks_for(rows * n), kThreads, 0, x, y, rows * n, n, k);
}

HILT_GPU_KERNEL(sum)
HILT_GPU_KERNEL(max)
HILT_GPU_KERNEL(argmax)
HILT_GPU_KERNEL(equals)
HILT_GPU_KERNEL(cumsum)
HILT_GPU_KERNEL(topk)

}  // namespace hilt::kernels
