// The smallest language model, beside microgpt, which says it in Python: names, a letter at a time.
// One layer of width 16, four heads, 16 positions: 4,192 parameters; Adam, one name a step.
#include <hilt/hilt.h>
#include <fstream>
#include <iostream>
#include <iterator>
#include "program/program.h"

using namespace hilt;

namespace {

constexpr Index kWidth = 16, kHeads = 4, kPositions = 16, kLetters = 27, kEnd = 26, kSteps = 1000;
constexpr auto at = [](auto i) { return static_cast<std::size_t>(i); };

struct Model {
  Generator random{1};
  Tensor letters = drawn(kLetters, kWidth), positions = drawn(kPositions, kWidth), qkv = drawn(kWidth, 3 * kWidth),
         out = drawn(kWidth, kWidth), up = drawn(kWidth, 4 * kWidth), down = drawn(4 * kWidth, kWidth),
         head = drawn(kWidth, kLetters);
  NamedParameters parameters{{"letters", &letters}, {"positions", &positions}, {"qkv", &qkv},  {"out", &out},
                             {"up", &up},           {"down", &down},           {"head", &head}};
  std::vector<PlanPtr> plans;  // of names of each length: a letter attends to itself and those before it
  AttentionOptions how;
  explicit Model(const std::string& backward) : how{.backward = parse_backward(backward)} {
    for (Index n = 0; n <= kPositions; ++n)
      plans.push_back(make_plan({.length = n, .heads = kHeads, .causality = Causality::token}));
  }
  Tensor drawn(Index rows, Index columns) { return randn({rows, columns}, random) * 0.08; }
  static Tensor norm(const Tensor& x) { return rms_norm(x, {}); }  // without weights

  Tensor logits(const Tensor& ids) const {  // of what follows each letter
    const Index n = ids.dim(0);
    Tensor x = norm(embedding(letters, ids) + slice(positions, 0, 0, n));
    const Tensor heads = reshape(matmul(norm(x), qkv), {1, n, 3, kHeads, kWidth / kHeads});
    x = x + matmul(reshape(attention(heads, plans[at(n)], how), {n, kWidth}), out);
    x = x + matmul(relu(matmul(norm(x), up)), down);
    return matmul(x, head);
  }

  std::string sample() {
    std::vector<std::int32_t> ids{kEnd};
    std::string name;
    while (std::ssize(ids) <= kPositions) {
      const Tensor next = logits(from_values(ids, {std::ssize(ids)}))[std::ssize(ids) - 1];
      const Index letter = draw_token(next.to_vector<float>(), {.temperature = 0.5}, rand({}, random).item());
      if (letter == kEnd) break;
      ids.push_back(static_cast<std::int32_t>(letter)), name += static_cast<char>('a' + letter);
    }
    return name;
  }
};

int work(const std::string& text, const std::string& backward) {
  std::ifstream file(text);
  const std::vector<std::string> names(std::istream_iterator<std::string>(file), {});
  if (names.empty()) fail_with(Code::data, "--text (", text, "): no such file, or no names in it, one a line");
  Model model(backward);
  AdamWOptimizer adam({.beta1 = 0.85, .beta2 = 0.99, .weight_decay = 0});
  for (Index step = 0; step < kSteps; ++step) {
    const std::string& name = names[at(step) % names.size()];
    if (name.find_first_not_of("abcdefghijklmnopqrstuvwxyz") != name.npos)
      fail_with(Code::data, "--text (", text, "): '", name, "' has more than the letters a to z");
    std::vector<std::int32_t> ids{kEnd};
    for (const char c : name) ids.push_back(c - 'a');
    ids.push_back(kEnd);
    const Index n = std::min<Index>(std::ssize(ids) - 1, kPositions);
    const Tensor all = from_values(ids, {std::ssize(ids)});
    Tape tape;
    for (const NamedParameter& p : model.parameters) tape.watch(*p.tensor);
    const Tensor loss = cross_entropy(model.logits(slice(all, 0, 0, n)), slice(all, 0, 1, n + 1));
    adam.step(model.parameters, tape.backward(loss), 0.01 * (1 - static_cast<double>(step) / kSteps));
    if (step % 100 == 0 || step + 1 == kSteps) std::cout << "step " << step << ": loss " << loss.item() << '\n';
  }
  for (int i = 0; i < 10; ++i) std::cout << model.sample() << '\n';
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return program::run("names", [&] {
    std::string text = "names.txt", backward(name_of(Backward::fused));
    program::Options options("names", "The smallest language model: names, a letter at a time.");
    options.text("--text", text, "FILE", "Names of letters a to z, one a line");
    options.text("--backward", backward, "MODE", "taped: attention is ops on the tape; fused: one op, a kernel");
    return options.parse(argc, argv) ? work(text, backward) : 0;
  });
}
