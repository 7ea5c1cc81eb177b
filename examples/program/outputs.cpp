// Files are written under hidden names and renamed together at the end, so a failed run leaves
// none.
#include "outputs.h"

#include <hilt/hilt.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace program {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail_file(const std::string& path, const std::string& why) {
  hilt::fail_with(hilt::Code::data, path, ": ", why, "; name a directory you may write to with --out");
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace

Outputs::Outputs(const std::string& name) : directory_(without_slash(name)) {
  const std::string& directory = directory_;
  std::error_code error;
  for (fs::path p = fs::absolute(directory, error); !error && !p.empty() && !fs::exists(p) && p != p.parent_path();
       p = p.parent_path())
    made_ = p;
  fs::create_directories(directory, error);
  const auto undo = [&](const std::string& why) {
    std::error_code ignored;
    if (!made_.empty()) fs::remove_all(made_, ignored);
    fail_file(directory, why);
  };
  if (error || !fs::is_directory(directory)) undo(error ? error.message() : "not a directory");
  const std::string probe = directory + "/.probe.tmp." + std::to_string(getpid());
  if (!std::ofstream(probe)) undo(std::strerror(errno));
  fs::remove(probe, error);
}

Outputs::~Outputs() {
  std::error_code ignored;
  for (const auto& [temporary, path] : staged_) fs::remove(temporary, ignored);
  // Directories made for nothing go again, innermost first; remove() leaves alone what is not
  // empty.
  for (fs::path p = fs::absolute(directory_, ignored); !made_.empty(); p = p.parent_path()) {
    if (!fs::remove(p, ignored) || p == fs::path(made_)) break;
  }
}

std::string Outputs::stage(const std::string& name) {
  const std::string path = directory_ + "/" + name;
  if (fs::is_directory(path)) fail_file(path, "a directory of that name is in the way");
  staged_.emplace_back(directory_ + "/." + name + ".tmp." + std::to_string(getpid()), path);
  return staged_.back().first;
}

void Outputs::write(const std::string& name, const std::string& content) {
  const std::string path = stage(name);
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  if (!file.flush()) fail_file(directory_ + "/" + name, std::strerror(errno));
}

void Outputs::commit() {
  for (const auto& [temporary, path] : staged_) {
    std::error_code error;
    fs::rename(temporary, path, error);
    if (error) fail_file(path, error.message());
  }
  staged_.clear();
  made_.clear();
}

}  // namespace program
