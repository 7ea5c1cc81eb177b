#pragma once
#include "ops/hilbert/call.h"

// Private: the three modes, as attention() calls them.

namespace hilt {

/// One branch, or all: o [B, L, H, D], and lse [B, L, H, 1] where branches merge or a caller asks.
struct Taped {
  Tensor o, lse;
};
Taped taped(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, bool with_lse);

namespace detail {

/// How hybrid and fused go back from what their op keeps.
std::vector<Tensor> hybrid_backward(const OneOp& op, std::span<const Tensor> given);
std::vector<Tensor> fused_backward(const OneOp& op, std::span<const Tensor> given);

}  // namespace detail

bool all_finite(std::span<const Tensor> tensors);

}  // namespace hilt
