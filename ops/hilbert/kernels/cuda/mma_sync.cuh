#pragma once
#include <cuda_runtime.h>
#include "core/dtype.h"

// Tensor cores as every GPU since sm_80 has them: thin wrappers over copies that run in the
// background, loads of 8 x 8 matrices from shared memory, and the product of 16 x 16 by 16 x 8
// elements of bf16 or f16 with sums in f32.
//
// What lane l has of a product d, 16 x 8, of its left factor a, 16 x 16, and right b, 16 x 8:
//     d[2 h + j]   row l / 4 + 8 h, column 2 (l % 4) + j
//     a[2 i + h]   two elements: row l / 4 + 8 h, columns 8 i + 2 (l % 4) and the next
//     b[i]         two elements: rows 8 i + 2 (l % 4) and the next, column l / 4
// So the sums of two products side by side, rounded, are a left factor as they stand.

namespace hilt::cuda {

/// An address in shared memory as instructions take it.
__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// Copies 16 bytes, or 4; or writes zeros and reads nothing.
__device__ __forceinline__ void copy_16(std::uint32_t to, const void* from, bool copy) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copy ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_4(std::uint32_t to, const void* from, bool copy) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(copy ? 4 : 0) : "memory");
}
/// One or two neighbours.
__device__ __forceinline__ void load_shared(float (&x)[1], std::uint32_t from) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(float (&x)[2], std::uint32_t from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(from) : "memory");
}
/// Waits for this thread's copies.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Four 8 x 8 matrices of 16-bit elements: lane l names row l % 8 of matrix l / 8, and gets of
/// matrix i in x[i] the elements 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrices(std::uint32_t (&x)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
/// The same of the transposed matrices.
__device__ __forceinline__ void load_transposed(std::uint32_t (&x)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

/// d += a b; top and below: where the two rows of a lane's d begin.
template <class T>
__device__ __forceinline__ void mma(float* top, float* below, const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(top[0]), "+f"(top[1]), "+f"(below[0]), "+f"(below[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(top[0]), "+f"(top[1]), "+f"(below[0]), "+f"(below[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two numbers rounded to T; the first in the lower half.
template <class T> __device__ __forceinline__ std::uint32_t pack_pair(float first, float second) {
  std::uint32_t x;
  if constexpr (std::is_same_v<T, bf16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
  return x;
}

/// In: word i of column block c in w[c], for lane i of four. Out: all four words of block i.
__device__ __forceinline__ void transpose_four(std::uint32_t (&w)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c & step) continue;
      const bool upper = lane & step;
      const std::uint32_t got = __shfl_xor_sync(~0u, upper ? w[c] : w[c + step], step);
      if (upper) w[c] = got;
      else w[c + step] = got;
    }
}

}  // namespace hilt::cuda
