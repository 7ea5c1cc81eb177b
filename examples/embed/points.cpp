// Clouds of points, several in a row as documents. Each layer sees them along another curve, in
// segments: points that one curve parts are neighbours on the next. Each batch has its own orders,
// and all have one plan.
//
// A cloud holds six shapes of four kinds. A point knows where it lies and a hint of its shape's
// kind, right 2 times in 5; the hints around it say the rest. `row`: points in random order.
//
//   points [all|morton|row] [SEED] [STEPS] [SEGMENT]
//   all, seed 1: 80.6 % of points right after 800 steps, 40.2 % by hints alone
#include <hilt/hilt.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

using namespace hilt;

constexpr Index kKinds = 4, kShapes = 6, kWidth = 32, kHeads = 4, kWaves = 24, kLength = 1024;
const std::vector<Index> kClouds{300, 180, 344, 200};  // points of each
constexpr const char* kCurves[] = {"hilbert", "hilbert-trans", "morton", "morton-trans"};

struct Clouds {
  Tensor xyz, hints, kinds;  // [L, 3], [L], [L]; features are [1, L, waves of the place + kinds]
  Tensor features() const {
    const Tensor turn = 10 * randn({3, kWaves}, RandomKey{1}), phase = 6.3 * rand({kWaves}, RandomKey{2});
    return unsqueeze(cat({sin(matmul(xyz, turn) + phase), one_hot(hints, kKinds, DType::f32)}, 1), 0);
  }
};
Clouds draw(std::mt19937& random) {
  const auto uniform = [&](double low, double high) { return std::uniform_real_distribution(low, high)(random); };
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  struct Shape {
    std::size_t kind, axis;
    std::array<double, 3> center;
  };
  std::vector<float> xyz;
  std::vector<std::int64_t> hints, kinds;
  for (const Index points : kClouds) {
    std::array<Shape, kShapes> shapes{};
    for (Shape& s : shapes) s = {below(kKinds), below(3), {uniform(0, 1), uniform(0, 1), uniform(0, 1)}};
    for (Index i = 0; i < points; ++i) {
      const Shape& s = shapes[below(kShapes)];
      const std::size_t a = s.axis, b = (a + 1) % 3, c = (a + 2) % 3;
      std::array<double, 3> x{uniform(-1, 1), uniform(-1, 1), uniform(-1, 1)};
      double r = 1;
      if (s.kind == 0) r = std::hypot(x[0], x[1], x[2]);  // a sphere
      else if (s.kind == 1) x[a] = x[a] < 0 ? -1 : 1;     // two sides of a box
      else if (s.kind == 2) x[b] = x[c] = 0;              // a rod
      else x[a] = 0, r = std::hypot(x[b], x[c]);          // a ring
      for (std::size_t e = 0; e < 3; ++e) xyz.push_back(static_cast<float>(s.center[e] + 0.12 * x[e] / r));
      kinds.push_back(static_cast<std::int64_t>(s.kind));
      hints.push_back(uniform(0, 1) < 0.2 ? kinds.back() : static_cast<std::int64_t>(below(kKinds)));  // 0.2 + 0.8 / 4
    }
  }
  return {from_values(xyz, {kLength, 3}), from_values(hints, {kLength}), from_values(kinds, {kLength})};
}

/// Into the width and out of it, then for each layer q, k and v, a projection, up and down.
struct Model {
  std::vector<Linear> weights;
  Norm norm = make_norm(NormKind::layer, kWidth, false);  // not learned
  explicit Model(Generator& noise) {
    const auto add = [&](Index from, Index to, double deviation) {
      weights.push_back(make_linear(from, to, true, deviation, noise));
    };
    add(kWaves + kKinds, kWidth, 0.3), add(kWidth, kKinds, 0.1);
    for (std::size_t i = 0; i < std::size(kCurves); ++i)
      add(kWidth, 3 * kWidth, 0.18), add(kWidth, kWidth, 0.06), add(kWidth, 2 * kWidth, 0.18),
          add(2 * kWidth, kWidth, 0.04);
  }
  Tensor operator()(const Clouds& clouds, const PlanPtr& plan, const std::string& curves) const {
    Tensor x = weights[0](clouds.features());
    for (std::size_t i = 0; i < std::size(kCurves); ++i) {
      AttentionOptions how;
      if (curves == "row") how.permutation = arange(kLength);
      else how.permutation = order_of_points(clouds.xyz, curves == "all" ? kCurves[i] : curves, 10, kClouds).token_at;
      const Linear* const of = &weights[2 + 4 * i];
      const Tensor qkv = reshape(of[0](norm(x)), {1, kLength, 3, kHeads, kWidth / kHeads});
      x = of[1].onto(x, reshape(attention(qkv, plan, how), x.shape()));
      x = of[3].onto(x, gelu(of[2](norm(x))));
    }
    return reshape(weights[1](x), {kLength, kKinds});
  }
  void visit_parameters(const std::string& at, const ParameterVisitor& visit) {
    for (std::size_t i = 0; Linear & w : weights) w.visit_parameters(join_name(at, std::to_string(i++)), visit);
  }
};

int main(int argc, char** argv) try {
  const auto number = [&](int i, Index usual) { return argc > i ? std::atoll(argv[i]) : usual; };
  const std::string curves = argc > 1 ? argv[1] : "all";
  const Index seed = number(2, 1), steps = number(3, 800), segment = number(4, 32);
  PlanSpec spec{.length = kLength, .heads = kHeads, .order = parse_order("given", kLength)};
  spec.pattern = parse_pattern("segment:" + std::to_string(segment));
  spec.documents = {DocumentList(kClouds.begin(), kClouds.end())};
  const PlanPtr plan = make_plan(spec);
  std::mt19937 random(static_cast<unsigned>(seed));
  Generator noise(random());
  Model model(noise);
  AdamWOptimizer optimizer;
  const NamedParameters parameters = parameters_of(model);
  for (Index step = 0; step < steps; ++step) {
    const Clouds clouds = draw(random);
    Tape tape;
    watch_parameters(tape, model);
    optimizer.step(parameters, tape.backward(cross_entropy(model(clouds, plan, curves), clouds.kinds)),
                   Schedule{.peak = 0.004, .steps = steps}(step));
  }
  double right = 0, hinted = 0;  // percent of 20 batches
  for (int batch = 0; batch < 20; ++batch) {
    const Clouds clouds = draw(random);
    const auto share = [&](const Tensor& said) { return mean(to(equal(said, clouds.kinds), DType::f64)).item(); };
    right += 5 * share(argmax(model(clouds, plan, curves))), hinted += 5 * share(clouds.hints);
  }
  std::printf("%s, seed %s: %.1f %% of points right after %s steps, %.1f %% by hints alone\n", curves.c_str(),
              std::to_string(seed).c_str(), right, std::to_string(steps).c_str(), hinted);
} catch (const Error& e) {
  std::fprintf(stderr, "points: error: %s\n", e.what());
  return static_cast<int>(e.code());
}
