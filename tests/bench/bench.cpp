// Speed of the parts, each beside a floor measured in the same process: a copy for what is bound by
// memory, the kernel called directly for products, the bare kernel for what the tape adds. Run one
// thread with HILT_THREADS=1, on a GPU with --device cuda.
#include <benchmark/benchmark.h>
#include <algorithm>
#include <cstring>
#include <functional>
#include <iostream>
#include <string_view>
#include "core/parallel.h"
#include "core/tape.h"
#include "ops/gemm/gemm.h"
#include "ops/hilbert/points/points.h"
#include "ops/ops.h"

using namespace hilt;

namespace {

Device device;  // of --device

Tensor random(const Shape& shape, std::uint64_t stream) { return randn(shape, {7, stream}, DType::f32, device); }
/// At the end of each round: a GPU has only been asked so far.
void finish() {
  synchronize(device);
  benchmark::ClobberMemory();
}

void bytes(benchmark::State& state, double each) {
  state.counters["GB/s"] =
      benchmark::Counter(each * static_cast<double>(state.iterations()) * 1e-9, benchmark::Counter::kIsRate);
}
void flops(benchmark::State& state, double each) {
  state.counters["GFLOP/s"] =
      benchmark::Counter(each * static_cast<double>(state.iterations()) * 1e-9, benchmark::Counter::kIsRate);
}

constexpr Index kColumns = 1024;
/// 32 MiB on a CPU, 512 MiB on a GPU: well past the caches.
Index rows() { return device.is_cuda() ? Index{1} << 17 : Index{1} << 13; }

// ---- memory -------------------------------------------------------------------------------------
void copy_floor(benchmark::State& state) {
  const Tensor x = random({rows(), kColumns}, 1);
  Tensor y = empty_like(x);
  for (auto _ : state) {
    copy(y, x);
    finish();
  }
  bytes(state, 2.0 * static_cast<double>(x.bytes()));
}
BENCHMARK(copy_floor)->UseRealTime();

template <Tensor (*op)(const Tensor&)> void unary(benchmark::State& state) {
  const Tensor x = random({rows(), kColumns}, 1);
  for (auto _ : state) benchmark::DoNotOptimize(op(x)), finish();
  bytes(state, 2.0 * static_cast<double>(x.bytes()));
}
BENCHMARK(unary<exp>)->UseRealTime()->Name("exp");
BENCHMARK(unary<gelu>)->UseRealTime()->Name("gelu");
BENCHMARK(unary<tanh>)->UseRealTime()->Name("tanh");
BENCHMARK(unary<softmax>)->UseRealTime()->Name("softmax");

void addition(benchmark::State& state) {
  const Tensor a = random({rows(), kColumns}, 1), b = random({rows(), kColumns}, 2);
  for (auto _ : state) benchmark::DoNotOptimize(add(a, b)), finish();
  bytes(state, 3.0 * static_cast<double>(a.bytes()));
}
BENCHMARK(addition)->UseRealTime()->Name("add");

void layer_norm_forward(benchmark::State& state) {
  const Tensor x = random({rows(), kColumns}, 1), w = random({kColumns}, 2), b = random({kColumns}, 3);
  for (auto _ : state) benchmark::DoNotOptimize(layer_norm(x, w, b)), finish();
  bytes(state, 2.0 * static_cast<double>(x.bytes()));
}
BENCHMARK(layer_norm_forward)->UseRealTime()->Name("layer_norm");

void forward_backward(benchmark::State& state, const std::function<Tensor()>& f, const Tensor& x, double moved) {
  for (auto _ : state) {
    Tape tape;
    tape.watch(x);
    const Tensor y = f();
    benchmark::DoNotOptimize(tape.backward(y, y));
    finish();
  }
  bytes(state, moved);
}
void softmax_both(benchmark::State& state) {
  const Tensor x = random({rows(), kColumns}, 1);
  forward_backward(
      state, [&] { return softmax(x); }, x, 5.0 * static_cast<double>(x.bytes()));
}
BENCHMARK(softmax_both)->UseRealTime()->Name("softmax forward+backward");
void layer_norm_both(benchmark::State& state) {
  const Tensor x = random({rows(), kColumns}, 1), w = random({kColumns}, 2), b = random({kColumns}, 3);
  forward_backward(
      state, [&] { return layer_norm(x, w, b); }, x, 5.0 * static_cast<double>(x.bytes()));
}
BENCHMARK(layer_norm_both)->UseRealTime()->Name("layer_norm forward+backward");

// ---- products -----------------------------------------------------------------------------------
void product(benchmark::State& state) {
  const Index m = state.range(0), n = state.range(1), k = state.range(2);
  const Tensor a = random({m, k}, 1), b = random({k, n}, 2);
  for (auto _ : state) benchmark::DoNotOptimize(matmul(a, b)), finish();
  flops(state, 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k));
}
/// One call of the library behind matmul, without tiles, threads or tensors.
void product_floor(benchmark::State& state) {
  const Index m = state.range(0), n = state.range(1), k = state.range(2);
  const Tensor a = random({m, k}, 1), b = random({k, n}, 2);
  Tensor c = empty({m, n}, DType::f32, device);
  const Index none = 0;
  for (auto _ : state) {
    const kernels::MatrixRef<const float> left{a.data<float>(), k, 1}, right{b.data<float>(), n, 1};
    const kernels::MatrixRef<float> out{c.mutable_data<float>(), n, 1};
    if constexpr (kHasCuda)
      if (device.is_cuda())
        kernels::gemm_batched<float>(cuda_of(device), {1, &none, &none, 0}, m, n, k, left, right, out);
    if (device.is_cpu()) kernels::gemm<float>(Cpu{}, m, n, k, left, right, out, false);
    finish();
  }
  flops(state, 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k));
}
void sizes(benchmark::internal::Benchmark* b) {
  for (const auto& s :
       std::vector<std::vector<std::int64_t>>{{64, 64, 64}, {768, 512, 128}, {1024, 1536, 384}, {2048, 2048, 2048}})
    b->Args(s);
  b->UseRealTime();
}
BENCHMARK(product)->Apply(sizes)->Name("matmul");
BENCHMARK(product_floor)->Apply(sizes)->Name("matmul floor (one library call, one thread)");

// ---- orders of points ---------------------------------------------------------------------------
/// A million points on a CPU, `axes` each; ns a point of codes, sort and inverse together.
void points_in_order(benchmark::State& state, const char* kind) {
  const Tensor x = rand({1000000, state.range(0)}, {7, 1});
  for (auto _ : state) benchmark::DoNotOptimize(order_of_points(x, kind));
  state.counters["ns/point"] =
      benchmark::Counter(1e-3, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
/// Each row goes to its place once.
void points_floor(benchmark::State& state) {
  const Tensor x = rand({1000000, state.range(0)}, {7, 1}), to = order_of_points(x).token_at;
  for (auto _ : state) benchmark::DoNotOptimize(gather(x, 0, to));
}
BENCHMARK_CAPTURE(points_in_order, hilbert, "hilbert")->Arg(2)->Arg(3)->UseRealTime()->Name("order_of_points hilbert");
BENCHMARK_CAPTURE(points_in_order, morton, "morton")->Arg(2)->Arg(3)->UseRealTime()->Name("order_of_points morton");
BENCHMARK(points_floor)->Arg(2)->Arg(3)->UseRealTime()->Name("order_of_points floor (one gather)");

// ---- the tape -----------------------------------------------------------------------------------
// A chain of additions on one element: what recording, replaying and freeing a node costs, beside
// the op itself.
constexpr int kChain = 1000;
void chain_bare(benchmark::State& state) {
  const Tensor x = random({1}, 1);
  for (auto _ : state) {
    Tensor y = x;
    for (int i = 0; i < kChain; ++i) y = add(y, x);
    benchmark::DoNotOptimize(y);
    finish();
  }
  state.counters["ns/op"] =
      benchmark::Counter(kChain * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(chain_bare)->Name("one-element add, no tape");
void chain_taped(benchmark::State& state) {
  const Tensor x = random({1}, 1);
  for (auto _ : state) {
    Tape tape;
    tape.watch(x);
    Tensor y = x;
    for (int i = 0; i < kChain; ++i) y = neg(y);
    benchmark::DoNotOptimize(tape.backward(y));
    finish();
  }
  state.counters["ns/op"] =
      benchmark::Counter(kChain * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(chain_taped)->Name("one-element neg, recorded and played back");
void chain_bare_neg(benchmark::State& state) {
  const Tensor x = random({1}, 1);
  for (auto _ : state) {
    Tensor y = x;
    for (int i = 0; i < 2 * kChain; ++i) y = neg(y);  // forward and backward run one kernel each
    benchmark::DoNotOptimize(y);
    finish();
  }
  state.counters["ns/op"] =
      benchmark::Counter(kChain * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(chain_bare_neg)->Name("the same two kernels, no tape");

}  // namespace

int main(int argc, char** argv) try {
  const std::string_view flag = "--device=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view given = argv[i];
    const int taken = given.starts_with(flag) ? 1 : given == "--device" && i + 1 < argc ? 2 : 0;
    if (taken == 0) continue;
    device = device_named(taken == 1 ? given.substr(flag.size()) : argv[i + 1]);
    std::copy(argv + i + taken, argv + argc + 1, argv + i);
    argc -= taken;
    break;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return static_cast<int>(Code::usage);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
} catch (const Error& e) {
  std::cerr << "bench: error: " << e.what() << '\n';
  return static_cast<int>(e.code());
}
