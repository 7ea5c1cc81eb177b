#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>
#include "core/config.h"
#include "tensor.h"

// Private to core and ops: how an op reaches the kernel for a device, a type and a processor; and
// one element from one type to another, the same on every device.

namespace hilt {

/// Floats round to nearest even. Floats to integers saturate, NaN is 0; integers keep low bits.
template <class To, class From> constexpr To convert(From x) {
  if constexpr (std::is_same_v<To, From>) return x;
  else if constexpr (std::is_same_v<To, bf16> || std::is_same_v<To, f16>) return To(static_cast<float>(x));
  else if constexpr (std::is_integral_v<To> && !std::is_integral_v<From>) {
    // Out of range is undefined in C++.
    const double v = static_cast<double>(x);
    constexpr double low = static_cast<double>(std::numeric_limits<To>::min());
    constexpr double high = static_cast<double>(std::numeric_limits<To>::max());
    if (v >= high) return std::numeric_limits<To>::max();
    return v > low ? static_cast<To>(v) : v <= low ? std::numeric_limits<To>::min() : To{0};
  } else return static_cast<To>(x);
}

/// f.operator()<T>() for the type that a tag names.
template <class F> constexpr auto with_type(DType type, F&& f) {
  switch (type) {
    case DType::f64: return f.template operator()<double>();
    case DType::f32: return f.template operator()<float>();
    case DType::bf16: return f.template operator()<bf16>();
    case DType::f16: return f.template operator()<f16>();
    case DType::i64: return f.template operator()<std::int64_t>();
    case DType::i32: return f.template operator()<std::int32_t>();
    case DType::u8: break;
  }
  return f.template operator()<std::uint8_t>();
}

/// Where a kernel runs. Kernels overload on their first argument, so that the versions of one
/// kernel share a name and a parameter list and a missing one is a build error.
struct Cpu {};
struct Cuda {
  void* stream = nullptr;  // a cudaStream_t, named only where CUDA's headers are
  int device = 0;
};
template <class Where> inline constexpr bool is_cuda = std::is_same_v<Where, Cuda>;
/// The stream of a GPU, now this thread's; throws Code::gpu where there is none or it was lost.
Cuda cuda_of(Device device);

/// What is made while one lives is kept longer than a call: it is the library's own, and not a
/// host's (see HostStream), whose stream runs behind it afterwards.
class Lasting {
 public:
  Lasting();
  ~Lasting();
  Lasting(const Lasting&) = delete;
  Lasting& operator=(const Lasting&) = delete;

 private:
  const struct Lender* host_;
};

/// Instruction sets that files named *_cpu.cpp are compiled for, each in turn with kIsa saying
/// which. A kernel that gains nothing is written once for Cpu, from which they derive. avx512_bf16
/// and avx512_amx run what is compiled for avx512, where kernels of bf16 factors ask for them.
enum class Isa { base, avx2, avx512, avx512_bf16, avx512_amx, neon };
/// Those of this family of processors, narrowest first.
#ifdef __aarch64__
inline constexpr std::array kIsas{Isa::neon};
#else
inline constexpr std::array kIsas{Isa::base, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::avx512_amx};
#endif
inline constexpr std::array kIsaNames{"base", "avx2", "avx512", "avx512_bf16", "avx512_amx", "neon"};
constexpr std::string_view name_of(Isa isa) { return kIsaNames[static_cast<std::size_t>(isa)]; }
/// Whether it multiplies bf16 as they are.
constexpr bool multiplies_bf16(Isa isa) { return isa == Isa::avx512_bf16 || isa == Isa::avx512_amx; }
/// Whether this build has kernels for it.
constexpr bool is_built(Isa isa) {
  return std::string_view(kIsaBuilt).find(name_of(multiplies_bf16(isa) ? Isa::avx512 : isa)) != std::string_view::npos;
}
template <Isa I> struct CpuAt : Cpu { static constexpr Isa kIsa = I; };

/// Has a kernel built for a type and a place; its signature stands with its declaration alone.
#define HILT_KERNEL(KERNEL, T, AT) template decltype(KERNEL<T, AT>) KERNEL<T, AT>;
#define HILT_GPU_KERNEL(KERNEL) \
  HILT_KERNEL(KERNEL, float, Cuda) HILT_KERNEL(KERNEL, bf16, Cuda) HILT_KERNEL(KERNEL, f16, Cuda)

Isa active_isa();  // the best this processor has and this build contains; HILT_ISA lowers it by name

namespace detail {
template <class F> auto with_isa(F&& f) {
  const auto at = [&]<Isa I>(CpuAt<I> where) {
    if constexpr (is_built(I)) return f(where);
    else return f(CpuAt<*std::ranges::find_if(kIsas, is_built)>{});  // of the same type
  };
  switch (active_isa()) {
    case Isa::avx512_amx:
    case Isa::avx512_bf16:
    case Isa::avx512: return at(CpuAt<Isa::avx512>{});
    case Isa::avx2: return at(CpuAt<Isa::avx2>{});
    default: return at(CpuAt<kIsas[0]>{});
  }
}
}  // namespace detail

/// Calls f(where) for the device of x, a float that kernels there take, told types at run time.
template <class F> auto with_device(const char* op, const Tensor& x, F&& f) {
  if (x.device().is_cpu() && is_floating(x.dtype())) return detail::with_isa(f);
  if constexpr (kHasCuda)
    if (x.device().is_cuda() && is_floating(x.dtype()) && x.dtype() != DType::f64) return f(cuda_of(x.device()));
  fail(op, ": no kernel for ", x.dtype(), " on ", x.device());
}

/// Calls f.operator()<T>(where) for the element type and device of x, a float of any width. f64
/// exists on the CPU alone. These and visit_any alone list which pairs are built.
template <class F> void visit(const char* op, const Tensor& x, F&& f) {
  with_device(op, x, [&]<class At>(At where) {
    with_type(x.dtype(), [&]<class T>() {
      if constexpr (!std::is_integral_v<T> && !(is_cuda<At> && std::is_same_v<T, double>))
        f.template operator()<T>(where);
    });
  });
}

/// The same for every element type, on the CPU alone, for kernels that only move data.
template <class F> void visit_any(const char* op, const Tensor& x, F&& f) {
  check(x.device().is_cpu(), op, ": no kernel for ", x.dtype(), " on ", x.device());
  with_type(x.dtype(), [&]<class T>() { f.template operator()<T>(Cpu{}); });
}

}  // namespace hilt
