// Orders of points against the definition, written a second time and the other way round: from the
// position to the cell, and a code is what a search digit by digit finds.
#include "ops/hilbert/points/points.h"
#include <gtest/gtest.h>
#include <algorithm>
#include <array>
#include <cfenv>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include "core/random.h"
#include "ops/hilbert/plan/order.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/reference.h"
#include "tests/support/settings.h"

using namespace hilt;

namespace {

using Rows = std::vector<std::int64_t>;
using Coordinates = std::array<std::uint64_t, 3>;
const char* const kKinds[] = {"hilbert", "hilbert-trans", "morton", "morton-trans"};

// ---- the definitions, from the position to the cell ---------------------------------------------

/// d2xy of the page of definitions.
Coordinates d2xy(int bits, std::uint64_t d) {
  std::uint64_t x = 0, y = 0;
  for (std::uint64_t s = 1; s < std::uint64_t{1} << bits; s *= 2, d >>= 2) {
    const std::uint64_t rx = d >> 1 & 1, ry = (d ^ rx) & 1;
    if (ry == 0) {
      if (rx == 1) x = s - 1 - x, y = s - 1 - y;
      std::swap(x, y);
    }
    x += s * rx, y += s * ry;
  }
  return {x, y, 0};
}

/// Skilling's inverse. The Gray code of a position, dealt out to the axes, x first, is a cell once
/// each level, from the finest but one, has reflected the first axis or exchanged it with another.
Coordinates skilling_cell(int bits, std::uint64_t position) {
  const std::uint64_t gray = position ^ position >> 1;
  Coordinates x{};
  for (int level = bits - 1; level >= 0; --level)
    for (int axis = 0; axis < 3; ++axis)
      x[static_cast<std::size_t>(axis)] |= (gray >> (3 * level + 2 - axis) & 1) << level;
  for (int level = 1; level < bits; ++level)
    for (std::size_t axis = 3; axis-- > 0;)
      for (int finer = 0; finer < level; ++finer) {
        const std::uint64_t bit = std::uint64_t{1} << finer;
        if (x[axis] >> level & 1) x[0] ^= bit;
        else if ((x[0] & bit) != (x[axis] & bit)) x[0] ^= bit, x[axis] ^= bit;
      }
  return x;
}

Coordinates morton_cell_at(int axes, int bits, std::uint64_t code) {
  Coordinates x{};
  for (int i = 0; i < axes * bits; ++i) x[static_cast<std::size_t>(i % axes)] |= (code >> i & 1) << i / axes;
  return x;
}

/// Level by level, the digit whose cell, at that level, is the one that holds this one.
std::uint64_t code_of(std::string_view kind, int axes, int bits, Coordinates cell) {
  if (kind.ends_with("-trans")) std::reverse(cell.begin(), cell.begin() + axes);
  std::uint64_t code = 0;
  for (int level = 1; level <= bits; ++level) {
    Coordinates coarse = cell;
    for (std::uint64_t& c : coarse) c >>= bits - level;
    for (std::uint64_t digit = 0;; ++digit) {
      const std::uint64_t next = code << axes | digit;
      if (digit == std::uint64_t{1} << axes) return ~std::uint64_t{0};  // none: no bijection
      const Coordinates at = kind.starts_with("morton") ? morton_cell_at(axes, level, next)
                             : axes == 2                ? d2xy(level, next)
                                                        : skilling_cell(level, next);
      if (at != coarse) continue;
      code = next;
      break;
    }
  }
  return code;
}

/// The order by the definition: cells, codes, and a stable sort, a document after the other.
Rows order_by_definition(const std::vector<double>& x, int axes, std::string_view kind, int bits, bool scaled,
                         std::vector<Index> documents) {
  const auto n = static_cast<Index>(x.size()) / axes;
  if (documents.empty()) documents = {n};
  Rows order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  Index first = 0;
  for (const Index length : documents) {
    const auto at = [&](Index row, int axis) { return x[static_cast<std::size_t>(row * axes + axis)]; };
    std::array<double, 3> low{};
    double side = 0;
    for (int a = 0; a < axes; ++a) {
      double least = at(first, a), most = least;
      for (Index row = first; row < first + length; ++row)
        least = std::fmin(least, at(row, a)), most = std::fmax(most, at(row, a));
      low[static_cast<std::size_t>(a)] = least, side = std::fmax(side, most - least);
    }
    std::vector<std::uint64_t> codes;
    for (Index row = first; row < first + length; ++row) {
      Coordinates cell{};
      for (int a = 0; a < axes; ++a) {
        const auto axis = static_cast<std::size_t>(a);
        const double cells = std::pow(2.0, bits);
        if (!scaled) cell[axis] = static_cast<std::uint64_t>(at(row, a));
        else if (side > 0)
          cell[axis] =
              static_cast<std::uint64_t>(std::fmin(std::floor((at(row, a) - low[axis]) / side * cells), cells - 1));
      }
      codes.push_back(code_of(kind, axes, bits, cell));
    }
    std::stable_sort(order.begin() + first, order.begin() + first + length, [&](std::int64_t a, std::int64_t b) {
      return codes[static_cast<std::size_t>(a - first)] < codes[static_cast<std::size_t>(b - first)];
    });
    first += length;
  }
  return order;
}

Rows token_at(const PointOrder& order) { return order.token_at.to_vector<std::int64_t>(); }

/// Every cell of 2^bits a side, x fastest, as rows.
Tensor full_grid(int axes, int bits) {
  const Index side = Index{1} << bits;
  Rows cells;
  for (Index z = 0; z < (axes == 3 ? side : 1); ++z)
    for (Index y = 0; y < side; ++y)
      for (Index x = 0; x < side; ++x) {
        cells.insert(cells.end(), {x, y});
        if (axes == 3) cells.push_back(z);
      }
  return from_values(cells, {std::ssize(cells) / axes, axes});
}

void expect_inverse(const PointOrder& order) {
  const Rows pi = token_at(order), rho = order.position_of.to_vector<std::int64_t>();
  ASSERT_EQ(order.token_at.dtype(), DType::i64);
  ASSERT_EQ(order.position_of.dtype(), DType::i64);
  ASSERT_EQ(pi.size(), rho.size());
  for (std::size_t i = 0; i < pi.size(); ++i) {
    ASSERT_TRUE(pi[i] >= 0 && pi[i] < std::ssize(pi)) << i;
    ASSERT_EQ(rho[static_cast<std::size_t>(pi[i])], static_cast<std::int64_t>(i));
  }
}

}  // namespace

// ---- full grids ---------------------------------------------------------------------------------

TEST(OrderOfPoints, PlaneIsTheClassicCurve) {
  for (int bits = 1; bits <= 7; ++bits) {
    const Index side = Index{1} << bits;
    Order hilbert{.kind = Order::Kind::hilbert, .grid = {side, side}};
    const ref::Pi pi = ref::order_of(hilbert, side * side);
    ASSERT_TRUE(pi.independent);
    const Rows expected(pi.token_at.begin(), pi.token_at.end());
    const PointOrder order = order_of_points(full_grid(2, bits), "hilbert", bits);
    EXPECT_EQ(token_at(order), expected) << bits;
    expect_inverse(order);
  }
}

TEST(OrderOfPoints, SpaceIsSkillingsCurveInUnitSteps) {
  for (int bits = 1; bits <= 4; ++bits) {
    const Index side = Index{1} << bits;
    const PointOrder order = order_of_points(full_grid(3, bits), "hilbert", bits);
    const Rows pi = token_at(order);
    expect_inverse(order);
    for (Index i = 0; i < std::ssize(pi); ++i) {
      const Cell at = cell_of({side, side, side}, pi[static_cast<std::size_t>(i)]);
      const Coordinates cell{static_cast<std::uint64_t>(at.x), static_cast<std::uint64_t>(at.y),
                             static_cast<std::uint64_t>(at.z)};
      ASSERT_EQ(cell, skilling_cell(bits, static_cast<std::uint64_t>(i))) << bits << " bits, position " << i;
      if (i == 0) continue;
      const Cell before = cell_of({side, side, side}, pi[static_cast<std::size_t>(i - 1)]);
      ASSERT_EQ(std::abs(at.x - before.x) + std::abs(at.y - before.y) + std::abs(at.z - before.z), 1) << i;
    }
  }
}

// By hand: two cells a side. Skilling's path begins along the last axis, and z, y, z, x, ..
TEST(OrderOfPoints, TwoCellsASide) {
  EXPECT_EQ(token_at(order_of_points(full_grid(2, 1), "hilbert", 1)), (Rows{0, 2, 3, 1}));
  EXPECT_EQ(token_at(order_of_points(full_grid(2, 1), "hilbert-trans", 1)), (Rows{0, 1, 3, 2}));
  EXPECT_EQ(token_at(order_of_points(full_grid(2, 1), "morton", 1)), (Rows{0, 1, 2, 3}));
  EXPECT_EQ(token_at(order_of_points(full_grid(2, 1), "morton-trans", 1)), (Rows{0, 2, 1, 3}));
  EXPECT_EQ(token_at(order_of_points(full_grid(3, 1), "hilbert", 1)), (Rows{0, 4, 6, 2, 3, 7, 5, 1}));
  EXPECT_EQ(token_at(order_of_points(full_grid(3, 1), "hilbert-trans", 1)), (Rows{0, 1, 3, 2, 6, 7, 5, 4}));
  EXPECT_EQ(token_at(order_of_points(full_grid(3, 1), "morton", 1)), (Rows{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(token_at(order_of_points(full_grid(3, 1), "morton-trans", 1)), (Rows{0, 4, 2, 6, 1, 5, 3, 7}));
}

TEST(OrderOfPoints, MortonIsTheCodeOfTheGrid) {
  const Rows pi = token_at(order_of_points(full_grid(2, 5), "morton", 5));
  for (std::size_t i = 0; i < pi.size(); ++i) {
    const Cell cell = cell_of({32, 32}, pi[i]);
    const auto x = static_cast<std::uint64_t>(cell.x), y = static_cast<std::uint64_t>(cell.y);
    EXPECT_EQ(morton_cell_at(2, 5, i), (Coordinates{x, y}));
  }
}

TEST(OrderOfPoints, ScaledAreTheCellsThemselves) {
  for (const int axes : {2, 3})
    for (const char* kind : kKinds)
      for (int bits = 1; bits <= 4; ++bits) {
        const Tensor cells = full_grid(axes, bits);
        const Rows expected = token_at(order_of_points(cells, kind, bits));
        for (const DType type : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i32, DType::u8})
          EXPECT_EQ(token_at(order_of_points(converted(cells, type), kind, bits)), expected) << kind << type << bits;
        EXPECT_EQ(token_at(order_of_points(add(mul(to(cells, DType::f64), 0.125), -3), kind, bits)), expected);
      }
}

// ---- any points ---------------------------------------------------------------------------------

TEST(OrderOfPoints, RandomPointsAgainstTheDefinition) {
  std::mt19937 random(1);
  const auto below = [&](Index n) { return static_cast<Index>(random() % static_cast<std::uint64_t>(n)); };
  for (int round = 0; round < 400; ++round) {
    const int axes = 2 + round % 2, most = axes == 2 ? 31 : 20;
    const char* const kind = kKinds[below(4)];
    const int bits = round % 5 == 0 ? most : static_cast<int>(1 + below(most));
    std::vector<Index> documents;
    for (Index d = below(4); d > 0; --d) documents.push_back(1 + below(90));
    const Index n = documents.empty() ? below(200) : std::reduce(documents.begin(), documents.end());
    const DType type = std::array{DType::f64, DType::f32, DType::i64, DType::i32}[static_cast<std::size_t>(below(4))];
    const bool scaled = is_floating(type), few = below(2) == 0;  // few values: many ties
    std::vector<double> x;
    for (Index i = 0; i < n * axes; ++i) {
      const Index cells = few ? std::min<Index>(3, Index{1} << bits) : Index{1} << bits;
      x.push_back(static_cast<double>(below(cells)));
      if (scaled) x.back() = static_cast<double>(static_cast<float>(x.back() * 0.37 - (few ? 0 : 1e3)));
    }
    const PointOrder order = order_of_points(from_values(x, {n, axes}, type), kind, bits, documents);
    expect_inverse(order);
    ASSERT_EQ(token_at(order), n == 0 ? Rows{} : order_by_definition(x, axes, kind, bits, scaled, documents))
        << "round " << round << ": " << kind << ", " << axes << " axes, " << bits << " bits, " << n << " of " << type;
  }
}

TEST(OrderOfPoints, ManyPointsOnAnyNumberOfThreads) {
  constexpr Index kMany = 150000;  // several pieces of every loop
  const std::vector<Index> packed{70000, 1, 79999};
  struct Case {
    const char* kind;
    int bits;
    bool clustered;  // runs of one digit, and ties
  };
  for (const auto& [kind, bits, clustered] :
       {Case{"morton", 20, false}, Case{"morton-trans", 17, true}, Case{"hilbert", 5, true}}) {
    Tensor points = rand({kMany, 3}, {3, 4});
    if (clustered) points = mul(points, mul(points, mul(points, points)));
    for (const std::vector<Index>& documents : {packed, {}}) {
      const Rows expected = order_by_definition(points.to_vector<double>(), 3, kind, bits, true, documents);
      for (const int threads : {1, 2, 4}) {
        const Threads some(threads);
        const PointOrder order = order_of_points(points, kind, bits, documents);
        expect_inverse(order);
        ASSERT_TRUE(token_at(order) == expected) << kind << ", " << threads << " threads";
      }
    }
  }
}

TEST(OrderOfPoints, TiesKeepTheirRows) {
  Rows ascending(40000);
  std::iota(ascending.begin(), ascending.end(), 0);
  for (const char* kind : kKinds) {
    EXPECT_EQ(token_at(order_of_points(full({40000, 3}, 0.3), kind)), ascending) << "a cube without sides";
    EXPECT_EQ(token_at(order_of_points(full({40000, 2}, 7, DType::i32), kind, 3)), ascending);
  }
  // Two cells in turn: all of the one, then all of the other, each in the order of rows.
  Rows cells(2 * 50000), expected;
  for (std::size_t i = 0; i < 50000; ++i) cells[2 * i] = cells[2 * i + 1] = i % 3 == 0 ? 1 : 2;
  for (const bool first : {true, false})
    for (Index i = 0; i < 50000; ++i)
      if ((i % 3 == 0) == first) expected.push_back(i);
  EXPECT_EQ(token_at(order_of_points(from_values(cells, {50000, 2}), "morton", 31)), expected);
}

TEST(OrderOfPoints, DocumentsApart) {
  const std::vector<Index> documents{300, 1, 20000, 77};
  Tensor points = rand({20378, 3}, {5, 6});
  const Rows together = token_at(order_of_points(points, "hilbert-trans", 7, documents));
  Index first = 0;
  for (const Index length : documents) {
    // Its own cube: moved and scaled by a power of two it has the same cells.
    const Tensor alone = add(mul(to(slice(points, 0, first, first + length), DType::f64), 4), -1);
    const Rows expected = token_at(order_of_points(alone, "hilbert-trans", 7));
    for (Index i = 0; i < length; ++i)
      ASSERT_EQ(together[static_cast<std::size_t>(first + i)] - first, expected[static_cast<std::size_t>(i)]);
    first += length;
  }
}

// What 0 / 0 is as a cell, the language does not say.
TEST(OrderOfPoints, APointAloneDividesByNothing) {
  const Threads one(1);
  std::feclearexcept(FE_ALL_EXCEPT);
  EXPECT_EQ(token_at(order_of_points(rand({3, 2}, {5, 6}), "hilbert", 16, {1, 1, 1})), (Rows{0, 1, 2}));
  EXPECT_EQ(std::fetestexcept(FE_INVALID | FE_DIVBYZERO), 0);
}

TEST(OrderOfPoints, AnyStridesAndSizes) {
  const Tensor points = rand({3, 50}, {7, 8});
  EXPECT_EQ(token_at(order_of_points(transpose(points, 0, 1))),
            token_at(order_of_points(clone(transpose(points, 0, 1)))));
  EXPECT_EQ(token_at(order_of_points(zeros({0, 3}))), Rows{});
  EXPECT_EQ(token_at(order_of_points(zeros({1, 2}))), Rows{0});
  // The ends of what is taken: the finest cells, a side of one denormal, the largest numbers.
  EXPECT_EQ(token_at(order_of_points(from_values<std::int64_t>({2147483647, 2147483647, 0, 0}, {2, 2}), "morton", 31)),
            (Rows{1, 0}));
  EXPECT_EQ(token_at(order_of_points(from_values<std::int64_t>({1048575, 0, 0, 0, 0, 0}, {2, 3}), "hilbert", 20)),
            (Rows{1, 0}));
  const double small = std::numeric_limits<double>::denorm_min(), large = std::nextafter(0x1p1022, 0);
  for (const double end : {small, large})
    EXPECT_EQ(token_at(order_of_points(from_values({end, end, -end, -end, 0.0, 0.0}, {3, 2}), "morton", 31)),
              (Rows{1, 2, 0}));
}

// What no document holds follows as it is: padding, of which nothing is asked.
TEST(OrderOfPoints, RowsBehindTheDocumentsStay) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> x{0, 1, 1, 0, 0, 0, 5, 5, 0, 1, 9, 9, nan, nan, 3, -7};
  for (const DType type : {DType::f32, DType::f64}) {
    const PointOrder order = order_of_points(from_values(x, {8, 2}, type), "morton", 4, {3, 2});
    expect_inverse(order);
    EXPECT_EQ(token_at(order), (Rows{2, 1, 0, 4, 3, 5, 6, 7}));
  }
  EXPECT_EQ(token_at(order_of_points(from_values(Rows{1, 1, 0, 0, -1, 99}, {3, 2}), "morton", 1, {2})),
            (Rows{1, 0, 2}));
}

// ---- refusals -----------------------------------------------------------------------------------

TEST(OrderOfPoints, ErrorsNameWhatIsWrong) {
  const auto error = [](const Tensor& x, std::string_view kind = "hilbert", int bits = 16,
                        const std::vector<Index>& documents = {}) {
    return error_of([&] { (void)order_of_points(x, kind, bits, documents); });
  };
  const Tensor eight = zeros({8, 3});
  EXPECT_EQ(error({}), "usage: order_of_points: needs points [N, 2 or 3], got []");
  EXPECT_EQ(error(zeros({8})), "usage: order_of_points: needs points [N, 2 or 3], got [8]");
  EXPECT_EQ(error(zeros({8, 4})), "usage: order_of_points: needs points [N, 2 or 3], got [8, 4]");
  EXPECT_EQ(
      error(eight, "hilbert-tran"),
      "usage: order_of_points: kind: 'hilbert-tran' is not one of hilbert, morton, hilbert-trans, morton-trans; did "
      "you mean hilbert-trans?");
  EXPECT_EQ(error(eight, "morton", 0), "usage: order_of_points: 0 bits; expected 1..20 on 3 axes");
  EXPECT_EQ(error(eight, "morton", 21), "usage: order_of_points: 21 bits; expected 1..20 on 3 axes");
  EXPECT_EQ(error(zeros({8, 2}), "morton", 32), "usage: order_of_points: 32 bits; expected 1..31 on 2 axes");
  EXPECT_EQ(error(eight, "morton", 16, {4, 5}), "usage: order_of_points: the documents hold 9 points, xyz 8");
  EXPECT_EQ(error(eight, "morton", 16, {8, 0}), "usage: order_of_points: a document of 0 points; expected at least 1");
  EXPECT_EQ(error(eight, "morton", 16, {9, -1}),
            "usage: order_of_points: a document of -1 points; expected at least 1");
  constexpr Index kHuge = std::numeric_limits<Index>::max();
  EXPECT_EQ(error(eight, "morton", 16, {kHuge, kHuge}),
            "usage: order_of_points: 9223372036854775807 + 9223372036854775807 overflows 64 bits");
}

TEST(OrderOfPoints, ErrorsNameTheFirstRow) {
  const auto with = [](double value, DType type, Index row) {
    std::vector<double> x(90000, 1);
    x[static_cast<std::size_t>(3 * row + 1)] = x[89999] = value;
    return error_of([&] { (void)order_of_points(from_values(x, {30000, 3}, type), "hilbert", 5, {10000, 20000}); });
  };
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::string row = "usage: order_of_points: row 4321 has ",
                    finite = " on axis 1; expected a finite number below 2^1022",
                    cell = " on axis 1; expected a cell, from 0 to below 2^5";
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    EXPECT_EQ(with(std::numeric_limits<double>::quiet_NaN(), type, 4321), row + "nan" + finite);
    EXPECT_EQ(with(kInf, type, 4321), row + "inf" + finite);
    EXPECT_EQ(with(-kInf, type, 4321), row + "-inf" + finite);
  }
  EXPECT_EQ(with(-0x1p1022, DType::f64, 4321), row + "-4.49423e+307" + finite);
  for (const DType type : {DType::i64, DType::i32}) {
    EXPECT_EQ(with(-1, type, 4321), row + "-1" + cell);
    EXPECT_EQ(with(32, type, 4321), row + "32" + cell);
    EXPECT_EQ(with(31, type, 4321), "nothing");
  }
  EXPECT_EQ(with(255, DType::u8, 4321), row + "255" + cell);
}
