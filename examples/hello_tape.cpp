// One step of least squares: what a tape records, the gradient it gives back, and what the gradient
// is good for.
//
// Prints:
//   matmul                       -> f32[2, 1]                saves           16 B, new           16 B
//   sub                          -> f32[2, 1]                saves            0 B, new            0 B
//   square                       -> f32[2, 1]                saves            8 B, new            8 B
//   sum                          -> f32[1, 1]                saves            0 B, new            0 B
//   reshape                      -> f32[]                    saves            0 B, new            0 B
//   5 ops, 24 B saved
//   loss = 29
//   d loss / d w = [[34],
//    [48]] f32[2, 1]
//   loss one step down = 4.7336
#include <hilt/hilt.h>
#include <iostream>
#include "program/program.h"

using namespace hilt;

namespace {

int work() {
  const Tensor x = from_values(std::vector{1.f, 2.f, 3.f, 4.f}, {2, 2});  // two samples of two features
  const Tensor target = from_values(std::vector{1.f, 2.f}, {2, 1});
  const Tensor w = from_values(std::vector{1.f, 1.f}, {2, 1});
  const auto loss_at = [&](const Tensor& weights) { return sum(square(matmul(x, weights) - target)); };

  Tape tape;
  tape.watch(w);
  const Tensor loss = loss_at(w);
  std::cout << tape << "loss = " << loss.item() << '\n';

  const Gradients g = tape.backward(loss);
  std::cout << "d loss / d w = " << g[w] << '\n';
  const Tape::Pause played;  // a tape plays once: what follows is arithmetic, not recorded
  std::cout << "loss one step down = " << loss_at(w - 0.01 * g[w]).item() << '\n';
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return program::run("hello_tape", [&] {
    program::Options options("hello_tape", "A tape and its gradients, for one step of least squares.");
    return options.parse(argc, argv) ? work() : 0;
  });
}
