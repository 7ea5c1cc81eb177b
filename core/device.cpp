// From the name of a device to a GPU that works, or to the reason why none does; the instruction
// set of CPU kernels: the best this processor has, or a lower one by HILT_ISA; and the build's
// constants with what Linux says of processor and memory.
#include "core/device.h"
#include <cstdlib>
#include <fstream>
#include <thread>
#include "core/cuda/context.h"
#include "core/dispatch.h"
#include "core/parallel.h"
#include "core/processor.h"

namespace hilt {

[[noreturn]] static void built_without() {
  fail_with(Code::gpu, "no usable GPU: this build has no CUDA kernels; the device 'cpu' always works");
}

Device device_named(std::string_view text) {
  if (text == "cpu") return {};
  const bool numbered = text.starts_with("cuda:");
  const int index = numbered ? number_in<int>(text.substr(5)).value_or(-1) : 0;
  check(index >= 0 && (numbered || text == "cuda" || text == "auto"), "device ", text,
        ": must be auto, cpu, cuda or cuda:N");
  try {
    if constexpr (kHasCuda) {
      if (text == "auto" && cuda::device_count() == 0) return {};
      return cuda::require(index), Device{Device::Kind::cuda, index};
    } else built_without();
  } catch (const Error&) {
    if (text == "auto") return {};
    throw;
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
  fail("HILT_ISA: '", text, "' must be ", kIsas.size() == 1 ? "neon" : "base, avx2, avx512, avx512_bf16 or avx512_amx");
}

Isa active_isa() {
  static const Isa isa = best_isa();
  return isa;
}

static std::string field(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    const auto value = colon == line.npos ? colon : line.find_first_not_of(" \t", colon + 1);
    if (line.starts_with(key) && value != line.npos) return line.substr(value);
  }
  return "";
}

static std::size_t kilobytes(std::string_view key) {
  return std::strtoull(field("/proc/meminfo", key).c_str(), nullptr, 10) * 1024;
}

Info info() {
  Info i;
  i.version = kVersion;
  i.build_type = kBuildType;
  i.compiler = kCompiler;
  i.blas = active_isa() == Isa::base ? "Eigen" : "Hilt";
  i.gpu_archs = kGpuArchs;
  std::string model = field("/proc/cpuinfo", "model name");
  if (const std::string part = field("/proc/cpuinfo", "CPU part"); model.empty() && !part.empty())  // as Arm's say it
    model = "implementer " + field("/proc/cpuinfo", "CPU implementer") + ", part " + part;
  i.devices.push_back("cpu: " + (model.empty() ? "unknown model" : model) + ", " +
                      std::to_string(std::thread::hardware_concurrency()) + " processors");
  for (std::string& gpu : gpu_descriptions()) i.devices.push_back(std::move(gpu));
  for (Isa isa : kIsas)
    if (is_built(isa)) i.isa_built.emplace_back(name_of(isa));
  i.isa_active = name_of(active_isa());
  i.threads = thread_count();
  i.memory = kilobytes("MemTotal");
  i.memory_available = kilobytes("MemAvailable");
  return i;
}

void detail::check_headers(const char* version) {
  const auto series = [](std::string_view v) { return v.substr(0, v.rfind('.')); };
  check(series(version) == series(kVersion), "hilt: library and header versions differ: the program was compiled for ",
        version, " and loaded ", std::string_view(kVersion),
        "; compile it again, or point the loader at the matching libhilt");
}

}  // namespace hilt
