// Attention over the GPUs of one host, a JSON line a figure:  hilt_gpu_ring [--repeats N] [--gpus
// N] [--length N] [NAME ..]
//
// Ranks are threads with a GPU each, joined by NCCL. A figure is forward + backward by the clock,
// from when all ranks are ready to when all are done, the median of N; efficiency is the time of
// one GPU, measured in the same process, over p times that of p. Every rank holds its rows against
// those of the whole, which its own GPU computed alone; where the whole is too large for that, its
// last segment. Bytes are what all ranks sent in one round, peak what the fullest GPU held, both
// without the referee.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <iostream>
#include <mutex>
#include <string>
#include <vector>
#include "core/cuda/context.h"
#include "ops/hilbert/ring.h"
#include "ops/ops.h"

namespace {

using namespace hilt;

struct Figure {
  const char* name;
  Index length;
  std::string pattern;
  Causality causality;
  Index segment = 0;  // of a pattern that does not fit on one GPU
  bool fits() const { return segment == 0; }
};
constexpr Index kHeads = 16, kDim = 128;

struct Operands {
  Tensor q, k, v, d_o;
};
struct Results {
  Tensor o, dq, dk, dv;
};

PlanPtr plan_of(const Figure& f, Index length) {
  PlanSpec spec;
  spec.length = length, spec.heads = kHeads, spec.pattern = parse_pattern(f.pattern),
  spec.order = parse_order("row", length), spec.causality = f.causality;
  spec.in_order = true;
  return make_plan(spec);
}

template <class Attend> Results play(const Operands& x, Attend&& attend) {
  Tape tape;
  for (const Tensor* t : {&x.q, &x.k, &x.v}) tape.watch(*t);
  const Tensor o = attend(x.q, x.k, x.v);
  const Gradients g = tape.backward(o, x.d_o);
  return {o, g[x.q], g[x.k], g[x.v]};
}

/// Milliseconds of each round, the first two left out.
template <class Round> std::vector<double> times_of(int repeats, const Comm& comm, Device device, Round&& round) {
  std::vector<double> ms;
  for (int i = 0; i < repeats + 2; ++i) {
    synchronize(device);
    comm.barrier();
    const auto begin = std::chrono::steady_clock::now();
    round();
    synchronize(device);
    comm.barrier();
    if (i >= 2)
      ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(ms.begin(), ms.end());
  return ms;
}

double worst_difference(const Tensor& a, const Tensor& b) {  // NaN where any is
  const Tensor d = abs(sub(to(a, DType::f32), to(b, DType::f32)));
  return max(reshape(d, {d.numel()}), {0}).item();
}

struct Outcome {
  double forward = 0, both = 0, low = 0, high = 0, error = 0;
  std::size_t bytes = 0, peak = 0;
};
struct Reference {
  double forward = 0, both = 0;
};

Outcome run(const Figure& f, int gpus, int repeats, Reference& one) {
  Outcome out;
  std::mutex mutex;
  run_ranks(gpus, [&](Comm& threads) {
    const int rank = threads.rank();
    const Device device{Device::Kind::cuda, rank};
    threads.set_deadline(std::chrono::minutes(5));
    Comm comm = gpus > 1 ? nccl_ranks(threads, device) : threads;
    const PlanPtr plan = plan_of(f, f.length);
    const bool balanced = f.causality != Causality::none;
    const auto shard = std::make_shared<const ShardPlan>(
        plan, balanced ? balanced_shards(*plan, gpus) : contiguous_shards(*plan, gpus), rank);
    Operands mine;
    Results want;
    {
      const Index rows = f.fits() ? f.length : shard->length();
      const auto x = [&](std::uint64_t stream) {
        return randn({1, rows, kHeads, kDim},
                     {5, f.fits() ? stream : stream + 10 * static_cast<std::uint64_t>(rank + 1)}, DType::bf16, device);
      };
      const auto own = [&](const Tensor& t) { return f.fits() ? rows_of_rank(t, *shard, rank) : t; };
      const Operands all{x(1), x(2), x(3), x(4)};
      mine = {own(all.q), own(all.k), own(all.v), own(all.d_o)};
      const auto alone = [&, here = f.fits() ? plan : plan_of(f, f.segment)](
                             const Tensor& q, const Tensor& k, const Tensor& v) { return attention(q, k, v, here); };
      if (!f.fits()) {
        const auto last = [&](const Tensor& t) { return slice(t, 1, rows - f.segment, rows); };
        want = play({last(all.q), last(all.k), last(all.v), last(all.d_o)}, alone);
      } else {
        Results whole = play(all, alone);
        want = {own(whole.o), own(whole.dq), own(whole.dk), own(whole.dv)};
        whole = {};
        if (gpus == 1) {
          const std::vector<double> forward =
              times_of(repeats, Comm(), device, [&] { (void)attention_with_lse(all.q, all.k, all.v, plan); });
          const std::vector<double> both = times_of(repeats, Comm(), device, [&] { (void)play(all, alone); });
          one = {forward[forward.size() / 2], both[both.size() / 2]};
        }
      }
    }
    const auto together = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
      return ring_attention(q, k, v, shard, comm);
    };
    const std::size_t referee = 4 * want.o.bytes(), before = comm.traffic().bytes_sent;
    synchronize(device), release_pool(device), reset_memory_peak(device);
    Results got = play(mine, together);
    const std::size_t bytes = comm.traffic().bytes_sent - before, peak = memory_stats(device).peak - referee;
    double error = 0;
    for (const auto& [x, y] :
         {std::pair{&got.o, &want.o}, {&got.dq, &want.dq}, {&got.dk, &want.dk}, {&got.dv, &want.dv}}) {
      const double d = worst_difference(slice(*x, 1, x->dim(1) - y->dim(1), x->dim(1)), *y);
      if (!(d <= error)) error = d;
    }
    got = want = {};
    const std::vector<double> forward =
        times_of(repeats, threads, device, [&] { (void)ring_attention_with_lse(mine.q, mine.k, mine.v, shard, comm); });
    const std::vector<double> both = times_of(repeats, threads, device, [&] { (void)play(mine, together); });
    const std::lock_guard lock(mutex);
    out.bytes += bytes, out.peak = std::max(out.peak, peak);
    if (!(error <= out.error)) out.error = error;
    if (rank == 0)
      out.forward = forward[forward.size() / 2], out.both = both[both.size() / 2], out.low = both.front(),
      out.high = both.back();
  });
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  int repeats = 7, most = cuda::device_count();
  Index only = 0;
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--repeats") && i + 1 < argc) repeats = std::atoi(argv[++i]);
    else if (!std::strcmp(argv[i], "--gpus") && i + 1 < argc) most = std::min(most, std::atoi(argv[++i]));
    else if (!std::strcmp(argv[i], "--length") && i + 1 < argc) only = std::atoll(argv[++i]);
    else names.emplace_back(argv[i]);
  }
  std::vector<Figure> figures;
  for (Index length : {Index{65536}, Index{131072}}) {
    figures.push_back({"ring_causal", length, "dense", Causality::token});
    figures.push_back({"ring_dense", length, "dense", Causality::none});
    figures.push_back({"ring_segments", length, "segment:2048", Causality::none});
  }
  figures.push_back({"ring_long", 1 << 22, "segment:16384", Causality::none, 16384});
  try {
    (void)device_named("cuda");
    bool failed = false;
    for (const Figure& f : figures) {
      if (!names.empty() && std::find(names.begin(), names.end(), f.name) == names.end()) continue;
      if (only > 0 && f.length != only) continue;
      Reference one;
      for (int gpus = f.fits() ? 1 : most; gpus <= most; gpus *= 2) {
        const Outcome r = run(f, gpus, f.fits() ? repeats : 2, one);
        constexpr double kAllowed = 0.0625;  // two units of bf16 where values reach 8
        failed = failed || !(r.error <= kAllowed);
        const auto efficiency = [&](double alone, double together) { return alone / (together * gpus); };
        std::cout << "{\"figure\": \"" << f.name << "\", \"gpus\": " << gpus << ", \"length\": " << f.length
                  << ", \"heads\": " << kHeads << ", \"dim\": " << kDim << ", \"dtype\": \"bf16\", \"pattern\": \""
                  << f.pattern << "\", \"order\": \"row\", \"causal\": \"" << name_of(f.causality)
                  << "\", \"forward_ms\": " << r.forward << ", \"ms\": " << r.both << ", \"ms_min\": " << r.low
                  << ", \"ms_max\": " << r.high;
        if (f.fits())
          std::cout << ", \"one_gpu_forward_ms\": " << one.forward << ", \"one_gpu_ms\": " << one.both
                    << ", \"forward_efficiency\": " << efficiency(one.forward, r.forward)
                    << ", \"efficiency\": " << efficiency(one.both, r.both);
        std::cout << ", \"max_abs_error\": " << r.error << ", \"bytes_sent\": " << r.bytes
                  << ", \"peak_bytes_a_gpu\": " << r.peak << "}" << std::endl;
      }
    }
    return failed ? 1 : 0;
  } catch (const Error& e) {
    std::cerr << "hilt_gpu_ring: error: " << e.what() << '\n';
    return static_cast<int>(e.code());
  }
}
