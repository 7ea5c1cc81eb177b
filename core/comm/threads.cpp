// Ranks that are threads of one process: a message says where bytes are; the receiver copies them.
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include "core/comm/link.h"

namespace hilt {
namespace {

struct Letter {
  int to;
  Tensor data;
  bool taken = false;
};

/// Everything the ranks share. One mutex: what it guards is touched for microseconds.
struct Office {
  explicit Office(int n) : size(n), desks(static_cast<std::size_t>(n)) {}

  using Route = std::tuple<int, int, int>;  // channel, from, to
  struct Desk {                             // of a rank
    int waits_for = Link::kNobody;
    bool gone = false;
  };
  const int size;
  std::mutex mutex;
  std::condition_variable moved;
  std::uint64_t events = 0;
  std::map<std::pair<Route, std::uint64_t>, std::shared_ptr<Letter>> letters;  // by number on their route
  std::map<Route, std::uint64_t> sent, received;
  std::vector<Desk> desks;
  std::optional<std::string> fault;
  std::exception_ptr first_error;

  void happened() {
    ++events;
    moved.notify_all();
  }
  /// Where no memory is left for the reason, the others learn of the failure all the same.
  void fail(const auto&... reason) noexcept {
    try {
      if (!fault) fault = (std::string() + ... + reason);
    } catch (const std::bad_alloc&) { fault = "out of memory"; }
    happened();
  }
};

void copy_bytes(Tensor& to, const Tensor& from) {
  const auto bytes_of = [](const Tensor& x) {  // shapes may differ: a message is its bytes
    return Tensor(x.storage(), {static_cast<Index>(x.bytes())}, {1},
                  x.offset() * static_cast<Index>(size_of(x.dtype())), DType::u8);
  };
  Tensor bytes = bytes_of(to);
  copy(bytes, moved(bytes_of(from), to.device()));
}

class ThreadFlight final : public Flight {
 public:
  ThreadFlight(std::shared_ptr<Office> office, int rank, int channel, std::vector<Message> out, std::vector<Message> in)
      : office_(std::move(office)), rank_(rank) {
    for (const Message& m : out) synchronize(m.data.device());  // the receiver reads from a thread of its own
    const std::lock_guard lock(office_->mutex);
    for (Message& m : out) {
      const Office::Route route{channel, rank, m.peer};
      out_.push_back(std::make_shared<Letter>(Letter{m.peer, m.data}));
      office_->letters.emplace(std::pair(route, office_->sent[route]++), out_.back());
    }
    for (Message& m : in) {
      const Office::Route route{channel, m.peer, rank};
      in_.push_back({m, {route, office_->received[route]++}});
    }
    office_->happened();
  }

  bool poll() override {
    while (!in_.empty()) {
      Incoming& next = in_.front();
      std::shared_ptr<Letter> letter;
      {
        const std::lock_guard lock(office_->mutex);
        const auto found = office_->letters.find(next.key);
        if (found == office_->letters.end()) {
          if (office_->desks[static_cast<std::size_t>(next.message.peer)].gone)
            office_->fail(left_early(next.message.peer, rank_, false));
          return false;
        }
        letter = found->second;
        office_->letters.erase(found);
      }
      const std::size_t expected = next.message.data.bytes(), came = letter->data.bytes();
      if (came == expected) copy_bytes(next.message.data, letter->data);
      const std::lock_guard lock(office_->mutex);
      if (came != expected) office_->fail(wrong_size(next.message.peer, came, rank_, expected));
      letter->taken = true;
      office_->happened();
      in_.erase(in_.begin());
    }
    const std::lock_guard lock(office_->mutex);
    // The sender frees it, because each thread counts what it has alive.
    for (; !out_.empty() && out_.back()->taken; out_.pop_back()) out_.back()->data = {};
    if (out_.empty()) return !office_->fault;
    if (office_->desks[static_cast<std::size_t>(out_.back()->to)].gone)
      office_->fail(left_early(out_.back()->to, rank_, true));
    return false;
  }
  int missing() const override {
    return !in_.empty() ? in_.front().message.peer : !out_.empty() ? out_.back()->to : Link::kNobody;
  }

 private:
  struct Incoming {
    Message message;
    std::pair<Office::Route, std::uint64_t> key;
  };
  std::shared_ptr<Office> office_;
  int rank_;
  std::vector<std::shared_ptr<Letter>> out_;
  std::vector<Incoming> in_;
};

class ThreadLink final : public Link {
 public:
  ThreadLink(std::shared_ptr<Office> office, int rank) : office_(std::move(office)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return office_->size; }
  std::string_view name() const override { return "threads"; }
  std::unique_ptr<Flight> start(int channel, std::vector<Message> out, std::vector<Message> in) override {
    return std::make_unique<ThreadFlight>(office_, rank_, channel, std::move(out), std::move(in));
  }
  std::optional<std::string> fault() override {
    const std::lock_guard lock(office_->mutex);
    return office_->fault;
  }
  bool abort(const std::string& reason) noexcept override {
    const std::lock_guard lock(office_->mutex);
    const bool first = !office_->fault;
    office_->fail(reason);
    return first;
  }
  void waits_for(int peer) override {
    const std::lock_guard lock(office_->mutex);
    office_->desks[static_cast<std::size_t>(rank_)].waits_for = peer;
  }
  std::optional<int> ask(int rank) override {
    const std::lock_guard lock(office_->mutex);
    const Office::Desk& desk = office_->desks[static_cast<std::size_t>(rank)];
    return desk.gone ? kLeft : desk.waits_for;
  }
  void pause(int) override {
    std::unique_lock lock(office_->mutex);
    office_->moved.wait_for(lock, std::chrono::milliseconds(20), [&] { return office_->events != seen_; });
    seen_ = office_->events;
  }

 private:
  std::shared_ptr<Office> office_;
  const int rank_;
  std::uint64_t seen_ = 0;
};

}  // namespace

void run_ranks(int ranks, const std::function<void(Comm&)>& work) {
  check(ranks >= 1 && ranks <= 1024, "run_ranks: ", ranks, " ranks, expected 1..1024");
  if (ranks == 1) {
    Comm alone;
    return work(alone);
  }
  const auto office = std::make_shared<Office>(ranks);
  const auto live = [&](int rank) {
    std::exception_ptr error;
    const char* what = "an exception of unknown type";
    try {
      Comm comm(std::make_shared<ThreadLink>(office, rank));
      work(comm);
    } catch (const std::exception& e) { error = std::current_exception(), what = e.what(); } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(office->mutex);
    office->desks[static_cast<std::size_t>(rank)].gone = true;
    if (error && !office->first_error) office->first_error = error;
    if (error) office->fail(who(rank), ": ", what);
    else office->happened();
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(live, rank);
    } catch (const std::exception& e) {  // those that run wait for ranks that will never come
      const std::string missing = who(static_cast<int>(threads.size())) + " of " + std::to_string(ranks);
      const char* const without = ": no thread can be started for it: ";
      const std::lock_guard lock(office->mutex);
      office->fail(missing, without, e.what());
      office->first_error = std::make_exception_ptr(
          Error(Code::memory,
                missing + without + e.what() + "; ask for fewer ranks, or raise the limits on threads and memory"));
    }
  }
  if (office->first_error) std::rethrow_exception(office->first_error);
}

}  // namespace hilt
