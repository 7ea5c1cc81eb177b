#pragma once
#include "../ops/ops.h"
#include "parameters.h"

namespace [[gnu::visibility("default")]] hilt {

/// What optimizers share: state by the names of parameters, f32 beside 16-bit ones, which also get
/// an f32 master copy. Weights of two axes or more decay. Deterministic.
class Optimizer {
 public:
  /// Makes zero state for what has none; a parameter of another shape than its state is an error.
  void prepare(const NamedParameters& parameters);

  /// "NAME.m", "NAME.v" as far as there are such and, beside 16-bit parameters, "NAME.master", in
  /// the order of prepare(); then "steps", one i64. What a visitor replaces must keep its shape and
  /// type.
  void visit_state(const ParameterVisitor& visit);
  /// Updates made so far: what the bias correction counts.
  Index steps() const { return *steps_.data<Index>(); }
  void set_steps(Index steps) { *steps_.mutable_data<Index>() = steps; }  // for a state read by hand
  std::size_t bytes() const;                                              // of the state

 private:
  friend class AdamWOptimizer;
  friend class SgdOptimizer;
  struct State {
    std::string name;
    Shape shape;
    Tensor m, v, master;
  };
  Optimizer(const char* name, bool has_m, bool has_v) : name_(name), has_m_(has_m), has_v_(has_v) {}
  const char* name_;
  bool has_m_, has_v_;
  Tensor steps_ = zeros({}, DType::i64);  // on the CPU
  std::vector<State> states_;
};

/// AdamW over the parameters of a module: decoupled weight decay.
class AdamWOptimizer : public Optimizer {
 public:
  /// The learning rate among them is not read: step() has it.
  explicit AdamWOptimizer(const AdamW& options = {}) : Optimizer("AdamWOptimizer", true, true), options_(options) {}

  /// One update of each parameter that has a gradient, at this learning rate; with the norm of the
  /// gradients (norm_of), clipped to a largest one. Where that norm is not finite, only steps()
  /// changes. The first call makes the state. If it throws, no parameter and no moment has changed.
  void step(const NamedParameters& parameters, const Gradients& gradients, double lr, const Clip& clip = {});
  const AdamW& options() const { return options_; }  // as it was made

 private:
  AdamW options_;
};

/// Gradient descent: m = momentum m + dw + decay w, then w = w - lr m. No momentum, no m.
class SgdOptimizer : public Optimizer {
 public:
  explicit SgdOptimizer(double momentum = 0, double weight_decay = 0);  // momentum in [0, 1)
  /// As AdamWOptimizer's.
  void step(const NamedParameters& parameters, const Gradients& gradients, double lr, const Clip& clip = {});

 private:
  double momentum_, weight_decay_;
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
