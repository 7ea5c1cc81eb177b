#pragma once
#include "ops/hilbert/kernels/attention.h"

// Private: attention by the tensor cores of any GPU since sm_80, for every tiling; bf16 and f16,
// head dims that are multiples of 16, to 128.
//
// Marks, int32 and zero before, [batch, heads, tiles]: set where a result came out as not finite
// and the plain kernel has to do the tile; the tile is then as it was before. That is how a NaN
// behind a mask is kept there (a product multiplies what is masked by zero, and 0 x NaN is NaN),
// and what f16 is too narrow for. Null: results are written as they are.

namespace hilt::kernels {

/// Whether the kernels can serve a call; they need rows of 16-byte aligned memory. O is T or float.
template <class T, class O>
bool mma_forward_serves(Cuda, const AttentionSizes&, Index n_heads, Rows<const T> q, Rows<const T> k, Rows<const T> v,
                        Rows<const O> o);
/// As attention_forward. again: of query tiles; only masks make it needed.
template <class T, class O>
void mma_forward(Cuda, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads, Rows<const T> q,
                 Rows<const T> k, Rows<const T> v, Rows<O> o, float* lse, bool fresh, std::int32_t* again);

/// Gradients of f32 are added to; those of T are written, every listed row and no other. False, and
/// nothing done, where rows cannot be read 16 bytes at a time. again_keys is [batch, heads, key
/// tiles] like the other, with key heads in the places of the first heads.
template <class T> bool mma_backward_serves(Cuda, const AttentionSizes&, Index n_heads);
template <class T, class O>
bool mma_backward(Cuda, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads, Rows<const T> q,
                  Rows<const T> k, Rows<const T> v, Rows<const T> d_o, const float* lse, const float* delta, Rows<O> dq,
                  Rows<O> dk, Rows<O> dv, std::int32_t* again_queries, std::int32_t* again_keys);

}  // namespace hilt::kernels
