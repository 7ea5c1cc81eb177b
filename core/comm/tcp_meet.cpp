// How ranks come together over TCP: each says hello to rank 0, which tells all where the others
// listen, then to every lower rank. What is none of them is turned away, and the run goes on.
#include <cstdlib>
#include "core/comm/tcp_mesh.h"
#include "core/io/text.h"

namespace hilt {
namespace tcp {

/// In a time that does not tell how much of it was right.
static bool same_secret(const std::string& a, const std::string& b) {
  unsigned different = a.size() != b.size();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) different |= static_cast<unsigned>(a[i] ^ b[i]);
  return different == 0;
}

/// Token, then rank, size and where it listens. Without the token a caller is told nothing.
bool Tcp::welcome(Peer& stranger) {
  const std::size_t end = stranger.text.find('\n');
  int rank = -1, size = -1;
  std::string host, port;
  std::istringstream(end == std::string::npos ? "" : stranger.text.substr(end)) >> rank >> size >> host >> port;
  if (end == std::string::npos || !same_secret(stranger.text.substr(0, end), token_) || port.empty()) {
    if (end != std::string::npos && !port.empty() && size == size_ && rank > 0 && rank < size_)
      refusal_ = who(rank) + " with another HILT_RUN_TOKEN";
    stranger.socket = {};
    return false;
  }
  std::string why;
  if (size != size_)
    why = who(rank) + " was started with WORLD_SIZE " + std::to_string(size) + ", " + who(rank_) + " with " +
          std::to_string(size_);
  else if (rank <= rank_ || rank >= size_)
    why = who(rank) + " does not belong to a run of " + std::to_string(size_) + " ranks";
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

void Tcp::connect(int peer, const Address& address, Time until) {
  Socket socket = connect_to(address, until, [this] { return !fault(); });
  const std::lock_guard lock(mutex_);
  if (!listener_) listener_ = listen_at({address_of(socket).host, 0});
  const Address own = address_of(listener_);
  at(peer).socket = std::move(socket), at(peer).came = true;
  at(peer).heard = Clock::now();
  tell(at(peer), Kind::hello,
       token_ + '\n' + std::to_string(rank_) + ' ' + std::to_string(size_) + ' ' + own.host + ' ' +
           std::to_string(own.port));
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
      std::ostringstream seconds;
      seconds << static_cast<double>(deadline_.count()) / 1000;
      for (const Peer& p : peers_)
        if (p.rank != rank_ && !p.came) missing += (missing.empty() ? "" : ", ") + std::to_string(p.rank);
      fail("of " + std::to_string(size_) + " ranks these did not come to " + master_.text() + " in " + seconds.str() +
           " s: " + (missing.empty() ? "unknown to " + who(rank_) : missing) +
           (refusal_.empty() ? "" : " (refused: " + refusal_ + ")"));
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
  wait([&] { return std::ranges::all_of(peers_, [&](const Peer& p) { return p.rank == rank_ || p.came; }); });
  const std::lock_guard lock(mutex_);
  for (Peer& p : peers_)
    if (rank_ == 0) tell(p, Kind::table, here_);
  listener_ = {};
  wake();
}

}  // namespace tcp

static std::string text_of(const char* variable) {
  const char* const text = std::getenv(variable);
  if (!text || !*text)
    fail_with(Code::usage, variable,
              ": not set; the environment of a rank names RANK, WORLD_SIZE, MASTER_ADDR and "
              "MASTER_PORT, as torchrun does");
  return text;
}

std::shared_ptr<TcpLink> meet(Meeting meeting) {
  check(meeting.token.find('\n') == std::string::npos && meeting.token.size() < tcp::kLongestHello / 2,
        "HILT_RUN_TOKEN: must be one line of at most 2,000 characters");
  auto link = std::make_shared<tcp::Tcp>(std::move(meeting));
  link->join();
  return link;
}

int number_of(const char* variable, int low, int high) {
  const std::string text = text_of(variable);
  const std::optional<int> n = number_in<int>(text);
  check(n.has_value(), variable, " (", text, "): not a whole number");
  check(*n >= low && *n <= high, variable, " (", *n, "): must be ", low, "..", high);
  return *n;
}

std::string run_token() {
  const char* const token = std::getenv("HILT_RUN_TOKEN");
  return token ? token : "";
}

Comm tcp_ranks() {
  const int size = number_of("WORLD_SIZE", 1, 65536), rank = number_of("RANK", 0, size - 1);
  if (size == 1) return Comm();
  const tcp::Address master{text_of("MASTER_ADDR"), number_of("MASTER_PORT", 1, 65535)};
  return Comm(meet({rank, size, master, run_token()}));
}

}  // namespace hilt
