// gather and scatter_add on a GPU.
//
// gather: a thread moves one element or 16 bytes of a row. An index outside the axis gives a row of
// all bits set, a NaN of every float type: nobody waits to check.
//
// scatter_add adds the rows that share a place in the order of the index, without atomics. A stable
// sort by place makes lists of them, one after the other:
//   runs     all lists together are cut into runs of kRun; a thread adds up some columns of a run, place
//            by place. A place within a run is done; of others the sums are kept
//   places   adds those of a place in order, and gives a place without rows its zeros
// No list makes a thread wait longer than others do: of a text's characters one may be a fifth.
#include <cub/device/device_radix_sort.cuh>
#include <cub/thread/thread_search.cuh>
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

// What to sort: positions of the index by place, those without one last.
__global__ void positions_kernel(const std::int64_t* index, Index n, Index extent, std::int32_t* place,
                                 std::int32_t* position) {
  for (Index i = first_element(); i < n; i += element_step()) {
    place[i] = static_cast<std::int32_t>(index[i] >= 0 && index[i] < extent ? index[i] : extent);
    position[i] = static_cast<std::int32_t>(i);
  }
}

// Where the list of each place begins, and behind them where the last one ends.
__global__ void begin_kernel(const std::int32_t* places, Index n, Index extent, std::int32_t* begin) {
  for (Index place = first_element(); place <= extent; place += element_step())
    begin[place] = static_cast<std::int32_t>(cub::LowerBound(places, n, place));
}

constexpr Index kRun = 32;    // rows of a list that a thread adds up
constexpr int kTogether = 4;  // of them on their way at a time

struct Lists {
  const std::int32_t *places, *positions, *begin;
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
        const Index i = min(e + k, end - 1), from = in.positions[i];
        at[k] = in.places[i];
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
  if (outer * n * row_bytes == 0) return;
  const std::uintptr_t all = reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(y) |
                             static_cast<std::uintptr_t>(row_bytes);
  if (all % 16 == 0) run.template operator()<uint4>();
  else if (all % 4 == 0) run.template operator()<std::uint32_t>();
  else if (all % 2 == 0) run.template operator()<std::uint16_t>();
  else run.template operator()<std::uint8_t>();
}

template <class T, class At>
void scatter_add(At where, const T* x, const std::int64_t* index, T* y, Index outer, Index n, Index extent,
                 Index inner) {
  if (outer * extent * inner == 0) return;
  const Device device{Device::Kind::cuda, where.device};
  Tensor lists_of = empty({4, n}, DType::i32, device), begins = empty({extent + 1}, DType::i32, device);
  auto *const places = lists_of.mutable_data<std::int32_t>(), *const begin = begins.mutable_data<std::int32_t>();
  launch("scatter_add", where, positions_kernel, blocks_for(n), kThreads, 0, index, n, extent, places, places + n);
  const auto sort = [&](void* space, std::size_t& bytes) {
    check_status(cub::DeviceRadixSort::SortPairs(space, bytes, places, places + 2 * n, places + n, places + 3 * n, n, 0,
                                                 static_cast<int>(std::bit_width(static_cast<std::size_t>(extent))),
                                                 static_cast<cudaStream_t>(where.stream)),
                 "scatter_add", where.device);
  };
  std::size_t bytes = 0;
  sort(nullptr, bytes);
  sort(empty({static_cast<Index>(bytes)}, DType::u8, device).mutable_raw(), bytes);
  launch("scatter_add", where, begin_kernel, blocks_for(extent + 1), kThreads, 0, places + 2 * n, n, extent, begin);
  const Lists lists{places + 2 * n, places + 3 * n, begin, n, extent, inner, (n + kRun - 1) / kRun};
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
