// Sums and maxima on a GPU over the middle of [outer, n, inner], a block a piece of SumPieces; a
// second kernel adds the pieces in order. With inner == 1 the threads of a block share one sum;
// else each has columns of its own, and rows are dealt out in turn.
#include "core/cuda/pack.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

template <class Op, class T>
__global__ void row_pieces_kernel(const T* x, double* partial, Index n, const __grid_constant__ SumPieces cut) {
  const Index piece = blockIdx.x % cut.pieces, o = blockIdx.x / cut.pieces;
  const Index begin = piece * cut.rows, end = min(begin + cut.rows, n);
  float part[4];
  for (float& p : part) p = static_cast<float>(Op::kStart);
  Index i = begin + threadIdx.x;
  const Index step = blockDim.x;
  for (; i + 3 * step < end; i += 4 * step)
    for (int k = 0; k < 4; ++k) part[k] = Op::of(part[k], static_cast<float>(x[o * n + i + k * step]));
  for (int k = 0; i < end; i += step, ++k) part[k] = Op::of(part[k], static_cast<float>(x[o * n + i]));
  const auto first = static_cast<double>(Op::of(part[0], part[1])),
             second = static_cast<double>(Op::of(part[2], part[3]));
  const double total = block_reduce<Op>(Op::of(first, second), Op::kStart);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// A thread has C neighbouring columns. blockDim = threads side by side x rows at a time, 2^n.
template <class Op, int C, class T>
__global__ void column_pieces_kernel(const T* x, double* partial, Index n, Index inner, int across,
                                     const __grid_constant__ SumPieces cut) {
  __shared__ double part[C][kThreads];
  const Index blocks = (inner + across * C - 1) / (across * C);
  const Index block = blockIdx.x % blocks, piece = blockIdx.x / blocks % cut.pieces,
              o = blockIdx.x / blocks / cut.pieces;
  const Index column = (block * across + threadIdx.x % across) * C, end = min((piece + 1) * cut.rows, n);
  const int lines = blockDim.x / across;
  float mine[C];
  for (float& m : mine) m = static_cast<float>(Op::kStart);
  if (column < inner) {
#pragma unroll 4
    for (Index r = piece * cut.rows + threadIdx.x / across; r < end; r += lines) {
      const Floats<C> v = load<C>(x + (o * n + r) * inner + column);
      for (int e = 0; e < C; ++e) mine[e] = Op::of(mine[e], v[e]);
    }
  }
  for (int e = 0; e < C; ++e) part[e][threadIdx.x] = mine[e];
  __syncthreads();
  if (threadIdx.x >= across || column >= inner) return;
  for (int e = 0; e < C; ++e) {
    double total = Op::kStart;
    for (int l = 0; l < lines; ++l) total = Op::of(total, part[e][l * across + threadIdx.x]);
    partial[(o * cut.pieces + piece) * inner + column + e] = total;
  }
}

// A block has kWarp results; its warps take pieces in turn.
template <class Op, class T>
__global__ void join_pieces_kernel(const double* partial, T* y, Index results, Index pieces, Index inner,
                                   double factor) {
  __shared__ double part[kThreads / kWarp][kWarp];
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const Index i = static_cast<Index>(blockIdx.x) * kWarp + lane;
  double all = Op::kStart;
  if (i < results)
    for (Index p = warp; p < pieces; p += warps)
      all = Op::of(all, partial[(i / inner * pieces + p) * inner + i % inner]);
  part[warp][lane] = all;
  __syncthreads();
  if (warp != 0 || i >= results) return;
  for (unsigned w = 1; w < warps; ++w) all = Op::of(all, part[w][lane]);
  y[i] = static_cast<T>(static_cast<float>(all * factor));
}

// A value's bits in rising order, NaN lowest, and behind them how far its place is from the end:
// the largest key is the first of the largest values.
__device__ unsigned long long key_of(float value, Index place) {
  const std::uint32_t bits = __float_as_uint(value + 0.0f);  // 0 and -0 are equal
  const std::uint32_t rising = value != value ? 0 : bits >> 31 ? ~bits : bits | 1u << 31;
  return static_cast<unsigned long long>(rising) << 32 | (0xffffffffu - static_cast<std::uint32_t>(place));
}
template <class T> __global__ void argmax_kernel(const T* x, std::int64_t* y, Index n) {
  unsigned long long best = 0;
  for (Index i = threadIdx.x; i < n; i += blockDim.x)
    best = Larger::of(best, key_of(static_cast<float>(x[blockIdx.x * n + i]), i));
  best = block_reduce<Larger>(best, 0ull);
  if (threadIdx.x == 0) y[blockIdx.x] = 0xffffffffu - static_cast<std::uint32_t>(best);
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

template <class Op, class T>
void join_pieces(Cuda where, const double* partial, T* y, Index results, Index pieces, Index inner, double factor) {
  launch("sum", where, join_pieces_kernel<Op, T>, dim3(static_cast<unsigned>((results + kWarp - 1) / kWarp)),
         pieces < kThreads / kWarp ? kWarp : kThreads, 0, partial, y, results, pieces, inner, factor);
}
template <class Op, class T> void reduce(Cuda where, const Reduction<T>& of) {
  const auto [x, y, partial, outer, n, inner, factor] = of;
  if (outer * inner == 0) return;
  const SumPieces cut(n, inner);
  if (inner == 1) {
    launch("sum", where, row_pieces_kernel<Op, T>, dim3(static_cast<unsigned>(outer * cut.pieces)),
           row_threads(n < cut.rows ? n : cut.rows), 0, x, partial, n, cut);
  } else {
    const auto columns = [&]<int C>() {
      int across = 1;
      while (across * C < of.inner && across < kThreads) across *= 2;
      const Index blocks = (of.inner + across * C - 1) / (across * C);
      launch("sum", where, column_pieces_kernel<Op, C, T>, dim3(static_cast<unsigned>(of.outer * cut.pieces * blocks)),
             kThreads, 0, of.x, of.partial, of.n, of.inner, across, cut);
    };
    if (inner % 4 == 0 && is_aligned(x)) columns.template operator()<4>();
    else columns.template operator()<1>();
  }
  join_pieces<Op>(where, partial, y, outer * inner, cut.pieces, inner, factor);
}

}  // namespace

template <class T, class At> void sum(At where, const Reduction<T>& of) { reduce<AddUp>(where, of); }
template <class T, class At> void max(At where, const Reduction<T>& of) { reduce<Largest>(where, of); }
template <class T, class At>
void add_pieces(At where, const double* partial, T* y, Index results, Index pieces, Index inner, double factor) {
  join_pieces<AddUp>(where, partial, y, results, pieces, inner, factor);
}

template <class T, class At> void argmax(At where, const T* x, std::int64_t* y, Index rows, Index cols) {
  launch("argmax", where, argmax_kernel<T>, dim3(static_cast<unsigned>(rows)), kThreads, 0, x, y, cols);
}

template <class T, class At> void cumsum(At where, const T* x, T* y, Index rows, Index n, bool reverse) {
  if (rows > 0) launch("cumsum", where, cumsum_kernel<T>, blocks_for(rows), kThreads, 0, x, y, rows, n, reverse);
}
template <class T, class At> void topk(At where, const T* x, std::int64_t* y, Index rows, Index n, Index k) {
  launch("topk", where, topk_kernel<T>, blocks_for(rows * n), kThreads, 0, x, y, rows * n, n, k);
}

HILT_GPU_KERNEL(sum)
HILT_GPU_KERNEL(max)
HILT_GPU_KERNEL(add_pieces)
HILT_GPU_KERNEL(argmax)
HILT_GPU_KERNEL(cumsum)
HILT_GPU_KERNEL(topk)

}  // namespace hilt::kernels
