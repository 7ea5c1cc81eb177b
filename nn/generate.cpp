// Tokens from a model's logits, one by one.
#include "nn/transformer.h"
#include <cmath>
#include <numeric>
#include "core/tape.h"

namespace hilt {

// A heap gives words, likeliest first: few words of a large vocabulary are ever asked for.
Index draw_token(std::span<const float> logits, const Sampling& how, double point) {
  check(!logits.empty(), "draw_token: there are no logits");
  check(how.temperature >= 0 && how.top_p >= 0 && how.top_k >= 0, "draw_token: temperature ", how.temperature,
        ", top_p ", how.top_p, " and top_k ", how.top_k, " must not be negative");
  const auto logit = [&](Index i) { return logits[static_cast<std::size_t>(i)]; };
  const Index first = std::ranges::max_element(logits) - logits.begin(), n = std::ssize(logits);
  if (how.temperature == 0) return first;
  const auto later = [&](Index a, Index b) { return logit(a) < logit(b) || (logit(a) == logit(b) && a > b); };
  std::vector<Index> heap(logits.size());
  std::iota(heap.begin(), heap.end(), Index{0});
  std::ranges::make_heap(heap, later);
  Index taken = 0;  // they stand behind the heap, the first one last
  const auto likeliest = [&](Index i) {
    for (; taken <= i; ++taken) std::ranges::pop_heap(heap.begin(), heap.end() - taken, later);
    return heap[static_cast<std::size_t>(n - 1 - i)];
  };
  const auto weight = [&](Index i) {
    return std::exp((static_cast<double>(logit(i)) - static_cast<double>(logit(first))) / how.temperature);
  };
  double share = 0;
  for (Index i = 0; i < n; ++i) share += weight(i);
  Index kept = n;
  if (how.top_k > 0 || how.top_p < 1) {
    const double enough = how.top_p * share;
    const Index most = how.top_k > 0 ? std::min(how.top_k, n) : n;
    for (share = 0, kept = 0; kept < most && (kept == 0 || share < enough);) share += weight(likeliest(kept++));
  }
  double left = point * share;
  Index i = 0;
  for (; i + 1 < kept && left >= weight(likeliest(i)); ++i) left -= weight(likeliest(i));
  return likeliest(i);
}

std::vector<std::int32_t> generate(const Transformer& model, KeyValueCache& cache, std::vector<std::int32_t> tokens,
                                   Index count, const Sampling& how, RandomKey key,
                                   const std::function<bool(std::int32_t)>& show) {
  const Tape::Pause pause;
  Index from = 0;  // the first token that the model sees
  for (Index drawn = 0; drawn < count; ++drawn) {
    const Index length = std::ssize(tokens), context = std::min(cache.context(), model.config.context);
    if (length - from > context) {
      from = length - (context + 1) / 2;
      const auto next = std::find(tokens.begin() + from, tokens.end(), how.boundary);
      if (next != tokens.end()) from = next - tokens.begin();
      cache.clear();
    }
    check(cache.length() < length - from, "generate: the cache has ", cache.length(), " tokens, and there are ",
          length - from, " to go on from");
    const std::vector<std::int32_t> fresh(tokens.begin() + from + cache.length(), tokens.end());
    const Device device = model.tokens.weight.device();
    const Tensor last = model.last_logits(moved(from_values(fresh, {1, std::ssize(fresh)}), device), {.cache = &cache});
    const std::vector<float> row = last.to_vector<float>();
    for (const float x : row)
      if (!std::isfinite(x) && !(x < 0))
        fail_with(Code::not_a_number, "generate: token ", drawn + 1, " of ", count, ": the logits hold ", x);
    const auto block = static_cast<std::uint32_t>(drawn / 4);
    const auto bits = philox(
        {block, 0, static_cast<std::uint32_t>(key.stream), static_cast<std::uint32_t>(key.stream >> 32)}, key.seed);
    tokens.push_back(
        static_cast<std::int32_t>(draw_token(row, how, bits[static_cast<std::size_t>(drawn % 4)] * 0x1p-32)));
    if (show && !show(tokens.back())) break;
  }
  return tokens;
}

}  // namespace hilt
