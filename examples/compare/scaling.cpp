#include <algorithm>
#include <chrono>
#include "run.h"

namespace compare {
namespace {

constexpr double kSeconds = 4;  // that both figures may take: longer lengths are left out once it is over
constexpr Index kShortest = 128;
constexpr int kRepeats = 3;

/// The problem again with another length or pattern, on a grid folded from the length. Throws if the pattern does not fit.
Problem resized(const Problem& p, Index length, const hilt::Pattern& pattern) {
  hilt::PlanSpec spec = p.plan->spec();
  spec.length = length;
  spec.pattern = pattern;
  spec.order.grid = {};
  Problem small = p;
  small.plan = hilt::make_plan(spec);
  const auto cut = [&](const hilt::Tensor& x) { return hilt::clone(hilt::slice(x, 1, 0, length)); };
  small.q = cut(p.q), small.k = cut(p.k), small.v = cut(p.v), small.d_o = cut(p.d_o);
  return small;
}

Sample measure(const Lesson& lesson, const Problem& p, Index x) {
  Sample sample{.x = x};
  std::optional<Dense> dense;
  for (const Mode& mode : lesson.modes) {
    if (!mode.ran()) continue;
    if (mode.name == "dense") dense.emplace(p, attended_sets(*p.plan));
    std::vector<double> ms;
    for (int i = 0; i < kRepeats; ++i) {
      const Run run = run_once(p, mode.name, mode.name == "dense" ? &*dense : nullptr);
      ms.push_back(run.forward_ms + run.backward_ms);
      sample.held_bytes[mode.name] = static_cast<double>(run.held);
    }
    sample.ms[mode.name] = median(ms);
  }
  return sample;
}

}  // namespace

void measure_scaling(Lesson& lesson) {
  const auto start = std::chrono::steady_clock::now();
  const auto in_time = [&](double share) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < share * kSeconds;
  };
  const Problem& p = lesson.problem;
  const auto add = [&](std::vector<Sample>& samples, Index length, const hilt::Pattern& pattern, Index x) {
    try {
      samples.push_back(measure(lesson, resized(p, length, pattern), x));
    } catch (const hilt::Error&) {
      // A pattern that names blocks, say, has no shorter version: the figure has a point less.
    }
  };
  const Index shortest = std::max(kShortest, p.length() / 32);
  for (Index length = shortest; length < p.length() && in_time(0.6); length *= 2) add(lesson.by_length, length, p.plan->spec().pattern, length);
  Sample whole{.x = p.length()};
  for (const Mode& mode : lesson.modes)
    if (mode.ran()) whole.ms[mode.name] = mode.forward_ms + mode.backward_ms, whole.held_bytes[mode.name] = static_cast<double>(mode.held_bytes);
  lesson.by_length.push_back(whole);

  const Index length = std::min<Index>(p.length(), 1024);
  for (Index keys = 8; keys <= length && keys <= 8 * p.dim() && in_time(1); keys *= 2)
    add(lesson.by_keys, length, {hilt::Branch{.kind = hilt::Branch::Kind::segment, .size = keys}}, keys);
}

}  // namespace compare
