// x to q, k and v in one product, rotary positions, attention on a plan, and the projection; on one
// rank or on a part of the sequence.
#include "nn/attention.h"
#include <cmath>
#include "ops/ops.h"

namespace hilt {

void check_config(const AttentionConfig& c) {
  check(c.width >= 1 && c.heads >= 1, "attention: width ", c.width, " and heads ", c.heads, " must be at least 1");
  const Index below = c.width / c.heads * c.heads, above = below + c.heads;
  if (below > 0)
    check(c.width % c.heads == 0, "width ", c.width, " is not divisible by ", c.heads, " heads; the nearest are ",
          below, " and ", above);
  check(c.width % c.heads == 0, "width ", c.width, " is not divisible by ", c.heads, " heads; the nearest is ", above);
  check(c.kv_heads >= 0 && c.heads % c.keys() == 0, "kv_heads ", c.kv_heads, " must divide heads ", c.heads,
        " (0: as many as heads)");
  check(!c.rotary || c.dim() % 2 == 0, "rotary positions turn pairs: width / heads = ", c.dim(), " must be even");
  check(c.rotary_base > 1, "rotary_base ", c.rotary_base, " must be above 1");
  check(c.dropout >= 0 && c.dropout < 1, "dropout ", c.dropout, " must be in [0, 1)");
  check(!c.pattern.empty(), "attention: the pattern has no branch; dense is the simplest");
}

HilbertSelfAttention make_self_attention(const AttentionConfig& config, double deviation, double projection_deviation,
                                         Generator& generator, DType dtype) {
  check_config(config);
  HilbertSelfAttention a;
  a.config = config;
  a.qkv = make_linear(config.width, (config.heads + 2 * config.keys()) * config.dim(), config.bias, deviation,
                      generator, dtype);
  a.projection = make_linear(config.width, config.width, config.bias, projection_deviation, generator, dtype);
  return a;
}

namespace {
PlanSpec spec_of(const AttentionConfig& config, Index length, const CallOptions& call) {
  PlanSpec spec{length,           config.heads,   config.order, config.pattern, config.dilation_mode,
                config.causality, WorkOrder::row, call.in_order};
  if (!call.use_order) spec.order.kind = Order::Kind::row;
  return spec;
}
}  // namespace

PlanPtr HilbertSelfAttention::plan(Index length, const CallOptions& call) const {
  return make_plan(spec_of(config, length, call));
}
ShardPlanPtr HilbertSelfAttention::shard(const Place& place, const CallOptions& call) const {
  return make_shard_plan(spec_of(config, place.length, call), place.sequence.size(), place.sequence.rank());
}

Tensor HilbertSelfAttention::heads_of(const Tensor& x, const CallOptions& call) const {
  check(bool(x) && x.rank() == 3 && x.dim(2) == config.width, "HilbertSelfAttention: x must be [batch, length, ",
        config.width, "], got ", x ? x.shape() : Shape{});
  const Index batch = x.dim(0), length = x.dim(1), heads = config.heads, keys = config.keys(), dim = config.dim();
  AttentionOptions options;
  options.backward = config.backward;
  if (call.noise && config.dropout > 0) options.dropout = config.dropout, options.key = call.noise->next();
  if (call.place) options.first_batch = call.place->first;
  const ShardPlanPtr part = call.place && call.place->divides() ? shard(*call.place, call) : nullptr;
  const PlanPtr plan_ = part ? nullptr : plan(length, call);
  Tensor rows = reshape(qkv(x), {batch, length, heads + 2 * keys, dim});  // q, k, v
  if (config.rotary) {
    std::optional<Tensor> where;
    if (part) where = from_values(part->tokens(), {length});
    else if (call.in_order) where = from_values(plan_->order().token_at, {length});
    rows = rotary(rows, config.rotary_base, where, heads + keys);
  }
  Tensor o;
  if (keys == heads && !part) {
    o = attention(reshape(rows, {batch, length, 3, heads, dim}), plan_, options);
  } else {
    const Tensor q = slice(rows, 2, 0, heads), k = slice(rows, 2, heads, heads + keys),
                 v = slice(rows, 2, heads + keys, heads + 2 * keys);
    o = part ? ring_attention(q, k, v, part, call.place->sequence, options) : attention(q, k, v, plan_, options);
  }
  return reshape(o, {batch, length, heads * dim});
}

Tensor HilbertSelfAttention::operator()(const Tensor& x, const CallOptions& call) const {
  return projection(heads_of(x, call));
}

void HilbertSelfAttention::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  qkv.visit_parameters(join_name(at, "qkv"), visit);
  projection.visit_parameters(join_name(at, "projection"), visit);
}

}  // namespace hilt
