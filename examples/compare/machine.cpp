// Two ceilings of this machine, measured: how fast it copies and how fast it multiplies.
#include "lesson.h"

namespace compare {
Machine measure_machine(const Problem& p) {
  Machine m;
  m.info = hilt::info();
  const hilt::Device device = p.q.device();
  // Large enough to miss every cache, small enough to be over soon.
  constexpr Index kCopied = Index{1} << 25;  // elements of 4 bytes: 128 MiB read, 128 MiB written
  hilt::Tensor to = hilt::zeros({kCopied}, hilt::DType::f32, device);
  const hilt::Tensor from = hilt::zeros({kCopied}, hilt::DType::f32, device);
  m.copy_gb_s =
      2.0 * static_cast<double>(from.bytes()) / program::best_seconds(6, device, [&] { hilt::copy(to, from); }) * 1e-9;
  m.gemm_gflop_s = program::product_gflops(device, p.dtype, device.is_cpu() ? 1024 : 8192);
  return m;
}

double arithmetic_speed(const Mode& mode) {
  return mode.forward_ms > 0 ? mode.forward_flops / mode.forward_ms * 1e-6 : 0;
}

void measure_machine_again(Lesson& lesson) {
  double fastest = 0;
  for (const Mode& m : lesson.modes)
    if (m.ran()) fastest = std::max(fastest, arithmetic_speed(m));
  if (fastest <= lesson.machine.gemm_gflop_s) return;
  const Machine again = measure_machine(lesson.problem);
  lesson.machine.copy_gb_s = std::max(lesson.machine.copy_gb_s, again.copy_gb_s);
  lesson.machine.gemm_gflop_s = std::max(lesson.machine.gemm_gflop_s, again.gemm_gflop_s);
  lesson.machine.measured_twice = true;
}

}  // namespace compare
