// Trains the tiny transformer: Hilbert attention, its fused backward, and a task whose best
// possible loss is known. examples/README.md has commands to try, and what they leave in --out.
#include <csignal>
#include "program/program.h"
#include "program/ranks.h"
#include "train/run.h"

int main(int argc, char** argv) {
  return program::run("train", [&] {
    train::Settings settings;
    program::Options options("train",
                             "Trains a tiny transformer with Hilbert attention on stories, Game of Life or any text.");
    train::declare(options, settings);
    train::follow_up(options, settings);
    if (!options.parse(argc, argv)) return 0;
    if (settings.sample_only) return train::sample_from_checkpoint(settings);
    std::signal(SIGPIPE, SIG_IGN);  // `train | head` trains on
    if (settings.ranks == 1) return train::run(options, settings);
    const std::string& comm = settings.comm;
    const std::string over = comm != "auto" ? comm : program::device_of(settings.device).is_cuda() ? "nccl" : "threads";
    return program::run_as("train", static_cast<int>(settings.ranks), over, argc, argv,
                           [&](hilt::Comm& met) { return train::run(options, settings, met); });
  });
}
