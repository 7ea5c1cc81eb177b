#pragma once
#include "core/pool.h"

// Private to core: the memory of a GPU.

namespace hilt::cuda {

/// A GPU's memory. Everything runs on one stream of it, so what a tensor leaves behind can be
/// handed on at once: whoever gets it writes after the last reader has run.
struct DeviceHeap {
  static constexpr std::size_t kAlignment = 512;
  int index = 0;
  std::string name() const;
  std::byte* take(std::size_t bytes) const;
  void give(std::byte* p) const noexcept;
};

Pool<DeviceHeap>& pool(int index);  // the pool of a GPU; throws Code::gpu where there is no such

}  // namespace hilt::cuda
