// Floats of 32 bits to 16 and back, and sums, for each instruction set; tensor.cpp declares them.
#include "core/dispatch.h"

namespace hilt::kernels {

template <class T, class At> void narrow(At, Index n, const float* from, T* to) {
  for (Index i = 0; i < n; ++i) to[i] = T(from[i]);
}
template <class T, class At> void widen(At, Index n, const T* from, float* to) {
  for (Index i = 0; i < n; ++i) to[i] = from[i];
}

template <class T, class At> void accumulate(At, const T* a, const T* b, T* out, Index n) {
  for (Index i = 0; i < n; ++i) out[i] = static_cast<T>(wide_t<T>(a[i]) + wide_t<T>(b[i]));
}

HILT_KERNEL(narrow, bf16, CpuAt<Isa::HILT_ISA>)
HILT_KERNEL(narrow, f16, CpuAt<Isa::HILT_ISA>)
HILT_KERNEL(widen, bf16, CpuAt<Isa::HILT_ISA>)
HILT_KERNEL(widen, f16, CpuAt<Isa::HILT_ISA>)
HILT_KERNEL(accumulate, double, CpuAt<Isa::HILT_ISA>)
HILT_KERNEL(accumulate, float, CpuAt<Isa::HILT_ISA>)
HILT_KERNEL(accumulate, bf16, CpuAt<Isa::HILT_ISA>)
HILT_KERNEL(accumulate, f16, CpuAt<Isa::HILT_ISA>)

}  // namespace hilt::kernels
