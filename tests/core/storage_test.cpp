// Blocks, the pool, the counters, borrowed memory, and what is said when memory runs out.
#include "core/storage.h"
#include <gtest/gtest.h>
#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>
#include "core/device.h"
#include "core/io/dlpack.h"
#include "core/pool.h"
#include "core/replay.h"
#include "core/tape.h"
#include "tests/support/child.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"
#include "tests/support/tiny_ops.h"

// Sanitizers would rather stop than say that memory ran out.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace hilt {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t live() { return memory_stats().live; }
std::size_t peak() { return memory_stats().peak; }
std::size_t pooled() { return memory_stats().pooled; }
std::size_t from_system() { return memory_stats().from_system; }
Storage block(std::size_t bytes) { return Storage::allocate(bytes, {}); }

TEST(Storage, IsAlignedAndWritableForEverySize) {
  for (std::size_t bytes :
       {0u, 1u, 2u, 63u, 64u, 65u, 127u, 128u, 129u, 1000u, 4096u, 4097u, 1u << 20u, (1u << 20) + 1u, 5u << 20u}) {
    Storage s = block(bytes);
    ASSERT_NE(s.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(s.data()) % 64, 0u) << bytes;
    EXPECT_EQ(s.bytes(), bytes);
    EXPECT_EQ(s.device(), Device{});
    std::memset(s.mutable_data(), 0xa5, bytes);
  }
}

TEST(Storage, CopiesShareAndTheLastOneFrees) {
  const std::size_t before = live();
  EXPECT_FALSE(bool(Storage{}));
  Storage a = block(1000);
  EXPECT_TRUE(bool(a));
  EXPECT_TRUE(a.is_sole_owner());
  {
    Storage b = a;
    EXPECT_TRUE(a == b);
    EXPECT_FALSE(a.is_sole_owner());
    EXPECT_EQ(a.data(), b.data());
    EXPECT_EQ(live(), before + 1000);
  }
  EXPECT_TRUE(a.is_sole_owner());
  EXPECT_FALSE(a == block(1000));
  a = {};
  EXPECT_EQ(live(), before);
}

TEST(Storage, VersionRisesWithEveryMutableAccessAndIsShared) {
  Storage a = block(8), b = a;
  const std::uint64_t first = a.version();
  (void)a.data();
  EXPECT_EQ(a.version(), first);
  (void)a.mutable_data();
  EXPECT_EQ(b.version(), first + 1);
  (void)b.mutable_data();
  EXPECT_EQ(a.version(), first + 2);
}

// ---- counters -----------------------------------------------------------------------------------

TEST(MemoryStats, LiveAndPeakAreExact) {
  const std::size_t start = live();
  reset_memory_peak();
  EXPECT_EQ(peak(), start);
  Storage a = block(1000), b = block(3 * kMiB + 1);
  EXPECT_EQ(live(), start + 1000 + 3 * kMiB + 1);
  EXPECT_EQ(peak(), live());
  b = {};
  EXPECT_EQ(live(), start + 1000);
  EXPECT_EQ(peak(), start + 1000 + 3 * kMiB + 1);
  b = block(2 * kMiB);
  EXPECT_EQ(peak(), start + 1000 + 3 * kMiB + 1);
  reset_memory_peak();
  EXPECT_EQ(peak(), live());
  const Storage none = block(0);
  EXPECT_EQ(live(), start + 1000 + 2 * kMiB);
  b = block(5 * kMiB);  // both exist for a moment
  EXPECT_EQ(peak(), start + 1000 + 7 * kMiB);
  EXPECT_EQ(live(), start + 1000 + 5 * kMiB);
}

TEST(MemoryStats, RandomAllocationsAddUp) {
  const PoolLimit limit(64 * kMiB);
  const std::size_t start = live();
  std::mt19937 random(1);
  std::vector<Storage> held;
  std::size_t expected = start, highest = start;
  reset_memory_peak();
  for (int i = 0; i < scaled(20000, 2000); ++i) {
    if (held.empty() || random() % 2) {
      const std::size_t bytes = random() % 8 ? random() % 5000 : random() % (4 * kMiB);
      held.push_back(block(bytes));
      expected += bytes;
    } else {
      std::swap(held[random() % held.size()], held.back());
      expected -= held.back().bytes();
      held.pop_back();
    }
    highest = std::max(highest, expected);
    ASSERT_EQ(live(), expected);
    ASSERT_EQ(peak(), highest);
  }
  held.clear();
  EXPECT_EQ(live(), start);
}

TEST(HostStream, IsForAGpu) {
  EXPECT_EQ(error_of([] { const HostStream on({}, nullptr, {}); }),
            "usage: HostStream: one at a time on a thread, and on a GPU; asked for cpu");
  const Tensor x = zeros({3});  // as before
  EXPECT_EQ(x.device(), Device{});
}

TEST(MemoryStats, NoOtherDeviceIsKnown) {
  if (kHasCuda) GTEST_SKIP() << "built with CUDA";
  const Device gpu{Device::Kind::cuda, 1};
  EXPECT_EQ(error_of([&] { memory_stats(gpu); }), "usage: memory_stats: built without CUDA, asked for cuda:1");
  EXPECT_EQ(error_of([&] { reset_memory_peak(gpu); }),
            "usage: reset_memory_peak: built without CUDA, asked for cuda:1");
  EXPECT_EQ(error_of([&] { Storage::allocate(1, gpu); }), "usage: Storage: built without CUDA, asked for cuda:1");
}

// ---- the pool -----------------------------------------------------------------------------------

TEST(Pool, HandsAFreedBlockToTheNextOfAboutItsSize) {
  const PoolLimit limit(64 * kMiB);
  Storage a = block(64000);  // small ones are the thread's
  const std::byte* const at = a.data();
  a = {};
  EXPECT_EQ(pooled(), 65536u);
  const std::size_t asked = from_system();
  for (std::size_t bytes : {65536u, 57345u, 64000u}) {
    const Storage b = block(bytes);
    EXPECT_EQ(b.data(), at) << bytes;
    EXPECT_EQ(pooled(), 0u);
  }
  EXPECT_EQ(from_system(), asked);
  const Storage larger = block(65537), smaller = block(57344);
  EXPECT_NE(larger.data(), at);
  EXPECT_NE(smaller.data(), at);
  EXPECT_EQ(from_system(), asked + 2);
  EXPECT_EQ(pooled(), 65536u);
}

TEST(Pool, SmallBlocksAreTheThreadsAndCounted) {
  const PoolLimit limit(64 * kMiB);
  const MemoryStats before = memory_stats();
  Storage a = block(1000);
  const std::byte* const at = a.data();
  EXPECT_EQ(memory_stats().live, before.live + 1000);
  a = {};
  EXPECT_EQ(memory_stats().live, before.live);
  EXPECT_EQ(pooled(), 0u);
#ifndef __SANITIZE_ADDRESS__
  EXPECT_EQ(block(600).data(), at);
#endif
  EXPECT_EQ(from_system(), before.from_system);
  set_pool_limit(0);  // then nothing is kept
  (void)block(1000);
  EXPECT_EQ(from_system(), before.from_system + 1);
}

TEST(Pool, RoundsUpByAQuarterAtMost) {
  const PoolLimit limit(std::size_t{1} << 40);
  std::size_t last = 0;
  const auto room = [&](std::size_t bytes) {
    release_pool();
    EXPECT_EQ(pooled(), 0u);
    (void)block(bytes);
    return pooled();
  };
  for (std::size_t bytes = 16385; bytes < 19000; ++bytes) {
    const std::size_t got = room(bytes);
    ASSERT_GE(got, bytes);
    ASSERT_GE(got, last);
    ASSERT_LE(got, std::max(bytes + 64, bytes + bytes / 4));
    ASSERT_EQ(got % 64, 0u);
    last = got;
  }
  for (std::size_t power = 32768; power <= 16 * kMiB; power *= 2)
    for (std::size_t bytes :
         {power - 1, power, power + 1, power + power / 4, power + power / 4 + 1, power + power / 2 + 7}) {
      const std::size_t got = room(bytes);
      ASSERT_GE(got, bytes);
      ASSERT_LE(got, bytes + bytes / 4) << bytes;
    }
}

TEST(Pool, SteadyWorkAsksTheSystemForNothing) {
  const PoolLimit limit(64 * kMiB);
  const auto step = [] {
    const Storage a = block(100000), b = block(100000);
    const Storage c = block(17);
    { const Storage d = block(2 * kMiB); }
    return block(3000);
  };
  step();
  const MemoryStats before = memory_stats();
  for (int i = 0; i < scaled(10000, 500); ++i) step();
  EXPECT_EQ(from_system(), before.from_system);
  EXPECT_EQ(pooled(), before.pooled);
  EXPECT_EQ(live(), before.live);
}

TEST(Pool, KeepsNoMoreThanItsLimit) {
  const PoolLimit limit(2 * kMiB);
  std::vector<Storage> held;
  for (int i = 0; i < 4; ++i) held.push_back(block(kMiB));
  held.clear();
  EXPECT_EQ(pooled(), 2 * kMiB);
  set_pool_limit(2 * kMiB);  // what is there fits
  EXPECT_EQ(pooled(), 2 * kMiB);
  set_pool_limit(2 * kMiB - 1);
  EXPECT_EQ(pooled(), 0u);
  set_pool_limit(0);
  { const Storage s = block(kMiB); }
  EXPECT_EQ(pooled(), 0u);
  const std::size_t asked = from_system();
  { const Storage s = block(kMiB); }
  EXPECT_EQ(from_system(), asked + 1);
}

TEST(Pool, ReleaseLeavesLiveBlocksAlone) {
  const PoolLimit limit(64 * kMiB);
  Storage kept = block(100);
  std::memset(kept.mutable_data(), 0x5a, 100);
  { const Storage s = block(kMiB); }
  EXPECT_EQ(pooled(), kMiB);
  release_pool();
  EXPECT_EQ(pooled(), 0u);
  EXPECT_TRUE(std::all_of(kept.data(), kept.data() + 100, [](std::byte b) { return b == std::byte{0x5a}; }));
}

TEST(Pool, LimitComesFromTheEnvironment) {
  if (!in_child({.environment = {"HILT_POOL_BYTES=1048576"}})) return;
  { const Storage a = block(kMiB), b = block(kMiB); }
  EXPECT_EQ(pooled(), kMiB);
}

TEST(Pool, EightThreadsShareIt) {
  const PoolLimit limit(8 * kMiB);
  const std::size_t start = live();
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t)
      threads.emplace_back([&wrong, t] {
        std::mt19937 random(static_cast<unsigned>(t));
        std::vector<Storage> held;
        for (int i = 0; i < scaled(4000, 400); ++i) {
          Storage s = block(8 + random() % 3000);
          std::memset(s.mutable_data(), t, s.bytes());
          held.push_back(std::move(s));
          if (held.size() < 20) continue;
          std::swap(held[random() % 20], held.back());
          const std::byte* const p = held.back().data();
          wrong += !std::all_of(p, p + held.back().bytes(), [t](std::byte b) { return b == std::byte(t); });
          held.pop_back();
        }
      });
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(live(), start);
}

TEST(Pool, BlocksThatLiveAtOnceNeverOverlap) {
  const PoolLimit limit(64 * kMiB);
  std::mt19937 random(2);
  for (int round = 0; round < 20; ++round) {
    std::vector<Storage> held;
    for (int i = 0; i < 200; ++i) held.push_back(block(random() % 4000));
    std::vector<std::pair<const std::byte*, const std::byte*>> spans;
    for (const Storage& s : held) spans.emplace_back(s.data(), s.data() + std::max<std::size_t>(s.bytes(), 1));
    std::sort(spans.begin(), spans.end());
    for (std::size_t i = 1; i < spans.size(); ++i) ASSERT_LE(spans[i - 1].second, spans[i].first);
  }
}

// ---- memory of others ---------------------------------------------------------------------------

TEST(Borrow, ReleasesOnceAfterTheLastUser) {
  const std::size_t start = live();
  double memory[4] = {1, 2, 3, 4};
  int released = 0;
  std::size_t live_then = 0;
  {
    Tensor view;
    {
      // What runs then may use the library: no lock is held, and the bytes are no longer counted.
      Storage s = Storage::borrow(memory, sizeof memory, {}, [&] {
        ++released;
        live_then = live();
        (void)block(100);
      });
      EXPECT_EQ(live(), start + sizeof memory);
      EXPECT_EQ(s.data(), reinterpret_cast<std::byte*>(memory));
      const Storage again = s;
      view = as_strided(Tensor(s, {4}, DType::f64), {2}, {2}, 1);
    }
    EXPECT_EQ(released, 0);
    EXPECT_EQ(view.to_vector(), (std::vector<double>{2, 4}));
    view.mutable_data<double>()[2] = 9;
    EXPECT_EQ(memory[3], 9);
    EXPECT_EQ(live(), start + sizeof memory);
  }
  EXPECT_EQ(released, 1);
  EXPECT_EQ(live_then, start);
  EXPECT_EQ(live(), start);
}

TEST(Borrow, NeedsNoReleaseAndNeverEntersThePool) {
  const PoolLimit limit(64 * kMiB);
  std::vector<std::byte> memory(4096);
  { const Storage s = Storage::borrow(memory.data(), memory.size(), {}, nullptr); }
  EXPECT_EQ(pooled(), 0u);
  int released = 0;
  {
    const Storage s = Storage::borrow(nullptr, 0, {}, [&] { ++released; });
  }
  EXPECT_EQ(released, 1);
  EXPECT_EQ(error_of([] { Storage::borrow(nullptr, 8, {}, nullptr); }),
            "usage: Storage: borrowing 8 bytes at a null pointer");
}

TEST(Borrow, ReleasesOnceWhenEightThreadsLetGo) {
  for (int round = 0; round < scaled(200, 20); ++round) {
    std::atomic<int> released{0};
    int memory = 0;
    {
      Storage s = Storage::borrow(&memory, sizeof memory, {}, [&] { ++released; });
      std::vector<std::jthread> threads;
      for (int t = 0; t < 8; ++t) threads.emplace_back([copy = s] {});
      s = {};
    }
    ASSERT_EQ(released, 1);
  }
}

// ---- what tapes keep ----------------------------------------------------------------------------

TEST(Borrow, ATensorLiesInTheMemoryOfASpan) {
  std::vector<float> mine{1, 2, 3, 4, 5, 6};
  int released = 0;
  {
    Tensor x = borrow(std::span(mine), {2, 3}, [&] { ++released; });
    EXPECT_EQ(x.data<float>(), mine.data());
    x.mutable_data<float>()[1] = 7;
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(released, 1);
  EXPECT_EQ(mine[1], 7);
  std::int64_t four[]{0, 1, 2, 3};
  EXPECT_EQ(borrow(std::span(four), 4).to_vector<std::int64_t>(), (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(error_of([&] { (void)borrow(std::span(mine), {7}); }), "usage: borrow: 6 values for a shape [7]");
}

TEST(Borrow, ConstantMemoryIsForReadingAlone) {
  const std::vector<double> theirs{1, 2};
  Tensor x = borrow(std::span(theirs), 2);
  EXPECT_EQ(x.data<double>(), theirs.data());
  EXPECT_EQ(tiny::scale(x, 2).to_vector(), (std::vector<double>{2, 4}));
  const std::string refused = "usage: Storage: this memory was lent for reading alone; write to a clone()";
  EXPECT_EQ(error_of([&] { copy(x, zeros({2}, DType::f64)); }), refused);
  EXPECT_EQ(error_of([&] { x.mutable_data<double>()[0] = 3; }), refused);
  EXPECT_EQ(error_of([&] { (void)to_dlpack(x, dlpack::Access::write); }), refused);
  EXPECT_TRUE(to_dlpack(x));
  Tensor own = clone(x);
  own.mutable_data<double>()[0] = 3;
  EXPECT_EQ(theirs[0], 1);
}

TEST(SmallBlocks, AreHadAgainByTheThreadThatGaveThemBack) {
  void* const first = detail::take_block(100);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % detail::kBlockAlignment, 0u);
  detail::give_block(first, 100);
  void* const second = detail::take_block(128);  // of the same size, by powers of two
#ifndef __SANITIZE_ADDRESS__
  EXPECT_EQ(second, first);
#endif
  std::thread([&] {  // whoever gives it back keeps it, until that thread ends
    detail::give_block(second, 128);
    void* const third = detail::take_block(65);
#ifndef __SANITIZE_ADDRESS__
    EXPECT_EQ(third, first);
#endif
    detail::give_block(third, 65);
  })
      .join();
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{16384}, std::size_t{16385}}) {
    void* const block = detail::take_block(bytes);
    detail::give_block(block, bytes);
  }
}

TEST(Saved, ATapeKeepsWhatItsOpsReadAgain) {
  const std::size_t start = live();
  Tensor a = full({100}, 2, DType::f64);
  Tape tape;
  tape.watch(a);
  const Tensor y = tiny::square(a);
  EXPECT_FALSE(a.storage().is_sole_owner());  // nobody may write in place to what is kept for backward
  a = {};
  EXPECT_EQ(live(), start + 1600);
}

TEST(Saved, TwoTapesThatKeepOneTensorEachCountIt) {
  const Tensor x = full({100}, 2, DType::f64), y = full({100}, 3, DType::f64);
  const std::size_t start = live();
  {
    Tape outer;
    outer.watch(x);
    const Tensor a = tiny::square(x);
    {
      Tape inner;
      inner.watch(x);
      inner.watch(y);
      const Tensor b = tiny::mul(x, y), c = tiny::square(x);
      EXPECT_EQ(inner.saved_bytes(), 1600u);
      EXPECT_EQ(outer.saved_bytes(), 800u);
    }
    outer.backward(a, ones({100}, DType::f64));
    EXPECT_EQ(outer.saved_bytes(), 0u);
  }
  EXPECT_EQ(live(), start);
}

// ---- running out --------------------------------------------------------------------------------

TEST(OutOfMemory, SaysWhatWasAskedWhatIsInUseAndByWhom) {
  const PoolLimit limit(64 * kMiB);
  { const Storage freed = block(3 * kMiB); }
  EXPECT_EQ(pooled(), 3 * kMiB);
  std::vector<Storage> held;
  for (std::size_t n : {2u, 9u, 4u, 7u, 3u, 5u}) held.push_back(block(n * kMiB));
  const MemoryStats before = memory_stats();
  constexpr std::size_t kAbsurd = std::size_t{1} << 60;
  const std::string error = error_of([] { block(kAbsurd); });
  EXPECT_EQ(
      error,
      "memory: out of memory: asked for " + std::to_string(kAbsurd) + " bytes with " + std::to_string(before.live) +
          " in use; the largest tensors hold 9437184, 7340032, 5242880, 4194304, 3145728 bytes; try a smaller batch or "
          "length, or a backward mode that saves less");
  EXPECT_EQ(pooled(), 0u);  // what it kept for reuse was offered first
  EXPECT_EQ(live(), before.live);
  EXPECT_EQ(peak(), before.peak);
  EXPECT_EQ(from_system(), before.from_system);

  held.clear();
  EXPECT_NE(error_of([] { block(kAbsurd); }).find("hold less than 1 MiB each"), std::string::npos);
  const Tensor fine = zeros({1000});
  EXPECT_EQ(fine.to_vector(), std::vector<double>(1000));
}

TEST(OutOfMemory, IsTheSameErrorThroughATensor) {
  EXPECT_EQ(error_of([] { empty({Index{1} << 58}); }).substr(0, 24), "memory: out of memory: a");
  EXPECT_EQ(error_of([] { empty({Index{1} << 61}); }), "usage: empty: 2305843009213693952 x 4 overflows 64 bits");
}

/// A system that counts.
struct Counting {
  static inline int taken = 0, given = 0;
  static Pool::Source source() {
    taken = given = 0;
    return {64, "", [](std::size_t bytes) { return ++taken, new std::byte[bytes]; },
            [](std::byte* p) { ++given, delete[] p; }};
  }
};

TEST(Pool, ARecordingsBlocksServeNobodyElse) {
  Pool pool(Counting::source(), std::size_t{1} << 20);
  const auto old = pool.take(1000);
  pool.give(old, 1000);
  pool.begin_recording();
  const auto kept = pool.take(1000), between = pool.take(2000);
  EXPECT_EQ(kept, old) << "what was free";
  pool.give(between, 2000);
  pool.release();
  EXPECT_EQ(pool.take(2000), between) << "again inside of it, whatever is asked of the pool";
  pool.give(between, 2000);
  const auto recorded = pool.end_recording();
  EXPECT_EQ(pool.stats().pooled, 0U);
  EXPECT_EQ(pool.stats().reserved, 2048U);
  EXPECT_EQ(pool.stats().live, 1000U);

  pool.give(kept, 1000);
  const auto other = pool.take(1000), another = pool.take(2000);
  EXPECT_NE(other, kept);
  EXPECT_NE(another, between);
  pool.release();
  EXPECT_EQ(Counting::given, 0);

  pool.unreserve(recorded);
  EXPECT_EQ(pool.take(1000), kept);
  EXPECT_EQ(pool.take(2000), between);
  for (const auto p : {kept, other}) pool.give(p, 1000);
  for (const auto p : {between, another}) pool.give(p, 2000);
  EXPECT_EQ(pool.stats().live, 0U);
  pool.release();
  EXPECT_EQ(Counting::given, Counting::taken);
}

TEST(Pool, WhatARecordingMayReadIsKeptBack) {
  Pool pool(Counting::source(), std::size_t{1} << 20);
  const auto input = pool.take(1000), scratch = pool.take(1000);
  pool.begin_recording();
  EXPECT_ANY_THROW(pool.begin_recording());
  pool.give(scratch, 1000);  // read before that at most
  EXPECT_EQ(pool.take(1000), scratch);
  const auto recorded = pool.end_recording();
  const auto other = pool.take(1000);
  pool.give(input, 1000);  // a cache lets go of it
  EXPECT_EQ(pool.stats().reserved, 1024U);
  pool.give(other, 1000);
  EXPECT_EQ(pool.take(1000), other) << "came after the recording";
  const auto third = pool.take(1000);
  EXPECT_NE(third, input);

  pool.begin_recording();  // another one: what came before it may be read too
  const auto second = pool.end_recording();
  pool.give(other, 1000);
  const auto fourth = pool.take(1000);
  EXPECT_NE(fourth, other);
  pool.unreserve(recorded);
  EXPECT_EQ(pool.stats().reserved, 2048U);
  pool.unreserve(second);
  EXPECT_EQ(pool.stats().reserved, 0U);
  EXPECT_EQ(pool.stats().pooled, 2048U);
  for (const auto p : {scratch, third, fourth}) pool.give(p, 1000);
  pool.release();
  EXPECT_EQ(Counting::given, Counting::taken);
}

TEST(Pool, ARecordingsTensorsMayOutliveIt) {
  Pool pool(Counting::source(), std::size_t{1} << 20);
  pool.begin_recording();
  const auto kept = pool.take(1000);
  pool.unreserve(pool.end_recording());
  EXPECT_EQ(Counting::given, 0);
  pool.give(kept, 1000);
  EXPECT_EQ(pool.take(1000), kept);
  pool.give(kept, 1000);
  pool.release();
  EXPECT_EQ(Counting::given, 1);
}

TEST(Replay, OnTheCpuRunsTheWork) {
  Replay replay;
  int times = 0;
  for (int i = 0; i < 5; ++i) replay([&] { ++times; });
  EXPECT_EQ(times, 5);
  EXPECT_FALSE(replay.is_recorded());
}

}  // namespace
}  // namespace hilt
