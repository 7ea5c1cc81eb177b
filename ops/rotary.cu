// rotary on a GPU: a thread turns one pair.
#include "core/cuda/launch.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

template <class T>
__global__ void rotate_kernel(const T* x, const float* table, T* y, Index pairs, Index length, Index heads,
                              Index turning, Index half, float turn) {
  for (Index i = first_element(); i < pairs; i += element_step()) {
    const Index d = i % half, row = i / half, l = row / heads % length;
    const float a = static_cast<float>(x[row * 2 * half + d]), b = static_cast<float>(x[row * 2 * half + half + d]);
    const float c = table[l * half + d], s = table[(length + l) * half + d] * turn;
    const bool turns = row % heads < turning;
    y[row * 2 * half + d] = static_cast<T>(turns ? a * c - b * s : a);
    y[row * 2 * half + half + d] = static_cast<T>(turns ? a * s + b * c : b);
  }
}

}  // namespace

template <class T, class At>
void rotate(At where, const T* x, const wide_t<T>* table, T* y, Index outer, Index length, Index heads, Index turning,
            Index dim, int sign) {
  const Index pairs = outer * length * heads * (dim / 2);
  launch("rotary", where, rotate_kernel<T>, blocks_for(pairs), kThreads, 0, x, table, y, pairs, length, heads, turning,
         dim / 2, static_cast<float>(sign));
}

HILT_GPU_KERNEL(rotate)

}  // namespace hilt::kernels
