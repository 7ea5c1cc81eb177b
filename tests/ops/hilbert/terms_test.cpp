// Score terms: every term in every mode against loops with dual numbers and against central
// differences, on every family of patterns; what a bias masks, rows that see a sink alone, the same
// bits on any number of threads, and what is refused.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/gradcheck.h"
#include "core/parallel.h"
#include "ops/hilbert/attention.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"
#include "tests/support/same_bits.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

using namespace hilt;

namespace {

constexpr Backward kModes[] = {Backward::taped, Backward::hybrid, Backward::fused};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// A problem: a set of pairs, sizes, and terms by their shapes; an empty shape is no term.
struct Problem {
  std::string pattern, order;
  Index length;
  Causality causality = Causality::none;
  DilationMode dilation_mode = DilationMode::all_queries;
  Index batch = 2, heads = 2, kv_heads = 1, dim = 3;
  DType dtype = DType::f64;
  double softcap = 0;
  bool published = false, slopes = false, sink = false;
  Shape relative, bias;  // relative: without heads
  double dropout = 0;

  std::string name() const {
    std::ostringstream s;
    s << pattern << ", " << order << ", causal " << name_of(causality) << ", " << dtype << ": softcap " << softcap
      << (published ? ", published slopes" : "") << (slopes ? ", slopes" : "") << (sink ? ", sink" : "")
      << ", relative " << relative << ", bias " << bias;
    return s.str();
  }
  PlanSpec spec() const {
    PlanSpec p;
    p.length = length, p.heads = heads;
    p.order = parse_order(order, length), p.pattern = parse_pattern(pattern);
    p.causality = causality, p.dilation_mode = dilation_mode;
    return p;
  }
};

struct Inputs {
  Tensor q, k, v, d_o, d_lse;
  AttentionOptions options;
};
Inputs inputs_of(const Problem& p, std::uint64_t seed) {
  const auto draw = [&](const Shape& shape, std::uint64_t stream, DType type) {
    return randn(shape, {seed, stream}, type);
  };
  const DType stat = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  Inputs in{draw({p.batch, p.length, p.heads, p.dim}, 1, p.dtype),
            draw({p.batch, p.length, p.kv_heads, p.dim}, 2, p.dtype),
            draw({p.batch, p.length, p.kv_heads, p.dim}, 3, p.dtype),
            draw({p.batch, p.length, p.heads, p.dim}, 4, p.dtype),
            draw({p.batch, p.heads, p.length}, 5, stat),
            {}};
  ScoreTerms& terms = in.options.terms;
  if (p.softcap > 0) terms.softcap = p.softcap;
  terms.alibi = p.published;
  if (p.slopes) terms.slopes = mul(draw({p.heads}, 6, stat), 0.2);
  if (p.relative.rank() > 0) {
    Shape table = {p.heads};
    for (const Index extent : p.relative) table.push_back(extent);
    terms.relative = draw(table, 7, stat);
  }
  if (p.bias.rank() > 0) terms.bias = draw(p.bias, 8, stat);
  if (p.sink) terms.sink = draw({p.heads}, 9, stat);
  in.options.dropout = p.dropout;
  if (p.dropout > 0) in.options.key = RandomKey{seed, 10};
  return in;
}

struct Values {
  std::vector<double> o, lse, dq, dk, dv, dslopes, dtable, dbias, dsink;
  std::vector<std::pair<const char*, const std::vector<double>*>> all() const {
    return {{"o", &o},           {"lse", &lse},     {"dq", &dq},      {"dk", &dk}, {"dv", &dv}, {"dslopes", &dslopes},
            {"dtable", &dtable}, {"dbias", &dbias}, {"dsink", &dsink}};
  }
};
Values run(const Problem& p, const Inputs& in, Backward mode, const PlanPtr& plan) {
  AttentionOptions options = in.options;
  options.backward = mode, options.strict = true;
  const ScoreTerms& terms = options.terms;
  Tape tape;
  for (const Tensor* x : {&in.q, &in.k, &in.v, &terms.slopes, &terms.relative, &terms.bias, &terms.sink})
    if (*x) tape.watch(*x);
  const AttentionResult r = attention_with_lse(in.q, in.k, in.v, plan, options);
  const Tensor loss = add(sum(mul(to(r.o, r.lse.dtype()), to(in.d_o, r.lse.dtype()))), sum(mul(r.lse, in.d_lse)));
  const Gradients g = tape.backward(loss);
  const auto slope = [&](const Tensor& x) { return x ? g[x].to_vector() : std::vector<double>(); };
  (void)p;
  return {r.o.to_vector(),     r.lse.to_vector(),     slope(in.q),       slope(in.k),      slope(in.v),
          slope(terms.slopes), slope(terms.relative), slope(terms.bias), slope(terms.sink)};
}

struct Oracle {
  ref::Sizes sizes;
  ref::Attended set;
  ref::Inputs<double> in;
};
Oracle oracle_of(const Problem& p, const Inputs& in) {
  const PlanSpec spec = p.spec();
  const ScoreTerms& x = in.options.terms;
  const auto values = [](const Tensor& t) { return t ? t.to_vector() : std::vector<double>(); };
  ref::Terms<double> terms;
  terms.softcap = p.softcap;
  terms.slopes = values(x.slopes);
  if (p.published) {  // as published: a geometric series from 2^(-8 / n), and of the rest every other one
    const auto series = [](Index n) {
      std::vector<double> s;
      for (Index i = 1; i <= n; ++i) s.push_back(std::pow(2.0, -8.0 * static_cast<double>(i) / static_cast<double>(n)));
      return s;
    };
    Index power = 1;
    while (2 * power <= p.heads) power *= 2;
    terms.slopes = series(power);
    const auto more = series(2 * power);
    for (Index i = 0; std::ssize(terms.slopes) < p.heads; i += 2) terms.slopes.push_back(more[at(i)]);
  }
  terms.table = values(x.relative), terms.bias = values(x.bias), terms.sink = values(x.sink);
  terms.distance_on_grid = p.pattern.find("2d") != std::string::npos;
  for (int i = 0; i < p.relative.rank(); ++i) terms.table_shape.push_back(p.relative[i]);
  terms.bias_shape = {1, 1, 1, 1};
  for (int i = 0; i < p.bias.rank(); ++i) terms.bias_shape[at(4 - p.bias.rank() + i)] = p.bias[i];
  terms.grid = ref::grid_of(spec.order, p.length);
  return {{p.batch, p.length, p.heads, p.kv_heads, p.dim, 1 / std::sqrt(static_cast<double>(p.dim)), p.dropout,
           in.options.key.value_or(RandomKey{})},
          ref::Attended(spec, ref::order_of(spec.order, p.length)),
          {values(in.q), values(in.k), values(in.v), terms}};
}

/// The largest difference as a share of the largest element.
double off(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return kInfinity;
  double worst = 0, largest = 1e-300;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return kInfinity;
    worst = std::max(worst, std::abs(a[i] - b[i])), largest = std::max(largest, std::abs(b[i]));
  }
  return worst / std::max(largest, 1e-6);
}

/// Sets of pairs of every family, and causality.
std::vector<Problem> families() {
  std::vector<Problem> list;
  const std::pair<const char*, const char*> sets[] = {{"dense", "row:4x6"},
                                                      {"dense", "hilbert:4x6"},
                                                      {"segment:7", "hilbert:4x6"},
                                                      {"segment:5,dilation=2,offset=1", "morton:4x6"},
                                                      {"segment:4+segment:24,dilation=3", "hilbert:4x6"},
                                                      {"slide:3", "row:4x6"},
                                                      {"neighborhood:5", "hilbert:4x6"},
                                                      {"window2d:2x3", "hilbert:4x6"},
                                                      {"slide2d:1x2", "row:4x6"},
                                                      {"neighborhood2d:3x3", "hilbert:4x6"}};
  for (const auto& [pattern, order] : sets)
    for (const Causality causality : {Causality::none, Causality::token})
      list.push_back({.pattern = pattern, .order = order, .length = 24, .causality = causality});
  return list;
}
/// Every term by itself, and together.
std::vector<Problem> with_every_term(const Problem& p) {
  std::vector<Problem> list;
  const auto add = [&](auto change) {
    list.push_back(p);
    change(list.back());
  };
  const Index n = p.length;
  add([](Problem& x) { x.softcap = 1.5; });
  add([](Problem& x) { x.published = true; });
  add([](Problem& x) { x.slopes = true; });
  add([](Problem& x) { x.relative = {7}; });
  add([](Problem& x) { x.relative = {3, 5}; });
  add([](Problem& x) { x.sink = true; });
  for (const Shape& bias : {Shape{n, n}, Shape{1, n}, Shape{n, 1}, Shape{p.heads, 1, 1}, Shape{p.batch, 1, n, n},
                            Shape{1, p.heads, n, n}, Shape{p.batch, p.heads, n, n}, Shape{p.batch, 1, 1, n}, Shape{1}})
    add([&](Problem& x) { x.bias = bias; });
  add([&](Problem& x) { x.softcap = 2, x.slopes = true, x.relative = {5, 3}, x.bias = {1, n, n}, x.sink = true; });
  return list;
}

}  // namespace

// ---- the reference itself -----------------------------------------------------------------------

TEST(ReferenceTerms, FormulasAgreeWithDualNumbersAndDifferences) {
  double worst_dual = 0, worst_difference = 0;
  Index checked = 0;
  std::uint64_t seed = 0;
  for (Problem p : families()) {
    p.dim = 2, p.batch = 1;
    for (Problem& x : with_every_term(p)) {
      if (++seed % 5 != 0 && x.bias.rank() != 3) continue;  // a fifth of them, and all terms together
      x.dropout = seed % 2 ? 0 : 0.3;
      const Inputs in = inputs_of(x, seed);
      const Oracle o = oracle_of(x, in);
      const std::vector<double> d_o = in.d_o.to_vector(), d_lse = in.d_lse.to_vector();
      const auto g = ref::attention_gradients<double>(o.sizes, o.set, o.in, d_o, {}, d_lse);
      const auto loss = [&](const ref::Inputs<double>& y) {
        const auto out = ref::attention<double>(o.sizes, o.set, y);
        double sum = 0;
        for (std::size_t i = 0; i < d_o.size(); ++i) sum += out.o[i] * d_o[i];
        for (std::size_t i = 0; i < d_lse.size(); ++i)
          if (std::isfinite(out.lse[i])) sum += out.lse[i] * d_lse[i];
        return sum;
      };
      const std::vector<double>* const slopes[] = {&g.dq, &g.dk, &g.dv, &g.dslopes, &g.dtable, &g.dbias, &g.dsink};
      const auto parts = [](ref::Inputs<double>& y) {
        return std::array<std::vector<double>*, 7>{&y.q,           &y.k,          &y.v,         &y.terms.slopes,
                                                   &y.terms.table, &y.terms.bias, &y.terms.sink};
      };
      for (std::size_t part = 0; part < 7; ++part)
        for (std::size_t i = seed % 3; i < slopes[part]->size(); i += 1 + slopes[part]->size() / 6) {
          ref::Inputs<double> along{std::vector<double>(o.in.q.size()), std::vector<double>(o.in.k.size()),
                                    std::vector<double>(o.in.v.size())};
          if (part >= 3) *parts(along)[part] = std::vector<double>(slopes[part]->size());
          (*parts(along)[part])[i] = 1;
          const double want = (*slopes[part])[i];
          worst_dual = std::max(worst_dual, std::abs(ref::slope_along(o.sizes, o.set, o.in, along, d_o, d_lse) - want));
          constexpr double kStep = 1e-5;
          ref::Inputs<double> up = o.in, down = o.in;
          (*parts(up)[part])[i] += kStep, (*parts(down)[part])[i] -= kStep;
          worst_difference = std::max(worst_difference, std::abs((loss(up) - loss(down)) / (2 * kStep) - want));
          ++checked;
        }
    }
  }
  std::cout << checked << " partial derivatives: dual numbers differ by " << worst_dual << ", central differences by "
            << worst_difference << '\n';
  EXPECT_LE(worst_dual, 1e-11);
  EXPECT_LE(worst_difference, 1e-7);
}

// ---- every term in every mode -------------------------------------------------------------------

class Terms : public testing::TestWithParam<Backward> {};
INSTANTIATE_TEST_SUITE_P(Modes, Terms, testing::ValuesIn(kModes),
                         [](const auto& mode) { return std::string(name_of(mode.param)); });

TEST_P(Terms, AgreeWithTheDefinitions) {
  std::uint64_t seed = 100;
  Index checked = 0;
  double worst = 0;
  const auto judge = [&](const Problem& p) {
    const Inputs in = inputs_of(p, ++seed);
    const Oracle o = oracle_of(p, in);
    const auto out = ref::attention<double>(o.sizes, o.set, o.in);
    auto g = ref::attention_gradients<double>(o.sizes, o.set, o.in, in.d_o.to_vector(), {}, in.d_lse.to_vector());
    if (p.published) g.dslopes.clear();
    const Values got = run(p, in, GetParam(), make_plan(p.spec()));
    const Values want{out.o, out.lse, g.dq, g.dk, g.dv, g.dslopes, g.dtable, g.dbias, g.dsink};
    for (std::size_t i = 0; i < 9; ++i) {
      const double error = off(*got.all()[i].second, *want.all()[i].second);
      EXPECT_LE(error, 1e-11) << p.name() << ": " << got.all()[i].first;
      worst = std::max(worst, error), ++checked;
    }
  };
  for (const Problem& family : families())
    for (Problem& p : with_every_term(family)) {
      if (seed % 4 == 0) p.dropout = 0.4;
      judge(p);
    }
  for (const Index heads : {3, 6}) {  // slopes between powers of two; three axes; longer than a tile
    Problem p{.pattern = "slide:9", .order = "hilbert:2x3x4", .length = 24, .heads = heads, .kv_heads = heads};
    p.published = true, p.relative = {3, 3, 5}, p.sink = true;
    judge(p);
    p = {.pattern = "dense", .order = "hilbert:15x20", .length = 300, .heads = heads, .kv_heads = 3};
    p.slopes = true, p.relative = {9, 7}, p.softcap = 3, p.bias = {300, 1}, p.causality = Causality::token;
    judge(p);
    p.bias = {heads, 300, 300}, p.relative = {601};
    judge(p);
  }
  std::cout << name_of(GetParam()) << ": " << checked << " tensors, the worst off by " << worst << '\n';
}

TEST_P(Terms, GradientsAgreeWithDifferences) {
  Index checked = 0;
  double worst = 0;
  std::uint64_t seed = 0;
  for (const Problem& family : families()) {
    std::vector<Problem> all = with_every_term(family);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (++seed % scaled(2, 8) != 0 && i + 1 < all.size()) continue;
      Problem p = all[i];
      p.dim = 1, p.batch = 1;
      if (p.bias.rank() == 4) p.bias = p.bias.with(0, 1);
      const Inputs in = inputs_of(p, seed);
      std::vector<Tensor> x{in.q, in.k, in.v};
      const ScoreTerms& given = in.options.terms;
      Tensor ScoreTerms::*const members[] = {&ScoreTerms::slopes, &ScoreTerms::relative, &ScoreTerms::sink,
                                             &ScoreTerms::bias};
      std::vector<Tensor ScoreTerms::*> there;
      for (const auto member : members)
        if (given.*member && (given.*member).numel() < 100) x.push_back(given.*member), there.push_back(member);
      const PlanPtr plan = make_plan(p.spec());
      const GradcheckResult r = gradcheck(
          [&](std::span<const Tensor> y) {
            AttentionOptions options = in.options;
            options.backward = GetParam();
            for (std::size_t j = 0; j < there.size(); ++j) options.terms.*there[j] = y[3 + j];
            const AttentionResult out = attention_with_lse(y[0], y[1], y[2], plan, options);
            const Tensor lse = unsqueeze(permute(out.lse, {0, 2, 1}), -1);
            return cat({out.o, maximum(lse, -1e3)}, -1);  // rows without keys have -inf, a constant
          },
          x);
      EXPECT_TRUE(r) << p.name() << ": " << r.where;
      checked += r.checked, worst = std::max(worst, r.worst);
    }
  }
  std::cout << name_of(GetParam()) << ": " << checked << " partial derivatives, worst at " << worst
            << " of what is allowed\n";
}

TEST_P(Terms, NarrowTypesFollowTheWideOnes) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const char* pattern : {"segment:48", "segment:32+slide:9", "neighborhood2d:5x5"}) {
      Problem p{.pattern = pattern, .order = "hilbert:12x16", .length = 192, .causality = Causality::token, .dim = 16};
      p.softcap = 4, p.slopes = true, p.relative = {9, 9}, p.bias = {2, 192, 192}, p.sink = true, p.dtype = dtype;
      const Inputs in = inputs_of(p, 7);
      const Oracle o = oracle_of(p, in);
      const auto out = ref::attention<double>(o.sizes, o.set, o.in);
      const auto g =
          ref::attention_gradients<double>(o.sizes, o.set, o.in, in.d_o.to_vector(), {}, in.d_lse.to_vector());
      const Values got = run(p, in, GetParam(), make_plan(p.spec()));
      const Values want{out.o, out.lse, g.dq, g.dk, g.dv, g.dslopes, g.dtable, g.dbias, g.dsink};
      const double allowed = dtype == DType::f32 ? 2e-5 : dtype == DType::bf16 ? 2.5e-2 : 3e-3;
      for (std::size_t i = 0; i < 9; ++i)
        EXPECT_LE(off(*got.all()[i].second, *want.all()[i].second), allowed) << p.name() << ": " << got.all()[i].first;
      // A bias may have the type of q: it is read in place, and its gradient is rounded once.
      Inputs narrow = in;
      narrow.options.terms.bias = to(in.options.terms.bias, dtype);
      const Values half = run(p, narrow, GetParam(), make_plan(p.spec()));
      EXPECT_LE(off(half.dbias, want.dbias), 2 * allowed) << p.name();
      EXPECT_LE(off(half.o, want.o), 2 * allowed) << p.name();
    }
}

// ---- bits ---------------------------------------------------------------------------------------

TEST_P(Terms, BitsRepeatOnAnyNumberOfThreads) {
  const Threads before(1);
  for (const DType dtype : {DType::f32, scaled(DType::f64, DType::f32)})
    for (const Shape& bias :
         {Shape{300, 300}, Shape{2, 1, 300, 300}, Shape{300, 1}, Shape{3, 1, 300}, Shape{2, 3, 300, 300}}) {
      Problem p{.pattern = "segment:100+segment:300,dilation=3", .order = "hilbert:15x20", .length = 300, .heads = 3};
      p.softcap = 2, p.slopes = true, p.relative = {5, 5}, p.sink = true, p.dtype = dtype, p.bias = bias;
      const Inputs in = inputs_of(p, 3);
      const PlanPtr plan = make_plan(p.spec());
      set_thread_count(1);
      const Values first = run(p, in, GetParam(), plan);
      for (const int threads : {1, 2, 4, 4, 4}) {
        set_thread_count(threads);
        const Values next = run(p, in, GetParam(), plan);
        for (std::size_t i = 0; i < 9; ++i)
          ASSERT_TRUE(same_bits(*next.all()[i].second, *first.all()[i].second))
              << threads << " threads, " << p.name() << ": " << first.all()[i].first;
      }
    }
}

TEST_P(Terms, ASequenceDoesNotDependOnItsBatch) {
  Problem p{.pattern = "segment:48", .order = "hilbert:10x20", .length = 200, .batch = 3};
  p.softcap = 2, p.published = true, p.relative = {5, 7}, p.sink = true, p.bias = {2, 200, 200}, p.dtype = DType::f32;
  const Inputs in = inputs_of(p, 4);
  const PlanPtr plan = make_plan(p.spec());
  const Values all = run(p, in, GetParam(), plan);
  for (Index b = 0; b < 3; ++b) {
    const auto one = [&](const Tensor& x) { return slice(x, 0, b, b + 1); };
    Inputs part = in;
    for (Tensor* x : {&part.q, &part.k, &part.v, &part.d_o, &part.d_lse}) *x = one(*x);
    Problem single = p;
    single.batch = 1;
    const Values alone = run(single, part, GetParam(), plan);
    const auto share = [&](const std::vector<double>& x) {
      return std::vector<double>(x.begin() + b * std::ssize(x) / 3, x.begin() + (b + 1) * std::ssize(x) / 3);
    };
    for (std::size_t i = 0; i < 5; ++i)
      EXPECT_TRUE(same_bits(share(*all.all()[i].second), *alone.all()[i].second)) << all.all()[i].first;
  }
}

TEST_P(Terms, RowsWithDocumentsOfTheirOwnEqualEachRowAlone) {
  const std::vector<DocumentList> rows{{Grid{5, 4}, Grid{3, 3}}, {Grid{3, 3}, Grid{4, 6}}};
  for (const Shape& bias : {Shape{2, 2, 40, 40}, Shape{1, 1, 40, 40}, Shape{2, 1, 1, 40}, Shape{1, 2, 40, 1}}) {
    Problem p{.pattern = "slide2d:2x1+segment:7", .order = "hilbert", .length = 40, .causality = Causality::token};
    p.softcap = 2, p.slopes = true, p.relative = {3, 5}, p.sink = true, p.bias = bias;
    const Inputs in = inputs_of(p, 12);
    PlanSpec spec = p.spec();
    spec.documents = rows;
    const Threads threads(4);
    const Values all = run(p, in, GetParam(), make_plan(spec));
    Values sum;
    for (Index b = 0; b < 2; ++b) {
      const auto one = [&](const Tensor& x) { return slice(x, 0, b, b + 1); };
      Inputs part = in;
      for (Tensor* x : {&part.q, &part.k, &part.v, &part.d_o, &part.d_lse}) *x = one(*x);
      if (bias[0] == 2) part.options.terms.bias = one(in.options.terms.bias);
      spec.documents = {rows[at(b)]};
      const Values alone = run(p, part, GetParam(), make_plan(spec));
      const auto add = [&](std::vector<double>& to, const std::vector<double>& x, bool behind) {
        if (behind) to.insert(to.end(), x.begin(), x.end());
        else to.resize(x.size());
        for (std::size_t i = 0; !behind && i < x.size(); ++i) to[i] += x[i];
      };
      add(sum.o, alone.o, true), add(sum.lse, alone.lse, true), add(sum.dq, alone.dq, true);
      add(sum.dk, alone.dk, true), add(sum.dv, alone.dv, true), add(sum.dbias, alone.dbias, bias[0] == 2);
      add(sum.dslopes, alone.dslopes, false), add(sum.dtable, alone.dtable, false), add(sum.dsink, alone.dsink, false);
    }
    for (std::size_t i = 0; i < 9; ++i)
      EXPECT_LE(off(*all.all()[i].second, *sum.all()[i].second), 1e-12) << p.name() << ": " << all.all()[i].first;
  }
}

// ---- what single terms promise ------------------------------------------------------------------

TEST_P(Terms, ABiasMasksAndSpoilsNothingElse) {
  Problem p{.pattern = "dense", .order = "row", .length = 20, .batch = 1, .heads = 1};
  p.bias = {20, 20}, p.softcap = 2;  // whose slope is NaN where a score is
  Inputs in = inputs_of(p, 5);
  std::vector<double> bias = in.options.terms.bias.to_vector();
  for (Index t = 0; t < 20; ++t) bias[at(t * 20 + 13)] = -kInfinity;  // no row attends to key 13
  for (Index u = 0; u < 20; ++u) bias[at(4 * 20 + u)] = -kInfinity;   // row 4: nothing
  in.options.terms.bias = from_values(bias, {20, 20});
  const auto judge = [&](const Inputs& x, const char* what) {
    AttentionOptions options = x.options;
    options.backward = GetParam();
    const Oracle o = oracle_of(p, x);
    const auto out = ref::attention<double>(o.sizes, o.set, o.in);
    const auto g = ref::attention_gradients<double>(o.sizes, o.set, o.in, x.d_o.to_vector());
    Tape tape;
    for (const Tensor& y : {x.q, x.k, x.v, x.options.terms.bias}) tape.watch(y);
    const Tensor y = attention(x.q, x.k, x.v, make_plan(p.spec()), options);
    const Gradients got = tape.backward(y, x.d_o);
    const auto same = [&](const char* name, const std::vector<double>& a, const std::vector<double>& b) {
      for (std::size_t i = 0; i < a.size(); ++i)
        ASSERT_TRUE((std::isnan(a[i]) && std::isnan(b[i])) || std::abs(a[i] - b[i]) <= 1e-12)
            << what << ": " << name << '[' << i << "] is " << a[i] << ", by definition " << b[i];
    };
    same("o", y.to_vector(), out.o);
    same("dq", got[x.q].to_vector(), g.dq), same("dk", got[x.k].to_vector(), g.dk);
    same("dv", got[x.v].to_vector(), g.dv), same("dbias", got[x.options.terms.bias].to_vector(), g.dbias);
    const std::vector<double> lse = attention_with_lse(x.q, x.k, x.v, make_plan(p.spec()), options).lse.to_vector();
    EXPECT_EQ(lse[4], -kInfinity) << what;
  };
  judge(in, "masked");
  Inputs nan = in;
  for (Tensor* x : {&nan.k, &nan.v}) {
    *x = clone(*x);
    for (Index d = 0; d < 3; ++d) x->mutable_data<double>()[13 * 3 + d] = std::nan("");
  }
  judge(nan, "NaN in the masked key");
  Inputs spoilt = in;
  bias[7 * 20 + 2] = kInfinity, bias[9 * 20 + 3] = std::nan("");
  spoilt.options.terms.bias = from_values(bias, {20, 20});
  judge(spoilt, "rows 7 and 9 spoilt");
}

TEST_P(Terms, ASinkOfMinusInfinityIsNone) {
  Problem p{.pattern = "blocks:8", .order = "row", .length = 24};
  p.pattern = "segment:6", p.causality = Causality::token, p.sink = true;
  Inputs in = inputs_of(p, 6);
  const Values with = run(p, in, GetParam(), make_plan(p.spec()));
  in.options.terms.sink = full({2}, -kInfinity, DType::f64);
  const Values none = run(p, in, GetParam(), make_plan(p.spec()));
  EXPECT_EQ(none.dsink, (std::vector<double>{0, 0}));
  in.options.terms.sink = {};
  const Values without = run(p, in, GetParam(), make_plan(p.spec()));
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_LE(off(*none.all()[i].second, *without.all()[i].second), 1e-14) << none.all()[i].first;
    EXPECT_GT(off(*with.all()[i].second, *without.all()[i].second), 1e-3) << none.all()[i].first;
  }
}

TEST_P(Terms, ARowWithoutKeysSeesItsSink) {
  PlanSpec spec;
  spec.length = 12, spec.heads = 2;
  spec.pattern = {blocks(4, {{0, 0}, {2, 1}}), blocks(4, {{0, 2}})};  // tokens 4 to 7 have no key
  const PlanPtr plan = make_plan(spec);
  Problem p{.pattern = "dense", .order = "row", .length = 12};
  p.sink = true;
  const Inputs in = inputs_of(p, 8);
  const ref::Attended set(spec, ref::order_of(spec.order, 12));
  const Oracle o = oracle_of(p, in);
  const auto out = ref::attention<double>(o.sizes, set, o.in);
  const auto g = ref::attention_gradients<double>(o.sizes, set, o.in, in.d_o.to_vector(), {}, in.d_lse.to_vector());
  const Values got = run(p, in, GetParam(), plan);
  const Values want{out.o, out.lse, g.dq, g.dk, g.dv, {}, {}, {}, g.dsink};
  for (std::size_t i = 0; i < 9; ++i)
    EXPECT_LE(off(*got.all()[i].second, *want.all()[i].second), 1e-13) << got.all()[i].first;
  EXPECT_DOUBLE_EQ(got.lse[4], in.options.terms.sink.to_vector()[0]);
}

TEST_P(Terms, ASinkStaysAsItIs) {
  // One sequence of one token: [H] has the memory layout of lse, where the online softmax begins.
  Problem p{.pattern = "dense", .order = "row", .length = 1, .batch = 1};
  p.sink = true;
  const Inputs in = inputs_of(p, 11);
  const std::vector<double> before = in.options.terms.sink.to_vector();
  const Oracle o = oracle_of(p, in);
  const auto g = ref::attention_gradients<double>(o.sizes, o.set, o.in, in.d_o.to_vector(), {}, in.d_lse.to_vector());
  EXPECT_LE(off(run(p, in, GetParam(), make_plan(p.spec())).dsink, g.dsink), 1e-13);
  EXPECT_EQ(in.options.terms.sink.to_vector(), before);
}

TEST(TermsOfACall, PublishedSlopes) {
  EXPECT_EQ(alibi_slopes(1, DType::f64).to_vector(), (std::vector<double>{1 / 256.0}));
  EXPECT_EQ(alibi_slopes(2, DType::f64).to_vector(), (std::vector<double>{1 / 16.0, 1 / 256.0}));
  EXPECT_EQ(alibi_slopes(8, DType::f64).to_vector(),
            (std::vector<double>{1 / 2.0, 1 / 4.0, 1 / 8.0, 1 / 16.0, 1 / 32.0, 1 / 64.0, 1 / 128.0, 1 / 256.0}));
  const std::vector<double> six = alibi_slopes(6, DType::f64).to_vector();
  const double want[] = {1 / 4.0, 1 / 16.0, 1 / 64.0, 1 / 256.0, 1 / 2.0, 1 / 8.0};
  for (std::size_t i = 0; i < 6; ++i) EXPECT_DOUBLE_EQ(six[i], want[i]);
}

TEST(TermsOfACall, OneFrameThatWasNamedIsAnAxis) {
  const Problem flat{
      .pattern = "slide2d:1x2", .order = "hilbert:3x4", .length = 12, .batch = 2, .heads = 4, .kv_heads = 4};
  Problem deep = flat;
  deep.order = "hilbert:1x3x4";
  Inputs in = inputs_of(flat, 1);
  const Tensor table = randn({4, 3, 3, 3}, {5, 6}, DType::f64);
  in.options.terms.relative = contiguous(select(table, 1, 1));
  const Tensor want = attention(in.q, in.k, in.v, make_plan(flat.spec()), in.options);
  EXPECT_EQ(attention(in.q, in.k, in.v, make_plan(deep.spec()), in.options).to_vector(), want.to_vector());
  in.options.terms.relative = table;
  EXPECT_EQ(attention(in.q, in.k, in.v, make_plan(deep.spec()), in.options).to_vector(), want.to_vector());
  EXPECT_EQ(to_string(deep.spec().order), "hilbert:1x3x4");
  EXPECT_EQ(to_string(parse_documents("1x3x4,3x4,2x3x4")), "1x3x4,3x4,2x3x4");
}

// A table by points sees what the grid would show it; points of one sequence for all, or of each.
TEST(TermsOfACall, PointsStandForAGrid) {
  for (const Backward mode : kModes) {
    PlanSpec on_grid, by_points;
    on_grid.length = by_points.length = 24, on_grid.heads = by_points.heads = 2;
    on_grid.order = parse_order("row:4x6", 24);
    const PlanPtr grid = make_plan(on_grid), none = make_plan(by_points);
    const Tensor q = randn({3, 24, 2, 4}, {1, 1}, DType::f64), k = randn(q.shape(), {1, 2}, DType::f64);
    AttentionOptions options{.backward = mode};
    options.terms.relative = randn({2, 3, 5}, {1, 3}, DType::f64);
    std::vector<std::int32_t> cells;
    for (std::int32_t t = 0; t < 72; ++t) cells.insert(cells.end(), {t / 6 - 7, t % 6 + 100000});
    const auto result = [&](const PlanPtr& plan) {
      Tape tape;
      tape.watch(options.terms.relative);
      const Tensor o = attention(q, k, k, plan, options);
      return std::pair(o.to_vector(), tape.backward(sum(square(o)))[options.terms.relative].to_vector());
    };
    const auto expected = result(grid);
    const Tensor each = from_values(cells, {72, 2});
    for (const Tensor& points : {slice(each, 0, 0, 24), each, reshape(each, {3, 24, 2})}) {
      options.terms.points = points;
      const auto got = result(none);
      EXPECT_EQ(got.first, expected.first) << name_of(mode) << points.shape();
      for (std::size_t i = 0; i < got.second.size(); ++i)  // rows of points of their own are added up apart
        EXPECT_NEAR(got.second[i], expected.second[i], 1e-12) << name_of(mode) << points.shape();
    }
  }
}

TEST(TermsOfACall, EachRowHasItsPoints) {
  PlanSpec spec;
  spec.length = 24, spec.heads = 2;
  const PlanPtr plan = make_plan(spec);
  const Tensor q = randn({3, 24, 2, 4}, {1, 1}, DType::f64),
               points = to(mul(randn({3, 24, 2}, {1, 4}, DType::f64), 3.0), DType::i32);
  for (const Backward mode : kModes) {
    AttentionOptions options{.backward = mode};
    options.terms.relative = randn({2, 3, 5}, {1, 3}, DType::f64);
    options.terms.points = points;
    const Tensor all = attention(q, q, q, plan, options);
    for (Index b = 0; b < 3; ++b) {
      const Tensor own = slice(q, 0, b, b + 1);
      options.terms.points = slice(points, 0, b, b + 1);
      EXPECT_EQ(attention(own, own, own, plan, options).to_vector(), slice(all, 0, b, b + 1).to_vector())
          << name_of(mode);
    }
  }
}

// At both ends of their type, with further axes below zero.
TEST(TermsOfACall, PointsMayLieFarApart) {
  constexpr std::int32_t kLow = std::numeric_limits<std::int32_t>::min(), kHigh = ~kLow;
  PlanSpec spec;
  spec.length = 2, spec.heads = 1;
  for (const Backward mode : kModes) {
    AttentionOptions options{.backward = mode};
    options.terms.relative = from_values<double>({0, 1, 2, 3, 4, 5, 6, 7, 8}, {1, 9, 1, 1});
    options.terms.points = from_values<std::int32_t>({kLow, 0, 0, kHigh, 0, 0}, {2, 3});
    const Tensor q = zeros({1, 2, 1, 1}, DType::f64), v = from_values<double>({1, 0}, {1, 2, 1, 1});
    const std::vector<double> o = attention(q, q, v, make_plan(spec), options).to_vector();
    EXPECT_NEAR(o[0], 1 / (1 + std::exp(0.0 - 4.0)), 1e-12);  // entries 4 of itself, 0 of what lies far above
    EXPECT_NEAR(o[1], 1 / (1 + std::exp(4.0 - 8.0)), 1e-12);
  }
}

TEST(TermsOfACall, PointsAreRefused) {
  PlanSpec spec;
  spec.length = 6, spec.heads = 1;
  const auto error = [&](const Shape& points, const Shape& table, DType type = DType::i32) {
    AttentionOptions options;
    if (table.rank() > 0) options.terms.relative = zeros(table);
    options.terms.points = zeros(points, type);
    const Tensor q = zeros({2, 6, 1, 4});
    return error_of([&] { (void)attention(q, q, q, make_plan(spec), options); });
  };
  EXPECT_EQ(error({2, 6, 2}, {1, 3, 3}), "nothing");
  EXPECT_EQ(error({6, 2}, {}), "usage: relative: points [6, 2] are for a table, and there is none");
  EXPECT_EQ(error({6, 2}, {1, 3}),
            "usage: relative: points are i32[6, 2], the table [1, 3]; expected i32 [6, 1] or [2, 6, 1]");
  EXPECT_EQ(error({6, 2}, {1, 3, 3}, DType::i64),
            "usage: relative: points are i64[6, 2], the table [1, 3, 3]; expected i32 [6, 2] or [2, 6, 2]");
  EXPECT_EQ(error({3, 2, 2}, {1, 3, 3}),
            "usage: relative: points are i32[3, 2, 2], the table [1, 3, 3]; expected i32 [6, 2] or [2, 6, 2]");
  spec.pattern = parse_pattern("dense,prefix=2");
  EXPECT_EQ(error({6, 2}, {1, 3, 3}), "usage: relative: points do not go with a prefix, as in dense,prefix=2");
}

TEST(TermsOfACall, RefusedWithBothSides) {
  const auto error = [](const char* order, const char* pattern, auto change, Index length = 12) {
    Problem p{.pattern = pattern, .order = order, .length = length, .batch = 2, .heads = 4, .kv_heads = 4};
    Inputs in = inputs_of(p, 1);
    change(in.options.terms);
    return error_of([&] { (void)attention(in.q, in.k, in.v, make_plan(p.spec()), in.options); });
  };
  const auto zeros64 = [](const Shape& s) { return zeros(s, DType::f64); };
  EXPECT_EQ(error("row", "dense", [](ScoreTerms& x) { x.softcap = 0; }), "usage: softcap: 0 must be a number above 0");
  EXPECT_EQ(error("row", "dense", [](ScoreTerms& x) { x.softcap = -2; }),
            "usage: softcap: -2 must be a number above 0");
  EXPECT_EQ(error("row", "dense", [&](ScoreTerms& x) { x.slopes = zeros64({3}); }),
            "usage: alibi: slopes: [3] does not fit [heads 4]");
  EXPECT_EQ(error("row", "dense",
                  [&](ScoreTerms& x) {
                    x.sink = zeros64({2, 4});
                  }),
            "usage: sink: [2, 4] does not fit [heads 4]");
  EXPECT_EQ(error("row", "dense", [&](ScoreTerms& x) { x.sink = zeros({4}, DType::f32); }),
            "usage: sink: is f32, but with q of f64 it must be f64");
  EXPECT_EQ(error("row", "dense",
                  [&](ScoreTerms& x) {
                    x.relative = zeros64({2, 33});
                  }),
            "usage: relative: table [2, 33] does not fit heads 4; expected [heads, 2 r + 1], or as many extents as "
            "the grid has axes");
  EXPECT_EQ(error("row", "dense",
                  [&](ScoreTerms& x) {
                    x.relative = zeros64({4, 6});
                  }),
            "usage: relative: table [4, 6] has an even extent, 6; offsets from -r to r are 2 r + 1");
  EXPECT_EQ(error("row", "dense",
                  [&](ScoreTerms& x) {
                    x.relative = zeros64({4, 3, 3});
                  }),
            "usage: relative: table [4, 3, 3] is for 2 axes, but order row has no grid; name one, as in row:HxW");
  EXPECT_EQ(error(
                "hilbert", "window2d:2x2",
                [&](ScoreTerms& x) {
                  x.relative = zeros64({4, 3, 3});
                },
                16),
            "usage: relative: table [4, 3, 3] is for 2 axes, but order hilbert has no grid; name one, as in row:HxW");
  EXPECT_EQ(error("hilbert:3x4", "dense",
                  [&](ScoreTerms& x) {
                    x.relative = zeros64({4, 3, 3, 3});
                  }),
            "usage: relative: table [4, 3, 3, 3] is for 3 axes, but the grid of order hilbert:3x4 has 2");
  EXPECT_EQ(error("hilbert:2x2x3", "dense",
                  [&](ScoreTerms& x) {
                    x.relative = zeros64({4, 3, 3});
                  }),
            "usage: relative: table [4, 3, 3] is for 2 axes, but the grid of order hilbert:2x2x3 has 3");
  EXPECT_EQ(error("row", "dense",
                  [&](ScoreTerms& x) {
                    x.bias = zeros64({3, 1, 12, 12});
                  }),
            "usage: bias: [3, 1, 12, 12] does not broadcast to [batch 2, heads 4, queries 12, keys 12]");
  EXPECT_EQ(error("row", "dense",
                  [&](ScoreTerms& x) {
                    x.bias = zeros64({12, 11});
                  }),
            "usage: bias: [12, 11] does not broadcast to [batch 2, heads 4, queries 12, keys 12]");
}
