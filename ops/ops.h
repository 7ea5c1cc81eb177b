#pragma once
#include "../core/random.h"
#include "../core/tensor.h"

// Every public op, one line of maths each, differentiable in its float inputs unless it says
// otherwise. README.md has what holds for all.

namespace [[gnu::visibility("default")]] hilt {

// ---- elementwise, broadcasting like NumPy: axes align at the end, an extent of 1 repeats --------
// + - * neg, maximum, minimum, where and comparisons take integers too, both of one type; what
// overflows wraps, and a constant must be one of that type's numbers.
Tensor add(const Tensor& a, const Tensor& b);      // a + b
Tensor sub(const Tensor& a, const Tensor& b);      // a - b
Tensor mul(const Tensor& a, const Tensor& b);      // a b
Tensor div(const Tensor& a, const Tensor& b);      // a / b
Tensor maximum(const Tensor& a, const Tensor& b);  // max(a, b); a tie sends half the gradient to each
Tensor minimum(const Tensor& a, const Tensor& b);  // min(a, b); a tie halves the gradient
Tensor pow(const Tensor& a, const Tensor& b);      // a^b, a > 0 where b is watched
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);  // condition ? a : b; condition is u8
Tensor add(const Tensor& x, double c);                                    // x + c
Tensor mul(const Tensor& x, double c);                                    // x c
Tensor sub(double c, const Tensor& x);                                    // c - x
Tensor div(double c, const Tensor& x);                                    // c / x
Tensor pow(const Tensor& x, double c);                                    // x^c
Tensor neg(const Tensor& x);                                              // -x
Tensor exp(const Tensor& x);                                              // e^x
Tensor log(const Tensor& x);                                              // natural, of x > 0
Tensor log1p(const Tensor& x);                                            // log(1 + x), of x > -1, precise around 0
Tensor expm1(const Tensor& x);                                            // e^x - 1, precise around 0
Tensor sqrt(const Tensor& x);                                             // the root, of x >= 0
Tensor rsqrt(const Tensor& x);                                            // 1 / sqrt(x)
Tensor sin(const Tensor& x);                                              // of radians
Tensor cos(const Tensor& x);                                              // of radians
Tensor erf(const Tensor& x);                                              // 2/sqrt(pi) int e^-t^2 dt from 0 to x
Tensor tanh(const Tensor& x);                                             // (e^x - e^-x) / (e^x + e^-x)
Tensor sigmoid(const Tensor& x);                                          // 1 / (1 + e^-x)
Tensor softplus(const Tensor& x);                                         // log(1 + e^x), without overflow
Tensor relu(const Tensor& x);                                             // max(x, 0); gradient 0 at 0
Tensor gelu(const Tensor& x);                                             // x Phi(x), by erf
Tensor gelu_tanh(const Tensor& x);                       // x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2
Tensor silu(const Tensor& x);                            // x sigmoid(x)
Tensor square(const Tensor& x);                          // x^2
Tensor abs(const Tensor& x);                             // |x|; gradient 0 at 0
Tensor clamp(const Tensor& x, double low, double high);  // gradient 1 on [low, high], 0 outside

inline Tensor maximum(const Tensor& x, double c) { return maximum(x, scalar_like(x, c)); }  // max(x, c)
inline Tensor minimum(const Tensor& x, double c) { return minimum(x, scalar_like(x, c)); }  // min(x, c)
inline Tensor where(const Tensor& condition, const Tensor& a, double b) {                   // condition ? a : b
  return where(condition, a, scalar_like(a, b));
}
inline Tensor where(const Tensor& condition, double a, const Tensor& b) {  // condition ? a : b
  return where(condition, scalar_like(b, a), b);
}

inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }  // a + b
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }  // a - b
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }  // a b
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }  // a / b
inline Tensor operator-(const Tensor& x) { return neg(x); }                      // -x
inline Tensor operator+(const Tensor& x, double c) { return add(x, c); }         // x + c
inline Tensor operator-(const Tensor& x, double c) { return add(x, -c); }        // x - c
inline Tensor operator*(const Tensor& x, double c) { return mul(x, c); }         // x c
inline Tensor operator*(double c, const Tensor& x) { return mul(x, c); }         // x c
inline Tensor operator/(const Tensor& x, double c) { return mul(x, 1 / c); }     // x / c
inline Tensor operator+(double c, const Tensor& x) { return add(x, c); }         // x + c
inline Tensor operator-(double c, const Tensor& x) { return sub(c, x); }         // c - x
inline Tensor operator/(double c, const Tensor& x) { return div(c, x); }         // c / x
/// A Tensor is a value that others may share and a tape may have saved: x = x + y makes a new one.
template <class T> void operator+=(Tensor&, const T&) {
  static_assert(!sizeof(T), "x += y writes to no tensor: write x = x + y; gradients add up by Gradients +=");
}
template <class T> void operator-=(Tensor&, const T&) {  // refused, as +=
  static_assert(!sizeof(T), "x -= y writes to no tensor: write x = x - y, or step an optimizer (adamw_step)");
}
/// Does not compile.
template <class T> void operator*=(Tensor&, const T&) { static_assert(!sizeof(T), "x *= y: write x = x * y"); }
/// Does not compile.
template <class T> void operator/=(Tensor&, const T&) { static_assert(!sizeof(T), "x /= y: write x = x / y"); }

// ---- reductions over the named axes, all of them when none is named -----------------------------
struct Axes : std::vector<int> {  // none, one or several, a negative one from the end
  using vector::vector;
  template <std::signed_integral I> Axes(I axis) : vector{static_cast<int>(axis)} {}  // one
};
Tensor sum(const Tensor& x, const Axes& axes = {}, bool keepdim = false);   // of integers and masks an exact i64
Tensor mean(const Tensor& x, const Axes& axes = {}, bool keepdim = false);  // sum / count
Tensor max(const Tensor& x, const Axes& axes = {}, bool keepdim = false);   // equal maxima share the gradient; NaN wins
Tensor min(const Tensor& x, const Axes& axes = {}, bool keepdim = false);   // equal minima share it; NaN wins
Tensor prod(const Tensor& x, const Axes& axes = {}, bool keepdim = false);  // the gradient holds where some are 0
/// sum (x - mean)^2 / (count - correction), NaN where that is 0 / 0.
Tensor var(const Tensor& x, const Axes& axes = {}, bool keepdim = false, Index correction = 1);
Tensor cumsum(const Tensor& x, int axis = -1);  // y_i = x_0 + .. + x_i along an axis, in this order

// ---- along the last axis ------------------------------------------------------------------------
Tensor softmax(const Tensor& x);      // e^x / sum e^x
Tensor log_softmax(const Tensor& x);  // x - log sum e^x
Tensor logsumexp(const Tensor& x);    // log sum e^x; the axis goes
struct TopK {                         // of each row
  Tensor values{}, indices{};         // [.., k], and where they stood, i64
};
TopK topk(const Tensor& x, Index k);  // the largest in falling order; NaN first, of equals the lower index
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  double epsilon = 1e-5);                                       // (x - mean) / sqrt(var + eps) w + b
Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon = 1e-5);  // x / sqrt(mean x^2 + eps) w; no w: 1
/// Rotates pairs (x_i, x_{i+D/2}) of [.., L, H, D] by position[l] * base^(-2i/D); positions: i32 or
/// i64 [L], or 0..L-1. Points [L, a] or [B, L, a], a to 3, turn a parts of D, part j as a head so
/// wide by coordinate j. The first `heads` of the H turn (all, unless told), the others pass.
Tensor rotary(const Tensor& x, double base = 10000, const std::optional<Tensor>& positions = std::nullopt,
              std::optional<Index> heads = std::nullopt);

// ---- linear algebra -----------------------------------------------------------------------------
/// a b over the last two axes; leading axes are batches and broadcast. Transposed views: in place.
Tensor matmul(const Tensor& a, const Tensor& b);
/// x w + b, and onto a residual stream r + x w + b. x: [.., in], w: [in, out], b: [out] or
/// undefined, r: [.., out].
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& residual = {});
Tensor linear_gelu_tanh(const Tensor& x, const Tensor& w, const Tensor& b);  // gelu_tanh(x w + b)

// ---- picking and placing ------------------------------------------------------------------------
Tensor embedding(const Tensor& table, const Tensor& ids);           // y[.., :] = table[ids[..], :]
Tensor gather(const Tensor& x, int axis, const Tensor& index);      // y[.. i ..] = x[.. index[i] ..], index: [n]
Tensor take_along(const Tensor& x, int axis, const Tensor& index);  // y[.. i ..] = x[.. index[.. i ..] ..]
Tensor scatter_add(const Tensor& x, int axis, const Tensor& index, Index extent);  // y[.. index[i] ..] += x[.. i ..]
/// 1 at y[.., ids[..]], 0 elsewhere, and for an id outside of the classes everywhere.
Tensor one_hot(const Tensor& ids, Index classes, DType dtype = DType::f32);
Tensor tril(const Tensor& x, Index diagonal = 0);  // 0 where column > row + diagonal, of the last two axes
inline Tensor masked_fill(const Tensor& x, const Tensor& m, double c) { return where(m, c, x); }  // m ? c : x
Tensor repeat(const Tensor& x, int axis, Index times);  // all of x again and again along an axis
Tensor flip(const Tensor& x, const Axes& axes);         // each named axis from its end
Tensor cat(std::span<const Tensor> parts, int axis);    // along an axis; all else must agree
/// Along an axis; all else must agree.
inline Tensor cat(const std::vector<Tensor>& parts, int axis) { return cat(std::span(parts), axis); }
Tensor stack(std::span<const Tensor> parts, int axis = 0);  // along a new axis
inline Tensor stack(const std::vector<Tensor>& parts, int axis = 0) { return stack(std::span(parts), axis); }
std::vector<Tensor> split(const Tensor& x, std::span<const Index> extents, int axis);  // views, one after the other
/// Extents `before` and `after` of `value` on both sides.
Tensor pad(const Tensor& x, int axis, Index before, Index after, double value = 0);

// ---- losses and noise ---------------------------------------------------------------------------
/// Mean over the targets that are not `ignore`, 0 where all are, of -log softmax(logits)[target].
/// logits [.., C], targets i32/i64 [..]. The loss of 16-bit logits is f32.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, Index ignore = -100);
/// Mean over the targets that are not `ignore`, 0 where all are, of -log_probs[target]; as above.
Tensor nll(const Tensor& log_probs, const Tensor& targets, Index ignore = -100);
/// Mean of (y - target)^2 over all elements, f32 for 16 bits, as the next.
Tensor mse(const Tensor& y, const Tensor& target);
/// Mean cross-entropy of sigmoid(logits) with targets in [0, 1], right however large the logits.
Tensor bce(const Tensor& logits, const Tensor& targets);
/// x m / (1 - p) with m = 1 with probability 1 - p. Element i of the mask depends on key and i
/// alone. With `rows`, x is these rows of a larger tensor, with their part of its mask.
Tensor dropout(const Tensor& x, double p, RandomKey key, std::vector<Index> rows = {});
inline Tensor dropout(const Tensor& x, double p, Generator& g) { return p == 0 ? x : dropout(x, p, g.next()); }

// ---- views: they share x's storage --------------------------------------------------------------
Tensor reshape(const Tensor& x, const Shape& shape);                  // a copy only where strides force one
Tensor reshape(const Tensor& x, std::initializer_list<Index> shape);  // an extent of -1 follows from the others
inline Tensor reshape(const Tensor& x, Index extent) { return reshape(x, {extent}); }
Tensor permute(const Tensor& x, std::span<const int> axes);  // y's axis i is x's axes[i]
inline Tensor permute(const Tensor& x, std::initializer_list<int> axes) {
  return permute(x, std::span(axes.begin(), axes.size()));
}
Tensor transpose(const Tensor& x, int a = -2, int b = -1);  // swaps two axes
Tensor slice(const Tensor& x, int axis, Index begin, Index end,
             Index step = 1);                        // from the end if < 0
Tensor select(const Tensor& x, int axis, Index i);   // x[.. i ..], without that axis
Tensor expand(const Tensor& x, const Shape& shape);  // repeats axes of extent 1
Tensor squeeze(const Tensor& x, int axis);           // without an axis of extent 1
Tensor unsqueeze(const Tensor& x, int axis);         // with a new axis of extent 1
Tensor contiguous(const Tensor& x);                  // x itself if it is dense, else a copy
Tensor to(const Tensor& x, DType dtype);             // gradient converts back
Tensor to(const Tensor& x, Device device);           // gradient goes back
Tensor detach(const Tensor& x);                      // the same numbers as a constant: no gradient passes

// ---- not differentiable -------------------------------------------------------------------------
Tensor argmax(const Tensor& x);                          // along the last axis, first of equals, NaN passed over; i64
Tensor argmin(const Tensor& x);                          // of the smallest, as argmax
Tensor floor(const Tensor& x);                           // the largest integer <= x
Tensor greater(const Tensor& a, const Tensor& b);        // a > b as u8
Tensor greater_equal(const Tensor& a, const Tensor& b);  // a >= b as u8
Tensor less(const Tensor& a, const Tensor& b);           // a < b as u8
Tensor less_equal(const Tensor& a, const Tensor& b);     // a <= b as u8
Tensor equal(const Tensor& a, const Tensor& b);          // a == b as u8
Tensor not_equal(const Tensor& a, const Tensor& b);      // a != b as u8
inline Tensor greater(const Tensor& x, double c) { return greater(x, scalar_like(x, c)); }  // x > c as u8
inline Tensor less(const Tensor& x, double c) { return less(x, scalar_like(x, c)); }        // x < c as u8
inline Tensor equal(const Tensor& x, double c) { return equal(x, scalar_like(x, c)); }      // x == c as u8

/// What a comparison operator gives: u8, 1 where it holds. It is no truth value: `if (a < b)` does
/// not compile, as neither "everywhere" nor "somewhere" is said; sum() counts.
struct Mask : Tensor {
  explicit Mask(const Tensor& m) : Tensor(m) {}  // of u8
  explicit operator bool() const = delete;       // sum(m).item() > 0 says whether one holds
};
inline Mask operator>(const Tensor& a, const Tensor& b) { return Mask(greater(a, b)); }                  // a > b
inline Mask operator>(const Tensor& x, double c) { return Mask(greater(x, scalar_like(x, c))); }         // x > c
inline Mask operator>=(const Tensor& a, const Tensor& b) { return Mask(greater_equal(a, b)); }           // a >= b
inline Mask operator>=(const Tensor& x, double c) { return Mask(greater_equal(x, scalar_like(x, c))); }  // x >= c
inline Mask operator<(const Tensor& a, const Tensor& b) { return Mask(less(a, b)); }                     // a < b
inline Mask operator<(const Tensor& x, double c) { return Mask(less(x, scalar_like(x, c))); }            // x < c
inline Mask operator<=(const Tensor& a, const Tensor& b) { return Mask(less_equal(a, b)); }              // a <= b
inline Mask operator<=(const Tensor& x, double c) { return Mask(less_equal(x, scalar_like(x, c))); }     // x <= c
inline Mask operator==(const Tensor& a, const Tensor& b) { return Mask(equal(a, b)); }                   // a == b
inline Mask operator==(const Tensor& x, double c) { return Mask(equal(x, scalar_like(x, c))); }          // x == c
inline Mask operator!=(const Tensor& a, const Tensor& b) { return Mask(not_equal(a, b)); }               // a != b
inline Mask operator!=(const Tensor& x, double c) { return Mask(not_equal(x, scalar_like(x, c))); }      // x != c
inline Mask operator&(const Tensor& a, const Tensor& b) { return Mask((a != 0) * (b != 0)); }            // neither is 0
inline Mask operator|(const Tensor& a, const Tensor& b) { return Mask(maximum(a != 0, b != 0)); }        // one is not 0
/// Not m. Of a Tensor ! asks whether it is undefined.
inline Mask operator!(const Mask& m) { return m == 0; }

// ---- optimiser steps: they write to the parameter and its state ---------------------------------
/// The options of one step.
struct AdamW {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0.01;  // as in the paper
};
/// m, v: of w's type, or f32 beside a 16-bit w, which `master`, f32, shadows. step counts from 1.
void adamw_step(Tensor& w, const Tensor& dw, Tensor& m, Tensor& v, Index step, const AdamW& options,
                Tensor* master = nullptr);
struct AdamWUpdate {             // the same for many parameters, each with its own decay, in a few kernels on a GPU
  Tensor* w{};                   // is written to
  Tensor dw{};                   // its gradient
  Tensor *m{}, *v{}, *master{};  // state, written to
  double weight_decay = 0;       // its own
};
/// With a norm, gradients count times min(1, max / norm) (max 0: as they are), and where it is not
/// finite nothing changes. Gradients of a loss times `scale`, and their norm, count divided by it.
struct Clip {
  Tensor norm{};     // of all gradients
  double max = 0;    // the largest norm that is left alone
  double scale = 1;  // by which the loss was multiplied
};
/// All of them; throws Code::usage before any is written to.
void adamw_step(std::span<const AdamWUpdate> updates, Index step, const AdamW& options, const Clip& clip = {});
/// The root of the sum of all squares, an f64 scalar on their device. NaN if `loss` is not finite.
Tensor norm_of(std::span<const Tensor> gradients, const Tensor& loss = {});
double global_norm(std::span<const Tensor> gradients);  // its value on the host, which waits for it
/// Scales the gradients so that their global norm is at most max_norm; returns the norm before.
/// Throws Code::not_a_number if it is not finite. New tensors replace those that are shared.
double clip_grad_norm(std::span<Tensor> gradients, double max_norm);

}  // namespace hilt
