// Extents, strides and broadcasting by hand, and what is refused.
#include "core/shape.h"
#include <gtest/gtest.h>
#include <sstream>
#include <vector>
#include "tests/support/error_of.h"

namespace hilt {
namespace {

constexpr Index kHuge = Index{1} << 62;

std::string text(const Shape& s) {
  std::ostringstream os;
  os << s;
  return os.str();
}

TEST(Shape, CountsAndIndexes) {
  const Shape s{2, 3, 5};
  EXPECT_EQ(s.rank(), 3);
  EXPECT_EQ(s.numel(), 30);
  EXPECT_EQ(s[0], 2);
  EXPECT_EQ(s[2], 5);
  EXPECT_EQ(s[-1], 5);
  EXPECT_EQ(s[-3], 2);
  EXPECT_EQ(std::vector<Index>(s.begin(), s.end()), (std::vector<Index>{2, 3, 5}));
  EXPECT_EQ(text(s), "[2, 3, 5]");
  EXPECT_EQ(Shape{}.rank(), 0);
  EXPECT_EQ(Shape{}.numel(), 1);
  EXPECT_EQ(text({}), "[]");
  EXPECT_EQ((Shape{4, 0, 7}.numel()), 0);
  EXPECT_EQ(Shape(std::vector<Index>{7, 8}), (Shape{7, 8}));
}

TEST(Shape, ComparesExtentsAndRank) {
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_NE((Shape{2, 3}), (Shape{3, 2}));
  EXPECT_NE((Shape{2}), (Shape{2, 0}));  // the unused extents are zeros
  EXPECT_NE((Shape{}), (Shape{0}));
  EXPECT_NE((Shape{1}), (Shape{1, 1}));
}

TEST(Shape, WithReplacesOneAxisAndCountsAgain) {
  const Shape s{2, 3, 5};
  EXPECT_EQ(s.with(1, 7), (Shape{2, 7, 5}));
  EXPECT_EQ(s.with(-1, 1), (Shape{2, 3, 1}));
  EXPECT_EQ(s.with(0, 7).numel(), 105);
  EXPECT_EQ((Shape{0, 3}.with(0, 4).numel()), 12);
  EXPECT_EQ(s, (Shape{2, 3, 5}));
}

TEST(Shape, RefusesNegativeExtentsRankAboveSixAndOverflow) {
  EXPECT_EQ((Shape{1, 2, 3, 4, 5, 6}.numel()), 720);
  EXPECT_EQ(error_of([] { Shape{1, 1, 1, 1, 1, 1, 1}; }), "usage: Shape: rank 7 exceeds 6");
  EXPECT_EQ(error_of([] {
              Shape s{1, 1, 1, 1, 1, 1};
              s.push_back(1);
            }),
            "usage: Shape: rank exceeds 6");
  EXPECT_EQ(error_of([] { Shape{2, -1}; }), "usage: Shape: extent -1 of axis 1 is negative");
  EXPECT_EQ((Shape{kHuge, 1}.numel()), kHuge);
  EXPECT_EQ(error_of([] { Shape{kHuge, 2}; }), "usage: Shape: 4611686018427387904 x 2 overflows 64 bits");
  EXPECT_EQ(error_of([] { Shape{3037000500, 3037000500}; }), "usage: Shape: 3037000500 x 3037000500 overflows 64 bits");
  // A zero makes the product small, but strides are products of the others.
  EXPECT_EQ(error_of([] { Shape{0, kHuge, 2}; }), "usage: Shape: 4611686018427387904 x 2 overflows 64 bits");
  EXPECT_EQ(error_of([] { Shape{kHuge, 0, 2}; }), "usage: Shape: 4611686018427387904 x 2 overflows 64 bits");
  EXPECT_EQ(error_of([] { Shape({kHuge, 1}).with(1, 4); }), "usage: Shape: 4611686018427387904 x 4 overflows 64 bits");
}

TEST(Shape, RowMajorStrides) {
  EXPECT_EQ(contiguous_strides({2, 3, 5}), (Strides{15, 5, 1}));
  EXPECT_EQ(contiguous_strides({}), Strides{});
  EXPECT_EQ(contiguous_strides({7}), (Strides{1}));
  EXPECT_EQ(contiguous_strides({2, 0, 5}), (Strides{5, 5, 1}));  // as if the zero were a one
  EXPECT_EQ(contiguous_strides({2, 3, 4, 5, 6, 7}), (Strides{2520, 840, 210, 42, 7, 1}));
}

TEST(Shape, CheckedAxisAcceptsBothEndsAndNamesTheRange) {
  EXPECT_EQ(checked_axis("op", 0, 3), 0);
  EXPECT_EQ(checked_axis("op", 2, 3), 2);
  EXPECT_EQ(checked_axis("op", -1, 3), 2);
  EXPECT_EQ(checked_axis("op", -3, 3), 0);
  EXPECT_EQ(error_of([] { checked_axis("op", 3, 3); }), "usage: op: axis 3 is outside -3..2 of a tensor of rank 3");
  EXPECT_EQ(error_of([] { checked_axis("op", -4, 3); }), "usage: op: axis -4 is outside -3..2 of a tensor of rank 3");
  EXPECT_NE(error_of([] { checked_axis("op", 0, 0); }), "nothing");
}

TEST(Shape, BroadcastsLikeNumPy) {
  EXPECT_EQ(broadcast("op", {2, 3}, {2, 3}), (Shape{2, 3}));
  EXPECT_EQ(broadcast("op", {2, 3}, {3}), (Shape{2, 3}));
  EXPECT_EQ(broadcast("op", {3}, {2, 1}), (Shape{2, 3}));
  EXPECT_EQ(broadcast("op", {4, 1, 5}, {1, 6, 1}), (Shape{4, 6, 5}));
  EXPECT_EQ(broadcast("op", {}, {2, 3}), (Shape{2, 3}));
  EXPECT_EQ(broadcast("op", {}, {}), Shape{});
  EXPECT_EQ(broadcast("op", {0}, {1}), (Shape{0}));
  EXPECT_EQ(broadcast("op", {1}, {0}), (Shape{0}));
  EXPECT_EQ(error_of([] {
              broadcast("add", {2, 3}, {2, 4});
            }),
            "usage: add: shapes [2, 3] and [2, 4] do not broadcast: axis -1 has 3 and 4");
  EXPECT_EQ(error_of([] {
              broadcast("add", {2, 3}, {4, 3});
            }),
            "usage: add: shapes [2, 3] and [4, 3] do not broadcast: axis -2 has 2 and 4");
  EXPECT_EQ(error_of([] { broadcast("add", {0}, {2}); }),
            "usage: add: shapes [0] and [2] do not broadcast: axis -1 has 0 and 2");
  EXPECT_EQ(error_of([] {
              broadcast("add", {kHuge, 1}, {1, 4});
            }),
            "usage: Shape: 4611686018427387904 x 4 overflows 64 bits");
}

TEST(Shape, BroadcastIsSymmetricAndKeepsWhatItContains) {
  std::vector<Shape> all{{}};
  for (Index a : {0, 1, 2, 3}) {
    all.push_back({a});
    for (Index b : {0, 1, 2, 3}) {
      all.push_back({a, b});
      for (Index c : {0, 1, 2, 3}) all.push_back({a, b, c});
    }
  }
  int fits = 0;
  for (const Shape& a : all)
    for (const Shape& b : all) {
      Shape ab, ba;
      const std::string error = error_of([&] { ab = broadcast("op", a, b); });
      EXPECT_EQ(error == "nothing", error_of([&] { ba = broadcast("op", b, a); }) == "nothing");
      if (error != "nothing") continue;
      ++fits;
      EXPECT_EQ(ab, ba);
      EXPECT_EQ(broadcast("op", ab, a), ab);
    }
  EXPECT_GT(fits, 1000);
  EXPECT_LT(fits, static_cast<int>(all.size() * all.size()));
}

}  // namespace
TEST(Shape, AnAxisThatIsNotThereIsAnError) {
  EXPECT_EQ(error_of([] { (void)(Shape{2, 3}[2]); }), "usage: Shape: axis 2 of a tensor of rank 2");
  EXPECT_EQ(error_of([] { (void)(Shape{2, 3}[-3]); }), "usage: Shape: axis -3 of a tensor of rank 2");
}

}  // namespace hilt
