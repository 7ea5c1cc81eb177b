// hilt_gpu_attention sweep --seed S --count N [--only base] [--problems FILE] [--repeats R]
//
// Attention problems drawn at random, see problems.h: time against the least that each can take
// (README.md), the route, what the plan cost, and the error against the plain kernel in f32 on the
// last sequence of the batch. A problem that fails is a line with its error and counts as the
// worst.
#include <chrono>
#include <iostream>
#include <limits>
#include <map>
#include <optional>
#include "ops/hilbert/attention.h"
#include "ops/hilbert/kernels/hopper/visits.h"
#include "ops/hilbert/plan/tiles.h"
#include "tests/bench/gpu.h"
#include "tests/bench/problems.h"

namespace hilt::bench {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Settings {
  std::uint64_t seed = 1, count = 100;
  bool base = false;
  int repeats = 15;
  std::string problems;
};
Settings settings_of(const std::vector<std::string>& options) {
  Settings s;
  for (std::size_t i = 0; i < options.size(); i += 2) {
    const std::string &option = options[i], value = i + 1 < options.size() ? options[i + 1] : "";
    check(!value.empty(), "sweep: ", option, " has no value");
    if (option == "--seed") s.seed = std::stoull(value);
    else if (option == "--count") s.count = std::stoull(value);
    else if (option == "--repeats") s.repeats = std::stoi(value);
    else if (option == "--problems") s.problems = value;
    else if (option == "--only" && value == "base") s.base = true;
    else fail("sweep (", option, ' ', value, "): options are --seed --count --only base --problems --repeats");
  }
  return s;
}

/// Bytes a second: the maxima of 8,192 rows, 1 GiB, are read and next to nothing is written.
double read_rate() {
  const Tensor a = randn({1 << 13, 1 << 16}, {1, 2}, DType::bf16, kGpu);
  Events events;
  const Times t = times_of(20, [&](int) { return events.ms([&] { (void)max(a, {1}); }); });
  return static_cast<double>(a.bytes()) / (t.median * 1e-3);
}
/// FLOPs a second of a large bf16 product.
double product_rate() {
  constexpr Index kSide = 8192;
  const Tensor a = randn({kSide, kSide}, {1, 3}, DType::bf16, kGpu),
               b = randn({kSide, kSide}, {1, 4}, DType::bf16, kGpu);
  Events events;
  const Times t = times_of(20, [&](int) { return events.ms([&] { (void)matmul(a, b); }); });
  return 2.0 * kSide * kSide * kSide / (t.median * 1e-3);
}
/// Exponentials a second: 16 a clock and multiprocessor since sm_80, at the GPU's highest clock.
double exp_rate() {
  int multiprocessors = 0, khz = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0);
  return 16.0 * multiprocessors * khz * 1e3;
}

struct Line {
  double forward = kInfinity, backward = kInfinity;  // ratios to the floor
  std::string forward_route = "none", backward_route = "none";
};

struct Inputs {
  Tensor q, k, v, d_o;
};
void watch_terms(Tape& tape, ScoreTerms terms) {
  visit_terms(terms, [&](const std::string&, Tensor& x) { tape.watch(x); });
}
struct Outputs {
  Tensor o;
  std::array<Tensor, 3> dx;
};
Outputs play(const Inputs& x, const PlanPtr& plan, const AttentionOptions& how) {
  Tape tape;
  for (const Tensor* t : {&x.q, &x.k, &x.v}) tape.watch(*t);
  watch_terms(tape, how.terms);
  Outputs out{attention(x.q, x.k, x.v, plan, how), {}};
  const Gradients g = tape.backward(out.o, x.d_o);
  out.dx = {g[x.q], g[x.k], g[x.v]};
  return out;
}

/// The worst relative error of o, dq, dk and dv.
double error_of(const Inputs& x, const PlanPtr& plan, AttentionOptions how) {
  const Outputs got = play(x, plan, how);
  const Index last = x.q.dim(0) - 1;
  const auto of_last = [&](const Tensor& t) { return slice(t, 0, last, last + 1); };
  const auto wide = [&](const Tensor& t) { return to(of_last(t), DType::f32); };
  how.first_batch = last;
  const Outputs want = play({wide(x.q), wide(x.k), wide(x.v), wide(x.d_o)}, plan, how);
  double worst = relative_error(of_last(got.o), want.o);
  // Gradients that cancel (a token that attends to itself alone) are judged beside dv.
  const double least = 1e-2 * global_norm(std::vector<Tensor>{want.dx[2]});
  for (std::size_t i = 0; i < 3; ++i) {
    const double size = global_norm(std::vector<Tensor>{want.dx[i]});
    const double e = relative_error(of_last(got.dx[i]), want.dx[i]) * size / std::max(size, least);
    if (!(e <= worst)) worst = e;
  }
  return worst;
}

Line run(std::uint64_t i, const Problem& p, Machine machine, double reads, int repeats) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const PlanPtr plan = make_plan(spec_of(p));
  const double plan_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  const DType type = p.dtype == "bf16" ? DType::bf16 : p.dtype == "f16" ? DType::f16 : DType::f32;
  machine.element = static_cast<double>(size_of(type));
  const Floor floor = floor_of(p, *plan, touched_cells(*plan), machine, reads);
  const auto x = [&](Index heads, std::uint64_t stream) {
    return randn({p.batch, p.length, heads, p.dim}, {i, stream}, type, kGpu);
  };
  const auto of_queries = [&](const Tensor& t) { return p.queries > 0 ? contiguous(slice(t, 1, 0, p.queries)) : t; };
  const Inputs in{of_queries(x(p.heads, 1)), x(p.kv_heads, 2), x(p.kv_heads, 3), of_queries(x(p.heads, 4))};
  AttentionOptions how;
  how.terms = terms_of(p, i, kGpu);
  if (p.dropout > 0) how.dropout = p.dropout, how.key = RandomKey{3, 4};
  const double error = error_of(in, plan, how);
  constexpr double kAllowed = 1e-2;  // operands and results of 16 bits
  check(error < kAllowed, "relative error ", error);

  // A copy empties the L2 cache of inputs and keeps the GPU busy while the work is asked for.
  const Tensor from = zeros({1 << 26}, DType::bf16, kGpu);
  Tensor to = empty_like(from);
  Events events;
  clear_attention_routes();
  const Times forward = times_of(repeats, [&](int) {
    copy(to, from);
    return events.ms([&] { (void)attention_with_lse(in.q, in.k, in.v, plan, how); });
  });
  Line line;
  const AttentionRoute first = attention_routes().at(0);
  line.forward_route = first.route;
  const Times backward = times_of(repeats, [&](int) {
    Tape tape;
    for (const Tensor* t : {&in.q, &in.k, &in.v}) tape.watch(*t);
    watch_terms(tape, how.terms);
    const Tensor o = attention(in.q, in.k, in.v, plan, how);
    copy(to, from);
    return events.ms([&] { (void)tape.backward(o, in.d_o); });
  });
  const AttentionRoute last = attention_routes().back();
  line.backward_route = last.route;
  line.forward = forward.median / floor.forward_ms, line.backward = backward.median / floor.backward_ms;
  std::cout << "{\"figure\": \"sweep\", \"i\": " << i << ", \"problem\": \"" << to_string(p)
            << "\", \"forward_ms\": " << forward.median << ", \"backward_ms\": " << backward.median
            << ", \"forward_floor_ms\": " << floor.forward_ms << ", \"backward_floor_ms\": " << floor.backward_ms
            << ", \"forward_ratio\": " << line.forward << ", \"backward_ratio\": " << line.backward
            << ", \"forward_route\": \"" << first.route << "\", \"backward_route\": \"" << last.route << '"';
  if (!last.reason.empty()) std::cout << ", \"reason\": \"" << last.reason << '"';
  double visits_ms = 0;
  std::size_t visits_bytes = 0;
  for (const PlanPart& part : row_parts(*plan))
    for (const Tiling& t : part.tilings) {
      if (first.route != "hopper" && last.route != "hopper") break;  // the others make none
      const auto visits_begin = Clock::now();
      const Visits made = visits_of(t);
      visits_ms += std::chrono::duration<double, std::milli>(Clock::now() - visits_begin).count();
      visits_bytes += made.mask.size() * sizeof made.mask[0];
      for (const VisitSide* side : {&made.queries, &made.keys})
        visits_bytes += side->owner.size() * sizeof(VisitSide::Owner) + side->visit.size() * sizeof(VisitSide::Visit);
    }
  std::cout << ", \"plan_ms\": " << plan_ms << ", \"visits_ms\": " << visits_ms << ", \"plan_bytes\": " << plan->bytes()
            << ", \"visits_bytes\": " << visits_bytes << ", \"relative_error\": " << error << "}" << std::endl;
  return line;
}

void summarize(std::vector<Line>& lines, std::uint64_t failed) {
  const auto quantiles = [&](double Line::*ratio) {
    std::ranges::sort(lines, {}, ratio);
    const auto at = [&](double q) {
      const double x =
          lines[std::min(lines.size() - 1, static_cast<std::size_t>(q * static_cast<double>(lines.size())))].*ratio;
      return x < kInfinity ? std::to_string(x) : "null";
    };
    return "{\"p50\": " + at(0.5) + ", \"p90\": " + at(0.9) + ", \"p95\": " + at(0.95) + ", \"worst\": " + at(1) + "}";
  };
  std::map<std::string, Index> routes;
  for (const Line& line : lines) ++routes[line.forward_route + "/" + line.backward_route];
  std::cout << "{\"figure\": \"sweep_summary\", \"problems\": " << lines.size() << ", \"failed\": " << failed
            << ", \"forward\": " << quantiles(&Line::forward) << ", \"backward\": " << quantiles(&Line::backward)
            << ", \"share_by_route\": {";
  const char* comma = "";
  for (const auto& [route, n] : routes) {
    std::cout << comma << '"' << route << "\": " << static_cast<double>(n) / static_cast<double>(lines.size());
    comma = ", ";
  }
  std::cout << "}}" << std::endl;
}

}  // namespace

int sweep(const std::vector<std::string>& options) try {
  const Settings s = settings_of(options);
  (void)device_named("cuda");
  std::vector<Problem> problems;
  if (!s.problems.empty()) problems = read_problems(s.problems);
  else
    for (std::uint64_t i = 0; i < s.count; ++i) problems.push_back(drawn(s.seed, i, s.base));
  check(!problems.empty(), "sweep: no problems");
  Machine machine;
  machine.bytes = copy_rate(), machine.flops = product_rate(), machine.exps = exp_rate();
  const double reads = read_rate();
  std::cout << "{\"figure\": \"rates\", \"copy\": " << machine.bytes << ", \"read\": " << reads
            << ", \"products\": " << machine.flops << ", \"exponentials\": " << machine.exps << "}" << std::endl;
  std::vector<Line> lines;
  std::uint64_t failed = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) try {
      lines.push_back(run(i, problems[i], machine, reads, s.repeats));
    } catch (const Error& e) {
      lines.emplace_back(), ++failed;
      std::string what = e.what();
      std::ranges::replace(what, '"', '\'');
      std::cout << "{\"figure\": \"sweep\", \"i\": " << i << ", \"problem\": \"" << to_string(problems[i])
                << "\", \"error\": \"" << what << "\"}" << std::endl;
    }
  summarize(lines, failed);
  return failed == 0 ? 0 : 1;
} catch (const Error& e) {
  std::cerr << "hilt_gpu_attention: error: " << e.what() << '\n';
  return static_cast<int>(e.code());
}

}  // namespace hilt::bench
