// mse, bce and nll by formula, and where the formula as it reads would overflow or cancel.
#include <limits>
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

constexpr Index kIgnore = -100;
constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

template <class F>
std::vector<OpCase> pair_cases(const char* name, Tensor (*op)(const Tensor&, const Tensor&), F formula, Input a,
                               Input b) {
  std::vector<OpCase> cases;
  for (const Shape& shape : {Shape{}, {1}, {7}, {3, 4}, {2, 1, 3}, {2, 1, 2, 1, 3, 2}, {617, 487}}) {
    a.shape = b.shape = shape;
    cases.push_back({name,
                     {a, b},
                     [=](auto in) { return op(in[0], in[1]); },
                     [=]<class T>(const Arrays<T>& in) { return formula(in[0], in[1]); },
                     {.wide = true, .large = shape.numel() > 1000, .steps = 4}});
  }
  return cases;
}
std::vector<OpCase> mse_cases() {
  return pair_cases(
      "mse", mse, []<class T>(const Array<T>& a, const Array<T>& b) { return naive::mse(a, b); }, real({}), real({}));
}
std::vector<OpCase> bce_cases() {
  return pair_cases(
      "bce", bce, []<class T>(const Array<T>& a, const Array<T>& b) { return naive::bce(a, b); }, real({}),
      between(0.1, 0.9, {}));
}
std::vector<OpCase> nll_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, std::vector<Index> targets, Index ignore, bool large = false) {
    const Tensor t = from_values(targets, Shape(std::span(shape.begin(), shape.end() - 1)),
                                 cases.size() % 2 ? DType::i32 : DType::i64);
    cases.push_back({text("nll ", t.dtype(), " ignoring ", ignore),
                     {between(-3, 0, shape)},
                     [=](auto in) { return nll(in[0], moved(t, in[0].device()), ignore); },
                     [=]<class T>(const Arrays<T>& in) { return naive::nll(in[0], targets, ignore); },
                     {.wide = true, .large = large, .steps = 2}});
  };
  for (int type = 0; type < 2; ++type) {
    add_case({4, 5}, {0, 4, 2, 2}, kIgnore);
    add_case({4, 5}, {0, kIgnore, kIgnore, 3}, kIgnore);
    add_case({4, 5}, {0, 1, 0, 3}, 0);
    add_case({2, 3, 4}, {0, 1, 2, 3, 3, 3}, kIgnore);
    add_case({5}, {3}, kIgnore);
  }
  add_case({617, 487}, randint(0, 487, {617}, {2, 0}).to_vector<Index>(), kIgnore, true);
  return cases;
}
const Op kLosses[] = {{"mse", mse_cases}, {"bce", bce_cases}, {"nll", nll_cases}};
INSTANTIATE_TEST_SUITE_P(Losses, OpJudges, testing::ValuesIn(kLosses), op_name);

TEST(Losses, BceIsRightAtTheEnds) {
  for (DType dtype : {DType::f64, DType::f32}) {
    const double unit = dtype == DType::f64 ? 0x1p-51 : 0x1p-22;
    for (double x : {1e-6, 0.5, 20.0, 80.0, 1000.0, 1e30})
      for (double target : {0.0, 1.0}) {
        // Right and sure costs e^-|x|, wrong and sure |x|.
        for (double sign : {-1.0, 1.0}) {
          const Tensor logit = full({1}, sign * x, dtype), t = full({1}, target, dtype);
          const Played p = play([&](auto in) { return bce(in[0], t); }, {{logit}}, ones({}, dtype));
          const double at = logit.to_vector()[0] * (target == 1 ? 1 : -1), tail = std::log1p(std::exp(-std::abs(at)));
          const double loss = at < 0 ? -at + tail : tail, slope = 1 / (1 + std::exp(at)) * (target == 1 ? -1 : 1);
          EXPECT_NEAR(p.y.item(), loss, 4 * unit * loss + 0x1p-140) << dtype << ' ' << x << ' ' << target;
          EXPECT_NEAR(p.dx[0].to_vector()[0], slope, 4 * unit * std::abs(slope) + 0x1p-140) << dtype << ' ' << x;
        }
      }
    // At 0, where max(x, 0) and |x| have kinks, the loss has none.
    const Played zero =
        play([&](auto in) { return bce(in[0], ones({1}, dtype)); }, {{zeros({1}, dtype)}}, ones({}, dtype));
    EXPECT_NEAR(zero.y.item(), std::log(2), 1e-7);
    EXPECT_EQ(zero.dx[0].to_vector()[0], -0.5);
  }
}

TEST(Losses, SixteenBitsGiveF32) {
  for (DType dtype : {DType::bf16, DType::f16}) {
    const Tensor x = values({256, 1, 3}, dtype), t = values({255, 0, 1}, dtype);
    EXPECT_EQ(mse(x, t).dtype(), DType::f32);
    EXPECT_EQ(mse(x, t).item(), 2);
    EXPECT_EQ(bce(x, t - t).dtype(), DType::f32);
    EXPECT_EQ(nll(reshape(x, {1, 3}), ids({1})).dtype(), DType::f32);
  }
}

TEST(Losses, NllOfLogSoftmaxIsTheCrossEntropy) {
  const Tensor x = random(real({5, 7}), 3), t = ids({6, kIgnore, 0, 3, 3});
  const Played a = play([&](auto in) { return nll(log_softmax(in[0]), t); }, {{x}}, ones({}, DType::f64));
  const Played b = play([&](auto in) { return cross_entropy(in[0], t); }, {{x}}, ones({}, DType::f64));
  EXPECT_NEAR(a.y.item(), b.y.item(), 1e-14);
  for (std::size_t i = 0; i < 35; ++i) EXPECT_NEAR(a.dx[0].to_vector()[i], b.dx[0].to_vector()[i], 1e-15);
}

TEST(Losses, NothingLeftIsNoLossAndWhatIsIgnoredDoesNotLeak) {
  const Tensor x = reshape(values({-1, kNan, -2, kInf}), {2, 2});
  const Played p = play([](auto in) { return nll(in[0], ids({0, kIgnore})); }, {{x}}, ones({}, DType::f64));
  EXPECT_EQ(p.y.item(), 1);
  EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{-1, 0, 0, 0}));
  const Played none = play([](auto in) { return nll(in[0], ids({kIgnore, kIgnore})); }, {{x}}, ones({}, DType::f64));
  EXPECT_EQ(none.y.item(), 0);
  EXPECT_EQ(none.dx[0].to_vector(), (std::vector<double>(4, 0)));
}

TEST(Losses, Refusals) {
  const Tensor x = ones({2, 3}), row = ones({3});
  EXPECT_TRUE(refuses([&] { mse(x, row); }, "mse", {"[2, 3]", "[3]"}));  // to broadcast would hide a mistake
  EXPECT_TRUE(refuses([&] { bce(x, row); }, "bce", {"[2, 3]", "[3]"}));
  EXPECT_TRUE(refuses([&] { mse(x, to(x, DType::f64)); }, "mse", {"f32", "f64"}));
  EXPECT_TRUE(refuses([&] { bce(to(x, DType::i64), to(x, DType::i64)); }, "bce", {"i64"}));
  EXPECT_TRUE(refuses([&] { nll(x, ids({0, 1, 2})); }, "nll", {"[2, 3]", "[3]"}));
  EXPECT_TRUE(refuses([&] { nll(x, ids({0, 3})); }, "take_along", {"3", "0..2"}));
  EXPECT_TRUE(refuses([&] { nll(ones({}), ids({0})); }, "nll", {"[]", "[1]"}));
}

}  // namespace
}  // namespace hilt
