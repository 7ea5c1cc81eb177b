#pragma once
#include <gtest/gtest.h>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>
#include "core/tape.h"
#include "tests/support/naive_ops.h"

// One case struct per op, many judges. A case names an op, draws its inputs and knows its formula;
// every judge below then tries what it knows on it. A judge returns what is wrong, in a sentence,
// or nothing; judges_test.cpp shows each of them deliberately wrong ops.

namespace hilt::judge {

/// A formula of naive_ops.h, for every scalar.
class Reference {
  template <class T> using Formula = std::function<Array<T>(const Arrays<T>&)>;
  std::tuple<Formula<double>, Formula<float>, Formula<Bounded>, Formula<Dual<double>>, Formula<Dual<float>>,
             Formula<Dual<Bounded>>>
      formulas_;

 public:
  template <class F>
  requires(!std::same_as<F, Reference>) Reference(F f) : formulas_(f, f, f, f, f, f) {}
  template <class T> Array<T> operator()(const Arrays<T>& in) const { return std::get<Formula<T>>(formulas_)(in); }
};

/// A float input, and what its elements are drawn from.
struct Input {
  enum class Spread {
    even,      // uniform on [low, high]
    lattice,   // low + 1/4 k within 1/50: stays away from kinks between, and from another lattice's points
    distinct,  // around 0, all 3/50 apart or more, in random order
  };
  Shape shape;
  double low = -2, high = 2;
  Spread spread = Spread::even;
};
inline Input real(const Shape& shape) { return {shape}; }
inline Input between(double low, double high, const Shape& shape) { return {shape, low, high}; }
inline Input lattice(double phase, const Shape& shape) { return {shape, phase, 0, Input::Spread::lattice}; }
inline Input distinct(const Shape& shape) { return {shape, 0, 0, Input::Spread::distinct}; }

/// What a case may ask of the judges.
struct Traits {
  bool view = false;   // the output may share an input's storage
  bool ties = false;   // equal elements change the gradient: never repeat one
  bool rows = false;   // row r of the output is made of row r of input 0 (and inputs that all rows share)
  bool wide = false;   // what comes of 16-bit inputs is f32
  bool large = false;  // only for the judge of sizes that take several threads
  int steps = 1;       // of an op that rounds more than once on its way: on a GPU each may err as a whole op may
};

struct OpCase {
  std::string name;  // as the call reads; label() adds the shapes
  std::vector<Input> inputs;
  Composite op;
  Reference reference;
  Traits traits = {};

  std::string label() const;
  DType result(DType dtype) const { return traits.wide && size_of(dtype) == 2 ? DType::f32 : dtype; }
};

/// Every case of one op.
struct Op {
  const char* name;
  std::vector<OpCase> (*cases)();
};

// ---- layouts ------------------------------------------------------------------------------------
enum class Layout { contiguous, offset, transposed, reversed, strided, strided_outer, expanded_first, expanded_last };
std::string_view name_of(Layout layout);
/// Those that a shape has and that differ from each other in it.
std::vector<Layout> layouts_of(const Shape& shape);
/// The axis that a layout repeats by a stride of zero, or -1. Elements along it are equal.
int repeated_axis(Layout layout, const Shape& shape);

/// A tensor in memory of ours: guard zones around it and gaps within it are NaN, and its start is
/// aligned no better than an element.
class Laid {
 public:
  Laid(const Array<double>& values, Layout layout, DType dtype);
  Laid(const Laid&) = delete;
  Laid(Laid&&) = default;
  const Tensor& tensor() const { return tensor_; }
  /// Element n in row-major order, of a tensor of f64.
  double& at(Index n);
  /// Whether every byte, guards and gaps included, is what it was.
  bool untouched() const { return block_ == before_; }

 private:
  std::vector<std::byte> block_, before_;
  Tensor tensor_;
};

// ---- judges -------------------------------------------------------------------------------------
/// What the gradient checks of a run came to. A case is an op x shapes x layouts x input, with one
/// derivative at least.
struct Tally {
  long cases = 0, derivatives = 0;
  double worst_ratio = 0, worst_dual = 0;  // of |analytic - numeric| to what is allowed; of |analytic - dual|, relative
  std::string ratio_at, dual_at;
};
Tally& tally();  // of this run; printed when it ends

/// f64, every layout of every input: the value; a fresh output; inputs, gaps and guard zones
/// unchanged.
std::string judge_forward(const OpCase& c);
/// f64, every layout of every input and of the incoming gradient: each gradient against central
/// differences and against dual numbers, both under a random cotangent.
std::string judge_gradients(const OpCase& c, Tally& tally);
/// The same with one tensor given for every pair of inputs of one shape.
std::string judge_aliases(const OpCase& c, Tally& tally);
/// Watching one input alone gives the bits that watching all gives, and no tape gives the same
/// output.
std::string judge_watching(const OpCase& c);
/// Output and gradients in a type of fewer bits. Each element stays within twice the bound that
/// rounding has on the naive formula computed in that type, plus its storage rounding; all of them,
/// in the mean square, within twice the error that formula really has.
std::string judge_precision(const OpCase& c, DType dtype);
/// Nothing is read before it is written, all of the output is, and nothing beyond it.
std::string judge_memory(const OpCase& c);
/// What other rows hold, NaN included, changes no bit of a row; nor does the number of rows.
std::string judge_rows(const OpCase& c);
/// Sizes that take several pieces: value, a directional derivative, and the same bits for 1, 2 and
/// 4 threads, time and again.
std::string judge_large(const OpCase& c, int repeats);

/// Runs every judge on every case of an op: INSTANTIATE_TEST_SUITE_P(Softmax, OpJudges,
/// testing::Values(..), op_name).
class OpJudges : public testing::TestWithParam<Op> {};
inline std::string op_name(const testing::TestParamInfo<Op>& info) { return info.param.name; }
inline void PrintTo(const Op& op, std::ostream* os) { *os << op.name; }

// ---- tools for tests ----------------------------------------------------------------------------
/// The parts one after the other, numbers with all their digits.
template <class... Parts> std::string text(const Parts&... parts) {
  std::ostringstream os;
  os.precision(17);
  (os << ... << parts);
  return std::move(os).str();
}
/// Whether f throws Error(code) with a message that opens with the op's name and holds every part.
testing::AssertionResult refuses(const std::function<void()>& f, std::string_view op,
                                 std::initializer_list<std::string_view> parts, Code code = Code::usage);
/// The elements as they are stored, in row-major order.
std::vector<std::byte> bits(const Tensor& x);
/// Seeded values of an input; the same as a dense tensor, and values as a tensor.
Array<double> draw(const Input& input, std::uint64_t seed);
Tensor random(const Input& input, std::uint64_t seed, DType dtype = DType::f64);
Tensor tensor_of(const Array<double>& values, DType dtype = DType::f64);
Tensor values(std::initializer_list<double> v, DType dtype = DType::f64);  // rank 1
Tensor ids(std::initializer_list<Index> v, DType dtype = DType::i64);      // rank 1

/// Output and gradients of all inputs for the incoming gradient dy.
struct Played {
  Tensor y;
  std::vector<Tensor> dx;
};
Played play(const Composite& op, std::span<const Tensor> inputs, const Tensor& dy);

}  // namespace hilt::judge
