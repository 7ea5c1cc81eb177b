// One profiled forward and backward pass of one mode: times, memory, and the tape's report. The
// dense mode is here too: attention as everybody writes it first, all scores of a head in one
// matrix, masked by a bias.
#include "lesson.h"
#include <limits>

namespace compare {
namespace {

/// [heads, ..], or [B, heads, ..] where axis is 1, as [B or 1, key heads, heads a key head, rest];
/// of one for all heads alike, [B or 1, 1, 1, rest].
Tensor by_heads(const Tensor& x, Index kv_heads, int axis, const hilt::Shape& rest) {
  const Index heads = x.dim(axis), of_key = heads == 1 ? 1 : kv_heads;
  hilt::Shape shape{axis == 0 ? 1 : x.dim(0), of_key, heads / of_key};
  for (const Index n : rest) shape.push_back(n);
  return hilt::reshape(x, shape);
}

/// L x L scores, a mask, a softmax, a product: no plan, no tiles; the tape differentiates it. The
/// mask is made once, before.
class Dense {
 public:
  Dense(const Problem& problem, const AttendedSets& sets);
  Tensor forward() const;

 private:
  const Problem& p_;
  hilt::ScoreTerms terms_;
  // By key head, or once for all heads.
  Tensor bias_;     // [.., L, L]: log of how often a key is listed, 0 where once, -inf where not
  Tensor present_;  // [.., L, 1]: 0 for rows without keys, undefined if there are none
  Tensor dropout_;  // multipliers; undefined without dropout
  Tensor apart_;    // [L, L]: minus the distance, for slopes
  Tensor entry_;    // [L * L], of relative
};

Dense::Dense(const Problem& p, const AttendedSets& sets) : p_(p), terms_(p.terms) {
  const Index length = p.length(), tables = sets.sets.size() == 1 ? 1 : p.heads();
  const hilt::DType wide = p.dtype == hilt::DType::f64 ? hilt::DType::f64 : hilt::DType::f32;
  const auto typed = [&](const auto& fill) { wide == hilt::DType::f64 ? fill(double()) : fill(float()); };
  const auto there = [&](const Tensor& x) { return hilt::moved(hilt::to(x, p.dtype), p.q.device()); };
  Tensor bias = hilt::full({tables, length, length}, -std::numeric_limits<double>::infinity(), wide);
  Tensor present = hilt::ones({tables, length, 1}, hilt::DType::f32);
  bool any_empty = false;
  typed([&]<class T>(T) {
    for (Index i = 0; i < tables * length; ++i) {
      const auto& keys = sets.head(i / length).row(i % length);
      T* const row = bias.mutable_data<T>() + i * length;
      for (std::size_t key = 0, times = 1; key < keys.size(); ++key) {
        times = key > 0 && keys[key] == keys[key - 1] ? times + 1 : 1;
        row[keys[key]] = std::log(static_cast<T>(times));
      }
      if (!keys.empty()) continue;
      std::fill_n(row, length, T{0});  // a softmax of nothing is not a number: see everything, then drop it
      present.mutable_data<float>()[i] = 0;
      any_empty = true;
    }
  });
  bias_ = there(by_heads(bias, p.kv_heads(), 0, {length, length}));
  if (any_empty) present_ = there(by_heads(present, p.kv_heads(), 0, {length, 1}));
  if (terms_.alibi) terms_.slopes = hilt::moved(hilt::alibi_slopes(p.heads(), hilt::DType::f64), p.q.device());
  const ExactTerms exact = exact_terms(*p.plan, terms_);
  // Pairs outside the grid are 0 apart, and find the 0 that forward() puts behind the table.
  const std::size_t pairs = at(length * length), behind = exact.tensor[1].size() / at(p.heads());
  std::vector<double> apart(pairs);
  std::vector<std::int32_t> entry(pairs, static_cast<std::int32_t>(behind));
  for (Index pair = 0; (terms_.slopes || terms_.relative) && pair < length * length; ++pair)
    exact.each(0, 0, pair / length, pair % length, [&](std::size_t which, std::size_t element, double factor) {
      if (which == 0) apart[at(pair)] = factor;
      if (which == 1) entry[at(pair)] = static_cast<std::int32_t>(element);
    });
  if (terms_.slopes) apart_ = there(hilt::from_values(apart, {length, length}));
  if (terms_.relative) entry_ = hilt::moved(hilt::from_values(entry, {length * length}), p.q.device());
  if (p.dropout == 0) return;
  Tensor multipliers = hilt::empty({p.batch(), p.kv_heads(), p.heads() / p.kv_heads(), length, length}, wide);
  typed([&]<class T>(T) {
    T* const m = multipliers.mutable_data<T>();
    hilt::parallel_for(p.batch() * p.heads() * length, 16, [&](Index first, Index last) {
      for (Index row = first; row < last; ++row)
        for (Index u = 0; u < length; ++u)
          m[row * length + u] = static_cast<T>(dropout_multiplier(p.key, row / length, row % length, u, p.dropout));
    });
  });
  dropout_ = there(multipliers);
}

Tensor Dense::forward() const {
  const Index kv_heads = p_.kv_heads(), length = p_.length();
  // [B, L, H, D] -> [B, key heads, heads a key head, L, D]
  const auto heads_first = [&](const Tensor& x) {
    return hilt::permute(hilt::reshape(x, {x.dim(0), length, kv_heads, x.dim(2) / kv_heads, x.dim(3)}),
                         {0, 2, 3, 1, 4});
  };
  Tensor s = hilt::matmul(heads_first(p_.q), hilt::transpose(heads_first(p_.k))) * p_.scale;
  const auto term = [&](const Tensor& x, int axis, const hilt::Shape& rest) {
    return hilt::to(by_heads(x, kv_heads, axis, rest), s.dtype());
  };
  if (terms_.softcap) s = hilt::tanh(s * (1 / *terms_.softcap)) * *terms_.softcap;
  if (terms_.slopes) s = s + term(terms_.slopes, 0, {1, 1}) * apart_;
  if (const Tensor& table = terms_.relative) {
    const Tensor none = hilt::zeros({table.dim(0), 1}, table.dtype(), table.device()),
                 all = hilt::cat({hilt::reshape(table, {table.dim(0), -1}), none}, 1);
    s = s + term(hilt::gather(all, 1, entry_), 0, {length, length});
  }
  if (const Tensor& b = terms_.bias) s = s + term(b, 1, {b.dim(2), b.dim(3)});
  s = s + bias_;
  if (terms_.sink) s = hilt::cat({s, hilt::expand(term(terms_.sink, 0, {1, 1}), s.shape().with(-1, 1))}, -1);
  Tensor p = hilt::softmax(s);
  if (terms_.sink) p = hilt::slice(p, -1, 0, length);
  if (dropout_) p = p * dropout_;
  Tensor o = hilt::matmul(p, heads_first(p_.v));
  if (present_) o = o * present_;
  return hilt::reshape(hilt::permute(o, {0, 3, 1, 2, 4}), p_.q.shape());
}

using Clock = std::chrono::steady_clock;

Trial run_once(const Problem& p, const std::string& mode, const std::function<Tensor()>& forward) {
  Trial run;
  const hilt::Device device = p.q.device();
  const auto beyond = [base = hilt::memory_stats(device).live](std::size_t bytes) {
    return bytes > base ? bytes - base : 0;
  };
  hilt::reset_memory_peak(device);
  hilt::synchronize(device);
  hilt::Tape tape(hilt::Tape::Options{.profile = true});
  for (std::size_t i = 1; i < kTensors.size(); ++i)
    if (p.input(i)) tape.watch(p.input(i));
  auto start = Clock::now();
  const Tensor o = forward();
  hilt::synchronize(device);
  run.forward_ms = 1e3 * program::seconds_since(start);
  run.forward_peak = beyond(hilt::memory_stats(device).peak);
  run.held_bytes = beyond(hilt::memory_stats(device).live);
  run.saved_bytes = tape.saved_bytes();
  hilt::reset_memory_peak(device);
  start = Clock::now();
  auto last = start;
  if (mode == kHybrid)  // of fused the kernel, no op, would be counted to the op after it
    hilt::set_op_hook([&](std::string_view name, const Tensor& y) {
      hilt::synchronize(device);
      hilt::NodeReport& op = run.inside.emplace_back();
      op.name = name, op.output = y.shape(), op.dtype = y.dtype(), op.backward_ms = 1e3 * program::seconds_since(last);
      op.backward_live = beyond(hilt::memory_stats(device).live);
      last = Clock::now();
    });
  // Where nothing attends to anything, o may be a constant to the tape.
  const hilt::Gradients g = tape.knows(o) ? tape.backward(o, p.d_o) : hilt::Gradients();
  hilt::synchronize(device);
  hilt::set_op_hook({});
  run.backward_ms = 1e3 * program::seconds_since(start);
  run.backward_peak = beyond(hilt::memory_stats(device).peak);
  run.result[0] = hilt::moved(o, {});
  for (std::size_t i = 1; i < kTensors.size(); ++i)
    if (const Tensor& x = p.input(i)) run.result[i] = hilt::moved(g.has(x) ? g[x] : hilt::zeros_like(x), {});
  run.tape = tape.report();
  for (hilt::NodeReport& node : run.tape)
    node.forward_live = beyond(node.forward_live), node.backward_live = beyond(node.backward_live);
  return run;
}

}  // namespace

std::function<Trial()> pass_of(const Problem& p, const std::string& mode, const AttendedSets& sets) {
  if (mode == kDense)
    return [&p, dense = std::make_shared<const Dense>(p, sets)] {
      return run_once(p, kDense, [&] { return dense->forward(); });
    };
  return [&p, mode] {
    const hilt::AttentionOptions options{
        .backward = hilt::parse_backward(mode), .scale = p.scale, .dropout = p.dropout, .key = p.key, .terms = p.terms};
    return run_once(p, mode, [&] { return hilt::attention(p.q, p.k, p.v, p.plan, options); });
  };
}

}  // namespace compare
