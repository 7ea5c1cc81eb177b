// Score terms, documents and parts of queries in a GPU's kernels, where rows are longer than what
// fuzzing draws: against the CPU in f64 on the same numbers, that a kernel ran and not its ops, and
// the same bits each time.
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <map>
#include <string>
#include "core/cuda/context.h"
#include "core/random.h"
#include "ops/hilbert/attention.h"
#include "ops/ops.h"
#include "tests/support/same_bits.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

const Device kGpu{Device::Kind::cuda, 0};

/// A problem: a set of pairs, sizes, and terms by their shapes; an empty shape is no term.
struct Problem {
  std::string pattern, order;
  Index batch = 1, length = 1280, heads = 4, kv_heads = 2, dim = 32;
  DType type = DType::f32;
  Causality causality = Causality::none;
  DilationMode mode = DilationMode::all_queries;
  std::string documents = "";
  Index first_query = 0, queries = -1, cross = -1;
  bool in_order = false;
  double softcap = 0, dropout = 0;
  bool published = false, slopes = false, sink = false, narrow_bias = false, masks = false;
  Shape relative{}, bias{};  // relative: without heads
  int points = 0;            // relative looks at points: 1, of all rows; 2, of each

  PlanSpec spec() const {
    PlanSpec p;
    p.length = length, p.heads = heads, p.causality = causality, p.dilation_mode = mode, p.in_order = in_order;
    p.pattern = parse_pattern(pattern), p.order = parse_order(order, behind_prefix(p.pattern, length));
    if (!documents.empty()) p.documents = parse_documents(documents);
    if (queries >= 0) p.queries = query_run(first_query, queries);
    if (cross >= 0) p.cross = cross;
    return p;
  }
};
std::ostream& operator<<(std::ostream& os, const Problem& p) {
  return os << p.pattern << ' ' << p.order << " B " << p.batch << " L " << p.length << " H " << p.heads << '/'
            << p.kv_heads << " D " << p.dim << ' ' << p.type << " causal " << name_of(p.causality) << " documents '"
            << p.documents << "' queries " << p.queries << ": softcap " << p.softcap << " slopes " << p.slopes
            << p.published << " relative " << p.relative << " points " << p.points << " bias " << p.bias << " sink "
            << p.sink;
}

constexpr Causality kToken = Causality::token;

std::vector<Problem> on_grids(Index dim) {
  return {{.pattern = "dense",
           .order = "row:20x32",
           .batch = 2,
           .length = 640,
           .dim = dim,
           .causality = kToken,
           .softcap = 3,
           .slopes = true,
           .sink = true,
           .relative = {7, 5},
           .bias = {640, 640}},
          {.pattern = "slide2d:3x4",
           .order = "hilbert:32x32",
           .length = 1024,
           .dim = dim,
           .published = true,
           .relative = {17, 17}},
          // A query's keys share an entry in all frames, and none lies beyond the table.
          {.pattern = "dense", .order = "hilbert:4x8x8", .length = 256, .dim = dim, .relative = {1, 15, 15}}};
}
/// That have kernels of their own on Hopper, both ways.
std::vector<Problem> of_one_term(Index dim) {
  const Problem both{.pattern = "dense", .order = "row", .batch = 2, .length = 640, .dim = dim};
  std::vector<Problem> out(6, both);
  out[0].softcap = 30, out[1].softcap = 8, out[2].published = out[3].published = out[5].published = true;
  out[4].dropout = 0.1, out[5].queries = 300, out[5].in_order = true;
  for (const std::size_t i : {0, 2, 4}) out[i].causality = kToken;
  return out;
}
std::vector<Problem> of_sequences() {
  return {{.pattern = "dense", .order = "hilbert", .batch = 2, .length = 700, .relative = {9}, .bias = {2, 4, 700, 1}},
          {.pattern = "segment:100+segment:512,dilation=3",
           .order = "hilbert",
           .batch = 2,
           .slopes = true,
           .narrow_bias = true,
           .bias = {2, 1, 1280, 1280}},
          {.pattern = "segment:64|slide:9",
           .order = "morton",
           .batch = 3,
           .softcap = 1,
           .relative = {301},
           .bias = {4, 1, 1280}},
          {.pattern = "neighborhood3d:3x3x3",
           .order = "hilbert:8x12x10",
           .length = 960,
           .slopes = true,
           .relative = {3, 5, 5},
           .bias = {1, 1, 1, 960}},
          {.pattern = "slide:40",
           .order = "row",
           .heads = 6,
           .kv_heads = 1,
           .causality = kToken,
           .dropout = 0.25,
           .sink = true,
           .bias = {1, 6, 1280, 1280}},
          {.pattern = "segment:128,dilation=2,offset=head",
           .order = "hilbert",
           .batch = 2,
           .mode = DilationMode::longnet,
           .slopes = true,
           .masks = true,
           .bias = {2, 4, 1280, 1280}}};
}
/// Alike in every row, and each row's own, where elements of a bias without a batch meet.
std::vector<Problem> of_documents() {
  return {{.pattern = "dense",
           .order = "hilbert",
           .batch = 3,
           .length = 1000,
           .causality = kToken,
           .documents = "300,16x24,300",
           .slopes = true,
           .relative = {11},
           .bias = {1, 4, 1000, 1000}},
          {.pattern = "slide:30",
           .order = "hilbert",
           .batch = 2,
           .length = 1000,
           .documents = "300,100,300/1,300,300,50",
           .published = true,
           .sink = true,
           .bias = {1, 1, 1000, 1000}},
          {.pattern = "neighborhood2d:5x5",
           .order = "hilbert",
           .batch = 2,
           .length = 1000,
           .documents = "20x20,10x12,20x20/20x20,15x20",
           .slopes = true,
           .relative = {5, 5},
           .bias = {2, 1, 1, 1000}}};
}
/// With a prefix. On a grid its pairs find a 0, which Hopper's kernels do not know.
std::vector<Problem> of_prefixes() {
  return {{.pattern = "slide2d:3x4,prefix=5",
           .order = "hilbert:32x32",
           .batch = 2,
           .length = 1029,
           .dim = 64,
           .slopes = true,
           .relative = {17, 17}},
          {.pattern = "segment:100,prefix=130",
           .order = "hilbert",
           .batch = 2,
           .length = 1000,
           .dim = 64,
           .causality = kToken,
           .slopes = true,
           .relative = {101}}};
}
/// Parts of the queries, whose rows a bias has, and others' queries.
std::vector<Problem> of_queries() {
  return {{.pattern = "dense",
           .order = "row",
           .batch = 2,
           .length = 900,
           .causality = kToken,
           .first_query = 200,
           .queries = 300,
           .slopes = true,
           .relative = {101},
           .bias = {1, 4, 300, 900}},
          {.pattern = "slide:50",
           .order = "hilbert",
           .length = 900,
           .first_query = 899,
           .queries = 1,
           .sink = true,
           .relative = {101},
           .bias = {4, 1, 900}},
          {.pattern = "segment:200",
           .order = "hilbert",
           .batch = 2,
           .length = 1024,
           .causality = kToken,
           .first_query = 77,
           .queries = 500,
           .in_order = true,
           .slopes = true,
           .bias = {500, 1024}},
          {.pattern = "dense",
           .order = "row",
           .batch = 2,
           .length = 300,
           .cross = 500,
           .softcap = 2,
           .sink = true,
           .bias = {1, 4, 500, 300}}};
}

/// Tables by points, in a plan's order, in the call's, in documents, for parts of the queries.
std::vector<Problem> of_points(Index dim) {
  return {{.pattern = "segment:300",
           .order = "given",
           .batch = 2,
           .dim = dim,
           .slopes = true,
           .relative = {5, 3, 7},
           .points = 2},
          {.pattern = "slide2d:3x4",
           .order = "hilbert:32x32",
           .length = 1024,
           .dim = dim,
           .published = true,
           .relative = {301},
           .points = 1},
          {.pattern = "dense",
           .order = "hilbert",
           .batch = 3,
           .length = 1000,
           .dim = dim,
           .causality = kToken,
           .documents = "300,100,300/1,300,300,50/1000",
           .softcap = 3,
           .relative = {5, 5},
           .bias = {1, 4, 1000, 1000},
           .points = 2},
          {.pattern = "dense",
           .order = "row",
           .batch = 2,
           .length = 900,
           .dim = dim,
           .first_query = 200,
           .queries = 300,
           .relative = {9, 9},
           .points = 1}};
}

std::vector<Problem> problems() {
  std::vector<Problem> all;
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    const auto add = [&](std::vector<Problem> list) {
      for (Problem& p : list) p.type = type, all.push_back(std::move(p));
    };
    for (const Index dim : {16, 64, 96, 128}) add(on_grids(dim)), add(of_points(dim));
    for (const Index dim : {64, 96, 128}) add(of_one_term(dim));
    add(of_sequences()), add(of_documents()), add(of_prefixes()), add(of_queries());
  }
  for (const DType type : {DType::f32, DType::bf16})
    for (const Index dim : {33, 160, 192, 256})
      all.push_back({.pattern = "dense",
                     .order = "row:16x20",
                     .length = 320,
                     .dim = dim,
                     .type = type,
                     .softcap = 2,
                     .dropout = 0.1,
                     .slopes = true,
                     .sink = true,
                     .relative = {9, 9},
                     .bias = {320, 320}});
  return all;
}

/// Near each other, but for a few at both ends of their type: i32 [L, axes] or [B, L, axes].
Tensor points_of(const Problem& p, Device device) {
  constexpr std::int32_t kLow = std::numeric_limits<std::int32_t>::min(), kHigh = ~kLow;
  const Shape one{p.length, p.relative.rank()}, each{p.batch, p.length, p.relative.rank()};
  const Tensor drawn = mul(randn(p.points == 1 ? one : each, {7, 10}, DType::f64), 3.0);
  std::vector<std::int32_t> points;
  for (const double x : drawn.to_vector())
    points.push_back(x > 7 ? kHigh : x < -7 ? kLow : static_cast<std::int32_t>(std::lround(x)));
  return moved(from_values(points, drawn.shape()), device);
}
/// An order of each row.
Tensor permutation_of(const Problem& p, Device device) {
  std::vector<std::int32_t> all;
  for (Index b = 0; b < p.batch; ++b) {
    std::vector<std::pair<double, std::int32_t>> tokens;
    for (const double key : rand({p.length}, {8, static_cast<std::uint64_t>(b)}).to_vector())
      tokens.emplace_back(key, static_cast<std::int32_t>(tokens.size()));
    std::ranges::sort(tokens);
    for (const auto& [key, token] : tokens) all.push_back(token);
  }
  return moved(from_values(all, {p.batch, p.length}), device);
}

struct Inputs {
  Tensor q, k, v, d_o, d_lse;
  AttentionOptions options;
};
Inputs inputs_of(const Problem& p, DType type, Device device) {
  const DType stat = type == DType::f64 ? DType::f64 : DType::f32;
  // Drawn in the problem's types, so that all see the same numbers.
  const auto draw = [&](const Shape& shape, std::uint64_t stream, double sigma, bool narrow) {
    const Tensor x = to(mul(randn(shape, {7, stream}, DType::f32), sigma), narrow ? p.type : DType::f32);
    return moved(to(x, narrow ? type : stat), device);
  };
  const Index rows = p.spec().rows_of_q();
  Inputs in{draw({p.batch, rows, p.heads, p.dim}, 1, 1, true), draw({p.batch, p.length, p.kv_heads, p.dim}, 2, 1, true),
            draw({p.batch, p.length, p.kv_heads, p.dim}, 3, 1, true), draw({p.batch, rows, p.heads, p.dim}, 4, 1, true),
            draw({p.batch, p.heads, rows}, 5, 1, false)};
  ScoreTerms& terms = in.options.terms;
  if (p.softcap > 0) terms.softcap = p.softcap;
  terms.alibi = p.published;
  if (p.slopes) terms.slopes = draw({p.heads}, 6, 0.2, false);
  if (p.relative.rank() > 0) {
    Shape table{p.heads};
    for (const Index extent : p.relative) table.push_back(extent);
    terms.relative = draw(table, 7, 1, false);
  }
  if (p.points > 0) terms.points = points_of(p, device);
  if (p.order == "given") in.options.permutation = permutation_of(p, device);
  if (p.bias.rank() > 0) terms.bias = draw(p.bias, 8, 1, p.narrow_bias);
  if (p.masks) terms.bias = where(greater(terms.bias, 1.0), -std::numeric_limits<double>::infinity(), terms.bias);
  if (p.sink) terms.sink = draw({p.heads}, 9, 1, false);
  if (p.dropout > 0) in.options.dropout = p.dropout, in.options.key = RandomKey{3, 4};
  return in;
}
/// The routes that can be told to serve a problem.
std::vector<std::string> routes_of(const Problem& p) {
  if (p.type == DType::f32) return {"plain"};
  std::vector<std::string> routes{"plain", "mma"};
  if (cuda::properties(0).is_hopper() && p.dim % 8 == 0) routes.push_back("hopper");
  return routes;
}
/// What play() returns.
constexpr const char* kNames[] = {"o", "lse", "dq", "dk", "dv", "dslopes", "dtable", "dbias", "dsink"};
std::vector<Tensor> play(const Problem& p, const Inputs& in) {
  const PlanPtr plan = make_plan(p.spec());
  const AttentionResult r = attention_with_lse(in.q, in.k, in.v, plan, in.options);
  std::vector<Tensor> out{r.o, r.lse};
  std::vector<Tensor> dx = attention_gradients(in.q, in.k, in.v, r, {in.d_o, in.d_lse}, plan, in.options);
  for (Tensor& x : dx) out.push_back(std::move(x));
  return out;
}

double relative_error(const Tensor& got, const Tensor& want) {
  const auto finite = [](const Tensor& x) {  // -inf where a row has no key
    return where(equal(x, -std::numeric_limits<double>::infinity()), 0.0, x);
  };
  const Tensor x = finite(to(moved(got, {}), DType::f64)), y = finite(want);
  return global_norm(std::vector<Tensor>{sub(x, y)}) / std::max(global_norm(std::vector<Tensor>{y}), 1e-30);
}

/// What a relative error may be. Rows of 16 bits: some roundings of half a unit in the last place.
/// Sums of dS cancel, above all with distances, which differ little from key to key.
double allowed(DType type, std::size_t which) {
  return (type == DType::f32 ? 2e-5 : type == DType::f16 ? 1e-3 : 8e-3) * (which < 5 ? 1 : which == 5 ? 20 : 4);
}

class OnGpuTerms : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << gpu_descriptions()[0];
  }
};

TEST_F(OnGpuTerms, AgreeWithTheCpu) {
  std::map<std::string, double> worst;
  for (const Problem& p : problems()) {
    SCOPED_TRACE(testing::Message() << p);
    const std::vector<Tensor> want = play(p, inputs_of(p, DType::f64, {}));
    for (const std::string& route : routes_of(p)) {
      const Setting forced("HILT_ROUTE", route.c_str());
      clear_attention_routes(), clear_attention_fallbacks();
      const std::vector<Tensor> got = play(p, inputs_of(p, p.type, kGpu));
      EXPECT_TRUE(attention_fallbacks().empty());
      EXPECT_FALSE(attention_routes().empty());
      const bool outside = prefix_of(p.spec().pattern) > 0 && p.relative.rank() > 1,
                 multiplies = p.dim % 16 == 0 && p.dim <= 128 && cuda::properties(0).major >= 8;
      std::string_view serves = route == "hopper" && (outside || p.points > 0) ? "mma" : route;
      if (serves == "mma" && !multiplies) serves = "plain";
      for (const AttentionRoute& r : attention_routes()) EXPECT_EQ(r.route, serves) << r.reason;
      for (std::size_t i = 0; i < want.size(); ++i) {
        ASSERT_EQ(bool(got[i]), bool(want[i])) << kNames[i];
        if (!want[i]) continue;
        const double error = relative_error(got[i], want[i]);
        double& seen = worst[std::string(name_of(p.type)) + ' ' + route + ' ' + kNames[i]];
        seen = std::max(seen, error);
        EXPECT_LT(error, allowed(p.type, i)) << kNames[i];
      }
    }
  }
  for (const auto& [what, error] : worst) std::cout << "worst relative error of " << what << ": " << error << '\n';
}

TEST_F(OnGpuTerms, PointsInEveryMode) {
  for (const Problem& p : of_points(32))
    for (const Backward mode : {Backward::taped, Backward::hybrid}) {
      SCOPED_TRACE(testing::Message() << p << ' ' << name_of(mode));
      Inputs in = inputs_of(p, DType::f32, kGpu);
      in.options.backward = mode;
      const std::vector<Tensor> want = play(p, inputs_of(p, DType::f64, {})), got = play(p, in);
      for (std::size_t i = 0; i < want.size(); ++i)
        if (want[i]) { EXPECT_LT(relative_error(got[i], want[i]), allowed(DType::f32, i)) << kNames[i]; }
    }
}

TEST_F(OnGpuTerms, RepeatBitForBit) {
  for (const Problem& p : problems()) {
    SCOPED_TRACE(testing::Message() << p);
    const Inputs in = inputs_of(p, p.type, kGpu);
    for (const std::string& route : routes_of(p)) {
      const Setting forced("HILT_ROUTE", route.c_str());
      const std::vector<Tensor> first = play(p, in);
      for (int i = 0; i < scaled(20, 3); ++i) {
        const std::vector<Tensor> again = play(p, in);
        for (std::size_t k = 0; k < first.size(); ++k)
          if (first[k]) { ASSERT_TRUE(same_bits(again[k], first[k])) << kNames[k] << ", run " << i; }
      }
    }
  }
}

// A key that a bias of -inf masks may be NaN or infinite: no one notices.
// What others see of a key decides of no bit: rows before it stay as they were.
TEST_F(OnGpuTerms, ACapLooksAtEachScoreAlone) {
  for (const Index dim : {64, 128}) {
    const Problem p{.pattern = "dense",
                    .order = "row",
                    .length = 256,
                    .dim = dim,
                    .type = DType::bf16,
                    .causality = kToken,
                    .softcap = 30};
    Inputs in = inputs_of(p, p.type, kGpu);
    constexpr Index kLarge = 100;
    const std::vector<Tensor> before = play(p, in);
    in.k = clone(in.k);
    Tensor row = slice(in.k, 1, kLarge, kLarge + 1);
    copy(row, mul(row, 64));
    const std::vector<Tensor> after = play(p, in);
    EXPECT_TRUE(same_bits(slice(before[0], 1, 0, kLarge), slice(after[0], 1, 0, kLarge)));
    EXPECT_TRUE(same_bits(slice(before[1], 2, 0, kLarge), slice(after[1], 2, 0, kLarge)));
  }
}

TEST_F(OnGpuTerms, WhatABiasMasksDoesNotSpread) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    const Problem p{.pattern = "dense",
                    .order = "row",
                    .length = 300,
                    .dim = 64,
                    .type = type,
                    .softcap = 2,
                    .slopes = true,
                    .bias = {300, 300}};
    Inputs in = inputs_of(p, type, kGpu);
    constexpr Index kBad = 130;
    Tensor column = slice(in.options.terms.bias, -1, kBad, kBad + 1);
    copy(column, full(column.shape(), -std::numeric_limits<double>::infinity(), DType::f32, kGpu));
    const std::vector<Tensor> clean = play(p, in);
    for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      for (Tensor* x : {&in.k, &in.v}) {
        *x = clone(*x);
        Tensor row = slice(*x, 1, kBad, kBad + 1);
        copy(row, full(row.shape(), value, type, kGpu));
      }
      const std::vector<Tensor> got = play(p, in);
      for (std::size_t k = 0; k < clean.size(); ++k)
        if (clean[k]) {
          EXPECT_LT(relative_error(got[k], to(moved(clean[k], {}), DType::f64)), allowed(type, k)) << kNames[k];
        }
    }
  }
}

}  // namespace
}  // namespace hilt
