#pragma once
#include <tuple>
#include "core/dispatch.h"
#include "core/strided.h"
#include "ops/math.h"

// Private: the elementwise ops as functors on scalars, and the kernel they all share. A new op is a
// struct here, its name in AllSpans, and a public function in elementwise.cpp.
// A functor takes up to three elements and two constants. Kernels run it over dense spans of f32,
// f64 or, where kTakesWhole, i64 alone; the driver in elementwise.cpp brings whatever the tensors
// are (strided, repeated, of fewer bits) into that form.

namespace hilt::spans {

/// y[i] = op(a[i], b[i], c[i]; p, q), of which only the first Op::kInputs pointers are read.
template <class T> using Span = void (*)(const T* a, const T* b, const T* c, T* y, Index n, T p, T q);

/// The kernel for an op, compiled for an instruction set in elementwise_cpu.cpp.
template <class Op, Isa I, class T> Span<T> span_of(CpuAt<I>);

struct DeviceSpan {  // the same on a GPU, which reads any types and strides itself: operand 0 of the walk is y
  void* y;
  const void* in[3];
  DType y_type, in_type[3];
  double p, q;
};
using RunOnDevice = void (*)(Cuda, const DeviceSpan&, const Runs<4>&);
template <class Op> void run_on_device(Cuda, const DeviceSpan&, const Runs<4>&);

template <int N> struct Inputs { static constexpr int kInputs = N; };
using One = Inputs<1>;
using Two = Inputs<2>;
using Three = Inputs<3>;

// ---- forward ------------------------------------------------------------------------------------
// clang-format off
struct Add : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return a + b; } };
struct Sub : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return a - b; } };
struct Mul : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return a * b; } };
struct Div : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return a / b; } };
struct Maximum : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return a != a ? a : b != b ? b : a > b ? a : b; } };
struct Minimum : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return a != a ? a : b != b ? b : a < b ? a : b; } };
struct Pow : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return std::pow(a, b); } };
struct Greater : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return T(a > b); } };
struct Less : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return T(a < b); } };
struct Equal : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return T(a == b); } };
struct GreaterEqual : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return T(a >= b); } };
struct LessEqual : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return T(a <= b); } };
struct NotEqual : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return T(a != b); } };
struct Same : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T, T, T) { return T(a == b || (a != a && b != b)); } };
struct Where : Three { template <class T> [[gnu::always_inline]] static constexpr T f(T c, T a, T b, T, T) { return c != 0 ? a : b; } };
struct AddConstant : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T p, T) { return x + p; } };
struct MulConstant : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T p, T) { return x * p; } };
struct PowConstant : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T p, T) { return std::pow(x, p); } };
struct SubFrom : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T p, T) { return p - x; } };
struct DivFrom : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T p, T) { return p / x; } };
struct Neg : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return -x; } };
struct Exp : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return math::exp(x); } };
struct Log : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return math::log(x); } };
struct Sqrt : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return std::sqrt(x); } };
struct Rsqrt : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return T{1} / std::sqrt(x); } };
struct Sin : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return std::sin(x); } };
struct Cos : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return std::cos(x); } };
struct Floor : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return std::floor(x); } };
struct Tanh : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return math::tanh(x); } };
struct Sigmoid : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return math::sigmoid(x); } };
struct Relu : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return x < 0 ? T{0} : x; } };
struct Gelu : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return x * math::normal(x).cdf; } };
struct Silu : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return x * math::sigmoid(x); } };
struct Square : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return x * x; } };
struct Abs : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return x < 0 ? -x : x == 0 ? T{0} : x; } };
struct Clamp : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T p, T q) { return x < p ? p : x > q ? q : x; } };
struct Log1p : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return std::log1p(x); } };
struct Expm1 : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return std::expm1(x); } };
struct Erf : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return std::erf(x); } };
struct Softplus : One { template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return (x < 0 ? T{0} : x) + std::log1p(math::exp(x < 0 ? x : -x)); } };
struct GeluTanh : One {  // (1 + tanh y) / 2 is the sigmoid of 2 y, which keeps its precision where it is small
  static constexpr double kC = 1.59576912160573071176, kCubic = 0.044715;  // 2 sqrt(2 / pi)
  template <class T> [[gnu::always_inline]] static constexpr T f(T x, T, T, T, T) { return x * math::sigmoid(T(kC) * (x + T(kCubic) * x * x * x)); }
};

// ---- backward: gradients from what was saved (s: x or y; a, b) and dy ---------------------------
struct MaximumGrad : Three { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T dy, T, T) { return a > b ? dy : a == b ? dy * T(0.5) : T{0}; } };
struct DivGradB : Three { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T dy, T, T) { return -dy * a / (b * b); } };
struct PowGradA : Three { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T dy, T, T) { return b == 0 ? T{0} : dy * b * std::pow(a, b - T{1}); } };
struct PowGradB : Three { template <class T> [[gnu::always_inline]] static constexpr T f(T a, T b, T dy, T, T) { const T y = std::pow(a, b); return y == 0 ? T{0} : dy * y * std::log(a); } };
struct PowConstantGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T p, T) { return p == 0 ? T{0} : dy * p * std::pow(s, p - T{1}); } };
struct DivFromGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T p, T) { return -dy * p / (s * s); } };
struct LogGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy / s; } };
struct SqrtGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy * T(0.5) / s; } };
struct RsqrtGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return T(-0.5) * dy * s * s * s; } };
struct SinGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy * std::cos(s); } };
struct CosGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return -dy * std::sin(s); } };
struct TanhGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy * (T{1} - s * s); } };
struct SigmoidGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy * s * (T{1} - s); } };
struct ReluGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return s > 0 ? dy : T{0}; } };
struct SquareGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy * (s + s); } };
struct AbsGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return s > 0 ? dy : s < 0 ? -dy : T{0}; } };
struct ClampGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T p, T q) { return s >= p && s <= q ? dy : T{0}; } };
struct Log1pGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy / (T{1} + s); } };
struct Expm1Grad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy * math::exp(s); } };
struct ErfGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy * T(1.12837916709551257390) * math::exp(-s * s); } };
struct SoftplusGrad : Two { template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { return dy * math::sigmoid(s); } };
struct SiluGrad : Two {
  template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) { const T g = math::sigmoid(s); return dy * g * (T{1} + s * (T{1} - g)); }
};
struct GeluGrad : Two {
  template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) {
    const auto [cdf, density] = math::normal(s);
    return dy * (cdf + s * density);
  }
};
struct GeluTanhGrad : Two {
  template <class T> [[gnu::always_inline]] static constexpr T f(T s, T dy, T, T, T) {
    const T c = T(GeluTanh::kC), k = T(GeluTanh::kCubic);
    s = s > T{30} ? T{30} : s < T{-30} ? T{-30} : s;  // from there on the sigmoid is 1 or 0, and s^3 must not overflow
    const T g = math::sigmoid(c * (s + k * s * s * s));
    return dy * g * (T{1} + s * (T{1} - g) * c * (T{1} + T{3} * k * s * s));
  }
};
// clang-format on

/// All of them: what elementwise_cpu.cpp compiles.
using AllSpans =
    std::tuple<Add, Sub, Mul, Div, Maximum, Minimum, Pow, Greater, Less, Equal, GreaterEqual, LessEqual, NotEqual, Same,
               Where, AddConstant, MulConstant, PowConstant, SubFrom, DivFrom, Neg, Exp, Log, Sqrt, Rsqrt, Sin, Cos,
               Floor, Tanh, Sigmoid, Relu, Gelu, Silu, Square, Abs, Clamp, Log1p, Expm1, Erf, Softplus, GeluTanh,
               MaximumGrad, DivGradB, PowGradA, PowGradB, PowConstantGrad, DivFromGrad, LogGrad, SqrtGrad, RsqrtGrad,
               SinGrad, CosGrad, TanhGrad, SigmoidGrad, ReluGrad, SquareGrad, AbsGrad, ClampGrad, Log1pGrad, Expm1Grad,
               ErfGrad, SoftplusGrad, SiluGrad, GeluGrad, GeluTanhGrad>;

/// Those that take integers too, of which sums and products wrap: their low bits are exact.
template <class Op, class... Of> constexpr bool kIsOneOf = (std::is_same_v<Op, Of> || ...);
template <class Op> constexpr bool kWraps = kIsOneOf<Op, Add, Sub, Mul, Neg, AddConstant, MulConstant, SubFrom>;
template <class Op>
constexpr bool kTakesWhole =
    kWraps<Op> || kIsOneOf<Op, Maximum, Minimum, Greater, Less, Equal, GreaterEqual, LessEqual, NotEqual, Where>;
/// What such an op computes in, given elements of T; signed integers may not overflow.
template <class Op, class T>
using Arithmetic = std::conditional_t<std::is_same_v<T, std::int64_t> && kWraps<Op>, std::uint64_t, T>;

}  // namespace hilt::spans
