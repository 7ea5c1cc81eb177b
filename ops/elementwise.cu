// The elementwise ops on a GPU: the functors of elementwise.h, each in three kernels. Dense f32 and bf16 of one shape move 16 bytes a
// thread and tensor; everything else (broadcast, strided, f16, the u8 of where and greater) takes the kernel that looks at types and
// strides element by element. Arithmetic is f32.
#include "core/cuda/launch.cuh"
#include "core/convert.h"
#include "ops/elementwise.h"

namespace hilt::spans {
namespace {

using namespace cuda;

template <class T, int N> struct alignas(sizeof(T) * N) Pack { T x[N]; };
template <class T> constexpr int kPack = 16 / static_cast<int>(sizeof(T));

template <class Op, class T>
__global__ void dense_kernel(const __grid_constant__ DeviceSpan s, Index n) {
  constexpr int N = kPack<T>;
  const Index packs = n / N;
  T* const y = static_cast<T*>(s.y);
  for (Index i = first_element(); i < packs; i += element_step()) {
    Pack<T, N> in[3], out;
    for (int k = 0; k < Op::kInputs; ++k) in[k] = static_cast<const Pack<T, N>*>(s.in[k])[i];
    for (int e = 0; e < N; ++e) {
      float x[3] = {};
      for (int k = 0; k < Op::kInputs; ++k) x[k] = static_cast<float>(in[k].x[e]);
      out.x[e] = static_cast<T>(Op::f(x[0], x[1], x[2], s.p, s.q));
    }
    reinterpret_cast<Pack<T, N>*>(y)[i] = out;
  }
  const Index left = packs * N + first_element();  // fewer than a pack
  if (left < n) {
    float x[3] = {};
    for (int k = 0; k < Op::kInputs; ++k) x[k] = static_cast<float>(static_cast<const T*>(s.in[k])[left]);
    y[left] = static_cast<T>(Op::f(x[0], x[1], x[2], s.p, s.q));
  }
}

template <class Op>
__global__ void strided_kernel(const __grid_constant__ DeviceSpan s, const __grid_constant__ Walk<4> walk) {
  for (Index i = first_element(); i < walk.elements; i += element_step()) {
    Index at[4];
    walk.at(i, at);
    float x[3] = {};
    for (int k = 0; k < Op::kInputs; ++k)
      x[k] = with_type(s.in_type[k], [&]<class T>() { return static_cast<float>(static_cast<const T*>(s.in[k])[at[k + 1]]); });
    const float y = Op::f(x[0], x[1], x[2], s.p, s.q);
    if (s.y_type == DType::f32) static_cast<float*>(s.y)[at[0]] = y;
    else if (s.y_type == DType::bf16) static_cast<bf16*>(s.y)[at[0]] = bf16(y);
    else if (s.y_type == DType::f16) static_cast<f16*>(s.y)[at[0]] = f16(y);
    else static_cast<std::uint8_t*>(s.y)[at[0]] = static_cast<std::uint8_t>(y);
  }
}

}  // namespace

template <class Op>
void run_on_device(Cuda where, const DeviceSpan& s, const Walk<4>& walk) {
  bool dense = walk.is_flat();
  for (int k = 0; k < Op::kInputs; ++k) dense = dense && s.in_type[k] == s.y_type && reinterpret_cast<std::uintptr_t>(s.in[k]) % 16 == 0;
  dense = dense && reinterpret_cast<std::uintptr_t>(s.y) % 16 == 0;
  const Index n = walk.elements;
  if (dense && s.y_type == DType::f32) launch("elementwise", where, dense_kernel<Op, float>, blocks_for(n, kPack<float>), kThreads, 0, s, n);
  else if (dense && s.y_type == DType::bf16) launch("elementwise", where, dense_kernel<Op, bf16>, blocks_for(n, kPack<bf16>), kThreads, 0, s, n);
  else launch("elementwise", where, strided_kernel<Op>, blocks_for(n), kThreads, 0, s, walk);
}

/// Names every launcher once, which is what makes the compiler build them.
template <class List> struct BuiltForDevice;
template <class... Ops>
struct BuiltForDevice<std::tuple<Ops...>> {
  static RunOnDevice const all[];
};
template <class... Ops>
RunOnDevice const BuiltForDevice<std::tuple<Ops...>>::all[] = {&run_on_device<Ops>...};
template struct BuiltForDevice<AllSpans>;

}  // namespace hilt::spans
