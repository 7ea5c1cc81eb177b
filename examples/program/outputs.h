#pragma once
#include <hilt/hilt.h>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// Private to examples/: the files a program leaves behind, all of them or none.

namespace program {

/// A directory to write to, for one program at a time. Files take their names only in commit();
/// until then there is nothing.
class Outputs {
 public:
  /// Makes the directory if it is missing; throws if another program writes to it, or none can.
  /// What killed programs left of their files goes.
  explicit Outputs(const std::string& directory);
  ~Outputs();
  Outputs(Outputs&&) = delete;  // nor copied

  const std::string& directory() const { return directory_; }
  /// Where nobody looks before `name` is whole.
  std::string unfinished(const std::string& name) const;
  /// Where to write what will be called `name`.
  std::string stage(const std::string& name);
  void write(const std::string& name, const std::string& content);
  void commit();
  void check_there() const { lock_->check_there(); }

 private:
  void unmake() const;
  std::string directory_, made_;                             // made_: the first directory that was not there
  std::optional<hilt::DirectoryLock> lock_;                  // while this lives
  std::vector<std::pair<std::string, std::string>> staged_;  // temporary path, final path
};

}  // namespace program
