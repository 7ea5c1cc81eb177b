// Inputs of a case: random numbers of the spread it asks for, in dense, strided and repeated
// layouts.
#include "tests/support/op_cases.h"
#include <cstring>
#include <numeric>
#include <random>

namespace hilt::judge {
namespace {

constexpr Index kGuard = 64;       // elements before and after a tensor
constexpr Index kOffset = 3;       // elements, of Layout::offset
constexpr Index kIdleStride = 17;  // of an axis of extent 1, where any stride must do
const std::byte kPoison{0xff};     // all bits set: a NaN of every float type

/// The axis of `from`, `from` + step, .. that is the first with more than one element, or -1.
int long_axis(const Shape& shape, int from, int step) {
  for (int i = from; i >= 0 && i < shape.rank(); i += step)
    if (shape[i] > 1) return i;
  return -1;
}

struct Plan {
  Strides strides{};
  Index elements = 1, offset = 0;
};
Plan plan_of(Layout layout, const Shape& shape) {
  std::vector<int> order(static_cast<std::size_t>(shape.rank()));  // axes as they lie in memory, outermost first
  std::iota(order.begin(), order.end(), 0);
  if (layout == Layout::transposed) std::swap(order.end()[-1], order.end()[-2]);
  if (layout == Layout::reversed) std::ranges::reverse(order);
  const int doubled = layout == Layout::strided ? shape.rank() - 1 : layout == Layout::strided_outer ? 0 : -1;
  const int repeated = repeated_axis(layout, shape);
  Plan plan;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    Index& stride = plan.strides[static_cast<std::size_t>(*axis)];
    stride = shape[*axis] == 1   ? kIdleStride
             : *axis == repeated ? 0
             : *axis == doubled  ? 2 * plan.elements
                                 : plan.elements;
    if (*axis != repeated) plan.elements *= std::max<Index>(shape[*axis], 1) * (*axis == doubled ? 2 : 1);
  }
  if (shape.numel() == 0) plan.elements = 0;  // nothing to hold, nothing held
  if (layout == Layout::offset) plan.offset = kOffset;
  plan.elements += plan.offset;
  return plan;
}

}  // namespace

std::string OpCase::label() const {
  std::string out = name;
  for (const Input& in : inputs) out += text(' ', in.shape);
  return out;
}

// ---- layouts ------------------------------------------------------------------------------------
std::string_view name_of(Layout layout) {
  constexpr std::string_view names[] = {"contiguous", "offset",        "transposed",     "reversed",
                                        "strided",    "strided_outer", "expanded_first", "expanded_last"};
  return names[static_cast<int>(layout)];
}

std::vector<Layout> layouts_of(const Shape& shape) {
  std::vector<Layout> out{Layout::contiguous, Layout::offset};
  if (shape.numel() == 0) return out;
  const int first = long_axis(shape, 0, 1), last = long_axis(shape, shape.rank() - 1, -1);
  if (first < 0) return out;
  const int second = long_axis(shape, first + 1, 1);
  const bool square_end = shape.rank() >= 2 && shape[-1] > 1 && shape[-2] > 1;
  if (square_end) out.push_back(Layout::transposed);
  if (second >= 0 && !(square_end && first == shape.rank() - 2)) out.push_back(Layout::reversed);
  if (shape[-1] > 1) out.push_back(Layout::strided);
  if (shape.rank() > 1 && shape[0] > 1) out.push_back(Layout::strided_outer);
  out.push_back(Layout::expanded_first);
  if (last != first) out.push_back(Layout::expanded_last);
  return out;
}

int repeated_axis(Layout layout, const Shape& shape) {
  if (layout == Layout::expanded_first) return long_axis(shape, 0, 1);
  if (layout == Layout::expanded_last) return long_axis(shape, shape.rank() - 1, -1);
  return -1;
}

Laid::Laid(const Array<double>& values, Layout layout, DType dtype) {
  const Plan plan = plan_of(layout, values.shape);
  const auto size = static_cast<Index>(size_of(dtype));
  block_.assign(static_cast<std::size_t>((kGuard + 1 + plan.elements + kGuard) * size), kPoison);
  std::byte* const start = block_.data() + (kGuard + 1) * size;  // one past a multiple of 64 elements
  const Storage storage = Storage::borrow(start, static_cast<std::size_t>(plan.elements * size), {}, nullptr);
  tensor_ = Tensor(storage, values.shape, plan.strides, plan.offset, dtype);
  if (values.size() > 0) {
    const int repeated = repeated_axis(layout, values.shape);  // along which values are equal
    const Tensor from = tensor_of(values, dtype);
    const Shape once = repeated < 0 ? values.shape : values.shape.with(repeated, 1);
    Tensor to = as_strided(tensor_, once, tensor_.strides(), tensor_.offset());
    copy(to, as_strided(from, once, from.strides(), 0));
  }
  before_ = block_;
}

double& Laid::at(Index n) {
  Index at = 0;
  for (int i = tensor_.rank() - 1; i >= 0; --i) {
    at += n % tensor_.dim(i) * tensor_.stride(i);
    n /= tensor_.dim(i);
  }
  return const_cast<double*>(std::as_const(tensor_).data<double>())[at];
}

// ---- tools --------------------------------------------------------------------------------------
testing::AssertionResult refuses(const std::function<void()>& f, std::string_view op,
                                 std::initializer_list<std::string_view> parts, Code code) {
  try {
    f();
  } catch (const Error& e) {
    const std::string_view message = e.what();
    if (e.code() != code)
      return testing::AssertionFailure() << "code " << static_cast<int>(e.code()) << ": " << message;
    if (!message.starts_with(op))
      return testing::AssertionFailure() << "does not open with '" << op << "': " << message;
    for (std::string_view part : parts)
      if (message.find(part) == message.npos)
        return testing::AssertionFailure() << "does not say '" << part << "': " << message;
    return testing::AssertionSuccess();
  } catch (const std::exception& e) {
    return testing::AssertionFailure() << "threw another type than Error: " << e.what();
  }
  return testing::AssertionFailure() << op << " did not refuse";
}

std::vector<std::byte> bits(const Tensor& x) {
  const Tensor y = dense(x);
  return y.numel() == 0 ? std::vector<std::byte>() : std::vector<std::byte>(y.raw(), y.raw() + y.bytes());
}

Array<double> draw(const Input& input, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  const auto uniform = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(rng() >> 11) * 0x1p-53;
  };
  Array<double> out(input.shape);
  for (Index i = 0; i < out.size(); ++i) {
    switch (input.spread) {
      case Input::Spread::even: out[i] = uniform(input.low, input.high); break;
      case Input::Spread::lattice: out[i] = input.low + std::floor(uniform(-8, 9)) / 4 + uniform(-0.02, 0.02); break;
      case Input::Spread::distinct:
        out[i] = 0.1 * static_cast<double>(i - out.size() / 2) + uniform(-0.02, 0.02);
        break;
    }
  }
  if (input.spread == Input::Spread::distinct) std::ranges::shuffle(out.values, rng);
  return out;
}

Tensor tensor_of(const Array<double>& v, DType dtype) { return from_values(v.values, v.shape, dtype); }
Tensor random(const Input& input, std::uint64_t seed, DType dtype) { return tensor_of(draw(input, seed), dtype); }
Tensor values(std::initializer_list<double> v, DType dtype) {
  return from_values(std::vector<double>(v), {static_cast<Index>(v.size())}, dtype);
}
Tensor ids(std::initializer_list<Index> v, DType dtype) {
  return from_values(std::vector<Index>(v), {static_cast<Index>(v.size())}, dtype);
}

Played play(const Composite& op, std::span<const Tensor> inputs, const Tensor& dy) {
  Tape tape;
  for (const Tensor& x : inputs) tape.watch(x);
  Played out;
  out.y = op(inputs);
  const Gradients g = tape.backward(out.y, dy);
  for (const Tensor& x : inputs) out.dx.push_back(g[x]);
  return out;
}

}  // namespace hilt::judge
