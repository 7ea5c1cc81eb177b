#pragma once
#include <array>
#include "vocabulary.h"

// What there is to learn: rows of tokens with their targets, functions of seed, split and number.

namespace train {

using hilt::Tensor, hilt::RandomKey, hilt::Batch;

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

/// How a task is spoken of, and what suits it: each task's file has its own.
struct Profile {
  const char *name, *help;   // of --task
  const char *row, *target;  // what a row and a target of it are called
  bool on_grid = false;      // finds a target for each cell of a grid, where others go on with a text
  const char* options;       // those it reads of what not every task reads
  const char* suited = "";   // options with the values they have unless they are given
  const char* before;        // what is known to one who counts pairs
  const char* reader = "";   // the best one there is, if it is known; what it loses, and what it knows
  const char *pays = "", *knows = "";
  const char* floor = "";    // what is known at the floor
  const char* picture = "";  // what stands above a board that a model filled
};

enum class Split : unsigned char { train, validation };

/// One thing to learn. Immutable, and safe to ask from any thread.
class Task {
 public:
  Task(Vocabulary vocabulary, Index length, std::uint64_t seed)
      : seed_(seed), length_(length), vocabulary_(std::move(vocabulary)) {}
  virtual ~Task() = default;
  Index length() const { return length_; }
  const Vocabulary& vocabulary() const { return vocabulary_; }
  /// What tells its data from others', where options and seed do not: size and checksum of a text.
  const hilt::SafetensorsMetadata& identity() const { return identity_; }
  Batch batch(Split split, Index first, Index count) const;
  /// Writes one row: length() inputs and as many targets, of which -100 is none.
  virtual void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const = 0;
  /// What the best reader pays for a row, in nats, and how many it hits; below 0: nobody knows.
  struct Exact {
    double cost = -1, right = 0;
  };
  virtual Exact exact(const std::int32_t* /*inputs*/, const std::int32_t* /*targets*/) const { return {}; }
  /// What it pays a target on average over all rows there could be; below 0: unknown.
  virtual double floor() const { return -1; }
  /// The same where it forgets what was said before.
  virtual double floor_without_memory() const { return -1; }

 protected:
  /// What a row is drawn by.
  Draws drawn(Split split, Index number) const {
    return Draws({seed_, static_cast<std::uint64_t>(number) * 2 + (split == Split::validation)});
  }
  std::uint64_t seed_;
  Index length_;
  Vocabulary vocabulary_;
  hilt::SafetensorsMetadata identity_;
};

/// Runs of `length` tokens from anywhere in a file, which is read once; the last tenth is for
/// validation. `vocabulary` replaces the file's own. Byte pairs are those of the directory
/// `tokenizer`.
std::unique_ptr<Task> text_task(const std::string& path, Alphabet alphabet, Index length, std::uint64_t seed,
                                const std::optional<Vocabulary>& vocabulary = std::nullopt,
                                const std::string& tokenizer = "");
/// Names, one a line of a file; without one, made.
std::unique_ptr<Task> names_task(const std::string& path, Index length, std::uint64_t seed,
                                 const std::optional<Vocabulary>& vocabulary);
extern const Profile kText, kNames;

/// What simpler readers reach, in nats a target, after counting in rows of the training split: that
/// knows how often each class is; that also knows the token before (for life: the cell itself).
struct Yardsticks {
  double uniform = 0, unigram = 0, bigram = 0;
};
Yardsticks yardsticks(const Task& task, Index rows);

}  // namespace train
