// Tensor copies against a loop over positions, for every pair of types and many layouts; and the
// walk they share.
#include <gtest/gtest.h>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include "core/dispatch.h"
#include "core/strided.h"
#include "core/tensor.h"
#include "tests/support/error_of.h"
#include "tests/support/half.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

// ---- one element, converted as tensor.h promises ------------------------------------------------

/// An element as bits, and the number it means: exact for every type in a long double of 64 bits of
/// mantissa.
template <class T> long double number(T x) {
  if constexpr (std::is_same_v<T, f16>) return half_f16().is_nan(x.bits) ? NAN : half_f16().value(x.bits);
  else if constexpr (std::is_same_v<T, bf16>) return half_bf16().is_nan(x.bits) ? NAN : half_bf16().value(x.bits);
  else return static_cast<long double>(x);
}
static_assert(std::numeric_limits<long double>::digits >= 64);

template <class To, class From> To converted(From from) {
  const long double x = number(from);
  if constexpr (std::is_same_v<To, From>) return from;
  else if constexpr (std::is_same_v<To, f16>) return std::bit_cast<f16>(half_f16().nearest(static_cast<double>(x)));
  else if constexpr (std::is_same_v<To, bf16>) return std::bit_cast<bf16>(half_bf16().nearest(static_cast<double>(x)));
  else if constexpr (std::is_floating_point_v<To>) return static_cast<To>(x);
  else if constexpr (std::is_integral_v<From>) {  // the low bits
    std::uint64_t bits = static_cast<std::uint64_t>(from);
    To to;
    std::memcpy(&to, &bits, sizeof to);
    return to;
  } else {
    constexpr long double kLow = std::numeric_limits<To>::min(), kHigh = std::numeric_limits<To>::max();
    return std::isnan(x) ? To{0} : static_cast<To>(std::min(std::max(std::trunc(x), kLow), kHigh));
  }
}

bool is_nan(double x) { return std::isnan(x); }
bool is_nan(float x) { return std::isnan(x); }
bool is_nan(f16 x) { return half_f16().is_nan(x.bits); }
bool is_nan(bf16 x) { return half_bf16().is_nan(x.bits); }
bool is_nan(std::int64_t) { return false; }
bool is_nan(std::int32_t) { return false; }
bool is_nan(std::uint8_t) { return false; }

/// Numbers that any type has trouble with, then ordinary ones. Floats are of 24 bits of mantissa at
/// most.
template <class T> T interesting(std::mt19937_64& random) {
  if constexpr (std::is_integral_v<T>) {
    constexpr T kEnds[] = {0, 1, std::numeric_limits<T>::max(), std::numeric_limits<T>::min(), static_cast<T>(-1)};
    const std::uint64_t bits = random();
    if (bits % 4 == 0) return kEnds[bits / 4 % 5];
    return static_cast<T>(static_cast<T>(bits >> 8) >> (bits & 31) % (8 * sizeof(T)));
  } else {
    const std::uint64_t bits = random();
    const float ends[] = {0.0f,           -0.0f,          0.5f,         -0.99f,       254.5f,        255.0f,
                          255.5f,         256.0f,         65504.0f,     65520.0f,     2147483520.0f, 2147483648.0f,
                          -2147483648.0f, -2147483904.0f, 9.223371e18f, 9.223372e18f, -9.223372e18f, -9.3e18f,
                          1e-8f,          1e-40f,         3e38f,        INFINITY,     -INFINITY,     NAN};
    const float x = bits % 3 == 0 ? ends[bits / 4 % std::size(ends)]
                    : bits % 3 == 1
                        ? std::bit_cast<float>(static_cast<std::uint32_t>(bits >> 16))
                        : static_cast<float>(static_cast<double>(static_cast<std::int64_t>(bits)) * 0x1p-53);
    return T(x);
  }
}

/// An integer that a float holds exactly: what becomes a 16-bit float is rounded once.
template <class T> T coarse(T x) {
  const std::int64_t wide = x;
  const int low =
      std::max(0, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(wide < 0 ? ~wide : wide))) - 24);
  return static_cast<T>(wide >> low << low);
}

// ---- layouts ------------------------------------------------------------------------------------

struct Layout {
  Shape shape;
  Strides strides;
  Index offset, elements;
};

Layout dense_layout(const Shape& shape) { return {shape, contiguous_strides(shape), 0, shape.numel()}; }
/// Axes in another order in memory, gaps after each, an offset.
Layout random_layout(const Shape& shape, std::mt19937_64& random, bool may_repeat) {
  std::vector<int> order;
  for (int i = 0; i < shape.rank(); ++i) order.push_back(i);
  std::shuffle(order.begin(), order.end(), random);
  Layout l{shape, {}, static_cast<Index>(random() % 4), 0};
  Index step = 1 + static_cast<Index>(random() % 2);
  for (int axis : order) {
    const bool repeat = may_repeat && random() % 4 == 0;
    l.strides[static_cast<std::size_t>(axis)] = repeat ? 0 : step;
    if (!repeat) step = step * std::max<Index>(shape[axis], 1) + static_cast<Index>(random() % 3);
  }
  l.elements = l.offset + step + static_cast<Index>(random() % 3);
  return l;
}

/// f(offset) for every position, in row-major order.
template <class F> void each(const Layout& l, F f) {
  Index at[Shape::kMaxRank] = {};
  for (Index n = 0; n < l.shape.numel(); ++n) {
    Index offset = l.offset;
    for (int i = 0; i < l.shape.rank(); ++i) offset += at[i] * l.strides[static_cast<std::size_t>(i)];
    f(offset);
    for (int i = l.shape.rank() - 1; i >= 0 && ++at[i] == l.shape[i]; --i) at[i] = 0;
  }
}

/// Copies random elements from one layout to another and compares every byte of the target, the
/// gaps included.
template <class To, class From> void check_copy(const Layout& to, const Layout& from, std::mt19937_64& random) {
  std::vector<From> source(static_cast<std::size_t>(from.elements));
  for (From& x : source) {
    x = interesting<From>(random);
    if constexpr (std::is_integral_v<From> && sizeof(To) == 2) x = coarse(x);
  }
  std::vector<To> target(static_cast<std::size_t>(to.elements));
  if (!target.empty()) std::memset(static_cast<void*>(target.data()), 0x5b, target.size() * sizeof(To));
  std::vector<To> expected = target;
  std::vector<Index> offsets;
  each(from, [&](Index at) { offsets.push_back(at); });
  std::size_t n = 0;
  each(to, [&](Index at) {
    expected[static_cast<std::size_t>(at)] = converted<To>(source[static_cast<std::size_t>(offsets[n++])]);
  });

  const auto tensor = [](auto& v, const Layout& l, DType t) {
    return Tensor(Storage::borrow(v.data(), v.size() * sizeof v[0], {}, nullptr), l.shape, l.strides, l.offset, t);
  };
  const Tensor src = tensor(source, from, dtype_of<From>);
  Tensor dst = tensor(target, to, dtype_of<To>);
  const std::uint64_t read = src.storage().version(), written = dst.storage().version();
  copy(dst, src);
  ASSERT_EQ(src.storage().version(), read);
  ASSERT_GT(dst.storage().version(), written);
  for (std::size_t i = 0; i < target.size(); ++i) {
    const bool same = std::memcmp(&target[i], &expected[i], sizeof(To)) == 0;
    ASSERT_TRUE(same || (is_nan(target[i]) && is_nan(expected[i])))
        << dtype_of<From> << " to " << dtype_of<To> << from.shape << ", element " << i << ": "
        << static_cast<double>(target[i]) << ", expected " << static_cast<double>(expected[i]);
  }
}

template <class F> void for_all_pairs(F f) {
  const auto to = [&]<class From>() {
    f.template operator()<double, From>();
    f.template operator()<float, From>();
    f.template operator()<bf16, From>();
    f.template operator()<f16, From>();
    f.template operator()<std::int64_t, From>();
    f.template operator()<std::int32_t, From>();
    f.template operator()<std::uint8_t, From>();
  };
  to.template operator()<double>();
  to.template operator()<float>();
  to.template operator()<bf16>();
  to.template operator()<f16>();
  to.template operator()<std::int64_t>();
  to.template operator()<std::int32_t>();
  to.template operator()<std::uint8_t>();
}

TEST(Copy, AllPairsOfTypesInRandomLayouts) {
  std::mt19937_64 random(1);
  const Shape shapes[] = {{}, {1}, {17}, {0}, {5, 7}, {3, 0, 2}, {4, 1, 6}, {2, 3, 4, 5}, {2, 1, 3, 2, 1, 4}, {130, 3}};
  int copies = 0;
  for_all_pairs([&]<class To, class From>() {
    for (const Shape& shape : shapes)
      for (int i = 0; i < scaled(6, 2); ++i, ++copies) {
        const Layout to = i == 0 ? dense_layout(shape) : random_layout(shape, random, false);
        const Layout from = i <= 1 ? dense_layout(shape) : random_layout(shape, random, true);
        check_copy<To, From>(to, from, random);
        if (testing::Test::HasFatalFailure()) return;
      }
  });
  EXPECT_EQ(copies, 49 * 10 * scaled(6, 2));
}

TEST(Copy, AllPairsOfTypesBeyondOnePiece) {
  const Threads threads(3);
  std::mt19937_64 random(2);
  for_all_pairs([&]<class To, class From>() {
    if (testing::Test::HasFatalFailure()) return;
    check_copy<To, From>(dense_layout({70001}), dense_layout({70001}), random);
    if (scaled(true, std::is_same_v<To, float>))
      check_copy<To, From>(random_layout({301, 4, 97}, random, false), random_layout({301, 4, 97}, random, true),
                           random);
  });
}

TEST(Copy, LongRunsAreCutAndRowsAreJoined) {
  const Threads threads(4);
  std::mt19937_64 random(3);
  for (const Shape& shape :
       {Shape{3, 150001}, Shape{2, 2, 65536}, Shape{65537, 2}, Shape{1, 400000}, Shape{400000, 1}}) {
    const Index padded = shape[-1] + 3;
    Layout rows = dense_layout(shape);  // each row is followed by a gap
    Index step = padded;
    for (int i = shape.rank() - 2; i >= 0; --i) rows.strides[static_cast<std::size_t>(i)] = step, step *= shape[i];
    rows.elements = step;
    check_copy<float, float>(rows, dense_layout(shape), random);
    check_copy<float, bf16>(dense_layout(shape), rows, random);
  }
}

TEST(Copy, GivesTheSameBitsForEveryNumberOfThreads) {
  std::mt19937_64 random(4);
  std::vector<double> source(500 * 301);
  for (double& x : source) x = interesting<double>(random);
  const Tensor x = as_strided(from_values(source, {500, 301}), {301, 500}, {1, 301}, 0);
  std::vector<std::vector<float>> results;
  for (int n : {1, 2, 3, 8}) {
    const Threads threads(n);
    Tensor y = empty(x.shape());
    copy(y, x);
    results.emplace_back(y.data<float>(), y.data<float>() + y.numel());
    EXPECT_EQ(std::memcmp(results.back().data(), results[0].data(), results[0].size() * sizeof(float)), 0) << n;
  }
}

TEST(Copy, RefusesAnotherShape) {
  Tensor x = zeros({2, 3});
  EXPECT_EQ(error_of([&] { copy(x, zeros({3, 2})); }), "usage: copy: [3, 2] into [2, 3]");
  EXPECT_EQ(error_of([&] { copy(x, zeros({6})); }), "usage: copy: [6] into [2, 3]");
  EXPECT_EQ(error_of([&] { copy(x, zeros({})); }), "usage: copy: [] into [2, 3]");
}

TEST(Copy, IntoItselfChangesNothing) {
  Tensor x = arange(100000, DType::f64);
  const std::vector<double> before = x.to_vector();
  copy(x, x);
  EXPECT_EQ(x.to_vector(), before);
}

// ---- the walk under all kernels -----------------------------------------------------------------

TEST(Runs, MergeWhatIsSteppedThroughEvenly) {
  const auto runs = [](const Shape& shape, const Strides& strides) { return Runs<1>(shape, {strides}); };
  const Runs<1> dense = runs({2, 3, 4}, {12, 4, 1});
  EXPECT_TRUE(dense.rows == 1 && dense.run == 24 && dense.step[0] == 1);
  const Runs<1> padded = runs({2, 3, 4}, {30, 10, 1});
  EXPECT_TRUE(padded.rows == 6 && padded.run == 4 && padded.step[0] == 1);
  const Runs<1> transposed = runs({3, 4}, {1, 3});
  EXPECT_TRUE(transposed.rows == 3 && transposed.run == 4 && transposed.step[0] == 3);
  const Runs<1> every_other = runs({3, 4}, {8, 2});
  EXPECT_TRUE(every_other.rows == 1 && every_other.run == 12 && every_other.step[0] == 2);
  const Runs<1> repeated = runs({3, 4}, {0, 0});
  EXPECT_TRUE(repeated.rows == 1 && repeated.run == 12 && repeated.step[0] == 0);
  const Runs<1> ones = runs({1, 4, 1}, {99, 1, 99});
  EXPECT_TRUE(ones.rows == 1 && ones.run == 4 && ones.step[0] == 1);
  const Runs<1> scalar = runs({}, {});
  EXPECT_TRUE(scalar.rows == 1 && scalar.run == 1);
  EXPECT_EQ(runs({3, 0, 2}, {0, 2, 1}).rows, 0);
  const Runs<2> both({2, 3}, {Strides{3, 1}, Strides{5, 1}});  // dense for one, not for the other
  EXPECT_TRUE(both.rows == 2 && both.run == 3);
}

TEST(Runs, VisitEveryElementOnceInRowMajorOrder) {
  std::mt19937_64 random(5);
  for (int round = 0; round < scaled(3000, 300); ++round) {
    Shape shape;
    for (std::uint64_t i = random() % 7; i > 0; --i)
      shape.push_back(static_cast<Index>(random() % 5 + (random() % 8 ? 1 : 0)));
    const Layout a = random_layout(shape, random, true),
                 b = random() % 2 ? dense_layout(shape) : random_layout(shape, random, true);
    std::vector<std::pair<Index, Index>> expected, got;
    each({shape, a.strides, 0, 0}, [&](Index at) { expected.emplace_back(at, 0); });
    std::size_t n = 0;
    each({shape, b.strides, 0, 0}, [&](Index at) { expected[n++].second = at; });

    const Runs<2> runs(shape, {a.strides, b.strides});
    const Index cut = static_cast<Index>(random() % static_cast<std::uint64_t>(runs.rows + 1));
    const auto row = [&](const Runs<2>::Offsets& o) {
      for (Index i = 0; i < runs.run; ++i) got.emplace_back(o[0] + i * runs.step[0], o[1] + i * runs.step[1]);
    };
    if (cut > 0) runs.for_rows(0, cut, row);  // in two parts: any row can be the first
    if (cut < runs.rows) runs.for_rows(cut, runs.rows, row);
    ASSERT_EQ(got, expected) << "round " << round;

    got.clear();
    const Threads one(1);
    const Index piece = static_cast<Index>(random() % 6 + 1);
    runs.for_pieces(piece, [&](const Runs<2>::Offsets& o, Index count) {
      ASSERT_LE(count, std::max(piece, runs.run >= piece ? Index{0} : runs.run));
      for (Index i = 0; i < count; ++i) got.emplace_back(o[0] + i * runs.step[0], o[1] + i * runs.step[1]);
    });
    ASSERT_EQ(got, expected) << "round " << round << ", piece " << piece;
  }
}

// ---- dispatch -----------------------------------------------------------------------------------

TEST(Visit, CallsForEveryTypeItPromises) {
  for (DType t : kAllDTypes) {
    const Tensor x = zeros({1}, t);
    DType seen{};
    int calls = 0;
    visit_any("op", x, [&]<class T>(Cpu) { seen = dtype_of<T>, ++calls; });
    EXPECT_EQ(seen, t);
    const Isa compiled = multiplies_bf16(active_isa()) ? Isa::avx512 : active_isa();
    const auto floats = [&] {
      visit("op", x, [&]<class T>(auto where) {
        if constexpr (!is_cuda<decltype(where)>) seen = dtype_of<T>, calls += where.kIsa == compiled;
      });
    };
    const std::string name(name_of(t));
    EXPECT_EQ(error_of(floats), is_floating(t) ? "nothing" : "usage: op: no kernel for " + name + " on cpu");
    EXPECT_EQ(seen, t);
    EXPECT_EQ(calls, 1 + is_floating(t));
  }
}

TEST(Copy, IntoWhatRepeatsOneElementIsRefused) {
  Tensor row = zeros({1, 3});
  Tensor wide = broadcast_to("test", row, {4, 3});
  EXPECT_EQ(error_of([&] {
              copy(wide, ones({4, 3}));
            }),
            "usage: copy: into [4, 3], whose axis 0 repeats one element (expand); copy into what was expanded, or into "
            "a clone");
  EXPECT_EQ(row.to_vector(), std::vector<double>(3));
  Tensor once = as_strided(row, {1, 3}, {0, 1}, 0);  // of one element a stride says nothing
  copy(once, ones({1, 3}));
  EXPECT_EQ(row.to_vector(), std::vector<double>(3, 1));
}

}  // namespace
}  // namespace hilt
