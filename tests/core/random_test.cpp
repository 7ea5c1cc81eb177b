// Philox against its published answers; distributions, independence of streams, and generators.
#include "core/random.h"
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <set>
#include <thread>
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

using Block = std::array<std::uint32_t, 4>;

// The known answers of Random123's own test of philox4x32-10 (kat_vectors).
TEST(Philox, GivesThePublishedAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, 0), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, 0xffffffffffffffff),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  // philox4x32-7, which dropout draws.
  EXPECT_EQ(philox<7>({0, 0, 0, 0}, 0), (Block{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(philox<7>({kOnes, kOnes, kOnes, kOnes}, 0xffffffffffffffff),
            (Block{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(philox<7>({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (Block{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

TEST(DropRate, IsTheNearest65536thAndNeverAll) {
  EXPECT_EQ(drop_rate(0), 0u);
  EXPECT_EQ(drop_rate(0x1p-18), 0u);
  EXPECT_EQ(drop_rate(0x1p-17), 1u);
  EXPECT_EQ(drop_rate(0.5), 32768u);
  EXPECT_EQ(drop_rate(0.1), 6554u);
  EXPECT_EQ(drop_rate(0.9999999), 65535u);
  EXPECT_EQ(keep_scale(0), 1.0);
  EXPECT_EQ(keep_scale(32768), 2.0);
  const std::array<std::uint32_t, 4> words{0x10000, 0x30002, 0x50004, 0x70006};
  for (std::uint32_t i = 0; i < 8; ++i) EXPECT_EQ(drop_bits(words, i), i);
}

/// The generator once more, as the paper writes it.
Block philox_by_the_paper(Block x, std::array<std::uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t left = std::uint64_t{0xD2511F53} * x[0], right = std::uint64_t{0xCD9E8D57} * x[2];
    const auto high = [](std::uint64_t product) { return static_cast<std::uint32_t>(product >> 32); };
    const auto low = [](std::uint64_t product) { return static_cast<std::uint32_t>(product & 0xffffffff); };
    x = {high(right) ^ x[1] ^ k[0], low(right), high(left) ^ x[3] ^ k[1], low(left)};
    k = {k[0] + 0x9E3779B9u, k[1] + 0xBB67AE85u};
  }
  return x;
}

TEST(Rand, ElementIsTheCounterUnderTheKey) {
  const RandomKey key{0x0123456789abcdef, 0xfedcba9876543210};
  const std::vector<double> x = rand({1000}, key, DType::f64).to_vector();
  for (std::uint32_t i = 0; i < 1000; ++i) {
    const Block bits = philox_by_the_paper({i, 0, 0x76543210, 0xfedcba98}, {0x89abcdef, 0x01234567});
    ASSERT_EQ(x[i], (bits[0] >> 8) * 0x1p-24) << i;
  }
}

TEST(Rand, IsTheSameWhateverTheShapeTheTypeAndTheNumberOfThreads) {
  const RandomKey key{5, 6};
  const std::vector<double> expected = rand({100000}, key, DType::f64).to_vector(),
                            normal = randn({100000}, key, DType::f64).to_vector(),
                            integers = randint(0, 1000000, {50000}, key).to_vector();
  EXPECT_EQ(rand({100000}, key).to_vector(), expected);  // 24 bits fit an f32
  EXPECT_EQ(rand({10, 100, 100}, key).to_vector(), expected);
  const std::vector<double> start = rand({777}, key).to_vector();
  EXPECT_TRUE(std::equal(start.begin(), start.end(), expected.begin()));
  for (int n : {1, 2, 3, 8}) {
    const Threads threads(n);
    EXPECT_EQ(rand({100000}, key).to_vector(), expected) << n;
    EXPECT_EQ(randn({100000}, key, DType::f64).to_vector(), normal) << n;
    EXPECT_EQ(randint(0, 1000000, {50000}, key).to_vector(), integers) << n;
  }
  for (DType t : {DType::f32, DType::f16, DType::bf16}) {
    const std::vector<double> narrow = randn({5000}, key, t).to_vector();
    for (std::size_t i = 0; i < narrow.size(); ++i)
      ASSERT_EQ(narrow[i], full({}, static_cast<float>(normal[i]), t).item()) << t << i;
  }
  EXPECT_EQ(rand({0}, key).numel(), 0);
  EXPECT_EQ(rand({}, key).item(), expected[0]);
}

// ---- distributions: seeds are fixed, so a bound of many sigmas is passed once and for all -------

struct Moments {
  double mean = 0, variance = 0, skewness = 0, kurtosis = 0;
};
Moments moments(const std::vector<double>& x) {
  const double n = static_cast<double>(x.size());
  Moments m;
  for (double e : x) m.mean += e / n;
  double second = 0, third = 0, fourth = 0;
  for (double e : x) {
    const double d = e - m.mean;
    second += d * d / n, third += d * d * d / n, fourth += d * d * d * d / n;
  }
  m.variance = second;
  m.skewness = third / std::pow(second, 1.5);
  m.kurtosis = fourth / (second * second);
  return m;
}
/// The largest distance between the distribution of x and a cumulative distribution function:
/// Kolmogorov's statistic, times sqrt(n).
template <class F> double kolmogorov(std::vector<double> x, F cdf) {
  std::sort(x.begin(), x.end());
  const double n = static_cast<double>(x.size());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double c = cdf(x[i]), at = static_cast<double>(i);
    worst = std::max({worst, c - at / n, (at + 1) / n - c});
  }
  return worst * std::sqrt(n);
}
double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const Moments x = moments(a), y = moments(b);
  double s = 0;
  for (std::size_t i = 0; i < a.size(); ++i) s += (a[i] - x.mean) * (b[i] - y.mean);
  return s / static_cast<double>(a.size()) / std::sqrt(x.variance * y.variance);
}

TEST(Rand, IsUniformOnTheUnitInterval) {
  const Index n = scaled(1000000, 100000);
  const std::vector<double> x = rand({n}, {1, 0}).to_vector();
  EXPECT_GE(*std::min_element(x.begin(), x.end()), 0.0);
  EXPECT_LT(*std::max_element(x.begin(), x.end()), 1.0);
  const double sigma = 1 / std::sqrt(static_cast<double>(n));
  const Moments m = moments(x);
  EXPECT_NEAR(m.mean, 0.5, 4 * sigma * std::sqrt(1 / 12.));
  EXPECT_NEAR(m.variance, 1 / 12., 4 * sigma * std::sqrt(1 / 180.));
  EXPECT_LT(kolmogorov(x, [](double v) { return v; }), 1.95);  // exceeded by one seed in a thousand
}

TEST(Rand, ReachesBothEndsAndNeverOne) {
  // Where the 24 bits are all zeros and all ones.
  const std::vector<float> x = rand({scaled<Index>(20000000, 2000000)}, {3, 0}).to_vector<float>();
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  EXPECT_LT(*low, scaled(1e-7f, 1e-5f));
  EXPECT_GT(*high, 1 - scaled(1e-7f, 1e-5f));
  EXPECT_LT(*high, 1.0f);
}

TEST(Randn, IsStandardNormal) {
  const Index n = scaled(1000000, 100000);
  const std::vector<double> x = randn({n}, {1, 0}, DType::f64).to_vector();
  const double sigma = 1 / std::sqrt(static_cast<double>(n));
  const Moments m = moments(x);
  EXPECT_NEAR(m.mean, 0, 4 * sigma);
  EXPECT_NEAR(m.variance, 1, 4 * sigma * std::sqrt(2));
  EXPECT_NEAR(m.skewness, 0, 4 * sigma * std::sqrt(6));
  EXPECT_NEAR(m.kurtosis, 3, 4 * sigma * std::sqrt(24));
  EXPECT_LT(kolmogorov(x, [](double v) { return std::erfc(-v / std::numbers::sqrt2) / 2; }), 1.95);
  const double largest = *std::max_element(x.begin(), x.end());
  EXPECT_GT(largest, scaled(4.2, 3.5));
  EXPECT_LT(largest, 5.8);  // sqrt(2 ln 2^24): what 24 bits can reach
  EXPECT_TRUE(std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); }));
}

TEST(Rand, StreamsSeedsAndNeighborsAreUncorrelated) {
  const Index n = scaled(200000, 50000);
  const double bound = 4.5 / std::sqrt(static_cast<double>(n));
  const auto draw = [&](RandomKey key) { return randn({n}, key, DType::f64).to_vector(); };
  const std::vector<double> x = draw({7, 0});
  for (const RandomKey key : {RandomKey{7, 1}, RandomKey{8, 0}, RandomKey{7, std::uint64_t{1} << 32},
                              RandomKey{7 + (std::uint64_t{1} << 32), 0}, RandomKey{0, 7}}) {
    const std::vector<double> y = draw(key);
    EXPECT_NE(x, y);
    EXPECT_LT(std::abs(correlation(x, y)), bound) << key.seed << ' ' << key.stream;
  }
  for (std::ptrdiff_t lag : {1, 2, 3, 4, 64, 4096})
    EXPECT_LT(std::abs(correlation(std::vector<double>(x.begin(), x.end() - lag),
                                   std::vector<double>(x.begin() + lag, x.end()))),
              bound)
        << lag;
}

TEST(Randint, IsUniformOnItsRange) {
  const Index n = scaled(700000, 70000);
  std::vector<double> counts(7);
  for (std::int64_t x : randint(-3, 4, {n}, {1, 0}).to_vector<std::int64_t>()) {
    ASSERT_GE(x, -3);
    ASSERT_LT(x, 4);
    ++counts[static_cast<std::size_t>(x + 3)];
  }
  double chi2 = 0;
  for (double c : counts) chi2 += std::pow(c - static_cast<double>(n) / 7, 2) / (static_cast<double>(n) / 7);
  EXPECT_LT(chi2, 22.5);  // of 6 degrees of freedom, exceeded by one seed in a thousand
}

TEST(Randint, TakesAnyRangeAndEveryIntegerType) {
  EXPECT_EQ(randint(5, 6, {10}, {1, 0}).to_vector(), std::vector<double>(10, 5));
  const std::vector<std::int64_t> wide = randint(0, Index{1} << 40, {1000}, {1, 0}).to_vector<std::int64_t>();
  EXPECT_GT(*std::max_element(wide.begin(), wide.end()), Index{1} << 39);
  EXPECT_GT(std::set<std::int64_t>(wide.begin(), wide.end()).size(), 990u);
  const std::vector<double> bytes = randint(0, 256, {5000}, {1, 0}, DType::u8).to_vector();
  EXPECT_EQ(std::set<double>(bytes.begin(), bytes.end()).size(), 256u);
  EXPECT_EQ(randint(-7, 8, {5}, {1, 0}, DType::i32).to_vector(), randint(-7, 8, {5}, {1, 0}).to_vector());
}

TEST(Rand, RefusesTheWrongTypeAndAnEmptyRange) {
  EXPECT_EQ(error_of([] { (void)rand({1}, {}, DType::i32); }), "usage: rand: needs a float type, got i32");
  EXPECT_EQ(error_of([] { (void)randn({1}, {}, DType::u8); }), "usage: randn: needs a float type, got u8");
  EXPECT_EQ(error_of([] { (void)randint(0, 5, {1}, {}, DType::f32); }),
            "usage: randint: needs an integer type, got f32");
  EXPECT_EQ(error_of([] { (void)randint(5, 5, {1}, {}); }), "usage: randint: [5, 5) is empty");
  EXPECT_EQ(error_of([] { (void)randint(5, 4, {1}, {}); }), "usage: randint: [5, 4) is empty");
}

// ---- generators ---------------------------------------------------------------------------------

bool operator==(const RandomKey& a, const RandomKey& b) { return a.seed == b.seed && a.stream == b.stream; }

TEST(Generator, HandsOutOneStreamAfterTheOther) {
  Generator g(42);
  EXPECT_TRUE(g.state() == (RandomKey{42, 0}));
  for (std::uint64_t i = 0; i < 5; ++i) EXPECT_TRUE(g.next() == (RandomKey{42, i}));
  EXPECT_TRUE(g.state() == (RandomKey{42, 5}));
  g.set_state({7, 100});
  EXPECT_TRUE(g.next() == (RandomKey{7, 100}));
  EXPECT_TRUE(Generator{}.next() == (RandomKey{0, 0}));
}

TEST(Generator, CopiesShareTheirState) {
  Generator a(1), b = a, other(1);
  (void)a.next();
  EXPECT_TRUE(b.next() == (RandomKey{1, 1}));
  EXPECT_TRUE(a.state() == (RandomKey{1, 2}));
  EXPECT_TRUE(other.state() == (RandomKey{1, 0}));
}

TEST(Recording, RemembersWhereEachGeneratorStoodWhenFirstUsed) {
  Generator a(1), b(2), unused(3);
  (void)a.next();
  const Generator::Recording recording;
  (void)b.next();
  (void)a.next();
  (void)a.next();
  Generator copy = a;
  (void)copy.next();
  ASSERT_EQ(recording.states().size(), 2u);
  EXPECT_TRUE(recording.states()[0].second == (RandomKey{2, 0}));
  EXPECT_TRUE(recording.states()[1].second == (RandomKey{1, 1}));

  const auto now = Generator::Recording::swap(recording.states());
  EXPECT_TRUE(a.state() == (RandomKey{1, 1}) && b.state() == (RandomKey{2, 0}) && unused.state() == (RandomKey{3, 0}));
  (void)a.next();
  Generator::Recording::swap(now);
  EXPECT_TRUE(a.state() == (RandomKey{1, 4}) && b.state() == (RandomKey{2, 1}));
}

TEST(Recording, NestsAndEnds) {
  Generator a(1), b(2);
  const Generator::Recording outer;
  (void)a.next();
  {
    const Generator::Recording inner;
    (void)a.next();
    (void)b.next();
    ASSERT_EQ(inner.states().size(), 2u);
    EXPECT_TRUE(inner.states()[0].second == (RandomKey{1, 1}));
  }
  ASSERT_EQ(outer.states().size(), 2u);  // what the inner one saw, it saw too
  EXPECT_TRUE(outer.states()[0].second == (RandomKey{1, 0}));
  EXPECT_TRUE(outer.states()[1].second == (RandomKey{2, 0}));
}

TEST(Recording, ListensToItsOwnThreadAlone) {
  const Generator::Recording recording;
  std::jthread([] {
    Generator g(1);
    (void)g.next();
  }).join();
  EXPECT_TRUE(recording.states().empty());
}

}  // namespace
}  // namespace hilt
