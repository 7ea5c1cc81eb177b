// Orders of points on a GPU: a cube around each document, codes of its cells, a stable sort by
// document and code, and its inverse. A row that has no cell comes last in its document.
#include <cub/device/device_radix_sort.cuh>
#include "core/cuda/launch.cuh"
#include "core/tensor.h"
#include "ops/hilbert/points/cells.h"

namespace hilt::kernels {
namespace {

using namespace cuda;
using Word = unsigned long long;  // as atomics take it

constexpr Index kRun = 4096;                  // rows of a block that looks for cubes
constexpr std::uint32_t kRefused = 1u << 31;  // of a row that has no cell

struct Points {
  Index n, documents;
  const Index* bounds;  // [documents + 1]
  Word* cubes;          // [documents, 2, 3]: the lowest on each axis, and the complements of the highest
};

/// Ordered as the numbers are.
__device__ Word ordered(double x) {
  const auto bits = static_cast<Word>(__double_as_longlong(x));
  return bits >> 63 ? ~bits : bits | Word{1} << 63;
}
__device__ double number(Word x) {
  return __longlong_as_double(static_cast<long long>(x >> 63 ? x & ~(Word{1} << 63) : ~x));
}

/// The document of a row, by bisection; of those behind them, how many there are.
__device__ Index document_of(const Points& p, Index row) {
  Index low = 0, high = p.documents + 1;
  while (high - low > 1) {
    const Index middle = (low + high) / 2;
    (p.bounds[middle] <= row ? low : high) = middle;
  }
  return low;
}

template <unsigned axes, class T> __device__ bool has_cells(const Cells& cells, const T* x) {
  bool all = true;
  for (unsigned a = 0; a < axes; ++a) all = all && has_cell(cells, x[a]);
  return all;
}

template <unsigned axes> __global__ void cube_kernel(Points p, Cells cells, const double* x) {
  const Index run = blockIdx.x * kRun, run_end = min(run + kRun, p.n);
  for (Index d = document_of(p, run); d < p.documents && p.bounds[d] < run_end; ++d) {
    Word least[6] = {~Word{0}, ~Word{0}, ~Word{0}, ~Word{0}, ~Word{0}, ~Word{0}};
    const Index end = min(run_end, p.bounds[d + 1]);
    for (Index i = max(run, p.bounds[d]) + threadIdx.x; i < end; i += blockDim.x)
      for (unsigned a = 0; a < axes && has_cells<axes>(cells, x + i * axes); ++a) {
        const Word at = ordered(x[i * axes + a]);
        least[a] = min(least[a], at), least[3 + a] = min(least[3 + a], ~at);
      }
    for (int k = 0; k < 6; ++k) {
      for (int lane = kWarp / 2; lane > 0; lane /= 2) least[k] = min(least[k], __shfl_xor_sync(~0u, least[k], lane));
      if (threadIdx.x % kWarp == 0) atomicMin(p.cubes + 6 * d + k, least[k]);
    }
  }
}

template <unsigned axes, class T>
__global__ void code_kernel(Points p, Cells cells, const T* x, Word* keys, std::uint32_t* rows) {
  const unsigned width = axes * cells.bits;
  for (Index i = first_element(); i < p.n; i += element_step()) {
    const Index d = document_of(p, i);
    const bool held = d < p.documents, scaled = held && is_floating(dtype_of<T>);
    if (scaled) cells.side = 0;
    for (unsigned a = 0; scaled && a < axes; ++a) {
      cells.low[a] = number(p.cubes[6 * d + a]);
      cells.side = fmax(cells.side, number(~p.cubes[6 * d + 3 + a]) - cells.low[a]);
    }
    if (cells.side == 0) cells.side = 1;
    const bool is_there = held && has_cells<axes>(cells, x + i * axes);
    keys[i] = static_cast<Word>(d) << (width + 1) | (is_there ? code_of<axes>(cells, x + i * axes) : Word{1} << width);
    rows[i] = static_cast<std::uint32_t>(i) | (is_there || !held ? 0 : kRefused);
  }
}

__global__ void inverse_kernel(Index n, const std::uint32_t* rows, Index* pi, Index* rho) {
  for (Index i = first_element(); i < n; i += element_step()) {
    const bool refused = rows[i] & kRefused;
    const Index row = rows[i] & ~kRefused;
    pi[i] = refused ? -1 : row, rho[row] = refused ? -1 : i;
  }
}

}  // namespace

PointOrder order_of_points(Cuda where, const Tensor& xyz, Cells cells, const std::vector<std::uint16_t>& table,
                           const std::vector<Index>& bounds) {
  const char* const name = "order_of_points";
  const Device device = xyz.device();
  const Index n = xyz.dim(0), axes = xyz.dim(1), documents = std::ssize(bounds) - 1;
  const int width = static_cast<int>(axes * cells.bits) + 1 +
                    std::bit_width(static_cast<std::uint64_t>(documents - (bounds.back() == n)));
  check(n < kRefused, name, ": ", n, " points; on a GPU at most 2147483647");
  check(width <= 64, name, ": ", documents, " documents of ", cells.bits, " bits on ", axes,
        " axes do not fit one key of a GPU; take fewer bits");
  PointOrder order{empty({n}, DType::i64, device), empty({n}, DType::i64, device)};
  if (n == 0) return order;
  const std::span whole(reinterpret_cast<const std::uint8_t*>(table.data()), table.size() * sizeof table[0]);
  const Tensor begins = moved(from_values(bounds, {documents + 1}), device),
               digits = moved(from_values(whole, {std::ssize(whole)}), device);
  Tensor cubes = full({documents, 6}, -1, DType::i64, device), keys = empty({2, n}, DType::i64, device),
         rows = empty({2, n}, DType::i32, device);
  const auto word = [](Tensor& t) { return reinterpret_cast<Word*>(t.mutable_data<std::int64_t>()); };
  const Points p{n, documents, begins.data<Index>(), word(cubes)};
  cells.table = reinterpret_cast<const std::uint16_t*>(digits.raw());
  Word* const key = word(keys);
  auto* const row = reinterpret_cast<std::uint32_t*>(rows.mutable_data<std::int32_t>());
  const auto run = [&](auto cube, auto of_floats, auto of_cells) {
    if (xyz.dtype() == DType::i64)
      return launch(name, where, of_cells, blocks_for(n), kThreads, 0, p, cells, xyz.data<Index>(), key, row);
    const auto runs = static_cast<unsigned>((n + kRun - 1) / kRun);
    launch(name, where, cube, dim3(runs), kThreads, 0, p, cells, xyz.data<double>());
    launch(name, where, of_floats, blocks_for(n), kThreads, 0, p, cells, xyz.data<double>(), key, row);
  };
  if (axes == 2) run(cube_kernel<2>, code_kernel<2, double>, code_kernel<2, Index>);
  else run(cube_kernel<3>, code_kernel<3, double>, code_kernel<3, Index>);
  std::size_t bytes = 0;
  const auto sort = [&](void* memory) {  // without memory it says how much it takes
    const auto stream = static_cast<cudaStream_t>(where.stream);
    check_status(cub::DeviceRadixSort::SortPairs(memory, bytes, key, key + n, row, row + n, static_cast<int>(n), 0,
                                                 width, stream),
                 name, where.device);
  };
  sort(nullptr);
  Tensor room = empty({static_cast<Index>(bytes)}, DType::u8, device);
  sort(room.mutable_raw());
  count_launch(where.device);
  launch(name, where, inverse_kernel, blocks_for(n), kThreads, 0, n, row + n, order.token_at.mutable_data<Index>(),
         order.position_of.mutable_data<Index>());
  return order;
}

}  // namespace hilt::kernels
