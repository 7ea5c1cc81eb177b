// Comm: groups, counting, waiting and collectives, over any Link.
#include "core/comm/comm.h"
#include <unistd.h>
#include <cstdlib>
#include <numeric>
#include <set>
#include "core/config.h"
#include "core/comm/link.h"
#include "core/io/text.h"

namespace hilt {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

milliseconds default_deadline() {
  const char* const text = std::getenv("HILT_DEADLINE");
  if (!text) return std::chrono::seconds(60);
  const double seconds = number_in<double>(text).value_or(0);
  check(seconds > 0 && seconds < 1e6, "HILT_DEADLINE: '", text, "' is not a number of seconds above 0");
  return milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

namespace {

struct Shared {                // what a group and those split off it share
  std::shared_ptr<Link> link;  // none in a group of one
  std::atomic<std::size_t> bytes_sent{0}, bytes_received{0}, messages_sent{0};
  std::atomic<std::int64_t> deadline_ms{default_deadline().count()};
  int next_channel = 1;
};

/// Elements [begin, end) of a dense tensor, as a tensor of its own.
Tensor piece(const Tensor& x, Index begin, Index end) {
  return as_strided(x, {end - begin}, {1}, x.offset() + (begin < x.numel() ? begin : 0));
}

Tensor dense_in(const Tensor& x, DType type) { return x.dtype() == type ? dense(x) : converted(x, type); }
/// Sends give(r), or one tensor, to every other rank r, and receives what it sends into into(r).
template <class Give, class Into> void exchange_all(const Comm& comm, Round round, const Give& give, const Into& into) {
  std::vector<Message> out, in;
  for (int r = 0; r < comm.size(); ++r) {
    if (r == comm.rank()) continue;
    if constexpr (std::is_same_v<Give, Tensor>) out.push_back({r, give});
    else out.push_back({r, give(r)});
    in.push_back({r, into(r)});
  }
  comm.exchange(std::move(out), std::move(in), round).wait();
}

/// The rank that holds up a wait for `peer`: the end of the chain of those that wait for another.
std::string suspect(Link& link, int peer) {
  std::set<int> seen{link.rank()};
  while (seen.insert(peer).second) {
    const std::optional<int> next = link.ask(peer);
    if (!next) return who(peer) + ", which does not answer: it computes, is stopped or cut off";
    if (*next == Link::kLeft) return who(peer) + ", which has left";
    if (*next == Link::kNobody) return who(peer) + ", which waits for nobody";
    peer = *next;
  }
  return who(peer) + ", in a circle of ranks that wait for each other";
}

}  // namespace

class detail::Pending {
 public:
  Pending(std::shared_ptr<Shared> shared, std::unique_ptr<Flight> flight, Round round)
      : shared_(std::move(shared)), flight_(std::move(flight)), round_(round) {}

  void wait() {
    if (flight_->poll()) return;
    Link& link = *shared_->link;
    const auto start = Clock::now();
    const milliseconds deadline(shared_->deadline_ms.load());
    link.waits_for(flight_->missing());
    for (int polls = 0; !flight_->poll(); ++polls) {
      if (const auto fault = link.fault()) fail_with(Code::distributed, *fault);
      if (Clock::now() - start > deadline) {
        const int peer = flight_->missing();
        std::ostringstream text;
        text << round_.op;
        if (round_.hop > 0) text << ", hop " << round_.hop;
        text << ": rank " << link.rank() << " waited " << static_cast<double>(deadline.count()) / 1000 << " s for rank "
             << peer << "; suspect: " << suspect(link, peer)
             << "; if it is only slow, set HILT_DEADLINE to more seconds";
        link.abort(text.str());
        fail_with(Code::distributed, link.fault().value_or(text.str()));
      }
      link.waits_for(flight_->missing());
      link.pause(polls);
    }
    link.waits_for(Link::kNobody);
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<Flight> flight_;
  Round round_;
};

void Transfer::wait() {
  if (const auto pending = std::move(pending_)) pending->wait();
}

struct Comm::State {
  std::shared_ptr<Shared> shared;
  int channel = 0, rank = 0;
  std::vector<int> members{0};  // ranks of the link
};

Comm::Comm() : state_(std::make_shared<State>()) { state_->shared = std::make_shared<Shared>(); }
Comm::Comm(std::shared_ptr<Link> link) : Comm() {
  state_->rank = link->rank();
  state_->members.resize(static_cast<std::size_t>(link->size()));
  std::iota(state_->members.begin(), state_->members.end(), 0);
  state_->shared->link = std::move(link);
}

int Comm::rank() const { return state_->rank; }
int Comm::size() const { return static_cast<int>(state_->members.size()); }
std::string_view Comm::name() const { return state_->shared->link ? state_->shared->link->name() : "single"; }
milliseconds Comm::deadline() const { return milliseconds(state_->shared->deadline_ms.load()); }
void Comm::set_deadline(milliseconds deadline) {
  check(deadline.count() > 0, "Comm: deadline ", deadline.count(), " ms must be above 0");
  state_->shared->deadline_ms = deadline.count();
}
Traffic Comm::traffic() const {
  return {state_->shared->bytes_sent, state_->shared->bytes_received, state_->shared->messages_sent};
}

Transfer Comm::exchange(std::vector<Message> out, std::vector<Message> in, Round round) const {
  for (std::vector<Message>* list : {&out, &in}) {
    for (Message& m : *list) {
      check(m.peer >= 0 && m.peer < size(), round.op, ": rank ", m.peer, " of ", size());
      check(m.peer != rank(), round.op, ": rank ", m.peer, " exchanges with itself");
      check(bool(m.data) && m.data.is_contiguous(), round.op, ": what travels must be dense");
      m.peer = state_->members[static_cast<std::size_t>(m.peer)];
    }
    std::erase_if(*list, [](const Message& m) { return m.data.bytes() == 0; });
  }
  Transfer transfer;
  if (out.empty() && in.empty()) return transfer;
  Shared& shared = *state_->shared;
  if (const auto fault = shared.link->fault()) fail_with(Code::distributed, *fault);
  for (const Message& m : out) shared.bytes_sent += m.data.bytes(), ++shared.messages_sent;
  for (const Message& m : in) shared.bytes_received += m.data.bytes();
  transfer.pending_ = std::make_shared<detail::Pending>(
      state_->shared, shared.link->start(state_->channel, std::move(out), std::move(in)), round);
  return transfer;
}

// Every rank adds up one piece of x, in the order of ranks, and hands it to the others.
Tensor Comm::sum(const Tensor& x, Round round) const {
  if (size() == 1) return clone(x);
  const bool is_short = is_floating(x.dtype()) && size_of(x.dtype()) < size_of(DType::f32);
  const Tensor total = dense_in(x, is_short ? DType::f32 : x.dtype());
  const Index n = total.numel(), chunk = (n + size() - 1) / size();
  const auto piece_of = [&](const Tensor& of, int r) {
    return piece(of, std::min(r * chunk, n), std::min((r + 1) * chunk, n));
  };
  std::vector<Tensor> parts;
  for (int r = 0; r < size(); ++r)
    parts.push_back(r == rank() ? piece_of(total, r) : empty_like(piece_of(total, rank())));
  const auto place = [&](int r) { return parts[static_cast<std::size_t>(r)]; };
  exchange_all(
      *this, round, [&](int r) { return piece_of(total, r); }, place);
  Tensor mine = clone(parts[0]);
  for (std::size_t r = 1; r < parts.size(); ++r) accumulate(mine, parts[r]);
  const Tensor result = empty(x.shape(), total.dtype(), x.device());
  Tensor own = piece_of(result, rank());
  copy(own, mine);
  exchange_all(*this, round, mine, [&](int r) { return piece_of(result, r); });
  return dense_in(result, x.dtype());
}

Tensor Comm::gather(const Tensor& x, Round round) const {
  const Tensor mine = dense(x);
  Shape shape{size()};
  for (Index extent : x.shape()) shape.push_back(extent);
  Tensor all = empty(shape, x.dtype(), x.device());
  const auto slot = [&](int r) { return piece(all, r * x.numel(), (r + 1) * x.numel()); };
  Tensor own = slot(rank());
  copy(own, piece(mine, 0, x.numel()));
  exchange_all(*this, round, mine, slot);
  return all;
}

Tensor Comm::broadcast(const Tensor& x, int root, Round round) const {
  Tensor y = rank() == root ? dense(x) : empty(x.shape(), x.dtype(), x.device());
  std::vector<Message> out, in;
  for (int r = 0; rank() == root && r < size(); ++r)
    if (r != root) out.push_back({r, y});
  if (rank() != root) in.push_back({root, y});
  exchange(std::move(out), std::move(in), round).wait();
  return y;
}

void Comm::barrier(Round round) const { (void)gather(zeros({1}, DType::u8), round); }

std::vector<std::string> Comm::gather_text(const std::string& text, Round round) const {
  const auto lengths = gather(from_values(std::vector<Index>{std::ssize(text)}, {1}), round).to_vector<Index>();
  const Index longest = *std::ranges::max_element(lengths);
  std::vector<std::uint8_t> bytes(text.begin(), text.end());
  bytes.resize(static_cast<std::size_t>(longest));
  const Tensor all = gather(from_values(bytes, {longest}), round);
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < lengths.size(); ++r)
    texts.emplace_back(reinterpret_cast<const char*>(all.raw()) + static_cast<Index>(r) * longest,
                       static_cast<std::size_t>(lengths[r]));
  return texts;
}

void Comm::agree(std::string_view what, const std::string& lines) const {
  const std::vector<std::string> texts = gather_text(lines, {"agree"});
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const auto first = split_text(texts[0], '\n'), other = split_text(texts[r], '\n');
    const auto line = [](const auto& all, auto at) {
      return at == all.end() || (at + 1 == all.end() && at->empty()) ? std::string_view("(nothing)") : *at;
    };
    const auto differ = std::ranges::mismatch(first, other);
    fail_with(Code::distributed, what, ": rank ", r, " has ", line(other, differ.in2), ", rank 0 ",
              line(first, differ.in1), "; start every rank with the same options");
  }
}

Comm Comm::split(int color, int key) const {
  Shared& shared = *state_->shared;
  const auto all =
      gather(from_values<std::int32_t>({color, key, shared.next_channel}, {3}), {"split"}).to_vector<std::int32_t>();
  const auto entry = [&](int r, std::size_t i) { return all[static_cast<std::size_t>(r) * 3 + i]; };
  std::set<int> colors;
  std::vector<int> ranks;
  int channel = 0;
  for (int r = 0; r < size(); ++r) {
    colors.insert(entry(r, 0));
    channel = std::max(channel, entry(r, 2));
    if (entry(r, 0) == color) ranks.push_back(r);
  }
  std::ranges::stable_sort(ranks, {}, [&](int r) { return entry(r, 1); });
  shared.next_channel = channel + static_cast<int>(colors.size());

  Comm group;
  group.state_->shared = state_->shared;
  group.state_->channel = channel + static_cast<int>(std::distance(colors.begin(), colors.find(color)));
  group.state_->rank = static_cast<int>(std::ranges::find(ranks, rank()) - ranks.begin());
  group.state_->members.clear();
  for (int r : ranks) group.state_->members.push_back(state_->members[static_cast<std::size_t>(r)]);
  return group;
}

const std::shared_ptr<Link>& Comm::link() const { return state_->shared->link; }

Comm nccl_ranks(const Comm& group, Device device) {
  check(device.is_cuda(), "nccl_ranks: ", device, " is no GPU");
  if (group.size() == 1) return group;
  if constexpr (kHasNccl) {
    char host[256] = {};
    (void)::gethostname(host, sizeof host - 1);
    const auto places = group.gather_text((std::ostringstream() << host << ", " << device).str());
    for (std::size_t i = 0; i < places.size(); ++i)
      for (std::size_t j = 0; j < i; ++j)
        if (places[i] == places[j])
          fail_with(Code::distributed, "nccl_ranks: ranks ", j, " and ", i, " both have ", places[i],
                    "; each rank needs a GPU of its own: ", group.size(), " ranks, ", gpu_descriptions().size(),
                    " GPUs here");
    return Comm(nccl_link(group, device));
  } else {
    fail_with(Code::distributed,
              "nccl_ranks: built without NCCL; install libnccl-dev and build with -Dcuda=enabled -Dnccl=enabled");
  }
}

Comm mpi_ranks(std::optional<int> communicator) {
  if constexpr (kHasMpi) return join_mpi(communicator);
  else fail_with(Code::distributed, "mpi_ranks: built without MPI; install it with: ./run setup --mpi");
}
void abort_mpi([[maybe_unused]] int status) {
  if constexpr (kHasMpi) end_mpi(status);
}

bool Comm::abort(const std::string& reason) const noexcept {
  return !state_->shared->link || state_->shared->link->abort(reason);
}

}  // namespace hilt
