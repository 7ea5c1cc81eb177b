#pragma once
#include "core/comm/link.h"
#include "core/comm/socket.h"

// Private: the Link over TCP, by which ranks that MPI links learn of each other's fate too.

namespace hilt {

class TcpLink : public Link {
 public:
  /// Says goodbye and returns once every rank has: true. False after a fault. Work of their own may
  /// keep the others for long; move() is called meanwhile.
  virtual bool leave(const std::function<void()>& move) = 0;
  virtual bool has_left(int peer) = 0;
};

struct Meeting {
  int rank = 0, size = 1;
  tcp::Address master;     // where rank 0 listens
  std::string token;       // what whoever connects must know
  tcp::Socket listener{};  // rank 0's, if it listens already
};
/// Returns when all have come; throws Code::distributed, naming who has not, at the deadline.
std::shared_ptr<TcpLink> meet(Meeting meeting);

/// A number from the environment; an error names the variable.
int number_of(const char* variable, int low, int high);
std::string run_token();  // HILT_RUN_TOKEN, or nothing

}  // namespace hilt
