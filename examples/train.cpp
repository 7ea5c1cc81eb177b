// Trains the tiny transformer: Hilbert attention, its fused backward, and a task whose best
// possible loss is known. examples/README.md has commands to try, and what they leave in --out.
#include <csignal>
#include "program/program.h"
#include "program/ranks.h"
#include "train/run.h"

int main(int argc, char** argv) {
  const auto declare = [](program::Options& options, train::Settings& s) {
    train::declare(options, s);
    train::follow_up(options, s);
  };
  const auto work = [&](const program::Options& options, const train::Settings& s) {
    if (s.sample_only) return train::sample_from_checkpoint(s);
    std::signal(SIGPIPE, SIG_IGN);  // `train | head` trains on
    if (s.ranks == 1) return train::run(options, s);
    const std::string over = s.comm != "auto" ? s.comm : program::device_of(s.device).is_cuda() ? "nccl" : "threads";
    return program::run_as("train", static_cast<int>(s.ranks), over, argc, argv,
                           [&](hilt::Comm& met) { return train::run(options, s, met); });
  };
  return program::run<train::Settings>(
      "train", "Trains a tiny transformer with Hilbert attention on stories, Game of Life or any text.", argc, argv,
      declare, work);
}
