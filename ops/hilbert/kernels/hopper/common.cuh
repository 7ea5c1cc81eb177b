#pragma once
#include "ops/hilbert/kernels/hopper/sm90.cuh"
#include "core/cuda/launch.cuh"
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/kernels/hopper/kernels.h"
#include "ops/hilbert/kernels/cuda/merge.cuh"
#include "ops/hilbert/kernels/cuda/on_device.h"

// What the Hopper attention kernels share.

namespace hilt::kernels::hopper {

using namespace cuda;
using namespace cuda::hopper;

constexpr int kTile = 128;                // queries and keys of a tile
constexpr int kThreads = 3 * kWarpgroup;  // one warpgroup loads, two multiply

/// Rows of one tensor; strides in elements.
struct Operand {
  const bf16* data;
  std::int64_t batch;
  int token, head;
  __device__ const bf16* at(int b, int h) const { return data + b * batch + static_cast<std::int64_t>(h) * head; }
};
inline Operand operand_of(Rows<const bf16> x) {
  return {x.data, x.batch, static_cast<int>(x.token), static_cast<int>(x.head)};
}

/// Where a ring of tiles stands: a stage, and the parity of its phase.
template <int Stages> struct Ring {
  int stage = 0;
  std::uint32_t parity;
  __device__ explicit Ring(std::uint32_t first) : parity(first) {}
  __device__ void next() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

/// A tile of one side that meets a tile of the other, as lists have it.
struct Meeting {
  int tile;
  bool partial;
};
__device__ __forceinline__ Meeting meeting(std::span<const Tiling::Ref> list, int e) {
  static_assert(sizeof(Tiling::Ref) == 8);
  const int2 x = __ldg(reinterpret_cast<const int2*>(list.data()) + e);
  return {x.x, (x.y & 0xff) != 0};
}

/// x = masked for the pairs that do not attend: rows row + 8 h, columns column + 8 c + j of what a
/// lane has of 64 x N scores. kQueries: rows are queries and columns keys; else the other way
/// round.
template <bool kQueries, int N>
__device__ __forceinline__ void mask(const TilingView& t, int row, int column, float masked, float (&x)[N]) {
  const auto at = [](int i) { return static_cast<std::size_t>(i); };
  if constexpr (kQueries) {
    const QueryBounds q[2] = {bounds_of(t, at(row)), bounds_of(t, at(row + 8))};
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const KeyPlace k = place_of(t, at(column + 8 * c + j));
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (!attends(q[h], k)) x[4 * c + 2 * h + j] = masked;
      }
    }
  } else {
    const KeyPlace k[2] = {place_of(t, at(row)), place_of(t, at(row + 8))};
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const QueryBounds q = bounds_of(t, at(column + 8 * c + j));
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (!attends(q, k[h])) x[4 * c + 2 * h + j] = masked;
      }
    }
  }
}

/// Whether a thread's share of 64 rows of a tile is finite: `threads` threads share them. A product
/// multiplies what is masked by zero, and 0 x NaN is NaN: where this says no, the plain kernel does
/// the tile again.
template <int D>
__device__ __forceinline__ bool rows_are_finite(std::uint32_t tile, std::uint32_t panel, int thread, int threads) {
  std::uint32_t odd = 0;  // two bf16: sums of x * 0
  for (int i = thread; i < 64 * D / 8; i += threads) {
    const uint4 v =
        load_shared_16(tile + static_cast<std::uint32_t>(i / 512) * panel + static_cast<std::uint32_t>(i % 512) * 16);
    for (const std::uint32_t w : {v.x, v.y, v.z, v.w})
      asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(odd) : "r"(w), "r"(0u));
  }
  return (odd & 0x7fff7fffu) == 0;
}

/// In: word j of chunk c in w[c] for lane j of a quad. Out: chunk `lane % 4`, all four words.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&w)[4], int quad) {
  const bool odd = quad & 1, high = quad & 2;
  std::uint32_t r = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
  if (odd) w[0] = r;
  else w[1] = r;
  r = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  if (odd) w[2] = r;
  else w[3] = r;
  const std::uint32_t a = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
  if (high) w[0] = a, w[1] = b;
  else w[2] = a, w[3] = b;
}
/// One row of sums (row h of the pair a lane has) as bf16: a quad writes 64 bytes at a time.
template <int Chunks, int N>
__device__ __forceinline__ void store_row(bf16* row, const float (&x)[N], int h, float scale, int quad) {
#pragma unroll
  for (int g = 0; g < Chunks / 4; ++g) {
    std::uint32_t w[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      w[c] = pack_bf16(x[16 * g + 4 * c + 2 * h] * scale, x[16 * g + 4 * c + 2 * h + 1] * scale);
    transpose_quad(w, quad);
    *reinterpret_cast<uint4*>(row + (4 * g + quad) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
/// row = keep row + scale sums, in f32: a quad fills 32 bytes, a sector, at a time. Nothing is read
/// where keep is 0.
template <int Chunks, int N>
__device__ __forceinline__ void merge_row(float* row, const float (&x)[N], int h, float scale, float keep, int quad) {
  constexpr int kAtOnce = 8;
#pragma unroll
  for (int g = 0; g < Chunks; g += kAtOnce) {
    float2* const to = reinterpret_cast<float2*>(row + g * 8) + quad;
    float2 y[kAtOnce] = {};
    if (keep != 0) {
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) y[c] = to[4 * c];
    }
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c)
      to[4 * c] = make_float2(fmaf(keep, y[c].x, scale * x[4 * (g + c) + 2 * h]),
                              fmaf(keep, y[c].y, scale * x[4 * (g + c) + 2 * h + 1]));
  }
}

}  // namespace hilt::kernels::hopper
