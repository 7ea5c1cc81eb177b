// Sentences that the page shares, and the summary on the terminal: what a reader of a log needs to
// know, in at most 45 lines of at most 80 columns, readable without color.
#include <ostream>
#include "lesson.h"

namespace compare {

std::string sizes_text(const Lesson& lesson) {
  const Problem& p = lesson.problem;
  const hilt::Grid g = p.plan->grid();
  std::string text = "batch " + std::to_string(p.batch()) + ", length " + std::to_string(p.length());
  if (lesson.settings.documents.empty())
    text += " (" + (g.frames > 1 ? std::to_string(g.frames) + "x" : "") + std::to_string(g.height) + "x" +
            std::to_string(g.width) + ")";
  text += ", heads " + std::to_string(p.heads());
  if (p.kv_heads() != p.heads()) text += " on " + std::to_string(p.kv_heads()) + " key heads";
  text += ", head dim " + std::to_string(p.dim()) + ", " + std::string(name_of(p.dtype));
  if (p.dropout > 0) text += format(", dropout %g", p.dropout);
  text += program::terms_in_words(lesson.settings);
  if (!lesson.settings.documents.empty()) text += ", documents " + program::brief(lesson.settings.documents);
  return text;
}

std::string route_of(const Lesson& lesson, const std::string& pass) {
  for (const std::string& line : lesson.routes)
    if (line == "backward on hopper" && line.starts_with(pass)) return "hopper_one_owner";
    else if (line.starts_with("backward on hopper: in one pass") && line.starts_with(pass)) return "hopper_one_pass";
    else if (line.starts_with(pass + " on ")) return line.substr(pass.size() + 4, line.find(':') - pass.size() - 4);
  return "cpu";
}

int products_back(const Lesson& lesson) {
  const std::string route = route_of(lesson, "backward");
  return route.starts_with("cpu") || route.starts_with("hopper_one_") ? 5 : 7;
}

std::string threads_text(const Lesson& lesson) {
  const int n = lesson.machine.info.threads;
  return std::to_string(n) + (n == 1 ? " thread" : " threads");
}

std::string kept_in_words(const Mode& taped, const Mode& fused) {
  const double x = static_cast<double>(taped.saved_bytes) / static_cast<double>(fused.saved_bytes);
  if (std::abs(std::log(x)) < std::log(1.05)) return "as much, within 5 %";
  return x > 1 ? format("%.1f times less", x) : format("%.1f times more", 1 / x);
}

std::string order_verdict(const Lesson& lesson) {
  if (lesson.same_result_in_any_order) return order_verdict(lesson.orders);
  return "These counts do not compare orders: the set is cut along each of them. Patterns of the grid, like "
         "window2d:16x16, do compare them.";
}

std::string order_and_result(const Lesson& lesson) {
  if (lesson.same_result_in_any_order)
    return "The set is defined without the order: in any order the result is the same, only the work moves.";
  return "In another order the same pattern is another set of pairs, and gives another result.";
}

double crossover_in_keys(const Lesson& lesson) {
  double keys = 0, balance = 0;  // of the size before: log(taped / fused)
  for (const Sample& s : lesson.by_keys) {
    if (!s.saved_bytes.contains(kTaped) || !s.saved_bytes.contains(kFused)) return 0;
    const double x = std::log(static_cast<double>(s.x)),
                 now = std::log(s.saved_bytes.at(kTaped) / s.saved_bytes.at(kFused));
    if (balance < 0 && now >= 0) return std::exp(keys + (x - keys) * balance / (balance - now));
    keys = x, balance = now;
  }
  return 0;
}

namespace {

constexpr std::size_t kColumns = 80;

std::string wrapped(const std::string& text, std::size_t indent) {
  return program::wrapped(text, kColumns, indent) + "\n";
}

struct Paint {
  bool on;
  std::string color(const char* code, const std::string& text) const {
    return on ? "\033[" + std::string(code) + "m" + text + "\033[0m" : text;
  }
  std::string verdict(bool ok, const std::string& text) const { return color(ok ? "32" : "1;31", text); }
  std::string bold(const std::string& text) const { return color("1", text); }
};

void print_modes(const Lesson& lesson, std::ostream& os, const Paint& paint) {
  os << paint.bold("mode     ops      keeps       peak    forward   backward  same bits\n");
  for (const Mode& m : lesson.modes) {
    if (!m.ran()) {
      os << format("%-7s  %s\n", m.name.c_str(), m.skipped.c_str());
      continue;
    }
    os << format("%-7s %4zu %10s %10s %10s %10s  ", m.name.c_str(), m.tape.size(), report::bytes(m.saved_bytes).c_str(),
                 report::bytes(m.peak() + lesson.problem.input_bytes()).c_str(),
                 report::milliseconds(m.forward_ms).c_str(), report::milliseconds(m.backward_ms).c_str())
       << paint.verdict(m.repeatable, m.repeatable
                                          ? format("all %lld runs", static_cast<long long>(lesson.settings.repeat))
                                          : "DIFFER")
       << '\n';
  }
  os << wrapped("keeps: bytes the tape holds to go back. peak: most at once. Both with q, k, v.", 2);
  const Mode *taped = lesson.mode(kTaped), *fused = lesson.mode(kFused);
  if (taped && fused && taped->saved_bytes > 0) {
    std::string text =
        format("against taped fused keeps %s and takes %.2f x its time.", kept_in_words(*taped, *fused).c_str(),
               (fused->forward_ms + fused->backward_ms) / (taped->forward_ms + taped->backward_ms));
    if (const double keys = crossover_in_keys(lesson); keys > 0)
      text += format(" In segments of less than about %.0f keys it keeps more: head dim %lld.", keys,
                     static_cast<long long>(lesson.problem.dim()));
    os << wrapped(text, 2);
  }
}

/// The tensors from `first` on, four of them, as far as they are there.
void print_errors(const Lesson& lesson, std::size_t first, std::ostream& os, const Paint& paint) {
  const auto row = [&](const std::string& name, auto&& cell) {
    os << format("%-11s", name.c_str());
    for (std::size_t i = first; i < first + 4; ++i)
      if (lesson.problem.input(i)) cell(i);
    os << '\n';
  };
  const auto title = [&](std::size_t i) { os << paint.bold(format("%10s  ", kTensors[i])); };
  row(first == 0 ? "largest err" : "", title);
  const Mode* any = nullptr;
  for (const Mode& m : lesson.modes)
    if (m.ran())
      row((any = &m)->name, [&](std::size_t i) {
        const Error& e = m.error[i];
        os << format("%10s ", report::scientific(e.max_abs).c_str()) << paint.verdict(e.ok, e.ok ? "ok" : "NO");
      });
  if (any)
    row("allowed", [&](std::size_t i) { os << format("%10s   ", report::scientific(any->error[i].limit).c_str()); });
}

void print_agreement(const Lesson& lesson, std::ostream& os, const Paint& paint) {
  print_errors(lesson, 0, os, paint);
  bool learns = false;
  for (std::size_t i = kOfTokens; i < kTensors.size(); ++i) learns = learns || lesson.problem.input(i);
  if (learns) print_errors(lesson, kOfTokens, os, paint);
  os << wrapped("Judge: " + lesson.oracle + ". Allowed: 2 x the error of " + lesson.naive + " + " + lesson.floor +
                    " of the terms; the relative error over the tensor likewise.",
                2);
}

void print_orders(const Lesson& lesson, std::ostream& os, const Paint& paint) {
  os << paint.bold("order      full  partial    of all   touched   useful pairs in them\n");
  for (const Arrangement& a : lesson.orders)
    os << table_line(a)
       << (hilt::to_string(lesson.problem.plan->spec().order).starts_with(a.order) ? "  <- this plan\n" : "\n");
  os << wrapped(order_verdict(lesson), 2) << wrapped(order_and_result(lesson), 2);
}

}  // namespace

void print_summary(const Lesson& lesson, std::ostream& os, bool color) {
  const Paint paint{color};
  const Problem& p = lesson.problem;
  const hilt::PlanSpec& spec = p.plan->spec();
  const double all = static_cast<double>(p.length()) * static_cast<double>(p.length()) * static_cast<double>(p.heads());
  os << paint.bold("One attention, and the ways to its gradient\n") << wrapped(sizes_text(lesson), 0)
     << wrapped("order " + hilt::to_string(spec.order) + ", pattern " + hilt::to_string(spec.pattern) + ", causal " +
                    std::string(name_of(spec.causality)) + ": up to " + std::to_string(lesson.longest_row) +
                    " keys a row, " + report::percent(static_cast<double>(lesson.pairs) / all) + " of all pairs",
                2)
     << '\n';
  print_modes(lesson, os, paint);
  os << '\n';
  print_agreement(lesson, os, paint);
  os << '\n';
  print_orders(lesson, os, paint);
  os << '\n';
  for (std::size_t i = 0; i < std::min<std::size_t>(lesson.notes.size(), 3); ++i)
    os << wrapped("note: " + lesson.notes[i], 2);
  os << wrapped(
      format("Measured: %.1f GB/s copying, %.0f GFLOP/s multiplying, %s. %.1f s in all.", lesson.machine.copy_gb_s,
             lesson.machine.gemm_gflop_s, threads_text(lesson).c_str(), lesson.seconds),
      2);
  os << wrapped("Read " + lesson.settings.out + "/compare.html; compare.json lies beside it.", 2);
  os << paint.verdict(lesson.passed(), lesson.passed() ? "verdict: ok, every tensor of every mode is within its limit"
                                                       : "verdict: FAILED, see NO and DIFFER above")
     << '\n';
}

}  // namespace compare
