// Optimizer steps on a GPU: a thread takes an element with all its state. Sums of squares: a block a piece, the pieces added on the host.
#include "core/cuda/reduce.cuh"
#include "ops/kernels.h"

namespace hilt::kernels {
namespace {

using namespace cuda;

struct Rates { float b1, b2, a1, a2, shrink, rate, c2, epsilon; };

template <class T>
__global__ void adamw_kernel(const __grid_constant__ Rates s, T* w, const T* dw, float* m, float* v, float* exact, Index n) {
  for (Index i = first_element(); i < n; i += element_step()) {
    const float g = static_cast<float>(dw[i]), weight = exact ? exact[i] : static_cast<float>(w[i]);
    const float mean = s.b1 * m[i] + s.a1 * g, square = s.b2 * v[i] + s.a2 * g * g;
    const float next = weight - (s.shrink * weight + s.rate * mean / (sqrtf(square * s.c2) + s.epsilon));
    m[i] = mean, v[i] = square;
    if (exact) exact[i] = next;
    w[i] = static_cast<T>(next);
  }
}

template <class T>
__global__ void sgd_kernel(float rate, float pull, float mu, T* w, const T* dw, float* u, Index n) {
  for (Index i = first_element(); i < n; i += element_step()) {
    const float weight = static_cast<float>(w[i]);
    float g = static_cast<float>(dw[i]) + pull * weight;
    if (u) u[i] = g = mu * u[i] + g;
    w[i] = static_cast<T>(weight - rate * g);
  }
}

template <class T>
__global__ void squares_kernel(const T* x, double* part, Index n, Index piece) {
  const Index end = min((blockIdx.x + 1) * piece, n);
  double sum = 0;
  for (Index i = blockIdx.x * piece + threadIdx.x; i < end; i += blockDim.x) {
    const double v = static_cast<double>(static_cast<float>(x[i]));
    sum += v * v;
  }
  sum = block_reduce<Sum>(sum, 0.0);
  if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

}  // namespace

template <class T>
void adamw(Cuda where, const AdamWStep& s, T* w, const T* dw, float* m, float* v, float* exact, Index n) {
  const auto f = [](double x) { return static_cast<float>(x); };
  const Rates rates{f(s.beta1), f(s.beta2), f(1 - s.beta1), f(1 - s.beta2), f(s.shrink), f(s.lr * s.correction1), f(s.correction2), f(s.epsilon)};
  launch("adamw_step", where, adamw_kernel<T>, blocks_for(n), kThreads, 0, rates, w, dw, m, v, exact, n);
}
template <class T>
void sgd(Cuda where, double lr, double decay, double momentum, T* w, const T* dw, float* u, Index n) {
  launch("sgd_step", where, sgd_kernel<T>, blocks_for(n), kThreads, 0, static_cast<float>(lr), static_cast<float>(decay), static_cast<float>(momentum),
         w, dw, u, n);
}
template <class T>
void sums_of_squares(Cuda where, const T* x, double* part, Index n, Index piece) {
  launch("global_norm", where, squares_kernel<T>, dim3(static_cast<unsigned>((n + piece - 1) / piece)), kThreads, 0, x, part, n, piece);
}

template void adamw(Cuda, const AdamWStep&, float*, const float*, float*, float*, float*, Index);
template void adamw(Cuda, const AdamWStep&, bf16*, const bf16*, float*, float*, float*, Index);
template void adamw(Cuda, const AdamWStep&, f16*, const f16*, float*, float*, float*, Index);
template void sgd(Cuda, double, double, double, float*, const float*, float*, Index);
template void sgd(Cuda, double, double, double, bf16*, const bf16*, float*, Index);
template void sgd(Cuda, double, double, double, f16*, const f16*, float*, Index);
template void sums_of_squares(Cuda, const float*, double*, Index, Index);
template void sums_of_squares(Cuda, const bf16*, double*, Index, Index);
template void sums_of_squares(Cuda, const f16*, double*, Index, Index);

}  // namespace hilt::kernels
