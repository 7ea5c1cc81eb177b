#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <utility>

// Private: TCP sockets that close themselves and never block.

namespace hilt::tcp {

using Time = std::chrono::steady_clock::time_point;

/// A host by name or number, and a port.
struct Address {
  std::string host;
  int port = 0;
  std::string text() const { return host + ":" + std::to_string(port); }
};

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

/// Listens on that address of this machine and on no other; port 0: any that is free. Throws
/// Code::distributed.
Socket listen_at(const Address& address);
/// This machine's end, in numbers.
Address address_of(const Socket& socket);
/// A connection that somebody opened; none if nobody did.
Socket accept_from(const Socket& listener);
/// Tries until `until`, while go_on() says so; then throws Code::distributed with the last reason.
/// Resolving a host's name may take longer.
Socket connect_to(const Address& address, Time until, const std::function<bool()>& go_on);

}  // namespace hilt::tcp
