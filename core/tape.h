#pragma once
#include <algorithm>
#include <thread>
#include "tensor.h"

namespace [[gnu::visibility("default")]] hilt {

class Tape;
struct Recomputed;  // what checkpoint() leaves on a tape
std::ostream& operator<<(std::ostream& os, const Tape& tape);

/// One op as a tape recorded it. Times and live bytes are known only to a tape that profiles.
struct NodeReport {
  std::string name{};           // the op's
  std::vector<Shape> inputs{};  // their shapes
  Shape output{};               // its shape
  DType dtype = DType::f32;
  std::size_t saved_bytes = 0;                      // storages this node keeps
  std::size_t unique_bytes = 0;                     // of those, the ones no earlier node keeps
  double forward_ms = 0, backward_ms = 0;           // wall time of each pass
  std::size_t forward_live = 0, backward_live = 0;  // bytes alive when the op's forward / backward returned
};

/// Called after every op, ours or a user's, on the thread that ran it: its name and what came of
/// it. For counting, tracing and looking at values; ops that it runs itself are not told to it.
using OpHook = std::function<void(std::string_view name, const Tensor& y)>;
/// From the next op on; an empty one ends that. Without a hook an op costs one load more.
void set_op_hook(OpHook hook);
namespace detail {
extern std::atomic<bool> has_op_hook;
void tell_op_hook(std::string_view name, const Tensor& y);
void push_range(std::string_view name);  // in builds for a GPU
void pop_range();
/// In builds for a GPU a range for profilers, by NVTX: an op, forward and backward, by the name
/// that a tape prints, and `backward`, a whole pass. In others nothing.
struct Range {
  explicit Range(std::string_view name) {
    if constexpr (kHasCuda) push_range(name);
  }
  ~Range() {
    if constexpr (kHasCuda) pop_range();
  }
};

/// The addresses of an op's inputs, however they were given.
template <class... In> std::array<const Tensor*, sizeof...(In)> addresses(const In&... in) { return {&in...}; }
inline List<const Tensor*> addresses(std::span<const Tensor> in) {
  List<const Tensor*> out;
  for (const Tensor& t : in) out.push_back(&t);
  return out;
}
/// Values by a tensor's id. They ascend, as ids do, so one more most often comes to the end.
template <class V> using ById = List<std::pair<TensorId, V>>;
template <class List> auto place_of(List& list, TensorId id) {
  if (list.empty() || list.back().first < id) return list.end();
  return std::lower_bound(list.begin(), list.end(), id, [](const auto& entry, TensorId x) { return entry.first < x; });
}
template <class List> auto* value_of(List& list, TensorId id) {  // null where there is none
  const auto at = place_of(list, id);
  return at != list.end() && at->first == id ? &at->second : nullptr;
}
template <class V> void put(ById<V>& list, TensorId id, const V& value) {  // in place of what is there, if any
  if (V* const old = value_of(list, id)) *old = value;
  else list.emplace(place_of(list, id), id, value);
}
/// What forward() gave, one tensor or several.
inline std::span<const Tensor> outputs_of(const Tensor& y) { return {&y, 1}; }
inline std::span<const Tensor> outputs_of(std::span<const Tensor> ys) { return ys; }
}  // namespace detail

/// One differentiable op: its attributes are members, what it keeps for later goes through save(),
/// and backward() maps the gradient of its output to the gradients of its inputs. A user's op
/// derives from this and has a member `Tensor forward(const Tensor&...)`, exactly like ours;
/// apply() runs it. With several outputs it derives from MultiFunction.
class Function {
 public:
  Function() = default;
  Function(Function&&) = default;  // moves onto the tape; what it saved has one keeper
  virtual ~Function() = default;
  static void* operator new(std::size_t bytes) { return detail::take_block(bytes); }  // small, and made by each op
  static void operator delete(void* p, std::size_t bytes) noexcept { detail::give_block(p, bytes); }  // back to them
  virtual std::string_view name() const = 0;  // names a string that outlives the Function
  /// One entry an input, in order, of that input's shape; an undefined Tensor where wants() is
  /// false. dy may be shared with others: it is for reading.
  virtual std::vector<Tensor> backward(const Tensor& dy) = 0;

 protected:
  /// Keeps t for backward(). Writing to t's storage from then on is an error that backward reports.
  /// An undefined tensor, an input that was left out say, comes back undefined.
  void save(const Tensor& t) {
    if (saved_.empty()) saved_.reserve(2);
    saved_.push_back({t, t ? t.storage().version() : 0});
  }
  /// What the i-th save() kept; throws Code::usage where it was written to since.
  const Tensor& saved(std::size_t i) const;
  /// Whether input i leads to a watched tensor. Known before forward() runs: save only what will be
  /// asked for. Inputs beyond the 63rd share one answer.
  bool wants(std::size_t input) const { return (wanted_ >> (input < 63 ? input : 63)) & 1u; }
  bool wants_any() const { return wanted_ != 0; }  // of some input

 private:
  friend class Tape;
  friend struct Recomputed;
  friend class MultiFunction;
  template <class Fn, class... In> friend auto apply(Fn, const In&...);
  /// What the tape calls.
  virtual std::vector<Tensor> backward_all(std::span<const Tensor> dy) { return backward(dy[0]); }
  struct Saved {
    Tensor tensor;
    std::uint64_t version;
  };
  detail::List<Saved> saved_;
  std::uint64_t wanted_ = 0;
};

/// A Function of several outputs: forward() returns a std::array or std::vector of tensors, and so
/// does apply(). A loss may depend on some of them alone.
class MultiFunction : public Function {
 public:
  /// As backward(); dy has one entry an output, undefined where the loss does not depend on it.
  std::vector<Tensor> backward_all(std::span<const Tensor> dy) override = 0;

 private:
  std::vector<Tensor> backward(const Tensor& dy) final { return backward_all({&dy, 1}); }
};

/// The result of playing a tape: the gradient of every watched tensor that the loss depends on. A
/// value: it can be copied, kept and added (micro-batches).
class Gradients {
 public:
  const Tensor& operator[](const Tensor& x) const;  // that of x; throws Code::usage where there is none
  bool has(const Tensor& x) const { return detail::value_of(by_id_, x.id()); }  // there is one of x
  std::size_t size() const { return by_id_.size(); }
  Gradients& operator+=(const Gradients& other);  // adds the gradients of both, by tensor
  friend Gradients operator+(Gradients a, const Gradients& b) { return std::move(a += b); }  // the same
  void set(const Tensor& x, const Tensor& dx);  // replaces the gradient of x, clipped or scaled say

 private:
  friend class Tape;
  detail::ById<Tensor> by_id_;
};

/// Listens to the ops of this thread while it lives, and plays them backwards once. Ops are kept in
/// the order they ran, which is already a topological order: no graph search, no recursion. Tapes
/// nest; the innermost listens. Once played it no longer does: what is computed from then on, an
/// optimizer's step say, is for the tape around it, if there is one.
///
/// ```cpp
/// const Tensor w = ones({2, 2}), x = ones({1, 2});
/// Tape tape;
/// tape.watch(w);
/// const Gradients g = tape.backward(sum(square(matmul(x, w))));
/// std::cout << g[w] << tape;  // d loss / d w, and what was recorded
/// ```
class Tape {
  struct Listener;  // a tape's place among those of its thread

 public:
  struct Options {  // check_finite: a result or gradient of an op that is not finite throws Code::not_a_number
    bool profile = false, check_finite = false;  // times and live bytes of each node; check_finite as above
  };
  Tape() : Tape(Options{}) {}      // listens from now on
  explicit Tape(Options options);  // the same
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  /// Differentiate with respect to x. Ops that depend on no watched tensor are not kept.
  void watch(const Tensor& x);
  /// Whether x is watched or was computed, on this tape, from something that is.
  bool knows(const Tensor& x) const { return slot_of(x.id()) != kNone; }
  /// Gradients of a scalar, or of y against the cotangent dy. Frees what nodes saved as it goes. A
  /// tape around this one that knows what they depend on refuses to play through them.
  Gradients backward(const Tensor& loss);
  Gradients backward(const Tensor& y, const Tensor& dy);

  std::size_t size() const { return ops_; }
  /// Bytes kept for backward: each storage once, however many nodes or views keep it.
  std::size_t saved_bytes() const;
  /// What is recorded, node by node; a profiling tape still knows it after backward.
  std::vector<NodeReport> report() const;
  friend std::ostream& operator<<(std::ostream& os, const Tape& tape);

  /// The tape that listens on this thread, or null; none that was played, or destroyed anywhere.
  static Tape* current();
  class Pause {  // while one lives, nothing on this thread is recorded
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    std::shared_ptr<Listener> paused_;
  };

 private:
  template <class Fn, class... In> friend auto apply(Fn, const In&...);
  friend struct Recomputed;
  using Slot = std::uint32_t;
  static constexpr Slot kNone = ~Slot{0};
  struct Known {  // a tensor, and the op that gave it
    TensorId id;
    Shape shape;
    DType dtype;
    Slot outputs = 0, first_input = 0;  // of the op: results from this one on, its place in input_slots_; 0: watched
    std::unique_ptr<Function> fn{};     // null but at the first of them
    const char* refused = nullptr;      // why nobody plays through it
  };

  Slot slot_of(TensorId id) const {
    const Slot* const slot = detail::value_of(slots_, id);
    return slot ? *slot : kNone;
  }
  void know(Known known);  // under the next slot
  std::uint64_t wanted(std::span<const Tensor* const> inputs);
  void record(std::unique_ptr<Function> fn, std::span<const Tensor* const> inputs, std::span<const Tensor> outputs,
              double start);  // when its forward() began, by clock_ms()
  void tell_around(std::span<const Tensor* const> inputs, std::span<const Tensor> outputs) const;
  void refuse_around(const char* why, const auto& ids, const auto& results) const;
  void check_thread() const;
  double clock_ms(Device device = {}) const;  // 0 unless profiling: a clock costs as much as a small op

  detail::List<Known> known_;               // by slot
  detail::List<Slot> input_slots_, asked_;  // of all ops, one after the other; of what wanted() was asked last
  detail::ById<Slot> slots_;
  std::size_t ops_ = 0;
  std::vector<NodeReport> profile_;
  detail::ById<Tensor>* captured_ = nullptr;  // where a checkpoint notes what its function reads, instead of ops
  std::shared_ptr<Listener> listener_;
  std::thread::id thread_ = std::this_thread::get_id();
  Options options_;
  bool played_ = false;
};

/// Returns fn.forward(inputs...) and, if a tape listens and an input matters, leaves fn on it. The
/// inputs are Tensors, or one std::span<const Tensor>.
template <class Fn, class... In> auto apply(Fn fn, const In&... inputs) {
  static_assert(alignof(Fn) <= detail::kBlockAlignment);
  static_assert(std::derived_from<Fn, Function>);  // clang 16 finds no friend that is constrained
  using Result = std::remove_cvref_t<decltype(fn.forward(inputs...))>;
  static_assert(std::same_as<Result, Tensor> || std::derived_from<Fn, MultiFunction>,
                "a Function whose forward() returns several tensors derives from MultiFunction");
  const detail::Range range(fn.name());
  Tape* const tape = Tape::current();
  const auto in = detail::addresses(inputs...);
  if (tape) fn.wanted_ = tape->wanted(in);  // else wants() is false throughout: nothing is saved
  const double start = tape ? tape->clock_ms() : 0;
  const Result y = [&] {
    const Tape::Pause pause;  // what an op does inside is its own business
    return fn.forward(inputs...);
  }();
  if (detail::has_op_hook.load(std::memory_order_relaxed)) [[unlikely]]
    for (const Tensor& t : detail::outputs_of(y)) detail::tell_op_hook(fn.name(), t);
  if (fn.wanted_) tape->record(std::make_unique<Fn>(std::move(fn)), in, detail::outputs_of(y), start);
  if (tape) tape->tell_around(in, detail::outputs_of(y));
  return y;
}

/// A list: named apart, or an unqualified apply(fn, span) could be std::apply of a tuple.
template <std::derived_from<Function> Fn> auto apply(Fn fn, std::span<const Tensor> inputs) {
  return hilt::apply<Fn, std::span<const Tensor>>(std::move(fn), inputs);
}

/// Memory for time: fn(inputs), keeping only the inputs; backward runs fn again. Watched tensors
/// that fn reads beside get their gradients too, and generators it draws from replay the same
/// numbers. What it reads beside, unwatched, must still hold the same then: that is not checked.
Tensor checkpoint(Composite fn, std::span<const Tensor> inputs);
inline Tensor checkpoint(Composite fn, const std::vector<Tensor>& inputs) {
  return checkpoint(std::move(fn), std::span(inputs));
}

}  // namespace hilt
