#pragma once
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>
#include "comm.h"

// Private: what a Comm is made of. A Link joins all ranks of a run and knows nothing of groups;
// Comm maps a group's ranks to the link's, counts, waits with a deadline, and makes collectives of
// exchanges.

namespace hilt {

/// 60 s, or HILT_DEADLINE.
std::chrono::milliseconds default_deadline();

/// Bytes under way.
class Flight {
 public:
  virtual ~Flight() = default;
  /// Moves things on without waiting for anyone; true once all is done. On a GPU: once the stream
  /// that the caller computes on will find it done.
  virtual bool poll() = 0;
  /// A rank that has not done its part, for the message of a failure; -1 if none is known.
  virtual int missing() const = 0;
};

class Link {
 public:
  virtual ~Link() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view name() const = 0;

  /// Starts these, as one group. Peers are ranks of the link; messages of different channels do not
  /// meet.
  virtual std::unique_ptr<Flight> start(int channel, std::vector<Message> out, std::vector<Message> in) = 0;
  /// Why the run cannot go on, once some rank said so or was found dead.
  virtual std::optional<std::string> fault() = 0;
  /// Makes `reason` the fault of every rank that can still be reached. Returns soon; the first
  /// reason stays.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Says to others what this rank waits for (peer -1: nothing, it computes), so that they can find
  /// who holds them all up.
  virtual void waits_for(int peer, Step step) = 0;
  /// For a wait for `peer` that ran out of time: the rank at the end of the chain of who waits for
  /// whom, and what it is doing, in words.
  virtual std::string suspect(int peer) = 0;
  /// Sleeps a little, less while things move.
  virtual void pause(int polls) = 0;
};

/// Over NCCL between GPUs, and over the link of `bootstrap` for all else.
std::shared_ptr<Link> nccl_link(const Comm& bootstrap, Device device);

}  // namespace hilt
