// Ranks with a GPU each, joined by NCCL: rows go on a stream of their own, beside what the GPU
// computes; everything else goes over the group that had met before.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <cstring>
#include <thread>
#include "core/cuda/context.h"
#include "core/comm/link.h"

namespace hilt {
namespace {

/// NCCL's own handle, shared by the link and what is under way. Calls do not block, but are polled.
class Channel {
 public:
  Channel(int device, std::shared_ptr<Link> control) : device_(device), control_(std::move(control)) {
    select();
    int lowest = 0, highest = 0;
    require(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    require(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
            "cudaStreamCreateWithPriority");  // not behind kernels that fill the GPU
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel() {
    select();
    if (comm_ && !control_->fault()) {
      ncclResult_t state = ncclCommFinalize(comm_);
      for (int i = 0; i < kFinalizePolls && state == ncclInProgress; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (ncclCommGetAsyncError(comm_, &state) != ncclSuccess) break;
      }
      if (state == ncclSuccess) (void)ncclCommDestroy(std::exchange(comm_, nullptr));
    }
    abort();
    if (stream_) (void)cudaStreamDestroy(stream_);
  }

  void join(const ncclUniqueId& id, std::chrono::milliseconds deadline) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    finish(ncclCommInitRankConfig(&comm_, control_->size(), id, control_->rank(), &config), "joining", deadline);
  }

  /// Calls for one group of sends and receives, after what the compute stream was asked before.
  cudaEvent_t run(const std::vector<Message>& out, const std::vector<Message>& in, std::chrono::milliseconds deadline) {
    select();
    const Cuda where = cuda_of({Device::Kind::cuda, device_});
    cudaEvent_t event = nullptr;
    require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    require(cudaEventRecord(event, static_cast<cudaStream_t>(where.stream)), "cudaEventRecord");
    require(cudaStreamWaitEvent(stream_, event, 0), "cudaStreamWaitEvent");
    started(ncclGroupStart(), "ncclGroupStart");
    for (const Message& m : out)
      started(ncclSend(m.data.raw(), m.data.bytes(), ncclInt8, m.peer, comm_, stream_), "ncclSend");
    for (const Message& m : in) {
      Tensor to = m.data;
      started(ncclRecv(to.mutable_raw(), to.bytes(), ncclInt8, m.peer, comm_, stream_), "ncclRecv");
    }
    finish(ncclGroupEnd(), "ncclGroupEnd", deadline);
    require(cudaEventRecord(event, stream_), "cudaEventRecord");
    return event;
  }

  bool is_done(cudaEvent_t event) const {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) return false;
    require(status, "cudaEventQuery");
    return true;
  }

  /// Why NCCL gave up, if it did.
  std::optional<std::string> error() {
    ncclResult_t state = ncclSuccess;
    if (!comm_ || ncclCommGetAsyncError(comm_, &state) != ncclSuccess || state == ncclSuccess ||
        state == ncclInProgress)
      return {};
    return "NCCL on rank " + std::to_string(control_->rank()) + ": " + ncclGetErrorString(state) + ": " +
           ncclGetLastError(comm_);
  }
  /// Ends its kernels, which otherwise wait for their peers for ever.
  void abort() {
    if (comm_) (void)ncclCommAbort(std::exchange(comm_, nullptr));
  }

 private:
  static constexpr int kFinalizePolls = 10'000;  // of 1 ms

  void select() const { (void)cuda_of({Device::Kind::cuda, device_}); }
  void require(cudaError_t status, const char* what) const { cuda::check_status(status, what, device_); }
  void started(ncclResult_t result, const char* what) const {
    if (result != ncclSuccess && result != ncclInProgress)
      fail_with(Code::distributed, what, " on rank ", control_->rank(), ": ", ncclGetErrorString(result));
  }
  void finish(ncclResult_t result, const char* what, std::chrono::milliseconds deadline) {
    const auto start = std::chrono::steady_clock::now();
    while (result == ncclInProgress) {
      if (const auto fault = control_->fault()) {
        abort();
        fail_with(Code::distributed, *fault);
      }
      if (std::chrono::steady_clock::now() - start > deadline) {
        const std::string text = std::string("NCCL, ") + what + ": rank " + std::to_string(control_->rank()) +
                                 " waited " + std::to_string(deadline.count()) + " ms";
        control_->abort(text);
        abort();
        fail_with(Code::distributed, text);
      }
      std::this_thread::yield();
      started(ncclCommGetAsyncError(comm_, &result), what);
    }
    started(result, what);
  }

  const int device_;
  std::shared_ptr<Link> control_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

class NcclFlight final : public Flight {
 public:
  NcclFlight(std::shared_ptr<Channel> channel, cudaEvent_t event, std::vector<Message> held,
             std::unique_ptr<Flight> on_cpu)
      : channel_(std::move(channel)), event_(event), held_(std::move(held)), on_cpu_(std::move(on_cpu)) {}
  ~NcclFlight() override {
    if (event_) (void)cudaEventDestroy(event_);
  }
  bool poll() override {
    if (on_cpu_ && on_cpu_->poll()) on_cpu_.reset();
    if (event_ && channel_->is_done(event_)) (void)cudaEventDestroy(std::exchange(event_, nullptr)), held_.clear();
    return !on_cpu_ && !event_;
  }
  int missing() const override {
    return on_cpu_ ? on_cpu_->missing() : held_.empty() ? Link::kNobody : held_.front().peer;
  }

 private:
  std::shared_ptr<Channel> channel_;
  cudaEvent_t event_;
  std::vector<Message> held_;  // memory that is in use until the event
  std::unique_ptr<Flight> on_cpu_;
};

class NcclLink final : public Link {
 public:
  NcclLink(const Comm& bootstrap, Device device)
      : control_(bootstrap.link()),
        channel_(std::make_shared<Channel>(device.index, control_)),
        deadline_(bootstrap.deadline()) {
    Tensor id = zeros({sizeof(ncclUniqueId)}, DType::u8);
    if (bootstrap.rank() == 0 && ncclGetUniqueId(reinterpret_cast<ncclUniqueId*>(id.mutable_raw())) != ncclSuccess)
      fail_with(Code::distributed, "ncclGetUniqueId: NCCL finds no way to reach this host; NCCL_DEBUG=INFO says more");
    id = bootstrap.broadcast(id, 0, {"joining over NCCL"});
    ncclUniqueId agreed;
    std::memcpy(&agreed, id.raw(), sizeof agreed);
    channel_->join(agreed, deadline_);
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  std::string_view name() const override { return "nccl"; }
  std::unique_ptr<Flight> start(int channel, std::vector<Message> out, std::vector<Message> in) override {
    const auto divide = [](std::vector<Message>& all) {
      const auto cpu = std::ranges::stable_partition(all, [](const Message& m) { return m.data.device().is_cuda(); });
      std::vector<Message> on_cpu(cpu.begin(), cpu.end());
      all.erase(cpu.begin(), cpu.end());
      return on_cpu;
    };
    std::vector<Message> cpu_out = divide(out), cpu_in = divide(in);
    std::unique_ptr<Flight> on_cpu;
    if (!cpu_out.empty() || !cpu_in.empty()) on_cpu = control_->start(channel, std::move(cpu_out), std::move(cpu_in));
    cudaEvent_t event = out.empty() && in.empty() ? nullptr : channel_->run(out, in, deadline_);
    in.insert(in.end(), out.begin(), out.end());
    return std::make_unique<NcclFlight>(channel_, event, std::move(in), std::move(on_cpu));
  }
  std::optional<std::string> fault() override {
    std::optional<std::string> fault = control_->fault();
    if (!fault)
      if (const auto error = channel_->error()) control_->abort(*error), fault = error;
    if (fault) channel_->abort();
    return fault;
  }
  bool abort(const std::string& reason) noexcept override {
    const bool first = control_->abort(reason);
    channel_->abort();
    return first;
  }
  void waits_for(int peer) override { control_->waits_for(peer); }
  std::optional<int> ask(int rank) override { return control_->ask(rank); }
  void pause(int polls) override {
    if (polls < kBusyPolls) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

 private:
  static constexpr int kBusyPolls = 2000;
  std::shared_ptr<Link> control_;
  std::shared_ptr<Channel> channel_;
  const std::chrono::milliseconds deadline_;
};

}  // namespace

std::shared_ptr<Link> nccl_link(const Comm& bootstrap, Device device) {
  return std::make_shared<NcclLink>(bootstrap, device);
}

}  // namespace hilt
