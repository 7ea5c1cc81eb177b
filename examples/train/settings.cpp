// The options of train and sample, the defaults of each task, and what is refused.
#include "settings.h"
#include <cmath>
#include <filesystem>
#include <limits>
#include "run.h"
#include "tasks/boards.h"
#include "tasks/images.h"
#include "tasks/json_file.h"

namespace train {

void declare_sampling(program::Options& options, Settings& s) {
  options.text("--prompt", s.prompt, "TEXT", "What a sample begins with");
  options.number("--temperature", s.temperature, 0, 100,
                 "Of sampling: 0 takes the likeliest, 1 what the model believes");
  options.integer("--top-k", s.top_k, 0, 1 << 20, "Sample among the K likeliest; 0 is all");
  options.number("--top-p", s.top_p, 0, 1, "Sample among the likeliest that have this share together");
  options.text("--stop", s.stop, "TEXT", "Ends a sample where the model writes this");
  options.integer("--tokens", s.tokens, 1, 1 << 20, "Length of a sample");
  options.text("--images", s.images, "F.npy",
               "The images of --task images, [N, H, W] or [N, H, W, C]; else drawn shapes");
  options.text("--labels", s.labels, "F.npy", "Their labels, [N], integers from 0");
  options.flag("--last", s.last, "Sample from the newest checkpoint, not from the best");
}

void declare(program::Options& options, Settings& s) {
  options.group(kModel);
  options.choice("--task", s.task, {"stories", "life", "text", "ising", "images"},
                 "stories: from a grammar whose entropy is known. life: the next step of Game of Life, nothing "
                 "living beyond the border. text: any file. ising: spins from noisy ones, whose best reader is known. "
                 "images: what is on them");
  options.choice("--vocabulary", s.vocabulary, {"characters", "bytes", "bpe"}, "Tokens of a text");
  options.text("--grid", s.grid, "HxW",
               "Board of life, in cells; ising: at most 12x12, its default; images: in patches, 8x8");
  options.integer("--patch", s.patch, 1, 1024, "Side of a patch of an image, in pixels");
  options.integer("--layers", s.layers, 1, 1024, "Blocks; text, ising, images: 4");
  options.integer("--heads", s.heads, 1, 1024, "Heads, a divisor of --width; all but stories: 4");
  options.integer("--width", s.width, 1, 1 << 16, "Features of a token; life, ising, images: 64");
  options.integer("--context", s.context, 1, 1 << 20, "Tokens of a row; life, ising, images: the cells of --grid");
  program::declare(options, s, {"order"}, "; life, ising, images: on the grid; else row where the pattern is dense");
  program::declare(options, s, {"pattern"}, "; life: slide2d:1x1; ising, images: segment:16");
  options.text("--pattern-odd", s.pattern_odd, "PATTERN",
               "Of blocks 1, 3, ..; without it --pattern; ising, images: segment:16,shift=8");
  program::declare(options, s, {"dilation_mode"});
  options.choice("--positions", s.positions, {"learned", "rotary", "none"},
                 "How a token knows where it stands; life, ising, images: learned");
  program::declare_terms(options, s);
  options.choice("--dtype", s.dtype, {"f32", "bf16", "f16"},
                 "Type of weights and activations; f16: of a loss scaled so that gradients fit");
  options.integer("--seed", s.seed, 0, std::numeric_limits<std::int64_t>::max(), "Of weights, rows and noise");
  options.group(kRun);
  options.integer("--steps", s.steps, 1, 1'000'000'000, "Updates; life: 500, text: 1000, ising, images: 2000");
  options.integer("--batch", s.batch, 1, 1 << 16, "Rows of a micro-batch; images: 16");
  options.integer("--accumulate", s.accumulate, 1, 1 << 16, "Micro-batches of an update");
  program::declare(options, s, {"backward"});
  options.flag("--checkpointing", s.checkpointing, "Keep each block's input alone and run it again in backward");
  options.number("--dropout", s.dropout, 0, 0.99, "Share of activations dropped");
  options.number("--lr", s.lr, 1e-12, 1e30, "Highest learning rate; life: 0.003, text: 0.001, ising, images: 0.002");
  options.choice("--schedule", s.schedule, {"cosine", "linear", "constant", "wsd"}, "How the learning rate goes");
  options.integer("--warmup", s.warmup, 0, 1'000'000'000, "Updates until the highest rate");
  options.integer("--patience", s.patience, 0, 1'000'000'000,
                  "Updates without a better validation loss after which the run ends; 0 never does");
  options.number("--weight-decay", s.weight_decay, 0, 1e6, "AdamW's, on matrices; all but stories: 0.1");
  options.number("--clip", s.clip, 0, 1e30, "Largest norm of a gradient; 0 does not clip");
  options.group(kCall);
  options.text("--text", s.text, "FILE", "The file of --task text, which it implies");
  options.text("--from", s.from, "DIR",
               "Begin with a GPT-2 in safetensors; with the tokenizer beside it, if there is one");
  options.text("--tokenizer", s.tokenizer, "DIR|train:N",
               "Byte pairs, which it implies: of a directory with GPT-2's vocab.json and merges.txt or a "
               "tokenizer.json, or N of them learned from the text");
  options.number("--seconds", s.seconds, 0, 1e7,
                 "Instead of --steps: as many as fit, judged by the first ones; 0 is off");
  options.text("--device", s.device, "auto|cpu|cuda", "Where to compute");
  options.text("--out", s.out, "DIR", "Where everything goes; without it out/train, or the next free out/train-N");
  options.flag("--resume", s.resume,
               "Go on from the last checkpoint in --out, with its options; --text FILE has to be named again, and so "
               "have --images and --labels");
  options.integer("--keep", s.keep, 2, 1 << 20, "Checkpoints to keep");
  options.integer("--save-every", s.save_every, 1, 1'000'000'000, "Updates between checkpoints");
  options.integer("--sample-every", s.sample_every, 0, 1'000'000'000, "Updates between samples; 0: only at the end");
  options.integer("--eval-every", s.eval_every, 1, 1'000'000'000, "Updates between evaluations");
  options.integer("--eval-rows", s.eval_rows, 1, 1 << 20, "Unseen rows of an evaluation");
  options.flag("--controls", s.controls, "life, ising, images: also train other patterns at equal cost, and compare");
  options.integer("--control-seeds", s.control_seeds, 1, 100, "Seeds of each control; ising, images: 5");
  options.integer("--ranks", s.ranks, 1, 1024, "Ranks that share the work; the numbers are those of one");
  options.integer("--sequence-ranks", s.sequence_ranks, 1, 1024,
                  "Ranks that share each sequence, by ring attention; the others divide the batch");
  options.choice("--comm", s.comm, {"auto", "threads", "mpi", "nccl"},
                 "What joins ranks; auto: mpi where mpirun or srun started them, else threads; between GPUs nccl");
  options.flag("--dry-run", s.dry_run, "Print the plan and its memory, and stop");
  options.flag("--sample-only", s.sample_only, "Print a sample from the best checkpoint in --out");
  declare_sampling(options, s);
}

static std::string weights_of(const Settings& s) { return s.from + "/model.safetensors"; }

/// How many heads config.json says; 0 where it says nothing. What it says of another function than
/// is computed here, or of other tensors than there are, is refused.
static Index heads_said(const std::string& path, const hilt::TransformerConfig& c) {
  if (!std::filesystem::exists(path)) return 0;
  const std::string what = "--from (" + path + ")";
  const json said = read_json(content_of(path, "--from"), what);
  if (!said.is_object()) fail_with(Code::data, what, ": is of type ", said.type_name(), ", expected an object");
  json here = json::parse(R"({"model_type": "gpt2", "activation_function": "gelu_new", "scale_attn_weights": true,
      "scale_attn_by_inverse_layer_idx": false, "add_cross_attention": false, "tie_word_embeddings": true})");
  here["layer_norm_epsilon"] = c.epsilon, here["n_layer"] = c.layers, here["n_embd"] = c.width;
  here["n_positions"] = here["n_ctx"] = c.context, here["vocab_size"] = c.vocab, here["n_inner"] = c.hidden;
  for (const auto& [key, value] : here.items())
    if (said.contains(key) && !said[key].is_null() && said[key] != value)
      fail_with(Code::data, what, ": ", key, " is ", said[key].dump(), "; the tensors, or what is computed here, have ",
                value.dump());
  if (!said.contains("n_head")) return 0;
  const auto heads = member(said, "n_head", json::value_t::number_unsigned, what).get<std::uint64_t>();
  if (heads == 0 || heads > 1024 || c.width % static_cast<Index>(heads) != 0)
    fail_with(Code::data, what, ": n_head is ", heads, "; expected a divisor of the width, ", c.width);
  return static_cast<Index>(heads);
}

/// The file decides sizes, and a part of its context may be asked for.
static void adopt_gpt2(program::Options& options, Settings& s) {
  check(s.task == "text", "--from (", s.from, "): goes on with a text; name one with --text");
  const hilt::TransformerConfig c = hilt::gpt2_config(weights_of(s), s.heads);
  const auto decided = [&](const std::string& name, const std::string& value, const std::string& asked,
                           const std::string& by = "/model.safetensors") {
    check(!options.given(name) || asked == value, name, " (", asked, "): ", s.from, by, " has ", value,
          "; leave it out");
    options.set(name, value);
  };
  if (const Index heads = heads_said(s.from + "/config.json", c)) {
    decided("--heads", std::to_string(heads), std::to_string(s.heads), "/config.json");
  } else if (!options.given("--heads")) {
    options.set("--heads", std::to_string(std::max<Index>(1, c.width / 64)));
    warn("--from (" + s.from + "): no config.json there has n_head; --heads " + std::to_string(s.heads) +
         " is taken, a width of 64 each");
  }
  decided("--layers", std::to_string(c.layers), std::to_string(s.layers));
  decided("--width", std::to_string(c.width), std::to_string(s.width));
  decided("--positions", "learned", s.positions);
  if (!options.given("--context")) options.set("--context", std::to_string(c.context));
  check(s.context <= c.context, "--context (", s.context, "): ", weights_of(s), " has ", c.context, " positions");
  if (!options.given("--lr")) options.set("--lr", "0.0001");
  const bool has_tokenizer =
      std::filesystem::exists(s.from + "/vocab.json") || std::filesystem::exists(s.from + "/tokenizer.json");
  if (has_tokenizer && !options.given("--tokenizer") && !options.given("--vocabulary"))
    options.set("--tokenizer", s.from);
}

hilt::Transformer read_weights(const Settings& s) {
  hilt::Transformer theirs = hilt::load_gpt2(weights_of(s), s.heads, program::dtype_of(s.dtype));
  if (const Index hidden = theirs.config.hidden_width(); hidden != 4 * s.width)
    fail_with(Code::data, "--from (", s.from, "): its hidden width is ", hidden, ", here it is ", 4 * s.width,
              "; no other is known here");
  if (theirs.head) fail_with(Code::data, "--from (", s.from, "): its head is not its embedding; GPT-2's is");
  check_finite(hilt::parameters_of(theirs), weights_of(s));
  return theirs;
}

void take_weights(hilt::Transformer& model, hilt::Transformer theirs, const Settings& s) {
  if (const Index ours = model.config.vocab, its = theirs.config.vocab; ours != its)
    fail_with(Code::data, "--from (", s.from, "): its tokens are ", its, ", here it is ", ours,
              "; take the tokenizer it was trained with");
  if (model.config.context < theirs.config.context)
    theirs.positions.weight = hilt::contiguous(hilt::slice(theirs.positions.weight, 0, 0, model.config.context));
  const hilt::NamedParameters ours = hilt::parameters_of(model), its = hilt::parameters_of(theirs);
  for (const hilt::NamedParameter& p : its)  // it has no score terms
    *std::ranges::find(ours, p.name, &hilt::NamedParameter::name)->tensor = *p.tensor;
}

/// What suits each of these tasks, where that is not the option's own default.
constexpr std::string_view kTasksWithDefaults[] = {"life", "ising", "images", "text"};
constexpr std::pair<const char*, std::array<const char*, 4>> kTaskDefaults[] = {
    {"--steps", {"500", "2000", "2000", "1000"}},
    {"--batch", {"", "", "16", ""}},
    {"--layers", {"", "4", "4", "4"}},
    {"--heads", {"4", "4", "4", "4"}},
    {"--width", {"64", "64", "64", ""}},
    {"--lr", {"0.003", "0.002", "0.002", "0.001"}},
    {"--weight-decay", {"0.1", "0.1", "0.1", "0.1"}},
    {"--positions", {"learned", "learned", "learned", ""}},
    {"--control-seeds", {"", "5", "5", ""}},
    {"--grid", {"", "12x12", "8x8", ""}},
    {"--pattern", {"slide2d:1x1", "segment:16", "segment:16", ""}}};

/// What suits the task of an option that was not given; empty where the task says nothing.
static std::string suited(const Settings& s, std::string_view option) {
  const auto task = static_cast<std::size_t>(std::ranges::find(kTasksWithDefaults, s.task) - kTasksWithDefaults);
  const auto* const found = std::ranges::find(kTaskDefaults, option, [](const auto& row) { return row.first; });
  return task < std::size(kTasksWithDefaults) && found != std::end(kTaskDefaults) ? found->second[task] : "";
}

void adopt_defaults(program::Options& options, Settings& s) {
  if (!s.text.empty() && !options.given("--task")) options.set("--task", "text");
  if (!s.images.empty() && !options.given("--task")) options.set("--task", "images");
  const auto prefer = [&](const std::string& name, const std::string& value) {
    if (!options.given(name)) options.set(name, value);
  };
  for (const auto& [option, values] : kTaskDefaults)
    if (const std::string value = suited(s, option); !value.empty()) prefer(option, value);
  if (s.is_images() && !s.images.empty()) {
    const Patches p = patches_of(s.images, s.patch);
    prefer("--grid", std::to_string(p.height) + "x" + std::to_string(p.width));
  }
  if (s.is_grid()) {
    const hilt::Grid grid = board_of(s);
    prefer("--context", std::to_string(grid.cells()));
    prefer("--order", "hilbert:" + s.grid);
    // As published: windows of the curve whose borders alternate, and a bias of every offset.
    if (!s.is_life() && s.layers > 1 && !options.given("--pattern")) prefer("--pattern-odd", "segment:16,shift=8");
    if (!s.is_life() && s.order.ends_with(s.grid))
      prefer("--relative", std::to_string(2 * grid.height - 1) + "x" + std::to_string(2 * grid.width - 1));
  }
  // Dense attention is one set in any order, and row order leaves it the fewest partial tiles.
  if (!s.is_grid() && s.pattern == "dense" && s.pattern_odd.empty()) prefer("--order", "row");
  if (!s.from.empty()) adopt_gpt2(options, s);
  if (!s.tokenizer.empty() && !options.given("--vocabulary")) options.set("--vocabulary", "bpe");
  // A constant rate does not know how long the run is: it can be continued to more --steps.
  const bool open_ended = s.schedule == "constant";
  prefer("--warmup", std::to_string(open_ended      ? 0
                                    : s.seconds > 0 ? s.warmup
                                                    : std::min<Index>(s.warmup, s.steps / 10)));
}

hilt::Grid board_of(const Settings& s) { return program::grid_of(s.grid, 1024); }

void check_settings(const program::Options& options, const Settings& s) {
  // What the task reads of those that not every task does.
  const std::string read = s.task == "text" ? " text vocabulary tokenizer "
                           : s.is_images()  ? " images labels patch "
                                            : "",
                    used = read + (s.is_grid() ? " grid " : " prompt temperature top-k top-p stop ") +
                           (s.controls ? " control-seeds " : "");
  constexpr std::string_view kSome =
      " text vocabulary tokenizer images labels patch grid prompt temperature top-k top-p stop control-seeds ";
  for (const auto& [name, value, is_text, group, preset] : options.values())
    if (const std::string word = ' ' + name + ' '; kSome.find(word) != kSome.npos && used.find(word) == used.npos)
      check(!options.given("--" + name) || value == preset || value == suited(s, "--" + name), "--", name, " (", value,
            "): --task ", s.task, name[0] == 'c' ? " without --controls" : "", " has no use for it; leave it out");
  check(s.task != "text" || !s.text.empty(), "--text: --task text needs a file; name one");
  check(s.images.empty() == s.labels.empty(), s.images.empty() ? "--labels (" : "--images (", s.images, s.labels,
        "): needs ", s.images.empty() ? "--images, what they are of" : "--labels, what is on them");
  check(!s.is_images() || s.sequence_ranks == 1, "--sequence-ranks (", s.sequence_ranks,
        "): an image has one label, of all its patches; let --ranks divide the batch");
  check(s.tokenizer.empty() || s.vocabulary == "bpe", "--tokenizer (", s.tokenizer, "): --vocabulary ", s.vocabulary,
        " has no use for it; leave one of them out");
  check(s.from.empty() || !s.resume, "--from (", s.from, "): --resume goes on from --out; leave one of them out");
  if (s.resume)
    check(s.tokenizer.empty(), "--tokenizer (", s.tokenizer, "): --resume has that of the checkpoint; leave it out");
  else
    check(s.vocabulary != "bpe" || !s.tokenizer.empty(),
          "--vocabulary (bpe): needs --tokenizer, a directory or train:N");
  check(s.ranks % s.sequence_ranks == 0, "--sequence-ranks (", s.sequence_ranks, "): must divide --ranks, ", s.ranks);
  check(s.batch >= s.ranks / s.sequence_ranks, "--batch (", s.batch, "): --ranks ", s.ranks, " with ", s.sequence_ranks,
        " to a sequence share at least ", s.ranks / s.sequence_ranks, " sequences");
  check(s.ranks == 1 || !s.controls, "--controls: train them on one rank; leave --ranks out");
  check(!s.controls || s.is_grid(), "--controls: only --task life, ising and images have them");
  check(!(s.resume && s.seconds > 0), "--seconds (", s.seconds,
        "): --resume goes on to the --steps of the checkpoint; leave it out");
  check(!(options.given("--steps") && s.seconds > 0 && !s.resume), "--seconds (", s.seconds, "): --steps ", s.steps,
        " is given too; leave one of them out");
}

void check_decided(const Settings& s) {
  check(s.pattern_odd.empty() || s.layers > 1, "--pattern-odd (", s.pattern_odd,
        "): --layers 1 has block 0 alone; leave it out, or take more layers");
  check(s.pattern_odd.empty() || (!s.order.starts_with("auto") && s.order.find("scope=segment") == s.order.npos),
        "--pattern-odd (", s.pattern_odd, "): --order ", s.order, " follows one pattern; name another");
  const hilt::Grid grid = board_of(s);  // whatever the task: a typing error is one
  if (s.is_ising())
    check(std::max(grid.height, grid.width) <= Ising::kMostSide, "--grid (", s.grid,
          "): the exact answer of --task ising is known up to ", Ising::kMostSide, "x", Ising::kMostSide);
  if (s.is_grid())
    check(grid.cells() == s.context, "--context (", s.context, "): --grid ", s.grid, " has ", grid.cells(),
          " cells; leave --context out");
  if (s.width % s.heads != 0) {
    const Index below = s.width / s.heads * s.heads, above = below + s.heads;
    fail("--width (", s.width, "): not divisible by --heads ", s.heads, " (nearest ",
         below > 0 ? std::to_string(below) + ", " : "", above, ")");
  }
  check(s.warmup <= s.steps || s.seconds > 0, "--warmup (", s.warmup, "): longer than the whole run, --steps ",
        s.steps);
}

std::map<std::string, std::string> decisive(const program::Options& options, const Settings& s) {
  std::map<std::string, std::string> out;
  for (const auto& [key, value, is_text, group, preset] : options.values())
    if (group != kCall && !value.empty()) out[key] = value;
  if (!s.is_grid()) out.erase("grid");
  if (!s.is_images()) out.erase("patch");
  if (s.task != "text") out.erase("vocabulary");
  return out;
}

std::unique_ptr<Task> make_task(const Settings& s, const std::optional<Vocabulary>& vocabulary, const Stage& stage) {
  const auto seed = static_cast<std::uint64_t>(s.seed);
  if (s.task == "stories") return stories_task(s.context, seed);
  if (s.is_grid()) {
    const hilt::Grid grid = board_of(s);
    if (s.is_life()) return life_task(grid.height, grid.width, seed);
    if (s.is_ising()) return ising_task(grid.height, grid.width, seed);
    const Patches patches{grid.height, grid.width, s.patch};
    return s.images.empty() ? shapes_task(patches, seed) : images_task(s.images, s.labels, patches, seed);
  }
  const Alphabet alphabet = s.vocabulary == "bytes" ? Alphabet::bytes
                            : s.vocabulary == "bpe" ? Alphabet::bpe
                                                    : Alphabet::characters;
  return text_task(s.text, alphabet, s.context, seed, vocabulary, s.tokenizer, s.dry_run ? "" : s.out, stage);
}

hilt::TransformerConfig model_config(const Settings& s, Index symbols, Index classes) {
  hilt::TransformerConfig c;
  c.layers = s.layers, c.heads = s.heads, c.width = s.width, c.context = s.context;
  c.vocab = symbols, c.classes = classes > 0 ? classes : symbols;
  // What a product of GPT-2's width begins with: smaller scores find too late what is told again.
  if (s.task == "stories" || s.is_images()) c.deviation *= std::sqrt(768.0 / static_cast<double>(s.width));
  c.pattern = program::pattern_of(s.pattern, s.context);
  c.order = program::order_of(s.order, hilt::behind_prefix(c.pattern, s.context));
  if (!s.pattern_odd.empty()) c.pattern_odd = program::pattern_of(s.pattern_odd, s.context, "--pattern-odd");
  c.dilation_mode = hilt::parse_dilation_mode(s.dilation_mode);
  c.causality = s.is_grid() ? hilt::Causality::none : hilt::Causality::token;
  c.positions = hilt::parse_positions(s.positions);
  c.terms = program::terms_of(s, s.heads);
  c.backward = hilt::parse_backward(s.backward);
  c.dropout = s.dropout, c.checkpointing = s.checkpointing, c.tie_weights = !s.is_grid(), c.image = s.is_images();
  hilt::check_config(c);
  return c;
}

hilt::SafetensorsMetadata identity_of(const hilt::TransformerConfig& config) {
  hilt::SafetensorsMetadata out{{"HILT_FORCE_ORDER", hilt::row_order_forced() ? "row" : "unset"}};
  std::uint64_t sum = 0;
  for (const hilt::Pattern* pattern : {&config.pattern, &config.pattern_odd})
    for (const auto& b : *pattern) sum = hilt::checksum(sum, b.pairs.data(), b.pairs.size() * sizeof(b.pairs[0]));
  out["pattern.checksum"] = std::to_string(sum);
  if (config.dropout > 0) out["noise"] = "16 bits of philox-7";
  return out;
}

hilt::PlanPtr plan_of(const hilt::TransformerConfig& c, Index block) {
  return hilt::make_plan({.length = c.context,
                          .heads = c.heads,
                          .order = c.order,
                          .pattern = hilt::attention_config(c, block).pattern,
                          .dilation_mode = c.dilation_mode,
                          .causality = c.causality});
}

std::string order_in_force(const Settings& s) {
  if (hilt::row_order_forced()) return "row (HILT_FORCE_ORDER, in place of " + s.order + ")";
  if (!s.order.starts_with("auto")) return s.order;
  return to_string(plan_of(model_config(s, 2))->spec().order) + " (auto)";
}

void check_identity(const hilt::Checkpoint& checkpoint, const hilt::SafetensorsMetadata& identity) {
  const hilt::SafetensorsMetadata& theirs = checkpoint.file().metadata();
  for (const auto& [key, value] : identity)
    if (const auto found = theirs.find(key); found != theirs.end() && found->second != value)
      fail_with(Code::data, checkpoint.path(), ": was trained with ", key, " ", found->second, ", here it is ", value,
                "; bring back what it was, or begin anew with another --out");
}

hilt::Schedule schedule_of(const Settings& s) {
  hilt::Schedule schedule{
      .kind = hilt::parse_schedule(s.schedule), .peak = s.lr, .floor = 0, .steps = s.steps, .warmup = s.warmup};
  hilt::check_schedule(schedule);
  return schedule;
}

}  // namespace train
