// The softmax family along rows: one pass finds what the row needs to know of itself, one writes.
#include "ops/kernels.h"
#include "ops/lanes.h"
#include "ops/math.h"

namespace hilt::kernels {
namespace {

/// log sum e^x of a row as shift + rest, apart for digits. -inf: of -inf or none; NaN: has one.
template <class W> struct RowLse { W shift, rest; };
template <class W, class T> [[gnu::always_inline]] inline RowLse<W> row_lse(const T* x, Index n) {
  const W top = max_of<W>(n, [x](Index i) { return static_cast<W>(x[i]); });
  const W shift = top - top == 0 ? top : W{0};
  const W total = sum_of<W>(n, [=](Index i) { return math::exp(static_cast<W>(x[i]) - shift); });
  return {shift, math::log(total)};
}

}  // namespace

template <class T, class At> void softmax(At, const T* x, T* y, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T* const in = x + r * cols;
    T* const out = y + r * cols;
    const W top = max_of<W>(cols, [in](Index i) { return static_cast<W>(in[i]); });
    if constexpr (sizeof(T) >= 4) {  // e^x waits in y for its sum
      for (Index i = 0; i < cols; ++i) out[i] = math::exp(in[i] - top);
      const W scale = W{1} / sum_of<W>(cols, [out](Index i) { return out[i]; });
      for (Index i = 0; i < cols; ++i) out[i] *= scale;
    } else {
      const W scale = W{1} / sum_of<W>(cols, [=](Index i) { return math::exp(static_cast<W>(in[i]) - top); });
      for (Index i = 0; i < cols; ++i) out[i] = static_cast<T>(math::exp(static_cast<W>(in[i]) - top) * scale);
    }
  });
}

template <class T, class At> void softmax_backward(At, const T* y, const T* dy, T* dx, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T *const p = y + r * cols, *const g = dy + r * cols;
    const W dot = sum_of<W>(cols, [=](Index i) { return static_cast<W>(p[i]) * static_cast<W>(g[i]); });
    for (Index i = 0; i < cols; ++i)
      dx[r * cols + i] = static_cast<T>(static_cast<W>(p[i]) * (static_cast<W>(g[i]) - dot));
  });
}

template <class T, class At> void log_softmax(At, const T* x, T* y, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T* const in = x + r * cols;
    const auto [shift, rest] = row_lse<W>(in, cols);
    for (Index i = 0; i < cols; ++i) y[r * cols + i] = static_cast<T>((static_cast<W>(in[i]) - shift) - rest);
  });
}

template <class T, class At> void log_softmax_backward(At, const T* y, const T* dy, T* dx, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T *const l = y + r * cols, *const g = dy + r * cols;
    const W total = sum_of<W>(cols, [g](Index i) { return static_cast<W>(g[i]); });
    for (Index i = 0; i < cols; ++i)
      dx[r * cols + i] = static_cast<T>(static_cast<W>(g[i]) - math::exp(static_cast<W>(l[i])) * total);
  });
}

template <class T, class At> void logsumexp(At, const T* x, T* y, Index rows, Index cols) {
  each_row(rows, cols, [=](Index r) {
    const auto [shift, rest] = row_lse<wide_t<T>>(x + r * cols, cols);
    y[r] = static_cast<T>(shift + rest);
  });
}

template <class T, class At> void logsumexp_backward(At, const T* x, const T* dy, T* dx, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const auto [shift, rest] = row_lse<W>(x + r * cols, cols);
    const W g = static_cast<W>(dy[r]);
    for (Index i = 0; i < cols; ++i)
      dx[r * cols + i] = static_cast<T>(g * math::exp((static_cast<W>(x[r * cols + i]) - shift) - rest));
  });
}

HILT_CPU_KERNEL(softmax)
HILT_CPU_KERNEL(softmax_backward)
HILT_CPU_KERNEL(log_softmax)
HILT_CPU_KERNEL(log_softmax_backward)
HILT_CPU_KERNEL(logsumexp)
HILT_CPU_KERNEL(logsumexp_backward)

}  // namespace hilt::kernels
