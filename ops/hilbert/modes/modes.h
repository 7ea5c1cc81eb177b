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

struct Hybrid final : OneOp {
  std::string_view name() const override { return "attention (hybrid)"; }
  std::vector<Tensor> backward(const Tensor& cotangent) override;
};

struct Fused final : OneOp {
  std::string_view name() const override { return "attention (fused)"; }
  std::vector<Tensor> backward(const Tensor& cotangent) override;
};

}  // namespace detail

bool all_finite(std::span<const Tensor> tensors);

}  // namespace hilt
