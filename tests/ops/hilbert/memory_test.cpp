// Bytes that each mode keeps and holds at most, against the stated formula.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "ops/hilbert/attention.h"
#include "ops/ops.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

using namespace hilt;

namespace {

PlanPtr plan_of(Index length, Index heads, const char* pattern, const char* order = "hilbert",
                Causality causality = Causality::none) {
  PlanSpec s;
  s.length = length;
  s.heads = heads;
  s.order = parse_order(order, length);
  s.pattern = parse_pattern(pattern);
  s.causality = causality;
  return make_plan(s);
}

struct Case {
  Index batch, heads, kv_heads, dim;
  DType dtype;
  const char* pattern;
  Causality causality = Causality::none;
  TermConfig terms = {};
};

/// What a forward and backward pass did: bytes kept between the two, and the highest that lived,
/// beyond q, k, v and d_o.
struct Measured {
  double saved, peak;
};
Measured measure(const Case& c, const PlanPtr& plan, Backward mode) {
  const Index length = plan->length();
  const Tensor q = randn({c.batch, length, c.heads, c.dim}, {1, 1}, c.dtype),
               k = randn({c.batch, length, c.kv_heads, c.dim}, {1, 2}, c.dtype),
               v = randn({c.batch, length, c.kv_heads, c.dim}, {1, 3}, c.dtype),
               d_o = randn(q.shape(), {1, 4}, c.dtype);
  AttentionOptions options;
  options.backward = mode;
  options.terms = make_terms(c.terms, c.heads, length, c.dtype);
  if (plan->takes_order()) options.permutation = flip(arange(length), {0});
  std::vector<Tensor> watched{q, k, v};
  visit_terms(options.terms, [&](const std::string&, Tensor& x) { watched.push_back(x); });
  const std::size_t before = memory_stats().live;
  double saved = 0;
  {
    Tape tape;
    for (const Tensor& x : watched) tape.watch(x);
    (void)attention(q, k, v, plan, options);
    EXPECT_TRUE(mode == Backward::taped || tape.size() == 1) << name_of(mode) << ": " << tape.size() << " nodes";
    saved = static_cast<double>(memory_stats().live - before);  // what nobody but the tape holds
  }
  reset_memory_peak();
  Tape tape;
  for (const Tensor& x : watched) tape.watch(x);
  const Tensor o = attention(q, k, v, plan, options);
  const Gradients g = tape.backward(o, d_o);
  EXPECT_EQ(g.size(), watched.size());
  return {saved, static_cast<double>(memory_stats().peak - before)};
}

}  // namespace

Case with(const TermConfig& terms, DType dtype = DType::f32) {
  return {2, 2, 1, 16, dtype, "segment:128", Causality::token, terms};
}

TEST(AttentionMemory, FitsTheFormula) {
  const Case cases[] = {{1, 2, 2, 16, DType::f32, "segment:128"},
                        {1, 2, 1, 16, DType::bf16, "segment:128", Causality::token},
                        {2, 1, 1, 8, DType::f64, "segment:128"},
                        {1, 2, 2, 16, DType::f32, "segment:128+segment:512,dilation=4"},
                        {1, 1, 1, 16, DType::f32, "slide:64", Causality::token},
                        with({.softcap = 5}),
                        with({.alibi = TermConfig::Alibi::learned}),
                        with({.relative = {255}}),
                        with({.bias = {1, 2, 1, 0}}),
                        with({.bias = {1, 1, 0, 1}}),
                        with({.bias = {1, 2, 1, 0}}, DType::bf16),
                        with({.sink = true}),
                        with({.sink = true}, DType::bf16),
                        with({.softcap = 5, .alibi = TermConfig::Alibi::learned, .relative = {63}, .sink = true})};
  // Fused is a promise; the others are estimates of what an op at a time takes, good enough to
  // refuse what will not fit.
  constexpr double kAllowed[] = {0.25, 0.25, 0.05};
  Index drawn = 0;
  for (const Case& c : cases)
    for (const Backward mode : {Backward::fused, Backward::hybrid, Backward::taped}) {
      if (drawn++ % scaled(1, 4) != 0) continue;  // another mode in each case
      const bool terms = c.terms != TermConfig();
      const Index longest = scaled<Index>(terms ? 4096 : mode == Backward::fused ? 65536 : 8192, terms ? 2048 : 4096);
      std::vector<std::pair<double, double>> line;
      double saved_off = 0, peak_off = 0;
      std::string where;
      for (Index length = 1024; length <= longest; length *= 2) {
        const PlanPtr plan = plan_of(length, c.heads, c.pattern, "hilbert", c.causality);
        const AttentionMemory stated = attention_memory(*plan, c.batch, c.kv_heads, c.dim, c.dtype, mode,
                                                        make_terms(c.terms, c.heads, length, c.dtype));
        const Measured m = measure(c, plan, mode);
        const auto off = [](double measured, std::size_t of) { return measured / static_cast<double>(of) - 1; };
        if (std::abs(off(m.saved, stated.saved)) > std::abs(saved_off)) saved_off = off(m.saved, stated.saved);
        if (std::abs(off(m.peak, stated.peak)) > std::abs(peak_off)) peak_off = off(m.peak, stated.peak);
        line.emplace_back(static_cast<double>(length), m.peak);
      }
      // a + b L through the ends fits everything between.
      const double b = (line.back().second - line[0].second) / (line.back().first - line[0].first),
                   a = line[0].second - b * line[0].first;
      for (const auto& [length, peak] : line)
        EXPECT_NEAR(peak / (a + b * length), 1, 0.05) << name_of(mode) << ' ' << c.pattern << " at " << length;
      std::cout << "  " << name_of(mode) << ", " << c.pattern << ", " << name_of(c.dtype) << ", 1024 to " << longest
                << " tokens: peak = " << static_cast<Index>(a) << " + " << b
                << " L bytes; beside attention_memory() at most " << 100 * peak_off << " %, saved " << 100 * saved_off
                << " %\n";
      const double allowed = kAllowed[static_cast<int>(mode)];
      EXPECT_LE(std::abs(saved_off), allowed) << name_of(mode) << ", " << c.pattern << ", " << name_of(c.dtype)
                                              << ": saved bytes against attention_memory()";
      EXPECT_LE(std::abs(peak_off), allowed) << name_of(mode) << ", " << c.pattern << ", " << name_of(c.dtype)
                                             << ": peak bytes against attention_memory()";
    }
}

TEST(AttentionMemory, OfAnOrderWithTheCallIsThatOfItsPlan) {
  for (const Case& c : {Case{1, 2, 2, 16, DType::f32, "segment:128"}, Case{2, 4, 1, 16, DType::bf16, "slide:64"}})
    for (const Index length : {1024, 4096}) {
      const PlanPtr plan = plan_of(length, c.heads, c.pattern, "given");
      const AttentionMemory stated = attention_memory(*plan, c.batch, c.kv_heads, c.dim, c.dtype, Backward::fused);
      const Measured m = measure(c, plan, Backward::fused);
      EXPECT_NEAR(m.peak / static_cast<double>(stated.peak), 1, 0.1) << c.pattern << ", " << length;
      EXPECT_NEAR(m.saved / static_cast<double>(stated.saved), 1, 0.05) << c.pattern << ", " << length;
    }
}

// The gradient of a bias of all pairs is as large as the bias; nothing else is that large.
TEST(AttentionMemory, FusedKeepsToTheFormulaWithABiasOfAllPairs) {
  for (const Shape& bias : {Shape{1, 1, 0, 0}, Shape{1, 2, 0, 0}, Shape{2, 2, 0, 0}})
    for (const Index length : {500, 1024}) {
      const Case c = with({.softcap = 5, .bias = bias, .sink = true});
      const PlanPtr plan = plan_of(length, c.heads, c.pattern, "hilbert", c.causality);
      const AttentionMemory stated = attention_memory(*plan, c.batch, c.kv_heads, c.dim, c.dtype, Backward::fused,
                                                      make_terms(c.terms, c.heads, length));
      const Measured m = measure(c, plan, Backward::fused);
      EXPECT_NEAR(m.peak / static_cast<double>(stated.peak), 1, 0.05) << bias << ", " << length;
      EXPECT_NEAR(m.saved / static_cast<double>(stated.saved), 1, 0.05) << bias << ", " << length;
    }
}

// On a GPU a tile of queries may have 32 KiB in which one pass adds up dQ: of 128 rows to head dim
// 64, of 64 beyond.
TEST(AttentionMemory, OnAGpuItCountsTheSumsOfOnePass) {
  constexpr Index kBatch = 3, kHeads = 2, kLength = 1000;
  const PlanPtr plan = plan_of(kLength, kHeads, "segment:256");
  const auto peak = [&](Index dim, DType dtype, Device on, Backward mode = Backward::fused) {
    return static_cast<Index>(attention_memory(*plan, kBatch, 1, dim, dtype, mode, {}, on).peak);
  };
  const Device gpu{Device::Kind::cuda, 0};
  for (const Index dim : {16, 64, 128}) {
    const Index row = kBatch * kLength, stats = 2 * 4 * row * kHeads, written = 2 * row * dim * (2 * kHeads + 2);
    const Index rows = dim <= 64 ? 128 : 64, tiles = kBatch * kHeads * ((kLength + rows - 1) / rows);
    for (const DType dtype : {DType::bf16, DType::f16})
      EXPECT_EQ(peak(dim, dtype, gpu), std::max(peak(dim, dtype, {}), stats + written + tiles * (32 << 10))) << dim;
    EXPECT_EQ(peak(dim, DType::f32, gpu), peak(dim, DType::f32, {}));
    EXPECT_EQ(peak(dim, DType::bf16, gpu, Backward::hybrid), peak(dim, DType::bf16, {}, Backward::hybrid));
  }
  EXPECT_GT(peak(16, DType::bf16, gpu), peak(16, DType::bf16, {}));
}

// 128 queries of 16,384 tokens are one owner with 256 steps of 64 keys, which 8 blocks share: their
// sums are o and a statistic for each query. Eight owners of keys or fewer have parts of dk and dv.
TEST(AttentionMemory, OnAGpuItCountsTheSumsOfParts) {
  constexpr Index kBatch = 2, kHeads = 4, kKeyHeads = 2, kDim = 64;
  const auto peak = [](const PlanPtr& plan, DType dtype, Device on) {
    return static_cast<Index>(attention_memory(*plan, kBatch, kKeyHeads, kDim, dtype, Backward::fused, {}, on).peak);
  };
  PlanSpec few;
  few.length = 16384, few.heads = kHeads, few.queries = query_run(16384 - 128, 128);
  PlanSpec cross;
  cross.length = 128, cross.heads = kHeads, cross.cross = 16384;
  const Device gpu{Device::Kind::cuda, 0};
  for (const auto& [spec, sums] :
       {std::pair(few, kHeads * 8 * 128 * (kDim + 1)), {cross, kKeyHeads * 8 * 128 * 2 * kDim}}) {
    const PlanPtr plan = make_plan(spec);
    EXPECT_EQ(peak(plan, DType::bf16, gpu), peak(plan, DType::bf16, {}) + 4 * kBatch * sums);
    EXPECT_EQ(peak(plan, DType::f32, gpu), peak(plan, DType::f32, {}));
  }
}

// 16,384 queries ask 1,024 keys: eight owners of these in 8 parts, with 256 steps of two masks. An
// order that comes with the call has its lists besides; kernels walk no others.
TEST(AttentionMemory, OnAGpuItCountsTheSumsOfAnOrderWithTheCallOnce) {
  constexpr Index kBatch = 2, kKeyHeads = 2, kDim = 64, kLength = 16384;
  const PlanPtr plan = plan_of(kLength, 4, "segment:16384,dilation=16", "given", Causality::token);
  const auto peak = [&](Device on) {
    return static_cast<Index>(
        attention_memory(*plan, kBatch, kKeyHeads, kDim, DType::bf16, Backward::fused, {}, on).peak);
  };
  const Index masks = 8 * 256 * 2 * 512, parts = 2 * 4 * kBatch * kKeyHeads * 8 * 1024 * kDim,
              order = (4 * kBatch + 40) * kLength;
  EXPECT_EQ(peak({Device::Kind::cuda, 0}), peak({}) + masks + parts + order);
}

// What a taped call multiplies and keeps follows the tiles that the plan lists, for every pattern;
// and its tape is as long for one as for another.
TEST(AttentionMemory, TapedFollowsTheTiles) {
  struct Family {
    const char *order, *pattern;
    Index length;
    Causality causality = Causality::none;
    double keeps = 100;  // at most so often what fused keeps
  };
  const Family families[] = {{"hilbert:128x128", "window2d:16x16", 16384, Causality::none, 12},
                             {"snake:128x128", "window2d:16x16", 16384, Causality::none, 12},
                             {"hilbert:64x64", "window2d:7x7", 4096},
                             {"hilbert:64x64", "slide2d:3x3", 4096},
                             {"hilbert:64x64", "neighborhood2d:7x7", 4096},
                             {"hilbert:56x56", "neighborhood2d:7x7", 3136, Causality::token},
                             {"row", "slide:144", 4096},
                             {"row", "slide:300", 4096, Causality::token},
                             {"hilbert", "neighborhood:65", 4096},
                             {"hilbert", "segment:128", 4096, Causality::token},
                             {"hilbert", "segment:100", 4096},
                             {"hilbert", "segment:16", 1000},
                             {"hilbert", "segment:256,dilation=4", 4000},
                             {"row", "blocks:64@local:1", 4096},
                             {"row", "blocks:64@global_local:1:2", 4096},
                             {"row", "dense", 1024},
                             {"hilbert", "dense", 1024, Causality::token}};
  constexpr Index kDim = 32;
  std::size_t nodes = 0;
  for (const Family& f : families) {
    if (f.length > scaled(16384, 4096)) continue;
    const PlanPtr plan = plan_of(f.length, 1, f.pattern, f.order, f.causality);
    const std::string name = std::string(f.order) + " " + f.pattern;
    const Tensor q = randn({1, f.length, 1, kDim}, {1, 1}), k = randn(q.shape(), {1, 2}), v = randn(q.shape(), {1, 3});
    std::size_t kept[2] = {};
    double products = 0;
    for (const Backward mode : {Backward::taped, Backward::fused}) {
      Tape tape(Tape::Options{.profile = true});
      for (const Tensor& x : {q, k, v}) tape.watch(x);
      AttentionOptions options;
      options.backward = mode;
      (void)attention(q, k, v, plan, options);
      kept[mode == Backward::fused] = tape.saved_bytes();
      if (mode == Backward::fused) continue;
      if (nodes == 0) nodes = tape.size();
      EXPECT_EQ(tape.size(), nodes) << name;
      for (const NodeReport& n : tape.report())
        if (n.name == "matmul") products += static_cast<double>(n.output.numel() * n.inputs[0][-1]);
    }
    // 128 x 128 tiles: whatever is listed inside them, they are the most that a mode may multiply.
    const double tiles = 2.0 * kDim * static_cast<double>(plan->stats().tile_pairs),
                 keeps = static_cast<double>(kept[0]) / static_cast<double>(kept[1]);
    const bool dense = f.pattern == std::string("dense");
    std::cout << "  " << name << ": taped multiplies " << products / tiles << " of its tiles and keeps " << keeps
              << " of what fused keeps\n";
    EXPECT_LE(products, (dense ? 2.0 : 1.3) * tiles) << name;
    EXPECT_LE(keeps, f.keeps) << name;
    if (dense) { EXPECT_GE(keeps, 2) << name; }
  }
  EXPECT_LE(nodes, 20u);
  std::cout << "  " << nodes << " nodes\n";
}

TEST(AttentionMemory, FusedNeverHoldsScores) {
  // Dense attention: the scores of one head would be L x L x 4 bytes, 16 MiB here.
  const Index length = 2048;
  const Case c{1, 1, 1, 16, DType::f32, "dense"};
  const Measured fused = measure(c, plan_of(length, 1, "dense"), Backward::fused);
  EXPECT_LT(fused.peak, 0.2 * 4 * static_cast<double>(length * length));
  EXPECT_LT(fused.saved, 2.0 * 4 * static_cast<double>(length * (c.dim + 1)));
  const Measured taped = measure(c, plan_of(length, 1, "dense"), Backward::taped);
  EXPECT_GE(taped.saved, 4 * static_cast<double>(length * length));
  std::cout << "dense, L = 2048: fused saves " << fused.saved / 1e6 << " MB and peaks at " << fused.peak / 1e6
            << " MB, taped " << taped.saved / 1e6 << " and " << taped.peak / 1e6 << " MB\n";
}

TEST(AttentionMemory, WithoutATapeOnlyTheOutputLives) {
  const PlanPtr plan = plan_of(2048, 2, "segment:128");
  const Tensor q = randn({1, 2048, 2, 16}, {1, 1}), k = randn(q.shape(), {1, 2}), v = randn(q.shape(), {1, 3});
  for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
    AttentionOptions options;
    options.backward = mode;
    const MemoryStats before = memory_stats();
    {
      const Tensor o = attention(q, k, v, plan, options);
      EXPECT_EQ(memory_stats().live - before.live, o.bytes());
    }
    {
      Tape tape;  // listens, but nothing is watched
      const Tensor o = attention(q, k, v, plan, options);
      EXPECT_EQ(tape.size(), 0u);
      EXPECT_EQ(tape.saved_bytes(), 0u);
      EXPECT_EQ(memory_stats().live - before.live, o.bytes());
    }
    {
      Tape tape;  // something else is watched
      tape.watch(randn({3}, {1, 4}));
      const Tensor o = attention(q, k, v, plan, options);
      EXPECT_EQ(tape.size(), 0u);
    }
    {
      Tape tape;
      tape.watch(q);
      const Tape::Pause pause;
      const Tensor o = attention(q, k, v, plan, options);
      EXPECT_EQ(tape.size(), 0u);
    }
    EXPECT_EQ(memory_stats().live, before.live);
  }
}

TEST(AttentionMemory, StepsDoNotGrow) {
  const PoolLimit limit(64 << 20);  // nothing is asked of the system where a pool may keep what is freed
  const PlanPtr plan = plan_of(96, 2, "segment:32+segment:96,dilation=2", "hilbert", Causality::token);
  const Tensor q = randn({1, 96, 2, 8}, {1, 1}), k = randn(q.shape(), {1, 2}), v = randn(q.shape(), {1, 3}),
               d_o = randn(q.shape(), {1, 4});
  for (const Backward mode : {Backward::fused, Backward::hybrid, Backward::taped}) {
    AttentionOptions options;
    options.backward = mode;
    const auto step = [&] {
      Tape tape;
      for (const Tensor& x : {q, k, v}) tape.watch(x);
      (void)tape.backward(attention(q, k, v, plan, options), d_o);
    };
    for (int i = 0; i < 50; ++i) step();
    const MemoryStats before = memory_stats();
    const std::size_t heap = mallinfo2().uordblks;
    const int steps = mode == Backward::fused ? scaled(10000, 500) : scaled(1000, 200);
    for (int i = 0; i < steps; ++i) step();
    EXPECT_EQ(memory_stats().live, before.live);
    EXPECT_EQ(memory_stats().from_system, before.from_system);
    EXPECT_LT(mallinfo2().uordblks, heap + 100'000) << name_of(mode);
  }
}
