// Training saved and gone on with: a model, its optimizer, step and generator, through a directory.
#include "nn/training.h"
#include <gtest/gtest.h>
#include <tuple>
#include "nn/transformer.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary.h"

namespace hilt {
namespace {

TransformerConfig small() { return {.layers = 1, .heads = 2, .width = 16, .context = 8, .vocab = 7}; }

struct Trainee {
  Transformer model = make_transformer(small(), 1);
  AdamWOptimizer optimizer;
  Generator noise{5};

  /// A step whose numbers depend on all that a checkpoint holds.
  std::vector<double> step() {
    const NamedParameters parameters = parameters_of(model);
    const Tensor ids = randint(0, 7, {2, 8}, noise);
    Tape tape;
    watch_parameters(tape, model);
    optimizer.step(parameters, tape.backward(model.loss(ids, ids)), 0.01);
    return model.logits(ids).to_vector();
  }
};

TEST(Training, GoesOnBitForBitFromTheNewestOfADirectory) {
  const Temporary there;
  const std::string directory = there.path("made/on/the/way");
  Trainee whole;
  EXPECT_EQ(load_training(directory, parameters_of(whole.model), whole.optimizer, whole.noise), std::nullopt);
  for (Index step = 1; step <= 3; ++step) {
    whole.step();
    save_training(directory, step, parameters_of(whole.model), whole.optimizer, whole.noise);
  }
  EXPECT_EQ(checkpoint_steps(directory), (std::vector<Index>{2, 3}));
  Trainee resumed;
  resumed.noise = Generator(99);
  EXPECT_EQ(load_training(directory, parameters_of(resumed.model), resumed.optimizer, resumed.noise), 3);
  EXPECT_EQ(resumed.optimizer.steps(), 3);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(resumed.step(), whole.step());
}

// Every score term learns, in every type and mode; what is learned of it is saved in f32.
TEST(Training, TermsLearnAndGoOnBitForBit) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
      SCOPED_TRACE(testing::Message() << dtype << ", " << name_of(mode));
      TransformerConfig c = small();
      c.positions = Positions::none, c.backward = mode;
      c.terms = {
          .softcap = 5, .alibi = TermConfig::Alibi::learned, .relative = {7}, .bias = {1, 1, 0, 0}, .sink = true};
      Trainee whole, resumed;
      whole.model = make_transformer(c, 1, dtype), resumed.model = make_transformer(c, 2, dtype);
      const Transformer before = make_transformer(c, 1, dtype);
      const Temporary there;
      for (Index step = 1; step <= 3; ++step) whole.step();
      save_training(there.path("a"), 3, parameters_of(whole.model), whole.optimizer, whole.noise);
      const HilbertSelfAttention &old = before.blocks[0].attention, &now = whole.model.blocks[0].attention;
      for (const auto& [name, x, y] : {std::tuple("slopes", old.terms.slopes, now.terms.slopes),
                                       {"relative", old.terms.relative, now.terms.relative},
                                       {"bias", old.terms.bias, now.terms.bias},
                                       {"sink", old.terms.sink, now.terms.sink}}) {
        EXPECT_EQ(y.dtype(), DType::f32) << name;
        EXPECT_NE(x.to_vector(), y.to_vector()) << name;
        EXPECT_TRUE(Checkpoint(there.path("a") + "/" + checkpoint_name(3))
                        .file()
                        .find("model.blocks.0.attention." + std::string(name)));
      }
      EXPECT_EQ(load_training(there.path("a"), parameters_of(resumed.model), resumed.optimizer, resumed.noise), 3);
      for (int i = 0; i < 2; ++i) EXPECT_EQ(resumed.step(), whole.step());
    }
}

TEST(Training, AnotherModelIsRefusedAndNothingChanges) {
  const Temporary there;
  Trainee run, other;
  run.step();
  save_training(there.path("a"), 1, parameters_of(run.model), run.optimizer, run.noise);
  other.model = make_transformer({.layers = 2, .heads = 2, .width = 16, .context = 8, .vocab = 7}, 1);
  const std::vector<double> before = other.model.head ? other.model.head.to_vector() : std::vector<double>();
  const std::string error =
      error_of([&] { load_training(there.path("a"), parameters_of(other.model), other.optimizer, other.noise); });
  EXPECT_NE(error.find("data: "), std::string::npos) << error;
  EXPECT_NE(error.find("lacks the tensor"), std::string::npos) << error;
  EXPECT_EQ(other.optimizer.steps(), 0);
}

TEST(Training, AModuleOfAnotherTypeIsACopy) {
  const Trainee run;
  Transformer narrow = to(run.model, DType::bf16), same = to(run.model, Device{});
  for (const NamedParameter& p : parameters_of(narrow)) EXPECT_EQ(p.tensor->dtype(), DType::bf16) << p.name;
  for (const NamedParameter& p : parameters_of(same)) EXPECT_EQ(p.tensor->dtype(), DType::f32) << p.name;
}

}  // namespace
}  // namespace hilt
