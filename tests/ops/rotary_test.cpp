// Rotation by formula; lengths stay, and products depend on the distance alone.
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

std::vector<OpCase> rotary_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, double base, std::vector<double> at, Traits traits = {}) {
    std::optional<Tensor> positions;
    if (!at.empty())
      positions = from_values(at, {static_cast<Index>(at.size())}, cases.size() % 2 ? DType::i32 : DType::i64);
    else
      for (Index l = 0; l < shape[-3]; ++l) at.push_back(static_cast<double>(l));
    traits.rows = shape.rank() > 3;
    cases.push_back({text("rotary base ", base, positions ? " given positions" : ""),
                     {real(shape)},
                     [=](std::span<const Tensor> in) { return rotary(in[0], base, positions); },
                     [=]<class T>(const Arrays<T>& in) { return naive::rotary(in[0], base, at); },
                     traits});
  };
  add_case({1, 1, 2}, 10000, {});
  add_case({3, 2, 4}, 10000, {});
  add_case({3, 2, 4}, 10, {5, 0, 2});
  add_case({4, 1, 6}, 100, {7, 7, -3, 1});
  add_case({2, 3, 1, 2}, 10000, {});
  add_case({2, 2, 3, 4}, 10, {1, 100});
  add_case({2, 1, 3, 2, 2}, 10000, {});
  add_case({2, 1, 1, 2, 1, 6}, 50, {3, 1});
  add_case({0, 2, 4}, 10000, {});
  add_case({2, 2, 40}, 10000, {});
  add_case({2, 3, 2, 16}, 10000, {});  // whole accesses of any type, where the layout is aligned
  add_case({3, 35, 9, 64}, 10000, {}, {.large = true});
  add_case({17, 9, 31, 66}, 10000, {}, {.large = true});
  add_case({311, 5, 200}, 10000, {}, {.large = true});
  // Points: each part of a head as a head of its own, of which those of other coordinates are left.
  const auto add_points = [&](const Shape& shape, const Shape& points, Traits traits = {}) {
    const Index axes = points[-1], length = points.numel() / axes, part = shape[-1] / axes;
    const Tensor where = mul(randn(points, {5, cases.size()}, DType::f64), 9.0);
    const Shape apart{shape.numel() / (length * shape[-2] * shape[-1]), length, shape[-2] * axes, part};
    cases.push_back({text("rotary points ", points),
                     {real(shape)},
                     [=](std::span<const Tensor> in) { return rotary(in[0], 100, where); },
                     [=]<class T>(const Arrays<T>& in) {
                       Array<T> x(apart), y(shape);
                       x.values = in[0].values;
                       for (Index axis = 0; axis < axes; ++axis) {
                         const auto at = slice(where, -1, axis, axis + 1).to_vector();
                         const Array<T> turned = naive::rotary(x, 100, at);
                         for (Index i = 0; i < y.size(); ++i)
                           if (i / part % axes == axis) y[i] = turned[i];
                       }
                       return y;
                     },
                     traits});
  };
  add_points({5, 3, 12}, {5, 1});
  add_points({5, 3, 12}, {5, 2});
  add_points({5, 3, 18}, {5, 3});
  add_points({2, 5, 3, 24}, {5, 3}, {.rows = true});
  add_points({2, 5, 3, 24}, {2, 5, 3});
  add_points({2, 3, 2, 32}, {2, 3, 2});  // whole accesses
  add_points({2, 35, 9, 96}, {2, 35, 3}, {.large = true});
  return cases;
}
const Op kRotary[] = {{"rotary", rotary_cases}};
INSTANTIATE_TEST_SUITE_P(Rotary, OpJudges, testing::ValuesIn(kRotary), op_name);

double inner(const std::vector<double>& a, const std::vector<double>& b) {
  double s = 0;
  for (std::size_t i = 0; i < a.size(); ++i) s += a[i] * b[i];
  return s;
}

TEST(Rotary, OnlyTheFirstHeadsTurnWhereToldSo) {
  const Tensor x = randn({2, 5, 6, 8}, {3, 1}, DType::f64);
  const Tensor y = rotary(x, 100, std::nullopt, 4);
  EXPECT_EQ(slice(y, 2, 0, 4).to_vector(), rotary(slice(x, 2, 0, 4), 100).to_vector());
  EXPECT_EQ(slice(y, 2, 4, 6).to_vector(), slice(x, 2, 4, 6).to_vector());
  Tape tape;
  tape.watch(x);
  const Tensor dy = randn(x.shape(), {3, 2}, DType::f64), dx = tape.backward(rotary(x, 100, std::nullopt, 4), dy)[x];
  EXPECT_EQ(slice(dx, 2, 4, 6).to_vector(), slice(dy, 2, 4, 6).to_vector());
}

// A part of a head turns as a head so wide would, by its own coordinate.
TEST(Rotary, PointsTurnEachPartByItsCoordinate) {
  for (const Index axes : {1, 2, 3})
    for (const DType type : {DType::f64, DType::f32, DType::i64}) {
      const Tensor x = randn({2, 5, 3, 12}, {3, 1}, DType::f64), dy = randn(x.shape(), {3, 2}, DType::f64);
      const Tensor points = converted(mul(randn({2, 5, axes}, {3, 3}, DType::f64), 9), type);
      Tape tape;
      tape.watch(x);
      const Tensor y = rotary(x, 100, points, 2), dx = tape.backward(y, dy)[x];
      for (Index b = 0; b < 2; ++b)
        for (Index part = 0; part < axes; ++part) {
          const auto own = [&](const Tensor& t, Index heads) {
            return slice(slice(slice(t, 0, b, b + 1), 2, 0, heads), 3, part * 12 / axes, (part + 1) * 12 / axes);
          };
          const std::vector<double> at = slice(slice(points, 0, b, b + 1), 2, part, part + 1).to_vector();
          const auto turned = [&](const Tensor& t, double sign) {
            Array<double> in(own(t, 2).shape());
            in.values = own(t, 2).to_vector();
            std::vector<double> where = at;
            for (double& coordinate : where) coordinate *= sign;
            return naive::rotary(in, 100, where).values;
          };
          const std::vector<double> got = own(y, 2).to_vector(), want = turned(x, 1), back = turned(dy, -1),
                                    d = own(dx, 2).to_vector();
          for (std::size_t i = 0; i < got.size(); ++i) {
            ASSERT_NEAR(got[i], want[i], 1e-12) << axes;
            ASSERT_NEAR(d[i], back[i], 1e-12) << axes;
          }
        }
      EXPECT_EQ(slice(y, 2, 2, 3).to_vector(), slice(x, 2, 2, 3).to_vector());
      const Tensor one = slice(points, 0, 0, 1);
      EXPECT_EQ(rotary(slice(x, 0, 0, 1), 100, squeeze(one, 0)).to_vector(),
                rotary(slice(x, 0, 0, 1), 100, one).to_vector());
    }
  const Tensor x = randn({2, 5, 3, 8}, {3, 1});
  EXPECT_EQ(rotary(x, 100, reshape(arange(5), {5, 1})).to_vector(), rotary(x, 100).to_vector());
}

TEST(Rotary, KeepsLengths) {
  const Tensor x = random(real({9, 3, 8}), 1);
  const std::vector<double> a = sum(square(x), {-1}).to_vector(), b = sum(square(rotary(x)), {-1}).to_vector();
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-13);
}

TEST(Rotary, ProductsDependOnDistanceAlone) {
  const Tensor q = random(real({1, 1, 16}), 1), k = random(real({1, 1, 16}), 2);
  const auto at = [](const Tensor& x, Index position) { return rotary(x, 10000, ids({position})).to_vector(); };
  for (Index distance : {0, 1, 5, 31})
    for (Index start : {0, 3, 1000})
      EXPECT_NEAR(inner(at(q, start + distance), at(k, start)), inner(at(q, distance), at(k, 0)), 1e-11)
          << start << ' ' << distance;
}

TEST(Rotary, MinusThePositionsTakesItBack) {
  const Tensor x = random(real({5, 2, 12}), 3);
  const std::vector<double> back =
      rotary(rotary(x, 500, ids({1, 4, 9, 1000, 0})), 500, ids({-1, -4, -9, -1000, 0})).to_vector();
  for (std::size_t i = 0; i < back.size(); ++i) EXPECT_NEAR(back[i], x.to_vector()[i], 1e-12);
  EXPECT_EQ(bits(rotary(x, 500, ids({0, 0, 0, 0, 0}))), bits(x));
}

TEST(Rotary, ATurnByOneIsAQuarterWhereTheAngleSaysSo) {
  // D = 2 has one pair and the angle position * base^0.
  const Tensor y = rotary(from_values(std::vector<double>{1, 0}, {1, 1, 2}), 10000, ids({1}));
  EXPECT_NEAR(y.to_vector()[0], std::cos(1.0), 1e-15);
  EXPECT_NEAR(y.to_vector()[1], std::sin(1.0), 1e-15);
}

TEST(Rotary, FarPositionsKeepTheirAngle) {
  // An angle of 1e6 radians has no digit to spare in f32; it must not be computed there.
  for (Index position : {1000, 100000, 1000003}) {
    const Tensor x = random(real({1, 2, 64}), 4, DType::f32);
    const std::vector<double> got = rotary(x, 10000, ids({position})).to_vector(),
                              exact = rotary(to(x, DType::f64), 10000, ids({position})).to_vector();
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], exact[i], 1e-6) << position << " element " << i;
  }
}

TEST(Rotary, Refusals) {
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 5})); }, "rotary", {"5"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({3, 4})); }, "rotary", {"[3, 4]"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 4}), 10000, ids({1, 2, 3})); }, "rotary", {"[3]", "2"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 4}), 10000, ones({2})); }, "rotary", {"positions", "f32"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 8}), 10000, ones({2, 3})); }, "rotary", {"8 dims", "3 parts"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 4}), 10000, ones({3, 2})); }, "rotary", {"[3, 2]"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 8}), 10000, ones({2, 4})); }, "rotary", {"[2, 4]"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 2, 3, 4}), 10000, ones({3, 2, 2})); }, "rotary", {"[3, 2, 2]"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 4}), 10000, full({2, 1}, NAN)); }, "rotary", {"not finite"}));
  EXPECT_TRUE(refuses(
      [&] {
        rotary(ones({2, 3, 4}), 10000, from_values(std::vector<Index>{0, 1}, {1, 2}));
      },
      "rotary", {"[1, 2]"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 4}), 0); }, "rotary", {"base", "0"}));
  EXPECT_TRUE(refuses([&] { rotary(ones({2, 3, 4}, DType::i64)); }, "rotary", {"i64"}));
}

}  // namespace
}  // namespace hilt
