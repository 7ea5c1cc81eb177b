// The three modes: gradients against differences, relations that need no oracle, repeatability,
// options, fallbacks, and guard zones around every output.
#include "ops/hilbert/attention.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/gradcheck.h"
#include "core/parallel.h"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/compact.h"
#include "ops/ops.h"
#include "tests/support/reference.h"
#include "tests/support/same_bits.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

using namespace hilt;

namespace {

constexpr Backward kModes[] = {Backward::taped, Backward::hybrid, Backward::fused};

PlanSpec spec_of(Index length, const char* pattern, const char* order = "row", Causality causality = Causality::none,
                 DilationMode mode = DilationMode::all_queries, Index heads = 1) {
  PlanSpec s;
  s.length = length;
  s.heads = heads;
  s.order = parse_order(order, length);
  s.pattern = parse_pattern(pattern);
  s.causality = causality;
  s.dilation_mode = mode;
  return s;
}

AttentionOptions options_of(Backward mode) {
  AttentionOptions options;
  options.backward = mode;
  return options;
}

struct Inputs {
  Tensor q, k, v, d_o;
};
Inputs random_inputs(Index batch, Index length, Index heads, Index kv_heads, Index dim, DType dtype = DType::f64,
                     std::uint64_t seed = 1) {
  return {randn({batch, length, heads, dim}, {seed, 1}, dtype), randn({batch, length, kv_heads, dim}, {seed, 2}, dtype),
          randn({batch, length, kv_heads, dim}, {seed, 3}, dtype),
          randn({batch, length, heads, dim}, {seed, 4}, dtype)};
}

struct Values {
  std::vector<double> o, dq, dk, dv;
};

Values run(const Inputs& in, const PlanPtr& plan, const AttentionOptions& options) {
  Tape tape;
  for (const Tensor* x : {&in.q, &in.k, &in.v}) tape.watch(*x);
  const Tensor o = attention(in.q, in.k, in.v, plan, options);
  const Gradients g = tape.backward(o, in.d_o);
  return {o.to_vector(), g[in.q].to_vector(), g[in.k].to_vector(), g[in.v].to_vector()};
}

using hilt::same_bits;
bool same_bits(const Values& a, const Values& b) {
  return same_bits(a.o, b.o) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

double largest(const std::vector<double>& x) {
  double m = 0;
  for (const double e : x) m = std::max(m, std::abs(e));
  return m;
}
/// The largest difference, as a share of the largest element.
double off(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst / std::max(largest(a), 1e-300);
}
double off(const Values& a, const Values& b) {
  return std::max(std::max(off(a.o, b.o), off(a.dq, b.dq)), std::max(off(a.dk, b.dk), off(a.dv, b.dv)));
}

ref::Attended set_of(const PlanSpec& s) {
  Order order = s.order;
  if (order.scope == Order::Scope::per_segment) order = with_segment(order, s.pattern[0].size);
  return ref::Attended(s, ref::order_of(order, s.length));
}

/// A tensor with one axis in another order: y[.. i ..] = x[.. from[i] ..].
Tensor picked(const Tensor& x, int axis, const std::vector<Index>& from) {
  return gather(x, axis,
                from_values(std::vector<std::int64_t>(from.begin(), from.end()), {static_cast<Index>(from.size())}));
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::usage);
    return e.what();
  }
  return "(no error)";
}

}  // namespace

// ---- the reference itself -----------------------------------------------------------------------

TEST(Reference, ByHand) {
  // One query, two keys, D = 1: scores 0 and log 3, so P = 1/4, 3/4 and O = (v0 + 3 v1) / 4.
  const ref::Attended set(2, 1, {1, 1, 0, 0});
  const double l3 = std::log(3.0);
  const ref::Inputs<double> in{{l3, 7}, {0, 1}, {10, 2}};
  const ref::Sizes n{1, 2, 1, 1, 1, 1.0, 0, {}};
  const auto out = ref::attention<double>(n, set, in);
  EXPECT_NEAR(out.o[0], 4, 1e-15);
  EXPECT_NEAR(out.lse[0], std::log(4.0), 1e-15);
  EXPECT_EQ(out.o[1], 0);  // no keys
  EXPECT_EQ(out.lse[1], -std::numeric_limits<double>::infinity());
  // dO = 1: Delta = 4, dS = P (V - Delta) = (1.5, -1.5).
  const auto g = ref::attention_gradients<double>(n, set, in, {1, 1});
  EXPECT_NEAR(g.dq[0], -1.5, 1e-15);
  EXPECT_EQ(g.dq[1], 0);
  EXPECT_NEAR(g.dk[0], 1.5 * l3, 1e-15);
  EXPECT_NEAR(g.dk[1], -1.5 * l3, 1e-15);
  EXPECT_NEAR(g.dv[0], 0.25, 1e-15);
  EXPECT_NEAR(g.dv[1], 0.75, 1e-15);
  // A key listed twice counts twice: P = 2/5, 3/5.
  const ref::Attended twice(2, 1, {2, 1, 0, 0});
  EXPECT_NEAR(ref::attention<double>(n, twice, in).o[0], (2 * 10 + 3 * 2) / 5.0, 1e-14);
  EXPECT_NEAR(ref::attention<double>(n, twice, in).lse[0], std::log(5.0), 1e-15);
}

TEST(Reference, FormulasAgreeWithDualNumbersAndDifferences) {
  double worst_dual = 0, worst_difference = 0;
  Index checked = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    const Index length = 1 + static_cast<Index>(seed * 7 % 9), heads = seed % 3 == 0 ? 4 : 2,
                kv_heads = seed % 2 ? heads : heads / 2, dim = 1 + static_cast<Index>(seed % 4),
                batch = 1 + static_cast<Index>(seed % 2);
    std::vector<std::uint8_t> count(at(length * length));
    for (std::size_t i = 0; i < count.size(); ++i) {
      const auto draw = philox({static_cast<std::uint32_t>(i), 5}, seed)[0] % 8;
      count[i] = draw < 4 ? 1 : draw == 4 ? 2 : 0;
    }
    const ref::Attended set(length, heads, count);
    const ref::Sizes n{batch, length, heads, kv_heads, dim, 0.7, seed % 4 == 0 ? 0.3 : 0, {seed, 9}};
    const auto values = [&](Index h, std::uint64_t stream) {
      return randn({batch, length, h, dim}, {seed, stream}, DType::f64).to_vector();
    };
    const ref::Inputs<double> in{values(heads, 1), values(kv_heads, 2), values(kv_heads, 3)};
    const std::vector<double> d_o = values(heads, 4);
    const auto g = ref::attention_gradients<double>(n, set, in, d_o);
    const auto loss = [&](const ref::Inputs<double>& x) {
      const auto out = ref::attention<double>(n, set, x);
      return std::inner_product(out.o.begin(), out.o.end(), d_o.begin(), 0.0);
    };
    const auto judge = [&](std::vector<double> ref::Inputs<double>::*which, const std::vector<double>& slope) {
      for (std::size_t i = 0; i < slope.size(); ++i) {
        ref::Inputs<double> along{std::vector<double>(in.q.size(), 0.0), std::vector<double>(in.k.size(), 0.0),
                                  std::vector<double>(in.v.size(), 0.0)};
        (along.*which)[i] = 1;
        worst_dual = std::max(worst_dual, std::abs(ref::slope_along(n, set, in, along, d_o) - slope[i]));
        constexpr double kStep = 1e-5;
        ref::Inputs<double> up = in, down = in;
        (up.*which)[i] += kStep, (down.*which)[i] -= kStep;
        worst_difference = std::max(worst_difference, std::abs((loss(up) - loss(down)) / (2 * kStep) - slope[i]));
        ++checked;
      }
    };
    judge(&ref::Inputs<double>::q, g.dq), judge(&ref::Inputs<double>::k, g.dk), judge(&ref::Inputs<double>::v, g.dv);
  }
  std::cout << checked << " partial derivatives: dual numbers differ by " << worst_dual << ", central differences by "
            << worst_difference << '\n';
  EXPECT_LE(worst_dual, 1e-13);
  EXPECT_LE(worst_difference, 1e-8);
}

TEST(Reference, OrdersAgreeWithTheLibrary) {
  // Two implementations written apart.
  Index orders = 0;
  for (const char* text : {"row", "snake", "morton", "tiles", "tiles:3x5", "hilbert", "hilbert,chunk=16",
                           "hilbert,chunk=5", "morton,chunk=12", "snake,chunk=9", "tiles:2x3,chunk=20"})
    for (Index length = 1; length <= 300; ++length) {
      const Order order = parse_order(text, length);
      const ref::Pi pi = ref::order_of(order, length);
      if (!pi.independent) continue;
      const Permutation p = build_permutation(order, length);
      ASSERT_EQ(pi.token_at, p.token_at) << text << ' ' << length;
      ASSERT_EQ(pi.position_of, p.position_of) << text << ' ' << length;
      ++orders;
    }
  for (const char* text : {"snake:13x7", "morton:13x7", "tiles:13x7/4x3", "row:13x7"})
    ASSERT_EQ(ref::order_of(parse_order(text, 91), 91).token_at, build_permutation(parse_order(text, 91), 91).token_at)
        << text;
  for (const Index side : {1, 2, 4, 8, 16, 32, 64}) {
    const std::string text = "hilbert:" + std::to_string(side) + "x" + std::to_string(side);
    const ref::Pi pi = ref::order_of(parse_order(text, side * side), side * side);
    ASSERT_TRUE(pi.independent);
    ASSERT_EQ(pi.token_at, build_permutation(parse_order(text, side * side), side * side).token_at) << text;
    ++orders;
  }
  std::cout << orders << " orders\n";
  EXPECT_GT(orders, 2500);
}

// ---- gradients by central differences: the second witness ---------------------------------------

class Attention : public testing::TestWithParam<Backward> {};
INSTANTIATE_TEST_SUITE_P(Modes, Attention, testing::ValuesIn(kModes),
                         [](const auto& mode) { return std::string(name_of(mode.param)); });

TEST_P(Attention, GradientsAgreeWithDifferences) {
  Index checked = 0, drawn = 0;
  double worst = 0;
  const Index stride = scaled(1, 5);  // 5 shares no factor with the 18 of a pattern: every value of each is still met
  for (const char* pattern :
       {"dense", "segment:4", "segment:5,dilation=2,offset=1", "segment:3+segment:12,dilation=3", "slide:2",
        "neighborhood:5", "window2d:2x2", "slide2d:1x1", "neighborhood2d:3x3", "segment:5,shift=2",
        "slide:2,dilation=2,stride=3,causal=1", "neighborhood3d:1x3x2,causal=0x0x1", "window2d:2x3,shift=1",
        "slide:1|segment:16,dilation=5", "segment:6,tail=borrow"})
    for (const char* order : {"row", "hilbert", "hilbert,chunk=7"})
      for (const Causality causality : {Causality::none, Causality::token, Causality::curve})
        for (const double dropout : {0.0, 0.4}) {
          if (drawn++ % stride != 0) continue;
          const PlanPtr plan = make_plan(spec_of(16, pattern, order, causality, DilationMode::all_queries, 2));
          AttentionOptions options = options_of(GetParam());
          options.dropout = dropout;
          options.key = RandomKey{3, 5};
          const Inputs in = random_inputs(1, 16, 2, 1, 3);
          const GradcheckResult r =
              gradcheck([&](std::span<const Tensor> x) { return attention(x[0], x[1], x[2], plan, options); },
                        {in.q, in.k, in.v});
          EXPECT_TRUE(r) << pattern << ", " << order << ", " << name_of(causality) << ", dropout " << dropout << ": "
                         << r.where;
          checked += r.checked, worst = std::max(worst, r.worst);
        }
  std::cout << name_of(GetParam()) << ": " << checked << " partial derivatives, worst at " << worst
            << " of what is allowed\n";
}

TEST_P(Attention, GradientsReachWhatAViewCameFrom) {
  const PlanPtr plan = make_plan(spec_of(6, "segment:4", "hilbert", Causality::token, DilationMode::all_queries, 2));
  const AttentionOptions options = options_of(GetParam());
  // [B, H, L, D] seen as [B, L, H, D]; every other feature; one head for all; a packed projection
  // and its slices.
  const auto judge = [](const Composite& fn, const std::vector<Tensor>& in, const char* what) {
    const GradcheckResult r = gradcheck(fn, in);
    EXPECT_TRUE(r) << what << ": " << r.where;
  };
  const Inputs in = random_inputs(1, 6, 2, 2, 3);
  judge(
      [&](auto x) {
        return attention(permute(x[0], {0, 2, 1, 3}), x[1], x[2], plan, options);
      },
      {randn({1, 2, 6, 3}, {1, 5}, DType::f64), in.k, in.v}, "permuted");
  judge([&](auto x) { return attention(x[0], slice(x[1], 3, 0, 6, 2), x[2], plan, options); },
        {in.q, randn({1, 6, 2, 6}, {1, 6}, DType::f64), in.v}, "every other feature");
  judge(
      [&](auto x) {
        return attention(x[0], x[1], expand(x[2], {1, 6, 2, 3}), plan, options);
      },
      {in.q, in.k, randn({1, 6, 1, 3}, {1, 7}, DType::f64)}, "expanded");
  judge([&](auto x) { return attention(x[0], x[0], x[0], plan, options); }, {in.q}, "q = k = v");
  judge([&](auto x) { return attention(x[0], plan, options); }, {randn({1, 6, 3, 2, 3}, {1, 8}, DType::f64)}, "packed");
  judge(
      [&](auto x) {
        return permute(attention(x[0], x[1], x[2], plan, options), {0, 2, 3, 1});
      },
      {in.q, in.k, in.v}, "its output permuted");
  judge(
      [&](auto x) {
        return expand(sum(attention(x[0], x[1], x[2], plan, options), {1}, true), {1, 4, 2, 3});
      },
      {in.q, in.k, in.v}, "its output summed");
}

TEST_P(Attention, PackedIsTheSameAsApart) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const PlanPtr plan =
        make_plan(spec_of(150, "segment:40", "hilbert", Causality::token, DilationMode::all_queries, 3));
    const Tensor qkv = randn({2, 150, 3, 3, 8}, {1, 1}, dtype), d_o = randn({2, 150, 3, 8}, {1, 2}, dtype);
    const auto part = [&](Index i) { return squeeze(slice(qkv, 2, i, i + 1), 2); };
    const Values apart = run({part(0), part(1), part(2), d_o}, plan, options_of(GetParam()));
    Tape tape;
    tape.watch(qkv);
    const Tensor o = attention(qkv, plan, options_of(GetParam()));
    const Gradients g = tape.backward(o, d_o);
    EXPECT_TRUE(same_bits(o.to_vector(), apart.o));
    const std::vector<double>* const want[] = {&apart.dq, &apart.dk, &apart.dv};
    for (Index i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(slice(g[qkv], 2, i, i + 1).to_vector(), *want[i])) << i;
  }
}

// ---- relations that need no oracle --------------------------------------------------------------

TEST_P(Attention, OneSegmentIsPlainAttention) {
  const Inputs in = random_inputs(2, 200, 3, 3, 8);
  for (const Causality causality : {Causality::none, Causality::token}) {
    const auto with = [&](const char* pattern, const char* order, DilationMode mode = DilationMode::all_queries) {
      return run(in, make_plan(spec_of(200, pattern, order, causality, mode, 3)), options_of(GetParam()));
    };
    const Values dense = with("dense", "row");
    for (const auto& [pattern, order] : {std::pair{"segment:200", "row"},
                                         {"segment:200", "hilbert"},
                                         {"segment:1000", "row"},
                                         {"slide:200", "hilbert"},
                                         {"slide:1000", "row"},
                                         {"window2d:100x100", "row:10x20"},
                                         {"slide3d:2x10x10", "hilbert:2x10x10"},
                                         {"dense", "hilbert"},
                                         {"dense", "tiles:4x4"},
                                         {"segment:200+segment:200", "morton"}})  // every key twice: the same softmax
      EXPECT_LE(off(dense, with(pattern, order)), 1e-13) << pattern << ' ' << order;
    EXPECT_LE(off(dense, with("segment:200", "hilbert", DilationMode::longnet)), 1e-13);
    EXPECT_LE(off(dense, with("segment:200", "hilbert", DilationMode::residue)), 1e-13);
    EXPECT_LE(off(dense, with("segment:200", "hilbert", DilationMode::head_groups)), 1e-13);
  }
}

TEST_P(Attention, AnOrderIsAPermutationOfRows) {
  // Along an order = permute the rows, attend in storage order, permute back.
  for (const char* text : {"hilbert:13x15", "morton:13x15", "tiles:13x15/4x4", "hilbert,chunk=50"})
    for (const char* pattern : {"segment:32", "segment:64,dilation=3,offset=2", "slide:7", "neighborhood:15",
                                "segment:32+segment:64,dilation=2"}) {
      const Inputs in = random_inputs(2, 195, 2, 1, 8);
      const PlanSpec s = spec_of(195, pattern, text, Causality::none, DilationMode::all_queries, 2);
      const Permutation pi = build_permutation(s.order, 195);
      PlanSpec plain = s;
      plain.order = Order{};
      const Values along = run(in, make_plan(s), options_of(GetParam()));
      const Values rows = run({reorder(in.q, pi), reorder(in.k, pi), reorder(in.v, pi), reorder(in.d_o, pi)},
                              make_plan(plain), options_of(GetParam()));
      const auto home = [&](const std::vector<double>& x, Index heads) {
        return restore(from_values(x, {2, 195, heads, 8}), pi).to_vector();
      };
      const Values back{home(rows.o, 2), home(rows.dq, 2), home(rows.dk, 1), home(rows.dv, 1)};
      EXPECT_LE(off(along, back), 1e-13) << text << ' ' << pattern;
      EXPECT_GT(off(along.o, rows.o), 0.01) << "the order moves nothing";
    }
  // Row order is no order.
  const Inputs in = random_inputs(1, 64, 1, 1, 4);
  EXPECT_TRUE(same_bits(run(in, make_plan(spec_of(64, "segment:16", "row")), options_of(GetParam())),
                        run(in, make_plan(spec_of(64, "segment:16", "hilbert,chunk=1")), options_of(GetParam()))));
}

TEST_P(Attention, PermutingHeadsPermutesOutputs) {
  const std::vector<Index> q_heads{4, 5, 0, 1, 2, 3}, kv_heads{2, 0, 1};  // groups of two move together
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Inputs in = random_inputs(1, 150, 6, 3, 8, dtype);
    const PlanPtr plan = make_plan(
        spec_of(150, "segment:50+segment:150,dilation=4", "hilbert", Causality::token, DilationMode::all_queries, 6));
    const Values base = run(in, plan, options_of(GetParam()));
    const Values other = run(
        {picked(in.q, 2, q_heads), picked(in.k, 2, kv_heads), picked(in.v, 2, kv_heads), picked(in.d_o, 2, q_heads)},
        plan, options_of(GetParam()));
    const auto moved = [&](const std::vector<double>& x, Index heads, const std::vector<Index>& from) {
      return picked(from_values(x, {1, 150, heads, 8}), 2, from).to_vector();
    };
    EXPECT_TRUE(same_bits(other.o, moved(base.o, 6, q_heads)));
    EXPECT_TRUE(same_bits(other.dq, moved(base.dq, 6, q_heads)));
    EXPECT_TRUE(same_bits(other.dk, moved(base.dk, 3, kv_heads)));
    EXPECT_TRUE(same_bits(other.dv, moved(base.dv, 3, kv_heads)));
  }
}

TEST_P(Attention, AConstantAddedToARowsLogitsChangesNothing) {
  const Inputs in = random_inputs(1, 100, 2, 2, 6);
  const PlanPtr plan =
      make_plan(spec_of(100, "segment:30+slide:5", "hilbert", Causality::token, DilationMode::all_queries, 2));
  const Tensor shift = randn({1, 1, 2, 6}, {1, 9}, DType::f64);
  const Inputs shifted{in.q, add(in.k, shift), in.v, in.d_o};
  EXPECT_LE(off(run(in, plan, options_of(GetParam())), run(shifted, plan, options_of(GetParam()))), 1e-12);
  // The log-sum-exp moves by just that: scale q . shift.
  const std::vector<double> before = attention_with_lse(in.q, in.k, in.v, plan).lse.to_vector(),
                            after = attention_with_lse(shifted.q, shifted.k, shifted.v, plan).lse.to_vector();
  const std::vector<double> moved = permute(sum(mul(mul(in.q, shift), 1 / std::sqrt(6.0)), {3}), {0, 2, 1}).to_vector();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(after[i] - before[i], moved[i], 1e-12);
}

TEST_P(Attention, DoublingVDoublesO) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Inputs in = random_inputs(1, 140, 2, 1, 8, dtype);
    const PlanPtr plan =
        make_plan(spec_of(140, "segment:64", "hilbert", Causality::token, DilationMode::all_queries, 2));
    const auto doubled = [](std::vector<double> x) {
      for (double& e : x) e *= 2;
      return x;
    };
    const Values base = run(in, plan, options_of(GetParam())),
                 twice = run({in.q, in.k, mul(in.v, 2), in.d_o}, plan, options_of(GetParam()));
    EXPECT_TRUE(same_bits(twice.o, doubled(base.o)));  // a power of two: exactly
    EXPECT_TRUE(same_bits(twice.dv, base.dv));
    if (dtype != DType::f16) {  // gradients of f16 may be subnormal, and then doubling rounds
      EXPECT_TRUE(same_bits(twice.dq, doubled(base.dq)));
      EXPECT_TRUE(same_bits(twice.dk, doubled(base.dk)));
    }
    const Values louder = run({in.q, in.k, in.v, mul(in.d_o, 2)}, plan, options_of(GetParam()));
    EXPECT_TRUE(same_bits(louder.dv, doubled(base.dv)) || dtype == DType::f16);
  }
}

TEST_P(Attention, ASequenceDoesNotDependOnItsBatch) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (const char* pattern : {"segment:48+segment:200,dilation=4", "dense", "slide:20"}) {
      const Index batch = 7, length = 200;
      const Inputs in = random_inputs(batch, length, 3, 1, 8, dtype);
      const PlanPtr plan =
          make_plan(spec_of(length, pattern, "hilbert", Causality::token, DilationMode::all_queries, 3));
      const Values all = run(in, plan, options_of(GetParam()));
      for (Index b = 0; b < batch; ++b) {
        const auto one = [&](const Tensor& x) { return slice(x, 0, b, b + 1); };
        const Values alone = run({one(in.q), one(in.k), one(in.v), one(in.d_o)}, plan, options_of(GetParam()));
        const auto part = [&](const std::vector<double>& x) {
          return std::vector<double>(x.begin() + b * std::ssize(x) / batch,
                                     x.begin() + (b + 1) * std::ssize(x) / batch);
        };
        ASSERT_TRUE(same_bits(part(all.o), alone.o)) << pattern << ' ' << dtype << " sequence " << b;
        ASSERT_TRUE(same_bits(part(all.dq), alone.dq)) << pattern << ' ' << dtype << " sequence " << b;
        ASSERT_TRUE(same_bits(part(all.dk), alone.dk)) << pattern << ' ' << dtype << " sequence " << b;
        ASSERT_TRUE(same_bits(part(all.dv), alone.dv)) << pattern << ' ' << dtype << " sequence " << b;
      }
    }
}

TEST_P(Attention, KeysSplitInTwoAndMergedEqualOneRun) {
  // By hand with the merge of ops/hilbert/modes/README.md, and as two branches of one plan.
  const Index length = 96;
  const Inputs in = random_inputs(2, length, 2, 2, 8);
  PlanSpec first = spec_of(length, "dense", "hilbert", Causality::token, DilationMode::all_queries, 2), second = first,
           both = first;
  first.pattern = {blocks(48, {{0, 0}, {1, 0}})};
  second.pattern = {blocks(48, {{0, 1}, {1, 1}})};
  both.pattern = {first.pattern[0], second.pattern[0]};
  const Values dense =
      run(in, make_plan(spec_of(length, "dense", "hilbert", Causality::token, DilationMode::all_queries, 2)),
          options_of(GetParam()));
  EXPECT_LE(off(dense, run(in, make_plan(both), options_of(GetParam()))), 1e-13);

  const AttentionResult a = attention_with_lse(in.q, in.k, in.v, make_plan(first)),
                        b = attention_with_lse(in.q, in.k, in.v, make_plan(second));
  const std::vector<double> la = a.lse.to_vector(), lb = b.lse.to_vector(), oa = a.o.to_vector(), ob = b.o.to_vector();
  double worst = 0;
  Index empty = 0;
  for (Index i = 0; i < std::ssize(oa); ++i) {
    const Index row = i / 8, head = row % 2, t = row / 2 % length, batch = row / 2 / length;
    const double l1 = la[at((batch * 2 + head) * length + t)], l2 = lb[at((batch * 2 + head) * length + t)];
    empty += std::isinf(l1) || std::isinf(l2);
    const double high = std::max(l1, l2),
                 l = std::isinf(high) ? high : high + std::log(std::exp(l1 - high) + std::exp(l2 - high));
    const double merged = std::isinf(l) ? 0 : std::exp(l1 - l) * oa[at(i)] + std::exp(l2 - l) * ob[at(i)];
    worst = std::max(worst, std::abs(merged - dense.o[at(i)]));
  }
  EXPECT_LE(worst, 1e-13);
  EXPECT_GT(empty, 0) << "no row is empty in one of the parts: -inf is not tried";
}

TEST_P(Attention, RowsWithoutKeysInSomeOrAllBranches) {
  // -inf merged with -inf, and with a number; before and after it.
  const Index length = 40;
  const Inputs in = random_inputs(1, length, 1, 1, 4);
  for (const auto& lists : std::vector<std::vector<BlockPairs>>{
           {{{0, 0}}, {{0, 1}, {1, 1}}, {{2, 2}}}, {{{1, 1}}, {{0, 0}}, {}}, {{}, {{3, 0}}, {}}, {{}, {}}}) {
    PlanSpec s = spec_of(length, "dense", "hilbert");
    s.pattern.clear();
    for (const BlockPairs& pairs : lists) s.pattern.push_back(blocks(10, pairs));
    const ref::Attended set = set_of(s);
    const ref::Sizes n{1, length, 1, 1, 4, 0.5, 0, {}};
    const ref::Inputs<double> x{in.q.to_vector(), in.k.to_vector(), in.v.to_vector()};
    const auto want = ref::attention<double>(n, set, x);
    const auto slopes = ref::attention_gradients<double>(n, set, x, in.d_o.to_vector());
    const Values got = run(in, make_plan(s), options_of(GetParam()));
    const auto near = [&](const std::vector<double>& a, const std::vector<double>& b) {
      for (std::size_t i = 0; i < a.size(); ++i) {
        ASSERT_NEAR(a[i], b[i], 1e-13);
        ASSERT_EQ(a[i] == 0, b[i] == 0);
      }
    };
    near(got.o, want.o), near(got.dq, slopes.dq), near(got.dk, slopes.dk), near(got.dv, slopes.dv);
    const AttentionResult result = attention_with_lse(in.q, in.k, in.v, make_plan(s), options_of(GetParam()));
    const std::vector<double> lse = result.lse.to_vector();
    for (Index t = 0; t < length; ++t) {
      const double l = want.lse[at(t)];
      EXPECT_TRUE(lse[at(t)] == l || std::abs(lse[at(t)] - l) <= 1e-13) << lse[at(t)] << " and " << l;
    }
  }
}

TEST(AttentionModes, AgreeWithEachOther) {
  double worst = 0;
  for (const char* pattern :
       {"dense", "segment:64", "segment:100,dilation=3", "segment:32+segment:128,dilation=4+segment:512,dilation=16",
        "slide:30", "neighborhood2d:5x7", "slide3d:0x9x9,dilation=2,stride=3,causal=1",
        "blocks:50@global_local:1:0|slide:20"}) {
    const Inputs in = random_inputs(2, 400, 4, 2, 16);
    const PlanPtr plan =
        make_plan(spec_of(400, pattern, "hilbert:20x20", Causality::token, DilationMode::all_queries, 4));
    const Values taped = run(in, plan, options_of(Backward::taped)),
                 hybrid = run(in, plan, options_of(Backward::hybrid)),
                 fused = run(in, plan, options_of(Backward::fused));
    EXPECT_TRUE(same_bits(hybrid.o, fused.o)) << pattern;
    worst = std::max({worst, off(taped, fused), off(hybrid, fused)});
  }
  std::cout << "taped, hybrid and fused differ by at most " << worst << " of the largest element\n";
  EXPECT_LE(worst, 1e-12);
}

// A few queries that attend to everything do not make all groups as long as theirs: their keys
// stand in several groups, whose parts are one softmax.
TEST(AttentionModes, AgreeWhereARowIsInSeveralGroups) {
  for (const char* pattern : {"blocks:16@global_local:1:2", "blocks:16@global_local:1:2+segment:64,dilation=3"})
    for (const Causality causality : {Causality::none, Causality::token}) {
      const Inputs in = random_inputs(2, 600, 4, 2, 8);
      const PlanSpec spec = spec_of(600, pattern, "hilbert", causality, DilationMode::longnet, 4);
      const PlanPtr plan = make_plan(spec);
      EXPECT_LT(group_shape(plan->tilings()[0]).k, 300);
      const Values fused = run(in, plan, options_of(Backward::fused));
      EXPECT_LE(off(run(in, plan, options_of(Backward::taped)), fused), 1e-12) << pattern;
      EXPECT_LE(off(run(in, plan, options_of(Backward::hybrid)), fused), 1e-12) << pattern;
      const auto lse = [&](Backward mode) {
        std::vector<double> x = attention_with_lse(in.q, in.k, in.v, plan, options_of(mode)).lse.to_vector();
        for (double& e : x) e = std::max(e, -1e9);  // rows without keys
        return x;
      };
      EXPECT_LE(off(lse(Backward::taped), lse(Backward::fused)), 1e-12) << pattern;
    }
}

// Long sequences of whole tiles: neighbors are taken together backward, unless the last is alone.
TEST(AttentionModes, AgreeWhereTilesGoTogether) {
  for (const Index length : {2048, 2150})
    for (const Causality causality : {Causality::none, Causality::token}) {
      const Inputs in = random_inputs(1, length, 2, 1, 3);
      const PlanPtr plan = make_plan(spec_of(length, "dense", "row", causality, DilationMode::all_queries, 2));
      EXPECT_LE(off(run(in, plan, options_of(Backward::hybrid)), run(in, plan, options_of(Backward::fused))), 1e-12);
    }
}

// ---- bits ---------------------------------------------------------------------------------------

TEST_P(Attention, BitsRepeatOnAnyNumberOfThreads) {
  const int before = thread_count();
  const int repeats = scaled(200, 10);
  const std::pair<DType, const char*> runs[] = {
      {DType::f32, "segment:100+segment:330,dilation=3"}, {DType::f32, "neighborhood2d:5x7"}, {DType::f64, "slide:20"}};
  for (const auto& [dtype, pattern] : runs) {
    const Inputs in = random_inputs(2, 330, 3, 1, 8, dtype);
    const PlanPtr plan =
        make_plan(spec_of(330, pattern, "hilbert:15x22", Causality::token, DilationMode::all_queries, 3));
    AttentionOptions options = options_of(GetParam());
    options.dropout = 0.2;
    options.key = RandomKey{1, 2};
    set_thread_count(1);
    const Values first = run(in, plan, options);
    for (const int threads : {1, 2, 4}) {
      set_thread_count(threads);
      for (int i = 0; i < (dtype == DType::f32 ? repeats : repeats / 10); ++i)
        ASSERT_TRUE(same_bits(run(in, plan, options), first)) << threads << " threads, repeat " << i;
    }
  }
  set_thread_count(before);
}

TEST_P(Attention, BitsDoNotDependOnStrides) {
  // The same numbers in another layout give the same bits.
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Inputs in = random_inputs(2, 140, 2, 2, 20, dtype);
    const PlanPtr plan =
        make_plan(spec_of(140, "segment:50", "hilbert", Causality::token, DilationMode::all_queries, 2));
    const auto heads_first = [](const Tensor& x) {
      return permute(contiguous(permute(x, {0, 2, 1, 3})), {0, 2, 1, 3});
    };
    const auto sparse = [](const Tensor& x) { return slice(pad(x, 3, 3, 4), 3, 3, 3 + x.dim(3)); };
    const Values base = run(in, plan, options_of(GetParam()));
    EXPECT_TRUE(same_bits(base, run({heads_first(in.q), heads_first(in.k), heads_first(in.v), heads_first(in.d_o)},
                                    plan, options_of(GetParam()))))
        << dtype;
    EXPECT_TRUE(
        same_bits(base, run({sparse(in.q), sparse(in.k), sparse(in.v), sparse(in.d_o)}, plan, options_of(GetParam()))))
        << dtype;
  }
}

TEST_P(Attention, OffsetsBeyond31Bits) {
  // Rows 2^30 elements apart in memory that is reserved, not used: token 2 stands beyond 2^31
  // elements, and 2^32 bytes.
  constexpr Index kApart = (Index{1} << 30) + 32, kLength = 4, kDim = 8;
  constexpr std::size_t kBytes = static_cast<std::size_t>(kApart * kLength + 32) * sizeof(float);
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const Storage storage = Storage::borrow(memory, kBytes, {}, [memory] { munmap(memory, kBytes); });
  const Inputs near = random_inputs(1, kLength, 1, 1, kDim, DType::f32);
  const auto far = [&](const Tensor& x, Index offset) {
    Tensor y(storage, x.shape(), Strides{kApart * kLength, kApart, kDim, 1}, offset, DType::f32);
    float* const to = y.mutable_data<float>();
    for (Index t = 0; t < kLength; ++t) std::copy_n(x.data<float>() + t * kDim, kDim, to + t * kApart);
    return y;
  };
  const Inputs spread{far(near.q, 0), far(near.k, kDim), far(near.v, 2 * kDim), far(near.d_o, 3 * kDim)};
  const PlanPtr plan = make_plan(spec_of(kLength, "segment:3", "hilbert", Causality::token));
  EXPECT_TRUE(same_bits(run(near, plan, options_of(GetParam())), run(spread, plan, options_of(GetParam()))));
}

// ---- the tape -----------------------------------------------------------------------------------

TEST_P(Attention, CheckpointKeepsLessAndChangesNothing) {
  for (const double dropout : {0.0, 0.3}) {
    const Inputs in = random_inputs(1, 256, 2, 2, 8, DType::f32);
    const PlanPtr plan =
        make_plan(spec_of(256, "segment:128", "hilbert", Causality::token, DilationMode::all_queries, 2));
    const auto with = [&](bool checkpointed, std::size_t& saved) {
      AttentionOptions options = options_of(GetParam());
      options.dropout = dropout;
      Generator generator(7);
      const Composite fn = [&, options, generator](std::span<const Tensor> x) mutable {
        AttentionOptions o = options;
        if (dropout > 0) o.key = generator.next();
        return mul(attention(x[0], x[1], x[2], plan, o), 1.5);
      };
      Tape tape;
      for (const Tensor* x : {&in.q, &in.k, &in.v}) tape.watch(*x);
      const std::vector<Tensor> list{in.q, in.k, in.v};
      const Tensor o = checkpointed ? checkpoint(fn, list) : fn(list);
      saved = tape.saved_bytes();
      const Gradients g = tape.backward(o, in.d_o);
      return Values{o.to_vector(), g[in.q].to_vector(), g[in.k].to_vector(), g[in.v].to_vector()};
    };
    std::size_t plain = 0, less = 0;
    const Values a = with(false, plain), b = with(true, less);
    EXPECT_TRUE(same_bits(a, b)) << "dropout " << dropout;
    EXPECT_LT(less, plain);
    EXPECT_EQ(less, in.q.bytes() + in.k.bytes() + in.v.bytes());
    std::cout << name_of(GetParam()) << ": saves " << plain << " bytes, checkpointed " << less << '\n';
  }
}

TEST_P(Attention, GradientsOnlyOfWhatIsWatched) {
  const Inputs in = random_inputs(1, 100, 2, 2, 8);
  const PlanPtr plan = make_plan(spec_of(100, "segment:32", "hilbert", Causality::token, DilationMode::all_queries, 2));
  const Values all = run(in, plan, options_of(GetParam()));
  for (unsigned watched = 1; watched < 8; ++watched) {
    Tape tape;
    const Tensor* const inputs[] = {&in.q, &in.k, &in.v};
    for (unsigned i = 0; i < 3; ++i)
      if (watched >> i & 1) tape.watch(*inputs[i]);
    const Tensor o = attention(in.q, in.k, in.v, plan, options_of(GetParam()));
    const Gradients g = tape.backward(o, in.d_o);
    EXPECT_TRUE(same_bits(o.to_vector(), all.o));
    const std::vector<double>* const want[] = {&all.dq, &all.dk, &all.dv};
    for (unsigned i = 0; i < 3; ++i) {
      ASSERT_EQ(g.has(*inputs[i]), (watched >> i & 1) != 0);
      if (watched >> i & 1) {
        EXPECT_TRUE(same_bits(g[*inputs[i]].to_vector(), *want[i])) << "watched " << watched << " input " << i;
      }
    }
  }
}

// What a host with a graph of its own asks for: the tape's gradients bit for bit, from what forward
// gave, on a thread without that tape; and forward does not run again where nobody needs it.
TEST_P(Attention, GradientsFromWhatForwardGave) {
  const auto [q, k, v, d_o] = random_inputs(2, 40, 4, 2, 5);
  const Tensor d_lse = randn({2, 4, 40}, {1, 9}, DType::f64);
  const std::vector<Tensor> tensors{q,
                                    k,
                                    v,
                                    randn({4}, {1, 5}, DType::f64),
                                    randn({4, 7}, {1, 6}, DType::f64),
                                    randn({1, 4, 1, 40}, {1, 7}, DType::f64),
                                    randn({4}, {1, 8}, DType::f64)};
  for (const char* pattern : {"slide:6", "segment:8+segment:40,dilation=5", "blocks:8@top:2"}) {
    const PlanPtr plan = make_plan(spec_of(40, pattern, "row", Causality::none, DilationMode::all_queries, 4));
    AttentionOptions options = options_of(GetParam());
    options.terms = {
        .alibi = true, .slopes = tensors[3], .relative = tensors[4], .bias = tensors[5], .sink = tensors[6]};
    const AttentionResult given = attention_with_lse(q, k, v, plan, options);
    for (const bool with_lse : {false, true}) {
      Tape tape;
      for (const Tensor& x : tensors) tape.watch(x);
      Gradients want;
      if (with_lse) {
        const AttentionResult r = attention_with_lse(q, k, v, plan, options);
        want = tape.backward(add(sum(mul(r.o, d_o)), sum(mul(r.lse, d_lse))));
      } else {
        want = tape.backward(attention(q, k, v, plan, options), d_o);
      }
      std::vector<Tensor> all, some;
      std::vector<std::string> passes;
      std::thread([&] {
        all = attention_gradients(q, k, v, given, {d_o, with_lse ? d_lse : Tensor()}, plan, options);
        for (const AttentionRoute& r : attention_routes()) passes.emplace_back(r.pass);
        some = attention_gradients(q, k, v, given, {d_o, with_lse ? d_lse : Tensor()}, plan, options, 0b0100010);
      }).join();
      ASSERT_EQ(all.size(), tensors.size());
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_EQ(all[i].to_vector(), want[tensors[i]].to_vector()) << pattern << ", " << i;
        EXPECT_EQ(bool(some[i]), i == 1 || i == 5);
      }
      EXPECT_EQ(some[5].to_vector(), all[5].to_vector());
      if (GetParam() == Backward::fused && !plan->looks_at_data()) {
        EXPECT_EQ(std::ranges::count(passes, "forward"), 0);
      }
    }
  }
  const PlanPtr plan = make_plan(spec_of(40, "dense", "row", Causality::none, DilationMode::all_queries, 4));
  const AttentionResult given = attention_with_lse(q, k, v, plan);
  for (const Tensor& d : attention_gradients(q, k, v, given, {d_o, {}}, plan, {}, 0)) EXPECT_FALSE(d);
}

TEST_P(Attention, ALossOfLogSumExpsAlone) {
  for (const char* pattern : {"slide:6", "segment:8+segment:40,dilation=5", "blocks:8@top:2"}) {
    const Inputs in = random_inputs(2, 40, 2, 2, 5);
    const PlanPtr plan = make_plan(spec_of(40, pattern, "row", Causality::none, DilationMode::all_queries, 2));
    const GradcheckResult r = gradcheck(
        [&](std::span<const Tensor> x) {
          return attention_with_lse(x[0], x[1], in.v, plan, options_of(GetParam())).lse;
        },
        {in.q, in.k});
    EXPECT_TRUE(r.ok) << pattern << ": " << r.where;
  }
}

TEST_P(Attention, WritingToWhatIsSavedIsAnError) {
  const PlanPtr plan = make_plan(spec_of(32, "segment:16"));
  for (int which = 0; which < 4; ++which) {
    Inputs in = random_inputs(1, 32, 1, 1, 4);
    Tape tape;
    for (const Tensor* x : {&in.q, &in.k, &in.v}) tape.watch(*x);
    Tensor o = attention(in.q, in.k, in.v, plan, options_of(GetParam()));
    Tensor* const written[] = {&in.q, &in.k, &in.v, &o};
    written[which]->mutable_data<double>()[0] = 1;
    if (which == 3 && GetParam() == Backward::taped) continue;  // its last op does not need its own output
    EXPECT_THROW((void)tape.backward(o, in.d_o), Error) << "written: " << which;
  }
}

TEST(AttentionModes, FusedIsOneNodeTapedIsTheSteps) {
  const Inputs in = random_inputs(1, 64, 1, 1, 4);
  const PlanPtr plan = make_plan(spec_of(64, "segment:16", "hilbert"));
  std::array<std::size_t, 3> nodes{};
  for (std::size_t i = 0; i < 3; ++i) {
    Tape tape;
    tape.watch(in.q);
    (void)attention(in.q, in.k, in.v, plan, options_of(kModes[i]));
    nodes[i] = tape.size();
  }
  EXPECT_GT(nodes[0], 3u);
  EXPECT_EQ(nodes[1], 1u);
  EXPECT_EQ(nodes[2], 1u);
}

// ---- options ------------------------------------------------------------------------------------

TEST_P(Attention, EveryOptionChangesSomething) {
  const Inputs in = random_inputs(1, 64, 2, 2, 4);
  const PlanPtr plan = make_plan(spec_of(64, "segment:32", "hilbert", Causality::token, DilationMode::all_queries, 2));
  AttentionOptions base = options_of(GetParam());
  base.dropout = 0.5;
  base.key = RandomKey{1, 2};
  const auto o_of = [&](auto change) {
    AttentionOptions options = base;
    change(options);
    return run(in, plan, options);
  };
  const Values plain = o_of([](AttentionOptions&) {});
  std::set<std::vector<double>> outputs{plain.o}, gradients{plain.dk};
  const auto differs = [&](const char* what, auto change) {
    const Values v = o_of(change);
    EXPECT_TRUE(outputs.insert(v.o).second) << what;
    EXPECT_TRUE(gradients.insert(v.dk).second) << what;
  };
  differs("scale", [](AttentionOptions& o) { o.scale = 0.3; });
  differs("dropout", [](AttentionOptions& o) { o.dropout = 0.25; });
  differs("no dropout", [](AttentionOptions& o) { o.dropout = 0; });
  differs("seed", [](AttentionOptions& o) { o.key = RandomKey{2, 2}; });
  differs("stream", [](AttentionOptions& o) { o.key = RandomKey{1, 3}; });
  differs("the stream's upper half", [](AttentionOptions& o) { o.key = RandomKey{1, 2 | std::uint64_t{1} << 32}; });
  EXPECT_TRUE(same_bits(plain, o_of([](AttentionOptions& o) { o.scale = 0.5; })));  // what it is by default at D = 4
}

TEST_P(Attention, DropoutKeepsWhatTheMaskSays) {
  // V = 1 and equal logits: O is the share of keys kept over 1 - p, the lse is that of all of them.
  const Index length = 64;
  const Tensor q = zeros({2, length, 2, 1}, DType::f64), k = zeros(q.shape(), DType::f64),
               v = ones(q.shape(), DType::f64);
  const PlanPtr plan = make_plan(spec_of(length, "dense", "hilbert", Causality::none, DilationMode::all_queries, 2));
  AttentionOptions options = options_of(GetParam());
  options.dropout = 0.25;
  options.key = RandomKey{11, 13};
  const std::vector<double> o = attention(q, k, v, plan, options).to_vector();
  double mean = 0;
  for (Index b = 0; b < 2; ++b)
    for (Index t = 0; t < length; ++t)
      for (Index h = 0; h < 2; ++h) {
        Index kept = 0;
        for (Index u = 0; u < length; ++u)
          kept +=
              kernels::attention_keeps(*options.key, static_cast<std::uint32_t>(b * 2 + h),
                                       static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(u), drop_rate(0.25));
        const double x = o[at((b * length + t) * 2 + h)];
        EXPECT_NEAR(x, static_cast<double>(kept) / static_cast<double>(length) / 0.75, 1e-13);
        mean += x / (4.0 * static_cast<double>(length));
      }
  EXPECT_NEAR(mean, 1, 0.02);
  const std::vector<double> lse = attention_with_lse(q, k, v, plan, options).lse.to_vector();
  for (const double l : lse) EXPECT_NEAR(l, std::log(64.0), 1e-13);
}

TEST(AttentionOptions, RefusedWithWhatCameAndWhatWasExpected) {
  const PlanPtr plan = make_plan(spec_of(16, "segment:4", "row", Causality::none, DilationMode::all_queries, 4));
  const Inputs in = random_inputs(1, 16, 4, 2, 4);
  const auto with = [&](const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {}) {
    return error_of([&] { (void)attention(q, k, v, plan, options); });
  };
  AttentionOptions no_key, much, negative, nan;
  no_key.dropout = 0.5;
  much.dropout = 1, much.key = RandomKey{};
  negative.dropout = -0.1, negative.key = RandomKey{};
  nan.dropout = std::numeric_limits<double>::quiet_NaN(), nan.key = RandomKey{};
  const std::pair<const char*, std::string> refused[] = {
      {"rank 3", with(squeeze(in.q, 0), in.k, in.v)},
      {"another length", with(slice(in.q, 1, 0, 15), slice(in.k, 1, 0, 15), slice(in.v, 1, 0, 15))},
      {"more queries than tokens", with(cat({in.q, in.q}, 1), in.k, in.v)},
      {"another length of k", with(in.q, slice(in.k, 1, 0, 15), in.v)},
      {"k and v differ", with(in.q, in.k, slice(in.v, 2, 0, 1))},
      {"another head dim", with(in.q, slice(in.k, 3, 0, 3), slice(in.v, 3, 0, 3))},
      {"another head dim of v", with(in.q, in.k, slice(in.v, 3, 0, 3))},
      {"heads not divisible",
       with(in.q, randn({1, 16, 3, 4}, {1, 1}, DType::f64), randn({1, 16, 3, 4}, {1, 2}, DType::f64))},
      {"no kv heads", with(in.q, slice(in.k, 2, 0, 0), slice(in.v, 2, 0, 0))},
      {"heads of the plan", with(slice(in.q, 2, 0, 2), in.k, in.v)},
      {"another batch", with(in.q, randn({2, 16, 2, 4}, {1, 1}, DType::f64), randn({2, 16, 2, 4}, {1, 2}, DType::f64))},
      {"types differ", with(in.q, to(in.k, DType::f32), in.v)},
      {"integers",
       with(zeros({1, 16, 4, 4}, DType::i32), zeros({1, 16, 4, 4}, DType::i32), zeros({1, 16, 4, 4}, DType::i32))},
      {"undefined", with(Tensor{}, in.k, in.v)},
      {"no plan", error_of([&] { (void)attention(in.q, in.k, in.v, PlanPtr{}); })},
      {"dropout without a key", with(in.q, in.k, in.v, no_key)},
      {"dropout 1", with(in.q, in.k, in.v, much)},
      {"dropout -0.1", with(in.q, in.k, in.v, negative)},
      {"dropout NaN", with(in.q, in.k, in.v, nan)},
      {"packed of rank 4", error_of([&] { (void)attention(in.q, plan); })},
      {"packed of four", error_of([&] {
         (void)attention(randn({1, 16, 4, 4, 4}, {1, 1}), plan);
       })},
      {"a mode", error_of([] { (void)parse_backward("fsued"); })},
      {"reorder, another length", error_of([&] { (void)reorder(in.q, build_permutation(Order{}, 15)); })},
      {"restore, no such axis", error_of([&] { (void)restore(in.q, build_permutation(Order{}, 16), 4); })},
  };
  for (const auto& [what, message] : refused) {
    EXPECT_NE(message, "(no error)") << what;
    std::cout << "  " << what << ": " << message << '\n';
  }
  for (const Backward mode : kModes) EXPECT_EQ(parse_backward(name_of(mode)), mode);
}

// ---- fallbacks ----------------------------------------------------------------------------------

TEST_P(Attention, FallbacksAreNamedCountedAndMayBeErrors) {
  // Whatever makes a call run in another mode than asked, the result is that of the mode asked for,
  // the reason is told, and `strict` makes it an error.
  clear_attention_fallbacks();
  EXPECT_TRUE(attention_fallbacks().empty());
  Index fell = 0;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const Index dim : {1, 8, 128, 256, 300})
      for (const char* pattern : {"dense", "segment:7,dilation=2", "slide:3"}) {
        const PlanPtr plan = make_plan(spec_of(20, pattern, "hilbert", Causality::token));
        const Inputs in = random_inputs(1, 20, 1, 1, dim, dtype);
        clear_attention_fallbacks();
        const Values got = run(in, plan, options_of(GetParam()));
        const std::size_t told = attention_fallbacks().size();
        AttentionOptions strict = options_of(GetParam());
        strict.strict = true;
        if (told == 0) {
          EXPECT_TRUE(same_bits(run(in, plan, strict), got));
        } else {
          ++fell;
          EXPECT_EQ(attention_fallbacks()[0].asked, GetParam());
          EXPECT_NE(attention_fallbacks()[0].ran, GetParam());
          EXPECT_FALSE(attention_fallbacks()[0].reason.empty());
          EXPECT_THROW((void)run(in, plan, strict), Error);
        }
      }
  std::cout << name_of(GetParam()) << ": " << fell << " fallbacks\n";
}

TEST_P(Attention, NotFiniteInputsAreHandedOver) {
  // A product by whole blocks would spread a NaN that the plan masks. Whether or not this mode
  // hands the call over, the NaN stays where the definitions put it, and a hand-over is told.
  const PlanPtr plan = make_plan(spec_of(40, "slide:3", "hilbert", Causality::token));
  Inputs in = random_inputs(1, 40, 1, 1, 4);
  in.k.mutable_data<double>()[20 * 4 + 1] = std::numeric_limits<double>::quiet_NaN();
  clear_attention_fallbacks();
  const Values got = run(in, plan, options_of(GetParam()));
  const std::size_t told = attention_fallbacks().size();
  const ref::Attended set = set_of(plan->spec());
  for (Index t = 0; t < 40; ++t) EXPECT_EQ(std::isnan(got.o[at(t * 4)]), set.times(0, t, 20) > 0) << t;
  AttentionOptions strict = options_of(GetParam());
  strict.strict = true;
  if (told > 0) {
    EXPECT_EQ(attention_fallbacks()[0].asked, GetParam());
    EXPECT_NE(attention_fallbacks()[0].ran, GetParam());
    EXPECT_FALSE(attention_fallbacks()[0].reason.empty());
    const std::string error = error_of([&] { (void)run(in, plan, strict); });
    EXPECT_NE(error.find(attention_fallbacks()[0].reason), std::string::npos) << error;
    std::cout << name_of(GetParam()) << ", strict: " << error << '\n';
    for (int i = 0; i < 100; ++i) (void)run(in, plan, options_of(GetParam()));
    EXPECT_LE(attention_fallbacks().size(), 64u);
  } else {
    EXPECT_NO_THROW((void)run(in, plan, strict));
  }
  clear_attention_fallbacks();
  EXPECT_TRUE(attention_fallbacks().empty());
}

// ---- kernels by themselves ----------------------------------------------------------------------

namespace {

/// Memory with 1,024 guard elements on both sides, filled with `fill`.
template <class T> class Guarded {
 public:
  Guarded(Index elements, T fill) : memory_(at(elements) + 2 * kGuard, T(kMark)), elements_(at(elements)) {
    std::fill_n(data(), elements, fill);
  }
  T* data() { return memory_.data() + kGuard; }
  bool is_whole() const {
    const auto marked = [](T x) { return static_cast<float>(x) == kMark; };
    return std::all_of(memory_.begin(), memory_.begin() + kGuard, marked) &&
           std::all_of(memory_.end() - kGuard, memory_.end(), marked);
  }
  std::vector<double> values() const {
    std::vector<double> out;
    for (std::size_t i = 0; i < elements_; ++i) out.push_back(static_cast<double>(memory_[at(kGuard) + i]));
    return out;
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 1024;
  static constexpr float kMark = -1000;  // the same in every type
  std::vector<T> memory_;
  std::size_t elements_;
};

/// Forward and backward by the kernels of one instruction set, outputs poisoned and guarded,
/// operands between NaNs.
template <Isa I, class T> void judge_kernels(const PlanSpec& spec, Index dim, double tolerance) {
  using S = kernels::Stat<T>;
  const Plan plan(spec);
  const Index batch = 2, length = spec.length, heads = spec.heads, kv_heads = heads / 2, pitch = dim + 5;
  const Inputs in = random_inputs(batch, length, heads, kv_heads, dim, dtype_of<T>);
  const ref::Sizes n{batch, length, heads, kv_heads, dim, 1 / std::sqrt(static_cast<double>(dim)), 0, {}};
  const ref::Inputs<double> x{in.q.to_vector(), in.k.to_vector(), in.v.to_vector()};
  const ref::Attended set = set_of(spec);
  const auto want = ref::attention<double>(n, set, x);
  const auto slopes = ref::attention_gradients<double>(n, set, x, in.d_o.to_vector());

  const T nan = T(std::numeric_limits<float>::quiet_NaN());
  const auto written = [&](S* data, Index h) {
    return kernels::Output{data, dtype_of<S>, length * h * dim, h * dim, dim};
  };
  const auto operand = [&](const Tensor& t, Index h) {
    Guarded<T> g(batch * length * h * pitch, nan);
    for (Index r = 0; r < batch * length * h; ++r) std::copy_n(t.data<T>() + r * dim, dim, g.data() + r * pitch);
    return g;
  };
  Guarded<T> q = operand(in.q, heads), k = operand(in.k, kv_heads), v = operand(in.v, kv_heads),
             d_o = operand(in.d_o, heads);
  const auto read = [&](Guarded<T>& g, Index h) {
    return kernels::Input{g.data(), dtype_of<T>, length * h * pitch, h * pitch, pitch};
  };
  const S poison = std::numeric_limits<S>::quiet_NaN();
  Guarded<S> o(batch * length * heads * dim, poison), lse(batch * heads * length, poison),
      delta(batch * heads * length, poison), dq(batch * length * heads * dim, 0),
      dk(batch * length * kv_heads * dim, 0), dv(batch * length * kv_heads * dim, 0);
  const kernels::AttentionSizes sizes{
      .batch = batch, .queries = length, .heads = heads, .kv_heads = kv_heads, .dim = dim, .scale = n.scale, .key = {}};
  std::vector<std::int32_t> all(at(heads));
  std::iota(all.begin(), all.end(), 0);
  const kernels::Kernels on = kernels::kernels_at(CpuAt<I>{}, dtype_of<T>);
  const auto pass_over = [&](std::int32_t tiling) {
    return kernels::AttentionPass{sizes,          &plan.tilings()[at(tiling)], all.data(),       heads,
                                  read(q, heads), read(k, kv_heads),           read(v, kv_heads)};
  };
  bool fresh = true;
  for (const std::int32_t i : plan.tilings_of(0)) {
    const kernels::ForwardPass pass{pass_over(i), written(o.data(), heads), lse.data(), fresh};
    on.forward({}, pass, on.route_forward({}, pass));
    fresh = false;
  }
  Guarded<T> stored(batch * length * heads * pitch, nan);
  for (Index r = 0; r < batch * length * heads; ++r)
    for (Index d = 0; d < dim; ++d) stored.data()[r * pitch + d] = T(o.data()[r * dim + d]);
  on.delta({}, {sizes, read(stored, heads), read(d_o, heads), delta.data()});
  for (const std::int32_t i : plan.tilings_of(0)) {
    const kernels::BackwardPass pass{pass_over(i),
                                     read(stored, heads),
                                     read(d_o, heads),
                                     lse.data(),
                                     delta.data(),
                                     written(dq.data(), heads),
                                     written(dk.data(), kv_heads),
                                     written(dv.data(), kv_heads)};
    on.backward({}, pass, on.route_backward({}, pass, false));
  }
  EXPECT_TRUE(q.is_whole() && k.is_whole() && v.is_whole() && d_o.is_whole() && stored.is_whole());
  EXPECT_TRUE(o.is_whole() && lse.is_whole() && delta.is_whole() && dq.is_whole() && dk.is_whole() && dv.is_whole())
      << "a kernel wrote beside its output";
  const std::string where =
      std::string(name_of(I)) + ' ' + std::string(name_of(dtype_of<T>)) + ", dim " + std::to_string(dim);
  EXPECT_LE(off(want.o, o.values()), tolerance) << where;
  EXPECT_LE(off(slopes.dq, dq.values()), tolerance) << where;
  EXPECT_LE(off(slopes.dk, dk.values()), tolerance) << where;
  EXPECT_LE(off(slopes.dv, dv.values()), tolerance) << where;
  std::vector<double> finite_want, finite_got;
  for (std::size_t i = 0; i < want.lse.size(); ++i) {
    const double got = static_cast<double>(lse.data()[i]);
    EXPECT_EQ(std::isinf(got), std::isinf(want.lse[i])) << where;
    if (std::isfinite(got)) finite_want.push_back(want.lse[i]), finite_got.push_back(got);
  }
  EXPECT_LE(off(finite_want, finite_got), tolerance) << where;
}

template <Isa I> void judge_instruction_set() {
  const PlanSpec specs[] = {
      spec_of(150, "segment:60+slide:9", "hilbert", Causality::token, DilationMode::all_queries, 2),
      spec_of(131, "segment:64,dilation=4,offset=3", "hilbert", Causality::token, DilationMode::all_queries, 4),
      spec_of(200, "dense", "row", Causality::none, DilationMode::all_queries, 2),
      spec_of(150, "segment:30|slide:7", "hilbert", Causality::token, DilationMode::all_queries, 2),
      spec_of(144, "slide3d:1x3x2,stride=4,causal=1", "hilbert:3x6x8", Causality::none, DilationMode::all_queries, 2),
      spec_of(140, "neighborhood2d:3x9", "hilbert:10x14", Causality::curve, DilationMode::all_queries, 2)};
  Index turn = 0;
  for (const PlanSpec& spec : specs)
    for (const Index dim : {1, 3, 8, 16, 20, 33, 64, 96, 128}) {
      judge_kernels<I, float>(spec, dim, 2e-5);
      if (++turn % 3 == 0) judge_kernels<I, double>(spec, dim, 1e-13);
      if (turn % 3 == 1) judge_kernels<I, bf16>(spec, dim, 2e-2);
      if (turn % 3 == 2) judge_kernels<I, f16>(spec, dim, 3e-3);
    }
}

TEST(AttentionMisuse, TheLayoutOfOthersIsNamed) {
  const Inputs in = random_inputs(1, 2, 8, 8, 4);  // [B, H, L, D] of 2 heads and 8 tokens
  const PlanPtr plan = make_plan(spec_of(8, "dense", "row", Causality::none, DilationMode::all_queries, 2));
  try {
    attention(in.q, in.k, in.v, plan);
    FAIL() << "nothing was said";
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "attention: 2 tokens, but the plan is for 8; this looks like [batch, heads, length, dim]: transpose(x, "
        "1, 2) is the layout here");
  }
}

/// What attention_into is given, within memory that it must not touch.
struct Given {
  const char* name;
  Tensor all, o;
};
std::vector<Given> places_for(const Shape& shape, DType dtype) {
  const Index b = shape[0], l = shape[1], h = shape[2], d = shape[3];
  std::vector<Given> out;
  const auto place = [&](const char* name, const Strides& strides, Index offset) {
    const Tensor all = full({2 * shape.numel() + 64}, -77, dtype);
    out.push_back({name, all, Tensor(all.storage(), shape, strides, offset, dtype)});
  };
  place("dense", {l * h * d, h * d, d, 1}, 0);
  place("heads first, one element further", {l * h * d, d, l * d, 1}, 1);
  place("rows apart", {l * h * (d + 3), h * (d + 3), d + 3, 1}, 3);
  place("tokens first", {h * d, b * h * d, d, 1}, 0);
  return out;
}

TEST(AttentionInto, WritesTheSameBitsAndNothingElse) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (const char* pattern : {"dense", "slide:6", "segment:8+segment:40,dilation=5", "blocks:8@top:2"})
      for (const bool sink : {false, true}) {
        const Inputs in = random_inputs(2, 40, 4, 2, 5, dtype);
        const PlanPtr plan = make_plan(spec_of(
            40, pattern, "row", pattern[0] == 'b' ? Causality::none : Causality::token, DilationMode::all_queries, 4));
        AttentionOptions options;
        if (sink) options.terms.sink = randn({4}, {1, 9}, dtype == DType::f64 ? dtype : DType::f32);
        const std::vector<double> expected = attention(in.q, in.k, in.v, plan, options).to_vector();
        for (Given& given : places_for(in.q.shape(), dtype)) {
          attention_into(given.o, in.q, in.k, in.v, plan, options);
          EXPECT_TRUE(same_bits(given.o.to_vector(), expected)) << given.name << ", " << dtype << ", " << pattern;
          copy(given.o, full(in.q.shape(), -77, dtype));
          EXPECT_EQ(given.all.to_vector(), full(given.all.shape(), -77, dtype).to_vector()) << given.name;
        }
      }
}

TEST(AttentionInto, OneRowOfACacheIntoOneRow) {
  const Inputs in = random_inputs(1, 24, 2, 2, 8, DType::f32);
  const PlanPtr plan = make_plan(spec_of(24, "slide:5", "row", Causality::token, DilationMode::all_queries, 2));
  Tensor out = zeros(in.q.shape());
  for (Index t = 0; t < 24; ++t) {
    PlanSpec spec = plan->spec();
    spec.queries = query_run(t, 1);
    Tensor row = slice(out, 1, t, t + 1);
    attention_into(row, slice(in.q, 1, t, t + 1), in.k, in.v, make_plan(spec));
  }
  EXPECT_EQ(out.to_vector(), attention(in.q, in.k, in.v, plan).to_vector());
}

TEST(AttentionInto, MakesNoOther) {
  const Inputs in = random_inputs(1, 256, 2, 2, 32, DType::f32);
  const PlanPtr plan = make_plan(spec_of(256, "slide:16", "row", Causality::none, DilationMode::all_queries, 2));
  Tensor o = empty(in.q.shape());
  reset_memory_peak();
  const std::size_t before = memory_stats().live;
  attention_into(o, in.q, in.k, in.v, plan);
  EXPECT_LT(memory_stats().peak - before, o.bytes());  // lse alone
}

TEST(AttentionInto, RefusesWhatItCannotWriteTo) {
  const Inputs in = random_inputs(1, 8, 2, 2, 4);
  const PlanPtr plan = make_plan(spec_of(8, "dense", "row", Causality::none, DilationMode::all_queries, 2));
  const auto error = [&](Tensor o) {
    try {
      attention_into(o, in.q, in.k, in.v, plan);
      return std::string("nothing");
    } catch (const Error& e) { return std::string(e.what()); }
  };
  EXPECT_EQ(error({}), "attention_into: o must be f64[1, 8, 2, 4] on cpu, as q is");
  EXPECT_EQ(error(empty({1, 8, 2, 4})), "attention_into: o must be f64[1, 8, 2, 4] on cpu, as q is");
  EXPECT_EQ(error(empty({8, 2, 4}, DType::f64)), "attention_into: o must be f64[1, 8, 2, 4] on cpu, as q is");
  EXPECT_EQ(error(expand(zeros({1, 1, 2, 4}, DType::f64), {1, 8, 2, 4})),
            "attention_into: o has stride 0 at axis 1; its rows lie apart, and their elements one after the other");
  EXPECT_EQ(error(transpose(zeros({1, 8, 4, 2}, DType::f64))),
            "attention_into: o has stride 2 at axis 3; its rows lie apart, and their elements one after the other");
  EXPECT_EQ(error(in.v), "attention_into: o shares memory with an input");
  Tape tape;
  tape.watch(in.k);
  EXPECT_EQ(error(empty({1, 8, 2, 4}, DType::f64)).substr(0, 37), "attention_into: a tape knows an input");
  const Tape::Pause pause;
  EXPECT_EQ(error(empty({1, 8, 2, 4}, DType::f64)), "nothing");
}

}  // namespace

TEST(AttentionKernels, StayInsideTheirOutputsOnEveryInstructionSet) {
  // Tolerances: f64 and f32 sums of some hundred terms; in 16 bits delta is taken from a rounded o.
  const auto judge = []<Isa I>(CpuAt<I>) {
    if constexpr (is_built(I))
      if (active_isa() >= I) judge_instruction_set<I>();
  };
  judge(CpuAt<kIsas[0]>{});
  judge(CpuAt<Isa::avx2>{});
  judge(CpuAt<Isa::avx512>{});
  std::cout << "best instruction set here: " << name_of(active_isa()) << '\n';
}

// ---- which kernel ran ---------------------------------------------------------------------------

TEST(AttentionKernels, AFewTokensStayOnTheirThread) {
  const Threads two(2);
  int jobs = 0;
  set_executor([&jobs](int n, const std::function<void(int)>& task) {
    ++jobs;
    for (int i = 0; i < n; ++i) task(i);
  });
  const auto jobs_of = [&](Index tokens) {
    PlanSpec spec;
    spec.length = tokens, spec.heads = 4;
    const Tensor q = randn({1, tokens, 4, 64}, {1, 1});
    jobs = 0;
    Tape tape;
    tape.watch(q);
    (void)tape.backward(attention(q, q, q, make_plan(spec)), q);
    return jobs;
  };
  const int few = jobs_of(16), many = jobs_of(128);
  set_executor({});
  EXPECT_EQ(few, 0);
  EXPECT_GT(many, 1);
}

TEST(AttentionRoutes, EveryPassIsToldOnce) {
  const Inputs in = random_inputs(1, 300, 2, 2, 4);
  const PlanPtr plan =
      make_plan(spec_of(300, "segment:64+slide:3", "row", Causality::none, DilationMode::all_queries, 2));
  clear_attention_routes();
  (void)run(in, plan, options_of(Backward::fused));
  std::map<std::string_view, int> passes;
  for (const AttentionRoute& r : attention_routes()) {
    EXPECT_TRUE(r.route.starts_with("cpu")) << r.route;
    ++passes[r.pass];
  }
  EXPECT_EQ(passes["forward"] % 2, 0);  // two branches
  EXPECT_EQ(passes["backward"], 2);
  for (int i = 0; i < 40; ++i) (void)run(in, plan, options_of(Backward::fused));
  EXPECT_EQ(attention_routes().size(), 64u);
}

// Both passes of the first call make the lists that they read, which stay with the plan; a later
// call finds them, and so does whoever asks what it would choose.
TEST(AttentionRoutes, TheFirstCallOfAPlanPaysForItsLists) {
  const Inputs in = random_inputs(1, 300, 2, 2, 4);
  const auto plan =
      std::make_shared<const Plan>(spec_of(300, "slide:9", "row", Causality::none, DilationMode::all_queries, 2));
  const Tiling& t = plan->tilings()[0];
  (void)run(in, plan, options_of(Backward::fused));
  using Kept = std::unique_ptr<const Compact>;
  const Kept& kept = t.memo.get<Kept>({1}, [] { return Kept(); });
  ASSERT_NE(kept, nullptr) << "the first call has made none, or others";
  EXPECT_EQ(t.memo.get<Kept>({0}, [] { return Kept(); }), nullptr) << "nobody reads these";
  (void)run(in, plan, options_of(Backward::fused));
  EXPECT_EQ(&compact(t, true), kept.get());
}

// What a CPU chooses is told as the routes of a GPU are.
TEST(AttentionRoutes, ACpuTellsWhatItChose) {
  const auto told = [](Index length, const char* pattern, Index kv_heads = 2, bool capped = false) {
    const Inputs in = random_inputs(1, length, 2, kv_heads, 64);
    AttentionOptions options = options_of(Backward::fused);
    if (capped) options.terms.softcap = 20;
    clear_attention_routes();
    (void)run(in, make_plan(spec_of(length, pattern, "row", Causality::none, DilationMode::all_queries, 2)), options);
    const AttentionRoute r = attention_routes().back();
    return std::string(r.pass) + " on " + std::string(r.route) + ": " + std::string(r.reason);
  };
  const std::string turns = "tasks that meet the same keys add their gradients in turns";
  EXPECT_EQ(told(128, "dense"), "backward on cpu: ");
  EXPECT_EQ(told(1024, "dense"), "backward on cpu: " + turns);
  EXPECT_EQ(told(128, "dense", 1), "backward on cpu: " + turns);
  EXPECT_EQ(told(1024, "slide:1").substr(0, 22), "backward on cpu_pairs:");
  EXPECT_EQ(told(128, "dense", 2, true), "backward on cpu: score terms take whole tiles of keys");
  EXPECT_EQ(told(128, "dense+dense", 1), "backward on cpu: gradients are added to those of other passes; " + turns);
}

// ---- HILT_FORCE_ORDER ---------------------------------------------------------------------------

TEST_P(Attention, ForcedRowOrder) {
  const Inputs in = random_inputs(1, 64, 1, 1, 4);
  const PlanSpec s = spec_of(64, "segment:8", "hilbert:8x8");
  const Values along = run(in, make_plan(s), options_of(GetParam())),
               rows = run(in, make_plan(spec_of(64, "segment:8", "row:8x8")), options_of(GetParam()));
  EXPECT_GT(off(along.o, rows.o), 0.01);
  const Values forced = [&] {
    const Setting row("HILT_FORCE_ORDER", "row");
    return run(in, make_plan(s), options_of(GetParam()));
  }();
  EXPECT_TRUE(same_bits(forced, rows));
  EXPECT_TRUE(same_bits(run(in, make_plan(s), options_of(GetParam())), along));
}

// ---- reorder, restore ---------------------------------------------------------------------------

TEST(Reorder, IsGatherAndRestoreItsInverse) {
  for (const char* text : {"hilbert:5x7", "hilbert:7x5", "morton:5x7", "tiles:5x7/2x3"}) {
    const Permutation p = build_permutation(parse_order(text, 35), 35);
    ASSERT_NE(p.token_at, p.position_of);  // its own inverse would prove nothing
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      const Tensor x = randn({2, 35, 3}, {1, 1}, dtype);
      const std::vector<double> flat = x.to_vector(), y = reorder(x, p).to_vector(), z = restore(x, p).to_vector();
      for (Index b = 0; b < 2; ++b)
        for (Index i = 0; i < 35; ++i)
          for (Index d = 0; d < 3; ++d) {
            EXPECT_EQ(y[at((b * 35 + i) * 3 + d)], flat[at((b * 35 + p.token_at[at(i)]) * 3 + d)]);
            EXPECT_EQ(z[at((b * 35 + p.token_at[at(i)]) * 3 + d)], flat[at((b * 35 + i) * 3 + d)]);
          }
      EXPECT_TRUE(same_bits(restore(reorder(x, p), p).to_vector(), flat));
      EXPECT_TRUE(same_bits(reorder(restore(x, p), p).to_vector(), flat));
      // Each is the other's backward, exactly: nothing is added.
      Tape tape;
      tape.watch(x);
      const Tensor out = reorder(x, p), dy = randn(out.shape(), {1, 2}, dtype);
      EXPECT_TRUE(same_bits(tape.backward(out, dy)[x].to_vector(), restore(dy, p).to_vector()));
      Tape other;
      other.watch(x);
      const Tensor back = restore(x, p);
      EXPECT_TRUE(same_bits(other.backward(back, dy)[x].to_vector(), reorder(dy, p).to_vector()));
    }
    const Tensor x = randn({3, 2, 35}, {1, 3}, DType::f64);
    EXPECT_TRUE(same_bits(restore(reorder(x, p, 2), p, 2).to_vector(), x.to_vector()));
    EXPECT_TRUE(same_bits(reorder(x, p, -1).to_vector(), reorder(x, p, 2).to_vector()));
    EXPECT_TRUE(gradcheck([&](auto in) { return mul(reorder(in[0], p, 2), restore(in[0], p, 2)); }, {x}));
  }
}
