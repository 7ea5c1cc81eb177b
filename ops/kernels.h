#pragma once
#include "core/dispatch.h"
#include "core/random.h"

// The catalogue of kernels, by op. A kernel takes raw pointers to dense data and sizes last. For
// the CPU it is compiled once an instruction set (ops/isa.h), and visit_cpu picks; for a GPU it has
// f32, bf16 and f16, and only starts what it asks for. At: CpuAt<I> or Cuda.

namespace hilt::kernels {

// ---- reductions ---------------------------------------------------------------------------------
/// How a sum over the middle axis is cut: columns that stay in L1, and pieces of so many rows.
struct SumPieces {
  static constexpr Index kPiece = 1 << 15;  // elements one thread reduces before it hands on a partial result
  static constexpr Index kColumns = 256;
  Index block, rows, pieces, blocks;
  [[gnu::always_inline]] constexpr SumPieces(Index n, Index inner)
      : block(inner < kColumns ? inner : kColumns),
        rows(block > 0 ? kPiece / block : 1),
        pieces(n > rows ? (n + rows - 1) / rows : 1),
        blocks(block > 0 ? (inner + block - 1) / block : 0) {}
};

// x: dense [outer, n, inner]; y: [outer, inner]. Sums are built in f32 (f64 for f64) over fixed
// pieces of the middle axis, and the pieces in order in f64, so that they depend on the shape
// alone. partial: [outer, pieces, inner].
template <class T, class At>
void sum(At, const T* x, T* y, double* partial, Index outer, Index n, Index inner, double factor);
template <class T, class At> void max(At, const T* x, T* y, Index outer, Index n, Index inner);
// The first of a row's maxima; on a GPU, as the next.
template <class T, class At> void argmax(At, const T* x, std::int64_t* y, Index rows, Index cols);
// 1 where x equals y or both are NaN, else 0.
template <class T, class At> void equals(At, const T* x, const T* y, T* out, Index n);
// On a GPU: running sums, or those from the other end; the places of the k largest, in order.
template <class T, class At> void cumsum(At, const T* x, T* y, Index rows, Index n, bool reverse);
template <class T, class At> void topk(At, const T* x, std::int64_t* y, Index rows, Index n, Index k);
template <class T> constexpr void cumsum_row(const T* x, T* y, Index n, bool reverse) {
  double sum = 0;
  for (Index i = reverse ? n - 1 : 0; i >= 0 && i < n; i += reverse ? -1 : 1)
    y[i] = static_cast<T>(static_cast<wide_t<T>>(sum += static_cast<double>(x[i])));
}
/// Whether element i of a row precedes j in falling order: NaN first, of equals the lower index.
template <class T> constexpr bool comes_before(const T* row, Index i, Index j) {
  const wide_t<T> a = row[i], b = row[j];
  return a > b || (a != a && b == b) || ((a == b || (a != a && b != b)) && i < j);
}

// ---- softmax, norms, rotary, dropout ------------------------------------------------------------
// Dense rows x cols. lse [rows], statistics [rows].
template <class T, class At> void softmax(At, const T* x, T* y, Index rows, Index cols);
template <class T, class At> void softmax_backward(At, const T* y, const T* dy, T* dx, Index rows, Index cols);
template <class T, class At> void log_softmax(At, const T* x, T* y, Index rows, Index cols);
template <class T, class At> void log_softmax_backward(At, const T* y, const T* dy, T* dx, Index rows, Index cols);
template <class T, class At> void logsumexp(At, const T* x, T* y, Index rows, Index cols);
template <class T, class At> void logsumexp_backward(At, const T* x, const T* dy, T* dx, Index rows, Index cols);
/// What a norm reads, and what its backward reads again: x and w, and of each row the statistics.
template <class T> struct NormRows {
  const T *x, *w, *b;  // b may be null
  Index rows, cols;
};
template <class T> struct NormKept {
  const T *x, *w;
  const wide_t<T>*mean, *rstd;
  Index rows, cols;
};
// y = (x - mean) rstd w + b; without `mean` the root mean square: y = x rstd w.
template <class T, class At>
void norm(At, const NormRows<T>& in, T* y, wide_t<T>* mean, wide_t<T>* rstd, double epsilon);
// On the CPU: dx, and dw and db added up over the rows of this call; any of the three may be null.
template <class T, class At>
void norm_rows_backward(At, const NormKept<T>& kept, const T* dy, T* dx, wide_t<T>* dw, wide_t<T>* db);
// On a GPU: the same over all rows, which are summed in so many pieces. partial: [2, pieces, cols].
template <class T, class At>
void norm_backward(At, const NormKept<T>& kept, const T* dy, T* dx, T* dw, T* db, float* partial, Index pieces);

/// x, y: [outer, length, heads, dim]. The first `turning` heads turn, back where the sign is -1.
struct Rotation {
  Index outer, length, heads, dim, turning;
  int sign;
};
// table: cos then sin of [length, dim / 2].
template <class T, class At> void rotate(At, const Rotation& by, const wide_t<T>* table, const T* x, T* y);

// y = x / (1 - p) where element first + i of the key's stream survives, else 0.
template <class T, class At> void dropout(At, const T* x, T* y, Index first, Index n, double p, RandomKey key);

// ---- cross-entropy ------------------------------------------------------------------------------
// One row of n logits. target < 0: none.
template <class T, class At> wide_t<T> row_logsumexp(At, const T* x, Index n);
template <class T, class At>
void row_cross_entropy_backward(At, const T* x, wide_t<T> lse, Index target, double scale, T* dx, Index n);

// On a GPU all rows at once: lse, losses and their mean, and `share`, 1 / how many targets count.
template <class T> struct Logits {
  const T* x;
  Index rows, classes;
  const std::int64_t* target;
  Index ignore;
};
template <class T, class At>
void cross_entropy(At, const Logits<T>& in, float* mean, float* lse, double* loss, float* share);
template <class T, class At>
void cross_entropy_backward(At, const Logits<T>& in, const float* lse, const float* dy, const float* share, T* dx);

// ---- picking and placing ------------------------------------------------------------------------
// x: [outer, extent] rows of so many bytes, y: [outer, n] of them.
void gather(Cuda, const void* x, const std::int64_t* index, void* y, Index outer, Index n, Index extent,
            Index row_bytes);
/// Orders of rows of `length` tokens, one after the other or one for all: pi [n]. `rows` of them
/// are judged: each is a bijection inside documents, whose numbers [documents] say which are.
struct Inversion {
  const std::int64_t* pi;
  Index n, rows, length;
  const std::int32_t* document = nullptr;
  Index documents = 0;
};
// token_at, position_of: [n], counted through all rows, the second all -1 before. A token that does
// not fit is -1, and cuda::check_verdict() names it.
void invert(Cuda, const Inversion& how, std::int64_t* token_at, std::int64_t* position_of);
// x: [outer, n, inner], y: [outer, extent, inner]; the index fixes in which order rows of one place
// are added.
template <class T, class At>
void scatter_add(At, const T* x, const std::int64_t* index, T* y, Index outer, Index n, Index extent, Index inner);

// ---- optimizers ---------------------------------------------------------------------------------
/// What one AdamW step multiplies by; `shrink` = lr decay (taken off, for 1 - shrink would lose its
/// digits in f32), the corrections are 1 / (1 - beta^t), `scale` is that of gradients.
struct AdamWStep {
  double lr, beta1, beta2, epsilon, shrink, correction1, correction2, scale;
};

// n elements, dense. `exact` is the f32 shadow of a 16-bit w, or null.
template <class T, class At>
void adamw(At, const AdamWStep&, T* w, const T* dw, wide_t<T>* m, wide_t<T>* v, wide_t<T>* exact, Index n);
template <class T, class At> double sum_of_squares(At, const T* x, Index n);

// On a GPU many tensors at once, each with its own `shrink`; norm: see Clip, or null.
struct AdamWPart {
  void* w;
  const void* dw;
  float *m, *v, *exact;
  Index n;
  double shrink;
};
template <class T, class At>
void adamw_all(At, const AdamWStep&, const double* norm, double max_norm, std::span<const AdamWPart>);
// sums[i]: of the i-th piece, counting through all tensors.
struct SquaresPart {
  const void* x;
  Index n;
};
template <class T, class At> void sums_of_squares(At, std::span<const SquaresPart>, double* sums, Index piece);
// *norm = sqrt of their sum, or NaN where the loss, unless it is null, is not finite.
void norm_of_sums(Cuda, const double* sums, Index pieces, const float* loss, double* norm);

}  // namespace hilt::kernels
