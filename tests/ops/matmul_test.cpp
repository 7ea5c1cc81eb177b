// Products of every size around the edges of tiles, batched and broadcast, against sums in loops.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include "core/dispatch.h"
#include "ops/ops.h"
#include "tests/support/op_cases.h"
#include "tests/support/scale.h"

namespace hilt {
namespace {
using namespace judge;

std::vector<OpCase> matmul_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& a, const Shape& b, Traits traits = {}) {
    cases.push_back({"matmul",
                     {real(a), real(b)},
                     [](auto in) { return matmul(in[0], in[1]); },
                     []<class T>(const Arrays<T>& in) { return naive::matmul(in[0], in[1]); },
                     traits});
  };
  add_case({2, 3}, {3, 4});
  add_case({1, 1}, {1, 1});
  add_case({1, 4}, {4, 1});
  add_case({4, 1}, {1, 3});
  add_case({3, 3}, {3, 3});
  add_case({1, 3}, {3, 4});
  add_case({3, 4}, {4, 1});
  add_case({2, 2, 3}, {2, 3, 2}, {.rows = true});  // batches
  add_case({2, 2, 3}, {3, 2}, {.rows = true});     // one b for all
  add_case({3, 2}, {2, 2, 3});                     // one a for all
  add_case({2, 2, 3}, {1, 3, 2}, {.rows = true});
  add_case({1, 2, 3}, {2, 3, 2});
  add_case({2, 1, 2, 2}, {3, 2, 2});
  add_case({2, 3, 2, 1}, {2, 3, 1, 2}, {.rows = true});
  add_case({2, 1, 1, 2, 2, 2}, {1, 2, 1, 1, 2, 3});
  add_case({1, 2, 3}, {1, 3, 2});
  add_case({3, 0}, {0, 2});  // sums of nothing
  add_case({0, 3}, {3, 2});
  add_case({2, 3}, {3, 0});
  add_case({0, 2, 3}, {3, 2});
  add_case({5, 17}, {17, 9});
  add_case({131, 257}, {257, 129}, {.large = true});
  add_case({9, 65, 67}, {9, 67, 63}, {.rows = true, .large = true});
  add_case({9, 65, 67}, {67, 63},
           {.large = true});  // one product of 585 rows: rounding may depend on how many there are
  add_case({65, 67}, {9, 67, 63}, {.large = true});
  add_case({1, 3001}, {3001, 101}, {.large = true});
  add_case({1001, 1}, {1, 303}, {.large = true});
  return cases;
}

/// A matrix times views of itself.
std::vector<OpCase> gram_cases() {
  std::vector<OpCase> cases;
  for (const Shape& shape : {Shape{3, 4}, {2, 3, 2}, {4, 1}, {1, 3}}) {
    std::vector<int> axes{0, 1, 2};
    axes.resize(static_cast<std::size_t>(shape.rank()));
    std::swap(axes.end()[-1], axes.end()[-2]);
    cases.push_back({"x x^T",
                     {real(shape)},
                     [](auto in) { return matmul(in[0], transpose(in[0])); },
                     [=]<class T>(const Arrays<T>& in) { return naive::matmul(in[0], naive::permute(in[0], axes)); }});
    cases.push_back({"x^T x",
                     {real(shape)},
                     [](auto in) { return matmul(transpose(in[0]), in[0]); },
                     [=]<class T>(const Arrays<T>& in) { return naive::matmul(naive::permute(in[0], axes), in[0]); }});
  }
  return cases;
}
/// x w + b, gelu_tanh of it, and r + x w + b; a row alone, rows, batches of rows.
std::vector<OpCase> linear_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& x, const Shape& w, Traits traits = {}) {
    const Shape y = x.with(-1, w[1]), b{w[1]};
    const auto product = []<class T>(const Array<T>& left, const Array<T>& right) {
      Array<T> rows = left;
      if (left.shape.rank() == 1) rows.shape = Shape{1, left.shape[0]};
      Array<T> out = naive::matmul(rows, right);
      out.shape = left.shape.with(-1, right.shape[1]);
      return out;
    };
    const auto plus = []<class T>(const T& p, const T& q) { return p + q; };
    Traits two = traits;
    // Where no kernel does both the argument of gelu is rounded, and its tail amplifies that: x
    // gelu'(x) / gelu(x) is about x^2, 10 at x = -3.
    two.steps = 12;
    cases.push_back({"linear",
                     {real(x), real(w), real(b)},
                     [](auto in) { return linear(in[0], in[1], in[2]); },
                     [=]<class T>(const Arrays<T>& in) { return naive::zip(product(in[0], in[1]), in[2], plus); },
                     traits});
    cases.push_back({"linear_gelu_tanh",
                     {real(x), real(w), real(b)},
                     [](auto in) { return linear_gelu_tanh(in[0], in[1], in[2]); },
                     [=]<class T>(const Arrays<T>& in) {
                       return naive::map(naive::zip(product(in[0], in[1]), in[2], plus), naive::gelu_tanh<T>);
                     },
                     two});
    cases.push_back(
        {"linear_gelu_tanh, no bias",
         {real(x), real(w)},
         [](auto in) { return linear_gelu_tanh(in[0], in[1], {}); },
         [=]<class T>(const Arrays<T>& in) { return naive::map(product(in[0], in[1]), naive::gelu_tanh<T>); },
         two});
    cases.push_back({"linear onto",
                     {real(x), real(w), real(b), real(y)},
                     [](auto in) { return linear(in[0], in[1], in[2], in[3]); },
                     [=]<class T>(const Arrays<T>& in) {
                       return naive::zip(naive::zip(product(in[0], in[1]), in[2], plus), in[3], plus);
                     },
                     traits});
    cases.push_back({"linear onto, no bias",
                     {real(x), real(w), real(y)},
                     [](auto in) { return linear(in[0], in[1], {}, in[2]); },
                     [=]<class T>(const Arrays<T>& in) { return naive::zip(product(in[0], in[1]), in[2], plus); },
                     traits});
  };
  add_case({2, 3}, {3, 4});
  add_case({1, 1}, {1, 1});
  add_case({3}, {3, 2});
  add_case({5, 1}, {1, 3});
  add_case({2, 3, 4}, {4, 5});
  add_case({1, 2, 2, 3}, {3, 1});
  add_case({0, 3}, {3, 2});
  add_case({2, 3}, {3, 0});
  add_case({5, 17}, {17, 9});
  add_case({4, 16}, {16, 8});
  add_case({131, 257}, {257, 129}, {.large = true});
  add_case({9, 65, 67}, {67, 63}, {.large = true});
  return cases;
}
const Op kMatmul[] = {{"matmul", matmul_cases}, {"gram", gram_cases}, {"linear", linear_cases}};
INSTANTIATE_TEST_SUITE_P(Matmul, OpJudges, testing::ValuesIn(kMatmul), op_name);

/// The tensor with its last two axes swapped in memory, or not.
Tensor stored(const Tensor& x, bool across) { return across ? transpose(clone(transpose(x))) : x; }

/// a b for dense row-major matrices, in f64, and the sums of absolute values of the terms.
struct Product {
  std::vector<double> y, size;
};
Product product(const std::vector<double>& a, const std::vector<double>& b, Index m, Index n, Index k) {
  Product p{std::vector<double>(static_cast<std::size_t>(m * n)), std::vector<double>(static_cast<std::size_t>(m * n))};
  for (Index i = 0; i < m; ++i)
    for (Index q = 0; q < k; ++q) {
      const double factor = a[static_cast<std::size_t>(i * k + q)];
      for (Index j = 0; j < n; ++j) {
        const double term = factor * b[static_cast<std::size_t>(q * n + j)];
        p.y[static_cast<std::size_t>(i * n + j)] += term;
        p.size[static_cast<std::size_t>(i * n + j)] += std::abs(term);
      }
    }
  return p;
}

/// |got - exact| <= (2 k u + one rounding) sum |a b|: twice the bound of a plain loop.
void expect_product(Index m, Index n, Index k, DType dtype, bool a_across, bool b_across, std::uint64_t seed) {
  const Tensor a = random(real({m, k}), seed, dtype), b = random(real({k, n}), seed + 1, dtype);
  const Product exact = product(a.to_vector(), b.to_vector(), m, n, k);
  const std::vector<double> got = matmul(stored(a, a_across), stored(b, b_across)).to_vector();
  const double u = dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
  const double store = dtype == DType::f64    ? 0x1p-53
                       : dtype == DType::f32  ? 0x1p-24
                       : dtype == DType::bf16 ? 0x1p-8
                                              : 0x1p-11;
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_LE(std::abs(got[i] - exact.y[i]),
              2 * static_cast<double>(k) * u * exact.size[i] + store * std::abs(exact.y[i]) + 0x1p-149)
        << dtype << ' ' << m << " x " << k << " x " << n << (a_across ? ", a transposed" : "")
        << (b_across ? ", b transposed" : "") << " element " << i;
}

TEST(Matmul, EverySizeAroundTheEdgesOfBlocks) {
  std::mt19937 rng(1);
  const Index edges[] = {1,  2,  3,  4,  5,  7,  8,  9,  11, 12, 13,  15,  16,  17,  23,  24,  25,  31,  32,
                         33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257};
  const auto edge = [&] { return edges[rng() % std::size(edges)]; };
  const DType dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
  for (int i = 0; i < scaled(400, 40); ++i) {
    expect_product(edge(), edge(), edge(), dtypes[i % 4], rng() % 2, rng() % 2, rng());
    if (HasFatalFailure()) return;
  }
}

TEST(Matmul, SmallSizesAll) {
  for (Index m = 1; m <= 5; ++m)
    for (Index n = 1; n <= 5; ++n)
      for (Index k = 0; k <= 5; ++k)
        for (bool a : {false, true})
          for (bool b : {false, true}) {
            expect_product(m, n, k, DType::f32, a, b, 3);
            if (HasFatalFailure()) return;
          }
}

TEST(Matmul, LargeInF32) {
  expect_product(517, 389, scaled<Index>(1031, 131), DType::f32, false, true, 5);
  expect_product(300, 300, scaled<Index>(3000, 300), DType::bf16, false, false, 6);
}

TEST(Matmul, SixteenBitsAccumulateInMore) {
  // 4096 ones: a bf16 accumulator stops at 256, an f16 one at 2048.
  for (DType dtype : {DType::bf16, DType::f16})
    for (const auto& [m, n] : {std::pair<Index, Index>{1, 1}, {5, 7}, {33, 65}}) {
      const Tensor a = ones({m, 4096}, dtype), b = ones({4096, n}, dtype);
      for (double v : matmul(a, b).to_vector()) ASSERT_EQ(v, 4096) << dtype << ' ' << m << " x " << n;
      const Played p = play([](auto in) { return matmul(in[0], in[1]); },
                            {{ones({4096, m}, dtype), ones({m, n}, dtype)}}, ones({4096, n}, dtype));
      for (double v : p.dx[1].to_vector()) ASSERT_EQ(v, 4096) << dtype;
    }
}

TEST(Matmul, GradientOfABroadcastFactorAddsUpInMoreThanSixteenBits) {
  // b serves 4096 batches.
  const Tensor a = ones({4096, 1, 2}, DType::bf16), b = ones({2, 3}, DType::bf16);
  const Played p = play([](auto in) { return matmul(in[0], in[1]); }, {{a, b}}, ones({4096, 1, 3}, DType::bf16));
  for (double v : p.dx[1].to_vector()) ASSERT_EQ(v, 4096);
}

TEST(Matmul, NothingToSumGivesZeros) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Played p = play([](auto in) { return matmul(in[0], in[1]); }, {{empty({3, 0}, dtype), empty({0, 2}, dtype)}},
                          ones({3, 2}, dtype));
    EXPECT_EQ(p.y.to_vector(), std::vector<double>(6, 0)) << dtype;
    EXPECT_EQ(p.dx[0].shape(), (Shape{3, 0}));
    EXPECT_EQ(p.dx[1].shape(), (Shape{0, 2}));
    const Played q = play([](auto in) { return matmul(in[0], in[1]); },
                          {{empty({2, 0, 3}, dtype), ones({3, 2}, dtype)}}, empty({2, 0, 2}, dtype));
    EXPECT_EQ(q.y.shape(), (Shape{2, 0, 2}));
    EXPECT_EQ(q.dx[1].to_vector(), std::vector<double>(6, 0)) << dtype;  // a sum over no rows
  }
}

TEST(Matmul, NanAndInfinityReachTheirRowAndColumnAlone) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (Index n : {3, 40}) {
      std::vector<double> v(static_cast<std::size_t>(n * n), 1);
      v[static_cast<std::size_t>(n + 2)] = std::nan("");
      v[static_cast<std::size_t>(2 * n)] = kInf;
      const Tensor special = from_values(v, {n, n}, dtype), plain = ones({n, n}, dtype);
      const std::vector<double> y = matmul(special, plain).to_vector(), z = matmul(plain, special).to_vector();
      for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < n; ++j) {
          const double a = y[static_cast<std::size_t>(i * n + j)], b = z[static_cast<std::size_t>(i * n + j)];
          EXPECT_TRUE(i == 1 ? std::isnan(a) : a == (i == 2 ? kInf : static_cast<double>(n)))
              << dtype << ' ' << n << ": " << i << ' ' << j << ' ' << a;
          EXPECT_TRUE(j == 2 ? std::isnan(b) : b == (j == 0 ? kInf : static_cast<double>(n)))
              << dtype << ' ' << n << ": " << i << ' ' << j << ' ' << b;
        }
      EXPECT_TRUE(std::isnan(matmul(from_values(std::vector<double>{0}, {1, 1}, dtype),
                                    from_values(std::vector<double>{kInf}, {1, 1}, dtype))
                                 .item()));
    }
  }
}

TEST(Matmul, RowsDoNotSeeEachOther) {
  // Content of other rows, NaN included, changes no bit of a row; in one matrix, not only between
  // batches.
  for (DType dtype : {DType::f32, DType::bf16})
    for (const auto& [m, k, n] : {std::array<Index, 3>{5, 17, 9}, {65, 130, 70}}) {
      const Tensor a = random(real({m, k}), 1, dtype), b = random(real({k, n}), 2, dtype);
      Tensor other = full({m, k}, std::nan(""), dtype), row = slice(other, 0, 3, 4);
      copy(row, slice(a, 0, 3, 4));
      EXPECT_EQ(bits(slice(matmul(a, b), 0, 3, 4)), bits(slice(matmul(other, b), 0, 3, 4))) << dtype << ' ' << m;
    }
  // The same between batches that share a factor.
  const Tensor a = random(real({9, 65, 67}), 1, DType::f32), b = random(real({67, 63}), 2, DType::f32);
  Tensor other = full({9, 65, 67}, std::nan(""), DType::f32), batch = slice(other, 0, 4, 5);
  copy(batch, slice(a, 0, 4, 5));
  EXPECT_EQ(bits(slice(matmul(a, b), 0, 4, 5)), bits(slice(matmul(other, b), 0, 4, 5)));
}

TEST(Matmul, FewRowsHaveTheBitsOfMany) {
  if (active_isa() == Isa::base) GTEST_SKIP() << "Eigen's sums depend on the size";
  for (DType dtype : {DType::f32, DType::f64, DType::bf16})
    for (Index k : {1, 5, 16, 255, 256, 257, 511, 513, 768})
      for (Index n : {1, 3, 16, 17, 65, 1030, 2049})
        for (const bool turned : {false, true}) {
          const Tensor a = random(real({20, k}), 1, dtype),
                       b = turned ? transpose(random(real({n, k}), 2, dtype)) : random(real({k, n}), 2, dtype);
          const Tensor all = matmul(a, b);
          for (Index rows : {1, 2, 3})
            EXPECT_EQ(bits(matmul(slice(a, 0, 2, 2 + rows), b)), bits(slice(all, 0, 2, 2 + rows)))
                << dtype << ' ' << rows << " x " << k << " x " << n << (turned ? ", turned" : "");
        }
}

#if defined(__x86_64__)
// vdpbf16ps as Intel documents it: whatever MXCSR says, denormals count as 0 and become 0, and it
// rounds to nearest even. The second product of a pair is added first.
float flushed(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float with_pair(float sum, std::uint32_t a, std::uint32_t b) {
  const auto number = [](std::uint32_t bits) { return flushed(std::bit_cast<float>(bits)); };
  sum = flushed(std::fma(number(a & 0xffff0000u), number(b & 0xffff0000u), flushed(sum)));
  return flushed(std::fma(number(a << 16), number(b << 16), sum));
}
[[gnu::target("avx512f,avx512bf16")]] void vdpbf16ps(float* sum, const std::uint32_t* a, const std::uint32_t* b) {
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  _mm512_storeu_ps(sum, _mm512_dpbf16_ps(_mm512_loadu_ps(sum), (__m512bh)x, (__m512bh)y));
}
bool same_float(float x, float y) {
  return (x != x && y != y) || std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
}

TEST(Matmul, PairsOfBf16AreAddedAsTheInstructionIsDocumented) {
  if (!__builtin_cpu_supports("avx512bf16")) GTEST_SKIP() << "this processor has no vdpbf16ps";
  std::mt19937 draw(1);
  for (int round = 0; round < 100'000; ++round) {
    std::array<std::uint32_t, 16> a, b, sum;
    // Exponents of two rounds in three are near each other, so that what is added counts.
    for (auto* x : {&a, &b, &sum})
      for (std::uint32_t& bits : *x) {
        bits = static_cast<std::uint32_t>(draw());
        if (round % 3 > 0) bits = (bits & 0x83ff83ffu) | (round % 3 == 1 ? 0x3c003c00u : 0x20002000u);
      }
    std::array<float, 16> got;
    for (std::size_t i = 0; i < 16; ++i) got[i] = std::bit_cast<float>(sum[i]);
    vdpbf16ps(got.data(), a.data(), b.data());
    for (std::size_t i = 0; i < 16; ++i) {
      const float want = with_pair(std::bit_cast<float>(sum[i]), a[i], b[i]);
      ASSERT_TRUE(same_float(got[i], want)) << std::hexfloat << got[i] << ", not " << want << ": " << std::hex << sum[i]
                                            << " + " << a[i] << " . " << b[i];
    }
  }
}

TEST(Matmul, ABf16ProductHasTheBitsOfThatInstruction) {
  if (!multiplies_bf16(active_isa())) GTEST_SKIP() << "products of bf16 are f32 here";
  const Index n = 33;
  for (const Index k : {2, 7, 64})
    for (const Index m : {2, 20})
      for (const double scale : {1.0, 0x1p-65}) {  // with the second, products are denormal
        const Tensor a = mul(random(real({m, k}), 1, DType::bf16), scale),
                     b = mul(random(real({k, n}), 2, DType::bf16), scale);
        const std::vector<float> x = a.to_vector<float>(), y = b.to_vector<float>(),
                                 got = matmul(a, b).to_vector<float>();
        const auto bits = [&](const std::vector<float>& all, Index at, bool there) {
          return there ? std::bit_cast<std::uint32_t>(all[static_cast<std::size_t>(at)]) : 0;
        };
        for (Index i = 0; i < m * n; ++i) {
          float sum = 0;
          for (Index p = 0; p < k; p += 2)
            sum = with_pair(sum, bits(x, i / n * k + p, true) >> 16 | bits(x, i / n * k + p + 1, p + 1 < k),
                            bits(y, p * n + i % n, true) >> 16 | bits(y, (p + 1) * n + i % n, p + 1 < k));
          ASSERT_EQ(got[static_cast<std::size_t>(i)], static_cast<float>(bf16(sum))) << m << ", " << k << ", " << i;
        }
      }
}
#endif

TEST(Matmul, Refusals) {
  const auto of = [](const Shape& a, const Shape& b) { return [=] { matmul(ones(a), ones(b)); }; };
  EXPECT_TRUE(refuses(of({2, 3}, {4, 5}), "matmul", {"[2, 3]", "[4, 5]", "3", "4"}));
  EXPECT_TRUE(refuses(of({3}, {3, 5}), "matmul", {"[3]"}));
  EXPECT_TRUE(refuses(of({2, 3}, {3}), "matmul", {"[3]"}));
  EXPECT_TRUE(refuses(of({}, {3, 3}), "matmul", {"[]"}));
  EXPECT_TRUE(refuses(of({2, 2, 3}, {3, 3, 2}), "matmul", {"[2, 2, 3]", "[3, 3, 2]"}));
  EXPECT_TRUE(refuses([] { matmul(ones({2, 3}), ones({3, 2}, DType::f64)); }, "matmul", {"f32", "f64"}));
  EXPECT_TRUE(refuses([] { matmul(ones({2, 3}, DType::i32), ones({3, 2}, DType::i32)); }, "matmul", {"i32"}));
}

}  // namespace
}  // namespace hilt
