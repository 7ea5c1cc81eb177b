#pragma once
#include "core/cuda/pack.cuh"
#include "ops/hilbert/kernels/cuda/loop.cuh"

// The plain way to multiply (loop.cuh): in f32 by fused multiply-adds, for every type and head dim
// to 256. The other is compared with it.
//
// Scores: a lane has one streamed row and takes its products with the 8 owned rows of its warp.
// Sums: a lane has every 32nd column and runs over the streamed rows. Pairs that do not attend are
// left out by a bit a pair, not multiplied by zero: 0 x NaN is NaN.

namespace hilt::kernels {

/// Head dims of up to 32 x Columns. Blocks: of a multiprocessor.
template <class T, int Columns, int Blocks> struct Plain {
  using Type = T;
  using Stride = Index;
  using Lanes = LanesOf<kWarp, 1, 8, kWarp, kWarp * Columns, Columns <= 4 ? 256 : 128>;
  using Powers = TruePowers;
  static constexpr bool kFolds = false, kMarks = false;
  static constexpr float kLift = 0;
  static constexpr int kBlocks = Blocks, kStages = 1, kWidth = kWarp * Columns;
  static constexpr int kPad = 4;  // floats: lanes that read 16 bytes each of their own row use all banks
  static constexpr std::uint32_t kPitch = 4 * kWidth, kStreamed = 4 * (kWidth + kPad),
                                 kOwnedBytes = Lanes::kOwned * kPitch, kChunkBytes = Lanes::kChunk * kStreamed,
                                 kOwnBytes = Lanes::kOwned * Lanes::kChunk * 4;  // weights

  static __device__ __forceinline__ float* floats_at(std::uint32_t bytes) {
    extern __shared__ __align__(128) std::uint8_t memory[];
    return reinterpret_cast<float*>(memory + bytes);
  }
  /// Rows token[0, n) of two tensors, or of a alone; zeros beyond n and dim. All threads.
  template <bool kStream>
  static __device__ void fetch(std::uint32_t to_a, std::uint32_t to_b, HeadRows<const T, Index> a,
                               HeadRows<const T, Index> b, const std::int32_t* token, int n, int dim) {
    constexpr int kRows = kStream ? Lanes::kChunk : Lanes::kOwned, kStep = kStream ? kWidth + kPad : kWidth;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kWidth; i += Lanes::kThreads) {
      const int r = i / kWidth, d = i % kWidth;
      const bool there = r < n && d < dim;
      floats_at(to_a)[r * kStep + d] = there ? static_cast<float>(a.row(token[r])[d]) : 0.0f;
      if (b.data) floats_at(to_b)[r * kStep + d] = there ? static_cast<float>(b.row(token[r])[d]) : 0.0f;
    }
  }
  /// s = owned rows . streamed rows
  static __device__ void multiply(typename Lanes::Scores& s, std::uint32_t own, std::uint32_t streamed) {
    const float* const rows = floats_at(own) + Lanes::warp_row() * kWidth;
    const float* const mine = floats_at(streamed) + Lanes::lane() * (kWidth + kPad);
    for (auto& x : s) x[0] = 0;
    for (int d = 0; d < kWidth; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(mine + d);
#pragma unroll
      for (int r = 0; r < Lanes::kRows; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(rows + r * kWidth + d);
        s[r][0] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, s[r][0]))));
      }
    }
  }
  /// sum += weights x n streamed rows, of the pairs whose bit is set. own: the memory for weights.
  static __device__ void add_weighted(typename Lanes::Sums& sum, const typename Lanes::Scores& w,
                                      const Bits<Lanes>& bits, std::uint32_t streamed, int n, std::uint32_t own) {
    float* const weight = floats_at(own) + threadIdx.x / kWarp * (Lanes::kRows * kWarp);
    unsigned pairs[Lanes::kRows];
#pragma unroll
    for (int r = 0; r < Lanes::kRows; ++r)
      pairs[r] = __ballot_sync(~0u, bits.at(r, 0)), weight[r * kWarp + Lanes::lane()] = w[r][0];
    __syncwarp();
    for (int j = 0; j < n; ++j) {
      const float* const row = floats_at(streamed) + j * (kWidth + kPad) + Lanes::lane();
      float x[Columns];
#pragma unroll
      for (int c = 0; c < Columns; ++c) x[c] = row[c * kWarp];
#pragma unroll
      for (int r = 0; r < Lanes::kRows; ++r)
        if (pairs[r] >> j & 1) {
          const float weigh = weight[r * kWarp + j];
#pragma unroll
          for (int c = 0; c < Columns; ++c) sum[r][c] = fmaf(weigh, x[c], sum[r][c]);
        }
    }
    __syncwarp();  // before the next weights
  }
  template <class To, class Value>
  static __device__ __forceinline__ void write_row(To* to, bool writes, int dim, Value&& value) {
#pragma unroll
    for (int c = 0; c < Columns; ++c)
      if (const int d = Lanes::column(c); writes && d < dim) to[d] = static_cast<To>(value(c));
  }
};

/// f.operator()<Columns>() for the head dim.
template <class F> void with_columns(Index dim, F&& f) {
  check(dim <= kPlainDim, "attention: head dim ", dim, " on a GPU must be at most ", kPlainDim,
        "; use backward = taped, or the CPU");
  if (dim <= 32) f.template operator()<1>();
  else if (dim <= 64) f.template operator()<2>();
  else if (dim <= 128) f.template operator()<4>();
  else f.template operator()<8>();
}

}  // namespace hilt::kernels
