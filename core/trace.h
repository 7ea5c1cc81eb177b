#pragma once
#include "config.h"
#include "tensor.h"

// Looking at a tape and at ops as they run.

namespace [[gnu::visibility("default")]] hilt {

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
}  // namespace detail

}  // namespace hilt
