// Documents packed into rows: the same as each alone, bit for bit where the tiles are the same;
// nothing crosses from one to another; what belongs to nobody is empty; what plans of them cost.
#include <gtest/gtest.h>
#include <bit>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <vector>
#include "core/parallel.h"
#include "ops/hilbert/attention.h"
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/tiles.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"
#include "tests/support/same_bits.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

constexpr Backward kModes[] = {Backward::taped, Backward::hybrid, Backward::fused};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

PlanSpec spec_of(Index length, const char* documents, const char* pattern, const char* order = "row",
                 Causality causality = Causality::none, Index heads = 2) {
  PlanSpec s;
  s.length = length, s.heads = heads, s.pattern = parse_pattern(pattern), s.order = parse_order(order, length);
  s.causality = causality, s.documents = parse_documents(documents);
  return s;
}

struct Inputs {
  Tensor q, k, v, d_o;
};
Inputs random_inputs(Index batch, Index length, Index heads, Index kv_heads, Index dim, DType type = DType::f64,
                     std::uint64_t seed = 1) {
  const auto x = [&](Index h, std::uint64_t stream) { return randn({batch, length, h, dim}, {seed, stream}, type); };
  return {x(heads, 1), x(kv_heads, 2), x(kv_heads, 3), x(heads, 4)};
}

struct Results {
  Tensor o, lse, dq, dk, dv;
};
Results run(const Inputs& in, const PlanPtr& plan, const AttentionOptions& options) {
  Tape tape;
  for (const Tensor& x : {in.q, in.k, in.v}) tape.watch(x);
  const Tensor o = attention(in.q, in.k, in.v, plan, options);
  const Gradients g = tape.backward(o, in.d_o);
  const auto gradient = [&](const Tensor& x) { return g.has(x) ? g[x] : zeros_like(x); };
  return {o, attention_with_lse(in.q, in.k, in.v, plan, options).lse, gradient(in.q), gradient(in.k), gradient(in.v)};
}

/// Row `row`, tokens [first, first + n), of [B, L, ..] or, for lse, [B, H, L].
Tensor part_of(const Tensor& x, Index row, Index first, Index n, int axis = 1) {
  return contiguous(slice(slice(x, 0, row, row + 1), axis, first, first + n));
}
Inputs part_of(const Inputs& in, Index row, Index first, Index n) {
  return {part_of(in.q, row, first, n), part_of(in.k, row, first, n), part_of(in.v, row, first, n),
          part_of(in.d_o, row, first, n)};
}

/// A pattern, whether it looks at a grid, and whether it has branches.
struct Kind {
  const char* pattern;
  bool planar = false;
};
constexpr Kind kKinds[] = {{"dense"},
                           {"segment:16"},
                           {"segment:16,tail=borrow"},
                           {"segment:16,dilation=3,offset=1"},
                           {"segment:8+segment:32,dilation=4,offset=head"},
                           {"slide:5"},
                           {"neighborhood:9"},
                           {"window2d:3x4", true},
                           {"slide2d:1x2", true},
                           {"neighborhood2d:3x3", true}};
constexpr const char* kOrders[] = {
    "row", "snake", "morton", "tiles:2x3", "hilbert", "hilbert,chunk=24", "hilbert,scope=order-only"};

}  // namespace

TEST(Documents, PackedEqualsEachAlone) {
  Index configurations = 0, documents = 0;
  for (const Kind& kind : kKinds)
    for (const char* order : kOrders)
      for (const Causality causality : {Causality::none, Causality::token, Causality::curve})
        for (const DilationMode mode : {DilationMode::all_queries, DilationMode::longnet, DilationMode::head_groups}) {
          const bool own_lists = configurations % 2 == 1, narrow = configurations % 5 == 4;
          if (std::string(order).ends_with("only") && causality == Causality::curve) continue;
          if (mode != DilationMode::all_queries && !std::string(kind.pattern).starts_with("segment")) continue;
          if (++configurations % scaled(3, 9) != 0) continue;
          const char* const text = kind.planar ? own_lists ? "4x5,12x11,5x4/9x16,1x3,7x8" : "5x7,12x11,7x5,5x7,1x1"
                                   : own_lists ? "20,130,10x13/1,64,8x8,64,15x6"
                                               : "33,1,9x15,33,2,5x7";
          PlanSpec spec = spec_of(290, text, kind.pattern, order, causality);
          spec.dilation_mode = mode;
          const PlanPtr plan = make_plan(spec);
          const Index batch = 2, dim = 5;
          const Inputs in = random_inputs(batch, spec.length, spec.heads, 1, dim, narrow ? DType::bf16 : DType::f64);
          const Results forward = run(in, plan, {.backward = Backward::fused});
          for (const Backward backward : kModes) {
            const std::string where = std::string(kind.pattern) + ", " + order + ", " + text + ", " +
                                      std::string(name_of(causality)) + ", " + std::string(name_of(mode)) + ", " +
                                      std::string(name_of(backward));
            const bool fused = backward == Backward::fused;
            const Results all = fused ? forward : run(in, plan, {.backward = backward});
            const double close = narrow ? 0.05 : 1e-12;
            for (Index row = 0; row < batch; ++row) {
              Index first = 0;
              for (const Document& d : spec.documents[own_lists ? at(row) : 0]) {
                PlanSpec alone = spec;
                alone.documents.clear(), alone.length = d.length, alone.order.grid = d.grid;
                const Results one = run(part_of(in, row, first, d.length), make_plan(alone), {.backward = backward});
                for (const auto& [name, x, y] : {std::tuple("o", part_of(all.o, row, first, d.length), one.o),
                                                 {"lse", part_of(all.lse, row, first, d.length, 2), one.lse},
                                                 {"dq", part_of(all.dq, row, first, d.length), one.dq},
                                                 {"dk", part_of(all.dk, row, first, d.length), one.dk},
                                                 {"dv", part_of(all.dv, row, first, d.length), one.dv}}) {
                  ASSERT_LE(off(x, y), close) << where << ": " << name << " of row " << row << " from " << first;
                  ASSERT_TRUE(!fused || same_bits(x, y)) << where << ": " << name << " of row " << row;
                }
                first += d.length, ++documents;
              }
              const Index left = spec.length - first;
              for (const Tensor& x : {all.o, all.dq, all.dk, all.dv})
                for (const double e : part_of(x, row, first, left).to_vector()) ASSERT_EQ(e, 0) << where;
              for (const double e : part_of(all.lse, row, first, left, 2).to_vector())
                ASSERT_EQ(e, -kInfinity) << where;
            }
          }
        }
  std::cout << configurations / scaled(3, 9) << " configurations x 3 modes, " << documents
            << " documents: fused bit for bit what each gives alone\n";
}

TEST(Documents, AreWhatTheDefinitionsSay) {
  Index plans = 0;
  for (const Kind& kind : kKinds)
    for (const char* order : kOrders)
      for (const Causality causality : {Causality::none, Causality::token, Causality::curve}) {
        if (std::string(order).ends_with("only") && causality == Causality::curve) continue;
        PlanSpec spec =
            spec_of(70, kind.planar ? "3x5,6x7/1x4,5x5,4x2,2x4" : "13,1,6x7/40,20", kind.pattern, order, causality);
        const PlanPtr plan = make_plan(spec);
        for (Index row = 0; row < 2; ++row) {
          const ref::Attended set = ref::Attended::packed(spec, spec.documents[at(row)]);
          const ref::PlanFault fault = ref::judge(*plan, set, row);
          ASSERT_EQ(fault.what, "") << kind.pattern << ", " << order << ": " << fault.details;
          PlanSpec one_list = spec;
          one_list.documents = {spec.documents[at(row)]};
          const ref::PlanFault other = ref::judge(*make_plan(one_list), set);
          ASSERT_EQ(other.what, "") << kind.pattern << ", " << order << ": " << other.details;
          ++plans;
        }
        if (plans % 3 != 0) continue;
        // The formulas, pair by pair, with dropout, whose masks are drawn by the tokens of a row.
        PlanSpec one_list = spec;
        one_list.documents = {spec.documents[0]};
        const Inputs in = random_inputs(2, spec.length, spec.heads, 1, 3);
        const RandomKey key{5, 9};
        const ref::Attended set = ref::Attended::packed(spec, spec.documents[0]);
        const ref::Sizes n{2, spec.length, spec.heads, 1, 3, 1 / std::sqrt(3.0), 0.3, key};
        const ref::Inputs<double> x{in.q.to_vector(), in.k.to_vector(), in.v.to_vector()};
        const auto want = ref::attention<double>(n, set, x);
        const auto slopes = ref::attention_gradients<double>(n, set, x, in.d_o.to_vector());
        for (const Backward backward : kModes) {
          const Results got = run(in, make_plan(one_list), {.backward = backward, .dropout = 0.3, .key = key});
          const auto judge = [&](const Tensor& t, const std::vector<double>& w) {
            ASSERT_LE(off(t, from_values(w, t.shape())), 1e-11) << kind.pattern << ", " << name_of(backward);
          };
          judge(got.o, want.o), judge(got.lse, want.lse);
          judge(got.dq, slopes.dq), judge(got.dk, slopes.dk), judge(got.dv, slopes.dv);
        }
      }
}

TEST(Documents, DoNotSeeEachOther) {
  // Tokens of one document, and of the end that belongs to nobody, become NaN or large: no bit of
  // the others changes. Lists of one row do not reach another row either.
  for (const char* pattern : {"dense", "segment:16", "segment:8+segment:32,dilation=4,offset=1", "slide:9"})
    for (const char* documents : {"40,100,37", "40,100,37/150,1"})
      for (const Causality causality : {Causality::none, Causality::token}) {
        const PlanSpec spec = spec_of(200, documents, pattern, "hilbert", causality);
        const PlanPtr plan = make_plan(spec);
        const Inputs in = random_inputs(2, spec.length, 2, 2, 5, DType::f32);
        for (const Backward backward : kModes)
          for (const double value : {1e4, std::numeric_limits<double>::quiet_NaN()}) {
            const Index row = 0, first = 40, n = 100, tail = 177;  // the second document of row 0, and its tail
            Inputs other = in;
            for (Tensor* x : {&other.q, &other.k, &other.v, &other.d_o}) {
              if (x == &other.d_o && std::isnan(value) && backward == Backward::taped)
                continue;  // its matmuls spread it
              *x = clone(*x);
              for (const auto& [from, to] : {std::pair(first, first + n), {tail, spec.length}}) {
                Tensor some = slice(slice(*x, 0, row, row + 1), 1, from, to);
                copy(some, full(some.shape(), value, some.dtype()));
              }
            }
            clear_attention_fallbacks();
            const Results changed = run(other, plan, {.backward = backward});
            // Where there is a NaN hybrid's backward is fused; so is taped where it would mask.
            const bool handed_over =
                std::isnan(value) && (backward == Backward::hybrid || !attention_fallbacks().empty());
            const Results base = run(in, plan, {.backward = handed_over ? Backward::fused : backward});
            bool differed = false;
            for (const auto& [x, y] :
                 {std::pair(base.o, changed.o), {base.dq, changed.dq}, {base.dk, changed.dk}, {base.dv, changed.dv}}) {
              for (const auto& [r, from, to] :
                   {std::tuple(row, Index{0}, first), {row, first + n, tail}, {row + 1, Index{0}, spec.length}})
                ASSERT_TRUE(same_bits(part_of(x, r, from, to - from), part_of(y, r, from, to - from)))
                    << pattern << ", " << documents << ", " << name_of(backward) << ", " << value << ", row " << r;
              differed = differed || !same_bits(part_of(x, row, first, n), part_of(y, row, first, n));
              for (const double e : part_of(y, row, tail, spec.length - tail).to_vector()) ASSERT_EQ(e, 0);
            }
            EXPECT_TRUE(differed);
          }
      }
}

TEST(Documents, HaveTheSameBitsForAnyNumberOfThreads) {
  for (const char* documents : {"130,3,40,130", "300/7,100,100"}) {
    const PlanPtr plan = make_plan(spec_of(310, documents, "dense", "hilbert", Causality::token));
    const Inputs in = random_inputs(2, 310, 2, 1, 7, DType::f32);
    std::vector<Results> all;
    for (const int threads : {1, 2, 4}) {
      const Threads use(threads);
      all.push_back(run(in, plan, {}));
      const Results &a = all[0], &b = all.back();
      EXPECT_TRUE(same_bits(a.o, b.o) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv));
    }
  }
}

TEST(Documents, EqualOnesShareOneTiling) {
  PlanSpec many = spec_of(4096 * 64, "1", "neighborhood2d:3x3", "hilbert");
  many.documents = {DocumentList(4096, Grid{8, 8})};
  const Plan plan(many);
  ASSERT_EQ(plan.parts().size(), 1u);
  EXPECT_EQ(plan.parts()[0].tilings.size(), 1u);
  PlanSpec one = spec_of(64, "8x8", "neighborhood2d:3x3", "hilbert");
  const Plan image(one);
  EXPECT_TRUE(plan.parts()[0].tilings[0].met == image.parts()[0].tilings[0].met);
  EXPECT_EQ(plan.stats().pairs, 4096 * image.stats().pairs);
  EXPECT_LE(plan.bytes(), image.bytes() + 4096 * (sizeof(Tiling::Place) + sizeof(Document)) + 4096);
  EXPECT_EQ(plan.empty_rows(), 0);
}

TEST(Documents, APlanOfManyIsSmall) {
  // 65,536 tokens in 58 documents of 58 lengths, causal dense.
  PlanSpec spec = spec_of(65536, "1", "dense", "row", Causality::token, 16);
  DocumentList list;
  Index left = spec.length;
  for (Index i = 0; i < 57; ++i) list.push_back(400 + 25 * i), left -= list.back().length;
  list.push_back(left);
  spec.documents = {list};
  const Plan plan(spec);
  ASSERT_EQ(plan.parts().size(), 58u);
  EXPECT_LE(plan.bytes(), 1000000u);
}

TEST(Documents, ThatDoNotFitAreRefused) {
  const auto plan = [](const char* documents, const char* pattern, const char* order = "row", Index length = 64) {
    return error_of([&] { (void)Plan(spec_of(length, documents, pattern, order)); });
  };
  EXPECT_EQ(plan("40,25", "dense"), "usage: plan: the documents of row 0 hold 65 tokens, but a row has 64");
  EXPECT_EQ(plan("40,24/8x8,1", "dense"), "usage: plan: the documents of row 1 hold 65 tokens, but a row has 64");
  EXPECT_EQ(plan("4x4,20", "window2d:2x2"),
            "usage: plan: window2d:2x2 needs a grid in every document; one of row 0 has 20 tokens and no grid");
  EXPECT_EQ(plan("4x4,20", "dense", "hilbert:8x8"),
            "usage: plan: order hilbert:8x8 names a grid, and grids belong to documents: 4x4,20");
  PlanSpec blocks_of = spec_of(64, "32,32", "dense");
  blocks_of.pattern = {blocks(16, local_blocks(4, 1))};
  EXPECT_EQ(error_of([&] { (void)Plan(blocks_of); }),
            "usage: plan: blocks:16(10 pairs): blocks are of a whole row, and cannot be of documents");
  PlanSpec in_order = spec_of(64, "32,32", "dense");
  in_order.in_order = true;
  EXPECT_EQ(error_of([&] { (void)Plan(in_order); }),
            "usage: plan: documents stand as tokens, not in the order of each: in_order must be false");
  PlanSpec wrong = spec_of(64, "32", "dense");
  wrong.documents[0][0].length = 31, wrong.documents[0][0].grid = Grid{8, 4};
  EXPECT_EQ(error_of([&] { (void)Plan(wrong); }), "usage: plan: a document of 31 tokens on a grid of 4x8");
  for (const auto& [bounds, named] : std::vector<std::pair<std::vector<DocumentList>, const char*>>{
           {{{{0, 5}, {5, 7}}}, "document 0 of row 0 is 0"},  // two rows: of 0 and 5 tokens, of 5 and 7
           {{{Grid{5, 1}, Grid{0, 5}}}, "document 1 of row 0 is 5x0"},
           {{{Grid{5, 0}}}, "document 0 of row 0 is 0x5"},
           {{{7}, {7, -3}}, "document 1 of row 1 is -3"}}) {
    wrong.documents = bounds;
    EXPECT_EQ(error_of([&] { (void)Plan(wrong); }),
              std::string("usage: plan: ") + named +
                  ": expected at least 1 token; list lengths and grids, not where documents begin and end");
  }
  const Inputs in = random_inputs(3, 64, 2, 2, 4);
  EXPECT_EQ(error_of([&] { (void)attention(in.q, in.k, in.v, make_plan(spec_of(64, "3/4", "dense"))); }),
            "usage: attention: a batch of 3, but the plan has documents for 2 rows");
  EXPECT_EQ(error_of([&] { (void)make_plan(spec_of(64, "3", "dense"))->order(); }),
            "usage: plan: each of its documents, 3, has an order of its own");
}

TEST(Documents, AsText) {
  for (const char* text : {"100", "100,16x16,4x6x6", "100,28/64,64", "1x1"})
    EXPECT_EQ(to_string(parse_documents(text)), text);
  EXPECT_EQ(parse_documents("100,28/4x16"),
            (std::vector<DocumentList>{{Document(100), Document(28)}, {Document(Grid{16, 4})}}));
  EXPECT_EQ(parse_documents("2x3x4")[0][0].length, 24);
  for (const char* text : {"", "0", "4x", "4x0", "1x2x3x4", "5,,6", "a", "100/", "3000000000"})
    EXPECT_NE(error_of([&] { (void)parse_documents(text); }), "nothing") << text;
}

/// What head 0 attends to, by row of the batch, query and key, with the tokens behind them.
using Pairs = std::vector<std::array<std::int32_t, 5>>;
static Pairs pairs_of(const Plan& plan, std::span<const PlanPart> parts, Index batch) {
  Pairs out;
  for (const PlanPart& part : parts)
    for (const std::int32_t tiling : plan.tilings_of(0)) {
      const Tiling& t = part.tilings[at(tiling)];
      Index pairs = 0;
      for (Index place = 0; place < part.places.count(batch); ++place) {
        const Tiling::Place its = part.places.at(place);
        for (std::size_t tile = 0; tile < t.q_tile.size(); ++tile)
          for (const auto [other, partial] : t.met.of(tile))
            for (auto q = at(t.q_tile[tile].begin); q < at(t.q_tile[tile].end); ++q)
              for (auto k = at(t.k_tile[at(other)].begin); k < at(t.k_tile[at(other)].end); ++k)
                if (!partial || attends(t, q, k))
                  out.push_back({its.row, its.q + t.q_token[q], its.k + t.k_token[k], its.k + t.q_names()[q],
                                 its.k + t.k_names()[k]}),
                      ++pairs;
      }
      EXPECT_EQ(pairs, t.pairs * part.places.count(batch));
    }
  std::ranges::sort(out);
  return out;
}

TEST(Documents, OfARowAreOneTilingForAGpu) {
  for (const char* documents : {"20,130,10x13,20,1", "20,130,10x13/1,64,8x8,64/290"})
    for (const char* pattern : {"dense", "segment:16,dilation=3,offset=1", "slide:5|segment:8", "neighborhood:9",
                                "segment:8+segment:32,dilation=4"})
      for (const char* order : {"row", "hilbert"})
        for (const Causality causality : {Causality::none, Causality::token, Causality::curve}) {
          PlanSpec spec = spec_of(310, documents, pattern, order, causality);
          for (const bool some : {false, true}) {
            if (some) spec.queries = std::vector<std::int32_t>{3, 4, 19, 20, 149, 150, 200};
            SCOPED_TRACE(testing::Message() << documents << ' ' << pattern << ' ' << order << ' ' << some);
            const PlanPtr plan = make_plan(spec);
            const std::span<const PlanPart> rows = row_parts(*plan);
            EXPECT_EQ(std::ssize(rows), std::ssize(spec.documents));
            EXPECT_EQ(rows.data(), row_parts(*plan).data()) << "made once";
            const Index batch = spec.documents.size() == 1 ? 2 : std::ssize(spec.documents);
            const Pairs want = pairs_of(*plan, plan->parts(), batch);
            EXPECT_FALSE(want.empty());
            EXPECT_EQ(pairs_of(*plan, rows, batch), want);
          }
        }
  PlanSpec of_one = spec_of(290, "290", "dense");
  of_one.documents = {};
  const PlanPtr whole = make_plan(of_one);
  EXPECT_EQ(row_parts(*whole).data(), whole->parts().data());
}

}  // namespace hilt
