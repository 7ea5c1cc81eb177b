// Moments and masters by the names of parameters, AdamW and SGD, clipping by global norm; learning
// rates as closed formulas of the step.
#include "nn/optimizer.h"
#include <cmath>
#include <numbers>
#include "core/io/text.h"

namespace hilt {

void Optimizer::prepare(const NamedParameters& parameters) {
  const Tape::Pause pause;
  check(states_.empty() || states_.size() == parameters.size(), name_, ": ", parameters.size(),
        " parameters, the state has ", states_.size());
  std::vector<State> made;  // all of them or none: a failure leaves the optimizer as it was
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const NamedParameter& p = parameters[i];
    const Tensor& w = *p.tensor;
    check(bool(w) && is_floating(w.dtype()), name_, ": ", p.name, " is not a tensor of floats");
    if (states_.empty()) {
      const DType wide = size_of(w.dtype()) == 2 ? DType::f32 : w.dtype();
      const auto zero = [&](bool has) { return has ? zeros(w.shape(), wide, w.device()) : Tensor{}; };
      made.push_back({p.name, w.shape(), zero(has_m_), zero(has_v_), wide == w.dtype() ? Tensor{} : to(w, wide)});
      continue;
    }
    const State& s = states_[i];
    check(s.name == p.name, name_, ": parameter ", i, " is ", p.name, ", its state is of ", s.name,
          "; an optimizer serves one module");
    check(s.shape == w.shape(), name_, ": ", p.name, " is ", w.shape(), ", its moments are ", s.shape);
  }
  if (states_.empty()) states_ = std::move(made);
}

void AdamWOptimizer::step(const NamedParameters& parameters, const Gradients& gradients, double lr, const Clip& clip) {
  prepare(parameters);
  const Tape::Pause pause;
  detail::List<AdamWUpdate> updates;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Tensor& w = *parameters[i].tensor;
    if (!gradients.has(w)) continue;
    State& s = states_[i];
    updates.push_back(
        {&w, gradients[w], &s.m, &s.v, s.master ? &s.master : nullptr, w.rank() < 2 ? 0 : options_.weight_decay});
  }
  AdamW options = options_;
  options.lr = lr;
  adamw_step(updates, steps() + 1, options, clip);  // changes nothing if it throws
  set_steps(steps() + 1);
}

SgdOptimizer::SgdOptimizer(double momentum, double weight_decay)
    : Optimizer("SgdOptimizer", momentum > 0, false), momentum_(momentum), weight_decay_(weight_decay) {
  check(momentum >= 0 && momentum < 1, "SgdOptimizer: momentum ", momentum, " must be in [0, 1)");
  check(std::isfinite(weight_decay) && weight_decay >= 0, "SgdOptimizer: weight decay ", weight_decay,
        " must be finite and not negative");
}

void SgdOptimizer::step(const NamedParameters& parameters, const Gradients& gradients, double lr, const Clip& clip) {
  check(std::isfinite(lr) && lr >= 0, "SgdOptimizer: learning rate ", lr, " must be finite and not negative");
  check(clip.max == 0 || clip.norm, "SgdOptimizer: to clip to ", clip.max, " it needs the norm (norm_of)");
  prepare(parameters);
  const Tape::Pause pause;
  std::vector<std::pair<Tensor*, Tensor>> changes;  // all of them or none
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Tensor& w = *parameters[i].tensor;
    if (!gradients.has(w)) continue;
    State& s = states_[i];
    Tensor& exact = s.master ? s.master : w;
    const Tensor norm = clip.norm ? to(clip.norm, exact.dtype()) : Tensor{};
    const auto change = [&](Tensor& from, const Tensor& onto) {
      changes.emplace_back(&from, norm ? where(norm - norm == 0, onto, from) : onto);
    };
    Tensor m = to(gradients[w], exact.dtype()) * (1 / clip.scale);
    if (clip.max > 0) m = m * minimum(clip.max * clip.scale / norm, 1.0);
    if (w.rank() >= 2 && weight_decay_ > 0) m = m + exact * weight_decay_;
    if (s.m) m = s.m * momentum_ + m, change(s.m, m);
    change(exact, exact - m * lr);
    if (s.master) changes.emplace_back(&w, changes.back().second);
  }
  for (auto& [tensor, value] : changes) copy(*tensor, value);
  set_steps(steps() + 1);
}

void Optimizer::visit_state(const ParameterVisitor& visit) {
  const auto show = [&](const std::string& name, Tensor& t) {
    if (!t) return;
    const Shape shape = t.shape();
    const DType dtype = t.dtype();
    visit(name, t);
    check(bool(t) && t.shape() == shape && t.dtype() == dtype, name_, ": ", name, " was replaced by ", t.dtype(),
          t.shape(), ", it must stay ", dtype, shape);
  };
  for (State& s : states_) show(s.name + ".m", s.m), show(s.name + ".v", s.v), show(s.name + ".master", s.master);
  if (!states_.empty()) show("steps", steps_);
}

std::size_t Optimizer::bytes() const {
  std::size_t n = 0;
  for (const State& s : states_) n += s.m.bytes() + s.v.bytes() + s.master.bytes();
  return n;
}

Tensor norm_of(const Gradients& gradients, const NamedParameters& parameters, const Tensor& loss) {
  const Tape::Pause pause;
  std::vector<Tensor> all;
  for (const NamedParameter& p : parameters)
    if (gradients.has(*p.tensor)) all.push_back(gradients[*p.tensor]);
  return norm_of(all, loss);
}

double clip_grad_norm(Gradients& gradients, const NamedParameters& parameters, double max_norm) {
  check(max_norm >= 0, "clip_grad_norm: max_norm ", max_norm, " must not be negative");
  const Tape::Pause pause;
  const double norm = norm_of(gradients, parameters).item();
  if (!std::isfinite(norm)) {
    for (const NamedParameter& p : parameters)
      if (gradients.has(*p.tensor) && !std::isfinite(global_norm(std::span(&gradients[*p.tensor], 1))))
        fail_with(Code::not_a_number, "clip_grad_norm: the norm is ", norm,
                  "; the first gradient that is not finite is ", p.name, "'s");
    fail_with(Code::not_a_number, "clip_grad_norm: the norm is ", norm,
              ", though every gradient's is finite: they are too large together");
  }
  if (max_norm > 0 && norm > max_norm)
    for (const NamedParameter& p : parameters)
      if (gradients.has(*p.tensor)) gradients.set(*p.tensor, mul(gradients[*p.tensor], max_norm / norm));
  return norm;
}

Gradients mean_of(Gradients sum, const NamedParameters& parameters, Index micro_batches) {
  check(micro_batches >= 1, "mean_of: ", micro_batches, " micro-batches; there must be at least 1");
  if (micro_batches == 1) return sum;
  const Tape::Pause pause;
  for (const NamedParameter& p : parameters)
    if (sum.has(*p.tensor)) sum.set(*p.tensor, mul(sum[*p.tensor], 1 / static_cast<double>(micro_batches)));
  return sum;
}

// ---- learning rates -----------------------------------------------------------------------------
constexpr std::array<std::string_view, 4> kKinds{"constant", "linear", "cosine", "wsd"};
constexpr Index kDecayShare = 5;  // wsd decays over a fifth of the run unless told

Schedule::Kind parse_schedule(std::string_view text) { return Schedule::Kind(find_name("schedule", text, kKinds)); }
std::string_view name_of(Schedule::Kind kind) { return kKinds[static_cast<std::size_t>(kind)]; }

void check_schedule(const Schedule& s) {
  check(s.steps >= 1, "schedule: steps ", s.steps, " must be at least 1");
  check(s.warmup >= 0 && s.warmup <= s.steps, "schedule: warmup ", s.warmup, " must be 0..", s.steps,
        ", the number of steps");
  check(s.decay >= 0 && s.decay <= s.steps - s.warmup, "schedule: decay ", s.decay, " must be 0..", s.steps - s.warmup,
        ", the steps after warm-up");
  check(std::isfinite(s.peak) && s.peak > 0, "schedule: peak ", s.peak, " must be positive");
  check(s.floor >= 0 && s.floor <= s.peak, "schedule: floor ", s.floor, " must be 0..", s.peak, ", the peak");
}

double Schedule::operator()(Index step) const {
  check_schedule(*this);
  check(step >= 0, "schedule: step ", step, " must not be negative");
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (kind == Kind::constant) return peak;
  const Index falls = kind != Kind::wsd ? steps - warmup
                      : decay > 0       ? decay
                                        : std::min(std::max<Index>(1, steps / kDecayShare), steps - warmup);
  const Index begin = steps - falls;
  if (step >= steps) return floor;
  if (step < begin) return peak;
  const double u = static_cast<double>(step - begin) / static_cast<double>(falls);
  if (kind == Kind::cosine) return floor + (peak - floor) * (1 + std::cos(std::numbers::pi * u)) / 2;
  return peak + (floor - peak) * u;
}

}  // namespace hilt
