// Which kernel takes a pass on a GPU: decided once, here, from what it is; and passes run.
#include <cstdlib>
#include "core/cuda/context.h"
#include "core/tensor.h"
#include "ops/hilbert/kernels/cuda/on_device.h"
#include "ops/hilbert/kernels/hopper/kernels.h"

namespace hilt::kernels {
namespace {

// ---- facts --------------------------------------------------------------------------------------

/// Whether rows can be read and written 16 bytes at a time.
template <class V> bool is_aligned(const AnyRows<V>& x) {
  const auto each = static_cast<Index>(16 / size_of(x.type));
  const auto fits = [&](Index stride) {
    return stride % each == 0 && stride >= 0 && stride <= std::numeric_limits<int>::max() / 2;
  };
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && x.batch % each == 0 && fits(x.token) && fits(x.head);
}
/// The route that HILT_ROUTE names; any faster one is left alone.
std::optional<Route> forced() {
  const char* const text = std::getenv("HILT_ROUTE");
  if (!text || !*text) return std::nullopt;
  for (const Route r : {Route::plain, Route::mma, Route::hopper})
    if (name_of(r) == text) return r;
  fail("HILT_ROUTE (", text, "): must be plain, mma or hopper");
}

/// Queries of a tile of dQ, where Hopper's kernels add it up.
Index queries_of(const AttentionPass& p) { return p.sizes.dim <= 64 ? 128 : 64; }

// ---- why not: empty where a route can be taken --------------------------------------------------

using Reason = std::string_view;

constexpr Reason kUnaligned = "rows do not lie at multiples of 16 bytes";

/// stored: whether rows of the pass that are no input lie as they must.
Reason why_not_hopper(Cuda where, const AttentionPass& p, bool stored) {
  const AttentionSizes& s = p.sizes;
  if (!kHasHopper) return "this build has no code for Hopper";
  if (!cuda::properties(where.device).is_hopper()) return "the GPU is no Hopper";
  if (forced() == Route::plain || forced() == Route::mma) return "HILT_ROUTE says so";
  if (size_of(p.q.type) != 2) return "Hopper's kernels take bf16 and f16";
  if (s.dim % 8 != 0 || s.dim > hopper::kDims[std::size(hopper::kDims) - 1])
    return "Hopper's kernels take head dims that are multiples of 8, to 256";
  if (p.terms && p.tiling->q_names().size() + p.tiling->k_names().size() > kMostTokens)
    return "Hopper's kernels know score terms of at most 16 million tokens";
  const auto on_large = [](const Tiling::Sites& grid) { return std::max(grid.height, grid.width) >= kMostRows; };
  if (p.terms && (std::ranges::any_of(p.tiling->grids, on_large) ||
                  (p.terms->table_on_grid && std::max(p.terms->reach.b, p.terms->reach.c) >= kMostRows)))
    return "Hopper's kernels know score terms of fewer than 16,384 rows and columns";
  if (p.terms && p.terms->points) return "Hopper's kernels know score terms of tokens and grids, not of points";
  const auto has_prefix = [](const Tiling::Sites& grid) { return grid.first > grid.begin; };
  if (p.terms && (p.terms->slopes_on_grid || p.terms->table_on_grid) &&
      std::ranges::any_of(p.tiling->grids, has_prefix))
    return "Hopper's kernels know score terms of a grid where no prefix stands before it";
  if (s.heads > hopper::kHeads) return "Hopper's kernels take at most 256 heads";
  if (!(s.scale > 0)) return "tensor cores' kernels take a positive scale";
  if (s.batch == 0 || p.tiling->q_tile.empty() || p.tiling->k_tile.empty()) return "there is nothing to do";
  if (!is_aligned(p.q) || !is_aligned(p.k) || !is_aligned(p.v)) return kUnaligned;
  const auto tiles = static_cast<Index>(std::max(p.tiling->q_tile.size(), p.tiling->k_tile.size()));
  if (2 * s.batch * s.heads * tiles >= hopper::kItems) return "there are too many tiles for one launch";
  return stored ? Reason() : kUnaligned;
}

/// Visits::eights, without visits where the first eight keys tell: along a curve nobody walks them.
bool in_eights(const Tiling& t) {
  const TokenList& names = t.k_names();
  for (std::int32_t r = 0; r < std::min(8, t.k_tile[0].end); ++r)
    if (names[at(r)] != (names[0] & ~7) + r) return false;
  return visits(t).eights;
}

/// Why one pass that adds up dQ does not serve. It saves two of seven products, but loses
/// where most cells are masked, or where an owner gathers rows for few meetings.
Reason why_not_one_pass(const BackwardPass& b) {
  if (b.sizes.dim > 128) return "one pass takes head dims to 128";
  if (b.of_terms || extra_of(b, true, in_eights(*b.tiling)) > Extra::drops)
    return "one pass knows a cap from 8 on alone, distances of tokens that count up, or dropout of keys in eights";
  const Visits& met = visits(*b.tiling);
  if (met.keys.made > 0) return "one pass takes masks that a plan has";
  constexpr Index kSteps = Index{1} << 23;  // each 64 queries; a meeting of two takes 32 bytes, here and there
  if (met.keys.owner[0].steps * std::ssize(met.keys.owner) > kSteps) return "one pass would list too many tiles";
  const std::size_t tiles = queries_of(b) == Visits::kOwner;
  if (!met.complete[tiles]) return "one pass wants a key for each query, and a query for each run of keys";
  if (2 * met.masked[tiles] > met.meetings[tiles]) return "most tiles are masked";
  constexpr Index kMeetings = 8;
  const bool follow = !b.along && b.tiling->q_token.counts_up() && b.tiling->k_token.counts_up() &&
                      6 * met.partial[tiles] <= met.meetings[tiles];  // whole tiles as stored
  if (!follow && (b.sizes.dim > 64 || met.meetings[tiles] < kMeetings * std::ssize(met.keys.owner)))
    return "rows are gathered";
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
  if (s.batch == 0 || s.dim == 0) return "there is nothing to do";
  if (!is_aligned(p.q) || !is_aligned(p.k) || !is_aligned(p.v)) return kUnaligned;
  return {};
}

/// Whether a product can meet rows that it is not to see.
bool has_mixed(const AttentionPass& p, const VisitsView* visits) {
  return (visits ? visits->mixed : p.tiling->met.partial > 0) || (p.terms && p.terms->bias.data);
}

/// What is zero before a pass: marks, where there can be any, and counts of items where Hopper's
/// kernels take them as they come. And room for masks that a plan has not, and for sums of dQ.
struct Scratch {
  std::vector<Tensor> held;
  Marks marks;
  hopper::PartialSums sums{};
  /// The visits of queries, and of keys, that own, or null.
  Scratch(Cuda where, const AttentionPass& p, bool marked, const VisitsView* queries_own, const VisitsView* keys_own,
          bool backward, const ScheduleView* schedule = nullptr) {
    const AttentionSizes& s = p.sizes;
    const auto room = [&]<class X>(X*& to, Index n, bool zero = false) {  // of numbers of four bytes
      static_assert(sizeof(X) == 4);
      if (n == 0) return;
      const Device device{Device::Kind::cuda, where.device};
      held.push_back(zero ? zeros({n}, DType::i32, device) : empty({n}, DType::i32, device));
      to = reinterpret_cast<X*>(held.back().mutable_raw());
    };
    if (schedule) {
      const Index tiles = s.batch * s.heads * schedule->tiles;
      room(sums.taken, 1 + tiles, true), room(sums.of_queries, tiles * hopper::kSumBytes / 4);
      sums.added = reinterpret_cast<std::uint32_t*>(sums.taken + 1);
    }
    const VisitsView none{};
    const VisitsView::Side &queries = (queries_own ? *queries_own : none).queries,
                           &keys = (keys_own ? *keys_own : none).keys;
    room(marks.masks, std::max(queries.made, keys.made) * Visits::kWords);
    const auto sums_of = [&](const VisitsView::Side& side, const TokenList& rows, Index heads, Index each) {
      return side.parts > 1 ? s.batch * heads * side.parts * std::ssize(rows) * each : 0;
    };
    room(marks.sums, std::max(sums_of(queries, p.tiling->q_token, s.heads, s.dim + 1),
                              sums_of(keys, p.tiling->k_token, s.kv_heads, 2 * s.dim)));
    if (!marked && !queries.uneven && !keys.uneven) return;
    const Index lines = marked ? s.batch * s.heads : 0, of_queries = lines * std::ssize(p.tiling->q_tile),
                of_keys = backward ? lines * std::ssize(p.tiling->k_tile) : 0;
    room(marks.taken, 3 + of_queries + of_keys, true);
    marks.any = marks.taken + 2;
    if (!marked) return;
    marks.queries = reinterpret_cast<std::uint32_t*>(marks.taken + 3);
    if (backward) marks.keys = marks.queries + of_queries;
  }
};

/// run.operator()<E, D>(), of the kernel for a pass's type and head dim.
template <class F> void with_hopper_kernel(const AttentionPass& p, F&& run) {
  with_type<bf16, f16>(p.q.type, [&]<class E>() {
    const auto fits = [&]<int D>() { return p.sizes.dim <= D && (run.template operator()<E, D>(), true); };
    [&]<std::size_t... I>(std::index_sequence<I...>) { (void)(fits.template operator()<hopper::kDims[I]>() || ...); }
    (std::make_index_sequence<std::size(hopper::kDims)>());
  });
}

/// The route where Hopper's kernels do not serve, which is `why`; stored: as above.
Decision without_hopper(Cuda where, const AttentionPass& p, Reason why, bool stored) {
  const Reason slow = stored ? why_not_mma(where, p) : kUnaligned;
  return {.route = slow.empty() ? Route::mma : Route::plain, .reason = slow.empty() ? why : slow};
}

}  // namespace

Decision route(Cuda where, const ForwardPass& f) {
  const bool aligned = is_aligned(f.o);
  const Reason why = why_not_hopper(where, f, aligned);
  if (!why.empty()) return without_hopper(where, f, why, aligned);
  return {.route = Route::hopper};
}

Decision route(Cuda where, const BackwardPass& b, bool whole) {
  const bool aligned = is_aligned(b.d_o);
  Reason why = why_not_hopper(where, b, aligned);
  if (!why.empty()) {
    Decision d = without_hopper(where, b, why, aligned);
    d.direct = whole && d.route == Route::mma;
    return d;
  }
  const bool one = whole && b.sizes.dropout == 0 && !b.terms && !b.delta_given && is_aligned(b.o) &&
                   b.sizes.dim <= 128 && visits(*b.tiling).one_owner;
  Decision d{.route = one ? Route::hopper_one_owner : Route::hopper, .direct = whole, .delta = !one};
  if (one) return d;
  d.reason = whole ? why_not_one_pass(b) : "gradients are added up";
  if (d.reason.empty()) d.route = Route::hopper_one_pass, d.reason = "in one pass that adds up dQ";
  return d;
}

/// The pass over keys that share the bits which drop their weights, where it drops any.
template <class Pass> Pass with_eights(Pass pass) {
  if (pass.sizes.dropout != 0 && !pass.along && !in_eights(*pass.tiling))
    pass.tiling = &with_ascending_keys(*pass.tiling);
  return pass;
}

void attention_forward(Cuda where, const ForwardPass& pass, const Decision& d) {
  ForwardPass f = d.route == Route::hopper ? with_eights(pass) : pass;
  const OrderedLists ordered(where, f);
  if (d.route == Route::plain) return plain_forward(where, f, {});
  if (d.route == Route::hopper) f.tiling = &hopper::walked(f, false);
  const VisitsView* const visits = d.route == Route::mma ? nullptr : &visits_on_device(*f.tiling, where);
  const bool mixed = has_mixed(f, visits);
  const Scratch scratch(where, f, mixed, visits, nullptr, false);
  const Marks& marks = scratch.marks;
  if constexpr (kHasHopper)
    if (d.route == Route::hopper)
      with_hopper_kernel(f, [&]<class E, int D>() { hopper::forward<E, D>(where, f, marks); });
  if (d.route == Route::mma) mma_forward(where, f, marks);
  if (mixed) plain_forward(where, f, marks);
}

void attention_backward(Cuda where, const BackwardPass& pass, const Decision& d) {
  BackwardPass b = d.route == Route::hopper ? with_eights(pass) : pass;
  const OrderedLists ordered(where, b);
  if (d.route == Route::plain) return plain_backward(where, b, {});
  const bool narrow = b.q.type == DType::f16;  // slopes beyond 65,504
  const VisitsView* const visits = d.route == Route::mma ? nullptr : &visits_on_device(*b.tiling, where);
  const bool mixed = narrow || has_mixed(b, visits);
  const bool one_pass = d.route == Route::hopper_one_pass;
  const auto walked = [&](bool keys_own) {
    return d.route == Route::hopper ? &visits_on_device(hopper::walked(b, keys_own), where) : visits;
  };
  const Scratch scratch(where, b, mixed, walked(false), walked(true), true,
                        one_pass ? &schedule_on_device(*b.tiling, where, queries_of(b)) : nullptr);
  const Marks& marks = scratch.marks;
  if constexpr (kHasHopper)
    with_hopper_kernel(b, [&]<class E, int D>() {
      if (d.route == Route::hopper_one_owner) hopper::one_owner_backward<E, D>(where, b, marks);
      if (one_pass) hopper::one_pass_backward<E, D>(where, b, marks, scratch.sums);
      if (d.route == Route::hopper) hopper::stream_backward<E, D>(where, b, marks);
    });
  if (d.route == Route::mma) mma_backward(where, b, marks);
  if (!mixed) return;
  BackwardPass redo = b;
  redo.d_terms = nullptr;  // marked tiles have given theirs, which are selected pair by pair
  if (b.delta) return plain_backward(where, redo, marks);
  Tensor delta = empty({b.sizes.batch, b.sizes.heads, b.sizes.queries}, DType::f32, {Device::Kind::cuda, where.device});
  redo.delta = delta.raw();
  attention_delta(where, {b.sizes, b.o, b.d_o, delta.mutable_raw(), marks.any});
  plain_backward(where, redo, marks);
}

}  // namespace hilt::kernels
