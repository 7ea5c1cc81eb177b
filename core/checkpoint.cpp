// A checkpoint keeps its inputs alone and runs its function a second time.
#include "core/checkpoint.h"
#include "core/random.h"
#include "core/tape.h"

namespace hilt {

/// fn again, on a tape of its own. dependencies: what the outer tape watches of all that fn read.
struct Recomputed final : Function {
  using Inputs = detail::Pointers<std::span<const Tensor>>;
  Composite fn;
  std::vector<Tensor> inputs, dependencies;
  Generator::Recording::States randomness;

  std::string_view name() const override { return "checkpoint"; }
  /// fn(inputs) with the random numbers of the first time; afterwards generators stand as before.
  Tensor replayed() const {
    struct Rewound {
      Generator::Recording::States now;
      ~Rewound() {
        for (auto& [generator, key] : now) generator.set_state(key);
      }
    } const rewound{Generator::Recording::swap(randomness)};
    return fn(inputs);
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    for (std::size_t i = 0; i < inputs.size() + dependencies.size(); ++i) (void)saved(i);  // checks the versions
    Tape tape;
    for (const Tensor& t : dependencies) tape.watch(t);
    const Tensor y = replayed();
    const Gradients g = tape.backward(y, dy);
    std::vector<Tensor> dx;
    for (const Tensor& t : dependencies) dx.push_back(g.has(t) ? g[t] : zeros_like(t));
    return dx;
  }

  static Tensor of(Composite fn, std::span<const Tensor> inputs) {
    Tape* const tape = Tape::current();
    if (!tape) return fn(inputs);
    Recomputed node;
    std::unordered_map<TensorId, Tensor> captured;
    Tensor y;
    const double start = tape->clock_ms();
    {
      Tape looking_on;  // records nothing; notes which of the outer tape's tensors fn reads
      looking_on.captured_ = &captured;
      looking_on.outer_ = tape;
      const Generator::Recording recording;
      y = fn(inputs);
      node.randomness = recording.states();
    }
    if (captured.empty() || tape->knows(y)) return y;
    for (const auto& [id, t] : captured) node.dependencies.push_back(t);
    node.fn = std::move(fn);
    node.inputs.assign(inputs.begin(), inputs.end());
    node.wanted_ = tape->wanted(Inputs(node.dependencies));
    if (!node.wanted_) return y;  // a checkpoint around this one looks on: it will replay both
    for (const auto* kept : {&node.inputs, &node.dependencies})
      for (const Tensor& t : *kept) node.save(t);
    auto kept = std::make_unique<Recomputed>(std::move(node));
    const Inputs in(kept->dependencies);
    tape->record(std::move(kept), in, {&y, 1}, start);
    return y;
  }
};

Tensor checkpoint(Composite fn, std::span<const Tensor> inputs) { return Recomputed::of(std::move(fn), inputs); }

}  // namespace hilt
