// Divides a batch over data x sequence ranks, and adds up losses and gradients, in buckets.
#include "nn/ranks.h"

namespace hilt {

constexpr Index kBucket = Index{1} << 22;  // elements that are added up in one exchange

RankGrid::RankGrid(const Comm& world, int sequence) : world_(world) {
  check(sequence >= 1 && world.size() % sequence == 0, "RankGrid: ", sequence, " ranks a sequence do not divide ",
        world.size(), " ranks");
  if (world.size() > 1) sequence_ = world.split(world.rank() / sequence, world.rank());
}

RankGrid::Part RankGrid::part_of(const Batch& whole, const HilbertSelfAttention& attention) const {
  const Index rows = whole.inputs.dim(0);
  const auto group = static_cast<Index>(world_.rank() / sequence_.size()), groups = static_cast<Index>(data_ranks());
  const Index first = rows * group / groups, last = rows * (group + 1) / groups;
  Part part{{slice(whole.inputs, 0, first, last), slice(whole.targets, 0, first, last)},
            {sequence_, first, whole.inputs.dim(1)}};
  if (!part.place.divides()) return part;
  const ShardPlanPtr shard = attention.shard(part.place);
  for (Tensor* x : {&part.batch.inputs, &part.batch.targets}) *x = rows_of_rank(*x, *shard, shard->rank());
  return part;
}

std::vector<double> RankGrid::sum(const std::vector<double>& values) const {
  if (world_.size() == 1) return values;
  return world_.sum(from_values(values, {std::ssize(values)}), {"sum of losses"}).to_vector<double>();
}

Gradients RankGrid::sum(Gradients gradients, const NamedParameters& parameters) const {
  if (world_.size() == 1) return gradients;
  const Tape::Pause pause;
  std::vector<Tensor> bucket, of;  // flat gradients, and whose they are
  Index elements = 0;
  const auto flush = [&] {
    if (bucket.empty()) return;
    const Tensor total = world_.sum(cat(bucket, 0), {"sum of gradients"});
    Index at = 0;
    for (const Tensor& p : of) {
      gradients.set(p, reshape(slice(total, 0, at, at + p.numel()), p.shape()));
      at += p.numel();
    }
    bucket.clear(), of.clear(), elements = 0;
  };
  for (const NamedParameter& p : parameters) {
    if (!gradients.has(*p.tensor)) continue;
    if (!bucket.empty() && (elements + p.tensor->numel() > kBucket || bucket[0].dtype() != p.tensor->dtype())) flush();
    bucket.push_back(reshape(gradients[*p.tensor], {p.tensor->numel()}));
    of.push_back(*p.tensor);
    elements += p.tensor->numel();
  }
  flush();
  return gradients;
}

Index count_targets(const Tensor& targets) {
  const std::vector<Index> all = targets.to_vector<Index>();
  return std::ranges::count_if(all, [](Index t) { return t != -100; });
}

}  // namespace hilt
