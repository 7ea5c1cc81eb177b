#pragma once
#include <sys/syscall.h>
#include <unistd.h>

namespace hilt {
/// The widest instruction set that CPU kernels know and this processor has. A build asks it too.
inline const char* widest_isa() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "base";  // all of these have f16c
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return "avx2";
  if (!__builtin_cpu_supports("avx512bf16")) return "avx512";
  constexpr long kAskFor = 0x1023, kTiles = 18;  // whose registers Linux lets a process use that asked
  return __builtin_cpu_supports("amx-bf16") && !syscall(SYS_arch_prctl, kAskFor, kTiles) ? "avx512_amx" : "avx512_bf16";
#else
  return "neon";
#endif
}
}  // namespace hilt
