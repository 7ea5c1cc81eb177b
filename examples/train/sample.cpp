// Draws tokens from a model's logits one after the other; finds the run and the checkpoint to draw
// from.
#include "sample.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <limits>
#include <numeric>

#include "../program/program.h"

namespace train {
namespace {

/// A token by the model's logits: temperature, then the likeliest only, then one draw.
std::int32_t pick(std::span<const float> logits, const Settings& s, Draws& draws) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater{}, [&](std::int32_t i) { return logits[static_cast<std::size_t>(i)]; });
  if (s.temperature == 0) return order[0];
  std::vector<double> p;
  double total = 0;
  for (const std::int32_t i : order) {
    p.push_back(std::exp((static_cast<double>(logits[static_cast<std::size_t>(i)]) -
                          static_cast<double>(logits[static_cast<std::size_t>(order[0])])) /
                         s.temperature));
    total += p.back();
  }
  const std::size_t most = s.top_k > 0 ? std::min(static_cast<std::size_t>(s.top_k), p.size()) : p.size();
  std::size_t kept = 0;
  double share = 0;
  while (kept < most && (kept == 0 || share < s.top_p * total)) share += p[kept++];
  double left = draws.uniform() * share;
  std::size_t at = 0;
  while (at + 1 < kept && left >= p[at]) left -= p[at++];
  return order[at];
}

}  // namespace

std::string sample_text(const hilt::Transformer& model, const Vocabulary& vocabulary, const Settings& s,
                        hilt::RandomKey key) {
  const hilt::Tape::Pause pause;
  Draws draws(key);
  const std::int32_t newline = std::max(vocabulary.find(U'\n'), 0);
  std::vector<std::int32_t> written = vocabulary.encode(s.prompt, "--prompt");
  if (s.task == "stories" || written.empty()) written.insert(written.begin(), newline);
  const Index context = model.config.context;
  std::size_t from = 0;  // the first token that the model sees
  for (Index n = 0; n < s.tokens; ++n) {
    if (static_cast<Index>(written.size() - from) > context) {
      from = written.size() - static_cast<std::size_t>(context);
      // A story is understood from its beginning: forget whole ones.
      const auto next = std::find(written.begin() + static_cast<std::ptrdiff_t>(from), written.end(), newline);
      if (s.task == "stories" && next != written.end()) from = static_cast<std::size_t>(next - written.begin());
    }
    hilt::Tensor ids = hilt::zeros({1, context}, hilt::DType::i32);
    std::copy(written.begin() + static_cast<std::ptrdiff_t>(from), written.end(), ids.mutable_data<std::int32_t>());
    const hilt::Tensor logits = model.logits(ids);
    const Index last = static_cast<Index>(written.size() - from) - 1;
    const std::vector<float> row = hilt::slice(logits, 1, last, last + 1).to_vector<float>();
    written.push_back(pick(row, s, draws));
  }
  const std::size_t skipped = s.task == "stories" || s.prompt.empty() ? 1 : 0;
  return vocabulary.decode(std::span(written).subspan(skipped));
}

std::string for_a_terminal(const std::string& sample) {
  return ::isatty(STDOUT_FILENO) ? program::printable(sample, "\n\t") : sample;
}

std::string sample_board(const hilt::Transformer& model, const Settings& s, Index number) {
  const hilt::Tape::Pause pause;
  const hilt::Grid grid = board_of(s);
  const auto task = make_task(s);
  const hilt::Batch b = task->batch(Split::validation, number, 1);
  const hilt::Tensor guess = hilt::moved(hilt::argmax(model.logits(b.inputs)), {});
  const auto *const in = b.inputs.data<std::int32_t>(), *const truth = b.targets.data<std::int32_t>();
  const auto* const out = guess.data<std::int64_t>();
  std::string text = "board, the model's next board (x: wrong)\n";
  Index wrong = 0;
  for (Index y = 0; y < grid.height; ++y) {
    for (Index x = 0; x < grid.width; ++x) text += in[y * grid.width + x] ? '#' : '.';
    text += "   ";
    for (Index x = 0; x < grid.width; ++x) {
      const Index i = y * grid.width + x;
      wrong += out[i] != truth[i];
      text += out[i] != truth[i] ? 'x' : out[i] ? '#' : '.';
    }
    text += '\n';
  }
  return text + std::to_string(wrong) + " of " + std::to_string(grid.cells()) + " cells wrong\n";
}

std::string newest_run() {
  std::string newest = "out/train";
  for (int n = 2; std::filesystem::exists("out/train-" + std::to_string(n)); ++n)
    if (!hilt::checkpoint_steps("out/train-" + std::to_string(n)).empty()) newest = "out/train-" + std::to_string(n);
  return newest;
}

std::string next_run() {
  std::string next = "out/train";
  for (int n = 2; std::filesystem::exists(next); ++n) next = "out/train-" + std::to_string(n);
  return next;
}

void adopt_checkpoint(program::Options& options, Settings& s, const hilt::Checkpoint& checkpoint, bool strictly) {
  constexpr std::string_view kPrefix = "config.";
  hilt::SafetensorsMetadata given;
  for (const auto& [key, value] : checkpoint.file().metadata()) {
    if (!key.starts_with(kPrefix)) continue;
    const std::string name = "--" + key.substr(kPrefix.size());
    if (!options.given(name)) options.set(name, value);
    else given[key.substr(kPrefix.size())] = value;
  }
  if (!strictly) return;
  hilt::SafetensorsMetadata asked, theirs;
  for (const auto& [key, value] : decisive(options, s)) {
    const auto found = given.find(key);
    if (key == "steps" && s.schedule == "constant") continue;  // how long it goes on changes nothing before
    if (found != given.end()) asked[key] = value, theirs[key] = found->second;
  }
  const std::vector<std::string> different = hilt::differences(theirs, "", asked);
  if (different.empty()) return;
  std::string all;
  for (const std::string& line : different) all += (all.empty() ? "--" : "; --") + line;
  hilt::fail("--resume: ", checkpoint.path(), " was trained otherwise: ", all,
             "; leave these options out, or name another --out");
}

namespace {

hilt::Checkpoint last_checkpoint(Settings& s) {
  if (s.out.empty()) s.out = newest_run();
  const std::vector<Index> steps = hilt::checkpoint_steps(s.out);
  if (steps.empty())
    hilt::fail_with(hilt::Code::data, "--out (", s.out,
                    "): no checkpoint there to go on from; train first, or name the directory of a run");
  return hilt::Checkpoint(s.out + '/' + hilt::checkpoint_name(steps.back()));
}

}  // namespace

void follow_up(program::Options& options, Settings& s) {
  options.then([&] {
    if (s.resume || s.sample_only) {
      adopt_checkpoint(options, s, last_checkpoint(s), s.resume);
    } else {
      if (s.out.empty()) s.out = next_run();
      adopt_defaults(options, s);
    }
    if (!s.sample_only) check_settings(options, s);
  });
}

void declare_sample(program::Options& options, Settings& s) {
  options.text("--out", s.out, "DIR", "Where train put the run; without it the newest of out/train, out/train-2, ..");
  declare_sampling(options, s);
  options.integer("--seed", s.seed, 0, std::numeric_limits<std::int64_t>::max(),
                  "Of the draws, and the number of a board; without it the run's");
}

void follow_up_sample(program::Options& options, Settings& s) {
  options.then([&] {
    program::Options all("train", "");  // under these names a checkpoint keeps what it decides
    declare(all, s);
    const Index seed = s.seed;
    adopt_checkpoint(all, s, last_checkpoint(s), false);
    if (options.given("--seed")) s.seed = seed;
  });
}

int sample_from_checkpoint(const Settings& s) {
  const hilt::Checkpoint checkpoint(s.out + '/' + hilt::checkpoint_name(hilt::checkpoint_steps(s.out).back()));
  const Vocabulary vocabulary = Vocabulary::from_text(checkpoint.get("vocabulary"));
  const hilt::TransformerConfig config = model_config(s, vocabulary.size());
  hilt::Transformer model = hilt::make_transformer(config, 0, s.dtype == "bf16" ? hilt::DType::bf16 : hilt::DType::f32);
  std::vector<hilt::SafetensorsItem> items;
  model.visit_parameters("", [&](const std::string& name, hilt::Tensor& t) { items.push_back({"model." + name, t}); });
  checkpoint.read(items, "model.");
  if (s.is_life()) {
    std::cout << sample_board(model, s, s.seed);
    return 0;
  }
  std::string text = sample_text(model, vocabulary, s, {static_cast<std::uint64_t>(s.seed), 0x73616d706c65});
  if (!text.ends_with('\n')) text += '\n';
  std::cout << for_a_terminal(text);
  return 0;
}

}  // namespace train
