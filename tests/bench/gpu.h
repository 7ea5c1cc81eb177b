#pragma once
#include <cuda_runtime_api.h>
#include <algorithm>
#include <string>
#include <vector>
#include "core/cuda/context.h"
#include "ops/ops.h"

// Times on a GPU, by events on its stream, and the rates they are compared with.

namespace hilt::bench {

inline const Device kGpu{Device::Kind::cuda, 0};

class Events {
 public:
  Events() {
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
  }
  template <class F> double ms(F&& f) {
    const auto stream = static_cast<cudaStream_t>(cuda_of(kGpu).stream);
    cudaEventRecord(begin_, stream);
    f();
    cudaEventRecord(end_, stream);
    cudaEventSynchronize(end_);
    float t = 0;
    cudaEventElapsedTime(&t, begin_, end_);
    return static_cast<double>(t);
  }

 private:
  cudaEvent_t begin_{}, end_{};
};

struct Times {
  double low, median, high;
};
template <class F> Times times_of(int repeats, F&& once) {
  std::vector<double> t;
  for (int i = 0; i < repeats + 5; ++i) {
    const double ms = once(i);
    if (i >= 5) t.push_back(ms);
  }
  std::sort(t.begin(), t.end());
  return {t.front(), t[t.size() / 2], t.back()};
}

inline double copy_rate() {  // bytes a second, read and written
  const Tensor a = randn({1 << 29}, {1, 1}, DType::bf16, kGpu);
  Tensor b = empty_like(a);
  Events events;
  const Times t = times_of(20, [&](int) { return events.ms([&] { copy(b, a); }); });
  return 2 * static_cast<double>(a.bytes()) / (t.median * 1e-3);
}

inline double relative_error(const Tensor& got, const Tensor& want) {
  const double off = global_norm(std::vector<Tensor>{sub(to(got, DType::f32), want)}),
               size = global_norm(std::vector<Tensor>{want});
  return off / size;
}

/// Problems drawn at random: a JSON line each, then one with the quantiles. gpu_sweep_cuda.cpp
int sweep(const std::vector<std::string>& options);

}  // namespace hilt::bench
