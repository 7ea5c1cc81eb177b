// Every elementwise op by formula, and by hand at infinities, NaN, zeros of both signs, subnormals,
// kinks and ties.
#include <limits>
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
const Shape kLarge{300007};  // several pieces for every kernel, and no multiple of a vector

// ---- one input ----------------------------------------------------------------------------------
using Unary = Tensor (*)(const Tensor&);

/// Cases of an op whose elements are `scalar` of x's: small shapes of every rank, a wide range, a
/// large size.
template <class F>
std::vector<OpCase> unary(const char* name, Unary op, F scalar, Input like, double widest_low, double widest_high) {
  const auto reference = [=]<class T>(const Arrays<T>& in) { return naive::map(in[0], scalar); };
  const auto call = [=](std::span<const Tensor> in) { return op(in[0]); };
  std::vector<OpCase> cases;
  for (const Shape& shape :
       {Shape{}, {1}, {7}, {0}, {2, 3}, {3, 0, 2}, {2, 3, 4}, {1, 5, 1}, {2, 1, 3, 2}, {2, 1, 2, 1, 3, 2}}) {
    like.shape = shape;
    cases.push_back({name, {like}, call, reference, {.rows = shape.numel() > 0 && shape.rank() > 0}});
  }
  cases.push_back({text(name, " wide"), {between(widest_low, widest_high, {101})}, call, reference, {.rows = true}});
  like.shape = kLarge;
  cases.push_back({name, {like}, call, reference, {.rows = true, .large = true}});
  return cases;
}

const Op kUnary[] = {
    {"neg",
     [] {
       return unary(
           "neg", neg, []<class T>(const T& x) { return -x; }, real({}), -1e4, 1e4);
     }},
    {"exp",
     [] {
       return unary(
           "exp", exp, []<class T>(const T& x) { return exp(x); }, real({}), -20, 10);
     }},
    {"log",
     [] {
       return unary(
           "log", log, []<class T>(const T& x) { return log(x); }, between(0.2, 3, {}), 0.01, 100);
     }},
    {"sqrt",
     [] {
       return unary(
           "sqrt", sqrt, []<class T>(const T& x) { return sqrt(x); }, between(0.2, 3, {}), 0.01, 1e4);
     }},
    {"rsqrt",
     [] {
       return unary(
           "rsqrt", rsqrt, []<class T>(const T& x) { return T(1) / sqrt(x); }, between(0.2, 3, {}), 0.05, 1e4);
     }},
    {"sin",
     [] {
       return unary(
           "sin", sin, []<class T>(const T& x) { return sin(x); }, real({}), -30, 30);
     }},
    {"cos",
     [] {
       return unary(
           "cos", cos, []<class T>(const T& x) { return cos(x); }, real({}), -30, 30);
     }},
    {"constant_minus",
     [] {
       return unary(
           "1.1 - x", [](const Tensor& x) { return 1.1 - x; }, []<class T>(const T& x) { return T(1.1) - x; }, real({}),
           -100, 100);
     }},
    {"constant_over",
     [] {
       return unary(
           "1.1 / x", [](const Tensor& x) { return 1.1 / x; }, []<class T>(const T& x) { return T(1.1) / x; },
           between(0.4, 3, {}), 0.05, 100);
     }},
    {"tanh",
     [] {
       return unary(
           "tanh", tanh, []<class T>(const T& x) { return tanh(x); }, real({}), -12, 12);
     }},
    {"sigmoid",
     [] {
       return unary(
           "sigmoid", sigmoid, []<class T>(const T& x) { return sigmoid(x); }, real({}), -30, 30);
     }},
    {"relu",
     [] {
       return unary(
           "relu", relu, []<class T>(const T& x) { return x > T(0) ? x : T(0); }, lattice(0.125, {}), 1, 100);
     }},
    {"gelu",
     [] {
       return unary(
           "gelu", gelu, []<class T>(const T& x) { return naive::gelu(x); }, real({}), -9, 9);
     }},
    {"gelu_tanh",
     [] {
       return unary(
           "gelu_tanh", gelu_tanh, []<class T>(const T& x) { return naive::gelu_tanh(x); }, real({}), -9, 9);
     }},
    {"silu",
     [] {
       return unary(
           "silu", silu, []<class T>(const T& x) { return x * sigmoid(x); }, real({}), -30, 30);
     }},
    {"square",
     [] {
       return unary(
           "square", square, []<class T>(const T& x) { return x * x; }, real({}), -100, 100);
     }},
    {"abs",
     [] {
       return unary(
           "abs", abs, []<class T>(const T& x) { return abs(x); }, lattice(0.125, {}), -100, -1);
     }},
    {"clamp",
     [] {
       return unary(
           "clamp(-0.625, 0.875)", [](const Tensor& x) { return clamp(x, -0.625, 0.875); },
           []<class T>(const T& x) { return x < T(-0.625)  ? T(-0.625)
                                            : x > T(0.875) ? T(0.875)
                                                           : x; }, lattice(0, {}),
           1, 100);
     }},
    {"log1p",
     [] {
       return unary(
           "log1p", log1p, []<class T>(const T& x) { return log(T(1) + x); }, between(-0.7, 2, {}), -0.9, 100);
     }},
    {"expm1",
     [] {
       return unary(
           "expm1", expm1, []<class T>(const T& x) { return exp(x) - T(1); }, real({}), -20, 10);
     }},
    {"erf",
     [] {
       return unary(
           "erf", erf, []<class T>(const T& x) { return erf(x); }, real({}), -4, 4);
     }},
    {"softplus",
     [] {
       return unary(
           "softplus", softplus, []<class T>(const T& x) { return log(T(1) + exp(x)); }, real({}), -12, 30);
     }},
    {"add_constant",
     [] {
       return unary(
           "x + 0.75", [](const Tensor& x) { return add(x, 0.75); }, []<class T>(const T& x) { return x + T(0.75); },
           real({}), -100, 100);
     }},
    {"mul_constant",
     [] {
       return unary(
           "x * 1.1", [](const Tensor& x) { return mul(x, 1.1); }, []<class T>(const T& x) { return x * T(1.1); },
           real({}), -100, 100);
     }},
    {"pow_constant",
     [] {
       std::vector<OpCase> cases;
       const auto power = [&]<int kTenths>(std::integral_constant<int, kTenths>, const Input& like, double low,
                                           double high) {
         constexpr double c = kTenths / 10.0;
         static const std::string name = text("x^", c);
         for (OpCase& one : unary(
                  name.c_str(), [](const Tensor& x) { return pow(x, c); },
                  []<class T>(const T& x) { return pow(x, T(c)); }, like, low, high))
           cases.push_back(std::move(one));
       };
       power(std::integral_constant<int, 0>(), real({}), -5, 5);
       power(std::integral_constant<int, 10>(), real({}), -5, 5);
       power(std::integral_constant<int, 20>(), real({}), -5, 5);
       power(std::integral_constant<int, 30>(), real({}), -5, 5);
       power(std::integral_constant<int, 5>(), between(0.3, 3, {}), 0.1, 50);
       power(std::integral_constant<int, -10>(), between(0.5, 3, {}), -5, -0.3);
       power(std::integral_constant<int, -5>(), between(0.3, 3, {}), 0.1, 50);
       power(std::integral_constant<int, 27>(), between(0.3, 3, {}), 0.1, 9);
       return cases;
     }},
};
INSTANTIATE_TEST_SUITE_P(Elementwise, OpJudges, testing::ValuesIn(kUnary), op_name);

// ---- two inputs ---------------------------------------------------------------------------------
template <class F> std::vector<OpCase> binary(const char* name, Composite op, F scalar, Input a, Input b) {
  const auto reference = [=]<class T>(const Arrays<T>& in) { return naive::zip(in[0], in[1], scalar); };
  const std::pair<Shape, Shape> shapes[] = {{{}, {}},
                                            {{3}, {}},
                                            {{}, {2, 2}},
                                            {{5}, {5}},
                                            {{2, 3}, {3}},
                                            {{2, 1}, {1, 3}},
                                            {{2, 3}, {2, 3}},
                                            {{3, 1, 2}, {2, 1}},
                                            {{2, 3, 2}, {1, 3, 1}},
                                            {{1}, {1, 1, 1}},
                                            {{0}, {1}},
                                            {{2, 0, 3}, {3}},
                                            {{2, 1, 2, 1, 2, 1}, {1, 2, 1, 2, 1, 2}},
                                            {{2, 3, 2}, {2, 3, 2}}};
  std::vector<OpCase> cases;
  for (const auto& [of_a, of_b] : shapes) {
    a.shape = of_a, b.shape = of_b;
    cases.push_back({name, {a, b}, op, reference, {.rows = of_a == of_b && of_a.rank() > 0}});
  }
  const std::pair<Shape, Shape> large[] = {{kLarge, kLarge}, {{617, 487}, {487}}, {{617, 1}, {1, 487}}};
  for (const auto& [of_a, of_b] : large) {
    a.shape = of_a, b.shape = of_b;
    cases.push_back({name, {a, b}, op, reference, {.rows = of_b.rank() == 1, .large = true}});
  }
  return cases;
}

const Op kBinary[] = {
    {"add",
     [] {
       return binary(
           "add", [](auto in) { return add(in[0], in[1]); }, []<class T>(const T& a, const T& b) { return a + b; },
           real({}), real({}));
     }},
    {"sub",
     [] {
       return binary(
           "sub", [](auto in) { return sub(in[0], in[1]); }, []<class T>(const T& a, const T& b) { return a - b; },
           real({}), real({}));
     }},
    {"mul",
     [] {
       return binary(
           "mul", [](auto in) { return mul(in[0], in[1]); }, []<class T>(const T& a, const T& b) { return a * b; },
           real({}), real({}));
     }},
    {"div",
     [] {
       return binary(
           "div", [](auto in) { return div(in[0], in[1]); }, []<class T>(const T& a, const T& b) { return a / b; },
           real({}), between(0.4, 3, {}));
     }},
    {"maximum",
     [] {
       return binary(
           "maximum", [](auto in) { return maximum(in[0], in[1]); },
           []<class T>(const T& a, const T& b) { return a > b ? a : b; }, lattice(0, {}), lattice(0.125, {}));
     }},
    {"minimum",
     [] {
       return binary(
           "minimum", [](auto in) { return minimum(in[0], in[1]); },
           []<class T>(const T& a, const T& b) { return a < b ? a : b; }, lattice(0, {}), lattice(0.125, {}));
     }},
    {"pow",
     [] {
       return binary(
           "pow", [](auto in) { return pow(in[0], in[1]); }, []<class T>(const T& a, const T& b) { return pow(a, b); },
           between(0.4, 2.5, {}), real({}));
     }},
};
INSTANTIATE_TEST_SUITE_P(ElementwisePairs, OpJudges, testing::ValuesIn(kBinary), op_name);

std::vector<OpCase> where_cases() {
  std::vector<OpCase> cases;
  const std::array<Shape, 3> shapes[] = {{Shape{}, {}, {}},
                                         {Shape{5}, {5}, {5}},
                                         {Shape{2, 1}, {3}, {2, 3}},
                                         {Shape{3}, {2, 3}, {}},
                                         {Shape{2, 3, 2}, {2, 3, 2}, {1, 2}},
                                         {Shape{0}, {1}, {0}}};
  const auto add_case = [&](const std::array<Shape, 3>& s, Traits traits) {
    const Tensor condition = randint(0, 2, s[0], {9, 0}, DType::u8);
    Array<double> chosen(s[0]);
    chosen.values = condition.to_vector();
    cases.push_back(
        {text("where ", s[0]),
         {real(s[1]), real(s[2])},
         [=](auto in) { return where(moved(condition, in[0].device()), in[0], in[1]); },
         [=]<class T>(const Arrays<T>& in) {
           const auto take = [&](const Array<T>& x, double when) {  // x where the condition is `when`, else 0
             const Array<T> wide = naive::zip(x, Array<T>(s[0]), [](const T& v, const T&) { return v; });
             Array<T> mask(s[0]);
             for (Index i = 0; i < mask.size(); ++i) mask[i] = T(chosen[i] == when);
             return naive::zip(wide, mask, [](const T& v, const T& m) { return value_of(m) == 1 ? v : T(0); });
           };
           return naive::zip(take(in[0], 1), take(in[1], 0), [](const T& a, const T& b) { return a + b; });
         },
         traits});
  };
  for (const auto& s : shapes) add_case(s, {});
  add_case({kLarge, kLarge, kLarge}, {.large = true});
  return cases;
}
const Op kWhere[] = {{"where", where_cases}};
INSTANTIATE_TEST_SUITE_P(ElementwiseChoice, OpJudges, testing::ValuesIn(kWhere), op_name);

// ---- infinities, NaN, kinks ---------------------------------------------------------------------
bool same_number(double a, double b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

struct At {
  double x, expected;
};
struct Special {
  const char* name;
  Unary op;
  std::vector<At> values;
};

TEST(Elementwise, InfinitiesAndNanPropagateAtEveryPosition) {
  const Special table[] = {
      {"neg", neg, {{kInf, -kInf}, {-kInf, kInf}}},
      {"exp", exp, {{kInf, kInf}, {-kInf, 0}, {1000, kInf}, {-1000, 0}, {0, 1}, {-0.0, 1}}},
      {"log", log, {{0, -kInf}, {-0.0, -kInf}, {-1, kNan}, {-kInf, kNan}, {kInf, kInf}, {1, 0}}},
      {"sqrt", sqrt, {{-1, kNan}, {-kInf, kNan}, {kInf, kInf}, {0, 0}}},
      {"rsqrt", rsqrt, {{0, kInf}, {kInf, 0}, {-1, kNan}}},
      {"tanh", tanh, {{kInf, 1}, {-kInf, -1}, {100, 1}, {-100, -1}, {0, 0}}},
      {"sin", sin, {{kInf, kNan}, {-kInf, kNan}, {0, 0}}},
      {"cos", cos, {{kInf, kNan}, {-kInf, kNan}, {0, 1}}},
      {"floor", floor, {{kInf, kInf}, {-kInf, -kInf}, {1.5, 1}, {-1.5, -2}, {-3, -3}, {0.25, 0}}},
      {"1 / x", [](const Tensor& x) { return 1.0 / x; }, {{0, kInf}, {-0.0, -kInf}, {kInf, 0}, {4, 0.25}}},
      {"sigmoid", sigmoid, {{kInf, 1}, {-kInf, 0}, {1000, 1}, {-1000, 0}, {0, 0.5}}},
      {"log1p", log1p, {{-1, -kInf}, {-2, kNan}, {-kInf, kNan}, {kInf, kInf}, {0, 0}}},
      {"expm1", expm1, {{kInf, kInf}, {-kInf, -1}, {1000, kInf}, {-1000, -1}, {0, 0}}},
      {"erf", erf, {{kInf, 1}, {-kInf, -1}, {100, 1}, {-100, -1}, {0, 0}}},
      {"softplus", softplus, {{kInf, kInf}, {1000, 1000}, {-kInf, 0}, {-1000, 0}}},
      {"relu", relu, {{kInf, kInf}, {-kInf, 0}, {-0.0, 0}}},
      {"gelu", gelu, {{kInf, kInf}, {100, 100}, {-100, 0}, {0, 0}}},
      {"gelu_tanh", gelu_tanh, {{kInf, kInf}, {8192, 8192}, {-8192, 0}, {0, 0}}},
      {"silu", silu, {{kInf, kInf}, {1000, 1000}, {-1000, 0}, {0, 0}}},
      {"square", square, {{kInf, kInf}, {-kInf, kInf}, {0, 0}}},
      {"abs", abs, {{kInf, kInf}, {-kInf, kInf}, {-0.0, 0}}},
      {"clamp", [](const Tensor& x) { return clamp(x, -1, 2); }, {{kInf, 2}, {-kInf, -1}}},
      {"x + 1", [](const Tensor& x) { return add(x, 1); }, {{kInf, kInf}, {-kInf, -kInf}}},
      {"x * 0", [](const Tensor& x) { return mul(x, 0); }, {{kInf, kNan}, {-kInf, kNan}, {3, 0}}},
      {"x^2", [](const Tensor& x) { return pow(x, 2); }, {{-kInf, kInf}, {-3, 9}, {0, 0}}},
      {"x^3", [](const Tensor& x) { return pow(x, 3); }, {{-kInf, -kInf}, {-8, -512}}},
      {"x^-1", [](const Tensor& x) { return pow(x, -1); }, {{kInf, 0}, {0, kInf}, {-4, -0.25}}},
      {"x^0.5", [](const Tensor& x) { return pow(x, 0.5); }, {{kInf, kInf}, {-8, kNan}, {0, 0}}},
  };
  for (const Special& s : table) {
    std::vector<At> values = s.values;
    values.push_back({kNan, kNan});
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      const Index n = dtype == DType::f32 ? 67 : 5;  // a body and a tail of every vector width
      const Tensor plain = random(between(0.3, 1.9, {n}), 1, dtype);
      const std::vector<double> before = s.op(plain).to_vector();
      for (const At& at : values)
        for (Index i = 0; i < n; ++i) {
          std::vector<double> in = plain.to_vector(), expected = before;
          in[static_cast<std::size_t>(i)] = at.x;
          expected[static_cast<std::size_t>(i)] = at.expected;
          const std::vector<double> got = s.op(from_values(in, {n}, dtype)).to_vector();
          for (std::size_t j = 0; j < got.size(); ++j)
            ASSERT_TRUE(same_number(got[j], expected[j]))
                << s.name << ' ' << dtype << " with " << at.x << " at " << i << ": element " << j << " is " << got[j]
                << ", expected " << expected[j];
        }
    }
  }
}

TEST(Elementwise, PairsFollowIeee) {
  struct Pair {
    const char* name;
    Tensor (*op)(const Tensor&, const Tensor&);
    double a, b, expected;
  };
  const Pair table[] = {{"add", add, kInf, -kInf, kNan},
                        {"add", add, kInf, 1, kInf},
                        {"sub", sub, kInf, kInf, kNan},
                        {"mul", mul, 0, kInf, kNan},
                        {"mul", mul, -2, kInf, -kInf},
                        {"div", div, 1, 0, kInf},
                        {"div", div, -1, 0, -kInf},
                        {"div", div, 0, 0, kNan},
                        {"div", div, 1, kInf, 0},
                        {"maximum", maximum, kNan, 1, kNan},
                        {"maximum", maximum, 1, kNan, kNan},
                        {"maximum", maximum, -kInf, -5, -5},
                        {"maximum", maximum, kInf, 3, kInf},
                        {"minimum", minimum, kNan, 1, kNan},
                        {"minimum", minimum, 1, kNan, kNan},
                        {"minimum", minimum, -kInf, -5, -kInf},
                        {"minimum", minimum, kInf, 3, 3},
                        {"pow", pow, 0, 0, 1},
                        {"pow", pow, 0, 2, 0},
                        {"pow", pow, 0, -1, kInf},
                        {"pow", pow, 2, kInf, kInf},
                        {"pow", pow, -2, 3, -8},
                        {"pow", pow, -2, 0.5, kNan},
                        {"pow", pow, kNan, 2, kNan},
                        {"pow", pow, 2, kNan, kNan}};
  for (const Pair& p : table)
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
      for (Index n : {1, 37}) {
        const Tensor y = p.op(full({n}, p.a, dtype), full({n}, p.b, dtype));
        for (double got : y.to_vector())
          ASSERT_TRUE(same_number(got, p.expected))
              << p.name << '(' << p.a << ", " << p.b << ") " << dtype << " = " << got;
      }
}

TEST(Elementwise, SubnormalsAndTheEndsOfTheRange) {
  // The smallest exponents are where hand-written approximations flush or overflow too soon.
  for (double x : {-87.3, -88.0, -90.0, -95.0, -100.0, -103.0, -103.9, 88.0, 88.7, 88.72, 88.73}) {
    const double got = exp(full({19}, x, DType::f32)).to_vector()[17];
    const double expected = static_cast<double>(std::exp(static_cast<float>(x)));
    if (std::isinf(expected)) EXPECT_EQ(got, expected) << x;
    else EXPECT_NEAR(got, expected, expected * 0x1p-22 + 0x1p-148) << x;
  }
  for (double x : {1e-45, 1e-40, 1.1754944e-38, 3e38}) {
    const double got = log(full({19}, x, DType::f32)).to_vector()[17];
    EXPECT_NEAR(got, std::log(static_cast<double>(static_cast<float>(x))), 1e-5) << x;
    const double root = sqrt(full({19}, x, DType::f32)).to_vector()[17];
    EXPECT_NEAR(root / static_cast<double>(std::sqrt(static_cast<float>(x))), 1, 1e-6) << x;
  }
}

TEST(Elementwise, TinyAndFarOutKeepTheirDigits) {
  // As formulas read, 1 + x and e^x - 1 would round small ones away, and e^x would overflow.
  struct Exact {
    const char* name;
    Unary op;
    double (*exact)(double), (*slope)(double);
  };
  const auto logistic = [](double x) { return std::log1p(std::exp(-std::abs(x))) + (x > 0 ? x : 0); };
  const Exact table[] = {
      {"log1p", log1p, [](double x) { return std::log1p(x); }, [](double x) { return 1 / (1 + x); }},
      {"expm1", expm1, [](double x) { return std::expm1(x); }, [](double x) { return std::exp(x); }},
      {"erf", erf, [](double x) { return std::erf(x); },
       [](double x) { return 2 * std::numbers::inv_sqrtpi * std::exp(-x * x); }},
      {"softplus", softplus, logistic, [](double x) { return 1 / (1 + std::exp(-x)); }},
  };
  for (const Exact& e : table)
    for (double x : {1e-30, 1e-20, 3e-9, 1e-5, 0.01, 2.0, 9.0, 40.0, 85.0})
      for (double at : {x, e.op == log1p ? -x / 90 : -x})
        for (DType dtype : {DType::f64, DType::f32}) {
          const Tensor in = full({19}, at, dtype);
          const Played p = play([&](auto t) { return e.op(t[0]); }, {{in}}, ones({19}, dtype));
          const double given = in.to_vector()[7], unit = dtype == DType::f64 ? 0x1p-52 : 0x1p-23;
          const double y = e.exact(given), dx = e.slope(given);
          EXPECT_NEAR(p.y.to_vector()[17], y, 4 * unit * std::abs(y) + 0x1p-140) << e.name << ' ' << at << ' ' << dtype;
          EXPECT_NEAR(p.dx[0].to_vector()[17], dx, (8 + std::abs(at * at)) * unit * dx + 0x1p-140)
              << e.name << " slope " << at << ' ' << dtype;
        }
}

TEST(Elementwise, SignOfZero) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    EXPECT_TRUE(std::signbit(neg(zeros({3}, dtype)).to_vector()[1])) << dtype;
    EXPECT_FALSE(std::signbit(abs(full({3}, -0.0, dtype)).to_vector()[1])) << dtype;
    EXPECT_TRUE(std::signbit(sqrt(full({3}, -0.0, dtype)).to_vector()[1])) << dtype;
    EXPECT_TRUE(std::signbit(mul(full({3}, -0.0, dtype), 2).to_vector()[1])) << dtype;
    EXPECT_TRUE(std::signbit(mul(full({3}, -2, dtype), zeros({3}, dtype)).to_vector()[1])) << dtype;
  }
}

TEST(Elementwise, SlopesAtKinksAndFarOut) {
  const Special table[] = {
      {"relu", relu, {{0, 0}, {-0.0, 0}, {1e-30, 1}, {-1e-30, 0}}},
      {"abs", abs, {{0, 0}, {-0.0, 0}, {1e-30, 1}, {-1e-30, -1}}},
      {"clamp",
       [](const Tensor& x) { return clamp(x, -1, 2); },
       {{-1, 1}, {2, 1}, {0, 1}, {-1.25, 0}, {2.25, 0}, {kInf, 0}, {-kInf, 0}}},
      {"tanh", tanh, {{1000, 0}, {-1000, 0}, {0, 1}, {kInf, 0}}},
      {"sigmoid", sigmoid, {{1000, 0}, {-1000, 0}, {0, 0.25}}},
      {"softplus", softplus, {{1000, 1}, {-1000, 0}, {0, 0.5}, {kInf, 1}, {-kInf, 0}}},
      {"log1p", log1p, {{0, 1}, {-0.5, 2}, {-1, kInf}, {kInf, 0}}},
      {"expm1", expm1, {{0, 1}, {-1000, 0}, {-kInf, 0}}},
      {"erf", erf, {{50, 0}, {-50, 0}, {kInf, 0}}},
      {"silu", silu, {{1000, 1}, {-1000, 0}, {0, 0.5}}},
      {"gelu", gelu, {{50, 1}, {-50, 0}, {0, 0.5}}},
      {"gelu_tanh", gelu_tanh, {{1e4, 1}, {-1e4, 0}, {0, 0.5}}},
      {"exp", exp, {{-1000, 0}, {0, 1}}},
      {"log", log, {{0, kInf}}},
      {"sqrt", sqrt, {{0, kInf}}},
      {"square", square, {{0, 0}}},
      {"x^2", [](const Tensor& x) { return pow(x, 2); }, {{0, 0}, {-3, -6}}},
      {"x^1", [](const Tensor& x) { return pow(x, 1); }, {{0, 1}, {-3, 1}}},
      {"x^0", [](const Tensor& x) { return pow(x, 0); }, {{0, 0}, {-3, 0}}},
      {"x^3", [](const Tensor& x) { return pow(x, 3); }, {{0, 0}, {-2, 12}}},
  };
  for (const Special& s : table)
    for (const At& at : s.values)
      for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
        const Tensor x = full({3}, at.x, dtype);
        const Tensor dx = play([&](auto in) { return s.op(in[0]); }, {{x}}, full({3}, 1, dtype)).dx[0];
        EXPECT_TRUE(same_number(dx.to_vector()[1], at.expected))
            << s.name << " at " << at.x << ' ' << dtype << ": " << dx;
      }
  // Finite input, finite slope, however large: nothing overflows on the way.
  for (double x : {1e15, 1e20, 1e37}) {
    const Tensor dx =
        play([](auto in) { return gelu_tanh(in[0]); }, {{values({x, -x}, DType::f32)}}, full({2}, 1, DType::f32)).dx[0];
    EXPECT_EQ(dx.to_vector(), (std::vector<double>{1, 0})) << "gelu_tanh at +-" << x;
    const Tensor of_silu =
        play([](auto in) { return silu(in[0]); }, {{values({x, -x}, DType::f32)}}, full({2}, 1, DType::f32)).dx[0];
    EXPECT_EQ(of_silu.to_vector(), (std::vector<double>{1, 0})) << "silu at +-" << x;
    const Tensor of_gelu =
        play([](auto in) { return gelu(in[0]); }, {{values({x, -x}, DType::f32)}}, full({2}, 1, DType::f32)).dx[0];
    EXPECT_EQ(of_gelu.to_vector(), (std::vector<double>{1, 0})) << "gelu at +-" << x;
  }
}

TEST(Elementwise, ATieSendsHalfToEach) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const std::vector<Tensor> in{values({1, 5, 2, 0}, dtype), values({1, 3, 4, -0.0}, dtype)};
    const Played p = play([](auto x) { return maximum(x[0], x[1]); }, in, values({8, 8, 8, 8}, dtype));
    EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{4, 8, 0, 4})) << dtype;
    EXPECT_EQ(p.dx[1].to_vector(), (std::vector<double>{4, 0, 8, 4})) << dtype;
    const Played q = play([](auto x) { return minimum(x[0], x[1]); }, in, values({8, 8, 8, 8}, dtype));
    EXPECT_EQ(q.dx[0].to_vector(), (std::vector<double>{4, 0, 8, 4})) << dtype;
    EXPECT_EQ(q.dx[1].to_vector(), (std::vector<double>{4, 8, 0, 4})) << dtype;
  }
}

TEST(Elementwise, PowNeedsAPositiveBaseOnlyWhereTheExponentIsWatched) {
  const Tensor a = values({-2, 0, 3}), b = values({3, 2, 2});
  Tape tape;
  tape.watch(a);
  const Tensor y = pow(a, b);
  EXPECT_EQ(tape.backward(y, ones({3}, DType::f64))[a].to_vector(), (std::vector<double>{12, 0, 6}));
}

TEST(Elementwise, WhatWasNotChosenDoesNotLeak) {
  const Tensor condition = from_values(std::vector<std::uint8_t>{1, 0, 1, 0}, {4});
  const std::vector<Tensor> in{values({1, kNan, 3, kInf}), values({kNan, 2, kInf, 4})};
  const Played p = play([&](auto x) { return where(condition, x[0], x[1]); }, in, values({kInf, kInf, 5, 6}));
  EXPECT_EQ(p.y.to_vector(), (std::vector<double>{1, 2, 3, 4}));
  EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{kInf, 0, 5, 0}));
  EXPECT_EQ(p.dx[1].to_vector(), (std::vector<double>{0, kInf, 0, 6}));
  // Any non-zero condition counts as true.
  const Tensor high = from_values(std::vector<std::uint8_t>{2, 255}, {2});
  EXPECT_EQ(where(high, values({1, 1}), values({0, 0})).to_vector(), (std::vector<double>{1, 1}));
}

TEST(Elementwise, Comparisons) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor y = greater(values({1, 2, 3, kNan, 0}, dtype), values({2, 2, 2, 0, -0.0}, dtype));
    EXPECT_EQ(y.dtype(), DType::u8);
    EXPECT_EQ(y.to_vector(), (std::vector<double>{0, 0, 1, 0, 0})) << dtype;
    const Tensor a = values({1, 2, 3, kNan, 0}, dtype);
    EXPECT_EQ(less(a, values({2, 2, 2, 0, -0.0}, dtype)).to_vector(), (std::vector<double>{1, 0, 0, 0, 0})) << dtype;
    EXPECT_EQ(equal(a, values({2, 2, 2, kNan, -0.0}, dtype)).to_vector(), (std::vector<double>{0, 1, 0, 0, 1}));
    EXPECT_EQ(bits(greater(a, 1.5)), bits(greater(a, full({5}, 1.5, dtype))));
    EXPECT_EQ(less(a, 2).to_vector(), (std::vector<double>{1, 0, 0, 0, 1})) << dtype;
    EXPECT_EQ(equal(a, 0).to_vector(), (std::vector<double>{0, 0, 0, 0, 1})) << dtype;
  }
  const Tensor y = greater(random(real({3, 1}), 1), random(real({2}), 2));
  EXPECT_EQ(y.shape(), (Shape{3, 2}));
  Tape tape;
  const Tensor x = values({1, 2});
  tape.watch(x);
  EXPECT_FALSE(tape.knows(greater(x, values({2, 1}))));
  EXPECT_FALSE(tape.knows(floor(x)));
}

TEST(Elementwise, ComparisonsAtTiesAndNan) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor a = values({1, 2, 3, kNan, 0, kInf}, dtype), b = values({2, 2, 2, kNan, -0.0, kInf}, dtype);
    const auto is = [&](const Tensor& y, const std::vector<double>& expected) {
      EXPECT_EQ(y.dtype(), DType::u8);
      EXPECT_EQ(y.to_vector(), expected) << dtype;
    };
    is(greater_equal(a, b), {0, 1, 1, 0, 1, 1});
    is(less_equal(a, b), {1, 1, 0, 0, 1, 1});
    is(not_equal(a, b), {1, 0, 1, 1, 0, 0});
    is(a > 2, {0, 0, 1, 0, 0, 1});
    is(a >= 2, {0, 1, 1, 0, 0, 1});
    is(a < 2, {1, 0, 0, 0, 1, 0});
    is(a <= 2, {1, 1, 0, 0, 1, 0});
    is(a == 2, {0, 1, 0, 0, 0, 0});
    is(a != 2, {1, 0, 1, 1, 1, 1});
    is((a > b) | (a == b), {0, 1, 1, 0, 1, 1});
    is((a >= b) & (a <= 2), {0, 1, 0, 0, 1, 0});
    is(!(a < b), {0, 1, 1, 1, 1, 1});
    is(a & b, {1, 1, 1, 1, 0, 1});
    is(a | neg(b), {1, 1, 1, 1, 0, 1});
  }
  static_assert(!std::is_constructible_v<bool, decltype(values({1}) < values({2}))>);  // if (a < b) would ask: defined?
}

/// Integer ops beside the same in C++, on the CPU or a GPU: exact, and wrapping.
void expect_exact_integers(Device device) {
  constexpr std::int64_t kBig = (std::int64_t{1} << 53) + 1, kMost = std::numeric_limits<std::int64_t>::max();
  const auto on = [&](const auto& v, DType dtype) {
    return moved(from_values(std::vector<std::int64_t>(v), {static_cast<Index>(v.size())}, dtype), device);
  };
  using Numbers = std::vector<std::int64_t>;
  const auto is = [&](const Tensor& y, const Numbers& expected, DType dtype) {
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_EQ(y.to_vector<std::int64_t>(), expected) << dtype;
  };
  const Tensor a = on(Numbers{kBig, -kBig, kMost, -7, 0}, DType::i64), b = on(Numbers{2, 3, 1, 5, 0}, DType::i64);
  is(a + b, {kBig + 2, -kBig + 3, -kMost - 1, -2, 0}, DType::i64);
  is(a - b, {kBig - 2, -kBig - 3, kMost - 1, -12, 0}, DType::i64);
  is(a * b, {2 * kBig, -3 * kBig, kMost, -35, 0}, DType::i64);
  is(-a, {-kBig, kBig, -kMost, 7, 0}, DType::i64);
  is(a - 1, {kBig - 1, -kBig - 1, kMost - 1, -8, -1}, DType::i64);
  is(3 * b + 1, {7, 10, 4, 16, 1}, DType::i64);
  is(1 - b, {-1, -2, 0, -4, 1}, DType::i64);
  is(maximum(a, b), {kBig, 3, kMost, 5, 0}, DType::i64);
  is(minimum(a, b), {2, -kBig, 1, -7, 0}, DType::i64);
  is(a > a - 1, {1, 1, 1, 1, 1}, DType::u8);
  is(a == a + 1, {0, 0, 0, 0, 0}, DType::u8);
  is(a != b, {1, 1, 1, 1, 0}, DType::u8);
  is(a <= b, {0, 1, 0, 1, 1}, DType::u8);
  is(where(a < b, a, 9.0), {9, -kBig, 9, -7, 9}, DType::i64);
  is((a > 0) & (b > 1), {1, 0, 0, 0, 0}, DType::u8);
  const Tensor narrow = on(Numbers{250, 3, 0, 128}, DType::u8);
  is(narrow + narrow, {244, 6, 0, 0}, DType::u8);
  is(narrow - 4, {246, 255, 252, 124}, DType::u8);
  is(narrow * 2, {244, 6, 0, 0}, DType::u8);
  is(minimum(narrow, 100.0), {100, 3, 0, 100}, DType::u8);
  const Tensor word = on(Numbers{2147483647, -5, 6, 7}, DType::i32);
  is(word + 1, {-2147483647 - 1, -4, 7, 8}, DType::i32);
  is(reshape(word, {2, 2}) * slice(word, 0, 2, 4), {-6, -35, 36, 49}, DType::i32);  // broadcast, and wrapped
  is(transpose(reshape(word, {2, 2})) - expand(slice(word, 0, 1, 2), {2, 2}), {-2147483644, 11, 0, 12}, DType::i32);
  const Tensor many = to(arange(100'003, DType::i64, device), DType::i32);
  EXPECT_EQ(bits(moved(many * 2 - many, {})), bits(moved(many, {})));
}
TEST(Elementwise, IntegersAreExactOnTheGpuToo) {
  for (const Device device : {Device{}, device_named("auto")}) expect_exact_integers(device);
}

TEST(Elementwise, AConstantMustBeANumberOfTheIntegers) {
  const Tensor i64 = ones({2}, DType::i64), u8 = ones({2}, DType::u8);
  EXPECT_TRUE(refuses([&] { i64 + 0.5; }, "add", {"0.5", "i64"}));
  EXPECT_TRUE(refuses([&] { i64 / 2; }, "mul", {"0.5", "i64"}));
  EXPECT_TRUE(refuses([&] { i64 - kNan; }, "add", {"nan", "i64"}));
  EXPECT_TRUE(refuses([&] { 0x1p60 - i64; }, "sub", {"i64"}));  // where doubles are not dense, what was meant?
  EXPECT_TRUE(refuses([&] { (void)(i64 == 1.5); }, "scalar_like", {"1.5", "i64"}));
  EXPECT_TRUE(refuses([&] { (void)(i64 == kNan); }, "scalar_like", {"nan", "i64"}));
  EXPECT_TRUE(refuses([&] { (void)(u8 < -1); }, "scalar_like", {"-1", "u8"}));
  EXPECT_TRUE(refuses([&] { (void)(u8 == 256); }, "scalar_like", {"256", "u8"}));
  EXPECT_EQ((u8 + 257).to_vector(), (std::vector<double>{2, 2}));  // wraps
}

TEST(Elementwise, OperatorsAreTheOpsTheyName) {
  const Tensor a = random(between(0.5, 2, {5}), 1), b = random(between(0.5, 2, {5}), 2);
  EXPECT_EQ(bits(a + b), bits(add(a, b)));
  EXPECT_EQ(bits(a - b), bits(sub(a, b)));
  EXPECT_EQ(bits(a * b), bits(mul(a, b)));
  EXPECT_EQ(bits(a / b), bits(div(a, b)));
  EXPECT_EQ(bits(-a), bits(neg(a)));
  EXPECT_EQ(bits(a + 1.5), bits(add(a, 1.5)));
  EXPECT_EQ(bits(a - 1.5), bits(add(a, -1.5)));
  EXPECT_EQ(bits(2.5 * a), bits(mul(a, 2.5)));
  EXPECT_EQ(bits(a / 4), bits(mul(a, 0.25)));
  EXPECT_EQ(bits(1.5 + a), bits(add(a, 1.5)));
  EXPECT_EQ(bits(1 - a), bits(sub(ones({5}, DType::f64), a)));
  EXPECT_EQ(bits(1 / a), bits(div(ones({5}, DType::f64), a)));
  EXPECT_EQ(bits(maximum(a, 1.0)), bits(maximum(a, ones({5}, DType::f64))));
  EXPECT_EQ(bits(minimum(a, 1.0)), bits(minimum(a, ones({5}, DType::f64))));
  const Tensor m = greater(a, b);
  EXPECT_EQ(bits(where(m, a, 0.0)), bits(where(m, a, zeros({5}, DType::f64))));
  EXPECT_EQ(bits(where(m, 2.0, a)), bits(where(m, full({5}, 2, DType::f64), a)));
}

// ---- refusals -----------------------------------------------------------------------------------
TEST(Elementwise, RefusesTypesAndShapesThatDoNotMatch) {
  const Tensor f32 = ones({2, 3}, DType::f32), f64 = ones({2, 3}, DType::f64), i64 = ones({2, 3}, DType::i64);
  struct Named {
    const char* name;
    Tensor (*op)(const Tensor&, const Tensor&);
  };
  for (const Named& n : {Named{"add", add},
                         {"sub", sub},
                         {"mul", mul},
                         {"div", div},
                         {"maximum", maximum},
                         {"pow", pow},
                         {"minimum", minimum},
                         {"greater", greater},
                         {"less", less},
                         {"equal", equal},
                         {"greater_equal", greater_equal},
                         {"less_equal", less_equal},
                         {"not_equal", not_equal}}) {
    EXPECT_TRUE(refuses([&] { n.op(f32, f64); }, n.name, {"f32", "f64"}));
    EXPECT_TRUE(refuses(
        [&] {
          n.op(f64, ones({4, 3}, DType::f64));
        },
        n.name, {"[2, 3]", "[4, 3]", "axis -2", "2", "4"}));
    EXPECT_TRUE(refuses([&] { n.op(f64, ones({2}, DType::f64)); }, n.name, {"[2, 3]", "[2]", "axis -1"}));
    if (n.name == std::string_view("div") || n.name == std::string_view("pow")) {
      EXPECT_TRUE(refuses([&] { n.op(i64, i64); }, n.name, {"i64"}));
    }
    EXPECT_TRUE(refuses([&] { n.op(i64, ones({2, 3}, DType::i32)); }, n.name, {"i64", "i32"}));
  }
  for (const auto& [name, op] : {std::pair<const char*, Unary>{"exp", exp},
                                 {"log", log},
                                 {"log1p", log1p},
                                 {"expm1", expm1},
                                 {"erf", erf},
                                 {"softplus", softplus},
                                 {"sqrt", sqrt},
                                 {"rsqrt", rsqrt},
                                 {"sin", sin},
                                 {"cos", cos},
                                 {"floor", floor},
                                 {"tanh", tanh},
                                 {"sigmoid", sigmoid},
                                 {"relu", relu},
                                 {"gelu", gelu},
                                 {"gelu_tanh", gelu_tanh},
                                 {"silu", silu},
                                 {"square", square},
                                 {"abs", abs}})
    EXPECT_TRUE(refuses([&] { op(i64); }, name, {"i64"}));
  EXPECT_TRUE(refuses([&] { clamp(f32, 2, 1); }, "clamp", {"2", "1"}));
  EXPECT_TRUE(refuses([&] { clamp(i64, 1, 2); }, "clamp", {"i64"}));
  EXPECT_TRUE(refuses([&] { where(f32, f32, f32); }, "where", {"u8", "f32"}));
  EXPECT_TRUE(refuses([&] { where(ones({2, 3}, DType::u8), f32, f64); }, "where", {"f32", "f64"}));
  EXPECT_TRUE(refuses([&] { where(ones({4}, DType::u8), f32, f32); }, "where", {"[4]", "[2, 3]"}));
}

}  // namespace
}  // namespace hilt
