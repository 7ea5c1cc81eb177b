// Random programs: a few leaves, a handful of ops on them and on each other's results, all results
// that nothing used joined into one output. Its gradient along a random direction against dual
// numbers run through the naive formulas. HILT_FUZZ_SEED=n runs program n alone and prints it.
#include <cstdlib>
#include <optional>
#include <random>
#include "ops/ops.h"
#include "tests/support/op_cases.h"
#include "tests/support/scale.h"

namespace hilt {
namespace {
using namespace judge;
using D = Dual<double>;
using Numbers = Array<D>;

constexpr double kTolerance = 1e-9;               // relative to the sum of the absolute values of all terms
constexpr double kLargest = 30, kSteepest = 1e3;  // a value or slope beyond takes its op back: digits would go
constexpr double kFromKink = 1e-6;
constexpr Index kMostElements = 128;

struct Value {
  Tensor t;
  Numbers n;
  bool used = false;
};
struct Unary {
  const char* name;
  double low, high;  // where it is smooth and tame
  std::vector<double> kinks;
  Composite op;
  std::function<D(const D&)> scalar;
};
struct Binary {
  const char* name;
  double low_a, low_b;  // smallest |b|, smallest a
  Composite op;
  std::function<D(const D&, const D&)> scalar;
};

std::vector<Unary> unary_ops() {
  const double far = kLargest;
  return {{"neg", -far, far, {}, [](auto in) { return neg(in[0]); }, [](const D& x) { return -x; }},
          {"exp", -far, 3, {}, [](auto in) { return exp(in[0]); }, [](const D& x) { return exp(x); }},
          {"log", 0.1, far, {}, [](auto in) { return log(in[0]); }, [](const D& x) { return log(x); }},
          {"sqrt", 0.1, far, {}, [](auto in) { return sqrt(in[0]); }, [](const D& x) { return sqrt(x); }},
          {"rsqrt", 0.1, far, {}, [](auto in) { return rsqrt(in[0]); }, [](const D& x) { return D(1) / sqrt(x); }},
          {"tanh", -far, far, {}, [](auto in) { return tanh(in[0]); }, [](const D& x) { return tanh(x); }},
          {"sigmoid", -far, far, {}, [](auto in) { return sigmoid(in[0]); }, [](const D& x) { return sigmoid(x); }},
          {"relu", -far, far, {0}, [](auto in) { return relu(in[0]); }, [](const D& x) { return x > D(0) ? x : D(0); }},
          {"gelu", -far, far, {}, [](auto in) { return gelu(in[0]); }, [](const D& x) { return naive::gelu(x); }},
          {"gelu_tanh",
           -far,
           far,
           {},
           [](auto in) { return gelu_tanh(in[0]); },
           [](const D& x) { return naive::gelu_tanh(x); }},
          {"silu", -far, far, {}, [](auto in) { return silu(in[0]); }, [](const D& x) { return x * sigmoid(x); }},
          {"square", -5, 5, {}, [](auto in) { return square(in[0]); }, [](const D& x) { return x * x; }},
          {"abs", -far, far, {0}, [](auto in) { return abs(in[0]); }, [](const D& x) { return abs(x); }},
          {"clamp",
           -far,
           far,
           {-0.5, 0.8},
           [](auto in) { return clamp(in[0], -0.5, 0.8); },
           [](const D& x) { return x > D(0.8)    ? D(0.8)
                                   : D(-0.5) > x ? D(-0.5)
                                                 : x; }},
          {"add 0.3", -far, far, {}, [](auto in) { return add(in[0], 0.3); }, [](const D& x) { return x + D(0.3); }},
          {"mul -1.7", -far, far, {}, [](auto in) { return mul(in[0], -1.7); }, [](const D& x) { return x * D(-1.7); }},
          {"pow 3", -3, 3, {}, [](auto in) { return pow(in[0], 3); }, [](const D& x) { return x * x * x; }},
          {"pow 1.3", 0.1, far, {}, [](auto in) { return pow(in[0], 1.3); }, [](const D& x) { return pow(x, D(1.3)); }},
          {"detach", -far, far, {}, [](auto in) { return detach(in[0]); }, [](const D& x) { return D(x.x); }},
          {"contiguous", -far, far, {}, [](auto in) { return contiguous(in[0]); }, [](const D& x) { return x; }},
          {"x tanh x",
           -far,
           far,
           {},
           [](auto in) { return mul(in[0], tanh(in[0])); },
           [](const D& x) { return x * tanh(x); }},
          {"checkpoint x tanh x",
           -far,
           far,
           {},
           [](auto in) { return checkpoint([](auto x) { return mul(x[0], tanh(x[0])); }, in); },
           [](const D& x) { return x * tanh(x); }}};
}
const std::vector<Binary>& binary_ops() {
  constexpr double kAny = -1e9;
  static const std::vector<Binary> ops{
      {"add", kAny, 0, [](auto in) { return add(in[0], in[1]); }, [](const D& a, const D& b) { return a + b; }},
      {"sub", kAny, 0, [](auto in) { return sub(in[0], in[1]); }, [](const D& a, const D& b) { return a - b; }},
      {"mul", kAny, 0, [](auto in) { return mul(in[0], in[1]); }, [](const D& a, const D& b) { return a * b; }},
      {"div", kAny, 0.2, [](auto in) { return div(in[0], in[1]); }, [](const D& a, const D& b) { return a / b; }},
      {"maximum", kAny, 0, [](auto in) { return maximum(in[0], in[1]); },
       [](const D& a, const D& b) { return a > b ? a : b; }},
      {"pow", 0.2, 0, [](auto in) { return pow(in[0], in[1]); }, [](const D& a, const D& b) { return pow(a, b); }}};
  return ops;
}

/// One program, written as it runs.
class Program {
 public:
  Program(std::uint64_t seed, const std::vector<Unary>& unary, int most_steps) : rng_(seed), unary_(unary) {
    const int leaves = pick(1, 3), steps = std::min(pick(2, 9), most_steps);
    for (int i = 0; i < leaves; ++i) leaf(shape());
    for (int done = 0, tries = 0; done < steps && tries < 100; ++tries) done += step();
  }

  /// What is wrong with the gradient, or nothing.
  std::string verdict() {
    std::vector<Tensor> ends;
    Arrays<D> numbers;
    for (Value& v : values_) {
      if (v.used || v.n.size() == 0) continue;
      ends.push_back(reshape(v.t, {v.t.numel()}));
      numbers.push_back(naive::reshape(v.n, {v.n.size()}));
    }
    if (ends.empty()) return "";
    const Tensor y = cat(ends, 0);
    const Numbers n = naive::cat(numbers, 0);
    const Array<double> dy = draw(between(-1, 1, n.shape), rng_());
    double exact = 0, analytic = 0, size = 1;
    const std::vector<double> got = y.to_vector();
    for (Index i = 0; i < n.size(); ++i) {
      if (!(std::abs(got[static_cast<std::size_t>(i)] - n[i].x) <= kTolerance * std::max(1.0, std::abs(n[i].x))))
        return text("output ", i, " is ", got[static_cast<std::size_t>(i)], ", expected ", n[i].x);
      exact += dy[i] * n[i].dx;
      size += std::abs(dy[i] * n[i].dx);
    }
    if (!tape_.knows(y)) return exact == 0 ? "" : text("the tape lost the output; the slope is ", exact);
    const Gradients g = tape_.backward(y, tensor_of(dy));
    for (const Leaf& leaf : leaves_) {
      if (!g.has(leaf.laid->tensor())) continue;  // then it must not have mattered
      const std::vector<double> dx = g[leaf.laid->tensor()].to_vector();
      for (std::size_t i = 0; i < dx.size(); ++i) {
        analytic += dx[i] * leaf.direction.values[i];
        size += std::abs(dx[i] * leaf.direction.values[i]);
      }
      if (!leaf.laid->untouched()) return "a leaf, or the memory around it, was written to";
    }
    worst_ = std::abs(analytic - exact) / size;
    return worst_ <= kTolerance
               ? ""
               : text("the gradient along a random direction is ", analytic, ", dual numbers give ", exact);
  }
  double worst() const { return worst_; }
  const std::string& listing() const { return listing_; }

 private:
  struct Leaf {
    std::unique_ptr<Laid> laid;
    Array<double> direction;
  };

  int pick(int low, int high) { return low + static_cast<int>(rng_() % static_cast<std::uint64_t>(high - low + 1)); }
  bool chance(int percent) { return pick(1, 100) <= percent; }
  Shape shape() {
    Shape s;
    for (int rank = pick(0, 4); rank > 0 && s.numel() <= 16; --rank) s.push_back(chance(3) ? 0 : pick(1, 4));
    return s;
  }

  std::size_t leaf(const Shape& s) {
    Array<double> v = draw(chance(50) ? between(0.3, 1.8, s) : between(-1.5, 1.5, s), rng_());
    const std::vector<Layout> layouts = layouts_of(s);
    const Layout layout = layouts[rng_() % layouts.size()];
    if (const int axis = repeated_axis(layout, s); axis >= 0)
      v = naive::gather(v, axis, std::vector<Index>(static_cast<std::size_t>(s[axis]), 0));
    Leaf& made =
        leaves_.emplace_back(Leaf{std::make_unique<Laid>(v, layout, DType::f64), draw(between(-1, 1, s), rng_())});
    Value value{made.laid->tensor(), Numbers(s)};
    for (Index i = 0; i < v.size(); ++i) value.n[i] = {v[i], made.direction[i]};
    tape_.watch(value.t);
    values_.push_back(std::move(value));
    listing_ += text("  v", values_.size() - 1, " = leaf ", s, ' ', name_of(layout), '\n');
    return values_.size() - 1;
  }

  /// Something made lately, more often than not.
  std::size_t any() {
    const int n = static_cast<int>(values_.size());
    return static_cast<std::size_t>(chance(60) ? pick(std::max(0, n - 3), n - 1) : pick(0, n - 1));
  }
  /// A value of that shape, or a new leaf.
  std::size_t of_shape(const Shape& s) {
    for (std::size_t i = values_.size(); i-- > 0;)
      if (values_[i].n.shape == s && chance(70)) return i;
    return leaf(s);
  }
  const Shape& shape_of(std::size_t i) const { return values_[i].n.shape; }

  /// Takes one more op into the program unless its result is too large, too steep, or not a number.
  bool keep(const std::string& name, std::vector<std::size_t> from,
            const std::function<Tensor(std::span<const Tensor>)>& op,
            const std::function<Numbers(const Arrays<D>&)>& formula) {
    Arrays<D> numbers;
    std::vector<Tensor> tensors;
    for (std::size_t i : from) numbers.push_back(values_[i].n), tensors.push_back(values_[i].t);
    Numbers n = formula(numbers);
    if (n.size() > kMostElements) return false;
    for (const D& v : n.values)
      if (!(std::abs(v.x) <= kLargest && std::abs(v.dx) <= kSteepest)) return false;
    listing_ += text("  v", values_.size(), " = ", name, " of");
    for (std::size_t i : from) {
      values_[i].used = true;
      listing_ += text(" v", i);
    }
    values_.push_back({op(tensors), std::move(n)});
    listing_ += text(' ', values_.back().n.shape, '\n');
    return true;
  }

  bool step() {
    switch (pick(0, 11)) {
      case 0:
      case 1:
      case 2: return unary();
      case 3:
      case 4: return binary();
      case 5: return reduction();
      case 6: return rows();
      case 7: return product();
      case 8:
      case 9: return view();
      case 10: return picking();
      default: return mixed();
    }
  }

  bool unary() {
    const Unary& u = unary_[rng_() % unary_.size()];
    const std::size_t a = any();
    for (const D& v : values_[a].n.values) {
      if (v.x < u.low || v.x > u.high) return false;
      for (double kink : u.kinks)
        if (std::abs(v.x - kink) < kFromKink) return false;
    }
    return keep(u.name, {a}, u.op, [&](const Arrays<D>& in) { return naive::map(in[0], u.scalar); });
  }

  bool binary() {
    const Binary& f = binary_ops()[rng_() % binary_ops().size()];
    const std::size_t a = any();
    Shape other = shape_of(a);  // equal, or broadcasting against it
    if (chance(40)) {
      Shape less;
      for (int i = pick(0, other.rank()); i < other.rank(); ++i) less.push_back(chance(30) ? 1 : other[i]);
      other = less;
    }
    const std::size_t b = chance(15) && other == shape_of(a) ? a : of_shape(other);
    for (const D& v : values_[a].n.values)
      if (v.x < f.low_a) return false;
    for (const D& v : values_[b].n.values)
      if (std::abs(v.x) < f.low_b) return false;
    bool tie = false;
    const Numbers gap = naive::zip(values_[a].n, values_[b].n, [](const D& x, const D& y) { return x - y; });
    for (const D& v : gap.values) tie = tie || std::abs(v.x) < kFromKink;
    if (tie && f.name == std::string_view("maximum")) return false;
    const bool turned = chance(50) && f.low_a < 0 && f.low_b == 0;
    return keep(f.name, turned ? std::vector{b, a} : std::vector{a, b}, f.op,
                [&](const Arrays<D>& in) { return naive::zip(in[0], in[1], f.scalar); });
  }

  bool reduction() {
    const std::size_t a = any();
    const Shape& s = shape_of(a);
    if (s.numel() == 0) return false;
    Axes axes;
    for (int i = 0; i < s.rank(); ++i)
      if (chance(50)) axes.push_back(chance(30) ? i - s.rank() : i);
    const bool kept = chance(50);
    switch (pick(0, 2)) {
      case 0:
        return keep(
            "sum", {a}, [=](auto in) { return sum(in[0], axes, kept); },
            [=](const Arrays<D>& in) { return naive::sum(in[0], axes, kept); });
      case 1:
        return keep(
            "mean", {a}, [=](auto in) { return mean(in[0], axes, kept); },
            [=](const Arrays<D>& in) { return naive::mean(in[0], axes, kept); });
      default:
        std::vector<D> sorted = values_[a].n.values;  // any two alike could tie
        std::ranges::sort(sorted, {}, &D::x);
        for (std::size_t i = 1; i < sorted.size(); ++i)
          if (sorted[i].x - sorted[i - 1].x < kFromKink) return false;
        return keep(
            "max", {a}, [=](auto in) { return max(in[0], axes, kept); },
            [=](const Arrays<D>& in) { return naive::max(in[0], axes, kept); });
    }
  }

  bool rows() {
    const std::size_t a = any();
    const Shape s = shape_of(a);
    if (s.rank() == 0 || s.numel() == 0) return false;
    switch (pick(0, 5)) {
      case 0:
        return keep(
            "softmax", {a}, [](auto in) { return softmax(in[0]); },
            [](const Arrays<D>& in) { return naive::softmax(in[0]); });
      case 1:
        return keep(
            "log_softmax", {a}, [](auto in) { return log_softmax(in[0]); },
            [](const Arrays<D>& in) { return naive::log_softmax(in[0]); });
      case 2:
        return keep(
            "logsumexp", {a}, [](auto in) { return logsumexp(in[0]); },
            [](const Arrays<D>& in) { return naive::logsumexp(in[0]); });
      case 3: {
        const std::size_t w = of_shape({s[-1]}), b = of_shape({s[-1]});
        return keep(
            "layer_norm", {a, w, b}, [](auto in) { return layer_norm(in[0], in[1], in[2], 0.01); },
            [](const Arrays<D>& in) { return naive::layer_norm(in[0], in[1], in[2], 0.01); });
      }
      case 4: {
        const std::size_t w = of_shape({s[-1]});
        return keep(
            "rms_norm", {a, w}, [](auto in) { return rms_norm(in[0], in[1], 0.01); },
            [](const Arrays<D>& in) { return naive::rms_norm(in[0], in[1], 0.01); });
      }
      default: {
        std::vector<Index> targets;
        for (Index i = 0; i < s.numel() / s[-1]; ++i)
          targets.push_back(chance(20) ? -100 : pick(0, static_cast<int>(s[-1]) - 1));
        if (targets.empty() || std::ranges::count(targets, -100) == static_cast<Index>(targets.size())) return false;
        const Tensor t = from_values(targets, Shape(std::span(s.begin(), s.end() - 1)));
        return keep(
            "cross_entropy", {a}, [=](auto in) { return cross_entropy(in[0], t); },
            [=](const Arrays<D>& in) { return naive::cross_entropy(in[0], targets, -100); });
      }
    }
  }

  bool product() {
    const std::size_t a = any();
    const Shape s = shape_of(a);
    if (s.rank() < 2 || s.numel() == 0) return false;
    std::vector<int> swapped;
    for (int i = 0; i < s.rank(); ++i) swapped.push_back(i);
    std::swap(swapped.end()[-1], swapped.end()[-2]);
    if (chance(30))
      return keep(
          "x x^T", {a}, [](auto in) { return matmul(in[0], transpose(in[0])); },
          [=](const Arrays<D>& in) { return naive::matmul(in[0], naive::permute(in[0], swapped)); });
    Shape other;
    if (s.rank() == 3 && chance(50)) other.push_back(chance(30) ? 1 : s[0]);
    if (s.rank() == 2 && chance(20)) other.push_back(2);
    other.push_back(s[-1]);
    other.push_back(pick(1, 3));
    const std::size_t b = of_shape(other);
    return keep(
        "matmul", {a, b}, [](auto in) { return matmul(in[0], in[1]); },
        [](const Arrays<D>& in) { return naive::matmul(in[0], in[1]); });
  }

  bool view() {
    const std::size_t a = any();
    const Shape s = shape_of(a);
    const int rank = s.rank();
    if (rank == 0)
      return keep(
          "unsqueeze", {a}, [](auto in) { return unsqueeze(in[0], 0); },
          [](const Arrays<D>& in) { return naive::reshape(in[0], {1}); });
    const int axis = pick(0, rank - 1);
    switch (pick(0, 5)) {
      case 0: {
        std::vector<int> axes;
        for (int i = 0; i < rank; ++i) axes.push_back(i);
        std::ranges::shuffle(axes, rng_);
        return keep(
            "permute", {a}, [=](auto in) { return permute(in[0], axes); },
            [=](const Arrays<D>& in) { return naive::permute(in[0], axes); });
      }
      case 1: {
        const Index begin = pick(0, static_cast<int>(s[axis])),
                    end = pick(static_cast<int>(begin), static_cast<int>(s[axis])), by = pick(1, 3);
        if (begin == end && chance(90)) return false;
        return keep(
            "slice", {a}, [=](auto in) { return slice(in[0], axis, begin, end, by); },
            [=](const Arrays<D>& in) { return naive::slice(in[0], axis, begin, end, by); });
      }
      case 2: {
        Shape flat{s.numel()};
        if (s.numel() > 0 && s.numel() % 2 == 0 && chance(60)) flat = {2, s.numel() / 2};
        return keep(
            "reshape", {a}, [=](auto in) { return reshape(in[0], flat); },
            [=](const Arrays<D>& in) { return naive::reshape(in[0], flat); });
      }
      case 3: {
        Shape wide;
        if (rank < 5) wide.push_back(2);
        for (int i = 0; i < rank; ++i) wide.push_back(s[i] == 1 ? 3 : s[i]);
        return keep(
            "expand", {a}, [=](auto in) { return expand(in[0], wide); },
            [=](const Arrays<D>& in) { return naive::expand(in[0], wide); });
      }
      case 4: {
        if (rank == 6) return false;
        Shape more;
        for (int i = 0; i < rank; ++i) {
          if (i == axis) more.push_back(1);
          more.push_back(s[i]);
        }
        return keep(
            "unsqueeze", {a}, [=](auto in) { return unsqueeze(in[0], axis); },
            [=](const Arrays<D>& in) { return naive::reshape(in[0], more); });
      }
      default: {
        const std::array<Index, 2> parts{s[axis] / 2, s[axis] - s[axis] / 2};
        const std::size_t which = rng_() % 2;
        return keep(
            "split", {a}, [=](auto in) { return split(in[0], parts, axis)[which]; },
            [=](const Arrays<D>& in) {
              return naive::slice(in[0], axis, which ? parts[0] : 0, which ? s[axis] : parts[0]);
            });
      }
    }
  }

  bool picking() {
    const std::size_t a = any();
    const Shape s = shape_of(a);
    if (s.rank() == 0 || s.numel() == 0) return false;
    const int axis = pick(0, s.rank() - 1);
    const auto random_indices = [&](Index count, Index below) {
      std::vector<Index> v;
      for (Index i = 0; i < count; ++i) v.push_back(pick(0, static_cast<int>(below) - 1));
      return v;
    };
    const auto as_ids = [&](const std::vector<Index>& v) {
      return from_values(v, {static_cast<Index>(v.size())}, chance(50) ? DType::i32 : DType::i64);
    };
    switch (pick(0, 4)) {
      case 0: {
        const std::vector<Index> v = random_indices(pick(1, 4), s[axis]);
        const Tensor t = as_ids(v);
        return keep(
            "gather", {a}, [=](auto in) { return gather(in[0], axis, t); },
            [=](const Arrays<D>& in) { return naive::gather(in[0], axis, v); });
      }
      case 1: {
        const Index extent = pick(1, 5);
        const std::vector<Index> v = random_indices(s[axis], extent);
        const Tensor t = as_ids(v);
        return keep(
            "scatter_add", {a}, [=](auto in) { return scatter_add(in[0], axis, t, extent); },
            [=](const Arrays<D>& in) { return naive::scatter_add(in[0], axis, v, extent); });
      }
      case 2: {
        if (s.rank() != 2) return false;
        const std::vector<Index> v = random_indices(pick(1, 5), s[0]);
        const Tensor t = as_ids(v);
        return keep(
            "embedding", {a}, [=](auto in) { return embedding(in[0], t); },
            [=](const Arrays<D>& in) { return naive::embedding(in[0], v, {static_cast<Index>(v.size())}); });
      }
      case 3: {
        const Index before = pick(0, 2), after = pick(0, 2);
        return keep(
            "pad", {a}, [=](auto in) { return pad(in[0], axis, before, after, 0.7); },
            [=](const Arrays<D>& in) { return naive::pad(in[0], axis, before, after, 0.7); });
      }
      default: {
        const std::size_t b = chance(30) ? a : of_shape(s.with(axis, pick(1, 3)));
        return keep(
            "cat", {a, b}, [=](auto in) { return cat(in, axis); },
            [=](const Arrays<D>& in) { return naive::cat(in, axis); });
      }
    }
  }

  bool mixed() {
    const std::size_t a = any();
    const Shape s = shape_of(a);
    const auto masked = [](const Numbers& x, const std::vector<double>& mask) {
      Numbers y = x;
      for (std::size_t i = 0; i < mask.size(); ++i) y.values[i] = y.values[i] * D(mask[i]);
      return y;
    };
    switch (pick(0, 2)) {
      case 0: {
        const RandomKey key{rng_(), rng_() % 100};
        std::vector<double> mask;
        if (s.numel() > 0) {
          const Tape::Pause pause;
          mask = dropout(ones(s, DType::f64), 0.3, key).to_vector();
        }
        return keep(
            "dropout", {a}, [=](auto in) { return dropout(in[0], 0.3, key); },
            [=](const Arrays<D>& in) { return masked(in[0], mask); });
      }
      case 1: {
        const std::size_t b = of_shape(s);
        const Tensor condition = randint(0, 2, s, {rng_(), 0}, DType::u8);
        return keep(
            "where", {a, b}, [=](auto in) { return where(condition, in[0], in[1]); },
            [=](const Arrays<D>& in) {
              Numbers y = in[1];
              const std::vector<double> c = condition.to_vector();
              for (std::size_t i = 0; i < c.size(); ++i)
                if (c[i] != 0) y.values[i] = in[0].values[i];
              return y;
            });
      }
      default: {
        if (s.rank() < 3 || s[-1] % 2 != 0) return false;
        std::vector<double> positions;
        for (Index i = 0; i < s[-3]; ++i) positions.push_back(static_cast<double>(i));
        return keep(
            "rotary", {a}, [](auto in) { return rotary(in[0], 100); },
            [=](const Arrays<D>& in) { return naive::rotary(in[0], 100, positions); });
      }
    }
  }

  std::mt19937_64 rng_;
  const std::vector<Unary>& unary_;
  Tape tape_;
  std::vector<Leaf> leaves_;
  std::vector<Value> values_;
  std::string listing_;
  double worst_ = 0;
};

struct Outcome {
  std::string wrong, listing;
  double worst = 0;
};
constexpr int kAllSteps = 9;
Outcome run(std::uint64_t seed, const std::vector<Unary>& unary, int most_steps = kAllSteps) {
  Outcome out;
  try {
    Program program(seed, unary, most_steps);
    out.wrong = program.verdict();
    out.listing = program.listing();
    out.worst = program.worst();
  } catch (const std::exception& e) { out.wrong = text("threw: ", e.what()); }
  return out;
}
/// A failure with the fewest steps that still show it.
std::string describe(std::uint64_t seed, const std::vector<Unary>& unary) {
  for (int steps = 0; steps <= kAllSteps; ++steps)
    if (const Outcome o = run(seed, unary, steps); !o.wrong.empty())
      return text("program ", seed, ": ", o.wrong, "\n", o.listing, "HILT_FUZZ_SEED=", seed, " replays it\n");
  return text("program ", seed, ": fails only sometimes\n");
}

TEST(Programs, GradientsAlongRandomDirections) {
  const std::vector<Unary> unary = unary_ops();
  if (const char* seed = std::getenv("HILT_FUZZ_SEED")) {
    const Outcome o = run(std::strtoull(seed, nullptr, 10), unary);
    std::cout << o.listing << (o.wrong.empty() ? "no difference" : o.wrong) << '\n';
    EXPECT_EQ(o.wrong, "");
    return;
  }
  constexpr int kReported = 3;
  const std::uint64_t programs = scaled(20000, 1000);
  double worst = 0;
  std::uint64_t worst_seed = 0;
  int failures = 0;
  for (std::uint64_t seed = 0; seed < programs && failures < kReported; ++seed) {
    const Outcome o = run(seed, unary);
    if (!o.wrong.empty()) ADD_FAILURE() << describe(seed, unary), ++failures;
    if (o.worst > worst) worst = o.worst, worst_seed = seed;
  }
  std::cout << "op programs: " << programs << ", worst relative error " << worst << " at HILT_FUZZ_SEED=" << worst_seed
            << '\n';
}

TEST(Programs, TheFuzzerCatches) {
  // tanh whose slope is 1 - y instead of 1 - y^2; a relu good to six digits; a view that forgets
  // its offset.
  struct Wrong final : Function {
    std::string_view name() const override { return "wrong tanh"; }
    Tensor forward(const Tensor& x) {
      const Tensor y = tanh(x);
      if (wants(0)) save(y);
      return y;
    }
    std::vector<Tensor> backward(const Tensor& dy) override { return {mul(dy, add(neg(saved(0)), 1))}; }
  };
  struct Rough final : Function {
    std::string_view name() const override { return "rough neg"; }
    Tensor forward(const Tensor& x) { return neg(x); }
    std::vector<Tensor> backward(const Tensor& dy) override { return {mul(dy, -1.000001)}; }
  };
  const auto caught = [](const char* name, const Composite& op) {
    std::vector<Unary> unary = unary_ops();
    std::ranges::find(unary, std::string_view(name), [](const Unary& u) { return std::string_view(u.name); })->op = op;
    for (std::uint64_t seed = 0; seed < 2000; ++seed)
      if (!run(seed, unary).wrong.empty()) return true;
    return false;
  };
  EXPECT_TRUE(caught("tanh", [](auto in) { return hilt::apply(Wrong(), in[0]); }));
  EXPECT_TRUE(caught("neg", [](auto in) { return hilt::apply(Rough(), in[0]); }));
  EXPECT_TRUE(caught("contiguous", [](auto in) { return mul(detach(in[0]), 1); }));
  EXPECT_TRUE(caught("detach", [](auto in) { return mul(in[0], 1); }));
}

// What people type first, since other libraries have it.
TEST(Program, ReadsAsOneWritesIt) {
  Generator generator(1), same(1);
  EXPECT_EQ(bits(randn({3}, generator)), bits(randn({3}, same.next())));
  EXPECT_EQ(bits(rand(3, generator)), bits(rand({3}, same.next())));
  EXPECT_EQ(bits(randint(0, 9, 3, generator)), bits(randint(0, 9, {3}, same.next())));
  EXPECT_EQ(zeros(3).shape(), (Shape{3}));
  EXPECT_EQ(full(2, 1.5).to_vector(), (std::vector<double>{1.5, 1.5}));
  const Tensor x = from_values({1.f, 2.f, 3.f, 4.f}, {2, 2});
  EXPECT_EQ(x.dtype(), DType::f32);
  EXPECT_EQ(from_values({1, 2}, 2, DType::f64).to_vector(), (std::vector<double>{1, 2}));
  EXPECT_EQ(sum(x, 0).to_vector(), (std::vector<double>{4, 6}));
  EXPECT_EQ(sum(x, -1, true).shape(), (Shape{2, 1}));
  EXPECT_EQ(sum(x, {0, 1}).item(), 10);
  EXPECT_EQ(sum(x).item(), 10);
  EXPECT_EQ(max(x, {}).item(), 4);
  EXPECT_EQ(mean(x, {1}).to_vector(), (std::vector<double>{1.5, 3.5}));
  EXPECT_EQ(x[1].to_vector(), (std::vector<double>{3, 4}));
  EXPECT_EQ(x[-1][0].item(), 3);
  EXPECT_EQ((1.0 - x[0]).to_vector(), (std::vector<double>{0, -1}));
  EXPECT_EQ(stack({x[0], x[0]}).shape(), (Shape{2, 2}));
  EXPECT_EQ(cat({x, x}, 1).shape(), (Shape{2, 4}));
  EXPECT_EQ(where(greater(x, 2.0), x, 0.0).to_vector(), (std::vector<double>{0, 0, 3, 4}));
}

}  // namespace
}  // namespace hilt
