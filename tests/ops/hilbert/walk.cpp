// Prints the stack of every function of the CPU's kernels, as it is entered for the first time on
// the way from attention(): addresses in this binary, innermost first, a line a function.
// tests/packaging/walk_test.py reads them. What is on the way is compiled for this program alone,
// without inlining, and tells which is entered (-finstrument-functions).
#include <execinfo.h>
#include <array>
#include <cstdint>
#include <cstdio>
#include "core/parallel.h"
#include "ops/hilbert/attention.h"
#include "ops/ops.h"

namespace {

bool listening = false;
struct Entered {
  void* function;
  std::array<void*, 64> frames;
  int depth;
};
std::array<Entered, 4096> entered;
std::size_t count = 0;

}  // namespace

extern "C" {
extern const char __executable_start;
[[gnu::no_instrument_function]] void __cyg_profile_func_enter(void* function, void*) {
  if (!listening) return;
  listening = false;  // what is called here is told as well
  std::size_t i = 0;
  while (i < count && entered[i].function != function) ++i;
  if (i == count && count < entered.size()) {
    Entered& e = entered[count++];
    e.function = function, e.depth = backtrace(e.frames.data(), static_cast<int>(e.frames.size()));
  }
  listening = true;
}
[[gnu::no_instrument_function]] void __cyg_profile_func_exit(void*, void*) {}
}

int main() {
  using namespace hilt;
  const ThreadLimit one(1);
  const Tensor q = full({1, 128, 2, 64}, 1, DType::f32);
  const PlanPtr plan = make_plan({.length = 128, .heads = 2});  // dense
  listening = true;
  (void)attention(q, q, q, plan);
  listening = false;
  const auto place = [](const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(&__executable_start);
  };
  for (std::size_t i = 0; i < count; ++i) {
    for (int f = 1; f < entered[i].depth; ++f)  // a return address is behind its call
      std::printf("%s%#jx", f > 1 ? " " : "", static_cast<std::uintmax_t>(place(entered[i].frames[f]) - 1));
    std::printf("\n");
  }
}
