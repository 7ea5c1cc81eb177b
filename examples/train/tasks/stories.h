#pragma once
#include "task.h"

// Short stories from a probabilistic grammar. A text has one derivation, so its probability, and
// the entropy of what comes next, are known exactly at every character.

namespace train {

/// A grammar in lines of two kinds; blank ones are for the eye.
///     list = 3 Anna | 2 Tom                      words with weights, none the beginning of another
///     label: 2 text with {list} and {=list}      {list} draws a word and remembers it, {=list} says it again
///     label: 1 other text >next
///     a way to continue from label; >next goes on there, else the story ends
/// Ways to continue must differ before their first brace, none being the beginning of another.
/// `start` opens.
class Grammar {
 public:
  explicit Grammar(std::string_view source);

  std::string story(Draws& draws) const;
  /// -ln p of each character given all before it, for a text that begins where a story does. Throws
  /// Code::data at the first character that cannot stand where it does.
  std::vector<double> costs(std::string_view text) const;

  double entropy() const { return entropy_; }          // of a story, in nats
  double mean_length() const { return mean_length_; }  // of a story, in characters
  /// The expected mean of costs() over the first `length` characters of stories put one after the
  /// other: no reader can do better. By dynamic programming, without sampling.
  double floor(Index length) const { return mean_cost(cost_at_, length); }
  /// The same for a reader that knows the grammar but forgets what was drawn.
  double floor_without_memory(Index length) const { return mean_cost(forgetful_cost_at_, length); }
  /// Every character that can occur, ascending.
  const std::string& alphabet() const { return alphabet_; }

 private:
  struct Option {
    std::string text;
    double p;                  // given the node
    int next;                  // node, or kEnd
    std::vector<double> cost;  // by character: what it tells about which option this is
  };
  /// A draw from options, or, with recall, the word that register holds.
  struct Node {
    std::vector<Option> options;
    int store = -1;   // register that remembers which option
    int recall = -1;  // register whose word is said; options are those it was drawn from
  };
  static constexpr int kEnd = -1, kRegisters = 8;
  using Memory = std::array<std::int8_t, kRegisters>;

  void price(Node& node, const std::string& where);
  void analyze();
  double mean_cost(const std::vector<double>& by_place, Index length) const;

  std::vector<Node> nodes_;  // 0 opens
  std::string alphabet_;
  double entropy_ = 0, mean_length_ = 0;
  std::vector<double> length_p_;                     // by length: of a story having it
  std::vector<double> cost_at_, forgetful_cost_at_;  // by place in a story: expected cost there, 0 beyond the end
};

const Grammar& story_grammar();

/// Rows are stories one after the other, after the end of a line. Stories whose text hashes to a
/// multiple of ten are for validation and never trained on.
extern const Profile kStoriesTask;
std::unique_ptr<Task> stories_task(Index length, std::uint64_t seed);
bool is_held_out(std::string_view story);

}  // namespace train
