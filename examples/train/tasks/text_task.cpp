// A text as a task. Bytes need no preparation. Characters are counted once, in pieces; every
// 1,024th one's byte is remembered, from where a row counts on.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include "task.h"

namespace train {

using namespace hilt;

namespace {

constexpr Index kLandmark = 1024;         // characters from one remembered byte to the next
constexpr Index kPiece = Index{1} << 20;  // bytes read at once
constexpr const char* kStays = "it must stay as it is for as long as it is trained on";

class File {
 public:
  explicit File(const std::string& path)
      : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (descriptor_ < 0) bad("cannot open: ", std::strerror(errno));
    struct stat status {};
    const bool known = ::fstat(descriptor_, &status) == 0;
    if (!known || !S_ISREG(status.st_mode)) {
      ::close(descriptor_);
      bad(!known                    ? "cannot look at it"
          : S_ISDIR(status.st_mode) ? "is a directory; expected a text"
                                    : "is not a regular file; expected a text");
    }
    size_ = status.st_size;
    written_ = time_of(status);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(descriptor_); }

  Index size() const { return size_; }
  /// Of what it holds, which must not change from here on.
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
    written_ = time_of(status);  // written again, as it was
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
    fail_with(Code::data, "--text (", path_, "): ", parts...);
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

  std::string path_;
  int descriptor_;
  Index size_ = 0;
  std::uint64_t checksum_ = 0;
  mutable std::atomic<Index> written_{0};  // when last
  mutable std::mutex mutex_;
};

class TextTask : public Task {
 public:
  TextTask(const std::string& path, Alphabet alphabet, Index length, std::uint64_t seed,
           const std::optional<Vocabulary>& vocabulary)
      : file_(path), what_("--text (" + path + ")"), seed_(seed) {
    check(length >= 1, "text: a row of ", length, " tokens");
    if (file_.size() == 0) file_.bad("is empty; expected a text");
    units_ = file_.size();
    if (alphabet == Alphabet::characters) {
      std::vector<char32_t> list = survey();
      vocabulary_ = Vocabulary::characters(list);
    }
    if (vocabulary) {
      if (vocabulary->is_bytes() != (alphabet == Alphabet::bytes))
        file_.bad("read as ", alphabet == Alphabet::bytes ? "bytes" : "characters", ", the model knows the other");
      for (const char32_t c : found_)
        if (vocabulary->find(c) < 0)
          file_.bad("holds a character (U+", std::hex, std::uppercase, static_cast<std::uint32_t>(c),
                    ") that the model does not know");
      vocabulary_ = *vocabulary;
    }
    length_ = length, classes_ = tokens_ = vocabulary_.size();
    identity_ = file_.identify();
    // Both sides need one row and the token after it.
    const Index least = length + 1;
    split_ = std::min(units_ - units_ / 10, units_ - least);
    if (split_ < least)
      file_.bad(
          "has ", units_, alphabet == Alphabet::bytes ? " bytes" : " characters", "; --context ", length,
          " needs at least ", 2 * least,
          " (a row and the token after it, for training and for validation); use a longer text or a smaller --context");
  }

  void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const override {
    Draws draws({seed_, static_cast<std::uint64_t>(number) * 2 + (split == Split::validation)});
    const Index begin = split == Split::train ? 0 : split_, end = split == Split::train ? split_ : units_;
    const Index at = begin + draws.below(end - begin - length_);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(length_ + 1));
    if (vocabulary_.is_bytes()) {
      std::vector<char> bytes(tokens.size());
      file_.read(at, bytes);
      std::ranges::transform(bytes, tokens.begin(), [](char c) { return static_cast<unsigned char>(c); });
    } else {
      read_characters(at, tokens);
    }
    file_.check_unchanged();
    std::copy(tokens.begin(), tokens.end() - 1, inputs);
    std::copy(tokens.begin() + 1, tokens.end(), targets);
  }

 private:
  /// Reads everything once: which characters there are, how many, and where every 1,024th begins.
  std::vector<char32_t> survey() {
    std::set<char32_t> seen;
    std::vector<bool> ascii(128);
    std::string piece;
    Index count = 0;
    for (Index at = 0; at < file_.size();) {
      piece.resize(static_cast<std::size_t>(std::min(kPiece, file_.size() - at)));
      file_.read(at, piece);
      const bool last = at + static_cast<Index>(piece.size()) == file_.size();
      std::size_t i = 0;
      while (i < piece.size() && (last || i + 4 <= piece.size())) {  // a character may go on in the next piece
        if (count++ % kLandmark == 0) landmarks_.push_back(at + static_cast<Index>(i));
        const char32_t c = read_utf8(piece, i, what_, static_cast<std::size_t>(at));
        if (c < 128) ascii[c] = true;
        else seen.insert(c);
      }
      at += static_cast<Index>(i);
    }
    for (char32_t c = 0; c < 128; ++c)
      if (ascii[c]) seen.insert(c);
    units_ = count;
    found_.assign(seen.begin(), seen.end());
    return found_;
  }

  void read_characters(Index first, std::span<std::int32_t> tokens) const {
    const Index skip = first % kLandmark, from = landmarks_[static_cast<std::size_t>(first / kLandmark)];
    const Index most =
        std::min(4 * (skip + static_cast<Index>(tokens.size())), file_.size() - from);  // 4 bytes each at most
    std::string bytes(static_cast<std::size_t>(most), '\0');
    file_.read(from, bytes);
    std::size_t at = 0;
    for (Index i = 0; i < skip; ++i) read_utf8(bytes, at, what_, static_cast<std::size_t>(from));
    for (std::int32_t& token : tokens) {
      const std::size_t here = at;
      if (at >= bytes.size()) file_.bad("changed while it was read; ", kStays);
      token = vocabulary_.find(read_utf8(bytes, at, what_, static_cast<std::size_t>(from)));
      if (token < 0)
        file_.bad("changed while it was read: a new character at byte ", from + static_cast<Index>(here), "; ", kStays);
    }
  }

  File file_;
  std::string what_;
  std::uint64_t seed_;
  Index units_ = 0, split_ = 0;  // bytes or characters: all, and those for training
  std::vector<Index> landmarks_;
  std::vector<char32_t> found_;
};

}  // namespace

std::unique_ptr<Task> text_task(const std::string& path, Alphabet alphabet, Index length, std::uint64_t seed,
                                const std::optional<Vocabulary>& vocabulary) {
  return std::make_unique<TextTask>(path, alphabet, length, seed, vocabulary);
}

}  // namespace train
