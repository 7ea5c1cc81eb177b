// The race that small tapes run: microseconds of a name, forward, backward and Adam, in Hilt three
// ways and on a tape of numbers (peers/scalar_tape.h). A JSON line each.
//
//   hilt_names [steps] [fused|taped|token|scalar|call ..]
//
// call: one attention of 16 tokens, forward and back.
#include <algorithm>
#include <chrono>
#include <iostream>
#include "names.h"
#include "peers/scalar_tape.h"

namespace {

template <class Step> void race(const std::string& mode, hilt::Index steps, Step&& step) {
  const auto all = names::made_names(10000);
  std::vector<double> us;
  double sum = 0, last = 0;
  for (hilt::Index i = 0; i < steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    last = step(all[names::at(i) % all.size()], names::rate(i, steps));
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    sum += last;
  }
  std::ranges::sort(us);
  std::cout << "{\"library\": \"" << mode << "\", \"steps\": " << steps << ", \"us\": " << us[us.size() / 2]
            << ", \"lowest_us\": " << us[0] << ", \"mean_loss\": " << sum / static_cast<double>(steps)
            << ", \"last_loss\": " << last << '}' << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const hilt::Index steps = argc > 1 ? std::atoi(argv[1]) : 1000;
  std::vector<std::string> modes(argv + std::min(argc, 2), argv + argc);
  if (modes.empty()) modes = {"fused", "taped", "token", "scalar"};
  std::cout.precision(7);
  for (const std::string& mode : modes) {
    if (mode == "scalar") {
      scalar::Model model(names::start(), names::kColumns);
      race(mode, steps, [&](const auto& name, double lr) { return model.step(name, lr); });
    } else if (mode == "call") {
      using namespace hilt;
      std::vector<Tensor> x;  // q, k, v and the gradient of the result
      for (std::uint64_t i = 0; i < 4; ++i) x.push_back(randn({1, 16, 4, 4}, RandomKey{i}));
      const PlanPtr plan = make_plan({.length = 16, .heads = 4, .causality = Causality::token});
      race(mode, steps, [&](const auto&, double) {
        Tape tape;
        for (int i = 0; i < 3; ++i) tape.watch(x[names::at(i)]);
        return static_cast<double>(tape.backward(attention(x[0], x[1], x[2], plan), x[3]).size());
      });
    } else {
      names::Model model;
      race(mode, steps, [&](const auto& name, double lr) { return model.step(name, mode, lr); });
    }
  }
}
