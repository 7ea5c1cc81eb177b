// TCP sockets that never block: listening, accepting, and connecting until a deadline passes.
#include "core/comm/socket.h"
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <cstring>
#include <memory>
#include <thread>
#include "core/error.h"

namespace hilt::tcp {
namespace {

using std::chrono::milliseconds;

struct Resolved {
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list{nullptr, &::freeaddrinfo};
  std::string reason;
};
Resolved resolve(const Address& address, int flags) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  Resolved r;
  if (const int error = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found))
    r.reason = ::gai_strerror(error);
  else r.list.reset(found);
  return r;
}

Socket open(const addrinfo& where) {
  return Socket(::socket(where.ai_family, where.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, where.ai_protocol));
}

void set(const Socket& socket, int level, int option) {
  const int on = 1;
  ::setsockopt(socket.get(), level, option, &on, sizeof on);
}

/// One end of a connection in numbers: this one by getsockname, the other by getpeername.
Address end_of(const Socket& socket, int (*which)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  auto* const there = reinterpret_cast<sockaddr*>(&address);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (which(socket.get(), there, &length) != 0 ||
      ::getnameinfo(there, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return {};
  return {host, std::atoi(port)};
}

/// Whether the connection stands within the second; else errno says why not.
bool connects(const Socket& socket, const addrinfo& where) {
  if (::connect(socket.get(), where.ai_addr, where.ai_addrlen) == 0) return true;
  if (errno != EINPROGRESS) return false;
  pollfd wait{socket.get(), POLLOUT, 0};
  if (::poll(&wait, 1, 1000) == 0) errno = ETIMEDOUT;
  if (wait.revents == 0) return false;
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  errno = error;
  return error == 0;
}

}  // namespace

Socket listen_at(const Address& address) {
  Resolved resolved = resolve(address, AI_PASSIVE);
  for (const addrinfo* a = resolved.list.get(); a; a = a->ai_next) {
    Socket socket = open(*a);
    if (socket) set(socket, SOL_SOCKET, SO_REUSEADDR);
    if (socket && ::bind(socket.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(socket.get(), SOMAXCONN) == 0)
      return socket;
    resolved.reason = std::strerror(errno);
  }
  fail_with(Code::distributed, "cannot listen on ", address.text(), ": ", resolved.reason,
            "; MASTER_ADDR must be an address of rank 0's machine, MASTER_PORT free on it");
}

Address address_of(const Socket& socket) { return end_of(socket, ::getsockname); }

Socket accept_from(const Socket& listener) {
  Socket socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) set(socket, IPPROTO_TCP, TCP_NODELAY);
  return socket;
}

Socket connect_to(const Address& address, Time until, const std::function<bool()>& go_on) {
  std::string reason;
  for (milliseconds nap(5); go_on(); nap = std::min(2 * nap, milliseconds(100))) {
    Resolved resolved = resolve(address, 0);
    for (const addrinfo* a = resolved.list.get(); a; a = a->ai_next) {
      Socket socket = open(*a);
      // A port in the range of outgoing connections may, with nobody listening, connect to itself.
      if (socket && connects(socket, *a) && end_of(socket, ::getpeername).text() != address_of(socket).text()) {
        set(socket, IPPROTO_TCP, TCP_NODELAY);
        return socket;
      }
      resolved.reason = std::strerror(errno);
    }
    reason = resolved.reason;
    if (std::chrono::steady_clock::now() > until) break;
    std::this_thread::sleep_for(nap);
  }
  fail_with(Code::distributed, "no connection to ", address.text(), ": ", reason);
}

}  // namespace hilt::tcp
