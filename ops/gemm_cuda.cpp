// Matrix products on a GPU, by cuBLAS. It counts columns first: what it calls C^T = B^T A^T is our C = A B on the same memory. 16-bit
// factors add up in f32; f32 products are f32 throughout (TF32 is off). One handle a device, with a workspace of its own, so that a
// product of one shape is always cut the same way.
#include <cublas_v2.h>
#include <array>
#include <memory>
#include <mutex>
#include "core/cuda/context.h"
#include "core/tensor.h"
#include "ops/gemm.h"

namespace hilt::kernels {
namespace {

constexpr Index kWorkspace = Index{32} << 20;  // bytes: what its documentation asks for on Hopper
constexpr std::size_t kMaxDevices = 64;

struct Library {
  cublasHandle_t handle = nullptr;
  Tensor workspace;
};

void check_library(cublasStatus_t status, Cuda where) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]] return;
  cuda::check_alive(where.device);
  fail_with(Code::gpu, "matmul: cuBLAS on cuda:", where.device, " reports ", cublasGetStatusName(status), ": ", cublasGetStatusString(status));
}

/// A device's handle, for one caller at a time.
struct Handle {
  std::unique_lock<std::mutex> lock;
  cublasHandle_t handle;
};
Handle handle_of(Cuda where) {
  static std::mutex mutex;
  static auto* const libraries = new std::array<std::unique_ptr<Library>, kMaxDevices>;  // never destroyed, as the contexts
  std::unique_lock lock(mutex);
  auto& library = (*libraries)[static_cast<std::size_t>(where.device)];
  if (!library) {
    auto made = std::make_unique<Library>();
    check_library(cublasCreate(&made->handle), where);
    check_library(cublasSetStream(made->handle, static_cast<cudaStream_t>(where.stream)), where);
    made->workspace = empty({kWorkspace}, DType::u8, {Device::Kind::cuda, where.device});
    check_library(cublasSetWorkspace(made->handle, made->workspace.mutable_raw(), kWorkspace), where);
    library = std::move(made);
  }
  return {std::move(lock), library->handle};
}

/// Offsets first, first + step, .. for as long as they go on like that.
Index even_run(const Index* at, Index n) {
  Index run = 2;
  while (run < n && at[run] - at[run - 1] == at[1] - at[0]) ++run;
  return run < n ? run : n;
}

template <class T> constexpr cudaDataType_t kType = std::is_same_v<T, float> ? CUDA_R_32F : std::is_same_v<T, bf16> ? CUDA_R_16BF : CUDA_R_16F;

}  // namespace

template <class T>
void gemm_batched(Cuda where, const BatchSteps& steps, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c) {
  cuda::check_alive(where.device);
  const Handle library = handle_of(where);
  const float one = 1, zero = 0;
  // A leading dimension is the stride between lines, of which one line alone may have any.
  const auto line = [](const MatrixRef<const T>& x, Index columns, bool transposed) {
    return static_cast<int>(std::max<Index>(transposed ? x.column : x.row, columns));
  };
  const bool a_t = a.column != 1, b_t = b.column != 1;
  const auto pick = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  for (Index first = 0; first < steps.batch;) {
    const Index left = steps.batch - first;
    const Index run = left == 1 ? 1 : std::min(even_run(steps.a + first, left), even_run(steps.b + first, left));
    const Index step_a = run > 1 ? steps.a[first + 1] - steps.a[first] : 0, step_b = run > 1 ? steps.b[first + 1] - steps.b[first] : 0;
    check_library(cublasGemmStridedBatchedEx(library.handle, pick(b_t), pick(a_t), static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &one,
                                             b.data + steps.b[first], kType<T>, line(b, b_t ? k : n, b_t), step_b, a.data + steps.a[first], kType<T>,
                                             line(a, a_t ? m : k, a_t), step_a, &zero, c.data + first * steps.c, kType<T>, static_cast<int>(c.row),
                                             steps.c, static_cast<int>(run), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), where);
    first += run;
  }
}

template void gemm_batched(Cuda, const BatchSteps&, Index, Index, Index, MatrixRef<const float>, MatrixRef<const float>, MatrixRef<float>);
template void gemm_batched(Cuda, const BatchSteps&, Index, Index, Index, MatrixRef<const bf16>, MatrixRef<const bf16>, MatrixRef<bf16>);
template void gemm_batched(Cuda, const BatchSteps&, Index, Index, Index, MatrixRef<const f16>, MatrixRef<const f16>, MatrixRef<f16>);

}  // namespace hilt::kernels
