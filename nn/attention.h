#pragma once
#include "../ops/hilbert/ring.h"
#include "layers.h"

namespace [[gnu::visibility("default")]] hilt {

struct AttentionConfig {  // what a HilbertSelfAttention computes, whatever its weights are
  Index width = 128;      // features of a token
  Index heads = 4;        // of queries; they divide width
  Index kv_heads = 0;     // 0: as many as heads
  Order order{};
  Pattern pattern = {Branch{}};
  DilationMode dilation_mode = DilationMode::all_queries;
  Causality causality = Causality::none;
  Backward backward = Backward::fused;
  double dropout = 0;          // of attention weights
  bool rotary = false;         // turn q and k by their token's index
  double rotary_base = 10000;  // as in rotary()
  bool bias = true;            // in both projections
  TermConfig terms{};          // of the scores
  Index context = 0;           // tokens of a row, where a bias says L
  Pattern dealt_by{};          // whose plan deals out rows to ranks; empty: pattern's

  Index keys() const { return kv_heads == 0 ? heads : kv_heads; }  // heads of keys and values
  Index dim() const { return width / heads; }                      // features of a head
  friend bool operator==(const AttentionConfig&, const AttentionConfig&) = default;
};
/// Throws Code::usage with what is wrong and the nearest values that are not.
void check_config(const AttentionConfig& config);

/// Where the rows of x stand if a batch is divided over ranks: x [b, l, width] holds `b` sequences
/// from number `first` on, and of each this rank's rows of `sequence`, whose ranks call alike.
struct Place {
  Comm sequence{};                                      // the ranks that share these sequences
  Index first = 0;                                      // number of the first sequence
  Index length = 0;                                     // tokens of a whole sequence
  bool divides() const { return sequence.size() > 1; }  // sequences are shared with other ranks
};

/// The keys and values that tokens left in each layer. A call of a model with token causality that
/// names a cache takes x for the tokens that follow those in it, rows of a sequence of `context`
/// tokens, and gives what a call on all of them gives. No tape may listen.
///
/// A run is `run` neighbouring tokens, from a multiple of `run` on. Where the tokens of a call lie
/// in one run, its plan serves them, unless it lists more than twice their own keys: all rows of
/// the run are computed, and only theirs are used. A GPU multiplies 64 rows at once anyway, and a
/// plan is copied there once a run.
class KeyValueCache {
 public:
  /// Room for so many tokens; empty. run 0: 64 on a GPU; 1, no row beside theirs, on a CPU.
  explicit KeyValueCache(Index context, Index run = 0) : context_(context), run_(run) {}
  Index length() const { return length_; }    // tokens that are there
  Index context() const { return context_; }  // the most tokens
  void clear() { length_ = 0; }               // no token is there
  /// Rows of keys that plans listed so far, a layer, sequence and tile; once for heads of one set.
  Index keys_read() const { return keys_read_; }

  /// For a model: `count` tokens come, then each layer adds its rows; at the end they count.
  void begin(const std::vector<AttentionConfig>& configs, Index count, Device device);  // layers have them in turn
  Tensor among_queries(const Tensor& rows);                              // the tokens' q, k and v, in the plan's rows
  Tensor rows_of_tokens(const Tensor& x) const;                          // of the plan's rows, theirs
  std::array<Tensor, 2> extended(const Tensor& k, const Tensor& v);      // those given and those before, all in cache
  void end() { length_ += count_; }                                      // the tokens of begin() count
  const PlanPtr& plan() const { return plans_[next_ % plans_.size()]; }  // its queries: the tokens, or their run

 private:
  void make_plans(Index first, Index count);
  Index context_, run_, length_ = 0, keys_read_ = 0;
  Index count_ = 0, first_ = 0;  // of the tokens that come; the first query of the plans
  Index refused_ = -1;           // a run whose plan would list too many keys
  std::size_t next_ = 0;
  std::vector<AttentionConfig> configs_;
  Tensor queries_;                             // [B, run, heads, dim] q, k and v, for each layer in turn
  std::vector<std::array<Tensor, 2>> layers_;  // [B, context, heads, dim]; zeros where nothing is yet
  std::vector<PlanPtr> plans_;                 // in turn by layers
  std::vector<Index> listed_;                  // rows of keys that each of them lists
};

struct CallOptions {           // what one call of a module may change
  Generator* noise = nullptr;  // draws dropout masks; without one nothing is dropped: evaluation
  bool use_order = true;       // false: the same pattern on row order, the tokens as they come
  bool in_order = false;       // x already stands in curve order: x[:, i] is token order.token_at[i], and so is y[:, i]
  const Place* place = nullptr;           // x is a part of a batch; rows of divided sequences stand in curve order
  std::vector<DocumentList> documents{};  // what lies in each row of x, see PlanSpec
  KeyValueCache* cache = nullptr;         // x follows what is in it
};

/// Self-attention on a Hilbert order: one projection to q, k and v, attention on a plan from
/// make_plan's cache, one output projection. Known elsewhere as HilbertAttentionCore.
struct HilbertSelfAttention {
  AttentionConfig config{};  // what it computes
  Linear qkv{};              // [width, (heads + 2 kv_heads) dim]: q, then k, then v
  Linear projection{};       // [heads dim, width]
  ScoreTerms terms{};        // their tensors are parameters, f32 beside 16-bit weights

  Tensor operator()(const Tensor& x, const CallOptions& call = {}) const;  // x: [B, L, width] -> [B, L, width]
  /// All but the output projection: the outputs of all heads side by side, [B, L, heads dim].
  Tensor heads_of(const Tensor& x, const CallOptions& call = {}) const;
  /// The plan that a call on this many tokens uses.
  PlanPtr plan(Index length, const CallOptions& call = {}) const;
  /// The part of that plan which is this rank's.
  ShardPlanPtr shard(const Place& place, const CallOptions& call = {}) const;
  void visit_parameters(const std::string& at, const ParameterVisitor& visit);
};
/// Normal weights of these deviations, zero biases; throws Code::usage as check_config().
HilbertSelfAttention make_self_attention(const AttentionConfig& config, double deviation, double projection_deviation,
                                         Generator& generator, DType dtype = DType::f32);

}  // namespace hilt
