#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace hilt {

/// What a process gets that the test process itself must not have.
struct Surroundings {
  std::vector<std::string> environment;  // NAME=value
  std::size_t stack = 0;                 // RLIMIT_STACK in bytes, of every thread; 0 leaves it
};

/// Runs the current test once more, in a process of its own that is started afresh. True in that
/// process, whose part is the test proper; false in the first one, after it has checked that the
/// other passed:  if (!in_child({..})) return;
inline bool in_child(const Surroundings& surroundings) {
  constexpr const char* kMark = "HILT_TEST_CHILD=1";
  if (std::getenv("HILT_TEST_CHILD")) return true;
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  const std::string filter = std::string("--gtest_filter=") + test.test_suite_name() + "." + test.name();

  // Everything is prepared before the fork: between it and exec only the simplest calls are safe.
  std::vector<std::string> environment = surroundings.environment;
  environment.push_back(kMark);
  for (char** e = environ; *e; ++e) {
    const std::string_view entry(*e), name = entry.substr(0, entry.find('=') + 1);
    bool ours = entry.starts_with("GTEST_");  // an output file of the first process, shards
    for (const std::string& mine : surroundings.environment) ours = ours || mine.starts_with(name);
    if (!ours) environment.emplace_back(entry);
  }
  std::vector<char*> envp, argv;
  for (std::string& e : environment) envp.push_back(e.data());
  envp.push_back(nullptr);
  // Under an emulator, as tests/tools/aarch64 has it, the kernel itself cannot run this program.
  const char* const emulator = std::getenv("HILT_TEST_EMULATOR");
  std::string self = std::filesystem::read_symlink("/proc/self/exe"), only = filter, no_color = "--gtest_color=no";
  std::string started = emulator ? emulator : self;
  if (emulator) argv.push_back(started.data());
  for (std::string* a : {&self, &only, &no_color}) argv.push_back(a->data());
  argv.push_back(nullptr);
  int pipe_ends[2];
  if (::pipe2(pipe_ends, O_CLOEXEC) != 0) ADD_FAILURE() << "pipe: " << std::strerror(errno);

  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(pipe_ends[1], 1);
    ::dup2(pipe_ends[1], 2);
    const rlimit stack{surroundings.stack, surroundings.stack};
    if (surroundings.stack && ::setrlimit(RLIMIT_STACK, &stack) != 0) ::_exit(126);
    ::execve(started.c_str(), argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(pipe_ends[1]);
  std::string output;
  char buffer[4096];
  for (ssize_t n; (n = ::read(pipe_ends[0], buffer, sizeof buffer)) > 0;)
    output.append(buffer, static_cast<std::size_t>(n));
  ::close(pipe_ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  const bool passed =
      pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0 && output.find("[  PASSED  ] 1 test") != output.npos;
  EXPECT_TRUE(passed) << (WIFSIGNALED(status) ? std::string("killed: ") + strsignal(WTERMSIG(status)) : "failed")
                      << "; it said\n"
                      << output;
  return false;
}

}  // namespace hilt
