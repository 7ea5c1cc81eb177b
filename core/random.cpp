// Tensors of random numbers: element i comes from Philox block i of its stream. Generators hand out
// streams, and a Recording notes which they handed out.
#include "core/random.h"
#include "core/cuda/kernels.h"
#include "core/dispatch.h"
#include "core/parallel.h"

namespace hilt {
namespace {

using Law = kernels::Draw::Law;

thread_local Generator::Recording* current_recording = nullptr;

Tensor drawn(const char* op, Tensor t, const kernels::Draw& draw) {
  kernels::generate(op, t, draw);
  return t;
}

}  // namespace

Generator::Generator(std::uint64_t seed) : state_(std::make_shared<RandomKey>(RandomKey{seed, 0})) {}
RandomKey Generator::state() const { return *state_; }
void Generator::set_state(RandomKey state) { *state_ = state; }
RandomKey Generator::next() {
  RandomKey key = *state_;
  for (Recording* r = current_recording; r; r = r->outer_) {
    const auto mine = std::ranges::find(r->states_, state_, [](const auto& used) { return used.first.state_; });
    const auto number = static_cast<std::size_t>(mine - r->states_.begin());
    if (mine == r->states_.end()) r->states_.emplace_back(*this, *state_);
    if (!r->further_) continue;
    check(number < r->words_, "Replay: more than ", r->words_, " generators");
    key.further = r->further_ + number;
  }
  ++state_->stream;
  return key;
}

Generator::Recording::Recording(const std::uint64_t* further, std::size_t words)
    : further_(further), words_(words), outer_(std::exchange(current_recording, this)) {}
Generator::Recording::~Recording() { current_recording = outer_; }
Generator::Recording::States Generator::Recording::swap(const States& states) {
  States before;
  before.reserve(states.size());  // all are set, or none
  for (const auto& [generator, key] : states) before.emplace_back(generator, std::exchange(*generator.state_, key));
  return before;
}

Tensor rand(const Shape& shape, RandomKey key, DType dtype, Device device) {
  check(is_floating(dtype), "rand: needs a float type, got ", dtype);
  return drawn("rand", empty(shape, dtype, device), {Law::uniform, key});
}

Tensor randn(const Shape& shape, RandomKey key, DType dtype, Device device) {
  check(is_floating(dtype), "randn: needs a float type, got ", dtype);
  return drawn("randn", empty(shape, dtype, device), {Law::normal, key});
}

Tensor randint(Index low, Index high, const Shape& shape, RandomKey key, DType dtype, Device device) {
  check(low < high, "randint: [", low, ", ", high, ") is empty");
  check(!is_floating(dtype), "randint: needs an integer type, got ", dtype);
  const auto span = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  return drawn("randint", empty(shape, dtype, device), {Law::integer, key, low, span});
}

}  // namespace hilt
