#pragma once
#include "core/cuda/walk.h"
#include "core/dispatch.h"
#include "core/random.h"

// Private to core: the few kernels that tensors themselves need on a GPU.

namespace hilt::kernels {

/// Writes one word; returns the runtime's status. Shows that a GPU can be used at all.
int write_word(Cuda, std::uint32_t* to, std::uint32_t word);

// n elements, dense.
void fill(Cuda, void* out, DType type, Index n, double value);
void count_up(Cuda, void* out, DType type, Index n);

/// Element by element from the second operand of the walk to the first, converting.
void copy_elements(Cuda, void* to, DType to_type, const void* from, DType from_type, const cuda::Walk<2>& walk);

/// The numbers of core/random.h: uniform floats, normal floats, integers low + bits mod span.
enum class Draw { uniform, normal, integer };
void draw(Cuda, Draw what, void* out, DType type, Index n, RandomKey key, Index low, std::uint64_t span);

/// out = a + b, rounded once; out may be a.
template <class T, class At> void accumulate(At, const T* a, const T* b, T* out, Index n);

}  // namespace hilt::kernels
