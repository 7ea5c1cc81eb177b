#pragma once
#include "core/dispatch.h"

namespace hilt::kernels {

/// A matrix somewhere in memory: element (i, j) at data[i * row + j * column]; one of the two strides is 1.
template <class T>
struct MatrixRef {
  T* data;
  Index row, column;
};

/// C = A B, or C += A B: A [m, k], B [k, n], C [m, n] with column stride 1; f32 or f64, on the calling thread alone.
/// Every large product on the CPU comes through here: OpenBLAS where the build has it and it knows the processor, else
/// Eigen. Both treat a last partial block of rows apart, so a row's last bit may depend on how many rows there are.
template <class T>
void gemm(Cpu, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add = false);

/// The same by Eigen, compiled for each instruction set: gemm_cpu.cpp.
template <Isa I, class T>
void eigen_gemm(CpuAt<I>, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add);

/// `batch` products on several threads; product i reads a at a + steps.a[i], b likewise, and writes c at c + i * steps.c. Each is cut into tiles of C that
/// depend on m, n and k alone, never on the number of threads, so the bits of the result do not either.
struct BatchSteps { Index batch = 1; const Index *a = nullptr, *b = nullptr; Index c = 0; };
template <class T>
void gemm_batched(Cpu, const BatchSteps& steps, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c);

}  // namespace hilt::kernels
