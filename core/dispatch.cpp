// The instruction set of CPU kernels: the best this processor has, or a lower one by HILT_ISA.
#include "core/dispatch.h"
#include <cstdlib>

namespace hilt {

static Isa best_isa() {
  Isa best = kIsas[0];
#if defined(__x86_64__)
  if (kHasWideIsa && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {  // all of these have f16c
    best = Isa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      best = __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512;
  }
#endif
  const char* text = std::getenv("HILT_ISA");
  if (!text) return best;
  for (Isa isa : kIsas)
    if (name_of(isa) == text) {
      check(isa <= best, "HILT_ISA: this processor or build has no ", text, "; the best is ", name_of(best));
      return isa;
    }
  fail("HILT_ISA: '", text, "' must be ", kIsas.size() == 1 ? "neon" : "base, avx2, avx512 or avx512_bf16");
}

std::string_view name_of(Isa isa) {
  return std::array{"base", "avx2", "avx512", "avx512_bf16", "neon"}[static_cast<std::size_t>(isa)];
}

Isa active_isa() {
  static const Isa isa = best_isa();
  return isa;
}

}  // namespace hilt
