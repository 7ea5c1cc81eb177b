#pragma once
#include "attention.h"
#include "optimizer.h"

namespace [[gnu::visibility("default")]] hilt {

struct Batch {                 // what a training step reads
  Tensor inputs{}, targets{};  // i32 [rows, length]; a target of -100 does not count
};

/// Training over data x sequence ranks: each group of `sequence` ranks holds the rows of some
/// sequences, and every rank the whole model. All numbers are those of one rank to rounding.
class RankGrid {
 public:
  RankGrid() = default;
  /// Ranks next to each other share sequences. `sequence` divides world.size().
  RankGrid(const Comm& world, int sequence);

  const Comm& world() const { return world_; }                         // all ranks
  int sequence_ranks() const { return sequence_.size(); }              // ranks that share a sequence
  int data_ranks() const { return world_.size() / sequence_.size(); }  // groups of those
  bool is_first() const { return world_.rank() == 0; }                 // the rank that prints and writes

  struct Part {  // this rank's part of a batch of whole sequences, and where it stands
    Batch batch{};
    Place place{};
  };
  /// This rank's part of a batch that each rank has whole.
  Part part_of(const Batch& whole, const HilbertSelfAttention& attention) const;

  std::vector<double> sum(const std::vector<double>& values) const;  // what every rank has, added
  /// The gradients of these parameters, added over ranks.
  Gradients sum(Gradients gradients, const NamedParameters& parameters) const;

 private:
  Comm world_, sequence_;
};

Index count_targets(const Tensor& targets);  // targets that count

}  // namespace hilt
