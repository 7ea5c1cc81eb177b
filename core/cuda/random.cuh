#pragma once
#include "core/random.h"

// For .cu files: keys that a Replay moves on.

namespace hilt::cuda {

/// The key as it is this time.
__device__ inline RandomKey now(RandomKey key) {
  if (key.further) key.stream += *key.further;
  return key;
}

}  // namespace hilt::cuda
