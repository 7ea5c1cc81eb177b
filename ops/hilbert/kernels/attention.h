#pragma once
#include <array>
#include "ops/hilbert/plan/attends.h"
#include "core/dispatch.h"
#include "core/random.h"

namespace hilt::kernels {

/// Rows of one attention operand, [batch, token, head, dim] with strides in elements; dim has
/// stride 1.
template <class T> struct Rows {
  T* data;
  Index batch, token, head;
  [[gnu::always_inline]] constexpr T* at(Index b, Index t, Index h) const {
    return data + b * batch + t * token + h * head;
  }
};

/// One attention call. Head h reads key head h / (heads / kv_heads).
struct AttentionSizes {
  Index batch, length, heads, kv_heads, dim;
  double scale;
  double dropout = 0;    // probability of dropping a weight
  RandomKey key;         // of the dropout mask, see attention_keeps
  Index first_head = 0;  // of these heads among all: part of the mask's counter
  Index first_batch = 0;
};

/// Whether the weight of (b, h, t, u) survives dropout: word u % 4 of philox({u / 4, t, b *
/// heads_total.., stream}, seed), as a 24-bit uniform, is at least p. The same on every device and
/// in every mode. head = b * heads + h.
[[gnu::always_inline]] constexpr bool attention_keeps(const RandomKey& key, std::uint32_t head, std::uint32_t t,
                                                      std::uint32_t u, double p) {
  const auto bits =
      philox({u / 4, t, head, static_cast<std::uint32_t>(key.stream)}, key.seed ^ (key.stream >> 32) << 32);
  const std::uint32_t even = u & 2 ? bits[2] : bits[0],
                      odd = u & 2 ? bits[3] : bits[1];  // bits[u % 4], so that loops become vectors
  return ((u & 1 ? odd : even) >> 8) * 0x1p-24 >= p;
}

/// Statistics and accumulators: f32, f64 for f64.
template <class T> using Stat = wide_t<T>;

// Forward over one tiling for the listed heads. o [B, L, H, D] and lse [B, H, L] hold the state of
// an online softmax at the tokens' own rows: where `fresh`, rows of q_token are written; else they
// continue from what is there, which merges this tiling with those before it. A row without keys is
// left (0, -inf) when fresh.
template <Isa I, class T, class O>
void attention_forward(CpuAt<I>, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads,
                       Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<O> o, Stat<T>* lse, bool fresh);
template <class T, class O>
void attention_forward(Cuda, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads,
                       Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<O> o, float* lse, bool fresh);

// delta[b, h, t] = d_o . o
template <Isa I, class T>
void attention_delta(CpuAt<I>, const AttentionSizes&, Rows<const T> o, Rows<const T> d_o, Stat<T>* delta);
template <class T> void attention_delta(Cuda, const AttentionSizes&, Rows<const T> o, Rows<const T> d_o, float* delta);

// Backward over one tiling for the listed heads, ADDING to dq [B, L, H, D], dk and dv [B, L, Hk,
// D], all in the accumulator type and zeroed by the caller, with the final (merged) lse and delta.
template <Isa I, class T>
void attention_backward(CpuAt<I>, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads,
                        Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<const T> d_o, const Stat<T>* lse,
                        const Stat<T>* delta, Rows<Stat<T>> dq, Rows<Stat<T>> dk, Rows<Stat<T>> dv);
template <class T>
void attention_backward(Cuda, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads,
                        Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<const T> d_o, const float* lse,
                        const float* delta, Rows<float> dq, Rows<float> dk, Rows<float> dv);

// On a GPU, where one kernel makes whole gradients of a call with this one tiling: it rounds to T
// and writes every listed row of dq, dk and dv, and no other. Whether there is one; and it, which
// is false, with nothing done, where it cannot read these rows.
template <class T> bool attention_backward_at_once_serves(Cuda, const AttentionSizes&, const Tiling&);
template <class T>
bool attention_backward_at_once(Cuda, const AttentionSizes&, const Tiling&, const std::int32_t* heads, Index n_heads,
                                Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<const T> o, Rows<const T> d_o,
                                const float* lse, Rows<T> dq, Rows<T> dk, Rows<T> dv);

}  // namespace hilt::kernels
