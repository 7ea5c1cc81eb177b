// Bytes that each mode keeps for backward and needs at its peak, counted off the code of the modes.
// One S is [B, heads, groups, q, k]; temporaries live to the end of their expression.
#include <algorithm>
#include <map>
#include "ops/hilbert/call.h"

namespace hilt {

AttentionMemory attention_memory(const Plan& plan, Index batch, Index kv_heads, Index dim, DType dtype, Backward mode) {
  const auto element = static_cast<double>(size_of(dtype));
  const double stat = dtype == DType::f64 ? 8.0 : 4.0;
  const double rows = static_cast<double>(batch * plan.length()), heads = static_cast<double>(plan.heads());
  const double q = rows * heads * static_cast<double>(dim), kv = 2 * rows * static_cast<double>(kv_heads * dim),
               row = rows * heads;
  const bool narrow = size_of(dtype) == 2;
  AttentionMemory m;
  const double kept = q * element + row * stat;  // o and lse
  if (mode == Backward::fused) {
    m.saved = static_cast<std::size_t>(kept);
    m.peak = static_cast<std::size_t>(kept + row * stat + (q + kv) * stat + (narrow ? q * element : 0));
    return m;
  }
  double scores = 0, largest = 0, gathered = 0, gathered_most = 0, masks = 0;
  std::map<std::pair<Index, Index>, double> sizes;  // groups of one size are multiplied together
  for (const auto& [index, users_of] : users(plan, -1)) {
    sizes.clear();
    double here = 0;
    bool in_place = !narrow && kv_heads == plan.heads();
    const Tiling& t = plan.tilings()[static_cast<std::size_t>(index)];
    const bool masked = t.tiles_partial > 0 ||
                        static_cast<Index>(t.keys.size()) < static_cast<Index>(t.q_tile.size() * t.k_tile.size());
    for (const Tiling::Group& g : t.group) {
      const Index nq = g.q.end - g.q.begin, nk = g.k.end - g.k.begin;
      const double pairs = static_cast<double>(nq) * static_cast<double>(nk);
      sizes[{nq, nk}] += pairs;
      if (masked && (t.group.size() == 1 || t.tiles_partial > 0)) masks += pairs;
      here += static_cast<double>(batch) * static_cast<double>(users_of.size()) *
              static_cast<double>((nq + 2 * nk) * dim) * stat;
    }
    for (const auto& [size, pairs] : sizes) {
      const double s = pairs * static_cast<double>(batch) * static_cast<double>(users_of.size()) * stat;
      scores += s;
      largest = std::max(largest, s);
    }
    for (std::size_t i = 0; i < t.q_token.size(); ++i)
      in_place = in_place && t.q_token[i] == static_cast<std::int32_t>(i);
    if (in_place && sizes.size() == 1 && t.k_token.size() == t.q_token.size()) here = 0;
    gathered += here;
    gathered_most = std::max(gathered_most, here);
  }
  if (mode == Backward::hybrid) {
    m.saved = static_cast<std::size_t>(kept);
    m.peak = static_cast<std::size_t>(kept + 4 * largest + masks + 2 * gathered_most + (q + kv) * stat + q * stat +
                                      (narrow ? (3 * q + kv) * stat : 0));
    return m;
  }
  const double branches = static_cast<double>(branch_count(plan));
  const double merge = branches > 1 ? scores + branches * q * stat : 0;  // logsumexp keeps S; the merge keeps each part
  m.saved = static_cast<std::size_t>(scores + gathered + masks + merge);
  m.peak = static_cast<std::size_t>(scores + 2 * largest + gathered + masks + merge + q * stat);
  return m;
}

}  // namespace hilt
