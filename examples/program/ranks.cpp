// Starts the ranks of a program as threads or processes, waits, and makes one error of theirs.
#include "ranks.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <new>
#include <random>
#include "program.h"

namespace program {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
constexpr milliseconds kGrace(6000);  // for others to end by themselves, once the deadline has passed

volatile std::sig_atomic_t interrupted = 0;

/// What work throws, with the rank in its message, unless a failure between ranks names them.
int named(hilt::Comm& comm, const std::function<int(hilt::Comm&)>& work) {
  const std::string who = "rank " + std::to_string(comm.rank()) + ": ";
  try {
    return work(comm);
  } catch (const hilt::Error& e) {
    if (e.code() == hilt::Code::distributed) throw;
    throw hilt::Error(e.code(), who + e.what());
  } catch (const std::bad_alloc&) {
    throw hilt::Error(hilt::Code::memory, who + "out of memory");
  } catch (const std::exception& e) { throw hilt::Error(hilt::Code::internal, who + "internal: " + e.what()); }
}

int live(hilt::Comm comm, const std::function<int(hilt::Comm&)>& work) {
  try {
    const int status = named(comm, work);
    // Together to the end: who is slow is waited for while it lives, and who is dead is named.
    comm.set_deadline(std::chrono::hours(24 * 365));
    comm.barrier({"end"});
    return status;
  } catch (const hilt::Error& e) {
    comm.abort(e.what());
    throw;
  }
}

int live_as_threads(int ranks, const std::function<int(hilt::Comm&)>& work) {
  std::vector<int> statuses(static_cast<std::size_t>(ranks));
  hilt::run_ranks(ranks,
                  [&](hilt::Comm& comm) { statuses[static_cast<std::size_t>(comm.rank())] = named(comm, work); });
  const auto failed = std::ranges::find_if(statuses, [](int s) { return s != 0; });
  return failed == statuses.end() ? 0 : *failed;
}

/// Below the ports of outgoing connections, so that none of those takes it before rank 0 does.
int free_port() {
  std::random_device random;
  for (int tries = 0; tries < 100; ++tries) {
    const int port = 20000 + static_cast<int>(random() % 12000),
              probe = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET, address.sin_port = htons(static_cast<std::uint16_t>(port)),
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool free = ::bind(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    ::close(probe);
    if (free) return port;
  }
  hilt::fail_with(hilt::Code::distributed, "no free port in 20000..31999 of 127.0.0.1");
}

/// mpirun can lock up where a rank is killed while MPI begins: then none of its children lives.
bool only_dead_children(pid_t pid) {
  const std::string proc = "/proc/" + std::to_string(pid);
  std::ifstream list(proc + "/task/" + std::to_string(pid) + "/children");
  int found = 0;
  for (pid_t child; list >> child; ++found) {
    std::ifstream stat("/proc/" + std::to_string(child) + "/stat");
    const std::string text(std::istreambuf_iterator<char>(stat), {});
    const std::size_t name_end = text.rfind(')');
    if (name_end == std::string::npos || text.compare(name_end, 3, ") Z") != 0) return false;
  }
  return found > 0;
}

/// A process under way: a rank, or mpirun with all of them.
struct Child {
  std::string name;
  pid_t pid = -1;
  int pipe = -1;  // its stderr
  std::string unread{};
  int status = 0, stopped = 0;
  bool ended = false;
};

class Family {
 public:
  explicit Family(std::string program) : program_(std::move(program)) {}

  void start(const std::string& name, const std::vector<std::string>& command, std::vector<std::string> environment,
             int death_signal) {
    for (char** e = environ; *e; ++e) {
      const std::string_view entry(*e), variable = entry.substr(0, entry.find('=') + 1);
      if (std::ranges::none_of(environment, [&](const std::string& ours) { return ours.starts_with(variable); }))
        environment.emplace_back(entry);
    }
    std::vector<char*> argv, envp;
    for (const std::string& a : command) argv.push_back(const_cast<char*>(a.c_str()));
    for (const std::string& e : environment) envp.push_back(const_cast<char*>(e.c_str()));
    argv.push_back(nullptr), envp.push_back(nullptr);
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) hilt::fail_with(hilt::Code::distributed, "pipe: ", std::strerror(errno));
    const pid_t parent = ::getpid(), group = children_.empty() ? 0 : children_.front().pid, pid = ::fork();
    if (pid == 0) {  // only the simplest calls up to exec
      ::setpgid(0, group);
      ::prctl(PR_SET_PDEATHSIG, death_signal);
      if (::getppid() != parent) ::_exit(6);
      ::dup2(ends[1], STDERR_FILENO);
      ::execvpe(argv[0], argv.data(), envp.data());
      ::_exit(errno == ENOENT ? 127 : 126);
    }
    ::close(ends[1]);
    if (pid < 0) {
      ::close(ends[0]);
      send(SIGKILL);
      hilt::fail_with(hilt::Code::distributed, "cannot start ", name, ": ", std::strerror(errno));
    }
    ::setpgid(pid, group);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    children_.push_back({name, pid, ends[0]});
  }

  int wait(bool mpi) {
    constexpr int kEnding[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction forward {
    }, before[std::size(kEnding)];
    forward.sa_handler = [](int signal) { interrupted = signal; };
    for (std::size_t i = 0; i < std::size(kEnding); ++i) {
      ::sigaction(kEnding[i], nullptr, &before[i]);
      if (kEnding[i] != SIGHUP || before[i].sa_handler != SIG_IGN) ::sigaction(kEnding[i], &forward, nullptr);
    }
    const milliseconds patience = hilt::Comm().deadline() + kGrace;
    while (!std::ranges::all_of(children_, &Child::ended)) {
      std::vector<pollfd> pipes;
      for (const Child& c : children_)
        if (c.pipe >= 0) pipes.push_back({c.pipe, POLLIN, 0});
      ::poll(pipes.data(), pipes.size(), 20);
      for (Child& c : children_) look(c), listen(c);
      if (const int signal = std::exchange(interrupted, 0)) {
        send(signal);
        // A step may be long, and its checkpoint wanted: who cannot wait interrupts again.
        if (mpi || (signal == SIGINT && chatter_ == "interrupted"))
          trouble_ = Clock::now() - patience + milliseconds(3000);
        chatter_ = "interrupted";
      }
      // Who is stopped holds the others up no more once one of them has given up, or must have.
      if (!failed_.empty() || (trouble_ && Clock::now() - *trouble_ > hilt::Comm().deadline()))
        for (const Child& c : children_)
          if (!c.ended && c.stopped) ::kill(c.pid, SIGKILL);
      if (!mpi || !only_dead_children(children_.front().pid)) childless_ = {};
      else if (!childless_) childless_ = Clock::now();
      else if (Clock::now() - *childless_ > milliseconds(2000)) send(SIGKILL);
      if (trouble_ && Clock::now() - *trouble_ > patience) send(mpi ? SIGTERM : SIGKILL);
      if (trouble_ && Clock::now() - *trouble_ > patience + milliseconds(2000)) send(SIGKILL);
    }
    for (Child& c : children_) listen(c);
    for (std::size_t i = 0; i < std::size(kEnding); ++i) ::sigaction(kEnding[i], &before[i], nullptr);
    return verdict(mpi);
  }

 private:
  /// Errors are kept, so that one of them can speak for all; everything else goes on at once.
  void hear(const Child& child, const std::string& line) {
    const std::string mark = program_ + ": error: ";
    const bool ruler = line.starts_with("--------------------");
    if (line.starts_with(mark)) {
      errors_.push_back({child.name, line.substr(mark.size())});
      if (!trouble_) trouble_ = Clock::now();
    } else if (child.name != "mpirun") std::cerr << line + '\n';
    else if (ruler) in_chatter_ = !in_chatter_;
    else if (in_chatter_ || line.starts_with('[')) chatter_ += line + ' ';
    else if (!line.empty()) std::cerr << line + '\n';
  }

  void listen(Child& child) {
    char buffer[4096];
    ssize_t n = 0;
    while (child.pipe >= 0 && (n = ::read(child.pipe, buffer, sizeof buffer)) > 0) {
      child.unread.append(buffer, static_cast<std::size_t>(n));
      for (std::size_t end; (end = child.unread.find('\n')) != std::string::npos; child.unread.erase(0, end + 1))
        hear(child, child.unread.substr(0, end));
    }
    if (child.pipe >= 0 && (n == 0 || child.ended)) {
      if (!child.unread.empty()) hear(child, std::exchange(child.unread, {}));
      ::close(std::exchange(child.pipe, -1));
    }
  }

  void look(Child& child) {
    int status = 0;
    if (child.ended || ::waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) <= 0) return;
    if (WIFCONTINUED(status)) child.stopped = 0;
    else if (WIFSTOPPED(status)) child.stopped = WSTOPSIG(status);
    else child.ended = true, child.status = status;
    if (child.ended && status != 0) failed_.push_back(child);
    if ((child.stopped || status != 0) && !trouble_) trouble_ = Clock::now();
  }

  int verdict(bool mpi) {
    if (chatter_ == "interrupted") return 130;
    const auto own = [&](const Child& c) {
      const int code = WIFEXITED(c.status) ? WEXITSTATUS(c.status) : 0;
      return (code >= 1 && code <= 7) || code == 70 || code == 130 ? code : 0;
    };
    std::string text;
    int code = 6;
    const auto describe = [](int signal) {
      return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
    };
    for (const Child& c : failed_) {
      const std::string sep = text.empty() ? "" : ", ";
      if (childless_ && WIFSIGNALED(c.status))
        text = errors_.empty() ? "mpirun did not end when its ranks had" : std::exchange(errors_, {}).front().text;
      else if (c.stopped) text += sep + c.name + " was stopped by " + describe(c.stopped) + " and did not go on";
      else if (WIFSIGNALED(c.status)) text += sep + c.name + " was ended by " + describe(WTERMSIG(c.status));
      else if (mpi && WEXITSTATUS(c.status) == 127) text = "there is no mpirun; install openmpi-bin";
      else if (!own(c) && chatter_.empty())
        text += sep + c.name + " ended with status " + std::to_string(WEXITSTATUS(c.status));
    }
    // mpirun: "... noticed that process rank 1 with PID 0 on node n exited on signal 9 (Killed)."
    if (const std::size_t at = chatter_.find("process rank "), end = chatter_.find(" with PID", at),
        signal = chatter_.find("signal ", at);
        at != std::string::npos && end != std::string::npos && signal != std::string::npos)
      text = chatter_.substr(at + 8, end - at - 8) + " was ended by " +
             chatter_.substr(signal, chatter_.find(')', signal) + 1 - signal);
    if (failed_.empty()) return 0;
    // Of a rank that dies before MPI begins mpirun does not always say which it was.
    if (const int status = failed_.front().status;
        mpi && text.empty() && WIFEXITED(status) && WEXITSTATUS(status) > 128)
      text = "a rank was ended by " + describe(WEXITSTATUS(status) - 128);
    // A rank that did not end MPI and whose own status was 0: here it is that of mpirun.
    const bool improper = chatter_.find("exiting improperly") != std::string::npos;
    if (improper && text.empty() && !errors_.empty()) {
      text = errors_.front().text;
    } else if (text.empty()) {
      // Who failed on its own account, not because another did, knows best.
      const auto first = std::ranges::find_if(failed_, [&](const Child& c) { return own(c) && own(c) != 6; });
      const Child& speaker = first == failed_.end() ? failed_.front() : *first;
      if (own(speaker) && !improper) code = own(speaker);
      const auto said = std::ranges::find(errors_, speaker.name, &Said::name);
      if (said != errors_.end())
        text = (said->text.starts_with("rank ") || code == 6 || mpi ? "" : said->name + ": ") + said->text;
      else if (code == 1) return code;  // a verdict, which needs no words here
      else
        text = speaker.name + " ended with status " + std::to_string(WEXITSTATUS(speaker.status)) +
               (chatter_.empty() ? "" : ": " + chatter_.substr(0, 400));
    } else if (!errors_.empty()) {
      text += "; " + errors_.front().text;
    }
    std::cout.flush();
    std::cerr << program_ + ": error: " + text + '\n';
    return code;
  }

  void send(int signal) const {
    if (!children_.empty()) ::kill(-children_.front().pid, signal);
  }

  const std::string program_;
  std::vector<Child> children_;
  struct Said {
    std::string name, text;
  };
  std::vector<Said> errors_;   // in the order in which they came
  std::vector<Child> failed_;  // likewise
  std::string chatter_;        // of mpirun
  bool in_chatter_ = false;
  std::optional<Clock::time_point> trouble_, childless_;
};

}  // namespace

int run_as(const std::string& program, int ranks, const std::string& over, int argc, char** argv,
           const std::function<int(hilt::Comm&)>& work) {
  const auto has = [](const char* variable) { return std::getenv(variable) != nullptr; };
  if (over == "threads") return live_as_threads(ranks, work);
  const bool mpi = over == "mpi";
  if (!mpi && has("RANK")) return live(hilt::tcp_ranks(), work);
  if (mpi && (has("OMPI_COMM_WORLD_RANK") || has("PMI_RANK"))) {
    const int status = run(program, [&] { return live(hilt::mpi_ranks(), work); });
    if (status != 0) ::_exit(status);  // MPI may be stuck half way, and what it does at exit() would wait for that
    return status;
  }

  std::random_device random;
  std::string self(4096, '\0');  // mpirun would take /proc/self/exe for itself
  const ssize_t length = ::readlink("/proc/self/exe", self.data(), self.size());
  if (length <= 0) hilt::fail_with(hilt::Code::distributed, "/proc/self/exe: ", std::strerror(errno));
  self.resize(static_cast<std::size_t>(length));
  std::vector<std::string> command{self};
  command.insert(command.end(), argv + 1, argv + argc);
  std::vector<std::string> environment{
      "WORLD_SIZE=" + std::to_string(ranks), "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + std::to_string(free_port()),
      "HILT_RUN_TOKEN=" + std::to_string(random()) + std::to_string(random()) + std::to_string(random())};
  Family family(program);
  if (mpi) {
    if (::geteuid() == 0)
      environment.insert(environment.end(), {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"});
    const std::vector<std::string> start{
        "mpirun", "-np", std::to_string(ranks), "--oversubscribe", "--bind-to",           "none", "--mca", "pml", "ob1",
        "--mca",  "btl", "self,vader",          "--mca",           "mpi_yield_when_idle", "1"};
    command.insert(command.begin(), start.begin(), start.end());
    family.start("mpirun", command, environment, SIGTERM);
  } else {
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<std::string> own = environment;
      own.push_back("RANK=" + std::to_string(rank));
      family.start("rank " + std::to_string(rank), command, own, SIGKILL);
    }
  }
  return family.wait(mpi);
}

}  // namespace program
