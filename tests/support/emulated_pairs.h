#pragma once
#include <immintrin.h>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

// What kernels use of AVX512_BF16 and AMX, number by number as the manual of these processors has
// it. What is compiled with this file in front needs none. Denormals are 0 on the way in and out,
// and sums are rounded to nearest even.

namespace emulated {

using Floats [[gnu::vector_size(64)]] = float;
using Words [[gnu::vector_size(64)]] = std::uint32_t;  // pairs of bf16

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline float half_of(std::uint32_t pair, int i) {
  return flushed(__builtin_bit_cast(float, i == 0 ? pair << 16 : pair & 0xffff0000u));
}
inline float joined(float x, float y, float sum) { return flushed(std::fma(x, y, flushed(sum))); }

inline std::atomic<long> used = 0;  // products so far

inline __m512 dpbf16_ps(__m512 sum, __m512bh x, __m512bh y) {
  ++used;
  Floats out = (Floats)sum;
  for (int i = 0; i < 16; ++i)
    for (const int half : {1, 0}) out[i] = joined(half_of(((Words)x)[i], half), half_of(((Words)y)[i], half), out[i]);
  return (__m512)out;
}

inline __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
  Words out{};
  for (int i = 0; i < 32; ++i) {
    const float x = i < 16 ? ((Floats)low)[i] : ((Floats)high)[i - 16];
    const auto bits = __builtin_bit_cast(std::uint32_t, flushed(x));
    out[i / 2] |= (x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16) << i % 2 * 16;
  }
  return (__m512bh)out;
}

/// What a processor takes for an illegal instruction.
inline void require(bool legal) {
  if (!legal) std::fputs("emulated: no processor takes such tiles\n", stderr), std::abort();
}
struct Tiles {
  struct Tile {
    std::uint32_t word[16][16];
    int rows, words;
  };
  static inline thread_local Tile tile[8];

  static void begin(const std::uint8_t (&shapes)[64]) {
    require(shapes[0] == 1);
    for (int i = 0; i < 8; ++i) require(shapes[16 + 2 * i] <= 64 && shapes[48 + i] <= 16);
    for (int i = 0; i < 8; ++i) tile[i] = Tile{{}, shapes[48 + i], shapes[16 + 2 * i] / 4};
  }
  template <int To> static void clear() { std::memset(tile[To].word, 0, sizeof tile[To].word); }
  template <int To> static void load(const void* from, std::ptrdiff_t words) {
    clear<To>();
    for (int row = 0; row < tile[To].rows; ++row)
      std::memcpy(tile[To].word[row], static_cast<const std::uint32_t*>(from) + row * words,
                  4 * static_cast<std::size_t>(tile[To].words));
  }
  template <int From> static void store(void* to, std::ptrdiff_t words) {
    for (int row = 0; row < tile[From].rows; ++row)
      std::memcpy(static_cast<std::uint32_t*>(to) + row * words, tile[From].word[row],
                  4 * static_cast<std::size_t>(tile[From].words));
  }
  template <int To, int A, int B> static void add_product() {
    require(tile[To].rows == tile[A].rows && tile[To].words == tile[B].words && tile[A].words == tile[B].rows);
    ++used;
    for (int row = 0; row < tile[To].rows; ++row)
      for (int column = 0; column < tile[To].words; ++column) {
        float of[2] = {};
        for (int k = 0; k < tile[A].words; ++k)
          for (const int half : {0, 1})
            of[half] = joined(half_of(tile[A].word[row][k], half), half_of(tile[B].word[k][column], half), of[half]);
        std::uint32_t& sum = tile[To].word[row][column];
        const float all = flushed(__builtin_bit_cast(float, sum)) + flushed(of[0] + of[1]);
        sum = __builtin_bit_cast(std::uint32_t, flushed(all));
      }
  }
  static void end() { std::memset(tile, 0, sizeof tile); }
};

}  // namespace emulated

#ifdef HILT_EMULATE
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#include "ops/hilbert/kernels/product_cpu.h"
namespace hilt::kernels {
namespace {
template <> struct AmxTiles<Bf16x2> : emulated::Tiles {};
}  // namespace
}  // namespace hilt::kernels
#endif
