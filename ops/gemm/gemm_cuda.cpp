// Matrix products on a GPU, by cuBLAS, which counts columns first: its C^T = B^T A^T is our C = A B
// on the same memory. f32 products are f32 throughout, unless HILT_TF32=1. One handle a device with
// a workspace of its own, so that a product of one shape is always cut the same way.
//
// A product that starts from a bias or a residual, or ends with gelu, goes through cuBLASLt, which
// does both before it rounds. Its choice of a kernel takes a tenth of a millisecond, so it is kept.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cstdlib>
#include <map>
#include <mutex>
#include "core/cuda/context.h"
#include "core/tensor.h"
#include "ops/gemm/gemm.h"

namespace hilt::kernels {
namespace {

constexpr Index kWorkspace = Index{32} << 20;  // bytes: what its documentation asks for on Hopper
constexpr std::size_t kMaxDevices = 64;

/// What cuBLASLt's choice of a kernel depends on.
struct ProductKey {
  Index m, n, k, lda, ldb, ldc, ld_start;
  cudaDataType_t type;
  bool a_t, b_t;
  cublasLtEpilogue_t end;
  unsigned alignment;
  auto operator<=>(const ProductKey&) const = default;
};

struct Library {
  cublasHandle_t handle = nullptr;
  cublasLtHandle_t light = nullptr;
  void* stream = nullptr;
  std::map<ProductKey, std::optional<cublasLtMatmulAlgo_t>> chosen;  // none: there is no such kernel
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

/// The power of two, up to 16 bytes, that divides all of these addresses.
template <class... P> unsigned alignment_of(const P*... p) {
  return 1U << std::min(4, std::countr_zero((std::uintptr_t{16} | ... | reinterpret_cast<std::uintptr_t>(p))));
}

cublasLtMatrixLayoutOpaque_t layout(cudaDataType_t type, bool transposed, Index rows, Index columns, Index leading,
                                    Cuda where) {
  cublasLtMatrixLayoutOpaque_t made;
  check_library(cublasLtMatrixLayoutInit(&made, type, static_cast<std::uint64_t>(transposed ? rows : columns),
                                         static_cast<std::uint64_t>(transposed ? columns : rows), leading),
                where);
  return made;
}

/// What the library calls an epilogue.
template <class T> cublasLtEpilogue_t epilogue(const Extras<T>& x) {
  if (x.sums) return CUBLASLT_EPILOGUE_BGRADA;
  if (!x.gelu) return x.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  if (x.before) return x.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  return x.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

struct Operands {
  cublasLtMatrixLayoutOpaque_t a, b, c, start;
};
/// cuBLASLt's choice for a product, none where it has no kernel for it.
std::optional<cublasLtMatmulAlgo_t> choose(Cuda where, const Library& library, cublasLtMatmulDescOpaque_t& product,
                                           Operands& of, unsigned alignment) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check_library(cublasLtMatmulPreferenceInit(&preference), where);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, const auto& value) {
    check_library(cublasLtMatmulPreferenceSetAttribute(&preference, name, &value, sizeof value), where);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspace));
  for (auto name : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(name, alignment);
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(library.light, &product, &of.b, &of.a, &of.start, &of.c,
                                                               &preference, 1, &best, &found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check_library(status, where);
  return status == CUBLAS_STATUS_SUCCESS && found > 0 ? std::optional(best.algo) : std::nullopt;
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
bool gemm_onto(At where, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b,
               MatrixRef<product_t<T, At>> c, const Extras<product_t<T, At>>& extras) {
  constexpr Index kStep = 8;  // what is written beside C has rows of whole steps
  if (extras.before && (n % kStep != 0 || alignment_of(extras.before) < 16)) return false;
  cuda::check_alive(where.device);
  const Locked library = library_of(where);
  const bool starts = extras.residual.data, a_t = a.column != 1, b_t = b.column != 1;
  const MatrixRef<const T> from = starts ? extras.residual : MatrixRef<const T>{c.data, c.row, c.column};
  const T* const row = extras.sums ? extras.sums : extras.bias;  // written, or read
  const unsigned alignment = alignment_of(a.data, b.data, c.data, from.data, row, extras.before);
  const ProductKey key{m,        n,        k,   line(a, m, k), line(b, k, n),    c.row,
                       from.row, kType<T>, a_t, b_t,           epilogue(extras), alignment};
  Operands of{layout(key.type, a_t, m, k, key.lda, where), layout(key.type, b_t, k, n, key.ldb, where),
              layout(key.type, false, m, n, key.ldc, where), layout(key.type, false, m, n, key.ld_start, where)};
  cublasLtMatmulDescOpaque_t product;
  check_library(cublasLtMatmulDescInit(&product, compute_in<T>(), CUDA_R_32F), where);
  const auto set = [&](cublasLtMatmulDescAttributes_t name, const auto& value) {
    check_library(cublasLtMatmulDescSetAttribute(&product, name, &value, sizeof value), where);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, pick(b_t)), set(CUBLASLT_MATMUL_DESC_TRANSB, pick(a_t));
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, key.end);
  if (row) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, row);
  if (extras.before) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, extras.before);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<std::int64_t>(c.row));
  }
  auto at = library->chosen.find(key);
  if (at == library->chosen.end())
    at = library->chosen.emplace(key, choose(where, *library.library, product, of, alignment)).first;
  if (!at->second && !extras.gelu && !extras.sums) check_library(CUBLAS_STATUS_NOT_SUPPORTED, where);
  if (!at->second) return false;
  const float one = 1, scale = starts ? 1.F : 0.F;
  check_library(cublasLtMatmul(library->light, &product, &one, b.data, &of.b, a.data, &of.a, &scale, from.data,
                               &of.start, c.data, &of.c, &*at->second, library->workspace.mutable_raw(), kWorkspace,
                               static_cast<cudaStream_t>(where.stream)),
                where);
  return true;
}

HILT_GPU_KERNEL(gemm_onto)
HILT_GPU_KERNEL(gemm_batched)

}  // namespace hilt::kernels
