#pragma once
#include <span>
#include <vector>
#include "forward.h"
#include "tensor.h"

// Memory for time: a part of a model that runs again when its gradient is asked for.

namespace [[gnu::visibility("default")]] hilt {

/// fn(inputs), keeping only the inputs: backward runs fn again. Watched tensors that fn reads
/// without being given them (weights a layer holds) get their gradients too, and generators it
/// draws from replay the same numbers. Tensors that it reads without being given them, and that
/// nobody watches, must still hold the same numbers then: only inputs and watched ones are checked.
Tensor checkpoint(Composite fn, std::span<const Tensor> inputs);
inline Tensor checkpoint(Composite fn, const std::vector<Tensor>& inputs) {
  return checkpoint(std::move(fn), std::span(inputs));
}

}  // namespace hilt
