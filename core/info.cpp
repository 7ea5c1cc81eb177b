// The build's constants, and what Linux says of the processor and the memory.
#include "core/info.h"
#include <cstdlib>
#include <fstream>
#include <thread>
#include "core/dispatch.h"
#include "core/parallel.h"

namespace hilt {

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
