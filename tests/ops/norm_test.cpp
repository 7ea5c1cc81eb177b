// layer_norm and rms_norm by formula, and on rows whose mean would swallow their digits.
#include <limits>
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

std::vector<OpCase> layer_norm_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](Input x, double epsilon, Traits traits = {}) {
    const Shape n{x.shape[-1]};
    traits.rows = x.shape.rank() > 1 && x.shape.numel() > 0;
    cases.push_back({text("layer_norm eps ", epsilon),
                     {x, between(0.5, 2, n), real(n)},
                     [=](std::span<const Tensor> in) { return layer_norm(in[0], in[1], in[2], epsilon); },
                     [=]<class T>(const Arrays<T>& in) { return naive::layer_norm(in[0], in[1], in[2], epsilon); },
                     traits});
  };
  for (const Shape& shape :
       {Shape{5}, {2, 5}, {3, 1}, {2, 3, 4}, {1, 1, 6}, {2, 1, 2, 3}, {0, 4}, {2, 1, 2, 1, 1, 3}, {2, 19}})
    for (double epsilon : {1e-5, 0.5}) add_case(real(shape), epsilon);
  add_case(between(99, 101, {2, 6}), 1e-5);  // mean of squares minus square of mean would lose it
  for (const Shape& shape : {Shape{617, 487}, {3, 100003}, {100003, 3}}) add_case(real(shape), 1e-5, {.large = true});
  return cases;
}
std::vector<OpCase> rms_norm_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](Input x, double epsilon, Traits traits = {}) {
    traits.rows = x.shape.rank() > 1 && x.shape.numel() > 0;
    cases.push_back({text("rms_norm eps ", epsilon),
                     {x, between(0.5, 2, {x.shape[-1]})},
                     [=](std::span<const Tensor> in) { return rms_norm(in[0], in[1], epsilon); },
                     [=]<class T>(const Arrays<T>& in) { return naive::rms_norm(in[0], in[1], epsilon); },
                     traits});
  };
  for (const Shape& shape :
       {Shape{5}, {2, 5}, {3, 1}, {2, 3, 4}, {1, 1, 6}, {2, 1, 2, 3}, {0, 4}, {2, 1, 2, 1, 1, 3}, {2, 19}})
    for (double epsilon : {1e-5, 0.5}) add_case(real(shape), epsilon);
  for (const Shape& shape : {Shape{617, 487}, {3, 100003}, {100003, 3}}) add_case(real(shape), 1e-5, {.large = true});
  return cases;
}
const Op kNorms[] = {{"layer_norm", layer_norm_cases}, {"rms_norm", rms_norm_cases}};
INSTANTIATE_TEST_SUITE_P(Norm, OpJudges, testing::ValuesIn(kNorms), op_name);

TEST(Norm, ConstantRowsGiveTheBias) {
  const Tensor w = values({2, 3, 4}), b = values({5, 6, 7});
  for (DType dtype : {DType::f64, DType::f32}) {
    const Tensor y = layer_norm(full({2, 3}, 7, dtype), from_values(w.to_vector(), {3}, dtype),
                                from_values(b.to_vector(), {3}, dtype));
    EXPECT_EQ(y.to_vector(), (std::vector<double>{5, 6, 7, 5, 6, 7}));
    EXPECT_EQ(rms_norm(zeros({2, 3}, dtype), from_values(w.to_vector(), {3}, dtype)).to_vector(),
              std::vector<double>(6, 0));
  }
}

TEST(Norm, SmallNumbersOnALargeMeanKeepTheirDigits) {
  // Mean 1e4, deviation 1: f32 resolves 1e-3 of it; E[x^2] - E[x]^2 would resolve nothing.
  const Tensor noise = random(real({4, 512}), 1, DType::f32);
  const Tensor x = add(noise, 1e4), one = ones({512}), none = zeros({512});
  const std::vector<double> got = layer_norm(x, one, none).to_vector();
  const std::vector<double> exact =
      layer_norm(to(x, DType::f64), to(one, DType::f64), to(none, DType::f64)).to_vector();
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], exact[i], 2e-3) << i;
}

TEST(Norm, GradientsOfWeightsAddUpInMoreThanSixteenBits) {
  // 4096 equal terms: a bf16 accumulator would stop at 256 times one of them.
  constexpr Index kRows = 4096;
  const Tensor x = broadcast_to("test", values({-1, 1}, DType::bf16), {kRows, 2});
  const Tensor w = ones({2}, DType::bf16), b = zeros({2}, DType::bf16);
  const Played p =
      play([](auto in) { return layer_norm(in[0], in[1], in[2], 0); }, {{x, w, b}}, ones({kRows, 2}, DType::bf16));
  EXPECT_EQ(p.dx[1].to_vector(), (std::vector<double>{-double{kRows}, double{kRows}}));
  EXPECT_EQ(p.dx[2].to_vector(), (std::vector<double>{double{kRows}, double{kRows}}));
  const Played q = play([](auto in) { return rms_norm(in[0], in[1], 0); }, {{x, w}}, ones({kRows, 2}, DType::bf16));
  EXPECT_EQ(q.dx[1].to_vector(), (std::vector<double>{-double{kRows}, double{kRows}}));
}

TEST(Norm, ScaleFreeAndNanStaysInItsRow) {
  const Tensor x = random(real({3, 33}), 5), w = random(real({33}), 6), b = random(real({33}), 7);
  const std::vector<double> y = layer_norm(x, w, b, 0).to_vector(),
                            scaled = layer_norm(add(mul(x, 8), 3), w, b, 0).to_vector();
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], scaled[i], 1e-12);
  const Tensor nan = mul(x, from_values(std::vector<double>{1, std::numeric_limits<double>::quiet_NaN(), 1}, {3, 1}));
  for (const Tensor& bad : {layer_norm(nan, w, b), rms_norm(nan, w)})
    for (std::size_t i = 0; i < 99; ++i) EXPECT_EQ(std::isnan(bad.to_vector()[i]), i / 33 == 1);
}

TEST(Norm, RowsThatNothingSumsAreCutOtherwise) {
  for (const Index rows : {1, 7, 3001}) {
    const Tensor x = random(real({rows, 33}), 5), w = random(real({33}), 6), dy = random(real({rows, 33}), 7);
    const auto dx = [&](bool sums) {
      Tape tape;
      tape.watch(x);
      if (sums) tape.watch(w);
      return tape.backward(rms_norm(x, w), dy)[x].to_vector();
    };
    EXPECT_EQ(dx(false), dx(true)) << rows;
  }
}

TEST(Norm, OfNothing) {
  EXPECT_EQ(layer_norm(empty({3, 0}), empty({0}), empty({0})).shape(), (Shape{3, 0}));
  EXPECT_EQ(rms_norm(empty({3, 0}), empty({0})).shape(), (Shape{3, 0}));
}

TEST(Norm, Refusals) {
  const Tensor x = ones({2, 3}), w = ones({3});
  EXPECT_TRUE(refuses([&] { layer_norm(x, ones({2}), w); }, "layer_norm", {"weight", "[2]", "3"}));
  EXPECT_TRUE(refuses([&] { layer_norm(x, w, ones({4})); }, "layer_norm", {"bias", "[4]", "3"}));
  EXPECT_TRUE(refuses([&] { layer_norm(x, ones({1, 3}), w); }, "layer_norm", {"weight", "[1, 3]"}));
  EXPECT_TRUE(refuses([&] { layer_norm(x, ones({3}, DType::f64), w); }, "layer_norm", {"f32", "f64"}));
  EXPECT_TRUE(refuses([&] { layer_norm(ones({}), w, w); }, "layer_norm", {"[]"}));
  EXPECT_TRUE(refuses([&] { rms_norm(x, ones({2})); }, "rms_norm", {"weight", "[2]", "3"}));
  EXPECT_TRUE(refuses([&] { rms_norm(x, ones({3}, DType::bf16)); }, "rms_norm", {"f32", "bf16"}));
  EXPECT_TRUE(refuses([&] { rms_norm(ones({}), w); }, "rms_norm", {"[]"}));
}

}  // namespace
}  // namespace hilt
