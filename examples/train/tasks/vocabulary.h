#pragma once
#include <hilt/hilt.h>
#include <map>
#include <unordered_map>

// Tokens and the text they stand for.

namespace train {

using hilt::Index;

/// What a text is cut into first: bytes, characters, or words of bytes whose pairs then merge.
enum class Alphabet : unsigned char { bytes, characters, pairs };

/// Each token is a string of bytes. Byte pairs are GPT-2's: text is cut into words, each word is
/// bytes, and pairs of tokens that stand side by side become one, the earliest learned first.
class Vocabulary {
 public:
  static Vocabulary bytes();
  /// One token for each character, numbered in the order given.
  static Vocabulary characters(const std::vector<char32_t>& list);
  /// The text of a tokenizer.json; `what` opens errors. Code::data where GPT-2 does otherwise.
  static Vocabulary pairs(std::string_view tokenizer, const std::string& what);
  /// From vocab.json and merges.txt, or else tokenizer.json.
  static Vocabulary pairs_of(const std::string& directory);
  /// What text() returned.
  static Vocabulary from_text(std::string_view text);

  Index size() const { return std::ssize(bytes_); }
  Alphabet alphabet() const { return alphabet_; }
  /// The token of one character or byte; -1 where there is none.
  std::int32_t find(std::string_view unit) const;
  /// Throws Code::data, with its place, on invalid UTF-8 and on a character that has no token.
  std::vector<std::int32_t> encode(std::string_view text, const std::string& what) const;
  std::string decode(std::span<const std::int32_t> tokens) const;
  /// One string that from_text() reads: for checkpoints.
  const std::string& text() const { return text_; }

 private:
  struct Merge {
    std::int32_t rank, token;
  };
  Vocabulary() { of_byte_.fill(-1); }
  void add(const std::string& unit, std::int32_t token);
  static std::uint64_t key(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
  }
  void encode_word(std::string_view word, std::vector<std::int32_t>& to) const;
  void encode_words(std::string_view text, std::vector<std::int32_t>& to) const;

  Alphabet alphabet_ = Alphabet::bytes;
  std::string text_;
  std::vector<std::string> bytes_;                         // by token
  std::array<std::int32_t, 256> of_byte_;                  // tokens of single bytes,
  std::map<std::string, std::int32_t, std::less<>> long_;  // and of longer characters
  std::unordered_map<std::uint64_t, Merge> merges_;        // by the pair of tokens
};

/// The character at `at`, which moves behind it. Throws Code::data, naming `what` and the byte.
char32_t read_utf8(std::string_view text, std::size_t& at, const std::string& what);
/// Where the word that begins at `at` ends, by GPT-2's rule: letters, numbers or other marks, each
/// with the blank before it; endings like 're; blanks. `text` is valid UTF-8.
std::size_t word_end(std::string_view text, std::size_t at);

/// All of a regular file; errors name `option`.
std::string content_of(const std::string& path, const std::string& option);
/// How many heads GPT-2's config.json says, of a model of such sizes; 0 where it says nothing. What
/// it says of another function than is computed here, or of other tensors, is refused.
Index heads_said(const std::string& path, const hilt::TransformerConfig& config);

}  // namespace train
