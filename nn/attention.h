#pragma once
#include "../ops/hilbert/ring.h"
#include "layers.h"

namespace [[gnu::visibility("default")]] hilt {

/// What a HilbertSelfAttention computes, whatever its weights are.
struct AttentionConfig {
  Index width = 128;
  Index heads = 4;
  Index kv_heads = 0;  // 0: as many as heads
  Order order{};
  Pattern pattern = {Branch{}};
  DilationMode dilation_mode = DilationMode::all_queries;
  Causality causality = Causality::none;
  Backward backward = Backward::fused;
  double dropout = 0;   // of attention weights
  bool rotary = false;  // turn q and k by their token's index
  double rotary_base = 10000;
  bool bias = true;

  Index keys() const { return kv_heads == 0 ? heads : kv_heads; }
  Index dim() const { return width / heads; }
  friend bool operator==(const AttentionConfig&, const AttentionConfig&) = default;
};
/// Throws Code::usage with what is wrong and the nearest values that are not.
void check_config(const AttentionConfig& config);

/// Where the rows of x stand if a batch is divided over ranks: x [b, l, width] holds `b` sequences,
/// from number `first` on, and of each of them the rows of this rank of `sequence`. All ranks of
/// `sequence` make the same calls.
struct Place {
  Comm sequence;  // the ranks that share these sequences
  Index first = 0;
  Index length = 0;  // tokens of a whole sequence
  bool divides() const { return sequence.size() > 1; }
};

/// What one call of a module may change.
struct CallOptions {
  Generator* noise = nullptr;  // draws dropout masks; without one nothing is dropped: evaluation
  bool use_order = true;       // false: the same pattern on row order, the tokens as they come
  bool in_order = false;       // x already stands in curve order: x[:, i] is token order.token_at[i], and so will be y
  const Place* place = nullptr;  // x is a part of a batch; rows of divided sequences stand in curve order
};

/// Self-attention on a Hilbert order: one projection to q, k and v, attention on a plan, one output
/// projection. Known elsewhere as HilbertAttentionCore. Plans come from make_plan's cache, one a
/// length.
struct HilbertSelfAttention {
  AttentionConfig config;
  Linear qkv;         // [width, (heads + 2 kv_heads) dim]: q, then k, then v
  Linear projection;  // [heads dim, width]

  /// x: [B, L, width] -> [B, L, width].
  Tensor operator()(const Tensor& x, const CallOptions& call = {}) const;
  /// All but the output projection: the outputs of all heads side by side, [B, L, heads dim].
  Tensor heads_of(const Tensor& x, const CallOptions& call = {}) const;
  /// The plan that a call on this many tokens uses.
  PlanPtr plan(Index length, const CallOptions& call = {}) const;
  /// The part of that plan which is this rank's.
  ShardPlanPtr shard(const Place& place, const CallOptions& call = {}) const;
  void visit_parameters(const std::string& at, const ParameterVisitor& visit);
};
HilbertSelfAttention make_self_attention(const AttentionConfig& config, double deviation, double projection_deviation,
                                         Generator& generator, DType dtype = DType::f32);

}  // namespace hilt
