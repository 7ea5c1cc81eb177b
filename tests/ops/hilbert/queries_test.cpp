// Queries that are a part of the tokens: each row is that row of the pass with all of them,
// whatever the pattern, the order, the mode, the terms; queries of another sequence; weights.
#include <gtest/gtest.h>
#include <bit>
#include <cmath>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>
#include "core/gradcheck.h"
#include "ops/hilbert/attention.h"
#include "ops/hilbert/ranks/shards.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/heap.h"
#include "tests/support/reference.h"
#include "tests/support/same_bits.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

using Rows = std::vector<std::int32_t>;
constexpr Backward kModes[] = {Backward::taped, Backward::hybrid, Backward::fused};

Tensor picked(const Tensor& x, int axis, const Rows& rows) {
  return contiguous(gather(x, axis, from_values(rows, {std::ssize(rows)})));
}
/// x [B, L, ..] where these rows are, else zero.
Tensor only(const Tensor& x, const Rows& rows) {
  return scatter_add(picked(x, 1, rows), 1, from_values(rows, {std::ssize(rows)}), x.dim(1));
}
struct Inputs {
  Tensor q, k, v, d_o;
};
Inputs random_inputs(Index batch, Index queries, Index keys, Index heads, Index kv_heads, Index dim,
                     DType type = DType::f64) {
  const auto x = [&](Index n, Index h, std::uint64_t stream) { return randn({batch, n, h, dim}, {7, stream}, type); };
  return {x(queries, heads, 1), x(keys, kv_heads, 2), x(keys, kv_heads, 3), x(queries, heads, 4)};
}

struct Results {
  Tensor o, lse, dq, dk, dv, d_slopes, d_table, d_bias, d_sink;
};
Results run(const Inputs& in, const PlanPtr& plan, const AttentionOptions& options) {
  Tape tape;
  for (const Tensor& x : {in.q, in.k, in.v}) tape.watch(x);
  const ScoreTerms& terms = options.terms;
  for (const Tensor& x : {terms.slopes, terms.relative, terms.bias, terms.sink})
    if (x) tape.watch(x);
  const Tensor o = attention(in.q, in.k, in.v, plan, options);
  const Gradients g = tape.knows(o) ? tape.backward(o, in.d_o) : Gradients();
  const auto of = [&](const Tensor& x) { return !x ? Tensor() : g.has(x) ? g[x] : zeros_like(x); };
  return {o,
          attention_with_lse(in.q, in.k, in.v, plan, options).lse,
          of(in.q),
          of(in.k),
          of(in.v),
          of(terms.slopes),
          of(terms.relative),
          of(terms.bias),
          of(terms.sink)};
}

struct Family {
  const char* pattern;
  const char* grid = "";
};
constexpr Family kFamilies[] = {{"dense"},
                                {"segment:16"},
                                {"segment:17,shift=5"},
                                {"segment:28,shift=5,tail=borrow"},
                                {"segment:16,dilation=3,offset=1"},
                                {"segment:8+segment:32,dilation=4,offset=head"},
                                {"slide:5"},
                                {"slide:3,dilation=2,causal=1"},
                                {"neighborhood:9"},
                                {"neighborhood:5,stride=4"},
                                {"segment:8|slide:3"},
                                {"dense|window2d:2x2", ":8x12"},
                                {"window2d:3x4,shift=1x2", ":8x12"},
                                {"slide2d:1x2", ":8x12"},
                                {"neighborhood2d:3x3,dilation=2", ":8x12"},
                                {"window3d:1x3x4", ":2x6x8"},
                                {"slide3d:1x1x1", ":2x6x8"},
                                {"neighborhood3d:1x3x3", ":2x6x8"},
                                {"blocks:8@local:1"},
                                {"blocks:16@global_local:1:1|slide:2"}};
constexpr Index kLength = 96;
constexpr const char* kOrders[] = {"row", "hilbert", "hilbert@,chunk=24", "hilbert@,scope=order-only", "morton"};

std::string order_text(std::string order, const Family& family) {
  const std::size_t mark = order.find('@');
  if (mark == std::string::npos) return order + family.grid;
  return order.substr(0, mark) + family.grid + order.substr(mark + 1);
}

PlanSpec spec_of(const char* pattern, const std::string& order = "row", Causality causality = Causality::none,
                 Index length = kLength, Index heads = 2) {
  PlanSpec s;
  s.length = length, s.heads = heads, s.pattern = parse_pattern(pattern), s.order = parse_order(order, length);
  s.causality = causality;
  return s;
}

const std::vector<Rows> kAsking{{95}, {0}, {40}, query_run(31, 20), query_run(90, 6), {3, 4, 17, 50, 51, 88}};

/// `part` against the rows of `whole`, whose loss was on those alone.
double difference(const Results& part, const Results& whole, const Rows& rows) {
  double worst = 0;
  for (const double d : {off(part.o, picked(whole.o, 1, rows)), off(part.lse, picked(whole.lse, 2, rows)),
                         off(part.dq, picked(whole.dq, 1, rows)), off(part.dk, whole.dk), off(part.dv, whole.dv)})
    worst = std::max(worst, d);
  for (const auto& [x, y] :
       {std::pair(part.d_slopes, whole.d_slopes), {part.d_table, whole.d_table}, {part.d_sink, whole.d_sink}})
    if (x) worst = std::max(worst, off(x, y));
  if (part.d_bias)
    worst = std::max(worst, off(part.d_bias, part.d_bias.dim(2) == std::ssize(rows) && whole.d_bias.dim(2) > 1
                                                 ? picked(whole.d_bias, 2, rows)
                                                 : whole.d_bias));
  return worst;
}

}  // namespace

TEST(Queries, AreRowsOfThePassWithAll) {
  Index drawn = 0, judged = 0;
  double worst = 0;
  for (const Family& family : kFamilies)
    for (const char* order : kOrders)
      for (const Causality causality : {Causality::none, Causality::token, Causality::curve})
        for (const DilationMode dilated : {DilationMode::all_queries, DilationMode::longnet, DilationMode::residue})
          for (const Rows& rows : kAsking) {
            const std::string text = order_text(order, family), pattern = family.pattern;
            if (text.ends_with("only") && causality == Causality::curve) continue;
            if (text.starts_with("morton") && text.ends_with("2x6x8")) continue;  // a control, 2-D
            if (dilated != DilationMode::all_queries && pattern.find("dilation") == std::string::npos) continue;
            if (++drawn % scaled(5, 19) != 0) continue;
            PlanSpec spec = spec_of(family.pattern, text, causality);
            spec.dilation_mode = dilated, spec.in_order = drawn % 4 == 1 && family.grid[0] == 0;
            const PlanPtr whole = make_plan(spec);
            spec.queries = rows;
            const PlanPtr part = make_plan(spec);
            const std::string where = std::string(family.pattern) + " on " + text + " causal " +
                                      std::string(name_of(causality)) + " " + std::string(name_of(dilated)) +
                                      (spec.in_order ? " in order" : "") + ", " + std::to_string(rows.size()) +
                                      " rows from " + std::to_string(rows[0]);
            if (!spec.in_order) {
              Order chunked = spec.order;
              const ref::Attended set = ref::Attended(spec, ref::order_of(chunked, kLength)).asked_by(rows);
              const ref::PlanFault fault = ref::judge(*part, set);
              EXPECT_EQ(fault.what, "") << where << ": " << fault.details;
            }
            const Inputs all = random_inputs(2, kLength, kLength, 2, 1, 8);
            const Inputs some{picked(all.q, 1, rows), all.k, all.v, picked(all.d_o, 1, rows)};
            AttentionOptions of_all, of_some;
            if (drawn % 3 == 0) of_all.dropout = 0.3, of_all.key = RandomKey{5, 6};
            if (drawn % 2 == 0) {
              ScoreTerms& x = of_all.terms;
              x.softcap = 3, x.slopes = randn({2}, {8, 1}, DType::f64), x.relative = randn({2, 9}, {8, 2}, DType::f64);
              x.bias = randn({1, 2, drawn % 4 == 0 ? kLength : 1, kLength}, {8, 3}, DType::f64);
              x.sink = randn({2}, {8, 4}, DType::f64);
            }
            of_some = of_all;
            if (of_all.terms.bias && of_all.terms.bias.dim(2) > 1) {
              Rows tokens = rows;  // a bias of all is by token, that of some by row of q
              if (spec.in_order)
                for (std::int32_t& row : tokens) row = whole->order().token_at[static_cast<std::size_t>(row)];
              of_some.terms.bias = picked(of_all.terms.bias, 2, tokens);
            }
            for (const Backward mode : kModes) {
              of_all.backward = of_some.backward = mode;
              Results full = run({all.q, all.k, all.v, only(all.d_o, rows)}, whole, of_all);
              if (spec.in_order && full.d_bias && full.d_bias.dim(2) > 1)
                full.d_bias = picked(full.d_bias, 2, whole->order().token_at);
              const double d = difference(run(some, part, of_some), full, rows);
              EXPECT_LT(d, 1e-12) << where << ", " << name_of(mode);
              worst = std::max(worst, d), ++judged;
            }
          }
  std::cout << judged << " passes over parts of the queries, at most " << worst << " from the pass over all\n";
}

TEST(Queries, AreTheLastWhereThePlanDoesNotSay) {
  for (const char* pattern : {"dense", "segment:16", "slide:5"}) {
    PlanSpec spec = spec_of(pattern, "hilbert", Causality::token);
    const Inputs all = random_inputs(1, kLength, kLength, 2, 2, 8);
    for (const Index n : {0, 1, 7}) {
      const Rows rows = query_run(kLength - n, n);
      const Inputs some{picked(all.q, 1, rows), all.k, all.v, picked(all.d_o, 1, rows)};
      spec.queries.reset();
      const PlanPtr silent = make_plan(spec);
      spec.queries = rows;
      const PlanPtr says = make_plan(spec);
      for (const Backward mode : kModes) {
        const Results a = run(some, silent, {.backward = mode}), b = run(some, says, {.backward = mode});
        for (const auto& [x, y] : {std::pair(a.o, b.o), {a.lse, b.lse}, {a.dq, b.dq}, {a.dk, b.dk}, {a.dv, b.dv}})
          EXPECT_TRUE(same_bits(x, y)) << pattern << ", " << n << " rows, " << name_of(mode);
        if (n == 0) continue;
        EXPECT_LT(off(a.o, picked(run(all, silent, {.backward = mode}).o, 1, rows)), 1e-13);
      }
    }
  }
}

// A run that begins and ends where tiles do has the tiles of the full plan.
TEST(Queries, HaveTheBitsOfTheFullPassWhereTilesAreTheSame) {
  constexpr Index kLong = 400;
  const Rows rows = query_run(128, 128);
  for (const char* pattern :
       {"dense", "segment:64", "segment:128,dilation=2", "slide:20", "neighborhood:9", "blocks:64@local:1"})
    for (const Causality causality : {Causality::none, Causality::token})
      for (const DType type : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        PlanSpec spec = spec_of(pattern, "row", causality, kLong);
        const Inputs all = random_inputs(2, kLong, kLong, 2, 1, 16, type);
        const Results full = run(all, make_plan(spec), {});
        spec.queries = rows;
        const Results part = run({picked(all.q, 1, rows), all.k, all.v, picked(all.d_o, 1, rows)}, make_plan(spec), {});
        EXPECT_TRUE(same_bits(part.o, picked(full.o, 1, rows))) << pattern << " o " << type;
        EXPECT_TRUE(same_bits(part.lse, picked(full.lse, 2, rows))) << pattern << " lse " << type;
        EXPECT_TRUE(same_bits(part.dq, picked(full.dq, 1, rows))) << pattern << " dq " << type;
      }
}

TEST(Queries, OfDocumentsKnowTheirDocument) {
  constexpr Index kRow = 300;
  const Rows list{0, 7, 19, 20, 33, 34, 150, 151, 152, 280, 299};
  Index judged = 0;
  for (const char* documents : {"20,14,13x9,64", "20,130,10x13/1,64,8x8,64,6x5", "33,33,33,33,33"})
    for (const char* pattern :
         {"dense", "segment:16", "slide:5", "segment:8+segment:32,dilation=4,offset=head", "neighborhood:3"})
      for (const char* order : {"row", "hilbert"})
        for (const Rows& rows : {list, Rows{33}, query_run(140, 20)}) {
          if (++judged % scaled(1, 4) != 0) continue;
          if (std::string(documents).find(",1,") != std::string::npos && pattern[0] == 'n') continue;
          PlanSpec spec = spec_of(pattern, order, Causality::token, kRow);
          spec.documents = parse_documents(documents);
          const PlanPtr whole = make_plan(spec);
          spec.queries = rows;
          const PlanPtr part = make_plan(spec);
          for (std::size_t row = 0; row < spec.documents.size(); ++row) {
            PlanSpec plain = spec;
            plain.queries.reset();
            const ref::PlanFault fault = ref::judge(
                *part, ref::Attended::packed(plain, spec.documents[row]).asked_by(rows), static_cast<Index>(row));
            EXPECT_EQ(fault.what, "") << pattern << " in " << documents << ": " << fault.details;
          }
          const Inputs all = random_inputs(std::ssize(spec.documents), kRow, kRow, 2, 1, 8);
          const Inputs some{picked(all.q, 1, rows), all.k, all.v, picked(all.d_o, 1, rows)};
          for (const Backward mode : kModes) {
            AttentionOptions of_all{.backward = mode}, of_some{.backward = mode};
            of_all.terms.alibi = of_some.terms.alibi = true;
            of_all.terms.bias = randn({kRow, kRow}, {3, 3}, DType::f64);
            of_some.terms.bias = unsqueeze(unsqueeze(picked(of_all.terms.bias, 0, rows), 0), 0);
            of_all.terms.bias = unsqueeze(unsqueeze(of_all.terms.bias, 0), 0);
            const Results full = run({all.q, all.k, all.v, only(all.d_o, rows)}, whole, of_all);
            EXPECT_LT(difference(run(some, part, of_some), full, rows), 1e-12)
                << pattern << " in " << documents << ", " << name_of(mode);
          }
        }
}

TEST(Queries, LeakNothing) {
  for (const char* pattern : {"dense", "segment:32", "slide:20", "blocks:16@local:1", "segment:8|slide:9"})
    for (const char* order : {"row", "hilbert"})
      for (const Backward mode : kModes) {
        PlanSpec spec = spec_of(pattern, order, Causality::token);
        spec.queries = Rows{30, 41, 60};
        const PlanPtr plan = make_plan(spec);
        const Inputs in = random_inputs(1, 3, kLength, 2, 2, 5);
        const Results before = run(in, plan, {.backward = mode});
        Inputs other = in;
        for (Tensor* x : {&other.k, &other.v}) {
          std::vector<double> values = x->to_vector();
          for (std::size_t i = 42 * 10; i < values.size(); ++i) values[i] = 1e3 - 7 * values[i];
          *x = from_values(values, x->shape());
        }
        const Results after = run(other, plan, {.backward = mode});
        EXPECT_TRUE(same_bits(slice(before.o, 1, 0, 2), slice(after.o, 1, 0, 2))) << pattern << ' ' << order;
        EXPECT_FALSE(same_bits(before.o, after.o)) << pattern << ' ' << order;
        for (const Tensor& d : {before.dk, before.dv})
          for (const double x : slice(d, 1, 61, kLength).to_vector()) EXPECT_EQ(x, 0) << pattern << ' ' << order;
      }
}

TEST(Queries, PassTheSecondWitness) {
  for (const Backward mode : kModes) {
    PlanSpec spec = spec_of("segment:8+slide:3", "hilbert", Causality::token, 20);
    spec.queries = Rows{2, 9, 19};
    const PlanPtr plan = make_plan(spec);
    const Inputs in = random_inputs(1, 3, 20, 2, 1, 3);
    const auto report = gradcheck(
        [&](std::span<const Tensor> x) {
          AttentionOptions options{.backward = mode};
          options.terms.bias = x[3];
          return attention(x[0], x[1], x[2], plan, options);
        },
        {in.q, in.k, in.v, randn({1, 2, 3, 20}, {2, 2}, DType::f64)});
    EXPECT_TRUE(report.ok) << name_of(mode) << ": " << report.where;
  }
}

TEST(Queries, RefuseWhatIsNoPartOfTheTokens) {
  PlanSpec spec = spec_of("dense", "row", Causality::none, 10);
  const auto planned = [&](const Rows& rows) {
    spec.queries = rows;
    return error_of([&] { make_plan(spec); });
  };
  EXPECT_EQ(planned({3, 10}), "usage: plan: queries: row 10 is not among the 10 of the keys");
  EXPECT_EQ(planned({-1}), "usage: plan: queries: row -1 is none; rows are named once, ascending, and count from 0");
  EXPECT_EQ(planned({4, 4}),
            "usage: plan: queries: row 4 comes twice or late; rows are named once, ascending, and count from 0");
  EXPECT_EQ(planned({4, 2}),
            "usage: plan: queries: row 2 comes twice or late; rows are named once, ascending, and count from 0");
  EXPECT_EQ(planned({4, 5}), "nothing");
  const PlanPtr two = make_plan(spec);
  const Inputs in = random_inputs(1, 3, 10, 2, 2, 4);
  EXPECT_EQ(error_of([&] { attention(in.q, in.k, in.v, two); }), "usage: attention: 3 queries, but the plan is for 2");
  spec.pattern = parse_pattern("blocks:2@top:1");
  EXPECT_EQ(error_of([&] { make_plan(spec); }),
            "usage: plan: blocks:2@top:1 chooses by the queries of all 10 tokens, and 2 of them are there; use another "
            "rule");
  EXPECT_EQ(error_of([] { query_run(-1, 2); }), "usage: queries: 2 from -1 on must be rows from 0 to 2147483646");
  spec = spec_of("dense", "row", Causality::none, 10);
  const PlanPtr whole = make_plan(spec);
  spec.queries = Rows{4, 5};
  Tape tape;
  tape.watch(in.q);
  const Tensor o = attention(in.q, in.k, in.v, whole);
  EXPECT_NE(error_of([&] { tape.backward(o, randn({1, 10, 2, 4}, {1}, DType::f64)); }), "nothing");
  AttentionOptions options;
  options.terms.bias = zeros({10, 10}, DType::f64);
  EXPECT_EQ(error_of([&] { attention(in.q, in.k, in.v, whole, options); }),
            "usage: bias: [10, 10] does not broadcast to [batch 1, heads 2, queries 3, keys 10]");
  spec.in_order = true;
  EXPECT_EQ(error_of([&] { make_shard_plan(spec, 2, 0); }).substr(0, 40), "usage: shards: 2 queries of 10 tokens; r");
}

// Cross-attention: queries of another sequence, against the formula in a few ops.
TEST(Queries, OfAnotherSequenceKnowDense) {
  for (const auto& [queries, keys] : {std::pair<Index, Index>{5, 140}, {150, 9}, {1, 3}, {7, 7}, {0, 4}, {4, 0}})
    for (const bool terms : {false, true})
      for (const Backward mode : kModes) {
        PlanSpec spec = spec_of("dense", "hilbert", Causality::none, keys, 4);
        if (queries <= keys) spec.cross = queries;  // more than the keys are another sequence by themselves
        const PlanPtr plan = make_plan(spec);
        EXPECT_EQ(plan_of_queries(plan, queries)->spec().cross, queries);
        const Inputs in = random_inputs(2, queries, keys, 4, 2, 6);
        AttentionOptions options{.backward = mode};
        if (terms) options.terms.bias = randn({2, 1, queries, keys}, {9, 9}, DType::f64);
        if (terms) options.terms.sink = randn({4}, {9, 8}, DType::f64);
        const Results got = run(in, plan, options);
        Tape tape;
        for (const Tensor& x : {in.q, in.k, in.v}) tape.watch(x);
        const auto heads = [](const Tensor& x) { return permute(x, {0, 2, 1, 3}); };
        const auto spread = [&](const Tensor& x) { return gather(heads(x), 1, from_values(Rows{0, 0, 1, 1}, {4})); };
        if (keys == 0) {
          EXPECT_EQ(off(got.o, zeros(in.q.shape(), DType::f64)), 0);
          continue;
        }
        Tensor s = mul(matmul(heads(in.q), transpose(spread(in.k))), 1 / std::sqrt(6.0));
        if (terms) s = add(s, options.terms.bias);
        if (terms) s = cat({s, expand(reshape(options.terms.sink, {1, 4, 1, 1}), {2, 4, queries, 1})}, -1);
        const Tensor p = slice(softmax(s), -1, 0, keys), o = heads(matmul(p, spread(in.v)));
        const Gradients g = tape.backward(o, in.d_o);
        for (const auto& [x, y] : {std::pair(got.o, o), {got.dq, g[in.q]}, {got.dk, g[in.k]}, {got.dv, g[in.v]}})
          EXPECT_LT(off(x, y), 1e-12) << queries << " x " << keys << ", " << name_of(mode);
      }
  PlanSpec spec = spec_of("slide:3", "row", Causality::none, 9);
  spec.cross = 2;
  const auto refused = [&] { return error_of([&] { make_plan(spec); }); };
  EXPECT_EQ(refused(), "usage: plan: queries of another sequence know dense alone, got slide:3");
  spec.pattern = parse_pattern("dense"), spec.causality = Causality::token;
  EXPECT_EQ(refused(),
            "usage: plan: queries of another sequence have no place among the 9 tokens, so neither causal, queries, "
            "in_order, documents nor prefix go with cross");
  spec.causality = Causality::none;
  const Inputs in = random_inputs(1, 2, 9, 2, 2, 4);
  AttentionOptions options;
  options.terms.alibi = true;
  EXPECT_EQ(error_of([&] { attention(in.q, in.k, in.v, make_plan(spec), options); }),
            "usage: alibi: looks at the tokens of both sides, and the 2 queries are of another sequence; use a bias");
}

TEST(Weights, AreThoseOfTheFormula) {
  Index judged = 0;
  for (const Family& family : kFamilies)
    for (const char* order : {"row", "hilbert"})
      for (const bool terms : {false, true})
        for (const int form : {0, 1, 2}) {  // all ask, some ask, rows in curve order
          PlanSpec spec = spec_of(family.pattern, order_text(order, family), Causality::token);
          spec.in_order = form == 2;
          if (form == 1) spec.queries = Rows{3, 9, 40, 41, 77, 95};
          const PlanPtr plan = make_plan(spec);
          const Inputs in =
              random_inputs(2, plan->queries(), kLength, 2, 1, 5, judged % 3 == 0 ? DType::f32 : DType::f64);
          const std::vector<Index> rows = form == 1 ? std::vector<Index>{0, 3, 5} : std::vector<Index>{2, 80, 95};
          AttentionOptions options;
          if (form == 0) options.dropout = 0.5, options.key = RandomKey{1, 2};  // which weights know nothing of
          if (terms) {
            const DType stat = in.q.dtype();
            options.terms.softcap = 2, options.terms.sink = randn({2}, {4, 4}, stat);
            options.terms.bias = randn({2, plan->queries(), kLength}, {4, 5}, stat);
            options.terms.relative = randn({2, 5}, {4, 6}, stat);
          }
          const auto weights = attention_weights(in.q, in.k, plan, rows, options);
          ASSERT_EQ(weights.size(), 2 * rows.size() * 2);
          const auto q = in.q.to_vector(), k = in.k.to_vector();
          const auto of = [](const Tensor& x) { return x ? x.to_vector() : std::vector<double>(); };
          const auto bias = of(options.terms.bias), table = of(options.terms.relative), sink = of(options.terms.sink);
          for (std::size_t i = 0; i < weights.size(); ++i) {
            const RowWeights& w = weights[i];
            const Index h = w.head, n = plan->queries();
            EXPECT_EQ(w.batch, static_cast<Index>(i) / 6);
            EXPECT_EQ(w.row, rows[i % 6 / 2]);
            EXPECT_EQ(h, static_cast<Index>(i) % 2);
            const Index row = spec.queries ? (*spec.queries)[static_cast<std::size_t>(w.row)] : w.row;
            const auto row_of = [&](Index token) {
              return spec.in_order ? Index{plan->order().position_of[static_cast<std::size_t>(token)]} : token;
            };
            const Index t = spec.in_order ? Index{plan->order().token_at[static_cast<std::size_t>(row)]} : row;
            std::vector<double> e;
            Rows keys;
            double sum = terms ? std::exp(sink[static_cast<std::size_t>(h)]) : 0, all = 0;
            for (Index u = 0; u < kLength; ++u) {
              const Index times = plan->attends(h, row, row_of(u));
              if (times == 0) continue;
              double z = 0;
              for (Index d = 0; d < 5; ++d)
                z += q[static_cast<std::size_t>(((w.batch * n + w.row) * 2 + h) * 5 + d)] *
                     k[static_cast<std::size_t>((w.batch * kLength + row_of(u)) * 5 + d)];
              z /= std::sqrt(5.0);
              if (terms)
                z = 2 * std::tanh(z / 2) +
                    bias[static_cast<std::size_t>((h * n + (spec.in_order ? t : w.row)) * kLength + u)] +
                    table[static_cast<std::size_t>(h * 5 + std::clamp<Index>(t - u, -2, 2) + 2)];
              keys.push_back(static_cast<std::int32_t>(u)), e.push_back(static_cast<double>(times) * std::exp(z));
              sum += e.back();
            }
            EXPECT_EQ(w.keys, keys) << family.pattern << ' ' << order;
            const double near = in.q.dtype() == DType::f32 ? 2e-6 : 1e-13;
            for (std::size_t j = 0; j < std::min(e.size(), w.weights.size()); ++j) {
              EXPECT_NEAR(w.weights[j], e[j] / sum, near);
              all += w.weights[j];
            }
            EXPECT_NEAR(all,
                        e.empty() ? 0
                        : terms   ? 1 - std::exp(sink[static_cast<std::size_t>(h)]) / sum
                                  : 1,
                        20 * near);
          }
          ++judged;
        }
  std::cout << judged << " configurations\n";
}

TEST(Weights, OfRowsWithDocumentsOfTheirOwnAndOfSetsChosenByLooking) {
  PlanSpec spec = spec_of("slide:4", "row", Causality::token, 40);
  spec.documents = parse_documents("10,30/25,5");
  const Inputs in = random_inputs(2, 40, 40, 2, 2, 4);
  const auto weights = attention_weights(in.q, in.k, make_plan(spec), std::vector<Index>{12, 36});
  ASSERT_EQ(weights.size(), 8U);
  EXPECT_EQ(weights[0].keys, (Rows{10, 11, 12}));        // sequence 0, row 12, head 0
  EXPECT_EQ(weights[4].keys, (Rows{8, 9, 10, 11, 12}));  // sequence 1
  EXPECT_EQ(weights[6].keys, Rows{});                    // row 36 of it belongs to nobody
  PlanSpec chosen = spec_of("blocks:8@top:2", "row", Causality::none, 40);
  const auto plan = make_plan(chosen);
  for (const RowWeights& w : attention_weights(in.q, in.k, plan, std::vector<Index>{33})) {
    const PlanPtr own = plan_of_sequence(plan, in.q, in.k, w.batch);
    Rows keys;
    for (Index u = 0; u < 40; ++u)
      if (own->attends(w.head, 33, u) > 0) keys.push_back(static_cast<std::int32_t>(u));
    EXPECT_EQ(w.keys, keys);
    EXPECT_NEAR(std::accumulate(w.weights.begin(), w.weights.end(), 0.0), 1, 1e-12);
  }
  EXPECT_EQ(error_of([&] { attention_weights(in.q, in.k, make_plan(spec), std::vector<Index>{40}); }),
            "usage: attention_weights: row 40 is not among the 40 of q, or comes twice or late");
}

// What a decoded token pays for its plan.
TEST(Queries, PlanOfOneIsCheap) {
  const Threads alone(1);  // whose allocations are counted
  struct Cost {
    std::int64_t bytes;  // the most that is held while it is made
    long allocations;
  };
  const auto cost = [](const PlanSpec& spec) {
    (void)Plan(spec);  // the order is kept for the next
    const std::int64_t before = heap::held;
    const long made = heap::made;
    heap::most_held = before;
    const Plan plan(spec);
    return Cost{heap::most_held - before, heap::made - made};
  };
  for (const Index length : {Index{1024}, Index{8192}})
    for (const auto& [pattern, order] : {std::pair("dense", "row"),
                                         {"dense", "hilbert"},
                                         {"slide:128", "row"},
                                         {"segment:256", "row"},
                                         {"segment:256", "hilbert"},
                                         {"window2d:16x16", length == 1024 ? "hilbert:32x32" : "hilbert:64x128"}}) {
      PlanSpec spec = spec_of(pattern, order, Causality::token, length, 8);
      const Cost all = cost(spec);
      spec.queries = Rows{static_cast<std::int32_t>(length - 1)};
      const Cost one = cost(spec);
      std::cout << "  " << length << " tokens, " << pattern << ", " << order << ": " << one.bytes << " bytes and "
                << one.allocations << " allocations for one query, " << all.bytes << " and " << all.allocations
                << " for all\n";
      EXPECT_LT(one.bytes, all.bytes) << pattern;
      EXPECT_LT(one.allocations, all.allocations) << pattern;
    }
}

}  // namespace hilt
