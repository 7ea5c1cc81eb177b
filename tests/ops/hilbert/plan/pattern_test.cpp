// Patterns as text, there and back, with whole error messages; block lists from builders and files.
#include "ops/hilbert/plan/pattern.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "core/error.h"
#include "ops/hilbert/plan/plan.h"
#include "tests/support/edited.h"
#include "tests/support/scale.h"

using namespace hilt;

namespace {

using Kind = Branch::Kind;

std::string error_of(const std::function<void()>& f, Code code = Code::usage) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  return "(no error)";
}
std::string parse_error(const std::string& text) {
  return error_of([&] { (void)parse_pattern(text); });
}

/// A file that goes when the test does.
class File {
 public:
  explicit File(const std::string& content)
      : path_(std::filesystem::temp_directory_path() / ("hilt_blocks_" + std::to_string(::getpid()) + ".npy")) {
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~File() { std::filesystem::remove(path_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

/// An .npy file of version 1.0.
std::string npy(const std::string& descr, const std::string& shape, const std::string& data, bool fortran = false) {
  std::string header =
      "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") + ", 'shape': " + shape + ", }";
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::string out("\x93NUMPY\x01\x00", 8);
  out += static_cast<char>(header.size() & 255);
  out += static_cast<char>(header.size() >> 8);
  return out + header + data;
}
template <class T> std::string bytes(std::initializer_list<T> values) {
  return std::string(reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T));
}

}  // namespace

TEST(ParsePattern, ReadsEverySpellingAndWritesItBack) {
  const auto one = [](auto change) {
    Branch b;
    change(b);
    return Pattern{b};
  };
  EXPECT_EQ(parse_pattern("dense"), Pattern{Branch{}});
  EXPECT_EQ(parse_pattern("segment:128"), one([](Branch& b) { b.kind = Kind::segment, b.size = 128; }));
  EXPECT_EQ(parse_pattern("segment:128,dilation=4"),
            one([](Branch& b) { b.kind = Kind::segment, b.size = 128, b.dilation = 4; }));
  EXPECT_EQ(parse_pattern("segment:128,dilation=4,offset=3"),
            one([](Branch& b) { b.kind = Kind::segment, b.size = 128, b.dilation = 4, b.offset = 3; }));
  EXPECT_EQ(parse_pattern("segment:128,offset=3,dilation=4"), parse_pattern("segment:128,dilation=4,offset=3"));
  EXPECT_EQ(parse_pattern("segment:128,dilation=4,offset=head"),
            one([](Branch& b) { b.kind = Kind::segment, b.size = 128, b.dilation = 4, b.offset_by_head = true; }));
  EXPECT_EQ(parse_pattern("slide:16"), one([](Branch& b) { b.kind = Kind::slide, b.size = 16; }));
  EXPECT_EQ(parse_pattern("slide:0"), one([](Branch& b) { b.kind = Kind::slide, b.size = 0; }));
  EXPECT_EQ(parse_pattern("neighborhood:17"), one([](Branch& b) { b.kind = Kind::neighborhood, b.size = 17; }));
  EXPECT_EQ(parse_pattern("window2d:8x16"),
            one([](Branch& b) { b.kind = Kind::window2d, b.rows = 8, b.columns = 16; }));
  EXPECT_EQ(parse_pattern("slide2d:2x3"), one([](Branch& b) { b.kind = Kind::slide2d, b.rows = 2, b.columns = 3; }));
  EXPECT_EQ(parse_pattern("neighborhood2d:5x7"),
            one([](Branch& b) { b.kind = Kind::neighborhood2d, b.rows = 5, b.columns = 7; }));
  EXPECT_EQ(parse_pattern("neighborhood3d:3x5x7,causal=1x0x0,dilation=2"), one([](Branch& b) {
              b.kind = Kind::neighborhood3d, b.frames = 3, b.rows = 5, b.columns = 7;
              for (Branch::Axis& axis : b.axes) axis.dilation = 2;
              b.axes[0].causal = true;
            }));
  EXPECT_EQ(parse_pattern("slide2d:3x3,stride=2x2,causal=0"), parse_pattern("slide2d:3x3,stride=2"));
  const Pattern three = parse_pattern("segment:128+segment:512,dilation=4+slide:3");
  ASSERT_EQ(three.size(), 3u);
  EXPECT_EQ(three[1], parse_pattern("segment:512,dilation=4")[0]);
  EXPECT_EQ(three[2], parse_pattern("slide:3")[0]);
  for (const char* text : {"dense",
                           "segment:128",
                           "segment:128,dilation=4",
                           "segment:128,dilation=4,offset=3",
                           "segment:128,dilation=4,offset=head",
                           "slide:16",
                           "slide:0",
                           "neighborhood:17",
                           "window2d:8x16",
                           "slide2d:2x3",
                           "slide2d:0x3",
                           "neighborhood2d:5x7",
                           "segment:128+segment:512,dilation=4",
                           "dense+slide:3+dense",
                           "segment:8,shift=3",
                           "segment:8,dilation=2,offset=head,shift=3",
                           "segment:8,shift=3,tail=borrow,prefix=2",
                           "slide:3,dilation=2,stride=5,causal=1",
                           "neighborhood:6,causal=1",
                           "window2d:4x6,shift=2x3",
                           "window2d:4x6,shift=2,causal=0x1",
                           "window3d:2x8x4",
                           "slide3d:0x1x2,dilation=1x2x3",
                           "neighborhood3d:3x5x7,stride=2,causal=1x0x0",
                           "segment:8|slide:3",
                           "dense,prefix=4",
                           "window2d:4x6,shift=2x3,prefix=16",
                           "segment:8|slide:3+segment:4,dilation=2,prefix=1",
                           "dense+slide:1|segment:4,dilation=2,offset=1|window2d:2x2+slide:5",
                           "blocks:64@local:0",
                           "blocks:64@dilated:1/2/4",
                           "blocks:64@global_local:0:2+blocks:8@top:4"}) {
    EXPECT_EQ(to_string(parse_pattern(text)), text);
    EXPECT_EQ(parse_pattern(to_string(parse_pattern(text))), parse_pattern(text)) << text;
  }
}

TEST(ParsePattern, GoldenErrors) {
  const std::string kinds =
                        " is not one of dense, segment, slide, neighborhood, window2d, slide2d, neighborhood2d, "
                        "window3d, slide3d, neighborhood3d, blocks",
                    near = kinds + "; did you mean ";
  const std::string list =
      ": expected local:RADIUS, dilated:R/R/.., global_local:GLOBAL:RADIUS, top:K or FILE.npy; as in blocks:64@local:1";
  const std::string sides = "expected HEIGHTxWIDTH; as in window2d:8x16";
  const std::pair<const char*, std::string> golden[] = {
      {"dens", "'dens'" + near + "dense?"},
      {"segmnt:4", "'segmnt'" + near + "segment?"},
      {"SEGMENT:4", "'SEGMENT'" + near + "segment?"},
      {"s:4", "'s'" + near + "segment, slide, slide2d or slide3d?"},
      {" segment:4", "' segment'" + near + "segment?"},
      {"", "''" + kinds},
      {"full", "'full'" + kinds},
      {"dense:4", "dense: takes no size, got '4'; as in dense"},
      {"segment", "segment: needs a size; as in segment:128"},
      {"segment:", "segment: needs a size; as in segment:128"},
      {"slide", "slide: needs a size; as in slide:16"},
      {"segment:0", "segment: size 0 must be at least 1; as in segment:128"},
      {"dense+segment:0", "segment: size 0 must be at least 1; as in segment:128"},
      {"segment:4x", "segment: size '4x' is not a whole number; as in segment:128"},
      {"segment:4 ,dilation=2", "segment: size '4 ' is not a whole number; as in segment:128"},
      {"segment:99999999999999999999",
       "segment: size 99999999999999999999 must be at most 2147483647; as in segment:128"},
      {"segment:4,dilation=0", "segment: dilation 0 must be at least 1; as in segment:128"},
      {"segment:4,dilatoin=2",
       "segment: option: 'dilatoin' is not one of dilation, offset, shift, tail; did you mean dilation?"},
      {"segment:4,tail=lend", "segment: tail: 'lend' is not one of short, borrow"},
      {"segment:4,dilation=2,offset=heads", "segment: offset 'heads' is not a whole number; as in segment:128"},
      {"segment:4,dilation=2,dilation=2", "segment: dilation is given twice"},
      {"slide:-1", "slide: radius -1 must be at least 0; as in slide:16"},
      {"dense,dilation=2", "dense: 'dilation=2': dense takes no options"},
      {"blocks:4@local:1,shift=2", "blocks: 'shift=2': blocks takes no options"},
      {"slide:3,offset=2", "slide: option: 'offset' is not one of dilation, stride, causal"},
      {"window2d:3x4,stride=2", "window2d: option: 'stride' is not one of shift, causal"},
      {"slide:3,stride=0", "slide: stride 0 must be at least 1; as in slide:16"},
      {"slide:3,causal=2", "slide: causal 2 must be 0 or 1; as in slide:16"},
      {"slide:3,stride=2x2",
       "slide: stride '2x2' has 2 numbers: expected one, or one for each of 1 axis; as in slide:16"},
      {"slide2d:3x3,dilation=2x2x2",
       "slide2d: dilation '2x2x2' has 3 numbers: expected one, or one for each of 2 axes; as in slide2d:3x3"},
      {"window3d:3x4", "window3d: '3x4': expected FRAMESxHEIGHTxWIDTH; as in window3d:2x8x8"},
      {"neighborhood3d:0x3x3", "neighborhood3d: frames 0 must be at least 1; as in neighborhood3d:3x5x5"},
      {"window2d:3", "window2d: '3': " + sides},
      {"window2d:3x", "window2d: '3x': " + sides},
      {"window2d:x3", "window2d: 'x3': " + sides},
      {"window2d:3x4x5", "window2d: '3x4x5': " + sides},
      {"window2d:3x0", "window2d: width 0 must be at least 1; as in window2d:8x16"},
      {"blocks:4", "blocks: '4': expected SIZE@LIST; as in blocks:64@local:1"},
      {"blocks:4@lcal:1", "blocks: 'lcal' is not one of local, dilated, global_local, top; did you mean local?"},
      {"blocks:4@local", "blocks: 'local'" + list},
      {"blocks:4@local:1:2", "blocks: 'local:1:2'" + list},
      {"blocks:4@dilated", "blocks: 'dilated'" + list},
      {"blocks:4@global_local:1", "blocks: 'global_local:1'" + list},
      {"blocks:4@local:x", "blocks: number 'x' is not a whole number; as in blocks:64@local:1"},
      {"blocks:4@dilated:1/0", "blocks: number 0 must be at least 1; as in blocks:64@local:1"},
      {"blocks:4@top:0", "blocks: number 0 must be at least 1; as in blocks:64@local:1"},
  };
  for (const auto& [text, message] : golden)
    EXPECT_EQ(parse_error(text), "pattern (" + std::string(text) + "): " + message) << text;
}

TEST(ParsePattern, NamesTheTextOrTheNumberThatItRefuses) {
  for (const auto& [text, named] : {std::pair{"", "''"},
                                    {"segment:4+", "''"},
                                    {"+segment:4", "''"},
                                    {"segment:4++dense", "''"},
                                    {"segment:4|", "''"},
                                    {"segment:4+|dense", "''"},
                                    {"segment:0", "0"},
                                    {"segment:-4", "-4"},
                                    {"segment:4,dilation=0", "0"},
                                    {"segment:4,dilation=", ""},
                                    {"segment:4,dilation", ""},
                                    {"segment:4,offset=-1", "-1"},
                                    {"slide:-1", "-1"},
                                    {"neighborhood:0", "0"},
                                    {"window2d:0x3", "0"},
                                    {"slide2d:-1x2", "-1"},
                                    {"segment:99999999999999999999", "99999999999999999999"},
                                    {"slide:9223372036854775807", "9223372036854775807"},
                                    {"blocks:0@x.npy", "0"},
                                    {"blocks:0@local:1", "0"},
                                    {"blocks:4@pairs.dat", "pairs.dat"},
                                    {"segment:4,dilation=2,dilation=3", "dilation"},
                                    {"segment:4,offset=1,dilation=2,offset=0", "offset"}}) {
    const std::string message = parse_error(text);
    EXPECT_NE(message, "(no error)") << text;
    EXPECT_NE(message.find(named), std::string::npos) << text << ": " << message;
  }
}

TEST(ParsePattern, ReadsModesAndCausality) {
  EXPECT_EQ(error_of([] { (void)parse_dilation_mode("allqueries"); }),
            "dilation mode: 'allqueries' is not one of all_queries, longnet, head_groups, residue; did you mean "
            "all_queries?");
  EXPECT_EQ(error_of([] { (void)parse_dilation_mode("head-groups"); }),
            "dilation mode: 'head-groups' is not one of all_queries, longnet, head_groups, residue; did you mean "
            "head_groups?");
  EXPECT_EQ(error_of([] { (void)parse_causality("tokens"); }),
            "causal: 'tokens' is not one of none, token, curve; did you mean token?");
  EXPECT_NE(error_of([] { (void)parse_causality(""); }), "(no error)");
  for (const DilationMode mode :
       {DilationMode::all_queries, DilationMode::longnet, DilationMode::head_groups, DilationMode::residue})
    EXPECT_EQ(parse_dilation_mode(name_of(mode)), mode);
  for (const Causality c : {Causality::none, Causality::token, Causality::curve})
    EXPECT_EQ(parse_causality(name_of(c)), c);
}

TEST(ParsePattern, SurvivesAnyText) {
  // Either a pattern that writes itself back, or one typed error. Mutations of good texts, and
  // noise.
  std::mt19937 random(1);
  const std::string alphabet = "segmntlidhbockwruaf23x0123456789,=+|:@-. \t\n\xff'";
  const std::string good[] = {"blocks:8@global_local:1:2+blocks:16@dilated:1/2",
                              "segment:128+segment:512,dilation=4,offset=head",
                              "neighborhood2d:5x7+slide:3",
                              "window2d:8x16,shift=4x3|slide:2+dense",
                              "slide3d:1x2x3,dilation=2,stride=1x2x3,causal=1",
                              "dense"};
  Index parsed = 0, refused = 0;
  for (int i = 0; i < scaled(1000000, 20000); ++i) {
    const std::string text = edited(good[random() % std::size(good)], alphabet, 4, random);
    if (text.find(".npy") != std::string::npos) continue;  // files have their own test
    try {
      const Pattern p = parse_pattern(text);
      ASSERT_EQ(parse_pattern(to_string(p)), p) << text;
      ++parsed;
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), Code::usage) << text;
      ++refused;
    }
  }
  EXPECT_GT(parsed, scaled(1000, 100));
  EXPECT_GT(refused, 1000);
  std::printf("[ fuzz     ] pattern: %lld texts, %lld of them patterns\n", static_cast<long long>(parsed + refused),
              static_cast<long long>(parsed));
}

// ---- block lists --------------------------------------------------------------------------------

TEST(Blocks, Builders) {
  const auto expect = [](const BlockPairs& got, BlockPairs want) { EXPECT_EQ(got, want); };
  expect(local_blocks(4, 1), {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {1, 2}, {2, 1}, {2, 2}, {2, 3}, {3, 2}, {3, 3}});
  expect(local_blocks(2, 0), {{0, 0}, {1, 1}});
  expect(local_blocks(2, 9), {{0, 0}, {0, 1}, {1, 0}, {1, 1}});
  expect(local_blocks(0, 1), {});
  expect(dilated_blocks(5, {2}),
         {{0, 0}, {0, 2}, {1, 1}, {1, 3}, {2, 0}, {2, 2}, {2, 4}, {3, 1}, {3, 3}, {4, 2}, {4, 4}});
  expect(dilated_blocks(3, {1, 1, 9}), {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {1, 2}, {2, 1}, {2, 2}});  // each pair once
  expect(global_local_blocks(4, 1, 0),
         {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 0}, {1, 1}, {2, 0}, {2, 2}, {3, 0}, {3, 3}});
  expect(global_local_blocks(2, 5, 0), {{0, 0}, {0, 1}, {1, 0}, {1, 1}});
  // A plan makes the list of a rule for as many blocks as there are.
  for (const auto& [text, pairs] : {std::pair{"local:1", local_blocks(5, 1)},
                                    {"dilated:3/1", dilated_blocks(5, {1, 3})},
                                    {"global_local:2:0", global_local_blocks(5, 2, 0)}}) {
    PlanSpec s{.length = 9, .pattern = parse_pattern("blocks:2@" + std::string(text))};
    EXPECT_EQ(Plan(s).spec().pattern[0].pairs, pairs) << text;
    s.pattern[0].numbers.push_back(1), s.pattern[0].numbers.push_back(1);
    EXPECT_EQ(error_of([&] { (void)Plan(s); }).starts_with("plan: blocks of 2: the rule has "),
              std::string(text) != "dilated:3/1");
  }
  // In time proportional to the pairs: two million blocks.
  EXPECT_EQ(local_blocks(1 << 21, 1).size(), 3u * (1 << 21) - 2);
  EXPECT_EQ(dilated_blocks(1 << 21, {1 << 20}).size(), 2u * (1 << 21));
  EXPECT_NE(error_of([] { (void)local_blocks(1 << 16, 1 << 16); }), "(no error)");  // the pairs would be 2^32
  const Branch b = blocks(16, {{0, 1}, {2, 3}});
  EXPECT_EQ(b.kind, Kind::blocks);
  EXPECT_EQ(b.size, 16);
  EXPECT_EQ(b.pairs, (BlockPairs{{0, 1}, {2, 3}}));
  EXPECT_NE(error_of([] { (void)local_blocks(-1, 1); }), "(no error)");
}

TEST(Blocks, FromAFile) {
  const BlockPairs want{{0, 1}, {2, 3}, {5, 0}};
  for (const std::string& content : {npy("<i4", "(3, 2)", bytes<std::int32_t>({0, 1, 2, 3, 5, 0})),
                                     npy("<i8", "(3, 2)", bytes<std::int64_t>({0, 1, 2, 3, 5, 0}))}) {
    const File file(content);
    const Pattern p = parse_pattern("blocks:16@" + file.path());
    ASSERT_EQ(p.size(), 1u);
    EXPECT_EQ(p[0].kind, Kind::blocks);
    EXPECT_EQ(p[0].size, 16);
    EXPECT_EQ(p[0].pairs, want);
    EXPECT_EQ(parse_pattern("slide:3+blocks:16@" + file.path() + "+dense").size(), 3u);
  }
  const File none(npy("<i4", "(0, 2)", ""));
  EXPECT_TRUE(parse_pattern("blocks:16@" + none.path())[0].pairs.empty());
}

TEST(Blocks, FromAFileThatStrangersMade) {
  const std::string good = npy("<i4", "(3, 2)", bytes<std::int32_t>({0, 1, 2, 3, 5, 0}));
  // What the file alone shows is data; what only a length shows is the caller's.
  const auto refused = [](const std::string& content, const char* what, Code code = Code::data) {
    const File file(content);
    const std::string text = "blocks:16@" + file.path();
    try {
      PlanSpec s;
      s.length = 64;  // four blocks: what the file may still say of blocks is checked against them
      s.pattern = parse_pattern(text);
      (void)Plan(s);
      ADD_FAILURE() << what << ": accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << what << ": " << e.what();
      if (code == Code::data) {
        EXPECT_NE(std::string(e.what()).find(file.path()), std::string::npos) << what << ": " << e.what();
      }
      std::cout << "  " << what << ": " << e.what() << '\n';
    }
  };
  refused("", "empty");
  refused(good.substr(0, 9), "header cut");
  refused(good.substr(0, good.size() - 1), "data cut");
  refused(good + "x", "trailing bytes");
  refused(npy("<f4", "(3, 2)", bytes<std::int32_t>({0, 1, 2, 3, 5, 0})), "floats");
  refused(npy("|O", "(3, 2)", bytes<std::int32_t>({0, 1, 2, 3, 5, 0})), "Python objects");
  refused(npy("<i4", "(2, 3)", bytes<std::int32_t>({0, 1, 2, 3, 5, 0})), "[2, 3]");
  refused(npy("<i4", "(6,)", bytes<std::int32_t>({0, 1, 2, 3, 5, 0})), "[6]");
  refused(npy("<i4", "(1, 2)", bytes<std::int32_t>({0, -1})), "a negative block");
  refused(npy("<i4", "(1, 2)", bytes<std::int32_t>({0, 4})), "a block beyond the end", Code::usage);
  refused(npy("<i8", "(1, 2)", bytes<std::int64_t>({0, std::int64_t{1} << 40})), "a block beyond 32 bits");
  refused(npy("<i8", "(1, 2)", bytes<std::int64_t>({std::int64_t{1} << 32, 0})),
          "a block that 32 bits would wrap to 0");
  refused(npy("<i4", "(4611686018427387904, 2)", bytes<std::int32_t>({0, 1})), "a shape that overflows");
  refused(npy("<i4", "(1000000000, 2)", bytes<std::int32_t>({0, 1})), "a shape beyond the file");
  EXPECT_NE(error_of([] { (void)parse_pattern("blocks:16@/no/such/file.npy"); }, Code::data), "(no error)");
  // Any byte changed: refused, or other pairs within range; never anything else.
  for (std::size_t i = 0; i < good.size(); ++i)
    for (const int flip : {1, 0x80, 0xff}) {
      std::string content = good;
      content[i] = static_cast<char>(content[i] ^ flip);
      const File file(content);
      try {
        PlanSpec s;
        s.length = 96;
        s.pattern = parse_pattern("blocks:16@" + file.path());
        (void)Plan(s);
      } catch (const Error&) {}
    }
}
