// Elementwise ops, broadcasting. y = f(x) or f(a, b); the derivative of each stands in
// elementwise.h beside f.
//      dx = f'(x) dy              keeps x, or y where f' is cheaper from y (exp, sqrt, tanh, ..), or nothing
//                                 (neg, add a constant)
//      da = df/da dy, summed over the axes a was repeated along; keeps a or b only where a wanted derivative reads it
#include "ops/elementwise.h"
#include "ops/helpers.h"
#include "ops/ops.h"

namespace hilt {
namespace {

using namespace spans;

constexpr Index kBlock = 512;  // elements widened or gathered at a time: three such buffers stay in L1

struct Kernel {  // the kernel of one op in each arithmetic type
  Span<float> narrow;
  Span<double> wide;
  Span<std::int64_t> whole;  // null where it takes no integers
  RunOnDevice device;
};
template <class Op> const Kernel& kernel() {
  static const Kernel made = [] {
    Kernel k{};
    detail::with_isa([&]<Isa I>(CpuAt<I> where) {
      k = {span_of<Op, I, float>(where), span_of<Op, I, double>(where), span_of<Op, I, std::int64_t>(where), nullptr};
    });
    if constexpr (kHasCuda) k.device = &run_on_device<Op>;
    return k;
  }();
  return made;
}

template <class W> using Load = void (*)(const std::byte* from, Index step, Index n, W* to);
template <class W, class T> void load(const std::byte* from, Index step, Index n, W* to) {
  const T* const x = reinterpret_cast<const T*>(from);
  if (step == 0) std::fill_n(to, n, convert<W>(*x));
  else
    for (Index i = 0; i < n; ++i) to[i] = convert<W>(x[i * step]);
}

Strides strides_within(const Tensor& y, const Tensor& x) {  // as x repeats to the shape of y
  return x.shape() == y.shape() ? x.strides() : broadcast_to("broadcast", x, y.shape()).strides();
}

/// y = op(inputs), of their broadcast shape; computed in W, to which inputs of any type convert.
template <class W> void run(Span<W> span, std::span<const Tensor* const> in, Tensor& y, W p, W q) {
  const auto is_like_y = [&](const Tensor* x) {
    return x->dtype() == dtype_of<W> && x->shape() == y.shape() && x->is_contiguous();
  };
  if (y.dtype() == dtype_of<W> && std::ranges::all_of(in, is_like_y)) {  // the common case needs no walk
    const W* x[3] = {};
    for (std::size_t k = 0; k < in.size(); ++k) x[k] = in[k]->data<W>();
    W* const out = y.mutable_data<W>();
    return parallel_for(y.numel(), kWorthATask, [&](Index begin, Index end) {
      const auto from = [begin](const W* all) { return all ? all + begin : nullptr; };
      span(from(x[0]), from(x[1]), from(x[2]), out + begin, end - begin, p, q);
    });
  }
  struct Operand {
    const std::byte* begin;
    Index step, bytes;  // from element to element along a run; of an element
    bool as_is;         // a run of it is one of W
    Load<W> load;
  };
  std::array<Strides, 4> strides{y.strides()};
  for (std::size_t k = 0; k < in.size(); ++k) strides[k + 1] = strides_within(y, *in[k]);
  const Runs<4> runs(y.shape(), strides);
  std::array<Operand, 3> operands{};
  bool whole = y.dtype() == dtype_of<W>;  // the kernel reads and writes the tensors themselves
  for (std::size_t k = 0; k < in.size(); ++k)
    visit_any("elementwise", *in[k], [&]<class T>(Cpu) {
      const Index step = runs.step[k + 1];
      operands[k] = {in[k]->raw(), step, sizeof(T), std::is_same_v<T, W> && (step == 1 || runs.run == 1), &load<W, T>};
      whole = whole && operands[k].as_is;
    });
  visit_any("elementwise", y, [&]<class T>(Cpu) {
    T* const out = y.mutable_data<T>();
    runs.for_pieces(kWorthATask, [&](const std::array<Index, 4>& at, Index n) {
      W buffer[4][kBlock];
      for (Index i = 0; i < n; i += whole ? n : kBlock) {
        const Index count = whole ? n : std::min(kBlock, n - i);
        const W* x[3] = {};
        for (std::size_t k = 0; k < in.size(); ++k) {
          const Operand& o = operands[k];
          const std::byte* const from = o.begin + (at[k + 1] + i * o.step) * o.bytes;
          if (o.as_is) x[k] = reinterpret_cast<const W*>(from);
          else o.load(from, o.step, count, buffer[k]), x[k] = buffer[k];
        }
        T* const to = out + at[0] + i;
        if constexpr (std::is_same_v<T, W>) {
          span(x[0], x[1], x[2], to, count, p, q);
        } else {
          span(x[0], x[1], x[2], buffer[3], count, p, q);
          for (Index j = 0; j < count; ++j) to[j] = static_cast<T>(static_cast<wide_t<T>>(buffer[3][j]));
        }
      }
    });
  });
}

void run_on_gpu(RunOnDevice run, std::span<const Tensor* const> in, Tensor& y, double p, double q) {
  if constexpr (kHasCuda) {  // without it nothing here may be linked, optimized or not
    if (y.numel() == 0) return;
    DeviceSpan s{y.mutable_raw(), {}, y.dtype(), {}, p, q};
    std::array<Strides, 4> strides{y.strides(), y.strides(), y.strides(), y.strides()};
    for (std::size_t k = 0; k < in.size(); ++k) {
      check(in[k]->dtype() != DType::f64, "elementwise: no kernel for f64 on ", y.device(), "; convert with to()");
      s.in[k] = in[k]->raw();
      s.in_type[k] = in[k]->dtype();
      strides[k + 1] = strides_within(y, *in[k]);
    }
    run(cuda_of(y.device()), s, Runs<4>(y.shape(), strides));
  }
}

/// The op on whole tensors. `type`: the result's. Integers alone are computed in i64.
Tensor map(const Kernel& kernel, std::span<const Tensor* const> in, DType type, double p = 0, double q = 0) {
  const bool wide = std::any_of(in.begin(), in.end(), [](const Tensor* t) { return t->dtype() == DType::f64; });
  const bool whole = std::none_of(in.begin(), in.end(), [](const Tensor* t) { return is_floating(t->dtype()); });
  Shape shape = in[0]->shape();
  for (const Tensor* t : in)
    if (t->shape() != shape) shape = broadcast("broadcast", shape, t->shape());
  Tensor y = empty(shape, type, in[0]->device());
  if (y.device().is_cuda()) return run_on_gpu(kernel.device, in, y, p, q), y;
  if (y.numel() == 0) return y;
  whole  ? run<std::int64_t>(kernel.whole, in, y, static_cast<std::int64_t>(p), 0)
  : wide ? run<double>(kernel.wide, in, y, p, q)
         : run<float>(kernel.narrow, in, y, static_cast<float>(p), static_cast<float>(q));
  return y;
}
template <class Op, class... In> Tensor mapped(DType type, double p, double q, const In&... in) {
  const std::array<const Tensor*, sizeof...(In)> all{&in...};
  return map(kernel<Op>(), all, type, p, q);
}

/// A gradient as an op G on what it reads: inputs 'a' and 'b', result 'y' and 'd', dy. None: dy.
using Kept = std::array<Tensor, 3>;  // of "aby"
template <class G, char... kReads> struct From {
  static constexpr bool reads(char x) { return ((kReads == x) || ...); }
  static Tensor of(double p, double q, const Kept& kept, const Tensor& dy) {
    if constexpr (sizeof...(kReads) == 0) return dy;
    else return mapped<G>(dy.dtype(), p, q, (kReads == 'd' ? dy : kept[std::string_view("aby").find(kReads)])...);
  }
};
using Dy = From<void>;

// ---- one and two inputs -------------------------------------------------------------------------
/// y = F(inputs), with the gradient of each. Keeps what those that are wanted read.
template <class F, class... Gradients> struct Elementwise final : Function {
  const std::string_view label;
  const double p, q;
  std::array<Shape, sizeof...(Gradients)> shapes{};
  explicit Elementwise(const char* op, double p_ = 0, double q_ = 0) : label(op), p(p_), q(q_) {}
  std::string_view name() const override { return label; }
  bool reads(char x) const {
    std::size_t i = 0;
    return ((wants(i++) && Gradients::reads(x)) || ...);
  }
  template <class... In> Tensor forward(const In&... in) {
    shapes = {in.shape()...};
    Tensor y = mapped<F>(std::get<0>(std::tie(in...)).dtype(), p, q, in...);
    std::size_t i = 0;
    for (const Tensor* x : {&in...})
      if (reads("ab"[i++])) save(*x);
    if (reads('y')) save(y);
    return y;
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    Kept kept;
    for (std::size_t i = 0, n = 0; i < kept.size(); ++i)
      if (reads("aby"[i])) kept[i] = saved(n++);
    std::size_t i = 0;
    const auto along = [&]<class G>(G) {
      const std::size_t at = i++;
      return wants(at) ? sum_to(G::of(p, q, kept, dy), shapes[at]) : Tensor{};
    };
    return {along(Gradients{})...};
  }
};

template <class F, class G> Tensor unary(const char* op, const Tensor& x, double p = 0, double q = 0) {
  if (!kTakesWhole<F> || !x) check_floats(op, x);
  check(is_floating(x.dtype()) || (std::trunc(p) == p && std::abs(p) <= 0x1p53), op, ": ", p, " is no ", x.dtype(),
        "; convert the tensor with to()");
  return apply(Elementwise<F, G>(op, p, q), x);
}

void check_pair(const char* op, const Tensor& a, const Tensor& b, bool takes_whole) {
  check_alike(op, "a", a, "b", b);
  check(takes_whole || is_floating(a.dtype()), op, ": needs tensors of floats, got ", a.dtype());
  if (a.shape() != b.shape()) broadcast(op, a.shape(), b.shape());  // for the message, by name
}

template <class F, class A, class B> Tensor binary(const char* op, const Tensor& a, const Tensor& b) {
  check_pair(op, a, b, kTakesWhole<F>);
  return apply(Elementwise<F, A, B>(op), a, b);
}

// ---- where --------------------------------------------------------------------------------------
struct Select final : Function {
  const Tensor condition;
  Shape a_shape, b_shape;
  explicit Select(const Tensor& c) : condition(c) {}
  std::string_view name() const override { return "where"; }
  Tensor forward(const Tensor& a, const Tensor& b) {
    a_shape = a.shape(), b_shape = b.shape();
    if (wants_any()) save(condition);
    return mapped<Where>(a.dtype(), 0, 0, condition, a, b);
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    const Tensor none, nothing = zeros({}, dy.dtype(), dy.device());
    const Tensor& c = saved(0);
    return {wants(0) ? sum_to(mapped<Where>(dy.dtype(), 0, 0, c, dy, nothing), a_shape) : none,
            wants(1) ? sum_to(mapped<Where>(dy.dtype(), 0, 0, c, nothing, dy), b_shape) : none};
  }
};

template <class F> Tensor comparison(const char* op, const Tensor& a, const Tensor& b) {
  check_pair(op, a, b, true);
  return mapped<F>(DType::u8, 0, 0, a, b);
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) { return binary<Add, Dy, Dy>("add", a, b); }
Tensor sub(const Tensor& a, const Tensor& b) { return binary<Sub, Dy, From<Neg, 'd'>>("sub", a, b); }
Tensor mul(const Tensor& a, const Tensor& b) {
  return binary<Mul, From<Mul, 'd', 'b'>, From<Mul, 'd', 'a'>>("mul", a, b);
}
Tensor div(const Tensor& a, const Tensor& b) {
  return binary<Div, From<Div, 'd', 'b'>, From<DivGradB, 'a', 'b', 'd'>>("div", a, b);
}
Tensor maximum(const Tensor& a, const Tensor& b) {
  return binary<Maximum, From<MaximumGrad, 'a', 'b', 'd'>, From<MaximumGrad, 'b', 'a', 'd'>>("maximum", a, b);
}
Tensor minimum(const Tensor& a, const Tensor& b) {
  return binary<Minimum, From<MaximumGrad, 'b', 'a', 'd'>, From<MaximumGrad, 'a', 'b', 'd'>>("minimum", a, b);
}
Tensor pow(const Tensor& a, const Tensor& b) {
  return binary<Pow, From<PowGradA, 'a', 'b', 'd'>, From<PowGradB, 'a', 'b', 'd'>>("pow", a, b);
}

Tensor add(const Tensor& x, double c) { return unary<AddConstant, Dy>("add", x, c); }
Tensor mul(const Tensor& x, double c) { return unary<MulConstant, From<MulConstant, 'd'>>("mul", x, c); }
Tensor sub(double c, const Tensor& x) { return unary<SubFrom, From<Neg, 'd'>>("sub", x, c); }
Tensor div(double c, const Tensor& x) { return unary<DivFrom, From<DivFromGrad, 'a', 'd'>>("div", x, c); }
Tensor pow(const Tensor& x, double c) { return unary<PowConstant, From<PowConstantGrad, 'a', 'd'>>("pow", x, c); }
Tensor neg(const Tensor& x) { return unary<Neg, From<Neg, 'd'>>("neg", x); }
Tensor exp(const Tensor& x) { return unary<Exp, From<Mul, 'y', 'd'>>("exp", x); }
Tensor log(const Tensor& x) { return unary<Log, From<LogGrad, 'a', 'd'>>("log", x); }
Tensor log1p(const Tensor& x) { return unary<Log1p, From<Log1pGrad, 'a', 'd'>>("log1p", x); }
Tensor expm1(const Tensor& x) { return unary<Expm1, From<Expm1Grad, 'a', 'd'>>("expm1", x); }
Tensor sqrt(const Tensor& x) { return unary<Sqrt, From<SqrtGrad, 'y', 'd'>>("sqrt", x); }
Tensor rsqrt(const Tensor& x) { return unary<Rsqrt, From<RsqrtGrad, 'y', 'd'>>("rsqrt", x); }
Tensor sin(const Tensor& x) { return unary<Sin, From<SinGrad, 'a', 'd'>>("sin", x); }
Tensor cos(const Tensor& x) { return unary<Cos, From<CosGrad, 'a', 'd'>>("cos", x); }
Tensor erf(const Tensor& x) { return unary<Erf, From<ErfGrad, 'a', 'd'>>("erf", x); }
Tensor tanh(const Tensor& x) { return unary<Tanh, From<TanhGrad, 'y', 'd'>>("tanh", x); }
Tensor sigmoid(const Tensor& x) { return unary<Sigmoid, From<SigmoidGrad, 'y', 'd'>>("sigmoid", x); }
Tensor softplus(const Tensor& x) { return unary<Softplus, From<SoftplusGrad, 'a', 'd'>>("softplus", x); }
Tensor relu(const Tensor& x) { return unary<Relu, From<ReluGrad, 'y', 'd'>>("relu", x); }
Tensor gelu(const Tensor& x) { return unary<Gelu, From<GeluGrad, 'a', 'd'>>("gelu", x); }
Tensor gelu_tanh(const Tensor& x) { return unary<GeluTanh, From<GeluTanhGrad, 'a', 'd'>>("gelu_tanh", x); }
Tensor gelu_tanh_backward(const Tensor& x, const Tensor& dy) { return mapped<GeluTanhGrad>(x.dtype(), 0, 0, x, dy); }
Tensor same(const Tensor& a, const Tensor& b) { return mapped<Same>(a.dtype(), 0, 0, a, b); }
Tensor silu(const Tensor& x) { return unary<Silu, From<SiluGrad, 'a', 'd'>>("silu", x); }
Tensor square(const Tensor& x) { return unary<Square, From<SquareGrad, 'a', 'd'>>("square", x); }
Tensor abs(const Tensor& x) { return unary<Abs, From<AbsGrad, 'a', 'd'>>("abs", x); }
Tensor clamp(const Tensor& x, double low, double high) {
  check(low <= high, "clamp: low ", low, " is above high ", high);
  return unary<Clamp, From<ClampGrad, 'a', 'd'>>("clamp", x, low, high);
}

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  check_pair("where", a, b, true);
  check(bool(condition) && condition.dtype() == DType::u8, "where: the condition must be u8, got ",
        condition ? name_of(condition.dtype()) : "an undefined tensor");
  broadcast("where", broadcast("where", a.shape(), b.shape()), condition.shape());
  return apply(Select(condition), a, b);
}

Tensor greater(const Tensor& a, const Tensor& b) { return comparison<Greater>("greater", a, b); }
Tensor less(const Tensor& a, const Tensor& b) { return comparison<Less>("less", a, b); }
Tensor equal(const Tensor& a, const Tensor& b) { return comparison<Equal>("equal", a, b); }
Tensor greater_equal(const Tensor& a, const Tensor& b) { return comparison<GreaterEqual>("greater_equal", a, b); }
Tensor less_equal(const Tensor& a, const Tensor& b) { return comparison<LessEqual>("less_equal", a, b); }
Tensor not_equal(const Tensor& a, const Tensor& b) { return comparison<NotEqual>("not_equal", a, b); }
Tensor floor(const Tensor& x) { return check_floats("floor", x), mapped<Floor>(x.dtype(), 0, 0, x); }

}  // namespace hilt
