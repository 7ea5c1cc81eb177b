// GPT-2's words and bytes as its files have them, the merging of pairs, and the learning of merges.
//
//      word    's | 't | 're | 've | 'm | 'll | 'd
//              | blank? letters | blank? numbers | blank? others | blanks (?!\S) | blanks
//
// In its files a byte is a character one can see: printable ones of Latin-1 stand for themselves,
// the others for U+0100 onwards, in order.
#include "bpe.h"
#include <algorithm>
#include <filesystem>
#include <queue>
#include <set>
#include <sstream>
#include "json_file.h"

namespace train {

using namespace hilt;

// ---- words --------------------------------------------------------------------------------------
namespace {

enum class Class : unsigned char { other, letter, number, space };

/// tests/tools/unicode_classes.py wrote this and says how to read it.
constexpr std::string_view kClasses =
    R"(W1D[24n1X1MX3IX3[14[34U14N854>546<5l25l35Xi1A`1i1DM454U@D589@54I45<545`25\:5\AQ1hD5h494IT5m8\3A@e5\5f2X1A85\<54m)"
    R"(18M:Y1<94Q245h3e3T;]14j1Y1T4U18A4Eh2A4U14=4m2T3M\1EP35HU2X5Y7h6=4Y24MX1BX15P2AP1989h25L54=@=4Q24e185<BY18:H94Q1H)"
    R"(A89h25L585858m3@54NX19<Q2T15<5h25L585D=4Y24m18BX1U14]1P1989h25L585D=4i385<BX156H]145H=<5@=85458=8=<=`1i24f2d1Y2P)"
    R"(15<5l25P2=4Y3<9498BX1R1L54AP15<5l25X15D=4m3858BX158U2T15<5T594Q24E<6M<B\25HEX2=P35T1549Ln3X1U2P658a1LV1X1m48545D)"
    R"(5P3545X158U149D54V1X19@Q44n3`2a1P15`4]3D]>\5a26X1IHA@=4=8M<Ad1a146X1Ih454E49\55dY15@9L545@9T55@9T45@9L545@9l15T7)"
    R"(5@9\8j1`2=P2Q2h:9H=`]29W25X3E\9>=P1MX2e1\2i1X2i1d15<m1`6]44A4>X1JX1j2X1IT;MD9X454Eh8Y1l3n4Y1h39D]1`5AX3J\1e4l2U1)"
    R"(d6^5X1JX1e14e;l5U2P1>X1U5h3e1:Y1`5Y3`4b3X1=>Y1`49T1M\59<U5@5H58=4EPHQ8hR19H9h49H9P15454545l39d65L54=<5L=@9HAd1E<)"
    R"(5L?\1g38G4o54R254:HE6X1Id1e<4A49X154=DI454545@5\19@EDA46]6:Djj2`7j9h2j^2h3a]4dLI@=8V149h454E49P7M4Q2l2U1L5L5L5L5)"
    R"(L5L5L5LQ:4Sj14A:4V3T1MD:=8Ah:I<5X;5@E\55h;>@Y1P4Q6P2R4X1j3P16l1R4X1n4l1QX1PhIQ8daf2]8h59dQ1=R2Y18a2l5Q2l39j8X1m4)"
    R"(T19l<9P8E8545DQ3P25<5@5l2f1HY1`6i1X6b3X1Q3H=4586Y1`3Y1l2U3d3Ml5a36X1ID5Z1Y1D5T5m2<5P1BX1Il2=4=X654=89D9454Q3<9\1)"
    R"(M<a1H9H9HU1L5L5\55h1I\>f1X1I`d[1a1l2AT6aPQ1h]19X=i4La1DE45X15d15D5458585`=U4\]1Y2P89h6Q5`1a>D5l@^2X1MX3IX3]1T;=H)"
    R"(9H9H9<]4`15X35\2585l19h1Y4\?b1d5b1T7V28aNd3=T6R2\3AR4@U1b25R14Eh4Y1h39`4AP16DY5hC:X1I`4A`4AP5Q1`6a1\15l15L585\15)"
    R"(l15L58]8lV1U1h2Y1P1Q3H5X55T1e8H945`558=49l2:Q1l2:Ml3R1T1Q6\258FEj2HAX3i8P7B9:P2:i54m1@5<5d3Z1T1m2f385f3<Q4P15`3J)"
    R"(DQ2h6Y1h2:Q1\2FQ1X2n2LQ:T9m6\6e1\6NI`4b1X1jT1l35X5I8i9f3Y14Q1h2^1@]3X2i5f2La2l2a1d6Z3h35894e1d5Q4T3NX1U1`4n1X1A4)"
    R"(94Q1\4=4a1P6i1@^1Y1454B`2]1X25T3a:L545@5l15X1Ml5V2X1]1P1989h25L585D=4Y24a1DiCd6Y2@FX1E<i3P6a2854R1X1iDl5U5@a4P6a)"
    R"(24^1X1i4\5e14NX1i6\3f2`1ALUG`5a>R8\2a1P1949P1585P3m1454j1X1i8P19l4Q2454a34Y1P5M4e24]1h5]24Y2T9mP1T15d4U24n1d3Eh3)"
    R"(Q>L585h4e24V1X1IH585P4i14NX1iV1\2eG4n1d2]5Xc3j<l=U2`HaY:T<m1lU4Uj?lX2UgQ1TW2Ml36X1Il96X1Ih3Y2P6Q2@b1X16L5d2E\2Qf)"
    R"(2R8l2U=\9E4Y8d1Q8854a3PoGQ1hj4Y5T1mlR1@5L585\T1e5<U2@Q1`a1aP9\=Ed1=T1MX1jXF`2b=T3m@d:5l85894989@5`1545L5T85@9P15)"
    R"(L5`35@5D54=L5`Z19T35T35l35T35l35T35l35T35l35T35P1:X6QP7l3Ul1d5Y1L:X1A4UX1h3Y2`5BX1il4L5@585l15dH:T1Q6`8M4BX1nR3\)"
    R"(76<6@b9d56l1YH@5\35854945X15@5454I4A454545<5854945454545458549@5L5@5@545X15T2E<5D5T2bX2d1^l:X1iP4PlV5Q4TW@MhK9X`)"
    R"(Fi1TVMmS<hS2Yl5\YC)";

struct Change {
  char32_t from;
  Class to;
};

Class class_of(char32_t c) {
  static const std::vector<Change> changes = [] {
    std::vector<Change> out{{0, Class::other}};
    char32_t at = 0;
    for (std::size_t i = 0; i < kClasses.size();) {
      std::uint32_t number = 0;
      for (int shift = 0, more = 1; more; shift += 5) {
        const auto digit = static_cast<std::uint32_t>(kClasses[i++] - '0');
        number |= digit % 32 << shift, more = digit >= 32;
      }
      at += number / 4;
      out.push_back({at, static_cast<Class>(number % 4)});
    }
    return out;
  }();
  return std::prev(std::ranges::upper_bound(changes, c, {}, &Change::from))->to;
}

/// The class of the character at `at`, which moves behind it.
Class take(std::string_view text, std::size_t& at) { return class_of(next_utf8(text, at).value_or(U'\0')); }

}  // namespace

std::size_t word_end(std::string_view text, std::size_t at) {
  for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
    if (text.substr(at).starts_with(ending)) return at + ending.size();
  std::size_t begin = at + (text[at] == ' ' && at + 1 < text.size()), end = begin;
  const Class kind = take(text, end);
  if (kind != Class::space) {
    for (std::size_t next = end; next < text.size() && take(text, next) == kind;) end = next;
    return end;
  }
  std::size_t before_last = at;  // the last blank belongs to the word behind it
  for (end = at; end < text.size();) {
    std::size_t next = end;
    if (take(text, next) != Class::space) return before_last > at ? before_last : end;
    before_last = end, end = next;
  }
  return end;
}

// ---- files --------------------------------------------------------------------------------------
namespace {

struct Shown {
  std::array<char32_t, 256> of{};
  std::array<unsigned char, 512> byte{};
  Shown() {
    char32_t next = 256;
    for (std::size_t b = 0; b < 256; ++b) {
      const bool printable = (b > 32 && b < 127) || (b > 160 && b != 173);
      of[b] = printable ? static_cast<char32_t>(b) : next++;
      byte[of[b]] = static_cast<unsigned char>(b);
    }
  }
};
const Shown& shown_bytes() {
  static const Shown shown;
  return shown;
}

std::string to_shown(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(out, shown_bytes().of[static_cast<unsigned char>(c)]);
  return out;
}

/// Added tokens may hold any character, and stand for it.
std::string from_shown(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const char32_t c = next_utf8(text, at).value_or(U'\uFFFF');
    if (c >= 324 || (c < 256 && shown_bytes().of[c] != c)) return text;
    out += static_cast<char>(shown_bytes().byte[c]);
  }
  return out;
}

}  // namespace

void Bpe::add_merge(const Pair& pair, std::int32_t token) {
  const std::uint64_t key = static_cast<std::uint64_t>(pair.first) << 32 | static_cast<std::uint32_t>(pair.second);
  by_pair_.try_emplace(key, Merge{static_cast<std::int32_t>(merges_.size()), token});
  merges_.push_back(pair);
}

const Bpe::Merge* Bpe::find(std::int32_t left, std::int32_t right) const {
  const auto found = by_pair_.find(static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right));
  return found == by_pair_.end() ? nullptr : &found->second;
}

Bpe Bpe::from_directory(const std::string& directory) {
  constexpr const char* kOption = "--tokenizer";
  const auto named = [&](const char* file) { return std::string(kOption) + " (" + directory + file + ")"; };
  const auto content = [&](const char* file) { return content_of(directory + file, kOption); };
  if (!std::filesystem::exists(directory + "/vocab.json"))
    return from_json(content("/tokenizer.json"), named("/tokenizer.json"));
  const std::string merges = content("/merges.txt");
  for (std::size_t at = 0; at < merges.size();)
    if (!next_utf8(merges, at)) fail_with(Code::data, named("/merges.txt"), ": invalid UTF-8 at byte ", at);
  json list = json::array();
  std::istringstream lines(merges);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty() && !line.starts_with("#version")) list.push_back(line);
  const json vocab = read_json(content("/vocab.json"), named("/vocab.json"));
  return from_json(json{{"model", {{"vocab", vocab}, {"merges", list}}}}.dump(), named(""));
}

Bpe Bpe::from_json(std::string_view text, const std::string& what) try {
  const std::size_t kMost = std::min(text.size() / 4, std::size_t{1} << 22);  // tokens: each takes text
  const json all = read_json(text, what);
  const json& model = member(all, "model", json::value_t::object, what);
  const auto refuse = [&](const std::string& name, const json& value) {
    fail_with(Code::data, what, ": ", name, " ", value.dump(), " is not GPT-2's, which alone is known here");
  };
  const auto plain = [&](const json& in, const char* name, const json& as) {
    if (in.contains(name) && !in[name].is_null() && in[name] != as && in[name] != "") refuse(name, in[name]);
  };
  plain(model, "type", "BPE");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) plain(model, name, "");
  for (const char* name : {"byte_fallback", "ignore_merges"}) plain(model, name, false);
  plain(model, "dropout", 0);
  plain(all, "normalizer", nullptr);
  if (all.contains("pre_tokenizer")) {
    const json& words = all["pre_tokenizer"];
    if (!words.is_object() || words.value("type", "") != "ByteLevel" || words.value("add_prefix_space", true) ||
        !words.value("use_regex", true))
      refuse("pre_tokenizer", words);
  }
  Bpe out;
  std::unordered_map<std::string, std::int32_t> token_of;
  const auto place = [&](const std::string& name, const json& id, const std::string& bytes) {
    const std::size_t at = id.is_number_unsigned() ? id.get<std::size_t>() : kMost;
    if (at >= kMost)
      fail_with(Code::data, what, ": token ", name, " has number ", id.dump(), ", at most ", kMost - 1, " is read");
    if (at >= out.bytes_.size()) out.bytes_.resize(at + 1);
    if (!out.bytes_[at].empty() && out.bytes_[at] != bytes)
      fail_with(Code::data, what, ": tokens ", name, " and ", to_shown(out.bytes_[at]), " both have number ", at);
    out.bytes_[at] = bytes, token_of[name] = static_cast<std::int32_t>(at);
  };
  for (const auto& [name, id] : member(model, "vocab", json::value_t::object, what).items())
    place(name, id, from_shown(name));
  for (std::size_t b = 0; b < 256; ++b) {
    const std::string name = to_shown(std::string(1, static_cast<char>(b)));
    if (!token_of.contains(name))
      fail_with(Code::data, what, ": its vocabulary lacks byte ", b, ", ", name, "; GPT-2's has all 256");
    out.token_of_[b] = token_of[name];
  }
  for (const json& merge : member(model, "merges", json::value_t::array, what)) {
    if (!merge.is_string() && merge.size() != 2) refuse("merge", merge);
    const std::string pair = merge.is_string() ? merge.get<std::string>()
                                               : merge.at(0).get<std::string>() + ' ' + merge.at(1).get<std::string>();
    const std::size_t blank = pair.find(' ');
    const auto left = token_of.find(pair.substr(0, blank)),
               right = token_of.find(blank == pair.npos ? "" : pair.substr(blank + 1));
    const auto both =
        left == token_of.end() || right == token_of.end() ? token_of.end() : token_of.find(left->first + right->first);
    if (both == token_of.end())
      fail_with(Code::data, what, ": merge '", pair, "': its parts and what they become must be in the vocabulary");
    out.add_merge({left->second, right->second}, both->second);
  }
  if (all.contains("added_tokens"))
    for (const json& added : all["added_tokens"]) {
      if (!added.at("special").get<bool>())
        refuse("added token that is not special", added);  // they are cut out of words
      place(added.at("content"), added.at("id"), added.at("content"));
    }
  return out;
} catch (const json::exception&) {
  fail_with(Code::data, what, ": not a tokenizer of byte pairs: a value in it is of another type than GPT-2's");
}

std::string Bpe::text() const {
  json vocab = json::object(), merges = json::array();
  const auto name = [&](std::int32_t token) { return to_shown(bytes_of(token)); };
  for (std::size_t i = 0; i < bytes_.size(); ++i)
    if (!bytes_[i].empty()) vocab[name(static_cast<std::int32_t>(i))] = i;
  for (const Pair& pair : merges_) merges.push_back(name(pair.first) + ' ' + name(pair.second));
  return json{{"model", {{"vocab", vocab}, {"merges", merges}}}}.dump();
}

// ---- merging ------------------------------------------------------------------------------------
void Bpe::encode_word(std::string_view word, std::vector<std::int32_t>& to) const {
  struct Piece {
    std::int32_t token;
    std::size_t before, after;
  };
  const std::size_t n = word.size();
  std::vector<Piece> pieces(n);
  for (std::size_t i = 0; i < n; ++i) pieces[i] = {token_of_[static_cast<unsigned char>(word[i])], i - 1, i + 1};
  struct Candidate {
    std::int32_t rank;
    std::size_t at;
    std::int32_t left, right, token;  // as they were when it was found
    bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
  };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](std::size_t at) {
    if (at >= n || pieces[at].after >= n) return;
    const std::int32_t left = pieces[at].token, right = pieces[pieces[at].after].token;
    if (const Merge* const m = find(left, right)) candidates.push({m->rank, at, left, right, m->token});
  };
  for (std::size_t i = 0; i + 1 < n; ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate c = candidates.top();
    candidates.pop();
    Piece& left = pieces[c.at];
    if (left.token != c.left || left.after >= n || pieces[left.after].token != c.right) continue;
    pieces[left.after].token = -1;
    left.token = c.token, left.after = pieces[left.after].after;
    if (left.after < n) pieces[left.after].before = c.at;
    consider(left.before), consider(c.at);
  }
  for (std::size_t i = 0; i < n; i = pieces[i].after) to.push_back(pieces[i].token);
}

// ---- learning -----------------------------------------------------------------------------------
Bpe Bpe::trained(const std::map<std::string, Index>& words, Index size) {
  check(size >= 256, "--tokenizer (train:", size, "): the bytes alone are 256 tokens");
  Bpe out;
  std::unordered_map<std::string, std::int32_t> token_of;
  const auto add = [&](const std::string& bytes) {
    const auto [found, is_new] = token_of.try_emplace(bytes, static_cast<std::int32_t>(out.bytes_.size()));
    if (is_new) out.bytes_.push_back(bytes);
    return found->second;
  };
  std::vector<std::pair<char32_t, unsigned char>> alphabet;  // as files have it: by what is seen
  for (std::size_t b = 0; b < 256; ++b) alphabet.emplace_back(shown_bytes().of[b], static_cast<unsigned char>(b));
  std::ranges::sort(alphabet);
  for (const auto& [seen, byte] : alphabet) out.token_of_[byte] = add(std::string(1, static_cast<char>(byte)));

  struct Word {
    std::vector<std::int32_t> tokens;
    Index count;
  };
  std::vector<Word> list;
  std::map<Pair, Index> counts;
  std::map<Pair, std::set<std::size_t>> where;
  std::set<std::pair<Index, Pair>> queue;  // the most frequent first
  const auto change = [&](const Pair& pair, Index by) {
    Index& count = counts[pair];
    queue.erase({-count, pair});
    if ((count += by) > 0) queue.insert({-count, pair});
  };
  const auto count = [&](std::size_t w, int sign) {
    const Word& word = list[w];
    for (std::size_t i = 0; i + 1 < word.tokens.size(); ++i) {
      const Pair pair{word.tokens[i], word.tokens[i + 1]};
      change(pair, sign * word.count);
      if (sign > 0) where[pair].insert(w);
    }
  };
  for (const auto& [text, times] : words) {
    list.push_back({{}, times});
    for (const char c : text) list.back().tokens.push_back(out.token_of_[static_cast<unsigned char>(c)]);
    count(list.size() - 1, 1);
  }
  while (out.size() < size && !queue.empty() && -queue.begin()->first >= 2) {
    const Pair pair = queue.begin()->second;
    const std::int32_t token = add(out.bytes_of(pair.first) + out.bytes_of(pair.second));
    out.add_merge(pair, token);
    const std::set<std::size_t> in = std::move(where[pair]);
    where.erase(pair);
    for (const std::size_t w : in) {
      count(w, -1);
      std::vector<std::int32_t>& tokens = list[w].tokens;
      std::size_t to = 0;
      for (std::size_t i = 0; i < tokens.size(); ++i, ++to) {
        const bool here = tokens[i] == pair.first && i + 1 < tokens.size() && tokens[i + 1] == pair.second;
        tokens[to] = here ? token : tokens[i];
        i += here;
      }
      tokens.resize(to);
      count(w, 1);
    }
  }
  return out;
}

}  // namespace train
