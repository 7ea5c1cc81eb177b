#pragma once
#include "comm.h"

// Private: what a Comm is made of. A Link joins all ranks of a run and knows nothing of groups;
// Comm maps a group's ranks to them, counts, waits with a deadline, makes collectives of exchanges.

namespace hilt {

std::chrono::milliseconds default_deadline();  // 60 s, or HILT_DEADLINE
/// Bytes of one message of MPI's, which counts them in an int. Tests make it small.
inline std::size_t mpi_piece = std::size_t{1} << 30;

// What is said of a rank, whatever joins them.
inline std::string who(int rank) { return "rank " + std::to_string(rank); }
inline std::string wrong_size(int from, std::size_t came, int to, std::size_t expected) {
  return who(from) + " sent " + std::to_string(came) + " bytes where " + who(to) + " expects " +
         std::to_string(expected) + ": the ranks do not run the same call";
}
/// It has left, and `rank` waits for it, or for it to take something.
inline std::string left_early(int gone, int rank, bool takes) {
  return who(gone) + " has left" +
         (takes ? " without taking what " + who(rank) + " sent" : ", and " + who(rank) + " waits for it");
}

class Flight {
 public:
  virtual ~Flight() = default;
  /// Moves things on without waiting; true once all is done, or on a GPU the stream finds it so.
  virtual bool poll() = 0;
  /// A rank that has not done its part, for the message of a failure; or Link::kNobody.
  virtual int missing() const = 0;
};

class Link {
 public:
  virtual ~Link() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view name() const = 0;

  /// Starts these, as one group. Peers are ranks of the link; messages of two channels do not meet.
  virtual std::unique_ptr<Flight> start(int channel, std::vector<Message> out, std::vector<Message> in) = 0;
  /// Why the run cannot go on, once some rank said so or was found dead.
  virtual std::optional<std::string> fault() = 0;
  /// Makes `reason` the fault of every rank that can be reached. Returns soon; the first one stays.
  /// False where another rank had given a reason before.
  virtual bool abort(const std::string& reason) noexcept = 0;

  static constexpr int kNobody = -1, kLeft = -2;
  virtual void waits_for(int peer) = 0;  // what other ranks hear who ask this one; kNobody: it computes
  /// Whom a rank waits for, kLeft where it has gone; nothing where it gives no answer.
  virtual std::optional<int> ask(int rank) = 0;
  virtual void pause(int polls) = 0;  // sleeps a little, less while things move
};

Comm join_mpi(std::optional<int> communicator);  // what mpi_ranks() makes, where there is MPI
void end_mpi(int status);                        // what abort_mpi() does
/// Over NCCL between GPUs, and over the link of `bootstrap` for all else.
std::shared_ptr<Link> nccl_link(const Comm& bootstrap, Device device);

}  // namespace hilt
