#pragma once
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hilt {
/// The widest instruction set that CPU kernels know and this processor has. A build asks it too.
inline const char* widest_isa() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "base";  // all of these have f16c
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return "avx2";
  if (!__builtin_cpu_supports("avx512bf16")) return "avx512";
  constexpr unsigned kTilesOfBf16 = 1u << 24 | 1u << 22;
  constexpr long kAskFor = 0x1023, kTheirRegisters = 18;  // of the kernel
  unsigned a, b, c, d = 0;
  const bool amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTilesOfBf16) == kTilesOfBf16 &&
                   syscall(SYS_arch_prctl, kAskFor, kTheirRegisters) == 0;
  return amx ? "avx512_amx" : "avx512_bf16";
#else
  return "neon";
#endif
}
}  // namespace hilt
