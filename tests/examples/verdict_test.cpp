// The parts of compare_gradients that decide: the rule, the sets and loops it judges by, the lines
// of source it shows.
#include "../../examples/compare/verdict.h"

#include <gtest/gtest.h>
#include <hilt/hilt.h>

#include <cmath>
#include <limits>

#include "../../examples/compare/arrangement.h"
#include "../../examples/compare/exact.h"
#include "../../examples/compare/source.h"

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

TEST(Source, EveryFormulaHasOneLine) {
  for (const compare::Formula& f : compare::kFormulas) {
    const compare::SourceLine line = compare::source_line(f.marker);
    EXPECT_GT(line.number, 0) << "modes.cpp needs exactly one line with '" << f.marker << "'";
    EXPECT_NE(line.text.find("matmul(") != line.text.npos || std::string_view(f.marker) == "// dS = ", false)
        << line.text;
  }
  EXPECT_GT(compare::source_line(compare::kFusedMarker).number, 0);
  EXPECT_EQ(compare::source_line("no such text").number, 0);
  EXPECT_EQ(compare::source_line("Tensor").number, 0) << "more than one";
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
        const compare::KeyLists& set = sets.head(h);
        const auto begin = static_cast<std::ptrdiff_t>(set.begin[static_cast<std::size_t>(t)]),
                   end = static_cast<std::ptrdiff_t>(set.begin[static_cast<std::size_t>(t) + 1]);
        ASSERT_EQ(std::vector<std::int32_t>(set.key.begin() + begin, set.key.begin() + end), wanted)
            << "head " << h << " token " << t;
      }
  }
}

// The loops against central differences: the loss is sum(o d_o).
TEST(Exact, GradientsAreSlopes) {
  const hilt::PlanPtr plan = plan_of(12, 4, "hilbert:3x4", "segment:6+segment:12,dilation=2", "all_queries", "none");
  compare::ExactProblem p{2, 12, 4, 2, 3, 0.7, 0.25, {9, 4}, {}, {}, {}, {}};
  p.q = waves(2 * 12 * 4 * 3), p.d_o = p.q;
  p.k = waves(2 * 12 * 2 * 3), p.v = p.k;
  for (double& x : p.k) x = std::cos(3 * x);
  for (double& x : p.v) x = 1 - x * x;
  for (double& x : p.d_o) x = std::cos(5 * x);
  const compare::AttendedSets sets = compare::attended_sets(*plan);
  const compare::Four out = compare::exact_attention(p, sets, hilt::DType::f32);
  constexpr double kStep = 1e-5;
  const auto slope = [&](double& x) {
    const double kept = x;
    double loss[2];
    for (int side : {0, 1}) {
      x = kept + (side ? kStep : -kStep);
      const compare::Four moved = compare::exact_attention(p, sets, hilt::DType::f32);
      loss[side] = 0;
      for (std::size_t i = 0; i < p.d_o.size(); ++i) loss[side] += moved[0][i] * p.d_o[i];
    }
    x = kept;
    return (loss[1] - loss[0]) / (2 * kStep);
  };
  for (std::size_t i = 0; i < p.q.size(); i += 5) EXPECT_NEAR(out[1][i], slope(p.q[i]), 1e-8) << "dq " << i;
  for (std::size_t i = 0; i < p.k.size(); i += 3) EXPECT_NEAR(out[2][i], slope(p.k[i]), 1e-8) << "dk " << i;
  for (std::size_t i = 0; i < p.v.size(); i += 3) EXPECT_NEAR(out[3][i], slope(p.v[i]), 1e-8) << "dv " << i;
}

// Two ways to count: the plan's own tiles in another order, and this plan's pairs moved there.
TEST(Arrangement, SetsDefinedOnTheGridCountTheSameBothWays) {
  for (const char* pattern : {"window2d:16x16", "neighborhood2d:7x7", "slide2d:3x9", "dense"}) {
    const hilt::PlanPtr plan = plan_of(32 * 32, 2, "hilbert:32x32", pattern, "all_queries", "none");
    const compare::AttendedSets sets = compare::attended_sets(*plan);
    for (const hilt::Order::Kind kind : compare::kOrders) {
      const compare::Arrangement moved = compare::rearranged(*plan, sets, kind);
      const hilt::TileStats own = plan->stats_for(kind);
      EXPECT_EQ(moved.stats.full, own.full) << pattern << ' ' << moved.order;
      EXPECT_EQ(moved.stats.partial, own.partial) << pattern << ' ' << moved.order;
      EXPECT_EQ(moved.stats.total, own.total) << pattern << ' ' << moved.order;
      EXPECT_EQ(moved.stats.pairs, own.pairs) << pattern << ' ' << moved.order;
      EXPECT_EQ(moved.stats.tile_pairs, own.tile_pairs) << pattern << ' ' << moved.order;
    }
  }
}

TEST(Arrangement, SaysWhereHilbertHelpsDoesNothingAndLoses) {
  const auto words = [](Index length, const char* order, const char* pattern) {
    const hilt::PlanPtr plan = plan_of(length, 1, order, pattern, "all_queries", "none");
    std::vector<compare::Arrangement> orders;
    for (const hilt::Order::Kind kind : compare::kOrders)
      orders.push_back(compare::rearranged(*plan, compare::attended_sets(*plan), kind));
    return compare::order_verdict(orders);
  };
  EXPECT_TRUE(
      words(4096, "hilbert:64x64", "window2d:16x16").starts_with("Hilbert order helps: it touches 4.00 x fewer"));
  EXPECT_TRUE(words(1024, "hilbert:32x32", "dense").starts_with("Hilbert order does nothing"));
  EXPECT_TRUE(words(1024, "hilbert:32x32", "neighborhood2d:7x7").starts_with("Hilbert order loses"));
}

}  // namespace
