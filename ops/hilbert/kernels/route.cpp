// How a pass runs on a CPU: decided once, here, from what it is.
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/compact.h"

namespace hilt::kernels {
namespace {

/// What keeps a pass from a faster route, in words that live for ever.
std::string_view reason_of(bool terms, bool added, bool in_turns) {
  static const auto all = [] {
    std::array<std::string, 8> out;
    for (unsigned i = 0; i < out.size(); ++i)
      for (const auto& [bit, words] : {std::pair{1u, "score terms take whole tiles of keys"},
                                       {2u, "gradients are added to those of other passes"},
                                       {4u, "tasks that meet the same keys add their gradients in turns"}})
        if (i & bit) out[i] += (out[i].empty() ? "" : "; ") + std::string(words);
    return out;
  }();
  return all[std::size_t{terms} + 2 * std::size_t{added} + 4 * std::size_t{in_turns}];
}

/// The lists of a pass, and whether most of its tiles of keys are taken pair by pair.
Decision decide(const AttentionPass& p) {
  Decision d;
  d.lists = &compact(*p.tiling, !p.terms && !p.causal);
  const auto by_pairs = std::ranges::count_if(d.lists->pair_begin, [](std::int32_t begin) { return begin >= 0; });
  d.route = 2 * by_pairs > std::ssize(d.lists->k_tile) ? Route::cpu_pairs : Route::cpu;
  d.reason = reason_of(p.terms, false, false);
  return d;
}

}  // namespace

Decision route(Cpu, const ForwardPass& f) { return decide(f); }

Decision route(Cpu, const BackwardPass& b, bool whole) {
  Decision d = decide(b);
  d.direct = whole, d.delta = !whole;
  d.every_key = d.lists->every_key;
  const Index sharing = b.sizes.heads / b.sizes.kv_heads;
  const auto share_keys = [&](std::int32_t g, std::int32_t h) { return g / sharing == h / sharing; };
  const std::span heads(b.heads, static_cast<std::size_t>(b.n_heads));
  const bool in_turns = std::ranges::adjacent_find(heads, share_keys) != heads.end() ||
                        std::ranges::any_of(d.lists->turns, [](std::int32_t runs) { return runs > 1; });
  d.reason = reason_of(b.terms, !whole, in_turns);
  return d;
}

}  // namespace hilt::kernels
