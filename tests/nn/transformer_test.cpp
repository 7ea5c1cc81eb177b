// The whole model: gradients, modes, checkpointing, curve order, initial values, and what one step
// costs in memory.
#include "nn/transformer.h"
#include <algorithm>
#include <utility>
#include "tests/nn/modules.h"
#include "nn/optimizer.h"
#include "tests/support/settings.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"

namespace hilt {
namespace {

/// Two layers of four numbers: small enough to differentiate each weight by differences.
TransformerConfig tiny() {
  TransformerConfig c;
  c.layers = 2, c.heads = 2, c.width = 4, c.hidden = 6, c.context = 8, c.vocab = 5;
  c.order.kind = Order::Kind::hilbert;
  c.pattern = parse_pattern("segment:4");
  return c;
}
/// A bidirectional encoder of boards: labels a cell, cells in Hilbert order.
TransformerConfig board_config(Index height, Index width, Index states, Index classes, const Pattern& pattern) {
  TransformerConfig c;
  c.context = height * width, c.vocab = states, c.classes = classes, c.pattern = pattern;
  c.order.kind = Order::Kind::hilbert, c.order.grid.width = width, c.order.grid.height = height;
  c.causality = Causality::none, c.tie_weights = false;
  return c;
}
Transformer model_of(const TransformerConfig& c, DType dtype = DType::f64) {
  return shaken(make_transformer(c, 1, dtype), 0.4);
}

struct Variant {
  const char* name;
  TransformerConfig config;
};
std::vector<Variant> variants() {
  std::vector<Variant> all{{"learned, tied", tiny()}};
  TransformerConfig c = tiny();
  c.positions = Positions::rotary, c.norm = NormKind::rms, c.activation = Activation::silu_gated, c.bias = false,
  c.tie_weights = false, c.kv_heads = 1;
  all.push_back({"rotary, rms, gated, untied, one key head", c});
  c = tiny();
  c.keep_order = true;
  all.push_back({"kept in curve order", c});
  c.positions = Positions::rotary;
  all.push_back({"rotary, kept in curve order", c});
  c = tiny();
  c.checkpointing = true;
  all.push_back({"checkpointing", c});
  c = board_config(2, 4, 3, 2, parse_pattern("neighborhood2d:1x3"));
  c.layers = 2, c.heads = 2, c.width = 4, c.hidden = 6;
  all.push_back({"board", c});
  c.keep_order = true;
  all.push_back({"board, kept in curve order", c});
  c.terms = {.alibi = TermConfig::Alibi::published, .relative = {3, 5}, .sink = true};
  all.push_back({"terms on a board, kept in curve order", c});
  c = tiny();
  c.positions = Positions::none;
  c.terms = {.softcap = 2, .alibi = TermConfig::Alibi::learned, .relative = {5}, .bias = {1, 2, 0, 0}, .sink = true};
  all.push_back({"all terms", c});
  c.checkpointing = true, c.kv_heads = 1, c.terms.bias = {1, 1, 1, 0};
  all.push_back({"all terms, checkpointing, one key head", c});
  c = tiny();
  c.pattern_odd = parse_pattern("segment:4,shift=2");
  all.push_back({"another pattern in odd blocks", c});
  return all;
}
// Only the odd blocks take the other pattern: the same weights with attention put together by hand.
TEST(TransformerOddPattern, BelongsToOddBlocksAlone) {
  TransformerConfig c = tiny();
  c.layers = 5, c.pattern_odd = parse_pattern("slide:1");
  const Transformer m = shaken(make_transformer(c, 1, DType::f64), 0.4);
  TransformerConfig plain = c;
  plain.pattern_odd.clear();
  Transformer by_hand = m;
  by_hand.config = plain;
  for (std::size_t i = 0; i < 5; ++i) {
    by_hand.blocks[i].attention.config = attention_config(plain);
    if (i % 2 == 1) by_hand.blocks[i].attention.config.pattern = parse_pattern("slide:1");
  }
  const Tensor ids = symbols({2, c.context}, c.vocab, 1);
  EXPECT_EQ(m.logits(ids).to_vector(), by_hand.logits(ids).to_vector());
  by_hand.blocks[3].attention.config.pattern = c.pattern;
  EXPECT_NE(m.logits(ids).to_vector(), by_hand.logits(ids).to_vector());
  for (const char* order : {"auto", "hilbert,scope=segment"}) {
    c.order = parse_order(order, c.context);
    EXPECT_EQ(
        error_of([&] { check_config(c); }),
        "usage: pattern_odd: orders auto and scope=segment follow one pattern, and all blocks need the same; name "
        "an order");
  }
}

// Patches are rows of numbers, with one label for their mean: put together by hand.
TEST(TransformerImage, IsTheMeanOfItsPatches) {
  TransformerConfig c = board_config(2, 4, 3, 5, parse_pattern("segment:4"));
  c.layers = 2, c.heads = 2, c.width = 4, c.hidden = 6, c.image = true;
  const Transformer m = shaken(make_transformer(c, 1, DType::f64), 0.4);
  const Tensor patches = randn({2, 8, 3}, {3, 1}, DType::f64);
  Tensor x = add(matmul(patches, m.tokens.weight), m.positions.weight);
  for (const Block& block : m.blocks) x = block(x);
  const Tensor y = matmul(mean(m.norm(x), {1}, true), m.head);
  EXPECT_LE(distance(m.logits(patches), y), 1e-13);
  EXPECT_EQ(m.logits(patches).shape(), (Shape{2, 1, 5}));
  const Tensor labels = from_values<std::int32_t>({4, 1}, {2, 1});
  EXPECT_NEAR(m.loss(patches, labels).item(), cross_entropy(y, labels).item(), 1e-13);
  EXPECT_EQ(error_of([&] {
              (void)m.logits(symbols({2, 8}, 3, 1));
            }),
            "usage: Transformer: patches must be numbers [batch, length, 3], got [2, 8]");
  EXPECT_EQ(error_of([&] {
              (void)m.loss(patches, symbols({2, 8}, 3, 1));
            }),
            "usage: Transformer: targets [2, 8] must be a label an image, [2, 1]");
}

Tensor ids_of(const TransformerConfig& c, Index batch = 2) { return symbols({batch, c.context}, c.vocab, 1); }
Tensor targets_of(const TransformerConfig& c, Index batch = 2) { return symbols({batch, c.context}, c.outputs(), 2); }

TEST(Transformer, GradientsAgreeWithDifferences) {
  Index checked = 0, drawn = 0;
  for (const auto& [name, config] : variants())
    for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
      if (drawn++ % scaled(1, 2) != 0) continue;  // two and one mode in turn
      TransformerConfig c = config;
      c.backward = mode;
      const Tensor ids = ids_of(c), targets = targets_of(c);
      const auto loss = gradcheck_module(
          model_of(c), {}, [&](const Transformer& m, std::span<const Tensor>) { return m.loss(ids, targets); });
      EXPECT_TRUE(loss) << name << ", " << name_of(mode) << ": " << loss.where;
      checked += loss.checked;
    }
  const TransformerConfig c = tiny();
  const auto logits = gradcheck_module(
      model_of(c), {}, [&](const Transformer& m, std::span<const Tensor>) { return m.logits(ids_of(c)); });
  EXPECT_TRUE(logits) << logits.where;
  RecordProperty("partial_derivatives", static_cast<int>(checked + logits.checked));
  EXPECT_GT(checked, scaled(5000, 2500));
}

TEST(Block, GradientsAgreeWithDifferences) {
  const Transformer model = model_of(tiny());
  const auto checked = gradcheck_module(model.blocks[0], {noise({1, 8, 4}, 5)},
                                        [](const Block& b, std::span<const Tensor> in) { return b(in[0]); });
  EXPECT_TRUE(checked) << checked.where;
}

TEST(Block, IsItsFormula) {
  const Block b = model_of(tiny()).blocks[0];
  const Tensor x = noise({2, 8, 4}, 5);
  const Tensor mixed = add(x, b.attention(b.norm1(x)));
  EXPECT_LE(distance(b(x), add(mixed, b.mlp(b.norm2(mixed)))), 1e-13);
}

TEST(Transformer, LogitsAreTheFormula) {
  for (const auto& [name, c] : variants()) {
    const Transformer m = model_of(c);
    const Tensor ids = ids_of(c);
    TransformerConfig plain = c;
    plain.keep_order = false;
    Tensor x = m.tokens(ids);
    if (c.positions == Positions::learned) x = add(x, m.positions.weight);
    for (const Block& b : m.blocks) x = b(x);
    const Tensor expected = matmul(m.norm(x), m.head ? m.head : transpose(m.tokens.weight));
    EXPECT_LE(distance(m.logits(ids), expected), 1e-12) << name;
    EXPECT_NEAR(m.loss(ids, targets_of(c)).item(), cross_entropy(expected, targets_of(c)).item(), 1e-12) << name;
    EXPECT_LE(distance(m.last_logits(ids), squeeze(slice(expected, 1, c.context - 1, c.context), 1)), 1e-12) << name;
  }
}

TEST(Transformer, BackwardModesAgree) {
  for (const auto& [name, config] : variants()) {
    std::vector<Slopes> all;
    for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
      TransformerConfig c = config;
      c.backward = mode;
      all.push_back(slopes_of(model_of(c), [&](const Transformer& m) { return m.loss(ids_of(c), targets_of(c)); }));
    }
    SCOPED_TRACE(name);
    expect_close(all[0], all[2], 1e-11);
    expect_close(all[1], all[2], 1e-11);
  }
}

TEST(Transformer, CheckpointingChangesNoBit) {
  for (const DType dtype : {DType::f32, DType::f64})
    for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused})
      for (const double dropout : {0.0, 0.3}) {
        TransformerConfig c = tiny();
        c.dropout = dropout;
        c.backward = mode;
        const auto run = [&](bool checkpointing) {
          c.checkpointing = checkpointing;
          Generator generator(17);
          return slopes_of(model_of(c, dtype), [&](const Transformer& m) {
            return m.loss(ids_of(c), targets_of(c), {&generator, true, false});
          });
        };
        expect_same_bits(run(true), run(false));
      }
}

TEST(Transformer, CheckpointingSavesMemory) {
  TransformerConfig c = tiny();
  c.layers = 8;
  const auto saved = [&](bool checkpointing) {
    c.checkpointing = checkpointing;
    Transformer m = model_of(c);
    Tape tape;
    watch_parameters(tape, m);
    const Tensor loss = m.loss(ids_of(c), targets_of(c));
    return tape.saved_bytes();
  };
  EXPECT_LT(saved(true), saved(false) / 3);
}

TEST(Transformer, CurveOrderThroughTheModelEqualsReorderingEveryCall) {
  for (const char* pattern : {"segment:4", "slide:2", "dense", "segment:2+segment:8,dilation=2"})
    for (const Causality causality : {Causality::token, Causality::none, Causality::curve})
      for (const Positions positions : {Positions::learned, Positions::rotary, Positions::none})
        for (const Index length : {8, 7, 1}) {
          TransformerConfig c = tiny();
          c.pattern = parse_pattern(pattern), c.causality = causality, c.positions = positions;
          const Tensor ids = slice(ids_of(c), 1, 0, length), targets = slice(targets_of(c), 1, 0, length);
          const auto run = [&](bool keep) {
            c.keep_order = keep;
            return model_of(c);
          };
          const Transformer kept = run(true), each = run(false);
          SCOPED_TRACE(testing::Message()
                       << pattern << ", " << name_of(causality) << ", " << name_of(positions) << ", " << length);
          EXPECT_LE(distance(kept.logits(ids), each.logits(ids)), 1e-12);
          EXPECT_LE(distance(kept.last_logits(ids), each.last_logits(ids)), 1e-12);
          const auto loss = [&](const Transformer& m) { return m.loss(ids, targets); };
          expect_close(slopes_of(kept, loss), slopes_of(each, loss), 1e-11);
          // Off for one call, nothing is permuted.
          const CallOptions row{nullptr, false, false};
          EXPECT_EQ(kept.logits(ids, row).to_vector(), each.logits(ids, row).to_vector());
        }
}

TEST(Transformer, NoTokenSeesTheNext) {
  for (const auto& [name, config] : variants()) {
    if (config.causality != Causality::token) continue;
    const Transformer m = model_of(config);
    const Tensor ids = ids_of(config, 1);
    const std::vector<double> before = m.logits(ids).to_vector();
    for (Index t = 1; t < config.context; ++t) {
      std::vector<std::int64_t> changed = ids.to_vector<std::int64_t>();
      auto& symbol = changed[static_cast<std::size_t>(t)];
      symbol = (symbol + 1) % config.vocab;
      const std::vector<double> after = m.logits(from_values(changed, ids.shape())).to_vector();
      const auto first = static_cast<std::ptrdiff_t>(t * config.outputs());
      EXPECT_TRUE(std::equal(before.begin(), before.begin() + first, after.begin())) << name << ", token " << t;
      EXPECT_FALSE(std::equal(before.begin() + first, before.begin() + first + config.outputs(), after.begin() + first))
          << name << ", token " << t;
    }
  }
}

TEST(Transformer, DropoutIsForTrainingAlone) {
  TransformerConfig c = tiny();
  const Tensor ids = ids_of(c);
  const std::vector<double> plain = model_of(c).logits(ids).to_vector();
  c.dropout = 0.4;
  const Transformer m = model_of(c);
  EXPECT_EQ(m.logits(ids).to_vector(), plain);
  Generator a(1), b(1);
  const std::vector<double> first = m.logits(ids, {&a, true, false}).to_vector();
  EXPECT_NE(first, plain);
  EXPECT_EQ(first, m.logits(ids, {&b, true, false}).to_vector());
}

TEST(Transformer, StartsAsGpt2Does) {
  TransformerConfig c;
  c.layers = 8, c.width = 64, c.heads = 4, c.vocab = 300, c.context = 256;
  Transformer m = make_transformer(c, 3);
  for (const NamedParameter& p : parameters_of(m)) {
    const std::vector<double> x = p.tensor->to_vector();
    double mean = 0, square = 0;
    for (const double v : x) mean += v / static_cast<double>(x.size()), square += v * v / static_cast<double>(x.size());
    const auto n = static_cast<double>(x.size());
    if (p.tensor->rank() == 1) {
      const double expected = p.name.ends_with("weight") ? 1 : 0;
      EXPECT_EQ(std::ranges::count(x, expected), static_cast<std::ptrdiff_t>(x.size())) << p.name;
      continue;
    }
    const bool joins = p.name.ends_with("projection.weight") || p.name.ends_with("down.weight");
    const double deviation = joins ? 0.02 / 4 : 0.02;                                       // sqrt(2 * 8) = 4
    EXPECT_NEAR(std::sqrt(square), deviation, 5 * deviation / std::sqrt(2 * n)) << p.name;  // five standard errors
    EXPECT_NEAR(mean, 0, 5 * deviation / std::sqrt(n)) << p.name;
  }
  EXPECT_FALSE(m.head) << "tied";
  EXPECT_NEAR(m.loss(ids_of(c), targets_of(c)).item(), std::log(300.0), 0.1) << "knows nothing yet";
  EXPECT_EQ(make_transformer(c, 3).blocks[1].mlp.up.weight.to_vector(), m.blocks[1].mlp.up.weight.to_vector());
  EXPECT_NE(make_transformer(c, 4).blocks[1].mlp.up.weight.to_vector(), m.blocks[1].mlp.up.weight.to_vector());
}

TEST(Transformer, CountsItsParameters) {
  TransformerConfig c;
  c.bias = false;
  Transformer m = make_transformer(c, 1);
  EXPECT_EQ(parameter_count(m), 804096) << "nanoGPT's small character model";
  std::vector<std::string> names;
  for (const NamedParameter& p : parameters_of(m)) names.push_back(p.name);
  EXPECT_EQ(names.front(), "tokens.weight");
  EXPECT_EQ(names.back(), "norm.weight");
  EXPECT_NE(std::ranges::find(names, "blocks.3.attention.projection.weight"), names.end());
  // 6 a weight and token, 14 D a pair: 64 * 65 / 2 pairs a head, 4 heads, 4 layers.
  const double weights = 4.0 * 12 * 128 * 128 + 65 * 128;
  EXPECT_DOUBLE_EQ(training_flops(m, 12, 64), 12 * (6 * weights * 64 + 14.0 * 32 * (64 * 65 / 2) * 4 * 4));
}

// A row of documents is each of them alone: their logits, and of a sum of losses the gradients.
TEST(Transformer, PackedDocumentsAreEachAlone) {
  for (const Positions positions : {Positions::learned, Positions::rotary, Positions::none})
    for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
      TransformerConfig c = tiny();
      c.context = 12, c.positions = positions, c.backward = mode, c.keep_order = true;
      c.terms = {.softcap = 2, .alibi = TermConfig::Alibi::learned, .relative = {5}, .sink = true};
      const Transformer m = model_of(c);
      const Tensor ids = ids_of(c);
      const std::vector<std::vector<DocumentList>> lists{{{5, 4}}, {{5, 4}, {4, 8}}};
      for (const auto& documents : lists) {
        SCOPED_TRACE(testing::Message() << to_string(documents) << ", " << name_of(positions) << ", " << name_of(mode));
        const Tensor packed = m.logits(ids, {.documents = documents});
        const auto pieces = [&](const Tensor& whole, auto&& f) {
          for (Index b = 0; b < 2; ++b) {
            Index at = 0;
            for (const Document& d : documents[documents.size() > 1 ? static_cast<std::size_t>(b) : 0]) {
              const Index from = std::exchange(at, at + d.length);
              f(slice(slice(whole, 0, b, b + 1), 1, from, at), slice(slice(ids, 0, b, b + 1), 1, from, at));
            }
          }
        };
        pieces(packed,
               [&](const Tensor& part, const Tensor& alone) { EXPECT_LE(distance(part, m.logits(alone)), 1e-12); });
        const Tensor weight = noise(packed.shape(), 8);
        const auto together = [&](const Transformer& model) {
          const Tensor y = model.logits(ids, {.documents = documents});
          Tensor loss = zeros({}, DType::f64);
          pieces(y, [&](const Tensor& part, const Tensor&) { loss = add(loss, sum(mul(part, part))); });
          return loss;
        };
        const auto alone = [&](const Transformer& model) {
          Tensor loss = zeros({}, DType::f64);
          pieces(weight, [&](const Tensor&, const Tensor& of) {
            const Tensor y = model.logits(of);
            loss = add(loss, sum(mul(y, y)));
          });
          return loss;
        };
        expect_close(slopes_of(m, together), slopes_of(m, alone), 1e-11);
      }
      EXPECT_NE(error_of([&] { (void)m.logits(ids, {.documents = {{9, 4}}}); }).find("documents"), std::string::npos);
    }
}

/// Trains on one batch until it is known by heart.
double learned(const TransformerConfig& c, const Tensor& ids, const Tensor& targets, int steps) {
  Transformer m = make_transformer(c, 1);
  AdamWOptimizer optimizer;
  const NamedParameters parameters = parameters_of(m);
  double loss = 0;
  for (int step = 0; step < steps; ++step) {
    Tape tape;
    watch_parameters(tape, m);
    const Tensor l = m.loss(ids, targets);
    Gradients g = tape.backward(l);
    loss = l.item();
    clip_grad_norm(g, parameters, 1);
    optimizer.step(parameters, g, 1e-2);
  }
  return loss;
}

TEST(Transformer, LearnsABoardByItsNeighbours) {
  // Each cell's label is whether its left neighbour on the board is alive: a 3x3 window sees it, a
  // cell alone does not.
  constexpr Index kHeight = 5, kWidth = 6, kBoards = 16;
  const Tensor ids = symbols({kBoards, kHeight * kWidth}, 2, 5);
  std::vector<std::int64_t> labels = ids.to_vector<std::int64_t>();
  for (Index i = kBoards * kHeight * kWidth; i-- > 0;)
    labels[static_cast<std::size_t>(i)] = i % kWidth ? labels[static_cast<std::size_t>(i - 1)] : std::int64_t{0};
  const Tensor targets = from_values(labels, ids.shape());
  const auto loss_with = [&](const char* pattern) {
    TransformerConfig c = board_config(kHeight, kWidth, 2, 2, parse_pattern(pattern));
    c.layers = 1, c.width = 16, c.heads = 2;
    return learned(c, ids, targets, 60);
  };
  EXPECT_LT(loss_with("neighborhood2d:3x3"), 0.2);
  EXPECT_GT(loss_with("slide2d:0x0"), 0.4);
}

TEST(Transformer, StepsNeedNoNewMemory) {
  const PoolLimit pool(std::size_t{1} << 30);  // whatever the environment says
  for (const bool checkpointing : {false, true}) {
    TransformerConfig c;
    c.layers = 2, c.checkpointing = checkpointing, c.dropout = 0.1;
    Transformer m = make_transformer(c, 1);
    AdamWOptimizer optimizer;
    const NamedParameters parameters = parameters_of(m);
    Generator generator(1);
    const auto step = [&] {
      Tape tape;
      watch_parameters(tape, m);
      const Tensor loss = m.loss(ids_of(c), targets_of(c), {&generator, true, false});
      Gradients g = tape.backward(loss);
      clip_grad_norm(g, parameters, 0.01);
      optimizer.step(parameters, g, 1e-3);
    };
    step();
    step();
    const MemoryStats two = memory_stats();
    for (int i = scaled(50, 3); i > 0; --i) step();
    const MemoryStats many = memory_stats();
    EXPECT_EQ(many.from_system, two.from_system);
    EXPECT_EQ(many.live, two.live);
    EXPECT_EQ(many.peak, two.peak);
  }
}

TEST(Transformer, SaysWhatIsWrong) {
  const auto wrong = [](auto change) {
    TransformerConfig c = tiny();
    change(c);
    return error_of([&] { (void)make_transformer(c, 1); });
  };
  EXPECT_EQ(wrong([](TransformerConfig&) {}), "nothing");
  EXPECT_EQ(wrong([](TransformerConfig& c) { c.layers = 0; }), "usage: layers 0 must be at least 1");
  EXPECT_EQ(wrong([](TransformerConfig& c) { c.context = 0; }), "usage: context 0 must be at least 1 token");
  EXPECT_EQ(wrong([](TransformerConfig& c) { c.vocab = 0; }), "usage: vocab 0 must be at least 1 symbol");
  EXPECT_EQ(wrong([](TransformerConfig& c) { c.width = 100, c.heads = 7; }),
            "usage: width 100 is not divisible by 7 heads; the nearest are 98 and 105");
  EXPECT_EQ(wrong([](TransformerConfig& c) { c.classes = 2; }),
            "usage: tie_weights: the head has 2 classes and the embedding 5 symbols; one matrix cannot be both: set "
            "tie_weights off");
  const Transformer m = model_of(tiny());
  EXPECT_EQ(error_of([&] { (void)m.logits(symbols({1, 9}, 5, 1)); }), "usage: Transformer: 9 tokens, the context is 8");
  EXPECT_EQ(error_of([&] { (void)m.logits(symbols({9}, 5, 1)); }),
            "usage: Transformer: tokens must be [batch, length], got [9]");
  EXPECT_EQ(error_of([&] {
              (void)m.loss(symbols({1, 8}, 5, 1), symbols({1, 7}, 5, 1));
            }),
            "usage: Transformer: targets [1, 7] must have the shape of the tokens, [1, 8]");
  EXPECT_EQ(error_of([&] {
              (void)m.logits(full({1, 3}, 5, DType::i64));
            }),
            "usage: embedding: index 5 at position 0 is outside 0..4");
  EXPECT_EQ(error_of([] { (void)parse_positions("learnt"); }),
            "usage: positions: 'learnt' is not one of learned, rotary, none; did you mean learned?");
  for (const Positions p : {Positions::learned, Positions::rotary, Positions::none})
    EXPECT_EQ(parse_positions(name_of(p)), p);
}

}  // namespace
}  // namespace hilt
