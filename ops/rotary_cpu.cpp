// Rotation of pairs of elements by angles that grow with the position.
#include "ops/kernels.h"
#include "ops/lanes.h"

namespace hilt::kernels {

template <class T, class At> void rotate(At, const Rotation& by, const wide_t<T>* table, const T* x, T* y) {
  using W = wide_t<T>;
  const auto [outer, length, heads, dim, turning, sign] = by;
  const Index half = dim / 2;
  const W turn = static_cast<W>(sign);
  each_row(outer * length, heads * dim, [=](Index row) {
    const W *const cosine = table + row % length * half, *const sine = table + (length + row % length) * half;
    for (Index h = 0; h < heads; ++h) {
      const T* const in = x + (row * heads + h) * dim;
      T* const out = y + (row * heads + h) * dim;
      if (h >= turning) {
        for (Index i = 0; i < dim; ++i) out[i] = in[i];
        continue;
      }
      for (Index i = 0; i < half; ++i) {
        const W a = static_cast<W>(in[i]), b = static_cast<W>(in[i + half]), c = cosine[i], s = sine[i] * turn;
        out[i] = static_cast<T>(a * c - b * s);
        out[i + half] = static_cast<T>(a * s + b * c);
      }
    }
  });
}

HILT_CPU_KERNEL(rotate)

}  // namespace hilt::kernels
