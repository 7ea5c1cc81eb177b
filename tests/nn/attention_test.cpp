// HilbertSelfAttention against a softmax in loops over what the plan's definition says attends.
#include "nn/attention.h"
#include "nn/training.h"
#include "tests/nn/modules.h"
#include "tests/support/error_of.h"

namespace hilt {
namespace {

struct Variant {
  const char* name;
  AttentionConfig config;
};

std::vector<Variant> variants() {
  AttentionConfig c;
  c.width = 8, c.heads = 4;
  c.order.kind = Order::Kind::hilbert;
  c.pattern = parse_pattern("segment:5");
  c.causality = Causality::token;
  std::vector<Variant> all{{"segment, causal", c}};
  c.kv_heads = 2;
  all.push_back({"grouped keys", c});
  c.rotary = true;
  all.push_back({"grouped keys, rotary", c});
  c.kv_heads = 0;
  all.push_back({"rotary", c});
  c.rotary = false, c.bias = false, c.causality = Causality::none;
  c.pattern = parse_pattern("slide:2");
  all.push_back({"slide, no bias", c});
  c.pattern = parse_pattern("slide2d:1x1");
  c.order.grid.width = 4, c.order.grid.height = 3;
  all.push_back({"grid", c});
  c.pattern = parse_pattern("segment:4+segment:12,dilation=3");
  c.causality = Causality::token;
  all.push_back({"two branches", c});
  c.causality = Causality::curve;
  all.push_back({"curve causality", c});
  return all;
}
constexpr Index kLength = 12;

HilbertSelfAttention module_of(const AttentionConfig& config) {
  Generator generator(5);
  return shaken(make_self_attention(config, 0.3, 0.3, generator, DType::f64));
}

double at(const Tensor& x, Index row, Index column) { return x.data<double>()[row * x.dim(-1) + column]; }

/// o[t, h, d] and then the projection, one sequence.
std::vector<double> by_definition(const HilbertSelfAttention& m, const Tensor& x, const Plan& plan) {
  const AttentionConfig& c = m.config;
  const Index heads = c.heads, keys = c.keys(), dim = c.dim(), columns = (heads + 2 * keys) * dim;
  std::vector<double> rows(static_cast<std::size_t>(kLength * columns)),
      mixed(static_cast<std::size_t>(kLength * c.width)), out(mixed.size());
  for (Index t = 0; t < kLength; ++t) {
    double* const row = rows.data() + t * columns;
    for (Index j = 0; j < columns; ++j) {
      row[j] = m.qkv.bias ? m.qkv.bias.data<double>()[j] : 0;
      for (Index i = 0; i < c.width; ++i) row[j] += at(x, t, i) * at(m.qkv.weight, i, j);
    }
    for (Index h = 0; c.rotary && h < heads + keys; ++h)
      for (Index i = 0; i < dim / 2; ++i) {
        const double angle =
            static_cast<double>(t) * std::pow(c.rotary_base, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        double &a = row[h * dim + i], &b = row[h * dim + i + dim / 2];
        const double turned = a * std::cos(angle) - b * std::sin(angle);
        b = a * std::sin(angle) + b * std::cos(angle);
        a = turned;
      }
  }
  for (Index h = 0; h < heads; ++h)
    for (Index t = 0; t < kLength; ++t) {
      const Index key = heads + h / (heads / keys), value = key + keys;
      double total = 0;
      for (Index u = 0; u < kLength; ++u) {
        double score = 0;
        for (Index d = 0; d < dim; ++d)
          score += rows[static_cast<std::size_t>(t * columns + h * dim + d)] *
                   rows[static_cast<std::size_t>(u * columns + key * dim + d)];
        const double weight =
            static_cast<double>(plan.attends(h, t, u)) * std::exp(score / std::sqrt(static_cast<double>(dim)));
        total += weight;
        for (Index d = 0; d < dim; ++d)
          mixed[static_cast<std::size_t>(t * c.width + h * dim + d)] +=
              weight * rows[static_cast<std::size_t>(u * columns + value * dim + d)];
      }
      for (Index d = 0; d < dim; ++d) mixed[static_cast<std::size_t>(t * c.width + h * dim + d)] /= total;
    }
  for (Index t = 0; t < kLength; ++t)
    for (Index j = 0; j < c.width; ++j) {
      double& y = out[static_cast<std::size_t>(t * c.width + j)] =
          m.projection.bias ? m.projection.bias.data<double>()[j] : 0;
      for (Index i = 0; i < c.width; ++i)
        y += mixed[static_cast<std::size_t>(t * c.width + i)] * at(m.projection.weight, i, j);
    }
  return out;
}

TEST(HilbertSelfAttention, IsItsDefinition) {
  for (const auto& [name, config] : variants())
    for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused})
      for (const bool use_order : {true, false}) {
        HilbertSelfAttention m = module_of(config);
        m.config.backward = mode;
        const Tensor x = noise({1, kLength, 8}, 3);
        const CallOptions call{nullptr, use_order, false};
        const Tensor expected = from_values(by_definition(m, x, *m.plan(kLength, call)), {1, kLength, 8});
        EXPECT_LE(distance(m(x, call), expected), 1e-11)
            << name << ", " << name_of(mode) << (use_order ? "" : ", row order");
      }
}

TEST(HilbertSelfAttention, TheOrderMatters) {
  for (const auto& [name, config] : variants()) {
    const HilbertSelfAttention m = module_of(config);
    const Tensor x = noise({1, kLength, 8}, 3);
    const double change = distance(m(x), m(x, {nullptr, false, false}));
    if (std::string_view(name) == "grid") EXPECT_LE(change, 1e-12) << name;  // that set ignores the order
    else EXPECT_GT(change, 1e-3) << name;
  }
}

TEST(HilbertSelfAttention, GradientsAgreeWithDifferences) {
  for (const auto& [name, config] : variants())
    for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
      HilbertSelfAttention m = module_of(config);
      m.config.backward = mode;
      const auto checked =
          gradcheck_module(m, {noise({1, kLength, 8}, 4)},
                           [](const HilbertSelfAttention& a, std::span<const Tensor> in) { return a(in[0]); });
      EXPECT_TRUE(checked) << name << ", " << name_of(mode) << ": " << checked.where;
    }
}

TEST(HilbertSelfAttention, InCurveOrderEqualsThereAndBack) {
  for (const auto& [name, config] : variants())
    for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
      HilbertSelfAttention m = module_of(config);
      m.config.backward = mode;
      const Tensor x = noise({2, kLength, 8}, 5), cotangent = noise({2, kLength, 8}, 6);
      const Permutation& order = m.plan(kLength)->order();
      const CallOptions along{nullptr, true, true};
      EXPECT_EQ(m.plan(kLength, along)->order().token_at, order.token_at);
      Tape tape;
      tape.watch(x);
      const Tensor y = restore(m(reorder(x, order), along), order);
      const Tensor dx = tape.backward(y, cotangent)[x];
      Tape plain;
      plain.watch(x);
      const Tensor expected = m(x);
      const Tensor expected_dx = plain.backward(expected, cotangent)[x];
      EXPECT_LE(distance(y, expected), 1e-12) << name << ", " << name_of(mode);
      EXPECT_LE(distance(dx, expected_dx), 1e-12) << name << ", " << name_of(mode);
    }
}

TEST(HilbertSelfAttention, DropoutNeedsNoise) {
  AttentionConfig config = variants().front().config;
  config.dropout = 0.5;
  const HilbertSelfAttention m = module_of(config);
  const Tensor x = noise({1, kLength, 8}, 3);
  HilbertSelfAttention without = m;
  without.config.dropout = 0;
  EXPECT_EQ(m(x).to_vector(), without(x).to_vector());
  Generator one(3), again(3), other(4);
  const auto with = [&](Generator& g) { return m(x, {&g, true, false}).to_vector(); };
  const std::vector<double> dropped = with(one);
  EXPECT_NE(dropped, without(x).to_vector());
  EXPECT_EQ(dropped, with(again));
  EXPECT_NE(dropped, with(again)) << "the second call draws another mask";
  EXPECT_NE(dropped, with(other));
}

TEST(HilbertSelfAttention, PlansAreShared) {
  const HilbertSelfAttention m = module_of(variants().front().config);
  EXPECT_EQ(m.plan(12), m.plan(12));
  EXPECT_NE(m.plan(12), m.plan(11));
  EXPECT_NE(m.plan(12), m.plan(12, {nullptr, false, false}));
}

// Those of the call, in the type that the call wants; a bias of more tokens is that of the first.
TEST(HilbertSelfAttention, TermsAreThoseOfAttention) {
  AttentionConfig c = variants().front().config;
  c.terms = {.softcap = 2, .alibi = TermConfig::Alibi::learned, .relative = {5}, .bias = {1, 4, 0, 0}, .sink = true};
  c.context = kLength;
  Generator generator(5);
  HilbertSelfAttention m = make_self_attention(c, 0.3, 0.3, generator, DType::f64);
  EXPECT_EQ(m.terms.slopes.to_vector(), alibi_slopes(4, DType::f64).to_vector());
  m = shaken(m);
  std::vector<std::string> names;
  for (const NamedParameter& p : parameters_of(m)) names.push_back(p.name);
  EXPECT_EQ(names, (std::vector<std::string>{"qkv.weight", "qkv.bias", "projection.weight", "projection.bias", "slopes",
                                             "relative", "bias", "sink"}));
  for (const Index length : {kLength, Index{7}}) {
    const Tensor x = noise({2, length, 8}, 3);
    ScoreTerms terms = m.terms;
    terms.bias = slice(slice(terms.bias, 2, 0, length), 3, 0, length);
    const Tensor o = attention(reshape(m.qkv(x), {2, length, 3, 4, 2}), m.plan(length), {.terms = terms});
    EXPECT_EQ(m(x).to_vector(), m.projection(reshape(o, {2, length, 8})).to_vector());
    HilbertSelfAttention without = m;
    without.terms = {};
    EXPECT_GT(distance(m(x), without(x)), 1e-3);
  }
  const HilbertSelfAttention narrow = to(m, DType::bf16);
  EXPECT_EQ(narrow(to(noise({1, kLength, 8}, 3), DType::bf16)).dtype(), DType::bf16);
  c.terms.bias = {2, 1, 1, 1};
  EXPECT_NE(error_of([&] { check_config(c); }).find("what is learned is for all of them"), std::string::npos);
}

TEST(HilbertSelfAttention, SaysWhatIsWrong) {
  const auto wrong = [](auto change) {
    AttentionConfig c;
    c.width = 100, c.heads = 5;
    change(c);
    return error_of([&] { check_config(c); });
  };
  EXPECT_EQ(wrong([](AttentionConfig&) {}), "nothing");
  EXPECT_EQ(wrong([](AttentionConfig& c) { c.heads = 7; }),
            "usage: width 100 is not divisible by 7 heads; the nearest are 98 and 105");
  EXPECT_EQ(wrong([](AttentionConfig& c) { c.heads = 101; }),
            "usage: width 100 is not divisible by 101 heads; the nearest is 101");
  EXPECT_EQ(wrong([](AttentionConfig& c) { c.heads = 0; }),
            "usage: attention: width 100 and heads 0 must be at least 1");
  EXPECT_EQ(wrong([](AttentionConfig& c) { c.kv_heads = 2; }),
            "usage: kv_heads 2 must divide heads 5 (0: as many as heads)");
  EXPECT_EQ(wrong([](AttentionConfig& c) { c.rotary = true, c.heads = 20; }),
            "usage: rotary positions turn pairs: width / heads = 5 must be even");
  EXPECT_EQ(wrong([](AttentionConfig& c) { c.dropout = 1; }), "usage: dropout 1 must be in [0, 1)");
  EXPECT_EQ(wrong([](AttentionConfig& c) { c.pattern.clear(); }),
            "usage: attention: the pattern has no branch; dense is the simplest");
  const HilbertSelfAttention m = module_of(variants().front().config);
  EXPECT_EQ(error_of([&] {
              (void)m(zeros({2, 3, 9}, DType::f64));
            }),
            "usage: HilbertSelfAttention: x must be [batch, length, 8], got [2, 3, 9]");
}

}  // namespace
}  // namespace hilt
