#pragma once
#include <hilt/hilt.h>
#include <cmath>
#include <string>
#include <vector>

// The smallest language model, of names a letter at a time, as microgpt has it: one layer of width
// 16, four heads, 16 positions, 4,192 parameters; Adam 0.85/0.99, a name a step. Peers begin with
// the same names and weights: whole numbers alone decide them.

namespace names {

using namespace hilt;

inline constexpr Index kWidth = 16, kHeads = 4, kPositions = 16, kLetters = 27, kEnd = 26;
inline constexpr Index kRows[] = {kLetters, kPositions, kWidth, kWidth, kWidth, 4 * kWidth, kWidth};
inline constexpr Index kColumns[] = {kWidth, kWidth, 3 * kWidth, kWidth, 4 * kWidth, kWidth, kLetters};
inline std::size_t at(Index i) { return static_cast<std::size_t>(i); }
inline double rate(Index step, Index steps) {
  return 0.01 * (1 - static_cast<double>(step) / static_cast<double>(steps));
}

class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(seed) {}
  std::uint64_t below(std::uint64_t n) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % n;
  }

 private:
  std::uint64_t state_;
};

/// Made of syllables: of 7 letters or so, as letters 0 .. 25 between two ends.
inline std::vector<std::vector<std::int32_t>> made_names(Index count) {
  Draws draws(12345);
  std::vector<std::vector<std::int32_t>> out(at(count));
  for (auto& name : out) {
    name.push_back(kEnd);
    for (std::uint64_t k = 2 + draws.below(3); k > 0; --k) {
      name.push_back("bdfgklmnrstvz"[draws.below(13)] - 'a');
      name.push_back("aeiou"[draws.below(5)] - 'a');
    }
    if (draws.below(2)) name.push_back("nrs"[draws.below(3)] - 'a');
    name.push_back(kEnd);
  }
  return out;
}

/// Nearly normal, of deviation 0.08: letters, positions, qkv, out, up, down, head.
inline std::vector<std::vector<float>> start() {
  Draws draws(1);
  std::vector<std::vector<float>> out;
  for (std::size_t i = 0; i < std::size(kRows); ++i)
    for (auto& w : out.emplace_back(at(kRows[i] * kColumns[i]))) {
      std::int64_t sum = 0;
      for (int k = 0; k < 12; ++k) sum += static_cast<std::int64_t>(draws.below(1 << 20));
      w = static_cast<float>(0.08 * (static_cast<double>(sum) / (1 << 20) - 6));
    }
  return out;
}

struct Model {
  std::vector<Tensor> w;
  NamedParameters parameters;
  std::vector<PlanPtr> plans;
  Tensor one = ones({kWidth});
  AdamWOptimizer adam{{.beta1 = 0.85, .beta2 = 0.99, .weight_decay = 0}};

  Model() {
    for (const auto& values : start()) w.push_back(from_values(values, {kRows[w.size()], kColumns[w.size()]}));
    for (std::size_t i = 0; i < w.size(); ++i) parameters.push_back({"w" + std::to_string(i), &w[i]});
    for (Index n = 0; n <= kPositions; ++n)
      plans.push_back(make_plan({.length = n, .heads = kHeads, .causality = Causality::token}));
  }
  Model(const Model&) = delete;
  Tensor norm(const Tensor& x) const { return rms_norm(x, one); }
  Tensor behind_attention(const Tensor& x, const Tensor& a) const {
    const Tensor y = x + matmul(a, w[3]);
    return matmul(y + matmul(relu(matmul(norm(y), w[4])), w[5]), w[6]);
  }
  /// The logits of a whole name.
  Tensor whole(const Tensor& ids, Backward backward) const {
    const Index n = ids.dim(0);
    const Tensor x = norm(embedding(w[0], ids) + slice(w[1], 0, 0, n));
    const Tensor heads = reshape(matmul(norm(x), w[2]), {1, n, 3, kHeads, kWidth / kHeads});
    return behind_attention(x, reshape(attention(heads, plans[at(n)], {.backward = backward}), {n, kWidth}));
  }
  /// Token by token, keys and values in lists, as microgpt goes.
  Tensor by_token(const Tensor& ids) const {
    std::vector<Tensor> keys, values, logits;
    for (Index t = 0; t < ids.dim(0); ++t) {
      const Tensor x = norm(embedding(w[0], slice(ids, 0, t, t + 1)) + slice(w[1], 0, t, t + 1));
      const Tensor qkv = reshape(matmul(norm(x), w[2]), {3, kHeads, 1, kWidth / kHeads});
      keys.push_back(qkv[1]), values.push_back(qkv[2]);
      const Tensor k = cat(keys, 1), v = cat(values, 1);
      const Tensor scores = matmul(qkv[0], transpose(k)) * (1 / std::sqrt(static_cast<double>(kWidth / kHeads)));
      logits.push_back(behind_attention(x, reshape(matmul(softmax(scores), v), {1, kWidth})));
    }
    return cat(logits, 0);
  }

  /// One step; the loss before it. mode: taped, fused or token.
  double step(const std::vector<std::int32_t>& name, const std::string& mode, double lr, std::size_t* nodes = nullptr) {
    const Index n = std::min<Index>(std::ssize(name) - 1, kPositions);
    const Tensor all = from_values(name, {std::ssize(name)}), ids = slice(all, 0, 0, n);
    Tape tape;
    for (const NamedParameter& p : parameters) tape.watch(*p.tensor);
    const Tensor logits = mode == "token" ? by_token(ids) : whole(ids, parse_backward(mode));
    const Tensor loss = cross_entropy(logits, slice(all, 0, 1, n + 1));
    if (nodes) *nodes = tape.size();
    adam.step(parameters, tape.backward(loss), lr);
    return loss.item();
  }
};

}  // namespace names
