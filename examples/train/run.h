#pragma once
#include <cmath>
#include <limits>
#include "../program/outputs.h"
#include "../program/report/page.h"
#include "../program/report/text.h"
#include "sample.h"
#include "trainer.h"

// Private to train: what a run will need, the run itself, what one sees of it, and what it leaves
// behind.

namespace train {

using report::format, report::Json, report::number;

// ---- memory -------------------------------------------------------------------------------------
/// Bytes by kind: exact for what lasts, activations by formula, from what each op keeps.
struct MemoryPlan {
  std::size_t parameters = 0, gradients = 0, moments = 0;
  std::size_t activations = 0;  // kept between the passes
  std::size_t working = 0;      // beyond that, at the worst moment
  std::size_t plan = 0;         // of the attention plan: outside the counters of tensors
  bool is_whole = false;        // or without what attention takes beyond the least
  struct Part {
    std::string name;
    std::size_t bytes;
  };
  std::vector<Part> largest;  // single tensors, or sets of alike ones, descending
  std::size_t total() const;  // or the most that 64 bits hold
};
/// Where more than `most` is needed without attention, its plan, which takes time, is not made.
MemoryPlan plan_memory(const Settings& s, const hilt::TransformerConfig& config, hilt::Device device = {},
                       std::size_t most = std::numeric_limits<std::size_t>::max());

Index count_parameters(const hilt::TransformerConfig& config);

/// Throws Code::memory where the plan needs more than `have`, with the five largest.
void require_memory(const MemoryPlan& plan, const Settings& s, std::size_t have);

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
  Log(const program::Outputs& outputs, const program::Options& options, const Start& start, Index after);
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
  enum class Detail : unsigned char { all, some, least };
  std::vector<std::string> fields_of(const Line& line, Index steps, Detail detail) const;
  Start start_;
  Index from_;
  bool terminal_, color_, open_ = false;  // open_: a line stands without its end
  double val_loss_ = -1;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now(), shown_{};
};

// ---- the run ------------------------------------------------------------------------------------
/// The last evaluation, and what the best reader pays on the same rows; below 0: unknown.
struct Score : Evaluation {
  double floor = -1;
  double excess() const { return floor >= 0 ? loss - floor : loss; }
};
struct Control {
  std::string name, order, pattern, pattern_odd;
  double flops = 0;           // of a step
  std::vector<Line> lines;    // of the first seed
  std::vector<Score> scores;  // by seed
  Score mean() const;
};
/// How far one control is above another, seed by seed.
struct Difference {
  std::string name;
  double mean, spread;                                            // spread: the standard deviation over seeds
  bool is_larger() const { return std::abs(mean) > 2 * spread; }  // than the spread, twice over
};
std::vector<Difference> differences_of(const std::vector<Control>& controls);
/// Both in lines; what is right are `target`s.
std::string in_words(const std::vector<Control>& controls, const std::string& target);

/// Where a few heads of the first and the last block look, on the first held-out row, as levels of
/// cells: of text a row for each of the last tokens, `text`; of a board, `width` cells wide, where
/// one cell looks. Null where nobody can tell.
Json attention_maps(const hilt::Transformer& model, const Task& task, Index width);

struct Story {
  const Settings& settings;
  const program::Options& options;
  Start start;
  MemoryPlan memory;
  std::size_t measured_bytes = 0;
  std::vector<Line> lines;
  std::vector<Control> controls;
  double flops = 0;             // of a step
  double exact_val_floor = -1;  // what the best reader pays on the rows of the last one; below 0: unknown
  double held_out = -1;         // nats on them; below 0: the run ended early
  std::vector<std::pair<Index, std::string>> samples;  // by step
  std::string verdict;
};
std::string to_html(const Story& story, const Json& attention);

/// Trains as the settings say, as one of the ranks of `met`; the exit status.
int run(const program::Options& options, Settings s, const hilt::Comm& met = {});

/// What the best possible reader loses, a target, on the first rows of the validation split.
Task::Exact exact_of(const Task& task, Index rows);
Start measure_start(const Settings& s, const Task& task, const hilt::TransformerConfig& config, hilt::Device device);
/// The same model with segments along curve and rows and 2-D windows: equally many keys a cell.
std::vector<Control> train_controls(const Settings& s, std::shared_ptr<const Task> task, hilt::Device device);
hilt::AdamW adamw_of(const Settings& s);

/// Prints what is about to be trained, with its memory, and warns of attention that is pointless.
void describe(const Settings& s, const hilt::TransformerConfig& config, const MemoryPlan& memory);
void warn(const std::string& text);
std::string next_commands(const Settings& s);
/// What goes on where this run stopped: `./run train --resume ..`.
std::string resume_command(const Settings& s);

/// SIGINT, SIGTERM and SIGHUP ask politely: interrupted() turns true. SIGINT after any of them ends
/// the process at once; a terminal that goes away says so twice.
void catch_interrupts();
bool interrupted();

}  // namespace train
