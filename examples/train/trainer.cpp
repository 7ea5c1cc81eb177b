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
                 std::uint64_t seed, hilt::DType dtype, const hilt::AdamW& adamw)
    : task_(std::move(task)),
      model_(hilt::make_transformer(config, seed, dtype)),
      optimizer_(adamw),
      parameters_(hilt::parameters_of(model_)),
      noise_(seed ^ kNoiseSeed) {
  optimizer_.prepare(parameters_);
}

// `checked`: under a tape that looks at every result.
Trainer::Pass Trainer::pass(Index batch, Index accumulate, bool checked) {
  Pass out{};
  for (Index i = 0; i < accumulate; ++i) {
    const hilt::Batch rows = task_->batch(hilt::Split::train, rows_, batch);
    rows_ += batch;
    hilt::Tape tape({.check_finite = checked});
    hilt::watch_parameters(tape, model_);
    const Tensor loss = model_.loss(rows.inputs, rows.targets, {.noise = &noise_});
    out.loss += loss.item() / static_cast<double>(accumulate);
    hilt::Gradients gradients = tape.backward(loss);
    if (i == 0)
      out.gradients = std::move(gradients);
    else
      out.gradients += gradients;
  }
  out.gradients = hilt::mean_of(std::move(out.gradients), parameters_, accumulate);
  return out;
}

Step Trainer::step(Index batch, Index accumulate, double lr, double clip) {
  const Index rows = rows_;
  const hilt::RandomKey noise = noise_.state();
  double norm = std::nan("");
  std::string why;
  Pass p = pass(batch, accumulate, false);
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
      if (why.empty() || why.starts_with("clip")) pass(batch, accumulate, true);
    } catch (const hilt::Error& e) {
      why = e.what();
    }
    rows_ = rows, noise_.set_state(noise);
    hilt::fail_with(hilt::Code::not_a_number, "loss (", p.loss, "): not finite at step ", steps() + 1, ": ",
                    why, "; lower --lr, or set --clip 1");
  }
  optimizer_.step(parameters_, p.gradients, lr);
  return {p.loss, norm, lr};
}

Evaluation Trainer::evaluate(Index rows, Index batch) {
  const hilt::Tape::Pause pause;
  Evaluation out;
  double right = 0;
  for (Index first = 0; first < rows; first += batch) {
    const Index count = std::min(batch, rows - first);
    const hilt::Batch b = task_->batch(hilt::Split::validation, first, count);
    const Tensor logits = model_.logits(b.inputs);
    out.loss += hilt::cross_entropy(logits, b.targets).item() * static_cast<double>(count);
    const Tensor best = hilt::argmax(logits);
    const std::int64_t* const guess = best.data<std::int64_t>();
    const std::int32_t* const target = b.targets.data<std::int32_t>();
    for (Index i = 0; i < b.targets.numel(); ++i) right += guess[i] == target[i];
  }
  out.loss /= static_cast<double>(rows);
  out.right = right / static_cast<double>(rows * task_->length());
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
  checkpoint.read(all);
  optimizer_.set_steps(static_cast<Index>(checkpoint.get_number("updates")));
  rows_ = static_cast<Index>(checkpoint.get_number("rows"));
  noise_.set_state({checkpoint.get_number("noise.seed"), checkpoint.get_number("noise.stream")});
}

}  // namespace train
