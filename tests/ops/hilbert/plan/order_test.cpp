// Orders as permutations and as text, their cache, and published shares of tiles.
#include "ops/hilbert/plan/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"
#include "tests/support/edited.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

using namespace hilt;

namespace {

using Tokens = std::vector<std::int32_t>;
using Kind = Order::Kind;
using Scope = Order::Scope;

Tokens tokens(std::string_view text, Index length) {
  return build_permutation(parse_order(text, length), length).token_at;
}

/// Those below `limit`, as a ragged grid keeps them.
Tokens below(Tokens all, Index limit) {
  std::erase_if(all, [&](std::int32_t t) { return t >= limit; });
  return all;
}

bool is_identity(const Tokens& t) {
  for (std::size_t i = 0; i < t.size(); ++i)
    if (t[i] != static_cast<std::int32_t>(i)) return false;
  return true;
}

std::string error_of(std::string_view text, Index length) {
  try {
    (void)parse_order(text, length);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::usage);
    return e.what();
  }
  return "(no error)";
}

}  // namespace

// ---- small tables, by hand from the definitions -------------------------------------------------

TEST(Permutation, SmallTables) {
  EXPECT_EQ(tokens("row", 5), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(tokens("snake:3x4", 12), (Tokens{0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11}));
  EXPECT_EQ(tokens("morton:4x4", 16), (Tokens{0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15}));
  EXPECT_EQ(tokens("morton:3x3", 9), (Tokens{0, 1, 3, 4, 2, 5, 6, 7, 8}));
  EXPECT_EQ(tokens("morton:2x5", 10), (Tokens{0, 1, 5, 6, 2, 3, 7, 8, 4, 9}));
  EXPECT_EQ(tokens("tiles:4x6/2x4", 24),
            (Tokens{0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11, 12, 13, 14, 15, 18, 19, 20, 21, 16, 17, 22, 23}));
  EXPECT_EQ(tokens("tiles:3x3/2x2", 9), (Tokens{0, 1, 3, 4, 2, 5, 6, 7, 8}));
  EXPECT_EQ(tokens("hilbert:4x4", 16), (Tokens{0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3}));
  EXPECT_EQ(tokens("hilbert:2x4", 8), (Tokens{0, 4, 5, 1, 2, 6, 7, 3}));
  EXPECT_EQ(tokens("hilbert:4x2", 8), (Tokens{0, 1, 3, 2, 4, 5, 7, 6}));
  EXPECT_EQ(tokens("hilbert:2x2x2", 8), (Tokens{0, 2, 6, 4, 5, 7, 3, 1}));
}

TEST(Permutation, NoLengthAndOneToken) {
  for (const char* text : {"row", "snake", "morton", "tiles", "hilbert", "hilbert,chunk=3", "tiles:2x3"}) {
    EXPECT_TRUE(tokens(text, 0).empty()) << text;
    EXPECT_EQ(tokens(text, 1), Tokens{0}) << text;
  }
  EXPECT_EQ(tokens("hilbert:1x1", 1), Tokens{0});
}

TEST(Permutation, SnakeIsNotHilbert) {
  for (const Index side : {2, 4, 8, 16}) {
    const std::string grid = ":" + std::to_string(side) + "x" + std::to_string(side);
    const Tokens snake = tokens("snake" + grid, side * side), hilbert = tokens("hilbert" + grid, side * side);
    EXPECT_NE(snake, hilbert);
    EXPECT_FALSE(is_identity(hilbert));
    EXPECT_EQ(snake[static_cast<std::size_t>(side)], 2 * side - 1);  // the second row from its right end
    // Both take unit steps: that alone does not tell them apart. The first quarter does.
    const auto quarter = [&](const Tokens& t) {
      Tokens first(t.begin(), t.begin() + side * side / 4);
      return std::count_if(first.begin(), first.end(), [&](std::int32_t u) { return u % side < side / 2; });
    };
    EXPECT_EQ(quarter(hilbert), side * side / 4);
    if (side > 2) { EXPECT_LT(quarter(snake), side * side / 4); }
    for (const Tokens& t : {snake, hilbert})
      for (std::size_t i = 1; i < t.size(); ++i)
        ASSERT_EQ(std::abs(t[i] / side - t[i - 1] / side) + std::abs(t[i] % side - t[i - 1] % side), 1);
  }
}

// ---- pi and rho ---------------------------------------------------------------------------------

TEST(Permutation, RhoUndoesPi) {
  // With an order that is its own inverse, pi in the place of rho would pass. Snake and 4 x 4
  // Morton are such; these are not.
  for (const auto& [text, length] : {std::pair{"hilbert:4x4", Index{16}},
                                     {"hilbert", 100},
                                     {"hilbert:3x5x7", 105},
                                     {"tiles:4x6/2x4", 24},
                                     {"morton:3x7", 21},
                                     {"hilbert,chunk=16", 70}}) {
    const Permutation p = build_permutation(parse_order(text, length), length);
    ASSERT_EQ(p.length(), length);
    bool involution = true;
    for (Index i = 0; i < length; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_EQ(p.position_of[static_cast<std::size_t>(p.token_at[at])], i) << text;
      EXPECT_EQ(p.token_at[static_cast<std::size_t>(p.position_of[at])], i) << text;
      involution &= p.token_at[at] == p.position_of[at];
    }
    EXPECT_FALSE(involution) << text << " proves nothing here";
  }
  // Which of the two is which: the token at position 2 of the 4 x 4 curve is (1, 1) = 5; token 5 is
  // at position 2.
  const Permutation p = build_permutation(parse_order("hilbert:4x4", 16), 16);
  EXPECT_EQ(p.token_at[4], 8);
  EXPECT_EQ(p.position_of[4], 3);
}

TEST(Permutation, FromAnyPi) {
  EXPECT_EQ(make_permutation({2, 0, 1}).position_of, (Tokens{1, 2, 0}));
  EXPECT_EQ(make_permutation({}).length(), 0);
  const auto message = [](Tokens pi) -> std::string {
    try {
      (void)make_permutation(std::move(pi));
    } catch (const Error& e) { return e.what(); }
    return "(no error)";
  };
  EXPECT_EQ(message({0, 3, 1}), "permutation: row 0: position 1 names token 3, which is not among 0..2");
  EXPECT_EQ(message({0, -1, 1}), "permutation: row 0: position 1 names token -1, which is not among 0..2");
  EXPECT_EQ(message({1, 0, 1}), "permutation: row 0: token 1 is at position 0 and again at 2");
}

// ---- folding and compressing --------------------------------------------------------------------

TEST(Fold, WidthIsThePowerOfTwoAboveTheRoot) {
  EXPECT_EQ(fold(0), (Grid{1, 0}));
  EXPECT_EQ(fold(1), (Grid{1, 1}));
  EXPECT_EQ(fold(2), (Grid{2, 1}));
  EXPECT_EQ(fold(4), (Grid{2, 2}));
  EXPECT_EQ(fold(5), (Grid{4, 2}));
  EXPECT_EQ(fold(16), (Grid{4, 4}));
  EXPECT_EQ(fold(17), (Grid{8, 3}));
  EXPECT_EQ(fold(4096), (Grid{64, 64}));
  EXPECT_EQ(fold(4097), (Grid{128, 33}));
  EXPECT_EQ(fold(2147483647), (Grid{65536, 32768}));
  for (Index length = 1; length <= 5000; ++length) {
    const double root = std::sqrt(static_cast<double>(length));
    const auto width = static_cast<Index>(std::exp2(std::ceil(std::log2(root) - 1e-12)));
    ASSERT_EQ(fold(length), (Grid{width, (length + width - 1) / width})) << length;
  }
  EXPECT_EQ(token_grid(parse_order("hilbert:2x32", 64), 64), (Grid{32, 2}));
  EXPECT_EQ(token_grid(parse_order("row:2x32", 64), 64), (Grid{32, 2}));
  EXPECT_EQ(token_grid(parse_order("hilbert:4x4,chunk=16", 64), 64), (Grid{8, 8}));
  EXPECT_EQ(token_grid(parse_order("hilbert", 64), 64), (Grid{8, 8}));
}

TEST(Permutation, RaggedLastRowCompresses) {
  // 13 tokens fold to 4 x 4 with three cells missing; the curve closes up over them.
  EXPECT_EQ(tokens("hilbert", 13), (Tokens{0, 1, 5, 4, 8, 12, 9, 10, 11, 7, 6, 2, 3}));
  EXPECT_EQ(tokens("snake", 13), (Tokens{0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11, 12}));
  for (Index length = 2; length <= 600; ++length) {
    const Grid grid = fold(length);
    const std::string shape = ":" + std::to_string(grid.height) + "x" + std::to_string(grid.width);
    for (const std::string name : {"snake", "morton", "hilbert", "tiles"}) {
      const std::string full = name + shape + (name == "tiles" ? "/8x16" : "");
      ASSERT_EQ(tokens(name, length), below(tokens(full, grid.cells()), length)) << name << " " << length;
    }
  }
}

TEST(Permutation, LengthsFromEmptyToPrimes) {
  Index built = 0;
  for (const char* text : {"row", "snake", "morton", "tiles", "tiles:3x5", "hilbert", "hilbert,steps=unit",
                           "hilbert,chunk=1", "hilbert,chunk=7", "morton,chunk=64", "snake,chunk=1000000"})
    for (const Index length : {0, 1, 2, 3, 5, 7, 63, 64, 65, 127, 128, 129, 1021, 4093, 65537}) {
      const Permutation p = build_permutation(parse_order(text, length), length);  // checks that it is a bijection
      ASSERT_EQ(p.length(), length) << text;
      ASSERT_EQ(std::ssize(p.position_of), length) << text;
      ++built;
    }
  EXPECT_EQ(built, 11 * 15);
}

// ---- scopes -------------------------------------------------------------------------------------

TEST(Scope, ChunksRepeatOneOrder) {
  const Tokens one = tokens("hilbert", 16), all = tokens("hilbert,chunk=16", 64);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], static_cast<std::int32_t>(i / 16 * 16) + one[i % 16]);
  EXPECT_NE(all, tokens("hilbert", 64));
  // A short last chunk leaves tokens out of the same order; a chunk beyond the end is the whole
  // sequence.
  const Tokens ragged = tokens("hilbert,chunk=16", 25);
  EXPECT_EQ(Tokens(ragged.begin(), ragged.begin() + 16), one);
  Tokens rest = below(one, 9);
  for (std::int32_t& t : rest) t += 16;
  EXPECT_EQ(Tokens(ragged.begin() + 16, ragged.end()), rest);
  EXPECT_EQ(tokens("hilbert,chunk=64", 64), tokens("hilbert", 64));
  EXPECT_EQ(tokens("hilbert,chunk=2147483647", 50), tokens("hilbert", 50));
  EXPECT_TRUE(is_identity(tokens("hilbert,chunk=1", 50)));
}

TEST(Scope, AGridIsThatOfAChunkOrOfAllTokens) {
  // The grid of a chunk.
  EXPECT_EQ(tokens("hilbert:2x4,chunk=8", 16), (Tokens{0, 4, 5, 1, 2, 6, 7, 3, 8, 12, 13, 9, 10, 14, 15, 11}));
  EXPECT_EQ(tokens("hilbert:2x4,chunk=8", 5), (Tokens{0, 4, 1, 2, 3}));
  // The grid of all tokens: a chunk is so many of its rows, here two of four.
  EXPECT_EQ(tokens("hilbert:4x4,chunk=8", 16), tokens("hilbert:2x4,chunk=8", 16));
  // Rows of a chunk need not be full, and less than a row is a row.
  EXPECT_EQ(tokens("hilbert:4x4,chunk=6", 16), (Tokens{0, 4, 5, 1, 2, 3, 6, 10, 11, 7, 8, 9, 12, 13, 14, 15}));
  EXPECT_TRUE(is_identity(tokens("snake:4x4,chunk=2", 16)));
  // Frames of a box: two of four; one; half of one.
  EXPECT_EQ(tokens("hilbert:4x2x2,chunk=8", 16), tokens("hilbert:2x2x2,chunk=8", 16));
  EXPECT_EQ(tokens("hilbert:4x2x2,chunk=4", 16), tokens("hilbert:2x2,chunk=4", 16));
  EXPECT_EQ(tokens("hilbert:2x4x2,chunk=4", 16), tokens("hilbert:2x2,chunk=4", 16));
  EXPECT_EQ(tokens("hilbert:4x4,chunk=100", 16), tokens("hilbert:4x4", 16));
}

TEST(Scope, SegmentsAreChunksOnceTheirLengthIsKnown) {
  const Order order = parse_order("hilbert,scope=segment", 64);
  EXPECT_EQ(order.scope, Scope::per_segment);
  EXPECT_EQ(with_segment(order, 16), parse_order("hilbert,chunk=16", 64));
  EXPECT_EQ(with_segment(parse_order("hilbert", 64), 16), parse_order("hilbert", 64));
  EXPECT_EQ(build_permutation(with_segment(order, Index{1} << 40), 64).token_at, tokens("hilbert", 64));
  EXPECT_THROW((void)with_segment(order, 0), Error);
  try {
    (void)build_permutation(order, 64);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "order (hilbert,scope=segment): scope=segment needs a pattern with segments; give chunk=N instead");
  }
}

TEST(Scope, OrderOnlyArrangesLikeGlobal) {
  EXPECT_EQ(parse_order("hilbert,scope=order-only", 64).scope, Scope::order_only);
  EXPECT_EQ(tokens("hilbert,scope=order-only", 64), tokens("hilbert", 64));
}

// ---- what people type ---------------------------------------------------------------------------

TEST(ParseOrder, ReadsEverySpellingAndWritesItBack) {
  const auto order = [](Kind kind, Grid grid = {}) {
    Order made;
    made.kind = kind;
    made.grid = grid;
    return made;
  };
  EXPECT_EQ(parse_order("row", 7), Order{});
  EXPECT_EQ(parse_order("snake:4x8", 32), order(Kind::snake, {8, 4}));
  EXPECT_EQ(parse_order("morton:4x8", 32), order(Kind::morton, {8, 4}));
  EXPECT_EQ(parse_order("hilbert:4x8", 32), order(Kind::hilbert, {8, 4}));
  EXPECT_EQ(parse_order("hilbert:2x4x8", 64), order(Kind::hilbert, {8, 4, 2}));
  Order tiled = order(Kind::tiles, {32, 16});
  tiled.tile_height = 4, tiled.tile_width = 2;
  EXPECT_EQ(parse_order("tiles:16x32/4x2", 512), tiled);
  EXPECT_EQ(parse_order("tiles", 512).tile_height, 8);
  EXPECT_EQ(parse_order("tiles", 512).tile_width, 16);
  EXPECT_EQ(parse_order("hilbert,chunk=128", 512).chunk, 128);
  EXPECT_EQ(parse_order("hilbert,chunk=128", 512).scope, Scope::chunked);
  EXPECT_EQ(parse_order("hilbert,steps=unit", 512).steps, Steps::unit);

  Index texts = 0;
  for (const char* text : {"row",
                           "snake",
                           "morton",
                           "tiles",
                           "hilbert",
                           "row:16x32",
                           "row:2x16x16",
                           "snake:16x32",
                           "morton:16x32",
                           "tiles:16x32/8x16",
                           "tiles:16x32/4x4",
                           "tiles:4x4",
                           "hilbert:16x32",
                           "hilbert:2x16x16",
                           "row,scope=segment",
                           "hilbert,scope=segment",
                           "hilbert:16x32,scope=segment",
                           "tiles:16x32/4x4,scope=segment",
                           "hilbert,chunk=64",
                           "hilbert:8x8,chunk=64",
                           "hilbert:16x32,chunk=64",
                           "tiles:4x4,chunk=64",
                           "hilbert,scope=order-only",
                           "hilbert:16x32,chunk=64,steps=unit",
                           "auto",
                           "auto:16x32",
                           "auto:2x16x16",
                           "hilbert:1x16x32",
                           "hilbert,steps=unit"}) {
    EXPECT_EQ(to_string(parse_order(text, 512)), text);
    ++texts;
  }
  for (const auto& [text, shorter] : {std::pair{"hilbert,scope=global", "hilbert"},
                                      {"hilbert,steps=near", "hilbert"},
                                      {"tiles:8x16", "tiles"},
                                      {"hilbert,steps=unit,chunk=064", "hilbert,chunk=64,steps=unit"}}) {
    EXPECT_EQ(to_string(parse_order(text, 512)), shorter);
    EXPECT_EQ(parse_order(shorter, 512), parse_order(text, 512));
    ++texts;
  }
  std::cout << texts << " spellings read and written back\n";
}

TEST(ParseOrder, SaysWhatIsWrong) {
  const std::string kinds = "' is not one of row, snake, morton, tiles, hilbert, auto, given; did you mean ";
  const std::string options = "' is not one of scope, chunk, steps; did you mean ";
  const std::string grid = "expected HEIGHTxWIDTH, each from 1 to 2147483647, got ";
  const std::string box = "expected HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH, each from 1 to 2147483647, got ";
  const struct {
    std::string text;
    Index length;
    std::string message;
  } cases[] = {
      {"hilbrt", 64, "'hilbrt" + kinds + "hilbert?"},
      {"Hilbert", 64, "'Hilbert" + kinds + "hilbert?"},
      {"mortn:8x8", 64, "'mortn" + kinds + "morton?"},
      {"tile", 64, "'tile" + kinds + "tiles?"},
      {"snakes", 64, "'snakes" + kinds + "snake?"},
      {"raw", 64, "'raw" + kinds + "row?"},
      {"", 64, "'' is not one of row, snake, morton, tiles, hilbert, auto, given"},
      {" hilbert", 64, "' hilbert" + kinds + "hilbert?"},
      {"snake:128x", 128, grid + "'128x'"},
      {"tiles:128x/8x16", 128, grid + "'128x'"},
      {"tiles:8x16/8", 128, grid + "'8'"},
      {"tiles:8x16/", 128, grid + "''"},
      {"tiles:8x16/8x16/2x2", 128, grid + "'8x16/2x2'"},
      {"morton:2x8x8", 128, grid + "'2x8x8'"},
      {"hilbert:128x", 128, box + "'128x'"},
      {"hilbert:x128", 128, box + "'x128'"},
      {"hilbert:", 128, box + "''"},
      {"hilbert:128", 128, box + "'128'"},
      {"hilbert:8X16", 128, box + "'8X16'"},
      {"hilbert:2x2x4x8", 128, box + "'2x2x4x8'"},
      {"hilbert:-8x16", 128, box + "'-8x16'"},
      {"hilbert:+8x16", 128, box + "'+8x16'"},
      {"hilbert:8 x16", 128, box + "'8 x16'"},
      {"hilbert:8x16.0", 128, box + "'8x16.0'"},
      {"hilbert:0x16", 0, box + "'0x16'"},
      {"hilbert:2147483648x1", 128, box + "'2147483648x1'"},
      {"hilbert:99999999999999999999x1", 128, box + "'99999999999999999999x1'"},
      {"hilbert:8x16", 100, "a grid of 8x16 has 128 cells, but there are 100 tokens; without a grid any length folds"},
      {"tiles:8x16/4x4", 129,
       "a grid of 8x16 has 128 cells, but there are 129 tokens; without a grid any length folds"},
      {"hilbert:2x4x8,scope=order-only", 65,
       "a grid of 2x4x8 has 64 cells, but there are 65 tokens; without a grid any length folds"},
      {"hilbert:8x16,chunk=64", 256,
       "a grid of 8x16 has 128 cells, but there are 256 tokens in chunks of 64; give the grid of all tokens "
       "or of "
       "one chunk"},
      {"hilbert,scop=segment", 64, "option: 'scop" + options + "scope?"},
      {"hilbert,", 64, "option: '' is not one of scope, chunk, steps"},
      {"hilbert,chunk", 64, "chunk must be from 1 to 2147483647, got ''"},
      {"hilbert,chunk=0", 64, "chunk must be from 1 to 2147483647, got '0'"},
      {"hilbert,chunk=12a", 64, "chunk must be from 1 to 2147483647, got '12a'"},
      {"hilbert,chunk=-4", 64, "chunk must be from 1 to 2147483647, got '-4'"},
      {"hilbert,scope=segmnt", 64, "scope: 'segmnt' is not one of global, segment, order-only; did you mean segment?"},
      {"hilbert,steps=units", 64, "steps: 'units' is not one of near, unit; did you mean unit?"},
      {"hilbert,chunk=4,chunk=8", 64, "option 'chunk' is given twice"},
      {"hilbert,chunk=4,scope=segment", 64, "chunk=N is a scope of its own; give scope or chunk, not both"},
      {"hilbert,scope=segment,chunk=4", 64, "chunk=N is a scope of its own; give scope or chunk, not both"},
      {"snake,steps=unit", 64, "steps can only be asked of hilbert"},
      {"row", Index{1} << 31, "2147483648 tokens; positions are 32-bit, so from 0 to 2147483647"},
      {"row", -1, "-1 tokens; positions are 32-bit, so from 0 to 2147483647"},
  };
  for (const auto& c : cases) EXPECT_EQ(error_of(c.text, c.length), "order (" + c.text + "): " + c.message);
  EXPECT_NE(error_of("hilbert:2147483647x2147483647x2147483647", 64), "(no error)");  // 2^93 cells
  std::cout << std::size(cases) << " exact messages\n";
}

TEST(ParseOrder, SurvivesAnyText) {
  // Either an order that writes itself back, or one typed error. Texts a few letters away from good
  // ones.
  std::mt19937 random(3);
  const std::string alphabet = "hilbertsnakemortonw0123456789x:/,=cup \t\n\xff'-";
  const std::string good[] = {"hilbert:8x8", "tiles:8x8/4x2",
                              "snake",       "hilbert,chunk=16,steps=unit",
                              "morton:4x16", "hilbert:4x4x4,scope=order_only"};
  Index parsed = 0, refused = 0;
  for (int i = 0; i < scaled(1000000, 20000); ++i) {
    const std::string text = edited(good[random() % std::size(good)], alphabet, 3, random);
    try {
      const Order order = parse_order(text, 64);
      ASSERT_EQ(parse_order(to_string(order), 64), order) << text;
      ++parsed;
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), Code::usage) << text;
      ++refused;
    }
  }
  EXPECT_GT(parsed, refused / 200);
  EXPECT_GT(refused, parsed);
  std::printf("[ fuzz     ] order: %lld texts, %lld orders\n", static_cast<long long>(parsed + refused),
              static_cast<long long>(parsed));
}

TEST(ParseOrder, ChecksValuesMadeInCode) {
  const auto broken = [](auto change) {
    Order order;
    order.kind = Kind::hilbert;
    change(order);
    EXPECT_THROW((void)build_permutation(order, 64), Error);
  };
  broken([](Order& o) { o.grid = {8, -8}; });
  broken([](Order& o) { o.grid = {8, 8, 0}; });
  broken([](Order& o) { o.grid = {8, 9}; });
  broken([](Order& o) { o.scope = Scope::chunked; });
  broken([](Order& o) { o.scope = Scope::chunked, o.chunk = Index{1} << 31; });
  broken([](Order& o) { o.tile_width = 0; });
  broken([](Order& o) { o.kind = Kind::snake, o.grid = {4, 4, 4}; });
  broken([](Order& o) { o.grid = {1, 1, 64}, o.kind = Kind::morton; });
  EXPECT_THROW((void)build_permutation({}, -1), Error);
  EXPECT_THROW((void)build_permutation({}, Index{1} << 31), Error);
}

// ---- HILT_FORCE_ORDER ---------------------------------------------------------------------------

TEST(ForceOrder, RowReplacesEveryOrderWhileItIsSet) {
  const Tokens hilbert = tokens("hilbert", 64);
  PermutationCache cache(1 << 20);
  const Order order = parse_order("hilbert", 64);
  EXPECT_FALSE(row_order_forced());
  EXPECT_EQ(cache.get(order, 64)->token_at, hilbert);
  {
    const Setting row("HILT_FORCE_ORDER", "row");
    EXPECT_TRUE(row_order_forced());
    EXPECT_TRUE(is_identity(tokens("hilbert", 64)));
    EXPECT_TRUE(is_identity(tokens("tiles:8x8/2x2,chunk=64", 64)));
    EXPECT_TRUE(is_identity(cache.get(order, 64)->token_at));   // not the Hilbert order it knows
    EXPECT_THROW((void)parse_order("hilbert:8x9", 64), Error);  // still checked
  }
  EXPECT_EQ(tokens("hilbert", 64), hilbert);
  EXPECT_EQ(cache.get(order, 64)->token_at, hilbert);
  const Setting typo("HILT_FORCE_ORDER", "Row");
  EXPECT_THROW((void)tokens("hilbert", 64), Error);
  const Setting nothing("HILT_FORCE_ORDER", "");
  EXPECT_FALSE(row_order_forced());
}

// ---- the cache ----------------------------------------------------------------------------------

TEST(PermutationCache, KeepsOneOfEachKey) {
  PermutationCache cache(1 << 20);
  const auto get = [&](std::string_view text, Index length) { return cache.get(parse_order(text, length), length); };
  const auto first = get("hilbert", 64);
  EXPECT_EQ(get("hilbert", 64), first);
  EXPECT_EQ(get("hilbert:8x8", 64), first);  // the same order by another name
  EXPECT_EQ(get("hilbert,scope=order-only", 64), first);
  EXPECT_EQ(cache.counters().hits, 3);
  EXPECT_EQ(cache.counters().misses, 1);
  // One length, many orders: each its own.
  for (const char* text : {"hilbert:4x16", "hilbert:16x4", "hilbert:4x4x4", "hilbert:2x4x8", "hilbert,chunk=16",
                           "hilbert:4x16,chunk=32", "snake", "morton", "tiles:2x4", "tiles:4x2", "row"}) {
    const Order order = parse_order(text, 64);
    EXPECT_EQ(cache.get(order, 64)->token_at, build_permutation(order, 64).token_at) << text;
    EXPECT_EQ(cache.get(order, 64), cache.get(order, 64)) << text;
    EXPECT_NE(cache.get(order, 64)->token_at, first->token_at) << text;
  }
  EXPECT_EQ(get("hilbert", 63)->length(), 63);
  EXPECT_EQ(cache.counters().entries, 13);
  cache.clear();
  EXPECT_EQ(cache.counters().entries, 0);
  EXPECT_EQ(cache.counters().bytes, 0u);
  EXPECT_EQ(cache.counters().hits + cache.counters().misses + cache.counters().evictions, 0);
  EXPECT_EQ(first->length(), 64);
  EXPECT_NE(get("hilbert", 64), first);
  EXPECT_EQ(permutation(parse_order("hilbert", 64), 64), permutation(parse_order("hilbert", 64), 64));
}

TEST(PermutationCache, ForgetsTheLeastRecentlyUsed) {
  constexpr std::size_t kBytes = 40'000;  // four orders of 1,000 tokens, 8 bytes a token and some
  PermutationCache cache(kBytes);
  const auto get = [&](Index chunk) {
    Order order;
    order.kind = Kind::hilbert, order.scope = Scope::chunked, order.chunk = chunk;
    return cache.get(order, 1000);
  };
  for (const Index chunk : {101, 102, 103, 104}) (void)get(chunk);
  EXPECT_EQ(cache.counters().entries, 4);
  const auto oldest = get(101);  // now the youngest
  (void)get(105);                // pushes 102 out
  EXPECT_EQ(cache.counters().evictions, 1);
  EXPECT_EQ(get(101), oldest);
  const Index misses = cache.counters().misses;
  (void)get(103), (void)get(104), (void)get(105);
  EXPECT_EQ(cache.counters().misses, misses);
  (void)get(102);
  EXPECT_EQ(cache.counters().misses, misses + 1);
  for (Index chunk = 1; chunk < 999; ++chunk) {
    (void)get(chunk);
    ASSERT_LE(cache.counters().bytes, kBytes);
  }
  EXPECT_EQ(cache.counters().entries, 4);
  // What does not fit is built and not kept, and pushes nothing out.
  const Index evictions = cache.counters().evictions;
  EXPECT_EQ(cache.get(parse_order("hilbert", 100'000), 100'000)->length(), 100'000);
  EXPECT_EQ(cache.counters().evictions, evictions);
  EXPECT_EQ(cache.counters().entries, 4);
  // Tiny entries are charged for what surrounds them.
  for (Index length = 0; length < 500; ++length) (void)cache.get(Order{}, length % 8);
  EXPECT_LE(cache.counters().bytes, kBytes);
  EXPECT_LE(cache.counters().entries, 80);
  EXPECT_EQ(oldest->length(), 1000);
}

TEST(PermutationCache, EightThreads) {
  constexpr int kThreads = 8, kRounds = 400;
  PermutationCache cache(60'000);  // too small for all 24 orders: hits, misses and evictions at once
  std::vector<Order> orders;
  for (const Index chunk : {16, 60, 64, 100, 128, 1000, 1024, 5000})
    for (const Kind kind : {Kind::snake, Kind::morton, Kind::hilbert}) {
      orders.emplace_back();
      orders.back().kind = kind, orders.back().scope = Scope::chunked, orders.back().chunk = chunk;
    }
  constexpr Index kLength = 900;
  std::vector<Tokens> expected;
  for (const Order& order : orders) expected.push_back(build_permutation(order, kLength).token_at);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id)
    threads.emplace_back([&, id] {
      std::mt19937 random(static_cast<unsigned>(id));
      for (int round = 0; round < kRounds; ++round) {
        const std::size_t i = random() % orders.size();
        if (cache.get(orders[i], kLength)->token_at != expected[i]) ++wrong;
        if (cache.counters().bytes > 60'000) ++wrong;
        if (id == 0 && round == kRounds / 2) cache.clear();
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  const PermutationCache::Counters counters = cache.counters();
  EXPECT_GT(counters.hits, 0);
  EXPECT_GT(counters.evictions, 0);
  EXPECT_LE(counters.hits + counters.misses, kThreads * kRounds);
  std::cout << kThreads << " threads: " << counters.hits << " hits, " << counters.misses << " misses, "
            << counters.evictions << " evictions\n";
}

// ---- what an order is good for: figures published with the definitions --------------------------

/// Percent of the 128 x 128 tiles of the score matrix that hold an attended pair, when every token
/// attends to the window around it (cut off at the edges), or to its own one of the windows that
/// divide the grid.
double percent_of_tiles(std::string_view text, Index side, Index window, bool sliding) {
  const Index length = side * side, count = (length + 127) / 128;
  const Permutation p = build_permutation(parse_order(text, length), length);
  std::vector<char> touched(static_cast<std::size_t>(count * count));
  const auto first = [&](Index at) { return sliding ? std::max(at - window / 2, Index{0}) : at / window * window; };
  const auto end = [&](Index at) {
    return std::min(sliding ? at + window / 2 + 1 : at / window * window + window, side);
  };
  for (Index t = 0; t < length; ++t) {
    const Index row = p.position_of[static_cast<std::size_t>(t)] / 128 * count;
    for (Index y = first(t / side); y < end(t / side); ++y)
      for (Index x = first(t % side); x < end(t % side); ++x)
        touched[static_cast<std::size_t>(row + p.position_of[static_cast<std::size_t>(y * side + x)] / 128)] = 1;
  }
  return 100.0 * static_cast<double>(std::count(touched.begin(), touched.end(), 1)) /
         static_cast<double>(count * count);
}

TEST(Orders, ShareOfScoreTilesIsAsPublished) {
  const struct {
    const char* order;
    Index side, window;
    bool sliding;
    double percent;
  } cases[] = {
      {"row", 128, 17, true, 12.84},        {"hilbert", 128, 17, true, 5.90},  {"morton", 128, 17, true, 6.18},
      {"tiles", 128, 17, true, 6.18},       {"row", 256, 17, true, 6.53},      {"hilbert", 256, 17, true, 1.58},
      {"row", 128, 16, false, 12.5},        {"hilbert", 128, 16, false, 1.56}, {"row:56x56", 56, 7, true, 19.0},
      {"hilbert:56x56", 56, 7, true, 24.5},
  };
  for (const auto& c : cases)
    EXPECT_NEAR(percent_of_tiles(c.order, c.side, c.window, c.sliding), c.percent, c.side == 56 ? 0.05 : 0.005)
        << c.order << " " << c.side;
}

// Why causality compares tokens and not positions: a mask on positions lets this share of all pairs
// see the future.
TEST(Orders, AMaskOnPositionsWouldLeakAsPublished) {
  constexpr Index kLength = 4096, kSegment = 128;
  const Permutation p = build_permutation(parse_order("hilbert", kLength), kLength);
  Index leaks = 0;
  for (Index i = 0; i < kLength; ++i)
    for (Index j = i / kSegment * kSegment; j < i; ++j)
      leaks += p.token_at[static_cast<std::size_t>(j)] > p.token_at[static_cast<std::size_t>(i)];
  EXPECT_NEAR(100.0 * static_cast<double>(leaks) / (kLength * kSegment), 24.7, 0.05);
}
