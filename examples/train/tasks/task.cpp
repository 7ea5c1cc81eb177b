// What tasks share: random numbers by count, vocabularies, batches and yardsticks.
#include "task.h"
#include "bpe.h"
#include <algorithm>
#include <cmath>

namespace train {

using namespace hilt;

// ---- random numbers -----------------------------------------------------------------------------
std::uint32_t Draws::bits() {
  const std::uint64_t block = drawn_ / 4;
  const auto four = philox({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                            static_cast<std::uint32_t>(key_.stream), static_cast<std::uint32_t>(key_.stream >> 32)},
                           key_.seed);
  return four[drawn_++ % 4];
}

Index Draws::below(Index n) {
  check(n > 0, "Draws: below ", n);
  const std::uint64_t high = bits(), random = high << 32 | bits();
  return static_cast<Index>(random % static_cast<std::uint64_t>(n));
}

char32_t read_utf8(std::string_view text, std::size_t& at, const std::string& what, std::size_t offset) {
  const std::optional<char32_t> c = next_utf8(text, at);
  if (!c) fail_with(Code::data, what, ": invalid UTF-8 at byte ", offset + at, "; take bytes instead of characters");
  return *c;
}

// ---- vocabulary ---------------------------------------------------------------------------------
Vocabulary Vocabulary::characters(const std::vector<char32_t>& list) {
  check(!list.empty(), "Vocabulary: no characters");
  Vocabulary v;
  v.characters_ = list;
  for (std::size_t i = 0; i < list.size(); ++i) v.by_code_.emplace_back(list[i], static_cast<std::int32_t>(i));
  std::ranges::sort(v.by_code_);
  for (std::size_t i = 1; i < list.size(); ++i)
    if (v.by_code_[i].first == v.by_code_[i - 1].first)
      fail_with(Code::data, "Vocabulary: character ", static_cast<std::uint32_t>(v.by_code_[i].first),
                " is there twice");
  return v;
}

Vocabulary Vocabulary::pairs(Bpe bpe) {
  Vocabulary v;
  v.bpe_ = std::make_shared<const Bpe>(std::move(bpe));
  return v;
}

Index Vocabulary::size() const {
  return bpe_ ? bpe_->size() : characters_.empty() ? 256 : static_cast<Index>(characters_.size());
}

Vocabulary Vocabulary::from_text(std::string_view text) {
  if (text == "bytes") return bytes();
  constexpr std::string_view kPairs = "bpe:";
  if (text.starts_with(kPairs)) return pairs(Bpe::from_json(text.substr(kPairs.size()), "Vocabulary"));
  constexpr std::string_view kKind = "characters:";
  if (!text.starts_with(kKind))
    fail_with(Code::data, "Vocabulary: expected `bytes`, `characters:` and a list, or `bpe:` and a tokenizer");
  std::vector<char32_t> list;
  for (std::size_t at = kKind.size(); at < text.size();) list.push_back(read_utf8(text, at, "Vocabulary"));
  if (list.empty()) fail_with(Code::data, "Vocabulary: no characters");
  return characters(list);
}

std::string Vocabulary::text() const {
  if (bpe_) return "bpe:" + bpe_->text();
  if (characters_.empty()) return "bytes";
  std::string out = "characters:";
  for (const char32_t c : characters_) append_utf8(out, c);
  return out;
}

std::int32_t Vocabulary::find(char32_t c) const {
  if (bpe_) {
    std::string text;
    append_utf8(text, c);
    std::vector<std::int32_t> tokens;
    bpe_->encode_word(text, tokens);
    return tokens.size() == 1 ? tokens[0] : -1;
  }
  if (characters_.empty()) return c < 256 ? static_cast<std::int32_t>(c) : -1;
  const auto found = std::ranges::lower_bound(by_code_, c, {}, [](const auto& entry) { return entry.first; });
  return found != by_code_.end() && found->first == c ? found->second : -1;
}

std::vector<std::int32_t> Vocabulary::encode(std::string_view text, const std::string& what) const {
  std::vector<std::int32_t> out;
  if (bpe_) {
    for (std::size_t at = 0; at < text.size();) read_utf8(text, at, what);  // all of it is
    for (std::size_t at = 0, end = 0; at < text.size(); at = end)
      bpe_->encode_word(text.substr(at, (end = word_end(text, at)) - at), out);
    return out;
  }
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t start = at;
    const char32_t c = characters_.empty() ? static_cast<unsigned char>(text[at++]) : read_utf8(text, at, what);
    const std::int32_t token = find(c);
    if (token < 0)
      fail_with(Code::data, what, ": character '", text.substr(start, at - start), "' at byte ", start,
                " is not among the ", size(), " the model knows");
    out.push_back(token);
  }
  return out;
}

std::string Vocabulary::decode(std::span<const std::int32_t> tokens) const {
  std::string out;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= size())
      fail_with(Code::data, "Vocabulary: token ", tokens[i], " at position ", i, " is outside 0..", size() - 1);
    if (bpe_) out += bpe_->bytes_of(tokens[i]);
    else if (characters_.empty()) out += static_cast<char>(tokens[i]);
    else append_utf8(out, characters_[at(tokens[i])]);
  }
  return out;
}

// ---- rows and batches ---------------------------------------------------------------------------
Batch Task::batch(Split split, Index first, Index count) const {
  check(count >= 1 && first >= 0, "batch: ", count, " rows from row ", first);
  Batch b{empty({count, length_}, DType::i32), empty({count, length_}, DType::i32)};
  auto *const inputs = b.inputs.mutable_data<std::int32_t>(), *const targets = b.targets.mutable_data<std::int32_t>();
  parallel_for(count, 1, [&](Index begin, Index end) {
    for (Index r = begin; r < end; ++r) row(split, first + r, inputs + r * length_, targets + r * length_);
  });
  return b;
}

Yardsticks yardsticks(const Task& task, Index rows) {
  const Index n = task.targets(), inputs = task.tokens(), classes = task.classes();
  constexpr Index kMostPairs = Index{1} << 24;
  const bool pairs = inputs * classes <= kMostPairs;
  std::vector<double> single(at(classes), 0.01), pair(pairs ? at(inputs * classes) : 0, 0.01);
  const auto visit = [&](Split split, auto&& f) {
    std::vector<std::int32_t> x(at(task.length())), y(at(n));
    for (Index r = 0; r < rows; ++r) {
      task.row(split, r, x.data(), y.data());
      for (std::size_t t = 0; t < y.size(); ++t) f(x[t], at(y[t]), at(x[t] * classes + y[t]));
    }
  };
  visit(Split::train, [&](std::int32_t, std::size_t y, std::size_t xy) {
    single[y] += 1;
    if (pairs) pair[xy] += 1;
  });
  double total = 0;
  for (double count : single) total += count;
  std::vector<double> after(pairs ? at(inputs) : 0, 0.0);
  for (std::size_t i = 0; i < pair.size(); ++i) after[i / at(classes)] += pair[i];
  Yardsticks out{.uniform = std::log(static_cast<double>(classes))};
  visit(Split::validation, [&](std::int32_t x, std::size_t y, std::size_t xy) {
    out.unigram -= std::log(single[y] / total);
    if (pairs) out.bigram -= std::log(pair[xy] / after[at(x)]);
  });
  const double seen = static_cast<double>(rows * n);
  out.unigram /= seen;
  out.bigram = pairs ? out.bigram / seen : out.unigram;
  return out;
}

}  // namespace train
