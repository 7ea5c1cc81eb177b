// The summary on the terminal: what a reader of a log needs to know, in at most 45 lines of at most
// 80 columns, readable without color.
#include <ostream>
#include "lesson.h"

namespace compare {
namespace {

struct Summary {
  const Lesson& lesson;
  const Json& words;
  std::ostream& os;
  bool color;

  std::string painted(const char* code, const std::string& text) const {
    return color ? "\033[" + std::string(code) + "m" + text + "\033[0m" : text;
  }
  std::string verdict(bool ok, const std::string& text) const { return painted(ok ? "32" : "1;31", text); }
  std::string bold(const std::string& text) const { return painted("1", text); }
  std::string word(const char* name) const { return words[name].get<std::string>(); }
  void say(const std::string& text, std::size_t indent = 2) const { os << program::wrapped(text, 80, indent) << '\n'; }

  void modes() const {
    const double given = static_cast<double>(lesson.problem.input_bytes());
    const std::string all_runs = format("all %ld runs", lesson.settings.repeat);
    os << bold("mode     ops      keeps       peak    forward   backward  same bits\n");
    for (const Mode& m : lesson.modes)
      if (m.ran())
        os << format("%-7s %4.0f %10s %10s %10s %10s  ", m.name.c_str(), m.number("nodes"),
                     report::bytes(m.number("saved_bytes")).c_str(),
                     report::bytes(m.number("peak_bytes") + given).c_str(),
                     report::milliseconds(m.number("forward_ms")).c_str(),
                     report::milliseconds(m.number("backward_ms")).c_str())
           << verdict(m.repeatable, m.repeatable ? all_runs : "DIFFER") << '\n';
      else os << format("%-7s  %s\n", m.name.c_str(), m.facts["skipped"].get<std::string>().c_str());
    say("keeps: bytes the tape holds to go back. peak: most at once. Both with q, k, v.");
    const Mode *taped = lesson.mode(kTaped), *fused = lesson.mode(kFused);
    if (!taped || !fused || taped->number("saved_bytes") <= 0) return;
    std::string text = format("against taped fused keeps %s and takes %.2f x its time.", word("kept_in_words").c_str(),
                              fused->ms() / taped->ms());
    if (const double keys = words["crossover"]; keys > 0)
      text +=
          format(" In segments of less than about %.0f keys it keeps more: head dim %ld.", keys, lesson.problem.dim());
    say(text);
  }

  /// The tensors from `first` on, four of them, as far as they are there.
  void errors(std::size_t first) const {
    const auto row = [&](const std::string& name, auto&& cell) {
      os << format("%-11s", name.c_str());
      for (std::size_t i = first; i < first + 4; ++i)
        if (lesson.problem.input(i)) os << cell(i);
      os << '\n';
    };
    row(first == 0 ? "largest err" : "", [&](std::size_t i) { return bold(format("%10s  ", kTensors[i])); });
    const Mode* any = nullptr;
    for (const Mode& m : lesson.modes)
      if (m.ran())
        row((any = &m)->name, [&](std::size_t i) {
          const Error& e = m.error[i];
          return format("%10s ", report::scientific(e.max_abs).c_str()) + verdict(e.ok, e.ok ? "ok" : "NO");
        });
    if (any)
      row("allowed", [&](std::size_t i) { return format("%10s   ", report::scientific(any->error[i].limit).c_str()); });
  }

  void orders() const {
    os << bold("order      full  partial    of all   touched   useful pairs in them\n");
    for (const Arrangement& a : lesson.orders)
      os << table_line(a)
         << (hilt::to_string(lesson.problem.plan->spec().order).starts_with(a.order) ? "  <- this plan\n" : "\n");
    say(word("order_verdict"));
    say(word("order_and_result"));
  }

  void print() const {
    const Problem& p = lesson.problem;
    const hilt::PlanSpec& spec = p.plan->spec();
    const double length = static_cast<double>(p.length()), all = length * length * static_cast<double>(p.heads());
    os << bold("One attention, and the ways to its gradient\n");
    say(word("sizes"), 0);
    say("order " + hilt::to_string(spec.order) + ", pattern " + hilt::to_string(spec.pattern) + ", causal " +
        std::string(name_of(spec.causality)) + ": up to " + std::to_string(lesson.longest_row) + " keys a row, " +
        report::percent(static_cast<double>(lesson.pairs) / all) + " of all pairs");
    os << '\n';
    modes();
    os << '\n';
    errors(0);
    const hilt::ScoreTerms& terms = p.terms;
    if (terms.slopes || terms.relative || terms.bias || terms.sink) errors(kOfTokens);
    say("Judge: " + word("oracle") + ". Allowed: 2 x the error of " + word("naive") + " + " + word("floor") +
        " of the terms; the relative error over the tensor likewise.");
    os << '\n';
    orders();
    os << '\n';
    for (std::size_t i = 0; i < std::min<std::size_t>(lesson.notes.size(), 3); ++i) say("note: " + lesson.notes[i]);
    const int threads = lesson.machine["threads"];
    say(format("Measured: %.1f GB/s copying, %.0f GFLOP/s multiplying, %d %s. %.1f s in all.",
               lesson.machine["copy_gb_s"].get<double>(), lesson.machine["gemm_gflop_s"].get<double>(), threads,
               threads == 1 ? "thread" : "threads", lesson.seconds));
    say("Read " + lesson.settings.out + "/compare.html; compare.json lies beside it.");
    os << verdict(lesson.passed(), lesson.passed() ? "verdict: ok, every tensor of every mode is within its limit"
                                                   : "verdict: FAILED, see NO and DIFFER above")
       << '\n';
  }
};

}  // namespace

void print_summary(const Lesson& lesson, const Json& words, std::ostream& os, bool color) {
  Summary{lesson, words, os, color}.print();
}

}  // namespace compare
