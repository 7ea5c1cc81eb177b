// Matrix products on the CPU: cut into tiles of C, which run on our threads, each by cpu_gemm. No
// BLAS of the system, nor is it faster, on one thread: with AVX-512 and 1024 x 1536 x 384 floats
// ours makes 108 GFLOP/s and OpenBLAS 0.3.21 106, with AVX2 105 and 107 (a transposed A: 98 and
// 109), Eigen on SSE2 with 1024 x 384 x 384 floats 38 and 31.
#include "ops/gemm/gemm.h"
#include "core/strided.h"

namespace hilt::kernels {
namespace {

// Multiplications worth a task of their own (about 20 microseconds; of fewer than kReadRows rows,
// reading B takes as long as the multiplications of so many), and the most tiles one product is cut
// into. Each tile packs its own share of A and B. Measured on one thread: 16 tiles of 1024 x
// 1536 x 384 cost nothing, 16 of 2048^3 10 % (4: 2 %), so a deep product is cut into large tiles.
constexpr Index kTask = Index{1} << 21, kReadRows = 16, kMaxTiles = 16;
constexpr Index kDeep = 1024, kFewTiles = 4, kLargeTile = 1024;
constexpr Index kTileStep = 64;  // tiles start at multiples of this: whole micro-kernels, whole cache lines

struct Tiles {
  Index down = 1, across = 1;  // tiles of C
  Index rows, columns;         // of one tile
  Tiles(Index m, Index n, Index k) : rows(m), columns(n) {
    const double tasks =
        static_cast<double>(std::max(m, kReadRows)) * static_cast<double>(n) * static_cast<double>(k) / kTask;
    const Index most = most_tiles();
    while (down * across < most && static_cast<double>(down * across) < tasks) {
      const Index longest = std::max(rows, columns);
      if (longest <= kTileStep ||
          (most == kMaxTiles && k > kDeep && down * across >= kFewTiles && longest < 2 * kLargeTile))
        break;
      (rows >= columns ? down : across) *= 2;
      rows = rounded(m, down);
      columns = rounded(n, across);
    }
    down = rows > 0 ? (m + rows - 1) / rows : 1;
    across = columns > 0 ? (n + columns - 1) / columns : 1;
  }
  Index work(Index k) const { return std::max<Index>(1, std::max(rows, kReadRows) * columns * k); }
  /// What cpu_gemm puts in an element of C does not depend on the tile around it, so there the
  /// number of threads may choose: no more tiles than keep all busy, since each packs anew.
  static Index most_tiles() {
    if (active_isa() == Isa::base) return kMaxTiles;
    return std::min<Index>(kMaxTiles, thread_count() == 1 ? 1 : 2 * Index{thread_count()});
  }
  static Index rounded(Index extent, Index parts) {
    return parts == 1 ? extent : ((extent + parts - 1) / parts + kTileStep - 1) / kTileStep * kTileStep;
  }
};

/// Where to pack a factor: one a thread, kept, since products come one after the other.
void* scratch() {
  struct alignas(64) CacheLine {
    std::byte bytes[64];
  };
  thread_local std::vector<CacheLine> kept(kGemmScratch / sizeof(CacheLine));
  return kept.data();
}

/// Products that start from a bias and a residual, tile by tile.
template <class T>
void tiled_products(const BatchSteps& steps, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b,
                    MatrixRef<wide_t<T>> c, const Extras<wide_t<T>>& start) {
  using W = wide_t<T>;
  const Tiles tiles(m, n, k);
  const Index per_product = tiles.down * tiles.across;
  parallel_each(steps.batch * per_product, std::max<Index>(1, kTask / 2 / tiles.work(k)), [&](Index task) {
    const Index i = task / per_product, at = task % per_product;
    const Index r = at / tiles.across * tiles.rows, col = at % tiles.across * tiles.columns;
    const Index rows = std::min(tiles.rows, m - r), columns = std::min(tiles.columns, n - col);
    const MatrixRef<W> to{c.data + i * steps.c + r * c.row + col, c.row, 1};
    const W* const bias = start.bias ? start.bias + col : nullptr;
    const W* residual = start.residual.data ? start.residual.data + r * start.residual.row + col : nullptr;
    for (Index line = 0; line < rows && (bias || residual); ++line) {  // while the tile is on its way into the cache
      W* const row = to.data + line * to.row;
      if (bias && residual)
        for (Index j = 0; j < columns; ++j) row[j] = residual[j] + bias[j];
      else std::copy_n(bias ? bias : residual, columns, row);
      if (residual) residual += start.residual.row;
    }
    gemm<T>(Cpu{}, rows, columns, k, {a.data + steps.a[i] + r * a.row, a.row, a.column},
            {b.data + steps.b[i] + col * b.column, b.row, b.column}, to, start.bias || start.residual.data);
  });
}

}  // namespace

template <class T, class At>
void gemm(At, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<product_t<T, At>> c,
          bool add) {
  detail::with_isa([&](auto where) { cpu_gemm<T>(where, {m, n, k, a, b, c, add}, scratch()); });
}

template <class T, class At>
bool gemm_onto(At, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b, MatrixRef<product_t<T, At>> c,
               const Extras<product_t<T, At>>& extras) {
  tiled_products<T>({}, m, n, k, a, b, c, extras);
  return true;
}
template <class T, class At>
void gemm_batched(At, const BatchSteps& steps, Index m, Index n, Index k, MatrixRef<const T> a, MatrixRef<const T> b,
                  MatrixRef<product_t<T, At>> c) {
  tiled_products<T>(steps, m, n, k, a, b, c, {});
}

#define HILT_CPU_GEMM(KERNEL) \
  HILT_KERNEL(KERNEL, float, Cpu) HILT_KERNEL(KERNEL, double, Cpu) HILT_KERNEL(KERNEL, bf16, Cpu)
HILT_CPU_GEMM(gemm)
HILT_CPU_GEMM(gemm_onto)
HILT_CPU_GEMM(gemm_batched)

}  // namespace hilt::kernels
