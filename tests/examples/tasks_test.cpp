// Tasks: the grammar's entropy against sums over all its texts and against samples, life against a
// board drawn by hand, texts against the file.
#include "../../examples/train/tasks/task.h"
#include <gtest/gtest.h>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include "../support/error_of.h"
#include "../support/scale.h"
#include "../support/settings.h"
#include "../support/temporary.h"
#include "../../examples/train/tasks/boards.h"
#include "../../examples/train/tasks/stories.h"

namespace train {
namespace {

using namespace hilt;

std::vector<std::int32_t> row_of(const Task& task, Split split, Index number, bool targets = false) {
  std::vector<std::int32_t> x(static_cast<std::size_t>(task.length())), y(x.size());
  task.row(split, number, x.data(), y.data());
  return targets ? y : x;
}

// ---- the grammar --------------------------------------------------------------------------------
// Small enough to list: every text with its probability, by hand.
constexpr std::string_view kTiny = R"(
who = 3 a | 1 bb
end = 1 x | 1 yy | 2 z
start: 1 "{who} " >next
next: 2 "says {=who}"
next: 1 "goes {end}" >again
again: 1 "!" >more
more: 1 ""
)";

std::map<std::string, double> tiny_texts() {
  std::map<std::string, double> texts;
  for (const auto& [who, p] : {std::pair("a", 0.75), {"bb", 0.25}}) {
    texts[std::string(who) + " says " + who + "\n"] = p * 2 / 3;
    for (const auto& [end, q] : {std::pair("x", 0.25), {"yy", 0.25}, {"z", 0.5}})
      texts[std::string(who) + " goes " + end + "!\n"] = p / 3 * q;
  }
  return texts;
}

TEST(Grammar, EntropyAndLengthAreTheSumsOverAllTexts) {
  const Grammar g(kTiny);
  double entropy = 0, length = 0;
  for (const auto& [text, p] : tiny_texts()) {
    entropy -= p * std::log(p);
    length += p * static_cast<double>(text.size());
    const std::vector<double> costs = g.costs(text);
    EXPECT_NEAR(std::accumulate(costs.begin(), costs.end(), 0.0), -std::log(p), 1e-12) << text;
  }
  EXPECT_NEAR(g.entropy(), entropy, 1e-12);
  EXPECT_NEAR(g.mean_length(), length, 1e-12);
}

// The first 6 characters of texts put one after the other: all of them are listed, with their
// probabilities.
TEST(Grammar, FloorIsTheEntropyOfTheFirstCharacters) {
  const Grammar g(kTiny);
  std::map<std::string, double> open{{"", 1.0}};
  for (bool grew = true; grew;) {
    grew = false;
    std::map<std::string, double> next;
    for (const auto& [text, p] : open) {
      if (text.size() >= 30) next[text] += p;
      else
        for (const auto& [more, q] : tiny_texts()) next[text + more] += p * q, grew = true;
    }
    open = next;
  }
  for (const std::size_t length : {1u, 2u, 6u, 13u, 30u}) {
    std::map<std::string, double> starts;
    for (const auto& [text, p] : open) starts[text.substr(0, length)] += p;
    double entropy = 0;
    for (const auto& [start, p] : starts) entropy -= p * std::log(p);
    EXPECT_NEAR(g.floor(static_cast<Index>(length)) * static_cast<double>(length), entropy, 1e-9) << length;
  }
}

TEST(Grammar, ForgettingCostsThePriceOfWhatIsToldAgain) {
  const Grammar g(kTiny);
  double more = 0;  // one word of `who`, in two texts of three
  for (const double p : {0.75, 0.25}) more -= 2.0 / 3 * p * std::log(p);
  const Index far = 20000;  // where the first text no longer matters
  EXPECT_NEAR((g.floor_without_memory(far) - g.floor(far)) * g.mean_length(), more, 2e-3);
}

TEST(Stories, SamplesPayWhatTheFloorSays) {
  const Grammar& g = story_grammar();
  const Index length = 192, rows = scaled(20000, 2000);
  Draws draws({7, 1});
  double paid = 0, squares = 0;
  for (Index r = 0; r < rows; ++r) {
    std::string text;
    while (static_cast<Index>(text.size()) < length) text += g.story(draws);
    const std::vector<double> costs = g.costs(text.substr(0, static_cast<std::size_t>(length)));
    const double row = std::accumulate(costs.begin(), costs.end(), 0.0) / static_cast<double>(length);
    paid += row, squares += row * row;
  }
  const double n = static_cast<double>(rows), mean = paid / n, error = std::sqrt((squares / n - mean * mean) / n);
  EXPECT_NEAR(g.floor(length), mean, 4 * error);
  EXPECT_GT(g.floor_without_memory(length), 1.3 * g.floor(length));  // remembering is worth it
}

TEST(Stories, EveryCharacterIsPricedAndOthersAreRefused) {
  EXPECT_EQ(error_of([] { story_grammar().costs("Anna has a red kite. Tom sings by the lake. One day Mia"); }),
            "data: Grammar: no story continues with 'M' at character 52");
  EXPECT_EQ(error_of([] { story_grammar().costs("anna"); }),
            "data: Grammar: no story continues with 'a' at character 0");
  const std::vector<double> costs =
      story_grammar().costs("Anna has a red kite. Tom sings by the lake. One day Anna meets");
  EXPECT_EQ(costs[52], 0.0);  // Anna, told again
  EXPECT_GT(costs[0] + costs[1], 1.0);
}

TEST(Stories, HeldOutStoriesAreNeverTrainedOn) {
  const auto task = stories_task(192, 3);
  std::set<std::string> held_out, trained;
  const auto collect = [&](Split split, std::set<std::string>& to) {
    for (Index r = 0; r < 300; ++r) {
      const std::string text = task->vocabulary().decode(row_of(*task, split, r, true));
      for (std::size_t at = 0, end; (end = text.find('\n', at)) != text.npos; at = end + 1)
        to.insert(text.substr(at, end + 1 - at));
    }
  };
  collect(Split::train, trained), collect(Split::validation, held_out);
  EXPECT_GT(held_out.size(), 100u);
  for (const std::string& story : held_out) EXPECT_TRUE(is_held_out(story) && !trained.contains(story)) << story;
  for (const std::string& story : trained) EXPECT_FALSE(is_held_out(story)) << story;
}

TEST(Stories, ARowOpensWithAnEndOfLineAndTargetsAreTheNextCharacters) {
  const auto task = stories_task(100, 3);
  const auto x = row_of(*task, Split::train, 5), y = row_of(*task, Split::train, 5, true);
  EXPECT_EQ(task->vocabulary().decode(x)[0], '\n');
  EXPECT_TRUE(std::equal(x.begin() + 1, x.end(), y.begin()));
  EXPECT_NE(row_of(*task, Split::train, 6), x);
  EXPECT_EQ(row_of(*stories_task(100, 3), Split::train, 5), x);
  EXPECT_NE(row_of(*stories_task(100, 4), Split::train, 5), x);
}

TEST(Grammar, MistakesAreNamed) {
  EXPECT_EQ(error_of([] { Grammar("a = 1 x\nb: 1 \"y\""); }), "usage: Grammar: no line `start:`");
  EXPECT_EQ(error_of([] { Grammar("x = 1 an | 2 anna\nstart: 1 \"{x}\""); }),
            "usage: Grammar: a list: 'an' is the beginning of 'anna'; a text would have two derivations");
  EXPECT_EQ(error_of([] { Grammar("x = 1 a | -2 b\nstart: 1 \"{x}\""); }),
            "usage: Grammar: a list: expected a weight above 0, and a text where there is a choice");
}

// ---- batches ------------------------------------------------------------------------------------
TEST(Batch, IsItsRowsWhateverTheThreads) {
  const auto task = stories_task(64, 1);
  std::vector<double> first;
  for (const int threads : {1, 2, 3}) {
    const Threads scope(threads);
    const Batch b = task->batch(Split::train, 10, 5);
    EXPECT_EQ(b.inputs.shape(), (Shape{5, 64}));
    const std::vector<double> all = b.inputs.to_vector();
    if (first.empty()) first = all;
    EXPECT_EQ(all, first);
    const auto row = row_of(*task, Split::train, 12);
    EXPECT_TRUE(std::equal(row.begin(), row.end(), all.begin() + 2 * 64));
  }
}

// ---- life ---------------------------------------------------------------------------------------
TEST(Life, AGliderMovesAndTheBorderIsDead) {
  const auto board = [](std::string_view text) {
    std::vector<std::int32_t> cells;
    for (const char c : text) cells.push_back(c == '#');
    return cells;
  };
  EXPECT_EQ(life_step(board(".#..."
                            "..#.."
                            "###.."
                            "....."
                            "....."),
                      5, 5),
            board("....."
                  "#.#.."
                  ".##.."
                  ".#..."
                  "....."));
  EXPECT_EQ(life_step(board("###"
                            "..."
                            "..."),
                      3, 3),
            board(".#."
                  ".#."
                  "..."));  // a torus would wrap it around
  EXPECT_EQ(life_step(board("##"
                            "##"),
                      2, 2),
            board("##"
                  "##"));
  EXPECT_EQ(life_step(board("#"), 1, 1), board("."));
  EXPECT_EQ(error_of([&] { life_step(board("#"), 2, 2); }), "usage: life_step: 1 cells for a board of 2x2");
  const auto task = life_task(6, 9, 1);
  EXPECT_EQ(row_of(*task, Split::train, 4, true), life_step(row_of(*task, Split::train, 4), 6, 9));
}

// ---- ising --------------------------------------------------------------------------------------
/// p of every lattice of this size, given `noisy` where it is there: by the definition.
std::vector<double> all_lattices(Index height, Index width, double coupling,
                                 const std::vector<std::int32_t>& noisy = {}) {
  const Index n = height * width;
  std::vector<double> p(std::size_t{1} << n);
  double z = 0;
  for (std::size_t state = 0; state < p.size(); ++state) {
    const auto spin = [&](Index y, Index x) { return (state >> (y * width + x) & 1) ? 1 : -1; };
    double energy = 0, seen = 1;
    for (Index y = 0; y < height; ++y)
      for (Index x = 0; x < width; ++x) {
        if (y + 1 < height) energy += spin(y, x) * spin(y + 1, x);
        if (x + 1 < width) energy += spin(y, x) * spin(y, x + 1);
        if (!noisy.empty())
          seen *= (spin(y, x) > 0) == (noisy[static_cast<std::size_t>(y * width + x)] == 1) ? 0.8 : 0.2;
      }
    z += p[state] = std::exp(coupling * energy) * seen;
  }
  for (double& x : p) x /= z;
  return p;
}

TEST(IsingLattice, PosteriorIsTheSumOverAllStates) {
  Draws draws({5, 1});
  for (const auto& [height, width] :
       {std::pair<Index, Index>{1, 1}, {1, 7}, {6, 1}, {2, 3}, {3, 2}, {4, 4}, {3, 5}, {5, 3}})
    for (const double coupling : {0.0, Ising::kCritical, 1.5, -0.7}) {
      const Ising lattice(height, width, coupling);
      std::vector<std::int32_t> noisy;
      for (Index i = 0; i < height * width; ++i) noisy.push_back(static_cast<std::int32_t>(draws.below(2)));
      const std::vector<double> p = all_lattices(height, width, coupling, noisy), up = lattice.posterior(noisy);
      for (std::size_t i = 0; i < up.size(); ++i) {
        double exact = 0;
        for (std::size_t state = 0; state < p.size(); ++state) exact += (state >> i & 1) ? p[state] : 0;
        EXPECT_NEAR(up[i], exact, 1e-12) << height << 'x' << width << ' ' << coupling << " cell " << i;
      }
    }
}

// Every state as often as it should be: chi squared over all of them, and each within 5 deviations.
TEST(IsingLattice, SamplesAreExact) {
  for (const auto& [height, width] : {std::pair<Index, Index>{3, 3}, {2, 4}, {5, 2}}) {
    const Ising lattice(height, width);
    const std::vector<double> p = all_lattices(height, width, Ising::kCritical);
    const double n = static_cast<double>(scaled(400000, 40000)), states = static_cast<double>(p.size());
    std::vector<double> seen(p.size());
    Draws draws({9, 2});
    for (double i = 0; i < n; ++i) {
      const std::vector<std::int32_t> spins = lattice.sample(draws);
      std::size_t state = 0;
      for (std::size_t k = 0; k < spins.size(); ++k) state |= static_cast<std::size_t>(spins[k]) << k;
      seen[state] += 1;
    }
    double chi = 0;
    for (std::size_t s = 0; s < p.size(); ++s) {
      chi += (seen[s] - n * p[s]) * (seen[s] - n * p[s]) / (n * p[s]);
      EXPECT_NEAR(seen[s], n * p[s], 5 * std::sqrt(n * p[s]) + 5) << s;
    }
    EXPECT_NEAR(chi, states - 1, 5 * std::sqrt(2 * states)) << height << 'x' << width;
  }
}

TEST(Ising, ItsFloorIsThePosteriorOfTheTrueSpinsOnTheSameRows) {
  const auto task = ising_task(3, 4, 7);
  std::set<std::vector<std::int32_t>> rows;
  double flipped = 0;
  for (Index r = 0; r < 300; ++r) {
    const auto x = row_of(*task, Split::validation, r), y = row_of(*task, Split::validation, r, true);
    const std::vector<double> p = all_lattices(3, 4, Ising::kCritical, x);
    double cost = 0, right = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      double up = 0;
      for (std::size_t state = 0; state < p.size(); ++state) up += (state >> i & 1) ? p[state] : 0;
      cost -= std::log(y[i] ? up : 1 - up), right += (up > 0.5) == (y[i] == 1), flipped += x[i] != y[i];
    }
    const Task::Exact exact = task->exact(x.data(), y.data());
    EXPECT_NEAR(exact.cost, cost, 1e-10);
    EXPECT_EQ(exact.right, right);
    rows.insert(x);
    EXPECT_EQ(row_of(*ising_task(3, 4, 7), Split::validation, r), x);
  }
  EXPECT_GT(rows.size(), 200u);
  EXPECT_NEAR(flipped / (300 * 12), 0.2, 5 * std::sqrt(0.16 / (300 * 12)));
  EXPECT_EQ(error_of([] { Ising(13, 2); }), "usage: Ising: a lattice of 13x2; its exact answer is known up to 12x12");
}

// ---- text ---------------------------------------------------------------------------------------
std::string umlauts(Index n) {  // 1, 2, 3 and 4 bytes
  std::string text;
  const char32_t kinds[] = {U'a', U'\u00e4', U'\u20ac', U'\U0001f600', U'\n', U'z'};
  for (Index i = 0; i < n; ++i) append_utf8(text, kinds[(i * i + i / 7) % 6]);
  return text;
}

TEST(Text, CharactersComeBackFromAnywhere) {
  const Temporary dir;
  const Index n = 5000;
  const std::string text = umlauts(n), path = dir.file("t.txt", text);
  const auto task = text_task(path, Alphabet::characters, 50, 1);
  EXPECT_EQ(task->vocabulary().size(), 6);
  const std::vector<std::int32_t> all = task->vocabulary().encode(text, "text");
  ASSERT_EQ(all.size(), static_cast<std::size_t>(n));
  EXPECT_EQ(task->vocabulary().decode(all), text);
  const auto validation = all.begin() + n - n / 10;
  for (Index r = 0; r < 200; ++r) {
    auto row = row_of(*task, Split::train, r), held = row_of(*task, Split::validation, r);
    row.push_back(row_of(*task, Split::train, r, true).back());
    EXPECT_NE(std::search(all.begin(), validation, row.begin(), row.end()), validation) << r;
    EXPECT_NE(std::search(validation, all.end(), held.begin(), held.end()), all.end()) << r;
  }
}

TEST(Text, BytesAreReadWhereTheyStand) {
  const Temporary dir;
  std::string text(3000, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i % 251);
  const auto task = text_task(dir.file("t.bin", text), Alphabet::bytes, 20, 1);
  EXPECT_EQ(task->vocabulary().size(), 256);
  const std::string row = task->vocabulary().decode(row_of(*task, Split::train, 0));
  EXPECT_NE(text.find(row), text.npos);
}

TEST(Text, WhatCannotBeReadIsNamed) {
  const Temporary dir;
  const auto refusal = [&](const std::string& path, Alphabet alphabet = Alphabet::characters, Index length = 10) {
    std::string text = error_of([&] { text_task(path, alphabet, length, 1); });
    for (std::size_t at; (at = text.find(dir.directory() + "/")) != text.npos;)
      text.erase(at, dir.directory().size() + 1);
    return text;
  };
  EXPECT_EQ(refusal(dir.path("none")), "data: --text (none): cannot open: No such file or directory");
  EXPECT_EQ(refusal(dir.file("empty", "")), "data: --text (empty): is empty; expected a text");
  std::filesystem::create_directory(dir.path("d"));
  EXPECT_EQ(refusal(dir.path("d")), "data: --text (d): is a directory; expected a text");
  EXPECT_EQ(refusal(dir.file("short", std::string(21, 'x')), Alphabet::bytes),
            "data: --text (short): has 21 bytes; --context 10 needs at least 22 (a row and the token after it, for "
            "training and for validation); use a longer "
            "text or a smaller --context");
  EXPECT_EQ(refusal(dir.file("enough", std::string(22, 'x')), Alphabet::bytes), "nothing");
  for (const auto& [bad, at] : {std::pair<std::string, int>("\xff", 0),
                                {"\xc0\x80", 0},
                                {"\xed\xa0\x80", 0},
                                {"\xf4\x90\x80\x80", 0},
                                {"\xe2\x82", 0},
                                {"\x80", 0}})
    EXPECT_EQ(refusal(dir.file("bad", std::string(3000, 'x') + bad)),
              "data: --text (bad): invalid UTF-8 at byte 3000; save it as UTF-8, or take bytes, not characters")
        << at;
  const Vocabulary known = Vocabulary::characters({U'a', U'b'});
  EXPECT_EQ(error_of([&] { known.encode("abc", "--prompt"); }),
            "data: --prompt: character 'c' at byte 2 is not among the 2 the model knows");
  EXPECT_EQ(error_of([&] {
              known.decode(std::vector<std::int32_t>{0, 2});
            }),
            "data: Vocabulary: token 2 at position 1 is outside 0..1");
}

TEST(Text, AVocabularySurvivesBeingWrittenDown) {
  const Vocabulary v = Vocabulary::characters({U'\n', U'"', U'\\', U'\u20ac'});
  EXPECT_EQ(Vocabulary::from_text(v.text()).text(), v.text());
  EXPECT_EQ(Vocabulary::from_text("bytes").alphabet(), Alphabet::bytes);
  EXPECT_EQ(error_of([] { Vocabulary::from_text("characters:aba"); }), "data: Vocabulary: character 97 is there twice");
  EXPECT_EQ(error_of([] { Vocabulary::from_text("characters:"); }), "data: Vocabulary: no characters");
}

// Any bytes at all: an error with a place, or a text that comes back.
TEST(Text, FuzzedUtf8IsReadOrRefused) {
  std::mt19937_64 random(11);
  const Index runs = scaled(7000000, 20000);
  Index refused = 0;
  std::string text, again;
  for (Index i = 0; i < runs; ++i) {
    text.clear();
    const auto kind = random() % 8;  // noise, good texts, and most often one bit away from a good one
    for (auto n = random() % 6 + 1; n > 0; --n) {
      auto c = static_cast<char32_t>(random() >> (43 + random() % 14));  // of all lengths
      if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) c = U'x';
      if (kind > 0) append_utf8(text, c);
      else text += static_cast<char>(random() % 3 ? 0x80 | random() : random());
    }
    if (kind > 2) text[random() % text.size()] ^= static_cast<char>(1 << random() % 8);
    std::size_t at = 0;
    std::optional<char32_t> c = U'x';
    for (again.clear(); c && at < text.size();)
      if ((c = next_utf8(text, at))) append_utf8(again, *c);
    if (!c) again = text, ++refused;
    ASSERT_EQ(again, text);
    // Throwing takes twenty times as long as all that: of 32 texts one is read by what throws.
    if (i % 32 != 0) continue;
    const std::string why = error_of([&] {
      for (std::size_t from = 0; from < text.size();) (void)read_utf8(text, from, "x");
    });
    ASSERT_EQ(why, c ? "nothing"
                     : "data: x: invalid UTF-8 at byte " + std::to_string(at) +
                           "; save it as UTF-8, or take bytes, not characters");
  }
  EXPECT_GT(refused, runs / 4);
  EXPECT_LT(refused, runs * 3 / 4);
  std::printf("[ fuzz     ] utf-8: %lld texts, %lld refused\n", static_cast<long long>(runs),
              static_cast<long long>(refused));
}

TEST(Yardsticks, KnowMoreOneAfterTheOther) {
  const auto task = stories_task(128, 1);
  const Yardsticks y = yardsticks(*task, 300);
  EXPECT_NEAR(y.uniform, std::log(static_cast<double>(task->vocabulary().size())), 1e-12);
  EXPECT_GT(y.uniform, y.unigram);
  EXPECT_GT(y.unigram, y.bigram);
  EXPECT_GT(y.bigram, story_grammar().floor_without_memory(128));
}

}  // namespace
}  // namespace train
