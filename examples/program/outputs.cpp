// Files are written under hidden names and renamed at the end: a failed run leaves none.
#include "program.h"
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>

namespace program {
namespace fs = std::filesystem;

constexpr const char* kUnfinished = ".hilt.tmp.";  // stands in the names of files that are not whole

static std::string unfinished(const std::string& directory, const std::string& name) {
  return directory + "/." + name + kUnfinished + std::to_string(getpid());
}

[[noreturn]] static void fail_file(const std::string& path, const std::string& why) {
  hilt::fail_with(hilt::Code::data, path, ": ", why, "; name a directory you may write to with --out");
}

/// Makes a file's content, or the names in a directory, last: the latter where the system can.
static void sync(const fs::path& path) {
  const int d = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool done = d >= 0 && ::fsync(d) == 0;
  const int error = errno;
  if (d >= 0) ::close(d);
  if (!done && !fs::is_directory(path)) fail_file(path, std::strerror(error));
}

Outputs::Outputs(const std::string& directory) : directory_(directory) {
  std::signal(SIGPIPE, SIG_IGN);  // files are worth more than words: `attend | head` writes them
  while (directory_.size() > 1 && directory_.back() == '/') directory_.pop_back();
  std::error_code error, looked;
  for (fs::path p = fs::absolute(directory_, error); p.has_relative_path() && !fs::exists(p, looked);
       p = p.parent_path())
    made_.push_back(p);
  fs::create_directories(directory_, error);
  try {
    if (error) fail_file(directory_, error.message());
    if (!fs::is_directory(directory_, looked)) fail_file(directory_, "not a directory");
    lock_.emplace(directory_);
    for (const fs::directory_entry& entry : fs::directory_iterator(directory_)) {
      const std::string found = entry.path().filename().string();
      if (found.starts_with('.') && found.find(kUnfinished) != found.npos) fs::remove(entry.path(), looked);
    }
    const std::string probe = unfinished(directory_, "probe");
    if (!std::ofstream(probe)) fail_file(directory_, std::strerror(errno));
    fs::remove(probe, looked);
  } catch (...) {
    lock_.reset();
    unmake();
    throw;
  }
  for (const fs::path& p : made_) sync(p.parent_path());
}

// remove() leaves what is not empty; a directory that somebody locked is theirs.
void Outputs::unmake() const {
  std::error_code error;
  for (const fs::path& p : made_) {
    const int d = ::open(p.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool free = d >= 0 && ::flock(d, LOCK_EX | LOCK_NB) == 0;
    if (free) fs::remove(p, error);
    if (d >= 0) ::close(d);
    if (!free || error) break;
  }
}

Outputs::~Outputs() {
  std::error_code ignored;
  for (const auto& [temporary, path] : staged_) fs::remove(temporary, ignored);
  lock_.reset();
  unmake();  // directories made for nothing go again
}

std::string Outputs::stage(const std::string& name) {
  const std::string path = directory_ + "/" + name;
  std::error_code none;
  if (fs::is_directory(path, none)) fail_file(path, "a directory of that name is in the way");
  staged_.emplace_back(unfinished(directory_, name), path);
  return staged_.back().first;
}

void Outputs::write(const std::string& name, const std::string& content) {
  const std::string path = stage(name);
  std::ofstream file(path, std::ios::binary);
  if (file << content << std::flush) return;
  const std::string why = std::strerror(errno);
  std::error_code ignored;
  fs::remove(path, ignored), staged_.pop_back();  // what is committed later is without it
  fail_file(directory_ + "/" + name, why);
}

void Outputs::commit() {
  for (const auto& [temporary, path] : staged_) sync(temporary);
  if (staged_.empty()) return;
  for (; !staged_.empty(); staged_.erase(staged_.begin())) {  // one that has its name is staged no longer
    const auto& [temporary, path] = staged_.front();
    std::error_code error;
    fs::rename(temporary, path, error);
    if (error) fail_file(path, error.message());
  }
  sync(directory_), made_.clear();
}

}  // namespace program
