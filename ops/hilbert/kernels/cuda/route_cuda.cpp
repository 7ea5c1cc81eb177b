// Which kernel takes a pass on a GPU: decided once, here, from what the pass is; and the passes
// run.
#include <cstdlib>
#include <limits>
#include <optional>
#include "core/cuda/context.h"
#include "core/tensor.h"
#include "ops/hilbert/kernels/hopper/kernels.h"

namespace hilt::kernels {
namespace {

constexpr Index kTile = Tiling::kTile;

// ---- facts
// -----------------------------------------------------------------------------------------

/// Whether rows can be read and written 16 bytes at a time.
template <class V> bool is_aligned(const AnyRows<V>& x) {
  const auto each = static_cast<Index>(16 / size_of(x.type));
  const auto fits = [&](Index stride) {
    return stride % each == 0 && stride >= 0 && stride <= std::numeric_limits<int>::max();
  };
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && x.batch % each == 0 && fits(x.token) && fits(x.head);
}
bool same_strides(const Input& a, const Input& b) {
  return a.batch == b.batch && a.token == b.token && a.head == b.head;
}

/// The tiling as equal groups without a mask; nothing where it is not of that sort.
std::optional<EqualGroups> equal_groups(const Tiling& t) {
  if (t.tiles_partial > 0 || t.group.empty()) return std::nullopt;
  const Tiling::Group& first = t.group[0];
  const EqualGroups g{static_cast<Index>(t.group.size()), first.q.end - first.q.begin, first.k.end - first.k.begin};
  if (g.queries == 0 || g.keys == 0 || g.groups * g.queries != static_cast<Index>(t.q_token.size()) ||
      g.groups * g.keys != static_cast<Index>(t.k_token.size()) || t.pairs != g.groups * g.queries * g.keys)
    return std::nullopt;
  for (Index i = 0; i < g.groups; ++i) {
    const Tiling::Group& x = t.group[static_cast<std::size_t>(i)];
    if (x.q.begin != i * g.queries || x.q.end != (i + 1) * g.queries || x.k.begin != i * g.keys ||
        x.k.end != (i + 1) * g.keys)
      return std::nullopt;
  }
  return g;
}

/// Whether every tile has 128 rows on both sides.
bool has_whole_tiles(const Tiling& t) {
  for (const auto* list : {&t.q_tile, &t.k_tile})
    for (const Tiling::Range& r : *list)
      if (r.end - r.begin != kTile) return false;
  return !t.q_tile.empty() && !t.k_tile.empty();
}

/// The route that HILT_ROUTE names; any faster one is left alone.
std::optional<Route> forced() {
  const char* const text = std::getenv("HILT_ROUTE");
  if (!text || !*text) return std::nullopt;
  for (const Route r : {Route::plain, Route::mma, Route::hopper_lists})
    if (name_of(r) == text) return r;
  fail("HILT_ROUTE (", text, "): must be plain, mma or hopper");
}

// ---- why not: empty where a route can be taken
// -------------------------------------------------------

using Reason = std::string_view;

/// What Hopper's kernels ask of any pass but its tiles.
Reason why_not_hopper(Cuda where, const AttentionPass& p) {
  const AttentionSizes& s = p.sizes;
  if (!kHasHopper) return "this build has no code for Hopper";
  if (!cuda::properties(where.device).is_hopper()) return "the GPU is no Hopper";
  if (forced() == Route::plain || forced() == Route::mma) return "HILT_ROUTE says so";
  if (p.q.type != DType::bf16) return "Hopper's kernels take bf16";
  if (s.dim != 64 && s.dim != 128) return "Hopper's kernels take head dims 64 and 128";
  if (s.dropout != 0) return "Hopper's kernels know no dropout";
  if (s.heads > hopper::kHeads) return "Hopper's kernels take at most 256 heads";
  if (!(s.scale > 0)) return "tensor cores' kernels take a positive scale";
  if (s.batch == 0) return "there is nothing to do";
  if (!is_aligned(p.q) || !is_aligned(p.k) || !is_aligned(p.v)) return "rows do not lie at multiples of 16 bytes";
  if (!same_strides(p.k, p.v)) return "k and v have other strides";
  return {};
}
/// Groups of whole tiles, or lists of them; sets route and groups.
Reason why_not_hopper_tiles(const AttentionPass& p, Decision& d) {
  const Index calls = p.sizes.batch * p.sizes.heads;
  const auto tiles = static_cast<Index>(std::max(p.tiling->q_tile.size(), p.tiling->k_tile.size()));
  if (calls * tiles >= hopper::kItems) return "there are too many tiles for one launch";
  if (const auto groups = equal_groups(*p.tiling);
      groups && groups->queries % kTile == 0 && groups->keys % kTile == 0) {
    d.route = Route::hopper_groups, d.groups = *groups;
    return {};
  }
  if (!has_whole_tiles(*p.tiling)) return "Hopper's kernels take tiles of 128 rows alone";
  d.route = Route::hopper_lists;
  return {};
}

Reason why_not_mma(Cuda where, const AttentionPass& p) {
  const AttentionSizes& s = p.sizes;
  if (forced() == Route::plain) return "HILT_ROUTE says so";
  if (size_of(p.q.type) != 2) return "tensor cores' kernels take bf16 and f16";
  if (cuda::properties(where.device).major < 8) return "the GPU is older than sm_80";
  if (s.dim % 16 != 0 || s.dim > kMmaDim)
    return "tensor cores' kernels take head dims that are multiples of 16, to 128";
  if (!(s.scale > 0)) return "tensor cores' kernels take a positive scale";
  if (p.n_heads > kMmaHeads) return "tensor cores' kernels take at most 1,024 heads";
  if (s.batch == 0 || s.dim == 0) return "there is nothing to do";
  if (!is_aligned(p.q) || !is_aligned(p.k) || !is_aligned(p.v)) return "rows do not lie at multiples of 16 bytes";
  return {};
}

/// int32 [batch, heads, tiles] of both sides, none marked.
struct MarkTensors {
  Tensor queries, keys;
  MarkTensors(Cuda where, const AttentionPass& p, bool backward) {
    const auto blank = [&](const std::vector<Tiling::Range>& tiles) {
      return zeros({p.sizes.batch, p.sizes.heads, static_cast<Index>(tiles.size())}, DType::i32,
                   {Device::Kind::cuda, where.device});
    };
    queries = blank(p.tiling->q_tile);
    if (backward) keys = blank(p.tiling->k_tile);
  }
  Marks marks() { return {queries.mutable_data<std::int32_t>(), keys ? keys.mutable_data<std::int32_t>() : nullptr}; }
};

}  // namespace

Decision route(Cuda where, const ForwardPass& f) {
  Decision d;
  d.reason = why_not_hopper(where, f);
  if (d.reason.empty() && !f.fresh && f.o.type != DType::f32) d.reason = "a softmax does not go on in 16 bits";
  if (d.reason.empty() && !is_aligned(f.o)) d.reason = "rows do not lie at multiples of 16 bytes";
  if (d.reason.empty()) d.reason = why_not_hopper_tiles(f, d);
  if (d.reason.empty()) return d;
  const Reason slow = is_aligned(f.o) ? why_not_mma(where, f) : Reason("rows do not lie at multiples of 16 bytes");
  d.route = slow.empty() ? Route::mma : Route::plain;
  if (!slow.empty()) d.reason = slow;
  return d;
}

Decision route(Cuda where, const BackwardPass& b, bool whole) {
  const AttentionSizes& s = b.sizes;
  Decision d;
  d.reason = why_not_hopper(where, b);
  if (d.reason.empty() && s.kv_heads != s.heads) d.reason = "Hopper's backward takes as many key heads as query heads";
  if (d.reason.empty() && !is_aligned(b.d_o)) d.reason = "rows do not lie at multiples of 16 bytes";
  if (d.reason.empty()) d.reason = why_not_hopper_tiles(b, d);
  d.direct = whole;
  if (d.reason.empty()) {
    const EqualGroups& g = d.groups;
    const bool one = g.keys == kTile || (g.keys == 2 * kTile && g.queries == 2 * kTile && s.dim == 64);
    if (whole && d.route == Route::hopper_groups && one && is_aligned(b.o))
      d.route = Route::hopper_one_group, d.delta = false;
    return d;
  }
  const Reason slow = is_aligned(b.d_o) ? why_not_mma(where, b) : Reason("rows do not lie at multiples of 16 bytes");
  d.route = slow.empty() ? Route::mma : Route::plain;
  if (!slow.empty()) d.reason = slow, d.direct = false;
  return d;
}

void attention_forward(Cuda where, const ForwardPass& f, const Decision& d) {
  if constexpr (kHasHopper)
    if (d.route == Route::hopper_groups) return hopper::group_forward(where, f, d.groups);
  if (d.route == Route::plain) return plain_forward(where, f, {});
  if (d.route == Route::mma && f.tiling->tiles_partial == 0) return mma_forward(where, f, {});
  MarkTensors left(where, f, false);
  if constexpr (kHasHopper)
    if (d.route == Route::hopper_lists) hopper::list_forward(where, f, left.marks());
  if (d.route == Route::mma) mma_forward(where, f, left.marks());
  if (f.tiling->tiles_partial > 0) plain_forward(where, f, left.marks());
}

void attention_backward(Cuda where, const BackwardPass& b, const Decision& d) {
  if constexpr (kHasHopper) {
    if (d.route == Route::hopper_one_group) return hopper::one_group_backward(where, b, d.groups);
    if (d.route == Route::hopper_groups) return hopper::group_backward(where, b, d.groups);
  }
  if (d.route == Route::plain) return plain_backward(where, b, {});
  const bool narrow = b.q.type == DType::f16;  // slopes beyond 65,504
  if (d.route == Route::mma && b.tiling->tiles_partial == 0 && !narrow) return mma_backward(where, b, {});
  MarkTensors left(where, b, true);
  if constexpr (kHasHopper)
    if (d.route == Route::hopper_lists) hopper::list_backward(where, b, left.marks());
  if (d.route == Route::mma) mma_backward(where, b, left.marks());
  if (b.tiling->tiles_partial > 0 || narrow) plain_backward(where, b, left.marks());
}

}  // namespace hilt::kernels
