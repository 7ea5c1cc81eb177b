#include "core/storage.h"
#include <sys/mman.h>
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>
#include "core/error.h"

namespace hilt {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kLarge = std::size_t{1} << 20;  // from here on a block is worth naming when memory runs out
constexpr std::size_t kDefaultLimit = std::size_t{4} << 30;

// Sizes are rounded up to one of four steps a power of two (at most 25 % above what was asked), so that a
// freed block fits the next tensor of about its size.
std::size_t size_class(std::size_t bytes) {
  if (bytes <= kAlignment) return kAlignment;
  const std::size_t step = std::max(kAlignment, std::bit_floor(bytes - 1) / 4);
  return (bytes + step - 1) / step * step;
}

/// One for the process: lists of freed blocks by size class, and the counters.
class CpuPool {
 public:
  CpuPool() {
    if (const char* text = std::getenv("HILT_POOL_BYTES")) limit_ = std::strtoull(text, nullptr, 10);
  }

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
    add_live(bytes);
    return p;
  }

  void give(std::byte* p, std::size_t bytes) noexcept {
    const std::size_t size = size_class(bytes);
    const std::lock_guard lock(mutex_);
    drop_live(bytes);
    if (stats_.pooled + size > limit_) return to_system(p, size);
    try {
      free_[size].push_back(p);
      stats_.pooled += size;
    } catch (const std::bad_alloc&) {
      to_system(p, size);
    }
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
    void* p = ::operator new(size, std::align_val_t{kAlignment}, std::nothrow);
    if (!p && stats_.pooled > 0) {
      empty_lists();
      p = ::operator new(size, std::align_val_t{kAlignment}, std::nothrow);
    }
    if (!p) out_of_memory(size);
    if (size >= 2 * kLarge) ::madvise(p, size, MADV_HUGEPAGE);  // a hint: fewer page faults and TLB misses
    return static_cast<std::byte*>(p);
  }
  static void to_system(std::byte* p, std::size_t) noexcept { ::operator delete(p, std::align_val_t{kAlignment}); }
  void empty_lists() noexcept {
    for (auto& [size, list] : free_) {
      for (std::byte* p : list) to_system(p, size);
      list.clear();
    }
    stats_.pooled = 0;
  }
  [[noreturn]] void out_of_memory(std::size_t size) {
    std::string largest;
    int named = 0;
    for (auto it = large_.rbegin(); it != large_.rend() && named < 5; ++it, ++named)
      largest += (named ? ", " : "") + std::to_string(*it);
    fail_with(Code::memory, "out of memory: asked for ", size, " bytes with ", stats_.live,
              " in use; the largest tensors hold ", largest.empty() ? "less than 1 MiB each" : largest,
              " bytes; try a smaller batch or length, or a backward mode that saves less");
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;
  std::multiset<std::size_t> large_;
  MemoryStats stats_;
  std::size_t limit_ = kDefaultLimit;
};

// Never destroyed: tensors in static variables may outlive every other object of the process.
CpuPool& pool() {
  static CpuPool* const p = new CpuPool;
  return *p;
}

}  // namespace

MemoryStats memory_stats(Device device) {
  check(device.is_cpu(), "memory_stats: built without CUDA, asked for ", device);
  return pool().stats();
}
void reset_memory_peak(Device device) {
  check(device.is_cpu(), "reset_memory_peak: built without CUDA, asked for ", device);
  pool().reset_peak();
}
void set_pool_limit(std::size_t bytes) { pool().set_limit(bytes); }
void release_pool() { pool().release(); }

StorageBlock::~StorageBlock() {
  if (pooled) pool().give(data, bytes);
  else if (device.is_cpu() && data) pool().returned(bytes);
  if (release) release();
}

Storage Storage::allocate(std::size_t bytes, Device device) {
  check(device.is_cpu(), "Storage: built without CUDA, asked for ", device);
  auto block = std::make_shared<StorageBlock>();
  block->data = pool().take(bytes);
  block->bytes = bytes;
  block->pooled = true;
  Storage s;
  s.block_ = std::move(block);
  return s;
}

Storage Storage::borrow(void* data, std::size_t bytes, Device device, std::function<void()> release) {
  check(data || bytes == 0, "Storage: borrowing ", bytes, " bytes at a null pointer");
  auto block = std::make_shared<StorageBlock>();
  if (device.is_cpu() && data) pool().borrowed(bytes);
  block->data = static_cast<std::byte*>(data);
  block->bytes = bytes;
  block->device = device;
  block->release = std::move(release);
  Storage s;
  s.block_ = std::move(block);
  return s;
}

Storage::Hold::Hold(const Storage& s) : block_(s.block_) {
  if (block_ && block_->holds.fetch_add(1) == 0) pool().saved(static_cast<std::ptrdiff_t>(block_->bytes));
}
void Storage::Hold::drop() noexcept {
  if (block_ && block_->holds.fetch_sub(1) == 1) pool().saved(-static_cast<std::ptrdiff_t>(block_->bytes));
  block_.reset();
}
Storage::Hold& Storage::Hold::operator=(Hold&& other) noexcept {
  if (this != &other) {
    drop();
    block_ = std::move(other.block_);
  }
  return *this;
}
Storage::Hold::~Hold() { drop(); }

}  // namespace hilt
