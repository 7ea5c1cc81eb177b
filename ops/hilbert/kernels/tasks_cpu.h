#pragma once
#include <new>
#include "core/parallel.h"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/product_cpu.h"

// Memory and threads of a pass.

namespace hilt::kernels {
namespace {

/// Hands out pieces of a block of memory, or, without one, counts what it will need.
struct Carver {
  std::byte* block = nullptr;
  Index used = 0;

  template <class X> X* take(Index n) {
    X* const piece = block ? reinterpret_cast<X*>(block + used) : nullptr;
    used += (n * static_cast<Index>(sizeof(X)) + kLine - 1) / kLine * kLine;
    return piece;
  }
  template <class W> Tile<W> tile(Index rows, Index columns) {
    constexpr Index line = kLine / static_cast<Index>(sizeof(W));
    const Index pitch = (((columns + line - 1) / line) | 1) * line;
    return {take<W>(rows * pitch), pitch};
  }
};
template <class Space> Index bytes_of(Index dim, Index entries) {
  Carver counter;
  Space(counter, dim, entries);
  return counter.used;
}

/// Scratch. A thread keeps a small one for its next pass: the system takes longer over it than a
/// pass over a few tokens.
class Memory {
 public:
  explicit Memory(Index bytes) {
    if (spare.bytes_ >= bytes) {
      swap(spare);
    } else {
      block = static_cast<std::byte*>(::operator new (static_cast<std::size_t>(bytes), std::align_val_t{kLine}));
      bytes_ = bytes;
    }
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (bytes_ > spare.bytes_ && bytes_ <= kMostKept) swap(spare);
    ::operator delete (block, std::align_val_t{kLine});
  }
  std::byte* block = nullptr;

 private:
  static constexpr Index kMostKept = Index{2} << 20;
  Memory() = default;
  void swap(Memory& other) {
    std::byte* const its = other.block;
    const Index bytes = other.bytes_;
    other.block = block, other.bytes_ = bytes_, block = its, bytes_ = bytes;
  }
  static thread_local Memory spare;
  Index bytes_ = 0;
};
thread_local Memory Memory::spare;

/// So few pairs of numbers are multiplied before another thread has woken.
constexpr Index kAlone = Index{1} << 19;

/// Tasks [0, n) of a pass, which workers take in ascending order, each with a Space of its own: no
/// task can fail, so one may wait for an earlier one. products: of matrices, in the pass. entries:
/// of a table that gets a gradient.
template <class Space> class Tasks {
 public:
  Tasks(const AttentionPass& pass, Index n, Index products, Index entries)
      : workers(is_small(pass, products) ? 1
                : thread_count() < n     ? thread_count()
                                         : n),
        n_(n),
        dim_(pass.sizes.dim),
        entries_(entries),
        bytes_(bytes_of<Space>(pass.sizes.dim, entries)),
        memory_(workers * bytes_) {}
  Space space_of(Index worker) const {
    Carver carver{memory_.block + worker * bytes_};
    return Space(carver, dim_, entries_);
  }
  bool take(Index& task) { return (task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED)) < n_; }

  const Index workers;

 private:
  static bool is_small(const AttentionPass& p, Index products) {
    return products * p.place_count() * p.n_heads * p.tiling->pairs * p.sizes.dim < kAlone;
  }
  const Index n_, dim_, entries_, bytes_;
  const Memory memory_;
  Index next_ = 0;
};

}  // namespace
}  // namespace hilt::kernels
