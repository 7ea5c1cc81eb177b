#pragma once
#include "core/dispatch.h"

namespace hilt::kernels {

// Dense rows x cols. lse [rows], statistics [rows].
template <Isa I, class T> void softmax(CpuAt<I>, const T* x, T* y, Index rows, Index cols);
template <Isa I, class T> void softmax_backward(CpuAt<I>, const T* y, const T* dy, T* dx, Index rows, Index cols);
template <Isa I, class T> void log_softmax(CpuAt<I>, const T* x, T* y, Index rows, Index cols);
template <Isa I, class T> void log_softmax_backward(CpuAt<I>, const T* y, const T* dy, T* dx, Index rows, Index cols);
template <Isa I, class T> void logsumexp(CpuAt<I>, const T* x, T* y, Index rows, Index cols);
template <Isa I, class T> void logsumexp_backward(CpuAt<I>, const T* x, const T* dy, T* dx, Index rows, Index cols);

// y = (x - mean) rstd w + b; without `mean` the root mean square: y = x rstd w. b may be null.
template <Isa I, class T>
void norm(CpuAt<I>, const T* x, const T* w, const T* b, T* y, wide_t<T>* mean, wide_t<T>* rstd, Index rows, Index cols, double epsilon);
// dx, and dw and db added up over the rows of this call; any of the three may be null.
template <Isa I, class T>
void norm_backward(CpuAt<I>, const T* x, const T* w, const wide_t<T>* mean, const wide_t<T>* rstd, const T* dy, T* dx, wide_t<T>* dw, wide_t<T>* db,
                   Index rows, Index cols);

// x, y: [outer, length, heads, dim]; table: cos then sin of [length, dim / 2]. sign -1 turns back.
template <Isa I, class T>
void rotate(CpuAt<I>, const T* x, const wide_t<T>* table, T* y, Index outer, Index length, Index heads, Index dim, int sign);

// y = x / (1 - p) where element first + i of the key's stream survives, else 0.
template <Isa I, class T>
void dropout(CpuAt<I>, const T* x, T* y, Index first, Index n, double p, std::uint64_t seed, std::uint64_t stream);

}  // namespace hilt::kernels
