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
  std::error_code error, looked;
  for (fs::path p = fs::absolute(directory, error);
       !error && !p.empty() && !fs::exists(p, looked) && p != p.parent_path(); p = p.parent_path())
    made_ = p;
  fs::create_directories(directory, error);
  std::string why;
  const std::string probe = directory + "/.probe.tmp." + std::to_string(getpid());
  if (error) why = error.message();
  else if (!fs::is_directory(directory, looked)) why = "not a directory";
  else if (!std::ofstream(probe)) why = std::strerror(errno);
  fs::remove(probe, looked);
  if (why.empty()) return;
  unmake();
  fail_file(directory, why);
}

// Innermost first; remove() leaves alone what is not empty: somebody else's, then.
void Outputs::unmake() const {
  std::error_code error;
  for (fs::path p = fs::absolute(directory_, error); !made_.empty() && !p.empty(); p = p.parent_path()) {
    fs::remove(p, error);
    if (error || p == fs::path(made_)) break;
  }
}

Outputs::~Outputs() {
  std::error_code ignored;
  for (const auto& [temporary, path] : staged_) fs::remove(temporary, ignored);
  unmake();  // directories made for nothing go again
}

std::string Outputs::stage(const std::string& name) {
  const std::string path = directory_ + "/" + name;
  std::error_code none;
  if (fs::is_directory(path, none)) fail_file(path, "a directory of that name is in the way");
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
