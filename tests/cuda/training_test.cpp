// Training steps on a GPU: a small transformer, causal attention over a Hilbert order, AdamW.
// Losses beside the CPU's, no waiting inside a step, no memory but that of the first steps.
#include <gtest/gtest.h>
#include <cmath>
#include <functional>
#include <vector>
#include "core/cuda/context.h"
#include "core/random.h"
#include "core/replay.h"
#include "nn/optimizer.h"
#include "nn/layers.h"
#include "nn/transformer.h"
#include "ops/hilbert/attention.h"
#include "ops/ops.h"
#include "tests/support/scale.h"

namespace hilt {
namespace {

const Device kGpu{Device::Kind::cuda, 0};
constexpr Index kBatch = 4, kLength = 128, kWidth = 128, kHeads = 2, kVocabulary = 65;

class Model {
 public:
  Model(Device device, DType type) : device_(device) {
    const auto add_parameter = [&](const Shape& shape, double size, double around = 0) {
      const Tensor start = add(mul(randn(shape, {3, static_cast<std::uint64_t>(w_.size())}), size), around);
      w_.push_back(moved(to(start, type), device));
      for (auto* list : {&m_, &v_}) list->push_back(zeros(shape, DType::f32, device));
      exact_.push_back(type == DType::f32 ? Tensor{} : moved(start, device));
    };
    add_parameter({kVocabulary, kWidth}, 0.1);
    add_parameter({kLength, kWidth}, 0.1);
    add_parameter({kWidth}, 0, 1), add_parameter({kWidth}, 0);
    add_parameter({kWidth, 3 * kWidth}, 0.08);
    add_parameter({kWidth, kWidth}, 0.08);
    add_parameter({kWidth}, 0, 1);
    add_parameter({kWidth, 4 * kWidth}, 0.08), add_parameter({4 * kWidth}, 0);
    add_parameter({4 * kWidth, kWidth}, 0.04), add_parameter({kWidth}, 0);
    add_parameter({kWidth, kVocabulary}, 0.08);
    PlanSpec spec;
    spec.length = kLength, spec.heads = kHeads, spec.causality = Causality::token,
    spec.order = parse_order("hilbert", kLength);
    plan_ = make_plan(spec);
  }

  /// One step; the loss stays on the device.
  Tensor step(const Tensor& ids, const Tensor& targets, Index number) {
    Tape tape;
    for (const Tensor& w : w_) tape.watch(w);
    Tensor x = add(embedding(w_[0], ids), w_[1]);
    const Tensor qkv =
        reshape(matmul(layer_norm(x, w_[2], w_[3]), w_[4]), {kBatch, kLength, 3, kHeads, kWidth / kHeads});
    x = add(x, matmul(reshape(attention(qkv, plan_), {kBatch, kLength, kWidth}), w_[5]));
    x = add(x, linear(gelu_tanh(linear(rms_norm(x, w_[6]), w_[7], w_[8])), w_[9], w_[10]));
    const Tensor loss = cross_entropy(matmul(x, w_[11]), targets);
    const Gradients g = tape.backward(loss);
    for (std::size_t i = 0; i < w_.size(); ++i)
      adamw_step(w_[i], g[w_[i]], m_[i], v_[i], number, {}, exact_[i] ? &exact_[i] : nullptr);
    return loss;
  }

 private:
  Device device_;
  std::vector<Tensor> w_, m_, v_, exact_;
  PlanPtr plan_;
};

/// Text of a kind that can be learned: each id follows from the one before.
struct Batch {
  Tensor ids, targets;
};
Batch batch_of(Index number, Device device) {
  std::vector<std::int64_t> ids, targets;
  const std::vector<std::int64_t> start =
      randint(0, kVocabulary, {kBatch}, {8, static_cast<std::uint64_t>(number)}).to_vector<std::int64_t>();
  for (std::int64_t id : start)
    for (Index i = 0; i < kLength; ++i) {
      ids.push_back(id);
      id = (id * 3 + 1) % kVocabulary;
      targets.push_back(id);
    }
  return {moved(from_values(ids, {kBatch, kLength}), device), moved(from_values(targets, {kBatch, kLength}), device)};
}

std::vector<double> losses(Device device, DType type, Index steps) {
  Model model(device, type);
  std::vector<double> out;
  for (Index i = 1; i <= steps; ++i) {
    const Batch b = batch_of(i, device);
    out.push_back(model.step(b.ids, b.targets, i).item());
  }
  return out;
}

double distance(const Tensor& x, const Tensor& y) {  // of the largest
  const std::vector<float> a = x.to_vector<float>(), b = contiguous(y).to_vector<float>();
  double most = 0, off = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max<double>(most, std::abs(b[i])), off = std::max<double>(off, std::abs(a[i] - b[i]));
  return off / most;
}

class TrainingOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << gpu_descriptions()[0];
  }
};

TEST_F(TrainingOnGpu, LossesAreTheCpus) {
  constexpr Index kSteps = 30;
  const std::vector<double> cpu = losses({}, DType::f32, kSteps), gpu = losses(kGpu, DType::f32, kSteps),
                            narrow = losses(kGpu, DType::bf16, kSteps);
  EXPECT_LT(cpu.back(), 0.8 * cpu.front());
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_NEAR(gpu[i], cpu[i], 1e-3 * cpu[i])
        << i;  // roundings of f32 that AdamW's division by sqrt(v) enlarges step by step
    EXPECT_NEAR(narrow[i], cpu[i], 3e-2 * cpu[i]) << i;  // weights and activations of 8 bits
  }
  EXPECT_EQ(losses(kGpu, DType::bf16, kSteps), narrow);  // to the bit
}

TEST_F(TrainingOnGpu, StepsNeitherWaitNorGrow) {
  for (DType type : {DType::f32, DType::bf16}) {
    Model model(kGpu, type);
    const Batch b = batch_of(1, kGpu);
    Tensor loss;
    for (Index i = 1; i <= 5; ++i) loss = model.step(b.ids, b.targets, i);
    const MemoryStats before = memory_stats(kGpu);
    const DeviceCounters counted = device_counters(kGpu);
    const Index steps = scaled(10000, 200);
    for (Index i = 6; i < 6 + steps; ++i) loss = model.step(b.ids, b.targets, i);
    EXPECT_EQ(device_counters(kGpu).host_waits, counted.host_waits) << type;
    const MemoryStats after = memory_stats(kGpu);
    EXPECT_EQ(after.from_system, before.from_system) << type;
    EXPECT_EQ(after.live, before.live) << type;
    EXPECT_TRUE(std::isfinite(loss.item()));
    std::cout << type << ": " << (device_counters(kGpu).launches - counted.launches) / static_cast<std::uint64_t>(steps)
              << " launches a step" << std::endl;
  }
}

enum class Kind { plain, checkpointing, keeps_order };
/// A transformer with dropout and a clipped norm, as `train` does it.
struct Trained {
  Transformer model;
  AdamWOptimizer optimizer;
  NamedParameters parameters = parameters_of(model);
  Tensor ids = zeros({kBatch, kLength}, DType::i64, kGpu), targets = zeros({kBatch, kLength}, DType::i64, kGpu), loss,
         norm;
  Gradients gradients;
  Generator noise{5};
  Replay replay{kGpu};

  explicit Trained(Kind kind) : model(make_transformer(config(kind), 3, DType::bf16)) {
    for (const NamedParameter& p : parameters) *p.tensor = moved(*p.tensor, kGpu);
  }
  static TransformerConfig config(Kind kind) {
    TransformerConfig c;
    c.layers = 2, c.heads = 2, c.width = kWidth, c.context = kLength, c.vocab = kVocabulary, c.dropout = 0.2,
    c.checkpointing = kind == Kind::checkpointing;
    if (kind == Kind::keeps_order) c.keep_order = true, c.order = parse_order("hilbert", kLength);
    return c;
  }
  void pass() {
    loss = {}, gradients = {};
    Tape tape;
    watch_parameters(tape, model);
    loss = model.loss(ids, targets, {.noise = &noise});
    gradients = tape.backward(loss);
    norm = norm_of(gradients, parameters, loss);
  }
  double step(Index number, bool recorded) {
    const Batch b = batch_of(number, kGpu);
    copy(ids, b.ids), copy(targets, b.targets);
    if (recorded) replay([&] { pass(); });
    else pass();
    optimizer.step(parameters, gradients, 1e-3, {norm, 0.5});
    return loss.item();
  }
};

TEST_F(TrainingOnGpu, ReplayedStepsAreTheSameSteps) {
  for (Kind kind : {Kind::plain, Kind::checkpointing, Kind::keeps_order}) {
    Trained plain(kind), replayed(kind);
    for (Index i = 1; i <= 40; ++i) {
      if (i == 20) release_pool(kGpu);  // what a recording works on stays
      const double expected = plain.step(i, false);
      ASSERT_EQ(replayed.step(i, true), expected) << i;
      ASSERT_EQ(replayed.norm.item(), plain.norm.item()) << i;
      ASSERT_EQ(replayed.noise.state().stream, plain.noise.state().stream) << i;
      ASSERT_EQ(replayed.replay.is_recorded(), i >= 2);
    }
    plain.noise.set_state({9, 100}), replayed.noise.set_state({9, 100});  // another seed: recorded anew
    for (Index i = 41; i <= 44; ++i) ASSERT_EQ(replayed.step(i, true), plain.step(i, false)) << i;
  }
}

TEST_F(TrainingOnGpu, ReplayedStepsNeitherWaitNorGrowNorLaunchOneByOne) {
  const std::size_t before_all = memory_stats(kGpu).live;
  {
    Trained t(Kind::plain);
    double loss = 0;
    for (Index i = 1; i <= 5; ++i) loss = t.step(i, true);
    const MemoryStats before = memory_stats(kGpu);
    const DeviceCounters counted = device_counters(kGpu);
    const Index steps = scaled(10000, 200);
    for (Index i = 1; i <= steps; ++i) {
      t.replay([&] { t.pass(); });
      t.optimizer.step(t.parameters, t.gradients, 1e-3, {t.norm, 0.5});
    }
    const DeviceCounters after = device_counters(kGpu);
    EXPECT_EQ(after.host_waits, counted.host_waits);
    EXPECT_EQ(after.launches - counted.launches, 2 * static_cast<std::uint64_t>(steps));  // the recording, and AdamW
    EXPECT_EQ(memory_stats(kGpu).from_system, before.from_system);
    EXPECT_EQ(memory_stats(kGpu).live, before.live);
    EXPECT_LT(t.loss.item(), loss);
  }
  EXPECT_EQ(memory_stats(kGpu).live, before_all);
}

TEST_F(TrainingOnGpu, ReplaySaysWhatItCannotRecord) {
  Tensor x = ones({4}, DType::f32, kGpu), y;
  const auto error_of = [&](const std::function<void()>& work) {
    Replay replay(kGpu);
    replay(work);
    try {
      replay(work);
    } catch (const Error& e) {
      replay([&] { y = add(x, 1.0); });  // and goes on
      EXPECT_TRUE(replay.is_recorded());
      EXPECT_EQ(y.to_vector(), std::vector<double>(4, 2));
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(
      error_of([&] { (void)sum(x).item(); }).find("Replay: a value was asked for while the work of cuda:0 is recorded"),
      std::string::npos);
  EXPECT_NE(error_of([&] { y = moved(ones({4}), kGpu); }).find("Replay: something was copied from the host"),
            std::string::npos);
  EXPECT_NE(error_of([&] { synchronize(kGpu); }).find("Replay: synchronize()"), std::string::npos);
}

// One after the other, with keys and values kept: a plan and its way to the GPU once in 64 tokens.
TEST_F(TrainingOnGpu, KeptTokensHaveTheLogitsOfTheFullPass) {
  for (const char* order : {"row", "hilbert"})
    for (const Positions positions : {Positions::learned, Positions::rotary}) {
      TransformerConfig c;
      c.layers = 2, c.heads = 2, c.kv_heads = 1, c.width = 128, c.context = 1200, c.vocab = kVocabulary;
      c.order = parse_order(order, c.context), c.positions = positions;
      Transformer m = make_transformer(c, 3, DType::bf16);
      for (const NamedParameter& p : parameters_of(m)) *p.tensor = moved(*p.tensor, kGpu);
      const Tensor ids = moved(randint(0, c.vocab, {2, c.context}, {1, 1}), kGpu), all = m.logits(ids);
      KeyValueCache cache(c.context);
      const Index prompt = 1100;
      double worst = distance(m.logits(slice(ids, 1, 0, prompt), {.cache = &cache}), slice(all, 1, 0, prompt));
      for (Index t = prompt; t < c.context; ++t) {
        const std::uint64_t waits = device_counters(kGpu).host_waits;
        const Tensor y = m.logits(slice(ids, 1, t, t + 1), {.cache = &cache});
        EXPECT_TRUE(t % 64 == 0 || t == prompt || device_counters(kGpu).host_waits == waits) << t;
        worst = std::max(worst, distance(y, slice(all, 1, t, t + 1)));
      }
      EXPECT_LT(worst, 3e-2) << order << ", " << name_of(positions);
    }
}

TEST_F(TrainingOnGpu, ProductsAreOfAllBits) {
  // 1 + 2^-12 has more bits than TF32 keeps.
  const Tensor a = full({64, 64}, 1 + 0x1p-12, DType::f32, kGpu), b = full({64, 64}, 1.0, DType::f32, kGpu);
  for (const Tensor& y : {matmul(a, b), linear(a, b, zeros({64}, DType::f32, kGpu))})
    EXPECT_EQ(y.to_vector()[5], 64 * (1 + 0x1p-12));
}

TEST_F(TrainingOnGpu, AStepWhoseNormIsNotFiniteChangesNothing) {
  for (double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
    Tensor w = ones({5000}, DType::bf16, kGpu), m = zeros({5000}, DType::f32, kGpu),
           v = zeros({5000}, DType::f32, kGpu);
    const std::vector<Tensor> g{full({5000}, 2.0, DType::bf16, kGpu)};
    const AdamWUpdate one{&w, g[0], &m, &v};
    adamw_step({&one, 1}, 1, {}, {norm_of(g, full({}, bad, DType::f32, kGpu)), 1});
    EXPECT_EQ(w.to_vector(), std::vector<double>(5000, 1));
    EXPECT_EQ(m.to_vector(), std::vector<double>(5000, 0));
    adamw_step({&one, 1}, 1, {}, {norm_of(g, full({}, 3.0, DType::f32, kGpu)), 1});
    EXPECT_NEAR(m.to_vector()[4999], 0.1 * 2 / std::sqrt(4.0 * 5000), 1e-6);
  }
}

TEST_F(TrainingOnGpu, ManyParametersInOneUpdateAndTheirNorm) {
  const Index sizes[] = {1, 7, 2048, 2049, 0, 5000, 100003};
  constexpr std::size_t kMany = 150;                     // more than a launch takes
  std::vector<Tensor> w[2], m[2], v[2], exact[2], g[2];  // on the CPU, on the GPU
  for (std::size_t i = 0; i < kMany; ++i) {
    const DType type = i % 5 == 3 ? DType::f32 : DType::bf16;
    const Shape shape{sizes[i % std::size(sizes)]};
    for (std::size_t way : {0U, 1U}) {
      const Device device = way ? kGpu : Device{};
      const auto drawn = [&](std::uint64_t stream) { return moved(to(randn(shape, {stream, i}), type), device); };
      w[way].push_back(drawn(1)), g[way].push_back(drawn(2));
      m[way].push_back(moved(randn(shape, {3, i}), device)),
          v[way].push_back(moved(square(randn(shape, {4, i})), device));
      exact[way].push_back(type == DType::f32 ? Tensor{} : to(w[way].back(), DType::f32));
    }
  }
  EXPECT_NEAR(global_norm(g[1]) / global_norm(g[0]), 1, 1e-12);
  for (std::size_t way : {0U, 1U}) {
    std::vector<AdamWUpdate> updates;
    for (std::size_t i = 0; i < kMany; ++i)
      updates.push_back({&w[way][i], g[way][i], &m[way][i], &v[way][i], exact[way][i] ? &exact[way][i] : nullptr,
                         0.1 * static_cast<double>(i % 3)});
    adamw_step(updates, 2, {.lr = 0.01});
  }
  for (std::size_t i = 0; i < kMany; ++i)
    for (const auto* list : {&w, &m, &v, &exact}) {
      if (!(*list)[0][i]) continue;
      const std::vector<double> cpu = (*list)[0][i].to_vector(), gpu = (*list)[1][i].to_vector();
      // Eight roundings of f32; of bf16 one to either side.
      const double allowed = (*list)[0][i].dtype() == DType::bf16 ? 0x1p-8 : 8 * 0x1p-23;
      for (std::size_t e = 0; e < cpu.size(); ++e)
        ASSERT_NEAR(cpu[e], gpu[e], (1 + std::abs(cpu[e])) * allowed) << "parameter " << i << ", element " << e;
    }
}

}  // namespace
}  // namespace hilt
