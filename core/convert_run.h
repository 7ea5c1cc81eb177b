#pragma once

#include "dispatch.h"

// Private to core: floats of 32 bits to 16 and back, side by side, compiled for each instruction set.

namespace hilt::kernels {

template <class T, class At> void narrow(At, Index n, const float* from, T* to);
template <class T, class At> void widen(At, Index n, const T* from, float* to);

}  // namespace hilt::kernels
