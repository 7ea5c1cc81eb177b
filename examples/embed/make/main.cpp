// An op of one's own: y = x^3, dy/dx = 3 x^2.
//
// Prints:
//   d sum(x^3) / dx = [3, 12, 27] f64[3]
#include <hilt/hilt.h>
#include <iostream>

using namespace hilt;

struct Cube final : Function {
  std::string_view name() const override { return "cube"; }
  Tensor forward(const Tensor& x) {
    if (wants(0)) save(x);
    return x * x * x;
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {3 * square(saved(0)) * dy}; }
};

int main() try {
  check_version();
  const Tensor x = from_values(std::vector{1.0, 2.0, 3.0}, {3});
  Tape tape;
  tape.watch(x);
  const Gradients g = tape.backward(sum(apply(Cube{}, x)));
  std::cout << "d sum(x^3) / dx = " << g[x] << '\n';
} catch (const Error& e) {
  std::cerr << "embed: error: " << e.what() << '\n';
  return static_cast<int>(e.code());
}
