// The judges of an op: value, gradients, layouts, fewer bits, memory, threads. Each runs every
// case.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <map>
#include <new>
#include <numeric>
#include <random>
#include "core/parallel.h"
#include "tests/support/op_cases.h"
#include "tests/support/scale.h"

// ---- fresh memory -------------------------------------------------------------------------------
// This binary's aligned operator new, from which tensors come, fills what it hands out with a byte
// of the judges' choice.
namespace {
constexpr int kAsItComes = -1;
int fresh_memory = kAsItComes;
}  // namespace

void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  void* const p = std::aligned_alloc(align, (bytes + align - 1) / align * align);
  if (!p) throw std::bad_alloc();
  if (fresh_memory != kAsItComes) std::memset(p, fresh_memory, bytes);
  return p;
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes, alignment);
  } catch (const std::bad_alloc&) { return nullptr; }
}
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace hilt::judge {
namespace {

/// While one lives, nothing is reused and all memory begins as `with`.
class Fresh {
 public:
  explicit Fresh(int with) {
    set_pool_limit(0);
    fresh_memory = with;
  }
  ~Fresh() {
    fresh_memory = kAsItComes;
    set_pool_limit(std::size_t{4} << 30);
  }
  Fresh(const Fresh&) = delete;
};

constexpr double kStep = 1e-6;                        // of a central difference
constexpr double kAbsolute = 1e-7, kRelative = 1e-6;  // what it may be off by
constexpr double kDual = 1e-11;                       // what dual numbers may be off by, relative to max(1, |value|)
constexpr long kFewestCases = 2500;                   // gradient cases of a whole run
constexpr std::size_t kLine = 64;                     // tensors get whole ones: what one leaves free can be looked at
constexpr int kPoison = 0xff;                         // all bits set: a NaN of every float type

std::uint64_t seed_of(std::string_view name) {
  std::uint64_t h = 14695981039346656037u;  // FNV-1a: the same on every machine
  for (char c : name) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}

// ---- drawing a case -----------------------------------------------------------------------------
Array<double> rounded(const Array<double>& x, DType dtype) {
  Array<double> y = x;
  if (x.size() > 0) y.values = tensor_of(x, dtype).to_vector();
  return y;
}

/// Equal along the axis that the layout repeats.
Array<double> with_repeats(const Array<double>& x, Layout layout) {
  const int axis = repeated_axis(layout, x.shape);
  return axis < 0 ? x : naive::gather(x, axis, std::vector<Index>(static_cast<std::size_t>(x.shape[axis]), 0));
}

/// Inputs as numbers of another kind. They are exact: nothing charges them for rounding.
void lift(double from, double& to) { to = from; }
void lift(double from, float& to) { to = static_cast<float>(from); }
void lift(double from, Bounded& to) { to = {from, 0, std::abs(from)}; }
template <class S> void lift(double from, Dual<S>& to) { lift(from, to.x); }
template <class T> Arrays<T> lifted(const Arrays<double>& in) {
  Arrays<T> out;
  for (const Array<double>& x : in) {
    Array<T>& to = out.emplace_back(x.shape);
    for (Index i = 0; i < x.size(); ++i) lift(x[i], to[i]);
  }
  return out;
}

/// How every input and the incoming gradient lie in memory.
struct Setting {
  std::vector<Layout> inputs;
  Layout dy = Layout::contiguous;
  friend bool operator==(const Setting&, const Setting&) = default;
};
std::string describe(const Setting& s) {
  std::string out;
  for (Layout l : s.inputs) out += text(out.empty() ? " (" : ", ", name_of(l));
  return s.dy == Layout::contiguous ? out + ")" : text(out, "; dy ", name_of(s.dy), ")");
}

/// A case with numbers: inputs and a cotangent.
class Drawn {
 public:
  explicit Drawn(const OpCase& c, DType dtype = DType::f64) : label_(c.label()), ties_(c.traits.ties), case_(c) {
    for (const Input& in : c.inputs) inputs_.push_back(rounded(draw(in, seed_of(label_) + inputs_.size()), dtype));
    dy_ = rounded(draw(between(-1, 1, c.reference(inputs_).shape), seed_of(label_) + inputs_.size()), dtype);
  }

  Arrays<double> inputs(const Setting& s) const {
    Arrays<double> out;
    for (std::size_t k = 0; k < inputs_.size(); ++k) out.push_back(with_repeats(inputs_[k], s.inputs[k]));
    return out;
  }
  Array<double> dy(const Setting& s) const { return with_repeats(dy_, s.dy); }
  DType of_result(DType of_inputs) const { return case_.result(of_inputs); }

  Setting plain() const { return {std::vector<Layout>(inputs_.size(), Layout::contiguous)}; }
  Setting mixture(std::uint64_t seed) const {
    std::mt19937_64 rng(seed + seed_of(label_));
    const auto pick = [&](const std::vector<Layout>& from) { return from[rng() % from.size()]; };
    Setting s{{}, pick(layouts_of(dy_.shape))};
    for (const Array<double>& x : inputs_) s.inputs.push_back(pick(layouts(x.shape)));
    return s;
  }
  /// Everything as it comes; each input, then the incoming gradient, in every layout; two mixtures.
  std::vector<Setting> settings() const {
    std::vector<Setting> out{plain()};
    for (std::size_t k = 0; k < inputs_.size(); ++k)
      for (Layout layout : layouts(inputs_[k].shape)) {
        if (layout == Layout::contiguous) continue;
        out.push_back(plain());
        out.back().inputs[k] = layout;
      }
    for (Layout layout : layouts_of(dy_.shape)) {
      if (layout == Layout::contiguous) continue;
      out.push_back(plain());
      out.back().dy = layout;
    }
    for (std::uint64_t seed : {1, 2})
      if (const Setting s = mixture(seed); std::ranges::find(out, s) == out.end()) out.push_back(s);
    return out;
  }

 private:
  std::vector<Layout> layouts(const Shape& shape) const {
    std::vector<Layout> out = layouts_of(shape);
    if (ties_) std::erase_if(out, [&](Layout l) { return repeated_axis(l, shape) >= 0; });
    return out;
  }

  std::string label_;
  bool ties_;
  OpCase case_;
  Arrays<double> inputs_;
  Array<double> dy_;
};

/// A setting in memory.
struct Scene {
  Arrays<double> numbers;
  Array<double> dy_numbers;
  std::vector<Laid> laid;
  Laid dy;

  Scene(const Drawn& drawn, const Setting& s, DType dtype)
      : numbers(drawn.inputs(s)), dy_numbers(drawn.dy(s)), dy(dy_numbers, s.dy, drawn.of_result(dtype)) {
    for (std::size_t k = 0; k < numbers.size(); ++k) laid.emplace_back(numbers[k], s.inputs[k], dtype);
  }
  std::vector<Tensor> inputs() const {
    std::vector<Tensor> out;
    for (const Laid& l : laid) out.push_back(l.tensor());
    return out;
  }
  std::string touched() const {
    for (std::size_t k = 0; k < laid.size(); ++k)
      if (!laid[k].untouched()) return text(": input ", k, ", a gap in it or its guard zone was written to");
    return dy.untouched() ? "" : ": the incoming gradient, a gap in it or its guard zone was written to";
  }
};

// ---- witnesses of a gradient --------------------------------------------------------------------
/// The derivative of every output along every element of every input: [input][element * outputs +
/// output].
using Jacobian = std::vector<std::vector<double>>;
Jacobian jacobian(const Reference& f, const Arrays<double>& inputs) {
  Jacobian out;
  auto in = lifted<Dual<double>>(inputs);
  for (auto& x : in) {
    std::vector<double>& columns = out.emplace_back();
    for (auto& element : x.values) {
      element.dx = 1;
      for (const Dual<double>& y : f(in).values) columns.push_back(y.dx);
      element.dx = 0;
    }
  }
  return out;
}
/// For each of n elements the slope of sum(output dy).
std::vector<double> contracted(const std::vector<double>& columns, const Array<double>& dy, Index n) {
  std::vector<double> out;
  for (auto column = columns.begin(); static_cast<Index>(out.size()) < n; column += dy.size())
    out.push_back(std::inner_product(dy.values.begin(), dy.values.end(), column, 0.0));
  return out;
}

/// d/dx_i sum(op(inputs) dy); x lies under at least one of the inputs.
std::vector<double> differences(const Composite& op, std::span<const Tensor> inputs, Laid& x, const Array<double>& dy) {
  std::vector<double> out;
  for (Index i = 0; i < x.tensor().numel(); ++i) {
    double& at = x.at(i);
    const double before = at;
    at = before + kStep;
    const double high = at;
    const std::vector<double> above = op(inputs).to_vector();
    at = before - kStep;
    const double low = at;
    const std::vector<double> below = op(inputs).to_vector();
    at = before;
    double rise = 0;  // term by term: outputs that did not move cancel exactly
    for (std::size_t j = 0; j < above.size(); ++j) rise += dy.values[j] * (above[j] - below[j]);
    out.push_back(rise / (high - low));
  }
  return out;
}

/// One gradient against both witnesses; counts one case.
std::string compare_gradient(const std::string& where, const std::vector<double>& analytic,
                             const std::vector<double>& numeric, const std::vector<double>& exact, Tally& tally) {
  tally.cases += !analytic.empty();
  tally.derivatives += static_cast<long>(analytic.size());
  for (std::size_t i = 0; i < analytic.size(); ++i) {
    const double ratio = std::abs(analytic[i] - numeric[i]) / (kAbsolute + kRelative * std::abs(numeric[i]));
    const double dual = std::abs(analytic[i] - exact[i]) / std::max(1.0, std::abs(exact[i]));
    if (!(ratio <= tally.worst_ratio)) tally.worst_ratio = ratio, tally.ratio_at = where;
    if (!(dual <= tally.worst_dual)) tally.worst_dual = dual, tally.dual_at = where;
    if (!(ratio <= 1) || !(dual <= kDual))
      return text(where, ": element ", i, " is ", analytic[i], "; central differences give ", numeric[i],
                  ", dual numbers ", exact[i]);
  }
  return "";
}

// ---- rounding -----------------------------------------------------------------------------------
constexpr double kSaved =
    3;  // times that a rounded intermediate may move a term of a gradient, as y does in y^3 of rsqrt

/// Unit roundoffs of the arithmetic done for a type and of storing in it, and half of its smallest
/// number.
struct Rounding {
  double compute, store, tiny;
};
Rounding rounding_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return {0x1p-53, 0x1p-53, 0};
    case DType::f32: return {0x1p-24, 0x1p-24, 0x1p-150};
    case DType::bf16: return {0x1p-24, 0x1p-8, 0x1p-134};
    default: return {0x1p-24, 0x1p-11, 0x1p-25};
  }
}

/// got against the formula's exact value and bound, and against what the naive formula makes of it
/// in the same type. `saved` rounded intermediates may have moved each term. In f64 there is
/// nothing more exact to call a formula naive by.
std::string compare_rounded(const std::string& where, const std::vector<double>& got, const std::vector<Bounded>& bound,
                            const std::vector<double>& naive, const Rounding& u, double saved) {
  constexpr std::size_t kFewest = 8;  // a mean square of fewer says little
  if (got.size() != bound.size()) return text(where, ": ", got.size(), " elements, expected ", bound.size());
  double squares = 0, naive_squares = 0, floor = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const Bounded& b = bound[i];
    const double allowed = 2 * u.compute * b.error + u.store * (std::abs(b.x) + saved * b.size) + (1 + saved) * u.tiny;
    const double error = std::abs(got[i] - b.x);
    if (!(error <= allowed))
      return text(where, ": element ", i, " is ", got[i], ", exact ", b.x, ": off by ", error, ", allowed ", allowed);
    if (naive.empty()) continue;
    squares += error * error;
    naive_squares += (naive[i] - b.x) * (naive[i] - b.x);
    floor += b.size * b.size;
  }
  const double error = std::sqrt(squares), twice = 2 * std::sqrt(naive_squares),
               rounding = (1 + saved) * u.store * std::sqrt(floor);
  if (got.size() >= kFewest && !(error <= twice + rounding))
    return text(where, ": root of squared errors ", error, "; twice that of the naive formula is ", twice,
                ", the floor ", rounding);
  return "";
}

std::string compare_output(const OpCase& c, const std::string& where, const Tensor& y, const Arrays<double>& inputs) {
  const Array<Bounded> exact = c.reference(lifted<Bounded>(inputs));
  if (y.shape() != exact.shape) return text(where, ": shape ", y.shape(), ", expected ", exact.shape);
  Rounding u = rounding_of(y.dtype());
  if (y.dtype() == DType::f64) {  // the judge rounds as the op does
    u.compute *= 1.5;
    return compare_rounded(where, y.to_vector(), exact.values, {}, u, 0);
  }
  Array<double> naive(exact.shape);
  const Array<float> in_float = c.reference(lifted<float>(inputs));
  for (Index i = 0; i < naive.size(); ++i) naive[i] = static_cast<double>(in_float[i]);
  return compare_rounded(where, y.to_vector(), exact.values, rounded(naive, y.dtype()).values, u, 0);
}

/// Sum over outputs of dy times the slope along one element, in the arithmetic of S.
template <class S>
std::vector<S> slopes(const Reference& f, Arrays<Dual<S>>& in, std::size_t k, const Array<double>& dy) {
  std::vector<S> out;
  for (Dual<S>& element : in[k].values) {
    lift(1, element.dx);
    S total(0);
    const Array<Dual<S>> y = f(in);
    for (Index j = 0; j < y.size(); ++j) {
      S weight(0);
      lift(dy[j], weight);
      total += weight * y[j].dx;
    }
    out.push_back(total);
    element.dx = S(0);
  }
  return out;
}

// ---- bits ---------------------------------------------------------------------------------------
bool same_bits(const Played& a, const Played& b) {
  if (bits(a.y) != bits(b.y)) return false;
  for (std::size_t k = 0; k < a.dx.size(); ++k)
    if (bits(a.dx[k]) != bits(b.dx[k])) return false;
  return true;
}

Tensor row_of(const Tensor& x, Index r) {
  return as_strided(x, x.shape().with(0, 1), x.strides(), x.offset() + r * x.stride(0));
}

std::size_t whole_lines(std::size_t bytes) { return std::max<std::size_t>(1, (bytes + kLine - 1) / kLine) * kLine; }

/// Whether the rest of t's last line is no longer what fresh memory began as.
bool overrun(const Tensor& t) {
  if (t.storage().bytes() != t.bytes()) return false;  // a view
  const std::byte* const begin = t.storage().data();
  return std::any_of(begin + t.bytes(), begin + whole_lines(t.bytes()),
                     [](std::byte b) { return b != std::byte{kPoison}; });
}

}  // namespace

// ---- judges -------------------------------------------------------------------------------------
std::string judge_forward(const OpCase& c) {
  const Drawn drawn(c);
  for (const Setting& s : drawn.settings()) {
    if (s.dy != Layout::contiguous) continue;
    const std::string where = c.label() + describe(s);
    const Scene scene(drawn, s, DType::f64);
    const std::vector<Tensor> in = scene.inputs();
    const Tensor y = c.op(in);
    if (y.dtype() != DType::f64) return text(where, ": type ", y.dtype(), ", expected f64");
    for (std::size_t k = 0; k < in.size(); ++k)
      if (!c.traits.view && y.storage() == in[k].storage())
        return text(where, ": the output shares the storage of input ", k);
    if (std::string wrong = compare_output(c, where, y, scene.numbers); !wrong.empty()) return wrong;
    if (std::string wrong = scene.touched(); !wrong.empty()) return where + wrong;
  }
  return "";
}

std::string judge_gradients(const OpCase& c, Tally& tally) {
  const Drawn drawn(c);
  std::map<std::vector<int>, Jacobian> jacobians;  // by the axes repeated: layouts that change no number share one
  for (const Setting& s : drawn.settings()) {
    const std::string where = c.label() + describe(s);
    Scene scene(drawn, s, DType::f64);
    std::vector<Tensor> in = scene.inputs();
    const Played played = play(c.op, in, scene.dy.tensor());
    if (std::string wrong = scene.touched(); !wrong.empty()) return where + wrong;
    std::vector<int> key;
    for (std::size_t k = 0; k < in.size(); ++k) key.push_back(repeated_axis(s.inputs[k], in[k].shape()));
    const auto [exact, fresh] = jacobians.try_emplace(key);
    if (fresh) exact->second = jacobian(c.reference, scene.numbers);
    for (std::size_t k = 0; k < in.size(); ++k) {
      // Elements of a repeated axis lie on one number and cannot move alone: differences are taken
      // on a dense copy.
      Laid spread(scene.numbers[k], Layout::contiguous, DType::f64);
      Laid& x = key[k] >= 0 ? spread : scene.laid[k];
      const Tensor original = std::exchange(in[k], x.tensor());
      const std::vector<double> numeric = differences(c.op, in, x, scene.dy_numbers);
      in[k] = original;
      std::string wrong = compare_gradient(text(where, " input ", k), played.dx[k].to_vector(), numeric,
                                           contracted(exact->second[k], scene.dy_numbers, in[k].numel()), tally);
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

std::string judge_aliases(const OpCase& c, Tally& tally) {
  const Drawn drawn(c);
  for (std::size_t i = 0; i < c.inputs.size(); ++i)
    for (std::size_t j = i + 1; j < c.inputs.size(); ++j) {
      if (c.inputs[i].shape != c.inputs[j].shape || c.traits.ties) continue;
      for (Layout layout : layouts_of(c.inputs[i].shape)) {
        if (repeated_axis(layout, c.inputs[i].shape) >= 0) continue;
        Setting s = drawn.plain();
        s.inputs[i] = s.inputs[j] = layout;
        Scene scene(drawn, s, DType::f64);
        const std::string where = text(c.label(), describe(s), " input ", i, " also as ", j);
        std::vector<Tensor> in = scene.inputs();
        scene.numbers[j] = scene.numbers[i];
        in[j] = in[i];
        if (std::string wrong = compare_output(c, where, c.op(in), scene.numbers); !wrong.empty()) return wrong;
        const Played played = play(c.op, in, scene.dy.tensor());
        if (std::string wrong = scene.touched(); !wrong.empty()) return where + wrong;
        const Jacobian columns = jacobian(c.reference, scene.numbers);
        std::vector<double> exact = contracted(columns[i], scene.dy_numbers, in[i].numel());
        std::ranges::transform(exact, contracted(columns[j], scene.dy_numbers, in[j].numel()), exact.begin(),
                               std::plus<>());
        const std::vector<double> numeric = differences(c.op, in, scene.laid[i], scene.dy_numbers);
        std::string wrong = compare_gradient(where, played.dx[i].to_vector(), numeric, exact, tally);
        if (!wrong.empty()) return wrong;
      }
    }
  return "";
}

std::string judge_watching(const OpCase& c) {
  const Drawn drawn(c);
  for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Scene scene(drawn, drawn.mixture(3), dtype);
    const std::vector<Tensor> in = scene.inputs();
    const Played all = play(c.op, in, scene.dy.tensor());
    if (bits(c.op(in)) != bits(all.y)) return text(c.label(), ' ', dtype, ": the output differs when a tape listens");
    for (std::size_t k = 0; k < in.size(); ++k) {
      Tape tape;
      tape.watch(in[k]);
      const Tensor y = c.op(in);
      const Gradients g = tape.backward(y, scene.dy.tensor());
      const std::string where = text(c.label(), ' ', dtype, ": watching input ", k, " alone changes ");
      if (bits(y) != bits(all.y)) return where + "the output";
      if (bits(g[in[k]]) != bits(all.dx[k])) return where + "its gradient";
    }
  }
  return "";
}

std::string judge_precision(const OpCase& c, DType dtype) {
  const Drawn drawn(c, dtype);
  const Rounding u = rounding_of(dtype);
  for (const Setting& s : {drawn.plain(), drawn.mixture(4)}) {
    const std::string where = text(c.label(), ' ', dtype, describe(s));
    const Scene scene(drawn, s, dtype);
    const Played played = play(c.op, scene.inputs(), scene.dy.tensor());
    if (played.y.dtype() != c.result(dtype)) return text(where, ": type ", played.y.dtype());
    if (std::string wrong = compare_output(c, where, played.y, scene.numbers); !wrong.empty()) return wrong;
    auto bounded = lifted<Dual<Bounded>>(scene.numbers);
    auto in_float = lifted<Dual<float>>(scene.numbers);
    for (std::size_t k = 0; k < scene.laid.size(); ++k) {
      Array<double> naive(scene.numbers[k].shape);
      naive.values.clear();
      for (float slope : slopes(c.reference, in_float, k, scene.dy_numbers))
        naive.values.push_back(static_cast<double>(slope));
      std::string wrong =
          compare_rounded(text(where, " gradient of input ", k), played.dx[k].to_vector(),
                          slopes(c.reference, bounded, k, scene.dy_numbers), rounded(naive, dtype).values, u, kSaved);
      if (!wrong.empty()) return wrong;
    }
    if (std::string wrong = scene.touched(); !wrong.empty()) return where + wrong;
  }
  return "";
}

std::string judge_memory(const OpCase& c) {
  const Drawn drawn(c);
  for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Scene scene(drawn, drawn.plain(), dtype);
    const std::vector<Tensor> in = scene.inputs();
    std::vector<Played> played;
    for (int fill : {0, kPoison}) {
      const Fresh memory(fill);
      played.push_back(play(c.op, in, scene.dy.tensor()));
    }
    const std::string where = text(c.label(), ' ', dtype);
    if (!same_bits(played[0], played[1])) return where + ": the result depends on what memory held before";
    if (!c.traits.view && overrun(played[1].y)) return where + ": something was written beyond the output";
    for (std::size_t k = 0; k < in.size(); ++k)
      if (played[1].dx[k].storage() != scene.dy.tensor().storage() && overrun(played[1].dx[k]))
        return text(where, ": something was written beyond the gradient of input ", k);
  }
  return "";
}

std::string judge_rows(const OpCase& c) {
  if (!c.traits.rows) return "";
  const Drawn drawn(c, DType::f32);
  const Scene scene(drawn, drawn.plain(), DType::f32);
  const std::vector<Tensor> in = scene.inputs();
  const Index rows = in[0].dim(0);
  const Played whole = play(c.op, in, scene.dy.tensor());
  for (Index r : {Index{0}, rows / 2, rows - 1}) {
    const auto same = [&](const Played& other, Index at) {
      return bits(row_of(other.y, at)) == bits(row_of(whole.y, r)) &&
             bits(row_of(other.dx[0], at)) == bits(row_of(whole.dx[0], r));
    };
    const auto only_row = [&](const Tensor& x) {
      Tensor out = full(x.shape(), std::numeric_limits<double>::quiet_NaN(), x.dtype());
      Tensor row = row_of(out, r);
      copy(row, row_of(x, r));
      return out;
    };
    std::vector<Tensor> others_nan = in, alone = in;
    others_nan[0] = only_row(in[0]);
    if (!same(play(c.op, others_nan, only_row(scene.dy.tensor())), r))
      return text(c.label(), ": row ", r, " depends on what the other rows hold");
    for (Tensor& x : alone)
      if (x.rank() == in[0].rank() && x.dim(0) == rows) x = row_of(x, r);
    if (!same(play(c.op, alone, row_of(scene.dy.tensor(), r)), 0))
      return text(c.label(), ": row ", r, " differs when it is the only one");
  }
  return "";
}

std::string judge_large(const OpCase& c, int repeats) {
  const Drawn drawn(c);
  const int threads_before = thread_count();
  {
    const Scene scene(drawn, drawn.plain(), DType::f64);
    const Played played = play(c.op, scene.inputs(), scene.dy.tensor());
    if (std::string wrong = compare_output(c, c.label(), played.y, scene.numbers); !wrong.empty()) return wrong;
    auto along = lifted<Dual<double>>(scene.numbers);
    double analytic = 0, exact = 0, size = 0;
    for (std::size_t k = 0; k < along.size(); ++k) {
      const Array<double> direction = draw(between(-1, 1, along[k].shape), 7 + k);
      const std::vector<double> dx = played.dx[k].to_vector();
      for (Index i = 0; i < direction.size(); ++i) {
        along[k][i].dx = direction[i];
        analytic += direction[i] * dx[static_cast<std::size_t>(i)];
        size += std::abs(direction[i] * dx[static_cast<std::size_t>(i)]);
      }
    }
    const Array<Dual<double>> y = c.reference(along);
    for (Index i = 0; i < y.size(); ++i) exact += y[i].dx * scene.dy_numbers[i];
    if (!(std::abs(analytic - exact) <= kDual * std::max(1.0, size)))
      return text(c.label(), ": along a random direction the gradient is ", analytic, ", dual numbers give ", exact);
  }
  std::string wrong;
  for (DType dtype : {DType::f32, DType::bf16}) {
    const Scene scene(drawn, drawn.plain(), dtype);
    set_thread_count(1);
    const Played first = play(c.op, scene.inputs(), scene.dy.tensor());
    for (int threads : {1, 2, 4}) {
      set_thread_count(threads);
      for (int i = 0; i < repeats && wrong.empty(); ++i)
        if (!same_bits(first, play(c.op, scene.inputs(), scene.dy.tensor())))
          wrong = text(c.label(), ' ', dtype, ": other bits with ", threads, " threads, repeat ", i);
    }
  }
  set_thread_count(threads_before);
  return wrong;
}

// ---- the tests ----------------------------------------------------------------------------------
Tally& tally() {
  static Tally t;
  return t;
}

namespace {

template <class Judge> void expect_none_wrong(const Op& op, bool large, Judge judge) {
  for (const OpCase& c : op.cases()) {
    if (c.traits.large != large) continue;
    try {
      const std::string wrong = judge(c);
      if (!wrong.empty()) ADD_FAILURE() << wrong;
    } catch (const std::exception& e) { ADD_FAILURE() << c.label() << " threw: " << e.what(); }
  }
}

TEST_P(OpJudges, Forward) { expect_none_wrong(GetParam(), false, judge_forward); }
TEST_P(OpJudges, Gradients) {
  expect_none_wrong(GetParam(), false, [](const OpCase& c) { return judge_gradients(c, tally()); });
}
TEST_P(OpJudges, SameTensorTwice) {
  expect_none_wrong(GetParam(), false, [](const OpCase& c) { return judge_aliases(c, tally()); });
}
TEST_P(OpJudges, WatchingOneInput) { expect_none_wrong(GetParam(), false, judge_watching); }
TEST_P(OpJudges, FewerBits) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    expect_none_wrong(GetParam(), false, [=](const OpCase& c) { return judge_precision(c, dtype); });
}
TEST_P(OpJudges, Memory) { expect_none_wrong(GetParam(), false, judge_memory); }
TEST_P(OpJudges, Rows) {
  for (bool large : {false, true}) expect_none_wrong(GetParam(), large, judge_rows);
}
TEST_P(OpJudges, Large) {
  expect_none_wrong(GetParam(), true, [](const OpCase& c) { return judge_large(c, scaled(20, 2)); });
}

/// Says at the end what the gradient checks came to.
class Summary : public testing::Environment {
 public:
  void TearDown() override {
    const Tally& t = tally();
    if (t.cases == 0) return;
    std::cout << "gradient checks: " << t.cases << " cases, worst |analytic - numeric| ratio " << t.worst_ratio
              << " at " << t.ratio_at << ", worst dual error " << t.worst_dual << " at " << t.dual_at << std::endl;
    const testing::UnitTest& run = *testing::UnitTest::GetInstance();
    if (run.test_to_run_count() == run.total_test_count()) { EXPECT_GE(t.cases, kFewestCases); }
  }
};
const testing::Environment* const summary = testing::AddGlobalTestEnvironment(new Summary);

}  // namespace
}  // namespace hilt::judge
