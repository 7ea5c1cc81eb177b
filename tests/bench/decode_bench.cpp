// Milliseconds a token where a sequence goes on: with the keys and values of its tokens kept, and
// by a pass over the whole row again; beside the time in which the weights are read once.
// Interleaved, medians; the logits of both are compared. Prints one line of JSON.
//
//   hilt_decode_bench [--layers 12] [--heads 12] [--width 768] [--context 1024] [--vocab 50304]
//                     [--pattern dense] [--order row] [--tokens 16]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>
#include "core/parallel.h"
#include "nn/parameters.h"
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
  Index tokens = 16;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--pattern") pattern = value;
    if (key == "--order") order = value;
    for (const auto& [name, to] : {std::pair{"--layers", &c.layers},
                                   {"--heads", &c.heads},
                                   {"--width", &c.width},
                                   {"--context", &c.context},
                                   {"--vocab", &c.vocab},
                                   {"--tokens", &tokens}})
      if (key == name) *to = std::stoll(value);
  }
  c.pattern = parse_pattern(pattern);
  c.order = parse_order(order, c.context);
  const Transformer m = make_transformer(c, 1);
  std::vector<Tensor> weights;
  double bytes = 0;
  for (const NamedParameter& p : parameters_of(const_cast<Transformer&>(m)))
    if (p.name != "positions.weight")
      weights.push_back(*p.tensor), bytes += 4.0 * static_cast<double>(p.tensor->numel());
  const Tensor ids = randint(0, c.vocab, {1, c.context}, {1, 1});
  KeyValueCache cache(c.context);
  const Index before = c.context - tokens;
  const double prompt = timed([&] { (void)m.last_logits(slice(ids, 1, 0, before), {.cache = &cache}); });
  std::vector<double> decoded, whole, read;
  double error = 0, keep = 0;
  for (Index t = before; t < c.context; ++t) {
    Tensor y, all;
    decoded.push_back(timed([&] { y = m.last_logits(slice(ids, 1, t, t + 1), {.cache = &cache}); }));
    read.push_back(timed([&] { keep += sum_of(weights); }));
    if (t % 4 == 3) {  // as it was sampled: all rows, of which what comes later cannot matter
      whole.push_back(timed([&] { all = select(m.logits(ids), 1, t); }));
      const std::vector<double> a = y.to_vector(), b = all.to_vector();
      for (std::size_t i = 0; i < a.size(); ++i) error = std::max(error, std::abs(a[i] - b[i]));
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
