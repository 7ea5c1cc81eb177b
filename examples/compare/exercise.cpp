// Exercises: the backward pass of compare.html's four tokens in Python, a line of it left out, and
// what judges a file in which a learner wrote it.
#include <unistd.h>
#include <filesystem>
#include <iostream>
#include "../program/outputs.h"
#include "lesson.h"

namespace compare {
namespace {

constexpr const char* kExercise =
#include "exercise.inc"
    ;
constexpr const char* kCheck =
#include "check.inc"
    ;

/// What the line defines, and zeros of its shape.
constexpr const char* kLeftOut[kLines][2] = {{"Delta", "[0] * len(Q)"},
                                             {"dS", "[[0] * len(K) for q in Q]"},
                                             {"dQ", "[[0, 0] for q in Q]"},
                                             {"dK", "[[0, 0] for k in K]"},
                                             {"dV", "[[0, 0] for v in V]"}};

}  // namespace

bool do_exercise(const Settings& s) {
  if (!s.check.empty()) {
    execlp("python3", "python3", "-c", kCheck, s.check.c_str(), nullptr);
    hilt::fail("--check (", s.check, "): python3 does not start; install it");
  }
  const Index number = s.answer ? s.answer : s.exercise;
  if (number == 0) return false;
  const auto& [name, zeros] = kLeftOut[number - 1];
  std::string text = kExercise;
  const std::string begin = std::string("    ") + name + " = ";
  const std::size_t from = text.find(begin) + begin.size(), size = text.find('\n', from) - from;
  if (s.answer) {
    std::cout << name << " = " << text.substr(from, size) << '\n';
    return true;
  }
  const std::string file = format("exercise_%d.py", static_cast<int>(number));
  hilt::check(!std::filesystem::exists(s.out + "/" + file), "--exercise (", number, "): ", s.out, "/", file,
              " is there; remove it, or name another --out");
  program::Outputs outputs(s.out);
  outputs.write(file, text.replace(from, size, std::string(zeros) + "  # left out: write it"));
  outputs.commit();
  const std::string path = s.out + "/" + file;
  std::cout << "wrote " << path << ": write its line of " << name << ", then ./run compare --check " << path << '\n';
  return true;
}

}  // namespace compare
