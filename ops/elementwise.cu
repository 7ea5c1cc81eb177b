// The elementwise ops on a GPU: the functors of elementwise.h, each in three kernels. Where all is
// f32 or all is bf16 and whole packs lie together, a thread moves 16 bytes a tensor; everything
// else takes the kernel that looks at types and strides element by element. Arithmetic is f32, or
// i64 where all are integers.
#include "core/cuda/pack.cuh"
#include "ops/elementwise.h"

namespace hilt::spans {
namespace {

using namespace cuda;

// `walk` counts packs; an input of inner stride 0 repeats one element.
template <class Op, class T>
__global__ void packed_kernel(const __grid_constant__ DeviceSpan s, const __grid_constant__ Walk<4> walk) {
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
__global__ void strided_kernel(const __grid_constant__ DeviceSpan s, const __grid_constant__ Walk<4> walk,
                               Index first) {
  using Signed = std::conditional_t<std::is_integral_v<W>, std::int64_t, W>;
  for (Index i = first + first_element(); i < walk.elements; i += element_step()) {
    Index at[4];
    walk.at(i, at);
    W x[3] = {};
    for (int k = 0; k < Op::kInputs; ++k)
      x[k] = with_type(s.in_type[k], [&]<class T>() { return convert<W>(static_cast<const T*>(s.in[k])[at[k + 1]]); });
    const W y = Op::f(x[0], x[1], x[2], static_cast<W>(static_cast<Signed>(s.p)), static_cast<W>(s.q));
    if constexpr (std::is_integral_v<W>) {
      if (s.y_type == DType::i64) static_cast<std::int64_t*>(s.y)[at[0]] = static_cast<std::int64_t>(y);
      else if (s.y_type == DType::i32) static_cast<std::int32_t*>(s.y)[at[0]] = static_cast<std::int32_t>(y);
      else static_cast<std::uint8_t*>(s.y)[at[0]] = static_cast<std::uint8_t>(y);
    } else if (s.y_type == DType::f32) static_cast<float*>(s.y)[at[0]] = y;
    else if (s.y_type == DType::bf16) static_cast<bf16*>(s.y)[at[0]] = bf16(y);
    else if (s.y_type == DType::f16) static_cast<f16*>(s.y)[at[0]] = f16(y);
    else static_cast<std::uint8_t*>(s.y)[at[0]] = static_cast<std::uint8_t>(y);
  }
}

}  // namespace

/// The walk in packs of n elements, as many as are whole; none where packs do not fit.
inline Walk<4> packed(const DeviceSpan& s, int inputs, Walk<4> walk, int n) {
  const Walk<4> none = [&] {
    Walk<4> w = walk;
    w.elements = 0;
    return w;
  }();
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

template <class Op> void run_on_device(Cuda where, const DeviceSpan& s, const Walk<4>& walk) {
  const auto run_strided = [&]<class W>(Index done) {
    launch("elementwise", where, strided_kernel<Op, W>, blocks_for(walk.elements - done), kThreads, 0, s, walk, done);
  };
  if constexpr (kTakesWhole<Op>) {
    bool whole = true;
    for (int k = 0; k < Op::kInputs; ++k) whole = whole && !is_floating(s.in_type[k]);
    if (whole) return run_strided.template operator()<Arithmetic<Op, std::int64_t>>(0);
  }
  const auto run_packed = [&]<class T>() {
    const Walk<4> packs = packed(s, Op::kInputs, walk, kPack<T>);
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
