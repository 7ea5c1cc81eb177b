#pragma once
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include "core/comm/tcp.h"

// Private to tcp.cpp and tcp_meet.cpp: one rank's end of a mesh of sockets.

namespace hilt::tcp {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

enum class Kind : std::uint32_t { hello, table, beat, data, abort, goodbye, seen };
struct Header {  // all ranks have one byte order, or the magic number is wrong
  std::uint32_t magic = 0x31544c48;
  Kind kind = Kind::hello;
  std::int32_t channel = 0;  // of data; of a beat: whom the sender waits for
  std::int32_t hop = 0;
  std::uint64_t length = 0;  // of what follows
};
static_assert(sizeof(Header) == 24);
inline constexpr std::size_t kLongestHello = 4096, kLongestText = std::size_t{1} << 20,
                             kReadAtOnce = std::size_t{4} << 20, kMostStrangers = 256;
inline constexpr milliseconds kBeat(500), kFarewell(1000);
inline constexpr int kSilentBeats = 4;  // a rank is called silent after that many are missing

struct Parcel {  // what goes out: a frame, whose body is text or the bytes of a tensor
  int to = -1;   // of a tensor: which rank
  Header header;
  std::string text;
  Tensor data;
  std::size_t sent = 0;  // of header and body
  bool done() const { return sent == sizeof(Header) + header.length; }
  const void* body() const { return data ? static_cast<const void*>(data.raw()) : text.data(); }
};

/// What comes in: read into the tensor that waits for it, or into memory of its own where none does
/// yet. A peer can run ahead by what it sends without waiting for us: a hop or two of a ring.
struct Arrival {
  std::size_t size = 0;
  Tensor data;
  std::unique_ptr<std::byte[]> kept;
  std::byte* to = nullptr;  // none: nobody wants it any more
  bool done = false;
};
struct Route {
  std::deque<std::shared_ptr<Arrival>> posted, early;  // one of them is empty: messages come in the order of sending
};

struct Peer {
  int rank = -1;  // -1: has not said
  Socket socket;
  std::deque<std::shared_ptr<Parcel>> out;
  Header header;
  std::size_t have = 0;  // of header and body of the frame that comes in
  std::string text;
  std::shared_ptr<Arrival> arrival;
  std::map<int, Route> routes;  // by channel
  Time heard = Clock::now();
  int waits_for = -1;
  std::string op;
  bool came = false;  // and may since have left
  bool left = false;  // said goodbye or why not
  bool seen = false;  // knows that we leave
};

class Tcp final : public TcpLink {
 public:
  explicit Tcp(Meeting meeting)
      : rank_(meeting.rank),
        size_(meeting.size),
        master_(std::move(meeting.master)),
        token_(std::move(meeting.token)),
        listener_(std::move(meeting.listener)),
        peers_(static_cast<std::size_t>(size_)) {
    for (int r = 0; r < size_; ++r) peers_[static_cast<std::size_t>(r)].rank = r;
    if (rank_ == 0 && !listener_) listener_ = listen_at(master_);
    thread_ = launch();
  }
  ~Tcp() override {
    {
      const std::lock_guard lock(mutex_);
      say_goodbye();
      closing_ = Clock::now();
    }
    wake();
    thread_.join();
  }

  void join();
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return "tcp"; }
  std::unique_ptr<Flight> start(int channel, std::vector<Message> out, std::vector<Message> in) override;
  std::optional<std::string> fault() override {
    const std::lock_guard lock(mutex_);
    return fault_;
  }
  void abort(const std::string& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    fail(reason);
    wake();
  }
  void waits_for(int peer, Step step) override {
    const std::lock_guard lock(mutex_);
    waits_for_ = peer, step_ = step;
  }
  std::string suspect(int peer) override;
  void pause(int) override {
    std::unique_lock lock(mutex_);
    moved_.wait_for(lock, milliseconds(20), [&] { return events_ != seen_; });
    seen_ = events_;
  }
  bool leave(const std::function<void()>& move) override;
  bool has_left(int peer) override {
    const std::lock_guard lock(mutex_);
    return at(peer).left;
  }

 private:
  friend class TcpFlight;

  Peer& at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  void happened() {
    ++events_;
    moved_.notify_all();
  }
  void wake() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  }
  void fail(const std::string& reason) {
    if (fault_) return;
    fault_ = reason.substr(0, kLongestHello);
    for (Peer& p : peers_) tell(p, Kind::abort, *fault_);
    happened();
  }
  void say_goodbye() {
    if (fault_ || std::exchange(said_goodbye_, true)) return;
    for (Peer& p : peers_) tell(p, Kind::goodbye);
  }
  void tell(Peer& p, Kind kind, std::string text = {}) {
    auto parcel = std::make_shared<Parcel>();
    parcel->header.kind = kind, parcel->header.length = text.size();
    if (kind == Kind::beat)
      parcel->header.channel = waits_for_, parcel->header.hop = static_cast<std::int32_t>(step_.hop);
    parcel->text = std::move(text);
    post(p, std::move(parcel));
  }
  void post(Peer& p, std::shared_ptr<Parcel> parcel) {
    if (!p.socket) return;
    p.out.push_back(std::move(parcel));
    flush(p);
  }

  static Socket make_wake();
  std::thread launch();
  void serve();
  bool finished() const;
  void watch();
  void flush(Peer& p);
  bool read(Peer& p);
  bool begin(Peer& p);
  bool handle(Peer& p);
  bool welcome(Peer& stranger);
  void lost(Peer& p, const std::string& how);
  void connect(int peer, const Address& address, Time until);

  const int rank_, size_;
  const Address master_;
  const std::string token_;
  const milliseconds deadline_ = default_deadline();
  const milliseconds beat_ = std::clamp(deadline_ / 10, milliseconds(20), kBeat);
  std::mutex mutex_;  // guards all below; nothing that blocks is done under it
  std::condition_variable moved_;
  std::uint64_t events_ = 0, seen_ = 0;
  Socket listener_, wake_ = make_wake();
  std::vector<Peer> peers_;
  bool said_goodbye_ = false;
  std::vector<std::unique_ptr<Peer>> strangers_;  // connected, not yet known
  std::string here_, table_, refusal_;
  std::optional<std::string> fault_;
  std::optional<Time> closing_;
  Time beaten_ = Clock::now();
  int waits_for_ = -1;
  Step step_{};
  std::vector<std::byte> unwanted_;
  std::thread thread_;
};

}  // namespace hilt::tcp
