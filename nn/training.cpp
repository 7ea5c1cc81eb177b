// Training state to and from a directory of checkpoints; models from other libraries' files.
#include "nn/training.h"
#include <cstring>
#include <filesystem>
#include <set>
#include "core/io/text.h"

namespace hilt {

namespace {

/// f(name, field) of all that a configuration says.
template <class Config, class F> void fields_of(Config& c, F f) {
  f("layers", c.layers), f("heads", c.heads), f("kv_heads", c.kv_heads), f("width", c.width), f("hidden", c.hidden);
  f("context", c.context), f("vocab", c.vocab), f("classes", c.classes), f("pattern", c.pattern);
  f("order", c.order), f("pattern_odd", c.pattern_odd), f("dilation_mode", c.dilation_mode);
  f("causality", c.causality), f("backward", c.backward), f("dropout", c.dropout);
  f("checkpointing", c.checkpointing), f("keep_order", c.keep_order), f("positions", c.positions);
  f("softcap", c.terms.softcap), f("alibi", c.terms.alibi), f("relative", c.terms.relative);
  f("bias_of_scores", c.terms.bias), f("sink", c.terms.sink), f("image", c.image), f("rotary_base", c.rotary_base);
  f("tie_weights", c.tie_weights), f("norm", c.norm), f("epsilon", c.epsilon), f("deviation", c.deviation);
  f("activation", c.activation), f("bias", c.bias);
}
/// Those that decide how a model is computed or trained, and not what it is.
constexpr const char* kHow[] = {"backward", "checkpointing", "keep_order", "dropout", "deviation"};
constexpr const char* kConfig = "config.";
constexpr std::array<std::string_view, 3> kAlibi{"none", "published", "learned"};

template <class T> std::string text_of(const T& value) {
  if constexpr (std::is_same_v<T, TermConfig::Alibi>) return std::string(kAlibi[static_cast<std::size_t>(value)]);
  else if constexpr (std::is_enum_v<T>) return std::string(name_of(value));
  else if constexpr (std::is_arithmetic_v<T>) {
    char text[32];
    return {text,
            std::to_chars(text, text + sizeof text, std::conditional_t<std::is_same_v<T, bool>, int, T>(value)).ptr};
  } else if constexpr (std::is_same_v<T, Shape>) {
    std::string text;
    for (const Index extent : value) text += (text.empty() ? "" : "x") + std::to_string(extent);
    return text;
  } else return to_string(value);
}

/// cells: what an order has, those of the context behind a prefix.
void read(const char* name, const std::string& text, Index cells, auto& value) {
  using T = std::remove_reference_t<decltype(value)>;
  const auto number = [&]<class Number>(Number) {
    const std::optional<Number> x = number_in<Number>(text);
    return x ? *x : (fail("config: ", name, " (", shown(text), ") should be a number"), Number{});
  };
  if constexpr (std::is_same_v<T, bool>) value = number(int{}) != 0;
  else if constexpr (std::is_arithmetic_v<T>) value = number(T{});
  else if constexpr (std::is_same_v<T, Order>) value = parse_order(text, cells);
  else if constexpr (std::is_same_v<T, Pattern>) value = text.empty() ? Pattern{} : parse_pattern(text);
  else if constexpr (std::is_same_v<T, DilationMode>) value = parse_dilation_mode(text);
  else if constexpr (std::is_same_v<T, Causality>) value = parse_causality(text);
  else if constexpr (std::is_same_v<T, Backward>) value = parse_backward(text);
  else if constexpr (std::is_same_v<T, Positions>) value = parse_positions(text);
  else if constexpr (std::is_same_v<T, NormKind>) value = parse_norm_kind(text);
  else if constexpr (std::is_same_v<T, Activation>) value = parse_activation(text);
  else if constexpr (std::is_same_v<T, TermConfig::Alibi>) value = T(find_name(name, text, kAlibi));
  else {
    value = Shape();
    for (const std::string_view extent : split_text(text, 'x'))
      if (!text.empty()) value.push_back(read_index(name, extent, 0));
  }
}

SafetensorsMetadata text_of_fields(const TransformerConfig& config) {
  SafetensorsMetadata text;
  fields_of(config, [&](const char* name, const auto& value) { text[name] = text_of(value); });
  return text;
}

/// Throws where a file has a configuration and it is of another model, however that is computed.
void require_same(const Checkpoint& checkpoint, const TransformerConfig& config) {
  SafetensorsMetadata theirs = checkpoint.file().metadata(), ours = text_of_fields(config);
  if (!theirs.contains(std::string(kConfig) + "layers")) return;
  for (const char* how : kHow) theirs.erase(kConfig + std::string(how)), ours.erase(how);
  std::string text;
  for (const std::string& one : differences(theirs, kConfig, ours)) text += (text.empty() ? "" : "; ") + one;
  if (!text.empty()) fail_with(Code::data, checkpoint.path(), ": another configuration: ", text);
}

TransformerConfig config_in(const Checkpoint& checkpoint) try {
  TransformerConfig config;
  fields_of(config, [&](const char* name, auto& value) {
    read(name, checkpoint.get(std::string(kConfig).append(name)), behind_prefix(config.pattern, config.context), value);
  });
  check_config(config);
  return config;
} catch (const Error& e) {
  if (e.code() != Code::usage) throw;
  fail_with(Code::data, checkpoint.path(), ": ", e.what());
}

/// Throws unless a file of so many bytes can hold such weights: before memory is asked for.
void require_fits(const TransformerConfig& c, const Checkpoint& checkpoint) {
  const auto fits = [&](std::initializer_list<Index> factors) {
    auto left = static_cast<Index>(checkpoint.file().bytes());
    for (const Index factor : factors) left /= std::max<Index>(factor, 1);
    if (left == 0) fail_with(Code::data, checkpoint.path(), ": its configuration is of a larger model than it holds");
  };
  const Shape& bias = c.terms.bias;
  const auto whole = [&](int axis) { return bias[axis] == 0 ? c.context : bias[axis]; };
  fits({c.vocab, c.width}), fits({c.layers, c.width, c.width}), fits({c.layers, c.width, c.hidden_width()});
  if (c.positions == Positions::learned) fits({c.context, c.width});
  if (!c.tie_weights) fits({c.width, c.outputs()});
  if (c.terms.relative.rank() > 0) fits({c.layers, c.heads, c.terms.relative.numel()});
  if (bias.rank() == 4) fits({c.layers, bias[0], bias[1], whole(2), whole(3)});
}

void add_config(SafetensorsMetadata& metadata, const TransformerConfig& config) {
  for (const auto& [key, value] : text_of_fields(config)) metadata[kConfig + key] = value;
}

std::vector<SafetensorsItem> weights_of(const NamedParameters& parameters) {
  std::vector<SafetensorsItem> items;  // they share the tensors
  for (const NamedParameter& p : parameters) items.push_back({"model." + p.name, *p.tensor});
  return items;
}

std::vector<SafetensorsItem> items_of(const NamedParameters& parameters, Optimizer& optimizer) {
  optimizer.prepare(parameters);
  std::vector<SafetensorsItem> items = weights_of(parameters);
  optimizer.visit_state([&](const std::string& name, Tensor& t) { items.push_back({"optimizer." + name, t}); });
  return items;
}

}  // namespace

void save_training(const std::string& directory, Index step, const NamedParameters& parameters, Optimizer& optimizer,
                   const Generator& generator, Index keep, const TransformerConfig* config) {
  check(step >= 0, "save_training: step ", step, " must not be negative");
  std::error_code failed;
  std::filesystem::create_directories(directory, failed);
  if (failed) fail_with(Code::data, directory, ": cannot make this directory: ", failed.message());
  SafetensorsMetadata metadata;
  if (config) add_config(metadata, *config);
  const RandomKey noise = generator.state();
  metadata["generator.seed"] = std::to_string(noise.seed), metadata["generator.stream"] = std::to_string(noise.stream);
  save_checkpoint(directory, step, items_of(parameters, optimizer), std::move(metadata), keep);
}

std::optional<Index> load_training(const std::string& directory, const NamedParameters& parameters,
                                   Optimizer& optimizer, Generator& generator, const TransformerConfig* config) {
  const std::vector<Index> steps = checkpoint_steps(directory);
  if (steps.empty()) return std::nullopt;
  const Checkpoint newest(directory + '/' + checkpoint_name(steps.back()));
  if (config) require_same(newest, *config);
  const RandomKey noise{newest.get_number("generator.seed"), newest.get_number("generator.stream")};
  std::vector<SafetensorsItem> items = items_of(parameters, optimizer);
  newest.read(items);
  generator.set_state(noise);
  return newest.step();
}

void save_model(const std::string& path, Transformer model) {
  check(model.tokens.weight && std::ssize(model.blocks) == model.config.layers,
        "save_model: this model lacks weights: it was moved from, or never made");
  const auto listed = [](const Branch& b) { return b.kind == Branch::Kind::blocks && b.lists == Branch::Lists::given; };
  check(std::ranges::none_of(model.config.pattern, listed) && std::ranges::none_of(model.config.pattern_odd, listed),
        "save_model: a list of block pairs has no text; name a rule, or write the tensors with write_checkpoint()");
  SafetensorsMetadata metadata;
  add_config(metadata, model.config);
  write_checkpoint(path, weights_of(parameters_of(model)), std::move(metadata));
}

Transformer load_model(const std::string& path) {
  const Checkpoint checkpoint(path);
  const TransformerConfig config = config_in(checkpoint);
  require_fits(config, checkpoint);
  const SafetensorsEntry* const tokens = checkpoint.file().find("model.tokens.weight");
  if (!tokens) fail_with(Code::data, path, ": lacks the tensor model.tokens.weight");
  Transformer model = make_transformer(config, 0, tokens->dtype);
  std::vector<SafetensorsItem> items = weights_of(parameters_of(model));
  checkpoint.read(items, "model.");
  return model;
}

// ---- Hugging Face's names for GPT-2's tensors, and ours; projections are [in, out] in both ------
namespace {

constexpr std::array<std::pair<std::string_view, std::string_view>, 10> kNames{
    {{"h.", "blocks."},
     {"ln_1.", "norm1."},
     {"attn.c_attn.", "attention.qkv."},
     {"attn.c_proj.", "attention.projection."},
     {"ln_2.", "norm2."},
     {"mlp.c_fc.", "mlp.up."},
     {"mlp.c_proj.", "mlp.down."},
     {"wte.", "tokens."},
     {"wpe.", "positions."},
     {"ln_f.", "norm."}}};

std::string their_name(std::string name) {  // blocks.3.mlp.up.weight -> h.3.mlp.c_fc.weight
  for (const auto& [theirs, ours] : kNames)
    if (const std::size_t at = name.find(ours); at != name.npos) name.replace(at, ours.size(), theirs);
  return name;
}

class Source {
 public:
  explicit Source(const std::string& path) : file_(path) {
    for (const SafetensorsEntry& e : file_.entries())
      if (e.name.starts_with("transformer.")) prefix_ = "transformer.";
  }
  const SafetensorsEntry* find(const std::string& name) const {
    return file_.find(name.starts_with("lm_head") ? name : prefix_ + name);
  }
  const SafetensorsEntry& need(const std::string& name) const {
    if (const SafetensorsEntry* e = find(name)) return *e;
    fail_with(Code::data, "load_gpt2: tensor (", prefix_, name, ") is missing, ", file_.path(),
              "; is this a GPT-2 model?");
  }
  Tensor take(const std::string& name, const Shape& shape, DType dtype) {
    const SafetensorsEntry& e = need(name);
    if (e.shape != shape || !is_floating(e.dtype))
      fail_with(Code::data, "load_gpt2: tensor ", e.name, " (", e.dtype, e.shape, "): expected floats of ", shape, ", ",
                file_.path(), ":", e.begin, "; width, layers and context come from the other tensors");
    taken_.insert(e.name);
    return to(file_.read(e.name), dtype);
  }
  Index count_layers() const {
    Index layers = 1;
    for (need("h.0.ln_1.weight"); find("h." + std::to_string(layers) + ".ln_1.weight");) ++layers;
    return layers;
  }
  /// Everything must have been taken, but for the causal masks that old files carry.
  void check_nothing_left() const {
    for (const SafetensorsEntry& e : file_.entries()) {
      const bool mask = e.name.ends_with(".attn.bias") || e.name.ends_with(".attn.masked_bias");
      if (!mask && !taken_.contains(e.name))
        fail_with(Code::data, "load_gpt2: tensor (", e.name, ") is not one of GPT-2's, ", file_.path(), ":", e.begin,
                  "; remove it or load another model");
    }
  }
  const std::string& path() const { return file_.path(); }

 private:
  SafetensorsFile file_;
  std::string prefix_;
  std::set<std::string> taken_;
};

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(moved(a, {}).raw(), moved(b, {}).raw(), a.bytes()) == 0;
}

TransformerConfig config_of(const Source& source, Index heads) {
  const auto matrix = [&](const std::string& name) {
    const Shape shape = source.need(name).shape;
    if (shape.rank() != 2 || shape.numel() == 0)
      fail_with(Code::data, "load_gpt2: tensor ", name, " (", shape, "): expected a matrix, ", source.path(),
                "; is this a GPT-2 model?");
    return shape;
  };
  const Shape tokens = matrix("wte.weight"), positions = matrix("wpe.weight"), up = matrix("h.0.mlp.c_fc.weight");
  TransformerConfig config;
  config.vocab = tokens[0], config.width = tokens[1], config.context = positions[0], config.hidden = up[1];
  config.heads = heads;
  config.layers = source.count_layers();
  return config;
}

}  // namespace

TransformerConfig gpt2_config(const std::string& path, Index heads) { return config_of(Source(path), heads); }

Transformer load_gpt2(const std::string& path, Index heads, DType dtype) {
  const Tape::Pause pause;
  Source source(path);
  const TransformerConfig config = config_of(source, heads);
  Transformer m = make_transformer(config, 0, dtype);
  m.visit_parameters("",
                     [&](const std::string& name, Tensor& p) { p = source.take(their_name(name), p.shape(), dtype); });
  if (source.find("lm_head.weight")) {
    const Tensor head = source.take("lm_head.weight", m.tokens.weight.shape(), dtype);
    if (!same_bytes(head, m.tokens.weight)) m.head = contiguous(transpose(head)), m.config.tie_weights = false;
  }
  source.check_nothing_left();
  return m;
}

}  // namespace hilt
