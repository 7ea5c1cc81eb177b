// An op of two inputs, which computes only the gradients somebody wants.
//
// Prints:
//   d |x w|^2 / dw = [[20],
//    [28]] f64[2, 1]
#include <hilt/hilt.h>
#include <iostream>

using namespace hilt;

// y = a b for matrices; da = dy b^T, db = a^T dy.
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
  const Tensor x = from_values(std::vector{1.0, 2.0, 3.0, 4.0}, {2, 2});
  const Tensor w = from_values(std::vector{1.0, 0.0}, {2, 1});
  Tape tape;
  tape.watch(w);
  const Gradients g = tape.backward(sum(square(apply(Product{}, x, w))));
  std::cout << "d |x w|^2 / dw = " << g[w] << '\n';
} catch (const Error& e) {
  std::cerr << "embed: error: " << e.what() << '\n';
  return static_cast<int>(e.code());
}
