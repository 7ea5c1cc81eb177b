// What processors with AVX512_BF16 and AMX compute, on others with AVX-512: attention and products
// of matrices are compiled with emulated_pairs.h in front and run their tests, as of the
// instruction set that HILT_EMULATED names. Where a processor has these, it judges the emulation.
#include <gtest/gtest.h>
#include <bit>
#include <cstdlib>
#include <random>
#include "core/dispatch.h"
#include "core/processor.h"
#include "ops/hilbert/attention.h"
#include "ops/hilbert/kernels/product_cpu.h"
#include "ops/ops.h"
#include "tests/support/emulated_pairs.h"

namespace hilt {

static Isa asked_for() {
  const char* const text = std::getenv("HILT_EMULATED");
  return text && std::string_view(text) == name_of(Isa::avx512_bf16) ? Isa::avx512_bf16 : Isa::avx512_amx;
}
// The linker has everyone outside core/ call this instead: see meson.build.
extern "C" Isa __wrap__ZN4hilt10active_isaEv() { return asked_for(); }

namespace {

using Words = std::uint32_t[16][16];

/// Bits of numbers near each other, or of any.
std::uint32_t some(std::mt19937& draw, int round) {
  const auto bits = static_cast<std::uint32_t>(draw());
  return round % 3 == 0 ? bits : (bits & 0x83ff83ffu) | (round % 3 == 1 ? 0x3c003c00u : 0x20002000u);
}

template <class Tiles> void run(const std::uint8_t (&shapes)[64], const Words& a, const Words& b, Words& sums) {
  Tiles::begin(shapes);
  Tiles::template load<0>(sums, 16), Tiles::template load<1>(a, 16), Tiles::template load<2>(b, 16);
  Tiles::template add_product<0, 1, 2>(), Tiles::template store<0>(sums, 16);
  Tiles::end();
}

/// Nothing here runs without AVX-512, which is not emulated.
struct Needs : testing::Environment {
  void SetUp() override {
    if (std::string_view(widest_isa()).substr(0, 6) == "avx512") return;
    std::puts("skipped: this processor has no AVX-512");
    std::exit(77);
  }
};
const auto* const kNeeds = testing::AddGlobalTestEnvironment(new Needs);

TEST(Emulated, KernelsUseIt) {
  const char* const text = std::getenv("HILT_EMULATED");
  ASSERT_EQ(name_of(active_isa()), text ? text : "avx512_amx");
  Generator draw(1);
  const Tensor x = to(randn({1, 32, 2, 16}, draw.next()), DType::bf16), m = reshape(x, {32, 32});
  const auto counted = [](auto run) {
    const long before = emulated::used;
    run();
    return emulated::used - before;
  };
  EXPECT_GT(counted([&] { (void)matmul(m, m); }), 0);
  EXPECT_GT(counted([&] { (void)attention(x, x, x, make_plan({.length = 32, .heads = 2})); }), 0);
}

TEST(Emulated, RoundsAsTheProcessor) {
  if (!__builtin_cpu_supports("avx512bf16")) GTEST_SKIP() << "this processor has no vcvtne2ps2bf16";
  std::mt19937 draw(1);
  for (int round = 0; round < 20'000; ++round) {
    emulated::Floats low, high;
    for (int i = 0; i < 16; ++i) {
      low[i] = std::bit_cast<float>(some(draw, round));
      high[i] = std::bit_cast<float>(some(draw, round));
    }
    const auto ours = (emulated::Words)emulated::cvtne2ps_pbh((__m512)high, (__m512)low);
    const auto theirs = (emulated::Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    for (int i = 0; i < 16; ++i) ASSERT_EQ(ours[i], theirs[i]) << std::hexfloat << low[i] << ' ' << high[i];
  }
}

TEST(Emulated, MultipliesTilesAsTheProcessor) {
  if (std::string_view(widest_isa()) != "avx512_amx") GTEST_SKIP() << "this processor has no AMX";
  std::mt19937 draw(1);
  for (int round = 0; round < 3'000; ++round) {
    Words a, b, ours, theirs;
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j) {
        a[i][j] = some(draw, round), b[i][j] = some(draw, round);
        ours[i][j] = theirs[i][j] = some(draw, round);
      }
    const auto below = [&](int n) { return static_cast<std::uint8_t>(1 + draw() % static_cast<unsigned>(n)); };
    const std::uint8_t rows = below(16), pairs = below(16), columns = below(16);
    alignas(64) std::uint8_t shapes[64] = {1};
    const auto shape = [&](int tile, std::uint8_t height, int words) {
      shapes[48 + tile] = height, shapes[16 + 2 * tile] = static_cast<std::uint8_t>(4 * words);
    };
    shape(0, rows, columns), shape(1, rows, pairs), shape(2, pairs, columns);
    run<kernels::AmxTiles<kernels::Bf16x2>>(shapes, a, b, theirs), run<emulated::Tiles>(shapes, a, b, ours);
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j) {
        const float x = std::bit_cast<float>(ours[i][j]), y = std::bit_cast<float>(theirs[i][j]);
        ASSERT_TRUE(ours[i][j] == theirs[i][j] || (x != x && y != y)) << std::hexfloat << x << ", not " << y;
      }
  }
}

}  // namespace
}  // namespace hilt
