// Memory that stays the program's: a tensor on a std::vector, and an op of one's own that remembers
// a number.
//
// Prints:
//   d sum(huber(x)) / dx = [-1, 0.5, 1] f32[3]
#include <hilt/hilt.h>
#include <iostream>

using namespace hilt;

// x^2 / 2 for |x| < limit, limit (|x| - limit / 2) beyond; its gradient is x, clamped.
struct Huber final : Function {
  double limit;
  explicit Huber(double l) : limit(l) {}
  std::string_view name() const override { return "huber"; }
  Tensor forward(const Tensor& x) {
    if (wants(0)) save(x);
    const Tensor inner = clamp(x, -limit, limit);
    return inner * (x - inner * 0.5);
  }
  std::vector<Tensor> backward(const Tensor& dy) override { return {clamp(saved(0), -limit, limit) * dy}; }
};

int main() try {
  check_version();
  std::vector<float> mine{-3, 0.5f, 2};
  const Tensor x(Storage::borrow(mine.data(), mine.size() * sizeof(float), {}, nullptr), {3}, DType::f32);
  Tape tape;
  tape.watch(x);
  const Gradients g = tape.backward(sum(apply(Huber(1), x)));
  std::cout << "d sum(huber(x)) / dx = " << g[x] << '\n';
} catch (const Error& e) {
  std::cerr << "embed: error: " << e.what() << '\n';
  return static_cast<int>(e.code());
}
