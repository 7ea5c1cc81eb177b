#pragma once
#include "core/dispatch.h"

// For files named *_cpu.cpp alone, compiled once an instruction set, with HILT_ISA naming it; their
// kernels are templates over the Isa, so no two copies share a symbol. Such a file may define
// nothing else with external linkage and use no out-of-line template or inline function of others
// (std::vector, std::sort, ..): the linker might keep the copy with AVX-512. A test looks.

namespace hilt {
inline constexpr Isa kIsa = Isa::HILT_ISA;
#define HILT_CPU_KERNEL(KERNEL)            \
  HILT_KERNEL(KERNEL, double, CpuAt<kIsa>) \
  HILT_KERNEL(KERNEL, float, CpuAt<kIsa>) HILT_KERNEL(KERNEL, bf16, CpuAt<kIsa>) HILT_KERNEL(KERNEL, f16, CpuAt<kIsa>)

/// A vector register's worth of T, and how many fit.
inline constexpr int kVectorBytes = kIsa == Isa::avx512 ? 64 : kIsa == Isa::avx2 ? 32 : 16;
inline constexpr bool kManyVectors = kIsa == Isa::avx512 || kIsa == Isa::neon;  // 32 of them, not 16
template <class T> inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
}  // namespace hilt
