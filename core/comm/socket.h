#pragma once
#include <chrono>
#include <functional>
#include <string>
#include "core/io/descriptor.h"

// Private: TCP sockets that close themselves and never block.

namespace hilt::tcp {

using Time = std::chrono::steady_clock::time_point;

struct Address {  // a host by name or number, and a port
  std::string host;
  int port = 0;
  std::string text() const { return host + ":" + std::to_string(port); }
};

struct Socket : Descriptor {
  using Descriptor::Descriptor;
};

/// Listens on that address of this machine alone; port 0: any free one. Throws Code::distributed.
Socket listen_at(const Address& address);
Address address_of(const Socket& socket);    // this machine's end, in numbers
Socket accept_from(const Socket& listener);  // a connection that somebody opened; none if nobody did
/// Tries until `until`, while go_on() says so; then throws Code::distributed with the last reason.
Socket connect_to(const Address& address, Time until, const std::function<bool()>& go_on);

}  // namespace hilt::tcp
