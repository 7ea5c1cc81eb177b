#pragma once
#include <cuda_runtime.h>
#include "core/cuda/context.h"
#include "core/random.h"

// For .cu files: starting a kernel, and how many threads it takes; keys that a Replay moves on;
// powers and logarithms of two as the hardware has them.

namespace hilt::cuda {

constexpr int kWarp = 32;
constexpr std::size_t kDefaultShared =
    47 << 10;  // bytes of shared memory a block gets without asking, but what it declares

/// Starts a kernel on the device's stream. Asks for the shared memory it needs, counts, and checks;
/// errors inside the kernel surface at a later check, under the name of what runs then.
template <class... Params, class... Args>
void launch(const char* name, Cuda where, void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared,
            Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  check_alive(where.device);
  if (shared > kDefaultShared)
    check_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
                 name, where.device);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(where.stream);
  check_status(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...), name,
               where.device);
  count_launch(where.device);
}

constexpr int kThreads = 256;          // of a kernel with a thread per element
constexpr Index kMaxBlocks = 1 << 20;  // such kernels stride over what exceeds this

/// Blocks for n elements, `each` of them a thread.
inline dim3 blocks_for(Index n, Index each = 1) {
  const Index blocks = (n + kThreads * each - 1) / (kThreads * each);
  return dim3(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks));
}

/// This thread's first element, and the step to its next.
__device__ inline Index first_element() { return static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline Index element_step() { return static_cast<Index>(gridDim.x) * blockDim.x; }

/// The key as it is this time.
__device__ inline RandomKey now(RandomKey key) {
  if (key.further) key.stream += *key.further;
  return key;
}

/// 2^x and log2 x, to two units in the last place; subnormals count as zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hilt::cuda
