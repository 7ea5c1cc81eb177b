// The Hilbert curve on every rectangle up to 128 x 128 and every box up to 10: each cell once,
// steps as promised, both directions.
#include "ops/hilbert/plan/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "tests/support/scale.h"

using namespace hilt;

namespace {

using Tokens = std::vector<std::int32_t>;

Tokens walk(const Grid& grid, Steps steps = Steps::near) { return hilbert_walk(grid, grid.cells(), steps); }

Index manhattan(const Cell& a, const Cell& b) {
  return std::abs(a.x - b.x) + std::abs(a.y - b.y) + std::abs(a.z - b.z);
}

/// What the walk of a grid turned out to be; found without curve.cpp's own idea of it.
struct Walked {
  bool bijection = true;
  Index diagonals = 0;  // steps to a cell that shares only a corner
  Index jumps = 0;      // steps to no neighbor at all
};

/// Rectangles only: 68 million cells pass through here, so rows and columns are compared without
/// dividing.
Walked examine(const Tokens& tokens, Index width, std::vector<Index>& seen, Index stamp) {
  Walked result;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const Index token = tokens[i];
    result.bijection &= token >= 0 && token < std::ssize(tokens) &&
                        std::exchange(seen[static_cast<std::size_t>(token)], stamp) != stamp;
    if (i == 0) continue;
    const Index step = std::abs(token - tokens[i - 1]);
    const bool same_row = step < width && token / width == tokens[i - 1] / width;
    if (step == width || (step == 1 && same_row)) continue;
    const Index dx = std::abs(token % width - tokens[i - 1] % width),
                dy = std::abs(token / width - tokens[i - 1] / width);
    dx == 1 && dy == 1 ? ++result.diagonals : ++result.jumps;
  }
  return result;
}

/// Both directions agree with the walk at position i.
bool agree(const Grid& grid, Steps steps, const Tokens& tokens, std::size_t i) {
  const auto position = static_cast<Index>(i);
  const Cell cell = hilbert_cell(grid, position, steps);
  return token_of(grid, cell) == tokens[i] && hilbert_position(grid, cell, steps) == position;
}

/// The classic curve on a square of 2^k cells a side, d2xy: two bits of the position a level, from
/// the finest up; each level reflects and transposes the s x s quadrant found so far, then moves
/// it.
Cell classic_cell(Index side, Index position) {
  Index x = 0, y = 0;
  for (Index s = 1; s < side; s *= 2, position >>= 2) {
    const Index rx = (position >> 1) & 1, ry = (position ^ rx) & 1;
    if (ry == 0) {
      if (rx == 1) x = s - 1 - x, y = s - 1 - y;
      std::swap(x, y);
    }
    x += s * rx, y += s * ry;
  }
  return {x, y};
}

/// Bits of x in even places, those of y in odd ones.
std::uint64_t morton_code(const Cell& cell) {
  std::uint64_t code = 0;
  for (int bit = 0; bit < 31; ++bit)
    code |= static_cast<std::uint64_t>((cell.x >> bit & 1) | (cell.y >> bit & 1) << 1) << (2 * bit);
  return code;
}

std::string message_of(const auto& f) {
  try {
    f();
  } catch (const Error& e) { return e.what(); }
  return "(no error)";
}

}  // namespace

// ---- tables worked out by hand from the definitions ---------------------------------------------

TEST(ClassicHilbert, FourByFour) {
  //    0  1 14 15
  //    3  2 13 12
  //    4  7  8 11
  //    5  6  9 10
  const Tokens expected{0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3};
  for (Index d = 0; d < 16; ++d) {
    const Cell cell = classic_cell(4, d);
    EXPECT_EQ(token_of({4, 4}, cell), expected[static_cast<std::size_t>(d)]) << "position " << d;
    EXPECT_EQ(hilbert_cell({4, 4}, d), cell);
    EXPECT_EQ(hilbert_position({4, 4}, cell), d);
  }
}

TEST(ClassicHilbert, IsTheGeneralizedCurveOfASquare) {
  for (Index side = 1; side <= 256; side *= 2) {
    const Tokens tokens = walk({side, side});
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const Cell cell = classic_cell(side, static_cast<Index>(i));
      ASSERT_EQ(token_of({side, side}, cell), tokens[i]) << "side " << side << " position " << i;
      ASSERT_TRUE(agree({side, side}, Steps::near, tokens, i)) << "side " << side;
    }
  }
}

TEST(GeneralizedHilbert, SmallRectangles) {
  EXPECT_EQ(walk({1, 1}), (Tokens{0}));
  EXPECT_EQ(walk({5, 1}), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(walk({1, 3}), (Tokens{0, 1, 2}));
  EXPECT_EQ(walk({2, 2}), (Tokens{0, 2, 3, 1}));
  EXPECT_EQ(walk({4, 2}), (Tokens{0, 4, 5, 1, 2, 6, 7, 3}));
  EXPECT_EQ(walk({2, 4}), (Tokens{0, 1, 3, 2, 4, 5, 7, 6}));
  EXPECT_EQ(walk({3, 3}), (Tokens{0, 3, 6, 7, 8, 5, 4, 1, 2}));
  EXPECT_EQ(walk({5, 3}), (Tokens{0, 5, 10, 11, 6, 1, 2, 7, 12, 13, 14, 9, 8, 3, 4}));
}

TEST(GeneralizedHilbert, SmallBoxes) {
  EXPECT_EQ(walk({2, 2, 2}), (Tokens{0, 2, 6, 4, 5, 7, 3, 1}));
  // Two cubes, one after the other along the longest side.
  EXPECT_EQ(walk({4, 2, 2}), (Tokens{0, 4, 12, 8, 9, 13, 5, 1, 2, 6, 14, 10, 11, 15, 7, 3}));
  EXPECT_EQ(walk({2, 4, 2}), (Tokens{0, 1, 9, 8, 10, 11, 3, 2, 4, 5, 13, 12, 14, 15, 7, 6}));
  EXPECT_EQ(walk({2, 2, 4}), (Tokens{0, 1, 3, 2, 6, 7, 5, 4, 8, 9, 11, 10, 14, 15, 13, 12}));
}

// On 10 x 10 the way down runs from (9, 5) with sides of -6 and -5. Half of -5 floors to -3 and is
// made even: -4, so that its first part is 4 x 3. Truncation gives -2, which is even already: still
// a fine curve, but not this one.
TEST(GeneralizedHilbert, HalvesOfNegativeSidesFloor) {
  const Tokens tokens = walk({10, 10});
  std::set<Cell> part, expected;
  for (std::size_t i = 70; i < 82; ++i) part.insert(cell_of({10, 10}, tokens[i]));
  for (Index y = 3; y <= 5; ++y)
    for (Index x = 6; x <= 9; ++x) expected.insert({x, y});
  EXPECT_EQ(part, expected);
}

// A trained model depends on every cell of its order, so that none may ever move. The digests
// (FNV-1a of all tokens, width innermost) come from a second implementation, in another language,
// of the same definitions.
TEST(GeneralizedHilbert, TablesNeverChange) {
  const auto digest = [](Index first, Index last, Index last_frames) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (Index frames = last_frames == 1 ? 1 : first; frames <= last_frames; ++frames)
      for (Index height = first; height <= last; ++height)
        for (Index width = first; width <= last; ++width)
          for (const std::int32_t t : walk({width, height, frames}))
            hash = (hash ^ static_cast<std::uint64_t>(t)) * 0x100000001b3;
    return hash;
  };
  EXPECT_EQ(digest(1, 48, 1), 0x0e9df1be9c143431u);
  EXPECT_EQ(digest(2, 10, 10), 0xbafd31188eab44fu);
}

// ---- every rectangle ----------------------------------------------------------------------------

TEST(GeneralizedHilbert, EveryRectangleUpTo128) {
  const Index side = scaled(128, 64);
  constexpr std::size_t kSamples = 48;  // both directions at so many positions a rectangle; all up to 24 x 24
  std::vector<Index> seen(static_cast<std::size_t>(side * side), 0);
  Index rectangles = 0, cells = 0, with_diagonal = 0, both_directions = 0, rewalked = 0, stamp = 0;
  for (Index height = 1; height <= side; ++height)
    for (Index width = 1; width <= side; ++width) {
      const Grid grid{width, height};
      const std::string name = std::to_string(width) + " wide, " + std::to_string(height) + " high";
      const Tokens tokens = walk(grid);
      ASSERT_EQ(std::ssize(tokens), width * height) << name;
      const Walked found = examine(tokens, width, seen, ++stamp);
      ASSERT_TRUE(found.bijection) << name;
      ASSERT_EQ(found.jumps, 0) << name;
      ASSERT_EQ(tokens[0], 0) << name;

      const Index longer = std::max(width, height), shorter = std::min(width, height);
      const bool odd_over_even = longer % 2 == 1 && shorter % 2 == 0;
      const bool thin = longer >= 3 * shorter;
      // Two cells across leave room to turn: a minor side of 2 never needs the diagonal.
      ASSERT_EQ(found.diagonals, odd_over_even && thin && shorter > 2 ? 1 : 0) << name;

      // An even major side (the only even one, or the longer) brings the curve to its other end.
      const bool along_x = odd_over_even && !thin ? width < height : width >= height;
      const Index major = along_x ? width : height;
      if (major % 2 == 0) { ASSERT_EQ(tokens.back(), along_x ? width - 1 : (height - 1) * width) << name; }

      if (odd_over_even) {
        const Tokens unit = walk(grid, Steps::unit);
        const Walked again = examine(unit, width, seen, ++stamp);
        ASSERT_TRUE(again.bijection && again.diagonals == 0 && again.jumps == 0) << name;
        ASSERT_EQ(unit == tokens, !thin) << name;
        for (std::size_t i = 0; i < unit.size(); i += 1 + unit.size() / 8)
          ASSERT_TRUE(agree(grid, Steps::unit, unit, i)) << name << ", position " << i;
        ++rewalked;
      }
      const std::size_t stride = longer <= 24 ? 1 : 1 + tokens.size() / kSamples;
      for (std::size_t i = 0; i < tokens.size(); i += stride, ++both_directions)
        ASSERT_TRUE(agree(grid, Steps::near, tokens, i)) << name << ", position " << i;
      ASSERT_TRUE(agree(grid, Steps::near, tokens, tokens.size() - 1)) << name;
      ++rectangles, cells += width * height, with_diagonal += found.diagonals;
    }
  EXPECT_EQ(rectangles, side * side);
  std::cout << rectangles << " rectangles, " << cells << " cells walked, " << both_directions
            << " positions checked in both directions; by default " << with_diagonal << " have one diagonal step, with "
            << "Steps::unit none (" << rewalked << " walked again)\n";
}

// ---- boxes --------------------------------------------------------------------------------------

TEST(GeneralizedHilbert, EveryBoxUpToTen) {
  Index boxes = 0, most = 0;
  for (Index frames = 1; frames <= 10; ++frames)
    for (Index height = 1; height <= 10; ++height)
      for (Index width = 1; width <= 10; ++width, ++boxes) {
        const Grid grid{width, height, frames};
        const Tokens tokens = walk(grid);
        Tokens sorted = tokens, all(tokens.size());
        std::sort(sorted.begin(), sorted.end());
        std::iota(all.begin(), all.end(), 0);
        ASSERT_EQ(std::ssize(tokens), grid.cells());
        ASSERT_EQ(sorted, all);
        ASSERT_EQ(tokens[0], 0);
        Index non_unit = 0;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
          ASSERT_TRUE(agree(grid, Steps::near, tokens, i)) << frames << "x" << height << "x" << width << " at " << i;
          if (i > 0) non_unit += manhattan(cell_of(grid, tokens[i - 1]), cell_of(grid, tokens[i])) != 1;
        }
        if (width % 2 == 0 && height % 2 == 0 && frames % 2 == 0) {
          ASSERT_EQ(non_unit, 0);
          ASSERT_EQ(walk(grid, Steps::unit), tokens);
        }
        most = std::max(most, non_unit);
      }
  std::cout << boxes << " boxes; at most " << most << " steps that are not unit steps, none where all sides are even\n";
}

TEST(GeneralizedHilbert, FlatBoxIsTheRectangle) {
  for (Index a = 1; a <= 12; ++a)
    for (Index b = 1; b <= 12; ++b) {
      const Tokens flat = walk({a, b});
      EXPECT_EQ(walk({a, 1, b}), flat);
      EXPECT_EQ(walk({1, a, b}), flat);
    }
}

// ---- what blocks of the curve are ---------------------------------------------------------------

TEST(ClassicHilbert, AlignedRunsAreSquaresAndTwoToOneRectangles) {
  for (Index side = 1; side <= 64; side *= 2) {
    const Tokens tokens = walk({side, side});
    for (Index run = 1, edge = 1; run <= side * side; run *= 4, edge *= 2)
      for (const Index length : {run, 2 * run}) {
        if (length > side * side) continue;
        for (Index begin = 0; begin < side * side; begin += length) {
          Cell low{side, side}, high{-1, -1};
          for (Index i = begin; i < begin + length; ++i) {
            const Cell cell = cell_of({side, side}, tokens[static_cast<std::size_t>(i)]);
            low = {std::min(low.x, cell.x), std::min(low.y, cell.y)};
            high = {std::max(high.x, cell.x), std::max(high.y, cell.y)};
          }
          const Index width = high.x - low.x + 1, height = high.y - low.y + 1;
          ASSERT_EQ(width * height, length) << "side " << side << ", positions from " << begin;
          ASSERT_EQ(std::min(width, height), edge);
          ASSERT_EQ(low.x % width, 0);
          ASSERT_EQ(low.y % height, 0);
        }
      }
  }
}

// ---- costs and limits ---------------------------------------------------------------------------

// Were either direction linear in the number of cells, this would not end.
TEST(GeneralizedHilbert, HugeGrids) {
  constexpr Index kHuge = std::numeric_limits<std::int32_t>::max();
  std::mt19937_64 random(1);
  for (const Grid& grid : {Grid{kHuge, kHuge}, Grid{kHuge, 2}, Grid{3, kHuge}, Grid{kHuge - 1, 1000003},
                           Grid{Index{1} << 30, Index{1} << 30}, Grid{2097151, 2097150, 2097149}, Grid{2, kHuge, 3}}) {
    const Index cells = grid.cells();
    for (int i = 0; i < 200; ++i) {
      const auto position = static_cast<Index>(random() % static_cast<std::uint64_t>(cells - 1));
      const Cell cell = hilbert_cell(grid, position), next = hilbert_cell(grid, position + 1);
      ASSERT_EQ(hilbert_position(grid, cell), position);
      ASSERT_LE(manhattan(cell, next), 4);
    }
  }
}

TEST(GeneralizedHilbert, WalkStopsAtTheLimit) {
  EXPECT_EQ(hilbert_walk({4, 4}, 7, Steps::near), (Tokens{0, 1, 5, 4, 6, 2, 3}));
  EXPECT_EQ(hilbert_walk({4, 4}, 0), Tokens{});
  EXPECT_EQ(hilbert_walk({2, 2}, 1000), (Tokens{0, 2, 3, 1}));
}

TEST(Curve, RefusesWhatIsNotThere) {
  EXPECT_EQ(message_of([] { (void)hilbert_cell({4, 2}, 8); }), "hilbert_cell: position 8 must be from 0 to 7");
  EXPECT_EQ(message_of([] { (void)hilbert_cell({4, 2}, -1); }), "hilbert_cell: position -1 must be from 0 to 7");
  EXPECT_EQ(message_of([] {
              (void)hilbert_position({4, 2}, {3, 2});
            }),
            "hilbert_position: cell (3, 2, 0) lies outside a grid of 1 x 2 x 4");
  EXPECT_EQ(message_of([] { (void)hilbert_walk({4, 0}, 0); }), "hilbert_walk: a grid of 1 x 0 x 4 has no cells");
  EXPECT_EQ(message_of([] {
              (void)hilbert_walk({4, 4}, Index{1} << 31);
            }),
            "hilbert_walk: limit 2147483648 must be from 0 to 2^31 - 1");
  EXPECT_EQ(message_of([] {
              (void)walk({4, 3, 2}, Steps::unit);
            }),
            "hilbert_walk: unit steps through a box need even sides, got 2 x 3 x 4");
  EXPECT_THROW((void)hilbert_position({4, 4}, {4, 0}), Error);
  EXPECT_THROW((void)hilbert_cell({4, 4}, 16), Error);
  EXPECT_THROW((void)hilbert_cell({Index{1} << 31, 1}, 0), Error);
  EXPECT_THROW((void)hilbert_cell({Index{1} << 30, Index{1} << 30, 16}, 0), Error);
  EXPECT_THROW((void)Grid({-1, 4}).cells(), Error);
}

// ---- Morton -------------------------------------------------------------------------------------

TEST(Morton, XIsInTheEvenBits) {
  EXPECT_EQ(morton_code({0, 0}), 0u);
  EXPECT_EQ(morton_code({1, 0}), 1u);
  EXPECT_EQ(morton_code({0, 1}), 2u);
  EXPECT_EQ(morton_code({2, 0}), 4u);
  EXPECT_EQ(morton_code({3, 5}), 39u);  // 10 01 11: y = 101, x = 011
  for (const Grid grid : {Grid{64, 64}, Grid{64, 16}, Grid{5, 37}}) {
    const Order order{.kind = Order::Kind::morton, .grid = grid};
    const Permutation pi = build_permutation(order, grid.cells());
    for (std::size_t i = 1; i < pi.token_at.size(); ++i)
      ASSERT_LT(morton_code(cell_of(grid, pi.token_at[i - 1])), morton_code(cell_of(grid, pi.token_at[i])));
  }
}
