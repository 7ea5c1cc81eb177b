// A text in byte pairs as a task: read once, in pieces; its tokens go to a file, four bytes each.
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include "bpe.h"
#include "file.h"

namespace train {

using namespace hilt;

namespace {

constexpr Index kLearnedFrom = Index{1} << 26;  // bytes at the beginning of a text that teach a tokenizer

/// Calls f(word) for every word of the first `bytes` bytes.
template <class F> void each_word(const File& file, Index bytes, F&& f) {
  constexpr std::size_t kAhead = 16;  // the end of a word is known once so many bytes after it are
  std::string text, piece;
  std::size_t valid = 0;  // bytes of `text` that are whole characters
  for (Index at = 0; at < bytes;) {
    piece.resize(static_cast<std::size_t>(std::min(kPiece, bytes - at)));
    file.read(at, piece);
    at += static_cast<Index>(piece.size());
    text += piece;
    const bool last = at == bytes, whole = last && at == file.size();
    while (valid < text.size() && (whole || valid + 4 <= text.size()))
      read_utf8(text, valid, file.what(), static_cast<std::size_t>(at) - text.size());
    const std::string_view known = std::string_view(text).substr(0, valid);
    std::size_t begin = 0;
    for (std::size_t end = 0; begin < valid; begin = end) {
      end = word_end(known, begin);
      if (!last && end + kAhead > valid) break;
      f(known.substr(begin, end - begin));
    }
    text.erase(0, begin), valid -= begin;
  }
}

Bpe tokenizer_of(const File& file, const std::string& tokenizer) {
  constexpr std::string_view kTrain = "train:";
  if (!tokenizer.starts_with(kTrain)) return Bpe::from_directory(tokenizer);
  const Index size = read_index("--tokenizer", std::string_view(tokenizer).substr(kTrain.size()), 256);
  std::map<std::string, Index> words;
  each_word(file, std::min(kLearnedFrom, file.size()), [&](std::string_view word) { ++words[std::string(word)]; });
  return Bpe::trained(words, size);
}

/// Writes the tokens of a text.
void tokenize(const File& text, const Bpe& bpe, const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  const auto write = [&](const std::vector<std::int32_t>& tokens) {
    out.write(reinterpret_cast<const char*>(tokens.data()),
              static_cast<std::streamsize>(tokens.size() * sizeof tokens[0]));
  };
  try {
    constexpr std::size_t kMostKnown = 1 << 17;
    std::unordered_map<std::string, std::vector<std::int32_t>> known;
    std::vector<std::int32_t> ready;
    each_word(text, text.size(), [&](std::string_view word) {
      if (known.size() == kMostKnown) known.clear();
      const auto [found, is_new] = known.try_emplace(std::string(word));
      if (is_new) bpe.encode_word(word, found->second);
      ready.insert(ready.end(), found->second.begin(), found->second.end());
      if (ready.size() < static_cast<std::size_t>(kPiece)) return;
      write(ready);
      ready.clear();
    });
    write(ready);
    text.check_unchanged();
    out.close();
    if (!out)
      fail_with(Code::data, path, ": cannot write the tokens of a text there: ", std::strerror(errno),
                "; name a directory with room with --out or TMPDIR");
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

class PairsTask : public TextRows {
 public:
  PairsTask(const std::string& path, Index length, std::uint64_t seed, const std::optional<Vocabulary>& vocabulary,
            const std::string& tokenizer, const std::string& keep_in, const Stage& stage)
      : TextRows(length, seed) {
    File text(path);
    if (text.size() == 0) text.bad("is empty; expected a text");
    if (vocabulary && vocabulary->alphabet() != Alphabet::bpe) text.bad("read as byte pairs, the model knows others");
    vocabulary_ = vocabulary ? *vocabulary : Vocabulary::pairs(tokenizer_of(text, tokenizer));
    classes_ = tokens_ = vocabulary_.size();
    identity_ = text.identify();
    const std::string pairs = vocabulary_.text(), &sum = identity_.at("text.checksum");
    char name[64], ending[16];
    std::snprintf(name, sizeof name, "tokens-%016" PRIx64 ".i32",
                  checksum(checksum(0, pairs.data(), pairs.size()), sum.data(), sum.size()));
    std::snprintf(ending, sizeof ending, ".tmp.%08x", std::random_device{}());
    const bool kept = !keep_in.empty() && std::filesystem::exists(keep_in + '/' + name);
    const std::string file = kept    ? keep_in + '/' + name
                             : stage ? stage(name)
                                     : std::filesystem::temp_directory_path().string() + '/' + name + ending;
    if (!kept) tokenize(text, *vocabulary_.bpe(), file);
    file_.emplace(file, "tokens");
    if (!kept && !stage) ::unlink(file.c_str());
    units_ = file_->size() / kBytes;
    split_ = split_of(text, units_, "tokens", length);
  }

 private:
  void read_tokens(Index first, std::span<std::int32_t> tokens) const override {
    file_->read(kBytes * first, {reinterpret_cast<char*>(tokens.data()), tokens.size_bytes()});
    for (const std::int32_t token : tokens)
      if (token < 0 || token >= tokens_)
        file_->bad("token ", token, " is none of ", tokens_, "; remove the file, and it is made anew");
  }
  static constexpr Index kBytes = sizeof(std::int32_t);
  std::optional<File> file_;  // of the tokens
};

}  // namespace

std::unique_ptr<Task> pairs_task(const std::string& path, Index length, std::uint64_t seed,
                                 const std::optional<Vocabulary>& vocabulary, const std::string& tokenizer,
                                 const std::string& keep_in, const Stage& stage) {
  return std::make_unique<PairsTask>(path, length, seed, vocabulary, tokenizer, keep_in, stage);
}

}  // namespace train
