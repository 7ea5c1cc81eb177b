#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include "ops/hilbert/kernels/hopper/wgmma.cuh"
#include "core/cuda/launch.cuh"
#include "ops/hilbert/kernels/cuda/mma_sync.cuh"

// Thin wrappers over the instructions of sm_90a that our kernels use.

namespace hilt::cuda::hopper {

constexpr int kWarpgroup = 128;  // threads

/// Tells the compiler that a warp agrees on x: what depends on it can stay in uniform registers,
/// from which wgmma takes its operands without a move each.
template <class Int> __device__ __forceinline__ Int warp_uniform(Int x) {
  return static_cast<Int>(__reduce_or_sync(~0u, static_cast<unsigned>(x)));
}
/// This thread's warpgroup.
__device__ __forceinline__ int warpgroup() { return warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroup); }

// ---- mbarrier: counts arrivals of a phase; who waits names the parity of the phase --------------
__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_passed(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  do
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  while (!done);
}

// ---- named barriers and registers ---------------------------------------------------------------
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Whether something holds for every thread of the barrier.
__device__ __forceinline__ bool named_all(int id, int threads, bool holds) {
  int all;
  asm volatile("{.reg .pred p, q; setp.ne.s32 p, %3, 0; bar.red.and.pred q, %1, %2, p; selp.s32 %0, 1, 0, q;}"
               : "=r"(all)
               : "r"(id), "r"(threads), "r"(static_cast<int>(holds))
               : "memory");
  return all != 0;
}

/// setmaxnreg only shares out what the launch allocated, floor(65536 / threads / 8) * 8 registers a
/// thread: what one warpgroup that loads leaves to others. Asking for more waits for ever.
constexpr int registers_left(int threads, int producer) {
  return (65536 / threads / 8 * 8 * threads - kWarpgroup * producer) / (threads - kWarpgroup) / 8 * 8;
}
template <int N> __device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- asynchronous copies (mma_sync.cuh) ---------------------------------------------------------
/// Arrives at a barrier once this thread's copies so far have landed.
__device__ __forceinline__ void arrive_when_landed(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// This thread's copies so far, as a group; and a wait for all but the last N groups.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
/// Between ordinary writes to shared memory, or copies seen to have landed, and a wgmma that reads
/// them.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- bulk operations of one thread, between shared and global memory ----------------------------
/// Copies that arrive at a barrier, which expects so many bytes; this is an arrival too.
__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// So many bytes more, without an arrival.
__device__ __forceinline__ void barrier_expect_more(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// A box of a tensor [batch, token, head, column], from these on.
__device__ __forceinline__ void box_load(std::uint32_t to, const CUtensorMap& map, int column, int head, int token,
                                         int batch, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(token), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
/// Adds f32 numbers to those in global memory, each as an atomic addition.
__device__ __forceinline__ void bulk_add(void* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
/// This thread's stores and additions so far, as a group; a wait until all were read from shared
/// memory, and until all are done.
__device__ __forceinline__ void close_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_bulk() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/// Between bulk operations and whatever else this thread does, either way.
__device__ __forceinline__ void fence_for_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- counters that blocks share -----------------------------------------------------------------
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* from) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void count_release(std::uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// ---- wgmma: order, and where operands lie -------------------------------------------------------
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/// After a wait: no use of the sums moves above it.
template <int N> __device__ __forceinline__ void fence_operand(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// A tile in shared memory is panels of [rows][64 bf16], rows of 128 bytes, each 1024-byte aligned;
/// chunk c (16 bytes) of row r lies at r * 128 + ((c ^ r % 8) * 16): the 128-byte swizzle.
constexpr std::uint32_t kPanelRow = 128;  // bytes
__host__ __device__ constexpr std::uint32_t swizzled(std::uint32_t row, std::uint32_t chunk) {
  return row * kPanelRow + ((chunk ^ (row & 7)) << 4);
}

/// The descriptor of an operand at base + at, eight-row groups 1024 bytes apart. `panel`: bytes
/// from panel to panel, for an operand that lies with its other axis contiguous. `at` is a
/// constant, added after the shift, so that a run of k-steps costs one addition each.
__device__ __forceinline__ std::uint64_t operand(std::uint32_t base, std::uint32_t at, std::uint32_t panel) {
  constexpr std::uint32_t kSwizzle128AndStride1024 = 0x40000040;
  std::uint64_t d;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(d)
      : "r"((base >> 4) + ((at >> 4) | (panel >> 4) << 16)), "r"(kSwizzle128AndStride1024));
  return d;
}
/// Where k-step k (16 columns) of an operand of `panel` bytes a panel begins, contiguous along k;
/// and along rows.
constexpr std::uint32_t along_columns(int k, std::uint32_t panel) {
  return static_cast<std::uint32_t>(k / 4) * panel + static_cast<std::uint32_t>(k % 4) * 32;
}
constexpr std::uint32_t along_rows(int k) { return static_cast<std::uint32_t>(k) * 16 * kPanelRow; }

// ---- stmatrix and arithmetic --------------------------------------------------------------------
__device__ __forceinline__ void store_matrix(std::uint32_t at, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                             std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
template <class E> __device__ __forceinline__ float2 unpack_pair(std::uint32_t x) {
  if constexpr (std::is_same_v<E, bf16>) return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000)};
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
/// A T in shared memory, of 4 bytes, 8, or some times 16.
template <class T> __device__ __forceinline__ T& shared(std::uint32_t at) {
  return *static_cast<T*>(__cvta_shared_to_generic(at));
}
template <class T> __device__ __forceinline__ T load_shared(std::uint32_t at) { return shared<const T>(at); }
template <class T> __device__ __forceinline__ void store_shared(std::uint32_t at, const T& x) { shared<T>(at) = x; }
/// Division by a number that the host knows, for numerators below 2^31: a product instead of some
/// forty instructions.
struct Divisor {
  std::uint32_t d = 1, factor = 1, shift = 0;
  Divisor() = default;
  explicit Divisor(Index divisor) : d(static_cast<std::uint32_t>(divisor)) {
    while ((std::uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<std::uint32_t>(((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ __forceinline__ void split(int n, int& quotient, int& rest) const {
    quotient =
        static_cast<int>((__umulhi(static_cast<std::uint32_t>(n), factor) + static_cast<std::uint32_t>(n)) >> shift);
    rest = n - quotient * static_cast<int>(d);
  }
};

}  // namespace hilt::cuda::hopper
