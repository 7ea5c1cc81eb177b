// The tape: it records ops in the order they ran and plays them backwards in one loop. A checkpoint
// keeps its inputs alone and runs its function a second time.
#include "core/tape.h"
#include <chrono>
#include <cmath>
#include <iomanip>
#include <mutex>
#include <ranges>
#include <unordered_map>
#include "core/random.h"

namespace hilt {

/// Throws with the first value of t that is not finite; node counts the ops of the tape from 0.
static void require_finite(const Tensor& t, std::string_view op, std::size_t node, const char* what) {
  if (!t || !is_floating(t.dtype())) return;
  const std::vector<double> x = t.to_vector();
  for (std::size_t i = 0; i < x.size(); ++i)
    if (!std::isfinite(x[i]))
      fail_with(Code::not_a_number, "op ", node, ", ", op, ": ", what, ' ', t.shape(), " is ", x[i], " at element ", i);
}

namespace {
/// A tensor in a message, by its shape: `[]` would not say much.
struct Named {
  const Tensor& x;
  friend std::ostream& operator<<(std::ostream& os, const Named& n) {
    return n.x && n.x.rank() == 0 ? os << "a scalar" : os << n.x.shape();
  }
};
}  // namespace

const Tensor& Function::saved(std::size_t i) const {
  if (i >= saved_.size()) fail(name(), ": saved(", i, ") of ", saved_.size(), " saved tensors");
  const Saved& s = saved_[i];
  if (!s.tensor) return s.tensor;
  check(s.tensor.storage().version() == s.version, name(), ": a tensor saved for backward, ", s.tensor.dtype(),
        s.tensor.shape(), ", was written to after the forward pass (version ", s.tensor.storage().version(),
        ", saved at ", s.version, "); write before the op runs, or to a clone");
  return s.tensor;
}

const Tensor& Gradients::operator[](const Tensor& x) const {
  const Tensor* const dx = detail::value_of(by_id_, x.id());
  check(dx, "Gradients: ", Named{x}, " was not watched, or the loss does not depend on it");
  return *dx;
}
Gradients& Gradients::operator+=(const Gradients& other) {
  if (&other == this) return *this += Gradients(other);  // what is added to must not be what is read
  for (const auto& [id, dx] : other.by_id_)
    if (Tensor* const sum = detail::value_of(by_id_, id)) accumulate(*sum, dx);
    else detail::put(by_id_, id, dx);
  return *this;
}
void Gradients::set(const Tensor& x, const Tensor& dx) {
  check(x.shape() == dx.shape(), "Gradients: a gradient ", dx.shape(), " for a tensor ", x.shape());
  detail::put(by_id_, x.id(), dx);
}

// ---- which tape listens -------------------------------------------------------------------------
/// It outlives the tape: no thread and no Pause is left with the address of one destroyed.
struct Tape::Listener {
  Tape* tape;  // null from then on
  std::shared_ptr<Listener> outer;
  static thread_local std::shared_ptr<Listener> innermost;
};
thread_local std::shared_ptr<Tape::Listener> Tape::Listener::innermost;

Tape::Tape(Options options) : options_(options) {
  (void)current();
  listener_ = std::make_shared<Listener>(Listener{this, Listener::innermost});
  Listener::innermost = listener_;
}
Tape::~Tape() { listener_->tape = nullptr; }
Tape* Tape::current() {
  auto& innermost = Listener::innermost;
  while (innermost && (!innermost->tape || innermost->tape->played_)) innermost = std::shared_ptr(innermost->outer);
  return innermost ? innermost->tape : nullptr;
}
Tape::Pause::Pause() : paused_(std::exchange(Listener::innermost, nullptr)) {}
Tape::Pause::~Pause() { Listener::innermost = std::move(paused_); }

// ---- recording ----------------------------------------------------------------------------------
void Tape::check_thread() const {
  check(std::this_thread::get_id() == thread_,
        "Tape: used from another thread than it was made on; a tape is one thread's");
}
double Tape::clock_ms(Device device) const {
  if (!options_.profile) return 0;
  if (device.is_cuda()) synchronize(device);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Tape::watch(const Tensor& x) {
  check_thread();
  check(bool(x), "Tape: watch of an undefined tensor");
  check(is_floating(x.dtype()), "Tape: watch of a tensor of type ", x.dtype(), "; only floats have gradients");
  if (const Slot slot = slot_of(x.id()); slot != kNone)
    return check(known_[slot].outputs == 0, "Tape: watch of ", x.shape(),
                 ", which was computed on this tape; watch what it was computed from, or detach() it");
  know({x.id(), x.shape(), x.dtype()});
}
/// So that nothing fails halfway: without memory the tape is as it was, and may go on.
static void make_room(auto& list, std::size_t more) {
  if (list.capacity() - list.size() < more) list.reserve(std::bit_ceil((list.size() + more) | 15));
}
void Tape::know(Known known) {
  make_room(known_, 1), make_room(slots_, 1);
  known_.push_back(std::move(known));
  detail::put(slots_, known_.back().id, static_cast<Slot>(known_.size() - 1));
}

std::uint64_t Tape::wanted(std::span<const Tensor* const> inputs) {
  std::uint64_t mask = 0;
  asked_.clear();
  if (known_.empty()) return mask;
  for (const Tensor* x : inputs) {
    asked_.push_back(slot_of(x->id()));
    if (asked_.back() == kNone) continue;
    if (captured_) detail::put(*captured_, x->id(), *x);
    else mask |= std::uint64_t{1} << std::min<std::size_t>(asked_.size() - 1, 63);
  }
  return mask;
}

void Tape::record(std::unique_ptr<Function> fn, std::span<const Tensor* const> inputs, std::span<const Tensor> outputs,
                  double start) {
  check(!outputs.empty(), fn->name(), ": forward returned no tensor");
  for (const Tensor& y : outputs) {
    check(bool(y), fn->name(), ": forward returned an undefined tensor");
    check(!knows(y), fn->name(), ": forward must return a tensor of its own, not one of its inputs");
    check(std::ranges::count(outputs, y.id(), &Tensor::id) == 1, fn->name(), ": forward returned one tensor twice");
  }
  make_room(known_, outputs.size()), make_room(slots_, outputs.size()), make_room(input_slots_, inputs.size());
  if (options_.profile) {
    NodeReport node;
    node.forward_ms = clock_ms(outputs[0].device()) - start;
    node.forward_live = memory_stats(outputs[0].device()).live;
    for (const Tensor* x : inputs) node.inputs.push_back(x->shape());
    profile_.push_back(std::move(node));
  }
  const std::string_view name = fn->name();
  const auto first_input = static_cast<Slot>(input_slots_.size());
  input_slots_.insert(input_slots_.end(), asked_.begin(), asked_.end());
  for (auto left = static_cast<Slot>(outputs.size()); const Tensor& y : outputs)
    know({y.id(), y.shape(), y.dtype(), left--, first_input, std::move(fn)});  // the first has it
  ++ops_;
  for (std::size_t i = 0; options_.check_finite && i < outputs.size(); ++i)
    require_finite(outputs[i], name, ops_ - 1, "its result");
}

// ---- playing ------------------------------------------------------------------------------------
Gradients Tape::backward(const Tensor& loss) {
  check(bool(loss), "Tape: backward of an undefined tensor");
  check(loss.numel() == 1, "Tape: backward of ", Named{loss},
        ", which is no scalar; take its sum() or mean(), or name a gradient to start from: backward(y, dy)");
  const Pause pause;
  return backward(loss, full(loss.shape(), 1.0, loss.dtype(), loss.device()));
}

Gradients Tape::backward(const Tensor& y, const Tensor& dy) {
  check_thread();
  check(!played_, "Tape: backward twice; a tape plays once and then no longer listens, so record on a new one");
  check(bool(y) && bool(dy), "Tape: backward of an undefined tensor, or from an undefined gradient");
  check(knows(y), "Tape: ", Named{y},
        " does not depend on a watched tensor; watch() before computing it, and compute it with ops (not under Pause, "
        "not from copied-out numbers)");
  check(dy.shape() == y.shape() && dy.dtype() == y.dtype(), "Tape: a gradient ", dy.dtype(), dy.shape(),
        " for an output ", y.dtype(), y.shape());
  if (options_.profile) profile_ = report();
  played_ = true;
  const Pause pause;
  const detail::Range pass("backward");
  detail::List<Tensor> grad(known_.size());  // by slot
  grad[slot_of(y.id())] = dy;

  for (std::size_t slot = known_.size(), n = ops_; slot-- > 0;) {
    const std::unique_ptr<Function> op = std::move(known_[slot].fn);  // what it saved is free behind it
    if (grad[slot] && known_[slot].refused) fail("Tape: ", known_[slot].refused);
    if (!op) continue;
    --n;
    Function& fn = *op;
    const std::span its = std::span(grad).subspan(slot, known_[slot].outputs);
    if (const auto g = std::ranges::find_if(its, &Tensor::operator bool); g != its.end()) {
      const detail::Range range(fn.name());
      const double start = clock_ms();
      std::vector<Tensor> dx = fn.backward_all(its);
      const std::span inputs = std::span(input_slots_).subspan(known_[slot].first_input);
      if (dx.size() != inputs.size())
        fail(fn.name(), ": backward returned ", dx.size(), " gradients for ", inputs.size(), " inputs");
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const Slot in = inputs[i];
        if (in == kNone) continue;
        const Known& known = known_[in];
        if (!dx[i] || dx[i].shape() != known.shape || dx[i].dtype() != known.dtype)
          fail(fn.name(), ": backward returned ", dx[i] ? "the wrong shape or type" : "no gradient", " for input ", i,
               ", which is ", known.dtype, known.shape, " and wanted");
        if (options_.check_finite) require_finite(dx[i], fn.name(), n, "the gradient of an input");
        if (grad[in]) accumulate(grad[in], dx[i]);
        else grad[in] = std::move(dx[i]);
      }
      if (options_.profile) {
        profile_[n].backward_ms = clock_ms(g->device()) - start;
        profile_[n].backward_live = memory_stats(g->device()).live;
      }
      std::ranges::fill(its, Tensor());
    }
    input_slots_.resize(known_[slot].first_input);
  }
  Gradients result;
  for (std::size_t slot = 0; const Known& known : known_)
    if (Tensor& g = grad[slot++]; g && known.outputs == 0) detail::put(result.by_id_, known.id, g);
  if (!knows(dy)) know({dy.id(), dy.shape(), dy.dtype()});  // depends on it as on what was watched
  refuse_around(
      "this asks for a second derivative, the gradient of a gradient, which no tape computes; detach() the "
      "gradient if it is to count as a constant",
      std::views::transform(known_, &Known::id), std::views::values(result.by_id_));
  return result;
}

/// Tapes around this one that know any of `ids` refuse to play through `results`.
void Tape::refuse_around(const char* why, const auto& ids, const auto& results) const {
  for (const Listener* l = listener_->outer.get(); l; l = l->outer.get()) {
    Tape* const around = l->tape;
    if (!around || around->played_) continue;
    if (std::ranges::all_of(ids, [&](TensorId id) { return around->slot_of(id) == kNone; })) continue;
    for (const Tensor& y : results)
      if (!around->knows(y)) around->know({y.id(), y.shape(), y.dtype(), 1, 0, nullptr, why});
  }
}
void Tape::tell_around(std::span<const Tensor* const> inputs, std::span<const Tensor> outputs) const {
  if (!listener_->outer) return;
  refuse_around(
      "a tape within this one alone recorded an op that the loss depends on; run the op outside of that tape, "
      "or detach() its result if it is to count as a constant",
      std::views::transform(inputs, &Tensor::id), outputs);
}

// ---- a part that runs twice ---------------------------------------------------------------------
/// fn again, on a tape of its own. dependencies: what the outer tape watches of all that fn read.
struct Recomputed final : Function {
  Composite fn;
  std::vector<Tensor> inputs, dependencies;
  Generator::Recording::States randomness;

  std::string_view name() const override { return "checkpoint"; }
  std::vector<Tensor> backward(const Tensor& dy) override {
    for (std::size_t i = 0; i < inputs.size() + dependencies.size(); ++i) (void)saved(i);  // checks the versions
    Tape tape;
    for (const Tensor& t : dependencies) tape.watch(t);
    const Tensor y = [&] {  // with the random numbers of the first time; afterwards generators stand as before
      struct Rewound {
        Generator::Recording::States now;
        ~Rewound() {
          for (auto& [generator, key] : now) generator.set_state(key);
        }
      } const rewound{Generator::Recording::swap(randomness)};
      return fn(inputs);
    }();
    const Gradients g = tape.backward(y, dy);
    std::vector<Tensor> dx;
    for (const Tensor& t : dependencies) dx.push_back(g.has(t) ? g[t] : zeros_like(t));
    return dx;
  }

  static Tensor of(Composite fn, std::span<const Tensor> inputs) {
    Tape* const tape = Tape::current();
    if (!tape) return fn(inputs);
    Recomputed node;
    detail::ById<Tensor> captured;
    Tensor y;
    const double start = tape->clock_ms();
    {
      struct LookingOn {
        Tape& tape;
        detail::ById<Tensor>* before;
        ~LookingOn() { tape.captured_ = before; }
      } const until{*tape, std::exchange(tape->captured_, &captured)};
      const Generator::Recording recording;
      y = fn(inputs);
      node.randomness = recording.states();
    }
    if (captured.empty() || tape->knows(y)) return y;
    for (const auto& [id, t] : captured) node.dependencies.push_back(t);
    node.fn = std::move(fn);
    node.inputs.assign(inputs.begin(), inputs.end());
    const auto in = detail::addresses(std::span<const Tensor>(node.dependencies));  // they stay where they are
    node.wanted_ = tape->wanted(in);
    if (!node.wanted_) return y;  // a checkpoint around this one looks on: it will replay both
    for (const auto* kept : {&node.inputs, &node.dependencies})
      for (const Tensor& t : *kept) node.save(t);
    tape->record(std::make_unique<Recomputed>(std::move(node)), in, {&y, 1}, start);
    return y;
  }
};

Tensor checkpoint(Composite fn, std::span<const Tensor> inputs) { return Recomputed::of(std::move(fn), inputs); }

// ---- what people see of a tape, and what is told of ops as they run -----------------------------
std::atomic<bool> detail::has_op_hook{false};
namespace {
std::mutex hook_mutex;
std::shared_ptr<const OpHook> op_hook;  // under hook_mutex
thread_local bool in_hook = false;
}  // namespace
void set_op_hook(OpHook hook) {
  const std::lock_guard lock(hook_mutex);
  op_hook = hook ? std::make_shared<const OpHook>(std::move(hook)) : nullptr;
  detail::has_op_hook = op_hook != nullptr;
}
void detail::tell_op_hook(std::string_view name, const Tensor& y) {
  if (in_hook) return;
  std::unique_lock lock(hook_mutex);
  const auto hook = op_hook;
  lock.unlock();
  if (!hook) return;
  struct Inside {
    Inside() { in_hook = true; }
    ~Inside() { in_hook = false; }
  } const inside;
  const Tape::Pause pause;
  (*hook)(name, y);
}

std::size_t Tape::saved_bytes() const {
  std::size_t n = 0;
  for (const NodeReport& node : report()) n += played_ ? 0 : node.unique_bytes;
  return n;
}

std::vector<NodeReport> Tape::report() const {
  if (played_) return profile_;
  std::vector<NodeReport> out = profile_;
  out.resize(ops_);
  std::unordered_map<const std::byte*, const NodeReport*> keeper;  // of each block the last op that keeps it
  for (auto node = out.begin(); const Known& known : known_) {
    if (!known.fn) continue;
    node->name = known.fn->name(), node->output = known.shape, node->dtype = known.dtype;
    for (const auto& s : known.fn->saved_) {
      const Storage& storage = s.tensor.storage();
      if (!storage) continue;
      const auto [at, is_new] = keeper.try_emplace(storage.data(), nullptr);  // ops keep the same tensors: once each
      if (is_new) node->unique_bytes += storage.bytes();
      if (std::exchange(at->second, &*node) != &*node) node->saved_bytes += storage.bytes();
    }
    ++node;
  }
  return out;
}

std::ostream& operator<<(std::ostream& os, const Tape& tape) {
  std::size_t unique = 0;
  TextStream text;
  text << std::fixed << std::setprecision(3);
  const std::vector<NodeReport> nodes = tape.report();
  for (const NodeReport& n : nodes) {
    text << std::left << std::setw(28) << n.name << " -> " << std::setw(24)
         << (TextStream() << n.dtype << n.output).str() << std::right << " saves " << std::setw(12) << n.saved_bytes
         << " B, new " << std::setw(12) << n.unique_bytes << " B";
    if (tape.options_.profile) text << "  forward " << n.forward_ms << " ms  backward " << n.backward_ms << " ms";
    text << '\n';
    unique += n.unique_bytes;
  }
  text << tape.size() << " ops, " << unique << " B saved" << (tape.played_ ? " until backward played" : "") << '\n';
  return os << text.str();
}

}  // namespace hilt
