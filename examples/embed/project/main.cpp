// An op of one's own, of two inputs, and a tensor in memory of the program's own, a std::vector.
//
// Prints:
//   d |x w|^2 / dw = [[20],
//    [28]] f64[2, 1]
#include <hilt/hilt.h>
#include <iostream>

using namespace hilt;

// y = a b for matrices; da = dy b^T, db = a^T dy, each only if somebody wants it.
struct Product final : Function {
  std::string_view name() const override { return "product"; }
  Tensor forward(const Tensor& a, const Tensor& b) {
    if (wants_any()) save(a), save(b);
    return matmul(a, b);
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    return {wants(0) ? matmul(dy, transpose(saved(1))) : Tensor(),
            wants(1) ? matmul(transpose(saved(0)), dy) : Tensor()};
  }
};

int main() try {
  check_version();
  std::vector<double> mine{1, 2, 3, 4};
  const Tensor x = borrow(std::span(mine), {2, 2}), w = from_values(std::vector{1.0, 0.0}, {2, 1});
  Tape tape;
  tape.watch(w);
  std::cout << "d |x w|^2 / dw = " << tape.backward(sum(square(apply(Product{}, x, w))))[w] << '\n';
} catch (const Error& e) {
  std::cerr << "embed: error: " << e.what() << '\n';
  return static_cast<int>(e.code());
}
