// Two ceilings of this machine, measured: how fast it copies and how fast it multiplies.
#include <algorithm>
#include <chrono>

#include "lesson.h"

namespace compare {
namespace {

/// Shortest of a few runs: what the machine can do when nothing else runs.
template <class F> double best_seconds(F&& f) {
  constexpr int kTries = 6;
  double best = 1e30;
  for (int i = 0; i < kTries; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

Machine measure_machine(hilt::DType dtype) {
  Machine m;
  m.info = hilt::info();
  // Large enough to miss every cache, small enough to be over soon.
  constexpr Index kCopied = Index{1} << 25;  // elements of 4 bytes: 128 MiB read, 128 MiB written
  hilt::Tensor to = hilt::zeros({kCopied});
  const hilt::Tensor from = hilt::zeros({kCopied});
  m.copy_gb_s = 2.0 * static_cast<double>(from.bytes()) / best_seconds([&] { hilt::copy(to, from); }) * 1e-9;
  // 16-bit types are multiplied in f32.
  constexpr Index kSide = 1024;
  const hilt::DType type = dtype == hilt::DType::f64 ? dtype : hilt::DType::f32;
  const hilt::Tensor a = hilt::full({kSide, kSide}, 0.5, type), b = hilt::full({kSide, kSide}, 0.25, type);
  m.gemm_gflop_s = 2.0 * kSide * kSide * kSide / best_seconds([&] { hilt::matmul(a, b); }) * 1e-9;
  return m;
}

}  // namespace compare
