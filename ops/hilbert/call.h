#pragma once
#include <array>
#include <functional>
#include <map>
#include <span>
#include <vector>
#include "ops/hilbert/attention.h"
#include "ops/hilbert/kernels/attention.h"

// Private: one call of attention, checked, and the kernels on its tensors; what attention() and
// ring_attention() share.

namespace hilt {

struct Call {
  PlanPtr plan;
  AttentionOptions options;
  double scale = 1;
  Index batch = 0, length = 0, kv_heads = 1, dim = 0;

  Index heads() const { return plan->heads(); }
  RandomKey key() const { return options.key.value_or(RandomKey{}); }
  kernels::AttentionSizes sizes() const;
};
/// For q of `length` rows, as many as k and v have.
Call checked_call(const char* op, const PlanPtr& plan, const AttentionOptions& options, Index length, const Tensor& q,
                  const Tensor& k, const Tensor& v);

/// Rows whose elements are neighbours, which kernels read in place; else a copy, by an op of its
/// own where a tape listens.
Tensor in_rows(const Tensor& x);

/// The most tilings that any head merges.
Index branch_count(const Plan& plan);
/// The heads that use each tiling as their branch number `branch`, or as any if that is negative.
std::map<std::int32_t, std::vector<std::int32_t>> users(const Plan& plan, Index branch);

/// Where an online softmax stands: o [B, L, H, D], which never rounds to 16 bits between `parts`,
/// and lse [B, H, L].
struct SoftmaxState {
  Tensor o, lse;
  bool fresh;  // nothing is there yet, and the first part writes every row
};
SoftmaxState blank_state(const Call& call, const Tensor& q, std::span<const Tiling> first, bool several_parts);
/// One part: keys and values that these tilings, one for each of the plan's, point into.
void attend(const Call& call, std::span<const Tiling> tilings, const Tensor& q, const Tensor& k, const Tensor& v,
            SoftmaxState& state);

/// delta [B, H, L]
Tensor delta_of(const Call& call, const Tensor& o, const Tensor& d_o, DType type);
/// Adds the gradients of one part to d = {dq, dk, dv}, which are of the accumulator's type, with
/// the lse and delta of the whole.
void add_gradients(const Call& call, std::span<const Tiling> tilings, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& d_o, const Tensor& lse, const Tensor& delta, std::array<Tensor, 3>& d);

/// All gradients of a call with these tilings in one go, rounded once, where a GPU has a kernel for
/// that; else false, with nothing done. `blank` makes {dq, dk, dv} of the type of q; every row is
/// written if `covers`, else those that no kernel writes must be zero.
bool gradients_at_once(const Call& call, std::span<const Tiling> tilings, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& o, const Tensor& d_o, const Tensor& lse,
                       const std::function<std::array<Tensor, 3>(bool covers)>& blank);
/// A tensor that is written all over, or blank.
inline Tensor blank_like(const Tensor& x, bool covers) { return covers ? empty_like(x) : zeros_like(x); }

namespace kernels {
template <class T> Rows<const T> rows(const Tensor& x) { return {x.data<T>(), x.stride(0), x.stride(1), x.stride(2)}; }
template <class T> Rows<T> rows(Tensor& x) { return {x.mutable_data<T>(), x.stride(0), x.stride(1), x.stride(2)}; }
}  // namespace kernels

}  // namespace hilt
