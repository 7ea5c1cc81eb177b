// GPT-2's words as its files have them, and the merging of pairs.
//
//      word    's | 't | 're | 've | 'm | 'll | 'd
//              | blank? letters | blank? numbers | blank? others | blanks (?!\S) | blanks
#include "vocabulary.h"
#include <algorithm>
#include <queue>

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

// ---- tokens -------------------------------------------------------------------------------------
void Vocabulary::add(const std::string& unit, std::int32_t token) {
  if (unit.size() == 1) of_byte_[static_cast<unsigned char>(unit[0])] = token;
  else long_[unit] = token;
}

Vocabulary Vocabulary::bytes() {
  Vocabulary v;
  v.text_ = "bytes";
  for (std::int32_t b = 0; b < 256; ++b) v.add(v.bytes_.emplace_back(1, static_cast<char>(b)), b);
  return v;
}

constexpr std::string_view kCharacters = "characters:", kPairs = "bpe:";

Vocabulary Vocabulary::characters(const std::vector<char32_t>& list) {
  if (list.empty()) fail_with(Code::data, "Vocabulary: no characters");
  Vocabulary v;
  v.alphabet_ = Alphabet::characters, v.text_ = kCharacters;
  for (const char32_t c : list) {
    std::string& unit = v.bytes_.emplace_back();
    append_utf8(unit, c);
    if (v.find(unit) >= 0)
      fail_with(Code::data, "Vocabulary: character ", static_cast<std::uint32_t>(c), " is there twice");
    v.add(unit, static_cast<std::int32_t>(v.size()) - 1);
    v.text_ += unit;
  }
  return v;
}

Vocabulary Vocabulary::from_text(std::string_view text) {
  if (text == "bytes") return bytes();
  if (text.starts_with(kPairs)) return pairs(text.substr(kPairs.size()), "Vocabulary");
  if (!text.starts_with(kCharacters))
    fail_with(Code::data, "Vocabulary: expected `bytes`, `characters:` and a list, or `bpe:` and a tokenizer");
  std::vector<char32_t> list;
  for (std::size_t at = kCharacters.size(); at < text.size();) list.push_back(read_utf8(text, at, "Vocabulary"));
  return characters(list);
}

char32_t read_utf8(std::string_view text, std::size_t& at, const std::string& what) {
  const std::optional<char32_t> c = next_utf8(text, at);
  if (!c)
    fail_with(Code::data, what, ": invalid UTF-8 at byte ", at, "; save it as UTF-8, or take bytes, not characters");
  return *c;
}

std::int32_t Vocabulary::find(std::string_view unit) const {
  if (unit.size() == 1) return of_byte_[static_cast<unsigned char>(unit[0])];
  const auto found = long_.find(unit);
  return found == long_.end() ? -1 : found->second;
}

std::vector<std::int32_t> Vocabulary::encode(std::string_view text, const std::string& what) const {
  std::vector<std::int32_t> out;
  out.reserve(text.size());
  for (std::size_t at = 0, begin = 0; at < text.size(); begin = at) {
    if (alphabet_ == Alphabet::bytes) ++at;
    else read_utf8(text, at, what);
    if (alphabet_ == Alphabet::pairs) continue;  // all of it is UTF-8 before a word is cut
    const std::string_view unit = text.substr(begin, at - begin);
    out.push_back(find(unit));
    if (out.back() < 0)
      fail_with(Code::data, what, ": character '", unit, "' at byte ", begin, " is not among the ", size(),
                " the model knows");
  }
  if (alphabet_ == Alphabet::pairs) encode_words(text, out);
  return out;
}

std::string Vocabulary::decode(std::span<const std::int32_t> tokens) const {
  std::string out;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= size())
      fail_with(Code::data, "Vocabulary: token ", tokens[i], " at position ", i, " is outside 0..", size() - 1);
    out += bytes_[static_cast<std::size_t>(tokens[i])];
  }
  return out;
}

void Vocabulary::encode_words(std::string_view text, std::vector<std::int32_t>& to) const {
  constexpr std::size_t kMostKnown = 1 << 17;
  std::unordered_map<std::string, std::vector<std::int32_t>> known;  // texts say most words often
  for (std::size_t at = 0, end = 0; at < text.size(); at = end) {
    end = word_end(text, at);
    if (known.size() == kMostKnown) known.clear();
    const auto [found, is_new] = known.try_emplace(std::string(text.substr(at, end - at)));
    if (is_new) encode_word(found->first, found->second);
    to.insert(to.end(), found->second.begin(), found->second.end());
  }
}

void Vocabulary::encode_word(std::string_view word, std::vector<std::int32_t>& to) const {
  struct Link {
    std::int32_t token;
    std::size_t before, after;
  };
  const std::size_t n = word.size();
  std::vector<Link> links(n);
  for (std::size_t i = 0; i < n; ++i) links[i] = {of_byte_[static_cast<unsigned char>(word[i])], i - 1, i + 1};
  struct Candidate {
    std::int32_t rank;
    std::size_t at;
    std::int32_t left, right, token;  // as they were when it was found
    bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
  };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](std::size_t at) {
    if (at >= n || links[at].after >= n) return;
    const std::int32_t left = links[at].token, right = links[links[at].after].token;
    const auto m = merges_.find(key(left, right));
    if (m != merges_.end()) candidates.push({m->second.rank, at, left, right, m->second.token});
  };
  for (std::size_t i = 0; i + 1 < n; ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate c = candidates.top();
    candidates.pop();
    Link& left = links[c.at];
    if (left.token != c.left || left.after >= n || links[left.after].token != c.right) continue;
    links[left.after].token = -1;
    left.token = c.token, left.after = links[left.after].after;
    if (left.after < n) links[left.after].before = c.at;
    consider(left.before), consider(c.at);
  }
  for (std::size_t i = 0; i < n; i = links[i].after) to.push_back(links[i].token);
}

}  // namespace train
