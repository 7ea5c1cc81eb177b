#pragma once
#include "core/dispatch.h"

// Private to core and ops: one GPU as the library uses it. No CUDA header comes in through here.

namespace hilt {
class Pool;
}

namespace hilt::cuda {

struct Properties {  // what kernels need to know of a GPU
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::size_t memory = 0;  // bytes
  bool is_hopper() const { return major == 9 && minor == 0; }
};
const Properties& properties(int index);

int device_count();  // GPUs the driver shows; 0 where there is no usable driver
/// Throws Code::gpu unless it exists, this build has code for it, and a small kernel has run on it.
void require(int index);

/// Its memory. All work of a GPU runs on one stream, so what a tensor leaves behind can be handed
/// on at once: whoever gets it writes after the last reader has run.
Pool& pool(int index);

std::vector<std::string> descriptions();
void synchronize(int index);
DeviceCounters counters(int index);

/// Checks a status of the CUDA runtime. An error that leaves the context unusable marks the device
/// as lost: from then on every call says so at once, and nothing waits for it.
void check_status(int status, const char* what, int device);
void check_alive(int device);
void count_launch(int device);

/// What a kernel found wrong in its data. It lies in the host's memory, so nobody waits to read it:
/// a kernel writes it whole, and check_verdict() throws Code::data. Calls that wait do so too.
struct alignas(16) Verdict {
  const char* what = nullptr;  // a literal; null: nothing is wrong
  std::int32_t row = 0, token = 0;
};
Verdict* verdict(int device);
void check_verdict(int device);

/// enter() makes a host's stream wait for ours, on which the tables beside plans are made; leave()
/// makes ours wait for the host's. A stream that the host records waits for nothing. leave() is
/// given what enter() returned.
struct Visit {
  void* stream;
  int before;  // the GPU that the thread had
  bool recorded;
};
Visit enter(int device, void* stream);
void leave(int device, const Visit& visit) noexcept;
void behind_ours(int device, void* stream) noexcept;        // the stream waits for what ours was asked so far
void forbid_while_recording(int device, const char* what);  // a recording holds what the GPU does by itself

/// Copies between memory of the host and of a GPU, in stream order. To the host it waits; from
/// pageable memory the source may be reused on return.
void to_host(Cuda where, void* host, const void* device, std::size_t bytes);
void to_device(Cuda where, void* device, const void* host, std::size_t bytes);
void within(Cuda where, void* to, const void* from, std::size_t bytes);
void clear(Cuda where, void* device, std::size_t bytes);

/// Work between begin and end is recorded and does not run; a call that waits is an error.
/// end returns it as a piece of work to start again and again, or nothing unless told to `keep` it.
struct Graph;
void begin_recording(Cuda where);
std::shared_ptr<Graph> end_recording(Cuda where, bool keep);
void start(Cuda where, const Graph& graph);

}  // namespace hilt::cuda
