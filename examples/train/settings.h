#pragma once
#include "../program/program.h"
#include "tasks/task.h"

// Private to train and sample: what one may ask for, and what follows from it.

namespace train {

using hilt::check, hilt::Code, hilt::fail, hilt::fail_with;

/// The options, under their names. Defaults are those of `stories`; others' are in their profiles.
struct Settings : hilt::AttentionSettings {
  Settings() { order = "hilbert", heads = 8; }
  std::string task = "stories", like = "gpt2", text, vocabulary = "characters", tokenizer, from, grid = "16x16";
  Index steps = 1300, layers = 2, width = 128, context = 192, batch = 8, accumulate = 1;
  double seconds = 0, lr = 2e-3, weight_decay = 0, clip = 1;
  std::string pattern_odd, positions = "rotary";
  bool checkpointing = false;
  std::string schedule = "cosine";
  Index warmup = 40, patience = 0;
  std::string dtype = "f32", device = "auto";
  Index ranks = 1, sequence_ranks = 1;
  std::string comm = "auto";
  std::string out = "";
  bool resume = false;
  Index keep = 3, save_every = 200, sample_every = 250, eval_every = 100, eval_rows = 64;
  bool dry_run = false;
  // Sampling.
  bool sample_only = false;
  std::string prompt, stop;
  double temperature = 0.8, top_p = 1;
  Index top_k = 0, tokens = 400;
  bool last = false;

  const Profile& profile() const;
  bool on_grid() const { return profile().on_grid; }
  std::string patterns() const { return pattern + (pattern_odd.empty() ? "" : " / " + pattern_odd); }
};

/// Whose an option is. A checkpoint keeps what is the model's or the run's; `sample` takes the
/// model's from there, --resume both. What is the call's no file decides.
inline constexpr const char *kModel = "The model", *kRun = "The run", *kCall = "This call";

void declare(program::Options& options, Settings& s);
/// Those of `sample`, which `train` has too.
void declare_sampling(program::Options& options, Settings& s);
/// What --from asks for.
hilt::Transformer read_weights(const Settings& s);
/// Its weights in `model`, whose kind it must be.
void take_weights(hilt::Transformer& model, hilt::Transformer theirs, const Settings& s);
/// Throws Code::not_a_number where a weight of a file is none, of those whose names begin so.
void check_finite(const hilt::SafetensorsFile& file, const std::string& prefix = "");
void adopt_defaults(program::Options& options, Settings& s);
/// Refuses what cannot be asked for in one call.
void check_settings(const program::Options& options, const Settings& s);
/// Refuses what no run can be, whoever says so: the options or a checkpoint.
void check_decided(const Settings& s);

/// The options that decide a run's numbers, by name: a checkpoint keeps them, a resumed run shares.
std::map<std::string, std::string> decisive(const program::Options& options, const Settings& s);

std::unique_ptr<Task> make_task(const Settings& s, const std::optional<Vocabulary>& vocabulary = std::nullopt);
/// A model of so many symbols.
hilt::TransformerConfig model_config(const Settings& s, Index symbols);
/// What besides options decides the numbers: blocks read from a file, an order that is forced.
hilt::SafetensorsMetadata identity_of(const hilt::TransformerConfig& config);
hilt::PlanPtr plan_of(const hilt::TransformerConfig& config, Index block = 0);
/// The order of the settings, or what the environment has put in its place.
std::string order_in_force(const Settings& s);
/// Throws Code::data where a checkpoint says otherwise; of what it does not say, nothing is known.
void check_identity(const hilt::Checkpoint& checkpoint, const hilt::SafetensorsMetadata& identity);
hilt::Schedule schedule_of(const Settings& s);
hilt::Grid board_of(const Settings& s);

}  // namespace train
