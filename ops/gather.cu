// gather and scatter_add on a GPU.
//
// gather: a thread moves one element or 16 bytes of a row. An index outside the axis gives a row of
// all bits set, a NaN of every float type: nobody waits to check.
//
// scatter_add adds the rows that share a place in the order of the index, without atomics. The
// index is cut into chunks, a warp each:
//   count    how often each place occurs in each chunk
//   total    how often it occurs in the chunks before, and in all
//   begin    where each place's list begins: a running sum over places
//   list     every position of the index goes to its place's list; within a chunk a warp takes 32 at a time,
//            equal ones by lane
//   add      a thread owns an element of the result and walks its list
#include "core/cuda/reduce.cuh"
#include "core/tensor.h"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

template <class Word>
__global__ void gather_kernel(const Word* x, const std::int64_t* index, Word* y, Index n, Index extent, Index words,
                              Index all) {
  for (Index i = first_element(); i < all; i += element_step()) {
    const Index w = i % words, row = i / words, at = index[row % n];
    Word out;
    if (at >= 0 && at < extent) out = x[(row / n * extent + at) * words + w];
    else memset(&out, 0xff, sizeof out);
    y[i] = out;
  }
}

constexpr char kNoBijection[] = "permutation: no bijection inside each document";

__global__ void invert_kernel(Inversion how, const char* what, cuda::Verdict* verdict, std::int64_t* token_at,
                              std::int64_t* position_of) {
  for (Index i = first_element(); i < how.rows * how.length; i += element_step()) {
    const Index at = i % how.n, begin = at / how.length * how.length, token = how.pi[at];
    bool fits = token >= 0 && token < how.length;
    if (fits && how.document) {
      const std::int32_t* const document = how.document + i / how.length * how.length % how.documents;
      fits = document[token] == document[i % how.length];
    }
    bool once = true;
    if (i < how.n) {
      token_at[i] = fits ? begin + token : -1;
      auto* const place = reinterpret_cast<unsigned long long*>(position_of + begin + token);
      once = !fits || atomicExch(place, static_cast<unsigned long long>(i)) == ~0ull;
    }
    if (fits && once) continue;
    const cuda::Verdict found{what, static_cast<std::int32_t>(i / how.length), static_cast<std::int32_t>(token)};
    *reinterpret_cast<int4*>(verdict) = reinterpret_cast<const int4&>(found);
  }
}

constexpr Index kChunks = 64, kFewest = 1024;  // chunks at most; positions of one at least
constexpr int kScanThreads = 1024, kScanned = 8;

// counts: [chunks, extent], zero.
__global__ void count_kernel(const std::int64_t* index, Index n, Index extent, Index chunk, std::int32_t* counts) {
  std::int32_t* const mine = counts + blockIdx.x * extent;
  const Index end = min((blockIdx.x + 1) * chunk, n);
  for (Index i = blockIdx.x * chunk; i < end; i += kWarp) {
    const Index at = i + threadIdx.x < end ? index[i + threadIdx.x] : -1;
    const unsigned same = __match_any_sync(~0u, at);
    if (at >= 0 && at < extent && __ffs(same) - 1 == static_cast<int>(threadIdx.x)) mine[at] += __popc(same);
    __syncwarp();
  }
}

// begin[place]: how many positions go there; counts[chunk][place]: those of the chunks before.
__global__ void total_kernel(std::int32_t* counts, Index chunks, Index extent, std::int32_t* begin) {
  for (Index place = first_element(); place < extent; place += element_step()) {
    std::int32_t total = 0;
    for (Index c = 0; c < chunks; ++c) {
      const std::int32_t before = total;
      total += counts[c * extent + place], counts[c * extent + place] = before;
    }
    begin[place] = total;
  }
}

// begin[place] becomes the sum of those before. One block; a thread has kScanned neighbours.
__global__ void begin_kernel(Index extent, std::int32_t* begin) {
  __shared__ std::int32_t warp_total[kWarp];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  std::int32_t carry = 0;
  for (Index first = 0; first < extent; first += kScanThreads * kScanned) {
    const Index mine = first + threadIdx.x * kScanned;
    std::int32_t count[kScanned], total = 0;
    for (int k = 0; k < kScanned; ++k) total += count[k] = mine + k < extent ? begin[mine + k] : 0;
    std::int32_t upto = total;
    for (int step = 1; step < kWarp; step *= 2) {
      const std::int32_t before = __shfl_up_sync(~0u, upto, step);
      if (lane >= static_cast<unsigned>(step)) upto += before;
    }
    if (lane == kWarp - 1) warp_total[warp] = upto;
    __syncthreads();
    std::int32_t at = carry + upto - total;
    for (unsigned w = 0; w < kWarp; ++w) {
      if (w < warp) at += warp_total[w];
      carry += warp_total[w];
    }
    for (int k = 0; k < kScanned; ++k) {
      if (mine + k < extent) begin[mine + k] = at;
      at += count[k];
    }
    __syncthreads();  // warp_total is written anew
  }
  if (threadIdx.x == 0) begin[extent] = carry;
}

__global__ void list_kernel(const std::int64_t* index, Index n, Index extent, Index chunk, const std::int32_t* begin,
                            std::int32_t* next, std::int32_t* list) {
  std::int32_t* const mine = next + blockIdx.x * extent;
  const Index end = min((blockIdx.x + 1) * chunk, n);
  for (Index i = blockIdx.x * chunk; i < end; i += kWarp) {
    const Index at = i + threadIdx.x < end ? index[i + threadIdx.x] : -1;
    const unsigned same = __match_any_sync(~0u, at), before = same & ((1u << threadIdx.x) - 1);
    const bool valid = at >= 0 && at < extent;
    if (valid) list[begin[at] + mine[at] + __popc(before)] = static_cast<std::int32_t>(i + threadIdx.x);
    __syncwarp();
    if (valid && before == 0) mine[at] += __popc(same);
    __syncwarp();
  }
}

template <class T>
__global__ void add_kernel(const T* x, const std::int32_t* begin, const std::int32_t* list, T* y, Index n, Index extent,
                           Index inner, Index all) {
  for (Index i = first_element(); i < all; i += element_step()) {
    const Index c = i % inner, place = i / inner % extent, o = i / inner / extent;
    float sum = 0;
    for (std::int32_t e = begin[place]; e < begin[place + 1]; ++e)
      sum += static_cast<float>(x[(o * n + list[e]) * inner + c]);
    y[i] = static_cast<T>(sum);
  }
}

}  // namespace

void invert(Cuda where, const Inversion& how, std::int64_t* token_at, std::int64_t* position_of) {
  const Index all = how.rows * how.length;
  launch("invert", where, invert_kernel, blocks_for(all), kThreads, 0, how, kNoBijection, verdict(where.device),
         token_at, position_of);
}

void gather(Cuda where, const void* x, const std::int64_t* index, void* y, Index outer, Index n, Index extent,
            Index row_bytes) {
  const auto run = [&]<class Word>() {
    const Index words = row_bytes / static_cast<Index>(sizeof(Word)), all = outer * n * words;
    launch("gather", where, gather_kernel<Word>, blocks_for(all), kThreads, 0, static_cast<const Word*>(x), index,
           static_cast<Word*>(y), n, extent, words, all);
  };
  const auto fits = [&](std::size_t word) {
    return (reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(y) |
            static_cast<std::uintptr_t>(row_bytes)) %
               word ==
           0;
  };
  if (outer * n * row_bytes == 0) return;
  if (fits(16)) run.template operator()<uint4>();
  else if (fits(4)) run.template operator()<std::uint32_t>();
  else if (fits(2)) run.template operator()<std::uint16_t>();
  else run.template operator()<std::uint8_t>();
}

template <class T, class At>
void scatter_add(At where, const T* x, const std::int64_t* index, T* y, Index outer, Index n, Index extent,
                 Index inner) {
  if (outer * extent * inner == 0) return;
  const Index chunk = std::max(kFewest, (n + kChunks - 1) / kChunks),
              chunks = std::max<Index>(1, (n + chunk - 1) / chunk);
  const Device device{Device::Kind::cuda, where.device};
  Tensor counts = zeros({chunks, extent}, DType::i32, device), begin = empty({extent + 1}, DType::i32, device),
         list = empty({n}, DType::i32, device);
  auto *const c = counts.mutable_data<std::int32_t>(), *const b = begin.mutable_data<std::int32_t>(),
              *const l = list.mutable_data<std::int32_t>();
  const dim3 grid(static_cast<unsigned>(chunks));
  launch("scatter_add", where, count_kernel, grid, kWarp, 0, index, n, extent, chunk, c);
  launch("scatter_add", where, total_kernel, blocks_for(extent), kThreads, 0, c, chunks, extent, b);
  launch("scatter_add", where, begin_kernel, dim3(1), kScanThreads, 0, extent, b);
  launch("scatter_add", where, list_kernel, grid, kWarp, 0, index, n, extent, chunk, b, c, l);
  const Index all = outer * extent * inner;
  launch("scatter_add", where, add_kernel<T>, blocks_for(all), kThreads, 0, x, b, l, y, n, extent, inner, all);
}

HILT_GPU_KERNEL(scatter_add)

}  // namespace hilt::kernels
