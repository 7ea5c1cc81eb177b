// From the name of a device to a GPU that works, or to the reason why none does.
#include "core/device.h"
#include <charconv>
#include "core/config.h"
#include "core/cuda/context.h"
#include "core/error.h"

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

}  // namespace hilt
