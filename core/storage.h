#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include "device.h"
#include "error.h"

namespace [[gnu::visibility("default")]] hilt {

/// What the process holds, in bytes of tensor data. Counters are exact, and free to read.
struct MemoryStats {
  std::size_t live = 0;         // reachable through some Storage
  std::size_t peak = 0;         // highest `live` since reset_memory_peak()
  std::size_t pooled = 0;       // freed, kept for reuse; but small blocks, which threads keep, are not counted
  std::size_t reserved = 0;     // freed, kept for work that was recorded (Replay)
  std::size_t from_system = 0;  // times the pool had to ask the operating system; steady work adds none
};
MemoryStats memory_stats(Device device = {});  // of a device, as of now
void reset_memory_peak(Device device = {});    // `peak` begins anew at `live`
/// `live` and `peak` of the CPU memory that this thread alone took and gave back since the reset.
MemoryStats thread_memory_stats();
void reset_thread_memory_stats();  // both begin anew at 0
/// Bytes the pool may keep for reuse; 0 returns memory at once. Default 4 GiB, or HILT_POOL_BYTES;
/// on a GPU all that was freed, or HILT_GPU_POOL_BYTES.
void set_pool_limit(std::size_t bytes, Device device = {});
void release_pool(Device device = {});  // returns what the pool keeps to the operating system

namespace detail {
/// Small blocks, as each op makes anew: the thread that gives one back keeps it for whoever asks
/// next. give_block() is told the size that was asked for.
inline constexpr std::size_t kBlockAlignment = 64;
void* take_block(std::size_t bytes);
void give_block(void* block, std::size_t bytes) noexcept;
template <class T> struct Recycled {  // an allocator of them
  using value_type = T;
  Recycled() = default;
  template <class U> Recycled(const Recycled<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(take_block(n * sizeof(T))); }
  void deallocate(T* p, std::size_t n) noexcept { give_block(p, n * sizeof(T)); }
  friend bool operator==(const Recycled&, const Recycled&) { return true; }
};
template <class T> using List = std::vector<T, Recycled<T>>;
}  // namespace detail

struct StorageBlock {         // the control record behind a Storage; here because its accessors are on every op's path
  std::byte* data = nullptr;  // null where bytes is 0
  std::size_t bytes = 0;      // usable from data on
  Device device;
  std::atomic<std::uint64_t> version{0};  // counts mutable_data()
  bool pooled = false, small = false;     // to be given back to the pool; a small block
  bool constant = false;                  // borrowed for reading alone
  std::function<void()> release;          // called at the end of memory that was borrowed

  StorageBlock() = default;
  StorageBlock(const StorageBlock&) = delete;
  StorageBlock& operator=(const StorageBlock&) = delete;
  ~StorageBlock();
};

/// A shared block of bytes on one device, 64-byte aligned. Copies share it; the last one frees it.
class Storage {
 public:
  Storage() = default;
  static Storage allocate(std::size_t bytes, Device device);  // from the pool; not initialized. Throws Code::memory
  /// Memory that stays the caller's: `release` runs once the last Storage on it is gone. Constant:
  /// for reading alone, and mutable_data() throws Code::usage.
  static Storage borrow(void* data, std::size_t bytes, Device device, std::function<void()> release,
                        bool constant = false);

  const std::byte* data() const { return block_->data; }  // for reading
  std::byte* mutable_data() {                             // for writing: raises version()
    check(!block_->constant, "Storage: this memory was lent for reading alone; write to a clone()");
    block_->version.store(version() + 1, std::memory_order_relaxed);
    return block_->data;
  }
  std::size_t bytes() const { return block_->bytes; }  // as asked for
  Device device() const { return block_->device; }
  /// Rises with every mutable_data(). A saved tensor whose version moved is stale.
  std::uint64_t version() const { return block_->version.load(std::memory_order_relaxed); }
  bool is_sole_owner() const { return block_.use_count() == 1; }  // no other Storage shares it
  explicit operator bool() const { return block_ != nullptr; }
  friend bool operator==(const Storage&, const Storage&) = default;

 private:
  explicit Storage(std::shared_ptr<StorageBlock> block) : block_(std::move(block)) {}
  std::shared_ptr<StorageBlock> block_;
};

}  // namespace hilt
