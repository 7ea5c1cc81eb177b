#pragma once
#include <map>
#include <string>
#include "ring.h"

namespace [[gnu::visibility("default")]] hilt {

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
  /// Of the ring types: this rank's part of the plan, and so which rows it holds.
  ShardPlanPtr shard(Index heads, const Documents& documents = {}) const;
  /// The learned tensors of its score terms: slopes, relative, bias, sink.
  void visit_parameters(const std::string& at, const std::function<void(const std::string&, Tensor&)>& visit);
  const std::string& type() const { return type_; }             // the attention_type
  const AttentionOptions& options() const { return options_; }  // those of every call

 private:
  friend NamedAttention make_attention(const std::map<std::string, std::string>& config, const Comm& comm);
  PlanSpec spec(Index length, Index heads, const Documents& documents) const;
  std::string type_, order_ = "row";
  PlanSpec spec_;     // but for lengths and what is of a call
  Index length_ = 0;  // of all ranks; 0 for the types of one rank
  Transport transport_ = Transport::ring;
  Dealing dealing_ = Dealing::contiguous;
  Comm comm_;
  std::uint64_t seed_ = 0;
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
///                  transport = ring. More keys: length (tokens of all ranks), transport, shards (contiguous,
///                  balanced, auto)
/// Keys: attention_type, segment_lengths, dilation_rates (comma separated), order (as parse_order,
/// or `auto`), dilation_mode, causal, block_size, blocks, work_order (row, diagonal, hilbert,
/// auto), dropout, seed, scale, backward, strict; the score terms softcap, sink (true), and alibi,
/// relative and bias as read_term has them, with heads where one is learned. An unknown name or
/// key, or a key that the type does not read, is an error.
NamedAttention make_attention(const std::map<std::string, std::string>& config, const Comm& comm = Comm());

}  // namespace hilt
