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
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

struct Whole {
  Tensor o, lse, dq, dk, dv;
};
struct Problem {
  PlanSpec spec;
  Index batch = 1, kv_heads = 1, dim = 8;
  AttentionOptions options;
  DType dtype = DType::f64;
  Tensor q, k, v, d_o;

  void draw(std::uint64_t seed) {
    const auto normal = [&](Index heads, std::uint64_t stream) {
      return to(randn({batch, spec.length, heads, dim}, RandomKey{seed, stream}, DType::f64), dtype);
    };
    q = normal(spec.heads, 1), k = normal(kv_heads, 2), v = normal(kv_heads, 3), d_o = normal(spec.heads, 4);
  }
};

/// The gradient, or zeros where nothing attends.
Tensor gradient(const Gradients& g, const Tensor& x) { return g.has(x) ? g[x] : zeros_like(x); }

Whole on_one_rank(const Problem& p) {
  Tape tape;
  for (const Tensor& x : {p.q, p.k, p.v}) tape.watch(x);
  const PlanPtr plan = make_plan(p.spec);
  const Tensor o = attention(p.q, p.k, p.v, plan, p.options);
  const Tensor lse = attention_with_lse(p.q, p.k, p.v, plan, p.options).lse;
  const Gradients g = tape.backward(o, p.d_o);
  return {o, lse, gradient(g, p.q), gradient(g, p.k), gradient(g, p.v)};
}

struct Sharding {
  Transport transport = Transport::ring;
  Index chunks = 0;
};  // 0: contiguous
ShardPlanPtr shard_of(const PlanSpec& spec, int ranks, int rank, Sharding how) {
  PlanSpec positions = spec;
  positions.in_order = spec.documents.empty();
  const PlanPtr plan = make_plan(positions);
  return std::make_shared<const ShardPlan>(
      plan, how.chunks > 0 ? balanced_shards(*plan, ranks, how.chunks) : contiguous_shards(*plan, ranks), rank,
      how.transport);
}

struct Outcome {
  Whole whole;
  std::vector<std::size_t> sent, predicted;
  double imbalance = 1;
};
Outcome on_ranks(const Problem& p, int ranks, Sharding how) {
  Outcome out{{},
              std::vector<std::size_t>(static_cast<std::size_t>(ranks)),
              std::vector<std::size_t>(static_cast<std::size_t>(ranks)),
              1};
  run_ranks(ranks, [&](Comm& comm) {
    const ShardPlanPtr shard = shard_of(p.spec, ranks, comm.rank(), how);
    const auto mine = [&](const Tensor& x) { return rows_of_rank(x, *shard, comm.rank()); };
    const Tensor q = mine(p.q), k = mine(p.k), v = mine(p.v);
    agree_on(*shard, comm, p.batch, p.kv_heads, p.dim, p.dtype, p.options);
    const std::size_t before = comm.traffic().bytes_sent;
    Tape tape;
    for (const Tensor& x : {q, k, v}) tape.watch(x);
    const Tensor o = ring_attention(q, k, v, shard, comm, p.options);
    const Gradients g = tape.backward(o, mine(p.d_o));
    const std::size_t sent = comm.traffic().bytes_sent - before;
    const Tensor lse = ring_attention_with_lse(q, k, v, shard, comm, p.options).lse;
    const ShardPlan::Bytes bytes = shard->bytes_sent(p.batch, p.kv_heads, p.dim, p.dtype);
    const auto all = [&](const Tensor& x) { return whole_of_rows(x, *shard, comm); };
    const Whole whole{all(o), permute(squeeze(all(unsqueeze(permute(lse, {0, 2, 1}), -1)), -1), {0, 2, 1}),
                      all(gradient(g, q)), all(gradient(g, k)), all(gradient(g, v))};
    const auto rank = static_cast<std::size_t>(comm.rank());
    out.sent[rank] = sent, out.predicted[rank] = bytes.forward + bytes.backward;
    if (rank == 0) out.whole = whole, out.imbalance = imbalance(shard->plan(), shard->shards());
  });
  return out;
}

/// The largest difference over the largest value; infinities must be in the same places.
double distance(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to_vector(), y = b.to_vector();
  EXPECT_EQ(x.size(), y.size());
  double worst = 0, largest = 1;
  for (std::size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    if (std::isinf(x[i]) || std::isinf(y[i])) {
      if (x[i] != y[i]) return HUGE_VAL;
      continue;
    }
    const double d = std::abs(x[i] - y[i]);
    if (!(d <= worst)) worst = d;
    largest = std::max(largest, std::abs(y[i]));
  }
  return worst / largest;
}
double distance(const Whole& a, const Whole& b) {
  return std::max(
      {distance(a.o, b.o), distance(a.lse, b.lse), distance(a.dq, b.dq), distance(a.dk, b.dk), distance(a.dv, b.dv)});
}

const std::vector<int> kRanks{1, 2, 3, 4, 5, 8};

std::string describe(const Problem& p, int ranks, Sharding how) {
  std::ostringstream text;
  text << "L " << p.spec.length << ", " << p.spec.heads << '/' << p.kv_heads << " heads of " << p.dim << ", "
       << to_string(p.spec.order) << ", " << to_string(p.spec.pattern) << ", " << name_of(p.spec.dilation_mode)
       << ", causal " << name_of(p.spec.causality) << ", documents " << to_string(p.spec.documents) << ", dropout "
       << p.options.dropout << "; " << ranks << " ranks, " << name_of(how.transport) << ", chunks " << how.chunks;
  return text.str();
}

/// Anything that a plan can be, small.
Problem random_problem(std::uint64_t seed) {
  std::uint32_t words = 0;
  const auto below = [&](Index n) {
    return static_cast<Index>(philox({words++, 0, 0, 0}, seed)[0] % static_cast<std::uint64_t>(n));
  };
  const std::vector<Index> lengths{1, 2, 3, 5, 7, 13, 31, 64, 97, 128, 129, 256, 257, 300, 389};
  Problem p;
  p.spec.length = lengths[static_cast<std::size_t>(below(static_cast<Index>(lengths.size())))];
  p.kv_heads = 1 + below(2), p.spec.heads = p.kv_heads * (1 + below(3));
  p.batch = 1 + below(2), p.dim = std::vector<Index>{1, 3, 8, 16}[static_cast<std::size_t>(below(4))];
  const std::vector<std::string> orders{"row", "snake", "morton", "tiles", "hilbert", "hilbert,chunk=32", "hilbert"};
  p.spec.order = parse_order(orders[static_cast<std::size_t>(below(7))], p.spec.length);
  const std::vector<std::string> patterns{"dense",
                                          "dense",
                                          "segment:64",
                                          "segment:16",
                                          "segment:32,dilation=4",
                                          "segment:16+segment:64,dilation=4",
                                          "segment:48,dilation=3,offset=1",
                                          "segment:600",
                                          "segment:32,dilation=4,offset=head",
                                          "slide:20",
                                          "slide:0",
                                          "neighborhood:31",
                                          "window2d:4x4",
                                          "slide2d:2x3",
                                          "neighborhood2d:5x5",
                                          "slide3d:0x2x3,dilation=2,stride=3",
                                          "slide:9,dilation=3,causal=1",
                                          "segment:48,shift=20",
                                          "blocks:32@global_local:1:0|slide:9",
                                          "blocks"};
  const std::string& pattern = patterns[static_cast<std::size_t>(below(static_cast<Index>(patterns.size())))];
  if (pattern == "blocks") {
    const Index n = (p.spec.length + 15) / 16;
    BlockPairs pairs;
    for (Index i = 0; i < n; ++i)
      for (Index j = 0; j < n; ++j)
        if (below(4) == 0) pairs.emplace_back(static_cast<std::int32_t>(i), static_cast<std::int32_t>(j));
    p.spec.pattern = {blocks(16, pairs)};
    p.spec.work_order = static_cast<WorkOrder>(below(4));
  } else {
    p.spec.pattern = parse_pattern(pattern);
  }
  const Order folding = p.spec.order;
  if (p.spec.pattern[0].on_grid()) {  // as square as the length allows
    Index height = 1;
    for (Index h = 1; h * h <= p.spec.length; ++h) height = p.spec.length % h == 0 ? h : height;
    p.spec.order.grid = {p.spec.length / height, height};
  }
  p.spec.dilation_mode = static_cast<DilationMode>(below(4));
  if (p.spec.dilation_mode == DilationMode::head_groups && static_cast<Index>(p.spec.pattern.size()) > p.spec.heads)
    p.spec.dilation_mode = DilationMode::longnet;
  p.spec.causality = static_cast<Causality>(below(3));
  if (below(3) == 0) p.options.dropout = 0.3, p.options.key = RandomKey{seed, 7};
  if (below(4) == 0) p.options.scale = 0.7;
  if (below(3) == 0 && !pattern.starts_with("blocks")) {
    const bool planar = p.spec.pattern[0].on_grid();
    p.spec.order = folding;
    p.spec.documents.resize(static_cast<std::size_t>(below(2) == 0 ? 1 : p.batch));
    for (DocumentList& list : p.spec.documents)
      for (Index left = p.spec.length; left > 0 && below(8) > 0; left -= list.back().length) {
        const Index height = 1 + below(std::min<Index>(left, 9));
        if (planar) list.emplace_back(Grid{1 + below(std::min<Index>(left / height, 20)), height});
        else list.emplace_back(1 + below(left));
      }
  }
  p.draw(seed);
  return p;
}

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
    ASSERT_LE(d, 1e-11) << "seed " << seed << ": " << describe(p, ranks, how);
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
          EXPECT_LE(distance(many.whole, one), 1e-11) << describe(p, ranks, how);
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
    EXPECT_EQ(many.sent, std::vector<std::size_t>(static_cast<std::size_t>(ranks))) << ranks;
    EXPECT_LE(distance(many.whole, on_one_rank(p)), 1e-11);
  }
}

TEST(Ring, OnlyActiveKeysOfADilatedBranchTravel) {
  Problem p;
  p.spec.length = 512, p.spec.pattern = parse_pattern("segment:512,dilation=8");
  p.draw(1);
  const Outcome many = on_ranks(p, 4, {});
  // Each rank holds 16 active keys and sends them to 3 others, K and V, forward and again backward,
  // and 48 rows of gradients home.
  const std::size_t row = 2 * 8 * sizeof(double);
  for (std::size_t sent : many.sent) EXPECT_EQ(sent, 3 * 16 * row * 3);
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
  for (std::size_t sent : many.sent) EXPECT_EQ(sent, (2 * 2 * 16 + 4) * 2 * sizeof(double) * 3);
}

TEST(Ring, MoreRanksThanTokens) {
  for (Index length : {0, 1, 2, 5}) {
    Problem p;
    p.spec.length = length, p.spec.heads = 2;
    p.draw(1);
    for (const Transport transport : {Transport::ring, Transport::gather})
      EXPECT_LE(distance(on_ranks(p, 8, {transport, 0}).whole, on_one_rank(p)), 1e-11) << length;
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
  p.spec.length = 512, p.spec.heads = 2, p.dim = 16, p.dtype = DType::bf16;
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
// stage before on their way home, and ours arriving. Two ranks never wait for a next, three never
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
