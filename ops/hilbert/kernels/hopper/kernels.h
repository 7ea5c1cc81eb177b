#pragma once
#include "ops/hilbert/kernels/cuda/kernels.h"
#include "ops/hilbert/kernels/hopper/visits.h"

// Private to kernels/: what route_cuda.cpp starts on Hopper GPUs: bf16 and f16, rows of
// 16-byte aligned memory, head dims that are multiples of 8, in registers and shared memory rounded
// up to one of kDims.

namespace hilt::kernels::hopper {

constexpr Index kHeads = 256, kItems = Index{1} << 30;  // at most: heads of a call, items of a launch
constexpr int kDims[] = {32, 64, 96, 128, 192, 256};

/// The tiling that forward() and stream_backward() walk where queries, or keys, are owned.
inline const Tiling& walked(const AttentionPass& p, bool keys_own) {
  const bool keeps = p.sizes.dropout != 0 || p.along;  // short lists are not in eights, nor of a call's order
  return keeps ? *p.tiling : with_short_lists(*p.tiling, keys_own);
}

// Each is compiled once a type and head dim, HILT_TYPE and HILT_DIM.

// forward.cu. o is of 16 bits, and L alone may go on (of a sink), or of f32 and both go on.
template <class E, int D> void forward(Cuda, const ForwardPass&, const Marks&);
// one_owner_backward.cu: where one owner has all the keys of a query, D up to 128; writes 16 bits.
template <class E, int D> void one_owner_backward(Cuda, const BackwardPass&, const Marks&);
// one_pass_backward.cu: any number of keys, in one pass that adds up dQ; D up to 128; writes 16
// bits.
struct PartialSums {
  float* of_queries;     // kSumBytes each, or less, [batch, heads, tiles of the schedule]
  std::uint32_t* added;  // [batch, heads, tiles], zero before
  std::int32_t* taken;   // zero before
};
constexpr Index kSumBytes = 32 << 10;
template <class E, int D> void one_pass_backward(Cuda, const BackwardPass&, const Marks&, const PartialSums&);
// stream_backward.cu: any number of keys, in two passes over the scores.
template <class E, int D> void stream_backward(Cuda, const BackwardPass&, const Marks&);

}  // namespace hilt::kernels::hopper
