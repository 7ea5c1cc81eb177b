// Memory of tensors: taken from the pool of its device, counted, and given back by the last owner.
#include "core/storage.h"
#include <sys/mman.h>
#include "core/config.h"
#include "core/cuda/context.h"
#include "core/pool.h"

namespace hilt {
namespace {

// Small blocks, in powers of two from kBlockAlignment on, and what a thread keeps of each: bytes.
constexpr std::size_t kSizes = 9;
constexpr std::align_val_t kAligned{detail::kBlockAlignment};
#ifdef __SANITIZE_ADDRESS__
constexpr std::size_t kMostKept = 0;  // it is to see who uses what was given back
#else
constexpr std::size_t kMostKept = 128 << 10;
#endif
constinit thread_local struct Kept {  // plain, so that it is there at once and to the end of a thread
  std::array<void*, kSizes> first;    // each begins with the address of the next
  std::array<std::size_t, kSizes> bytes;
  void clear(std::size_t as_if) {
    for (void* block : std::exchange(first, {}))
      while (block) ::operator delete(std::exchange(block, *static_cast<void**>(block)), kAligned);
    bytes.fill(as_if);
  }
} kept{};
std::size_t size_of_block(std::size_t bytes) {
  return static_cast<std::size_t>(std::bit_width((bytes - (bytes > 0)) / detail::kBlockAlignment));
}

constexpr std::size_t kHuge = std::size_t{2} << 20;  // a page of the larger sort

std::byte* take_from_heap(std::size_t bytes) {
  void* const p = ::operator new(bytes, kAligned, std::nothrow);
  if (p && bytes >= kHuge) {  // a hint, which whole pages alone take: fewer page faults and TLB misses
    constexpr std::size_t kPage = 4096;
    const std::size_t skipped = -reinterpret_cast<std::uintptr_t>(p) % kPage;
    ::madvise(static_cast<std::byte*>(p) + skipped, bytes - skipped, MADV_HUGEPAGE);
  }
  return static_cast<std::byte*>(p);
}
void give_to_heap(std::byte* p) { ::operator delete(p, kAligned); }

Pool& pool_of(const char* what, Device device) {
  if constexpr (kHasCuda)
    if (device.is_cuda()) return cuda::pool(device.index);
  check(device.is_cpu(), what, ": built without CUDA, asked for ", device);
  // Never destroyed: tensors in static variables may outlive every other object of the process.
  static Pool* const p = new Pool({detail::kBlockAlignment, "", take_from_heap, give_to_heap},
                                  pool_limit("HILT_POOL_BYTES", std::size_t{4} << 30));
  return *p;
}

constexpr std::size_t kSmall = detail::kBlockAlignment << (kSizes - 1);  // on a CPU tensors are such blocks too

/// A thread's own counts. `live` is negative where a thread gives back what another took.
struct Mine {
  std::ptrdiff_t live = 0, peak = 0;
};
thread_local Mine mine;

}  // namespace

void* detail::take_block(std::size_t bytes) {
  const std::size_t size = size_of_block(bytes), all = kBlockAlignment << size;
  Kept& its = kept;
  if (size >= kSizes || !its.first[size]) return ::operator new(all, kAligned);
  its.bytes[size] -= all;
  return std::exchange(its.first[size], *static_cast<void**>(its.first[size]));
}
void detail::give_block(void* p, std::size_t bytes) noexcept {
  thread_local const struct AtTheEnd {
    ~AtTheEnd() { kept.clear(kMostKept); }
  } keeps_no_more;
  const std::size_t size = size_of_block(bytes), all = kBlockAlignment << size;
  Kept& its = kept;
  if (size >= kSizes || its.bytes[size] >= kMostKept) return ::operator delete(p, kAligned);
  its.bytes[size] += all;
  *static_cast<void**>(p) = std::exchange(its.first[size], p);
}

MemoryStats memory_stats(Device device) { return pool_of("memory_stats", device).stats(); }
void reset_memory_peak(Device device) { pool_of("reset_memory_peak", device).reset_peak(); }
MemoryStats thread_memory_stats() {
  MemoryStats s;
  s.live = static_cast<std::size_t>(std::max<std::ptrdiff_t>(mine.live, 0));
  s.peak = static_cast<std::size_t>(std::max<std::ptrdiff_t>(mine.peak, 0));
  return s;
}
void reset_thread_memory_stats() { mine = {}; }
void set_pool_limit(std::size_t bytes, Device device) { pool_of("set_pool_limit", device).set_limit(bytes); }
void release_pool(Device device) {
  pool_of("release_pool", device).release();
  if (device.is_cpu()) kept.clear(0);
}

StorageBlock::~StorageBlock() {
  if (data) {
    Pool& pool = pool_of("Storage", device);
    pooled && !small ? pool.give(data, bytes) : pool.drop_live(bytes);
    if (small) detail::give_block(data, bytes);
  }
  if (pooled && device.is_cpu()) mine.live -= static_cast<std::ptrdiff_t>(bytes);
  if (release) release();
}

static Storage lent_by(const Lender& host, std::size_t bytes) {
  void* const p = bytes ? host.memory->take(bytes) : nullptr;
  if (bytes && !p) fail_with(Code::memory, "out of memory: the host has no ", bytes, " bytes more on ", host.device);
  return Storage::borrow(p, bytes, host.device, [p, memory = host.memory] {
    if (p) memory->give(p);
  });
}

Storage Storage::allocate(std::size_t bytes, Device device) try {
  if (lender && lender->device == device) return lent_by(*lender, bytes);
  auto block = std::allocate_shared<StorageBlock>(detail::Recycled<StorageBlock>());
  Pool& pool = pool_of("Storage", device);
  try {
    block->small = device.is_cpu() && bytes <= kSmall && pool.keeps();
    if (block->small) block->data = static_cast<std::byte*>(detail::take_block(bytes)), pool.add_live(bytes);
  } catch (const std::bad_alloc&) { block->small = false; }  // the pool gives back what it keeps, or says who has it
  if (!block->small) block->data = pool.take(bytes);
  block->bytes = bytes, block->device = device, block->pooled = true;
  if (device.is_cpu()) {
    mine.live += static_cast<std::ptrdiff_t>(bytes);
    mine.peak = std::max(mine.peak, mine.live);
  }
  return Storage(std::move(block));
} catch (const std::bad_alloc&) { fail_with(Code::memory, "out of memory: asked for ", bytes, " bytes"); }

Storage Storage::borrow(void* data, std::size_t bytes, Device device, std::function<void()> release, bool constant) {
  check(data || bytes == 0, "Storage: borrowing ", bytes, " bytes at a null pointer");
  auto block = std::allocate_shared<StorageBlock>(detail::Recycled<StorageBlock>());
  if (data) pool_of("Storage", device).add_live(bytes);
  block->data = static_cast<std::byte*>(data);
  block->bytes = bytes;
  block->device = device;
  block->release = std::move(release);
  block->constant = constant;
  return Storage(std::move(block));
}

}  // namespace hilt
