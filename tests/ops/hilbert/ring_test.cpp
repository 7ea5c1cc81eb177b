// Attention over ranks against attention on one rank, which is judged elsewhere against brute
// force.
#include "ops/hilbert/ring.h"
#include <gtest/gtest.h>
#include <cmath>
#include <mutex>
#include "core/parallel.h"
#include "ops/hilbert/make_attention.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/ring_problem.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

const std::vector<int> kRanks{1, 2, 3, 4, 5, 8};

TEST(Ring, RandomPlansOverAnyNumberOfRanksEqualOneRank) {
  const std::uint64_t count = scaled(600, 120);
  double worst = 0;
  for (std::uint64_t seed = 1; seed <= count; ++seed) {
    const Problem p = random_problem(seed);
    const Whole one = on_one_rank(p);
    const int ranks = kRanks[seed % kRanks.size()];
    const Sharding how{seed / 7 % 2 ? Transport::gather : Transport::ring,
                       seed % 3 == 0 ? 1 + static_cast<Index>(seed % 4) : 0};
    const Outcome many = on_ranks(p, ranks, how);
    const double d = distance(many.whole, one);
    ASSERT_LE(d, 1e-12) << "seed " << seed << ": " << describe(p, ranks, how);
    ASSERT_EQ(many.sent, many.predicted) << "seed " << seed << ": " << describe(p, ranks, how);
    worst = std::max(worst, d);
  }
  std::cout << count << " configurations over 1 to 8 ranks, worst difference " << worst << '\n';
}

TEST(Ring, EveryCausalModeAndTransportOverEveryNumberOfRanks) {
  const Index length = scaled(331, 139);
  for (const char* pattern :
       {"dense", "segment:96", "segment:32+segment:128,dilation=4", "slide:40", "neighborhood2d:5x7"})
    for (const Causality causality : {Causality::none, Causality::token, Causality::curve}) {
      Problem p;
      p.spec = {.length = length,
                .heads = 2,
                .order = parse_order("hilbert", length),
                .pattern = parse_pattern(pattern),
                .causality = causality};
      if (p.spec.pattern[0].on_grid())
        p.spec.length = length - 1,
        p.spec.order = parse_order(length == 331 ? "hilbert:15x22" : "hilbert:6x23", length - 1);
      p.draw(3);
      const Whole one = on_one_rank(p);
      for (int ranks : kRanks)
        for (const Sharding how :
             {Sharding{Transport::ring, 0}, Sharding{Transport::gather, 0}, Sharding{Transport::ring, 4}}) {
          const Outcome many = on_ranks(p, ranks, how);
          EXPECT_LE(distance(many.whole, one), 1e-12) << describe(p, ranks, how);
          EXPECT_EQ(many.sent, many.predicted) << describe(p, ranks, how);
        }
    }
}

// Every term at once, each gradient added over ranks, on a row, a grid and documents.
TEST(Ring, EveryTermOverEveryNumberOfRanks) {
  for (const char* pattern : {"dense", "segment:32+segment:128,dilation=4", "slide2d:3x2"})
    for (const bool documents : {false, true}) {
      Problem p;
      p.batch = 2, p.spec.length = 132, p.spec.heads = 4, p.kv_heads = 2;
      p.spec.pattern = parse_pattern(pattern), p.spec.causality = Causality::token;
      const bool planar = p.spec.pattern[0].on_grid();
      p.spec.order = parse_order(planar ? "hilbert:11x12" : "hilbert", 132);
      if (documents && planar) continue;
      if (documents) p.spec.documents = {{40, 1, 70}, {132}}, p.spec.order = parse_order("hilbert", 132);
      p.options.terms.softcap = 4, p.options.dropout = 0.2, p.options.key = RandomKey{1, 7};
      p.draw(3);
      p.draw_terms(3, true, planar ? Shape{5, 7} : Shape{9}, {2, 1, 132, 132}, true);
      const Whole one = on_one_rank(p);
      ASSERT_EQ(one.of_terms.size(), 4u);
      for (int ranks : kRanks)
        for (const Sharding how : {Sharding{Transport::ring, 0}, Sharding{Transport::gather, 4}}) {
          const Outcome many = on_ranks(p, ranks, how);
          EXPECT_LE(distance(many.whole, one), 1e-12) << describe(p, ranks, how);
          EXPECT_EQ(many.sent, many.predicted) << describe(p, ranks, how);
        }
    }
}

TEST(Ring, SegmentsInsideAShardSendNothing) {
  Problem p;
  p.spec = {.length = 512,
            .heads = 2,
            .order = parse_order("hilbert", 512),
            .pattern = parse_pattern("segment:64"),
            .causality = Causality::token};
  p.draw(1);
  for (int ranks : {2, 3, 4, 8}) {
    const Outcome many = on_ranks(p, ranks, {});
    EXPECT_EQ(many.sent, std::vector<std::int64_t>(static_cast<std::size_t>(ranks))) << ranks;
    EXPECT_LE(distance(many.whole, on_one_rank(p)), 1e-12);
  }
}

TEST(Ring, OnlyActiveKeysOfADilatedBranchTravel) {
  Problem p;
  p.spec.length = 512, p.spec.pattern = parse_pattern("segment:512,dilation=8");
  p.draw(1);
  const Outcome many = on_ranks(p, 4, {});
  // Each rank holds 16 active keys and sends them to 3 others, K and V, forward and again backward,
  // and returns 48 rows of gradients.
  const std::int64_t row = 2 * 8 * sizeof(double);
  for (std::int64_t sent : many.sent) EXPECT_EQ(sent, 3 * 16 * row * 3);
}

TEST(Ring, TheHaloOfALocalPlanIsAllThatTravels) {
  Problem p;
  p.spec = {
      .length = 1024, .heads = 1, .order = parse_order("hilbert:32x32", 1024), .pattern = parse_pattern("slide2d:2x2")};
  p.dim = 1;
  p.draw(1);
  const Outcome many = on_ranks(p, 4, {});
  // A shard is a quarter of the grid, 16 x 16 cells: 2 rows and columns along two sides, and 4
  // cells at the corner.
  for (std::int64_t sent : many.sent) EXPECT_EQ(sent, (2 * 2 * 16 + 4) * 2 * std::int64_t{sizeof(double)} * 3);
}

TEST(Ring, MoreRanksThanTokens) {
  for (Index length : {0, 1, 2, 5}) {
    Problem p;
    p.spec.length = length, p.spec.heads = 2;
    p.draw(1);
    for (const Transport transport : {Transport::ring, Transport::gather})
      EXPECT_LE(distance(on_ranks(p, 8, {transport, 0}).whole, on_one_rank(p)), 1e-12) << length;
  }
}

TEST(Ring, ShortTypesAreAsCloseAsOnOneRank) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (int ranks : {2, 5}) {
      Problem p;
      p.spec = {.length = 300, .heads = 2, .order = parse_order("hilbert", 300), .causality = Causality::token};
      p.dim = 16, p.dtype = dtype;
      p.draw(5);
      Problem exact = p;
      exact.dtype = DType::f64;
      exact.q = to(p.q, DType::f64), exact.k = to(p.k, DType::f64), exact.v = to(p.v, DType::f64),
      exact.d_o = to(p.d_o, DType::f64);
      const Whole want = on_one_rank(exact), one = on_one_rank(p), many = on_ranks(p, ranks, {}).whole;
      const double ulp = dtype == DType::f32 ? 0x1p-24 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
      for (const auto& [name, x, y, z] : {std::tuple{"o", many.o, one.o, want.o},
                                          {"dq", many.dq, one.dq, want.dq},
                                          {"dk", many.dk, one.dk, want.dk},
                                          {"dv", many.dv, one.dv, want.dv}})
        EXPECT_LE(distance(x, z), 2 * distance(y, z) + ulp) << name << ' ' << dtype << ' ' << ranks;
    }
}

TEST(Ring, PartialResultsDoNotRoundToSixteenBits) {
  Problem p;
  // f16: a CPU with products of bf16 rounds weights before them, of parts and of wholes alike.
  p.spec.length = 512, p.spec.heads = 2, p.dim = 16, p.dtype = DType::f16;
  p.draw(9);
  Problem exact = p;
  exact.dtype = DType::f64;
  exact.q = to(p.q, DType::f64), exact.k = to(p.k, DType::f64), exact.v = to(p.v, DType::f64),
  exact.d_o = to(p.d_o, DType::f64);
  const Whole want = on_one_rank(exact), one = on_one_rank(p), many = on_ranks(p, 16, {}).whole;
  const auto deviation = [](const Tensor& a, const Tensor& b) {
    return std::sqrt(sum(square(sub(to(a, DType::f64), b))).item());
  };
  for (const auto& [name, x, y, z] : {std::tuple{"o", many.o, one.o, want.o},
                                      {"dq", many.dq, one.dq, want.dq},
                                      {"dk", many.dk, one.dk, want.dk},
                                      {"dv", many.dv, one.dv, want.dv}})
    EXPECT_LE(deviation(x, z), 1.05 * deviation(y, z)) << name << ": 16 ranks add an error that one has not";
}

TEST(Ring, TheSameBitsEveryTime) {
  Problem p;
  p.spec = {.length = 389,
            .heads = 3,
            .order = parse_order("hilbert", 389),
            .pattern = parse_pattern("segment:64+segment:300,dilation=4"),
            .causality = Causality::token};
  p.kv_heads = 1, p.dtype = DType::f32;
  p.draw(2);
  const Whole first = on_ranks(p, 4, {}).whole;
  for (int again = 0; again < 5; ++again) {
    const Threads threads(1 + again % 3);
    const Whole other = on_ranks(p, 4, {}).whole;
    for (const auto& [x, y] :
         {std::pair{first.o, other.o}, {first.dq, other.dq}, {first.dk, other.dk}, {first.dv, other.dv}})
      EXPECT_EQ(x.to_vector(), y.to_vector());
  }
}

TEST(Ring, ANotANumberInAMaskedKeyOfAnotherRankStaysThere) {
  Problem p;
  p.spec.length = 256, p.spec.causality = Causality::token;
  p.draw(1);
  p.k.mutable_data<double>()[200 * p.dim] = std::nan("");
  p.v.mutable_data<double>()[200 * p.dim] = std::nan("");
  const std::vector<double> o = on_ranks(p, 4, {}).whole.o.to_vector();
  for (Index t = 0; t < 256; ++t) EXPECT_EQ(std::isnan(o[static_cast<std::size_t>(t * p.dim)]), t >= 200) << t;
}

// Beside what one rank with as many rows holds there are parcels of two tensors of those rows: keys
// and values attended to, the next ones that arrive, the gradients that are computed, those of the
// stage before on their return, and ours arriving. Two ranks never wait for a next, three never
// while gradients travel.
TEST(Ring, PeakMemoryIsThatOfTheRowsAndAtMostFiveParcels) {
  const Index rows = scaled(256, 64);
  const std::size_t parcel = static_cast<std::size_t>(rows) * 2 * 2 * 64 * sizeof(float);
  std::size_t alone = 0;
  for (const auto& [ranks, parcels] : {std::pair{1, 0u}, {2, 3u}, {3, 4u}, {4, 5u}, {5, 5u}, {8, 5u}}) {
    Problem p;
    p.spec.length = rows * ranks, p.spec.heads = 2;
    p.dim = 64, p.dtype = DType::f32;
    std::vector<std::size_t> peak(static_cast<std::size_t>(ranks));
    run_ranks(ranks, [&](Comm& comm) {
      const ShardPlanPtr shard = shard_of(p.spec, ranks, comm.rank(), {});
      const auto drawn = [&](std::uint64_t stream) {
        return randn({1, rows, 2, p.dim}, RandomKey{1, stream + static_cast<std::uint64_t>(comm.rank()) * 10});
      };
      const Tensor q = drawn(1), k = drawn(2), v = drawn(3), d_o = drawn(4);
      comm.barrier();
      reset_thread_memory_stats();
      Tape tape;
      for (const Tensor& x : {q, k, v}) tape.watch(x);
      (void)tape.backward(ring_attention(q, k, v, shard, comm), d_o);
      peak[static_cast<std::size_t>(comm.rank())] = thread_memory_stats().peak;
    });
    if (ranks == 1) alone = peak[0];
    std::cout << ranks << " ranks of " << rows << " rows: " << peak[0] << " bytes a rank\n";
    const std::size_t delta = ranks > 1 ? static_cast<std::size_t>(rows) * 2 * sizeof(float) : 0;
    for (std::size_t bytes : peak) EXPECT_EQ(bytes, alone + delta + parcels * parcel) << ranks;
  }
}

TEST(Ring, BalancedShardsEvenOutAMaskThatContiguousOnesDoNot) {
  PlanSpec spec{.length = 16384,
                .heads = 1,
                .order = parse_order("hilbert", 16384),
                .causality = Causality::token,
                .in_order = true};
  const PlanPtr plan = make_plan(spec);
  for (int ranks : {4, 8}) {
    const double contiguous = imbalance(*plan, contiguous_shards(*plan, ranks)),
                 balanced = imbalance(*plan, balanced_shards(*plan, ranks));
    std::cout << ranks << " ranks, causal under a Hilbert order: imbalance " << contiguous << " contiguous, "
              << balanced << " balanced\n";
    EXPECT_GT(contiguous, 1.3);
    EXPECT_LT(balanced, 1.05);
    const Shards shards = balanced_shards(*plan, ranks);
    for (int r = 0; r < ranks; ++r) EXPECT_EQ(shards.rows(r), 16384 / ranks);
  }
}

TEST(Ring, RanksThatDisagreeAreNamedBeforeAnythingHangs) {
  const auto error = error_of([] {
    run_ranks(3, [](Comm& comm) {
      PlanSpec spec;
      spec.length = 96, spec.pattern = parse_pattern(comm.rank() == 2 ? "segment:32" : "segment:16");
      const ShardPlanPtr shard = shard_of(spec, 3, comm.rank(), {});
      agree_on(*shard, comm, 1, 1, 8, DType::f32, {});
    });
  });
  EXPECT_NE(error.find("rank 2 has pattern = segment:32, rank 0 pattern = segment:16"), std::string::npos) << error;
}

// What is not for several ranks says so by name, where the plan is divided or where it is called.
TEST(Ring, WhatRanksCannotDoIsRefusedByName) {
  const auto divided = [](const PlanSpec& spec) {
    return error_of([&] { (void)contiguous_shards(*make_plan(spec), 2); });
  };
  PlanSpec part{.length = 64}, other = part, chosen = part;
  part.queries = query_run(16, 8), other.cross = 8, chosen.pattern = parse_pattern("blocks:8@top:2");
  for (const PlanSpec& spec : {part, other})
    EXPECT_EQ(divided(spec),
              "usage: shards: 8 queries of 64 tokens; ranks hold rows of all, so leave queries and cross out");
  EXPECT_EQ(divided(chosen),
            "usage: shards: blocks:8@top:2 compares the queries and keys of all ranks; name another rule");
  run_ranks(2, [](const Comm& comm) {
    Problem p;
    p.spec.length = 64;
    p.draw(1);
    const auto called = [&](Index queries) {
      return error_of([&] {
        const ShardPlanPtr shard = shard_of(p.spec, 2, comm.rank(), {});
        const auto mine = [&](const Tensor& x) { return rows_of_rank(x, *shard, comm.rank()); };
        (void)ring_attention(slice(mine(p.q), 1, 32 - queries, 32), mine(p.k), mine(p.v), shard, comm, p.options);
      });
    };
    EXPECT_EQ(called(32), "nothing");
    // A call with the last queries alone, as one rank has it.
    EXPECT_NE(called(8).find("usage: ring_attention: q [1, 8, 1, 8]"), std::string::npos) << called(8);
    for (const Backward mode : {Backward::taped, Backward::hybrid}) {
      p.options.backward = mode;
      EXPECT_EQ(called(32), "usage: ring_attention: backward " + std::string(name_of(mode)) +
                                " is not for several ranks; use fused");
    }
    p.options.backward = Backward::fused;
    p.spec.pattern = parse_pattern("slide2d:1x1"), p.spec.documents = {{Grid{8, 4}, Grid{4, 8}}};
    p.options.terms.alibi = true;
    EXPECT_EQ(called(32),
              "usage: ring_attention: alibi and relative on the grids of documents are not for several "
              "ranks, and these are 4x8,8x4");
    p.options.terms = {};
    p.draw_terms(1, false, {3, 3}, {}, false);
    EXPECT_NE(called(32).find("alibi and relative on the grids of documents"), std::string::npos) << called(32);
    p.options.terms = {};
    EXPECT_EQ(called(32), "nothing");
  });
}

TEST(Ring, WrongCallsSayWhatIsWrong) {
  PlanSpec spec;
  spec.length = 8;
  EXPECT_NE(
      error_of([&] { ShardPlan(make_plan(spec), contiguous_shards(*make_plan(spec), 2), 0); }).find("in_order = true"),
      std::string::npos);
  spec.in_order = true;
  const ShardPlanPtr shard = shard_of(spec, 2, 0, {});
  const Tensor x = zeros({1, 4, 1, 4});
  EXPECT_NE(error_of([&] {
              (void)ring_attention(x, x, x, shard, Comm());
            }).find("rank 0 of 1, but the plan is for rank 0 of 2"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              ShardPlan(make_plan(spec), {2, {0, 4, 7}, {0, 1}}, 0);
            }).find("do not cover"),
            std::string::npos);
}

}  // namespace
}  // namespace hilt
