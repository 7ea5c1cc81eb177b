// What the machine can do at best; times over shorter sequences and over segment lengths, within a
// few seconds each.
#include "lesson.h"

namespace compare {
Machine measure_machine(const Problem& p) {
  Machine m;
  m.info = hilt::info();
  const hilt::Device device = p.q.device();
  // Large enough to miss every cache, small enough to be over soon.
  constexpr Index kCopied = Index{1} << 25;  // elements of 4 bytes: 128 MiB read, 128 MiB written
  hilt::Tensor to = hilt::zeros({kCopied}, hilt::DType::f32, device);
  const hilt::Tensor from = hilt::zeros({kCopied}, hilt::DType::f32, device);
  m.copy_gb_s =
      2.0 * static_cast<double>(from.bytes()) / program::best_seconds(6, device, [&] { hilt::copy(to, from); }) * 1e-9;
  m.gemm_gflop_s = program::product_gflops(device, p.dtype, device.is_cpu() ? 1024 : 8192);
  return m;
}

void measure_machine_again(Lesson& lesson) {
  double fastest = 0;  // GFLOP/s forward
  for (const Mode& m : lesson.modes)
    if (m.forward_ms > 0) fastest = std::max(fastest, m.forward_flops / m.forward_ms * 1e-6);
  if (fastest <= lesson.machine.gemm_gflop_s) return;
  const Machine again = measure_machine(lesson.problem);
  lesson.machine.copy_gb_s = std::max(lesson.machine.copy_gb_s, again.copy_gb_s);
  lesson.machine.gemm_gflop_s = std::max(lesson.machine.gemm_gflop_s, again.gemm_gflop_s);
  lesson.machine.measured_twice = true;
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

Sample measure(const Lesson& lesson, const Problem& p, Index x, bool with_dense, int repeats) {
  Sample sample{.x = x};
  std::optional<Dense> dense;
  if (with_dense && lesson.mode(kDense)) dense.emplace(p, attended_sets(*p.plan));
  for (const Mode& mode : lesson.modes) {
    if (!mode.ran() || (mode.name == kDense && !dense)) continue;
    std::vector<double> ms;
    for (int i = 0; i < repeats; ++i) {
      const Run run = run_once(p, mode.name, mode.name == kDense ? &*dense : nullptr);
      ms.push_back(run.forward_ms + run.backward_ms);
      sample.saved_bytes[mode.name] = static_cast<double>(run.saved_bytes);
    }
    std::ranges::sort(ms);
    sample.ms[mode.name] = ms[ms.size() / 2];  // of an odd number
  }
  return sample;
}

}  // namespace

void measure_scaling(Lesson& lesson) {
  using Clock = std::chrono::steady_clock;
  const Problem& p = lesson.problem;
  const auto add = [&](std::vector<Sample>& samples, Index length, const hilt::Pattern& pattern, Index x,
                       bool with_dense, int repeats) {
    try {
      samples.push_back(measure(lesson, resized(p, length, pattern), x, with_dense, repeats));
    } catch (const hilt::Error&) {
      // A pattern that names blocks, say, has no shorter version: the figure has a point less.
    }
  };
  const auto in_time = [](Clock::time_point start) { return program::seconds_since(start) < kSeconds; };

  auto start = Clock::now();
  const Index short_length = std::min<Index>(p.length(), 1024);
  for (Index keys = 8; keys <= short_length && keys <= 8 * p.dim() && in_time(start); keys *= 2)
    add(lesson.by_keys, short_length, {hilt::Branch{.kind = hilt::Branch::Kind::segment, .size = keys}}, keys, false,
        1);

  start = Clock::now();
  const bool packed = !p.plan->spec().documents.empty();  // and nothing shorter is like it
  for (Index length = std::max(kShortest, p.length() / 32); !packed && length < p.length() && in_time(start);
       length *= 2)
    add(lesson.by_length, length, p.plan->spec().pattern, length, true, kRepeats);
  Sample whole{.x = p.length()};
  for (const Mode& mode : lesson.modes)
    if (mode.ran())
      whole.ms[mode.name] = mode.forward_ms + mode.backward_ms,
      whole.saved_bytes[mode.name] = static_cast<double>(mode.saved_bytes);
  lesson.by_length.push_back(whole);
}

}  // namespace compare
