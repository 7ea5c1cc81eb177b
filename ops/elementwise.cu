// The elementwise ops on a GPU: the functors of elementwise.h, each in three kernels. Where all is
// f32 or all is bf16 and whole packs lie together, a thread moves 16 bytes a tensor; everything
// else takes the kernel that looks at types and strides element by element. Arithmetic is f32, or
// i64 where all are integers.
#include "core/cuda/pack.cuh"
#include "ops/elementwise.h"
#include "ops/kernels.h"

namespace hilt::spans {
namespace {

using namespace cuda;

// `walk` counts packs; an input of inner stride 0 repeats one element.
template <class Op, class T>
__global__ void packed_kernel(const __grid_constant__ DeviceSpan s, const __grid_constant__ Runs<4> walk) {
  constexpr int N = kPack<T>;
  const float p = static_cast<float>(s.p), q = static_cast<float>(s.q);
  for (Index i = first_element(); i < walk.elements; i += element_step()) {
    Index at[4];
    walk.at(i, at);
    Floats<N> in[3] = {}, out;
    for (int k = 0; k < Op::kInputs; ++k) {
      const T* const from = static_cast<const T*>(s.in[k]) + at[k + 1];
      if (walk.stride[0][k + 1] != 0) in[k] = load<N>(from);
      else
        for (int e = 0; e < N; ++e) in[k].x[e] = static_cast<float>(*from);
    }
    for (int e = 0; e < N; ++e) out.x[e] = Op::f(in[0][e], in[1][e], in[2][e], p, q);
    store(static_cast<T*>(s.y) + at[0], out);
  }
}

template <class Op, class W>
__global__ void strided_kernel(const __grid_constant__ DeviceSpan s, const __grid_constant__ Runs<4> walk,
                               Index first) {
  using Signed = std::conditional_t<std::is_integral_v<W>, std::int64_t, W>;
  for (Index i = first + first_element(); i < walk.elements; i += element_step()) {
    Index at[4];
    walk.at(i, at);
    W x[3] = {};
    for (int k = 0; k < Op::kInputs; ++k)
      x[k] = with_type(s.in_type[k], [&]<class T>() { return convert<W>(static_cast<const T*>(s.in[k])[at[k + 1]]); });
    const W y = Op::f(x[0], x[1], x[2], static_cast<W>(static_cast<Signed>(s.p)), static_cast<W>(s.q));
    with_type(s.y_type, [&]<class T>() {
      if constexpr (std::is_integral_v<T> || !std::is_integral_v<W>) static_cast<T*>(s.y)[at[0]] = static_cast<T>(y);
    });
  }
}

}  // namespace

/// The walk in packs of n elements, as many as are whole; none where packs do not fit.
inline Runs<4> packed(const DeviceSpan& s, int inputs, Runs<4> walk, int n) {
  Runs<4> none = walk;
  none.elements = 0;
  if (walk.axes == 0 || (walk.axes > 1 && walk.extent[0] % n != 0) || walk.stride[0][0] != 1) return none;
  const void* const at[4] = {s.y, s.in[0], s.in[1], s.in[2]};
  for (int k = 0; k <= inputs; ++k) {
    const Index inner = walk.stride[0][k];
    if ((k > 0 && s.in_type[k - 1] != s.y_type) || (inner != 0 && inner != 1)) return none;
    if (inner == 0) continue;
    if (!is_aligned(at[k])) return none;
    for (int axis = 1; axis < walk.axes; ++axis)
      if (walk.stride[axis][k] % n != 0) return none;
    walk.stride[0][k] = n;
  }
  walk.elements /= n, walk.extent[0] /= n;
  return walk;
}

template <class Op> void run_on_device(Cuda where, const DeviceSpan& s, const Runs<4>& walk) {
  const auto run_strided = [&]<class W>(Index done) {
    launch("elementwise", where, strided_kernel<Op, W>, blocks_for(walk.elements - done), kThreads, 0, s, walk, done);
  };
  if constexpr (kTakesWhole<Op>) {
    bool whole = true;
    for (int k = 0; k < Op::kInputs; ++k) whole = whole && !is_floating(s.in_type[k]);
    if (whole) return run_strided.template operator()<Arithmetic<Op, std::int64_t>>(0);
  }
  const auto run_packed = [&]<class T>() {
    const Runs<4> packs = packed(s, Op::kInputs, walk, kPack<T>);
    if (packs.elements > 0)
      launch("elementwise", where, packed_kernel<Op, T>, blocks_for(packs.elements), kThreads, 0, s, packs);
    return packs.elements * kPack<T>;
  };
  const Index done = s.y_type == DType::f32    ? run_packed.template operator()<float>()
                     : s.y_type == DType::bf16 ? run_packed.template operator()<bf16>()
                                               : 0;
  if (done < walk.elements) run_strided.template operator()<float>(done);
}

/// Names every launcher once, which is what makes the compiler build them.
template <class List> struct BuiltForDevice;
template <class... Ops> struct BuiltForDevice<std::tuple<Ops...>> { static RunOnDevice const all[]; };
template <class... Ops> RunOnDevice const BuiltForDevice<std::tuple<Ops...>>::all[] = {&run_on_device<Ops>...};
template struct BuiltForDevice<AllSpans>;

}  // namespace hilt::spans

namespace hilt::kernels {
namespace {

using namespace cuda;

// Dropout: a thread takes the eight elements that share a counter, at once where it can.
constexpr int kEach = 8;  // elements a counter serves

/// kWhole: every counter serves eight elements, which lie in whole accesses.
template <bool kWhole, class T>
__global__ void dropout_kernel(const T* x, T* y, Index first, Index n, float scale, std::uint32_t rate,
                               RandomKey drawn) {
  const RandomKey key = now(drawn);
  const Index counters = (first + n + kEach - 1) / kEach;
  for (Index c = first / kEach + first_element(); c < counters; c += element_step()) {
    const Index begin = c * kEach - first;
    const auto has = [&](int k) { return begin + k >= 0 && begin + k < n; };
    Floats<kEach> values{};
    if constexpr (kWhole) values = load<kEach>(x + begin);
    else
      for (int k = 0; k < kEach; ++k)
        if (has(k)) values.x[k] = static_cast<float>(x[begin + k]);
    const auto words = drop_words(c, key);
    for (int k = 0; k < kEach; ++k)
      values.x[k] = drop_bits(words, static_cast<std::uint32_t>(k)) >= rate ? values[k] * scale : 0.0f;
    if constexpr (kWhole) store(y + begin, values);
    else
      for (int k = 0; k < kEach; ++k)
        if (has(k)) y[begin + k] = static_cast<T>(values[k]);
  }
}

// ---- optimizer steps: a thread an element with its state, dozens of tensors in one launch -------
/// The tensors of one launch, as many as 4 KiB of parameters hold; blockIdx.y names one.
template <class P, int kMost> struct Parts {
  P part[kMost];

  /// start(parts, grid) for all of these, of which a block takes so many elements at a time.
  template <class F> static void in_launches(std::span<const P> all, Index elements_of_block, F&& start) {
    constexpr Index kBlocks = 1024;  // of one tensor; they stride over what exceeds this
    for (std::size_t first = 0; first < all.size(); first += kMost) {
      const auto some = all.subspan(first, std::min(all.size() - first, std::size_t{kMost}));
      Parts parts;
      std::ranges::copy(some, parts.part);
      const Index longest = std::ranges::max(some, {}, &P::n).n,
                  blocks = std::min(kBlocks, (longest + elements_of_block - 1) / elements_of_block);
      start(parts, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(some.size())));
    }
  }
};
constexpr Index kUpdated = 8 * kThreads;  // elements of a block at a time

using Updates = Parts<AdamWPart, 56>;
using Squares = Parts<SquaresPart, 120>;

template <class T>
__global__ void adamw_kernel(const __grid_constant__ AdamWStep s, const double* norm_of_all, double max_norm,
                             const __grid_constant__ Updates all) {
  const AdamWPart& p = all.part[blockIdx.y];
  const float shrink = static_cast<float>(p.shrink);
  float scale = static_cast<float>(s.scale);
  if (norm_of_all) {
    const double norm = *norm_of_all;
    if (!isfinite(norm)) return;
    if (max_norm > 0 && norm * scale > max_norm) scale = static_cast<float>(max_norm / norm);
  }
  T* const w = static_cast<T*>(p.w);
  const T* const dw = static_cast<const T*>(p.dw);
#pragma unroll 4
  for (Index i = first_element(); i < p.n; i += element_step()) {
    const float weight = p.exact ? p.exact[i] : static_cast<float>(w[i]);
    const float next = adamw_next(s, weight, static_cast<float>(dw[i]) * scale, shrink, p.m[i], p.v[i]);
    if (p.exact) p.exact[i] = next;
    w[i] = static_cast<T>(next);
  }
}

__global__ void squares_kernel(const __grid_constant__ Squares all, Index piece) {
  const SquaresPart& p = all.part[blockIdx.y];
  for (Index k = blockIdx.x; k * piece < p.n; k += gridDim.x) {
    const Index end = min((k + 1) * piece, p.n);
    double sum = with_type(p.type, [&]<class T>() {
      double mine = 0;
#pragma unroll 4
      for (Index i = k * piece + threadIdx.x; i < end; i += kThreads) {
        const double v = static_cast<double>(static_cast<float>(static_cast<const T*>(p.x)[i]));
        mine += v * v;
      }
      return mine;
    });
    sum = block_reduce<Sum>(sum, 0.0);
    if (threadIdx.x == 0) p.sums[k] = sum;
  }
}

__global__ void norm_kernel(const double* sums, Index pieces, const float* loss, double* norm) {
  double sum = 0;
  for (Index i = threadIdx.x; i < pieces; i += kThreads) sum += sums[i];
  sum = block_reduce<Sum>(sum, 0.0);
  if (threadIdx.x == 0) *norm = loss && !isfinite(*loss) ? static_cast<double>(NAN) : sqrt(sum);
}

}  // namespace

template <class T, class At> void dropout(At where, const T* x, T* y, Index first, Index n, double p, RandomKey key) {
  const std::uint32_t rate = drop_rate(p);
  const bool whole = first % kEach == 0 && n % kEach == 0 && is_aligned(x, y);
  launch("dropout", where, whole ? dropout_kernel<true, T> : dropout_kernel<false, T>, blocks_for(n / kEach + 2),
         kThreads, 0, x, y, first, n, static_cast<float>(keep_scale(rate)), rate, key);
}

template <class T, class At>
void adamw_all(At where, const AdamWStep& s, const double* norm, double max_norm, std::span<const AdamWPart> all) {
  Updates::in_launches(all, kUpdated, [&](const Updates& some, dim3 grid) {
    launch("adamw_step", where, adamw_kernel<T>, grid, kThreads, 0, s, norm, max_norm, some);
  });
}
void sums_of_squares(Cuda where, std::span<const SquaresPart> all, Index piece) {
  Squares::in_launches(all, piece, [&](const Squares& some, dim3 grid) {
    launch("global_norm", where, squares_kernel, grid, kThreads, 0, some, piece);
  });
}

void norm_of_sums(Cuda where, const double* sums, Index pieces, const float* loss, double* norm) {
  launch("global_norm", where, norm_kernel, dim3(1), kThreads, 0, sums, pieces, loss, norm);
}

HILT_GPU_KERNEL(dropout)
HILT_GPU_KERNEL(adamw_all)

}  // namespace hilt::kernels
