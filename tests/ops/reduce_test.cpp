// Sums, means, maxima and argmax over every subset of axes, and over ten million elements.
#include <limits>
#include "ops/ops.h"
#include "tests/support/op_cases.h"
#include "tests/support/scale.h"

namespace hilt {
namespace {
using namespace judge;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

std::string named(const char* op, const Axes& axes, bool keepdim) {
  std::string out = text(op, " over {");
  for (int a : axes) out += text(out.back() == '{' ? "" : ", ", a);
  return out + (keepdim ? "} kept" : "}");
}
bool holds(const Axes& axes, const Shape& shape, int axis) {
  return axes.empty() || std::ranges::count(axes, axis) + std::ranges::count(axes, axis - shape.rank()) > 0;
}

/// Every subset of the axes of ranks 0 to 4, kept and not; a few of rank 6, negative ones, extents
/// of 0.
template <class Call, class Formula>
std::vector<OpCase> reduction(const char* name, Call op, Formula formula, Input like, bool of_nothing) {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, const Axes& axes, Traits traits = {}) {
    for (bool keepdim : {false, true}) {
      like.shape = shape;
      traits.ties = like.spread == Input::Spread::distinct;
      traits.rows = shape.rank() > 0 && shape.numel() > 0 && !holds(axes, shape, 0);
      cases.push_back({named(name, axes, keepdim),
                       {like},
                       [=](std::span<const Tensor> in) { return op(in[0], axes, keepdim); },
                       [=]<class T>(const Arrays<T>& in) { return formula(in[0], axes, keepdim); },
                       traits});
    }
  };
  for (const Shape& shape : {Shape{}, {5}, {3, 4}, {2, 3, 2}, {2, 3, 1, 2}})
    for (int subset = 0; subset < 1 << shape.rank(); ++subset) {
      Axes axes;
      for (int a = 0; a < shape.rank(); ++a)
        if (subset >> a & 1) axes.push_back(a);
      add_case(shape, axes);
    }
  const Shape six{2, 1, 2, 3, 1, 2};
  for (const Axes& axes : {Axes{}, {0, 2, 5}, {-1}, {-6, 3}, {5, 0}, {1, 4}, {0, 1, 2, 3, 4, 5}}) add_case(six, axes);
  add_case({3, 0}, {0});
  if (of_nothing)
    for (const Axes& axes : {Axes{}, {1}}) add_case({3, 0}, axes);
  for (const Axes& axes : {Axes{}, {0}, {1}}) add_case({617, 487}, axes, {.large = true});
  add_case({7, 211, 203}, {1}, {.large = true});
  add_case({300007}, {}, {.large = true});
  add_case({3, 100003}, {1}, {.large = true});
  add_case({100003, 3}, {0}, {.large = true});
  return cases;
}

constexpr auto kSum = []<class T>(const Array<T>& x, const Axes& axes, bool keepdim) {
  return naive::sum(x, axes, keepdim);
};
constexpr auto kMean = []<class T>(const Array<T>& x, const Axes& axes, bool keepdim) {
  return naive::mean(x, axes, keepdim);
};
constexpr auto kMax = []<class T>(const Array<T>& x, const Axes& axes, bool keepdim) {
  return naive::max(x, axes, keepdim);
};
constexpr auto kMin = []<class T>(const Array<T>& x, const Axes& axes, bool keepdim) {
  return naive::min(x, axes, keepdim);
};
constexpr auto kProd = []<class T>(const Array<T>& x, const Axes& axes, bool keepdim) {
  return naive::prod(x, axes, keepdim);
};

std::vector<OpCase> var_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, const Axes& axes, bool keepdim, Index correction, Traits traits = {}) {
    traits.steps = 4;
    cases.push_back({named("var", axes, keepdim),
                     {real(shape)},
                     [=](auto in) { return var(in[0], axes, keepdim, correction); },
                     [=]<class T>(const Arrays<T>& in) {
                       return naive::var(in[0], axes, keepdim, static_cast<double>(correction));
                     },
                     traits});
  };
  for (Index correction : {0, 1})
    for (bool keepdim : {false, true}) {
      add_case({5}, {}, keepdim, correction);
      add_case({3, 4}, {0}, keepdim, correction);
      add_case({3, 4}, {-1}, keepdim, correction, {.rows = true});
      add_case({2, 3, 2, 2}, {0, 2}, keepdim, correction);
    }
  add_case({617, 487}, {1}, false, 1, {.rows = true, .large = true});
  add_case({300007}, {}, false, 1, {.large = true});
  return cases;
}

std::vector<OpCase> cumsum_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, int axis, Traits traits = {}) {
    traits.view = true;  // of one element a line
    cases.push_back(
        {text("cumsum along ", axis),
         {real(shape)},
         [=](auto in) { return cumsum(in[0], axis); },
         [=]<class T>(const Arrays<T>& in) { return naive::cumsum(in[0], axis < 0 ? axis + shape.rank() : axis); },
         traits});
  };
  add_case({7}, 0);
  add_case({3, 4}, 1, {.rows = true});
  add_case({3, 4}, 0);
  add_case({2, 3, 4}, 1);
  add_case({2, 1, 2, 1, 3, 2}, -2);
  add_case({3, 0}, 1);
  add_case({1, 5}, 0);
  add_case({617, 487}, 1, {.rows = true, .large = true});
  add_case({617, 487}, 0, {.large = true});
  return cases;
}

std::vector<OpCase> topk_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, Index k, Traits traits = {}) {
    traits.ties = true;
    cases.push_back({text("topk ", k),
                     {distinct(shape)},
                     [=](auto in) { return topk(in[0], k).values; },
                     [=]<class T>(const Arrays<T>& in) {
                       Array<T> y(shape.with(-1, k));
                       const Index n = shape[-1];
                       for (Index row = 0; k > 0 && row < y.size() / k; ++row) {
                         std::vector<T> all(&in[0][row * n], &in[0][row * n] + n);
                         std::ranges::sort(all, [](const T& a, const T& b) { return a > b; });
                         std::copy_n(all.begin(), k, &y[row * k]);
                       }
                       return y;
                     },
                     traits});
  };
  add_case({5}, 2);
  add_case({5}, 5);
  add_case({3, 4}, 1, {.rows = true});
  add_case({2, 1, 3}, 2, {.rows = true});
  add_case({2, 3, 2, 2}, 2);
  add_case({311, 211}, 7, {.rows = true, .large = true});
  return cases;
}

const Op kReductions[] = {
    {"sum", [] { return reduction("sum", sum, kSum, real({}), true); }},
    {"mean", [] { return reduction("mean", mean, kMean, real({}), false); }},
    {"max",
     [] {
       return reduction("max", static_cast<Tensor (*)(const Tensor&, const Axes&, bool)>(max), kMax, distinct({}),
                        false);
     }},
    {"min",
     [] {
       return reduction("min", static_cast<Tensor (*)(const Tensor&, const Axes&, bool)>(min), kMin, distinct({}),
                        false);
     }},
    {"prod", [] { return reduction("prod", prod, kProd, between(0.99, 1.01, {}), true); }},
    {"var", var_cases},
    {"cumsum", cumsum_cases},
    {"topk", topk_cases},
};
INSTANTIATE_TEST_SUITE_P(Reduce, OpJudges, testing::ValuesIn(kReductions), op_name);

// ---- products, running sums, the largest --------------------------------------------------------
TEST(Reduce, TheGradientOfAProductHoldsAroundZeros) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor x = values({2, 3, 4, 0, 5, 2, 0, 0, 7}, dtype);
    const Played p = play([](auto in) { return prod(reshape(in[0], {3, 3}), {1}); }, {{x}}, values({1, 2, 3}, dtype));
    EXPECT_EQ(p.y.to_vector(), (std::vector<double>{24, 0, 0})) << dtype;
    EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{12, 8, 6, 20, 0, 0, 0, 0, 0})) << dtype;
  }
  EXPECT_TRUE(std::isnan(prod(values({0, kInf})).item()));
  EXPECT_EQ(prod(values({-2, kInf})).item(), -kInf);
  EXPECT_EQ(prod(full({1000}, 1.0009765625, DType::bf16)).item(), 1);  // what bf16 has is 1
}

TEST(Reduce, VarianceFarFromZero) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Tensor x = values({256, 258, 260, 258}, dtype);
    EXPECT_EQ(var(x, {}, false, 0).item(), 2) << dtype;
    EXPECT_NEAR(var(x).item(), 8.0 / 3, 0.01) << dtype;
    EXPECT_TRUE(std::isnan(var(slice(x, 0, 0, 1)).item())) << dtype;
    EXPECT_EQ(var(slice(x, 0, 0, 1), {}, false, 0).item(), 0) << dtype;
    EXPECT_EQ(var(x, {}, false, 5).item(), kInf) << dtype;  // of fewer than none, as of none
  }
  EXPECT_TRUE(std::isnan(var(values({1, kNan})).item()));
}

TEST(Reduce, RunningSumsGoInOrderInF64) {
  const std::vector<double> got = cumsum(full({100'000}, 0.1, DType::f32)).to_vector();
  const double tenth = static_cast<double>(0.1f);
  for (std::size_t i : {0u, 9u, 999u, 99'999u})
    EXPECT_EQ(got[i], static_cast<double>(static_cast<float>(tenth * static_cast<double>(i + 1)))) << i;
  // One NaN or infinity is in all sums from there on, and in none before.
  const std::vector<double> odd = cumsum(values({1, kInf, 2, -kInf, 3})).to_vector();
  EXPECT_EQ(std::vector<double>(odd.begin(), odd.begin() + 3), (std::vector<double>{1, kInf, kInf}));
  EXPECT_TRUE(std::isnan(odd[3]) && std::isnan(odd[4]));
}

TEST(Reduce, TopkIsStableAndNanComesFirst) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor x = reshape(values({1, 3, 3, -1, -kInf, kNan, 2, kNan, -0.0, 0, kInf, 0}, dtype), {2, 6});
    const TopK top = topk(x, 4);
    EXPECT_EQ(top.indices.dtype(), DType::i64);
    EXPECT_EQ(top.indices.to_vector<Index>(), (std::vector<Index>{5, 1, 2, 0, 1, 4, 0, 2})) << dtype;
    EXPECT_EQ(bits(top.values), bits(take_along(x, -1, top.indices))) << dtype;
    EXPECT_EQ(topk(x, 0).values.shape(), (Shape{2, 0}));
    EXPECT_EQ(topk(slice(x, 1, 0, 5), 5).indices.to_vector<Index>(),
              (std::vector<Index>{1, 2, 0, 3, 4, 1, 4, 0, 2, 3}));  // -0 equals 0
  }
  EXPECT_TRUE(refuses([&] { topk(ones({2, 3}), 4); }, "topk", {"4", "[2, 3]"}));
  EXPECT_TRUE(refuses([&] { topk(ones({2, 3}), -1); }, "topk", {"-1", "[2, 3]"}));
  EXPECT_TRUE(refuses([&] { topk(ones({}), 0); }, "topk", {"[]"}));
  EXPECT_TRUE(refuses([&] { topk(ones({3}, DType::i64), 1); }, "topk", {"i64"}));
}

TEST(Reduce, NanAndInfinitiesInMinima) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    EXPECT_TRUE(std::isnan(min(values({1, kNan, -kInf}, dtype)).item())) << dtype;
    EXPECT_EQ(min(values({kInf, kInf}, dtype)).item(), kInf) << dtype;
    EXPECT_EQ(min(values({3, -kInf}, dtype)).item(), -kInf) << dtype;
    const Played p = play([](auto in) { return min(in[0]); }, {{values({2, 1, 1, 5}, dtype)}}, full({}, 6, dtype));
    EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{0, 3, 3, 0})) << dtype;
  }
}

/// Sums of integers, on the CPU or a GPU: exact beyond 2^53, as f64 is not.
void expect_exact_sums(Device device) {
  constexpr std::int64_t kBig = std::int64_t{1} << 53;
  const auto on = [&](const Tensor& x) { return moved(x, device); };
  const Tensor x =
      on(from_values({kBig, std::int64_t{1}, std::int64_t{1}, -kBig, std::int64_t{3}, std::int64_t{1}}, {2, 3}));
  using Numbers = std::vector<std::int64_t>;
  EXPECT_EQ(sum(x).to_vector<std::int64_t>(), (Numbers{6}));
  EXPECT_EQ(sum(x, {1}).to_vector<std::int64_t>(), (Numbers{kBig + 2, -kBig + 4}));
  EXPECT_EQ(sum(x, {0}).to_vector<std::int64_t>(), (Numbers{0, 4, 2}));
  EXPECT_EQ(sum(transpose(x), {0}, true).shape(), (Shape{1, 2}));
  const Tensor many = on(arange(1'000'003));
  EXPECT_EQ(sum(many).to_vector<std::int64_t>(), (Numbers{std::int64_t{1'000'003} * 1'000'002 / 2}));
  EXPECT_EQ(sum(to(many, DType::u8) > 127).to_vector<std::int64_t>(), (Numbers{3906 * 128}));  // each 256 has 128
  EXPECT_EQ(sum(on(zeros({3, 0}, DType::u8)), {1}).to_vector<std::int64_t>(), (Numbers{0, 0, 0}));
  EXPECT_EQ(sum(on(full({5}, 7, DType::i32))).dtype(), DType::i64);
}
TEST(Reduce, IntegersAddUpExactlyOnTheGpuToo) {
  for (const Device device : {Device{}, device_named("auto")}) expect_exact_sums(device);
}
TEST(Reduce, AMaskAddsUpInTwiceItsBytes) {
  const Tensor mask = ones({3'000'001}, DType::u8), columns = ones({3000, 700}, DType::u8);
  for (const auto& [x, axes] : {std::pair(mask, Axes{}), {columns, {0}}, {columns, {1}}}) {
    reset_thread_memory_stats();
    EXPECT_EQ(sum(x, axes).to_vector<Index>()[0], axes.empty() ? x.numel() : x.dim(axes[0]));
    EXPECT_LE(thread_memory_stats().peak, 2 * x.bytes()) << x.shape();
  }
}
TEST(Reduce, TopkOnTheGpuIsThatOfTheCpu) {
  for (Index n : {1, 33, 1000, 50'257})
    for (Index k : {Index{1}, std::min<Index>(n, 40), std::min<Index>(n, 1000)}) {
      const Tensor x = to(to(random(real({3, n}), 5, DType::f32) * 100.0, DType::i32), DType::f32);  // with ties
      const TopK there = topk(moved(x, device_named("auto")), k), here = topk(x, k);
      EXPECT_EQ(there.indices.to_vector<Index>(), here.indices.to_vector<Index>()) << n << ' ' << k;
      EXPECT_EQ(bits(moved(there.values, {})), bits(here.values)) << n << ' ' << k;
    }
}

// ---- special values -----------------------------------------------------------------------------
TEST(Reduce, EqualMaximaShareTheGradient) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor x = from_values(std::vector<double>{1, 3, 3, 2, 2, 2, -0.0, 0, -1}, {3, 3}, dtype);
    const Played rows = play([](auto in) { return max(in[0], {1}); }, {{x}}, values({12, 6, 8}, dtype));
    EXPECT_EQ(rows.y.to_vector(), (std::vector<double>{3, 2, 0})) << dtype;
    EXPECT_EQ(rows.dx[0].to_vector(), (std::vector<double>{0, 6, 6, 2, 2, 2, 4, 4, 0})) << dtype;
    const Played all = play([](auto in) { return max(in[0]); }, {{x}}, full({}, 6, dtype));
    EXPECT_EQ(all.dx[0].to_vector(), (std::vector<double>{0, 3, 3, 0, 0, 0, 0, 0, 0})) << dtype;
  }
  // Repeated by a stride of zero, each repetition is an element of its own.
  const Tensor wide = broadcast_to("test", values({1, 2}), {4, 2});
  const Played p = play([](auto in) { return max(in[0], {0}); }, {{wide}}, values({4, 8}));
  EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{1, 2, 1, 2, 1, 2, 1, 2}));
}

TEST(Reduce, InfinitiesAndNanPropagate) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (Index n : {2, 67})
      for (Index at : {Index{0}, n / 2, n - 1}) {
        const auto row = [&](double special, double other) {
          std::vector<double> v(static_cast<std::size_t>(n), other);
          v[static_cast<std::size_t>(at)] = special;
          return from_values(v, {n}, dtype);
        };
        for (const Tensor& y :
             {sum(row(kNan, 1)), mean(row(kNan, 1)), max(row(kNan, 1)), max(row(kNan, kInf)), sum(row(kInf, -kInf))})
          EXPECT_TRUE(std::isnan(y.item())) << dtype << " n " << n << " at " << at;
        EXPECT_EQ(sum(row(kInf, 1)).item(), kInf);
        EXPECT_EQ(mean(row(-kInf, 1)).item(), -kInf);
        EXPECT_EQ(max(row(kInf, 1)).item(), kInf);
        EXPECT_EQ(max(row(-kInf, -kInf)).item(), -kInf);
        EXPECT_EQ(max(row(-5, -kInf)).item(), -5);
      }
}

TEST(Reduce, OfNothing) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Tensor none = empty({3, 0}, dtype);
    EXPECT_EQ(sum(none).item(), 0);
    EXPECT_EQ(sum(none, {1}).to_vector(), (std::vector<double>{0, 0, 0}));
    EXPECT_EQ(sum(none, {0}).numel(), 0);
    EXPECT_TRUE(std::isnan(mean(none).item()));  // 0 / 0
    EXPECT_EQ(play([](auto in) { return sum(in[0], {1}); }, {{none}}, ones({3}, dtype)).dx[0].shape(), none.shape());
    // The largest of nothing is not a number one can store; either answer says so.
    EXPECT_TRUE(refuses([&] { max(none, {1}); }, "max", {"[3, 0]"}));
  }
}

TEST(Reduce, TenMillionAddUp) {
  const Index n = scaled<Index>(10'000'000, 1'000'000);
  const double tenth = static_cast<double>(0.1f);
  // One accumulator would be off by percents. Equal terms round the same way each time, so that
  // errors add up; of different ones most cancel.
  const double total = sum(full({n}, 0.1, DType::f32)).item(), exact = tenth * static_cast<double>(n);
  EXPECT_NEAR(total / exact, 1, 1e-5);
  EXPECT_NEAR(mean(full({n}, 0.1, DType::f32)).item() / tenth, 1, 1e-5);
  const Tensor x = rand({n}, {3, 0});
  double reference = 0;
  for (float v : x.to_vector<float>()) reference += static_cast<double>(v);
  EXPECT_NEAR(sum(x).item() / reference, 1, 25 * 0x1p-24);
  const Tensor by_column = sum(as_strided(x, {n / 4, 4}, {4, 1}, 0), {0});
  EXPECT_NEAR(sum(by_column).item() / reference, 1, 25 * 0x1p-24);
}

TEST(Reduce, SixteenBitsAccumulateInMore) {
  for (Index n : {257, 4096}) {
    EXPECT_EQ(sum(ones({n}, DType::bf16)).item(), n == 257 ? 256 : 4096);  // 257 rounds to even
    EXPECT_EQ(sum(ones({n, 3}, DType::bf16), {0}).to_vector(), sum(ones({3, n}, DType::bf16), {1}).to_vector());
    EXPECT_EQ(sum(ones({n, 3}, DType::f16), {0}).to_vector()[2], static_cast<double>(n));
    EXPECT_EQ(mean(full({n}, 3, DType::bf16)).item(), 3);
  }
  EXPECT_EQ(mean(full({1000}, 60000, DType::f16)).item(), 60000);  // the sum alone would overflow
}

TEST(Reduce, Argmax) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor x =
        from_values(std::vector<double>{1, 3, 3, -1, -1, -2, -kInf, -kInf, -kInf, 0, 1, 2}, {2, 2, 3}, dtype);
    const Tensor y = argmax(x);
    EXPECT_EQ(y.dtype(), DType::i64);
    EXPECT_EQ(y.shape(), (Shape{2, 2}));
    EXPECT_EQ(y.to_vector<Index>(), (std::vector<Index>{1, 0, 0, 2})) << dtype;
  }
  const Tensor x = random(real({5, 77}), 4);
  const Tensor across = as_strided(x, {77, 5}, {1, 77}, 0);
  const std::vector<Index> got = argmax(across).to_vector<Index>();
  const std::vector<double> v = across.to_vector();
  for (std::size_t r = 0; r < 77; ++r) EXPECT_EQ(got[r], std::max_element(&v[5 * r], &v[5 * r] + 5) - &v[5 * r]);
  Tape tape;
  tape.watch(x);
  EXPECT_FALSE(tape.knows(argmax(x)));
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Reduce, Argmin) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Tensor x = from_values({1.0, -3.0, -3.0, kInf, kInf, 2.0, 0.0, -0.0, 1.0}, {3, 3}, dtype);
    EXPECT_EQ(argmin(x).to_vector<Index>(), (std::vector<Index>{1, 2, 0})) << dtype;
  }
  const Tensor x = random(real({5}), 4);
  Tape tape;
  tape.watch(x);
  EXPECT_FALSE(tape.knows(argmin(x)));
  EXPECT_EQ(tape.size(), 0u);
  EXPECT_TRUE(refuses([&] { argmin(ones({3, 0})); }, "argmin", {"[3, 0]"}));
}

// ---- refusals -----------------------------------------------------------------------------------
TEST(Reduce, RefusesAxesItDoesNotHave) {
  const Tensor x = ones({2, 3});
  struct Named {
    const char* name;
    Tensor (*op)(const Tensor&, const Axes&, bool);
  };
  for (const Named& n : {Named{"sum", sum}, {"mean", mean}, {"max", max}, {"min", min}, {"prod", prod}}) {
    EXPECT_TRUE(refuses([&] { n.op(x, {2}, false); }, n.name, {"axis 2", "-2..1"}));
    EXPECT_TRUE(refuses([&] { n.op(x, {-3}, false); }, n.name, {"axis -3", "-2..1"}));
    EXPECT_TRUE(refuses([&] { n.op(ones({}), {0}, false); }, n.name, {"axis 0"}));
    EXPECT_TRUE(refuses([&] { n.op(x, {1, 1}, false); }, n.name, {"axis", "1"}));
    EXPECT_TRUE(refuses([&] { n.op(x, {1, -1}, false); }, n.name, {"axis", "1"}));
    if (n.name != std::string_view("sum")) {
      EXPECT_TRUE(refuses([&] { n.op(ones({2}, DType::i64), {}, false); }, n.name, {"i64"}));
    }
  }
  EXPECT_TRUE(refuses([&] { var(ones({2}, DType::i64)); }, "var", {"i64"}));
  EXPECT_TRUE(refuses([&] { var(x, {2}); }, "var", {"axis 2", "-2..1"}));
  EXPECT_TRUE(refuses([&] { cumsum(ones({2}, DType::i64)); }, "cumsum", {"i64"}));
  EXPECT_TRUE(refuses([&] { cumsum(x, 2); }, "cumsum", {"axis 2", "-2..1"}));
  EXPECT_TRUE(refuses([&] { min(ones({3, 0}), {1}); }, "min", {"[3, 0]", "minimum"}));
  EXPECT_TRUE(refuses([&] { argmax(ones({})); }, "argmax", {"[]"}));
  EXPECT_TRUE(refuses([&] { argmax(ones({3, 0})); }, "argmax", {"[3, 0]"}));
}

}  // namespace
}  // namespace hilt
