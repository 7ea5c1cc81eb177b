// Text from the best checkpoint of a training run, as `train --sample-only` prints it.
//
//   sample --out out/train --prompt 'Mia has a' --temperature 0.7 --top-k 20 --seed 3
#include "train/sample.h"
#include "program/program.h"

int main(int argc, char** argv) {
  return program::run("sample", [&] {
    train::Settings settings;
    settings.sample_only = true;
    program::Options options("sample", "Prints text from the best checkpoint of a training run.");
    train::declare_sample(options, settings);
    return options.parse(argc, argv) ? train::sample_from_checkpoint(settings) : 0;
  });
}
