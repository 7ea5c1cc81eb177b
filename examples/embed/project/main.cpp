// Two ops of one's own, one that remembers a number and one of two inputs, and memory that stays
// the program's: a tensor on a std::vector.
//
// Prints:
//   d sum(huber(x)) / dx = [-1, 0.5, 1] f32[3]
//   d |x w|^2 / dw = [[20],
//    [28]] f64[2, 1]
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
  std::vector<float> mine{-3, 0.5f, 2};
  const Tensor x(Storage::borrow(mine.data(), mine.size() * sizeof(float), {}, nullptr), {3}, DType::f32);
  Tape tape;
  tape.watch(x);
  std::cout << "d sum(huber(x)) / dx = " << tape.backward(sum(apply(Huber(1), x)))[x] << '\n';

  const Tensor a = from_values(std::vector{1.0, 2.0, 3.0, 4.0}, {2, 2}), w = from_values(std::vector{1.0, 0.0}, {2, 1});
  Tape second;  // a tape plays once
  second.watch(w);
  std::cout << "d |x w|^2 / dw = " << second.backward(sum(square(apply(Product{}, a, w))))[w] << '\n';
} catch (const Error& e) {
  std::cerr << "embed: error: " << e.what() << '\n';
  return static_cast<int>(e.code());
}
