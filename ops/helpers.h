#pragma once
#include "core/dispatch.h"
#include "core/tape.h"
#include "ops/ops.h"

// Private: what several ops need of each other.

namespace hilt {

/// An op that is linear in its one input and keeps nothing of it: y = A x, dx = A^T dy.
template <class A, class Transposed> struct Linear final : Function {
  std::string_view label;
  A a;
  Transposed transposed;
  Linear(std::string_view name, A y, Transposed dx) : label(name), a(std::move(y)), transposed(std::move(dx)) {}
  std::string_view name() const override { return label; }
  Tensor forward(const Tensor& x) { return a(x); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {transposed(dy)}; }
};
template <class A, class Transposed>
Tensor apply_linear(std::string_view name, const Tensor& x, A a, Transposed transposed) {
  return apply(Linear<A, Transposed>(name, std::move(a), std::move(transposed)), x);
}

/// dy summed over the axes along which this shape was broadcast: the backward of every broadcast.
Tensor sum_to(const Tensor& dy, const Shape& shape);

Tensor gelu_tanh_backward(const Tensor& x, const Tensor& dy);  // dy gelu_tanh'(x)
Tensor same(const Tensor& a, const Tensor& b);                 // 1 where a equals b or both are NaN, else 0

inline void check_floats(const char* op, const Tensor& x) {
  check(bool(x) && is_floating(x.dtype()), op, ": needs a tensor of floats, got ",
        x ? name_of(x.dtype()) : "an undefined one");
}

inline constexpr Index kWorthATask = 1 << 15;  // elements

/// [everything else, last axis]
inline Tensor as_rows(const Tensor& x) { return reshape(x, {x.dim(-1) > 0 ? x.numel() / x.dim(-1) : 0, x.dim(-1)}); }

inline Tensor widened(const Tensor& x) { return size_of(x.dtype()) == 2 ? to(x, DType::f32) : x; }

/// Two inputs of one op must have one type and live on one device.
inline void check_alike(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b) {
  check(bool(a) && bool(b), op, ": ", a ? b_name : a_name, " is an undefined tensor");
  check(a.dtype() == b.dtype(), op, ": ", a_name, " is ", a.dtype(), " and ", b_name, " is ", b.dtype(),
        "; convert one with to()");
  check(a.device() == b.device(), op, ": ", a_name, " is on ", a.device(), " and ", b_name, " on ", b.device(),
        "; move one with to()");
}

/// Rows [begin, begin + count) of x along an axis, or each step-th from there, sharing x's storage.
inline Tensor rows_of(const Tensor& x, int axis, Index begin, Index count, Index step = 1) {
  Strides strides = x.strides();
  strides[static_cast<std::size_t>(axis)] *= step;
  const Shape shape = x.shape().with(axis, count);
  return as_strided(x, shape, strides, x.offset() + (shape.numel() > 0 ? begin * x.stride(axis) : 0));
}

inline Shape without_last(const Shape& shape) { return Shape(std::span(shape.begin(), shape.end() - 1)); }

struct AroundAxis {  // a dense tensor around one axis: [outer, extent, inner]
  Index outer = 1, extent = 1, inner = 1;
  AroundAxis(const Shape& shape, int axis) : extent(shape[axis]) {
    for (int i = 0; i < axis; ++i) outer *= shape[i];
    for (int i = axis + 1; i < shape.rank(); ++i) inner *= shape[i];
  }
};

}  // namespace hilt
