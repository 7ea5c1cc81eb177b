#pragma once
#include "transformer.h"

namespace [[gnu::visibility("default")]] hilt {

/// How a token is drawn: among the top_k likeliest (0: all), and of these the fewest that have the
/// share top_p together, by softmax(logits / temperature). At temperature 0 the likeliest.
struct Sampling {
  double temperature = 1, top_p = 1;  // top_p: of all tokens
  Index top_k = 0;                    // of equals the lower one is the likelier
  Index boundary = -1;                // what is forgotten ends before such a token, if one comes
};
/// The token at this point of [0, 1), likeliest first.
Index draw_token(std::span<const float> logits, const Sampling& how, double point);

/// Continues tokens, of which the cache has the first cache.length(), by `count`, or until `show`,
/// told each of them, is false; returns all. In a full context the older half is forgotten. Token i
/// that comes depends on the key's number i. Throws Code::not_a_number where logits are.
std::vector<std::int32_t> generate(const Transformer& model, KeyValueCache& cache, std::vector<std::int32_t> tokens,
                                   Index count, const Sampling& how, RandomKey key,
                                   const std::function<bool(std::int32_t)>& show = {});

}  // namespace hilt
