// softmax, log_softmax and logsumexp by formula, at large logits, infinities and NaN.
#include <limits>
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
using Unary = Tensor (*)(const Tensor&);

template <class F> std::vector<OpCase> along_last(const char* name, Unary op, F formula) {
  const auto call = [=](std::span<const Tensor> in) { return op(in[0]); };
  const auto reference = [=]<class T>(const Arrays<T>& in) { return formula(in[0]); };
  std::vector<OpCase> cases;
  for (const Shape& shape :
       {Shape{5}, {1}, {2, 3}, {3, 1}, {2, 2, 4}, {1, 1, 7}, {2, 1, 3, 2}, {0, 3}, {2, 1, 2, 1, 1, 3}, {2, 33}})
    cases.push_back({name, {real(shape)}, call, reference, {.rows = shape.rank() > 1 && shape.numel() > 0}});
  cases.push_back({text(name, " far apart"), {between(-30, 30, {3, 6})}, call, reference, {.rows = true}});
  cases.push_back({text(name, " far from 0"), {between(90, 100, {3, 6})}, call, reference, {.rows = true}});
  for (const Shape& shape : {Shape{617, 487}, {4, 75011}, {75011, 4}})
    cases.push_back({name, {real(shape)}, call, reference, {.rows = true, .large = true}});
  return cases;
}
const Op kAlongLast[] = {
    {"softmax",
     [] { return along_last("softmax", softmax, []<class T>(const Array<T>& x) { return naive::softmax(x); }); }},
    {"log_softmax",
     [] {
       return along_last("log_softmax", log_softmax, []<class T>(const Array<T>& x) { return naive::log_softmax(x); });
     }},
    {"logsumexp",
     [] { return along_last("logsumexp", logsumexp, []<class T>(const Array<T>& x) { return naive::logsumexp(x); }); }},
};
INSTANTIATE_TEST_SUITE_P(Softmax, OpJudges, testing::ValuesIn(kAlongLast), op_name);

TEST(Softmax, LargeLogitsDoNotOverflow) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor x = from_values(std::vector<double>{1e4, 1e4, -1e4, 0, -1e4, -1e4}, {2, 3}, dtype);
    EXPECT_EQ(softmax(x).to_vector(), (std::vector<double>{0.5, 0.5, 0, 1, 0, 0})) << dtype;
    EXPECT_EQ(logsumexp(x).to_vector()[1], 0) << dtype;
    EXPECT_EQ(log_softmax(x).to_vector()[3], 0) << dtype;
    for (Unary op : {softmax, log_softmax})
      for (double dx :
           play([=](auto in) { return op(in[0]); }, {{x}}, random(real({2, 3}), 1, dtype)).dx[0].to_vector())
        EXPECT_TRUE(std::isfinite(dx)) << dtype;
  }
}

TEST(Softmax, RowsSumToOneAndMinusInfinityGetsNothing) {
  for (DType dtype : {DType::f64, DType::f32}) {
    Tensor x = random(between(-5, 5, {7, 129}), 1, dtype);
    std::vector<double> v = x.to_vector();
    for (std::size_t r = 0; r < 7; ++r)
      for (std::size_t i = 0; i < 18 * r; ++i) v[r * 129 + i] = -kInf;
    x = from_values(v, x.shape(), dtype);
    const Played p = play([](auto in) { return softmax(in[0]); }, {{x}}, random(real({7, 129}), 2, dtype));
    const Tensor logs = log_softmax(x);
    for (std::size_t r = 0; r < 7; ++r) {
      double total = 0, slopes = 0;
      for (std::size_t i = 0; i < 129; ++i) {
        const double y = p.y.to_vector()[r * 129 + i], dx = p.dx[0].to_vector()[r * 129 + i];
        total += y, slopes += dx;
        if (i < 18 * r) {
          EXPECT_EQ(y, 0);
          EXPECT_EQ(dx, 0);
          EXPECT_EQ(logs.to_vector()[r * 129 + i], -kInf);
        }
      }
      EXPECT_NEAR(total, 1, dtype == DType::f64 ? 1e-14 : 1e-6);
      EXPECT_NEAR(slopes, 0, dtype == DType::f64 ? 1e-14 : 1e-6);  // a constant added to a row changes nothing
    }
  }
}

TEST(Softmax, InfinitiesAndNanStayInTheirRow) {
  // -inf - -inf and inf - inf are NaN, and so is a softmax of them; log of a sum of zeros is -inf.
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (std::size_t n : {3u, 40u}) {
      const auto rows = [&](double special, double rest) {
        std::vector<double> v(3 * n, 0.5);
        std::fill(v.begin() + static_cast<std::ptrdiff_t>(n), v.begin() + static_cast<std::ptrdiff_t>(2 * n), rest);
        v[n] = special;
        return from_values(v, {3, static_cast<Index>(n)}, dtype);
      };
      const auto expect_row = [&](Unary op, const Tensor& x, double expected) {
        const std::vector<double> y = op(x).to_vector();
        const std::size_t width = y.size() / 3;
        const std::vector<double> clean = op(rows(0.5, 0.5)).to_vector();
        for (std::size_t i = 0; i < y.size(); ++i) {
          if (i / width != 1) EXPECT_EQ(y[i], clean[i]);
          else
            EXPECT_TRUE(std::isnan(expected) ? std::isnan(y[i]) : y[i] == expected)
                << dtype << " n " << n << " element " << i << " is " << y[i];
        }
      };
      for (Unary op : {softmax, log_softmax}) {
        expect_row(op, rows(kNan, 1), kNan);
        expect_row(op, rows(-kInf, -kInf), kNan);
      }
      EXPECT_TRUE(std::isnan(softmax(rows(kInf, 1)).to_vector()[n]));
      expect_row(logsumexp, rows(kNan, 1), kNan);
      expect_row(logsumexp, rows(-kInf, -kInf), -kInf);
      expect_row(logsumexp, rows(kInf, 1), kInf);
    }
  }
}

TEST(Softmax, OfNothing) {
  for (Unary op : {softmax, log_softmax}) EXPECT_EQ(op(empty({3, 0})).shape(), (Shape{3, 0}));
  EXPECT_EQ(logsumexp(empty({2, 0})).to_vector(), (std::vector<double>{-kInf, -kInf}));
}

TEST(Softmax, Refusals) {
  for (const auto& [name, op] :
       {std::pair<const char*, Unary>{"softmax", softmax}, {"log_softmax", log_softmax}, {"logsumexp", logsumexp}}) {
    EXPECT_TRUE(refuses([&] { op(ones({})); }, name, {"[]"}));
    EXPECT_TRUE(refuses([&] { op(ones({2}, DType::i32)); }, name, {"i32"}));
  }
}

}  // namespace
}  // namespace hilt
