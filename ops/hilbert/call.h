#pragma once
#include <array>
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

// ---- forward
// ---------------------------------------------------------------------------------------

/// Where an online softmax stands: o [B, L, H, D], which never rounds to 16 bits between `parts`,
/// and lse [B, H, L].
struct SoftmaxState {
  Tensor o, lse;
  bool fresh;  // nothing is there yet, and the first part writes every row
};
SoftmaxState initial_state(const Call& call, const Tensor& q, std::span<const Tiling> first, bool several_parts);
/// One part: keys and values that these tilings, one for each of the plan's, point into.
void attend(const Call& call, std::span<const Tiling> tilings, const Tensor& q, const Tensor& k, const Tensor& v,
            SoftmaxState& state);
/// All of it: what hybrid and fused compute.
AttentionResult kernel_forward(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v);

// ---- backward
// --------------------------------------------------------------------------------------

/// What backward reads: o and d_o as q, lse and delta [B, H, L].
struct BackwardInputs {
  Tensor q, k, v, o, d_o, lse;
  Tensor delta = {};  // made where a route wants it and it is not there
};
/// Backward over tilings as it will run: a route for each, and what these want of memory.
struct BackwardRun {
  struct Part {
    std::int32_t tiling;
    std::vector<std::int32_t> heads;
    kernels::Decision how;
  };
  std::vector<Part> parts;
  DType type;          // of dq, dk and dv: that of q, or the accumulator's
  bool zeroed, delta;  // they must be zero before; delta is read

  /// dq, dk or dv.
  Tensor gradient_like(const Tensor& x) const {
    return zeroed ? zeros(x.shape(), type, x.device()) : empty(x.shape(), type, x.device());
  }
};
/// `whole`: these tilings are all of the call, not one of several parts whose gradients are added
/// up.
BackwardRun decide_backward(const Call& call, std::span<const Tiling> tilings, const BackwardInputs& x, bool whole);
/// Writes the gradients, or adds them, to d = {dq, dk, dv}, which gradient_like made.
void run_backward(const Call& call, std::span<const Tiling> tilings, const BackwardRun& run, BackwardInputs& x,
                  std::array<Tensor, 3>& d);

// ---- one op
// ----------------------------------------------------------------------------------------

namespace detail {

/// What hybrid and fused share: the forward kernel, and what it keeps.
struct OneOp : Function {
  Call call;
  bool packed = false;

  Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v);
  Tensor forward(const Tensor& qkv);

  /// q, k, v inside [B, L, 3, H, D].
  static std::array<Tensor, 3> parts(const Tensor& qkv);

 protected:
  BackwardInputs kept(const Tensor& d_o) const;
  /// Gradients in the type of the inputs, of those that somebody wants.
  std::vector<Tensor> finished(std::vector<Tensor> dx, DType type) const;
  std::vector<Tensor> fused_backward(const Tensor& d_o) const;

 private:
  void keep(std::initializer_list<Tensor> tensors);
};

}  // namespace detail

}  // namespace hilt
