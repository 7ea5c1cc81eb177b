// Attention on one GPU, a JSON line a figure:  hilt_gpu_attention [--repeats N] [NAME ..]
// Problems drawn at random instead:            hilt_gpu_attention sweep --seed S --count N [..]
//
// Inputs are random and rotate through more memory than the L2 cache holds; times are events on the
// stream, medians of N; a figure's correctness is asserted in the same process, against the plain
// kernel in f32 on the same numbers. Floors: bytes, each tensor once, over the rate of a copy
// measured here; FLOPs over 716 TFLOP/s.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>
#include "ops/hilbert/attention.h"
#include "tests/bench/gpu.h"

namespace {

using namespace hilt;
using namespace hilt::bench;

constexpr double kPeakFlops = 716e12;      // of a large bf16 product on one H200
constexpr std::size_t kCache = 60u << 20;  // bytes of L2

struct Shape4 {
  const char* name;
  Index batch, length, heads, dim;
  std::string pattern, order;
  Causality causality = Causality::none;
  DType type = DType::bf16;
  std::string term = "none";
  Index queries = 0;  // the last so many ask, forward alone; 0: all
};
/// The score term that a name stands for, learned where it can be.
ScoreTerms terms_of(const Shape4& s) {
  const auto x = [](const Shape& shape) { return randn(shape, {8, 1}, DType::f32, kGpu); };
  ScoreTerms t;
  if (s.term == "softcap") t.softcap = 30;
  if (s.term == "slopes") t.slopes = alibi_slopes(s.heads, DType::f32, kGpu);
  if (s.term == "relative:17x17") t.relative = x({s.heads, 17, 17});
  if (s.term == "relative:255") t.relative = x({s.heads, 255});
  if (s.term == "bias of keys") t.bias = x({s.batch, 1, 1, s.length});
  if (s.term == "bias of pairs") t.bias = x({s.length, s.length});
  if (s.term == "bias of heads' pairs") t.bias = x({s.heads, s.length, s.length});
  if (s.term == "sink") t.sink = x({s.heads});
  return t;
}

void line(const Shape4& s, const char* what, const Times& t, double bytes, double flops, double rate, double error) {
  const double by_bytes = bytes / rate * 1e3, by_flops = flops / kPeakFlops * 1e3, floor = std::max(by_bytes, by_flops);
  std::cout << "{\"figure\": \"" << s.name << "\", \"pass\": \"" << what << "\", \"batch\": " << s.batch
            << ", \"length\": " << s.length << ", \"heads\": " << s.heads << ", \"dim\": " << s.dim << ", \"dtype\": \""
            << name_of(s.type) << "\", \"pattern\": \"" << s.pattern << "\", \"order\": \"" << s.order
            << "\", \"causal\": \"" << name_of(s.causality) << "\", \"term\": \"" << s.term
            << "\", \"ms\": " << t.median << ", \"ms_min\": " << t.low << ", \"ms_max\": " << t.high
            << ", \"floor_ms\": " << floor << ", \"floor\": \"" << (by_bytes > by_flops ? "bytes" : "flops")
            << "\", \"tflops\": " << flops / t.median * 1e-9 << ", \"relative_error\": " << error << "}" << std::endl;
}

int run(const Shape4& s, int repeats, double rate) {
  PlanSpec spec;
  spec.length = s.length, spec.heads = s.heads, spec.pattern = parse_pattern(s.pattern), spec.causality = s.causality;
  spec.order = parse_order(s.order, s.length);
  const bool all = s.queries == 0;
  if (!all) spec.queries = query_run(s.length - s.queries, s.queries);
  const PlanPtr plan = make_plan(spec);
  AttentionOptions how;
  how.terms = terms_of(s);
  const auto watch = [&](Tape& tape, std::initializer_list<Tensor> inputs) {
    for (const Tensor& t : inputs) tape.watch(t);
    visit_terms(how.terms, [&](const std::string&, Tensor& t) { tape.watch(t); });
  };
  const Shape shape{s.batch, s.length, s.heads, s.dim}, asks{s.batch, plan->queries(), s.heads, s.dim};
  const auto each = static_cast<std::size_t>(shape.numel()) * size_of(s.type);
  const auto sets = static_cast<int>(std::max<std::size_t>(2, 2 * kCache / (3 * each) + 1));
  struct Set {
    Tensor q, k, v, d_o;
  };
  std::vector<Set> in;
  for (int i = 0; i < sets; ++i) {
    const auto x = [&](const Shape& its, std::uint64_t stream) {
      return randn(its, {7, stream + 10 * static_cast<std::uint64_t>(i)}, s.type, kGpu);
    };
    in.push_back({x(asks, 1), x(shape, 2), x(shape, 3), x(asks, 4)});
  }
  const auto at = [&](int i) -> const Set& { return in[static_cast<std::size_t>(i % sets)]; };
  const auto play = [&](const Set& x, Tensor& o) -> std::vector<Tensor> {
    if (!all) return o = attention(x.q, x.k, x.v, plan, how), std::vector<Tensor>{};
    Tape tape;
    watch(tape, {x.q, x.k, x.v});
    o = attention(x.q, x.k, x.v, plan, how);
    const Gradients g = tape.backward(o, x.d_o);
    return {g[x.q], g[x.k], g[x.v]};
  };
  // Right first.
  double forward_error = 0, backward_error = 0;
  {
    const Set wide{to(in[0].q, DType::f32), to(in[0].k, DType::f32), to(in[0].v, DType::f32),
                   to(in[0].d_o, DType::f32)};
    Tensor o, o_wide;
    const auto got = play(in[0], o), want = play(wide, o_wide);
    forward_error = relative_error(o, o_wide);
    for (std::size_t i = 0; i < got.size(); ++i)
      backward_error = std::max(backward_error, relative_error(got[i], want[i]));
    constexpr double kAllowed = 1e-2;  // bf16 operands and outputs
    if (!(forward_error < kAllowed && backward_error < kAllowed)) {
      std::cerr << "hilt_gpu_attention: " << s.name << ' ' << s.pattern << ' ' << s.order << ": error " << forward_error
                << " forward, " << backward_error << " backward\n";
      return 1;
    }
  }
  Events events;
  const Times forward = times_of(repeats, [&](int i) {
    (void)attention_with_lse(at(i + 1).q, at(i + 1).k, at(i + 1).v, plan,
                             how);  // keeps the GPU busy while the next is asked for
    return events.ms([&] { (void)attention_with_lse(at(i).q, at(i).k, at(i).v, plan, how); });
  });
  const double keys = std::min(1.0,
                               static_cast<double>(plan->tilings()[0].k_token.size()) / static_cast<double>(s.length)),
               rows = static_cast<double>(plan->queries()) / static_cast<double>(s.length),
               tensor = static_cast<double>(each),
               pairs = static_cast<double>(plan->stats().pairs) * static_cast<double>(s.batch * s.heads),
               flops = 4 * pairs * static_cast<double>(s.dim);
  // Forward reads q, k and v and writes o; backward reads q, k, v, o and dO and writes dq, dk and
  // dv. Keys that nobody attends to are not read.
  line(s, "forward", forward, (2 * rows + 2 * keys) * tensor, flops, rate, forward_error);
  if (!all) return 0;
  const Times backward = times_of(repeats, [&](int i) {
    Tape tape;
    const Set& x = at(i);
    watch(tape, {x.q, x.k, x.v});
    const Tensor o = attention(x.q, x.k, x.v, plan, how);
    return events.ms([&] { (void)tape.backward(o, x.d_o); });
  });
  line(s, "backward", backward, (6 + 2 * keys) * tensor, 2.5 * flops, rate, backward_error);
  return 0;
}

/// The three ways to a gradient on one dense problem: time, what the tape keeps, the most memory at
/// once.
int modes(int repeats) {
  constexpr Index kBatch = 8, kLength = 4096, kHeads = 16, kDim = 64;
  PlanSpec spec;
  spec.length = kLength, spec.heads = kHeads, spec.order = parse_order("hilbert", kLength);
  const PlanPtr plan = make_plan(spec);
  std::vector<Tensor> in, exact;
  for (std::uint64_t i = 0; i < 4; ++i) in.push_back(randn({kBatch, kLength, kHeads, kDim}, {9, i}, DType::bf16, kGpu));
  Events events;
  double forward_ms = 0, backward_ms = 0;
  std::size_t saved = 0;
  const auto play = [&](std::span<const Tensor> x, Backward how) {
    AttentionOptions options;
    options.backward = how;
    Tape tape;
    for (std::size_t i = 0; i < 3; ++i) tape.watch(x[i]);
    Tensor o;
    forward_ms = events.ms([&] { o = attention(x[0], x[1], x[2], plan, options); });
    saved = tape.saved_bytes();
    std::vector<Tensor> out{o};
    backward_ms = events.ms([&] {
      const Gradients g = tape.backward(o, x[3]);
      for (std::size_t i = 0; i < 3; ++i) out.push_back(g[x[i]]);
    });
    return out;
  };
  {
    std::vector<Tensor> wide;
    for (const Tensor& x : in) wide.push_back(to(x, DType::f32));
    exact = play(wide, Backward::fused);
  }
  for (Backward how : {Backward::taped, Backward::hybrid, Backward::fused}) {
    double error = 0;
    release_pool(kGpu);
    const std::size_t before = memory_stats(kGpu).live;
    reset_memory_peak(kGpu);
    {
      const std::vector<Tensor> got = play(in, how);
      for (std::size_t i = 0; i < got.size(); ++i) error = std::max(error, relative_error(got[i], exact[i]));
    }
    reset_memory_peak(kGpu);
    play(in, how);
    const std::size_t kept = saved, peak = memory_stats(kGpu).peak - before;
    if (!(error < 2e-2))
      return std::cerr << "hilt_gpu_attention: modes " << name_of(how) << ": error " << error << '\n', 1;
    std::vector<double> forward, backward;
    for (int i = 0; i < std::max(3, repeats / 5); ++i)
      play(in, how), forward.push_back(forward_ms), backward.push_back(backward_ms);
    std::ranges::sort(forward), std::ranges::sort(backward);
    const std::size_t ends = 4 * in[0].bytes();
    std::cout << "{\"figure\": \"modes\", \"mode\": \"" << name_of(how) << "\", \"batch\": " << kBatch
              << ", \"length\": " << kLength << ", \"heads\": " << kHeads << ", \"dim\": " << kDim
              << ", \"dtype\": \"bf16\", \"pattern\": \"dense\", \"forward_ms\": " << forward[forward.size() / 2]
              << ", \"backward_ms\": " << backward[backward.size() / 2] << ", \"saved_bytes\": " << kept
              << ", \"beyond_bytes\": " << static_cast<double>(kept) - static_cast<double>(ends)
              << ", \"peak_bytes\": " << peak << ", \"relative_error\": " << error << "}" << std::endl;
  }
  return 0;
}

/// What looks at tokens, along a random order that comes with the call, a new one each time: beside
/// the plan of that order, forward alone and both ways. bf16, head dim 64.
int orders(int repeats) {
  constexpr Index kLength = 65536, kHeads = 8;
  constexpr int kOrders = 4;
  const auto x = [](std::uint64_t stream) { return randn({1, kLength, kHeads, 64}, {51, stream}, DType::bf16, kGpu); };
  const Tensor q = x(1), k = x(2), v = x(3), d_o = x(4);
  Events events;
  for (const char* pattern : {"segment:64", "segment:128", "segment:1024", "slide:64", "slide:512"})
    for (const std::string_view what : {"causal", "alibi", "relative", "bias of keys", "dropout"}) {
      PlanSpec spec;
      spec.length = kLength, spec.heads = kHeads, spec.order = parse_order("given", kLength);
      spec.pattern = parse_pattern(pattern);
      if (what == "causal") spec.causality = Causality::token;
      AttentionOptions own;
      if (what == "alibi") own.terms.alibi = true;
      if (what == "relative") own.terms.relative = randn({kHeads, 255}, {51, 5}, DType::f32, kGpu);
      if (what == "bias of keys") own.terms.bias = randn({1, 1, 1, kLength}, {51, 6}, DType::f32, kGpu);
      if (what == "dropout") own.dropout = 0.1, own.key = RandomKey{51, 7};
      const PlanPtr any = make_plan(spec);
      std::vector<Tensor> order;
      std::vector<PlanPtr> plans;
      std::uint64_t seed = 51;
      for (int i = 0; i < kOrders; ++i) {
        spec.given = query_run(0, kLength);
        for (Index n = kLength; n > 1; --n) {
          seed = seed * 6364136223846793005u + 1442695040888963407u;
          std::swap(spec.given[static_cast<std::size_t>(n - 1)],
                    spec.given[static_cast<std::size_t>((seed >> 33) % static_cast<std::uint64_t>(n))]);
        }
        order.push_back(moved(from_values(spec.given, {kLength}), kGpu));
        plans.push_back(std::make_shared<const Plan>(spec));
      }
      const auto timed = [&](bool with_call, bool backward) {
        return times_of(repeats, [&](int i) {
          const auto at = static_cast<std::size_t>(i % kOrders);
          AttentionOptions how = own;
          if (with_call) how.permutation = order[at];
          return events.ms([&] {
            Tape tape;
            if (backward) tape.watch(q), tape.watch(k), tape.watch(v);
            const Tensor o = attention(q, k, v, with_call ? any : plans[at], how);
            if (backward) (void)tape.backward(o, d_o);
          });
        });
      };
      for (const bool backward : {false, true}) {
        const Times of_plan = timed(false, backward), of_call = timed(true, backward);
        std::cout << "{\"figure\": \"orders\", \"pass\": \"" << (backward ? "both" : "forward") << "\", \"pattern\": \""
                  << pattern << "\", \"what\": \"" << what << "\", \"of_plan_ms\": " << of_plan.median
                  << ", \"of_call_ms\": " << of_call.median << ", \"ratio\": " << of_call.median / of_plan.median << "}"
                  << std::endl;
      }
    }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && !std::strcmp(argv[1], "sweep")) return sweep({argv + 2, argv + argc});
  int repeats = 50;
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--repeats") && i + 1 < argc) repeats = std::atoi(argv[++i]);
    else names.emplace_back(argv[i]);
  }
  std::vector<Shape4> shapes;
  for (const char* order : {"hilbert", "row"}) {
    shapes.push_back({"segments", 1, 65536, 16, 64, "segment:128", order});
    shapes.push_back({"segments", 1, 65536, 16, 64, "segment:256", order});
    shapes.push_back({"segments", 1, 65536, 16, 64, "segment:2048,dilation=16", order});
    shapes.push_back({"segments", 1, 65536, 16, 128, "segment:128", order});
    shapes.push_back({"long_segments", 1, 65536, 16, 64, "segment:2048", order});
    shapes.push_back({"long_segments", 1, 65536, 16, 64, "segment:2048,dilation=4", order});
  }
  shapes.push_back({"dense", 4, 4096, 16, 128, "dense", "row"});
  shapes.push_back({"dense", 4, 4096, 32, 64, "dense", "row"});
  shapes.push_back({"causal", 4, 4096, 16, 128, "dense", "row", Causality::token});
  shapes.push_back({"causal", 4, 4096, 32, 64, "dense", "row", Causality::token});
  for (const char* order : {"hilbert", "row"})
    shapes.push_back({"neighborhood", 16, 16384, 2, 64, "neighborhood2d:17x17", order});
  // One token asks.
  shapes.push_back({.name = "decode",
                    .batch = 64,
                    .length = 8192,
                    .heads = 16,
                    .dim = 64,
                    .pattern = "dense",
                    .order = "row",
                    .causality = Causality::token,
                    .queries = 1});
  // By the tensor cores of any GPU.
  for (Index dim : {64, 128})
    for (Causality causality : {Causality::token, Causality::none})
      shapes.push_back({"portable", 4, 4096, 16, dim, "dense", "row", causality, DType::f16});
  for (Index dim : {64, 128})
    shapes.push_back({"plain", 4, 4096, 16, dim, "dense", "row", Causality::token, DType::f32});
  shapes.push_back({"portable", 16, 16384, 2, 64, "neighborhood2d:17x17", "hilbert", Causality::none, DType::f16});
  for (const char* term : {"none", "softcap", "slopes", "relative:17x17", "bias of keys", "sink"})
    shapes.push_back(
        {"terms", 16, 16384, 2, 64, "neighborhood2d:17x17", "hilbert:128x128", Causality::none, DType::bf16, term});
  for (const char* term :
       {"none", "softcap", "slopes", "relative:255", "bias of keys", "bias of pairs", "bias of heads' pairs", "sink"})
    shapes.push_back({"terms", 4, 4096, 16, 64, "dense", "row", Causality::token, DType::bf16, term});
  try {
    (void)device_named("cuda");
    const double rate = copy_rate();
    std::cout << "{\"figure\": \"copy\", \"bytes_per_second\": " << rate << "}" << std::endl;
    int failed = 0;
    for (const Shape4& s : shapes)
      if (names.empty() || std::find(names.begin(), names.end(), s.name) != names.end())
        failed += run(s, repeats, rate);
    if (names.empty() || std::ranges::find(names, "modes") != names.end()) failed += modes(repeats);
    if (names.empty() || std::ranges::find(names, "orders") != names.end()) failed += orders(repeats);
    return failed == 0 ? 0 : 1;
  } catch (const Error& e) {
    std::cerr << "hilt_gpu_attention: error: " << e.what() << '\n';
    return static_cast<int>(e.code());
  }
}
