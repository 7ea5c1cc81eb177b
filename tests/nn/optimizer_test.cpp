// AdamW and SGD against their formulas one number at a time in double, and what surrounds them.
#include "nn/optimizer.h"
#include <bit>
#include "tests/nn/modules.h"
#include "tests/support/error_of.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

/// A matrix, which decays, and a vector, which does not.
struct Pair {
  Tensor matrix, vector;
  void visit_parameters(const std::string& at, const ParameterVisitor& visit) {
    visit(join_name(at, "matrix"), matrix);
    visit(join_name(at, "vector"), vector);
  }
};
Pair pair_of(DType dtype) { return {to(noise({3, 4}, 1), dtype), to(noise({5}, 2), dtype)}; }
Gradients gradients_of(const Pair& p, std::uint64_t stream, double scale = 1) {
  Gradients g;
  g.set(p.matrix, to(noise({3, 4}, stream, scale), p.matrix.dtype()));
  g.set(p.vector, to(noise({5}, stream + 1000, scale), p.vector.dtype()));
  return g;
}

struct Scalar {
  double w, m = 0, v = 0;
  void step(double g, int t, double lr, const AdamW& o, bool decays) {
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double mean = m / (1 - std::pow(o.beta1, t)), square = v / (1 - std::pow(o.beta2, t));
    w -= lr * (decays ? o.weight_decay : 0) * w;
    w -= lr * mean / (std::sqrt(square) + o.epsilon);
  }
};

TEST(AdamWOptimizer, IsItsFormula) {
  const AdamW options{1, 0.8, 0.95, 1e-6, 0.1};
  Pair p = pair_of(DType::f64);
  std::vector<Scalar> matrix, vector;
  for (const double w : p.matrix.to_vector()) matrix.push_back({w});
  for (const double w : p.vector.to_vector()) vector.push_back({w});
  AdamWOptimizer optimizer(options);
  for (int t = 1; t <= 20; ++t) {
    const double lr = 0.1 / t;
    const Gradients g = gradients_of(p, static_cast<std::uint64_t>(10 + t));
    const std::vector<double> dm = g[p.matrix].to_vector(), dv = g[p.vector].to_vector();
    for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i].step(dm[i], t, lr, options, true);
    for (std::size_t i = 0; i < vector.size(); ++i) vector[i].step(dv[i], t, lr, options, false);
    optimizer.step(parameters_of(p), g, lr);
    EXPECT_EQ(optimizer.steps(), t);
  }
  for (std::size_t i = 0; i < matrix.size(); ++i) EXPECT_NEAR(p.matrix.to_vector()[i], matrix[i].w, 1e-13);
  for (std::size_t i = 0; i < vector.size(); ++i) EXPECT_NEAR(p.vector.to_vector()[i], vector[i].w, 1e-13);
  optimizer.visit_state([&](const std::string& name, Tensor& t) {
    if (name == "steps") return;
    const std::vector<Scalar>& all = name.starts_with("matrix") ? matrix : vector;
    for (std::size_t i = 0; i < all.size(); ++i)
      EXPECT_NEAR(t.to_vector()[i], name.ends_with(".m") ? all[i].m : all[i].v, 1e-14) << name;
  });
}

TEST(AdamWOptimizer, SixteenBitWeightsHaveMasters) {
  // Steps of 1e-4 on weights near 1: bf16 resolves 2^-8, so without a master nothing would ever
  // move.
  struct One {
    Tensor w = full({2, 2}, 1, DType::bf16);
    void visit_parameters(const std::string&, const ParameterVisitor& visit) { visit("w", w); }
  } model;
  AdamWOptimizer optimizer(AdamW{1, 0.9, 0.999, 1e-8, 0});
  for (int t = 0; t < 100; ++t) {
    Gradients g;
    g.set(model.w, full({2, 2}, 1, DType::bf16));
    optimizer.step(parameters_of(model), g, 1e-4);
  }
  std::vector<std::string> names;
  Tensor master;
  optimizer.visit_state([&](const std::string& name, Tensor& t) {
    names.push_back(name);
    EXPECT_EQ(t.dtype(), name == "steps" ? DType::i64 : DType::f32) << name;
    if (name == "w.master") master = t;
  });
  EXPECT_EQ(names, (std::vector<std::string>{"w.m", "w.v", "w.master", "steps"}));
  EXPECT_NEAR(master.to_vector()[0], 0.99, 1e-5);
  EXPECT_EQ(model.w.to_vector(), to(master, DType::bf16).to_vector());
  EXPECT_EQ(optimizer.bytes(), 3u * 4 * 4);
}

TEST(AdamWOptimizer, GoesOnFromASavedStateBitForBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Pair p = pair_of(dtype);
    AdamWOptimizer optimizer;
    for (std::uint64_t t = 1; t <= 4; ++t) optimizer.step(parameters_of(p), gradients_of(p, t), 0.1);
    Pair q{clone(p.matrix), clone(p.vector)};
    AdamWOptimizer resumed;
    resumed.prepare(parameters_of(q));
    std::map<std::string, Tensor> saved;
    optimizer.visit_state([&](const std::string& name, Tensor& t) { saved[name] = clone(t); });
    resumed.visit_state([&](const std::string& name, Tensor& t) { t = saved.at(name); });
    EXPECT_EQ(resumed.steps(), 4);  // nobody has to remember it
    optimizer.step(parameters_of(p), gradients_of(p, 9), 0.1);
    resumed.step(parameters_of(q), gradients_of(q, 9), 0.1);
    EXPECT_EQ(p.matrix.to_vector(), q.matrix.to_vector());
    EXPECT_EQ(p.vector.to_vector(), q.vector.to_vector());
  }
}

TEST(AdamWOptimizer, LeavesAloneWhatHasNoGradient) {
  Pair p = pair_of(DType::f32);
  const std::vector<double> before = p.vector.to_vector();
  Gradients g;
  g.set(p.matrix, ones({3, 4}));
  AdamWOptimizer optimizer;
  optimizer.step(parameters_of(p), g, 0.1);
  EXPECT_EQ(p.vector.to_vector(), before);
  EXPECT_NE(p.matrix.to_vector(), pair_of(DType::f32).matrix.to_vector());
}

TEST(AdamWOptimizer, SaysWhatIsWrong) {
  Pair p = pair_of(DType::f32);
  AdamWOptimizer optimizer;
  optimizer.prepare(parameters_of(p));
  NamedParameters fewer = parameters_of(p);
  fewer.pop_back();
  EXPECT_EQ(error_of([&] { optimizer.prepare(fewer); }), "usage: AdamWOptimizer: 1 parameters, the state has 2");
  NamedParameters renamed = parameters_of(p);
  renamed[0].name = "other";
  EXPECT_EQ(error_of([&] { optimizer.prepare(renamed); }),
            "usage: AdamWOptimizer: parameter 0 is other, its state is of matrix; an optimizer serves one module");
  Pair q = pair_of(DType::f32);
  q.matrix = zeros({4, 3});
  EXPECT_EQ(error_of([&] { optimizer.prepare(parameters_of(q)); }),
            "usage: AdamWOptimizer: matrix is [4, 3], its moments are [3, 4]");
  EXPECT_EQ(error_of([&] { optimizer.visit_state([](const std::string&, Tensor& t) { t = zeros({1}); }); }),
            "usage: AdamWOptimizer: matrix.m was replaced by f32[1], it must stay f32[3, 4]");
}

std::vector<std::string> names_of(Optimizer& optimizer) {
  std::vector<std::string> names;
  optimizer.visit_state([&](const std::string& name, Tensor&) { names.push_back(name); });
  return names;
}

TEST(SgdOptimizer, IsItsFormula) {
  for (const double momentum : {0.0, 0.9}) {
    Pair p = pair_of(DType::f64);
    SgdOptimizer optimizer(momentum, 0.1);
    std::vector<double> matrix = p.matrix.to_vector(), vector = p.vector.to_vector(), m(17, 0);
    for (int t = 1; t <= 10; ++t) {
      const double lr = 0.1 / t;
      const Gradients g = gradients_of(p, static_cast<std::uint64_t>(10 + t));
      const std::vector<double> dm = g[p.matrix].to_vector(), dv = g[p.vector].to_vector();
      for (std::size_t i = 0; i < 12; ++i)
        m[i] = momentum * m[i] + dm[i] + 0.1 * matrix[i], matrix[i] -= lr * m[i];  // matrices decay, vectors do not
      for (std::size_t i = 0; i < 5; ++i) m[12 + i] = momentum * m[12 + i] + dv[i], vector[i] -= lr * m[12 + i];
      optimizer.step(parameters_of(p), g, lr);
      EXPECT_EQ(optimizer.steps(), t);
    }
    for (std::size_t i = 0; i < 12; ++i) EXPECT_NEAR(p.matrix.to_vector()[i], matrix[i], 1e-14);
    for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(p.vector.to_vector()[i], vector[i], 1e-14);
    EXPECT_EQ(names_of(optimizer), momentum > 0 ? (std::vector<std::string>{"matrix.m", "vector.m", "steps"})
                                                : (std::vector<std::string>{"steps"}));
    EXPECT_EQ(optimizer.bytes(), momentum > 0 ? 17u * 8 : 0u);
  }
}

TEST(SgdOptimizer, SixteenBitWeightsHaveMasters) {
  Pair p{full({2, 2}, 1, DType::bf16), full({3}, 1, DType::bf16)};
  SgdOptimizer optimizer(0.5);
  for (int t = 0; t < 100; ++t) {  // steps of 2e-4: bf16 resolves 2^-8
    Gradients g;
    g.set(p.matrix, ones({2, 2}, DType::bf16));
    optimizer.step(parameters_of(p), g, 1e-4);
  }
  EXPECT_EQ(names_of(optimizer),
            (std::vector<std::string>{"matrix.m", "matrix.master", "vector.m", "vector.master", "steps"}));
  optimizer.visit_state([&](const std::string& name, Tensor& t) {
    EXPECT_EQ(t.dtype(), name == "steps" ? DType::i64 : DType::f32) << name;
    if (name == "matrix.master") {
      EXPECT_NEAR(t.to_vector()[0], 1 - 0.0198, 1e-5);  // the first steps are shorter
    }
  });
  EXPECT_EQ(p.matrix.to_vector()[0], 0.98046875);
  EXPECT_EQ(p.vector.to_vector()[0], 1) << "without a gradient";
}

TEST(SgdOptimizer, ClipsAndLeavesAloneWhatIsNotFinite) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    Pair p{zeros({1, 2}, dtype), zeros({1}, dtype)};
    Gradients g;
    g.set(p.matrix, full({1, 2}, 6, dtype)), g.set(p.vector, full({1}, 3, dtype));  // a norm of 9
    SgdOptimizer optimizer(0.9);
    const Tensor norm = norm_of(g, parameters_of(p));
    optimizer.step(parameters_of(p), g, 1, {norm, 3});
    EXPECT_NEAR(p.matrix.to_vector()[0], -2, 1e-6);
    EXPECT_NEAR(p.vector.to_vector()[0], -1, 1e-6);
    optimizer.step(parameters_of(p), g, 1, {norm, 3, 4});  // of a loss times 4: 9 counts as 2.25, and is left alone
    EXPECT_NEAR(p.matrix.to_vector()[1], -2 - (0.9 * 2 + 1.5), 1e-6);
    const std::vector<double> before = p.matrix.to_vector();
    g.set(p.vector, full({1}, INFINITY, dtype));
    optimizer.step(parameters_of(p), g, 1, {norm_of(g, parameters_of(p)), 3});
    EXPECT_EQ(p.matrix.to_vector(), before);
    optimizer.visit_state([&](const std::string& name, Tensor& t) {
      if (name == "matrix.m") { EXPECT_NEAR(t.to_vector()[0], 3.3, 1e-6); }
    });
    EXPECT_EQ(optimizer.steps(), 3);
  }
}

TEST(SgdOptimizer, SaysWhatIsWrong) {
  Pair p = pair_of(DType::f32);
  SgdOptimizer optimizer;
  optimizer.prepare(parameters_of(p));
  NamedParameters fewer = parameters_of(p);
  fewer.pop_back();
  EXPECT_EQ(error_of([&] { optimizer.prepare(fewer); }), "usage: SgdOptimizer: 1 parameters, the state has 2");
  EXPECT_EQ(error_of([] { SgdOptimizer(1.5); }), "usage: SgdOptimizer: momentum 1.5 must be in [0, 1)");
  EXPECT_EQ(error_of([] { SgdOptimizer(0, -1); }),
            "usage: SgdOptimizer: weight decay -1 must be finite and not negative");
  EXPECT_EQ(error_of([&] { optimizer.step(parameters_of(p), {}, -1); }),
            "usage: SgdOptimizer: learning rate -1 must be finite and not negative");
  EXPECT_EQ(error_of([&] {
              optimizer.step(parameters_of(p), {}, 1, {{}, 1});
            }),
            "usage: SgdOptimizer: to clip to 1 it needs the norm (norm_of)");
}

TEST(ClipGradNorm, ScalesWhatIsTooLong) {
  const Pair before = pair_of(DType::f64);
  Pair p = before;
  Gradients g;
  g.set(p.matrix, full({3, 4}, 2, DType::f64));  // 12 x 4 = 48
  g.set(p.vector, full({5}, 1, DType::f64));     // and 5: 53
  EXPECT_DOUBLE_EQ(clip_grad_norm(g, parameters_of(p), 100), std::sqrt(53.0));
  EXPECT_EQ(g[p.matrix].to_vector()[0], 2);
  EXPECT_DOUBLE_EQ(clip_grad_norm(g, parameters_of(p), 0), std::sqrt(53.0)) << "0 only measures";
  EXPECT_EQ(g[p.matrix].to_vector()[0], 2);
  EXPECT_DOUBLE_EQ(clip_grad_norm(g, parameters_of(p), 0.5), std::sqrt(53.0));
  EXPECT_NEAR(g[p.matrix].to_vector()[7], 2 * 0.5 / std::sqrt(53.0), 1e-15);
  EXPECT_NEAR(g[p.vector].to_vector()[4], 0.5 / std::sqrt(53.0), 1e-15);
}

TEST(ClipGradNorm, NamesWhatIsNotFinite) {
  Pair p = pair_of(DType::f32);
  Gradients g = gradients_of(p, 1);
  g.set(p.vector, full({5}, NAN));
  EXPECT_EQ(error_of([&] { clip_grad_norm(g, parameters_of(p), 1); }),
            "not_a_number: clip_grad_norm: the norm is nan; the first gradient that is not finite is vector's");
  EXPECT_EQ(error_of([&] { clip_grad_norm(g, parameters_of(p), -1); }),
            "usage: clip_grad_norm: max_norm -1 must not be negative");
}

TEST(MicroBatches, AddUpToTheWholeBatch) {
  TransformerConfig c;
  c.layers = 1, c.heads = 2, c.width = 8, c.context = 6, c.vocab = 7;
  Transformer m = shaken(make_transformer(c, 1, DType::f64));
  const NamedParameters parameters = parameters_of(m);
  const Tensor ids = symbols({6, 6}, 7, 1), targets = symbols({6, 6}, 7, 2);
  const auto gradients = [&](Index begin, Index end) {
    Tape tape;
    watch_parameters(tape, m);
    return tape.backward(m.loss(slice(ids, 0, begin, end), slice(targets, 0, begin, end)));
  };
  const Gradients whole = gradients(0, 6);
  Gradients sum;
  for (const Index begin : {0, 2, 4}) sum += gradients(begin, begin + 2);
  const Gradients mean = mean_of(std::move(sum), parameters, 3);
  for (const NamedParameter& p : parameters) EXPECT_LE(distance(mean[*p.tensor], whole[*p.tensor]), 1e-12) << p.name;
  EXPECT_EQ(error_of([&] { (void)mean_of({}, parameters, 0); }),
            "usage: mean_of: 0 micro-batches; there must be at least 1");
}

TEST(Training, IsTheSameForAnyNumberOfThreads) {
  std::vector<std::vector<double>> ends;
  for (const int threads : {1, 2, 4}) {
    const Threads scope(threads);
    TransformerConfig c;
    c.layers = 2, c.dropout = 0.1;
    Transformer m = make_transformer(c, 1);
    AdamWOptimizer optimizer;
    const NamedParameters parameters = parameters_of(m);
    Generator generator(2);
    for (int step = 0; step < 3; ++step) {
      Tape tape;
      watch_parameters(tape, m);
      Gradients g =
          tape.backward(m.loss(symbols({12, 64}, 65, 1), symbols({12, 64}, 65, 2), {&generator, true, false}));
      clip_grad_norm(g, parameters, 1);
      optimizer.step(parameters, g, 1e-3);
    }
    std::vector<double> all;
    for (const NamedParameter& p : parameters) {
      const std::vector<double> x = p.tensor->to_vector();
      all.insert(all.end(), x.begin(), x.end());
    }
    ends.push_back(std::move(all));
    EXPECT_EQ(ends.back(), ends.front()) << threads << " threads";
  }
}

}  // namespace
}  // namespace hilt
