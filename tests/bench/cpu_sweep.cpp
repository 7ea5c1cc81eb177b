// hilt_cpu_sweep --seed S --count N [--only base] [--problems FILE] [--repeats R] [--threads T]
//
// The problems of problems.h on a CPU, in f32: ns a pair that attends, forward and backward, beside
// dense attention of the same head dim, timed in turns; what the plan cost; and the error of o, dq,
// dk and dv on the last sequence of the batch against f64: taped, where that takes less than
// 512 MiB, else fused. A problem that fails is a line with its error and counts as the worst.
// README.md says what the ratios are.
#include <algorithm>
#include <chrono>
#include <ctime>
#include <iostream>
#include <limits>
#include <map>
#include "core/device.h"
#include "core/parallel.h"
#include "ops/hilbert/attention.h"
#include "ops/hilbert/kernels/compact.h"
#include "ops/ops.h"
#include "tests/bench/problems.h"

using namespace hilt;
using namespace hilt::bench;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Settings {
  std::uint64_t seed = 1, count = 300;
  int repeats = 5, threads = 1;
  bool base = false;
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
    else if (option == "--threads") s.threads = std::stoi(value);
    else if (option == "--problems") s.problems = value;
    else if (option == "--only" && value == "base") s.base = true;
    else
      fail("sweep (", option, ' ', value, "): options are --seed --count --only base --problems --repeats --threads");
  }
  check(s.repeats > 0 && s.threads > 0, "sweep: --repeats ", s.repeats, " and --threads ", s.threads,
        " must be at least 1");
  return s;
}

/// With one thread the time that it had a processor, which other programs hardly change.
double ms_now(int threads) {
  if (threads > 1) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
  }
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

struct Inputs {
  Tensor q, k, v, d_o;
};
Inputs inputs_of(const Problem& p, std::uint64_t seed) {
  const auto x = [&](Index length, Index heads, std::uint64_t stream) {
    return randn({p.batch, length, heads, p.dim}, {seed, stream}, DType::f32);
  };
  const Index queries = p.queries > 0 ? p.queries : p.length;
  return {x(queries, p.heads, 1), x(p.length, p.kv_heads, 2), x(p.length, p.kv_heads, 3), x(queries, p.heads, 4)};
}
struct Outputs {
  std::array<Tensor, 4> x;  // o, dq, dk, dv
  double forward_ms = 0, backward_ms = 0;
};
Outputs play(const Inputs& x, const PlanPtr& plan, AttentionOptions how, int threads) {
  Tape tape;
  for (const Tensor* t : {&x.q, &x.k, &x.v}) tape.watch(*t);
  visit_terms(how.terms, [&](const std::string&, Tensor& term) { tape.watch(term); });
  const double begin = ms_now(threads);
  const Tensor o = attention(x.q, x.k, x.v, plan, how);
  const double middle = ms_now(threads);
  const Gradients g = tape.backward(o, x.d_o);
  const double end = ms_now(threads);
  return {{o, g[x.q], g[x.k], g[x.v]}, middle - begin, end - middle};
}
/// The least of several runs.
struct Least {
  double forward_ms = kInfinity, backward_ms = kInfinity;
  void take(const Outputs& x) {
    forward_ms = std::min(forward_ms, x.forward_ms), backward_ms = std::min(backward_ms, x.backward_ms);
  }
  double sum() const { return forward_ms + backward_ms; }
};

/// Pairs that attend, of one sequence and all heads.
double useful_pairs(const Plan& plan) {
  Index pairs = 0;
  for (const PlanPart& part : plan.parts())
    for (Index h = 0; h < plan.heads(); ++h)
      for (const std::int32_t i : plan.tilings_of(h))
        pairs += part.places.count(1) * part.tilings[static_cast<std::size_t>(i)].pairs;
  return static_cast<double>(pairs);
}

/// The worst relative error of o, dq, dk and dv, and against what.
struct Errors {
  double worst = 0;
  std::string_view reference;
};
Errors error_of(const Inputs& x, const PlanPtr& plan, AttentionOptions how, int threads) {
  const Index last = x.q.dim(0) - 1;
  const auto of_last = [&](const Tensor& t) { return to(slice(t, 0, last, last + 1), DType::f64); };
  const Outputs got = play(x, plan, how, threads);
  constexpr std::size_t kMost = std::size_t{1} << 29;
  const bool small = attention_memory(*plan, 1, x.k.dim(2), x.q.dim(3), DType::f64, Backward::taped).peak < kMost;
  visit_terms(how.terms, [](const std::string&, Tensor& term) { term = to(term, DType::f64); });
  how.first_batch = last, how.backward = small ? Backward::taped : Backward::fused;
  const Outputs want = play({of_last(x.q), of_last(x.k), of_last(x.v), of_last(x.d_o)}, plan, how, threads);
  const auto norm = [](const Tensor& t) { return global_norm(std::vector<Tensor>{t}); };
  // Gradients that cancel (a token that attends to itself alone) are judged beside dv.
  const double least = 0.1 * norm(want.x[3]);
  Errors e{0, name_of(how.backward)};
  for (std::size_t i = 0; i < got.x.size(); ++i) {
    const double size = std::max(norm(want.x[i]), i == 0 ? 0 : least);
    const double off = norm(sub(of_last(got.x[i]), want.x[i])), relative = off == 0 ? 0 : off / size;
    if (!(relative <= e.worst)) e.worst = relative;
  }
  return e;
}

/// Dense attention of a head dim: what a pair costs where all is products.
struct Dense {
  static constexpr Index kLength = 1024, kHeads = 2;
  Problem problem;
  PlanPtr plan;
  Inputs in;
  explicit Dense(Index dim) {
    problem.length = kLength, problem.heads = problem.kv_heads = kHeads, problem.dim = dim, problem.dtype = "f32";
    plan = make_plan(spec_of(problem));
    in = inputs_of(problem, 1);
  }
  double pairs() const { return useful_pairs(*plan); }
};

double copy_rate(int threads) {  // bytes a second, read and written
  const Tensor from = zeros({1 << 24}, DType::f32);
  Tensor to = empty_like(from);
  double least = kInfinity;
  for (int i = 0; i < 8; ++i) {
    const double begin = ms_now(threads);
    copy(to, from);
    least = std::min(least, ms_now(threads) - begin);
  }
  return 2 * static_cast<double>(from.bytes()) / (least * 1e-3);
}

struct Ratios {
  double pair = kInfinity, floor = kInfinity;
};

Ratios run(std::uint64_t i, const Problem& p, const Dense& dense, Machine machine, const Settings& s) {
  using Clock = std::chrono::steady_clock;
  const auto ms_since = [](Clock::time_point begin) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  };
  const auto begin = Clock::now();
  const PlanPtr plan = make_plan(spec_of(p));
  const double plan_ms = ms_since(begin);
  AttentionOptions how;
  how.terms = terms_of(p, i, {});
  if (p.dropout > 0) how.dropout = p.dropout, how.key = RandomKey{3, 4};
  const auto lists_begin = Clock::now();
  for (const PlanPart& part : plan->parts())
    for (const Tiling& t : part.tilings) (void)compact(t, true);
  const double lists_ms = ms_since(lists_begin), pairs = useful_pairs(*plan);
  check(pairs > 0, "no pair attends");
  const Inputs in = inputs_of(p, i);
  const Errors error = error_of(in, plan, how, s.threads);
  constexpr double kAllowed = 1e-5;  // f32
  check(error.worst < kAllowed, "relative error ", error.worst);

  Least ours, all;
  for (int r = 0; r < s.repeats; ++r) {
    all.take(play(dense.in, dense.plan, {}, s.threads));
    ours.take(play(in, plan, how, s.threads));
  }
  const double dense_ns = all.sum() * 1e6 / dense.pairs();
  const double ns = ours.sum() * 1e6 / (pairs * static_cast<double>(p.batch));
  machine.flops = 14 * static_cast<double>(p.dim) / (dense_ns * 1e-9), machine.exps = kInfinity;
  const Floor floor = floor_of(p, *plan, {0, static_cast<Index>(pairs)}, machine, machine.bytes);
  const Ratios ratios{ns / dense_ns, ours.sum() / (floor.forward_ms + floor.backward_ms)};
  std::cout << "{\"figure\": \"sweep\", \"i\": " << i << ", \"problem\": \"" << to_string(p)
            << "\", \"forward_ms\": " << ours.forward_ms << ", \"backward_ms\": " << ours.backward_ms
            << ", \"pair_ns\": " << ns << ", \"dense_pair_ns\": " << dense_ns << ", \"ratio\": " << ratios.pair
            << ", \"floor_ratio\": " << ratios.floor
            << ", \"keys\": " << pairs / static_cast<double>((p.queries > 0 ? p.queries : p.length) * p.heads)
            << ", \"plan_ms\": " << plan_ms << ", \"lists_ms\": " << lists_ms << ", \"plan_bytes\": " << plan->bytes()
            << ", \"relative_error\": " << error.worst << ", \"reference\": \"" << error.reference << "\"}"
            << std::endl;
  return ratios;
}

void summarize(std::vector<Ratios>& lines, std::uint64_t failed, int threads) {
  const auto quantiles = [&](double Ratios::*ratio) {
    std::ranges::sort(lines, {}, ratio);
    const auto at = [&](double q) {
      const double n = static_cast<double>(lines.size());
      const double x = lines[std::min(lines.size() - 1, static_cast<std::size_t>(q * n))].*ratio;
      return x < kInfinity ? std::to_string(x) : "null";
    };
    return "{\"p50\": " + at(0.5) + ", \"p90\": " + at(0.9) + ", \"p95\": " + at(0.95) + ", \"worst\": " + at(1) + "}";
  };
  std::cout << "{\"figure\": \"sweep_summary\", \"problems\": " << lines.size() << ", \"failed\": " << failed
            << ", \"threads\": " << threads << ", \"ratio\": " << quantiles(&Ratios::pair)
            << ", \"floor_ratio\": " << quantiles(&Ratios::floor) << "}" << std::endl;
}

}  // namespace

int main(int argc, char** argv) try {
  const Settings s = settings_of({argv + 1, argv + argc});
  set_thread_count(s.threads);
  Machine machine{.low_ms = 0.5, .high_ms = 15, .bytes = 2e10, .flops = 1e11, .exps = 2e9, .element = 4};
  std::vector<Problem> problems;
  if (!s.problems.empty()) problems = read_problems(s.problems);
  else
    for (std::uint64_t i = 0; i < s.count; ++i) problems.push_back(drawn(s.seed, i, s.base, machine));
  check(!problems.empty(), "sweep: no problems");
  machine.bytes = copy_rate(s.threads);
  std::cout << "{\"figure\": \"rates\", \"machine\": \"" << info().devices.at(0) << ", " << info().isa_active
            << "\", \"threads\": " << s.threads << ", \"copy\": " << machine.bytes << "}" << std::endl;
  std::map<Index, Dense> dense;
  std::vector<Ratios> lines;
  std::uint64_t failed = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) try {
      Problem& p = problems[i];
      p.dtype = "f32";
      lines.push_back(run(i, p, dense.try_emplace(p.dim, p.dim).first->second, machine, s));
    } catch (const Error& e) {
      lines.emplace_back(), ++failed;
      std::string what = e.what();
      std::ranges::replace(what, '"', '\'');
      std::cout << "{\"figure\": \"sweep\", \"i\": " << i << ", \"problem\": \"" << to_string(problems[i])
                << "\", \"error\": \"" << what << "\"}" << std::endl;
    }
  summarize(lines, failed, s.threads);
  return failed == 0 ? 0 : 1;
} catch (const Error& e) {
  std::cerr << "hilt_cpu_sweep: error: " << e.what() << '\n';
  return static_cast<int>(e.code());
}
