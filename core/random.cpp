// Tensors of random numbers: element i comes from Philox block i of its stream. Generators hand out
// streams, and a Recording notes which they handed out.
#include "core/random.h"
#include <algorithm>
#include <cmath>
#include <numbers>
#include "core/cuda/kernels.h"
#include "core/dispatch.h"
#include "core/parallel.h"

namespace hilt {
namespace {

thread_local Generator::Recording* current_recording = nullptr;

std::array<std::uint32_t, 4> bits_at(RandomKey key, Index i) {
  const auto n = static_cast<std::uint64_t>(i);
  return philox({static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n >> 32),
                 static_cast<std::uint32_t>(key.stream), static_cast<std::uint32_t>(key.stream >> 32)},
                key.seed);
}
double uniform(std::uint32_t bits) { return (bits >> 8) * 0x1p-24; }

/// A tensor of draws: f(i) on the CPU, and the same numbers on a GPU.
template <class F>
Tensor generate(const char* op, Tensor t, RandomKey key, kernels::Draw what, Index low, std::uint64_t span, F f) {
  if (t.device().is_cuda()) {
    if constexpr (kHasCuda)
      kernels::draw(cuda_of(t.device()), what, t.mutable_raw(), t.dtype(), t.numel(), key, low, span);
    return t;
  }
  visit_any(op, t, [&]<class T>(Cpu) {
    T* const out = t.mutable_data<T>();
    parallel_for(t.numel(), 1 << 12, [&](Index begin, Index end) {
      for (Index i = begin; i < end; ++i) out[i] = static_cast<T>(static_cast<wide_t<T>>(f(i)));
    });
  });
  return t;
}

}  // namespace

Generator::Generator(std::uint64_t seed) : state_(std::make_shared<State>(RandomKey{seed, 0})) {}
RandomKey Generator::state() const { return state_->key; }
void Generator::set_state(RandomKey state) { state_->key = state; }
RandomKey Generator::next() {
  RandomKey key = state_->key;
  for (Recording* r = current_recording; r; r = r->outer_) {
    const auto mine = std::ranges::find(r->states_, state_, [](const auto& used) { return used.first.state_; });
    const auto number = static_cast<std::size_t>(mine - r->states_.begin());
    if (mine == r->states_.end()) r->states_.emplace_back(*this, state_->key);
    if (!r->further_) continue;
    check(number < r->words_, "Replay: more than ", r->words_, " generators");
    key.further = r->further_ + number;
  }
  ++state_->key.stream;
  return key;
}

Generator::Recording::Recording(const std::uint64_t* further, std::size_t words)
    : further_(further), words_(words), outer_(std::exchange(current_recording, this)) {}
Generator::Recording::~Recording() { current_recording = outer_; }
Generator::Recording::States Generator::Recording::swap(const States& states) {
  States before;
  before.reserve(states.size());  // all are set, or none
  for (const auto& [generator, key] : states) before.emplace_back(generator, std::exchange(generator.state_->key, key));
  return before;
}

Tensor rand(const Shape& shape, RandomKey key, DType dtype, Device device) {
  check(is_floating(dtype), "rand: needs a float type, got ", dtype);
  return generate("rand", empty(shape, dtype, device), key, kernels::Draw::uniform, 0, 1,
                  [key](Index i) { return uniform(bits_at(key, i)[0]); });
}

Tensor randn(const Shape& shape, RandomKey key, DType dtype, Device device) {
  check(is_floating(dtype), "randn: needs a float type, got ", dtype);
  return generate("randn", empty(shape, dtype, device), key, kernels::Draw::normal, 0, 1, [key](Index i) {
    const auto bits = bits_at(key, i);
    const double radius = std::sqrt(-2 * std::log(1 - uniform(bits[0])));  // 1 - u is never 0
    return radius * std::cos(2 * std::numbers::pi * uniform(bits[1]));
  });
}

Tensor randint(Index low, Index high, const Shape& shape, RandomKey key, DType dtype, Device device) {
  check(low < high, "randint: [", low, ", ", high, ") is empty");
  check(!is_floating(dtype), "randint: needs an integer type, got ", dtype);
  const auto span = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  return generate("randint", empty(shape, dtype, device), key, kernels::Draw::integer, low, span, [=](Index i) {
    const auto bits = bits_at(key, i);
    const std::uint64_t wide = (std::uint64_t{bits[0]} << 32) | bits[1];
    return low + static_cast<Index>(wide % span);  // bias below 2^-32 for spans below 2^32
  });
}

}  // namespace hilt
