// The smallest language model learns the same however it is written: attention fused or taped, a
// name at once or token by token, or all of it on a tape of numbers that knows nothing of Hilt.
#include <gtest/gtest.h>
#include "../bench/names.h"
#include "../bench/peers/scalar_tape.h"

namespace {

TEST(Names, EveryWayHasTheSameLosses) {
  constexpr hilt::Index kSteps = 30;
  const auto all = names::made_names(kSteps);
  const std::vector<std::string> modes{"fused", "hybrid", "taped", "token"};
  std::vector<std::unique_ptr<names::Model>> models;
  for (std::size_t i = 0; i < modes.size(); ++i) models.push_back(std::make_unique<names::Model>());
  scalar::Model numbers(names::start(), names::kColumns);
  EXPECT_EQ(numbers.m.size(), 4192u);
  for (hilt::Index step = 0; step < kSteps; ++step) {
    const auto& name = all[names::at(step)];
    const double lr = names::rate(step, kSteps), loss = numbers.step(name, lr);
    for (std::size_t i = 0; i < modes.size(); ++i)
      EXPECT_NEAR(models[i]->step(name, modes[i], lr), loss, 1e-4) << modes[i] << ", step " << step;
  }
}

}  // namespace
