#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>
#include "config.h"

namespace [[gnu::visibility("default")]] hilt {

struct Device {                                   // where memory lives and kernels run
  enum class Kind : unsigned char { cpu, cuda };  // where memory can lie
  Kind kind = Kind::cpu;
  int index = 0;  // which GPU; 0 for the CPU

  bool is_cpu() const { return kind == Kind::cpu; }    // in the memory of the host
  bool is_cuda() const { return kind == Kind::cuda; }  // in the memory of a GPU
  friend auto operator<=>(const Device&, const Device&) = default;
  friend std::ostream& operator<<(std::ostream& os, const Device& d) {
    return d.is_cpu() ? os << "cpu" : os << "cuda:" << std::to_string(d.index);
  }
};

/// What `auto`, `cpu`, `cuda` or `cuda:N` names; `auto` takes the CPU where no GPU runs a small
/// kernel. Throws Code::gpu with the driver's reason where the GPU that was asked for is of no use.
Device device_named(std::string_view text);
/// A line about each GPU: name, memory, compute capability; or one that says why none can be used.
std::vector<std::string> gpu_descriptions();

void synchronize(Device device);  // waits until everything asked of a GPU is done; at once for the CPU

struct DeviceCounters {          // what was asked of a GPU since the process began
  std::uint64_t launches = 0;    // of our kernels; products by the vendor's library not counted
  std::uint64_t host_waits = 0;  // times a thread waited for it: an item(), a copy to the host, synchronize()
};
DeviceCounters device_counters(Device device);  // of that GPU; zeros for the CPU

struct Info {  // what this library is and what it runs on: the first thing a bug report needs
  std::string version{}, build_type{}, compiler{};  // of the library, as text
  std::string blas{};                               // whose matrix products
  std::string gpu_archs{};                          // GPU architectures in the binary, empty without CUDA
  std::vector<std::string> devices{};               // "cpu: its model, processors it may use"
  std::vector<std::string> isa_built{};             // instruction sets the CPU kernels were compiled for, widest last
  std::string isa_active{};                      // the one in use: the widest this processor has, or what HILT_ISA says
  int threads = 0;                               // that kernels use
  std::size_t memory = 0, memory_available = 0;  // bytes of the machine, and those a program could still get
};
Info info();  // of this process, as of now

namespace detail {
void check_headers(const char* version);
}
/// Throws unless the library that was loaded is of the series (0.3 of 0.3.1) of these headers.
/// Always inlined: an out-of-line copy could be another library's.
[[gnu::always_inline]] inline void check_version() { detail::check_headers(kVersion); }

}  // namespace hilt
