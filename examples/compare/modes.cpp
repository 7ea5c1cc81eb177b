// Runs every mode that fits in memory, interleaved, and judges its tensors against the exact ones.
#include <cstring>
#include "lesson.h"

namespace compare {
namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = hilt::dense(a), y = hilt::dense(b);
  return x.shape() == y.shape() && x.dtype() == y.dtype() && std::memcmp(x.raw(), y.raw(), x.bytes()) == 0;
}

std::string does_not_fit(const Problem& p, const std::string& mode) {
  const auto of_kernel = [&] {
    return hilt::attention_memory(*p.plan, p.batch(), p.kv_heads(), p.dim(), p.dtype, hilt::parse_backward(mode),
                                  p.terms, p.q.device());
  };
  const std::size_t need = mode == kDense ? dense_peak(p) : of_kernel().peak,
                    free = hilt::info().memory_available + hilt::memory_stats().pooled;
  return need <= free ? "" : "would need " + report::bytes(need) + ", " + report::bytes(free) + " are free";
}

/// What is shown of a mode: one of its runs, so that parts add up. The first run's tensors are the
/// ones that are judged.
void summarize(Mode& mode, const Lesson& lesson, const std::vector<Run>& runs) {
  std::vector<const Run*> by_time;  // but the first, which asks the system for memory
  for (const Run& run : std::span(runs).subspan(1)) by_time.push_back(&run);
  std::ranges::sort(by_time, {}, [](const Run* r) { return r->forward_ms + r->backward_ms; });
  const Run& run = *by_time[(by_time.size() - 1) / 2];
  static_cast<Measured&>(mode) = run;
  const bool by_ops = mode.name == kDense || mode.name == kTaped;
  static_cast<Cost&>(mode) =
      by_ops ? cost_of_tape(mode.tape) : cost_of_kernel(lesson.problem, mode.name, products_back(lesson));
}

ExactProblem exact_problem(const Problem& p) {
  ExactProblem out{p.batch(), p.length(), p.heads(), p.kv_heads(), p.dim(), p.scale, p.dropout, p.key, {}, {}, {}, {}};
  out.q = p.q.to_vector(), out.k = p.k.to_vector(), out.v = p.v.to_vector(), out.d_o = p.d_o.to_vector();
  out.terms = exact_terms(*p.plan, p.terms);
  return out;
}

/// The floor, relative to the terms. In 16 bits one rounding to nearest: of the result, since all
/// before it is f32. In f32 and f64 four: the sums themselves are in that type, and the recomputed
/// scores are summed in another order than the first time.
double rounding_of(hilt::DType dtype) {
  switch (dtype) {
    case hilt::DType::f64: return 4 * 0x1p-53;
    case hilt::DType::bf16: return 0x1p-8;
    case hilt::DType::f16: return 0x1p-11;
    default: return 4 * 0x1p-24;
  }
}

}  // namespace

bool Mode::ok() const {
  return !ran() || (repeatable && std::ranges::all_of(error, [](const Error& e) { return e.ok; }));
}
const Mode* Lesson::mode(const std::string& name) const {
  const auto found = std::ranges::find(modes, name, &Mode::name);
  return found == modes.end() || !found->ran() ? nullptr : &*found;
}
bool Lesson::passed() const {
  return forward_identical && std::ranges::all_of(modes, [](const Mode& m) { return m.ok(); });
}

void judge_modes(Lesson& lesson) {
  const Problem& p = lesson.problem;
  const AttendedSets sets = attended_sets(*p.plan);
  const ExactProblem problem = exact_problem(p);
  const Tensors exact = exact_attention(problem, sets, p.dtype), naive = naive_attention(problem, sets, p.dtype);
  const Tensors terms = term_sizes(problem, sets, p.dtype);
  lesson.oracle = p.dtype == hilt::DType::f64 ? "plain loops in long double" : "plain loops in f64";
  lesson.naive = "the same loops in " + std::string(name_of(p.dtype));
  lesson.floor = hilt::size_of(p.dtype) > 2 ? "four roundings" : "one rounding";
  lesson.tiles = p.plan->stats();
  lesson.same_result_in_any_order = order_changes_nothing(p.plan->spec());
  for (std::size_t h : sets.of_head) lesson.pairs += static_cast<Index>(sets.sets[h].key.size());
  for (const KeyLists& set : sets.sets)
    for (Index t = 0; t < p.length(); ++t) lesson.longest_row = std::max(lesson.longest_row, std::ssize(set.row(t)));
  lesson.orders = arrangements_of(*p.plan);
  for (std::size_t i = 0; i < kTensors.size(); ++i) lesson.naive_error[i] = measure(naive[i], exact[i]);

  hilt::clear_attention_fallbacks();
  hilt::clear_attention_routes();
  for (const std::string& name : lesson.settings.modes) lesson.modes.push_back({{}, {}, name, does_not_fit(p, name)});
  std::map<std::string, std::vector<Run>> runs;
  std::optional<Dense> dense;
  for (std::int64_t repeat = 0; repeat <= lesson.settings.repeat; ++repeat)
    for (Mode& mode : lesson.modes) {  // interleaved: a slow moment hits every mode
      if (!mode.ran()) continue;
      if (mode.name == kDense && !dense) dense.emplace(p, sets);
      Run run = run_once(p, mode.name, mode.name == kDense ? &*dense : nullptr);
      for (std::size_t i = 0; i < kTensors.size() && repeat > 0; ++i)
        mode.repeatable = mode.repeatable && (!p.input(i) || same_bits(run.result[i], runs[mode.name][0].result[i]));
      if (repeat > 0) run.result = {};
      runs[mode.name].push_back(std::move(run));
    }
  lesson.routes = program::routes_taken();
  for (Mode& mode : lesson.modes) {
    if (!mode.ran()) continue;
    summarize(mode, lesson, runs[mode.name]);
    for (std::size_t i = 0; i < kTensors.size(); ++i) {
      if (!p.input(i)) continue;
      const std::vector<double> x = runs[mode.name][0].result[i].to_vector();
      mode.error[i] = judge(x, exact[i], terms[i], lesson.naive_error[i], rounding_of(p.dtype));
      for (std::size_t j = 0; i < kOfTokens && j < x.size(); ++j)
        mode.deviation[i].push_back(std::abs(x[j] - exact[i][j]));
    }
  }
  for (const Mode& mode : lesson.modes)
    if (mode.ran()) lesson.checks = check_rows(p, problem, sets, runs[mode.name][0].result[0].to_vector());
  lesson.broken = break_it(problem, sets, order_in_force(*p.plan), exact, naive, terms, rounding_of(p.dtype));
  if (lesson.mode(kHybrid) && lesson.mode(kFused))
    lesson.forward_identical = same_bits(runs[kHybrid][0].result[0], runs[kFused][0].result[0]);
  lesson.notes = program::oddities_of(*p.plan);
  std::ranges::copy(program::fallbacks_taken(), std::back_inserter(lesson.notes));
  if (p.q.device().is_cuda())
    for (const std::string& line : lesson.routes) lesson.notes.push_back("attention " + line);
}

}  // namespace compare
