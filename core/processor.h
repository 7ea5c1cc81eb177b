#pragma once

namespace hilt {
/// The widest instruction set that CPU kernels know and this processor has. A build asks it too.
inline const char* widest_isa() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "base";  // all of these have f16c
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return "avx2";
  return __builtin_cpu_supports("avx512bf16") ? "avx512_bf16" : "avx512";
#else
  return "neon";
#endif
}
}  // namespace hilt
