// Checkpoints: what comes back, what a damaged file says, and that a directory never holds half of
// one.
#include "nn/checkpoint.h"
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <filesystem>
#include "../support/error_of.h"
#include "../support/scale.h"
#include "../support/temporary.h"

namespace hilt {
namespace {

/// Counts the moments of this process at which a file changes; it is killed at the one that makes
/// it 0. A write has two: before it, and when half of it is done.
long moments_left = 0;
void moment() {
  if (moments_left > 0 && --moments_left == 0) ::kill(::getpid(), SIGKILL);
}

}  // namespace
}  // namespace hilt

// The C library's own names: these stand before its own in this binary.
extern "C" {
ssize_t write(int file, const void* from, size_t bytes) {
  hilt::moment();
  if (hilt::moments_left == 1) (void)!::syscall(SYS_write, file, from, bytes / 2);
  hilt::moment();
  return ::syscall(SYS_write, file, from, bytes);
}
int fsync(int file) {
  hilt::moment();
  return static_cast<int>(::syscall(SYS_fsync, file));
}
int rename(const char* from, const char* to) noexcept {
  hilt::moment();
  return ::renameat(AT_FDCWD, from, AT_FDCWD, to);
}
int unlink(const char* path) noexcept {
  hilt::moment();
  return ::unlinkat(AT_FDCWD, path, 0);
}
}

namespace hilt {
namespace {

std::vector<SafetensorsItem> items(double at = 1) {
  return {
      {"model.w", full({3, 5}, at)}, {"model.b", full({5}, at + 1, DType::bf16)}, {"optimizer.w.m", full({3, 5}, -at)}};
}
const SafetensorsMetadata kMetadata{{"config.lr", "0.001"}, {"rows", "77"}, {"vocabulary", "characters:\n\"\\\u20ac"}};

std::string path_in(const Temporary& dir, Index step) { return dir.path(checkpoint_name(step)); }
std::string without(const Temporary& dir, std::string text) {
  for (std::size_t at; (at = text.find(dir.directory() + "/")) != text.npos;)
    text.erase(at, dir.directory().size() + 1);
  return text;
}

TEST(Checkpoint, ComesBackWhole) {
  const Temporary dir;
  save_checkpoint(dir.directory(), 100, items(3), kMetadata, 2);
  EXPECT_EQ(dir.names(), std::vector<std::string>{"ckpt-000100.safetensors"});
  const Checkpoint c(path_in(dir, 100));
  EXPECT_EQ(c.step(), 100);
  EXPECT_EQ(c.get_number("rows"), 77u);
  EXPECT_EQ(c.get("vocabulary"), kMetadata.at("vocabulary"));
  std::vector<SafetensorsItem> back = items(0);
  c.read(back);
  const std::vector<SafetensorsItem> expected = items(3);
  for (std::size_t i = 0; i < back.size(); ++i)
    EXPECT_EQ(back[i].tensor.to_vector(), expected[i].tensor.to_vector()) << back[i].name;
  struct stat status {};
  ASSERT_EQ(::stat(path_in(dir, 100).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST(Checkpoint, CountsWhatCanBeCounted) {
  const Temporary dir;
  save_checkpoint(dir.directory(), 1, items(), {{"rows", "18446744073709551615"}, {"next", "9223372036854775807"}}, 2);
  const Checkpoint c(path_in(dir, 1));
  EXPECT_EQ(c.get_number("rows"), ~std::uint64_t{0});
  EXPECT_EQ(without(dir, error_of([&] { (void)c.get_index("rows"); })),
            "data: ckpt-000001.safetensors: metadata 'rows' is 18446744073709551615, more than anything is counted to");
  EXPECT_EQ(without(dir, error_of([&] { (void)c.get_index("next"); })),  // nothing could come after it
            "data: ckpt-000001.safetensors: metadata 'next' is 9223372036854775807, more than anything is counted to");
}

TEST(Checkpoint, EqualStatesAreEqualFiles) {
  const Temporary a, b;
  save_checkpoint(a.directory(), 5, items(), kMetadata, 2);
  save_checkpoint(b.directory(), 5, items(), kMetadata, 2);
  EXPECT_EQ(a.content(checkpoint_name(5)), b.content(checkpoint_name(5)));
}

TEST(Checkpoint, TheOldestGo) {
  const Temporary dir;
  for (const Index step : {1, 2, 3, 10, 1234567}) save_checkpoint(dir.directory(), step, items(), {}, 3);
  EXPECT_EQ(checkpoint_steps(dir.directory()), (std::vector<Index>{3, 10, 1234567}));
  save_checkpoint(dir.directory(), 1234568, items(), {}, 0);  // fewer than two are never kept
  EXPECT_EQ(checkpoint_steps(dir.directory()), (std::vector<Index>{1234567, 1234568}));
  for (const char* name : {"ckpt--00001.safetensors", "ckpt-18446744073709551615.safetensors"}) dir.file(name, "");
  EXPECT_EQ(checkpoint_steps(dir.directory()).size(), 2u);
  for (const char* name : {"ckpt--00001.safetensors", "ckpt-18446744073709551615.safetensors"})
    std::filesystem::remove(dir.path(name));
  dir.file("ckpt-5.safetensors", ""), dir.file("ckpt-000007.tmp.12345678", "half"), dir.file("other", "");
  dir.file("tokens-1.tmp.12345678", "");                    // no checkpoint
  EXPECT_EQ(checkpoint_steps(dir.directory()).size(), 2u);  // only names that we would give
  remove_unfinished_checkpoints(dir.directory());
  EXPECT_EQ(dir.names(), (std::vector<std::string>{"ckpt-1234567.safetensors", "ckpt-1234568.safetensors",
                                                   "ckpt-5.safetensors", "other", "tokens-1.tmp.12345678"}));
  EXPECT_TRUE(checkpoint_steps(dir.path("none")).empty());
}

TEST(Checkpoint, EveryFlippedBitIsNoticedAndNothingIsTaken) {
  const Temporary dir;
  save_checkpoint(dir.directory(), 1, items(3), kMetadata, 2);
  const std::string whole = dir.content(checkpoint_name(1));
  const std::string path = path_in(dir, 1);
  Index refused = 0, named = 0;
  const std::size_t step = scaled<std::size_t>(1, 7);
  for (std::size_t i = 0; i < whole.size(); i += step) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << i % 8));
    dir.file(checkpoint_name(1), damaged);
    std::vector<SafetensorsItem> back = items(0);
    const std::string why = error_of([&] { Checkpoint(path).read(back); });
    // A blank of the header's padding carries nothing, but strict readers may refuse it too.
    ASSERT_TRUE(why.starts_with("data: ")) << "byte " << i << ": " << why;
    ++refused;
    named += why.find("does not match its checksum") != why.npos;
    for (const SafetensorsItem& item : back)
      ASSERT_EQ(item.tensor.to_vector(), items(0)[static_cast<std::size_t>(&item - back.data())].tensor.to_vector());
  }
  EXPECT_GE(named, Index(2 * 15 * 4 / static_cast<Index>(step)));
  std::printf("[ flips    ] %lld flipped bits, all refused\n", static_cast<long long>(refused));
  std::string last = whole;
  last.back() = static_cast<char>(last.back() ^ 1);
  dir.file(checkpoint_name(1), last);
  std::vector<SafetensorsItem> back = items(0);
  EXPECT_EQ(without(dir, error_of([&] { Checkpoint(path).read(back); })),
            "data: ckpt-000001.safetensors: damaged: tensor optimizer.w.m, bytes " + std::to_string(whole.size() - 60) +
                ".." + std::to_string(whole.size()) + ", does not match its checksum; use an earlier checkpoint");
}

TEST(Checkpoint, ADamagedOneNamesTheNewestWholeOneBeforeIt) {
  const Temporary dir;
  for (Index step = 1; step <= 4; ++step) save_checkpoint(dir.directory(), step, items(3), kMetadata, 4);
  const std::string whole = dir.content(checkpoint_name(4));
  const auto way_out = [&](Index from) {
    return "; " + checkpoint_name(from) +
           " beside it is whole: to go on from there, move ckpt-000004.safetensors away and resume";
  };
  std::string flipped = whole;
  flipped.back() = static_cast<char>(flipped.back() ^ 1);
  for (const std::string& content : {std::string(), whole.substr(0, 100), flipped}) {
    dir.file(checkpoint_name(4), content);
    std::vector<SafetensorsItem> back = items(0);
    const auto why = [&] { return without(dir, error_of([&] { Checkpoint(path_in(dir, 4)).read(back); })); };
    dir.file(checkpoint_name(3), whole);
    EXPECT_TRUE(why().ends_with(way_out(3))) << why();
    dir.file(checkpoint_name(3), flipped);
    EXPECT_TRUE(why().ends_with(way_out(2))) << why();
  }
}

TEST(Checkpoint, TheBestStaysAndADamagedOneNamesTheNewestWholeOne) {
  const Temporary dir;
  save_best_checkpoint(dir.directory(), 1, items(1), kMetadata);
  for (Index step = 2; step <= 5; ++step) save_checkpoint(dir.directory(), step, items(3), kMetadata, 2);
  const std::string path = dir.directory() + '/' + kBestCheckpoint;
  EXPECT_EQ(Checkpoint(path).step(), 1);
  EXPECT_EQ(checkpoint_steps(dir.directory()), (std::vector<Index>{4, 5}));
  dir.file(kBestCheckpoint, dir.content(kBestCheckpoint).substr(0, 100));
  EXPECT_TRUE(error_of([&] { Checkpoint{path}; })
                  .ends_with("; ckpt-000005.safetensors beside it is whole: to go on from "
                             "there, move " +
                             path + " away and resume"));
}

TEST(Checkpoint, TruncatedAndExtendedFilesAreRefused) {
  const Temporary dir;
  save_checkpoint(dir.directory(), 1, items(3), kMetadata, 2);
  const std::string whole = dir.content(checkpoint_name(1));
  for (std::size_t n = 0; n < whole.size(); n += scaled<std::size_t>(1, 11)) {
    dir.file(checkpoint_name(1), whole.substr(0, n));
    ASSERT_TRUE(error_of([&] { Checkpoint c(path_in(dir, 1)); }).starts_with("data: ")) << n;
  }
  dir.file(checkpoint_name(1), whole + 'x');
  EXPECT_TRUE(error_of([&] { Checkpoint c(path_in(dir, 1)); }).starts_with("data: "));
}

TEST(Checkpoint, WhatDoesNotFitIsNamed) {
  const Temporary dir;
  save_checkpoint(dir.directory(), 1, items(3), kMetadata, 2);
  const Checkpoint c(path_in(dir, 1));
  const auto refusal = [&](std::vector<SafetensorsItem> wanted, const std::string& prefix = "") {
    return without(dir, error_of([&] { c.read(wanted, prefix); }));
  };
  std::vector<SafetensorsItem> all = items(0);
  EXPECT_EQ(refusal({all[0], all[1]}),
            "data: ckpt-000001.safetensors: holds a tensor that this model has not: optimizer.w.m f32[3, 5]");
  EXPECT_EQ(refusal({all[0], all[1]}, "model."), "nothing");
  EXPECT_EQ(refusal({all[0], all[1], all[2], {"model.c", full({2}, 0)}}),
            "data: ckpt-000001.safetensors: lacks the tensor model.c f32[2]");
  all[0].tensor = full({5, 3}, 0);
  EXPECT_EQ(refusal(all), "data: ckpt-000001.safetensors: tensor model.w is f32[3, 5], expected f32[5, 3]");
  all[0].tensor = full({3, 5}, 0, DType::f64);
  EXPECT_EQ(refusal(all), "data: ckpt-000001.safetensors: tensor model.w is f32[3, 5], expected f64[3, 5]");
  EXPECT_EQ(without(dir, error_of([&] { c.get("nothing"); })),
            "data: ckpt-000001.safetensors: its metadata lack 'nothing'");
  EXPECT_EQ(without(dir, error_of([&] { c.get_number("config.lr"); })),
            "data: ckpt-000001.safetensors: metadata 'config.lr' should be a whole number, is '0.001'");
  EXPECT_EQ(differences(c.file().metadata(), "config.", {{"lr", "0.002"}, {"width", "8"}}),
            (std::vector<std::string>{"lr: 0.001 in the checkpoint, 0.002 asked for",
                                      "width: unknown to the checkpoint, 8 asked for"}));
  EXPECT_EQ(differences(c.file().metadata(), "config.", {}),
            std::vector<std::string>{"lr: 0.001 in the checkpoint, unknown here"});
}

TEST(Checkpoint, AFullDiskLeavesTheDirectoryAsItWas) {
  const Temporary dir;
  save_checkpoint(dir.directory(), 1, items(), kMetadata, 2);
  const std::string before = dir.content(checkpoint_name(1));
  const auto old = ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  for (const rlim_t bytes : {0u, 100u, 600u}) {
    const rlimit small{bytes, limit.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
    const std::string why = error_of([&] { save_checkpoint(dir.directory(), 2, items(), kMetadata, 2); });
    ::setrlimit(RLIMIT_FSIZE, &limit);
    EXPECT_TRUE(why.starts_with("data: ") && why.find("File too large") != why.npos) << why;
    EXPECT_EQ(dir.names(), std::vector<std::string>{checkpoint_name(1)});
    EXPECT_EQ(dir.content(checkpoint_name(1)), before);
  }
  ::signal(SIGXFSZ, old);
  EXPECT_TRUE(error_of([&] {
                save_checkpoint(dir.path("none"), 2, items(), kMetadata, 2);
              }).find("No such file or directory") != std::string::npos);
}

TEST(DirectoryLock, IsHeldByOneAndEndsWithItsProcess) {
  const Temporary dir;
  {
    const DirectoryLock lock(dir.directory());
    EXPECT_EQ(error_of([&] { DirectoryLock second(dir.directory()); }),
              "data: " + dir.directory() +
                  ": another program writes to this directory; wait for it or name another directory");
  }
  const DirectoryLock again(dir.directory());
  EXPECT_EQ(
      error_of([&] { DirectoryLock none(dir.path("none")); }),
      "data: " + dir.path("none") + ": cannot open: No such file or directory; name a directory you may write to");
}

// A child saves two checkpoints and is killed at its first file call, its second, and so on, until
// it lives to the end. Whatever is found is whole, and two checkpoints are there at every moment.
TEST(Checkpoint, KilledWritersLeaveWholeFilesOnly) {
  const std::vector<SafetensorsItem> big{{"w", full({64, 1024}, 1)}, {"m", full({64, 1024}, 2)}};
  Index found = 0, unfinished = 0, removed = 0;
  long moment = 1;
  for (int status = SIGKILL; WIFSIGNALED(status); ++moment) {
    const Temporary dir;
    for (Index step : {1, 2}) save_checkpoint(dir.directory(), step, big, kMetadata, 2);
    const pid_t pid = ::fork();
    if (pid == 0) {
      moments_left = moment;
      for (Index step : {3, 4})
        if (error_of([&] { save_checkpoint(dir.directory(), step, big, kMetadata, 2); }) != "nothing") ::_exit(1);
      ::_exit(0);
    }
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0) << "moment " << moment;
    for (const Index step : checkpoint_steps(dir.directory())) {
      std::vector<SafetensorsItem> back{{"w", full({64, 1024}, 0)}, {"m", full({64, 1024}, 0)}};
      ASSERT_EQ(error_of([&] { Checkpoint(path_in(dir, step)).read(back); }), "nothing") << "moment " << moment;
      ++found;
    }
    for (const std::string& name : dir.names()) unfinished += name.find(".tmp.") != name.npos;
    remove_unfinished_checkpoints(dir.directory());
    const std::vector<Index> steps = checkpoint_steps(dir.directory());
    ASSERT_EQ(dir.names().size(), steps.size()) << "moment " << moment;
    ASSERT_GE(steps.size(), 2u) << "moment " << moment;
    removed += steps.front() > 1;
    if (!WIFSIGNALED(status)) { EXPECT_EQ(steps, (std::vector<Index>{3, 4})); }
  }
  std::printf("[ kills    ] %ld writers killed, %lld of them while writing; %lld checkpoints read, all whole\n",
              moment - 2, static_cast<long long>(unfinished), static_cast<long long>(found));
  // Each save writes twice at least, syncs, renames and removes: were the calls not seen, none
  // would be killed.
  EXPECT_GE(unfinished, 2 * 6);
  EXPECT_GE(removed, 6);
}

}  // namespace
}  // namespace hilt
