// Layers against their formulas written out in loops, and their gradients against central
// differences.
#include "nn/layers.h"
#include "tests/nn/modules.h"
#include "tests/support/error_of.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

double element(const Tensor& x, Index row, Index column) { return x.data<double>()[row * x.dim(-1) + column]; }

/// Row by row: f(row of x, output column).
template <class F> void expect_rows(const Tensor& y, const Tensor& x, F f, double tolerance = 1e-12) {
  const Index rows = x.numel() / x.dim(-1);
  ASSERT_EQ(y.numel() / y.dim(-1), rows);
  for (Index r = 0; r < rows; ++r)
    for (Index c = 0; c < y.dim(-1); ++c)
      ASSERT_NEAR(element(y, r, c), f(x.data<double>() + r * x.dim(-1), c), tolerance) << r << ", " << c;
}

double gelu_tanh_at(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double gelu_at(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double silu_at(double x) { return x / (1 + std::exp(-x)); }

TEST(Linear, IsItsFormula) {
  Generator generator(1);
  const Tensor x = noise({2, 3, 5}, 1), residual = noise({2, 3, 4}, 2);
  for (const bool bias : {true, false}) {
    const Linear layer = shaken(make_linear(5, 4, bias, 0.5, generator, DType::f64));
    EXPECT_EQ(bool(layer.bias), bias);
    const auto at = [&](const double* row, Index c) {
      double y = bias ? layer.bias.data<double>()[c] : 0;
      for (Index i = 0; i < 5; ++i) y += row[i] * element(layer.weight, i, c);
      return y;
    };
    expect_rows(layer(x), x, at);
    Index row = 0;
    expect_rows(layer.onto(residual, x), x, [&](const double* in, Index c) {
      const double y = at(in, c) + element(residual, row / 4, c);
      ++row;
      return y;
    });
  }
}

TEST(Linear, GradientsAgreeWithDifferences) {
  Generator generator(1);
  for (const bool bias : {true, false})
    for (const Shape& shape : {Shape{3, 5}, {2, 3, 5}, {1, 1, 5}}) {
      const Linear layer = shaken(make_linear(5, 4, bias, 0.5, generator, DType::f64));
      const auto plain = gradcheck_module(layer, {noise(shape, 1)},
                                          [](const Linear& l, std::span<const Tensor> in) { return l(in[0]); });
      EXPECT_TRUE(plain) << plain.where;
      const auto onto =
          gradcheck_module(layer, {noise(shape, 1), noise(shape.with(-1, 4), 2)},
                           [](const Linear& l, std::span<const Tensor> in) { return l.onto(in[1], in[0]); });
      EXPECT_TRUE(onto) << onto.where;
    }
}

TEST(Linear, ReadsStridedInputsAndOneVector) {
  const Tensor w = noise({5, 4}, 3), b = noise({4}, 4);
  const Tensor x = permute(noise({5, 2, 3}, 5), {1, 2, 0}), r = expand(noise({1, 1, 4}, 6), {2, 3, 4});
  EXPECT_LE(distance(linear(x, w, b, r), add(r, add(matmul(contiguous(x), w), b))), 1e-14);
  EXPECT_LE(distance(linear(x, transpose(noise({4, 5}, 7)), b), add(matmul(x, transpose(noise({4, 5}, 7))), b)), 1e-14);
  const Tensor one = noise({5}, 8);
  EXPECT_EQ(linear(one, w, b).shape(), Shape{4});
  EXPECT_LE(distance(linear(one, w, b), add(squeeze(matmul(unsqueeze(one, 0), w), 0), b)), 1e-14);
  EXPECT_EQ(linear(zeros({0, 5}, DType::f64), w, b).shape(), (Shape{0, 4}));
  // 16 bits are for storage: all of it is rounded once.
  const auto narrow = [](const Tensor& t) { return to(t, DType::bf16); };
  const auto rounded = [&](const Tensor& t) { return to(narrow(t), DType::f32); };
  EXPECT_EQ(linear(narrow(x), narrow(w), narrow(b)).to_vector(),
            narrow(linear(rounded(x), rounded(w), rounded(b))).to_vector());
}

TEST(Linear, ResultsDoNotDependOnThreads) {
  const Tensor x = randn({193, 300}, {1, 1}), w = randn({300, 211}, {1, 2}), b = randn({211}, {1, 3}),
               r = randn({193, 211}, {1, 4});
  const auto wide = [](const Tensor& t) { return to(t, DType::f64); };
  EXPECT_LE(distance(linear(x, w, b, r), add(wide(r), add(matmul(wide(x), wide(w)), wide(b)))), 1e-5)
      << "sums of 300 terms in f32";
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 3, 8}) {
    const Threads scope(threads);
    results.push_back(linear(x, w, b, r).to_vector<float>());
    EXPECT_EQ(results.back(), results.front()) << threads << " threads";
  }
}

TEST(Linear, SaysWhatIsWrong) {
  const Tensor x = zeros({2, 5}), w = zeros({5, 4}), b = zeros({4});
  EXPECT_EQ(error_of([&] {
              (void)linear(x, zeros({6, 4}), b);
            }),
            "usage: linear: x [2, 5] and w [6, 4] must be [.., in] and [in, out]");
  EXPECT_EQ(error_of([&] { (void)linear(x, w, zeros({5})); }),
            "usage: linear: b [5] must have one entry for each of the 4 columns of w");
  EXPECT_EQ(error_of([&] {
              (void)linear(x, w, b, zeros({2, 5}));
            }),
            "usage: linear: the residual [2, 5] must have the shape of x w, [2, 4]");
  EXPECT_EQ(error_of([&] { (void)linear(x, to(w, DType::f64), b); }),
            "usage: linear: x is f32 and w is f64; convert one with to()");
  Generator generator(1);
  EXPECT_EQ(error_of([&] { (void)make_linear(0, 4, true, 1, generator); }),
            "usage: Linear: [0, 4] must have at least one row and column");
}

TEST(Norms, AreTheirFormulas) {
  const Tensor x = noise({3, 2, 6}, 1);
  for (const NormKind kind : {NormKind::layer, NormKind::rms, NormKind::plain})
    for (const bool bias : {true, false}) {
      const Norm norm = shaken(make_norm(kind, 6, bias, 0.01, DType::f64));
      EXPECT_EQ(bool(norm.bias), bias && kind == NormKind::layer);
      EXPECT_EQ(bool(norm.weight), kind != NormKind::plain);
      expect_rows(norm(x), x, [&](const double* row, Index c) {
        double mean = 0, square = 0;
        if (kind == NormKind::layer)
          for (int i = 0; i < 6; ++i) mean += row[i] / 6;
        for (int i = 0; i < 6; ++i) square += (row[i] - mean) * (row[i] - mean) / 6;
        return (row[c] - mean) / std::sqrt(square + 0.01) * (norm.weight ? norm.weight.data<double>()[c] : 1) +
               (norm.bias ? norm.bias.data<double>()[c] : 0);
      });
      const auto checked =
          gradcheck_module(norm, {x}, [](const Norm& n, std::span<const Tensor> in) { return n(in[0]); });
      EXPECT_TRUE(checked) << name_of(kind) << ": " << checked.where;
    }
}

TEST(Mlp, IsItsFormula) {
  Generator generator(3);
  const Tensor x = noise({4, 5}, 2);
  for (const Activation activation :
       {Activation::gelu_tanh, Activation::gelu, Activation::relu, Activation::silu_gated}) {
    const Mlp mlp = shaken(make_mlp(5, 7, activation, true, 0.3, 0.3, generator, DType::f64));
    EXPECT_EQ(mlp.up.weight.dim(1), activation == Activation::silu_gated ? 14 : 7);
    expect_rows(mlp(x), x, [&](const double* row, Index c) {
      const auto up = [&](Index h) {
        double y = mlp.up.bias.data<double>()[h];
        for (Index i = 0; i < 5; ++i) y += row[i] * element(mlp.up.weight, i, h);
        return y;
      };
      double y = mlp.down.bias.data<double>()[c];
      for (Index h = 0; h < 7; ++h) {
        const double a = up(h);
        const double inner = activation == Activation::gelu_tanh ? gelu_tanh_at(a)
                             : activation == Activation::gelu    ? gelu_at(a)
                             : activation == Activation::relu    ? std::max(a, 0.0)
                                                                 : silu_at(a) * up(7 + h);
        y += inner * element(mlp.down.weight, h, c);
      }
      return y;
    });
    const auto checked = gradcheck_module(mlp, {x}, [](const Mlp& m, std::span<const Tensor> in) { return m(in[0]); });
    EXPECT_TRUE(checked) << name_of(activation) << ": " << checked.where;
  }
}

TEST(Embedding, PicksRows) {
  Generator generator(1);
  const Embedding embedding = make_embedding(5, 3, 1, generator, DType::f64);
  const Tensor ids = from_values(std::vector<std::int64_t>{4, 0, 4, 2}, {2, 2});
  const Tensor y = embedding(ids);
  ASSERT_EQ(y.shape(), (Shape{2, 2, 3}));
  for (Index i = 0; i < 4; ++i)
    for (Index c = 0; c < 3; ++c)
      EXPECT_EQ(element(y, i, c), element(embedding.weight, ids.data<std::int64_t>()[i], c));
}

TEST(Layers, NamesAreReadAndProposed) {
  for (const Activation a : {Activation::gelu_tanh, Activation::gelu, Activation::relu, Activation::silu_gated})
    EXPECT_EQ(parse_activation(name_of(a)), a);
  for (const NormKind k : {NormKind::layer, NormKind::rms, NormKind::plain}) EXPECT_EQ(parse_norm_kind(name_of(k)), k);
  EXPECT_EQ(error_of([] { (void)parse_norm_kind("rmss"); }),
            "usage: norm: 'rmss' is not one of layer, rms, plain; did you mean rms?");
  EXPECT_EQ(error_of([] { (void)parse_activation("gelo"); }),
            "usage: activation: 'gelo' is not one of gelu_tanh, gelu, relu, silu_gated; did you mean gelu?");
}

TEST(Layers, ParametersAreNamedOnce) {
  Generator generator(1);
  Mlp mlp = make_mlp(3, 4, Activation::gelu, true, 1, 1, generator);
  std::vector<std::string> names;
  for (const NamedParameter& p : parameters_of(mlp)) names.push_back(p.name);
  EXPECT_EQ(names, (std::vector<std::string>{"up.weight", "up.bias", "down.weight", "down.bias"}));
  EXPECT_EQ(parameter_count(mlp), 3 * 4 + 4 + 4 * 3 + 3);
  EXPECT_EQ(join_name("", "a"), "a");
  EXPECT_EQ(join_name("a", "b"), "a.b");
}

TEST(InitialValues, HaveTheVarianceOfTheirName) {
  struct One {
    const char* name;
    double scale, deviation, bound;
  };
  const double xavier = std::sqrt(2.0 / 600), he = std::sqrt(2.0 / 200);
  for (const One& o : {One{"normal", 0.5, 0.5, 3},
                       {"uniform", 0.5, 0.5 / std::sqrt(3), 0.5},
                       {"xavier_normal", 1, xavier, 1},
                       {"xavier_uniform", 1, xavier, std::sqrt(3) * xavier},
                       {"he_normal", 2, 2 * he, 2},
                       {"he_uniform", 1, he, std::sqrt(3) * he}}) {
    Generator g(3), same(3);
    const Tensor x = initial_values(o.name, {200, 400}, g, o.scale);
    double sum = 0, squares = 0, largest = 0;
    for (double v : x.to_vector()) sum += v, squares += v * v, largest = std::max(largest, std::abs(v));
    EXPECT_NEAR(sum / 80000, 0, 0.02 * o.deviation) << o.name;
    EXPECT_NEAR(std::sqrt(squares / 80000), o.deviation, 0.02 * o.deviation) << o.name;
    EXPECT_LE(largest, o.bound * (1 + 1e-6)) << o.name;
    EXPECT_EQ(initial_values(o.name, {200, 400}, same, o.scale).to_vector(), x.to_vector()) << o.name;
  }
  Generator g(1);
  EXPECT_EQ(initial_values("ones", 3, g, 1, DType::bf16).to_vector(), (std::vector<double>{1, 1, 1}));
  EXPECT_NE(error_of([&] { initial_values("xavier", {2, 2}, g); }).find("did you mean"), std::string::npos);
  EXPECT_EQ(error_of([&] { initial_values("he_normal", 3, g); }),
            "usage: initial_values: he_normal is for weights [.., in, out], got [3]");
}

}  // namespace
}  // namespace hilt
