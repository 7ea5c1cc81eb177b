#pragma once
#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include "core/error.h"
#include "core/replay.h"
#include "core/storage.h"

// Private to core: the pool that tensors' memory comes from, one for the CPU and one for each GPU.

namespace hilt {

/// How much a pool may keep: what the environment's variable says, whole bytes, or `otherwise`.
inline std::size_t pool_limit(const char* variable, std::size_t otherwise) {
  const char* const text = std::getenv(variable);
  if (!text) return otherwise;
  std::size_t bytes = 0;
  const char* const end = text + std::strlen(text);
  const auto [last, error] = std::from_chars(text, end, bytes);
  check(*text && last == end && error == std::errc{}, variable, " (", text,
        "): not a number of bytes; 0 keeps nothing");
  return bytes;
}

/// The host whose stream and memory this thread uses on a GPU, while a HostStream lives.
struct Lender {
  Device device;
  void* stream;
  std::shared_ptr<const HostStream::Memory> memory;
};
inline thread_local const Lender* lender = nullptr;

/// Lists of freed blocks by size class, and the counters. Source: take(bytes), null when there is
/// no more; give(pointer); kAlignment; name(), for messages.
template <class Source> class Pool {
 public:
  Pool(Source source, std::size_t limit) : source_(std::move(source)), limit_(limit) {}

  std::byte* take(std::size_t bytes) {
    const std::size_t size = size_class(bytes);
    std::unique_lock lock(mutex_);
    std::byte* p = nullptr;
    auto& list = free_[size];
    if (!list.empty()) {
      p = list.back();
      list.pop_back();
      stats_.pooled -= size;
    } else {
      p = from_system(size);
      ++stats_.from_system;
    }
    try {
      if (recording_) (*recording_)[p] = {size, false};
      if (!recorded_.empty()) younger_.insert(p);
      add_live(bytes);
    } catch (...) {
      if (recording_) recording_->erase(p);
      younger_.erase(p);
      source_.give(p);
      throw;
    }
    return p;
  }

  void give(std::byte* p, std::size_t bytes) noexcept {
    const std::size_t size = size_class(bytes);
    const std::lock_guard lock(mutex_);
    drop_live(bytes);
    for (Recorded& r : recorded_) {
      const auto mine = r.find(p);
      if (&r == recording_ || mine == r.end()) continue;
      mine->second.idle = true;
      stats_.reserved += size;
      return;
    }
    const bool may_be_read = recorded_.size() > (recording_ ? 1 : 0) && younger_.erase(p) == 0;
    if (may_be_read) keep_back(p, size);
    else keep(p, size);
  }

  // Blocks that a recording (core/replay.h) uses are not given to others while it lives: the GPU
  // writes there at each launch. Blocks in use when it began are kept too: it may read them.
  struct Reserved {
    std::size_t size;
    bool idle;  // no tensor's
  };
  using Recorded = std::map<std::byte*, Reserved>;
  void begin_recording() {  // from here on notes what is taken, and returns nothing to the system
    const std::lock_guard lock(mutex_);
    check(!recording_, "Replay: another recording goes on", source_.name());
    recording_ = &recorded_.emplace_back();
    younger_.clear();
  }
  Recorded* end_recording() noexcept {  // reserves what was taken since, given back or not, until unreserve()
    const std::lock_guard lock(mutex_);
    for (auto& [size, list] : free_)
      std::erase_if(list, [&](std::byte* p) {
        const auto mine = recording_->find(p);
        if (mine == recording_->end()) return false;
        stats_.pooled -= mine->second.size, stats_.reserved += mine->second.size;
        return mine->second.idle = true;
      });
    return std::exchange(recording_, nullptr);
  }
  void unreserve(const Recorded* recorded) noexcept {
    const std::lock_guard lock(mutex_);
    for (const auto& [p, block] : *recorded)
      if (block.idle) stats_.reserved -= block.size, keep(p, block.size);
    recorded_.remove_if([&](const Recorded& r) { return &r == recorded; });
    if (!recorded_.empty()) return;
    for (const auto& [p, size] : kept_back_) stats_.reserved -= size, keep(p, size);
    kept_back_.clear(), younger_.clear();
  }

  void borrowed(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    add_live(bytes);
  }
  void returned(std::size_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    drop_live(bytes);
  }

  MemoryStats stats() {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    stats_.peak = stats_.live;
  }
  void saved(std::ptrdiff_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    stats_.saved += static_cast<std::size_t>(bytes);
  }
  void set_limit(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
    if (stats_.pooled > limit_) empty_lists();
  }
  void release() {
    const std::lock_guard lock(mutex_);
    empty_lists();
  }

 private:
  static constexpr std::size_t kLarge = 1 << 20;  // from here on a block is worth naming when memory runs out

  // Sizes are rounded up to one of four steps a power of two (at most 25 % above what was asked),
  // so that a freed block fits the next tensor of about its size.
  static std::size_t size_class(std::size_t bytes) {
    if (bytes <= Source::kAlignment) return Source::kAlignment;
    const std::size_t step = std::max(Source::kAlignment, std::bit_floor(bytes - 1) / 4);
    return (bytes + step - 1) / step * step;
  }

  void keep(std::byte* p, std::size_t size) noexcept {
    if (stats_.pooled + size > limit_ && !recording_) return source_.give(p);
    try {
      free_[size].push_back(p);
      stats_.pooled += size;
    } catch (const std::bad_alloc&) { source_.give(p); }
  }

  void keep_back(std::byte* p, std::size_t size) noexcept {
    try {
      kept_back_.emplace_back(p, size);
      stats_.reserved += size;
    } catch (const std::bad_alloc&) {
      // Lost, rather than written to while the GPU reads it.
    }
  }

  void add_live(std::size_t bytes) {
    if (bytes >= kLarge) large_.insert(bytes);
    stats_.live += bytes;
    stats_.peak = std::max(stats_.peak, stats_.live);
  }
  void drop_live(std::size_t bytes) noexcept {
    if (bytes >= kLarge) large_.erase(large_.find(bytes));
    stats_.live -= bytes;
  }

  std::byte* from_system(std::size_t size) {
    std::byte* p = source_.take(size);
    if (!p && stats_.pooled > 0) {
      empty_lists();
      p = source_.take(size);
    }
    if (!p) out_of_memory(size);
    return p;
  }
  void empty_lists() noexcept {
    if (recording_) return;
    for (auto& [size, list] : free_) {
      for (std::byte* p : list) source_.give(p);
      list.clear();
    }
    stats_.pooled = 0;
  }
  [[noreturn]] void out_of_memory(std::size_t size) {
    std::string largest;
    int named = 0;
    for (auto it = large_.rbegin(); it != large_.rend() && named < 5; ++it, ++named)
      largest += (named ? ", " : "") + std::to_string(*it);
    fail_with(
        Code::memory, "out of memory", source_.name(), ": asked for ", size, " bytes with ", stats_.live, " in use",
        stats_.reserved > 0 ? " and " + std::to_string(stats_.reserved) + " kept for recorded work" : std::string(),
        "; the largest tensors hold ", largest.empty() ? "less than 1 MiB each" : largest + " bytes",
        "; try a smaller batch or length, or a backward mode that saves less");
  }

  Source source_;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;
  std::multiset<std::size_t> large_;
  std::list<Recorded> recorded_;
  Recorded* recording_ = nullptr;                              // the last of them, while it goes on
  std::set<std::byte*> younger_;                               // taken since it began
  std::vector<std::pair<std::byte*, std::size_t>> kept_back_;  // given back since, but older
  MemoryStats stats_;
  std::size_t limit_;
};

}  // namespace hilt
