// Byte pairs against those of another implementation; golden/make_bpe.py says which.
#include "../../examples/train/tasks/vocabulary.h"
#include <gtest/gtest.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include "../../examples/train/tasks/task.h"
#include "../support/error_of.h"
#include "../support/temporary.h"

namespace train {
namespace {

using namespace hilt;
using nlohmann::json;

const json& golden() {
  static const json all = [] {
    const char* const source = std::getenv("SRC");
    const std::filesystem::path here =
        source ? std::filesystem::path(source) / "tests" / "examples" : std::filesystem::path(__FILE__).parent_path();
    return json::parse(std::ifstream(here / "golden" / "bpe.json"));
  }();
  return all;
}
Vocabulary golden_tokenizer() { return Vocabulary::pairs(golden()["tokenizer"].dump(), "golden"); }

TEST(Bpe, TokensAreThoseOfAnotherImplementation) {
  const Vocabulary vocabulary = golden_tokenizer();
  EXPECT_EQ(vocabulary.size(), 400);
  std::size_t tokens = 0;
  for (const json& one : golden()["texts"]) {
    const std::string text = one["text"];
    EXPECT_EQ(vocabulary.encode(text, "text"), one["tokens"].get<std::vector<std::int32_t>>()) << text;
    EXPECT_EQ(vocabulary.decode(vocabulary.encode(text, "text")), text);
    tokens += one["tokens"].size();
  }
  EXPECT_GT(tokens, 2000u);
  const Vocabulary again = Vocabulary::from_text(vocabulary.text());
  EXPECT_EQ(again.text(), vocabulary.text());
  EXPECT_EQ(again.alphabet(), Alphabet::pairs);
  EXPECT_EQ(vocabulary.decode(std::vector{vocabulary.find("\n")}), "\n");
  EXPECT_EQ(vocabulary.find("\U0001f600"), -1);
}

TEST(Bpe, BothKindsOfFilesSayTheSame) {
  const Temporary pair, one;
  const json& tokenizer = golden()["tokenizer"];
  pair.file("vocab.json", tokenizer["model"]["vocab"].dump());
  std::string merges = "#version: 0.2\n";
  for (const json& merge : tokenizer["model"]["merges"])
    merges += merge[0].get<std::string>() + ' ' + merge[1].get<std::string>() + '\n';
  pair.file("merges.txt", merges);
  one.file("tokenizer.json", tokenizer.dump());
  EXPECT_EQ(Vocabulary::pairs_of(pair.directory()).text(), golden_tokenizer().text());
  EXPECT_EQ(Vocabulary::pairs_of(one.directory()).text(), golden_tokenizer().text());
}

TEST(Bpe, ALongTextIsItsTokens) {
  const Temporary dir;
  const std::string part = golden()["texts"].back()["text"];
  std::string text;
  while (text.size() < std::size_t{1} << 20) text += part;
  text += "don't " + part;
  const std::string path = dir.file("text", text);
  const Vocabulary vocabulary = golden_tokenizer();
  const std::vector<std::int32_t> tokens = vocabulary.encode(text, "text");
  EXPECT_EQ(vocabulary.decode(tokens), text);
  const auto task = text_task(path, Alphabet::pairs, 30, 1, vocabulary);
  std::vector<std::int32_t> inputs(30), targets(30);
  task->row(Split::validation, 3, inputs.data(), targets.data());
  const auto held = tokens.end() - static_cast<std::ptrdiff_t>(tokens.size() / 10);
  const auto found = std::search(held, tokens.end(), inputs.begin(), inputs.end());
  ASSERT_NE(found, tokens.end());
  EXPECT_TRUE(std::equal(targets.begin(), targets.end(), found + 1));
  EXPECT_TRUE(
      error_of([&] { text_task(dir.file("short", std::string(100, '\n') + "!"), Alphabet::pairs, 150, 1, vocabulary); })
          .ends_with(" tokens; --context 150 needs at least 302 (a row and the token after it, for training and "
                     "for validation); use a longer text or a smaller --context"));
  EXPECT_EQ(error_of([&] { text_task(path, Alphabet::bytes, 30, 1, vocabulary); }),
            "data: --text (" + path + "): read as bytes, the model knows others");
}

TEST(Bpe, WhatIsNotGpt2sIsNamed) {
  const auto why = [](const char* place, const json& value) {
    json changed = golden()["tokenizer"];
    changed[json::json_pointer(place)] = value;
    return error_of([&] { Vocabulary::pairs(changed.dump(), "t"); });
  };
  EXPECT_EQ(why("/model/type", "BPE"), "nothing");
  EXPECT_EQ(why("/model/type", "Unigram"), "data: t: type \"Unigram\" is not GPT-2's, which alone is known here");
  EXPECT_TRUE(why("/normalizer", {{"type", "NFC"}}).starts_with("data: t: normalizer {\"type\":\"NFC\"} is not"));
  EXPECT_TRUE(why("/pre_tokenizer/add_prefix_space", true).starts_with("data: t: pre_tokenizer {"));
  EXPECT_TRUE(why("/model/merges/0", "a").starts_with("data: t: merge 'a': its parts"));
  EXPECT_TRUE(why("/model/merges/0", {"a", "\u6771"}).starts_with("data: t: merge 'a "));
  EXPECT_TRUE(why("/model/vocab/!", 1 << 30).starts_with("data: t: token ! has number 1073741824, at most "));
  EXPECT_TRUE(why("/model/vocab/!", "x").starts_with("data: t: token ! has number \"x\", at most "));
  json lacks = golden()["tokenizer"];
  lacks["model"]["vocab"].erase("!");
  EXPECT_EQ(error_of([&] { Vocabulary::pairs(lacks.dump(), "t"); }),
            "data: t: its vocabulary lacks byte 33, !; GPT-2's has all 256");
  EXPECT_TRUE(why("/model/vocab/!", 2000000).starts_with("data: t: token ! has number 2000000, at most ")) << "no text";
  EXPECT_TRUE(why("/model/vocab/!", 3.5).starts_with("data: t: token ! has number 3.5, at most "));
  EXPECT_TRUE(why("/model/vocab/!", -1).starts_with("data: t: token ! has number -1, at most "));
  EXPECT_EQ(why("/model/merges/0", {"t", "h", "e"}),
            "data: t: merge [\"t\",\"h\",\"e\"] is not GPT-2's, which alone is known here");
  EXPECT_EQ(why("/model/merges", nullptr), "data: t: 'merges' should be of type array, is null");
  EXPECT_EQ(why("/model", nullptr), "data: t: 'model' should be of type object, is null");
  EXPECT_EQ(why("/model/dropout", 0.0), "nothing");
  EXPECT_EQ(why("/model/dropout", 0.1), "data: t: dropout 0.1 is not GPT-2's, which alone is known here");
  const json& known = golden()["tokenizer"]["model"]["vocab"];
  EXPECT_EQ(why("/model/vocab/!", known["a"]), "data: t: tokens a and ! both have number " + known["a"].dump());
  const json added{{{"id", 500}, {"content", "fox"}, {"special", false}}};
  EXPECT_TRUE(why("/added_tokens", added).starts_with("data: t: added token that is not special {"));
  const std::string deep = std::string(300000, '[') + std::string(300000, ']');  // deeper than a stack
  EXPECT_EQ(error_of([&] { Vocabulary::pairs("{\"model\": {\"type\": " + deep + "}}", "t"); }),
            "data: t: nested more than 16 deep");
  const Temporary pair;
  (void)(pair.file("vocab.json", deep), pair.file("merges.txt", ""));
  EXPECT_EQ(error_of([&] { Vocabulary::pairs_of(pair.directory()); }),
            "data: --tokenizer (" + pair.directory() + "/vocab.json): nested more than 16 deep");
  EXPECT_EQ(error_of([] { Vocabulary::pairs("{", "t"); }), "data: t: not JSON at byte 1");
  EXPECT_EQ(error_of([] { Vocabulary::pairs(R"({"a": {"b": 1}, "c": {"b": 1, "d": [], "b": 2}})", "t"); }),
            "data: t: \"b\" stands there twice");
  EXPECT_TRUE(
      error_of([] { Vocabulary::pairs_of("/none"); }).starts_with("data: --tokenizer (/none/tokenizer.json): "));
  const Temporary dir;
  std::string bad(3000, 'x');
  bad += '\xff';
  const std::string path = dir.file("bad", bad);
  EXPECT_EQ(error_of([&] { text_task(path, Alphabet::pairs, 5, 1, golden_tokenizer()); }),
            "data: --text (" + path + "): invalid UTF-8 at byte 3000; save it as UTF-8, or take bytes, not characters");
}

}  // namespace
}  // namespace train
