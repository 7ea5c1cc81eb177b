#pragma once
#include "core/dispatch.h"

namespace hilt::kernels {

/// What one AdamW step multiplies by; `shrink` = lr decay (taken off, for 1 - shrink would lose its digits in f32), the
/// corrections are 1 / (1 - beta^t).
struct AdamWStep { double lr, beta1, beta2, epsilon, shrink, correction1, correction2; };

// n elements, dense. `exact` is the f32 shadow of a 16-bit w, or null; u the velocity, or null.
template <Isa I, class T>
void adamw(CpuAt<I>, const AdamWStep&, T* w, const T* dw, wide_t<T>* m, wide_t<T>* v, wide_t<T>* exact, Index n);
template <Isa I, class T>
void sgd(CpuAt<I>, double lr, double decay, double momentum, T* w, const T* dw, wide_t<T>* u, Index n);
template <Isa I, class T>
double sum_of_squares(CpuAt<I>, const T* x, Index n);

}  // namespace hilt::kernels
