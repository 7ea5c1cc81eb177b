#pragma once
#include "ops/hilbert/call.h"

// Private: the three modes, as attention() calls them.

namespace hilt {

/// Of one branch or all: o [B, L, H, D], and where branches merge or one asks lse [B, L, H, 1].
struct Taped {
  Tensor o, lse;
};
Taped taped(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, bool with_lse);

namespace detail {

/// How hybrid and fused go back from what their op keeps.
std::vector<Tensor> hybrid_backward(const OneOp& op, const Tensor& cotangent);
std::vector<Tensor> fused_backward(const OneOp& op, const Tensor& cotangent);

}  // namespace detail

bool all_finite(std::span<const Tensor> tensors);

}  // namespace hilt
