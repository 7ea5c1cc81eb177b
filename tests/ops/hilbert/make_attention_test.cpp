// Every name and option builds the attention it stands for, and every wrong one is refused.
#include "ops/hilbert/make_attention.h"
#include <gtest/gtest.h>
#include <map>
#include <string>
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
    EXPECT_EQ(a.plan(x.q, x.k)->length(), length);
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
                    Change{"dropout", "0.5", kHilbert}, Change{"seed", "7", kDropped},
                    Change{"scale", "0.1", kHilbert}));

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
  const PlanPtr row = make_attention(config).plan(x.q, x.k);
  for (const char* name : {"diagonal", "hilbert", "auto"}) {
    Config other = config;
    other["work_order"] = name;
    const NamedAttention a = make_attention(other);
    const PlanPtr plan = a.plan(x.q, x.k);
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
  const PlanPtr plan = make_attention(config).plan(x.q, x.k);
  PlanSpec hilbert = plan->spec();
  hilbert.order = parse_order("hilbert", kLength);
  const OrderChoice choice = choose_order(hilbert);
  EXPECT_EQ(plan->spec().order, choice.order);
  EXPECT_GE(choice.considered.size(), 1U);
}

// ---- what is not there is said ------------------------------------------------------------------
TEST(MakeAttention, Refusals) {
  EXPECT_NE(refused({}).find("attention_type is missing"), std::string::npos);
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

TEST(TopBlocks, AreThoseWithTheLargestProductOfMeans) {
  // Blocks of two tokens; key block j has mean e_j, query block i asks most for block 2 - i.
  const Tensor k = from_values<float>({1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1}, {1, 6, 1, 3});
  const Tensor q = from_values<float>({0, 1, 5, 0, 1, 5, 1, 5, 0, 1, 5, 0, 5, 1, 0, 5, 1, 0}, {1, 6, 1, 3});
  const BlockPairs pairs = top_blocks(q, k, *permutation(Order{}, 6), 2, 2);
  EXPECT_EQ(pairs, (BlockPairs{{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {2, 1}}));
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
