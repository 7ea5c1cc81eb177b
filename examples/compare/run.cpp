// One profiled forward and backward pass of one mode: times, memory, and the tape's report.
#include "lesson.h"

namespace compare {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) { return 1e3 * program::seconds_since(start); }
std::size_t beyond(std::size_t bytes, std::size_t base) { return bytes > base ? bytes - base : 0; }

Tensor forward(const Problem& p, const std::string& mode, const Dense* dense) {
  if (dense) return dense->forward(p.q, p.k, p.v);
  const hilt::AttentionOptions options{
      .backward = hilt::parse_backward(mode), .scale = p.scale, .dropout = p.dropout, .key = p.key, .terms = p.terms};
  return hilt::attention(p.q, p.k, p.v, p.plan, options);
}

}  // namespace

Run run_once(const Problem& p, const std::string& mode, const Dense* dense) {
  Run run;
  const hilt::Device device = p.q.device();
  const std::size_t base = hilt::memory_stats(device).live;
  hilt::reset_memory_peak(device);
  hilt::synchronize(device);
  hilt::Tape tape(hilt::Tape::Options{.profile = true});
  for (std::size_t i = 1; i < kTensors.size(); ++i)
    if (p.input(i)) tape.watch(p.input(i));
  auto start = Clock::now();
  const Tensor o = forward(p, mode, dense);
  hilt::synchronize(device);
  run.forward_ms = milliseconds_since(start);
  run.forward_peak = beyond(hilt::memory_stats(device).peak, base);
  run.held_bytes = beyond(hilt::memory_stats(device).live, base);
  run.saved_bytes = tape.saved_bytes();
  hilt::reset_memory_peak(device);
  start = Clock::now();
  auto last = start;
  if (mode == kHybrid)  // of fused the kernel, no op, would be counted to the op after it
    hilt::set_op_hook([&](std::string_view name, const Tensor& y) {
      hilt::synchronize(device);
      hilt::NodeReport& op = run.inside.emplace_back();
      op.name = name, op.output = y.shape(), op.dtype = y.dtype(), op.backward_ms = milliseconds_since(last);
      op.backward_live = beyond(hilt::memory_stats(device).live, base);
      last = Clock::now();
    });
  // Where nothing attends to anything, o may be a constant to the tape.
  const hilt::Gradients g = tape.knows(o) ? tape.backward(o, p.d_o) : hilt::Gradients();
  hilt::synchronize(device);
  hilt::set_op_hook({});
  run.backward_ms = milliseconds_since(start);
  run.backward_peak = beyond(hilt::memory_stats(device).peak, base);
  run.result[0] = hilt::moved(o, {});
  for (std::size_t i = 1; i < kTensors.size(); ++i)
    if (const Tensor& x = p.input(i)) run.result[i] = hilt::moved(g.has(x) ? g[x] : hilt::zeros_like(x), {});
  run.tape = tape.report();
  for (hilt::NodeReport& node : run.tape)
    node.forward_live = beyond(node.forward_live, base), node.backward_live = beyond(node.backward_live, base);
  return run;
}

}  // namespace compare
