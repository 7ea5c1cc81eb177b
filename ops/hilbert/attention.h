#pragma once
#include "../../core/random.h"
#include "../../core/tape.h"
#include "plan/plan.h"
#include "terms.h"

namespace [[gnu::visibility("default")]] hilt {

/// How the backward of attention() is obtained. Forward: hybrid and fused share one kernel.
enum class Backward : unsigned char { taped, hybrid, fused };
/// a row of the table of modes.
struct BackwardMode {
  Backward mode{};                  // the value
  std::string_view name{}, what{};  // what options call it, and a sentence
};
/// All there are, in the order of their values.
std::span<const BackwardMode> backward_modes();
Backward parse_backward(std::string_view text);
std::string_view name_of(Backward mode);

struct AttentionOptions {  // what a call may change
  Backward backward = Backward::fused;
  std::optional<double> scale{};   // 1 / sqrt(D)
  double dropout = 0;              // of attention weights; in [0, 1)
  std::optional<RandomKey> key{};  // of the dropout mask; needed when dropout > 0
  Index first_batch = 0;           // the number of the first sequence among all that share the mask
  bool strict = false;             // a fallback is an error
  ScoreTerms terms = {};           // see ScoreTerms
  /// The order, where the plan is of `order=given`: i32 or i64 [L] or [B, L], the token at each
  /// position, a bijection inside each document, on the device of q. A CPU looks at once; a GPU
  /// at the next value that is asked for, and what a wrong order gives has no meaning. Bits are
  /// those of a plan with that order, but of causality by token, and on a GPU of what looks at
  /// tokens and of a sink's gradient. Fewer queries make a plan an order; taped and hybrid may.
  Tensor permutation = {};
};

/// Why a call ran in another mode than asked, newest last: at most the 64 last of this thread.
struct Fallback {
  Backward asked{}, ran{};  // modes
  std::string reason{};     // a sentence
};
const std::vector<Fallback>& attention_fallbacks();  // those of this thread
void clear_attention_fallbacks();                    // those of this thread

/// Which kernels ran, newest last: at most the 64 last passes of this thread. A pass is a tiling's
/// forward or backward; route: cpu or cpu_pairs, which takes most pairs of tokens one by one; on a
/// GPU plain, mma or hopper, which HILT_ROUTE forces where it serves. reason: why none is faster.
struct AttentionRoute {
  std::string_view pass{}, route{}, reason{};  // literals
};
const std::vector<AttentionRoute>& attention_routes();  // those of this thread
void clear_attention_routes();                          // those of this thread

/// o[b, t, h] = sum over u in A(t) of softmax(scale q[b, t, h] . k[b, u, h']) v[b, u, h'],  h' = h
/// / (H / Hk). q: [B, L, H, D]; k, v: [B, L, Hk, D]; any strides. q may have fewer rows: those that
/// PlanSpec::queries names, without it the last. With more it is PlanSpec::cross.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                 const AttentionOptions& options = {});
/// The same from one packed projection [B, L, 3, H, D].
Tensor attention(const Tensor& qkv, const PlanPtr& plan, const AttentionOptions& options = {});

/// The same, written to o: any strides but that of the last axis, and no memory of q, k or v. For
/// where no gradient is wanted: an input that a tape knows is an error.
void attention_into(Tensor& o, const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                    const AttentionOptions& options = {});

/// With the log-sum-exp of every row, [B, H, L] (f32; f64 for f64), a result that a tape knows like
/// o: with its gradient, dS gains P dL.
struct AttentionResult {
  Tensor o{}, lse{};  // outputs, and log-sum-exps
};
/// The same o as attention().
AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                                   const AttentionOptions& options = {});

/// Gradients of q, k, v, slopes, relative, bias and sink, those whose bit is set in `wanted` and
/// that are there, from what attention_with_lse() gave and the gradients of that, of which lse may
/// be undefined: for a host with a graph of its own, on any thread. taped, and sets chosen by q and
/// k, run forward once more.
std::vector<Tensor> attention_gradients(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionResult& given,
                                        const AttentionResult& d, const PlanPtr& plan,
                                        const AttentionOptions& options = {}, unsigned wanted = 0x7f);

/// The plan of one sequence of q and k: where the pattern looks at data, its blocks are chosen, for
/// each key head by the means of the queries of its heads; else `plan`. attention() does so itself.
PlanPtr plan_of_sequence(const PlanPtr& plan, const Tensor& q, const Tensor& k, Index sequence);

/// Whom a row of q attends to in one head: keys, as ascending tokens, and their weights. A key that
/// counts twice has the sum, one that a bias masks 0; a sink leaves less than 1 to all of them.
struct RowWeights {
  Index batch{}, row{}, head{};      // which row of q this is
  std::vector<std::int32_t> keys{};  // ascending
  std::vector<double> weights{};     // one a key
};
/// The weights of some rows of q, ascending: by sequence, row, head; no dropout and no tape.
std::vector<RowWeights> attention_weights(const Tensor& q, const Tensor& k, const PlanPtr& plan,
                                          std::span<const Index> rows, const AttentionOptions& options = {});

/// The plan of a call with `count` rows of q: where `plan` has more, of its last; fewer, a cross.
PlanPtr plan_of_queries(const PlanPtr& plan, Index count);

/// X along the order, and back: y[:, i] = x[:, token_at[i]]; each is the other's backward.
Tensor reorder(const Tensor& x, const Permutation& order, int axis = 1);
Tensor restore(const Tensor& y, const Permutation& order, int axis = 1);  // the inverse

/// What taped and hybrid multiply: a tiling's groups, padded to one size, as one batch of products.
/// Dense attention is one group; where a set has no such runs, groups follow its lists.
struct GroupShape {
  Index groups = 0, q = 0, k = 0;                 // how many, and the rows and keys of each
  Index pairs() const { return groups * q * k; }  // that are multiplied
};
GroupShape group_shape(const Tiling& t);  // of one tiling

/// What a kernel multiplies in a pass over a tiling, for one head; a CPU may take pairs one by one.
struct KernelWork {
  Index pairs = 0, keys = 0;  // of queries and keys, multiplied; keys read
};
KernelWork kernel_work(const Tiling& t, Device device, bool scored);  // scored: the call has score terms

/// Bytes that a mode will save for backward and need at its peak, beyond q, k, v and the tensors of
/// the terms, whose gradients are all asked for. Terms that do not fit are errors, as in a call.
struct AttentionMemory {
  std::size_t saved = 0, peak = 0;  // bytes
};
/// Without running anything, on a GPU neither.
AttentionMemory attention_memory(const Plan& plan, Index batch, Index kv_heads, Index dim, DType dtype, Backward mode,
                                 const ScoreTerms& terms = {}, Device where = {});

}  // namespace hilt
