// From the name of a device to a GPU that works, or to the reason why none does; and the
// instruction set of CPU kernels: the best this processor has, or a lower one by HILT_ISA.
#include "core/device.h"
#include <charconv>
#include <cstdlib>
#include <optional>
#include "core/cuda/context.h"
#include "core/dispatch.h"
#include "core/processor.h"

namespace hilt {

[[noreturn]] static void built_without() {
  fail_with(Code::gpu, "no usable GPU: this build has no CUDA kernels; the device 'cpu' always works");
}

Device device_named(std::string_view text) {
  if (text == "cpu") return {};
  int index = 0;
  if (text.starts_with("cuda:")) {
    const auto [end, error] = std::from_chars(text.data() + 5, text.data() + text.size(), index);
    check(error == std::errc() && end == text.data() + text.size() && index >= 0, "device ", text,
          ": must be auto, cpu, cuda or cuda:N");
  } else {
    check(text == "cuda" || text == "auto", "device ", text, ": must be auto, cpu, cuda or cuda:N");
  }
  if constexpr (kHasCuda) {
    if (text == "auto" && cuda::device_count() == 0) return {};
    try {
      cuda::require(index);
    } catch (const Error&) {
      if (text == "auto") return {};
      throw;
    }
    return {Device::Kind::cuda, index};
  } else {
    if (text == "auto") return {};
    built_without();
  }
}

std::vector<std::string> gpu_descriptions() {
  if constexpr (kHasCuda) return cuda::descriptions();
  else return {};
}

void synchronize(Device device) {
  if (device.is_cpu()) return;
  if constexpr (kHasCuda) cuda::synchronize(device.index);
  else built_without();
}

DeviceCounters device_counters(Device device) {
  if (device.is_cpu()) return {};
  if constexpr (kHasCuda) return cuda::counters(device.index);
  else built_without();
}

static Isa best_isa() {
  std::optional<Isa> best;
  for (Isa isa : kIsas) {
    if (is_built(isa)) best = isa;
    if (name_of(isa) == widest_isa()) break;
  }
  check(best.has_value(), "this build has CPU kernels for ", kIsaBuilt, ", and this processor has ", widest_isa(),
        "; build with -Disa=all, which serves every processor");
  const char* text = std::getenv("HILT_ISA");
  if (!text) return *best;
  for (Isa isa : kIsas)
    if (name_of(isa) == text) {
      check(isa <= *best, "HILT_ISA: this processor or build has no ", text, "; the best is ", name_of(*best));
      check(is_built(isa), "HILT_ISA: this build has no ", text, ", but ", kIsaBuilt, "; build with -Disa=all");
      return isa;
    }
  fail("HILT_ISA: '", text, "' must be ", kIsas.size() == 1 ? "neon" : "base, avx2, avx512 or avx512_bf16");
}

Isa active_isa() {
  static const Isa isa = best_isa();
  return isa;
}

}  // namespace hilt
