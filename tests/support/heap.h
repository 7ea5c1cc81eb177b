#pragma once
#include <atomic>
#include <cstdint>

// A binary with heap.cpp among its files has an operator new that counts, and that fails where a
// test asks it to.

namespace hilt::heap {

/// Bytes that the process holds, tensors' apart, which have counters of their own: now, and the
/// most since a test set it.
inline std::atomic<std::int64_t> held{0}, most_held{0};

enum class Of : unsigned char { nothing, tensors, everything };
/// Which allocations of one thread fail. Other threads, and tests that do not ask, never notice.
struct Failing {
  Of of = Of::nothing;
  long left = 0;          // the one that makes it 0
  bool for_ever = false;  // and all after it
  bool met = false;
};
extern thread_local constinit Failing failing;
/// Allocations of this thread, tensors' too: ever, and less what it gave back.
extern thread_local constinit long made, blocks;

}  // namespace hilt::heap
