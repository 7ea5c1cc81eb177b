// The share that dropout keeps, and that backward, a checkpoint and any number of threads draw the
// same mask.
#include "core/parallel.h"
#include "ops/ops.h"
#include "tests/support/op_cases.h"
#include "tests/support/scale.h"

namespace hilt {
namespace {
using namespace judge;

constexpr RandomKey kKey{11, 3};

std::vector<OpCase> dropout_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, double p, Traits traits = {}) {
    Array<double> mask(shape);  // the statistics below judge it; here the question is who uses it, and how
    if (shape.numel() > 0)
      mask.values = greater(dropout(ones(shape, DType::f64), p, kKey), zeros({}, DType::f64)).to_vector();
    cases.push_back({text("dropout ", p),
                     {real(shape)},
                     [=](std::span<const Tensor> in) { return dropout(in[0], p, kKey); },
                     [=]<class T>(const Arrays<T>& in) {
                       Array<T> keep(shape);
                       for (Index i = 0; i < keep.size(); ++i) keep[i] = T(mask[i]);
                       const double rate = std::round(p * 65536) / 65536;
                       return naive::zip(in[0], keep, [=](const T& x, const T& m) { return x * m / (T(1) - T(rate)); });
                     },
                     traits});
  };
  for (const Shape& shape : {Shape{}, {1}, {7}, {0}, {2, 3}, {2, 3, 4}, {1, 5, 1}, {2, 1, 2, 1, 3, 2}})
    for (double p : {0.0, 0.25, 0.5, 0.9}) add_case(shape, p);
  add_case({300007}, 0.3, {.large = true});
  add_case({519, 96}, 0.3, {.large = true});  // whole accesses of a GPU
  add_case({617, 487}, 0.3, {.large = true});
  return cases;
}
const Op kDropout[] = {{"dropout", dropout_cases}};
INSTANTIATE_TEST_SUITE_P(Dropout, OpJudges, testing::ValuesIn(kDropout), op_name);

std::vector<double> mask_of(const Shape& shape, double p, RandomKey key, DType dtype = DType::f32) {
  return greater(dropout(ones(shape, dtype), p, key), zeros({}, dtype)).to_vector();
}

TEST(Dropout, KeepsTheShareItShould) {
  const Index n = scaled<Index>(1'000'000, 100'000);
  for (double p : {0.1, 0.5, 0.9}) {
    const std::vector<double> m = mask_of({n}, p, kKey), other = mask_of({n}, p, {kKey.seed, kKey.stream + 1}),
                              reseeded = mask_of({n}, p, {12, 3});
    double kept = 0, neighbors = 0, with_other = 0, with_reseeded = 0, far = 0;
    for (std::size_t i = 0; i < m.size(); ++i) {
      const double centered = m[i] - (1 - p);
      kept += centered;
      if (i > 0) neighbors += centered * (m[i - 1] - (1 - p));
      if (i >= 4) far += centered * (m[i - 4] - (1 - p));
      with_other += centered * (other[i] - (1 - p));
      with_reseeded += centered * (reseeded[i] - (1 - p));
    }
    // Five standard deviations of a sum of n independent terms.
    const double variance = p * (1 - p), sigma = 5 * std::sqrt(static_cast<double>(n));
    EXPECT_LT(std::abs(kept), sigma * std::sqrt(variance)) << p;
    for (double correlation : {neighbors, far, with_other, with_reseeded})
      EXPECT_LT(std::abs(correlation), sigma * variance) << p;
  }
}

TEST(Dropout, ElementIDependsOnKeyAndIAlone) {
  const std::vector<double> base = mask_of({1000}, 0.4, kKey);
  EXPECT_EQ(mask_of({1000}, 0.4, kKey), base);
  EXPECT_EQ(mask_of({10, 100}, 0.4, kKey), base);
  EXPECT_EQ(mask_of({5, 2, 25, 4}, 0.4, kKey), base);
  for (DType dtype : {DType::f64, DType::bf16, DType::f16}) EXPECT_EQ(mask_of({1000}, 0.4, kKey, dtype), base) << dtype;
  EXPECT_EQ(mask_of({333}, 0.4, kKey), std::vector<double>(base.begin(), base.begin() + 333));
  const Tensor across = as_strided(ones({1000}), {10, 100}, {1, 10}, 0);  // element i by position, not by address
  EXPECT_EQ(greater(dropout(across, 0.4, kKey), zeros({})).to_vector(), base);
  const int before = thread_count();
  const std::vector<double> wide = mask_of({300007}, 0.4, kKey);
  for (int threads : {1, 2, 4}) {
    set_thread_count(threads);
    EXPECT_EQ(mask_of({300007}, 0.4, kKey), wide);
  }
  set_thread_count(before);
  EXPECT_EQ(std::vector<double>(wide.begin(), wide.begin() + 1000), base);
  EXPECT_NE(mask_of({1000}, 0.4, {kKey.seed, 4}), base);
  EXPECT_NE(mask_of({1000}, 0.4, {kKey.seed + (std::uint64_t{1} << 40), kKey.stream}), base);
}

TEST(Dropout, RowsOfAWholeOnTheGpuTooAreDroppedAsThere) {
  const std::vector<Index> rows{1, 2, 3, 6};
  for (const Device device : {Device{}, device_named("auto")})
    for (DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (Index columns : {8, 12, 5}) {  // a counter's elements in one row, in two at times, anyhow
        const Tensor x = moved(random(real({7, columns}), 5, dtype), device);
        const auto of = [&](const Tensor& all) { return gather(all, 0, moved(from_values(rows, {4}), device)); };
        EXPECT_EQ(bits(moved(dropout(of(x), 0.4, kKey, rows), {})), bits(moved(of(dropout(x, 0.4, kKey)), {})))
            << device << ' ' << dtype << ' ' << columns;
      }
}

TEST(Dropout, BackwardUsesTheMaskOfForward) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Played p =
        play([](auto in) { return dropout(in[0], 0.5, kKey); }, {{zeros({40, 25}, dtype)}}, ones({40, 25}, dtype));
    EXPECT_EQ(p.dx[0].to_vector(), mul(dropout(ones({40, 25}, dtype), 0.5, kKey), 1).to_vector()) << dtype;
    for (double v : p.dx[0].to_vector()) EXPECT_TRUE(v == 0 || v == 2);
  }
}

TEST(Dropout, WithAGeneratorEveryCallDraws) {
  Generator g(5), same(5);
  const Tensor x = ones({1000});
  const Tensor first = dropout(x, 0.5, g), second = dropout(x, 0.5, g);
  EXPECT_NE(bits(first), bits(second));
  EXPECT_EQ(bits(dropout(x, 0.5, same)), bits(first));
  EXPECT_EQ(bits(dropout(x, 0.5, same)), bits(second));
  EXPECT_EQ(bits(dropout(x, 0, g)), bits(x));
  EXPECT_EQ(g.state().stream, same.state().stream);  // nothing dropped, nothing drawn
}

TEST(Dropout, InACheckpointTheReplayDropsTheSame) {
  Generator g(6);
  const Tensor x = random(real({50, 7}), 1);
  const Composite noisy = [&](auto in) { return mul(dropout(in[0], 0.5, g), in[0]); };
  const Tensor dy = random(real({50, 7}), 2);
  const Played plain = play(noisy, {{x}}, dy);
  g = Generator(6);
  const Played replayed = play([&](auto in) { return checkpoint(noisy, in); }, {{x}}, dy);
  EXPECT_EQ(bits(plain.y), bits(replayed.y));
  EXPECT_EQ(bits(plain.dx[0]), bits(replayed.dx[0]));
}

TEST(Dropout, Refusals) {
  const Tensor x = ones({3});
  EXPECT_TRUE(refuses([&] { dropout(x, -0.1, kKey); }, "dropout", {"-0.1"}));
  EXPECT_TRUE(refuses([&] { dropout(x, 1, kKey); }, "dropout", {"1"}));
  EXPECT_TRUE(refuses([&] { dropout(x, 1.5, kKey); }, "dropout", {"1.5"}));
  EXPECT_TRUE(refuses([&] { dropout(x, std::nan(""), kKey); }, "dropout", {"nan"}));
  EXPECT_TRUE(refuses([&] { dropout(ones({3}, DType::i64), 0.5, kKey); }, "dropout", {"i64"}));
  Generator g(1);
  EXPECT_TRUE(refuses([&] { dropout(x, 1, g); }, "dropout", {"1"}));
}

}  // namespace
}  // namespace hilt
