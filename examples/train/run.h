#pragma once
#include <cmath>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>
#include "../program/report/report.h"
#include "settings.h"

// Private to train and sample: what a run will need, its steps, the run itself, what one sees of
// it, what it leaves behind, and text from that.

namespace train {

using report::format, report::Json, report::number;

// ---- memory -------------------------------------------------------------------------------------
/// Bytes by kind: exact for what lasts, activations by formula, from what each op keeps.
struct MemoryPlan {
  double parameters = 0, gradients = 0, moments = 0;
  double activations = 0;  // kept between the passes
  double working = 0;      // beyond that, at the worst moment
  double plan = 0;         // of the attention plan: outside the counters of tensors
  bool is_whole = false;   // or without what attention takes beyond the least
  using Item = std::pair<std::string, double>;
  std::vector<Item> largest;  // single tensors, or sets of alike ones, descending
  double total() const { return parameters + gradients + moments + activations + working; }
};
/// Where more than `most` is needed without attention, its plan, which takes time, is not made.
MemoryPlan plan_memory(const Settings& s, const hilt::TransformerConfig& config, hilt::Device device = {},
                       double most = std::numeric_limits<double>::infinity());

Index count_parameters(const hilt::TransformerConfig& config);

/// Throws Code::memory where the plan needs more than `have`, with the five largest.
void require_memory(const MemoryPlan& plan, const Settings& s, double have);

// ---- a model, its optimizer and how far they got ------------------------------------------------
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

// ---- log.jsonl: the first line says what runs where; each line after it is a step ---------------
struct Line : Update {
  Index step = 0;
  double val_loss = -1, val_right = -1;  // below 0: not evaluated
  double ms = 0, tokens_per_s = 0, gflops = 0;
  std::size_t bytes = 0;  // of tensors, at the worst moment so far
  bool best = false;      // of the evaluations so far
};

/// What the first line says beside the options.
struct Start : Yardsticks {
  std::string device{}, out{};                   // what `auto`, and no --out, came to
  double floor = -1, floor_without_memory = -1;  // below 0: unknown
  double peak_gflops = 0;
  Index parameters = 0, vocabulary = 0, tokens_per_step = 0;
};

/// The first line; the report shows of it too.
Json first_line(const program::Options& options, const Start& start);

class Log {
 public:
  /// Begins a log, or goes on with the one that is there, keeping its lines up to `after`.
  Log(program::Outputs& outputs, const program::Options& options, const Start& start, Index after);
  ~Log();
  Log(Log&&) = delete;  // nor copied
  /// Appends a line. Where the disk is full it is lost, which is said once; training goes on.
  void write(const Line& line);
  /// Makes what is written last.
  void sync() const;
  /// The lines of all steps, read again: a long run keeps none of them in memory.
  std::vector<Line> lines() const;
  const Line& last() const { return last_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  bool lacks_lines_ = false;
  Line last_{};
};

// ---- while it runs ------------------------------------------------------------------------------
/// A line about the latest step: in place on a terminal; else at the first, evaluations and last.
class Progress {
 public:
  Progress(const Start& start, Index from);
  ~Progress();
  Progress(Progress&&) = delete;  // nor copied
  /// `steps`: of the whole run; 0 while nobody knows.
  void show(const Line& line, Index steps, bool last);
  /// Prints a line of its own, above.
  void say(const std::string& text);

 private:
  /// What a narrow terminal has no room for goes, and then whole fields from the right.
  enum Detail : unsigned char { all, some, least };
  struct Field {
    std::string text;
    Detail first = all, last = least;  // of the details that have it
  };
  std::vector<Field> fields_of(const Line& line, Index steps) const;
  static std::string joined(const std::vector<Field>& fields, Detail detail, std::size_t room);
  Start start_;
  Index from_;
  bool terminal_, color_, open_ = false;  // open_: a line stands without its end
  double val_loss_ = -1;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now(), shown_{};
};

// ---- the run ------------------------------------------------------------------------------------
/// Where a few heads of the first and the last block look, on the first held-out row: of text a row
/// for each of the last tokens, `text`; of a board, `width` cells wide, where one cell looks. Null
/// where nobody can tell.
Json attention_maps(const hilt::Transformer& model, const Task& task, Index width);

struct Story {
  const Settings& settings;
  const program::Options& options;
  Start start;
  MemoryPlan memory;
  std::size_t measured_bytes = 0;
  std::vector<Line> lines;
  double flops = 0;             // of a step
  double exact_val_floor = -1;  // what the best reader pays on the rows of the last one; below 0: unknown
  double held_out = -1;         // nats on them; below 0: the run ended early
  std::vector<std::pair<Index, std::string>> samples;  // by step
  std::string verdict;
  Json attention;  // attention_maps
};
std::string to_html(const Story& story);

/// Trains as the settings say, as one of the ranks of `met`; the exit status.
int run(const program::Options& options, Settings s, const hilt::Comm& met = {});

/// What the best possible reader loses, a target, on the first rows of the validation split.
Task::Exact exact_of(const Task& task, Index rows);
Start measure_start(const Settings& s, const Task& task, const hilt::TransformerConfig& config, hilt::Device device);
hilt::AdamW adamw_of(const Settings& s);

/// Prints what is about to be trained, with its memory, and warns of attention that is pointless.
void describe(const Settings& s, const hilt::TransformerConfig& config, const MemoryPlan& memory);
void warn(const std::string& text);
std::string next_commands(const Settings& s);
/// What goes on where this run stopped: `./run train --resume ..`.
std::string resume_command(const Settings& s);

// ---- samples and checkpoints --------------------------------------------------------------------
struct Sample {
  std::string text;  // with the prompt
  Index tokens = 0;  // drawn
};
/// Continues `prompt` by `s.tokens` tokens, or until it would write `s.stop`. The model sees the
/// first tokens of a row of its full context; when that is full, its older half is dropped (of
/// stories, whole ones). `show` gets the text piece by piece, in whole characters.
Sample sample_text(const hilt::Transformer& model, const Vocabulary& vocabulary, const Settings& s, hilt::RandomKey key,
                   const std::function<void(std::string_view)>& show = {});

/// An unseen board and what the model says of it, beside its targets.
std::string sample_board(const hilt::Transformer& model, const Task& task, const Settings& s, Index number);

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
