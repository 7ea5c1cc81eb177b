// parallel_for hands out every range once, the same ranges on any number of threads, and brings
// exceptions back.
#include "core/parallel.h"
#include <gtest/gtest.h>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <vector>
#include "core/tensor.h"
#include "tests/support/child.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

using Ranges = std::set<std::pair<Index, Index>>;

/// The ranges that parallel_for handed out; each exactly once.
Ranges ranges_of(Index n, Index grain) {
  std::mutex mutex;
  Ranges ranges;
  std::size_t calls = 0;
  parallel_for(n, grain, [&](Index begin, Index end) {
    const std::lock_guard lock(mutex);
    ranges.emplace(begin, end);
    ++calls;
  });
  EXPECT_EQ(ranges.size(), calls);
  return ranges;
}

/// The threads of a loop that `expected` threads share: none of them goes on before all have come,
/// for which nothing but the time-out of the suite is too late.
std::set<std::thread::id> threads_of_a_loop(std::size_t expected) {
  std::mutex mutex;
  std::condition_variable came;
  std::set<std::thread::id> seen;
  parallel_for(64, 1, [&](Index, Index) {
    std::unique_lock lock(mutex);
    seen.insert(std::this_thread::get_id());
    came.notify_all();
    came.wait(lock, [&] { return seen.size() >= expected; });
  });
  return seen;
}
/// How many there are. One too many may come too late for a loop, but not for each of a hundred.
std::size_t most_threads_of_a_loop(std::size_t expected) {
  std::size_t most = 0;
  for (int round = 0; round < 100; ++round) most = std::max(most, threads_of_a_loop(expected).size());
  return most;
}

TEST(Parallel, RangesCoverEverythingOnceAndDependOnSizeAndGrainAlone) {
  for (Index grain : {1, 2, 3, 7, 64, 1000})
    for (Index n : {Index{0}, Index{1}, Index{2}, grain - 1, grain, grain + 1, 2 * grain, 2 * grain + 1, 5 * grain - 1,
                    Index{997}}) {
      Ranges expected;
      if (n > 0 && n <= grain) expected.emplace(0, n);
      for (Index begin = 0; n > grain && begin < n; begin += grain) expected.emplace(begin, std::min(begin + grain, n));
      for (int threads : {1, 2, 3, 8}) {
        const Threads scope(threads);
        ASSERT_EQ(ranges_of(n, grain), expected) << n << " by " << grain << " on " << threads;
      }
    }
}

TEST(Parallel, NothingToDoIsNoCall) {
  for (Index n : {Index{0}, Index{-1}, std::numeric_limits<Index>::min()})
    for (Index grain : {0, 1, 100}) EXPECT_TRUE(ranges_of(n, grain).empty());
}

TEST(Parallel, AGrainBelowOneIsOne) {
  for (Index grain : {0, -5}) EXPECT_EQ(ranges_of(3, grain), (Ranges{{0, 1}, {1, 2}, {2, 3}}));
}

TEST(Parallel, WorksOnSeveralThreadsAndOnOneWhenAsked) {
  for (int threads : {4, 2, 3}) {
    const Threads scope(threads);
    EXPECT_EQ(most_threads_of_a_loop(static_cast<std::size_t>(threads)), static_cast<std::size_t>(threads));
  }
  const Threads one(1);
  EXPECT_EQ(threads_of_a_loop(1), (std::set{std::this_thread::get_id()}));
}

TEST(Parallel, IsDoneWhenItReturns) {
  const Threads threads(4);
  std::vector<int> done(1000);
  for (int round = 0; round < scaled(2000, 200); ++round) {
    std::fill(done.begin(), done.end(), 0);
    parallel_for(1000, 10, [&](Index begin, Index end) {
      for (Index i = begin; i < end; ++i) ++done[static_cast<std::size_t>(i)];  // plain memory: visible afterwards
    });
    ASSERT_EQ(std::count(done.begin(), done.end(), 1), 1000);
  }
}

TEST(Parallel, CallsAnyCallable) {
  struct Fill {
    std::vector<Index>* out;
    void operator()(Index begin, Index end) const {
      for (Index i = begin; i < end; ++i) (*out)[static_cast<std::size_t>(i)] = i;
    }
  };
  std::vector<Index> v(100);
  const Fill fill{&v};
  parallel_for(100, 9, fill);
  for (Index i = 0; i < 100; ++i) ASSERT_EQ(v[static_cast<std::size_t>(i)], i);
  int calls = 0;
  auto counter = [&calls](Index, Index) mutable { ++calls; };
  const Threads one(1);
  parallel_for(10, 5, counter);
  EXPECT_EQ(calls, 2);
}

// ---- exceptions ---------------------------------------------------------------------------------

struct Thrown {
  Index at;
};

TEST(Parallel, RethrowsOneExceptionAsItWas) {
  for (int threads : {1, 2, 4}) {
    const Threads scope(threads);
    for (int round = 0; round < scaled(300, 50); ++round) {
      std::atomic<int> running{0};
      bool caught = false;
      try {
        parallel_for(100, 1, [&](Index begin, Index) {
          ++running;
          struct Leave {
            std::atomic<int>& n;
            ~Leave() { --n; }
          } const leave{running};
          if (begin % 10 == 7) throw Thrown{begin};
        });
      } catch (const Thrown& t) { caught = t.at % 10 == 7; }
      ASSERT_TRUE(caught);
      ASSERT_EQ(running, 0);  // nobody is left inside
    }
    EXPECT_EQ(ranges_of(10, 1).size(), 10u);  // and the pool works as before
  }
}

TEST(Parallel, AFailureEndsTheWorkEarly) {
  const Threads threads(2);
  std::atomic<Index> ran{0};
  EXPECT_THROW(parallel_for(1000000, 1,
                            [&](Index, Index) {
                              ++ran;
                              throw Thrown{0};
                            }),
               Thrown);
  EXPECT_LE(ran, 2);
}

TEST(Parallel, ErrorsKeepCodeAndText) {
  const Threads threads(4);
  EXPECT_EQ(error_of([] { parallel_for(50, 1, [](Index, Index) { fail_with(Code::data, "row is bad"); }); }),
            "data: row is bad");
  EXPECT_EQ(error_of([] { parallel_for(1, 1, [](Index, Index) { fail_with(Code::data, "row is bad"); }); }),
            "data: row is bad");
}

// ---- nesting and other threads ------------------------------------------------------------------

TEST(Parallel, InnerLoopsRunOnTheThreadThatCallsThem) {
  for (int threads : {1, 2, 4}) {
    const Threads scope(threads);
    std::atomic<int> foreign{0}, visited{0};
    parallel_for(20, 1, [&](Index, Index) {
      const std::thread::id here = std::this_thread::get_id();
      parallel_for(30, 4, [&](Index begin, Index end) {
        foreign += std::this_thread::get_id() != here;
        parallel_for(end - begin, 1, [&](Index b, Index e) { visited += static_cast<int>(e - b); });
      });
    });
    EXPECT_EQ(foreign, 0);
    EXPECT_EQ(visited, 600);
  }
}

TEST(Parallel, AnInnerFailureComesOutOfTheOuterLoop) {
  const Threads threads(4);
  EXPECT_EQ(error_of([] {
              parallel_for(20, 1, [](Index, Index) {
                parallel_for(20, 1, [](Index b, Index) { check(b != 11, "inner ", b); });
              });
            }),
            "usage: inner 11");
  EXPECT_EQ(ranges_of(5, 1).size(), 5u);
}

TEST(Parallel, ALoopAfterANestedOneIsParallelAgain) {
  const Threads threads(2);
  parallel_for(4, 1, [](Index, Index) { parallel_for(4, 1, [](Index, Index) {}); });
  EXPECT_EQ(threads_of_a_loop(2).size(), 2u);
}

TEST(Parallel, EightThreadsWithLoopsOfTheirOwn) {
  const Threads scope(3);
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t)
      threads.emplace_back([&wrong, t] {
        std::vector<Index> v(500);
        for (int round = 0; round < scaled(500, 50); ++round) {
          const Index add = t * 1000 + round;
          parallel_for(500, 16, [&](Index begin, Index end) {
            for (Index i = begin; i < end; ++i) v[static_cast<std::size_t>(i)] = i + add;
          });
          for (Index i = 0; i < 500; ++i) wrong += v[static_cast<std::size_t>(i)] != i + add;
        }
      });
  }
  EXPECT_EQ(wrong, 0);
}

// ---- the number of threads ----------------------------------------------------------------------

TEST(Parallel, ThreadCountIsWhatWasSet) {
  const Threads scope(1);
  for (int n : {1, 7, 256, 2}) {
    set_thread_count(n);
    EXPECT_EQ(thread_count(), n);
  }
  EXPECT_EQ(error_of([] { set_thread_count(0); }), "usage: set_thread_count: 0 must be 1..256");
  EXPECT_EQ(error_of([] { set_thread_count(-3); }), "usage: set_thread_count: -3 must be 1..256");
  EXPECT_EQ(error_of([] { set_thread_count(257); }), "usage: set_thread_count: 257 must be 1..256");
  EXPECT_EQ(thread_count(), 2);
}

TEST(Parallel, ThreadCountMayChangeWhileOthersWork) {
  const Threads scope(2);
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  {
    std::jthread changer([&] {
      for (int n = 0; !stop; ++n) {
        set_thread_count(n % 6 + 1);
        std::this_thread::yield();
      }
    });
    {
      std::vector<std::jthread> workers;
      for (int t = 0; t < 3; ++t)
        workers.emplace_back([&] {
          for (int round = 0; round < scaled(1000, 100); ++round) {
            std::atomic<Index> sum{0};
            parallel_for(300, 7, [&](Index begin, Index end) { sum += (begin + end - 1) * (end - begin) / 2; });
            wrong += sum != 300 * 299 / 2;
          }
        });
    }
    stop = true;
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Parallel, SumsPerRangeAreTheSameForEveryNumberOfThreads) {
  std::vector<float> x(100003);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>(std::sin(static_cast<double>(i)) * std::pow(10, static_cast<int>(i % 9) - 4));
  const auto sum = [&] {
    constexpr Index kGrain = 1024;
    const auto n = static_cast<Index>(x.size());
    std::vector<float> parts(static_cast<std::size_t>((n + kGrain - 1) / kGrain));
    parallel_for(n, kGrain, [&](Index begin, Index end) {
      float s = 0;
      for (Index i = begin; i < end; ++i) s += x[static_cast<std::size_t>(i)];
      parts[static_cast<std::size_t>(begin / kGrain)] = s;
    });
    float total = 0;
    for (float p : parts) total += p;
    return total;
  };
  const Threads one(1);
  const float expected = sum();
  for (int n : {2, 3, 4, 8}) {
    const Threads scope(n);
    for (int repeat = 0; repeat < 20; ++repeat) {
      const float got = sum();
      ASSERT_EQ(std::memcmp(&got, &expected, sizeof got), 0) << n;
    }
  }
}

TEST(ThreadLimit, HoldsForAScopeOfOneThread) {
  const Threads eight(8);
  {
    const ThreadLimit two(2);
    EXPECT_EQ(thread_count(), 2);
    EXPECT_EQ(most_threads_of_a_loop(2), 2u);
    const ThreadLimit five(5);  // the smaller one holds
    EXPECT_EQ(thread_count(), 2);
    const ThreadLimit one(1);
    EXPECT_EQ(threads_of_a_loop(1), (std::set{std::this_thread::get_id()}));
    std::jthread([] { EXPECT_EQ(thread_count(), 8); }).join();
  }
  EXPECT_EQ(thread_count(), 8);
  EXPECT_EQ(error_of([] { ThreadLimit(0); }), "usage: ThreadLimit: 0 must be at least 1");
  EXPECT_EQ(thread_count(), 8);
}

// ---- threads of the host ------------------------------------------------------------------------
/// A thread a task, as nobody would write it; counts them.
struct Host {
  std::atomic<int> tasks{0};
  Executor executor() {
    return [this](int n, const std::function<void(int)>& task) {
      std::vector<std::jthread> threads;
      for (int i = 0; i < n; ++i) threads.emplace_back([&, i] { ++tasks, task(i); });
    };
  }
};
struct HostThreads {
  explicit HostThreads(Executor e) { set_executor(std::move(e)); }
  ~HostThreads() { set_executor({}); }
};

TEST(Executor, RunsEverythingOnceOnTheHostsThreads) {
  const Threads scope(3);
  Host host;
  const HostThreads theirs(host.executor());
  std::vector<int> done(1000);
  std::atomic<int> mine{0};
  const std::thread::id here = std::this_thread::get_id();
  parallel_for(1000, 10, [&](Index begin, Index end) {
    mine += std::this_thread::get_id() == here;
    parallel_for(end - begin, 1, [&](Index b, Index) { ++done[static_cast<std::size_t>(begin + b)]; });
  });
  EXPECT_EQ(std::count(done.begin(), done.end(), 1), 1000);
  EXPECT_EQ(mine, 0);
  EXPECT_EQ(host.tasks, 3);  // as many as there may be threads; inner loops run where they stand
  parallel_for(10, 10, [](Index, Index) {});
  EXPECT_EQ(host.tasks, 3);  // one piece needs nobody
  const ThreadLimit two(2);
  EXPECT_EQ(ranges_of(100, 7).size(), 15u);
  EXPECT_EQ(host.tasks, 5);
}

TEST(Executor, MayRunTasksOneAfterTheOther) {
  const Threads scope(4);
  const HostThreads theirs([](int n, const std::function<void(int)>& task) {
    for (int i = n; i-- > 0;) task(i);
  });
  for (Index n : {2, 5, 1000}) EXPECT_EQ(ranges_of(n, 1).size(), static_cast<std::size_t>(n));
  EXPECT_EQ(error_of([] { parallel_for(50, 1, [](Index b, Index) { check(b != 7, "row ", b); }); }), "usage: row 7");
}

TEST(Executor, NoThreadOfOursIsStarted) {
  if (!in_child({.environment = {"HILT_THREADS=4"}})) return;
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
  };
  set_executor([](int n, const std::function<void(int)>& task) {
    for (int i = 0; i < n; ++i) task(i);
  });
  parallel_for(1000, 1, [](Index, Index) {});
  const auto with_host = threads();
  set_executor({});
  parallel_for(1000, 1, [](Index, Index) {});
  EXPECT_GE(threads(), with_host + 3);  // ours come now; a sanitizer may have one of its own
}

TEST(Executor, MayChangeWhileOthersWork) {
  const Threads scope(2);
  Host host;
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  {
    std::jthread changer([&] {
      while (!stop) set_executor(host.executor()), set_executor({});
    });
    {
      std::vector<std::jthread> workers;
      for (int t = 0; t < 3; ++t)
        workers.emplace_back([&] {
          for (int round = 0; round < scaled(200, 50); ++round) {
            std::atomic<Index> sum{0};
            parallel_for(300, 7, [&](Index begin, Index end) { sum += (begin + end - 1) * (end - begin) / 2; });
            wrong += sum != 300 * 299 / 2;
          }
        });
    }
    stop = true;
  }
  set_executor({});
  EXPECT_EQ(wrong, 0);
}

TEST(Parallel, TheEnvironmentSaysHowMany) {
  if (!in_child({.environment = {"HILT_THREADS=3"}})) return;
  EXPECT_EQ(thread_count(), 3);
}

TEST(Parallel, AWrongEnvironmentIsAnError) {
  if (!in_child({.environment = {"HILT_THREADS=many"}})) return;
  EXPECT_EQ(error_of([] { thread_count(); }), "usage: HILT_THREADS: 'many' must be 1..256");
  EXPECT_EQ(error_of([] { parallel_for(10, 1, [](Index, Index) {}); }), "usage: HILT_THREADS: 'many' must be 1..256");
  set_thread_count(2);  // says it instead
  EXPECT_EQ(thread_count(), 2);
}

TEST(Parallel, AnEmptyEnvironmentIsAnErrorToo) {
  if (!in_child({.environment = {"HILT_THREADS="}})) return;
  EXPECT_EQ(error_of([] { thread_count(); }), "usage: HILT_THREADS: '' must be 1..256");
}

}  // namespace
}  // namespace hilt
