#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include "task.h"

// Private to the tasks on texts: a file that is read piece by piece, and must not change meanwhile.

namespace train {

inline constexpr Index kPiece = Index{1} << 20;  // bytes read at once
inline constexpr const char* kStays = "it must stay as it is for as long as it is trained on";

class File {
 public:
  explicit File(const std::string& path, const char* option = "--text")
      : what_(std::string(option) + " (" + path + ")"),
        descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (descriptor_ < 0) bad("cannot open: ", std::strerror(errno));
    struct stat status {};
    const bool known = ::fstat(descriptor_, &status) == 0;
    if (!known || !S_ISREG(status.st_mode)) {
      ::close(descriptor_);
      bad(!known                    ? "cannot look at it"
          : S_ISDIR(status.st_mode) ? "is a directory; expected a text"
                                    : "is not a regular file; expected a text");
    }
    char byte = 0;  // of files that the system makes as they are read, nobody knows the size
    if (status.st_size == 0 && ::read(descriptor_, &byte, 1) == 1) {
      ::close(descriptor_);
      bad("has no size, as files in /proc; copy it to another place");
    }
    size_ = status.st_size;
    written_ = time_of(status);
  }
  File(File&&) = delete;  // nor copied
  ~File() { ::close(descriptor_); }

  Index size() const { return size_; }
  const std::string& what() const { return what_; }
  /// Size and checksum of what it holds, which must not change from here on.
  hilt::SafetensorsMetadata identify() {
    checksum_ = checksum();
    return {{"text.bytes", std::to_string(size_)}, {"text.checksum", std::to_string(checksum_)}};
  }
  /// After reading: throws where what was read may not be what was there at first.
  void check_unchanged() const {
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0) bad("cannot look at it: ", std::strerror(errno));
    if (status.st_size == size_ && time_of(status) == written_) return;
    const std::lock_guard lock(mutex_);
    if (status.st_size != size_ || (time_of(status) != written_ && checksum() != checksum_))
      bad("changed while it was read; ", kStays);
    // Written again, as it was. A write sets the time before the bytes are there:
    // a young time is looked at again.
    struct timespec now {};
    ::clock_gettime(CLOCK_REALTIME, &now);
    if (std::abs(now.tv_sec - status.st_mtim.tv_sec) > 1) written_ = time_of(status);
  }
  void read(Index offset, std::span<char> to) const {
    for (std::size_t done = 0; done < to.size();) {
      const ssize_t got = ::pread(descriptor_, to.data() + done, to.size() - done,
                                  static_cast<off_t>(offset) + static_cast<off_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0)
        bad("cannot read byte ", offset + static_cast<Index>(done), ": ",
            got < 0 ? std::strerror(errno) : "the file became shorter", "; ", kStays);
      done += static_cast<std::size_t>(got);
    }
  }
  template <class... Parts> [[noreturn]] void bad(const Parts&... parts) const {
    hilt::fail_with(hilt::Code::data, what_, ": ", parts...);
  }

 private:
  static Index time_of(const struct stat& status) {
    return Index{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  }
  std::uint64_t checksum() const {
    std::uint64_t sum = 0;
    std::vector<char> piece;
    for (Index at = 0; at < size_; at += kPiece) {
      piece.resize(static_cast<std::size_t>(std::min(kPiece, size_ - at)));
      read(at, piece);
      sum = hilt::checksum(sum, piece.data(), piece.size());
    }
    return sum;
  }

  std::string what_;
  int descriptor_;
  Index size_ = 0;
  std::uint64_t checksum_ = 0;
  mutable std::atomic<Index> written_{0};  // when last
  mutable std::mutex mutex_;
};

/// Both sides of a split need a row and a token. Where its last tenth, or more if short, begins.
inline Index split_of(const File& file, Index units, const char* unit, Index length) {
  const Index least = length + 1, split = std::min(units - units / 10, units - least);
  if (split < least)
    file.bad(
        "has ", units, " ", unit, "; --context ", length, " needs at least ", 2 * least,
        " (a row and the token after it, for training and for validation); use a longer text or a smaller --context");
  return split;
}

/// A row begins anywhere in its part of a text, and its targets are one token further.
class TextRows : public Task {
 public:
  void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const override {
    const Index begin = split == Split::train ? 0 : split_, end = split == Split::train ? split_ : units_;
    std::vector<std::int32_t> tokens(at(length_ + 1));
    read_tokens(begin + drawn(split, number).below(end - begin - length_), tokens);
    std::copy_n(tokens.data(), length_, inputs);
    std::copy_n(tokens.data() + 1, length_, targets);
  }

 protected:
  TextRows(Index length, std::uint64_t seed) {
    hilt::check(length >= 1, "text: a row of ", length, " tokens");
    length_ = length, seed_ = seed;
  }
  virtual void read_tokens(Index first, std::span<std::int32_t> tokens) const = 0;
  Index units_ = 0, split_ = 0;  // all there are, and those for training
};

/// text_task where tokens are byte pairs.
std::unique_ptr<Task> pairs_task(const std::string& path, Index length, std::uint64_t seed,
                                 const std::optional<Vocabulary>& vocabulary, const std::string& tokenizer,
                                 const std::string& keep_in, const Stage& stage);

}  // namespace train
