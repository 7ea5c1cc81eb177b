// What this build of Hilt is and what it runs on, in one block to paste into a bug report; --json
// for programs.
//
//   hilt      0.1.0, debugoptimized, gcc 12.2.0
//   BLAS      Hilt
//   CUDA      not in this build
//   device    cpu: Intel(R) Xeon(R) Processor, 2 processors
//   ISA       avx512 in use; built for base, avx2, avx512
//   threads   2
//   memory    23.4 GiB, 21.9 GiB available
#include <hilt/hilt.h>
#include <iostream>
#include <nlohmann/json.hpp>
#include "program/program.h"

static void print_text(const hilt::Info& i) {
  const auto gibibytes = [](std::size_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  std::cout.precision(1);
  std::cout << std::fixed << "hilt      " << i.version << ", " << i.build_type << ", " << i.compiler << '\n'
            << "BLAS      " << i.blas << '\n'
            << "CUDA      " << (i.gpu_archs.empty() ? "not in this build" : i.gpu_archs) << '\n';
  for (const std::string& device : i.devices) std::cout << "device    " << device << '\n';
  std::cout << "ISA       " << i.isa_active << " in use; built for " << program::joined(i.isa_built, ", ") << '\n'
            << "threads   " << i.threads << '\n'
            << "memory    " << gibibytes(i.memory) << " GiB, " << gibibytes(i.memory_available) << " GiB available\n";
}

static void print_json(const hilt::Info& i) {
  const nlohmann::ordered_json out = {
      {"version", i.version}, {"build_type", i.build_type}, {"compiler", i.compiler},
      {"blas", i.blas},       {"cuda", hilt::kHasCuda},     {"gpu_archs", i.gpu_archs},
      {"devices", i.devices}, {"isa_active", i.isa_active}, {"isa_built", i.isa_built},
      {"threads", i.threads}, {"memory_bytes", i.memory},   {"memory_available_bytes", i.memory_available}};
  std::cout << out.dump(2) << '\n';
}

int main(int argc, char** argv) {
  return program::run<bool>(
      "info", "What this build of Hilt is and what it runs on.", argc, argv,
      [](program::Options& o, bool& json) { o.flag("--json", json, "print one JSON object instead of text"); },
      [](const program::Options&, bool json) { return (json ? print_json : print_text)(hilt::info()), 0; });
}
