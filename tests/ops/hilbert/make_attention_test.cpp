// Every name and option builds the attention it stands for, and every wrong one is refused.
#include "ops/hilbert/make_attention.h"
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include "core/error.h"
#include "ops/ops.h"

using namespace hilt;

namespace {

using Config = std::map<std::string, std::string>;

constexpr Index kLength = 64, kHeads = 4, kDim = 8;

struct Inputs {
  Tensor q, k, v;
};
Inputs inputs(Index length = kLength) {
  return {randn({2, length, kHeads, kDim}, {5, 1}), randn({2, length, kHeads, kDim}, {5, 2}),
          randn({2, length, kHeads, kDim}, {5, 3})};
}
std::vector<double> run(const Config& config, std::uint64_t step = 0) {
  const Inputs x = inputs();
  return make_attention(config)(x.q, x.k, x.v, step).to_vector();
}
std::vector<double> run(PlanSpec spec, const AttentionOptions& options = {}) {
  const Inputs x = inputs();
  spec.length = kLength;
  spec.heads = kHeads;
  return attention(x.q, x.k, x.v, make_plan(spec), options).to_vector();
}
std::string refused(const Config& config, Code code = Code::usage) {
  try {
    (void)run(config);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  return "accepted";
}

// ---- a name is a plan ---------------------------------------------------------------------------
TEST(MakeAttention, StandardIsLongNet) {
  PlanSpec spec;
  spec.pattern = parse_pattern("segment:16+segment:32,dilation=2");
  spec.dilation_mode = DilationMode::longnet;
  EXPECT_EQ(run({{"attention_type", "standard"}, {"segment_lengths", "16,32"}, {"dilation_rates", "1,2"}}), run(spec));
}
TEST(MakeAttention, ImprovedDividesHeads) {
  PlanSpec spec;
  spec.pattern = parse_pattern("segment:16+segment:32,dilation=2");
  spec.dilation_mode = DilationMode::head_groups;
  EXPECT_EQ(run({{"attention_type", "improved"}, {"segment_lengths", "16,32"}, {"dilation_rates", "1,2"}}), run(spec));
}
TEST(MakeAttention, HilbertIsSegmentsOfTheCurve) {
  PlanSpec spec;
  spec.pattern = parse_pattern("segment:16");
  spec.order = parse_order("hilbert", kLength);
  EXPECT_EQ(run({{"attention_type", "hilbert"}, {"segment_lengths", "16"}}), run(spec));
}
TEST(MakeAttention, BlockSparseIsBlocks) {
  PlanSpec spec;
  spec.pattern = {blocks(16, local_blocks(4, 1))};
  EXPECT_EQ(run({{"attention_type", "block_sparse"}, {"block_size", "16"}, {"blocks", "local:1"}}), run(spec));
}
TEST(MakeAttention, TakesWhateverLengthComes) {
  const NamedAttention a = make_attention({{"attention_type", "hilbert"}, {"segment_lengths", "16"}});
  for (Index length : {1, 7, 16, 100}) {
    const Inputs x = inputs(length);
    EXPECT_EQ(a.plan(x.q)->length(), length);
    EXPECT_EQ(a(x.q, x.k, x.v).shape(), x.q.shape());
  }
}

// ---- every option changes something -------------------------------------------------------------
struct Change {
  const char *key, *value;
  Config base;
};

class EveryOption : public testing::TestWithParam<Change> {};
TEST_P(EveryOption, ChangesTheResult) {
  const auto& [key, value, base] = GetParam();
  Config changed = base;
  changed[key] = value;
  EXPECT_NE(run(base), run(changed)) << key << " = " << value;
}
const Config kHilbert{{"attention_type", "hilbert"}, {"segment_lengths", "16"}};
const Config kTwoBranches{{"attention_type", "hilbert"}, {"segment_lengths", "16,32"}, {"dilation_rates", "1,2"}};
const Config kBlocks{{"attention_type", "block_sparse"}, {"block_size", "8"}, {"blocks", "local:1"}};
const Config kLearned{{"attention_type", "hilbert"}, {"segment_lengths", "16"}, {"heads", "4"}};
const Config kDropped{{"attention_type", "hilbert"}, {"dropout", "0.5"}};
INSTANTIATE_TEST_SUITE_P(
    MakeAttention, EveryOption,
    testing::Values(Change{"attention_type", "standard", kHilbert}, Change{"attention_type", "improved", kTwoBranches},
                    Change{"segment_lengths", "32", kHilbert}, Change{"dilation_rates", "2", kHilbert},
                    Change{"order", "row", kHilbert}, Change{"order", "morton", kHilbert},
                    Change{"order", "snake:8x8", kHilbert}, Change{"dilation_mode", "longnet", kTwoBranches},
                    Change{"dilation_mode", "head_groups", kTwoBranches},
                    Change{"dilation_mode", "residue", kTwoBranches}, Change{"causal", "token", kHilbert},
                    Change{"causal", "curve", kHilbert}, Change{"block_size", "16", kBlocks},
                    Change{"blocks", "local:2", kBlocks}, Change{"blocks", "dilated:2+3", kBlocks},
                    Change{"blocks", "global_local:1:1", kBlocks}, Change{"blocks", "top:2", kBlocks},
                    Change{"dropout", "0.5", kHilbert}, Change{"seed", "7", kDropped}, Change{"scale", "0.1", kHilbert},
                    Change{"softcap", "0.5", kHilbert}, Change{"alibi", "published", kHilbert},
                    Change{"sink", "true", kLearned}));

TEST(MakeAttention, BackwardChoosesHowTheGradientIsObtained) {
  const Inputs x = inputs();
  for (const auto& [mode, name] :
       {std::pair{"taped", "scatter_add"}, {"hybrid", "attention (hybrid)"}, {"fused", "attention (fused)"}}) {
    Tape tape;
    tape.watch(x.q);
    (void)make_attention({{"attention_type", "hilbert"}, {"segment_lengths", "16"}, {"backward", mode}})(x.q, x.k, x.v);
    const auto nodes = tape.report();
    ASSERT_FALSE(nodes.empty());
    EXPECT_EQ(nodes.back().name, name);
  }
}
TEST(MakeAttention, WorkOrderChangesTheTilesAndNotTheSet) {
  const Inputs x = inputs();
  const Config config{{"attention_type", "block_sparse"}, {"block_size", "8"}, {"blocks", "dilated:3"}};
  const PlanPtr row = make_attention(config).plan(x.q);
  for (const char* name : {"diagonal", "hilbert", "auto"}) {
    Config other = config;
    other["work_order"] = name;
    const NamedAttention a = make_attention(other);
    const PlanPtr plan = a.plan(x.q);
    EXPECT_EQ(plan->spec().work_order, parse_work_order(name));
    if (std::string(name) == "hilbert") { EXPECT_NE(plan->tilings()[0].q_token, row->tilings()[0].q_token); }
    EXPECT_EQ(plan->stats().pairs, row->stats().pairs);
    const std::vector<double> y = a(x.q, x.k, x.v).to_vector(), z = run(config);
    for (std::size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], z[i], 2e-6) << name;
  }
}
TEST(MakeAttention, StrictIsPassedOn) {
  EXPECT_TRUE(make_attention({{"attention_type", "hilbert"}, {"strict", "true"}}).options().strict);
  EXPECT_FALSE(make_attention({{"attention_type", "hilbert"}, {"strict", "false"}}).options().strict);
}
TEST(MakeAttention, StepsDrawTheirOwnDropout) {
  EXPECT_NE(run(kDropped, 0), run(kDropped, 1));
  EXPECT_EQ(run(kDropped, 1), run(kDropped, 1));
}
TEST(MakeAttention, AutoTakesTheOrderWithTheFewestTilesAndKeepsTheSet) {
  const Config config{{"attention_type", "hilbert"}, {"segment_lengths", "64"}, {"order", "auto"}};
  const Inputs x = inputs();
  const PlanPtr plan = make_attention(config).plan(x.q);
  PlanSpec as_they_come = plan->spec();
  as_they_come.order = {};
  EXPECT_EQ(plan->spec().order, choose_order(as_they_come).order);
}

// What is learned has names, moves the result and gets a gradient; packed documents are each alone.
TEST(MakeAttention, LearnsItsTermsAndTakesDocuments) {
  const Inputs x = inputs();
  for (const char* type : {"standard", "hilbert", "block_sparse"})
    for (const auto& [key, value, name] : {std::tuple("alibi", "learned", "slopes"),
                                           {"relative", "7", "relative"},
                                           {"bias", "1x4x64x64", "bias"},
                                           {"bias", "2x1x1x64", "bias"},
                                           {"sink", "true", "sink"}}) {
      SCOPED_TRACE(testing::Message() << type << ", " << key << " = " << value);
      NamedAttention a = make_attention({{"attention_type", type}, {key, value}, {"heads", "4"}});
      const std::vector<double> before = a(x.q, x.k, x.v).to_vector();
      std::vector<std::string> names;
      Tensor learned;
      a.visit_parameters("block", [&](const std::string& its, Tensor& p) {
        names.push_back(its);
        learned = p = add(p, randn(p.shape(), {6, 1}));
      });
      EXPECT_EQ(names, std::vector<std::string>{std::string("block.") + name});
      Tape tape;
      tape.watch(learned);
      const Tensor y = a(x.q, x.k, x.v);
      EXPECT_NE(y.to_vector(), before);
      const std::vector<double> d = tape.backward(sum(mul(y, x.q)))[learned].to_vector();
      EXPECT_GT(std::ranges::count_if(d, [](double g) { return g != 0; }), 0);
    }
  const NamedAttention a =
      make_attention({{"attention_type", "hilbert"}, {"segment_lengths", "8"}, {"alibi", "published"}});
  const Tensor packed = a(x.q, x.k, x.v, 0, {{40, 24}});
  for (const auto& [from, to] : {std::pair<Index, Index>{0, 40}, {40, 64}}) {
    const auto part = [&](const Tensor& t) { return slice(t, 1, from, to); };
    EXPECT_EQ(part(packed).to_vector(), a(part(x.q), part(x.k), part(x.v)).to_vector());
  }
}
TEST(ReadTerm, Refusals) {
  const auto refusal = [](const char* name, const char* text) {
    TermConfig c;
    try {
      read_term(c, name, text);
    } catch (const Error& e) { return std::string(e.what()); }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal("relative", "17x17"), "accepted");
  EXPECT_EQ(refusal("bias", "1x4x1xL"), "accepted");
  EXPECT_EQ(refusal("relative", "17x16"), "relative (17x16): 16 is even; offsets from -r to r are 2 r + 1");
  EXPECT_EQ(refusal("relative", "3x3x3x3"), "relative (3x3x3x3): has 4 axes; at most 3");
  EXPECT_EQ(refusal("relative", "3x"), "relative: '' is not a whole number");
  EXPECT_EQ(refusal("bias", "4x4"), "bias (4x4): has rank 2; expected [batch, heads, queries, keys]");
  EXPECT_EQ(refusal("alibi", "lerned"),
            "alibi: 'lerned' is not one of none, published, learned; did you mean learned?");
}

// ---- the table ----------------------------------------------------------------------------------
TEST(AttentionSettings, EveryRowHasAFieldOfItsOwnAndReadsAllItsValues) {
  std::vector<AttentionSettings> changed;
  for (const AttentionSetting& row : attention_settings()) {
    SCOPED_TRACE(row.name);
    EXPECT_FALSE(row.help.empty());
    EXPECT_EQ(&attention_setting(row.name), &row);
    std::vector<std::string> values(row.choices.begin(), row.choices.end());
    const bool is_flag = std::holds_alternative<bool AttentionSettings::*>(row.field);
    if (values.empty()) values = {is_flag ? "true" : "3"};
    int differ = 0;
    for (const std::string& value : values) {
      AttentionSettings s;
      read_setting(s, row.name, value);
      differ += s != AttentionSettings();
      if (&value == &values.back() && s == AttentionSettings()) read_setting(s, row.name, values.front());
      if (&value == &values.back()) changed.push_back(s);
    }
    // A name is the default, unless none is.
    const bool needed = row.choices.empty() || row.name == "attention_type";
    EXPECT_EQ(differ, std::ssize(values) - (needed ? 0 : 1));
  }
  for (std::size_t i = 0; i < changed.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(changed[i], changed[j]) << attention_settings()[i].name;
}
TEST(AttentionSettings, ModesAreThoseOfTheTableOfModes) {
  const std::vector<std::string_view>& names = attention_setting("backward").choices;
  ASSERT_EQ(names.size(), backward_modes().size());
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(parse_backward(names[i]), backward_modes()[i].mode);
}
TEST(AttentionSettings, AreAPlanOptionsAndTerms) {
  AttentionSettings s;
  for (const auto& [name, value] : Config{{"order", "snake:8x8"},
                                          {"pattern", "slide:3"},
                                          {"causal", "token"},
                                          {"documents", "40,24"},
                                          {"backward", "taped"},
                                          {"scale", "0.5"},
                                          {"dropout", "0.25"},
                                          {"relative", "7"},
                                          {"sink", "true"},
                                          {"softcap", "2"}})
    read_setting(s, name, value);
  const PlanSpec spec = plan_spec(s, kLength, kHeads);
  EXPECT_EQ(spec.length, kLength);
  EXPECT_EQ(spec.heads, kHeads);
  EXPECT_EQ(spec.order, parse_order("snake:8x8", kLength));
  EXPECT_EQ(spec.pattern, parse_pattern("slide:3"));
  EXPECT_EQ(spec.causality, Causality::token);
  EXPECT_EQ(spec.documents, parse_documents("40,24"));
  const AttentionOptions options = attention_options(s);
  EXPECT_EQ(options.backward, Backward::taped);
  EXPECT_EQ(options.scale, 0.5);
  EXPECT_EQ(options.dropout, 0.25);
  EXPECT_EQ(term_config(s), (TermConfig{.softcap = 2, .relative = {7}, .sink = true}));
}

// ---- what is not there is said ------------------------------------------------------------------
TEST(MakeAttention, Refusals) {
  EXPECT_NE(refused({}).find("attention_type: '' is not one of standard"), std::string::npos);
  EXPECT_EQ(refused({{"attention_type", "hilbert"}, {"softcap", "-1"}}), "softcap: -1 must be a number above 0");
  EXPECT_EQ(refused({{"attention_type", "hilbert"}, {"softcap", "ten"}}), "softcap: 'ten' is not a number");
  EXPECT_EQ(refused({{"attention_type", "hilbert"}, {"sink", "yes"}}), "sink: 'yes' is not one of false, true");
  EXPECT_NE(refused({{"attention_type", "hilbert"}, {"sink", "true"}}).find("needs heads"), std::string::npos);
  EXPECT_NE(refused({{"attention_type", "hilbert"}, {"bias", "1x1x1xL"}, {"heads", "4"}}).find("write a number"),
            std::string::npos);
  EXPECT_NE(refused({{"attention_type", "hilbert"}, {"relative", "3"}, {"heads", "3"}}).find("does not fit heads 4"),
            std::string::npos);
  EXPECT_NE(refused({{"attention_type", "hilbrt"}}).find("did you mean hilbert?"), std::string::npos);
  EXPECT_NE(refused({{"attention_type", "hilbert"}, {"segment_length", "16"}}).find("did you mean segment_lengths?"),
            std::string::npos);
  EXPECT_NE(refused({{"attention_type", "hilbert"}, {"block_size", "16"}}).find("hilbert does not read block_size"),
            std::string::npos);
  EXPECT_NE(refused({{"attention_type", "block_sparse"}, {"dilation_rates", "2"}})
                .find("block_sparse does not read dilation_rates"),
            std::string::npos);
  EXPECT_NE(refused({{"attention_type", "standard"}, {"segment_lengths", "16,32"}, {"dilation_rates", "1"}})
                .find("must pair up"),
            std::string::npos);
  EXPECT_NE(refused({{"attention_type", "hilbert"}, {"dropout", "lots"}}).find("'lots' is not a number"),
            std::string::npos);
  EXPECT_NE(refused({{"attention_type", "block_sparse"}, {"blocks", "top"}}).find("expected local:RADIUS"),
            std::string::npos);
  for (const char* causal : {"token", "curve"})
    EXPECT_NE(refused({{"attention_type", "block_sparse"}, {"blocks", "top:2"}, {"causal", causal}})
                  .find("blocks:64@top:2 chooses the keys of a block of queries by all of them, later ones too, so "
                        "causal " +
                        std::string(causal) + " would leak"),
              std::string::npos);
  EXPECT_NE(refused({{"attention_type", "hilbert"}, {"backward", "fsued"}}).find("did you mean fused?"),
            std::string::npos);
  for (const char* ring : {"ring", "ring_hilbert", "block_sparse_ring"})
    EXPECT_NE(refused({{"attention_type", ring}}).find("needs length"), std::string::npos);
  EXPECT_NE(refused({{"attention_type", "hilbert"}, {"transport", "ring"}}).find("hilbert does not read transport"),
            std::string::npos);
  EXPECT_NE(refused({{"attention_type", "block_sparse_ring"}, {"length", "64"}, {"blocks", "top:2"}})
                .find("name another builder"),
            std::string::npos);
}

// ---- blocks chosen by q and k -------------------------------------------------------------------
PlanPtr looking(Index length, Index heads, Index size, Index most, const char* order = "row") {
  PlanSpec spec{.length = length, .heads = heads, .order = parse_order(order, length)};
  spec.pattern = parse_pattern("blocks:" + std::to_string(size) + "@top:" + std::to_string(most));
  return make_plan(spec);
}
std::vector<BlockPairs> chosen(const PlanPtr& plan, const Tensor& q, const Tensor& k, Index sequence) {
  return plan_of_sequence(plan, q, k, sequence)->spec().pattern[0].chosen;
}

TEST(TopBlocks, AreThoseWithTheLargestProductOfMeans) {
  // Blocks of two tokens; key block j has mean e_j, query block i asks most for block 2 - i.
  const Tensor k = from_values<float>({1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1}, {1, 6, 1, 3});
  const Tensor q = from_values<float>({0, 1, 5, 0, 1, 5, 1, 5, 0, 1, 5, 0, 5, 1, 0, 5, 1, 0}, {1, 6, 1, 3});
  EXPECT_EQ(chosen(looking(6, 1, 2, 2), q, k, 0)[0], (BlockPairs{{0, 1}, {0, 2}, {1, 0}, {1, 1}, {2, 0}, {2, 1}}));
  // All alike: the smaller block.
  EXPECT_EQ(chosen(looking(6, 1, 2, 1), zeros(q.shape()), k, 0)[0], (BlockPairs{{0, 0}, {1, 0}, {2, 0}}));
  // A block with a NaN in it comes last.
  const Tensor bad = mul(k, from_values<float>({0, 0, NAN, 1, 1, 1}, {1, 6, 1, 1}));
  EXPECT_EQ(chosen(looking(6, 1, 2, 1), q, bad, 0)[0][0], (BlockPairs::value_type{0, 2}));
  // More than there are, and none.
  EXPECT_EQ(chosen(looking(6, 1, 4, 9), q, k, 0)[0], (BlockPairs{{0, 0}, {0, 1}, {1, 0}, {1, 1}}));
  EXPECT_EQ(chosen(looking(0, 1, 4, 9), randn({1, 0, 1, 3}, {1, 1}), randn({1, 0, 1, 3}, {1, 1}), 0)[0], BlockPairs{});
}
TEST(TopBlocks, AreChosenBySequenceAndKeyHead) {
  constexpr Index batch = 3, length = 37, heads = 6, kv_heads = 3, dim = 4, size = 5, most = 3;
  const Tensor q = randn({batch, length, heads, dim}, {7, 1}, DType::f64),
               k = randn({batch, length, kv_heads, dim}, {7, 2}, DType::f64);
  const std::vector<double> qs = q.to_vector(), ks = k.to_vector();
  const Index n = (length + size - 1) / size;
  for (const char* order : {"row", "hilbert", "hilbert,scope=order-only"}) {
    const PlanPtr plan = looking(length, heads, size, most, order);
    const bool by_token = std::string(order).ends_with("only");
    for (Index b = 0; b < batch; ++b)
      for (Index h = 0; h < kv_heads; ++h) {
        const auto mean = [&](const std::vector<double>& x, Index all, Index head, Index block, Index d) {
          double sum = 0;
          const Index end = std::min((block + 1) * size, length);
          for (Index p = block * size; p < end; ++p) {
            const Index t = by_token ? p : plan->order().token_at[static_cast<std::size_t>(p)];
            sum += x[static_cast<std::size_t>(((b * length + t) * all + head) * dim + d)];
          }
          return sum / static_cast<double>(end - block * size);
        };
        BlockPairs want;
        for (Index i = 0; i < n; ++i) {
          std::vector<std::pair<double, std::int32_t>> score;  // the largest has the least
          for (Index j = 0; j < n; ++j) {
            double s = 0;
            for (Index d = 0; d < dim; ++d)
              s += (mean(qs, heads, 2 * h, i, d) + mean(qs, heads, 2 * h + 1, i, d)) / 2 * mean(ks, kv_heads, h, j, d);
            score.emplace_back(-s, static_cast<std::int32_t>(j));
          }
          std::ranges::sort(score);
          for (Index j = 0; j < most; ++j)
            want.emplace_back(static_cast<std::int32_t>(i), score[static_cast<std::size_t>(j)].second);
        }
        std::ranges::sort(want);
        EXPECT_EQ(chosen(plan, q, k, b)[static_cast<std::size_t>(h)], want) << order << ' ' << b << ' ' << h;
      }
  }
}
TEST(TopBlocks, PlanOfNoSequenceHasItsCountsAndNoSet) {
  const PlanPtr plan = looking(64, 4, 8, 3);
  EXPECT_TRUE(plan->looks_at_data());
  EXPECT_THROW((void)plan->attends(0, 0, 0), Error);
  const Inputs x = inputs();
  const PlanPtr own = plan_of_sequence(plan, x.q, x.k, 1);
  EXPECT_FALSE(own->looks_at_data());
  EXPECT_EQ(plan_of_sequence(own, x.q, x.k, 0), own);
  EXPECT_EQ(own->tilings().size(), 4u);  // a set for each head
  EXPECT_EQ(own->stats().pairs, 4 * plan->stats().pairs);
  EXPECT_THROW((void)make_shard_plan(plan->spec(), 2, 0), Error);
}
TEST(TopBlocks, EveryModeAttendsToWhatEachSequenceChose) {
  const Inputs x = inputs(50);
  const PlanPtr plan = looking(50, kHeads, 8, 2, "hilbert");
  const Tensor d_o = randn(x.q.shape(), {5, 4});
  const auto gradients = [&](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const PlanPtr& p,
                             const AttentionOptions& options) {
    Tape tape;
    for (const Tensor* t : {&q, &k, &v}) tape.watch(*t);
    const Tensor o = attention(q, k, v, p, options);
    const Gradients d = tape.backward(o, g);
    return std::vector<Tensor>{o, d[q], d[k], d[v], attention_with_lse(q, k, v, p, options).lse};
  };
  for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
    AttentionOptions options{.backward = mode, .dropout = 0.25, .key = RandomKey{3, 4}};
    const std::vector<Tensor> all = gradients(x.q, x.k, x.v, d_o, plan, options);
    for (Index b = 0; b < 2; ++b) {
      const auto own = [&](const Tensor& t) { return clone(slice(t, 0, b, b + 1)); };
      options.first_batch = b;
      const std::vector<Tensor> one =
          gradients(own(x.q), own(x.k), own(x.v), own(d_o), plan_of_sequence(plan, x.q, x.k, b), options);
      for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(own(all[i]).to_vector(), one[i].to_vector()) << i;
    }
    // One packed projection, and a batch of none.
    const Tensor packed = cat({unsqueeze(x.q, 2), unsqueeze(x.k, 2), unsqueeze(x.v, 2)}, 2);
    options.first_batch = 0;
    EXPECT_EQ(attention(packed, plan, options).to_vector(), all[0].to_vector());
    const Tensor none = slice(x.q, 0, 0, 0);
    EXPECT_EQ(attention(none, none, none, plan, options).shape(), none.shape());
  }
}

// ---- over ranks ---------------------------------------------------------------------------------
std::vector<double> over_ranks(Config config, int ranks) {
  const Inputs x = inputs();
  std::vector<double> all;
  config["length"] = std::to_string(kLength);
  run_ranks(ranks, [&](Comm& comm) {
    const NamedAttention a = make_attention(config, comm);
    const ShardPlanPtr shard = a.shard(kHeads);
    const auto mine = [&](const Tensor& t) { return rows_of_rank(t, *shard, comm.rank()); };
    const Tensor o = whole_of_rows(a(mine(x.q), mine(x.k), mine(x.v)), *shard, comm);
    if (comm.rank() == 0) all = o.to_vector();
  });
  return all;
}
TEST(MakeAttention, RingTypesAreTheirOneRankCounterparts) {
  const auto near = [](const std::vector<double>& a, const std::vector<double>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6);
  };
  for (int ranks : {1, 3, 4}) {
    near(over_ranks({{"attention_type", "ring"}}, ranks), run(PlanSpec{}));
    const Config segments{{"segment_lengths", "16,32"}, {"dilation_rates", "1,2"}, {"causal", "token"}};
    for (const auto& [ring, one] : {std::pair{"ring", "standard"}, {"ring_hilbert", "hilbert"}}) {
      Config a = segments, b = segments;
      a["attention_type"] = ring, b["attention_type"] = one;
      for (const char* transport : {"ring", "gather"})
        for (const char* shards : {"contiguous", "balanced"}) {
          a["transport"] = transport, a["shards"] = shards;
          near(over_ranks(a, ranks), run(b));
        }
    }
    const Config blocks{{"block_size", "8"}, {"blocks", "dilated:1+3"}, {"order", "hilbert"}};
    Config a = blocks, b = blocks;
    a["attention_type"] = "block_sparse_ring", b["attention_type"] = "block_sparse";
    near(over_ranks(a, ranks), run(b));
  }
}
TEST(MakeAttention, TransportAndShardsChangeWhatTravelsAndWhoHoldsWhat) {
  run_ranks(2, [](Comm& comm) {
    const auto shard = [&](Config c) {
      c["attention_type"] = "ring", c["length"] = "64";
      return make_attention(c, comm).shard(kHeads);
    };
    EXPECT_EQ(shard({})->transport(), Transport::ring);
    EXPECT_EQ(shard({{"transport", "gather"}})->transport(), Transport::gather);
    EXPECT_EQ(shard({})->shards().owner.size(), 2u);
    EXPECT_GT(shard({{"shards", "balanced"}})->shards().owner.size(), 2u);
  });
}

}  // namespace
