// What people see of a tape, and what is told of ops as they run.
#include "core/trace.h"
#include <iomanip>
#include <mutex>
#include <unordered_set>
#include "core/cuda/context.h"
#include "core/tape.h"

namespace hilt {

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
  std::shared_ptr<const OpHook> hook;
  {
    const std::lock_guard lock(hook_mutex);
    hook = op_hook;
  }
  if (!hook) return;
  struct Inside {
    Inside() { in_hook = true; }
    ~Inside() { in_hook = false; }
  } const inside;
  const Tape::Pause pause;
  (*hook)(name, y);
}

void detail::push_range(std::string_view name) {
  if constexpr (kHasCuda) cuda::push_range(std::string(name).c_str());
}
void detail::pop_range() {
  if constexpr (kHasCuda) cuda::pop_range();
}

std::size_t Tape::saved_bytes() const {
  std::size_t n = 0;
  for (const NodeReport& node : report()) n += played_ ? 0 : node.unique_bytes;
  return n;
}

std::vector<NodeReport> Tape::report() const {
  if (played_) return profile_;
  std::vector<NodeReport> out = profile_;
  out.resize(nodes_.size());
  std::unordered_set<const std::byte*> seen;  // nodes keep the same tensors again and again: count each block once
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    const Function& fn = *nodes_[n].fn;
    const Known& known = known_[static_cast<std::size_t>(nodes_[n].output)];
    out[n].name = fn.name();
    out[n].output = known.shape;
    out[n].dtype = known.dtype;
    std::unordered_set<const std::byte*> mine;
    for (const auto& s : fn.saved_) {
      const Storage& storage = s.tensor.storage();
      if (!storage) continue;
      if (!mine.insert(storage.data()).second) continue;
      out[n].saved_bytes += storage.bytes();
      if (seen.insert(storage.data()).second) out[n].unique_bytes += storage.bytes();
    }
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
