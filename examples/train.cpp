// Trains the tiny transformer: Hilbert attention, its fused backward, and a task whose best
// possible loss is known. examples/train/README.md has commands to try.
#include <csignal>
#include "train/run.h"

int main(int argc, char** argv) {
  const auto declare = [](program::Options& options, train::Settings& s) {
    s.ranks = program::ranks_started(s.ranks);
    train::declare(options, s);
    train::follow_up(options, s);
  };
  const auto work = [](const program::Options& options, const train::Settings& s) {
    if (s.sample_only) return program::is_first_started() ? train::sample_from_checkpoint(s) : 0;
    std::signal(SIGPIPE, SIG_IGN);  // `train | head` trains on
    if (s.ranks == 1 && s.comm != "mpi") return train::run(options, s);
    return program::run_as("train", s.ranks, s.comm, [&](hilt::Comm& met) { return train::run(options, s, met); });
  };
  return program::run<train::Settings>(
      "train", "Trains a tiny transformer with Hilbert attention on stories, Game of Life or any text.", argc, argv,
      declare, work);
}
