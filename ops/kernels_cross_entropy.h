#pragma once
#include "core/dispatch.h"

namespace hilt::kernels {

// One row of n logits. target < 0: none.
template <Isa I, class T> wide_t<T> row_logsumexp(CpuAt<I>, const T* x, Index n);
template <Isa I, class T>
void row_cross_entropy_backward(CpuAt<I>, const T* x, wide_t<T> lse, Index target, double scale, T* dx, Index n);

}  // namespace hilt::kernels
