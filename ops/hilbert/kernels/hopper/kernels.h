#pragma once
#include "ops/hilbert/kernels/cuda/kernels.h"

// Private to kernels/: what route_cuda.cpp starts on Hopper GPUs: bf16, head dims 64 and 128, no
// dropout, rows of 16-byte aligned memory, k and v alike. Groups have multiples of 128 queries and
// keys; lists have tiles of 128 rows, masked where they are partial.

namespace hilt::kernels::hopper {

constexpr Index kHeads = 256, kItems = Index{1} << 30;  // at most: heads of a call, tiles of a launch

// segment_forward.cu. o is of bf16, and fresh, or of f32 and goes on from what is there.
void group_forward(Cuda, const ForwardPass&, const EqualGroups&);
void list_forward(Cuda, const ForwardPass&, const Marks&);

// segment_backward.cu: 128 keys a group, or 256 and as many queries at head dim 64; writes bf16.
void one_group_backward(Cuda, const BackwardPass&, const EqualGroups&);

// stream_backward.cu: any number of keys, in two passes over the scores.
void group_backward(Cuda, const BackwardPass&, const EqualGroups&);
void list_backward(Cuda, const BackwardPass&, const Marks&);

}  // namespace hilt::kernels::hopper
