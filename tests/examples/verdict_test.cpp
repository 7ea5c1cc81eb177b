// The parts of compare_gradients that decide: the rule, the sets and loops it judges by.
#include <gtest/gtest.h>
#include <hilt/hilt.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "../../examples/compare/arrangement.h"
#include "../../examples/compare/exact.h"

namespace {

using hilt::Index;
constexpr double kRounding = 0x1p-22;

std::vector<double> waves(std::size_t n) {
  std::vector<double> x;
  for (std::size_t i = 0; i < n; ++i) x.push_back(std::sin(static_cast<double>(i)));
  return x;
}

TEST(Verdict, TheRule) {
  const std::vector<double> exact = waves(1000), terms(1000, 1.0);
  std::vector<double> naive = exact;
  naive[7] += 1e-6;
  const compare::Error yardstick = compare::measure(naive, exact);
  EXPECT_EQ(yardstick.worst_index, 7u);
  EXPECT_NEAR(yardstick.max_abs, 1e-6, 1e-15);
  EXPECT_TRUE(compare::judge(exact, exact, terms, yardstick, kRounding).ok);

  std::vector<double> x = exact;
  x[500] += 2e-6;
  EXPECT_TRUE(compare::judge(x, exact, terms, yardstick, kRounding).ok) << "twice the naive error is allowed";
  x[500] = exact[500] + 2e-6 + 2 * kRounding;
  const compare::Error off = compare::judge(x, exact, terms, yardstick, kRounding);
  EXPECT_FALSE(off.ok) << "more is not";
  EXPECT_EQ(off.worst_index, 500u);
  EXPECT_NEAR(off.limit, 2e-6 + kRounding, 1e-12);
}

TEST(Verdict, ManySmallErrorsFailTogether) {
  const std::vector<double> exact = waves(1000), terms(1000, 1.0);
  std::vector<double> naive = exact, x = exact;
  naive[7] += 1e-6;
  for (double& value : x) value += 1.9e-6;  // each within the limit of the largest error
  const compare::Error e = compare::judge(x, exact, terms, compare::measure(naive, exact), kRounding);
  EXPECT_LE(e.max_abs, e.limit);
  EXPECT_GT(e.rel_l2, e.rel_limit);
  EXPECT_FALSE(e.ok);
}

TEST(Verdict, WhatIsNotANumberOrNotThereFails) {
  const std::vector<double> exact = waves(10), terms(10, 1.0);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    std::vector<double> x = exact;
    x[3] = bad;
    const compare::Error e = compare::judge(x, exact, terms, compare::measure(x, exact), kRounding);
    EXPECT_EQ(e.worst_index, 3u);
    EXPECT_TRUE(std::isinf(e.max_abs));
    EXPECT_FALSE(compare::judge(x, exact, terms, {}, kRounding).ok);
  }
  EXPECT_FALSE(compare::judge(waves(9), exact, terms, {}, kRounding).ok);
}

TEST(Verdict, AGradientThatCancelsIsJudgedByItsTerms) {
  const std::vector<double> exact(4, 0.0), x(4, 1e-7), terms(4, 1.0);
  EXPECT_TRUE(compare::judge(x, exact, terms, {}, kRounding).ok);
  EXPECT_FALSE(compare::judge(x, exact, std::vector<double>(4, 0.01), {}, kRounding).ok);
}

// Naive may be right in each of two elements by luck, and not in a thousand.
TEST(Verdict, OfFewElementsTheFloorIsWider) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{2}, std::size_t{1000}}) {
    const std::vector<double> exact(n, 1.0), terms(n, 1.0);
    const auto ok = [&](double roundings) {
      const std::vector<double> x(n, 1 + roundings * kRounding);
      return compare::judge(x, exact, terms, compare::measure(exact, exact), kRounding).ok;
    };
    EXPECT_TRUE(ok(0.9)) << n;
    EXPECT_EQ(ok(2.5), n <= 2) << n;
    EXPECT_FALSE(ok(4.5)) << n;
  }
}

hilt::PlanPtr plan_of(Index length, Index heads, const std::string& order, const std::string& pattern,
                      const std::string& dilation_mode, const std::string& causal) {
  return hilt::make_plan({.length = length,
                          .heads = heads,
                          .order = hilt::parse_order(order, length),
                          .pattern = hilt::parse_pattern(pattern),
                          .dilation_mode = hilt::parse_dilation_mode(dilation_mode),
                          .causality = hilt::parse_causality(causal)});
}

struct Setting {
  Index length, heads;
  const char *order, *pattern, *dilation_mode, *causal;
};
constexpr Setting kSettings[] = {
    {1, 1, "row", "dense", "all_queries", "none"},
    {37, 3, "hilbert", "segment:8,dilation=3,offset=head", "all_queries", "token"},
    {37, 4, "hilbert,scope=order-only", "segment:8+segment:16,dilation=2", "longnet", "none"},
    {40, 4, "snake:5x8", "segment:5+segment:20,dilation=4", "head_groups", "none"},
    {40, 2, "morton:5x8", "segment:10,dilation=3", "residue", "curve"},
    {63, 1, "hilbert:7x9", "slide:5", "all_queries", "token"},
    {63, 1, "tiles:7x9/2x3", "neighborhood:7", "all_queries", "none"},
    {63, 1, "hilbert:7x9", "window2d:3x4", "all_queries", "none"},
    {63, 1, "hilbert:7x9", "slide2d:2x1", "all_queries", "token"},
    {63, 1, "hilbert:7x9", "neighborhood2d:5x3+slide:3", "all_queries", "none"},
    {64, 2, "hilbert,chunk=16", "segment:16", "all_queries", "none"},
};

TEST(Exact, ListsAreWhatAttendsSays) {
  for (const Setting& s : kSettings) {
    SCOPED_TRACE(s.pattern);
    const hilt::PlanPtr plan = plan_of(s.length, s.heads, s.order, s.pattern, s.dilation_mode, s.causal);
    const compare::AttendedSets sets = compare::attended_sets(*plan);
    for (Index h = 0; h < s.heads; ++h)
      for (Index t = 0; t < s.length; ++t) {
        std::vector<std::int32_t> wanted;
        for (Index u = 0; u < s.length; ++u)
          wanted.insert(wanted.end(), static_cast<std::size_t>(plan->attends(h, t, u)), static_cast<std::int32_t>(u));
        ASSERT_EQ(sets.head(h).row(t), wanted) << "head " << h << " token " << t;
      }
  }
}

// A row of documents: what attends() says of the row, though the judge asks each document alone.
TEST(Exact, ListsOfDocumentsAreWhatAttendsSays) {
  const hilt::PlanPtr plan =
      hilt::make_plan({.length = 60,
                       .heads = 2,
                       .order = hilt::parse_order("hilbert", 60),
                       .pattern = hilt::parse_pattern("segment:8,dilation=2,offset=head+slide:3"),
                       .documents = hilt::parse_documents("20,4x5,7")});
  const compare::AttendedSets sets = compare::attended_sets(*plan);
  for (Index h = 0; h < 2; ++h)
    for (Index t = 0; t < 60; ++t) {
      std::vector<std::int32_t> wanted;
      for (Index u = 0; u < 60; ++u)
        wanted.insert(wanted.end(), static_cast<std::size_t>(plan->attends(h, t, u)), static_cast<std::int32_t>(u));
      ASSERT_EQ(sets.head(h).row(t), wanted) << "head " << h << " token " << t;
    }
}

/// Terms of every kind on a plan of 12 tokens and 4 heads.
compare::ExactTerms terms_on(const hilt::Plan& plan, const hilt::Shape& table, const hilt::Shape& bias) {
  hilt::ScoreTerms terms{.softcap = 1.5};
  const auto draw = [](const hilt::Shape& shape, std::uint64_t stream) {
    return hilt::randn(shape, {3, stream}, hilt::DType::f64);
  };
  terms.slopes = draw({4}, 1), terms.relative = draw(table, 2), terms.bias = draw(bias, 3), terms.sink = draw({4}, 4);
  return compare::exact_terms(plan, terms);
}

// The loops against central differences: the loss is sum(o d_o).
void check_slopes(const hilt::PlanPtr& plan, const compare::ExactTerms& terms) {
  compare::ExactProblem p{2, 12, 4, 2, 3, 0.7, 0.25, {9, 4}, {}, {}, {}, {}, terms};
  p.q = waves(2 * 12 * 4 * 3), p.d_o = p.q;
  p.k = waves(2 * 12 * 2 * 3), p.v = p.k;
  for (double& x : p.k) x = std::cos(3 * x);
  for (double& x : p.v) x = 1 - x * x;
  for (double& x : p.d_o) x = std::cos(5 * x);
  const compare::AttendedSets sets = compare::attended_sets(*plan);
  const compare::Tensors out = compare::exact_attention(p, sets, hilt::DType::f32);
  constexpr double kStep = 1e-5;
  const auto slope = [&](double& x) {
    const double kept = x;
    double loss[2];
    for (int side : {0, 1}) {
      x = kept + (side ? kStep : -kStep);
      const compare::Tensors moved = compare::exact_attention(p, sets, hilt::DType::f32);
      loss[side] = 0;
      for (std::size_t i = 0; i < p.d_o.size(); ++i) loss[side] += moved[0][i] * p.d_o[i];
    }
    x = kept;
    return (loss[1] - loss[0]) / (2 * kStep);
  };
  for (std::size_t i = 0; i < p.q.size(); i += 5) EXPECT_NEAR(out[1][i], slope(p.q[i]), 1e-8) << "dq " << i;
  for (std::size_t i = 0; i < p.k.size(); i += 3) EXPECT_NEAR(out[2][i], slope(p.k[i]), 1e-8) << "dk " << i;
  for (std::size_t i = 0; i < p.v.size(); i += 3) EXPECT_NEAR(out[3][i], slope(p.v[i]), 1e-8) << "dv " << i;
  for (std::size_t which = 0; which < 4; ++which)
    for (std::size_t i = 0; i < p.terms.tensor[which].size(); i += 1 + which)
      EXPECT_NEAR(out[4 + which][i], slope(p.terms.tensor[which][i]), 1e-8) << "term " << which << ", " << i;
}
TEST(Exact, GradientsAreSlopes) {
  const hilt::PlanPtr two = plan_of(12, 4, "hilbert:3x4", "segment:6+segment:12,dilation=2", "all_queries", "none");
  const hilt::PlanPtr grid = plan_of(12, 4, "hilbert:3x4", "slide2d:1x2", "all_queries", "token");
  const hilt::PlanPtr packed = hilt::make_plan({.length = 12,
                                                .heads = 4,
                                                .pattern = hilt::parse_pattern("slide2d:1x1"),
                                                .documents = hilt::parse_documents("2x3,4x1")});
  check_slopes(two, {});
  check_slopes(two, terms_on(*two, {4, 5}, {1, 4, 1, 12}));
  check_slopes(grid, terms_on(*grid, {4, 3, 3}, {2, 1, 12, 12}));
  check_slopes(packed, terms_on(*packed, {4, 3, 1}, {1, 1, 12, 1}));
}

// The judge's formulas, which share no code with the modes, and fused in f64: the same numbers.
TEST(Exact, TermsAreThoseOfTheLibrary) {
  for (const char* documents : {"", "2x3,4x1"}) {
    hilt::PlanSpec spec{.length = 12, .heads = 4, .pattern = hilt::parse_pattern("slide2d:1x2")};
    if (*documents) spec.documents = hilt::parse_documents(documents);
    else spec.order = hilt::parse_order("hilbert:3x4", 12);
    const hilt::PlanPtr plan = hilt::make_plan(spec);
    const auto draw = [](const hilt::Shape& shape, std::uint64_t stream) {
      return hilt::randn(shape, {3, stream}, hilt::DType::f64);
    };
    const hilt::Tensor q = draw({2, 12, 4, 3}, 1), k = draw({2, 12, 2, 3}, 2), v = draw({2, 12, 2, 3}, 3),
                       d_o = draw({2, 12, 4, 3}, 4);
    for (const bool published : {false, true}) {
      hilt::ScoreTerms terms{.softcap = 1.5, .alibi = published};
      if (!published) terms.slopes = draw({4}, 5);
      terms.relative = draw({4, 3, 3}, 6), terms.bias = draw({2, 1, 1, 12}, 7), terms.sink = draw({4}, 8);
      hilt::Tape tape;
      for (const hilt::Tensor& x : {q, k, v}) tape.watch(x);
      hilt::visit_terms(terms, [&](const std::string&, hilt::Tensor& x) { tape.watch(x); });
      const hilt::Tensor o = hilt::attention(q, k, v, plan, {.terms = terms});
      const hilt::Gradients g = tape.backward(o, d_o);
      const compare::ExactProblem p{2,
                                    12,
                                    4,
                                    2,
                                    3,
                                    1 / std::sqrt(3.0),
                                    0,
                                    {},
                                    q.to_vector(),
                                    k.to_vector(),
                                    v.to_vector(),
                                    d_o.to_vector(),
                                    compare::exact_terms(*plan, terms)};
      const compare::Tensors exact = compare::exact_attention(p, compare::attended_sets(*plan), hilt::DType::f64);
      const hilt::Tensor* const all[] = {nullptr, &q, &k, &v, &terms.slopes, &terms.relative, &terms.bias, &terms.sink};
      for (std::size_t i = 0; i < exact.size(); ++i) {
        if (i > 0 && !*all[i]) continue;
        const std::vector<double> x = i == 0 ? o.to_vector() : g[*all[i]].to_vector();
        ASSERT_EQ(x.size(), exact[i].size()) << i;
        for (std::size_t e = 0; e < x.size(); ++e) EXPECT_NEAR(x[e], exact[i][e], 1e-13) << i << ", " << e;
      }
    }
  }
}

// As dense attention in 16 bits does: its allowance is what these loops lose.
TEST(Exact, NaiveLoopsStoreWhatTheyReadOfTerms) {
  const hilt::PlanPtr plan = plan_of(12, 4, "hilbert:3x4", "slide2d:1x2", "all_queries", "token");
  const compare::AttendedSets sets = compare::attended_sets(*plan);
  compare::ExactProblem p{2, 12, 4, 2, 3, 0.5, 0.2, {9, 4}, waves(288), waves(144), {}, {}, {}};
  p.v = p.k, p.d_o = p.q;
  for (std::vector<double>* const x : {&p.q, &p.k, &p.v, &p.d_o})
    for (double& value : *x) value = static_cast<float>(hilt::bf16(static_cast<float>(value)));
  for (const bool bent : {false, true}) {
    p.terms = terms_on(*plan, {4, 3, 3}, {2, 1, 12, 12});
    if (!bent) p.terms.softcap = 0;
    compare::ExactProblem stored = p;
    for (std::vector<double>& tensor : stored.terms.tensor)
      for (double& x : tensor) x = static_cast<float>(hilt::bf16(static_cast<float>(x)));
    EXPECT_EQ(compare::naive_attention(p, sets, hilt::DType::bf16),
              compare::naive_attention(stored, sets, hilt::DType::bf16));
    EXPECT_NE(compare::naive_attention(p, sets, hilt::DType::f32),
              compare::naive_attention(stored, sets, hilt::DType::f32));
  }
}

// Two ways to count: the plan's own tiles in an order, and pairs one by one, moved there.
TEST(Arrangement, TilesAreThoseOfThePairs) {
  constexpr Index kTile = hilt::Tiling::kTile, kLength = 32 * 32, kSide = kLength / kTile;
  for (const char* pattern : {"window2d:16x16", "neighborhood2d:7x7", "slide2d:3x9", "dense"}) {
    const hilt::PlanPtr plan = plan_of(kLength, 2, "hilbert:32x32", pattern, "all_queries", "none");
    const compare::AttendedSets sets = compare::attended_sets(*plan);
    for (const compare::Arrangement& a : compare::arrangements_of(*plan)) {
      hilt::TileStats counted{.total = kSide * kSide * std::ssize(sets.sets)};
      for (const compare::KeyLists& set : sets.sets) {
        std::vector<Index> held(static_cast<std::size_t>(kSide * kSide));
        for (Index t = 0; t < kLength; ++t)
          for (const std::int32_t u : set.row(t))
            ++held[compare::at(a.walk.position_of[compare::at(t)] / kTile * kSide +
                               a.walk.position_of[compare::at(u)] / kTile)];
        for (const Index n : held) {
          counted.full += n == kTile * kTile, counted.partial += n > 0 && n < kTile * kTile;
          counted.pairs += n, counted.tile_pairs += n > 0 ? kTile * kTile : 0;
        }
      }
      EXPECT_EQ(a.stats.full, counted.full) << pattern << ' ' << a.order;
      EXPECT_EQ(a.stats.partial, counted.partial) << pattern << ' ' << a.order;
      EXPECT_EQ(a.stats.total, counted.total) << pattern << ' ' << a.order;
      EXPECT_EQ(a.stats.pairs, counted.pairs) << pattern << ' ' << a.order;
      EXPECT_EQ(a.stats.tile_pairs, counted.tile_pairs) << pattern << ' ' << a.order;
    }
  }
}

TEST(Arrangement, SaysWhereHilbertHelpsDoesNothingAndLoses) {
  const auto words = [](Index length, const char* order, const char* pattern) {
    return compare::order_verdict(compare::arrangements_of(*plan_of(length, 1, order, pattern, "all_queries", "none")));
  };
  EXPECT_TRUE(
      words(4096, "hilbert:64x64", "window2d:16x16").starts_with("Hilbert order helps: it touches 4.00 x fewer"));
  EXPECT_TRUE(words(1024, "hilbert:32x32", "dense").starts_with("Hilbert order does nothing"));
  EXPECT_TRUE(words(1024, "hilbert:32x32", "neighborhood2d:7x7").starts_with("Hilbert order loses"));
}

TEST(Broken, EveryMistakeShowsAndNoneDoesNot) {
  const hilt::PlanPtr plan = plan_of(16, 2, "hilbert:4x4", "segment:8", "all_queries", "none");
  compare::ExactProblem p{2, 16, 2, 1, 3, 0.7, 0.25, {9, 4}, waves(2 * 16 * 2 * 3), waves(2 * 16 * 3), {}, {}};
  p.v = p.k, p.d_o = p.q;
  for (double& x : p.k) x = std::cos(3 * x);
  for (double& x : p.d_o) x = std::cos(5 * x);
  const compare::AttendedSets sets = compare::attended_sets(*plan);
  const compare::Tensors exact = compare::exact_attention(p, sets, hilt::DType::f32),
                         naive = compare::naive_attention(p, sets, hilt::DType::f32),
                         terms = compare::term_sizes(p, sets, hilt::DType::f32);
  const auto all = compare::break_it(p, sets, plan->order(), exact, naive, terms, kRounding);
  ASSERT_EQ(all.size(), compare::kMistakes.size());
  // Which of o, dq, dk, dv are right.
  const std::array<std::array<bool, 4>, 7> right{
      {{1, 1, 1, 1}, {1, 0, 0, 1}, {1, 0, 0, 1}, {0, 0, 0, 0}, {0, 0, 0, 0}, {1, 0, 0, 0}, {1, 0, 0, 0}}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(compare::kMistakes[i]);
    for (std::size_t j = 0; j < 4; ++j) EXPECT_EQ(all[i].error[j].ok, right[i][j]) << "tensor " << j;
    const bool agrees = std::abs(all[i].slope - all[i].difference) < 1e-6;
    EXPECT_EQ(agrees, i == 0 || i == 3) << all[i].slope << ' ' << all[i].difference;
    EXPECT_EQ(all[i].row_sum < 1e-12, i == 0 || i == 2 || i == 3) << all[i].row_sum;
  }
}

}  // namespace
