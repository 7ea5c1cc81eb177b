#pragma once
#include "core/dispatch.h"

namespace hilt::kernels {

/// A matrix in memory: element (i, j) at data[i * row + j * column]; one of the strides is 1.
template <class T> struct MatrixRef {
  T* data;
  Index row, column;
};

template <class T> MatrixRef<const T> matrix(const Tensor& x) { return {x.data<T>(), x.stride(-2), x.stride(-1)}; }

/// What type a product comes in: on a CPU f32 where factors have 16 bits, and the caller rounds it.
/// Factors become that too, but bf16 stays where the processor multiplies it.
inline DType product_type(const Tensor& x) {
  return x.device().is_cuda() || size_of(x.dtype()) > 2 ? x.dtype() : DType::f32;
}
inline DType factor_type(const Tensor& x) {
  return x.dtype() == DType::bf16 && multiplies_bf16(active_isa()) ? DType::bf16 : product_type(x);
}
template <class T, class At> using product_t = std::conditional_t<is_cuda<At>, T, wide_t<T>>;

/// f.operator()<T>(where) for the type of factors and where their product is made.
template <class F> void visit_factors(const char* op, const Tensor& factor, F&& f) {
  visit(op, factor, [&]<class T>(auto where) {
    if constexpr (is_cuda<decltype(where)>) f.template operator()<T>(where);
    else if constexpr (!std::is_same_v<T, f16>) f.template operator()<T>(Cpu{});
  });
}

/// C = A B, or C += A B: A [m, k], B [k, n], C [m, n] with column stride 1; of factor_type(), on
/// the calling thread alone. Every large product on the CPU comes through here, to cpu_gemm.
template <class T, class At>
void gemm(At, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<product_t<T, At>> c,
          bool add = false);

/// The same, compiled for each instruction set: gemm_cpu.cpp. `scratch` is of kGemmScratch bytes.
inline constexpr Index kGemmScratch = 768 << 10;
template <class T> struct CpuProduct {
  Index m, n, k;
  MatrixRef<const T> a, b;
  MatrixRef<wide_t<T>> c;
  bool add;
};
template <class T, class At> void cpu_gemm(At, const CpuProduct<T>& product, void* scratch);

/// What a product starts from and how it ends, each where it is not null: a row `bias` and a matrix
/// `residual` are added. On a GPU alone: with `gelu` C is gelu_tanh of that, and what stands before
/// goes to `before`, laid out as C, which is dense then; the columns of B are summed into sums [n],
/// so that A = x^T and B = dy give both gradients of a layer.
template <class T> struct Extras {
  const T* bias = nullptr;
  MatrixRef<const T> residual{nullptr, 0, 1};
  bool gelu = false;
  T *before = nullptr, *sums = nullptr;
};
/// C = A B with these, cut into tiles and run on several threads as gemm_batched does. On a GPU
/// 16-bit C is rounded once. False, with nothing written, where the library has no kernel that ends
/// so; it always adds.
template <class T, class At>
bool gemm_onto(At, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<product_t<T, At>> c,
               const Extras<product_t<T, At>>& extras);

/// `batch` products on several threads; product i reads a at a + steps.a[i], b likewise, and writes
/// c at c + i * steps.c. Each is cut into tiles of C. On a GPU f32, and 16-bit factors.
struct BatchSteps {
  static constexpr Index kStart = 0;
  Index batch = 1;
  const Index *a = &kStart, *b = &kStart;  // of one product
  Index c = 0;
};
template <class T, class At>
void gemm_batched(At, const BatchSteps& steps, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b,
                  MatrixRef<product_t<T, At>> c);

}  // namespace hilt::kernels
