// Attention as tests/bench/peers/cpu_attention.py asks for it, beside PyTorch. A line of the input
// is `LENGTH PATTERN CAUSALITY TYPE`; the answer, milliseconds of one forward pass and of its
// backward pass, 4 heads of 64; with an argument, of processor time. HILT_THREADS and HILT_ISA say
// how.
#include <ctime>
#include <iostream>
#include <map>
#include <sstream>
#include "core/device.h"
#include "core/tape.h"
#include "ops/hilbert/attention.h"
#include "ops/ops.h"

using namespace hilt;

namespace {

struct Problem {
  PlanPtr plan;
  Tensor q, k, v, d_o;
};

Problem problem_of(const std::string& line) {
  std::istringstream in(line);
  Index length = 0;
  std::string pattern, causal, type;
  in >> length >> pattern >> causal >> type;
  PlanSpec spec;
  spec.length = length, spec.heads = 4, spec.pattern = parse_pattern(pattern);
  spec.causality = causal == "token" ? Causality::token : Causality::none;
  const auto drawn = [&](std::uint64_t stream) {
    return to(randn({1, length, 4, 64}, {7, stream}), type == "bf16" ? DType::bf16 : DType::f32);
  };
  return {make_plan(spec), drawn(1), drawn(2), drawn(3), drawn(4)};
}

}  // namespace

int main(int count, char**) {
  std::map<std::string, Problem> known;
  std::cout << info().devices.at(0) << ", " << info().isa_active << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    if (!known.contains(line)) known[line] = problem_of(line);
    const Problem& p = known[line];
    const auto now_ms = [&] {
      timespec t{};
      clock_gettime(count > 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
      return 1e3 * static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_nsec);
    };
    Tape tape;
    for (const Tensor* x : {&p.q, &p.k, &p.v}) tape.watch(*x);
    const double begin = now_ms();
    const Tensor o = attention(p.q, p.k, p.v, p.plan);
    const double middle = now_ms();
    const Gradients gradients = tape.backward(o, p.d_o);
    std::cout << middle - begin << ' ' << now_ms() - middle << std::endl;
  }
}
