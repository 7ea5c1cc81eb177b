// Layer and RMS norm along rows: one pass finds what the row needs to know of itself, one writes.
#include <cmath>
#include "ops/kernels.h"
#include "ops/lanes.h"

namespace hilt::kernels {

template <class T, class At>
void norm(At, const NormRows<T>& in_rows, T* y, wide_t<T>* mean, wide_t<T>* rstd, double epsilon) {
  using W = wide_t<T>;
  const auto [x, w, b, rows, cols] = in_rows;
  each_row(rows, cols, [=](Index r) {
    const T* const in = x + r * cols;
    T* const out = y + r * cols;
    const W n = static_cast<W>(cols);
    const W center = mean ? sum_of<W>(cols, [in](Index i) { return static_cast<W>(in[i]); }) / n : W{0};
    const W square = sum_of<W>(cols,
                               [=](Index i) {
                                 const W d = static_cast<W>(in[i]) - center;
                                 return d * d;
                               }) /
                     n;
    const W scale = W{1} / std::sqrt(square + static_cast<W>(epsilon));
    if (b)
      for (Index i = 0; i < cols; ++i)
        out[i] = static_cast<T>((static_cast<W>(in[i]) - center) * scale * static_cast<W>(w[i]) + static_cast<W>(b[i]));
    else
      for (Index i = 0; i < cols; ++i)
        out[i] = static_cast<T>((static_cast<W>(in[i]) - center) * scale * static_cast<W>(w[i]));
    if (mean) mean[r] = center;
    rstd[r] = scale;
  });
}

template <class T, class At>
void norm_rows_backward(At, const NormKept<T>& kept, const T* dy, T* dx, wide_t<T>* dw, wide_t<T>* db) {
  using W = wide_t<T>;
  const auto [x, w, mean, rstd, rows, cols] = kept;
  const W n = static_cast<W>(cols);
  for (Index r = 0; r < rows; ++r) {
    const T *const in = x + r * cols, *const g = dy + r * cols;
    const W center = mean ? mean[r] : W{0}, scale = rstd[r];
    const auto hat = [=](Index i) { return (static_cast<W>(in[i]) - center) * scale; };
    const auto slope = [=](Index i) { return static_cast<W>(g[i]) * static_cast<W>(w[i]); };  // of the loss along hat
    if (dx) {
      const W along = sum_of<W>(cols, [=](Index i) { return slope(i) * hat(i); }) / n;
      const W level = mean ? sum_of<W>(cols, slope) / n : W{0};
      T* const out = dx + r * cols;
      for (Index i = 0; i < cols; ++i) out[i] = static_cast<T>(scale * (slope(i) - level - hat(i) * along));
    }
    if (dw)
      for (Index i = 0; i < cols; ++i) dw[i] += static_cast<W>(g[i]) * hat(i);
    if (db)
      for (Index i = 0; i < cols; ++i) db[i] += static_cast<W>(g[i]);
  }
}

HILT_CPU_KERNEL(norm)
HILT_CPU_KERNEL(norm_rows_backward)

}  // namespace hilt::kernels
