#pragma once
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/hopper/visits.h"

// Private to kernels/: what route_cuda.cpp starts on any GPU. A kernel that multiplies what is
// masked by zero would spread NaN (0 x NaN is NaN), and f16 is too narrow for some slopes: it
// leaves a tile whose result is not finite as it was, and marks it; the plain kernel, which
// selects, redoes it.

namespace hilt::kernels {

/// Zero before, [places, heads, tiles] of queries and of keys (key heads in the places of the first
/// heads). Which rows of a tile are to be redone: so many at its front, the low half of a mark, and
/// at its back, the high half. Null: none is marked, or, for the plain kernel, every tile is asked
/// for.
struct Marks {
  std::uint32_t *queries = nullptr, *keys = nullptr;
  std::int32_t* any = nullptr;     // set beside them
  std::int32_t* taken = nullptr;   // zero before: items taken of each of two launches
  std::uint32_t* masks = nullptr;  // room for those that make_masks() makes
  float* sums = nullptr;           // room for those of parts, see PartSums
};
constexpr std::uint32_t kWholeTile = ~0u;

/// What a Hopper kernel does to scores and weights: nothing more, distances of tokens that count
/// up, a cap, dropout of keys in eights or of any, or score terms and maybe dropout of any.
enum class Extra { none, distances, cap, drops, drops_any, terms };
/// The least that has what a pass asks for; alone: of one term, where that is all.
inline Extra extra_of(const AttentionPass& p, bool alone, bool eights) {
  const bool drops = p.sizes.dropout != 0;
  if (!p.terms && !drops) return Extra::none;
  if (p.sizes.dim > 128) return Extra::terms;
  if (!p.terms) return eights && !p.along ? Extra::drops : Extra::drops_any;
  const Terms& t = *p.terms;
  if (!alone || drops || t.table || t.bias.data || (t.slopes && t.cap != 0)) return Extra::terms;
  if (t.cap != 0) return t.cap < 8 ? Extra::terms : Extra::cap;  // its slope comes from weights of 16 bits
  const bool count_up = !p.along && p.tiling->q_names().counts_up() && p.tiling->k_names().counts_up();
  return t.slopes && !t.slopes_on_grid && count_up ? Extra::distances : Extra::terms;
}

// masks.cu: the masks of owners' compared cells, for Hopper's kernels; zeroes `taken`.
void make_masks(Cuda, const AttentionPass& pass, std::span<const VisitSide::Owner> owner, bool queries_own,
                std::uint32_t* masks, std::int32_t* taken);

/// What parts of owners left, f32 [batch, heads, parts, rows, dim] of one or two results; of O its
/// L too, [batch, heads, parts, rows]. `marked`: a row with NaN is marked, and stays as it is.
struct PartSums {
  const float *sums[2], *lse;
  Index parts, heads, dim, batch, n_heads, length;  // length: of to_lse, [batch, heads, length]
  std::int16_t head[256];                           // those with sums, n_heads of them
  std::span<const std::int32_t> token;              // of each row
  Output to[2];
  Input before[2];            // sums that results go on from, or none
  const std::int32_t* known;  // the rows that have any; null: all
  float* to_lse;
  bool fresh, marked;
};
// parts.cu: adds them up.
void add_parts(Cuda, const PartSums& p);

// forward.cu, backward.cu, for every pattern, two ways to multiply. Plain: in f32, every type and
// head dim up to kPlainDim; the referee of the others.
constexpr Index kPlainDim = 256;
void plain_forward(Cuda, const ForwardPass&, const Marks&);
void plain_backward(Cuda, const BackwardPass&, const Marks&);

// On the tensor cores of any GPU since sm_80: bf16 and f16, head dims that are multiples of 16, to
// kMmaDim.
constexpr Index kMmaDim = 128;
void mma_forward(Cuda, const ForwardPass&, const Marks&);
void mma_backward(Cuda, const BackwardPass&, const Marks&);

}  // namespace hilt::kernels
