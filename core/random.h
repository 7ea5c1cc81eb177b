#pragma once
#include "tensor.h"

namespace [[gnu::visibility("default")]] hilt {

/// The low and the high half of a product. nvcc loses sight of its width and makes more of it.
[[gnu::always_inline]] constexpr std::array<std::uint32_t, 2> wide_product(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
  std::uint32_t low, high;
  asm("{.reg .b64 x; mul.wide.u32 x, %2, %3; mov.b64 {%0, %1}, x;}" : "=r"(low), "=r"(high) : "r"(a), "r"(b));
  return {low, high};
#else
  const std::uint64_t product = std::uint64_t{a} * b;
  return {static_cast<std::uint32_t>(product), static_cast<std::uint32_t>(product >> 32)};
#endif
}

/// Philox4x32: 128 random bits as a pure function of a 128-bit counter and a 64-bit key, on every
/// device. 7 rounds are the fewest that are known to pass the usual tests; 10 have a margin.
template <int Rounds = 10>
[[gnu::always_inline]] constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                                                     std::uint64_t key) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < Rounds; ++round) {
    const auto a = wide_product(counter[0], 0xD2511F53), b = wide_product(counter[2], 0xCD9E8D57);
    counter = {b[1] ^ counter[1] ^ k0, b[0], a[1] ^ counter[3] ^ k1, a[0]};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

struct RandomKey {           // a stream of random numbers: element i of stream s under a seed is philox({i, s}, seed)
  std::uint64_t seed = 0;    // what all streams share
  std::uint64_t stream = 0;  // which of them
  /// In a Replay: where the GPU finds by how many streams they begin later this time. Null: none.
  const std::uint64_t* further = nullptr;
};

/// What dropout drops, in 65,536ths: p to the nearest, but never all. Below 2^-17 that is nothing.
constexpr std::uint32_t drop_rate(double p) {
  const auto rate = static_cast<std::uint32_t>(p * 0x1p16 + 0.5);
  return rate < 0xffff ? rate : 0xffff;
}
/// What makes up for it: 1 / (1 - rate).
constexpr double keep_scale(std::uint32_t rate) { return 0x1p16 / (0x1p16 - rate); }
/// Dropout's decisions, 16 bits each, eight a counter: number i is kept if not below the rate.
[[gnu::always_inline]] constexpr std::uint32_t drop_bits(const std::array<std::uint32_t, 4>& words, std::uint32_t i) {
  const std::uint32_t even = i & 4 ? words[2] : words[0], odd = i & 4 ? words[3] : words[1];
  return (i & 2 ? odd : even) >> (i & 1) * 16 & 0xffff;
}

/// Hands out streams, one after the other. Copies share their state; checkpoint() rewinds it.
class Generator {
 public:
  explicit Generator(std::uint64_t seed = 0);  // begins with stream 0
  RandomKey next();                            // a stream nobody had
  operator RandomKey() { return next(); }      // wherever a key is asked for
  RandomKey state() const;                     // what next() would hand out
  void set_state(RandomKey state);             // goes on from there

  /// While one lives, remembers the state each generator had when it was first used on this thread.
  class Recording;

 private:
  std::shared_ptr<RandomKey> state_;
};

/// The generators a piece of code drew from, and where they stood; rewind() puts them back there.
class Generator::Recording {
 public:
  /// further: on a GPU, a word a generator in order of first use; keys drawn meanwhile carry it.
  explicit Recording(const std::uint64_t* further = nullptr, std::size_t words = 0);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  using States = std::vector<std::pair<Generator, RandomKey>>;  // generators and where they stood
  /// First-use states, in order of first use.
  const States& states() const { return states_; }
  /// Sets each generator to its listed state and returns where it stood before.
  static States swap(const States& states);

 private:
  friend class Generator;
  States states_;
  const std::uint64_t* further_;
  std::size_t words_;
  Recording* outer_;
};

/// Uniform on [0, 1), 24 bits; standard normal (Box-Muller). Element i depends on key and i alone.
Tensor rand(const Shape& shape, RandomKey key, DType dtype = DType::f32, Device device = {});
Tensor randn(const Shape& shape, RandomKey key, DType dtype = DType::f32, Device device = {});  // normal
/// Uniform integers in [low, high).
Tensor randint(Index low, Index high, const Shape& shape, RandomKey key, DType dtype = DType::i64, Device device = {});

}  // namespace hilt
