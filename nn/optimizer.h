#pragma once
#include "../ops/ops.h"
#include "layers.h"

namespace [[gnu::visibility("default")]] hilt {

/// What optimizers share: state by the names of parameters, f32 beside 16-bit ones, which also get
/// an f32 master copy. Weights of two axes or more decay. Deterministic.
class Optimizer {
 public:
  /// Makes zero state for what has none; a parameter of another shape than its state is an error.
  void prepare(const NamedParameters& parameters);

  /// "NAME.m", "NAME.v" as far as there are such and, beside 16-bit parameters, "NAME.master", in
  /// the order of prepare(); then "steps", one i64. What a visitor replaces keeps shape and type.
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

/// Learning rate as a pure function of the step, counted from 0. All begin with `warmup` steps that
/// rise linearly from peak / warmup to peak; then, over the rest of `steps` with u running from 0
/// to 1:
///   constant   peak
///   linear     peak + (floor - peak) u
///   cosine     floor + (peak - floor) (1 + cos(pi u)) / 2
///   wsd        peak, and over the last `decay` steps linearly to floor (warm-up, stable, decay)
/// From `steps` on: floor (constant: peak).
struct Schedule {
  enum class Kind : unsigned char { constant, linear, cosine, wsd };  // the shapes above
  Kind kind = Kind::cosine;
  double peak = 1e-3, floor = 0;   // highest and lowest rate
  Index steps = 1000, warmup = 0;  // of the run, and those that warm up
  Index decay = 0;                 // of wsd; 0: a fifth of steps

  double operator()(Index step) const;  // the rate at this step
  friend bool operator==(const Schedule&, const Schedule&) = default;
};
Schedule::Kind parse_schedule(std::string_view text);
std::string_view name_of(Schedule::Kind kind);
/// Throws Code::usage: negative counts, a peak not above 0, a warm-up or floor beyond its bounds.
void check_schedule(const Schedule& schedule);

}  // namespace hilt
