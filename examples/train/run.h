#pragma once
#include <string>

#include "log.h"
#include "memory.h"
#include "sample.h"
#include "trainer.h"

// Private to train: the run itself, and what it leaves behind.

namespace train {

/// A control of life: the same training with another attention.
struct Control {
  std::string name, order, pattern;
  double flops = 0;  // of a step
  std::vector<Line> lines;
};

/// Where one head looks: a digit for each cell, 0 (below 1/64) to 5 (from 1/4 on); a dot where it
/// may not look.
struct AttentionMap {
  Index layer, head;
  std::string cells;
};
/// Of text a row for each of the last tokens, whose text is `text`; of a board where one cell
/// looks.
struct AttentionMaps {
  Index columns = 0, rows = 0, cell = -1;
  std::string text;
  std::vector<AttentionMap> maps;
};
/// A few heads of the first and the last block, on the first held-out row. width: of a board, else
/// 0.
AttentionMaps attention_maps(const hilt::Transformer& model, const Task& task, Index width);

/// What a page tells.
struct Story {
  const Settings& settings;
  const program::Options& options;
  Start start;
  MemoryPlan memory;
  std::size_t measured_bytes = 0;
  const std::vector<Line>& lines;
  std::vector<Control> controls;
  double flops = 0;             // of a step
  double exact_val_floor = -1;  // what the grammar pays on the rows of evaluations; below 0: unknown
  double held_out = -1;         // nats on them; below 0: the run ended early
  std::vector<std::pair<Index, std::string>> samples;  // by step
  AttentionMaps attention;
  std::string verdict;
};
std::string to_html(const Story& story);

/// Trains as the settings say, as one of the ranks of `met`; the exit status.
int run(const program::Options& options, Settings s, const hilt::Comm& met = {});

/// Nats a character that the grammar itself pays on the first rows of the validation split; -1 for
/// other tasks.
double exact_cost(const Settings& s, const Task& task, Index rows);
Start measure_start(const Settings& s, const Task& task, const hilt::TransformerConfig& config, hilt::Device device);
/// life: the same model with segments along the curve, and along rows: equally many keys for each
/// cell.
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
