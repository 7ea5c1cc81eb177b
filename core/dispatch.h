#pragma once
#include "core/config.h"
#include "tensor.h"

// Private to core and ops: how an op reaches the kernel for a device, an element type and a
// processor.

namespace hilt {

/// Where a kernel runs. Kernels overload on their first argument, so that the versions of one
/// kernel share a name and a parameter list and a missing one is a build error.
struct Cpu {};
struct Cuda {
  void* stream = nullptr;  // a cudaStream_t, named only where CUDA's headers are
  int device = 0;
};
/// Whether a visitor was called for a GPU.
template <class Where> inline constexpr bool is_cuda = std::is_same_v<Where, Cuda>;
/// The compute stream of a GPU, which becomes this thread's; throws Code::gpu where there is none
/// or it was lost.
Cuda cuda_of(Device device);

/// Instruction sets that files named *_cpu.cpp are compiled for, each in turn with kIsa saying
/// which. A kernel that gains nothing from it is written once for Cpu, from which every CpuAt
/// derives.
enum class Isa { base, avx2, avx512 };
template <Isa I> struct CpuAt : Cpu { static constexpr Isa kIsa = I; };

/// The best this processor has and this build contains; HILT_ISA=base|avx2|avx512 lowers it.
Isa active_isa();
std::string_view name_of(Isa isa);

namespace detail {
template <class F> void with_isa(F&& f) {
  if constexpr (kHasWideIsa) {
    switch (active_isa()) {
      case Isa::avx512: return f(CpuAt<Isa::avx512>{});
      case Isa::avx2: return f(CpuAt<Isa::avx2>{});
      case Isa::base: break;
    }
  }
  f(CpuAt<Isa::base>{});
}
template <class T, class F> void visit_cpu(F&& f) {
  with_isa([&](auto where) { f.template operator()<T>(where); });
}
}  // namespace detail

/// Calls f(where) for the device of x, a float that kernels there take: for those that are told
/// types at run time.
template <class F> void with_device(const char* op, const Tensor& x, F&& f) {
  if (x.device().is_cpu() && is_floating(x.dtype())) return detail::with_isa(f);
  if constexpr (kHasCuda)
    if (x.device().is_cuda() && is_floating(x.dtype()) && x.dtype() != DType::f64) return f(cuda_of(x.device()));
  fail(op, ": no kernel for ", x.dtype(), " on ", x.device());
}

/// Calls f.operator()<T>(where) for the element type and device of x, a float of any width. f64
/// exists on the CPU alone. This and visit_any are the only places that list which pairs are built.
template <class F> void visit(const char* op, const Tensor& x, F&& f) {
  if (x.device().is_cpu()) switch (x.dtype()) {
      case DType::f32: return detail::visit_cpu<float>(f);
      case DType::f64: return detail::visit_cpu<double>(f);
      case DType::bf16: return detail::visit_cpu<bf16>(f);
      case DType::f16: return detail::visit_cpu<f16>(f);
      default: break;
    }
  if constexpr (kHasCuda) {
    if (x.device().is_cuda()) switch (x.dtype()) {
        case DType::f32: return f.template operator()<float>(cuda_of(x.device()));
        case DType::bf16: return f.template operator()<bf16>(cuda_of(x.device()));
        case DType::f16: return f.template operator()<f16>(cuda_of(x.device()));
        default: break;
      }
  }
  fail(op, ": no kernel for ", x.dtype(), " on ", x.device());
}

/// The same for every element type, on the CPU alone; for kernels that move data and do not
/// compute.
template <class F> void visit_any(const char* op, const Tensor& x, F&& f) {
  check(x.device().is_cpu(), op, ": no kernel for ", x.dtype(), " on ", x.device());
  switch (x.dtype()) {
    case DType::f64: return f.template operator()<double>(Cpu{});
    case DType::f32: return f.template operator()<float>(Cpu{});
    case DType::bf16: return f.template operator()<bf16>(Cpu{});
    case DType::f16: return f.template operator()<f16>(Cpu{});
    case DType::i64: return f.template operator()<std::int64_t>(Cpu{});
    case DType::i32: return f.template operator()<std::int32_t>(Cpu{});
    case DType::u8: return f.template operator()<std::uint8_t>(Cpu{});
  }
}

/// The same for the types that index: i32 and i64.
template <class F> void visit_integer(const char* op, const Tensor& x, F&& f) {
  if (x.dtype() == DType::i64) return f.template operator()<std::int64_t>(Cpu{});
  if (x.dtype() == DType::i32) return f.template operator()<std::int32_t>(Cpu{});
  fail(op, ": indices must be i32 or i64, got ", x.dtype());
}

}  // namespace hilt
