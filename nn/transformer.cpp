// Tokens to logits:
//      x = tokens[ids] + positions[0..L)        x += attention(norm(x)), x += mlp(norm(x)), layer by layer
//      logits = norm(x) head
#include "nn/transformer.h"
#include <cmath>
#include "core/io/text.h"
#include "ops/ops.h"

namespace hilt {

constexpr std::array<std::string_view, 3> kPositions{"learned", "rotary", "none"};

Positions parse_positions(std::string_view text) { return Positions(find_name("positions", text, kPositions)); }
std::string_view name_of(Positions positions) { return kPositions[static_cast<std::size_t>(positions)]; }

AttentionConfig attention_config(const TransformerConfig& c, Index block) {
  AttentionConfig a;
  a.width = c.width, a.heads = c.heads, a.kv_heads = c.kv_heads;
  a.order = c.order, a.pattern = c.pattern, a.dilation_mode = c.dilation_mode, a.causality = c.causality;
  a.backward = c.backward, a.dropout = c.dropout;
  a.rotary = c.positions == Positions::rotary, a.rotary_base = c.rotary_base, a.bias = c.bias;
  a.terms = c.terms, a.context = c.context;
  if (block % 2 == 1 && !c.pattern_odd.empty()) a.pattern = c.pattern_odd, a.dealt_by = c.pattern;
  return a;
}

std::vector<AttentionConfig> attention_configs(const TransformerConfig& c) {
  std::vector<AttentionConfig> all{attention_config(c)};
  if (!c.pattern_odd.empty()) all.push_back(attention_config(c, 1));
  return all;
}

void check_config(const TransformerConfig& c) {
  check(c.layers >= 1, "layers ", c.layers, " must be at least 1");
  check(c.context >= 1, "context ", c.context, " must be at least 1 token");
  check(c.vocab >= 1, "vocab ", c.vocab, " must be at least 1 symbol");
  check(c.classes >= 0 && c.hidden >= 0, "classes ", c.classes, " and hidden ", c.hidden,
        " must not be negative (0: vocab, and 4 width)");
  check(c.epsilon > 0, "epsilon ", c.epsilon, " must be positive");
  check(c.deviation > 0, "deviation ", c.deviation, " must be positive");
  check(!c.tie_weights || c.outputs() == c.vocab, "tie_weights: the head has ", c.outputs(),
        " classes and the embedding ", c.vocab, " symbols; one matrix cannot be both: set tie_weights off");
  check(c.pattern_odd.empty() || (c.order.kind != Order::Kind::automatic && c.order.scope != Order::Scope::per_segment),
        "pattern_odd: orders auto and scope=segment follow one pattern, and all blocks need the same; name an order");
  check(!c.image || !c.tie_weights, "image: patches are no symbols that a head could name; set tie_weights off");
  for (const AttentionConfig& a : attention_configs(c)) check_config(a);
}

Tensor Block::operator()(const Tensor& x, const CallOptions& call, const std::vector<Index>& rows) const {
  const bool drops = call.noise && dropout > 0;
  // Without noise in between, a product ends by adding itself to the residual stream.
  const auto join = [&](const Tensor& residual, const Linear& last, const Tensor& inner) {
    return drops ? add(residual, hilt::dropout(last(inner), dropout, call.noise->next(), rows))
                 : last.onto(residual, inner);
  };
  const Tensor mixed = join(x, attention.projection, attention.heads_of(norm1(x), call));
  return join(mixed, mlp.down, mlp.inner(norm2(mixed)));
}

void Block::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  norm1.visit_parameters(join_name(at, "norm1"), visit);
  attention.visit_parameters(join_name(at, "attention"), visit);
  norm2.visit_parameters(join_name(at, "norm2"), visit);
  mlp.visit_parameters(join_name(at, "mlp"), visit);
}

Transformer make_transformer(const TransformerConfig& c, std::uint64_t seed, DType dtype) {
  check_config(c);
  Generator generator(seed);
  const double joining = c.deviation / std::sqrt(2.0 * static_cast<double>(c.layers));
  Transformer m;
  m.config = c;
  m.tokens = make_embedding(c.vocab, c.width, c.deviation, generator, dtype);
  if (c.positions == Positions::learned)
    m.positions = make_embedding(c.context, c.width, c.deviation, generator, dtype);
  for (Index i = 0; i < c.layers; ++i) {
    Block b;
    b.norm1 = make_norm(c.norm, c.width, c.bias, c.epsilon, dtype);
    b.attention = make_self_attention(attention_config(c, i), c.deviation, joining, generator, dtype);
    b.norm2 = make_norm(c.norm, c.width, c.bias, c.epsilon, dtype);
    b.mlp = make_mlp(c.width, c.hidden_width(), c.activation, c.bias, c.deviation, joining, generator, dtype);
    b.dropout = c.dropout;
    m.blocks.push_back(std::move(b));
  }
  m.norm = make_norm(c.norm, c.width, c.bias, c.epsilon, dtype);
  if (!c.tie_weights) m.head = make_linear(c.width, c.outputs(), false, c.deviation, generator, dtype).weight;
  return m;
}

void Transformer::visit_parameters(const std::string& at, const ParameterVisitor& visit) {
  tokens.visit_parameters(join_name(at, "tokens"), visit);
  positions.visit_parameters(join_name(at, "positions"), visit);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    blocks[i].visit_parameters(join_name(at, "blocks." + std::to_string(i)), visit);
  norm.visit_parameters(join_name(at, "norm"), visit);
  if (head) visit(join_name(at, "head.weight"), head);
}

PlanPtr Transformer::plan(Index length, const CallOptions& call) const {
  CallOptions inner = call;
  inner.in_order = call.in_order || keeps_order(call);
  return blocks.front().attention.plan(length, inner);
}

bool Transformer::keeps_order(const CallOptions& call) const {
  return config.keep_order && !config.image && call.use_order && !call.in_order &&
         !(call.place && call.place->divides()) && call.documents.empty() && !call.cache &&
         config.order.kind != Order::Kind::row;
}

// One rank numbers its rows as they stand: by token, or with keep_order by position.
std::vector<Index> Transformer::rows_of(const CallOptions& call, Index batch) const {
  std::vector<Index> rows;
  if (!call.place || !call.noise || config.dropout == 0) return rows;
  const Place& place = *call.place;
  std::vector<std::int32_t> numbers = query_run(0, place.length);
  if (place.divides()) {
    const ShardPlanPtr part = blocks.front().attention.shard(place, call);
    numbers = config.keep_order && call.use_order ? part->shards().positions(part->rank()) : part->tokens();
  }
  for (Index b = 0; b < batch; ++b)
    for (const std::int32_t row : numbers) rows.push_back((place.first + b) * place.length + row);
  return rows;
}

Tensor Transformer::features(const Tensor& ids, const CallOptions& call) const {
  const bool divided = call.place && call.place->divides();
  if (config.image) {
    check(bool(ids) && ids.rank() == 3 && ids.dim(2) == config.vocab && is_floating(ids.dtype()),
          "Transformer: patches must be numbers [batch, length, ", config.vocab, "], got ",
          ids ? ids.shape() : Shape{});
    check(!divided, "Transformer: the label of an image is of all its tokens; one rank must have them");
  } else {
    check(bool(ids) && ids.rank() == 2, "Transformer: tokens must be [batch, length], got ",
          ids ? ids.shape() : Shape{});
  }
  const Index length = divided ? call.place->length : ids.dim(1);
  check(length >= 1 && length <= config.context, "Transformer: ", length, " tokens, the context is ", config.context);
  const bool keeps = keeps_order(call);
  CallOptions inner = call;
  inner.in_order = call.in_order || keeps;

  const Index before = call.cache ? call.cache->length() : 0;  // tokens
  if (call.cache) {
    check(!Tape::current() && !call.noise && !call.place && call.documents.empty() && !call.in_order && call.use_order,
          "Transformer: with a KeyValueCache tokens follow as they come, and no tape listens; leave out noise, place, "
          "documents and in_order, and pause the tape");
    check(call.cache->context() == config.context, "Transformer: the cache has a context of ", call.cache->context(),
          ", the model of ", config.context);
    call.cache->begin(attention_configs(config), length, tokens.weight.device());
  }
  const Tensor here = moved(ids, tokens.weight.device());
  Tensor x = config.image ? matmul(to(here, tokens.weight.dtype()), tokens.weight)
                          : tokens(keeps ? reorder(here, plan(length, call)->order()) : here);
  const std::vector<Index> rows = rows_of(call, ids.dim(0));
  if (positions.weight) {
    const auto first = [&](Index n) {
      return n == config.context ? positions.weight : slice(positions.weight, 0, before, before + n);
    };
    if (!call.documents.empty()) (void)plan(length, call);  // refuses what does not fit
    Tensor where = call.documents.empty() ? first(length) : Tensor();
    for (const DocumentList& row : call.documents) {  // in each they begin anew
      std::vector<Tensor> parts;
      Index rest = length;
      for (const Document& d : row) parts.push_back(first(d.length)), rest -= d.length;
      if (rest > 0) parts.push_back(first(rest));
      where = where ? cat({where, unsqueeze(cat(parts, 0), 0)}, 0) : unsqueeze(cat(parts, 0), 0);
    }
    if (inner.in_order) where = reorder(where, plan(length, call)->order(), 0);
    if (divided) {
      const ShardPlanPtr part = blocks.front().attention.shard(*call.place, call);
      where = rows_of_rank(where.rank() == 2 ? unsqueeze(where, 0) : where, *part, part->rank());
    }
    x = add(x, where);
  }
  if (call.noise && config.dropout > 0) x = dropout(x, config.dropout, call.noise->next(), rows);
  for (const Block& block : blocks) {
    if (config.checkpointing)
      x = checkpoint([block, inner, rows](std::span<const Tensor> in) { return block(in[0], inner, rows); }, {x});
    else x = block(x, inner, rows);
  }
  if (call.cache) call.cache->end();
  return config.image ? mean(norm(x), {1}, true) : norm(x);
}

Tensor Transformer::to_logits(const Tensor& x) const { return matmul(x, head ? head : transpose(tokens.weight)); }

Tensor Transformer::logits(const Tensor& ids, const CallOptions& call) const {
  const Tensor x = features(ids, call);
  return to_logits(keeps_order(call) ? restore(x, plan(ids.dim(1), call)->order()) : x);
}

Tensor Transformer::last_logits(const Tensor& ids, const CallOptions& call) const {
  check(!config.image, "Transformer: an image has one label, and no last one; take logits");
  const Tensor x = features(ids, call);
  const Index last = ids.dim(1) - 1;
  const bool in_order = call.in_order || keeps_order(call);
  const Index at = in_order ? plan(ids.dim(1), call)->order().position_of[static_cast<std::size_t>(last)] : last;
  return to_logits(squeeze(slice(x, 1, at, at + 1), 1));
}

Tensor Transformer::loss(const Tensor& ids, const Tensor& targets, const CallOptions& call) const {
  const Tensor y = to_logits(features(ids, call));
  const Shape shape{ids.dim(0), config.image ? 1 : ids.dim(1)};
  check(bool(targets) && targets.shape() == shape, "Transformer: targets ", targets ? targets.shape() : Shape{},
        config.image ? " must be a label an image, " : " must have the shape of the tokens, ", shape);
  // A mean does not care where its terms stand: the targets travel instead of the features.
  const Tensor there = moved(targets, y.device());
  return cross_entropy(y, keeps_order(call) ? reorder(there, plan(ids.dim(1), call)->order()) : there);
}

double training_flops(const Transformer& model, Index batch, Index length) {
  Transformer shapes = model;  // copies share the tensors
  double weights = 0;
  shapes.visit_parameters("", [&](const std::string& name, Tensor& p) {
    const bool looked_up = name == "positions.weight" ||
                           (name == "tokens.weight" && model.head && !model.config.image) ||
                           name.ends_with("attention.relative");
    if (p.rank() == 2 && !looked_up) weights += static_cast<double>(p.numel());
  });
  double pairs = 0;  // of all blocks
  for (const Block& block : model.blocks) {
    const PlanPtr plan = block.attention.plan(length);
    for (Index h = 0; h < plan->heads(); ++h)
      for (const std::int32_t i : plan->tilings_of(h))
        for (const PlanPart& part : plan->parts())
          pairs += static_cast<double>(part.places.count(1) * part.tilings[static_cast<std::size_t>(i)].pairs);
  }
  // A pair costs 4 D forward (q.k, p v) and 10 D backward (the scores again, dV, dP, dQ, dK).
  const double dim = static_cast<double>(attention_config(model.config).dim());
  return static_cast<double>(batch) * (6 * weights * static_cast<double>(length) + 14 * dim * pairs);
}

// ---- tokens from logits, one by one -------------------------------------------------------------
/// Throws where no token can be drawn.
template <class... Where> static void check_logits(std::span<const float> logits, const Where&... where) {
  const bool none = *std::ranges::max_element(logits) == -INFINITY;
  for (const float x : logits)
    if (none || !(x < INFINITY)) fail_with(Code::not_a_number, where..., "the logits hold ", none ? "only " : "", x);
}

// A heap gives words, likeliest first: few words of a large vocabulary are ever asked for.
Index draw_token(std::span<const float> logits, const Sampling& how, double point) {
  check(!logits.empty(), "draw_token: there are no logits");
  check(how.temperature >= 0 && how.top_p >= 0 && how.top_p <= 1 && how.top_k >= 0 && point >= 0 && point < 1,
        "draw_token: temperature ", how.temperature, ", top_p ", how.top_p, ", top_k ", how.top_k, " and point ", point,
        " must not be negative, top_p at most 1 and point below 1");
  check_logits(logits, "draw_token: ");
  const auto logit = [&](Index i) { return logits[static_cast<std::size_t>(i)]; };
  const Index first = std::ranges::max_element(logits) - logits.begin(), n = std::ssize(logits);
  if (how.temperature == 0) return first;
  const auto later = [&](Index a, Index b) { return logit(a) < logit(b) || (logit(a) == logit(b) && a > b); };
  std::vector<Index> heap(logits.size());
  std::iota(heap.begin(), heap.end(), Index{0});
  std::ranges::make_heap(heap, later);
  Index taken = 0;  // they stand behind the heap, the first one last
  const auto likeliest = [&](Index i) {
    for (; taken <= i; ++taken) std::ranges::pop_heap(heap.begin(), heap.end() - taken, later);
    return heap[static_cast<std::size_t>(n - 1 - i)];
  };
  const auto weight = [&](Index i) {
    return std::exp((static_cast<double>(logit(i)) - static_cast<double>(logit(first))) / how.temperature);
  };
  double share = 0;
  for (Index i = 0; i < n; ++i) share += weight(i);
  Index kept = n;
  if (how.top_k > 0 || how.top_p < 1) {
    const double enough = how.top_p * share;
    const Index most = how.top_k > 0 ? std::min(how.top_k, n) : n;
    for (share = 0, kept = 0; kept < most && (kept == 0 || share < enough);) share += weight(likeliest(kept++));
  }
  double left = point * share;
  Index i = 0;
  for (; i + 1 < kept && left >= weight(likeliest(i)); ++i) left -= weight(likeliest(i));
  return likeliest(i);
}

std::vector<std::int32_t> generate(const Transformer& model, KeyValueCache& cache, std::vector<std::int32_t> tokens,
                                   Index count, const Sampling& how, RandomKey key,
                                   const std::function<bool(std::int32_t)>& show) {
  const Tape::Pause pause;
  Index from = 0;  // the first token that the model sees
  for (Index drawn = 0; drawn < count; ++drawn) {
    const Index length = std::ssize(tokens), context = std::min(cache.context(), model.config.context);
    if (length - from > context) {
      from = length - (context + 1) / 2;
      const auto next = std::find(tokens.begin() + from, tokens.end(), how.boundary);
      if (next != tokens.end()) from = next - tokens.begin();
      cache.clear();
    }
    check(cache.length() < length - from, "generate: the cache has ", cache.length(), " tokens, and there are ",
          length - from, " to go on from");
    const std::vector<std::int32_t> fresh(tokens.begin() + from + cache.length(), tokens.end());
    const Tensor last = model.last_logits(from_values(fresh, {1, std::ssize(fresh)}), {.cache = &cache});
    const std::vector<float> row = last.to_vector<float>();
    check_logits(row, "generate: token ", drawn + 1, " of ", count, ": ");
    const auto low = [](auto x) { return static_cast<std::uint32_t>(x); };
    const auto bits = philox({low(drawn / 4), 0, low(key.stream), low(key.stream >> 32)}, key.seed);
    tokens.push_back(
        static_cast<std::int32_t>(draw_token(row, how, bits[static_cast<std::size_t>(drawn % 4)] * 0x1p-32)));
    if (show && !show(tokens.back())) break;
  }
  return tokens;
}

}  // namespace hilt
