// Ranks that MPI has started: bytes, and notes which rank failed and which one waits for which.
// No call blocks but MPI_Init_thread and MPI_Finalize, which run on a thread that may be left
// behind. MPI begins with mpi_ranks() where the host has not begun it, and then ends with the last
// Comm, once every rank has come to that. After a failure it cannot end, as its end waits for all:
// abort_mpi() ends the processes instead.
#include <mpi.h>
#include <unistd.h>
#include <algorithm>
#include <deque>
#include <future>
#include <map>
#include <thread>
#include "core/comm/link.h"

namespace hilt {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
constexpr milliseconds kAnswer(1000), kFarewell(500);
std::atomic<bool> ours{false};  // it was begun here, and has not ended

void must(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  fail_with(Code::distributed, call, ": ", text);
}
bool done(MPI_Request& request, MPI_Status* status = MPI_STATUS_IGNORE) {
  int flag = 0;
  must(MPI_Test(&request, &flag, status), "MPI_Test");
  return flag != 0;
}
template <class Ready> void wait_until(const char* call, const Ready& ready) {
  for (const auto until = Clock::now() + default_deadline(); !ready(); std::this_thread::sleep_for(milliseconds(1)))
    if (Clock::now() > until) fail_with(Code::distributed, call, ": not every rank has come to it within the deadline");
}
void on_a_thread(const char* call, const std::function<void()>& run) {
  std::promise<void> promise;
  const std::future<void> end = promise.get_future();
  std::thread([run, promise = std::move(promise)]() mutable { run(), promise.set_value(); }).detach();
  wait_until(call, [&] { return end.wait_for(milliseconds(0)) == std::future_status::ready; });
}

struct Note {  // small enough to leave at once, whether or not it is asked for
  enum About { failure, question, answer } about = failure;
  int waits_for = Link::kNobody;  // of an answer
  char reason[2000] = "";         // of a failure
};

struct Receiving {
  int peer;
  Tensor data;
  std::byte* to;  // none: nobody wants it any more
  std::size_t size, got = 0, piece = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  std::vector<std::byte> unwanted{};
};
struct Sending {
  int peer;
  Tensor data;
  std::vector<MPI_Request> requests{};
  bool sent() {
    return std::ranges::all_of(requests, [](MPI_Request& r) { return done(r); });
  }
};

class Mpi final : public Link {
 public:
  explicit Mpi(MPI_Comm comm) : comm_(comm) {
    int* bound = nullptr;
    int found = 0;
    MPI_Comm_rank(comm_, &rank_), MPI_Comm_size(comm_, &size_);
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, static_cast<void*>(&bound), &found);
    if (found) note_tag_ = *bound;
    listen();
  }
  ~Mpi() override {
    waits_for_ = kLeft;
    try {
      MPI_Request all = MPI_REQUEST_NULL;
      if (!fault()) must(MPI_Ibarrier(comm_, &all), "MPI_Ibarrier");
      wait_until("MPI_Ibarrier", [&] { return advance(), fault() || done(all); });
    } catch (const std::exception& e) { abort(e.what()); }
    MPI_Cancel(&hearing_);
    MPI_Request_free(&hearing_);
    if (fault_) return;
    MPI_Comm_free(&comm_);
    try {
      if (ours) on_a_thread("MPI_Finalize", [] { MPI_Finalize(), ours = false; });
    } catch (const std::exception&) {}  // abort_mpi() is left
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return "mpi"; }
  std::unique_ptr<Flight> start(int channel, std::vector<Message> out, std::vector<Message> in) override;
  std::optional<std::string> fault() override {
    while (!said_.empty() && done(said_.front().second)) said_.pop_front();
    for (MPI_Status status; done(hearing_, &status); listen()) {
      heard_.reason[sizeof heard_.reason - 1] = 0;
      if (heard_.about == Note::failure && !fault_) fault_ = heard_.reason, told_ = true;
      if (heard_.about == Note::question) say(status.MPI_SOURCE, Note::answer);
      if (heard_.about == Note::answer) answers_[status.MPI_SOURCE] = heard_.waits_for;
    }
    return fault_;
  }
  bool abort(const std::string& reason) noexcept override {
    try {
      if (fault()) return !told_;
      fault_ = reason;
      for (int r = 0; r < size_; ++r)
        if (r != rank_) say(r, Note::failure, reason);
      const auto until = Clock::now() + kFarewell;
      while (fault() && !said_.empty() && Clock::now() < until) std::this_thread::yield();
    } catch (const std::exception&) {}  // MPI itself is broken, which the others will see
    return true;
  }
  void waits_for(int peer) override { waits_for_ = peer; }
  std::optional<int> ask(int rank) override {
    // All who wait run out of time together: the lower ranks speak first, and the others hear it.
    if (!std::exchange(has_asked_, true)) hear_until(milliseconds(100) * std::min(rank_, 40), [] { return false; });
    answers_.erase(rank);
    say(rank, Note::question);
    hear_until(kAnswer, [&] { return answers_.contains(rank); });
    return answers_.contains(rank) ? std::optional(answers_[rank]) : std::nullopt;
  }
  void pause(int polls) override {
    if (polls < 200) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(std::min(polls, 1000)));
  }

 private:
  friend class MpiFlight;

  /// Hears what others say until there is a fault, or `ready`, or it took too long.
  template <class Ready> void hear_until(milliseconds most, const Ready& ready) {
    for (const auto until = Clock::now() + most; !fault() && !ready() && Clock::now() < until;) pause(1000);
  }
  void listen() {
    must(MPI_Irecv(&heard_, sizeof heard_, MPI_BYTE, MPI_ANY_SOURCE, note_tag_, comm_, &hearing_), "MPI_Irecv");
  }
  void say(int to, Note::About about, const std::string& reason = "") {
    auto& [note, request] = said_.emplace_back(Note{about, waits_for_}, MPI_REQUEST_NULL);
    reason.copy(note.reason, sizeof note.reason - 1);
    must(MPI_Isend(&note, sizeof note, MPI_BYTE, to, note_tag_, comm_, &request), "MPI_Isend");
  }
  void send(int channel, Sending& s) {
    s.requests.resize((s.data.bytes() + mpi_piece - 1) / mpi_piece, MPI_REQUEST_NULL);
    for (std::size_t i = 0; i < s.requests.size(); ++i)
      must(
          MPI_Isend(s.data.raw() + i * mpi_piece, static_cast<int>(std::min(mpi_piece, s.data.bytes() - i * mpi_piece)),
                    MPI_BYTE, s.peer, channel, comm_, &s.requests[i]),
          "MPI_Isend");
  }
  /// One step of the first message of each route. A message is looked at before memory is given to
  /// it, so that one of a wrong size, or one that nobody wants any more, does no harm.
  void advance() {
    std::erase_if(abandoned_, [](const auto& s) { return s->sent(); });
    for (auto& [route, queue] : routes_)
      while (!queue.empty() && step(*queue.front(), route.second)) queue.pop_front();
  }
  bool step(Receiving& r, int channel) {
    while (true) {
      if (r.request != MPI_REQUEST_NULL) {
        if (!done(r.request)) return false;
        r.got += r.piece;
        if (r.got == r.size) return true;
      }
      int ready = 0, count = 0;
      MPI_Message message;
      MPI_Status status;
      must(MPI_Improbe(r.peer, channel, comm_, &ready, &message, &status), "MPI_Improbe");
      if (!ready) return false;
      MPI_Get_count(&status, MPI_BYTE, &count);
      r.piece = static_cast<std::size_t>(count);
      if (r.piece != std::min(mpi_piece, r.size - r.got)) {
        abort(wrong_size(r.peer, r.got + r.piece, rank_, r.size));
        return false;
      }
      if (!r.to) r.unwanted.resize(r.piece);
      must(MPI_Imrecv(r.to ? r.to + r.got : r.unwanted.data(), count, MPI_BYTE, &message, &r.request), "MPI_Imrecv");
    }
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1, note_tag_ = 32767, waits_for_ = kNobody;
  std::optional<std::string> fault_;
  bool told_ = false;       // of it, by another rank
  bool has_asked_ = false;  // another rank whom it waits for
  Note heard_;
  MPI_Request hearing_ = MPI_REQUEST_NULL;
  std::deque<std::pair<Note, MPI_Request>> said_;  // which keeps its place
  std::map<int, int> answers_;
  /// By peer and channel, in the order in which they were asked for.
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Receiving>>> routes_;
  std::vector<std::shared_ptr<Sending>> abandoned_;  // of transfers that were dropped
};

class MpiFlight final : public Flight {
 public:
  MpiFlight(Mpi& link, int channel, std::vector<Message> out, std::vector<Message> in) : link_(link) {
    if (channel >= link_.note_tag_)
      fail_with(Code::distributed, "MPI has ", link_.note_tag_, " tags, which is fewer than there are groups");
    for (Message& m : in) {
      Tensor host = m.data.device().is_cpu() ? m.data : empty(m.data.shape(), m.data.dtype());
      in_.push_back({m.data, std::make_shared<Receiving>(Receiving{m.peer, host, host.mutable_raw(), host.bytes()})});
      link_.routes_[{m.peer, channel}].push_back(in_.back().second);
    }
    for (Message& m : out) {
      out_.push_back(std::make_shared<Sending>(Sending{m.peer, moved(m.data, {})}));
      link_.send(channel, *out_.back());
    }
  }
  ~MpiFlight() override {
    for (auto& s : out_) link_.abandoned_.push_back(std::move(s));
    for (auto& [to, r] : in_) {
      try {  // MPI is writing to it, and cannot be told otherwise
        while (r->request != MPI_REQUEST_NULL && !link_.fault()) link_.advance();
      } catch (const std::exception&) {}
      if (r->request == MPI_REQUEST_NULL) r->to = nullptr, r->data = {};
    }
  }
  bool poll() override {
    link_.advance();
    std::erase_if(in_, [](auto& i) {
      const bool here = i.second->got == i.second->size;
      if (here && !i.first.device().is_cpu()) copy(i.first, moved(i.second->data, i.first.device()));
      return here;
    });
    std::erase_if(out_, [](const auto& s) { return s->sent(); });
    return in_.empty() && out_.empty() && !link_.fault();
  }
  int missing() const override {
    return !in_.empty() ? in_.front().second->peer : !out_.empty() ? out_.front()->peer : Link::kNobody;
  }

 private:
  Mpi& link_;
  std::vector<std::pair<Tensor, std::shared_ptr<Receiving>>> in_;
  std::vector<std::shared_ptr<Sending>> out_;
};

std::unique_ptr<Flight> Mpi::start(int channel, std::vector<Message> out, std::vector<Message> in) {
  return std::make_unique<MpiFlight>(*this, channel, std::move(out), std::move(in));
}

}  // namespace

Comm join_mpi(std::optional<int> communicator) {
  int begun = 0, ended = 0, size = 1, provided = 0, began_it = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  check(begun || !communicator, "mpi_ranks: a communicator was named, and MPI has not begun");
  if (ended) fail_with(Code::distributed, "mpi_ranks: MPI has ended in this process, for good; keep the first Comm");
  if (!begun) {
    ours = true;
    on_a_thread("MPI_Init", [] {
      int given = 0;  // one thread at a time calls MPI, but not always the one that began it
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &given);
    });
  }
  MPI_Query_thread(&provided), MPI_Is_thread_main(&began_it);
  if (provided < MPI_THREAD_SERIALIZED && !began_it)
    fail_with(Code::distributed,
              "mpi_ranks: only the thread that began MPI may call it; ask for MPI_THREAD_SERIALIZED");
  MPI_Comm own;
  MPI_Request request;
  must(MPI_Comm_idup(communicator ? MPI_Comm_f2c(*communicator) : MPI_COMM_WORLD, &own, &request), "MPI_Comm_idup");
  wait_until("MPI_Comm_idup", [&] { return done(request); });
  MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
  MPI_Comm_size(own, &size);
  if (size > 1) return Comm(std::make_shared<Mpi>(own));
  MPI_Comm_free(&own);
  if (!begun) MPI_Finalize(), ours = false;
  return Comm();
}

void end_mpi(int status) {
  if (!ours) return;
  int begun = 0;
  MPI_Initialized(&begun);
  try {
    if (begun) on_a_thread("MPI_Abort", [status] { MPI_Abort(MPI_COMM_WORLD, status); });
  } catch (const std::exception&) {}
  ::_exit(status);
}

}  // namespace hilt
