#pragma once
#include <variant>
#include "ring.h"

namespace [[gnu::visibility("default")]] hilt {

/// What an attention is asked to be, as people write it; attention_settings() says of each field
/// what it is called, what it takes and what it does.
struct AttentionSettings {
  std::string order = "row", pattern = "dense", dilation_mode = "all_queries", causal = "none";  // the set
  std::string documents{}, queries{};                                 // what lies in a row, and which rows ask
  std::string backward{name_of(AttentionOptions().backward)};         // the mode
  std::optional<double> scale{};                                      // of q . k
  double dropout = 0, softcap = 0;                                    // 0: none
  std::string alibi{}, relative{}, bias{};                            // terms by their sizes; empty: none
  bool sink = false, strict = false;                                  // whether
  Index seed = 0;                                                     // of dropout
  std::string transport = "ring", shards = "contiguous";              // over ranks
  std::string attention_type{}, segment_lengths{}, dilation_rates{};  // of make_attention(), like those below
  std::string blocks = "local:1", work_order = "row";                 // of block_sparse
  Index block_size = 64, length = 0, heads = 0;                       // 0: unknown
  friend bool operator==(const AttentionSettings&, const AttentionSettings&) = default;
};

/// A row of the table of what an attention is told: options of programs, the keys of
/// make_attention() and arguments in Python read it.
struct AttentionSetting {
  /// Which of the attention_types have use for it; of what is for all, terms are of the scores.
  enum class Reader : unsigned char { all, terms, segments, blocks, ranks, none };
  std::string_view name{}, kind{};  // as in dilation_mode; what stands for a value in its help: ORDER, X
  std::variant<std::string AttentionSettings::*, double AttentionSettings::*,
               std::optional<double> AttentionSettings::*, Index AttentionSettings::*, bool AttentionSettings::*>
      field{};                              // where a value is kept
  Reader reader = Reader::all;              // who has use for it
  std::string_view help{}, tensor{};        // a sentence; and of a score term, what a tensor of it is
  double low = 0, high = 0;                 // the range of a number
  std::vector<std::string_view> choices{};  // all its values; empty: there are others
};
const std::vector<AttentionSetting>& attention_settings();         // the table
const AttentionSetting& attention_setting(std::string_view name);  // its row
/// Reads a value of one; an error where the text is none.
void read_setting(AttentionSettings& settings, std::string_view name, std::string_view text);
/// What they come to: a plan of so many tokens, how to run it, and its score terms by their sizes.
PlanSpec plan_spec(const AttentionSettings& settings, Index length, Index heads);
AttentionOptions attention_options(const AttentionSettings& settings);  // all but the terms
TermConfig term_config(const AttentionSettings& settings);              // as read_term() has them

/// An attention chosen by name, for any length; plans are made as lengths come up.
class NamedAttention {
 public:
  /// [B, L, H, D] as attention() takes them; for the ring types this rank's rows, as
  /// ring_attention() takes them. `step` tells dropout's streams apart; documents: see PlanSpec.
  using Documents = std::vector<DocumentList>;
  /// The attention itself; errors are those of attention() and ring_attention().
  Tensor operator()(const Tensor& q, const Tensor& k, const Tensor& v, std::uint64_t step = 0,
                    const Documents& documents = {}) const;
  PlanPtr plan(const Tensor& q, const Documents& documents = {}) const;  // that a call uses
  /// For the ring types: this rank's part of the plan, and so which rows it holds.
  ShardPlanPtr shard(Index heads, const Documents& documents = {}) const;
  /// The learned tensors of its score terms: slopes, relative, bias, sink.
  void visit_parameters(const std::string& at, const std::function<void(const std::string&, Tensor&)>& visit);
  const std::string& type() const { return settings_.attention_type; }  // the attention_type
  const AttentionOptions& options() const { return options_; }          // those of every call

 private:
  friend NamedAttention make_attention(const std::map<std::string, std::string>& config, const Comm& comm);
  PlanSpec spec(Index length, Index heads, const Documents& documents) const;
  AttentionSettings settings_;
  PlanSpec spec_;  // but for lengths and what is of a call
  Comm comm_;
  AttentionOptions options_;
};

/// The systems people know, by their names:
///   standard       dilated attention: branches (segment_lengths, dilation_rates), longnet
///   improved       the same with branches on head groups
///   hilbert        segments of the Hilbert order, every query asking
///   block_sparse   blocks (block_size; blocks = local:RADIUS, dilated:R+R+.., global_local:GLOBAL:RADIUS,
///                  FILE.npy, or top:K, which each sequence and key head chooses for itself by pooled q.k)
///   ring, ring_hilbert, block_sparse_ring
///                  dense (or segments, as standard), hilbert and block_sparse over the ranks of comm, the
///                  same on each; known as HilbertRing with transport = gather, as HilbertTrueRing with
///                  transport = ring; they need length
/// attention_settings() has the keys. An unknown one, or one that the type does not read, is an
/// error.
NamedAttention make_attention(const std::map<std::string, std::string>& config, const Comm& comm = Comm());

}  // namespace hilt
