// Learning rates against values worked out by hand.
#include "nn/optimizer.h"
#include <gtest/gtest.h>
#include <cmath>
#include "tests/support/error_of.h"

namespace hilt {
namespace {

using Kind = Schedule::Kind;

TEST(Schedule, WarmsUpLinearly) {
  for (const Kind kind : {Kind::constant, Kind::linear, Kind::cosine, Kind::wsd}) {
    const Schedule s{kind, 2, 0, 20, 4, 5};
    EXPECT_DOUBLE_EQ(s(0), 0.5);
    EXPECT_DOUBLE_EQ(s(1), 1.0);
    EXPECT_DOUBLE_EQ(s(2), 1.5);
    EXPECT_DOUBLE_EQ(s(3), 2.0);
    EXPECT_DOUBLE_EQ(s(4), 2.0) << "the rest begins at the peak";
  }
}

TEST(Schedule, FollowsItsFormula) {
  const Schedule constant{Kind::constant, 3, 1, 10, 0}, linear{Kind::linear, 3, 1, 10, 2},
      cosine{Kind::cosine, 3, 1, 10, 2};
  const Schedule wsd{Kind::wsd, 3, 1, 10, 2, 4}, wsd_by_default{Kind::wsd, 3, 1, 10, 2};
  for (const Index step : {0, 5, 9, 10, 1000}) EXPECT_DOUBLE_EQ(constant(step), 3);
  EXPECT_DOUBLE_EQ(linear(4), 2.5);  // 2 of 8 steps
  EXPECT_DOUBLE_EQ(linear(6), 2);
  EXPECT_DOUBLE_EQ(linear(9), 1.25);
  EXPECT_DOUBLE_EQ(cosine(4), 2 + std::sqrt(0.5));  // cos 45 degrees
  EXPECT_DOUBLE_EQ(cosine(6), 2);
  EXPECT_DOUBLE_EQ(cosine(8), 2 - std::sqrt(0.5));
  EXPECT_DOUBLE_EQ(wsd(6), 3);
  EXPECT_DOUBLE_EQ(wsd(7), 2.5);
  EXPECT_DOUBLE_EQ(wsd(8), 2);
  EXPECT_DOUBLE_EQ(wsd(9), 1.5);
  EXPECT_DOUBLE_EQ(wsd_by_default(8), 3);  // a fifth of 10 steps falls: 8 and 9
  EXPECT_DOUBLE_EQ(wsd_by_default(9), 2);
  for (const Schedule& s : {linear, cosine, wsd})
    for (const Index step : {10, 11, 5000}) EXPECT_DOUBLE_EQ(s(step), 1);
}

TEST(Schedule, IsAPureFunction) {
  const Schedule s{Kind::cosine, 1, 0.1, 100, 10};
  const double at_50 = s(50);
  (void)s(99), (void)s(3);
  EXPECT_EQ(s(50), at_50);
}

TEST(Schedule, NeverLeavesItsBounds) {
  for (const Kind kind : {Kind::constant, Kind::linear, Kind::cosine, Kind::wsd})
    for (const Index warmup : {0, 1, 7, 13})
      for (const Index decay : {0, 1, 6}) {
        if (decay > 13 - warmup) continue;
        const Schedule s{kind, 1, 0.25, 13, warmup, decay};
        for (Index step = 0; step < 20; ++step) {
          EXPECT_LE(s(step), 1);
          EXPECT_GE(s(step), step < warmup ? 1.0 / static_cast<double>(warmup) : 0.25);
          if (step > warmup) { EXPECT_LE(s(step), s(step - 1)) << "falls once it has risen"; }
        }
      }
}

TEST(Schedule, SaysWhatIsWrong) {
  const auto wrong = [](Schedule s) { return error_of([&] { (void)s(0); }); };
  EXPECT_EQ(wrong({Kind::cosine, 1, 0, 0}), "usage: schedule: steps 0 must be at least 1");
  EXPECT_EQ(wrong({Kind::cosine, 1, 0, 10, 11}), "usage: schedule: warmup 11 must be 0..10, the number of steps");
  EXPECT_EQ(wrong({Kind::wsd, 1, 0, 10, 4, 7}), "usage: schedule: decay 7 must be 0..6, the steps after warm-up");
  EXPECT_EQ(wrong({Kind::cosine, 0, 0, 10}), "usage: schedule: peak 0 must be positive");
  EXPECT_EQ(wrong({Kind::cosine, 1, 2, 10}), "usage: schedule: floor 2 must be 0..1, the peak");
  EXPECT_EQ(error_of([] { (void)Schedule{}(-1); }), "usage: schedule: step -1 must not be negative");
  EXPECT_EQ(error_of([] { (void)parse_schedule("cosin"); }),
            "usage: schedule: 'cosin' is not one of constant, linear, cosine, wsd; did you mean cosine?");
  for (const Kind k : {Kind::constant, Kind::linear, Kind::cosine, Kind::wsd}) EXPECT_EQ(parse_schedule(name_of(k)), k);
}

}  // namespace
}  // namespace hilt
