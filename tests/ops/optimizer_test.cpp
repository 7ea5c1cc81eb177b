// AdamW, SGD, the global norm and clipping against their formulas, one number at a time.
#include <limits>
#include "core/parallel.h"
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
constexpr int kSteps = 50;
constexpr Index kSize = 37;
constexpr AdamW kOptions{.lr = 0.03, .beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-6, .weight_decay = 0.1};

double gradient_at(Index i, Index step) { return std::sin(static_cast<double>(3 * i + step * step)) + 0.3; }
double start_at(Index i) { return std::cos(static_cast<double>(i)); }

Tensor gradient(Index step, DType dtype) {
  Array<double> g(Shape{kSize});
  for (Index i = 0; i < kSize; ++i) g[i] = gradient_at(i, step);
  return tensor_of(g, dtype);
}
Tensor start(DType dtype) {
  Array<double> w(Shape{kSize});
  for (Index i = 0; i < kSize; ++i) w[i] = start_at(i);
  return tensor_of(w, dtype);
}

/// One parameter, as the papers write it: decay apart from the moments (Loshchilov and Hutter),
/// both moments unbiased.
template <class T> struct ScalarAdamW {
  T w, m = 0, v = 0;
  void step(T g, Index t, const AdamW& o) {
    m = T(o.beta1) * m + T(1 - o.beta1) * g;
    v = T(o.beta2) * v + T(1 - o.beta2) * g * g;
    const T unbiased_m = m / T(1 - std::pow(o.beta1, t)), unbiased_v = v / T(1 - std::pow(o.beta2, t));
    w = w - T(o.lr) * (unbiased_m / (std::sqrt(unbiased_v) + T(o.epsilon)) + T(o.weight_decay) * w);
  }
};

/// The path of every parameter after kSteps, in T, from the numbers that dtype holds.
template <class T> std::vector<double> adamw_path(DType dtype) {
  std::vector<ScalarAdamW<T>> all;
  for (double w : start(dtype).to_vector()) all.push_back({static_cast<T>(w)});
  for (Index t = 1; t <= kSteps; ++t) {
    const std::vector<double> g = gradient(t, dtype).to_vector();
    for (std::size_t i = 0; i < all.size(); ++i) all[i].step(static_cast<T>(g[i]), t, kOptions);
  }
  std::vector<double> out;
  for (const auto& one : all) out.push_back(static_cast<double>(one.w));
  return out;
}
double worst(const std::vector<double>& a, const std::vector<double>& b) {
  double w = 0;
  for (std::size_t i = 0; i < a.size(); ++i) w = std::max(w, std::abs(a[i] - b[i]));
  return w;
}

TEST(AdamW, FollowsTheFormulaForFiftySteps) {
  Tensor w = start(DType::f64), m = zeros({kSize}, DType::f64), v = zeros({kSize}, DType::f64);
  for (Index t = 1; t <= kSteps; ++t) adamw_step(w, gradient(t, DType::f64), m, v, t, kOptions);
  EXPECT_LT(worst(w.to_vector(), adamw_path<double>(DType::f64)), 1e-13);
}

TEST(AdamW, InF32ErrsLikeAScalarLoopInF32) {
  Tensor w = start(DType::f32), m = zeros({kSize}), v = zeros({kSize});
  for (Index t = 1; t <= kSteps; ++t) adamw_step(w, gradient(t, DType::f32), m, v, t, kOptions);
  const std::vector<double> exact = adamw_path<double>(DType::f32);
  EXPECT_LE(worst(w.to_vector(), exact), 2 * worst(adamw_path<float>(DType::f32), exact) + 2 * 0x1p-24);
}

TEST(AdamW, SixteenBitsFollowTheirMaster) {
  for (DType dtype : {DType::bf16, DType::f16}) {
    Tensor w = start(dtype), m = zeros({kSize}), v = zeros({kSize}), master = to(w, DType::f32);
    for (Index t = 1; t <= kSteps; ++t) {
      adamw_step(w, gradient(t, dtype), m, v, t, kOptions, &master);
      ASSERT_EQ(bits(w), bits(to(master, dtype))) << "step " << t;
    }
    const std::vector<double> exact = adamw_path<double>(dtype);
    EXPECT_LE(worst(master.to_vector(), exact), 2 * worst(adamw_path<float>(dtype), exact) + 2 * 0x1p-24) << dtype;
  }
  // Steps too small for bf16 to show still add up.
  Tensor w = ones({1}, DType::bf16), m = zeros({1}), v = zeros({1}), master = ones({1});
  for (Index t = 1; t <= 100; ++t)
    adamw_step(w, ones({1}, DType::bf16), m, v, t, {.lr = 1e-4, .weight_decay = 0}, &master);
  EXPECT_NEAR(master.item(), 0.99, 1e-4);
  EXPECT_EQ(w.item(), 0.98828125);
}

TEST(AdamW, WithoutAMasterSixteenBitsAreRoundedEachStep) {
  Tensor w = start(DType::bf16), m = zeros({kSize}), v = zeros({kSize});
  std::vector<ScalarAdamW<double>> all;
  for (double x : w.to_vector()) all.push_back({x});
  for (Index t = 1; t <= 5; ++t) {
    const Tensor g = gradient(t, DType::bf16);
    adamw_step(w, g, m, v, t, kOptions);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].step(g.to_vector()[i], t, kOptions);
      // Within half a unit in the last place of the step from where bf16 stood; then both stand
      // there.
      ASSERT_NEAR(w.to_vector()[i], all[i].w, std::abs(all[i].w) * 0x1p-8 * (1 + 1e-3)) << t << ' ' << i;
      all[i].w = w.to_vector()[i];
    }
  }
}

TEST(AdamW, FirstStepIsTheLearningRateWhateverTheGradient) {
  for (double g : {1e-3, 1.0, 1e6}) {
    Tensor w = zeros({1}, DType::f64), m = zeros({1}, DType::f64), v = zeros({1}, DType::f64);
    adamw_step(w, full({1}, g, DType::f64), m, v, 1, {.lr = 0.1, .epsilon = 0});
    EXPECT_NEAR(w.item(), -0.1, 1e-15);
  }
}

TEST(AdamW, GradientsOfAnyStridesAndTheSameBitsForAnyThreads) {
  const Tensor g = random(real({617, 487}), 1, DType::f32);
  const auto run = [&](const Tensor& dw) {
    Tensor w = random(real({617, 487}), 2, DType::f32), m = zeros({617, 487}), v = zeros({617, 487});
    for (Index t = 1; t <= 3; ++t) adamw_step(w, dw, m, v, t, kOptions);
    return bits(w);
  };
  const int before = thread_count();
  set_thread_count(1);
  const auto expected = run(g);
  EXPECT_EQ(run(transpose(clone(transpose(g)))), expected);
  for (int threads : {2, 4}) {
    set_thread_count(threads);
    EXPECT_EQ(run(g), expected) << threads;
  }
  set_thread_count(before);
}

TEST(AdamW, ManyAtOnceAreAsOneByOne) {
  constexpr int kMany = 5;
  std::vector<Tensor> w[2], m[2], v[2];
  std::vector<AdamWUpdate> updates;
  for (int i = 0; i < kMany; ++i)
    for (int way : {0, 1}) {
      const DType dtype = i % 2 ? DType::f64 : DType::f32;
      w[way].push_back(start(dtype)), m[way].push_back(zeros({kSize}, dtype)), v[way].push_back(zeros({kSize}, dtype));
    }
  for (std::size_t i = 0; i < kMany; ++i)
    updates.push_back({&w[0][i], gradient(1 + static_cast<Index>(i), w[0][i].dtype()), &m[0][i], &v[0][i], nullptr,
                       0.1 * static_cast<double>(i)});
  adamw_step(updates, 3, kOptions);
  for (std::size_t i = 0; i < kMany; ++i) {
    AdamW options = kOptions;
    options.weight_decay = updates[i].weight_decay;
    adamw_step(w[1][i], updates[i].dw, m[1][i], v[1][i], 3, options);
    EXPECT_EQ(bits(w[0][i]), bits(w[1][i])) << i;
    EXPECT_EQ(bits(v[0][i]), bits(v[1][i])) << i;
  }
}

TEST(AdamW, WritesAreSeenByTheTape) {
  Tensor w = ones({3}), x = ones({3}), m = zeros({3}), v = zeros({3});
  Tape tape;
  tape.watch(x);
  const Tensor y = mul(x, w);  // keeps w
  adamw_step(w, ones({3}), m, v, 1, kOptions);
  EXPECT_THROW(tape.backward(y, ones({3})), Error);
}

TEST(AdamW, Refusals) {
  Tensor w = ones({3}), m = zeros({3}), v = zeros({3}), half = ones({3}, DType::bf16), master = ones({3}),
         narrow = ones({2});
  const Tensor g = ones({3});
  EXPECT_TRUE(refuses([&] { adamw_step(w, g, m, v, 0, kOptions); }, "adamw_step", {"step", "0"}));
  EXPECT_TRUE(refuses([&] { adamw_step(w, ones({2}), m, v, 1, kOptions); }, "adamw_step", {"[3]", "[2]"}));
  EXPECT_TRUE(refuses([&] { adamw_step(w, g, narrow, v, 1, kOptions); }, "adamw_step", {"[3]", "[2]"}));
  EXPECT_TRUE(refuses([&] { adamw_step(w, g, m, narrow, 1, kOptions); }, "adamw_step", {"[3]", "[2]"}));
  EXPECT_TRUE(refuses([&] { adamw_step(w, ones({3}, DType::f64), m, v, 1, kOptions); }, "adamw_step", {"f32", "f64"}));
  EXPECT_TRUE(refuses([&] { adamw_step(w, g, half, v, 1, kOptions); }, "adamw_step", {"f32", "bf16"}));
  EXPECT_TRUE(refuses([&] { adamw_step(half, ones({3}, DType::bf16), m, v, 1, kOptions, &narrow); }, "adamw_step",
                      {"[3]", "[2]"}));
  EXPECT_TRUE(refuses([&] { adamw_step(half, ones({3}, DType::bf16), m, v, 1, kOptions, &half); }, "adamw_step",
                      {"f32", "bf16"}));
  Tensor across = transpose(zeros({2, 3})), m2 = zeros({3, 2}), v2 = zeros({3, 2});
  EXPECT_TRUE(refuses(
      [&] {
        adamw_step(across, ones({3, 2}), m2, v2, 1, kOptions);
      },
      "adamw_step", {"[3, 2]", "dense"}));
  for (const double wrong : {kNan, -1.0, std::numeric_limits<double>::infinity()}) {
    EXPECT_TRUE(refuses([&] { adamw_step(w, g, m, v, 1, {.lr = wrong}); }, "adamw_step: learning rate",
                        {std::isnan(wrong) ? "nan"
                         : wrong < 0       ? "-1"
                                           : "inf"}));
    EXPECT_TRUE(refuses([&] { adamw_step(w, g, m, v, 1, {.weight_decay = wrong}); }, "adamw_step: weight decay", {}));
    EXPECT_TRUE(refuses([&] { adamw_step(w, g, m, v, 1, {.epsilon = wrong}); }, "adamw_step: epsilon", {}));
    EXPECT_TRUE(refuses([&] { adamw_step({}, 1, {.lr = wrong}); }, "adamw_step: learning rate", {}));
  }
  EXPECT_TRUE(refuses([&] { adamw_step(w, g, m, v, 1, {.beta1 = kNan}); }, "adamw_step", {"nan"}));
  EXPECT_EQ(w.to_vector(), (std::vector<double>{1, 1, 1}));  // nothing was written
  EXPECT_EQ(m.to_vector(), (std::vector<double>{0, 0, 0}));
}

TEST(GlobalNorm, IsTheRootOfAllSquaresInF64) {
  const std::vector<Tensor> g{values({3}), from_values(std::vector<double>{0, 4, 12, 0}, {2, 2}, DType::f32),
                              full({}, 84, DType::bf16), empty({0})};
  EXPECT_EQ(global_norm(g), 85);
  EXPECT_EQ(global_norm(std::vector<Tensor>{}), 0);
  EXPECT_NEAR(global_norm({{full({100}, 1e30, DType::f32)}}) / 1e31, 1, 1e-7);  // squares overflow f32
  EXPECT_NEAR(global_norm({{full({100}, 1e-30, DType::f32)}}) / 1e-29, 1, 1e-7);
  EXPECT_NEAR(global_norm({{transpose(expand(values({1, 2}), {3, 2}))}}), std::sqrt(15.0), 1e-15);
  EXPECT_EQ(global_norm({{full({300007}, 0.5, DType::f32)}}), std::sqrt(300007 * 0.25));
  EXPECT_TRUE(std::isnan(global_norm({{values({1, kNan})}})));
  const int before = thread_count();
  const Tensor x = random(real({300007}), 1, DType::f32);
  set_thread_count(1);
  const double one = global_norm({{x}});
  for (int threads : {2, 4}) {
    set_thread_count(threads);
    EXPECT_EQ(global_norm({{x}}), one);
  }
  set_thread_count(before);
}

TEST(Clip, AStepByTheNormIsAStepOfClippedGradients) {
  for (DType dtype : {DType::f64, DType::f32}) {
    for (const auto& [most, scale] :
         {std::pair(0.0, 1.0), {0.1, 1.0}, {1000.0, 1.0}, {0.0, 1024.0}, {0.1, 1024.0}, {1000.0, 1024.0}}) {
      Tensor w[2], m[2], v[2];
      for (std::size_t way : {0U, 1U})
        w[way] = random(real({40}), 1, dtype), m[way] = zeros({40}, dtype), v[way] = zeros({40}, dtype);
      for (Index t = 1; t <= 5; ++t) {
        std::vector<Tensor> g{random(real({40}), static_cast<int>(t) + 1, dtype)};
        const std::vector<Tensor> scaled{mul(g[0], scale)};
        const AdamWUpdate whole{&w[0], scaled[0], &m[0], &v[0]};
        adamw_step({&whole, 1}, t, kOptions, {norm_of(scaled), most, scale});
        if (most > 0) clip_grad_norm(g, most);
        const AdamWUpdate clipped{&w[1], g[0], &m[1], &v[1]};
        adamw_step({&clipped, 1}, t, kOptions);
      }
      EXPECT_EQ(w[0].to_vector(), w[1].to_vector()) << dtype << " " << most << " " << scale;
      EXPECT_EQ(v[0].to_vector(), v[1].to_vector()) << dtype << " " << most << " " << scale;
    }
  }
}

TEST(Clip, WhereTheNormOrTheLossIsNotFiniteNothingChanges) {
  for (double bad : {kNan, kInf, -kInf})
    for (bool is_loss : {false, true}) {
      Tensor w = ones({3}), m = zeros({3}), v = zeros({3});
      const std::vector<Tensor> g{full({3}, is_loss ? 1.0 : bad, DType::f32)};
      const AdamWUpdate one{&w, g[0], &m, &v};
      const Tensor norm = norm_of(g, full({}, is_loss ? bad : 1.0, DType::f32));
      EXPECT_FALSE(std::isfinite(norm.item()));
      adamw_step({&one, 1}, 1, kOptions, {norm, 1});
      EXPECT_EQ(w.to_vector(), (std::vector<double>{1, 1, 1}));
      EXPECT_EQ(m.to_vector(), (std::vector<double>{0, 0, 0}));
    }
}

TEST(Clip, Refusals) {
  Tensor w = ones({3}), m = zeros({3}), v = zeros({3});
  const AdamWUpdate one{&w, ones({3}), &m, &v};
  EXPECT_TRUE(refuses(
      [&] {
        adamw_step({&one, 1}, 1, kOptions, {full({}, 1.0, DType::f64), -1});
      },
      "adamw_step", {"-1"}));
  EXPECT_TRUE(refuses(
      [&] {
        adamw_step({&one, 1}, 1, kOptions, {full({}, 1.0, DType::f64), 1, 0});
      },
      "adamw_step", {"scale", "0"}));
  EXPECT_TRUE(refuses(
      [&] {
        adamw_step({&one, 1}, 1, kOptions, {full({}, 1.0, DType::f32), 1});
      },
      "adamw_step", {"norm", "f64"}));
  EXPECT_TRUE(refuses([&] { adamw_step({&one, 1}, 1, kOptions, {{}, 1}); }, "adamw_step", {"needs the norm"}));
  EXPECT_TRUE(refuses([&] { (void)norm_of({}, zeros({2})); }, "norm_of", {"one number"}));
  EXPECT_TRUE(refuses(
      [&] {
        adamw_step({&one, 1}, 1, kOptions, {full({2}, 1.0, DType::f64), 1});
      },
      "adamw_step", {"norm", "f64"}));
}

TEST(ClipGradNorm, ScalesOnlyWhatIsTooLong) {
  for (DType dtype : {DType::f64, DType::f32}) {
    std::vector<Tensor> g{values({3, 0}, dtype), values({4}, dtype)};
    EXPECT_EQ(clip_grad_norm(g, 10), 5);
    EXPECT_EQ(g[0].to_vector(), (std::vector<double>{3, 0}));
    EXPECT_EQ(clip_grad_norm(g, 5), 5);
    EXPECT_EQ(g[1].to_vector(), (std::vector<double>{4}));
    EXPECT_EQ(clip_grad_norm(g, 1), 5);
    EXPECT_NEAR(g[0].to_vector()[0], 0.6, 1e-6);
    EXPECT_NEAR(g[1].item(), 0.8, 1e-6);
    EXPECT_EQ(g[0].dtype(), dtype);
    EXPECT_LE(global_norm(g), 1 + (dtype == DType::f64 ? 1e-14 : 1e-6));
  }
  std::vector<Tensor> none{zeros({3})};
  EXPECT_EQ(clip_grad_norm(none, 1), 0);
  EXPECT_EQ(none[0].to_vector(), (std::vector<double>{0, 0, 0}));
}

TEST(ClipGradNorm, SharedNumbersAreScaledOnceAndOthersKeepTheirs) {
  // add(a, b) hands one gradient to both inputs; someone may also hold a copy for a log.
  const Tensor t = values({3, 4});
  std::vector<Tensor> g{t, t};
  const double norm = clip_grad_norm(g, 1);
  EXPECT_NEAR(norm, std::sqrt(50.0), 1e-14);
  EXPECT_EQ(t.to_vector(), (std::vector<double>{3, 4}));
  for (const Tensor& x : g) EXPECT_NEAR(x.to_vector()[1], 4 / norm, 1e-14);
  const Tensor whole = values({1, 2, 2, 4});
  std::vector<Tensor> halves{slice(whole, 0, 0, 2), slice(whole, 0, 2, 4)};
  EXPECT_EQ(clip_grad_norm(halves, 2.5), 5);
  EXPECT_EQ(whole.to_vector(), (std::vector<double>{1, 2, 2, 4}));
  EXPECT_NEAR(halves[1].to_vector()[1], 2, 1e-14);
  std::vector<Tensor> repeated{expand(values({3}), {4})};
  EXPECT_EQ(clip_grad_norm(repeated, 3), 6);
  EXPECT_NEAR(repeated[0].to_vector()[3], 1.5, 1e-14);
}

TEST(ClipGradNorm, WhatIsNotFiniteIsAnErrorAndNothingChanges) {
  for (double bad : {kNan, kInf, -kInf})
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      std::vector<Tensor> g{values({1, 2}, dtype), values({bad, 5}, dtype)};
      EXPECT_TRUE(refuses([&] { clip_grad_norm(g, 1); }, "clip_grad_norm", {}, Code::not_a_number));
      EXPECT_EQ(g[0].to_vector(), (std::vector<double>{1, 2}));
      EXPECT_EQ(g[1].to_vector()[1], 5);
    }
}

TEST(ClipGradNorm, Refusals) {
  std::vector<Tensor> g{values({1, 2})};
  EXPECT_TRUE(refuses([&] { clip_grad_norm(g, -1); }, "clip_grad_norm", {"-1"}));
  EXPECT_TRUE(refuses([&] { clip_grad_norm(g, kNan); }, "clip_grad_norm", {"nan"}));
}

}  // namespace
}  // namespace hilt
