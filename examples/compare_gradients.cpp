// The lesson: one attention, and what it costs to differentiate it as a dense masked product (what
// everyone writes first), op by op on a plan (taped), with a fused forward and the six formulas in
// library products (hybrid), and with one kernel each way (fused). Every tensor is judged against
// plain loops in f64; the exit status is 1 if one of them is off.
//
//   compare_gradients --length 1024 --pattern neighborhood2d:9x9 --modes taped,fused --out out/compare
//
// Prints a summary and writes compare.html (read this one) and compare.json; or judges exercises.
#include <unistd.h>
#include <cstdlib>
#include <iostream>
#include "compare/lesson.h"

namespace {

void declare(program::Options& options, compare::Settings& s) {
  program::declare_drawn(options, s, {1, 1 << 17}, 2);
  options.list("--modes", s.modes, std::vector(s.modes), "What to compare");
  options.text("--out", s.out, "DIR", "Where the two files go");
  options.flag("--json", s.json, "Print compare.json instead of the summary");
  options.then([&] {
    const bool is_own = s.order.find(':') != s.order.npos;  // with a grid or points; windows need a plane
    const bool is_plane = s.documents.empty() && !is_own && hilt::fold(s.length).cells() == s.length;
    if (!is_plane && !options.given("--pattern")) options.set("--pattern", "segment:256");
  });
  options.group(compare::kExercises);
  const char* const kLeft = "of the line left out: Delta, dS, dQ, dK, dV, running softmax";
  options.integer("--exercise", s.exercise, 1, compare::kLines,
                  std::string("Write exercise_N.py, N the number ") + kLeft);
  options.text("--check", s.check, "FILE", "Judge such a file, with its line written");
  options.integer("--answer", s.answer, 1, compare::kLines, std::string("Print the line; N is the number ") + kLeft);
}

int work(const program::Options& options, const compare::Settings& settings) {
  compare::do_exercise(options, settings);
  const auto start = std::chrono::steady_clock::now();
  compare::Lesson lesson{.settings = settings, .options = options, .problem = compare::make_problem(settings)};
  program::Outputs outputs(settings.out);
  lesson.machine = compare::measure_machine(lesson.problem);
  compare::judge_modes(lesson);
  compare::measure_machine_again(lesson);
  compare::measure_scaling(lesson);
  lesson.seconds = program::seconds_since(start);

  const compare::Files files = compare::files_of(lesson);
  outputs.write("compare.json", files.json);
  outputs.write("compare.html", files.html);
  const bool color = isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR");
  if (settings.json) std::cout << files.json;
  else compare::print_summary(lesson, files.words, std::cout, color);
  if (std::cout.flush()) outputs.commit();  // else run() says why; nothing is left
  return lesson.passed() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return program::run<compare::Settings>("compare_gradients",
                                         "One attention, and the ways to its gradient: dense, taped, hybrid, fused.",
                                         argc, argv, declare, work);
}
