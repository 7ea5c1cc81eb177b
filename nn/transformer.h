#pragma once
#include "attention.h"

namespace [[gnu::visibility("default")]] hilt {

enum class Positions : unsigned char { learned, rotary, none };  // how a model learns where a token stands
Positions parse_positions(std::string_view text);
std::string_view name_of(Positions positions);

/// All that decides what a Transformer computes; the defaults are nanoGPT's small character model.
struct TransformerConfig {
  Index layers = 4;    // blocks
  Index heads = 4;     // of queries
  Index kv_heads = 0;  // of keys and values; 0: as many
  Index width = 128;   // of the residual stream
  Index hidden = 0;    // of the Mlp; 0: 4 width
  Index context = 64;  // the most tokens of a sequence
  Index vocab = 65;    // input symbols
  Index classes = 0;   // output symbols; 0: vocab
  Order order{};
  Pattern pattern = {Branch{}};  // of even blocks
  Pattern pattern_odd{};         // of odd blocks; empty: pattern too
  DilationMode dilation_mode = DilationMode::all_queries;
  Causality causality = Causality::token;
  Backward backward = Backward::fused;
  double dropout = 0;          // of embeddings, attention weights and what joins the residual stream
  bool checkpointing = false;  // keep each block's input alone and run it again in backward
  bool keep_order = false;     // permute once at the input, hold activations in curve order, restore it at the output
  Positions positions = Positions::learned;
  TermConfig terms{};               // of attention's scores, in every block tensors of its own
  bool image = false;               // tokens are patches, `vocab` numbers each, and a row has one label, of their mean
  double rotary_base = 10000;       // as in rotary()
  bool tie_weights = true;          // the head is the transposed embedding; only with classes == vocab
  NormKind norm = NormKind::layer;  // before each branch and at the end
  double epsilon = 1e-5;            // of the norms
  double deviation = 0.02;          // of initial weights: GPT-2's, which suits its width of 768
  Activation activation = Activation::gelu_tanh;
  bool bias = true;  // in every product and layer norm

  Index hidden_width() const { return hidden == 0 ? 4 * width : hidden; }  // of the Mlp
  Index outputs() const { return classes == 0 ? vocab : classes; }         // of the last axis of logits
  friend bool operator==(const TransformerConfig&, const TransformerConfig&) = default;
};
/// Throws Code::usage with what is wrong and the nearest values that are not.
void check_config(const TransformerConfig& config);
/// The attention of a block.
AttentionConfig attention_config(const TransformerConfig& config, Index block = 0);
/// Those of block 0 and, where there is another pattern, of block 1: blocks have them in turn.
std::vector<AttentionConfig> attention_configs(const TransformerConfig& config);

struct Block {                       // x + attention(norm(x)), then x + mlp(norm(x))
  Norm norm1{}, norm2{};             // before each branch
  HilbertSelfAttention attention{};  // the first branch
  Mlp mlp{};
  double dropout = 0;  // of both branches
  /// rows: where the rows of x stand among those that share dropout's masks; empty: x is all.
  Tensor operator()(const Tensor& x, const CallOptions& call = {}, const std::vector<Index>& rows = {}) const;
  void visit_parameters(const std::string& at, const ParameterVisitor& visit);
};

/// Tokens to logits: causal by token a language model; on a grid, not causal, an encoder of boards.
struct Transformer {
  TransformerConfig config{};       // what it computes
  Embedding tokens{}, positions{};  // positions: [context, width] where they are learned
  std::vector<Block> blocks{};      // one after the other
  Norm norm{};
  Tensor head{};  // [width, outputs]; undefined where it is tied to tokens

  /// tokens: i32 or i64 [B, L], L <= context -> [B, L, outputs]. With a place: this rank's rows. Of
  /// images: patches [B, L, vocab] -> [B, 1, outputs].
  Tensor logits(const Tensor& ids, const CallOptions& call = {}) const;
  /// The logits of each sequence's last token -> [B, outputs]: what sampling asks for.
  Tensor last_logits(const Tensor& ids, const CallOptions& call = {}) const;
  /// Mean cross entropy over the targets that are not -100. targets: i32 or i64 [B, L]; targets[b,
  /// t] belongs to ids[b, t] (for a language model the symbol that follows it); of images [B, 1].
  Tensor loss(const Tensor& ids, const Tensor& targets, const CallOptions& call = {}) const;
  /// The plan that a call on this many tokens uses.
  PlanPtr plan(Index length, const CallOptions& call = {}) const;
  void visit_parameters(const std::string& at, const ParameterVisitor& visit);

 private:
  /// The residual stream after the last norm, in the order the blocks ran in.
  Tensor features(const Tensor& ids, const CallOptions& call) const;
  Tensor to_logits(const Tensor& x) const;
  bool keeps_order(const CallOptions& call) const;
  /// Where the rows of x stand in the whole batch, for masks of dropout: empty where x is that.
  std::vector<Index> rows_of(const CallOptions& call, Index batch) const;
};

/// GPT-2's initial values: normal with `deviation`, products that join the residual stream with
/// deviation / sqrt(2 layers), biases 0, norms 1. The same seed gives the same model.
Transformer make_transformer(const TransformerConfig& config, std::uint64_t seed, DType dtype = DType::f32);

/// Floating-point operations of a training step: 6 a weight and token, and the pairs that attend.
double training_flops(const Transformer& model, Index batch, Index length);

/// How a token is drawn: among the top_k likeliest (0: all), and of these the fewest that have the
/// share top_p together, by softmax(logits / temperature). At temperature 0 the likeliest.
struct Sampling {
  double temperature = 1, top_p = 1;  // top_p: of all tokens
  Index top_k = 0;                    // of equals the lower one is the likelier
  Index boundary = -1;                // what is forgotten ends before such a token, if one comes
};
/// The token at this point of [0, 1), likeliest first. Throws Code::not_a_number as generate().
Index draw_token(std::span<const float> logits, const Sampling& how, double point);

/// Continues tokens, of which the cache has the first cache.length(), by `count`, or until `show`,
/// told each of them, is false; returns all. In a full context the older half is forgotten. Token i
/// that comes depends on the key's number i. Throws Code::not_a_number where logits are.
std::vector<std::int32_t> generate(const Transformer& model, KeyValueCache& cache, std::vector<std::int32_t> tokens,
                                   Index count, const Sampling& how, RandomKey key,
                                   const std::function<bool(std::int32_t)>& show = {});

}  // namespace hilt
