#pragma once
#include <hilt/hilt.h>
#include <functional>

// What there is to learn: rows of tokens with their targets, functions of seed, split and number.

namespace train {

using hilt::Index, hilt::Tensor, hilt::RandomKey, hilt::Batch;

inline std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// Random numbers one after the other, all from one key.
class Draws {
 public:
  explicit Draws(RandomKey key) : key_(key) {}
  std::uint32_t bits();
  double uniform() { return bits() * 0x1p-32; }  // [0, 1)
  /// 0..n-1, from 64 random bits: the bias is below n / 2^64.
  Index below(Index n);

 private:
  RandomKey key_;
  std::uint64_t drawn_ = 0;
};

class Bpe;
enum class Alphabet : unsigned char { bytes, characters, bpe };

/// Tokens and the text they stand for: all 256 bytes, a list of characters in UTF-8, or byte pairs.
class Vocabulary {
 public:
  static Vocabulary bytes() { return {}; }
  /// One token for each character, numbered in the order given.
  static Vocabulary characters(const std::vector<char32_t>& list);
  static Vocabulary pairs(Bpe bpe);
  /// What text() returned.
  static Vocabulary from_text(std::string_view text);

  Index size() const;
  Alphabet alphabet() const {
    return bpe_ ? Alphabet::bpe : characters_.empty() ? Alphabet::bytes : Alphabet::characters;
  }
  const Bpe* bpe() const { return bpe_.get(); }
  std::int32_t find(char32_t c) const;
  /// Throws Code::data, with its place, on invalid UTF-8 and on a character that has no token.
  std::vector<std::int32_t> encode(std::string_view text, const std::string& what) const;
  std::string decode(std::span<const std::int32_t> tokens) const;
  /// One string that from_text() reads: for checkpoints.
  std::string text() const;

 private:
  std::vector<char32_t> characters_;                        // by token
  std::vector<std::pair<char32_t, std::int32_t>> by_code_;  // ascending
  std::shared_ptr<const Bpe> bpe_;
};

/// The character at `at`, which moves behind it. Throws Code::data, naming `what` and the byte.
char32_t read_utf8(std::string_view text, std::size_t& at, const std::string& what, std::size_t offset = 0);

enum class Split : unsigned char { train, validation };

/// One thing to learn. Immutable, and safe to ask from any thread.
class Task {
 public:
  virtual ~Task() = default;
  Index length() const { return length_; }
  Index classes() const { return classes_; }                           // of targets
  Index tokens() const { return tokens_; }                             // of inputs
  Index targets() const { return targets_ > 0 ? targets_ : length_; }  // of a row
  const Vocabulary& vocabulary() const { return vocabulary_; }
  /// What tells its data from others', where options and seed do not: size and checksum of a text.
  const hilt::SafetensorsMetadata& identity() const { return identity_; }
  virtual Batch batch(Split split, Index first, Index count) const;
  /// Writes one row: length() inputs, targets() targets.
  virtual void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const = 0;
  /// What the best reader pays for a row, in nats, and how many it hits; below 0: nobody knows.
  struct Exact {
    double cost = -1, right = 0;
  };
  virtual Exact exact(const std::int32_t* /*inputs*/, const std::int32_t* /*targets*/) const { return {}; }
  virtual std::string name_of(Index c) const { return std::to_string(c); }

 protected:
  /// What a row is drawn by.
  Draws drawn(Split split, Index number) const {
    return Draws({seed_, static_cast<std::uint64_t>(number) * 2 + (split == Split::validation)});
  }
  std::uint64_t seed_ = 0;
  Index length_ = 0, classes_ = 0, tokens_ = 0, targets_ = 0;  // targets_ 0: one a token
  Vocabulary vocabulary_ = Vocabulary::bytes();
  hilt::SafetensorsMetadata identity_;
};

/// Where to write what will be called so.
using Stage = std::function<std::string(const std::string& name)>;

/// Runs of `length` tokens from anywhere in a file, which is read where it is needed; the last
/// tenth is for validation, and rows of one that changed throw Code::data. `vocabulary` replaces
/// the file's own. Byte pairs are those of `tokenizer`, a directory or "train:N". Their tokens are
/// a file in `keep_in`; one that is not there is made where `stage` says, or has no name.
std::unique_ptr<Task> text_task(const std::string& path, Alphabet alphabet, Index length, std::uint64_t seed,
                                const std::optional<Vocabulary>& vocabulary = std::nullopt,
                                const std::string& tokenizer = "", const std::string& keep_in = "",
                                const Stage& stage = {});

/// What simpler readers reach, in nats a target, after counting in rows of the training split: that
/// knows how often each class is; that also knows the token before (for life: the cell itself).
struct Yardsticks {
  double uniform = 0, unigram = 0, bigram = 0;
};
Yardsticks yardsticks(const Task& task, Index rows);

}  // namespace train
