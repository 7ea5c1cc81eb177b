// Milliseconds a token where a sequence goes on: with the keys and values of its tokens kept, and
// by a pass over the whole row again; on a CPU beside the time in which the weights are read once.
// Interleaved, medians; the logits of both are compared. Prints one line of JSON. On a GPU weights
// are bf16, and a token ends when its logits are on the host.
//
//   hilt_decode_bench [--layers 12] [--heads 12] [--width 768] [--context 1024] [--vocab 50304]
//                     [--pattern dense] [--order row] [--prompt context - tokens] [--tokens 16]
//                     [--device cpu] [--run 0]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>
#include "core/parallel.h"
#include "nn/layers.h"
#include "nn/transformer.h"
#include "ops/ops.h"

using namespace hilt;

namespace {

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
template <class F> double timed(F&& f) {
  const double begin = now_ms();
  f();
  return now_ms() - begin;
}
double median(std::vector<double> x) {
  std::ranges::nth_element(x, x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2));
  return x[x.size() / 2];
}

/// Every float is read once, by all threads.
double sum_of(const std::vector<Tensor>& tensors) {
  constexpr Index kRun = 1 << 16, kLanes = 64;
  double total = 0;
  for (const Tensor& x : tensors) {
    const Index runs = (x.numel() + kRun - 1) / kRun;
    std::vector<float> sums(static_cast<std::size_t>(runs));
    const float* const data = x.data<float>();
    parallel_for(runs, 4, [&](Index begin, Index end) {
      for (Index run = begin; run < end; ++run) {
        float lanes[kLanes] = {};
        const Index last = std::min(x.numel(), (run + 1) * kRun);
        for (Index i = run * kRun; i + kLanes <= last; i += kLanes)
          for (Index j = 0; j < kLanes; ++j) lanes[j] += data[i + j];
        for (const float lane : lanes) sums[static_cast<std::size_t>(run)] += lane;
      }
    });
    for (const float s : sums) total += static_cast<double>(s);
  }
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  TransformerConfig c;
  c.layers = 12, c.heads = 12, c.width = 768, c.context = 1024, c.vocab = 50304;
  std::string pattern = "dense", order = "row";
  Index tokens = 16, before = -1, run = 0;
  Device device;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--pattern") pattern = value;
    if (key == "--order") order = value;
    if (key == "--device") device = device_named(value);
    for (const auto& [name, to] : {std::pair{"--layers", &c.layers},
                                   {"--heads", &c.heads},
                                   {"--width", &c.width},
                                   {"--context", &c.context},
                                   {"--vocab", &c.vocab},
                                   {"--prompt", &before},
                                   {"--run", &run},
                                   {"--tokens", &tokens}})
      if (key == name) *to = std::stoll(value);
  }
  c.pattern = parse_pattern(pattern);
  c.order = parse_order(order, c.context);
  const bool on_gpu = device.is_cuda();
  Transformer m = make_transformer(c, 1, on_gpu ? DType::bf16 : DType::f32);
  std::vector<Tensor> weights;
  double bytes = 0;
  for (const NamedParameter& p : parameters_of(m)) {
    *p.tensor = moved(*p.tensor, device);
    if (p.name != "positions.weight") weights.push_back(*p.tensor), bytes += static_cast<double>(p.tensor->bytes());
  }
  const Tensor ids = moved(randint(0, c.vocab, {1, c.context}, {1, 1}), device);
  KeyValueCache cache(c.context, run);
  if (before < 0) before = c.context - tokens;
  const auto logits = [&](Index first, Index last) {
    return m.last_logits(slice(ids, 1, first, last), {.cache = &cache}).to_vector<float>();
  };
  for (int i = 0; on_gpu && i < 2; ++i, cache.clear()) (void)logits(0, before), (void)logits(before, before + 1);
  const double prompt = timed([&] { (void)logits(0, before); });
  std::vector<double> decoded, whole, read;
  double error = 0, keep = 0;
  for (Index t = before; t < std::min(before + tokens, c.context); ++t) {
    std::vector<float> a;
    decoded.push_back(timed([&] { a = logits(t, t + 1); }));
    read.push_back(timed([&] { keep += on_gpu ? 0.0 : sum_of(weights); }));
    if (t % 4 == 3) {  // as it was sampled: all rows, of which what comes later cannot matter
      std::vector<float> b;
      whole.push_back(timed([&] { b = select(m.logits(ids), 1, t).to_vector<float>(); }));
      for (std::size_t i = 0; i < a.size(); ++i)
        error = std::max(error, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    }
  }
  std::printf(
      "{\"model\": \"%lld x %lld, context %lld, vocabulary %lld, %s, %s\", \"threads\": %d, \"tokens\": %lld, "
      "\"ms_a_token\": %.2f, \"ms_whole_row\": %.1f, \"ms_prompt\": %.1f, \"times_faster\": %.1f, "
      "\"ms_read_weights\": %.2f, \"of_read_rate\": %.2f, \"weights_mb\": %.0f, \"max_difference\": %.2e%s}\n",
      static_cast<long long>(c.layers), static_cast<long long>(c.width), static_cast<long long>(c.context),
      static_cast<long long>(c.vocab), pattern.c_str(), order.c_str(), thread_count(), static_cast<long long>(tokens),
      median(decoded), median(whole), prompt, median(whole) / median(decoded), median(read),
      median(read) / median(decoded), bytes / 1e6, error, std::isnan(keep) ? ", \"nan\": 1" : "");
}
