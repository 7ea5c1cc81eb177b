#include "nn/attention.h"
#include <cmath>
#include "ops/ops.h"

namespace hilt {

void check_config(const AttentionConfig& c) {
  check(c.width >= 1 && c.heads >= 1, "attention: width ", c.width, " and heads ", c.heads, " must be at least 1");
  const Index below = c.width / c.heads * c.heads, above = below + c.heads;
  if (below > 0) check(c.width % c.heads == 0, "width ", c.width, " is not divisible by ", c.heads, " heads; the nearest are ", below, " and ", above);
  check(c.width % c.heads == 0, "width ", c.width, " is not divisible by ", c.heads, " heads; the nearest is ", above);
  check(c.kv_heads >= 0 && c.heads % c.keys() == 0, "kv_heads ", c.kv_heads, " must divide heads ", c.heads, " (0: as many as heads)");
  check(!c.rotary || c.dim() % 2 == 0, "rotary positions turn pairs: width / heads = ", c.dim(), " must be even");
  check(c.rotary_base > 1, "rotary_base ", c.rotary_base, " must be above 1");
  check(c.dropout >= 0 && c.dropout < 1, "dropout ", c.dropout, " must be in [0, 1)");
  check(!c.pattern.empty(), "attention: the pattern has no branch; dense is the simplest");
}

HilbertSelfAttention make_self_attention(const AttentionConfig& config, double deviation, double projection_deviation, Generator& generator,
                                         DType dtype) {
  check_config(config);
  HilbertSelfAttention a;
  a.config = config;
  a.qkv = make_linear(config.width, (config.heads + 2 * config.keys()) * config.dim(), config.bias, deviation, generator, dtype);
  a.projection = make_linear(config.width, config.width, config.bias, projection_deviation, generator, dtype);
  return a;
}

PlanPtr HilbertSelfAttention::plan(Index length, const CallOptions& call) const {
  PlanSpec spec{length, config.heads, config.order, config.pattern, config.dilation_mode, config.causality, WorkOrder::row, call.in_order};
  if (!call.use_order) spec.order.kind = Order::Kind::row;
  return make_plan(spec);
}

Tensor HilbertSelfAttention::heads_of(const Tensor& x, const CallOptions& call) const {
  check(bool(x) && x.rank() == 3 && x.dim(2) == config.width, "HilbertSelfAttention: x must be [batch, length, ", config.width, "], got ",
        x ? x.shape() : Shape{});
  const Index batch = x.dim(0), length = x.dim(1), heads = config.heads, keys = config.keys(), dim = config.dim();
  AttentionOptions options;
  options.backward = config.backward;
  if (call.noise && config.dropout > 0) options.dropout = config.dropout, options.key = call.noise->next();
  const PlanPtr plan_ = plan(length, call);
  const Tensor packed = qkv(x);
  Tensor o;
  if (keys == heads && !config.rotary) {
    o = attention(reshape(packed, {batch, length, 3, heads, dim}), plan_, options);
  } else {
    const Tensor rows = reshape(packed, {batch, length, heads + 2 * keys, dim});
    Tensor turned = slice(rows, 2, 0, heads + keys);  // q and k
    if (config.rotary) {
      std::optional<Tensor> where;
      if (call.in_order) where = from_values(plan_->order().token_at, {length});
      turned = rotary(turned, config.rotary_base, where);
    }
    o = attention(slice(turned, 2, 0, heads), slice(turned, 2, heads, heads + keys), slice(rows, 2, heads + keys, heads + 2 * keys), plan_, options);
  }
  return reshape(o, {batch, length, heads * dim});
}

Tensor HilbertSelfAttention::operator()(const Tensor& x, const CallOptions& call) const { return projection(heads_of(x, call)); }

void HilbertSelfAttention::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  qkv.visit_parameters(join_name(at, "qkv"), visit);
  projection.visit_parameters(join_name(at, "projection"), visit);
}

}  // namespace hilt
