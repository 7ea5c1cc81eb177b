#pragma once
#include <chrono>
#include <string>
#include <vector>

#include "log.h"

// Private to train: what one sees while it runs.

namespace train {

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

}  // namespace train
