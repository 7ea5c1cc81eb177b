// A text as a task, and names: read whole, and their tokens kept.
#include "task.h"

namespace train {

using namespace hilt;

const Profile kText{.name = "text",
                    .help = "any file",
                    .row = "run of text",
                    .target = "token",
                    .options = "text vocabulary tokenizer prompt temperature top-k top-p stop tokens",
                    .suited = "--steps 1000 --layers 4 --heads 4 --lr 0.001 --weight-decay 0.1",
                    .before = "the symbol before"};
const Profile kNames{.name = "names",
                     .help = "10,000 made of syllables, or those of --text, one a line; a model like microgpt",
                     .row = "name",
                     .target = "letter",
                     .options = "text prompt temperature top-k top-p stop tokens",
                     .suited =
                         "--like microgpt --layers 1 --heads 4 --width 16 --context 16 --positions learned "
                         "--steps 1000 --batch 1 --lr 0.01 --schedule linear --warmup 0 --clip 0 "
                         "--temperature 0.5",
                     .before = "the letter before"};

namespace {

hilt::SafetensorsMetadata identity_of(const std::string& text) {
  constexpr std::size_t kPiece = 1 << 20;  // checkpoints have sums of sums
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < text.size(); at += kPiece)
    sum = checksum(sum, text.data() + at, std::min(kPiece, text.size() - at));
  return {{"text.bytes", std::to_string(text.size())}, {"text.checksum", std::to_string(sum)}};
}

/// All characters of a text, ascending.
std::vector<char32_t> characters_in(const std::string& text, const std::string& what) {
  std::vector<bool> seen(0x110000);
  for (std::size_t at = 0; at < text.size();) seen[read_utf8(text, at, what)] = true;
  std::vector<char32_t> all;
  for (char32_t c = 0; c < seen.size(); ++c)
    if (seen[c]) all.push_back(c);
  return all;
}

/// A row begins anywhere in its part of a text, and its targets are one token further. By lines it
/// begins with the end of one before the next, and what comes behind that is no target.
class TextTask : public Task {
 public:
  TextTask(const std::string& text, const std::string& what, const Vocabulary& vocabulary, Index length,
           std::uint64_t seed, bool by_lines)
      : Task(vocabulary, length, seed), tokens_(vocabulary_.encode(text, what)) {
    identity_ = identity_of(text);
    if (by_lines) {
      tokens_.insert(tokens_.begin(), end_), tokens_.resize(tokens_.size() + at(length) + 1, end_);
      for (std::size_t i = 0; i + 1 < tokens_.size(); ++i)
        if (tokens_[i] == end_ && tokens_[i + 1] != end_) lines_.push_back(static_cast<Index>(i));
    }
    const Index units = by_lines ? std::ssize(lines_) : std::ssize(tokens_), least = by_lines ? 1 : length + 1;
    const char* const unit[] = {" bytes", " characters", " tokens"};
    split_ = std::min(units - units / 10, units - least);  // the last tenth, or more where that is short
    if (split_ >= least) return;
    if (by_lines) fail_with(Code::data, what, ": has ", units, " names, one a line; expected 2 or more");
    fail_with(Code::data, what, ": has ", units, unit[static_cast<int>(vocabulary_.alphabet())], "; --context ", length,
              " needs at least ", 2 * least,
              " (a row and the token after it, for training and for validation); use a longer text or a smaller "
              "--context");
  }
  void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const override {
    const bool train = split == Split::train, anywhere = lines_.empty();
    const Index all = anywhere ? std::ssize(tokens_) : std::ssize(lines_), begin = train ? 0 : split_,
                count = (train ? split_ : all - split_) - (anywhere ? length_ : 0),
                which = begin + drawn(split, number).below(count);
    const auto first = tokens_.begin() + (anywhere ? which : lines_[at(which)]);
    std::copy_n(first, length_, inputs);
    std::copy_n(first + 1, length_, targets);
    if (!anywhere) std::fill(std::find(targets, targets + length_ - 1, end_) + 1, targets + length_, -100);
  }

 private:
  std::vector<std::int32_t> tokens_;
  std::int32_t end_ = vocabulary_.find("\n");
  std::vector<Index> lines_;  // where they begin; empty: anywhere
  Index split_ = 0;           // of what rows begin with: how many are for training
};

/// They have 4 to 9 letters.
std::string made_names() {
  Draws draws(RandomKey{12345});
  std::string text;
  for (int n = 0; n < 10'000; ++n, text += '\n') {
    for (Index syllables = 2 + draws.below(3); syllables > 0; --syllables)
      (text += "bdfgklmnrstvz"[draws.below(13)]) += "aeiou"[draws.below(5)];
    if (draws.below(2) > 0) text += "nrs"[draws.below(3)];
  }
  return text;
}

}  // namespace

std::unique_ptr<Task> names_task(const std::string& path, Index length, std::uint64_t seed,
                                 const std::optional<Vocabulary>& vocabulary) {
  const std::string what = "--text (" + path + ")";
  std::string text = path.empty() ? made_names() : content_of(path, "--text");
  std::erase(text, '\r');
  const auto own = [&] { return Vocabulary::characters(characters_in(text + "\nabcdefghijklmnopqrstuvwxyz", what)); };
  return std::make_unique<TextTask>(text, what, vocabulary ? *vocabulary : own(), length, seed, true);
}

std::unique_ptr<Task> text_task(const std::string& path, Alphabet alphabet, Index length, std::uint64_t seed,
                                const std::optional<Vocabulary>& vocabulary, const std::string& tokenizer) {
  check(length >= 1, "text: a row of ", length, " tokens");
  const std::string what = "--text (" + path + ")", text = content_of(path, "--text");
  if (text.empty()) fail_with(Code::data, what, ": is empty; expected a text");
  const char* const named[] = {"bytes", "characters", "byte pairs"};
  if (vocabulary && vocabulary->alphabet() != alphabet)
    fail_with(Code::data, what, ": read as ", named[static_cast<int>(alphabet)], ", the model knows others");
  const auto own = [&] {
    if (alphabet == Alphabet::bytes) return Vocabulary::bytes();
    return alphabet == Alphabet::pairs ? Vocabulary::pairs_of(tokenizer)
                                       : Vocabulary::characters(characters_in(text, what));
  };
  return std::make_unique<TextTask>(text, what, vocabulary ? *vocabulary : own(), length, seed, false);
}

}  // namespace train
