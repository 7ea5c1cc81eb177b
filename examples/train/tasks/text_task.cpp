// A text as a task: read whole, and its tokens kept.
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

namespace {

/// All characters of a text, ascending.
std::vector<char32_t> characters_in(const std::string& text, const std::string& what) {
  std::vector<bool> seen(0x110000);
  for (std::size_t at = 0; at < text.size();) seen[read_utf8(text, at, what)] = true;
  std::vector<char32_t> all;
  for (char32_t c = 0; c < seen.size(); ++c)
    if (seen[c]) all.push_back(c);
  return all;
}

/// A row begins anywhere in its part of a text, and its targets are one token further.
class TextTask : public Task {
 public:
  TextTask(const std::string& text, const std::string& what, const Vocabulary& vocabulary, Index length,
           std::uint64_t seed)
      : Task(vocabulary, length, seed), tokens_(vocabulary_.encode(text, what)) {
    const Index units = std::ssize(tokens_), least = length + 1;
    const char* const unit[] = {" bytes", " characters", " tokens"};
    split_ = std::min(units - units / 10, units - least);  // the last tenth, or more where that is short
    if (split_ < least)
      fail_with(Code::data, what, ": has ", units, unit[static_cast<int>(vocabulary_.alphabet())], "; --context ",
                length, " needs at least ", 2 * least,
                " (a row and the token after it, for training and for validation); use a longer text or a smaller "
                "--context");
    constexpr std::size_t kPiece = 1 << 20;  // checkpoints have sums of sums
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < text.size(); at += kPiece)
      sum = checksum(sum, text.data() + at, std::min(kPiece, text.size() - at));
    identity_ = {{"text.bytes", std::to_string(text.size())}, {"text.checksum", std::to_string(sum)}};
  }
  void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const override {
    const Index begin = split == Split::train ? 0 : split_, end = split == Split::train ? split_ : std::ssize(tokens_);
    const auto first = tokens_.begin() + begin + drawn(split, number).below(end - begin - length_);
    std::copy_n(first, length_, inputs);
    std::copy_n(first + 1, length_, targets);
  }

 private:
  std::vector<std::int32_t> tokens_;
  Index split_ = 0;  // tokens for training
};

}  // namespace

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
  return std::make_unique<TextTask>(text, what, vocabulary ? *vocabulary : own(), length, seed);
}

}  // namespace train
