// The loss and its gradient by formula, ignored targets, and logits that would overflow.
#include <limits>
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

constexpr Index kIgnore = -100;

DType loss_type(DType dtype) { return size_of(dtype) == 2 ? DType::f32 : dtype; }

std::vector<OpCase> cross_entropy_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](Input logits, std::vector<Index> targets, Index ignore = kIgnore, Traits traits = {}) {
    traits.wide = true;
    const Shape shape(std::span(logits.shape.begin(), logits.shape.end() - 1));
    const Tensor t = from_values(targets, shape, cases.size() % 2 ? DType::i32 : DType::i64);
    cases.push_back({text("cross_entropy ", t.dtype(), " ignoring ", ignore),
                     {logits},
                     [=](auto in) {
                       const Tensor there = moved(t, in[0].device());
                       return ignore == kIgnore ? cross_entropy(in[0], there) : cross_entropy(in[0], there, ignore);
                     },
                     [=]<class T>(const Arrays<T>& in) { return naive::cross_entropy(in[0], targets, ignore); },
                     traits});
  };
  for (int type = 0; type < 2; ++type) {
    add_case(real({4, 5}), {0, 4, 2, 2});
    add_case(real({4, 5}), {0, kIgnore, kIgnore, 3});
    add_case(real({4, 5}), {0, 1, 0, 3}, 0);  // a class may be what is ignored
    add_case(real({2, 3, 4}), {0, 1, 2, 3, 3, 3});
    add_case(real({1, 1}), {0});
    add_case(real({5}), {3});
    add_case(real({3, 2}), {1, -1, 0}, -1);
    add_case(between(-30, 30, {3, 6}), {0, 5, 1});
    add_case(real({2, 1, 2, 1, 1, 3}), {0, 1, 2, 0});
    add_case(real({3, 37}), {36, 0, 11});
  }
  add_case(real({617, 487}), randint(0, 487, {617}, {2, 0}).to_vector<Index>(), kIgnore, {.large = true});
  add_case(real({30011, 11}), randint(0, 11, {30011}, {2, 0}).to_vector<Index>(), 3, {.large = true});
  return cases;
}
const Op kLosses[] = {{"cross_entropy", cross_entropy_cases}};
INSTANTIATE_TEST_SUITE_P(CrossEntropy, OpJudges, testing::ValuesIn(kLosses), op_name);

TEST(CrossEntropy, UniformLogitsCostTheLogarithmOfTheClasses) {
  for (DType dtype : {DType::f64, DType::f32})
    EXPECT_NEAR(cross_entropy(full({6, 50}, 3, dtype), zeros({6}, DType::i64)).item(), std::log(50.0), 1e-6);
}

TEST(CrossEntropy, NothingLeftIsNoLossAndNoGradient) {
  // The mean of nothing: 0, so that a batch of padding moves nothing.
  for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Tensor x = random(real({3, 4}), 1, dtype);
    const Played p = play([](auto in) { return cross_entropy(in[0], full({3}, kIgnore, DType::i64)); }, {{x}},
                          ones({}, loss_type(dtype)));
    EXPECT_EQ(p.y.item(), 0) << dtype;
    EXPECT_EQ(p.dx[0].to_vector(), std::vector<double>(12, 0)) << dtype;
    EXPECT_EQ(cross_entropy(empty({0, 4}, dtype), empty({0}, DType::i64)).item(), 0) << dtype;
  }
}

TEST(CrossEntropy, WhatIsIgnoredIsNotRead) {
  std::vector<double> v = random(real({3, 4}), 1).to_vector();
  const Tensor clean = from_values(v, {3, 4});
  v[4] = std::nan(""), v[5] = std::numeric_limits<double>::infinity();
  const Tensor x = from_values(v, {3, 4}), t = ids({1, kIgnore, 2});
  const auto loss = [&](auto in) { return cross_entropy(in[0], t); };
  const Played p = play(loss, {{x}}, ones({}, DType::f64)), q = play(loss, {{clean}}, ones({}, DType::f64));
  EXPECT_EQ(bits(p.y), bits(q.y));
  EXPECT_EQ(bits(p.dx[0]), bits(q.dx[0]));
  for (std::size_t i = 4; i < 8; ++i) EXPECT_EQ(p.dx[0].to_vector()[i], 0);
}

TEST(CrossEntropy, LargeLogitsDoNotOverflow) {
  for (DType dtype : {DType::f64, DType::f32, DType::f16}) {
    const Tensor x = from_values(std::vector<double>{1e4, 0, -1e4, -1e4, 1e4, 0}, {2, 3}, dtype);
    const Played p = play([](auto in) { return cross_entropy(in[0], ids({0, 2})); }, {{x}}, ones({}, loss_type(dtype)));
    EXPECT_EQ(p.y.item(), 5000) << dtype;
    EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{0, 0, 0, 0, 0.5, -0.5})) << dtype;
  }
  // A class that cannot be: the loss is infinite where it is the target, finite elsewhere.
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor x = from_values(std::vector<double>{0, -inf}, {1, 2});
  EXPECT_EQ(cross_entropy(x, ids({1})).item(), inf);
  EXPECT_EQ(cross_entropy(x, ids({0})).item(), 0);
}

TEST(CrossEntropy, TargetsOfAnyStride) {
  const Tensor x = random(real({3, 4}), 1), wide = ids({3, 9, 0, 9, 1, 9});
  EXPECT_EQ(bits(cross_entropy(x, slice(wide, 0, 0, 6, 2))), bits(cross_entropy(x, ids({3, 0, 1}))));
}

TEST(CrossEntropy, Refusals) {
  const Tensor x = ones({3, 4});
  EXPECT_TRUE(refuses(
      [&] {
        cross_entropy(x, ids({0, 1, 4}));
      },
      "cross_entropy", {"4", "2"}));  // target 4 at position 2
  EXPECT_TRUE(refuses(
      [&] {
        cross_entropy(x, ids({0, -1, 2}));
      },
      "cross_entropy", {"-1", "1", "0..3"}));  // target, position, classes
  EXPECT_TRUE(refuses([&] { cross_entropy(x, ids({0, 1, 99}, DType::i32)); }, "cross_entropy", {"99", "2"}));
  EXPECT_TRUE(refuses([&] { cross_entropy(x, ids({0, kIgnore, 2}), -1); }, "cross_entropy", {"-100", "1"}));
  EXPECT_TRUE(refuses([&] { cross_entropy(x, ids({0, 1})); }, "cross_entropy", {"[3, 4]", "[2]"}));
  EXPECT_TRUE(refuses([&] { cross_entropy(x, ones({3})); }, "cross_entropy", {"i32", "i64", "f32"}));
  EXPECT_TRUE(refuses([&] { cross_entropy(ones({}), ids({0})); }, "cross_entropy", {"[]"}));
  EXPECT_TRUE(refuses([&] { cross_entropy(ones({3, 4}, DType::i64), ids({0, 1, 2})); }, "cross_entropy", {"i64"}));
}

}  // namespace
}  // namespace hilt
