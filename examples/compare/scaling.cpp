// What the machine can do at best; times over shorter sequences and over segment lengths, within a
// few seconds each.
#include <ctime>
#include "lesson.h"

namespace compare {
/// Seconds that this thread had a processor.
static double worked() {
  timespec t{};
  (void)::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

Json measure_machine(const Problem& p) {
  const hilt::Info i = hilt::info();
  const auto start = std::chrono::steady_clock::now();
  const double before = worked();
  const hilt::Device device = p.q.device();
  // Large enough to miss every cache, small enough to be over soon.
  constexpr Index kCopied = Index{1} << 25;  // elements of 4 bytes: 128 MiB read, 128 MiB written
  hilt::Tensor to = hilt::zeros({kCopied}, hilt::DType::f32, device);
  const hilt::Tensor from = hilt::zeros({kCopied}, hilt::DType::f32, device);
  const double seconds = program::seconds_of(6, device, [&] { hilt::copy(to, from); })[0];
  const double gflops = program::product_gflops(device, p.dtype, device.is_cpu() ? 1024 : 8192);
  return {{"version", i.version},
          {"build_type", i.build_type},
          {"compiler", i.compiler},
          {"blas", i.blas},
          {"devices", i.devices},
          {"isa", i.isa_active},
          {"threads", i.threads},
          {"memory_bytes", i.memory},
          {"routes", Json::array()},
          {"copy_gb_s", 2.0 * static_cast<double>(from.bytes()) / seconds * 1e-9},
          {"gemm_gflop_s", gflops},
          {"processor_share", device.is_cpu() ? (worked() - before) / program::seconds_since(start) : 1.0}};
}

void measure_machine_again(Lesson& lesson) {
  Json& machine = lesson.machine;
  const Json again = measure_machine(lesson.problem);
  const double first = machine["gemm_gflop_s"], second = again["gemm_gflop_s"];
  for (const char* ceiling : {"copy_gb_s", "gemm_gflop_s"})
    machine[ceiling] = std::max(machine[ceiling], again[ceiling]);
  machine["processor_share"] = std::min(machine["processor_share"], again["processor_share"]);
  machine["steady"] = std::min(first, second) / std::max(first, second);
}

namespace {

constexpr double kSeconds = 3;  // that a figure may take: what would come later is left out once they are over
constexpr Index kShortest = 128;
constexpr int kRepeats = 3;

/// The problem again with another length or pattern, on a grid folded from the length. Throws if
/// the pattern does not fit.
Problem resized(const Problem& p, Index length, const hilt::Pattern& pattern) {
  hilt::PlanSpec spec = p.plan->spec();
  spec.length = length;
  spec.pattern = pattern;
  const hilt::Grid grid = hilt::fold(length);
  const bool on_grid =
      std::ranges::any_of(pattern, &hilt::Branch::on_grid) || (p.terms.relative && p.terms.relative.rank() > 2);
  spec.order.grid = on_grid && grid.cells() == length ? grid : hilt::Grid{};
  spec.documents.clear();
  Problem small = p;
  small.terms = hilt::fitted_terms(p.terms, p.dtype, length);
  small.plan = hilt::make_plan(spec);
  const auto cut = [&](const hilt::Tensor& x) { return hilt::clone(hilt::slice(x, 1, 0, length)); };
  small.q = cut(p.q), small.k = cut(p.k), small.v = cut(p.v), small.d_o = cut(p.d_o);
  return small;
}

/// A point of a figure: time and kept bytes of the modes that ran, by f(mode), with or without
/// dense.
template <class F> Json sample(const Lesson& lesson, const char* what, Index x, bool with_dense, F&& f) {
  std::map<std::string, double> ms, saved_bytes;
  for (const Mode& mode : lesson.modes)
    if (mode.ran() && (with_dense || mode.name != kDense))
      std::tie(ms[mode.name], saved_bytes[mode.name]) = std::pair<double, double>(f(mode));
  return {{what, x}, {"ms", ms}, {"saved_bytes", saved_bytes}};
}

}  // namespace

void measure_scaling(Lesson& lesson) {
  using Clock = std::chrono::steady_clock;
  const Problem& p = lesson.problem;
  const auto add = [&](Json& samples, const char* what, Index x, const hilt::Pattern& pattern, Index length,
                       int repeats) {
    const bool with_dense = repeats > 1;
    try {
      const Problem small = resized(p, length, pattern);
      const AttendedSets sets = with_dense && lesson.mode(kDense) ? attended_sets(*small.plan) : AttendedSets();
      samples.push_back(sample(lesson, what, x, with_dense, [&](const Mode& mode) {
        const std::function<Trial()> pass = pass_of(small, mode.name, sets);
        std::vector<std::pair<double, std::size_t>> runs;
        for (int i = 0; i < repeats; ++i) {
          const Trial run = pass();
          runs.emplace_back(run.ms(), run.saved_bytes);
        }
        std::ranges::sort(runs);
        return runs[runs.size() / 2];  // of an odd number
      }));
    } catch (const hilt::Error&) {
      // A pattern that names blocks, say, has no shorter version: the figure has a point less.
    }
  };
  const auto in_time = [](Clock::time_point start) { return program::seconds_since(start) < kSeconds; };

  auto start = Clock::now();
  const Index short_length = std::min<Index>(p.length(), 1024);
  for (Index keys = 8; keys <= short_length && keys <= 8 * p.dim() && in_time(start); keys *= 2)
    add(lesson.by_keys, "keys", keys, {hilt::Branch{.kind = hilt::Branch::Kind::segment, .size = keys}}, short_length,
        1);

  start = Clock::now();
  const bool packed = !p.plan->spec().documents.empty();  // and nothing shorter is like it
  for (Index length = std::max(kShortest, p.length() / 32); !packed && length < p.length() && in_time(start);
       length *= 2)
    add(lesson.by_length, "length", length, p.plan->spec().pattern, length, kRepeats);
  const auto whole = [](const Mode& mode) { return std::pair(mode.ms(), mode.number("saved_bytes")); };
  lesson.by_length.push_back(sample(lesson, "length", p.length(), true, whole));
}

}  // namespace compare
