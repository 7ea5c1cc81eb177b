#pragma once
#include "core/dispatch.h"

namespace hilt::kernels {

/// A matrix somewhere in memory: element (i, j) at data[i * row + j * column]; one of the two
/// strides is 1.
template <class T> struct MatrixRef {
  T* data;
  Index row, column;
};

/// C = A B, or C += A B: A [m, k], B [k, n], C [m, n] with column stride 1; f32 or f64, on the
/// calling thread alone. Every large product on the CPU comes through here, and goes to cpu_gemm.
/// Eigen, below AVX2, treats a last partial block of rows apart, so there a row's last bit may
/// depend on how many rows there are.
template <class T>
void gemm(Cpu, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add = false);

/// The same, compiled for each instruction set: gemm_cpu.cpp. `scratch` is of kGemmScratch bytes.
inline constexpr Index kGemmScratch = 768 << 10;
template <Isa I, class T>
void cpu_gemm(CpuAt<I>, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add,
              T* scratch);

/// C = A B + start, cut into tiles and run on several threads as gemm_batched does. start: a row
/// `bias` and a matrix `residual`, either of which may be null. On a GPU 16-bit C is rounded once,
/// after all of it.
template <class T> struct Start {
  const T* bias = nullptr;
  MatrixRef<const T> residual{nullptr, 0, 1};
};
template <class T>
void gemm_onto(Cpu, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c,
               Start<T> start);
template <class T>
void gemm_onto(Cuda, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c,
               Start<T> start);
/// C = gelu_tanh(A B + bias) with C dense; what stands before gelu goes to `before`, laid out as C,
/// unless that is null, as bias may be. False, with nothing written, where the library has no
/// kernel that ends so.
template <class T>
bool gemm_gelu(Cuda, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c,
               const T* bias, T* before);
/// C = A B, and the columns of B summed into sums [n]: with A = x^T and B = dy, both gradients of a
/// layer. False, with nothing written, likewise.
template <class T>
bool gemm_with_sums(Cuda, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c,
                    T* sums);

/// `batch` products on several threads; product i reads a at a + steps.a[i], b likewise, and writes
/// c at c + i * steps.c. Each is cut into tiles of C, and the bits of the result do not depend on
/// the number of threads.
struct BatchSteps {
  Index batch = 1;
  const Index *a = nullptr, *b = nullptr;
  Index c = 0;
};
template <class T>
void gemm_batched(Cpu, const BatchSteps& steps, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b,
                  MatrixRef<T> c);
/// f32, and 16-bit factors that add up in f32.
template <class T>
void gemm_batched(Cuda, const BatchSteps& steps, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b,
                  MatrixRef<T> c);

}  // namespace hilt::kernels
