#pragma once
#include "../ops/ops.h"
#include "parameters.h"

namespace [[gnu::visibility("default")]] hilt {

/// AdamW over the parameters of a module: decoupled weight decay on those of two axes or more.
/// Moments are f32 beside 16-bit parameters, which also get an f32 master copy. Deterministic.
class AdamWOptimizer {
 public:
  /// The learning rate among them is not read: step() has it.
  explicit AdamWOptimizer(const AdamW& options = {}) : options_(options) {}

  /// One update of each parameter that has a gradient, at this learning rate; with the norm of the
  /// gradients (norm_of), clipped to a largest one. Where that norm is not finite, only steps()
  /// changes. The first call makes the state. If it throws, no parameter and no moment has changed.
  void step(const NamedParameters& parameters, const Gradients& gradients, double lr, const Clip& clip = {});
  /// Makes zero state for what has none; a parameter of another shape than its state is an error.
  void prepare(const NamedParameters& parameters);

  /// "NAME.m", "NAME.v" and, beside 16-bit parameters, "NAME.master", in the order of prepare();
  /// then "steps", one i64. What a visitor replaces must keep its shape and type.
  void visit_state(const ParameterVisitor& visit);
  /// Updates made so far: what the bias correction counts.
  Index steps() const { return *steps_.data<Index>(); }
  void set_steps(Index steps) { *steps_.mutable_data<Index>() = steps; }  // for who reads a state by hand
  const AdamW& options() const { return options_; }                       // as it was made
  std::size_t bytes() const;                                              // of the state

 private:
  struct State {
    std::string name;
    Tensor m, v, master;
  };
  AdamW options_;
  Tensor steps_ = zeros({}, DType::i64);  // on the CPU
  std::vector<State> states_;
};

/// The global norm of the gradients of these parameters, a scalar on their device, for step() to
/// clip by without waiting. NaN if `loss` is given and not finite; a step with it changes nothing.
Tensor norm_of(const Gradients& gradients, const NamedParameters& parameters, const Tensor& loss = {});
/// Scales the gradients of these parameters to a global norm of at most max_norm (0: only
/// measures); returns the norm before. Throws Code::not_a_number, naming the first parameter, where
/// it is not finite. If memory runs out, some are scaled and some are not: compute them again.
double clip_grad_norm(Gradients& gradients, const NamedParameters& parameters, double max_norm);

/// The sum of micro-batch gradients divided by their number; empty micro-batches are an error.
Gradients mean_of(Gradients sum, const NamedParameters& parameters, Index micro_batches);

}  // namespace hilt
