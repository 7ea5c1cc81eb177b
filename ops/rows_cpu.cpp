// What works along rows on the CPU, each on one thread: the ops of rows.h, norms' sums over rows,
// and rotations, of which a token is a row.
#include "ops/rows.h"
#include "core/strided.h"
#include "ops/isa.h"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

constexpr Index kPiece = 1 << 14;  // elements worth a task

/// The terms of [0, n) joined in several vectors of lanes, which are joined in one fixed order.
template <class W, class Term, class Join>
[[gnu::always_inline]] inline W joined(Index n, W start, Term term, Join join) {
  constexpr int kWidth = 4 * kLanes<W>;
  W at[kWidth];
  for (W& w : at) w = start;
  Index i = 0;
  for (; i + kWidth <= n; i += kWidth)
    for (int l = 0; l < kWidth; ++l) at[l] = join(at[l], term(i + l));
  for (int l = 0; i < n; ++i, ++l) at[l] = join(at[l], term(i));
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) at[l] = join(at[l], at[l + half]);
  return at[0];
}

template <class W> struct Row {
  static constexpr bool kRereads = true;  // what it wrote is in the cache
  Index index, cols;

  template <class T> [[gnu::always_inline]] T* of(T* x) const { return x + index * cols; }
  template <class F, class... T> [[gnu::always_inline]] W sum(F f, const T*... x) const {
    return joined<W>(
        cols, 0, [=](Index i) { return f(static_cast<W>(x[i])...); }, [](W a, W b) { return a + b; });
  }
  template <class T> [[gnu::always_inline]] W max(const T* x) const {
    return joined<W>(
        cols, -__builtin_inff(), [=](Index i) { return static_cast<W>(x[i]); }, [](W a, W b) { return b > a ? b : a; });
  }
  template <class Y, class F, class... T> [[gnu::always_inline]] void map(Y* to, F f, const T*... x) const {
    for (Index i = 0; i < cols; ++i) to[i] = static_cast<Y>(f(static_cast<W>(x[i])...));
  }
  bool leads() const { return true; }
  bool owns(Index) const { return true; }
  [[gnu::always_inline]] static W product(W a, W b) { return a * b; }
};

}  // namespace

template <class Op, class At> void along_rows(At, const char*, const Op& op) {
  parallel_each(op.rows, kPiece / (op.cols + 1) + 1, [=](Index r) {
    op(Row<wide_t<typename Op::Element>>{r, op.cols});
  });
}

template <class T, class At>
void norm_rows_backward(At, const NormBackward<T>& op, Index begin, Index end, wide_t<T>* dw, wide_t<T>* db) {
  using W = wide_t<T>;
  for (Index r = begin; r < end; ++r) {
    const Row<W> row{r, op.cols};
    const T *const x = row.of(op.x), *const dy = row.of(op.dy);
    const W center = op.mean ? op.mean[r] : W{0}, scale = op.rstd[r];
    if (op.dx) op(row);
    if (dw)
      for (Index i = 0; i < row.cols; ++i) dw[i] += static_cast<W>(dy[i]) * ((static_cast<W>(x[i]) - center) * scale);
    if (db)
      for (Index i = 0; i < row.cols; ++i) db[i] += static_cast<W>(dy[i]);
  }
}

template <class T, class At> void rotate(At, const Rotation& by, const wide_t<T>* table, const T* x, T* y) {
  using W = wide_t<T>;
  const auto [outer, length, heads, dim, turning, axes, sign] = by;
  const Index half = dim / 2;
  const W turn = static_cast<W>(sign);
  const auto turn_row = [=](Index row) __attribute__((noinline)) {  // a second copy may round otherwise
    const W* const angles = table + row % length * axes * half;
    const Index first = row * heads * dim, last = first + turning * dim;
    for (Index h = first, at = 0; h < last; h += dim, at = at + half < axes * half ? at + half : 0) {
      const W *const cosine = angles + at, *const sine = cosine + length * axes * half;
      for (Index i = h; i < h + half; ++i) {
        const W a = static_cast<W>(x[i]), b = static_cast<W>(x[i + half]), c = cosine[i - h], s = sine[i - h] * turn;
        y[i] = static_cast<T>(a * c - b * s);
        y[i + half] = static_cast<T>(a * s + b * c);
      }
    }
    for (Index i = last; i < first + heads * dim; ++i) y[i] = x[i];
  };
  parallel_each(outer * length, kPiece / (heads * dim + 1) + 1, turn_row);
}

#define HILT_CPU_ROWS(OP)                          \
  HILT_KERNEL(along_rows, OP<double>, CpuAt<kIsa>) \
  HILT_KERNEL(along_rows, OP<float>, CpuAt<kIsa>)  \
  HILT_KERNEL(along_rows, OP<bf16>, CpuAt<kIsa>)   \
  HILT_KERNEL(along_rows, OP<f16>, CpuAt<kIsa>)
HILT_ROW_OPS(HILT_CPU_ROWS)
HILT_CPU_KERNEL(norm_rows_backward)
HILT_CPU_KERNEL(rotate)

}  // namespace hilt::kernels
