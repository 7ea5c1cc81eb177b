// Exercises: check.py, run by python3, writes them, answers them and judges what a learner wrote.
#include <unistd.h>
#include "lesson.h"

namespace compare {
namespace {

constexpr const char* kExercise =
#include "exercise.inc"
    ;
constexpr const char* kCheck =
#include "check.inc"
    ;

}  // namespace

void do_exercise(const Settings& s) {
  const std::string number = std::to_string(s.answer ? s.answer : s.exercise);
  const char* const what = !s.check.empty() ? "check" : s.answer ? "answer" : "exercise";
  if (s.check.empty() && number == "0") return;
  const std::string& value = s.check.empty() ? number : s.check;
  execlp("python3", "python3", "-c", kCheck, what, value.c_str(), s.out.c_str(), kExercise, nullptr);
  hilt::fail("--", what, " (", value, "): python3 does not start; install it");
}

}  // namespace compare
