#pragma once
#include <cmath>
#include "core/dispatch.h"
#include "core/random.h"

// The catalogue of kernels, by op. A kernel takes raw pointers to dense data and sizes last. For
// the CPU it is compiled once an instruction set (ops/isa.h), and visit picks; for a GPU it has
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

/// x: [outer, n, inner], dense; y: [outer, inner], by the factor; partial: [outer, pieces, inner].
template <class T> struct Reduction {
  const T* x;
  T* y;
  double* partial;
  Index outer, n, inner;
  double factor = 1;
};
// Sums are built in f32 (f64 for f64) over fixed pieces of the middle axis, and the pieces in order
// in f64, so that they depend on the shape alone; maxima likewise. Of a maximum n is not 0.
template <class T, class At> void sum(At, const Reduction<T>& of);
template <class T, class At> void max(At, const Reduction<T>& of);
// On a GPU: y from partial alone, with so many pieces.
template <class T, class At>
void add_pieces(At, const double* partial, T* y, Index results, Index pieces, Index inner, double factor);
/// What a sum and a maximum do with two numbers.
struct AddUp {
  static constexpr double kStart = 0;
  template <class W> [[gnu::always_inline]] static constexpr W of(W a, W b) { return a + b; }
};
struct Largest {  // NaN wins
  static constexpr double kStart = -std::numeric_limits<double>::infinity();
  template <class W> [[gnu::always_inline]] static constexpr W of(W a, W b) { return b > a || b != b ? b : a; }
};
// The first of a row's maxima; on a GPU, as the next.
template <class T, class At> void argmax(At, const T* x, std::int64_t* y, Index rows, Index cols);
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

// ---- rows: rows.h has the ops along them --------------------------------------------------------
template <class T> struct NormBackward;
// On the CPU: dx, and dw and db added up over some rows; any of the three may be null.
template <class T, class At>
void norm_rows_backward(At, const NormBackward<T>& op, Index begin, Index end, wide_t<T>* dw, wide_t<T>* db);
// On a GPU: dw and db, either of which may be null, over all rows, which are summed in so many
// pieces. partial: [2, pieces, cols].
template <class T, class At>
void norm_columns(At, const NormBackward<T>& op, T* dw, T* db, double* partial, Index pieces);
// On a GPU: the mean of the losses of targets that are not `ignore`, and 1 / how many they are.
void mean_loss(Cuda, const double* loss, const std::int64_t* target, Index ignore, float* mean, float* share,
               Index rows);

// ---- rotary, dropout ----------------------------------------------------------------------------
/// x, y: [outer, length, heads, dim]. The first `turning` heads turn, back where the sign is -1,
/// each by the next of so many axes.
struct Rotation {
  Index outer, length, heads, dim, turning, axes;
  int sign;
};
// table: cos then sin of [length, axes, dim / 2].
template <class T, class At> void rotate(At, const Rotation& by, const wide_t<T>* table, const T* x, T* y);

/// The random bits of elements 8 c .. 8 c + 7 of a key's stream.
[[gnu::always_inline]] constexpr std::array<std::uint32_t, 4> drop_words(Index c, RandomKey key) {
  const auto low = [](auto x) { return static_cast<std::uint32_t>(x); };
  return philox<7>({low(c), low(c >> 32), low(key.stream), low(key.stream >> 32)}, key.seed);
}
// y = x / (1 - p) where element first + i of the key's stream survives, else 0.
template <class T, class At> void dropout(At, const T* x, T* y, Index first, Index n, double p, RandomKey key);

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
// x: [outer, n, inner], y: [outer, extent, inner]; the index fixes the order of what is added up.
template <class T, class At>
void scatter_add(At, const T* x, const std::int64_t* index, T* y, Index outer, Index n, Index extent, Index inner);

// ---- optimizers ---------------------------------------------------------------------------------
/// What one AdamW step multiplies by; `shrink` = lr decay (taken off, for 1 - shrink would lose its
/// digits in f32), the corrections are 1 / (1 - beta^t), `scale` is that of gradients.
struct AdamWStep {
  double lr, beta1, beta2, epsilon, shrink, correction1, correction2, scale;
};
/// The step of one element: its moments change, and it gives the next weight.
template <class W>
[[gnu::always_inline]] constexpr W adamw_next(const AdamWStep& s, W weight, W gradient, W shrink, W& mean, W& square) {
  const auto in_w = [](double x) { return static_cast<W>(x); };
  mean = in_w(s.beta1) * mean + in_w(1 - s.beta1) * gradient;
  square = in_w(s.beta2) * square + in_w(1 - s.beta2) * gradient * gradient;
  const W root = std::sqrt(square * in_w(s.correction2));
  return weight - (shrink * weight + in_w(s.lr * s.correction1) * mean / (root + in_w(s.epsilon)));
}

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
struct SquaresPart {
  const void* x;
  double* sums;  // one of each piece
  Index n;
  DType type;
};
void sums_of_squares(Cuda, std::span<const SquaresPart>, Index piece);
// *norm = sqrt of their sum, or NaN where the loss, unless it is null, is not finite.
void norm_of_sums(Cuda, const double* sums, Index pieces, const float* loss, double* norm);

}  // namespace hilt::kernels
