// A group of ranks over threads: collectives, bytes, early messages, and
// what all hear when one throws, leaves or waits too long.
#include "core/comm/comm.h"
#include <gtest/gtest.h>
#include <atomic>
#include <chrono>
#include <thread>
#include "core/comm/link.h"
#include "core/config.h"
#include "core/device.h"
#include "core/random.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

using std::chrono::milliseconds;
using Work = std::function<void(Comm&)>;

class CommTest : public testing::Test {
 protected:
  void run(int ranks, const Work& work) const { run_ranks(ranks, work); }
  /// What every rank throws; a rank that throws nothing says "nothing".
  std::vector<std::string> errors(int ranks, const Work& work) const {
    std::vector<std::string> all(static_cast<std::size_t>(ranks));
    try {
      run(ranks, [&](Comm& comm) {
        std::string& mine = all[static_cast<std::size_t>(comm.rank())];
        mine = "nothing";
        try {
          comm.barrier();  // all have met before the first fails
          work(comm);
        } catch (const std::exception&) {
          mine = error_of([&] { throw; });
          throw;
        }
      });
    } catch (const std::exception&) {}
    return all;
  }
};

constexpr int kSizes[] = {1, 2, 3, 4, 5, 8};

Tensor numbers(Index n, int rank, DType type = DType::f32) {
  return randn({n}, RandomKey{7, static_cast<std::uint64_t>(rank)}, type);
}
Tensor marked(Index n, int mark) { return full({n}, mark, DType::i32); }
/// Returns once `state()` holds. Nothing but the time-out of the suite bounds it: a machine may be
/// slow.
template <class State> void until(const State& state) {
  while (!state()) std::this_thread::yield();
}
/// What a rank says that is asked for whom it waits.
bool has_left(const Comm& comm, int rank) { return comm.link()->ask(rank) == Link::kLeft; }
bool waits(const Comm& comm, int rank) { return comm.link()->ask(rank).value_or(Link::kNobody) >= 0; }
bool waits_for(const Comm& comm, int rank, int other) { return comm.link()->ask(rank) == other; }
bool same(const Tensor& a, const Tensor& b) { return a.shape() == b.shape() && a.to_vector() == b.to_vector(); }

TEST_F(CommTest, KnowsWhoItIs) {
  for (int p : kSizes) {
    std::atomic<int> ranks = 0;
    run(p, [&](Comm& comm) {
      EXPECT_EQ(comm.size(), p);
      EXPECT_EQ(comm.name(), p == 1 ? "single" : "threads");
      ranks += 1 << comm.rank();
    });
    EXPECT_EQ(ranks, (1 << p) - 1);
  }
}

TEST_F(CommTest, RingPassesEverythingOn) {
  for (int p : kSizes)
    for (Index n : {Index{1}, Index{1000}, Index{300007}})
      run(p, [&](Comm& comm) {
        Tensor held = marked(n, comm.rank());
        const int next = (comm.rank() + 1) % p, previous = (comm.rank() + p - 1) % p;
        for (int hop = 1; hop < p; ++hop) {
          Tensor came = empty_like(held);
          comm.exchange({{next, held}}, {{previous, came}}, {"ring", hop}).wait();
          held = came;
          ASSERT_TRUE(same(held, marked(n, (comm.rank() + p - hop) % p))) << p << " ranks, hop " << hop;
        }
      });
}

TEST_F(CommTest, SumIsThatOfTheOrderOfRanksToTheBit) {
  for (int p : kSizes)
    for (DType type : {DType::f32, DType::f64, DType::bf16})
      for (Index n : {Index{0}, Index{1}, Index{p - 1}, Index{p}, Index{10007}}) {
        Tensor serial = numbers(n, 0, type), wide = empty({n}, type == DType::bf16 ? DType::f32 : type);
        copy(wide, serial);
        for (int r = 1; r < p; ++r) {
          Tensor more = empty_like(wide);
          copy(more, numbers(n, r, type));
          accumulate(wide, more);
        }
        copy(serial, wide);
        run(p, [&](Comm& comm) {
          EXPECT_TRUE(same(comm.sum(numbers(n, comm.rank(), type)), serial)) << p << " ranks, " << n << ' ' << type;
        });
      }
}

TEST_F(CommTest, LargeSums) {
  constexpr Index n = 1000003;
  Tensor serial = numbers(n, 0);
  for (int r = 1; r < 3; ++r) accumulate(serial, numbers(n, r));
  run(3, [&](Comm& comm) { EXPECT_TRUE(same(comm.sum(numbers(n, comm.rank())), serial)); });
}

TEST_F(CommTest, Collectives) {
  for (int p : kSizes)
    run(p, [&](Comm& comm) {
      const int rank = comm.rank();
      const Tensor all = comm.gather(full({2, 3}, rank));
      ASSERT_EQ(all.shape(), (Shape{p, 2, 3}));
      for (int r = 0; r < p; ++r) EXPECT_EQ(all.to_vector()[static_cast<std::size_t>(r) * 6 + 5], r);
      for (int root = 0; root < p; ++root) EXPECT_TRUE(same(comm.broadcast(marked(5, rank), root), marked(5, root)));
      std::vector<std::string> texts;
      for (int r = 0; r < p; ++r)
        texts.push_back(std::string(static_cast<std::size_t>(r * r), 'x') + std::to_string(r));
      EXPECT_EQ(comm.gather_text(texts[static_cast<std::size_t>(rank)]), texts);
      EXPECT_EQ(comm.gather_text(""), std::vector<std::string>(static_cast<std::size_t>(p)));
    });
}

TEST_F(CommTest, NobodyPassesABarrierBeforeAllHaveCome) {
  for (int p : kSizes) {
    std::atomic<int> came = 0, passed = 0;
    run(p, [&](Comm& comm) {
      // The last one comes when all others wait, or would not and fail.
      for (int r = 0; comm.rank() == p - 1 && r < p - 1; ++r) until([&] { return passed > 0 || waits(comm, r); });
      ++came;
      comm.barrier();
      EXPECT_EQ(came, p);
      ++passed;
    });
  }
}

TEST_F(CommTest, AgreeNamesTheFirstLineThatDiffers) {
  run(3, [](Comm& comm) { comm.agree("options", "heads = 4\nlength = 64\n"); });
  for (const std::string& e : errors(3, [](Comm& comm) {
         comm.agree("options", comm.rank() == 2 ? "heads = 4\nlength = 32\n" : "heads = 4\nlength = 64\n");
       }))
    EXPECT_NE(e.find("options: rank 2 has length = 32, rank 0 length = 64; start every rank with the same options"),
              e.npos)
        << e;
  for (const std::string& e :
       errors(2, [](Comm& comm) { comm.agree("options", comm.rank() ? "a = 1\n" : "a = 1\nb = 2\n"); }))
    EXPECT_NE(e.find("options: rank 1 has (nothing), rank 0 b = 2; start every rank with the same options"), e.npos)
        << e;
}

TEST_F(CommTest, SplitsIntoAGridAndAgain) {
  run(4, [](Comm& comm) {
    const Comm row = comm.split(comm.rank() / 2, comm.rank()), column = comm.split(comm.rank() % 2, -comm.rank());
    ASSERT_EQ(row.size(), 2);
    ASSERT_EQ(column.size(), 2);
    EXPECT_EQ(row.rank(), comm.rank() % 2);
    EXPECT_EQ(column.rank(), 1 - comm.rank() / 2) << "keys order the ranks";
    const double r = comm.rank();
    EXPECT_EQ(row.sum(full({1}, r)).item(), comm.rank() < 2 ? 1 : 5);
    EXPECT_EQ(column.gather(full({1}, r)).to_vector(),
              (std::vector<double>{2.0 + comm.rank() % 2, 0.0 + comm.rank() % 2}));
    const Comm alone = row.split(row.rank(), 0);
    EXPECT_EQ(alone.size(), 1);
    EXPECT_EQ(alone.sum(full({1}, r)).item(), r);
    const Comm turned = comm.split(0, -comm.rank());
    EXPECT_EQ(turned.rank(), 3 - comm.rank());
    // Groups do not hear each other's messages, whatever the order in which they are sent.
    Tensor a = empty({1}), b = empty({1});
    const int other = 1 - row.rank();
    Transfer first = row.exchange({{other, full({1}, 1)}}, {{other, a}});
    const int there = turned.size() - 1 - (row.rank() == 0 ? comm.rank() + 1 : comm.rank() - 1);
    turned.exchange({{there, full({1}, 2)}}, {{there, b}}).wait();
    first.wait();
    EXPECT_EQ(a.item(), 1);
    EXPECT_EQ(b.item(), 2);
  });
}

TEST_F(CommTest, CountsBytesExactly) {
  run(4, [](Comm& comm) {
    (void)comm.gather(zeros({10}));
    EXPECT_EQ(comm.traffic().bytes_sent, 3 * 40u);
    EXPECT_EQ(comm.traffic().bytes_received, 3 * 40u);
    EXPECT_EQ(comm.traffic().messages_sent, 3u);
    (void)comm.sum(zeros({8}));  // two pieces of two floats to each of three
    EXPECT_EQ(comm.traffic().bytes_sent, 3 * 40u + 2 * 3 * 8u);
    (void)comm.gather(zeros({0}));
    EXPECT_EQ(comm.traffic().messages_sent, 3 + 6u) << "nothing to say, no message";
  });
}

TEST_F(CommTest, MessagesKeepTheirOrderWithSeveralUnderWay) {
  run(3, [](Comm& comm) {
    const int next = (comm.rank() + 1) % 3, previous = (comm.rank() + 2) % 3;
    std::vector<Tensor> came;
    std::vector<Transfer> transfers;
    for (int i = 0; i < 20; ++i) {
      came.push_back(empty({Index{1} + 5000 * (i % 3)}, DType::i32));
      transfers.push_back(
          comm.exchange({{next, marked(came.back().numel(), 100 * comm.rank() + i)}}, {{previous, came.back()}}));
    }
    for (std::size_t i = transfers.size(); i-- > 0;) transfers[i].wait();
    for (int i = 0; i < 20; ++i)
      EXPECT_TRUE(same(came[static_cast<std::size_t>(i)],
                       marked(came[static_cast<std::size_t>(i)].numel(), 100 * previous + i)))
          << i;
  });
}

TEST_F(CommTest, TakesWhatCameEarly) {
  run(2, [](Comm& comm) {
    Tensor a = empty({100000}, DType::i32), b = empty({3}, DType::i32);
    const Comm later = comm.split(0, comm.rank());
    if (comm.rank() == 0) {
      Transfer sent = comm.exchange({{1, marked(100000, 1)}, {1, marked(3, 2)}}, {});
      later.barrier();
      sent.wait();
    } else {
      later.barrier();  // sent after them, so they are here
      comm.exchange({}, {{0, a}, {0, b}}).wait();
      EXPECT_TRUE(same(a, marked(100000, 1)));
      EXPECT_TRUE(same(b, marked(3, 2)));
    }
  });
}

TEST_F(CommTest, WhoSendsLetsGoOfWhatItSent) {
  run(2, [](Comm& comm) {
    Tensor came = zeros({1000}), taken = zeros({1});
    reset_thread_memory_stats();
    if (comm.rank() == 1) {
      comm.exchange({}, {{0, came}}).wait();
      EXPECT_EQ(thread_memory_stats().live, 0U);
      comm.exchange({{0, taken}}, {}).wait();
    } else {
      Transfer sent = comm.exchange({{1, full({1000}, 1)}}, {});
      comm.exchange({}, {{1, taken}}).wait();  // before the wait for it begins
      sent.wait();
      EXPECT_EQ(thread_memory_stats().live, 0U);
    }
    comm.barrier();
  });
}

TEST_F(CommTest, ADroppedTransferTakesItsMessageWithIt) {
  run(2, [](Comm& comm) {
    const int other = 1 - comm.rank();
    const Comm later = comm.split(0, comm.rank());
    for (int late = 0; late < 2; ++late) {
      Tensor first = full({50000}, -1, DType::i32), second = empty({2}, DType::i32);
      {
        const Transfer dropped = comm.exchange({{other, marked(50000, 1)}}, {{other, first}});
        if (late) later.barrier();  // sent after it, so it is here
      }
      comm.exchange({{other, marked(2, 2)}}, {{other, second}}).wait();
      EXPECT_TRUE(same(second, marked(2, 2)));
    }
    comm.barrier();
  });
}

// More bytes than an int counts, where there is memory for what arrives.
TEST_F(CommTest, AMessageOfMoreThanTwoGibibytes) {
  constexpr Index n = (Index{1} << 31) + 5;
  if (scaled(false, true) || info().memory_available < std::size_t{6} << 30) GTEST_SKIP() << "it wants 6 GiB of memory";
  const PoolLimit none(0);
  run(2, [](Comm& comm) {
    Tensor x = empty({n}, DType::u8);
    if (comm.rank() == 1) {
      comm.exchange({}, {{0, x}}).wait();
      for (const Index i : {Index{0}, Index{1} << 31, n - 1}) EXPECT_EQ(x.data<std::uint8_t>()[i], 1 + i % 251) << i;
    } else {
      for (const Index i : {Index{0}, Index{1} << 31, n - 1})
        x.mutable_data<std::uint8_t>()[i] = static_cast<std::uint8_t>(1 + i % 251);
      comm.exchange({{1, x}}, {}).wait();
      EXPECT_EQ(comm.traffic().bytes_sent, std::size_t{n});
    }
  });
}

TEST_F(CommTest, WhereMpiIsMissingItSaysHowToGetIt) {
  if (kHasMpi) GTEST_SKIP() << "built with MPI";
  EXPECT_EQ(error_of([] { (void)mpi_ranks(); }),
            "distributed: mpi_ranks: built without MPI; install it with: ./run setup --mpi");
  abort_mpi(3);  // does nothing
}

TEST_F(CommTest, WrongUse) {
  run(2, [](Comm& comm) {
    EXPECT_EQ(error_of([&] { (void)comm.exchange({{2, zeros({1})}}, {}); }), "usage: exchange: rank 2 of 2");
    EXPECT_EQ(error_of([&] {
                (void)comm.exchange({{comm.rank(), zeros({1})}}, {});
              }),
              "usage: exchange: rank " + std::to_string(comm.rank()) + " exchanges with itself");
    EXPECT_EQ(error_of([&] { comm.set_deadline(milliseconds(0)); }), "usage: Comm: deadline 0 ms must be above 0");
  });
}

// ---- failures -----------------------------------------------------------------------------------

TEST_F(CommTest, SizesThatDifferFailOnEveryRank) {
  for (int late : {0, 1})
    for (const std::string& e : errors(3, [&](Comm& comm) {
           const Comm pair = comm.split(comm.rank() == 2, comm.rank());
           Tensor came = empty({comm.rank() == 1 ? 3 : 2});
           if (comm.rank() == late) pair.barrier();  // the other has begun
           Transfer transfer;
           if (comm.rank() == 0) transfer = comm.exchange({{1, zeros({2})}}, {});
           if (comm.rank() == 1) transfer = comm.exchange({}, {{0, came}});
           if (comm.rank() == 1 - late) pair.barrier();
           transfer.wait();
           for (int i = 0; i < 3; ++i) comm.barrier();
         }))
      EXPECT_EQ(e, "distributed: rank 0 sent 8 bytes where rank 1 expects 12: the ranks do not run the same call");
}

TEST_F(CommTest, AThrowOfOneRankReachesAll) {
  const std::vector<std::string> all = errors(4, [](Comm& comm) {
    if (comm.rank() == 2) fail_with(Code::data, "shard.npy: too short");
    comm.barrier();
    comm.barrier();
  });
  // Nobody waits for the deadline, which has words of its own.
  for (std::size_t r = 0; r < all.size(); ++r)
    EXPECT_EQ(all[r], r == 2 ? "data: shard.npy: too short" : "distributed: rank 2: shard.npy: too short");
}

TEST_F(CommTest, AbortReachesAllAndTheFirstReasonStays) {
  for (const std::string& e : errors(3, [](Comm& comm) {
         if (comm.rank() == 1) comm.abort("no more"), comm.abort("and that is final");
         comm.barrier();
         comm.barrier();
       }))
    EXPECT_EQ(e, "distributed: no more");
}

TEST_F(CommTest, ARankThatReturnsEarlyIsMissedOnlyByThoseThatWaitForIt) {
  run(3, [&](Comm& comm) {
    Tensor came = empty({1});
    if (comm.rank() == 2) return comm.exchange({{0, ones({1})}}, {}).wait();
    if (comm.rank() == 0) comm.exchange({}, {{2, came}}).wait();  // a thread leaves when its message is taken
    until([&] { return has_left(comm, 2); });
    if (comm.rank() == 0) comm.exchange({{1, zeros({1})}}, {{1, came}}).wait();
    else comm.exchange({{0, ones({1})}}, {{0, came}}).wait();
  });
  const std::vector<std::string> all = errors(3, [](Comm& comm) {
    if (comm.rank() == 2) return;
    Tensor came = empty({1});
    if (comm.rank() == 0) comm.exchange({}, {{2, came}}).wait();
    else comm.exchange({}, {{0, came}}).wait();
  });
  EXPECT_EQ(all[0], "distributed: rank 2 has left, and rank 0 waits for it");
  EXPECT_EQ(all[1], all[0]);
  EXPECT_EQ(all[2], "nothing");
}

TEST_F(CommTest, TheDeadlineNamesWhoHoldsAllUp) {
  // 0 waits for 1, 1 for 2, 2 for 3, and 3 computes.
  std::atomic<int> came_to_wait = 0;
  const std::vector<std::string> all = errors(4, [&](Comm& comm) {
    comm.set_deadline(comm.rank() == 0 ? milliseconds(100) : std::chrono::hours(1));
    if (comm.rank() == 0) until([&] { return came_to_wait == 3 && waits_for(comm, 1, 2) && waits_for(comm, 2, 3); });
    else ++came_to_wait;
    Tensor came = empty({1});
    if (comm.rank() < 3) comm.exchange({}, {{comm.rank() + 1, came}}, {"ring", 2}).wait();
    else until([&] { return comm.link()->fault().has_value(); });
    comm.barrier();
  });
  for (const std::string& e : all)
    EXPECT_EQ(e,
              "distributed: ring, hop 2: rank 0 waited 0.1 s for rank 1; suspect: rank 3, which waits for nobody; if "
              "it is only slow, set HILT_DEADLINE to more seconds");
}

TEST_F(CommTest, ACircleOfWaitsIsSeen) {
  std::atomic<bool> came_to_wait = false;
  const std::vector<std::string> all = errors(2, [&](Comm& comm) {
    comm.set_deadline(comm.rank() == 0 ? milliseconds(100) : std::chrono::hours(1));
    if (comm.rank() == 0) until([&] { return came_to_wait && waits_for(comm, 1, 0); });
    else came_to_wait = true;
    Tensor came = empty({1});
    comm.exchange({}, {{1 - comm.rank(), came}}, {"hello"}).wait();
  });
  for (const std::string& e : all)
    EXPECT_NE(e.find("hello: rank 0 waited 0.1 s for rank 1; suspect: rank "), e.npos) << e;
  EXPECT_NE(all[0].find("wait for each other"), std::string::npos) << all[0];
}

}  // namespace
}  // namespace hilt
