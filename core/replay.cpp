// A step for a GPU: run once, recorded as a CUDA graph, launched with the generators moved forward.
#include "core/replay.h"
#include "core/cuda/context.h"
#include "core/pool.h"
#include "core/random.h"
#include "core/tensor.h"

namespace hilt {
namespace {
constexpr Index kMostGenerators = 64;
}

struct Replay::Recorded {  // what the GPU does, the memory it does it in, and how far each generator moved
  struct Drawn {
    Generator generator;
    RandomKey begin;
    std::uint64_t streams;
  };

  explicit Recorded(Device where) : device(where), further(zeros({kMostGenerators}, DType::i64, where)) {}
  ~Recorded() {
    if constexpr (kHasCuda)
      if (memory) cuda::pool(device.index).unreserve(memory);
  }

  Device device;
  Tensor further;  // one word a generator
  std::vector<Drawn> drawn;
  std::shared_ptr<cuda::Graph> graph;
  Shelf* memory = nullptr;
};

Replay::Replay(Device device) : device_(device) {}

void Replay::record(const std::function<void()>& work) {
  auto made = std::make_shared<Recorded>(device_);
  if constexpr (kHasCuda) {
    const Cuda where = cuda_of(device_);
    auto& pool = cuda::pool(device_.index);
    const Generator::Recording draws(reinterpret_cast<const std::uint64_t*>(made->further.data<std::int64_t>()),
                                     kMostGenerators);
    pool.begin_recording();
    bool began = false;
    try {
      cuda::begin_recording(where);
      began = true;
      work();
    } catch (...) {
      if (began) cuda::end_recording(where, false);
      made->memory = pool.end_recording();
      Generator::Recording::swap(draws.states());
      throw;
    }
    made->memory = pool.end_recording();
    made->graph = cuda::end_recording(where, true);
    for (const auto& [generator, begin] : draws.states())
      made->drawn.push_back({generator, begin, generator.state().stream - begin.stream});
  }
  recorded_ = std::move(made);
}

void Replay::operator()(const std::function<void()>& work) {
  if (device_.is_cpu() || !std::exchange(ran_, true)) return work();
  if constexpr (kHasCuda) {
    const auto is_reseeded = [](const Recorded::Drawn& d) { return d.generator.state().seed != d.begin.seed; };
    if (recorded_ && std::ranges::any_of(recorded_->drawn, is_reseeded)) recorded_.reset();  // with their seeds
    const bool again = recorded_ != nullptr;
    if (!again) record(work);
    std::vector<std::int64_t> further;
    for (Recorded::Drawn& d : recorded_->drawn) {
      RandomKey at = d.generator.state();
      further.push_back(again ? static_cast<std::int64_t>(at.stream - d.begin.stream) : 0);
      if (again) at.stream += d.streams, d.generator.set_state(at);
    }
    const Cuda where = cuda_of(device_);
    cuda::to_device(where, recorded_->further.mutable_raw(), further.data(), further.size() * sizeof further[0]);
    cuda::start(where, *recorded_->graph);
  }
}

struct HostStream::State {
  Lender lender;
  cuda::Visit visit;
};
HostStream::HostStream(Device device, void* stream, std::shared_ptr<const Memory> memory) {
  check(device.is_cuda() && !lender, "HostStream: one at a time on a thread, and on a GPU; asked for ", device);
  if constexpr (kHasCuda)
    state_ = std::make_unique<State>(Lender{device, stream, std::move(memory)}, cuda::enter(device.index, stream));
  else (void)compute_stream(device);  // says what is missing
  lender = &state_->lender;
}
HostStream::~HostStream() {
  lender = nullptr;
  if constexpr (kHasCuda) cuda::leave(state_->lender.device.index, state_->visit);
}

Lasting::Lasting() : host_(lender) {
  if constexpr (kHasCuda)
    if (host_) cuda::forbid_while_recording(host_->device.index, "a plan or a table was used for the first time");
  lender = nullptr;
}
Lasting::~Lasting() {
  lender = host_;
  if constexpr (kHasCuda)
    if (host_) cuda::behind_ours(host_->device.index, host_->stream);
}

void* compute_stream(Device device) {
  if (device.is_cpu()) return nullptr;
  if constexpr (kHasCuda) return cuda_of(device).stream;
  fail_with(Code::gpu, "no usable GPU: this build has no CUDA kernels; the device 'cpu' always works");
}

}  // namespace hilt
