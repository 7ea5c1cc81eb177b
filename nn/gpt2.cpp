// Hugging Face's names for GPT-2's tensors, and ours. Its projections are [in, out], as ours.
#include "nn/training.h"
#include <cstring>
#include <set>
#include "ops/ops.h"
#include "core/io/safetensors.h"

namespace hilt {
namespace {

struct Pair {
  std::string_view theirs, ours;
};
constexpr std::array<Pair, 10> kNames{{{"h.", "blocks."},
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
