// Text from the best checkpoint of a training run, as `train --sample-only` prints it.
//
//   sample --out out/train --prompt 'Mia has a' --temperature 0.7 --top-k 20 --seed 3
#include "train/run.h"

int main(int argc, char** argv) {
  return program::run<train::Settings>(
      "sample", "Prints text from the best checkpoint of a training run.", argc, argv, train::declare_sample,
      [](const program::Options&, const train::Settings& s) { return train::sample_from_checkpoint(s); });
}
