#pragma once
#include <future>
#include "tasks/task.h"

// Private to train: a model, its optimizer and how far they got. Prints nothing.

namespace train {

struct Update {
  double loss = 0, grad_norm = 0, lr = 0;
  bool stop = false;  // some rank wants to
  Index skipped = 0;  // batches before whose gradients were beyond f16
  double scale = 1;   // of the loss that was differentiated
};
struct Evaluation {
  double loss = 0;
  double right = 0;  // share of targets that the likeliest class hits
};

class Trainer {
 public:
  Trainer(const hilt::TransformerConfig& config, std::shared_ptr<const Task> task, std::uint64_t seed,
          hilt::DType dtype, const hilt::AdamW& adamw, hilt::Device device = {}, const hilt::RankGrid& grid = {})
      : Trainer(hilt::make_transformer(config, seed, dtype), std::move(task), seed, adamw, device, grid) {}
  Trainer(hilt::Transformer model, std::shared_ptr<const Task> task, std::uint64_t seed, const hilt::AdamW& adamw,
          hilt::Device device = {}, const hilt::RankGrid& grid = {});

  /// One update: `accumulate` micro-batches of `batch` rows. Throws Code::not_a_number, naming the
  /// first op whose result is not finite; that, and what else it throws before the update, leaves
  /// all as it was: is_whole(). In f16 a batch whose gradients overflow is left out, the loss's
  /// scale halved, and the next one taken; many good ones in a row double it.
  Update step(Index batch, Index accumulate, double lr, double clip, bool stop = false);
  Evaluation evaluate(Index rows, Index batch);
  Index steps() const { return optimizer_.steps(); }
  /// What there is now is what steps() updates made of it, and worth a checkpoint.
  bool is_whole() const { return whole_; }

  const hilt::Transformer& model() const { return model_; }
  Index parameters() { return hilt::parameter_count(model_); }

  /// Everything that decides what comes next: tensors by name, and counters.
  std::vector<hilt::SafetensorsItem> items();
  hilt::SafetensorsMetadata counters() const;
  void restore(const hilt::Checkpoint& checkpoint);

 private:
  /// What this rank has of a micro-batch, and its share of all targets.
  struct MicroBatch {
    hilt::RankGrid::Part part;
    double share;
  };
  /// Rows of the training split: from which on, how many at once, how many times.
  struct Asked {
    Index first = -1, batch = 0, accumulate = 0;
    friend bool operator==(const Asked&, const Asked&) = default;
  };
  std::future<std::vector<hilt::Batch>> fetch(const Asked& asked) const;
  /// One batch forward and back, and the update, unless the norm is not finite. Whether to stop.
  std::pair<double, bool> attempt(Index batch, Index accumulate, double lr, double clip, bool stop);
  bool is_scaled() const { return parameters_.front().tensor->dtype() == hilt::DType::f16; }
  void rescale(double by);
  void load(Index batch, Index accumulate);
  void pass(bool checked);
  [[noreturn]] void explain(double loss, const hilt::RandomKey& noise, const char* what_to_lower);
  hilt::RankGrid::Part part_of(const hilt::Batch& whole) const;

  hilt::Device device_;
  hilt::RankGrid grid_;
  std::shared_ptr<const Task> task_;
  hilt::Transformer model_;
  hilt::AdamWOptimizer optimizer_;
  double decay_;  // of weights, by each update and the rate: more than 2 of it makes them grow
  hilt::NamedParameters parameters_;
  hilt::Generator noise_;  // of dropout
  bool whole_ = true;
  double scale_ = 1;  // of the loss that is differentiated
  Index good_ = 0;    // updates since it changed
  Index rows_ = 0;    // of the training split that were seen: where the data stand

  Asked ahead_;  // what next_ will be: the rows of the next step
  std::future<std::vector<hilt::Batch>> next_;

  // The step under way. On a GPU these stay in place, because a step is recorded once.
  std::vector<MicroBatch> micro_batches_;
  hilt::Tensor loss_, norm_;  // scalars: the mean over this rank's targets, and the norm of the gradients
  hilt::Gradients gradients_;
  hilt::Replay replay_;
};

}  // namespace train
