#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "nn/optimizer.h"
#include "nn/ranks.h"
#include "nn/transformer.h"

// A training over the ranks of any Comm, in f64: for what holds it against the same on one rank.

namespace hilt {

/// 50 updates of a model whose even and odd blocks have sets of their own, with score terms and
/// dropout: five sequences a batch, targets that do not count. `sequence` ranks share each. The
/// losses, then all weights.
inline std::vector<double> trained(const Comm& world, int sequence) {
  constexpr Index context = 30, vocab = 7;
  TransformerConfig config{.layers = 2, .heads = 2, .kv_heads = 1, .width = 8, .context = context, .vocab = vocab};
  config.order = parse_order("hilbert:5x6", context), config.pattern = parse_pattern("segment:8+segment:30,dilation=2");
  config.pattern_odd = parse_pattern("slide2d:2x2"), config.dropout = 0.1;
  config.terms = {
      .softcap = 5, .alibi = TermConfig::Alibi::learned, .relative = {7}, .bias = {1, 2, 1, 0}, .sink = true};
  const RankGrid grid(world, sequence);
  Transformer model = make_transformer(config, 1, DType::f64);
  const NamedParameters parameters = parameters_of(model);
  AdamWOptimizer optimizer;
  Generator noise{5}, rows{9};
  std::vector<double> course;
  for (int step = 0; step < 50; ++step) {
    const Tensor ids = randint(0, vocab, {5, context}, rows);
    std::vector<std::int32_t> targets = ids.to_vector<std::int32_t>();
    for (std::size_t i = 0; i < targets.size(); ++i) targets[i] = i % 11 < 2 ? -100 : targets[i];
    const Batch whole{ids, from_values(targets, ids.shape())};
    const RankGrid::Part part = grid.part_of(whole, model.blocks.front().attention);
    Tape tape;
    watch_parameters(tape, model);
    const Tensor loss =
        mul(model.loss(part.batch.inputs, part.batch.targets, {.noise = &noise, .place = &part.place}),
            static_cast<double>(count_targets(part.batch.targets)) / static_cast<double>(count_targets(whole.targets)));
    const Gradients gradients = grid.sum(tape.backward(loss), parameters);
    course.push_back(grid.sum({loss.item()})[0]);
    optimizer.step(parameters, gradients, 1e-2);
  }
  for (const NamedParameter& p : parameters)
    for (const double x : p.tensor->to_vector()) course.push_back(x);
  return course;
}

/// The largest difference of two of those.
inline double apart(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = a.size() == b.size() ? 0 : HUGE_VAL;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (const double d = std::abs(a[i] - b[i]); !(d <= worst)) worst = d;
  return worst;
}

}  // namespace hilt
