#pragma once
#include <functional>
#include <memory>
#include "device.h"

namespace [[gnu::visibility("default")]] hilt {

/// A step of work for a GPU, recorded once as a CUDA graph and then launched in one go.
///
/// ```cpp
/// Tensor x = zeros({4}), y;
/// Replay step;
/// for (std::uint64_t i = 0; i < 3; ++i) {
///   copy(x, randn({4}, RandomKey{i}));
///   step([&] { y = square(x); });
/// }
/// ```
///
/// The first call runs the work. The second records what it asks of the GPU. From then on a call
/// launches the recording, and `work` itself is not called. So it must find its inputs in the same
/// tensors each time (copy() into them) and make tensors of the same shapes. While it is recorded,
/// it may neither wait for a value nor bring one from the host (both are errors), and no other
/// thread may ask anything of that GPU. Tensors that it assigns to variables outside have their new
/// values after each call. Generators move on as if it had run, and dropout draws new masks. The
/// memory that the work takes is kept for it. On the CPU every call runs the work.
class Replay {
 public:
  explicit Replay(Device device = {});  // where the work runs
  Replay(Replay&&) = default;
  Replay& operator=(Replay&&) = default;

  /// Runs the work, or what was recorded of it; errors are those of `work`.
  void operator()(const std::function<void()>& work);
  /// Whether the next call launches the recording.
  bool is_recorded() const { return recorded_ != nullptr; }

 private:
  struct Recorded;
  void record(const std::function<void()>& work);
  Device device_;
  bool ran_ = false;  // once, which filled what is made on first use: plans, tables, the choice of kernels
  std::shared_ptr<Recorded> recorded_;
};

/// The stream that a GPU computes on, a cudaStream_t, for a host to order by; null for the CPU.
void* compute_stream(Device device);

/// While one lives, what this thread asks of a GPU runs on a stream of a host, such as PyTorch, and
/// in memory of the host's allocator. Where the host records that stream as a CUDA graph, the work
/// is recorded with it. Then what would wait is an error, so plans must have been used once before.
/// Afterwards the thread's current GPU is the one it was.
class HostStream {
 public:
  /// The host's allocator, in the order of the stream.
  struct Memory {
    std::function<void*(std::size_t bytes)> take;  // null, or an exception, where there is no more
    std::function<void(void*)> give;               // from any thread
  };
  /// stream: a cudaStream_t.
  HostStream(Device device, void* stream, std::shared_ptr<const Memory> memory);
  ~HostStream();
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hilt
