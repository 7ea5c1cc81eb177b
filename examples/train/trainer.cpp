#include "trainer.h"

#include <algorithm>
#include <cmath>

namespace train {

using hilt::Tensor;

namespace {

constexpr std::uint64_t kNoiseSeed =
    0x6e6f697365;  // keeps dropout's numbers apart from those of weights and rows

}  // namespace

Trainer::Trainer(const hilt::TransformerConfig& config, std::shared_ptr<const hilt::Task> task,
                 std::uint64_t seed, hilt::DType dtype, const hilt::AdamW& adamw, hilt::Device device,
                 const hilt::RankGrid& grid)
    : device_(device),
      grid_(grid),
      task_(std::move(task)),
      model_(hilt::make_transformer(config, seed, dtype)),
      optimizer_(adamw),
      parameters_(hilt::parameters_of(model_)),
      noise_(seed ^ kNoiseSeed) {
  for (const hilt::NamedParameter& p : parameters_) *p.tensor = hilt::moved(*p.tensor, device_);
  optimizer_.prepare(parameters_);
}

hilt::RankGrid::Part Trainer::part_of(const hilt::Batch& whole) const {
  return grid_.part_of(whole, model_.blocks.front().attention);
}

// `checked`: under a tape that looks at every result. The mean over all targets is, of each rank, the mean over its own times their share; gradients
// of such losses add up over ranks.
Trainer::Pass Trainer::pass(Index batch, Index accumulate, bool checked, bool& stop) {
  Pass out{};
  for (Index i = 0; i < accumulate; ++i) {
    const hilt::Batch rows = task_->batch(hilt::Split::train, rows_, batch);
    rows_ += batch;
    const hilt::RankGrid::Part part = part_of(rows);
    const double share = grid_.world().size() == 1 ? 1
                                                   : static_cast<double>(hilt::count_targets(part.batch.targets)) /
                                                         static_cast<double>(hilt::count_targets(rows.targets));
    hilt::Tape tape({.check_finite = checked});
    hilt::watch_parameters(tape, model_);
    Tensor loss = model_.loss(part.batch.inputs, part.batch.targets, {.noise = &noise_, .place = &part.place});
    if (share != 1) loss = hilt::mul(loss, share);
    hilt::Gradients gradients = tape.backward(loss);
    if (i == 0)
      out.gradients = std::move(gradients);
    else
      out.gradients += gradients;
    out.loss += loss.item() / static_cast<double>(accumulate);  // last: a GPU is waited for here
  }
  out.gradients = grid_.sum(hilt::mean_of(std::move(out.gradients), parameters_, accumulate), parameters_);
  const std::vector<double> total = grid_.sum({out.loss, stop ? 1.0 : 0.0});
  out.loss = total[0], stop = total[1] > 0;
  return out;
}

Step Trainer::step(Index batch, Index accumulate, double lr, double clip, bool stop) {
  const Index rows = rows_;
  const hilt::RandomKey noise = noise_.state();
  double norm = std::nan("");
  std::string why;
  Pass p = pass(batch, accumulate, false, stop);
  try {
    if (std::isfinite(p.loss)) norm = hilt::clip_grad_norm(p.gradients, parameters_, clip);
  } catch (const hilt::Error& e) {
    if (e.code() != hilt::Code::not_a_number) throw;
    why = e.what();
  }
  if (!std::isfinite(norm)) {  // once more, looking where it begins
    rows_ = rows, noise_.set_state(noise);
    for (const hilt::NamedParameter& parameter : parameters_)
      if (!std::isfinite(hilt::global_norm(std::span(parameter.tensor, 1)))) {
        why = "parameter " + parameter.name + " is not finite after update " + std::to_string(steps());
        break;
      }
    try {
      if (why.empty() || why.starts_with("clip")) pass(batch, accumulate, true, stop);
    } catch (const hilt::Error& e) {
      why = e.what();
    }
    rows_ = rows, noise_.set_state(noise);
    hilt::fail_with(hilt::Code::not_a_number, "loss (", p.loss, "): not finite at step ", steps() + 1, ": ",
                    why, "; lower --lr, or set --clip 1");
  }
  optimizer_.step(parameters_, p.gradients, lr);
  return {p.loss, norm, lr, stop};
}

Evaluation Trainer::evaluate(Index rows, Index batch) {
  const hilt::Tape::Pause pause;
  Evaluation out;
  std::vector<double> sums(3);  // of losses, of targets that were hit, of targets
  for (Index first = 0; first < rows; first += batch) {
    const Index count = std::min(batch, rows - first);
    const hilt::RankGrid::Part part = part_of(task_->batch(hilt::Split::validation, first, count));
    const Tensor logits = model_.logits(part.batch.inputs, {.place = &part.place});
    const double targets = static_cast<double>(hilt::count_targets(part.batch.targets));
    sums[0] += hilt::cross_entropy(logits, hilt::moved(part.batch.targets, device_)).item() * targets;
    const std::vector<Index> guess = hilt::argmax(logits).to_vector<Index>(), target = part.batch.targets.to_vector<Index>();
    for (std::size_t i = 0; i < guess.size(); ++i) sums[1] += guess[i] == target[i];
    sums[2] += targets;
  }
  sums = grid_.sum(sums);
  out.loss = sums[0] / sums[2];
  out.right = sums[1] / sums[2];
  return out;
}

std::vector<hilt::SafetensorsItem> Trainer::items() {
  std::vector<hilt::SafetensorsItem> out;
  for (const hilt::NamedParameter& p : parameters_) out.push_back({"model." + p.name, *p.tensor});
  optimizer_.visit_state([&](const std::string& name, Tensor& t) {
    out.push_back({"optimizer." + name, t});
  });
  return out;
}

hilt::SafetensorsMetadata Trainer::counters() const {
  const hilt::RandomKey noise = noise_.state();
  return {{"updates", std::to_string(steps())},
          {"rows", std::to_string(rows_)},
          {"noise.seed", std::to_string(noise.seed)},
          {"noise.stream", std::to_string(noise.stream)},
          {"vocabulary", task_->vocabulary().text()}};
}

void Trainer::restore(const hilt::Checkpoint& checkpoint) {
  std::vector<hilt::SafetensorsItem> all = items();  // copies share the tensors
  for (hilt::SafetensorsItem& item : all) item.tensor = hilt::moved(item.tensor, {});
  checkpoint.read(all);
  if (device_.is_cuda()) {
    std::vector<hilt::SafetensorsItem> there = items();
    for (std::size_t i = 0; i < all.size(); ++i) hilt::copy(there[i].tensor, hilt::moved(all[i].tensor, device_));
  }
  optimizer_.set_steps(static_cast<Index>(checkpoint.get_number("updates")));
  rows_ = static_cast<Index>(checkpoint.get_number("rows"));
  noise_.set_state({checkpoint.get_number("noise.seed"), checkpoint.get_number("noise.stream")});
}

}  // namespace train
