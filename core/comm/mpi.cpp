// Ranks that MPI has started; it carries data alone, beside the link over TCP. They meet over TCP
// before MPI begins where MASTER_ADDR and MASTER_PORT name a place, so that a rank that never comes
// is named; else MPI carries rank 0's address. MPI begins with mpi_ranks() and ends with the last
// Comm, once every rank has said goodbye. After a failure it cannot be ended, as its end waits for
// all: the process then ends without, and its exit status makes mpirun take down the others.
#include <mpi.h>
#include <cstdlib>
#include <deque>
#include <future>
#include <map>
#include <random>
#include <thread>
#include "core/comm/tcp.h"

namespace hilt {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using tcp::Address, tcp::Socket, tcp::Time;
constexpr std::size_t kPiece = std::size_t{1} << 30;  // MPI counts bytes in an int
constexpr milliseconds kLinger(1000);                 // what a rank sent before its goodbye can arrive after it

void must(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  fail_with(Code::distributed, call, ": ", text);
}

/// For calls that return once every rank made them: on a thread, which may be left behind.
void within(milliseconds deadline, const char* call, TcpLink* control, const std::function<void()>& run) {
  std::promise<void> promise;
  const std::future<void> done = promise.get_future();
  std::thread([run, promise = std::move(promise)]() mutable { run(), promise.set_value(); }).detach();
  // The link over TCP, which can name a rank, speaks first.
  for (const Time until = Clock::now() + deadline + (control ? kLinger : milliseconds(0));
       done.wait_for(milliseconds(5)) != std::future_status::ready;) {
    if (const auto fault = control ? control->fault() : std::nullopt) fail_with(Code::distributed, *fault);
    if (Clock::now() > until)
      fail_with(Code::distributed, call, ": did not return in ", deadline.count() / 1000,
                " s; not all ranks have called it");
  }
}
void within(milliseconds deadline, const char* call, MPI_Request& request) {
  int done = 0;
  for (const Time until = Clock::now() + deadline; must(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call), !done;
       std::this_thread::sleep_for(milliseconds(1)))
    if (Clock::now() > until)
      fail_with(Code::distributed, call, ": a rank did not take part in ", deadline.count() / 1000, " s");
}

struct Sending {
  int peer;
  Tensor data;
  std::vector<MPI_Request> requests{};
};
struct Receiving {
  int peer;
  Tensor data;
  std::byte* to;  // none: nobody wants it any more
  std::size_t size, got = 0, piece = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  std::vector<std::byte> unwanted{};
  bool done() const { return got == size; }
};

class Mpi final : public Link {
 public:
  Mpi(MPI_Comm comm, std::shared_ptr<TcpLink> control, bool ends_mpi)
      : comm_(comm), control_(std::move(control)), ends_mpi_(ends_mpi) {
    int* bound = nullptr;
    int found = 0;
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, static_cast<void*>(&bound), &found);
    if (found) last_tag_ = *bound;
  }
  ~Mpi() override {
    try {
      if (!control_->leave([this] { advance(); })) return;
      within(default_deadline(), "MPI_Finalize", nullptr, [comm = comm_, ends = ends_mpi_]() mutable {
        MPI_Comm_free(&comm);
        if (ends) MPI_Finalize();
      });
    } catch (const std::exception&) {  // all have said goodbye: nobody is left to be told
    }
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  std::string_view name() const override { return "mpi"; }
  std::unique_ptr<Flight> start(int channel, std::vector<Message> out, std::vector<Message> in) override;
  std::optional<std::string> fault() override { return control_->fault(); }
  void abort(const std::string& reason) noexcept override { control_->abort(reason); }
  void waits_for(int peer, Step step) override { control_->waits_for(peer, step); }
  std::string suspect(int peer) override { return control_->suspect(peer); }
  void pause(int polls) override {
    if (polls < 200) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(std::min(polls, 1000)));
  }

 private:
  friend class MpiFlight;

  void send(int channel, Sending& s) {
    for (std::size_t at = 0; at < s.data.bytes(); at += kPiece) {
      s.requests.push_back(MPI_REQUEST_NULL);
      must(MPI_Isend(s.data.raw() + at, static_cast<int>(std::min(kPiece, s.data.bytes() - at)), MPI_BYTE, s.peer,
                     channel, comm_, &s.requests.back()),
           "MPI_Isend");
    }
  }
  static bool sent(Sending& s) {
    int done = 0;
    must(MPI_Testall(static_cast<int>(s.requests.size()), s.requests.data(), &done, MPI_STATUSES_IGNORE),
         "MPI_Testall");
    return done;
  }
  /// One step of the first message of each route. A message is looked at before memory is given to
  /// it, so that one of a wrong size, or one that nobody wants any more, does no harm.
  void advance() {
    std::erase_if(abandoned_, [](const auto& s) { return sent(*s); });
    for (auto& [route, queue] : routes_)
      while (!queue.empty() && step(*queue.front(), route.second)) queue.pop_front();
  }
  bool step(Receiving& r, int channel) {
    while (true) {
      int ready = 0, count = 0;
      if (r.request != MPI_REQUEST_NULL) {
        must(MPI_Test(&r.request, &ready, MPI_STATUS_IGNORE), "MPI_Test");
        if (!ready) return false;
        r.got += r.piece;
        if (r.done()) return true;
      }
      MPI_Message message;
      MPI_Status status;
      must(MPI_Improbe(r.peer, channel, comm_, &ready, &message, &status), "MPI_Improbe");
      if (!ready) return false;
      MPI_Get_count(&status, MPI_BYTE, &count);
      r.piece = static_cast<std::size_t>(count);
      if (r.piece != std::min(kPiece, r.size - r.got)) {
        control_->abort(wrong_size(r.peer, r.got + r.piece, rank(), r.size));
        return false;
      }
      if (!r.to) r.unwanted.resize(r.piece);
      must(MPI_Imrecv(r.to ? r.to + r.got : r.unwanted.data(), count, MPI_BYTE, &message, &r.request), "MPI_Imrecv");
    }
  }

  const MPI_Comm comm_;
  const std::shared_ptr<TcpLink> control_;
  const bool ends_mpi_;
  int last_tag_ = 32767;
  /// By peer and channel, in the order in which they were asked for.
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Receiving>>> routes_;
  std::vector<std::shared_ptr<Sending>> abandoned_;  // of transfers that were dropped
};

class MpiFlight final : public Flight {
 public:
  MpiFlight(Mpi& link, int channel, std::vector<Message> out, std::vector<Message> in) : link_(link) {
    if (channel > link_.last_tag_)
      fail_with(Code::distributed, "MPI has ", link_.last_tag_, " tags, which is fewer than there are groups");
    for (Message& m : in) {
      Tensor host = m.data.device().is_cpu() ? m.data : empty(m.data.shape(), m.data.dtype());
      in_.push_back({m.data, std::make_shared<Receiving>(Receiving{m.peer, host, host.mutable_raw(), host.bytes()})});
      link_.routes_[{m.peer, channel}].push_back(in_.back().receiving);
    }
    for (Message& m : out) {
      out_.push_back(std::make_shared<Sending>(Sending{m.peer, moved(m.data, {})}));
      link_.send(channel, *out_.back());
    }
  }
  ~MpiFlight() override {
    for (auto& s : out_) link_.abandoned_.push_back(std::move(s));
    for (Incoming& i : in_) {
      Receiving& r = *i.receiving;
      try {  // MPI is writing to it, and cannot be told otherwise
        while (r.request != MPI_REQUEST_NULL && !link_.fault()) link_.advance();
      } catch (const std::exception&) {}
      if (r.request == MPI_REQUEST_NULL) r.to = nullptr, r.data = {};
    }
  }

  bool poll() override {
    link_.advance();
    std::erase_if(in_, [](Incoming& i) {
      const bool done = i.receiving->done();
      if (done && !i.to.device().is_cpu()) copy(i.to, moved(i.receiving->data, i.to.device()));
      return done;
    });
    std::erase_if(out_, [](const auto& s) { return Mpi::sent(*s); });
    if (in_.empty() && out_.empty()) return !link_.fault();
    if (const int peer = missing(); !link_.control_->has_left(peer)) gone_ = {};
    else if (!gone_) gone_ = Clock::now();
    else if (Clock::now() - *gone_ > kLinger) link_.abort(left_early(peer, link_.rank(), in_.empty()));
    return false;
  }
  int missing() const override {
    return !in_.empty() ? in_.front().receiving->peer : !out_.empty() ? out_.front()->peer : -1;
  }

 private:
  struct Incoming {
    Tensor to;
    std::shared_ptr<Receiving> receiving;
  };
  Mpi& link_;
  std::vector<Incoming> in_;
  std::vector<std::shared_ptr<Sending>> out_;
  std::optional<Time> gone_;
};

std::unique_ptr<Flight> Mpi::start(int channel, std::vector<Message> out, std::vector<Message> in) {
  return std::make_unique<MpiFlight>(*this, channel, std::move(out), std::move(in));
}

/// What Open MPI, or else MPICH and its kin, has told this process before MPI begins.
std::shared_ptr<TcpLink> meet_before_mpi() {
  if (!std::getenv("MASTER_ADDR") || !std::getenv("MASTER_PORT")) return nullptr;
  for (const auto& [rank, size] :
       {std::pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), std::pair("PMI_RANK", "PMI_SIZE")}) {
    if (!std::getenv(rank) || !std::getenv(size)) continue;
    const int ranks = number_of(size, 1, 65536);
    if (ranks > 1)
      return meet({number_of(rank, 0, ranks - 1),
                   ranks,
                   {std::getenv("MASTER_ADDR"), number_of("MASTER_PORT", 1, 65535)},
                   run_token()});
  }
  return nullptr;
}

std::shared_ptr<TcpLink> meet_through(MPI_Comm comm, int rank, int size) {
  std::string token = run_token();
  char place[512] = "", host[256] = "127.0.0.1";
  Socket listener;
  if (rank == 0) {
    const char* const here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    if (!here || std::atoi(here) != size) ::gethostname(host, sizeof host - 1);
    listener = tcp::listen_at({host, 0});
    if (std::random_device random; token.empty()) token = std::to_string(random()) + std::to_string(random());
    const std::string text = address_of(listener).host + ' ' + std::to_string(address_of(listener).port) + ' ' + token;
    text.copy(place, sizeof place - 1);
  }
  MPI_Request request;
  must(MPI_Ibcast(place, sizeof place, MPI_CHAR, 0, comm, &request), "MPI_Ibcast");
  within(default_deadline(), "MPI_Ibcast", request);
  Address master;
  std::istringstream(place) >> master.host >> master.port >> token;
  return meet({rank, size, master, token, std::move(listener)});
}

}  // namespace

Comm join_mpi() {
  int begun = 0, ended = 0, rank = 0, size = 1;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  if (ended)
    fail_with(Code::distributed,
              "mpi_ranks: MPI has ended in this process and cannot begin again; keep the first Comm");
  std::shared_ptr<TcpLink> control = meet_before_mpi();
  if (!begun)
    within(default_deadline(), "MPI_Init", control.get(), [] {
      int provided = 0;  // one thread at a time calls MPI, but not always the one that began it
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
    });
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size == 1) {
    if (!begun) MPI_Finalize();
    return Comm();
  }
  MPI_Comm own;
  MPI_Request request;
  must(MPI_Comm_idup(MPI_COMM_WORLD, &own, &request), "MPI_Comm_idup");
  within(default_deadline(), "MPI_Comm_idup", request);
  MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
  if (!control) control = meet_through(own, rank, size);
  return Comm(std::make_shared<Mpi>(own, std::move(control), !begun));
}

}  // namespace hilt
