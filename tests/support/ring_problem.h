#pragma once
#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>
#include "ops/hilbert/ring.h"
#include "ops/ops.h"

// Attention on one rank and the same over the ranks of any Comm, for what compares the two: threads
// of a test, or processes that MPI has started.

namespace hilt {

struct Whole {
  Tensor o, lse, dq, dk, dv;
  std::vector<Tensor> of_terms{};  // gradients, in the order of terms_of()
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
  /// Score terms: `bias` of that shape, `table` without its heads; an empty shape is none.
  void draw_terms(std::uint64_t seed, bool slopes, const Shape& table, const Shape& bias, bool sink) {
    const auto normal = [&](const Shape& shape, std::uint64_t stream) {
      return randn(shape, RandomKey{seed, stream}, DType::f64);
    };
    Shape of_heads{spec.heads};
    if (slopes) options.terms.alibi = true, options.terms.slopes = normal(of_heads, 5);
    if (sink) options.terms.sink = normal(of_heads, 6);
    if (bias.rank() > 0) options.terms.bias = normal(bias, 7);
    for (const Index extent : table) of_heads.push_back(extent);
    if (table.rank() > 0) options.terms.relative = normal(of_heads, 8);
  }
};

/// The tensors of the terms that are there.
inline std::vector<Tensor> terms_of(const Problem& p) {
  std::vector<Tensor> all;
  ScoreTerms terms = p.options.terms;
  visit_terms(terms, [&](const std::string&, const Tensor& x) { all.push_back(x); });
  return all;
}

/// The gradient, or zeros where nothing attends.
inline Tensor gradient(const Gradients& g, const Tensor& x) { return g.has(x) ? g[x] : zeros_like(x); }

inline Whole on_one_rank(const Problem& p) {
  Tape tape;
  for (const Tensor& x : {p.q, p.k, p.v}) tape.watch(x);
  for (const Tensor& x : terms_of(p)) tape.watch(x);
  const PlanPtr plan = make_plan(p.spec);
  const Tensor o = attention(p.q, p.k, p.v, plan, p.options);
  const Tensor lse = attention_with_lse(p.q, p.k, p.v, plan, p.options).lse;
  const Gradients g = tape.backward(o, p.d_o);
  Whole whole{o, lse, gradient(g, p.q), gradient(g, p.k), gradient(g, p.v)};
  for (const Tensor& x : terms_of(p)) whole.of_terms.push_back(gradient(g, x));
  return whole;
}

struct Sharding {
  Transport transport = Transport::ring;
  Index chunks = 0;
};  // 0: contiguous
inline ShardPlanPtr shard_of(const PlanSpec& spec, int ranks, int rank, Sharding how) {
  PlanSpec positions = spec;
  positions.in_order = spec.documents.empty();
  const PlanPtr plan = make_plan(positions);
  return std::make_shared<const ShardPlan>(
      plan, how.chunks > 0 ? balanced_shards(*plan, ranks, how.chunks) : contiguous_shards(*plan, ranks), rank,
      how.transport);
}

struct Outcome {
  Whole whole;                                // every rank has it
  std::vector<std::int64_t> sent, predicted;  // bytes, by rank
};
/// The same problem over the ranks of `comm`, each of which calls this.
inline Outcome on_rank(const Problem& p, const Comm& comm, Sharding how) {
  const ShardPlanPtr shard = shard_of(p.spec, comm.size(), comm.rank(), how);
  const auto mine = [&](const Tensor& x) { return rows_of_rank(x, *shard, comm.rank()); };
  const Tensor q = mine(p.q), k = mine(p.k), v = mine(p.v);
  agree_on(*shard, comm, p.batch, p.kv_heads, p.dim, p.dtype, p.options);
  const std::size_t before = comm.traffic().bytes_sent;
  Tape tape;
  for (const Tensor& x : {q, k, v}) tape.watch(x);
  for (const Tensor& x : terms_of(p)) tape.watch(x);
  const Tensor o = ring_attention(q, k, v, shard, comm, p.options);
  const Gradients g = tape.backward(o, mine(p.d_o));
  const std::size_t sent = comm.traffic().bytes_sent - before;
  const Tensor lse = ring_attention_with_lse(q, k, v, shard, comm, p.options).lse;
  const ShardPlan::Bytes bytes = shard->bytes_sent(p.batch, p.kv_heads, p.dim, p.dtype);
  const auto all = [&](const Tensor& x) { return whole_of_rows(x, *shard, comm); };
  const auto of_all = [&](std::size_t n) {
    return comm.gather(from_values(std::vector{static_cast<std::int64_t>(n)}, {1})).to_vector<std::int64_t>();
  };
  Outcome out{{all(o), permute(squeeze(all(unsqueeze(permute(lse, {0, 2, 1}), -1)), -1), {0, 2, 1}),
               all(gradient(g, q)), all(gradient(g, k)), all(gradient(g, v))},
              of_all(sent),
              of_all(bytes.forward + bytes.backward)};
  for (const Tensor& x : terms_of(p)) out.whole.of_terms.push_back(comm.sum(gradient(g, x)));
  return out;
}
inline Outcome on_ranks(const Problem& p, int ranks, Sharding how) {
  Outcome out;
  run_ranks(ranks, [&](const Comm& comm) {
    const Outcome mine = on_rank(p, comm, how);
    if (comm.rank() == 0) out = mine;
  });
  return out;
}

/// The largest difference over the largest value; infinities must be in the same places.
inline double distance(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to_vector(), y = b.to_vector();
  if (x.size() != y.size()) return HUGE_VAL;
  double worst = 0, largest = 1;
  for (std::size_t i = 0; i < x.size(); ++i) {
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
inline double distance(const Whole& a, const Whole& b) {
  double worst = std::max(
      {distance(a.o, b.o), distance(a.lse, b.lse), distance(a.dq, b.dq), distance(a.dk, b.dk), distance(a.dv, b.dv)});
  for (std::size_t i = 0; i < b.of_terms.size(); ++i) worst = std::max(worst, distance(a.of_terms[i], b.of_terms[i]));
  return worst;
}

inline std::string describe(const Problem& p, int ranks, Sharding how) {
  std::ostringstream text;
  text << "L " << p.spec.length << ", " << p.spec.heads << '/' << p.kv_heads << " heads of " << p.dim << ", "
       << to_string(p.spec.order) << ", " << to_string(p.spec.pattern) << ", " << name_of(p.spec.dilation_mode)
       << ", causal " << name_of(p.spec.causality) << ", documents " << to_string(p.spec.documents) << ", dropout "
       << p.options.dropout << ", terms";
  ScoreTerms terms = p.options.terms;
  visit_terms(terms, [&](const std::string& name, const Tensor& x) { text << ' ' << name << x.shape(); });
  text << "; " << ranks << " ranks, " << name_of(how.transport) << ", chunks " << how.chunks;
  return text.str();
}

/// Anything that a plan can be, small.
inline Problem random_problem(std::uint64_t seed) {
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
  if (p.spec.documents.empty() && below(3) == 0) p.spec.length += p.spec.pattern.back().prefix = 1 + below(9);
  p.draw(seed);
  if (below(2) == 0) {  // on the grids of documents distances are refused
    const bool planar = p.spec.pattern[0].on_grid() && !p.spec.documents.empty();
    const auto one_or = [&](Index all) { return below(2) == 0 ? 1 : all; };
    const Index offsets = 1 + 2 * below(9), kinds = below(3);
    const Shape bias{one_or(p.batch), one_or(p.spec.heads), one_or(p.spec.length), one_or(p.spec.length)};
    p.draw_terms(seed, !planar && below(2) == 0, below(2) == 0 ? Shape{offsets} : Shape{}, kinds ? Shape{} : bias,
                 below(2) == 0);
    if (below(3) == 0) p.options.terms.softcap = 3;
  }
  return p;
}

}  // namespace hilt
