#pragma once
#include <optional>
#include <span>
#include <string>
#include "../../core/random.h"
#include "../../core/tape.h"
#include "plan/plan.h"

namespace [[gnu::visibility("default")]] hilt {

/// How the backward pass of attention() is obtained. The forward of hybrid and fused is one kernel,
/// bit for bit; taped runs the same steps, on the same plan, one op at a time.
enum class Backward : unsigned char { taped, hybrid, fused };
struct BackwardMode {
  Backward mode;
  std::string_view name, what;
};
/// All there are, in the order of their values.
std::span<const BackwardMode> backward_modes();
Backward parse_backward(std::string_view text);
std::string_view name_of(Backward mode);

struct AttentionOptions {
  Backward backward = Backward::fused;
  std::optional<double> scale;  // 1 / sqrt(D)
  double dropout = 0;
  std::optional<RandomKey> key;  // of the dropout mask; needed when dropout > 0
  Index first_batch = 0;         // the number of the first sequence among all that share the mask
  bool strict = false;           // a fallback is an error
};

/// Why a call ran in another mode than asked, newest last: at most the 64 last of this thread.
struct Fallback {
  Backward asked, ran;
  std::string reason;
};
const std::vector<Fallback>& attention_fallbacks();
void clear_attention_fallbacks();

/// Which kernels ran, newest last: at most the 64 last passes of this thread. A pass is a tiling's
/// forward or backward; the route is cpu, plain, mma or hopper, the reason why it was no faster
/// one. HILT_ROUTE=plain|mma|hopper forces a route on a GPU where it serves.
struct AttentionRoute {
  std::string_view pass, route, reason;
};
const std::vector<AttentionRoute>& attention_routes();
void clear_attention_routes();

/// o[b, t, h] = sum over u in A(t) of softmax(scale q[b, t, h] . k[b, u, h']) v[b, u, h'],  h' = h
/// / (H / Hk). q: [B, L, H, D]; k, v: [B, L, Hk, D]; any strides.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                 const AttentionOptions& options = {});
/// The same from one packed projection [B, L, 3, H, D].
Tensor attention(const Tensor& qkv, const PlanPtr& plan, const AttentionOptions& options = {});

/// Forward alone, with the log-sum-exp of every row, [B, H, L] (f32; f64 for f64). No tape listens.
struct AttentionResult {
  Tensor o, lse;
};
AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                                   const AttentionOptions& options = {});

/// X along the order, and back: y[:, i] = x[:, token_at[i]] on an axis, and its inverse. Each is
/// the other's backward.
Tensor reorder(const Tensor& x, const Permutation& order, int axis = 1);
Tensor restore(const Tensor& y, const Permutation& order, int axis = 1);

/// Bytes that a mode will save for backward and need at its peak, beyond q, k, v.
struct AttentionMemory {
  std::size_t saved = 0, peak = 0;
};
AttentionMemory attention_memory(const Plan& plan, Index batch, Index kv_heads, Index dim, DType dtype, Backward mode);

}  // namespace hilt
