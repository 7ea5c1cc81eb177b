// operator new and delete of a test binary: they count what is held, and fail where a test asks.
#include "tests/support/heap.h"
#include <malloc.h>
#include <cstdlib>
#include <new>

namespace hilt::heap {

thread_local constinit Failing failing;
thread_local constinit long made = 0, blocks = 0;

namespace {

bool fails(bool tensor) {
  if (failing.of == Of::nothing || (failing.of == Of::tensors && !tensor)) return false;
  --failing.left;
  const bool now = failing.left == 0 || (failing.left < 0 && failing.for_ever);
  failing.met = failing.met || now;
  return now;
}

void* taken(std::size_t bytes) {
  void* const p = fails(false) ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!p) return p;
  ++made, ++blocks;
  const std::int64_t now = held += static_cast<std::int64_t>(malloc_usable_size(p));
  std::int64_t most = most_held.load();
  while (now > most && !most_held.compare_exchange_weak(most, now)) {}
  return p;
}
void* taken(std::size_t bytes, std::align_val_t alignment, bool tensor) {
  const auto align = static_cast<std::size_t>(alignment);
  void* const p = fails(tensor) ? nullptr : std::aligned_alloc(align, (bytes + align - 1) / align * align);
  made += p != nullptr, blocks += p != nullptr;
  return p;
}
void* or_throw(void* p) {
  if (!p) throw std::bad_alloc();
  return p;
}
void give(void* p) {
  if (!p) return;
  --blocks;
  held -= static_cast<std::int64_t>(malloc_usable_size(p));
  std::free(p);
}
void give_aligned(void* p) {
  blocks -= p != nullptr;
  std::free(p);
}

}  // namespace
}  // namespace hilt::heap

using namespace hilt::heap;

// All forms are here, on malloc: a sanitizer would else pair some of its own with ours. It still
// sees every block, and each that leaks.
void* operator new(std::size_t bytes) { return or_throw(taken(bytes)); }
void* operator new[](std::size_t bytes) { return or_throw(taken(bytes)); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return taken(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return taken(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return or_throw(taken(bytes, alignment, false)); }
// Tensors' memory is asked for like this, that of small ones where the pool keeps nothing, see
// core/storage.cpp.
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return taken(bytes, alignment, true);
}
void operator delete(void* p) noexcept { give(p); }
void operator delete[](void* p) noexcept { give(p); }
void operator delete(void* p, std::size_t) noexcept { give(p); }
void operator delete[](void* p, std::size_t) noexcept { give(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { give(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { give(p); }
void operator delete(void* p, std::align_val_t) noexcept { give_aligned(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { give_aligned(p); }
