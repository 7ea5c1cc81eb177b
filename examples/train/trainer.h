#pragma once
#include <hilt/hilt.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tasks/task.h"

// Private to train: a model, its optimizer and how far they got. Knows nothing of files but what
// goes into a checkpoint, and prints nothing.

namespace train {

struct Step {
  double loss, grad_norm, lr;
  bool stop;  // some rank wants to
};
struct Evaluation {
  double loss = 0;
  double right = 0;  // share of targets that the likeliest class hits
};

class Trainer {
 public:
  Trainer(const hilt::TransformerConfig& config, std::shared_ptr<const Task> task, std::uint64_t seed,
          hilt::DType dtype, const hilt::AdamW& adamw, hilt::Device device = {}, const hilt::RankGrid& grid = {});

  /// One update: `accumulate` micro-batches of `batch` rows. Throws Code::not_a_number, naming the
  /// first op whose result is not finite, and leaves the parameters as they were. Whatever else it
  /// throws before the update, a text that cannot be read or a rank that is lost, leaves all as it
  /// was: is_whole().
  Step step(Index batch, Index accumulate, double lr, double clip, bool stop = false);
  /// On the first `rows` rows of the validation split.
  Evaluation evaluate(Index rows, Index batch);
  /// Updates made.
  Index steps() const { return optimizer_.steps(); }
  /// What there is now is what steps() updates made of it, and worth a checkpoint.
  bool is_whole() const { return whole_; }

  const hilt::Transformer& model() const { return model_; }
  const Task& task() const { return *task_; }
  Index parameters() { return hilt::parameter_count(model_); }

  /// Everything that decides what comes next: tensors by name, and counters.
  std::vector<hilt::SafetensorsItem> items();
  hilt::SafetensorsMetadata counters() const;
  /// Takes both from a checkpoint.
  void restore(const hilt::Checkpoint& checkpoint);

 private:
  /// What this rank has of a micro-batch, and its share of all targets.
  struct Rows {
    hilt::RankGrid::Part part;
    double share;
  };
  void load(Index batch, Index accumulate);
  void pass(bool checked);
  [[noreturn]] void explain(double loss, const hilt::RandomKey& noise, double clip);
  hilt::RankGrid::Part part_of(const hilt::Batch& whole) const;

  hilt::Device device_;
  hilt::RankGrid grid_;
  std::shared_ptr<const Task> task_;
  hilt::Transformer model_;
  hilt::AdamWOptimizer optimizer_;
  hilt::NamedParameters parameters_;
  hilt::Generator noise_;  // of dropout
  bool whole_ = true;
  Index rows_ = 0;  // of the training split that were seen: where the data stand

  // Of the step under way. On a GPU they stay in place, for a step is recorded once.
  std::vector<Rows> micro_batches_;
  hilt::Tensor loss_, norm_;  // scalars: the mean over this rank's targets, and the norm of the gradients
  hilt::Gradients gradients_;
  hilt::Replay replay_;
};

}  // namespace train
