#pragma once
#include "tensor.h"

// Memory for time: a part of a model that runs again when its gradient is asked for.

namespace [[gnu::visibility("default")]] hilt {

/// fn(inputs), keeping only the inputs: backward runs fn again. Watched tensors that fn reads
/// beside them get their gradients too, and generators it draws from replay the same numbers. What
/// it reads beside, unwatched, must still hold the same numbers then: that is not checked.
Tensor checkpoint(Composite fn, std::span<const Tensor> inputs);
inline Tensor checkpoint(Composite fn, const std::vector<Tensor>& inputs) {
  return checkpoint(std::move(fn), std::span(inputs));
}

}  // namespace hilt
