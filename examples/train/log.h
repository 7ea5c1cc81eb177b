#pragma once
#include <string>
#include <vector>

#include "settings.h"

// Private to train: log.jsonl. The first line says what runs where; each line after it is a step.

namespace train {

struct Line {
  Index step = 0;
  double loss = 0, val_loss = -1, val_right = -1;  // below 0: not evaluated
  double lr = 0, grad_norm = 0, ms = 0, tokens_per_s = 0, gflops = 0;
  std::size_t bytes = 0;  // of tensors, at the worst moment so far
  bool best = false;      // of the evaluations so far
  Index skipped = 0;      // batches before, in f16
  double scale = 1;       // of the loss, in f16
};

/// What the first line says beside the options.
struct Start {
  std::string device;  // that computes: what `auto` came to
  double uniform = 0, unigram = 0, bigram = 0;
  double floor = -1, floor_without_memory = -1;  // below 0: unknown
  double peak_gflops = 0;
  Index parameters = 0, vocabulary = 0, tokens_per_step = 0;
};

class Log {
 public:
  /// Begins a log, or goes on with the one that is there, keeping its lines up to `after`.
  Log(const std::string& path, const program::Options& options, const Start& start, Index after);
  ~Log();
  Log(Log&&) = delete;  // nor copied
  /// Appends a line. Where the disk is full it is lost, which is said once; training goes on.
  void write(const Line& line);
  /// Makes what is written last.
  void sync() const;
  const std::vector<Line>& lines() const { return lines_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  bool lacks_lines_ = false;
  std::vector<Line> lines_;
};

}  // namespace train
