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
      const Checkpoint written(there.path("a") + "/" + checkpoint_name(3));
      const HilbertSelfAttention &old = before.blocks[0].attention, &now = whole.model.blocks[0].attention;
      for (const auto& [name, x, y] : {std::tuple("slopes", old.terms.slopes, now.terms.slopes),
                                       {"relative", old.terms.relative, now.terms.relative},
                                       {"bias", old.terms.bias, now.terms.bias},
                                       {"sink", old.terms.sink, now.terms.sink}}) {
        EXPECT_EQ(y.dtype(), DType::f32) << name;
        EXPECT_NE(x.to_vector(), y.to_vector()) << name;
        EXPECT_TRUE(written.file().find("model.blocks.0.attention." + std::string(name)));
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

TEST(Training, AClonedModuleHasTensorsOfItsOwn) {
  Trainee run;
  Transformer frozen = cloned(run.model);
  const NamedParameters before = parameters_of(frozen);
  for (const NamedParameter& p : parameters_of(run.model))
    for (const NamedParameter& q : before) EXPECT_FALSE(p.tensor->storage() == q.tensor->storage()) << p.name;
  const Tensor ids = zeros({1, 8}, DType::i64);
  const std::vector<double> logits = run.model.logits(ids).to_vector();
  EXPECT_EQ(frozen.logits(ids).to_vector(), logits);
  run.step();
  EXPECT_NE(run.model.logits(ids).to_vector(), logits);
  EXPECT_EQ(frozen.logits(ids).to_vector(), logits);
}

TransformerConfig everything() {
  TransformerConfig c = small();
  c.layers = 2, c.kv_heads = 1, c.hidden = 24, c.classes = 5, c.order = parse_order("hilbert:2x4", 8);
  c.pattern = parse_pattern("segment:4+slide:2,dilation=2"), c.pattern_odd = parse_pattern("segment:4,shift=2");
  c.causality = Causality::none, c.backward = Backward::hybrid, c.dropout = 0.1, c.positions = Positions::rotary;
  c.terms = {
      .softcap = 1.0 / 3, .alibi = TermConfig::Alibi::learned, .relative = {3, 7}, .bias = {1, 2, 0, 8}, .sink = true};
  c.tie_weights = false, c.norm = NormKind::rms, c.epsilon = 1e-7, c.activation = Activation::silu_gated,
  c.bias = false;
  c.rotary_base = 500, c.deviation = 0.1, c.keep_order = true, c.checkpointing = true;
  return c;
}

TEST(Training, AnotherConfigurationIsRefusedByTheNameOfItsField) {
  const Temporary there;
  const std::string directory = there.path("a");
  Trainee run, other;
  run.step();
  save_training(directory, 1, run.model, run.optimizer, run.noise);
  other.model.config.heads = 4, other.model.config.pattern = parse_pattern("segment:4");
  EXPECT_EQ(error_of([&] { load_training(directory, other.model, other.optimizer, other.noise); }),
            "data: " + directory +
                "/ckpt-000001.safetensors: another configuration: heads: 2 in the checkpoint, 4 asked "
                "for; pattern: dense in the checkpoint, segment:4 asked for");
  EXPECT_EQ(other.optimizer.steps(), 0);
  other.model.config = everything();
  const std::string all = error_of([&] { load_training(directory, other.model, other.optimizer, other.noise); });
  for (const std::string field :
       {"layers",    "kv_heads", "hidden",     "classes",  "pattern",        "order", "pattern_odd", "causality",
        "positions", "softcap",  "alibi",      "relative", "bias_of_scores", "sink",  "rotary_base", "tie_weights",
        "norm",      "epsilon",  "activation", "bias"})
    EXPECT_NE(all.find(' ' + field + ": "), all.npos) << field << " is not in " << all;
  other.model.config = run.model.config;
  other.model.config.backward = Backward::taped;  // how, not what
  EXPECT_EQ(load_training(directory, other.model, other.optimizer, other.noise), 1);
  EXPECT_EQ(load_training(directory, parameters_of(other.model), other.optimizer, other.noise), 1);
}

TEST(Training, AModelIsOneFileWithoutAnOptimizer) {
  const Temporary there;
  const std::string path = there.path("model.safetensors");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TransformerConfig c = everything();
    c.dropout = 0;
    Transformer model = make_transformer(c, 3, dtype);
    save_model(path, model);
    const Checkpoint file(path);
    for (const SafetensorsEntry& entry : file.file().entries())
      EXPECT_TRUE(entry.name.starts_with("model.")) << entry.name;
    const Transformer read = load_model(path);
    EXPECT_TRUE(read.config == c);
    const Tensor ids = zeros({1, 8}, DType::i64);
    EXPECT_EQ(read.logits(ids).to_vector(), model.logits(ids).to_vector());
    EXPECT_EQ(read.tokens.weight.dtype(), dtype);
  }
  Trainee run;
  save_training(there.path("a"), 1, run.model, run.optimizer, run.noise);
  EXPECT_TRUE(load_model(there.path("a/ckpt-000001.safetensors")).config == run.model.config);
  save_training(there.path("b"), 1, parameters_of(run.model), run.optimizer, run.noise);
  const std::string bare = there.path("b/ckpt-000001.safetensors");
  EXPECT_EQ(error_of([&] { (void)load_model(bare); }), "data: " + bare + ": its metadata lack 'config.layers'");
}

TEST(Training, AModelFileThatLiesAsksForNoMemory) {
  const Temporary there;
  const std::string path = there.path("model.safetensors");
  Transformer model = make_transformer(small(), 1);
  std::vector<SafetensorsItem> items;
  for (const NamedParameter& p : parameters_of(model)) items.push_back({"model." + p.name, *p.tensor});
  save_model(path, model);
  const Checkpoint honest(path);
  const auto why = [&](const char* field, const char* value) {
    SafetensorsMetadata metadata;
    for (const auto& [key, text] : honest.file().metadata())
      if (key.starts_with("config.")) metadata[key] = text;
    metadata[std::string("config.") + field] = value;
    write_checkpoint(path, items, metadata);
    return error_of([&] { (void)load_model(path); });
  };
  for (const auto& [field, value] : {std::pair("vocab", "4611686018427387904"),
                                     {"hidden", "9223372036854775807"},
                                     {"context", "2000000000"},
                                     {"width", "1000000000000"},
                                     {"layers", "1000000000000"}})
    ASSERT_EQ(why(field, value), "data: " + path + ": its configuration is of a larger model than it holds") << field;
  for (const auto& [field, value] :
       {std::pair("order", "spiral"), {"layers", "-1"}, {"relative", "x"}, {"alibi", "some"}, {"bias", ""}})
    EXPECT_TRUE(why(field, value).starts_with("data: " + path + ": ")) << field << ": " << why(field, value);
  EXPECT_EQ(error_of([&] {
              TransformerConfig c = small();
              c.pattern = {blocks(4, {{0, 0}, {1, 1}})};
              save_model(path, make_transformer(c, 1));
            }),
            "usage: save_model: a list of block pairs has no text; name a rule, or write the tensors with "
            "write_checkpoint()");
  const Transformer taken = std::move(model);
  EXPECT_EQ(error_of([&] { save_model(path, model); }),
            "usage: save_model: this model lacks weights: it was moved from, or never made");
}

}  // namespace
}  // namespace hilt
