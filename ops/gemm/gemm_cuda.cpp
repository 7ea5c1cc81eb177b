// Matrix products on a GPU, by cuBLAS, which counts columns first: its C^T = B^T A^T is our C = A B
// on the same memory. f32 products are f32 throughout, unless HILT_TF32=1. One handle a device with
// a workspace of its own, so that a product of one shape is always cut the same way.
//
// A product that starts from a bias or a residual, or ends with gelu, goes through cuBLASLt, which
// does both before it rounds. Its choice of a kernel takes a tenth of a millisecond, so it is kept.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <array>
#include <bit>
#include <compare>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <optional>
#include "core/cuda/context.h"
#include "core/tensor.h"
#include "ops/gemm/gemm.h"

namespace hilt::kernels {
namespace {

constexpr Index kWorkspace = Index{32} << 20;  // bytes: what its documentation asks for on Hopper
constexpr std::size_t kMaxDevices = 64;

/// What cuBLASLt's choice of a kernel depends on.
struct Kind {
  Index m, n, k, lda, ldb, ldc, ld_start;
  cudaDataType_t type;
  bool a_t, b_t;
  cublasLtEpilogue_t end;
  unsigned alignment;
  auto operator<=>(const Kind&) const = default;
};

struct Library {
  cublasHandle_t handle = nullptr;
  cublasLtHandle_t light = nullptr;
  void* stream = nullptr;
  std::map<Kind, std::optional<cublasLtMatmulAlgo_t>> chosen;  // none: there is no such kernel
  Tensor workspace;
};

void check_library(cublasStatus_t status, Cuda where) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  cuda::check_alive(where.device);
  fail_with(Code::gpu, "matmul: cuBLAS on cuda:", where.device, " reports ", cublasGetStatusName(status), ": ",
            cublasGetStatusString(status));
}

/// A device's library, for one caller at a time.
struct Locked {
  std::unique_lock<std::mutex> lock;
  Library* library;
  Library* operator->() const { return library; }
};
Locked library_of(Cuda where) {
  static std::mutex mutex;
  static auto* const libraries = new std::array<std::unique_ptr<Library>, kMaxDevices>;  // never destroyed
  std::unique_lock lock(mutex);
  auto& library = (*libraries)[static_cast<std::size_t>(where.device)];
  if (!library) {
    const Lasting lasting;
    auto made = std::make_unique<Library>();
    check_library(cublasCreate(&made->handle), where);
    check_library(cublasLtCreate(&made->light), where);
    made->workspace = empty({kWorkspace}, DType::u8, {Device::Kind::cuda, where.device});
    library = std::move(made);
  }
  if (library->stream != where.stream) {  // ours, or a host's; it forgets its workspace with the stream before
    check_library(cublasSetStream(library->handle, static_cast<cudaStream_t>(where.stream)), where);
    check_library(cublasSetWorkspace(library->handle, library->workspace.mutable_raw(), kWorkspace), where);
    library->stream = where.stream;
  }
  return {std::move(lock), library.get()};
}

/// Offsets first, first + step, .. for as long as they go on like that.
Index even_run(const Index* at, Index n) {
  Index run = 2;
  while (run < n && at[run] - at[run - 1] == at[1] - at[0]) ++run;
  return run < n ? run : n;
}

template <class T>
constexpr cudaDataType_t kType = std::is_same_v<T, float>  ? CUDA_R_32F
                                 : std::is_same_v<T, bf16> ? CUDA_R_16BF
                                                           : CUDA_R_16F;

/// What products are added up in. Factors of f32 keep all their bits unless TF32 was asked for.
template <class T> cublasComputeType_t compute_in() {
  static const char* const asked = std::getenv("HILT_TF32");
  return std::is_same_v<T, float> && asked && std::string_view(asked) == "1" ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                             : CUBLAS_COMPUTE_32F;
}

cublasOperation_t pick(bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }
/// The stride between lines, of which one line alone may have any.
template <class T> Index line(const MatrixRef<T>& x, Index rows, Index columns) {
  return x.column == 1 ? std::max(x.row, columns) : std::max(x.column, rows);
}

/// What cuBLASLt makes and has to be told to destroy.
template <class T, cublasStatus_t (*kDestroy)(T)> struct Owned {
  T handle = nullptr;
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle) kDestroy(handle);
  }
};
using Product = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

/// The power of two, up to 16 bytes, that divides all of these addresses.
template <class... P> unsigned alignment_of(const P*... p) {
  return 1U << std::min(4, std::countr_zero((std::uintptr_t{16} | ... | reinterpret_cast<std::uintptr_t>(p))));
}

/// C = A B + residual, unless that is null, with what the library calls an epilogue: `end` says
/// which, `row` is the bias it reads or the sums it writes, `before` what it writes beside C.
/// Whether cuBLASLt has a kernel for it; without one nothing is written.
template <class T>
bool try_product(Cuda where, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c,
                 MatrixRef<const T> residual, cublasLtEpilogue_t end, const T* row, T* before) {
  cuda::check_alive(where.device);
  const Locked library = library_of(where);
  const MatrixRef<const T> from = residual.data ? residual : MatrixRef<const T>{c.data, c.row, c.column};
  const unsigned alignment = alignment_of(a.data, b.data, c.data, from.data, row, before);
  const Kind kind{
      m, n, k, line(a, m, k), line(b, k, n), c.row, from.row, kType<T>, a.column != 1, b.column != 1, end, alignment};
  const auto layout = [&](Layout& to, bool transposed, Index rows, Index columns, Index leading) {
    check_library(
        cublasLtMatrixLayoutCreate(&to.handle, kind.type, static_cast<std::uint64_t>(transposed ? rows : columns),
                                   static_cast<std::uint64_t>(transposed ? columns : rows), leading),
        where);
  };
  Layout of_a, of_b, of_c, of_start;
  layout(of_a, kind.a_t, m, k, kind.lda), layout(of_b, kind.b_t, k, n, kind.ldb), layout(of_c, false, m, n, kind.ldc);
  layout(of_start, false, m, n, kind.ld_start);
  Product product;
  check_library(cublasLtMatmulDescCreate(&product.handle, compute_in<T>(), CUDA_R_32F), where);
  const auto set = [&](cublasLtMatmulDescAttributes_t name, const auto& value) {
    check_library(cublasLtMatmulDescSetAttribute(product.handle, name, &value, sizeof value), where);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, pick(kind.b_t)), set(CUBLASLT_MATMUL_DESC_TRANSB, pick(kind.a_t));
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, kind.end);
  if (row) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, row);
  if (before)
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, before),
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<std::int64_t>(c.row));
  auto at = library->chosen.find(kind);
  if (at == library->chosen.end()) {
    Preference preference;
    check_library(cublasLtMatmulPreferenceCreate(&preference.handle), where);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, const auto& value) {
      check_library(cublasLtMatmulPreferenceSetAttribute(preference.handle, name, &value, sizeof value), where);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspace));
    for (auto name : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(name, kind.alignment);
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(library->light, product.handle, of_b.handle, of_a.handle, of_start.handle,
                                       of_c.handle, preference.handle, 1, &best, &found);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check_library(status, where);
    at = library->chosen
             .emplace(kind, status == CUBLAS_STATUS_SUCCESS && found > 0 ? std::optional(best.algo) : std::nullopt)
             .first;
  }
  if (!at->second) return false;
  const float one = 1, scale = residual.data ? 1.F : 0.F;
  check_library(cublasLtMatmul(library->light, product.handle, &one, b.data, of_b.handle, a.data, of_a.handle, &scale,
                               from.data, of_start.handle, c.data, of_c.handle, &*at->second,
                               library->workspace.mutable_raw(), kWorkspace, static_cast<cudaStream_t>(where.stream)),
                where);
  return true;
}

}  // namespace

template <class T, class At>
void gemm_batched(At where, const BatchSteps& steps, Index m, Index n, Index k, MatrixRef<const T> a,
                  MatrixRef<const T> b, MatrixRef<product_t<T, At>> c) {
  cuda::check_alive(where.device);
  const Locked library = library_of(where);
  const float one = 1, zero = 0;
  const bool a_t = a.column != 1, b_t = b.column != 1;
  for (Index first = 0; first < steps.batch;) {
    const Index left = steps.batch - first;
    const Index run = left == 1 ? 1 : std::min(even_run(steps.a + first, left), even_run(steps.b + first, left));
    const Index step_a = run > 1 ? steps.a[first + 1] - steps.a[first] : 0,
                step_b = run > 1 ? steps.b[first + 1] - steps.b[first] : 0;
    check_library(cublasGemmStridedBatchedEx(library->handle, pick(b_t), pick(a_t), static_cast<int>(n),
                                             static_cast<int>(m), static_cast<int>(k), &one, b.data + steps.b[first],
                                             kType<T>, static_cast<int>(line(b, k, n)), step_b, a.data + steps.a[first],
                                             kType<T>, static_cast<int>(line(a, m, k)), step_a, &zero,
                                             c.data + first * steps.c, kType<T>, static_cast<int>(c.row), steps.c,
                                             static_cast<int>(run), compute_in<T>(), CUBLAS_GEMM_DEFAULT),
                  where);
    first += run;
  }
}

template <class T, class At>
void gemm_onto(At where, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b,
               MatrixRef<product_t<T, At>> c, Start<product_t<T, At>> start) {
  const auto end = start.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  if (!try_product<T>(where, m, n, k, a, b, c, start.residual, end, start.bias, nullptr))
    check_library(CUBLAS_STATUS_NOT_SUPPORTED, where);
}

template <class T, class At>
bool gemm_gelu(At where, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c,
               const T* bias, T* before) {
  constexpr Index kStep = 8;  // what it writes beside C has rows of whole steps
  if (before && (n % kStep != 0 || alignment_of(before) < 16)) return false;
  const auto end = before ? (bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX)
                          : (bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU);
  return try_product<T>(where, m, n, k, a, b, c, {nullptr, 0, 1}, end, bias, before);
}

template <class T, class At>
bool gemm_with_sums(At where, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<T> c,
                    T* sums) {
  return try_product<T>(where, m, n, k, a, b, c, {nullptr, 0, 1}, CUBLASLT_EPILOGUE_BGRADA, sums, nullptr);
}

HILT_GPU_KERNEL(gemm_onto)
HILT_GPU_KERNEL(gemm_with_sums)
HILT_GPU_KERNEL(gemm_batched)
HILT_KERNEL(gemm_gelu, bf16, Cuda)
HILT_KERNEL(gemm_gelu, f16, Cuda)

}  // namespace hilt::kernels
