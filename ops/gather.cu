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
//   runs     all lists, one after the other, are cut into runs of kRun; a thread adds up some columns of a
//            run, place by place. A place within a run is done; of others the sums are kept
//   places   adds those of a place in order, and gives a place without rows its zeros
// No list makes a thread wait longer than others do: of a text's characters one may be a fifth.
#include "core/cuda/pack.cuh"
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

constexpr Index kChunks = 64, kFewest = 256;  // chunks at most; positions of one at least
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

constexpr Index kRun = 32;    // rows of a list that a thread adds up
constexpr int kTogether = 4;  // of them on their way at a time

struct Lists {
  const std::int64_t* index;
  const std::int32_t *begin, *list;
  Index n, extent, inner, runs;
};

// partial: [outer, runs, 2, inner], of the place that began in a run before and that which goes on.
template <int C, class T> __global__ void add_runs_kernel(Lists in, const T* x, T* y, float* partial, Index all) {
  const Index packs = in.inner / C;
  for (Index i = first_element(); i < all; i += element_step()) {
    const Index c = i % packs * C, line = i / packs, o = line / in.runs;
    const Index first = line % in.runs * kRun, end = min(first + kRun, static_cast<Index>(in.begin[in.extent]));
    Index place = -1;
    Floats<C> sum;
    const auto finish = [&] {
      if (place < 0) return;
      const bool began = in.begin[place] >= first;
      if (began && in.begin[place + 1] <= first + kRun) store(y + (o * in.extent + place) * in.inner + c, sum);
      else store(partial + (2 * line + began) * in.inner + c, sum);
    };
    for (Index e = first; e < end; e += kTogether) {
      Index at[kTogether];
      Floats<C> row[kTogether];
      for (int k = 0; k < kTogether; ++k) {
        const Index from = in.list[min(e + k, end - 1)];
        at[k] = in.index[from];
        row[k] = load<C>(x + (o * in.n + from) * in.inner + c);
      }
      for (int k = 0; k < kTogether && e + k < end; ++k) {
        if (at[k] != place) finish(), place = at[k], sum = {};
        for (int j = 0; j < C; ++j) sum.x[j] += row[k][j];
      }
    }
    finish();
  }
}

template <int C, class T> __global__ void add_places_kernel(Lists in, const float* partial, T* y, Index all) {
  const Index packs = in.inner / C;
  for (Index i = first_element(); i < all; i += element_step()) {
    const Index c = i % packs * C, place = i / packs % in.extent, o = i / packs / in.extent;
    const Index begin = in.begin[place], end = in.begin[place + 1], first = begin / kRun, last = (end - 1) / kRun;
    if (begin < end && first == last) continue;
    Floats<C> sum{};
#pragma unroll 4
    for (Index run = first; begin < end && run <= last; ++run) {
      const Floats<C> part = load<C>(partial + (2 * (o * in.runs + run) + (run == first)) * in.inner + c);
      for (int j = 0; j < C; ++j) sum.x[j] += part[j];
    }
    store(y + (o * in.extent + place) * in.inner + c, sum);
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
  const Lists lists{index, b, l, n, extent, inner, (n + kRun - 1) / kRun};
  Tensor partial = empty({outer, lists.runs, 2, inner}, DType::f32, device);
  float* const sums = partial.mutable_data<float>();
  const auto add = [&]<int C>() {
    const Index packs = inner / C, in_runs = outer * lists.runs * packs, in_places = outer * extent * packs;
    launch("scatter_add", where, add_runs_kernel<C, T>, blocks_for(in_runs), kThreads, 0, lists, x, y, sums, in_runs);
    launch("scatter_add", where, add_places_kernel<C, T>, blocks_for(in_places), kThreads, 0, lists, sums, y,
           in_places);
  };
  constexpr int kColumns = 4;
  if (inner % kColumns == 0 && is_aligned(x, y)) add.template operator()<kColumns>();
  else add.template operator()<1>();
}

HILT_GPU_KERNEL(scatter_add)

}  // namespace hilt::kernels
