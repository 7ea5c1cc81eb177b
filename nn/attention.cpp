// x to q, k and v in one product, rotary positions, attention on a plan, and the projection.
#include "nn/attention.h"
#include "ops/ops.h"

namespace hilt {

void check_config(const AttentionConfig& c) {
  check(c.width >= 1 && c.heads >= 1, "attention: width ", c.width, " and heads ", c.heads, " must be at least 1");
  const Index below = c.width / c.heads * c.heads, above = below + c.heads;
  check(c.width % c.heads == 0, "width ", c.width, " is not divisible by ", c.heads, " heads; the nearest ",
        below > 0 ? "are " + std::to_string(below) + " and " : "is ", above);
  check(c.kv_heads >= 0 && c.heads % c.keys() == 0, "kv_heads ", c.kv_heads, " must divide heads ", c.heads,
        " (0: as many as heads)");
  check(!c.rotary || c.dim() % 2 == 0, "rotary positions turn pairs: width / heads = ", c.dim(), " must be even");
  check(c.rotary_base > 1, "rotary_base ", c.rotary_base, " must be above 1");
  check(c.dropout >= 0 && c.dropout < 1, "dropout ", c.dropout, " must be in [0, 1)");
  check(!c.pattern.empty(), "attention: the pattern has no branch; dense is the simplest");
  check(c.terms.bias.rank() == 0 || c.terms.bias[0] == 1, "attention: bias ", c.terms.bias,
        " has sequences of its own; what is learned is for all of them: 1");
}

HilbertSelfAttention make_self_attention(const AttentionConfig& config, double deviation, double projection_deviation,
                                         Generator& generator, DType dtype) {
  check_config(config);
  HilbertSelfAttention a;
  a.config = config;
  a.qkv = make_linear(config.width, (config.heads + 2 * config.keys()) * config.dim(), config.bias, deviation,
                      generator, dtype);
  a.projection = make_linear(config.width, config.width, config.bias, projection_deviation, generator, dtype);
  a.terms = make_terms(config.terms, config.heads, config.context, dtype);
  return a;
}

static PlanSpec spec_of(const AttentionConfig& config, Index length, const CallOptions& call) {
  PlanSpec spec{length,           config.heads,   config.order, config.pattern, config.dilation_mode,
                config.causality, WorkOrder::row, call.in_order};
  spec.documents = call.documents;
  if (!call.use_order) spec.order.kind = Order::Kind::row;
  return spec;
}

void KeyValueCache::make_plans(Index first, Index count) {
  plans_.clear(), listed_.clear(), first_ = first;
  for (const AttentionConfig& config : configs_) {
    PlanSpec spec = spec_of(config, context_, {});
    spec.queries = query_run(first, count);
    plans_.push_back(std::make_shared<const Plan>(std::move(spec)));  // make_plan's few are for plans that come again
    listed_.push_back(0);
    for (const PlanPart& part : plans_.back()->parts())
      for (const Tiling& t : part.tilings)
        for (std::size_t i = 0; i < t.q_tile.size(); ++i) listed_.back() += t.keys_of(i);
  }
}

void KeyValueCache::begin(const std::vector<AttentionConfig>& configs, Index count, Device device) {
  const Causality causality = configs.front().causality;
  check(causality == Causality::token, "KeyValueCache: causal ", name_of(causality),
        ": a token would change what is kept of those before it; use causal token");
  check(count >= 1 && length_ + count <= context_, "KeyValueCache: ", count, " more tokens after ", length_,
        " do not fit the context, ", context_, "; clear it and pass the last ones again");
  next_ = 0, count_ = count;
  if (configs != configs_) configs_ = configs, plans_.clear(), refused_ = -1;
  const Index usual = device.is_cuda() ? 64 : 1, run = run_ > 0 ? run_ : usual;
  const Index first = length_ / run * run, rows = std::min(run, context_ - first);
  const bool runs = run > 1 && length_ + count <= first + rows && first != refused_;
  if (runs && !plans_.empty() && first_ == first && plan()->queries() == rows) return;
  make_plans(length_, count);
  if (!runs) return;
  const std::vector<PlanPtr> alone = plans_;
  const std::vector<Index> listed_alone = listed_;
  make_plans(first, rows);
  const auto all = [](const std::vector<Index>& x) { return std::accumulate(x.begin(), x.end(), Index{0}); };
  if (all(listed_) > 2 * all(listed_alone)) plans_ = alone, listed_ = listed_alone, first_ = length_, refused_ = first;
}

Tensor KeyValueCache::among_queries(const Tensor& rows) {
  const Index all = plan()->queries();
  if (all == count_) return rows;
  const Shape shape{rows.dim(0), all, rows.dim(2), rows.dim(3)};
  if (!queries_ || queries_.shape() != shape || queries_.dtype() != rows.dtype())
    queries_ = zeros(shape, rows.dtype(), rows.device());
  Tensor to = rows_of_tokens(queries_);
  copy(to, rows);
  return queries_;
}
Tensor KeyValueCache::rows_of_tokens(const Tensor& x) const {
  return slice(x, 1, length_ - first_, length_ - first_ + count_);
}

std::array<Tensor, 2> KeyValueCache::extended(const Tensor& k, const Tensor& v) {
  if (next_ == layers_.size()) {
    const Shape all{k.dim(0), context_, k.dim(2), k.dim(3)};
    layers_.push_back({zeros(all, k.dtype(), k.device()), zeros(all, v.dtype(), v.device())});
  }
  keys_read_ += listed_[next_ % listed_.size()] * k.dim(0);
  std::array<Tensor, 2>& layer = layers_[next_++];
  check(layer[0].dim(0) == k.dim(0), "KeyValueCache: ", k.dim(0), " sequences follow ", layer[0].dim(0));
  for (std::size_t i = 0; i < 2; ++i) {
    Tensor rows = slice(layer[i], 1, length_, length_ + k.dim(1));
    copy(rows, i == 0 ? k : v);
  }
  return layer;
}

PlanPtr HilbertSelfAttention::plan(Index length, const CallOptions& call) const {
  if (call.cache) return call.cache->plan();
  return make_plan(spec_of(config, length, call));
}
ShardPlanPtr HilbertSelfAttention::shard(const Place& place, const CallOptions& call) const {
  return make_shard_plan(spec_of(config, place.length, call), place.sequence.size(), place.sequence.rank(),
                         Transport::ring, Dealing::automatic, config.dealt_by);
}

Tensor HilbertSelfAttention::heads_of(const Tensor& x, const CallOptions& call) const {
  check(bool(x) && x.rank() == 3 && x.dim(2) == config.width, "HilbertSelfAttention: x must be [batch, length, ",
        config.width, "], got ", x ? x.shape() : Shape{});
  const Index batch = x.dim(0), length = x.dim(1), heads = config.heads, keys = config.keys(), dim = config.dim();
  AttentionOptions options;
  options.backward = config.backward;
  if (call.noise && config.dropout > 0) options.dropout = config.dropout, options.key = call.noise->next();
  const bool divided = call.place && call.place->divides();
  const ShardPlanPtr part = divided ? shard(*call.place, call) : nullptr;
  const PlanPtr plan_ = part ? nullptr : plan(length, call);
  const Index whole = divided ? call.place->length : call.cache ? call.cache->context() : length;
  options.terms = fitted_terms(terms, x.dtype(), whole);
  if (Tensor& bias = options.terms.bias; call.cache && bias && bias.dim(2) > 1)
    bias = slice(bias, 2, plan_->spec().queries->front(), plan_->spec().queries->back() + 1);
  if (call.place) options.first_batch = call.place->first;
  Tensor rows = reshape(qkv(x), {batch, length, heads + 2 * keys, dim});  // q, k, v
  if (call.cache) rows = call.cache->among_queries(rows);
  if (config.rotary) {
    std::optional<Tensor> where;
    if (part) where = from_values(part->tokens(), {length});
    else if (call.cache) where = from_values(*plan_->spec().queries, {rows.dim(1)});
    else if (call.in_order) where = from_values(plan_->order().token_at, {length});
    rows = rotary(rows, config.rotary_base, where, heads + keys);
  }
  Tensor o;
  if (keys == heads && !part && !call.cache) {
    o = attention(reshape(rows, {batch, length, 3, heads, dim}), plan_, options);
  } else {
    const Tensor q = slice(rows, 2, 0, heads);
    std::array kv{slice(rows, 2, heads, heads + keys), slice(rows, 2, heads + keys, heads + 2 * keys)};
    if (call.cache) kv = call.cache->extended(call.cache->rows_of_tokens(kv[0]), call.cache->rows_of_tokens(kv[1]));
    const auto& [k, v] = kv;
    o = part ? ring_attention(q, k, v, part, call.place->sequence, options) : attention(q, k, v, plan_, options);
    if (call.cache) o = call.cache->rows_of_tokens(o);
  }
  return reshape(o, {batch, length, heads * dim});
}

Tensor HilbertSelfAttention::operator()(const Tensor& x, const CallOptions& call) const {
  return projection(heads_of(x, call));
}

void HilbertSelfAttention::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  qkv.visit_parameters(join_name(at, "qkv"), visit);
  projection.visit_parameters(join_name(at, "projection"), visit);
  visit_terms(terms, [&](const std::string& name, Tensor& x) { visit(join_name(at, name), x); });
}

}  // namespace hilt
