#pragma once
#include "../../../core/dtype.h"
#include "../plan/plan.h"

// A plan divided over ranks: who owns which rows, what each computes, and which rows travel.

namespace [[gnu::visibility("default")]] hilt {

/// Chunk i is positions [cut[i], cut[i + 1]), of rank owner[i], whose rows are its chunks in order.
struct Shards {
  int ranks = 1;               // how many
  std::vector<Index> cut{};    // one more than chunks
  std::vector<int> owner{};    // one a chunk
  Index rows(int rank) const;  // positions that a rank owns
  /// The positions of a rank's rows.
  std::vector<std::int32_t> positions(int rank) const;
};
/// One run a rank, as even as possible, cut where the longest segments that fit need not travel.
Shards contiguous_shards(const Plan& plan, int ranks);
/// `chunks_each` runs a rank, the most expensive first to the least busy: for uneven masks.
Shards balanced_shards(const Plan& plan, int ranks, Index chunks_each = 8);
/// Contiguous, unless some rank then has a tenth more work than with balanced ones.
Shards choose_shards(const Plan& plan, int ranks);
/// The most tile work of any rank over the mean. 1 is even.
double imbalance(const Plan& plan, const Shards& shards);

/// How rows travel to the ranks that need them. The results differ by rounding alone.
enum class Transport : unsigned char {
  ring,    // rank after rank: the next rows travel while those that are here are attended to
  gather,  // all at once, then attended to at once
};
Transport parse_transport(std::string_view text);
std::string_view name_of(Transport transport);

/// A rank's part of a plan. It attends in stages: first to its own keys, then to those that it
/// receives. Only rows that someone attends to travel, straight from their owner and back.
class ShardPlan {
 public:
  /// Rows to or from one rank. rows: which are sent, or where received ones lie; empty: [0, count).
  struct Parcel {
    int peer{};                        // the other rank
    Index count{};                     // how many
    std::vector<std::int32_t> rows{};  // see above
  };
  /// Keys that are attended to together.
  struct Stage {
    std::vector<Parcel> send{}, receive{};  // one a peer
    Index keys = 0;                         // rows of the keys attended to in this stage
    std::vector<PlanPart> parts{};          // those of the plan, cut down to this rank's queries and these keys
  };

  /// The same plan on every rank; its rows must be positions (in_order), or tokens with documents.
  ShardPlan(PlanPtr plan, Shards shards, int rank, Transport transport = Transport::ring);

  const Plan& plan() const { return *plan_; }
  const Shards& shards() const { return shards_; }
  int rank() const { return rank_; }  // this one
  Transport transport() const { return transport_; }
  /// Rows of this rank, and the token that each is.
  Index length() const { return length_; }
  std::vector<std::int32_t> tokens() const { return tokens_of(rank_); }  // of this rank
  std::vector<std::int32_t> tokens_of(int rank) const;                   // of any rank
  const std::vector<Stage>& stages() const { return stages_; }           // the own keys first

  /// Bytes that this rank will send.
  struct Bytes {
    std::size_t forward = 0, backward = 0;  // of each pass
  };
  Bytes bytes_sent(Index batch, Index kv_heads, Index dim, DType dtype) const;  // for tensors of these sizes

 private:
  PlanPtr plan_;
  Shards shards_;
  int rank_;
  Transport transport_;
  Index length_ = 0;
  std::vector<Stage> stages_;
};
using ShardPlanPtr = std::shared_ptr<const ShardPlan>;

/// How the positions of a plan are dealt out.
enum class Dealing : unsigned char { contiguous, balanced, automatic };
Dealing parse_dealing(std::string_view text);
/// Builds a rank's part of the plan for a spec, or finds it among those used last. Rows become
/// positions, dealt out as for the pattern `dealt_by`, where one is named. Safe from any thread.
ShardPlanPtr make_shard_plan(PlanSpec spec, int ranks, int rank, Transport transport = Transport::ring,
                             Dealing dealing = Dealing::automatic, const Pattern& dealt_by = {});

}  // namespace hilt
