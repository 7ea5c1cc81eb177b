#pragma once
#include <cstddef>
#include <string>
#include <vector>
#include "config.h"

namespace [[gnu::visibility("default")]] hilt {

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
/// Throws unless the library that was loaded is of the series (0.2 of 0.2.1) of these headers.
/// Always inlined: an out-of-line copy could be another library's.
[[gnu::always_inline]] inline void check_version() { detail::check_headers(kVersion); }

}  // namespace hilt
