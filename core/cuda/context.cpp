// The devices of the process: for each GPU a stream, a pool, counters, and whether it still works.
#include "core/cuda/context.h"
#include <cuda_runtime_api.h>
#include "core/cuda/kernels.h"
#include "core/pool.h"
#include "core/tape.h"
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else
static int nvtxRangePushA(const char*) { return 0; }
static int nvtxRangePop() { return 0; }
#endif

namespace hilt {
namespace cuda {
namespace {

constexpr int kMaxDevices = 64;

struct Context {
  int index = 0;
  Properties properties;
  cudaStream_t stream = nullptr;
  std::unique_ptr<Pool> pool;
  std::atomic<std::uint64_t> launches{0}, host_waits{0};
  std::atomic<bool> recording{false};
  std::atomic<bool> lost{false};
  Verdict* verdict = nullptr;
  std::string lost_reason;  // written once, before `lost`
};

std::string text_of(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + " (" + std::to_string(static_cast<int>(status)) +
         "): " + cudaGetErrorString(status);
}

template <class... Parts> [[noreturn]] void no_usable_gpu(const Parts&... reason) {
  fail_with(Code::gpu, "no usable GPU: ", reason..., "; the device 'cpu' always works");
}

struct Count {
  int devices = 0;
  cudaError_t status = cudaGetDeviceCount(&devices);
  Count() {
    if (status != cudaSuccess) devices = 0, (void)cudaGetLastError();
  }
};
const Count& count() {  // asked once: a driver does not come and go
  static const Count c;
  return c;
}

std::mutex contexts_mutex;
std::array<std::atomic<Context*>, kMaxDevices> contexts{};  // never destroyed: static tensors may live on

/// A host may have selected another GPU since: the runtime knows.
void select(int index) {
  int selected = -1;
  if (cudaGetDevice(&selected) == cudaSuccess && selected == index) return;
  check_status(cudaSetDevice(index), "cudaSetDevice", index);
}

/// This thread's mark in a stream, made once a GPU. Never destroyed: the driver may be gone then.
cudaEvent_t mark(int index) noexcept {
  thread_local std::array<cudaEvent_t, kMaxDevices> marks{};
  cudaEvent_t& event = marks[static_cast<std::size_t>(index)];
  if (!event) (void)cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  return event;
}

Properties ask(int index) {
  cudaDeviceProp p{};
  check_status(cudaGetDeviceProperties(&p, index), "cudaGetDeviceProperties", index);
  return {p.name, p.major, p.minor, p.multiProcessorCount, p.totalGlobalMem};
}

/// A kernel that writes one known word: this build has code for the GPU, and the GPU runs it.
void smoke(const Context& c) {
  constexpr std::uint32_t kWord = 0x48494c54;
  std::uint32_t* word = nullptr;
  std::uint32_t seen = 0;
  cudaError_t status = cudaMalloc(reinterpret_cast<void**>(&word), sizeof *word);
  if (status == cudaSuccess) status = static_cast<cudaError_t>(kernels::write_word({c.stream, c.index}, word, kWord));
  if (status == cudaSuccess) status = cudaMemcpyAsync(&seen, word, sizeof seen, cudaMemcpyDeviceToHost, c.stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(c.stream);
  (void)cudaFree(word);
  (void)cudaGetLastError();
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion)
    no_usable_gpu("cuda:", c.index, " (", c.properties.name, ") has compute capability ", c.properties.major, ".",
                  c.properties.minor, ", this build has code for ", kGpuArchs);
  if (status != cudaSuccess) no_usable_gpu("cuda:", c.index, " failed a small kernel with ", text_of(status));
  if (seen != kWord) no_usable_gpu("cuda:", c.index, " computed a wrong word");
}

std::byte* take(int index, std::size_t bytes) {
  check_alive(index);
  select(index);
  void* p = nullptr;
  const cudaError_t status = cudaMalloc(&p, bytes);
  if (status == cudaErrorMemoryAllocation) return (void)cudaGetLastError(), nullptr;
  check_status(status, "cudaMalloc", index);
  return static_cast<std::byte*>(p);
}

Context* existing(int index) {
  return index >= 0 && index < kMaxDevices ? contexts[static_cast<std::size_t>(index)].load(std::memory_order_acquire)
                                           : nullptr;
}

Context& context(int index) {
  if (Context* const c = existing(index)) return *c;
  if (count().status != cudaSuccess) no_usable_gpu("driver reports ", text_of(count().status));
  if (index < 0 || index >= std::min(count().devices, kMaxDevices))
    no_usable_gpu("cuda:", index, " asked for, the driver shows ", count().devices);
  const std::lock_guard lock(contexts_mutex);
  auto& slot = contexts[static_cast<std::size_t>(index)];
  if (Context* const c = slot.load()) return *c;
  int before = index;
  (void)cudaGetDevice(&before);
  select(index);
  auto c = std::make_unique<Context>();
  c->index = index;
  c->properties = ask(index);
  const cudaError_t status = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
  if (status != cudaSuccess) no_usable_gpu("cuda:", index, " reports ", text_of(status));
  smoke(*c);
  void* verdict = nullptr;
  if (const cudaError_t made = cudaHostAlloc(&verdict, sizeof(Verdict), cudaHostAllocPortable | cudaHostAllocMapped))
    no_usable_gpu("cuda:", index, " reports ", text_of(made), " of memory that both sides see");
  c->verdict = new (verdict) Verdict();
  constexpr std::size_t kAlignment = 512;
  c->pool = std::make_unique<Pool>(
      Pool::Source{
          kAlignment, " on cuda:" + std::to_string(index), [index](std::size_t n) { return take(index, n); },
          [](std::byte* p) { (void)cudaFree(p); }},  // it waits for the stream; a lost device takes nothing back
      pool_limit("HILT_GPU_POOL_BYTES", std::numeric_limits<std::size_t>::max()));
  (void)cudaSetDevice(before);
  slot.store(c.get(), std::memory_order_release);
  return *c.release();
}

[[noreturn]] void device_lost(const Context& c) {
  fail_with(Code::gpu, "device lost: cuda:", c.index, ": ", c.lost_reason,
            "; its memory is gone: start the program again");
}

}  // namespace

int device_count() { return count().devices; }
void require(int index) { (void)context(index); }
const Properties& properties(int index) { return context(index).properties; }
Pool& pool(int index) { return *context(index).pool; }

void check_alive(int device) {
  const Context* const c = existing(device);
  if (c && c->lost.load(std::memory_order_acquire)) [[unlikely]]
    device_lost(*c);
}

void check_status(int code, const char* what, int device) {
  const auto status = static_cast<cudaError_t>(code);
  if (status == cudaSuccess) [[likely]]
    return;
  check_alive(device);
  (void)cudaGetLastError();
  // A sticky error answers every later call with itself; others are over once they were read.
  const cudaError_t after = cudaFree(nullptr);
  (void)cudaGetLastError();
  Context* const c = existing(device);
  if (c && after == status) {
    const std::lock_guard lock(contexts_mutex);
    if (!c->lost.load())
      c->lost_reason = std::string(what) + " reports " + text_of(status),
      c->lost.store(true, std::memory_order_release);
  }
  check_alive(device);
  if (status == cudaErrorMemoryAllocation)
    fail_with(Code::memory, what, ": out of memory on cuda:", device, ": ", text_of(status));
  fail_with(Code::gpu, what, ": cuda:", device, " reports ", text_of(status));
}

void count_launch(int device) { context(device).launches.fetch_add(1, std::memory_order_relaxed); }

void forbid_while_recording(int device, const char* what) {
  if (context(device).recording.load(std::memory_order_relaxed)) [[unlikely]]
    fail("Replay: ", what, " while the work of cuda:", device,
         " is recorded; let the work begin after it, or end before");
}

Verdict* verdict(int device) { return context(device).verdict; }
void check_verdict(int device) {
  Verdict& v = *verdict(device);
  if (!v.what) return;
  const Verdict found = std::exchange(v, {});
  fail_with(Code::data, found.what, ": row ", found.row, ", token ", found.token);
}

static void copy_bytes(Cuda where, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                       const char* what) {
  if (bytes == 0) return;
  check_alive(where.device);
  check_status(cudaMemcpyAsync(to, from, bytes, kind, static_cast<cudaStream_t>(where.stream)), what, where.device);
}
void to_host(Cuda where, void* host, const void* device, std::size_t bytes) {
  if (bytes == 0) return;
  forbid_while_recording(where.device, "a value was asked for");
  context(where.device).host_waits.fetch_add(1, std::memory_order_relaxed);
  copy_bytes(where, host, device, bytes, cudaMemcpyDeviceToHost, "copy to the host");
  check_status(cudaStreamSynchronize(static_cast<cudaStream_t>(where.stream)), "copy to the host", where.device);
  check_verdict(where.device);
}
void to_device(Cuda where, void* device, const void* host, std::size_t bytes) {
  if (bytes > 0) forbid_while_recording(where.device, "something was copied from the host");
  copy_bytes(where, device, host, bytes, cudaMemcpyHostToDevice, "copy to the GPU");
}
void within(Cuda where, void* to, const void* from, std::size_t bytes) {
  copy_bytes(where, to, from, bytes, cudaMemcpyDeviceToDevice, "copy");
}
void clear(Cuda where, void* device, std::size_t bytes) {
  if (bytes == 0) return;
  check_alive(where.device);
  check_status(cudaMemsetAsync(device, 0, bytes, static_cast<cudaStream_t>(where.stream)), "clear", where.device);
}

// ---- recording ----------------------------------------------------------------------------------
struct Graph {
  cudaGraphExec_t exec = nullptr;
  ~Graph() {
    if (exec) (void)cudaGraphExecDestroy(exec);
  }  // what runs still ends
};
void begin_recording(Cuda where) {
  check_alive(where.device);
  forbid_while_recording(where.device, "another recording began");
  check_status(cudaStreamBeginCapture(static_cast<cudaStream_t>(where.stream), cudaStreamCaptureModeRelaxed), "Replay",
               where.device);
  context(where.device).recording = true;
}
std::shared_ptr<Graph> end_recording(Cuda where, bool keep) {
  cudaGraph_t graph = nullptr;
  context(where.device).recording = false;
  const cudaError_t status = cudaStreamEndCapture(static_cast<cudaStream_t>(where.stream), &graph);
  const std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, cudaError_t (*)(cudaGraph_t)> written(graph,
                                                                                                  cudaGraphDestroy);
  if (!keep) return (void)cudaGetLastError(), nullptr;
  check_status(status, "Replay", where.device);
  auto made = std::make_shared<Graph>();
  check_status(cudaGraphInstantiate(&made->exec, graph, 0), "Replay", where.device);
  return made;
}
void start(Cuda where, const Graph& graph) {
  check_alive(where.device);
  check_status(cudaGraphLaunch(graph.exec, static_cast<cudaStream_t>(where.stream)), "Replay", where.device);
  count_launch(where.device);
}

// ---- a host's stream ----------------------------------------------------------------------------
namespace {
/// Where this fails the device is lost, and the next call says why.
void order(int device, void* earlier, void* later) noexcept {
  (void)cudaEventRecord(mark(device), static_cast<cudaStream_t>(earlier));
  (void)cudaStreamWaitEvent(static_cast<cudaStream_t>(later), mark(device), 0);
}
}  // namespace
Visit enter(int device, void* stream) {
  Visit visit{stream, device, false};
  check_status(cudaGetDevice(&visit.before), "cudaGetDevice", device);
  Context& c = context(device);
  check_alive(device);
  select(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_status(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing", device);
  visit.recorded = status != cudaStreamCaptureStatusNone;
  if (visit.recorded) forbid_while_recording(device, "a host recorded its own"), c.recording = true;
  else order(device, c.stream, stream);
  return visit;
}
void leave(int device, const Visit& visit) noexcept {
  Context& c = context(device);
  if (visit.recorded) c.recording = false;
  else order(device, visit.stream, c.stream);
  if (visit.before != device) (void)cudaSetDevice(visit.before);
}
void behind_ours(int device, void* stream) noexcept { order(device, context(device).stream, stream); }

std::vector<std::string> descriptions() {
  if (count().status != cudaSuccess) return {"no usable GPU: driver reports " + text_of(count().status)};
  std::vector<std::string> out;
  for (int i = 0; i < count().devices; ++i) {
    const Properties p = ask(i);
    TextStream line;
    line << "cuda:" << i << ": " << p.name << ", " << (p.memory >> 20) << " MiB, compute capability " << p.major << '.'
         << p.minor;
    out.push_back(line.str());
  }
  return out;
}
void synchronize(int index) {
  Context& c = context(index);
  check_alive(index);
  select(index);
  forbid_while_recording(index, "synchronize()");
  c.host_waits.fetch_add(1, std::memory_order_relaxed);
  check_status(cudaStreamSynchronize(c.stream), "synchronize", index);
  check_verdict(index);
}
DeviceCounters counters(int index) {
  const Context& c = context(index);
  return {c.launches.load(), c.host_waits.load()};
}
}  // namespace cuda

void detail::push_range(std::string_view name) { nvtxRangePushA(std::string(name).c_str()); }
void detail::pop_range() { nvtxRangePop(); }

Cuda cuda_of(Device device) {
  cuda::Context& c = cuda::context(device.index);
  cuda::check_alive(device.index);
  cuda::select(device.index);
  return {lender && lender->device == device ? lender->stream : c.stream, device.index};
}

}  // namespace hilt
