#pragma once
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include "core/error.h"
#include "core/replay.h"
#include "core/shape.h"
#include "core/storage.h"

// Private to core: the pool that tensors' memory comes from, one for the CPU and one for each GPU.

namespace hilt {

/// How much a pool may keep: what the environment's variable says, whole bytes, or `otherwise`.
inline std::size_t pool_limit(const char* variable, std::size_t otherwise) {
  const char* const text = std::getenv(variable);
  if (!text) return otherwise;
  const auto bytes = number_in<std::size_t>(text);
  check(bytes.has_value(), variable, " (", text, "): not a number of bytes; 0 keeps nothing");
  return *bytes;
}

/// The host whose stream and memory this thread uses on a GPU, while a HostStream lives.
struct Lender {
  Device device;
  void* stream;
  std::shared_ptr<const HostStream::Memory> memory;
};
inline thread_local const Lender* lender = nullptr;

class Shelf {  // freed blocks by their size
 public:
  std::byte* take(std::size_t size) {  // null where there is none
    std::vector<std::byte*>& blocks = blocks_[size];
    if (blocks.empty()) return nullptr;
    std::byte* const p = blocks.back();
    return blocks.pop_back(), p;
  }
  bool put(std::byte* p, std::size_t size) noexcept try {
    return blocks_[size].push_back(p), true;
  } catch (const std::bad_alloc&) { return false; }
  template <class F> void clear(F f) {  // f(block, size) for each
    for (auto& [size, blocks] : std::exchange(blocks_, {}))
      for (std::byte* p : blocks) f(p, size);
  }

 private:
  std::map<std::size_t, std::vector<std::byte*>> blocks_;
};

/// The freed blocks of a device, and the counters.
class Pool {
 public:
  struct Source {                                 // where blocks come from, and go in the end
    std::size_t alignment;                        // of blocks
    std::string place;                            // for messages
    std::function<std::byte*(std::size_t)> take;  // null where there is no more
    std::function<void(std::byte*)> give;
  };
  Pool(Source source, std::size_t limit) : source_(std::move(source)), limit_(limit) {}

  std::byte* take(std::size_t bytes) {
    const std::size_t size = size_class(bytes);
    const std::lock_guard lock(mutex_);
    std::byte* p = recording_ ? recording_->take(size) : nullptr;
    if (p) stats_.reserved -= size;
    else if ((p = free_.take(size))) stats_.pooled -= size;
    else p = from_system(size);
    try {
      if (!recordings_.empty()) owners_[p] = recording_;
      if (bytes >= kLarge) large_.insert(bytes);
    } catch (...) {
      owners_.erase(p);
      source_.give(p);
      throw;
    }
    add_live(bytes);
    return p;
  }

  void give(std::byte* p, std::size_t bytes) noexcept {
    const std::size_t size = size_class(bytes);
    const std::lock_guard lock(mutex_);
    drop_live(bytes);
    if (bytes >= kLarge) large_.erase(large_.find(bytes));
    const auto found = owners_.find(p);
    const bool known = found != owners_.end();
    if (known && found->second) return reserve(*found->second, p, size);
    if (!known && recordings_.size() > (recording_ ? 1 : 0)) return reserve(older_, p, size);
    if (known) owners_.erase(found);
    keep(p, size);
  }

  // Blocks that a recording (core/replay.h) uses are not given to others while it lives: the GPU
  // writes there at each launch. Blocks in use when it began are kept too: it may read them.
  void begin_recording() {  // what is taken from here on is the recording's; nothing is returned to the system
    const std::lock_guard lock(mutex_);
    check(!recording_, "Replay: another recording goes on", source_.place);
    recording_ = &recordings_.emplace_back();
    std::erase_if(owners_, [](const auto& block) { return !block.second; });
  }
  Shelf* end_recording() noexcept {  // what was taken since stays reserved, given back or not, until unreserve()
    const std::lock_guard lock(mutex_);
    return std::exchange(recording_, nullptr);
  }
  void unreserve(Shelf* recording) noexcept {
    const std::lock_guard lock(mutex_);
    release(*recording);
    for (auto& [p, of] : owners_)
      if (of == recording) of = nullptr;
    recordings_.remove_if([&](const Shelf& r) { return &r == recording; });
    if (recordings_.empty()) release(older_), owners_.clear();
  }

  // Memory that is counted here, and may come from elsewhere.
  void add_live(std::size_t bytes) noexcept {
    const std::size_t now = live_.fetch_add(bytes) + bytes;
    for (std::size_t peak = peak_; peak < now && !peak_.compare_exchange_weak(peak, now);) {}
  }
  void drop_live(std::size_t bytes) noexcept { live_ -= bytes; }

  MemoryStats stats() {
    const std::lock_guard lock(mutex_);
    stats_.live = live_, stats_.peak = peak_;
    return stats_;
  }
  void reset_peak() { peak_ = live_.load(); }
  bool keeps() const { return limit_ > 0; }
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
  std::size_t size_class(std::size_t bytes) const {
    if (bytes <= source_.alignment) return source_.alignment;
    const std::size_t step = std::max(source_.alignment, std::bit_floor(bytes - 1) / 4);
    return (bytes + step - 1) / step * step;
  }

  void keep(std::byte* p, std::size_t size) noexcept {
    const bool fits = stats_.pooled + size <= limit_ || recording_;
    if (fits && free_.put(p, size)) stats_.pooled += size;
    else source_.give(p);
  }
  /// Where there is no memory to note it, it is lost: none may write to it while the GPU reads it.
  void reserve(Shelf& of, std::byte* p, std::size_t size) noexcept {
    if (of.put(p, size)) stats_.reserved += size;
  }
  void release(Shelf& reserved) noexcept {
    reserved.clear([&](std::byte* p, std::size_t size) {
      owners_.erase(p);
      stats_.reserved -= size, keep(p, size);
    });
  }

  std::byte* from_system(std::size_t size) {
    std::byte* p = source_.take(size);
    if (!p && stats_.pooled > 0) {
      empty_lists();
      p = source_.take(size);
    }
    if (!p) out_of_memory(size);
    ++stats_.from_system;
    return p;
  }
  void empty_lists() noexcept {
    if (recording_) return;
    free_.clear([&](std::byte* p, std::size_t) { source_.give(p); });
    stats_.pooled = 0;
  }
  [[noreturn]] void out_of_memory(std::size_t size) {
    std::string largest;
    int named = 0;
    for (auto it = large_.rbegin(); it != large_.rend() && named < 5; ++it, ++named)
      largest += (named ? ", " : "") + std::to_string(*it);
    fail_with(
        Code::memory, "out of memory", source_.place, ": asked for ", size, " bytes with ", live_.load(), " in use",
        stats_.reserved > 0 ? " and " + std::to_string(stats_.reserved) + " kept for recorded work" : std::string(),
        "; the largest tensors hold ", largest.empty() ? "less than 1 MiB each" : largest + " bytes",
        "; try a smaller batch or length, or a backward mode that saves less");
  }

  Source source_;
  std::mutex mutex_;
  Shelf free_;
  std::multiset<std::size_t> large_;  // of what is live
  std::list<Shelf> recordings_;       // what was given back of their blocks
  Shelf* recording_ = nullptr;        // the last of them, while it goes on
  /// Whose a block is that was taken for a recording, or since the last one began: then null.
  std::map<std::byte*, Shelf*> owners_;
  Shelf older_;  // what was given back but taken before the last recording began: some recording may read it
  std::atomic<std::size_t> live_{0}, peak_{0};
  MemoryStats stats_;  // but for these two
  std::atomic<std::size_t> limit_;
};

}  // namespace hilt
