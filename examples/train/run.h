#pragma once
#include <cmath>
#include <string>

#include "log.h"
#include "memory.h"
#include "sample.h"
#include "trainer.h"

// Private to train: the run itself, and what it leaves behind.

namespace train {

/// The last evaluation, and what the best reader pays on the same rows; below 0: unknown.
struct Score {
  double loss = 0, right = 0, floor = -1;
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

/// Where one head looks: a digit a cell, 0 (below 1/64) to 5 (from 1/4 on); a dot: it may not.
struct AttentionMap {
  Index layer, head;
  std::string cells;
};
/// Of text a row for each of the last tokens, `text`; of a board where one cell looks.
struct AttentionMaps {
  Index columns = 0, rows = 0, cell = -1;
  std::string text;
  std::vector<AttentionMap> maps;
};
/// A few heads of the first and the last block, on the first held-out row. width: a board's, or 0.
AttentionMaps attention_maps(const hilt::Transformer& model, const Task& task, Index width);

struct Story {
  const Settings& settings;
  const program::Options& options;
  Start start;
  MemoryPlan memory;
  std::size_t measured_bytes = 0;
  const std::vector<Line>& lines;
  std::vector<Control> controls;
  double flops = 0;             // of a step
  double exact_val_floor = -1;  // what the best reader pays on the rows of the last one; below 0: unknown
  double held_out = -1;         // nats on them; below 0: the run ended early
  std::vector<std::pair<Index, std::string>> samples;  // by step
  AttentionMaps attention;
  std::string verdict;
};
std::string to_html(const Story& story);

/// Trains as the settings say, as one of the ranks of `met`; the exit status.
int run(const program::Options& options, Settings s, const hilt::Comm& met = {});

/// Of the best reader, a target: on the first rows of the validation split.
Task::Exact exact_of(const Task& task, Index rows);
Start measure_start(const Settings& s, const Task& task, const hilt::TransformerConfig& config, hilt::Device device);
/// The same model with segments along curve and rows and 2-D windows: equally many keys a cell.
std::vector<Control> train_controls(const Settings& s, std::shared_ptr<const Task> task, hilt::Device device);
hilt::AdamW adamw_of(const Settings& s);

/// Prints what is about to be trained, with its memory, and warns of attention that is pointless.
void describe(const Settings& s, const hilt::TransformerConfig& config, const MemoryPlan& memory);
void warn(const std::string& text);
std::string next_commands(const Settings& s);

/// SIGINT, SIGTERM and SIGHUP ask politely: interrupted() turns true. SIGINT after any of them ends
/// the process at once; a terminal that goes away says so twice.
void catch_interrupts();
bool interrupted();

}  // namespace train
