#pragma once
#include "core/dtype.h"

// wgmma: a warpgroup multiplies 64 x 16 by 16 x N numbers of 16 bits, E, and adds in f32. A lies in
// shared memory (a descriptor) or in registers, B in shared memory. kTransposeA, kTransposeB: the
// operand lies with its other axis contiguous. accumulate = 0: d = a b, whatever d held.
//
// Element d[4c + 2h + j] of lane l of warp w: row 16 w + l / 4 + 8 h, column 8 c + 2 (l % 4) + j.
// The A fragment of k-step k is those of columns 16 k .. 16 k + 15 as pairs of E: {d[8k], d[8k+1]},
// {d[8k+2], d[8k+3]}, {d[8k+4], d[8k+5]}, {d[8k+6], d[8k+7]}.

namespace hilt::cuda::hopper {

// One instruction for both types: TYPE is what it calls E, P the number of the operand that says
// whether it accumulates.
#define HILT_WGMMA_OF(N, TYPE, A, B, P, FLAGS, ...)                                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
               " {" HILT_REGISTERS_##N "}, " A ", " B ", p, 1, 1, " FLAGS ";}"                                         \
               : HILT_SUMS_##N                                                                                         \
               : __VA_ARGS__)
#define HILT_WGMMA(N, ...)                                                      \
  if constexpr (std::is_same_v<E, bf16>) HILT_WGMMA_OF(N, "bf16", __VA_ARGS__); \
  else HILT_WGMMA_OF(N, "f16", __VA_ARGS__)

#define HILT_REGISTERS_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define HILT_REGISTERS_64 HILT_REGISTERS_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HILT_REGISTERS_96 HILT_REGISTERS_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define HILT_REGISTERS_128 HILT_REGISTERS_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HILT_SUMS_4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define HILT_SUMS_16(I) HILT_SUMS_4(I), HILT_SUMS_4(I + 4), HILT_SUMS_4(I + 8), HILT_SUMS_4(I + 12)
#define HILT_SUMS_32 HILT_SUMS_16(0)
#define HILT_SUMS_64 HILT_SUMS_32, HILT_SUMS_16(16)
#define HILT_SUMS_96 HILT_SUMS_64, HILT_SUMS_16(32)
#define HILT_SUMS_128 HILT_SUMS_96, HILT_SUMS_16(48)

// Both forms for N columns; I0 .. I6 are the operands behind the sums.
#define HILT_WGMMA_OF_COLUMNS(N, I0, I1, I2, I3, I4, I5, I6)                                                       \
  template <class E, int kTransposeA, int kTransposeB>                                                             \
  __device__ __forceinline__ void wgmma(float(&d)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {      \
    HILT_WGMMA(N, I0, I1, I2, I3 "," I4, "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));     \
  }                                                                                                                \
  template <class E, int kTransposeB>                                                                              \
  __device__ __forceinline__ void wgmma(float(&d)[N / 2], const std::uint32_t(&a)[4], std::uint64_t b,             \
                                        int accumulate) {                                                          \
    HILT_WGMMA(N, "{" I0 "," I1 "," I2 "," I3 "}", I4, I5, I6, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
               "r"(accumulate), "n"(kTransposeB));                                                                 \
  }
HILT_WGMMA_OF_COLUMNS(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
HILT_WGMMA_OF_COLUMNS(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
HILT_WGMMA_OF_COLUMNS(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
HILT_WGMMA_OF_COLUMNS(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")

#undef HILT_WGMMA_OF_COLUMNS
#undef HILT_WGMMA
#undef HILT_WGMMA_OF
#undef HILT_REGISTERS_32
#undef HILT_REGISTERS_64
#undef HILT_REGISTERS_96
#undef HILT_REGISTERS_128
#undef HILT_SUMS_32
#undef HILT_SUMS_64
#undef HILT_SUMS_96
#undef HILT_SUMS_128
#undef HILT_SUMS_16
#undef HILT_SUMS_4

}  // namespace hilt::cuda::hopper
