#pragma once
#include <functional>
#include <memory>
#include "device.h"

namespace [[gnu::visibility("default")]] hilt {

/// The same work for a GPU, step after step, started in one go: a CUDA graph.
///
///     Replay step(device);
///     while (..) { copy(ids, next); step([&] { loss = ..; gradients = ..; }); }
///
/// The first call runs the work, the second writes down what it asks of the GPU, and from then on a
/// call starts that and leaves the host out: `work` is not called. So it has to find its inputs in
/// the same tensors each time (copy() into them), make tensors of the same shapes, and neither wait
/// for a value nor bring one from the host: both are errors while it is written down. Tensors that
/// it leaves to variables outside have their new values after each call. No other thread asks
/// anything of that GPU while it is written down. Generators move on as if it had run, and dropout
/// draws new masks. The memory the work takes is kept for it. On the CPU every call runs it.
class Replay {
 public:
  explicit Replay(Device device = {});
  Replay(Replay&&) noexcept;
  Replay& operator=(Replay&&) noexcept;
  ~Replay();

  void operator()(const std::function<void()>& work);
  /// Whether the next call starts what was written down.
  bool is_recorded() const { return recorded_ != nullptr; }

 private:
  struct Recorded;
  void record(const std::function<void()>& work);
  Device device_;
  bool ran_ = false;  // once, which filled what is made on first use: plans, tables, the choice of kernels
  std::unique_ptr<Recorded> recorded_;
};

}  // namespace hilt
