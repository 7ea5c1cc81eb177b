// A text as a task. Bytes need no preparation. Characters are counted once, in pieces; every
// 1,024th one's byte is remembered, from where a row counts on.
#include <set>
#include "file.h"

namespace train {

using namespace hilt;

namespace {

constexpr Index kLandmark = 1024;  // characters from one remembered byte to the next

class TextTask : public TextRows {
 public:
  TextTask(const std::string& path, Alphabet alphabet, Index length, std::uint64_t seed,
           const std::optional<Vocabulary>& vocabulary)
      : TextRows(length, seed), file_(path) {
    if (file_.size() == 0) file_.bad("is empty; expected a text");
    units_ = file_.size();
    if (alphabet == Alphabet::characters) survey();
    if (vocabulary) {
      if (vocabulary->alphabet() != alphabet)
        file_.bad("read as ", alphabet == Alphabet::bytes ? "bytes" : "characters", ", the model knows others");
      for (const char32_t c : found_)
        if (vocabulary->find(c) < 0)
          file_.bad("holds a character (U+", std::hex, std::uppercase, static_cast<std::uint32_t>(c),
                    ") that the model does not know");
      vocabulary_ = *vocabulary;
    }
    classes_ = tokens_ = vocabulary_.size();
    identity_ = file_.identify();
    split_ = split_of(file_, units_, alphabet == Alphabet::bytes ? "bytes" : "characters", length);
  }

 private:
  void read_tokens(Index first, std::span<std::int32_t> tokens) const override {
    if (vocabulary_.alphabet() == Alphabet::bytes) {
      std::vector<char> bytes(tokens.size());
      file_.read(first, bytes);
      std::ranges::transform(bytes, tokens.begin(), [](char c) { return static_cast<unsigned char>(c); });
    } else {
      read_characters(first, tokens);
    }
    file_.check_unchanged();
  }
  /// Reads everything once: which characters there are, how many, and where every 1,024th begins.
  void survey() {
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
        const char32_t c = read_utf8(piece, i, file_.what(), static_cast<std::size_t>(at));
        if (c < 128) ascii[c] = true;
        else seen.insert(c);
      }
      at += static_cast<Index>(i);
    }
    for (char32_t c = 0; c < 128; ++c)
      if (ascii[c]) seen.insert(c);
    units_ = count;
    found_.assign(seen.begin(), seen.end());
    vocabulary_ = Vocabulary::characters(found_);
  }

  void read_characters(Index first, std::span<std::int32_t> tokens) const {
    const Index skip = first % kLandmark, from = landmarks_[static_cast<std::size_t>(first / kLandmark)];
    const Index most = std::min(4 * (skip + static_cast<Index>(tokens.size())), file_.size() - from);
    std::string bytes(static_cast<std::size_t>(most), '\0');
    file_.read(from, bytes);
    std::size_t at = 0;
    for (Index i = 0; i < skip; ++i) read_utf8(bytes, at, file_.what(), static_cast<std::size_t>(from));
    for (std::int32_t& token : tokens) {
      const std::size_t here = at;
      if (at >= bytes.size()) file_.bad("changed while it was read; ", kStays);
      token = vocabulary_.find(read_utf8(bytes, at, file_.what(), static_cast<std::size_t>(from)));
      if (token < 0)
        file_.bad("changed while it was read: a new character at byte ", from + static_cast<Index>(here), "; ", kStays);
    }
  }

  File file_;
  std::vector<Index> landmarks_;
  std::vector<char32_t> found_;
};

}  // namespace

std::unique_ptr<Task> text_task(const std::string& path, Alphabet alphabet, Index length, std::uint64_t seed,
                                const std::optional<Vocabulary>& vocabulary, const std::string& tokenizer,
                                const std::string& keep_in, const Stage& stage) {
  if (alphabet == Alphabet::bpe) return pairs_task(path, length, seed, vocabulary, tokenizer, keep_in, stage);
  return std::make_unique<TextTask>(path, alphabet, length, seed, vocabulary);
}

}  // namespace train
