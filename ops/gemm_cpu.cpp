// Matrix products by Eigen, compiled for this instruction set. The build passes -DEigen=Eigen_<isa>, so that each copy
// is a namespace of its own and no code for a wider processor leaks into another.
#include <Eigen/Core>
#include "ops/gemm.h"
#include "ops/isa.h"

namespace hilt::kernels {
namespace {

template <class T>
using Dense = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using Ref = Eigen::Map<const Dense<T>, 0, Eigen::OuterStride<>>;

// f(M) with M a row-major map of the matrix, or the transpose of one.
template <class T, class F>
void with(MatrixRef<const T> m, Index rows, Index columns, F f) {
  if (m.column == 1) f(Ref<T>(m.data, rows, columns, Eigen::OuterStride<>(m.row)));
  else f(Ref<T>(m.data, columns, rows, Eigen::OuterStride<>(m.column)).transpose());
}

}  // namespace

template <Isa I, class T>
void eigen_gemm(CpuAt<I>, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c, bool add) {
  Eigen::Map<Dense<T>, 0, Eigen::OuterStride<>> out(c.data, m, n, Eigen::OuterStride<>(c.row));
  with<T>(a, m, k, [&](const auto& A) {
    with<T>(b, k, n, [&](const auto& B) {
      if (add) out.noalias() += A * B;
      else out.noalias() = A * B;
    });
  });
}

template void eigen_gemm(CpuAt<kIsa>, Index, Index, Index, MatrixRef<const float>, MatrixRef<const float>, MatrixRef<float>, bool);
template void eigen_gemm(CpuAt<kIsa>, Index, Index, Index, MatrixRef<const double>, MatrixRef<const double>, MatrixRef<double>, bool);

}  // namespace hilt::kernels
