#pragma once
#include "settings.h"

// Private to train and sample: text from a model.

namespace train {

struct Sample {
  std::string text;  // with the prompt
  Index tokens = 0;  // drawn
};
/// Continues `prompt` by `s.tokens` tokens, or until it would write `s.stop`. The model sees the
/// first tokens of a row of its full context; when that is full, its older half is dropped (of
/// stories, whole ones). `show` gets the text piece by piece, in whole characters.
Sample sample_text(const hilt::Transformer& model, const Vocabulary& vocabulary, const Settings& s, hilt::RandomKey key,
                   const std::function<void(std::string_view)>& show = {});

/// Unseen rows and what the model says of them: a board beside its targets, or sixteen images.
std::string sample_labels(const hilt::Transformer& model, const Task& task, const Settings& s, Index number);

/// As it is, but on a terminal: what a model learned from bytes may be a command to one.
std::string for_a_terminal(const std::string& sample);

/// The first of out/train, out/train-2, .. that is not there.
std::string next_run();

/// Prints a sample from the best checkpoint in --out, or with --last from the newest.
int sample_from_checkpoint(const Settings& s);

/// Once the options of `train` are read: finds --out, takes a checkpoint's or the task's, checks.
void follow_up(program::Options& options, Settings& s);
/// Binds the few options of `train` that matter to `sample`; the rest is the checkpoint's.
void declare_sample(program::Options& options, Settings& s);

/// Fills the options that were not given from a checkpoint's: the model's; to resume, the run's
/// too, and those given must agree. Keys that no run of ours has written are refused.
void adopt_checkpoint(program::Options& options, Settings& s, const hilt::Checkpoint& checkpoint, bool to_resume);

/// f(), which takes a checkpoint at its word: what is wrong with that is the file's fault.
template <class F> void said_by(const hilt::Checkpoint& checkpoint, F&& f) try { f(); } catch (const hilt::Error& e) {
  if (e.code() != Code::usage) throw;
  fail_with(Code::data, checkpoint.path(), ": its metadata say ", e.what());
}

/// Throws Code::data where the checkpoint's tensors are not such a model's: before it is made.
void check_sizes(const hilt::TransformerConfig& config, const hilt::Checkpoint& checkpoint);

}  // namespace train
