// What works along rows on a GPU, in f32: the ops of rows.h, norms' sums over rows, and rotations.
// A warp or a block owns a row, reduces it in a fixed order, and reads it again for each pass, from
// the cache after the first.
#include "core/cuda/pack.cuh"
#include "ops/kernels.h"
#include "ops/rows.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

template <class R, class Op> __global__ void rows_kernel(const __grid_constant__ Op op) {
  const R row(op.cols);
  if (row.index < op.rows) op(row);
}

constexpr int kSumThreads = 1024;

__global__ void mean_loss_kernel(const double* loss, const std::int64_t* target, Index ignore, float* y, float* share,
                                 Index rows) {
  double total = 0, count = 0;
  for (Index r = threadIdx.x; r < rows; r += blockDim.x) total += loss[r], count += target[r] == ignore ? 0 : 1;
  total = block_reduce<Sum>(total, 0.0);
  count = block_reduce<Sum>(count, 0.0);
  if (threadIdx.x != 0) return;
  *y = static_cast<float>(count > 0 ? total / count : 0);
  *share = static_cast<float>(count > 0 ? 1 / count : 0);
}

// ---- a norm's dw and db: sums over rows, of which a block has a piece and some columns ----------
constexpr int kWarps = 8;  // of a block

// partial: [2, pieces, cols] for dw and db. A thread has C neighbouring columns.
template <int C, class T>
__global__ void norm_columns_kernel(const __grid_constant__ NormBackward<T> of, double* partial, Index per_piece) {
  const Index cols = of.cols;
  __shared__ float part[2][kWarps][kWarp * C];
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Index column = (static_cast<Index>(blockIdx.x) * kWarp + lane) * C, piece = blockIdx.y;
  const Index end = min((piece + 1) * per_piece, of.rows);
  float w[C] = {}, b[C] = {};
  if (column < cols) {
#pragma unroll 4
    for (Index r = piece * per_piece + warp; r < end; r += kWarps) {
      const auto g = load<C>(of.dy + r * cols + column), v = load<C>(of.x + r * cols + column);
      const float center = of.mean ? of.mean[r] : 0.0f, scale = of.rstd[r];
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

// A warp turns the heads of a token, a thread N neighbouring pairs at a time.
template <int N, class T> __global__ void rotate_kernel(Rotation by, const float* table, const T* x, T* y) {
  const int half = static_cast<int>(by.dim / 2), packs = static_cast<int>(by.heads) * half / N,
            angles = static_cast<int>(by.axes) * half;  // of a token
  const float turn = static_cast<float>(by.sign);
  for (Index token = first_element() / kWarp; token < by.outer * by.length; token += element_step() / kWarp) {
    const float *const cosines = table + token % by.length * angles, *const sines = cosines + by.length * angles;
    const Index row = token * by.heads * by.dim;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x % kWarp); i < packs; i += kWarp) {
      const int head = i * N / half, d = i * N % half;
      const Index first = row + head * by.dim + d, second = first + half;
      Floats<N> a = load<N>(x + first), b = load<N>(x + second);
      if (head < by.turning) {
        const int at = i * N % angles;
        const Floats<N> c = load<N>(cosines + at), s = load<N>(sines + at), from = a;
        for (int e = 0; e < N; ++e) {
          a.x[e] = from[e] * c[e] - b[e] * (s[e] * turn);
          b.x[e] = from[e] * (s[e] * turn) + b[e] * c[e];
        }
      }
      store(y + first, a), store(y + second, b);
    }
  }
}

}  // namespace

template <class Op, class At> void along_rows(At where, const char* name, const Op& op) {
  const bool aligned = std::apply([](const auto*... p) { return is_aligned(p...); }, op.in_packs());
  with_rows<typename Op::Element>(op.rows, op.cols, aligned, [&]<class R>(dim3 grid, int threads) {
    launch(name, where, rows_kernel<R, Op>, grid, threads, 0, op);
  });
}

void mean_loss(Cuda where, const double* loss, const std::int64_t* target, Index ignore, float* y, float* share,
               Index rows) {
  launch("cross_entropy", where, mean_loss_kernel, dim3(1), kSumThreads, 0, loss, target, ignore, y, share, rows);
}

template <class T, class At>
void norm_columns(At where, const NormBackward<T>& of, T* dw, T* db, double* partial, Index pieces) {
  if (!dw && !db) return;
  const auto sum_rows = [&]<int C>() {
    const auto blocks = static_cast<unsigned>((of.cols + kWarp * C - 1) / (kWarp * C));
    launch("norm", where, norm_columns_kernel<C, T>, dim3(blocks, static_cast<unsigned>(pieces)), kWarps * kWarp, 0, of,
           partial, (of.rows + pieces - 1) / pieces);
  };
  constexpr int kColumns = 4;
  if (of.cols % kColumns == 0 && is_aligned(of.x, of.dy)) sum_rows.template operator()<kColumns>();
  else sum_rows.template operator()<1>();
  if (dw) add_pieces(where, partial, dw, of.cols, pieces, of.cols, 1);
  if (db) add_pieces(where, partial + pieces * of.cols, db, of.cols, pieces, of.cols, 1);
}

template <class T, class At> void rotate(At where, const Rotation& by, const wide_t<T>* table, const T* x, T* y) {
  check(by.heads * by.dim <= std::numeric_limits<int>::max(), "rotary: ", by.heads, " heads of ", by.dim,
        " are too much for one token");
  const bool whole = by.dim / 2 % kPack<T> == 0 && is_aligned(x, y, table);
  launch("rotary", where, whole ? rotate_kernel<kPack<T>, T> : rotate_kernel<1, T>,
         blocks_for(by.outer * by.length * kWarp), kThreads, 0, by, table, x, y);
}

#define HILT_GPU_ROWS(OP)                  \
  HILT_KERNEL(along_rows, OP<float>, Cuda) \
  HILT_KERNEL(along_rows, OP<bf16>, Cuda) HILT_KERNEL(along_rows, OP<f16>, Cuda)
HILT_ROW_OPS(HILT_GPU_ROWS)
HILT_GPU_KERNEL(norm_columns)
HILT_GPU_KERNEL(rotate)

}  // namespace hilt::kernels
