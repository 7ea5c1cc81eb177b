// gradcheck accepts right gradients, finds small errors and says where, and leaves its inputs as
// they were.
#include "core/gradcheck.h"
#include <gtest/gtest.h>
#include <cmath>
#include <limits>
#include "core/random.h"
#include "tests/support/error_of.h"
#include "tests/support/tiny_ops.h"

namespace hilt {
namespace {
using namespace tiny;

using Numbers = std::vector<double>;
using Inputs = std::span<const Tensor>;

/// y = x - mean(x), whose gradient under a sum is zero. `right` or not, it is off by `error`.
struct Center final : Function {
  bool right;
  double error;
  Center(bool r, double e) : right(r), error(e) {}
  std::string_view name() const override { return "center"; }
  Tensor forward(const Tensor& x) {
    double mean = 0;
    for (double e : x.to_vector()) mean += e / static_cast<double>(x.numel());
    return map(x, [&](double e) { return e - mean; });
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    if (!right) return {zeros_like(dy)};
    return {map(forward(dy), [this](double e) { return e + error; })};
  }
};
Composite center(bool right, double error = 0) {
  return [=](Inputs in) { return apply(Center(right, error), in[0]); };
}

TEST(Gradcheck, PassesWhatIsRightAndCountsItsWork) {
  const Tensor x = randn({2, 3}, {1, 0}, DType::f64), y = randn({2, 3}, {1, 1}, DType::f64);
  const GradcheckResult r = gradcheck([](Inputs in) { return exp(mul(square(in[0]), in[1])); }, {x, y});
  EXPECT_TRUE(r) << r.where;
  EXPECT_EQ(r.checked, 12);
  EXPECT_LT(r.worst, 0.1);
  EXPECT_FALSE(r.where.empty());
}

TEST(Gradcheck, SeesWhatAPlainSumHides) {
  const Tensor x = randn({7}, {1, 0}, DType::f64);
  EXPECT_TRUE(gradcheck(center(true), {x}));
  EXPECT_FALSE(gradcheck(center(false), {x}));
}

TEST(Gradcheck, FindsSmallErrorsAndSaysWhere) {
  const Tensor x = vec({0.5, 1.5});
  EXPECT_FALSE(gradcheck(center(true, 1e-4), {x}));
  EXPECT_FALSE(gradcheck(center(true, 3e-6), {x}));
  EXPECT_TRUE(gradcheck(center(true, 1e-8), {x}));
  // One element of the second input, off by 0.1 %.
  struct Off final : Function {
    std::string_view name() const override { return "off"; }
    Tensor forward(const Tensor& a, const Tensor& b) {
      save(a);
      return times(a, b);
    }
    std::vector<Tensor> backward(const Tensor& dy) override {
      Tensor db = times(dy, saved(0));
      db.mutable_data<double>()[4] *= 1.001;
      return {zeros_like(dy), db};
    }
  };
  const Tensor a = randn({2, 3}, {1, 0}, DType::f64), b = randn({2, 3}, {1, 1}, DType::f64);
  const auto fn = [&](Inputs in) { return apply(Off{}, a, in[1]); };
  const GradcheckResult r = gradcheck(fn, {vec({1}), b});
  EXPECT_FALSE(r);
  EXPECT_EQ(r.checked, 7);
  EXPECT_GT(r.worst, 1);
  EXPECT_TRUE(r.where.starts_with("input 1 [2, 3], element 4 of its storage: analytic ")) << r.where;
}

TEST(Gradcheck, ToleranceIsTheOptions) {
  const Tensor x = vec({0.5, 1.5});
  EXPECT_TRUE(gradcheck(center(true, 1e-4), {x}, {.absolute = 1e-3}));
  EXPECT_FALSE(gradcheck(center(true, 1e-4), {x}, {.absolute = 1e-5, .relative = 1e-9}));
  // Central differences of x^3 are off by exactly step^2.
  const auto cube = [](Inputs in) { return mul(square(in[0]), in[0]); };
  EXPECT_TRUE(gradcheck(cube, {x}));
  EXPECT_FALSE(gradcheck(cube, {x}, {.step = 0.1}));
  EXPECT_FALSE(gradcheck(center(true), {x}, {.absolute = 0, .relative = 0}));
}

TEST(Gradcheck, TheSeedChoosesTheCotangent) {
  const Tensor x = randn({5}, {1, 0}, DType::f64);
  const double a = gradcheck(center(false), {x}, {.seed = 1}).worst,
               b = gradcheck(center(false), {x}, {.seed = 2}).worst;
  EXPECT_NE(a, b);
  EXPECT_EQ(a, gradcheck(center(false), {x}).worst);
}

TEST(Gradcheck, AnInputListedTwiceIsOneVariable) {
  const Tensor x = vec({0.5, 1.5});
  const GradcheckResult r = gradcheck([](Inputs in) { return mul(in[0], in[1]); }, {x, x});
  EXPECT_TRUE(r) << r.where;
  EXPECT_EQ(r.checked, 2);
}

TEST(Gradcheck, StridedExpandedAndOverlappingInputs) {
  const Tensor memory = randn({12}, {1, 0}, DType::f64);
  const auto fn = [](Inputs in) { return square(in[0]); };
  const struct {
    Shape shape;
    Strides strides;
    Index offset, elements;
  } layouts[] = {{{2, 3}, {1, 2}, 0, 6}, {{2, 2}, {6, 3}, 1, 4}, {{3, 4}, {0, 1}, 2, 4},
                 {{2, 3}, {0, 0}, 5, 1}, {{3, 3}, {1, 1}, 4, 5}, {{}, {}, 11, 1}};
  for (const auto& l : layouts) {
    const GradcheckResult r = gradcheck(fn, {as_strided(memory, l.shape, l.strides, l.offset)});
    EXPECT_TRUE(r) << l.shape << ' ' << r.where;
    EXPECT_EQ(r.checked, l.elements) << l.shape;
  }
}

TEST(Gradcheck, InputsThatShareMemoryMoveTogether) {
  const Tensor memory = vec({0.5, 1.5, -0.7});
  const Tensor nothing = as_strided(memory, {0}, {1}, 3), head = as_strided(memory, {2}, {1}, 0),
               tail = as_strided(memory, {2}, {1}, 1);
  const GradcheckResult r = gradcheck([](Inputs in) { return mul(in[1], square(in[2])); }, {nothing, head, tail});
  EXPECT_TRUE(r) << r.where;
  EXPECT_EQ(r.checked, 3);
}

TEST(Gradcheck, AnInputThatIsNotUsedHasSlopeZero) {
  const Tensor x = vec({0.5}), unused = vec({1, 2});
  const GradcheckResult r = gradcheck([](Inputs in) { return square(in[0]); }, {x, unused});
  EXPECT_TRUE(r) << r.where;
  EXPECT_EQ(r.checked, 3);
}

TEST(Gradcheck, NaNNeverPasses) {
  struct Nan final : Function {
    std::string_view name() const override { return "nan"; }
    Tensor forward(const Tensor& x) { return clone(x); }
    std::vector<Tensor> backward(const Tensor& dy) override {
      Tensor dx = clone(dy);
      dx.mutable_data<double>()[0] = std::numeric_limits<double>::quiet_NaN();
      return {dx};
    }
  };
  const GradcheckResult r = gradcheck([](Inputs in) { return apply(Nan{}, in[0]); }, {vec({1, 2, 3})});
  EXPECT_FALSE(r);
  EXPECT_TRUE(std::isnan(r.worst));
  EXPECT_EQ(r.where.substr(0, 57), "input 0 [3], element 0 of its storage: analytic nan, nume");
}

TEST(Gradcheck, PutsTheInputsBack) {
  const Tensor x = randn({9}, {1, 0}, DType::f64);
  const Numbers before = x.to_vector();
  EXPECT_TRUE(gradcheck([](Inputs in) { return exp(in[0]); }, {x}));
  EXPECT_EQ(x.to_vector(), before);
  int calls = 0;
  EXPECT_EQ(error_of([&] {
              gradcheck(
                  [&](Inputs in) {
                    check(++calls < 5, "fn: enough");
                    return exp(in[0]);
                  },
                  {x});
            }),
            "usage: fn: enough");
  EXPECT_EQ(x.to_vector(), before);
  EXPECT_EQ(Tape::current(), nullptr);
}

TEST(Gradcheck, MayRunWhileATapeListens) {
  const Tensor x = vec({0.5});
  Tape tape;
  tape.watch(x);
  EXPECT_TRUE(gradcheck([](Inputs in) { return exp(in[0]); }, {x}));
  EXPECT_EQ(tape.size(), 0u);
  EXPECT_EQ(Tape::current(), &tape);
}

TEST(Gradcheck, RefusesWhatItCannotJudge) {
  const auto fn = [](Inputs in) { return exp(in[0]); };
  EXPECT_EQ(error_of([&] { gradcheck(fn, {vec({1}, DType::f32)}); }),
            "usage: gradcheck: inputs must be f64, got f32; convert with to(x, DType::f64)");
  EXPECT_EQ(error_of([&] {
              gradcheck(fn, {vec({1}), arange(3)});
            }),
            "usage: gradcheck: inputs must be f64, got i64; convert with to(x, DType::f64)");
  EXPECT_EQ(error_of([&] { gradcheck(fn, {Tensor{}}); }), "usage: gradcheck: undefined input");
  EXPECT_EQ(error_of([&] { gradcheck(fn, {vec({1})}, {.step = 0}); }), "usage: gradcheck: step 0 must be above 0");
  Generator g(1);
  EXPECT_EQ(error_of([&] { gradcheck([&](Inputs in) { return drop(in[0], g); }, {vec(Numbers(20, 1.0))}); }),
            "usage: gradcheck: fn gave two results for the same inputs; draw its random numbers from one key");
}

TEST(Gradcheck, WithNothingToMoveChecksNothing) {
  const GradcheckResult r = gradcheck([](Inputs in) { return square(in[0]); }, {vec({})});
  EXPECT_TRUE(r);
  EXPECT_EQ(r.checked, 0);
  EXPECT_TRUE(r.where.empty());
}

}  // namespace
}  // namespace hilt
