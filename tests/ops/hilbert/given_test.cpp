// Orders that come with the call: the same bits as the plan made with that order, in every mode,
// for a row or for each; what is no bijection is named; what asks for a grid is refused.
#include <gtest/gtest.h>
#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>
#include "ops/hilbert/attention.h"
#include "ops/hilbert/points/points.h"
#include "ops/hilbert/ranks/shards.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/heap.h"
#include "tests/support/same_bits.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

constexpr Backward kModes[] = {Backward::taped, Backward::hybrid, Backward::fused};
constexpr Index kLength = 300, kHeads = 4;

PlanSpec spec_of(const char* pattern, const char* order, const char* documents = "") {
  PlanSpec s;
  s.length = kLength, s.heads = kHeads, s.pattern = parse_pattern(pattern), s.order = parse_order(order, kLength);
  if (*documents) s.documents = parse_documents(documents);
  return s;
}

struct Inputs {
  Tensor q, k, v, d_o, d_lse;
};
Inputs random_inputs(Index batch, DType type) {
  const auto x = [&](Index h, std::uint64_t stream) { return randn({batch, kLength, h, 8}, {7, stream}, type); };
  return {x(kHeads, 1), x(2, 2), x(2, 3), x(kHeads, 4),
          randn({batch, kHeads, kLength}, {7, 5}, type == DType::f64 ? type : DType::f32)};
}

/// o, lse, and the gradients of both with respect to q, k, v and the terms that are there.
std::vector<Tensor> results_of(const Inputs& in, const PlanPtr& plan, const AttentionOptions& options) {
  std::vector<Tensor> watched{in.q, in.k, in.v};
  for (const Tensor& x : {options.terms.slopes, options.terms.relative, options.terms.bias, options.terms.sink})
    if (x) watched.push_back(x);
  Tape tape;
  for (const Tensor& x : watched) tape.watch(x);
  const AttentionResult r = attention_with_lse(in.q, in.k, in.v, plan, options);
  const Tensor loss = add(sum(mul(to(r.o, DType::f64), to(in.d_o, DType::f64))),
                          sum(mul(to(r.lse, DType::f64), to(in.d_lse, DType::f64))));
  const Gradients g = tape.backward(loss);
  std::vector<Tensor> out{r.o, r.lse};
  for (const Tensor& x : watched) out.push_back(g.has(x) ? g[x] : zeros_like(x));
  return out;
}
void expect_same_bits(const std::vector<Tensor>& got, const std::vector<Tensor>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(got[i].shape() == want[i].shape() && same_bits(got[i], want[i])) << what << ": result " << i;
}
/// Rows one over the other.
std::vector<Tensor> stacked(const std::vector<std::vector<Tensor>>& rows) {
  std::vector<Tensor> out;
  for (std::size_t i = 0; i < rows[0].size(); ++i) {
    std::vector<Tensor> each;
    for (const std::vector<Tensor>& row : rows) each.push_back(row[i]);
    out.push_back(cat(each, 0));
  }
  return out;
}
Inputs row_of(const Inputs& in, Index b) {
  const auto one = [&](const Tensor& x) { return contiguous(slice(x, 0, b, b + 1)); };
  return {one(in.q), one(in.k), one(in.v), one(in.d_o), one(in.d_lse)};
}

Tensor tensor_of(const std::vector<std::int32_t>& pi, DType type = DType::i32) {
  return from_values(pi, {std::ssize(pi)}, type);
}
std::vector<std::int32_t> shuffled(const std::vector<Index>& ends, unsigned seed) {
  std::vector<std::int32_t> pi(kLength);
  std::iota(pi.begin(), pi.end(), 0);
  std::mt19937 random(seed);
  Index begin = 0;
  for (const Index end : ends) std::shuffle(pi.begin() + begin, pi.begin() + end, random), begin = end;
  return pi;
}

constexpr const char* kPatterns[] = {"dense",
                                     "segment:64",
                                     "segment:96,dilation=3,offset=head,shift=40",
                                     "segment:70,tail=borrow",
                                     "slide:20",
                                     "slide:9,dilation=2,stride=3,causal=1",
                                     "neighborhood:33",
                                     "blocks:32@local:1",
                                     "blocks:64@global_local:1:0",
                                     "segment:64+segment:128,dilation=4",
                                     "slide:8|segment:100",
                                     "dense|slide:3"};

TEST(GivenOrder, HasTheBitsOfThePlanMadeWithThatOrder) {
  const Tensor pi = tensor_of(permutation(parse_order("hilbert", kLength), kLength)->token_at);
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    const Inputs in = random_inputs(2, type);
    for (const char* pattern : kPatterns)
      for (const Backward mode : kModes) {
        const AttentionOptions options{.backward = mode};
        AttentionOptions given = options;
        given.permutation = pi;
        expect_same_bits(results_of(in, make_plan(spec_of(pattern, "given")), given),
                         results_of(in, make_plan(spec_of(pattern, "hilbert")), options),
                         std::string(pattern) + ' ' + std::string(name_of(mode)));
      }
  }
}

TEST(GivenOrder, OfEachRowIsAsIfTheRowWereAlone) {
  const Inputs in = random_inputs(3, DType::f32);
  std::vector<Tensor> rows;
  for (unsigned b = 0; b < 3; ++b) rows.push_back(tensor_of(shuffled({kLength}, b), DType::i64));
  for (const char* pattern : kPatterns)
    for (const Causality causality : {Causality::none, Causality::curve, Causality::token}) {
      PlanSpec spec = spec_of(pattern, "given");
      spec.causality = causality;
      AttentionOptions options;
      options.permutation = stack(rows);
      const std::vector<Tensor> got = results_of(in, make_plan(spec), options);
      std::vector<std::vector<Tensor>> each;
      for (Index b = 0; b < 3; ++b) {
        options.permutation = rows[static_cast<std::size_t>(b)];
        each.push_back(results_of(row_of(in, b), make_plan(spec), options));
      }
      expect_same_bits(got, stacked(each), pattern);
    }
}

TEST(GivenOrder, OfDocumentsIsInsideEach) {
  const Inputs in = random_inputs(2, DType::f64);
  for (const char* documents : {"100,16x8,40", "100,16x8,40/1,150"}) {
    const bool each = std::string(documents).find('/') != std::string::npos;
    const std::vector<std::int32_t> pi =
        each ? shuffled({1, 100, 151, 228, 268, kLength}, 3) : shuffled({100, 228, 268, kLength}, 3);
    for (const char* pattern : {"dense", "segment:48,shift=5", "slide:7", "neighborhood:9", "slide:3|segment:16"}) {
      if (each && std::string(pattern) == "dense") continue;
      PlanSpec fixed = spec_of(pattern, "given", documents);
      fixed.given = pi;
      for (const Backward mode : kModes) {
        const AttentionOptions options{.backward = mode};
        AttentionOptions given = options;
        given.permutation = tensor_of(pi);
        expect_same_bits(results_of(in, make_plan(spec_of(pattern, "given", documents)), given),
                         results_of(in, make_plan(fixed), options), std::string(documents) + ' ' + pattern);
      }
    }
  }
}

TEST(GivenOrder, WhatLooksAtTokensIsAsInThePlan) {
  const Inputs in = random_inputs(2, DType::f64);
  const std::vector<std::int32_t> pi = shuffled({kLength}, 1);
  for (int what = 1; what < 6; ++what) {
    PlanSpec any = spec_of("segment:64+slide:9", "given");
    PlanSpec fixed = any;
    fixed.given = pi;
    AttentionOptions options;
    if (what == 1) options.dropout = 0.5, options.key = RandomKey{1, 2};
    if (what == 2) options.terms.alibi = true;
    if (what == 3) options.terms.relative = randn({kHeads, 31}, {1, 3}, DType::f64);
    if (what == 4) options.terms.bias = randn({2, 1, kLength, kLength}, {1, 4}, DType::f64);
    if (what == 5) options.terms.sink = randn({kHeads}, {1, 5}, DType::f64), options.terms.softcap = 3;
    AttentionOptions given = options;
    given.permutation = tensor_of(pi);
    std::vector<Tensor> got = results_of(in, make_plan(any), given), want = results_of(in, make_plan(fixed), options);
    if (what == 5) {  // a sum over rows, which stand along the order
      EXPECT_LT(off(got.back(), want.back()), 1e-13);
      got.pop_back(), want.pop_back();
    }
    expect_same_bits(got, want, "what " + std::to_string(what));
  }
}

// Beside causality by token: documents, bf16, and what else looks at tokens.
TEST(GivenOrder, CausalityByTokenGoesWithTheRest) {
  for (const DType type : {DType::f64, DType::bf16}) {
    const DType stat = type == DType::f64 ? DType::f64 : DType::f32;
    const Inputs in = random_inputs(2, type);
    for (const char* documents : {"", "100,150", "100,150/40,60,160"})
      for (const char* pattern : {"dense", "segment:48,shift=5", "slide:20", "segment:64+slide:9"})
        for (int what = 0; what < 3; ++what) {
          PlanSpec any = spec_of(pattern, "given", documents);
          any.causality = Causality::token;
          PlanSpec fixed = any;
          fixed.given = any.documents.empty()       ? shuffled({kLength}, 6)
                        : any.documents.size() == 1 ? shuffled({100, 250, kLength}, 6)
                                                    : shuffled({40, 100, 250, 260, kLength}, 6);
          AttentionOptions options;
          if (what == 1) options.dropout = 0.3, options.key = RandomKey{1, 2};
          if (what == 2) options.terms.bias = randn({2, kHeads, kLength, kLength}, {1, 4}, stat);
          AttentionOptions given = options;
          given.permutation = tensor_of(fixed.given);
          const std::vector<Tensor> got = results_of(in, make_plan(any), given),
                                    want = results_of(in, make_plan(fixed), options);
          for (std::size_t i = 0; i < got.size(); ++i)
            EXPECT_LT(off(got[i], want[i]),
                      (type == DType::f64 ? 1e-11 : 1e-2) * std::max(1.0, off(want[i], zeros_like(want[i]))))
                << type << ' ' << documents << ' ' << pattern << ", what " << what << ", result " << i;
        }
  }
}

// Causality by token is left to the kernels: tiles that come later are passed by, of others pairs.
TEST(GivenOrder, CausalityByTokenIsThatOfThePlan) {
  Inputs in = random_inputs(2, DType::f64);
  std::vector<std::int32_t> reversed = query_run(0, kLength);
  std::ranges::reverse(reversed);
  const auto hilbert = permutation(parse_order("hilbert", kLength), kLength)->token_at;
  std::vector<const char*> patterns(std::begin(kPatterns), std::end(kPatterns));
  patterns.push_back("segment:299");  // and a token that meets itself alone
  for (const bool bad : {false, true}) {
    if (bad)  // the last token, which no other sees
      for (Tensor* x : {&in.k, &in.v}) *x = cat({slice(*x, 1, 0, kLength - 1), full({2, 1, 2, 8}, NAN, DType::f64)}, 1);
    for (const char* pattern : patterns)
      for (const auto& pi : {query_run(0, kLength), reversed, shuffled({kLength}, 9), hilbert}) {
        PlanSpec any = spec_of(pattern, "given");
        any.causality = Causality::token;
        PlanSpec fixed = any;
        fixed.given = pi;
        AttentionOptions given;
        given.permutation = tensor_of(pi);
        const std::vector<Tensor> got = results_of(in, make_plan(any), given),
                                  want = results_of(in, make_plan(fixed), {});
        for (std::size_t i = 0; i < got.size(); ++i) {
          const std::vector<double> x = got[i].to_vector<double>(), y = want[i].to_vector<double>();
          for (std::size_t j = 0; j < x.size(); ++j)
            ASSERT_TRUE(x[j] == y[j] || std::abs(x[j] - y[j]) < 1e-11 || (std::isnan(x[j]) && std::isnan(y[j])))
                << pattern << ", result " << i << ": " << x[j] << ", " << y[j];
        }
      }
  }
}

TEST(GivenOrder, ServesEveryEntrance) {
  const Inputs in = random_inputs(2, DType::f32);
  const std::vector<std::int32_t> pi = shuffled({kLength}, 2);
  PlanSpec fixed = spec_of("segment:64", "given");
  fixed.given = pi;
  const PlanPtr any = make_plan(spec_of("segment:64", "given")), same = make_plan(fixed);
  AttentionOptions given;
  given.permutation = tensor_of(pi);
  const AttentionResult want = attention_with_lse(in.q, in.k, in.v, same);
  Tensor o = zeros_like(in.q);
  attention_into(o, in.q, in.k, in.v, any, given);
  EXPECT_TRUE(same_bits(o, want.o));
  const Tensor k = in.q, v = mul(in.q, 2.0), qkv = stack({in.q, k, v}, 2);
  EXPECT_TRUE(same_bits(attention(qkv, any, given), attention(qkv, same)));
  const auto gradients = [&](const PlanPtr& plan, const AttentionOptions& how) {
    return attention_gradients(in.q, in.k, in.v, want, {in.d_o, in.d_lse}, plan, how);
  };
  const std::vector<Tensor> got = gradients(any, given), wanted = gradients(same, {});
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(got[i], wanted[i])) << i;
  const std::vector<Index> rows{0, 17, 299};
  const auto some = attention_weights(in.q, in.k, any, rows, given), all = attention_weights(in.q, in.k, same, rows);
  ASSERT_EQ(some.size(), all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(some[i].batch, all[i].batch);
    EXPECT_EQ(some[i].keys, all[i].keys);
    EXPECT_EQ(some[i].weights, all[i].weights);
  }
  const Tensor last = slice(in.q, 1, 290, kLength);
  EXPECT_TRUE(same_bits(attention(last, in.k, in.v, any, given), attention(last, in.k, in.v, same)));
}

TEST(GivenOrder, TakesTheOrderOfPoints) {
  const Inputs in = random_inputs(1, DType::f32);
  const Tensor points = rand({kLength, 3}, {1, 9});
  AttentionOptions options;
  for (const char* kind : {"hilbert", "hilbert-trans", "morton", "morton-trans"}) {
    options.permutation = order_of_points(points, kind, 10, {120, 180}).token_at;
    PlanSpec fixed = spec_of("segment:32", "given", "120,180");
    for (const double token : options.permutation.to_vector()) fixed.given.push_back(static_cast<std::int32_t>(token));
    EXPECT_TRUE(same_bits(attention(in.q, in.k, in.v, make_plan(spec_of("segment:32", "given", "120,180")), options),
                          attention(in.q, in.k, in.v, make_plan(fixed))))
        << kind;
  }
}

// An order that never came costs its list and its inverse, where a plan has ranks and tiles.
TEST(GivenOrder, ThatIsNewMakesNoPlan) {
  const Threads alone(1);
  const Inputs in = random_inputs(1, DType::f32);
  for (const char* pattern : {"dense", "segment:64", "slide:20"}) {
    PlanSpec spec = spec_of(pattern, "given");
    spec.causality = Causality::token;
    const PlanPtr plan = make_plan(spec);
    AttentionOptions options;
    options.dropout = 0.1, options.key = RandomKey{1, 2};
    long made = 0;
    std::int64_t held = 0;
    for (unsigned call = 0; call < 1000; ++call) {
      options.permutation = tensor_of(shuffled({kLength}, 100 + call));
      const long before = heap::made;
      (void)attention(in.q, in.k, in.v, plan, options);
      made = heap::made - before;
      if (call == 100) held = heap::held;
    }
    std::cout << "  " << pattern << ": " << made << " allocations a call\n";
    EXPECT_LT(made, 100) << pattern;
    EXPECT_LE(heap::held, held + 4096) << pattern;
  }
}

TEST(GivenOrder, MakesNoPlanAnew) {
  const Inputs in = random_inputs(1, DType::f32);
  const PlanPtr plan = make_plan(spec_of("segment:64", "given"));
  AttentionOptions options;
  std::vector<Tensor> first;
  for (unsigned step = 0; step < 40; ++step) {
    options.permutation = tensor_of(shuffled({kLength}, step % 20));
    const Tensor o = attention(in.q, in.k, in.v, plan, options);
    if (step < 20) first.push_back(o);
    else EXPECT_TRUE(same_bits(o, first[step - 20]));
  }
  EXPECT_FALSE(same_bits(first[0], first[1]));
}

TEST(GivenOrder, ThatIsNoBijectionIsNamed) {
  const Inputs in = random_inputs(2, DType::f32);
  const auto call = [&](const char* documents, std::vector<std::int32_t> pi, Causality causality) {
    return error_of([&] {
      PlanSpec spec = spec_of("segment:64", "given", documents);
      spec.causality = causality;
      AttentionOptions options;
      options.permutation = tensor_of(pi);
      if (std::ssize(pi) > kLength) options.permutation = reshape(options.permutation, {2, kLength});
      (void)attention(in.q, in.k, in.v, make_plan(spec), options);
    });
  };
  for (const Causality causality : {Causality::none, Causality::token}) {
    std::vector<std::int32_t> pi = shuffled({100, kLength}, 4), both = pi;
    EXPECT_EQ(call("100", pi, causality), "nothing");
    pi[7] = 120;
    EXPECT_EQ(call("100", pi, causality),
              "data: permutation: row 0: position 7 names token 120, which is not among 0..99 of its document");
    pi[7] = -1;
    EXPECT_EQ(call("", pi, causality),
              "data: permutation: row 0: position 7 names token -1, which is not among 0..299");
    std::iota(pi.begin(), pi.end(), 0);
    pi[5] = 3;
    EXPECT_EQ(call("", pi, causality), "data: permutation: row 0: token 3 is at position 3 and again at 5");
    both.insert(both.end(), pi.begin(), pi.end());
    EXPECT_EQ(call("", both, causality), "data: permutation: row 1: token 3 is at position 3 and again at 5");
  }
}

TEST(GivenOrder, IsRefusedWhereItMakesNoSense) {
  const Inputs in = random_inputs(2, DType::f32);
  const auto planned = [](PlanSpec spec) { return error_of([&] { (void)make_plan(spec); }); };
  const auto begins = [](const std::string& text, const std::string& with) {
    return text.starts_with(with) ? with : text;
  };
  std::string want = "usage: plan: window2d:4x4 looks at a grid";
  EXPECT_EQ(begins(planned(spec_of("window2d:4x4", "given")), want), want);
  want = "usage: plan: slide:1,prefix=4: order=given is of all tokens of a row, so no prefix goes with it";
  EXPECT_EQ(begins(planned(spec_of("slide:1,prefix=4", "given")), want), want);
  EXPECT_EQ(begins(planned(spec_of("slide:1,prefix=4", "given", "100,150")), want), want);
  want = "usage: plan: blocks:32@top:2 chooses by what lies at each position";
  EXPECT_EQ(begins(planned(spec_of("blocks:32@top:2", "given")), want), want);
  EXPECT_EQ(error_of([] { (void)parse_order("given,chunk=4", 8); }),
            "usage: order (given,chunk=4): given takes no grid and no options");
  PlanSpec spec = spec_of("dense", "row");
  spec.given = {1, 0};
  EXPECT_EQ(planned(spec), "usage: plan: an order of 2 tokens is given, and the order is row; ask for order=given");
  spec.order = parse_order("given", kLength);
  EXPECT_EQ(planned(spec), "usage: plan: the order given is of 2 tokens, a row has 300");

  const auto called = [&](const char* order, const Tensor& pi) {
    AttentionOptions options;
    options.permutation = pi;
    return error_of([&] { (void)attention(in.q, in.k, in.v, make_plan(spec_of("dense", order)), options); });
  };
  EXPECT_EQ(called("given", {}),
            "usage: attention: the plan is of order=given, so each call brings a permutation, "
            "[length] or [batch, length]");
  EXPECT_EQ(called("row", arange(kLength)),
            "usage: attention: a permutation goes with order=given, and the plan has an order, row");
  EXPECT_EQ(called("given", arange(9)), "usage: attention: the permutation is [9]; expected [300] or [2, 300]");
  EXPECT_EQ(called("given", rand({kLength}, {1, 1})), "usage: attention: the permutation is f32; expected i32 or i64");
  want = "usage: plan: order=given is of queries that are tokens";
  EXPECT_EQ(begins(error_of([] { (void)make_shard_plan(spec_of("dense", "given"), 2, 0); }), want), want);
}

}  // namespace
}  // namespace hilt
