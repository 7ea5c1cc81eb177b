// Training over ranks, as threads, against training on one; ranks_mpi.cpp does the same over MPI.
#include "nn/ranks.h"
#include <gtest/gtest.h>
#include "tests/support/error_of.h"
#include "tests/nn/ranks_story.h"

namespace hilt {
namespace {

TEST(Ranks, EveryGridTellsTheStoryOfOneRank) {
  const std::vector<double> one = trained(Comm(), 1);
  EXPECT_LT(one[49], one[0] - 0.5) << "it learns nothing";
  for (const auto& [ranks, sequence] : {std::pair{2, 1}, {2, 2}, {3, 1}, {3, 3}, {4, 1}, {4, 2}, {4, 4}}) {
    std::vector<double> many;
    run_ranks(ranks, [&](const Comm& world) {
      const std::vector<double> mine = trained(world, sequence);
      if (world.rank() == 0) many = mine;
    });
    EXPECT_LE(apart(many, one), 1e-12) << ranks << " ranks, " << sequence << " to a sequence";
  }
}

TEST(Ranks, AGridMustDivideItsRanks) {
  run_ranks(3, [](const Comm& world) {
    EXPECT_EQ(error_of([&] { (void)RankGrid(world, 2); }), "usage: RankGrid: 2 ranks a sequence do not divide 3 ranks");
  });
}

}  // namespace
}  // namespace hilt
