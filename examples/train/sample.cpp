// Shows what a model writes, piece by piece; finds the run and the checkpoint to draw from.
#include "run.h"
#include <unistd.h>
#include <iostream>

namespace train {

/// How much of a text is whole characters: all but one that is not there to its end.
static std::size_t whole_characters(std::string_view text) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;  // not the first byte of one
    return static_cast<std::size_t>(std::countl_one(byte)) > back ? text.size() - back : text.size();  // has so many
  }
  return text.size();
}

/// No tensor shows how long a model's rows are: one that would take minutes a token is refused.
static void check_row(const hilt::TransformerConfig& c, const hilt::Checkpoint& checkpoint) {
  constexpr double kMost = 1e13;
  const auto context = static_cast<double>(c.context);
  const auto is_dense = [](const hilt::Branch& b) { return b.kind == hilt::Branch::Kind::dense; };
  const bool all_keys = std::ranges::any_of(c.pattern, is_dense) || std::ranges::any_of(c.pattern_odd, is_dense);
  const double pass =
      2 * context *
      (static_cast<double>(count_parameters(c)) + (all_keys ? context * static_cast<double>(c.width * c.layers) : 0));
  if (pass > kMost)
    fail_with(Code::data, checkpoint.path(), ": a token of a sample would take ", pass, " operations in rows of ",
              c.context, ", at most ", kMost, " are done; is it from a stranger?");
  // The stream, its norms, q, k, v, two of the hidden layer, logits, and the keys and values.
  program::require_memory(checkpoint.path(),
                          program::product_of({c.context, (8 + 2 * c.layers) * c.width + c.vocab, sizeof(float)}),
                          "is it from a stranger?");
}

/// What a run goes on from is its newest checkpoint; a sample is of the best.
static hilt::Checkpoint chosen_checkpoint(const Settings& s) {
  const std::string best = s.out + '/' + hilt::kBestCheckpoint;
  if (!s.resume && !s.last && std::filesystem::exists(best)) return hilt::Checkpoint(best);
  const std::vector<Index> steps = hilt::checkpoint_steps(s.out);
  if (steps.empty())
    fail_with(Code::data, "--out (", s.out,
              "): no checkpoint there to go on from; train first, or name the directory of a run");
  return hilt::Checkpoint(s.out + '/' + hilt::checkpoint_name(steps.back()));
}

Sample sample_text(const hilt::Transformer& model, const Vocabulary& vocabulary, const Settings& s, hilt::RandomKey key,
                   const std::function<void(std::string_view)>& show) {
  if (s.task == "names" && s.stop.empty()) {  // each begins where rows do
    Settings one = s;
    one.stop = "\n", one.tokens = std::min(s.tokens, s.context);
    Sample all;
    for (std::uint64_t i = 0; i < 10; ++i) {
      Sample name = sample_text(model, vocabulary, one, {key.seed, key.stream + i}, {});  // the next seed has others
      all.text += name.text += '\n', all.tokens += name.tokens;
      if (show) show(name.text);
    }
    return all;
  }
  const std::int32_t newline = std::max(vocabulary.find("\n"), 0);
  const bool stories = s.task == "stories", begins = stories || s.task == "names";
  std::vector<std::int32_t> prompt = vocabulary.encode(s.prompt, "--prompt");
  if (begins || prompt.empty()) prompt.insert(prompt.begin(), newline);
  const std::size_t skipped = begins || s.prompt.empty() ? 1 : 0;
  std::string text = vocabulary.decode(std::span(prompt).subspan(skipped));
  const std::size_t prompted = text.size();
  std::size_t shown = 0;
  const auto show_until = [&](std::size_t end) {
    if (show && end > shown) show(std::string_view(text).substr(shown, end - shown));
    shown = std::max(shown, end);
  };
  Index n = 0;
  const auto goes_on = [&](std::int32_t token) {
    ++n;
    // What may be the beginning of where to stop is not shown before it is known.
    const std::size_t held = s.stop.empty() ? 0 : s.stop.size() - 1;
    const std::size_t before = std::max(prompted, text.size() - std::min(held, text.size()));
    text += vocabulary.decode(std::span(&token, 1));
    if (const std::size_t stop = text.find(s.stop, before); !s.stop.empty() && stop != text.npos) {
      text.resize(stop);
      return false;
    }
    show_until(whole_characters(std::string_view(text).substr(0, text.size() - std::min(held, text.size()))));
    return true;
  };
  hilt::KeyValueCache cache(model.config.context);
  // A story is understood from its beginning: whole ones are forgotten.
  const hilt::Sampling how{
      .temperature = s.temperature, .top_p = s.top_p, .top_k = s.top_k, .boundary = stories ? newline : -1};
  try {
    hilt::generate(model, cache, std::move(prompt), s.tokens, how, key, goes_on);
  } catch (const hilt::Error& e) {
    constexpr std::string_view kGenerate = "generate: ";
    if (e.code() != Code::not_a_number) throw;
    fail_with(e.code(), "sample: ", std::string_view(e.what()).substr(kGenerate.size()), "; the weights are too large");
  }
  show_until(text.size());
  return {text, n};
}

std::string for_a_terminal(const std::string& sample) {
  return ::isatty(STDOUT_FILENO) ? program::printable(sample, "\n\t") : sample;
}

std::string sample_board(const hilt::Transformer& model, const Task& task, const Settings& s, Index number) {
  const hilt::Tape::Pause pause;
  const hilt::Batch b = task.batch(Split::validation, number % std::numeric_limits<Index>::max(), 1);
  const hilt::Tensor logits = model.logits(b.inputs);
  if (const auto odd = program::not_finite(logits))
    fail_with(Code::not_a_number, "sample: the logits hold ", *odd, "; the weights are too large");
  const std::vector<Index> guess = hilt::argmax(logits).to_vector<Index>(), truth = b.targets.to_vector<Index>();
  const auto* const in = b.inputs.data<std::int32_t>();
  const Task::Exact exact = task.exact(in, b.targets.data<std::int32_t>());
  const Index width = board_of(s).width;
  Index wrong = 0;
  std::string text = std::string(s.profile().picture) + '\n';
  for (Index first = 0; first < std::ssize(guess); first += width) {
    std::string line[3];
    for (Index i = first; i < first + width; ++i) {
      const auto k = at(i);
      wrong += guess[k] != truth[k];
      line[0] += in[i] ? '#' : '.';
      line[1] += guess[k] != truth[k] ? 'x' : guess[k] ? '#' : '.';
      line[2] += truth[k] ? '#' : '.';
    }
    text += line[0] + "   " + line[1] + (exact.cost < 0 ? "" : "   " + line[2]) + '\n';
  }
  text += std::to_string(wrong) + " of " + std::to_string(guess.size()) + ' ' + s.profile().target + "s wrong";
  if (exact.cost >= 0)
    text += format(", of the %s %.0f", s.profile().reader, static_cast<double>(guess.size()) - exact.right);
  return text + '\n';
}

// The last of out/train, out/train-2, .. that holds checkpoints.
static std::string newest_run() {
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

void adopt_checkpoint(program::Options& options, Settings& s, const hilt::Checkpoint& checkpoint, bool to_resume) {
  constexpr std::string_view kPrefix = "config.";
  hilt::SafetensorsMetadata groups, theirs, asked;
  for (const auto& [key, value, is_text, group, preset] : options.values()) groups[key] = group;
  for (const auto& [key, value] : checkpoint.file().metadata()) {
    if (!key.starts_with(kPrefix)) continue;
    const std::string name = key.substr(kPrefix.size()), &group = groups[name];
    if (group != kModel && group != kRun)
      fail_with(Code::data, checkpoint.path(), ": its metadata say ", key, " (", value,
                "): no run keeps that, and no file decides it; is it from a stranger, or a newer version?");
    theirs[name] = value;
    if (options.given("--" + name) || (group == kRun && !to_resume)) continue;
    if (value.find(".npy") != value.npos)  // of blocks
      fail_with(Code::data, checkpoint.path(), ": ", key, " (", value,
                "): names a file, and no file is opened because another says so; name it again with train ",
                to_resume ? "--resume" : "--sample-only", " --", name, " ", value);
    try {
      options.set("--" + name, value, checkpoint.path());
    } catch (const hilt::Error& e) { fail_with(Code::data, e.what()); }
  }
  for (const auto& [key, value, is_text, group, preset] : options.values()) {
    if (group == kCall || !options.given("--" + key) || (!theirs.contains(key) && value == preset)) continue;
    // How long a constant rate goes on changes nothing before, and a sample has draws of its own.
    if (to_resume ? key == "steps" && s.schedule == "constant" : key == "seed" || key == "steps") continue;
    asked[key] = value;
  }
  std::erase_if(theirs, [&](const auto& entry) { return !asked.contains(entry.first); });
  const std::vector<std::string> different = hilt::differences(theirs, "", asked);
  if (different.empty()) return;
  fail(to_resume ? "--resume: " : "--sample-only: ", checkpoint.path(), " was trained otherwise: --",
       program::joined(different, "; --"), "; leave these options out, or name another --out");
}

void check_finite(const hilt::SafetensorsFile& file, const std::string& prefix) {
  for (const hilt::SafetensorsEntry& e : file.entries())
    if (const auto odd = e.name.starts_with(prefix) ? program::not_finite(file.read(e.name)) : std::nullopt)
      fail_with(Code::not_a_number, file.path(), ": tensor ", e.name, " holds ", *odd,
                "; take a file whose numbers are finite");
}

void check_sizes(const hilt::TransformerConfig& config, const hilt::Checkpoint& checkpoint) {
  Index held = 0;
  for (const hilt::SafetensorsEntry& entry : checkpoint.file().entries())
    if (entry.name.starts_with("model.")) held += entry.shape.numel();
  if (const Index needed = count_parameters(config); needed != held)
    fail_with(Code::data, checkpoint.path(), ": its metadata describe a model of ", needed,
              " numbers, its tensors hold ", held, "; is it damaged, or from a stranger?");
}

void follow_up(program::Options& options, Settings& s) {
  options.then([&] {
    check(!s.sample_only || !(s.resume || s.dry_run || s.seconds > 0 || !s.from.empty()),
          "--sample-only: samples and does no more; leave --resume, --dry-run, --seconds and --from out");
    if (s.resume || s.sample_only) {
      if (s.out.empty()) s.out = newest_run();
      const hilt::Checkpoint checkpoint = chosen_checkpoint(s);
      adopt_checkpoint(options, s, checkpoint, s.resume);
      if (s.resume) said_by(checkpoint, [&] { check_decided(s), model_config(s, 2); });
    } else {
      if (s.out.empty()) s.out = next_run();
      adopt_defaults(options, s);
    }
    if (!s.sample_only) check_decided(s), check_settings(options, s);
  });
}

void declare_sample(program::Options& options, Settings& s) {
  s.sample_only = true;
  options.text("--out", s.out, "DIR", "Where train put the run; without it the newest of out/train, out/train-2, ..");
  declare_sampling(options, s);
  options.integer("--seed", s.seed, 0, std::numeric_limits<std::int64_t>::max(),
                  "Of the draws, and the number of a board; without it the run's");
  options.then([&] {
    program::Options all("train", "");  // under these names a checkpoint keeps what it decides
    declare(all, s);
    const Index seed = s.seed;
    if (s.out.empty()) s.out = newest_run();
    adopt_checkpoint(all, s, chosen_checkpoint(s), false);
    if (options.given("--seed")) s.seed = seed;
  });
}

int sample_from_checkpoint(const Settings& s) {
  const hilt::Checkpoint checkpoint = chosen_checkpoint(s);
  const Vocabulary vocabulary = Vocabulary::from_text(checkpoint.get("vocabulary"));
  std::unique_ptr<Task> task;
  hilt::TransformerConfig config;
  said_by(checkpoint, [&] {
    if (s.on_grid()) task = make_task(s);
    config = model_config(s, vocabulary.size());
  });
  check_identity(checkpoint, identity_of(config));
  check_sizes(config, checkpoint);
  check_row(config, checkpoint);
  hilt::Transformer model = hilt::make_transformer(config, 0, program::dtype_of(s.dtype));
  std::vector<hilt::SafetensorsItem> items;
  model.visit_parameters("", [&](const std::string& name, hilt::Tensor& t) { items.push_back({"model." + name, t}); });
  checkpoint.read(items, "model.");
  check_finite(checkpoint.file(), "model.");
  if (s.on_grid()) {
    std::cout << sample_board(model, *task, s, s.seed);
    return 0;
  }
  const auto began = std::chrono::steady_clock::now();
  const Sample sample =
      sample_text(model, vocabulary, s, {static_cast<std::uint64_t>(s.seed), 0x73616d706c65},
                  [](std::string_view piece) { std::cout << for_a_terminal(std::string(piece)) << std::flush; });
  if (!sample.text.ends_with('\n')) std::cout << std::endl;
  const double seconds = program::seconds_since(began);
  const double a_second = static_cast<double>(sample.tokens) / seconds;
  std::cerr << format("%ld tokens in %.2f s, %.0f a second\n", sample.tokens, seconds, a_second) << std::flush;
  return 0;
}

}  // namespace train
