#pragma once
#include <optional>
#include "ops/hilbert/kernels/attention.h"

// Private: attention of whole groups on Hopper GPUs, bf16, head dims 64 and 128. Where every pair
// of a group attends and groups are multiples of the tensor cores' tiles, nothing is masked and the
// rows of a group can be read through its lists of tokens as they are needed.

namespace hilt::kernels {

/// A tiling of equal groups without a mask: group g has queries q_token[g * queries ..) and keys
/// k_token[g * keys ..).
struct EqualGroups {
  Index groups = 0, queries = 0, keys = 0;
};
/// Nothing where the tiling is not of that sort.
std::optional<EqualGroups> equal_groups(const Tiling& t);

/// Whether the kernels below can serve a call; they need rows of 16-byte aligned memory. o is of
/// bf16, and fresh, or of f32, where what is there is the state of an online softmax that goes on,
/// as attention_forward has it.
template <class O>
bool segment_forward_serves(Cuda, const AttentionSizes&, const EqualGroups&, Rows<const bf16> q, Rows<const bf16> k,
                            Rows<const bf16> v, Rows<const O> o);
template <class O>
void segment_forward(Cuda, const AttentionSizes&, const Tiling&, const EqualGroups&, const std::int32_t* heads,
                     Index n_heads, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, Rows<O> o, float* lse,
                     bool fresh);

/// Tilings whose tiles all have 128 rows, masked where tiles are partial: `again` [batch, heads,
/// query tiles], zero before, is set where a value that is not finite met a mask and the plain
/// kernel has to do the tile. In f32 such a tile is as it was before.
bool whole_tiles(const Tiling& t);
template <class O>
bool list_forward_serves(Cuda, const AttentionSizes&, const Tiling&, Rows<const bf16> q, Rows<const bf16> k,
                         Rows<const bf16> v, Rows<const O> o);
template <class O>
void list_forward(Cuda, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads,
                  Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, Rows<O> o, float* lse, bool fresh,
                  std::int32_t* again);

/// Backward, written once and for all in bf16: every listed row of dq, dk and dv, and no other.
/// False, and nothing done, where rows cannot be read 16 bytes at a time.
bool segment_backward_serves(Cuda, const AttentionSizes&, const EqualGroups&);
bool segment_backward(Cuda, const AttentionSizes&, const Tiling&, const EqualGroups&, const std::int32_t* heads,
                      Index n_heads, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, Rows<const bf16> o,
                      Rows<const bf16> d_o, const float* lse, Rows<bf16> dq, Rows<bf16> dk, Rows<bf16> dv);

/// The same for groups of any number of keys, in two passes over the scores; delta comes from
/// attention_delta. Gradients of f32 are added to.
bool stream_backward_serves(Cuda, const AttentionSizes&, const EqualGroups&);
template <class O>
bool stream_backward(Cuda, const AttentionSizes&, const Tiling&, const EqualGroups&, const std::int32_t* heads,
                     Index n_heads, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, Rows<const bf16> d_o,
                     const float* lse, const float* delta, Rows<O> dq, Rows<O> dk, Rows<O> dv);

/// The same for whole_tiles(): again_queries [batch, heads, query tiles] and again_keys [batch,
/// heads, key tiles] as for list_forward.
bool list_backward_serves(Cuda, const AttentionSizes&, const Tiling&);
template <class O>
bool list_backward(Cuda, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads,
                   Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, Rows<const bf16> d_o, const float* lse,
                   const float* delta, Rows<O> dq, Rows<O> dk, Rows<O> dv, std::int32_t* again_queries,
                   std::int32_t* again_keys);

}  // namespace hilt::kernels
