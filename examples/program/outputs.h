#pragma once
#include <string>
#include <utility>
#include <vector>

// Private to examples/: the files a program leaves behind, all of them or none.

namespace program {

/// A directory to write to. Files take their names only in commit(); until then there is nothing.
class Outputs {
 public:
  /// Makes the directory if it is missing; throws if files cannot be made in it.
  explicit Outputs(const std::string& directory);
  ~Outputs();
  Outputs(Outputs&&) = delete;  // nor copied

  const std::string& directory() const { return directory_; }
  /// Where to write what will be called `name`.
  std::string stage(const std::string& name);
  void write(const std::string& name, const std::string& content);
  void commit();

 private:
  void unmake() const;
  std::string directory_, made_;                             // made_: the first directory that was not there
  std::vector<std::pair<std::string, std::string>> staged_;  // temporary path, final path
};

}  // namespace program
