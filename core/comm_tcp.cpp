// Ranks that are processes, joined pair by pair by TCP. One thread a rank owns all reading and most writing, so a rank that computes for
// long still takes what is sent to it, still says that it lives, and still hears that another does not.
//   hello -> rank 0 (and every lower rank); table <- rank 0, once all have come; then data, and
//   beat      every half second: I live, and this is whom I wait for
//   abort     the run cannot go on, and why; whoever hears it first tells everyone
//   goodbye   I am done; answered, as abort is, by `seen`, after which the socket can be closed without losing what it still held
// A connection that ends without a goodbye is a death, silence for as long as the deadline a freeze.
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include "core/tcp.h"

namespace hilt {
namespace {

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
constexpr std::size_t kLongestHello = 4096, kLongestText = std::size_t{1} << 20, kReadAtOnce = std::size_t{4} << 20, kMostStrangers = 256;
constexpr milliseconds kBeat(500), kFarewell(1000);
constexpr int kSilentBeats = 4;  // a rank is called silent after that many are missing

/// What goes out: a frame, whose body is text or the bytes of a tensor.
struct Parcel {
  Header header;
  std::string text;
  Tensor data;
  std::size_t sent = 0;  // of header and body
  bool done() const { return sent == sizeof(Header) + header.length; }
  const void* body() const { return data ? static_cast<const void*>(data.raw()) : text.data(); }
};

/// What comes in: read into the tensor that waits for it, or into memory of its own where none does yet. A peer can be ahead by what it
/// sends without waiting for this rank: a hop or two of a ring.
struct Arrival {
  std::size_t size = 0;
  Tensor data;
  std::unique_ptr<std::byte[]> kept;
  std::byte* to = nullptr;  // none: nobody wants it any more
  bool done = false;
};
struct Route {
  std::deque<std::shared_ptr<Arrival>> posted, early;  // at most one of them has any: messages have the order in which they were sent
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
  int hop = 0;
  bool came = false;  // and may since have left
  bool left = false;  // said goodbye or why not
  bool seen = false;  // knows that we leave
};

std::string who(int rank) { return "rank " + std::to_string(rank); }

/// In a time that does not tell how much of it was right.
bool same_secret(const std::string& a, const std::string& b) {
  unsigned different = a.size() != b.size();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) different |= static_cast<unsigned>(a[i] ^ b[i]);
  return different == 0;
}

class Tcp final : public TcpLink {
 public:
  explicit Tcp(Meeting meeting)
      : rank_(meeting.rank), size_(meeting.size), master_(std::move(meeting.master)), token_(std::move(meeting.token)), listener_(std::move(meeting.listener)),
        wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), peers_(static_cast<std::size_t>(size_)) {
    if (!wake_) fail_with(Code::distributed, "eventfd: ", std::strerror(errno));
    for (int r = 0; r < size_; ++r) peers_[static_cast<std::size_t>(r)].rank = r;
    if (rank_ == 0 && !listener_) listener_ = listen_at(master_);
    thread_ = std::thread([this] { serve(); });
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
    if (kind == Kind::beat) parcel->header.channel = waits_for_, parcel->header.hop = static_cast<std::int32_t>(step_.hop);
    parcel->text = std::move(text);
    post(p, std::move(parcel));
  }
  void post(Peer& p, std::shared_ptr<Parcel> parcel) {
    if (!p.socket) return;
    p.out.push_back(std::move(parcel));
    flush(p);
  }

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
  bool all_here() const {
    return std::ranges::all_of(peers_, [&](const Peer& p) { return p.rank == rank_ || p.came; });
  }

  const int rank_, size_;
  const Address master_;
  const std::string token_;
  const milliseconds deadline_ = default_deadline();
  const milliseconds beat_ = std::clamp(deadline_ / 10, milliseconds(20), kBeat);
  std::mutex mutex_;  // guards all below; nothing that blocks is done under it
  std::condition_variable moved_;
  std::uint64_t events_ = 0, seen_ = 0;
  Socket listener_, wake_;
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

// ---- messages ----------------------------------------------------------------------------------------

class TcpFlight final : public Flight {
 public:
  TcpFlight(Tcp& link, int channel, std::vector<Message> out, std::vector<Message> in) : link_(link) {
    for (Message& m : out) {
      out_.push_back({m.peer, std::make_shared<Parcel>()});
      Parcel& parcel = *out_.back().parcel;
      parcel.data = moved(m.data, {});
      parcel.header.kind = Kind::data, parcel.header.channel = channel, parcel.header.length = parcel.data.bytes();
    }
    for (Message& m : in) {
      in_.push_back({m.peer, m.data, std::make_shared<Arrival>()});
      Arrival& arrival = *in_.back().arrival;
      arrival.data = m.data.device().is_cpu() ? m.data : empty(m.data.shape(), m.data.dtype());
      arrival.to = arrival.data.mutable_raw(), arrival.size = arrival.data.bytes();
    }
    const std::lock_guard lock(link_.mutex_);
    for (Incoming& i : in_) {
      Route& route = link_.at(i.peer).routes[channel];
      if (route.early.empty()) {
        route.posted.push_back(i.arrival);
      } else {
        fits(i.peer, i.arrival->size, route.early.front()->size);
        i.early = std::move(route.early.front());
        route.early.pop_front();
      }
    }
    for (Outgoing& o : out_) link_.post(link_.at(o.peer), o.parcel);
    link_.wake();
  }
  ~TcpFlight() override {  // what is on its way out goes on, with a share of its tensor; what comes in is read and forgotten
    const std::lock_guard lock(link_.mutex_);
    for (Incoming& i : in_) i.arrival->data = {}, i.arrival->to = nullptr;
  }

  bool poll() override {
    std::vector<Incoming> ready;
    {
      const std::lock_guard lock(link_.mutex_);
      std::erase_if(in_, [&](const Incoming& i) {
        const bool done = (i.early ? i.early : i.arrival)->done;
        if (done) ready.push_back(i);
        else if (link_.at(i.peer).left) link_.fail(who(i.peer) + " has left, and " + who(link_.rank_) + " waits for it");
        return done;
      });
      std::erase_if(out_, [&](const Outgoing& o) {
        if (!o.parcel->done() && link_.at(o.peer).left) link_.fail(who(o.peer) + " has left without taking what " + who(link_.rank_) + " sent");
        return o.parcel->done();
      });
    }
    for (Incoming& i : ready) {
      if (i.early && i.early->size == i.arrival->size) std::memcpy(i.arrival->to, i.early->kept.get(), i.early->size);
      if (!i.to.device().is_cpu()) copy(i.to, moved(i.arrival->data, i.to.device()));
    }
    return in_.empty() && out_.empty() && !link_.fault();
  }
  int missing() const override { return !in_.empty() ? in_.front().peer : !out_.empty() ? out_.front().peer : -1; }

 private:
  friend class Tcp;
  struct Outgoing { int peer; std::shared_ptr<Parcel> parcel; };
  struct Incoming { int peer; Tensor to; std::shared_ptr<Arrival> arrival, early{}; };
  void fits(int peer, std::size_t expected, std::size_t came) const {
    if (came != expected)
      link_.fail(who(peer) + " sent " + std::to_string(came) + " bytes where " + who(link_.rank_) + " expects " + std::to_string(expected) +
                 ": the ranks do not run the same call");
  }
  Tcp& link_;
  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
};

std::unique_ptr<Flight> Tcp::start(int channel, std::vector<Message> out, std::vector<Message> in) {
  return std::make_unique<TcpFlight>(*this, channel, std::move(out), std::move(in));
}

// ---- the thread --------------------------------------------------------------------------------------

void Tcp::serve() {
  std::unique_lock lock(mutex_);
  try {
    while (!finished()) {
      std::vector<pollfd> wait{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      std::vector<Peer*> of;
      const auto add = [&](Peer& p) {
        if (!p.socket) return;
        of.push_back(&p);
        wait.push_back({p.socket.get(), static_cast<short>(p.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      };
      for (Peer& p : peers_) add(p);
      for (const auto& s : strangers_) add(*s);
      lock.unlock();
      ::poll(wait.data(), wait.size(), static_cast<int>(beat_.count() / 2));
      lock.lock();
      std::uint64_t count = 0;
      if (wait[0].revents) (void)!::read(wake_.get(), &count, sizeof count);
      for (std::size_t i = 0; i < of.size(); ++i) {
        const short events = wait[i + 2].revents;
        if (!of[i]->socket || !events) continue;
        if (events & POLLOUT) flush(*of[i]);
        if ((events & ~POLLOUT) && !read(*of[i])) lost(*of[i], "its connection ended without a goodbye; it was killed, or crashed");
      }
      while (listener_ && wait[1].revents && strangers_.size() < kMostStrangers) {
        auto stranger = std::make_unique<Peer>();
        stranger->socket = accept_from(listener_);
        if (!stranger->socket) break;
        strangers_.push_back(std::move(stranger));
      }
      std::erase_if(strangers_, [&](const auto& s) { return !s->socket || !listener_; });
      watch();
    }
  } catch (const std::exception& e) {  // memory, say, for what came early
    fail(who(rank_) + ": " + e.what());
  }
  for (Peer& p : peers_) p.socket = {}, p.out.clear();
  happened();
}

bool Tcp::finished() const {
  if (!closing_) return false;
  const bool waited = fault_ && Clock::now() - *closing_ > kFarewell;
  return waited || std::ranges::all_of(peers_, [](const Peer& p) { return !p.socket || (p.seen && p.out.empty()); });
}

/// Beats, and listens for those of others.
void Tcp::watch() {
  const Time now = Clock::now();
  const bool frozen = now - beaten_ > 2 * kSilentBeats * beat_;  // it was this rank that slept: nobody is to blame
  if (now - beaten_ < beat_) return;
  beaten_ = now;
  for (Peer& p : peers_) {
    if (!p.socket || p.left) continue;
    if (frozen) p.heard = now;
    if (p.out.empty()) tell(p, Kind::beat, std::string(step_.op));
    const auto silence = std::chrono::duration<double>(now - p.heard);
    if (silence > deadline_) fail(who(p.rank) + " has been silent for " + std::to_string(static_cast<int>(silence.count())) + " s; it is frozen, or its machine cannot be reached");
  }
}

void Tcp::flush(Peer& p) {
  while (!p.out.empty()) {
    Parcel& parcel = *p.out.front();
    const std::size_t head = std::min(parcel.sent, sizeof(Header)), body = parcel.sent - head;
    iovec parts[] = {{reinterpret_cast<char*>(&parcel.header) + head, sizeof(Header) - head},
                     {static_cast<char*>(const_cast<void*>(parcel.body())) + body, parcel.header.length - body}};
    msghdr message{};
    message.msg_iov = parts, message.msg_iovlen = 2;
    const ssize_t n = ::sendmsg(p.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) return;  // full, or broken: reading finds out
    parcel.sent += static_cast<std::size_t>(n);
    if (!parcel.done()) continue;
    if (parcel.data) happened();
    p.out.pop_front();
  }
}

/// False once the connection has ended.
bool Tcp::read(Peer& p) {
  for (std::size_t total = 0; total < kReadAtOnce && p.socket;) {
    char* to = reinterpret_cast<char*>(&p.header) + p.have;
    std::size_t want = sizeof(Header) - p.have;
    if (p.have >= sizeof(Header)) {
      const std::size_t body = p.have - sizeof(Header);
      want = p.header.length - body;
      if (!p.arrival) to = p.text.data() + body;
      else if (p.arrival->to) to = reinterpret_cast<char*>(p.arrival->to) + body;
      else unwanted_.resize(want = std::min(want, kLongestText)), to = reinterpret_cast<char*>(unwanted_.data());
    }
    const ssize_t n = ::recv(p.socket.get(), to, want, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n < 0) return true;
    p.heard = Clock::now();
    p.have += static_cast<std::size_t>(n), total += static_cast<std::size_t>(n);
    if (p.have == sizeof(Header) && !begin(p)) return true;
    if (p.have < sizeof(Header) || p.have < sizeof(Header) + p.header.length) continue;
    p.have = 0;
    if (!handle(p)) return true;  // a stranger that has moved on
  }
  return true;
}

/// A header is here: where does the rest go? False if it is none of ours.
bool Tcp::begin(Peer& p) {
  const Header& h = p.header;
  const bool known = p.rank >= 0, data = h.kind == Kind::data;
  if (h.magic != Header{}.magic || (known ? h.kind == Kind::hello : h.kind != Kind::hello && h.kind != Kind::beat) ||
      (!data && h.length > (known ? kLongestText : kLongestHello))) {
    lost(p, "it sends what is no message of ours");
    return false;
  }
  if (!data) return p.text.assign(h.length, '\0'), true;
  Route& route = p.routes[h.channel];
  if (!route.posted.empty()) {
    p.arrival = std::move(route.posted.front());
    route.posted.pop_front();
    if (p.arrival->size == h.length) return true;
    fail(who(p.rank) + " sent " + std::to_string(h.length) + " bytes where " + who(rank_) + " expects " + std::to_string(p.arrival->size) +
         ": the ranks do not run the same call");
    p.arrival = std::make_shared<Arrival>();
  } else {
    p.arrival = std::make_shared<Arrival>();
    p.arrival->kept = std::make_unique_for_overwrite<std::byte[]>(h.length);
    p.arrival->to = p.arrival->kept.get(), p.arrival->size = h.length;
    route.early.push_back(p.arrival);
  }
  return true;
}

/// A frame is complete. False if p has been moved.
bool Tcp::handle(Peer& p) {
  switch (p.header.kind) {
    case Kind::hello: return welcome(p);
    case Kind::table: table_ = p.text; break;
    case Kind::beat: p.waits_for = p.header.channel, p.hop = p.header.hop, p.op = p.text; return true;
    case Kind::data: p.arrival->done = true, p.arrival.reset(); break;
    case Kind::seen: p.seen = true; return true;
    case Kind::abort:
    case Kind::goodbye:
      p.left = true;
      if (p.header.kind == Kind::abort) fail(p.text);
      // It takes nothing any more. What has been begun must be ended, or what follows would be read as a part of it.
      std::erase_if(p.out, [](const auto& parcel) { return parcel->header.kind == Kind::data && parcel->sent == 0; });
      tell(p, Kind::seen);
      break;
  }
  happened();
  return true;
}

// ---- meeting -----------------------------------------------------------------------------------------

/// Token, then rank, size and where it listens. Who does not know the token is told nothing; who knows it, why it cannot come in.
bool Tcp::welcome(Peer& stranger) {
  const std::size_t end = stranger.text.find('\n');
  int rank = -1, size = -1;
  std::string host, port;
  std::istringstream(end == std::string::npos ? "" : stranger.text.substr(end)) >> rank >> size >> host >> port;
  if (end == std::string::npos || !same_secret(stranger.text.substr(0, end), token_) || port.empty()) {
    stranger.socket = {};
    return false;
  }
  std::string why;
  if (size != size_) why = who(rank) + " was started with WORLD_SIZE " + std::to_string(size) + ", " + who(rank_) + " with " + std::to_string(size_);
  else if (rank <= rank_ || rank >= size_) why = who(rank) + " does not belong to a run of " + std::to_string(size_) + " ranks";
  else if (at(rank).came) why = who(rank) + " has already come; is RANK the same for two processes?";
  if (!why.empty()) {
    refusal_ = why;
    tell(stranger, Kind::abort, why);
    return true;
  }
  Peer& p = at(rank);
  p.socket = std::move(stranger.socket), p.came = true;
  p.heard = Clock::now();
  here_ += std::to_string(rank) + ' ' + host + ' ' + port + '\n';
  if (fault_) tell(p, Kind::abort, *fault_);
  happened();
  return false;
}

void Tcp::lost(Peer& p, const std::string& how) {
  p.socket = {};
  p.out.clear();
  if (p.rank >= 0 && !p.left) fail(who(p.rank) + " is lost: " + how);
  p.left = true;
  happened();
}

void Tcp::connect(int peer, const Address& address, Time until) {
  Socket socket = connect_to(address, until, [this] { return !fault(); });
  const std::lock_guard lock(mutex_);
  if (!listener_) listener_ = listen_at({address_of(socket).host, 0});
  const Address own = address_of(listener_);
  at(peer).socket = std::move(socket), at(peer).came = true;
  at(peer).heard = Clock::now();
  tell(at(peer), Kind::hello, token_ + '\n' + std::to_string(rank_) + ' ' + std::to_string(size_) + ' ' + own.host + ' ' + std::to_string(own.port));
  wake();
}

void Tcp::join() {
  // Rank 0 knows who is missing, so it speaks first.
  const Time until = Clock::now() + deadline_ + (rank_ == 0 ? milliseconds(0) : milliseconds(2000));
  const auto wait = [&](const auto& here) {
    std::unique_lock lock(mutex_);
    moved_.wait_until(lock, until, [&] { return fault_ || here(); });
    if (!fault_ && !here()) {
      std::string missing;
      for (const Peer& p : peers_)
        if (p.rank != rank_ && !p.came) missing += (missing.empty() ? "" : ", ") + std::to_string(p.rank);
      fail("of " + std::to_string(size_) + " ranks these did not come to " + master_.text() + " in " + std::to_string(deadline_.count() / 1000) + " s: " +
           (missing.empty() ? "unknown to " + who(rank_) : missing) + (refusal_.empty() ? "" : " (refused: " + refusal_ + ")"));
    }
    if (fault_) fail_with(Code::distributed, *fault_);
  };
  if (rank_ > 0) {
    connect(0, master_, until);
    wait([&] { return !table_.empty(); });
    std::istringstream table(table_);
    Address address;
    for (int r = 0; table >> r >> address.host >> address.port;)
      if (r < rank_) connect(r, address, until);
  }
  wait([&] { return all_here(); });
  const std::lock_guard lock(mutex_);
  for (Peer& p : peers_)
    if (rank_ == 0) tell(p, Kind::table, here_);
  listener_ = {};
  wake();
}

// ---- the end -----------------------------------------------------------------------------------------

bool Tcp::leave(const std::function<void()>& move) {
  std::unique_lock lock(mutex_);
  say_goodbye();
  wake();
  while (!fault_ && !std::ranges::all_of(peers_, [&](const Peer& p) { return p.rank == rank_ || p.left; })) {
    lock.unlock();
    move();
    lock.lock();
    moved_.wait_for(lock, milliseconds(2));
  }
  return !fault_;
}

std::string Tcp::suspect(int peer) {
  const std::lock_guard lock(mutex_);
  std::vector<bool> known(peers_.size());
  while (true) {
    const Peer& p = at(peer);
    const auto silence = Clock::now() - p.heard;
    std::ostringstream text;
    text << who(peer);
    if (peer == rank_) return text.str() + ", which is this one: the ranks wait for each other in a circle (" + std::string(step_.op) + ")";
    if (p.left) return text.str() + ", which has left";
    if (silence > kSilentBeats * beat_) return text << ", silent for " << static_cast<double>(silence / milliseconds(100)) / 10 << " s", text.str();
    if (p.waits_for < 0 || p.waits_for >= size_) return text.str() + ", which waits for nobody";
    if (known[static_cast<std::size_t>(peer)]) return text.str() + ", in a circle of ranks that wait for each other (" + p.op + ")";
    known[static_cast<std::size_t>(peer)] = true;
    peer = p.waits_for;
  }
}

std::string text_of(const char* variable) {
  const char* const text = std::getenv(variable);
  if (!text || !*text) fail_with(Code::usage, variable, ": not set; the environment of a rank names RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does");
  return text;
}

}  // namespace

std::shared_ptr<TcpLink> meet(Meeting meeting) {
  check(meeting.token.find('\n') == std::string::npos && meeting.token.size() < kLongestHello / 2, "HILT_RUN_TOKEN: must be one line of at most 2,000 characters");
  auto link = std::make_shared<Tcp>(std::move(meeting));
  link->join();
  return link;
}

int number_of(const char* variable, int low, int high) {
  const std::string text = text_of(variable);
  int n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  check(error == std::errc{} && end == text.data() + text.size(), variable, " (", text, "): not a whole number");
  check(n >= low && n <= high, variable, " (", n, "): must be ", low, "..", high);
  return n;
}

std::string run_token() {
  const char* const token = std::getenv("HILT_RUN_TOKEN");
  return token ? token : "";
}

Comm tcp_ranks() {
  const int size = number_of("WORLD_SIZE", 1, 65536), rank = number_of("RANK", 0, size - 1);
  if (size == 1) return Comm();
  const Address master{text_of("MASTER_ADDR"), number_of("MASTER_PORT", 1, 65535)};
  return Comm(meet({rank, size, master, run_token()}));
}

}  // namespace hilt
