// rotary on a GPU: a thread turns one pair.
#include "core/cuda/launch.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

template <class T> __global__ void rotate_kernel(Rotation by, const float* table, const T* x, T* y, Index pairs) {
  const Index half = by.dim / 2, length = by.length;
  const float turn = static_cast<float>(by.sign);
  for (Index i = first_element(); i < pairs; i += element_step()) {
    const Index d = i % half, row = i / half, l = row / by.heads % length;
    const float a = static_cast<float>(x[row * 2 * half + d]), b = static_cast<float>(x[row * 2 * half + half + d]);
    const float c = table[l * half + d], s = table[(length + l) * half + d] * turn;
    const bool turns = row % by.heads < by.turning;
    y[row * 2 * half + d] = static_cast<T>(turns ? a * c - b * s : a);
    y[row * 2 * half + half + d] = static_cast<T>(turns ? a * s + b * c : b);
  }
}

}  // namespace

template <class T, class At> void rotate(At where, const Rotation& by, const wide_t<T>* table, const T* x, T* y) {
  const Index pairs = by.outer * by.length * by.heads * (by.dim / 2);
  launch("rotary", where, rotate_kernel<T>, blocks_for(pairs), kThreads, 0, by, table, x, y, pairs);
}

HILT_GPU_KERNEL(rotate)

}  // namespace hilt::kernels
