// Ranks that are processes, joined pair by pair by TCP; one thread a rank reads all of it.
//   hello -> rank 0 (and every lower rank); table <- rank 0, once all have come; then data, and
//   beat      every half second: I live, and this is whom I wait for
//   abort     the run cannot go on, and why; whoever hears it first tells everyone
//   goodbye   I am done; answered, as abort is, by `seen`: then the socket can be closed without losing what it holds
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include "core/comm/tcp_mesh.h"

namespace hilt::tcp {

// ---- messages -----------------------------------------------------------------------------------

class TcpFlight final : public Flight {
 public:
  TcpFlight(Tcp& link, int channel, std::vector<Message> out, std::vector<Message> in) : link_(link) {
    for (Message& m : out) {
      Parcel& parcel = *out_.emplace_back(std::make_shared<Parcel>());
      parcel.to = m.peer, parcel.data = moved(m.data, {});
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
      if (route.early.empty()) route.posted.push_back(i.arrival);
      else {
        if (const std::size_t came = route.early.front()->size; came != i.arrival->size)
          link_.fail(wrong_size(i.peer, came, link_.rank_, i.arrival->size));
        i.early = std::move(route.early.front());
        route.early.pop_front();
      }
    }
    for (const auto& parcel : out_) link_.post(link_.at(parcel->to), parcel);
    link_.wake();
  }
  // What is on its way out goes on, with a share of its tensor; what comes in is read and dropped.
  ~TcpFlight() override {
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
        else if (link_.at(i.peer).left) link_.fail(left_early(i.peer, link_.rank_, false));
        return done;
      });
      std::erase_if(out_, [&](const auto& parcel) {
        if (!parcel->done() && link_.at(parcel->to).left) link_.fail(left_early(parcel->to, link_.rank_, true));
        return parcel->done();
      });
    }
    for (Incoming& i : ready) {
      if (i.early && i.early->size == i.arrival->size) std::memcpy(i.arrival->to, i.early->kept.get(), i.early->size);
      if (!i.to.device().is_cpu()) copy(i.to, moved(i.arrival->data, i.to.device()));
    }
    return in_.empty() && out_.empty() && !link_.fault();
  }
  int missing() const override { return !in_.empty() ? in_.front().peer : !out_.empty() ? out_.front()->to : -1; }

 private:
  struct Incoming {
    int peer;
    Tensor to;
    std::shared_ptr<Arrival> arrival, early{};
  };
  Tcp& link_;
  std::vector<std::shared_ptr<Parcel>> out_;
  std::vector<Incoming> in_;
};

std::unique_ptr<Flight> Tcp::start(int channel, std::vector<Message> out, std::vector<Message> in) {
  return std::make_unique<TcpFlight>(*this, channel, std::move(out), std::move(in));
}

// ---- the thread ---------------------------------------------------------------------------------

Socket Tcp::make_wake() {
  Socket wake(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake) fail_with(Code::distributed, "eventfd: ", std::strerror(errno));
  return wake;
}

std::thread Tcp::launch() {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // a program's signals are for the program's own threads
  std::thread thread([this] { serve(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

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
        if ((events & ~POLLOUT) && !read(*of[i]))
          lost(*of[i], rank_ > 0 && table_.empty()
                           ? "it turned this rank away, or ended, before the run began; is "
                             "HILT_RUN_TOKEN the same for both?"
                           : "its connection ended without a goodbye; it was killed, or crashed");
      }
      while (listener_ && wait[1].revents) {
        if (strangers_.size() == kMostStrangers) strangers_.erase(strangers_.begin());
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
    if (silence > deadline_)
      fail(who(p.rank) + " has been silent for " + std::to_string(static_cast<int>(silence.count())) +
           " s; it is frozen, or its machine cannot be reached");
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

bool Tcp::read(Peer& p) {  // false once the connection has ended
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

bool Tcp::begin(Peer& p) {  // a header is here: where does the rest go? False if it is none of ours
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
    fail(wrong_size(p.rank, h.length, rank_, p.arrival->size));
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
    case Kind::beat: p.waits_for = p.header.channel, p.op = p.text; return true;
    case Kind::data: p.arrival->done = true, p.arrival.reset(); break;
    case Kind::seen: p.seen = true; return true;
    case Kind::abort:
    case Kind::goodbye:
      p.left = true;
      if (p.header.kind == Kind::abort) fail(p.text);
      // It takes nothing any more. What has begun must end, or what follows is taken for its rest.
      std::erase_if(p.out, [](const auto& parcel) { return parcel->header.kind == Kind::data && parcel->sent == 0; });
      tell(p, Kind::seen);
      break;
  }
  happened();
  return true;
}

void Tcp::lost(Peer& p, const std::string& how) {
  p.socket = {};
  p.out.clear();
  if (p.rank >= 0 && !p.left) fail(who(p.rank) + " is lost: " + how);
  p.left = true;
  happened();
}

// ---- the end ------------------------------------------------------------------------------------

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
    if (peer == rank_)
      return text.str() + ", which is this one: the ranks wait for each other in a circle (" + std::string(step_.op) +
             ")";
    if (p.left) return text.str() + ", which has left";
    if (silence > kSilentBeats * beat_)
      return text << ", silent for " << static_cast<double>(silence / milliseconds(100)) / 10 << " s", text.str();
    if (p.waits_for < 0 || p.waits_for >= size_) return text.str() + ", which waits for nobody";
    if (known[static_cast<std::size_t>(peer)])
      return text.str() + ", in a circle of ranks that wait for each other (" + p.op + ")";
    known[static_cast<std::size_t>(peer)] = true;
    peer = p.waits_for;
  }
}

}  // namespace hilt::tcp
