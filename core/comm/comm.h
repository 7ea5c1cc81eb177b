#pragma once
#include <chrono>
#include "../tensor.h"

// Several ranks, each with a part of the work, and the messages between them.

namespace [[gnu::visibility("default")]] hilt {

/// A tensor that goes to, or comes from, another rank. It must be dense; an empty one is not sent.
struct Message {
  int peer;     // the other rank
  Tensor data;  // dense; what arrives is written into it
};

struct Round {  // what a rank is doing while it waits: the words of the error, if the wait ends in one
  std::string_view op = "exchange";  // a literal
  Index hop = 0;                     // counts rounds of one op
};

struct Traffic {  // what a Comm has carried since it was made, its splits included
  std::size_t bytes_sent = 0, bytes_received = 0, messages_sent = 0;  // payload alone, without headers
};

class Link;  // private: how bytes travel, see link.h
namespace detail {
class Pending;
}

/// An exchange under way. Until wait() has returned, do not write to what it sends, and do not
/// touch what it receives. If it is destroyed without wait(), it gives both up.
class Transfer {
 public:
  Transfer() = default;  // of nothing
  Transfer(Transfer&&) = default;
  Transfer& operator=(Transfer&&) = default;
  /// Returns when everything has arrived and been sent. Throws Code::distributed if a rank is lost
  /// or has failed, or the deadline passed; then every other rank is told why. On a GPU the stream
  /// waits instead of the host, where it can.
  void wait();

 private:
  friend class Comm;
  std::shared_ptr<detail::Pending> pending_;  // by one alone
};

/// One rank's view of a group. A value: copies are the same group. Every rank makes the same calls
/// in the same order. Sums are made in the order of ranks, so they have the same bits everywhere.
class Comm {
 public:
  Comm();  // a group of one: every call returns at once, and nothing is opened
  /// Rank `link->rank()` of all that the link joins; what link.h makes.
  explicit Comm(std::shared_ptr<Link> link);

  int rank() const;  // 0 .. size() - 1
  int size() const;
  std::string_view name() const;                          // single, threads, mpi, nccl
  std::chrono::milliseconds deadline() const;             // how long a wait may take; 60 s, or HILT_DEADLINE in seconds
  void set_deadline(std::chrono::milliseconds deadline);  // for the waits that begin from now on
  Traffic traffic() const;

  /// Starts all of these at once. Between two ranks messages arrive in the order they were sent,
  /// and must have the size that is expected.
  Transfer exchange(std::vector<Message> out, std::vector<Message> in, Round round = {}) const;
  /// x of all ranks, added; f32 accumulates 16-bit types.
  Tensor sum(const Tensor& x, Round round = {"sum"}) const;
  /// x of all ranks, which have one shape: [ranks, ...].
  Tensor gather(const Tensor& x, Round round = {"gather"}) const;
  /// x of rank `root`. All must pass a tensor of that shape and type.
  Tensor broadcast(const Tensor& x, int root = 0, Round round = {"broadcast"}) const;
  void barrier(Round round = {"barrier"}) const;  // returns once every rank has called it
  /// Texts of all ranks.
  std::vector<std::string> gather_text(const std::string& text, Round round = {"gather_text"}) const;
  /// Throws, on every rank, naming the first of a rank's `key = value` lines that rank 0 has not.
  void agree(std::string_view what, const std::string& lines) const;

  /// The group of all ranks that name the same color, ranked by key, then by rank here.
  Comm split(int color, int key) const;
  const std::shared_ptr<Link>& link() const;  // what the group is made of; none in a group of one
  /// Tells every rank of the link why this one cannot go on: their waits throw Code::distributed.
  /// False where another rank had said why before.
  bool abort(const std::string& reason) const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Runs work(comm) as `ranks` threads of this process, and returns when all are done. The first
/// exception ends the waits of the others and is rethrown.
void run_ranks(int ranks, const std::function<void(Comm&)>& work);
/// The ranks of `group`, which must be all of its run, joined by NCCL. Each names a GPU that no
/// other rank uses. Tensors on GPUs travel between the GPUs; the rest goes over `group` as before.
Comm nccl_ranks(const Comm& group, Device device);

/// Joins the processes that mpirun or srun started; or those of a communicator of your own, as
/// MPI_Comm_c2f(yours) names it, of which a duplicate is made. Where you have begun MPI, you end
/// it. Else it begins here, and ends with the last Comm. Throws where built without MPI.
Comm mpi_ranks(std::optional<int> communicator = {});
/// Where mpi_ranks() has begun MPI and a failure keeps it from ending: ends all processes of the
/// run at once, this one with that status. For a program that has said why. Else it does nothing.
void abort_mpi(int status);

}  // namespace hilt
