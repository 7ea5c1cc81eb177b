#pragma once
#include "core/dispatch.h"

// Private: what several ops need of each other.

namespace hilt {

/// dy summed over the axes along which a tensor of this shape was broadcast: the backward of every
/// broadcast.
Tensor sum_to(const Tensor& dy, const Shape& shape);

/// dy gelu_tanh'(x).
Tensor gelu_tanh_backward(const Tensor& x, const Tensor& dy);

/// Two inputs of one op must have one type and live on one device.
inline void check_alike(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b) {
  check(bool(a) && bool(b), op, ": ", a ? b_name : a_name, " is an undefined tensor");
  check(a.dtype() == b.dtype(), op, ": ", a_name, " is ", a.dtype(), " and ", b_name, " is ", b.dtype(),
        "; convert one with to()");
  check(a.device() == b.device(), op, ": ", a_name, " is on ", a.device(), " and ", b_name, " on ", b.device(),
        "; move one with to()");
}

/// A dense tensor around one axis: [outer, extent, inner].
struct AroundAxis {
  Index outer = 1, extent = 1, inner = 1;
  AroundAxis(const Shape& shape, int axis) : extent(shape[axis]) {
    for (int i = 0; i < axis; ++i) outer *= shape[i];
    for (int i = axis + 1; i < shape.rank(); ++i) inner *= shape[i];
  }
};

}  // namespace hilt
