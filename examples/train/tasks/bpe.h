#pragma once
#include <unordered_map>
#include <hilt/hilt.h>

// Byte-pair tokens as GPT-2 has them: text is cut into words, each word is bytes, and pairs of
// tokens that stand side by side become one, the earliest learned first.

namespace train {

using hilt::Index;

/// Where the word that begins at `at` ends, by GPT-2's rule: letters, numbers or other marks, each
/// with the blank before it; endings like 're; blanks. `text` is valid UTF-8.
std::size_t word_end(std::string_view text, std::size_t at);

class Bpe {
 public:
  /// From vocab.json and merges.txt, or else tokenizer.json; Code::data where GPT-2 does otherwise.
  static Bpe from_directory(const std::string& directory);
  /// The text of a tokenizer.json; `what` opens errors.
  static Bpe from_json(std::string_view text, const std::string& what);
  /// The 256 bytes, and the pairs most often seen in words by their count, until there are `size`
  /// tokens or no pair was seen twice. Of two equally frequent, the one of earlier tokens.
  static Bpe trained(const std::map<std::string, Index>& words, Index size);

  Index size() const { return static_cast<Index>(bytes_.size()); }
  const std::string& bytes_of(std::int32_t token) const { return bytes_[static_cast<std::size_t>(token)]; }
  /// Appends the tokens of one word, or of any bytes that are to be one.
  void encode_word(std::string_view word, std::vector<std::int32_t>& to) const;
  /// What from_json reads: for checkpoints.
  std::string text() const;

 private:
  using Pair = std::pair<std::int32_t, std::int32_t>;
  struct Merge {
    std::int32_t rank, token;
  };
  void add_merge(const Pair& pair, std::int32_t token);
  const Merge* find(std::int32_t left, std::int32_t right) const;

  std::vector<std::string> bytes_;  // by token
  std::array<std::int32_t, 256> token_of_{};
  std::vector<Pair> merges_;  // by rank
  std::unordered_map<std::uint64_t, Merge> by_pair_;
};

}  // namespace train
