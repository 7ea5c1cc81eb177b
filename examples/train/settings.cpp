// The options of train and sample, the defaults of each task, and what is refused.
#include "run.h"
#include <sstream>
#include "tasks/boards.h"
#include "tasks/stories.h"

namespace train {

constexpr const Profile* kTasks[] = {&kStoriesTask, &kLife, &kText, &kIsing, &kNames};

const Profile& Settings::profile() const {
  return **std::ranges::find(kTasks, task, [](const Profile* p) { return std::string_view(p->name); });
}

/// The options that suit a task, with their values.
static std::map<std::string, std::string> suited(const Profile& profile) {
  std::map<std::string, std::string> out;
  std::istringstream words(profile.suited);
  for (std::string name, value; words >> name >> value;) out[name] = value;
  return out;
}

/// "; life: 500; text: 1000", for the help of an option.
static std::string suited_in_words(const std::string& option) {
  std::string text;
  for (const Profile* p : kTasks)
    for (const auto& [name, value] : suited(*p))
      if (name == option) text += "; " + std::string(p->name) + ": " + value;
  return text;
}

void declare_sampling(program::Options& options, Settings& s) {
  options.text("--prompt", s.prompt, "TEXT", "What a sample begins with");
  options.number("--temperature", s.temperature, 0, 100,
                 "Of sampling: 0 takes the likeliest, 1 what the model believes");
  options.integer("--top-k", s.top_k, 0, 1 << 20, "Sample among the K likeliest; 0 is all");
  options.number("--top-p", s.top_p, 0, 1, "Sample among the likeliest that have this share together");
  options.text("--stop", s.stop, "TEXT", "Ends a sample where the model writes this");
  options.integer("--tokens", s.tokens, 1, 1 << 20, "Length of a sample");
  options.flag("--last", s.last, "Sample from the newest checkpoint, not from the best");
}

void declare(program::Options& options, Settings& s) {
  options.group(kModel);
  std::string help;
  std::vector<std::string> names;
  for (const Profile* p : kTasks)
    names.emplace_back(p->name), help += (help.empty() ? "" : ". ") + std::string(p->name) + ": " + p->help;
  options.choice("--task", s.task, names, help);
  const auto integer = [&](const char* name, Index& value, Index low, Index high, const std::string& what) {
    options.integer(name, value, low, high, what + suited_in_words(name));
  };
  const auto number = [&](const char* name, double& value, double low, double high, const std::string& what) {
    options.number(name, value, low, high, what + suited_in_words(name));
  };
  options.choice("--like", s.like, {"gpt2", "microgpt"},
                 "Kind of layers; microgpt: RMS norms without weights, ReLU, no biases, a head of its own");
  options.choice("--vocabulary", s.vocabulary, {"characters", "bytes", "bpe"},
                 "Tokens of a text; bpe: those of --tokenizer");
  options.text("--grid", s.grid, "HxW", "Board, in cells; of ising at most 12x12" + suited_in_words("--grid"));
  integer("--layers", s.layers, 1, 1024, "Blocks");
  integer("--heads", s.heads, 1, 1024, "Heads, a divisor of --width");
  integer("--width", s.width, 1, 1 << 16, "Features of a token");
  integer("--context", s.context, 1, 1 << 20, "Tokens of a row; life, ising: the cells of --grid");
  program::declare(options, s, {"order"}, "; life, ising: on the grid; else row where the pattern is dense");
  program::declare(options, s, {"pattern"}, suited_in_words("--pattern"));
  options.text("--pattern-odd", s.pattern_odd, "PATTERN",
               "Of blocks 1, 3, ..; without it --pattern" + suited_in_words("--pattern-odd"));
  program::declare(options, s, {"dilation_mode"});
  options.choice("--positions", s.positions, {"learned", "rotary", "none"},
                 "How a token knows where it stands" + suited_in_words("--positions"));
  program::declare_terms(options, s);
  options.choice("--dtype", s.dtype, {"f32", "bf16", "f16"},
                 "Type of weights and activations; f16: of a loss scaled so that gradients fit");
  options.integer("--seed", s.seed, 0, std::numeric_limits<std::int64_t>::max(), "Of weights, rows and noise");
  options.group(kRun);
  integer("--steps", s.steps, 1, 1'000'000'000, "Updates");
  integer("--batch", s.batch, 1, 1 << 16, "Rows of a micro-batch");
  integer("--accumulate", s.accumulate, 1, 1 << 16, "Micro-batches of an update");
  program::declare(options, s, {"backward"});
  options.flag("--checkpointing", s.checkpointing, "Keep each block's input alone and run it again in backward");
  number("--dropout", s.dropout, 0, 0.99, "Share of activations dropped");
  number("--lr", s.lr, 1e-12, 1e30, "Highest learning rate");
  options.choice("--schedule", s.schedule, {"cosine", "linear", "constant", "wsd"}, "How the learning rate goes");
  integer("--warmup", s.warmup, 0, 1'000'000'000, "Updates until the highest rate");
  integer("--patience", s.patience, 0, 1'000'000'000,
          "Updates without a better validation loss after which the run ends; 0 never does");
  number("--weight-decay", s.weight_decay, 0, 1e6, "AdamW's, on matrices");
  number("--clip", s.clip, 0, 1e30, "Largest norm of a gradient; 0 does not clip");
  options.group(kCall);
  options.text("--text", s.text, "FILE", "The file of --task text, which it implies, or names");
  options.text("--from", s.from, "DIR",
               "Begin with a GPT-2 in safetensors; with the tokenizer beside it, if there is one");
  options.text("--tokenizer", s.tokenizer, "DIR",
               "Byte pairs, which it implies: of a directory with GPT-2's vocab.json and merges.txt or a "
               "tokenizer.json");
  number("--seconds", s.seconds, 0, 1e7, "Instead of --steps: as many as fit, judged by the first ones; 0 is off");
  options.text("--device", s.device, "auto|cpu|cuda", "Where to compute");
  options.text("--out", s.out, "DIR", "Where everything goes; without it out/train, or the next free out/train-N");
  options.flag("--resume", s.resume,
               "Go on from the last checkpoint in --out, with its options; --text FILE has to be named again");
  integer("--keep", s.keep, 2, 1 << 20, "Checkpoints to keep");
  integer("--save-every", s.save_every, 1, 1'000'000'000, "Updates between checkpoints");
  integer("--sample-every", s.sample_every, 0, 1'000'000'000, "Updates between samples; 0: only at the end");
  integer("--eval-every", s.eval_every, 1, 1'000'000'000, "Updates between evaluations");
  integer("--eval-rows", s.eval_rows, 1, 1 << 20, "Unseen rows of an evaluation");
  integer("--ranks", s.ranks, 1, 1024, "Ranks that share the work; the numbers are those of one");
  integer("--sequence-ranks", s.sequence_ranks, 1, 1024,
          "Ranks that share each sequence, by ring attention; the others divide the batch");
  options.choice("--comm", s.comm, {"auto", "threads", "mpi", "nccl"},
                 "What joins ranks; auto: mpi where mpirun or srun started them, else threads; between GPUs nccl");
  options.flag("--dry-run", s.dry_run, "Print the plan and its memory, and stop");
  options.flag("--sample-only", s.sample_only, "Print a sample from the best checkpoint in --out");
  declare_sampling(options, s);
  for (const char* name : {"--task images", "--images", "--labels", "--patch"})
    options.gone(name, "images are no task here any more; in C++ TransformerConfig::image learns them");
  for (const char* name : {"--controls", "--control-seeds"})
    options.gone(name, "train again, with --order row:16x16 --pattern segment:16 for one, and compare the reports");
}

static std::string weights_of(const Settings& s) { return s.from + "/model.safetensors"; }

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
  check_finite(hilt::SafetensorsFile(weights_of(s)));
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

void adopt_defaults(program::Options& options, Settings& s) {
  if (!s.text.empty() && !options.given("--task")) options.set("--task", "text");
  const auto prefer = [&](const std::string& name, const std::string& value) {
    if (!options.given(name)) options.set(name, value);
  };
  for (const auto& [name, value] : suited(s.profile()))
    if (name != "--pattern-odd" || (s.layers > 1 && !options.given("--pattern"))) prefer(name, value);
  if (s.on_grid()) {
    const hilt::Grid grid = board_of(s);
    prefer("--context", std::to_string(grid.cells()));
    prefer("--order", "hilbert:" + s.grid);
    // As published: beside windows of the curve whose borders alternate, a bias of every offset.
    if (s.task == "ising" && s.order.ends_with(s.grid))
      prefer("--relative", std::to_string(2 * grid.height - 1) + "x" + std::to_string(2 * grid.width - 1));
  }
  // Dense attention is one set in any order, and row order leaves it the fewest partial tiles.
  if (!s.on_grid() && s.pattern == "dense" && s.pattern_odd.empty()) prefer("--order", "row");
  if (!s.from.empty()) adopt_gpt2(options, s);
  if (!s.tokenizer.empty() && !options.given("--vocabulary")) options.set("--vocabulary", "bpe");
  // A constant rate does not know how long the run is: it can be continued to more --steps.
  const Index tenth = s.seconds > 0 ? s.warmup : std::min<Index>(s.warmup, s.steps / 10);
  prefer("--warmup", std::to_string(s.schedule == "constant" ? 0 : tenth));
}

hilt::Grid board_of(const Settings& s) { return program::grid_of(s.grid, 1024); }

/// Whether an option is one that some task has use for, and this one none.
static bool is_unused(const Settings& s, const std::string& name) {
  const auto reads = [&](const Profile& p) { return std::ranges::count(hilt::split_text(p.options, ' '), name) > 0; };
  return std::ranges::any_of(kTasks, [&](const Profile* p) { return reads(*p); }) && !reads(s.profile());
}

void check_settings(const program::Options& options, const Settings& s) {
  for (const auto& [name, value, is_text, group, preset] : options.values())
    check(!is_unused(s, name) || !options.given("--" + name) || value == preset, "--", name, " (", value, "): --task ",
          s.task, " has no use for it; leave it out");
  check(!s.last, "--last: --sample-only alone has use for it; leave it out");
  check(s.task != "text" || !s.text.empty(), "--text: --task text needs a file; name one");
  check(!s.tokenizer.starts_with("train:"), "--tokenizer (", s.tokenizer,
        "): merges are not learned here any more; name a directory with a tokenizer.json, as the package tokenizers "
        "saves it");
  check(s.tokenizer.empty() || s.vocabulary == "bpe", "--tokenizer (", s.tokenizer, "): --vocabulary ", s.vocabulary,
        " has no use for it; leave one of them out");
  check(s.from.empty() || !s.resume, "--from (", s.from, "): --resume goes on from --out; leave one of them out");
  check(!s.resume || s.tokenizer.empty(), "--tokenizer (", s.tokenizer,
        "): --resume has that of the checkpoint; leave it out");
  check(s.resume || s.vocabulary != "bpe" || !s.tokenizer.empty(), "--vocabulary (bpe): needs --tokenizer, ",
        "a directory with GPT-2's vocab.json and merges.txt or tokenizer.json");
  check(s.ranks % s.sequence_ranks == 0, "--sequence-ranks (", s.sequence_ranks, "): must divide --ranks, ", s.ranks);
  check(s.batch >= s.ranks / s.sequence_ranks, "--batch (", s.batch, "): --ranks ", s.ranks, " with ", s.sequence_ranks,
        " to a sequence share at least ", s.ranks / s.sequence_ranks, " sequences");
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
  if (s.task == "ising")
    check(std::max(grid.height, grid.width) <= Ising::kMostSide, "--grid (", s.grid,
          "): the exact answer of --task ising is known up to ", Ising::kMostSide, "x", Ising::kMostSide);
  if (s.on_grid())
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
    if (group != kCall && !value.empty() && !is_unused(s, key)) out[key] = value;
  return out;
}

std::unique_ptr<Task> make_task(const Settings& s, const std::optional<Vocabulary>& vocabulary) {
  const auto seed = static_cast<std::uint64_t>(s.seed);
  if (s.task == "stories") return stories_task(s.context, seed);
  if (s.on_grid()) {
    const hilt::Grid grid = board_of(s);
    return (s.task == "life" ? life_task : ising_task)(grid.height, grid.width, seed);
  }
  std::error_code error;
  if (const auto bytes = std::filesystem::file_size(s.text, error); !error)  // and as many tokens, at most
    program::require_memory("--text (" + s.text + ")",
                            program::product_of({s.ranks, static_cast<Index>(bytes), 1 + sizeof(std::int32_t)}),
                            "it is read whole; name a part of it");
  if (s.task == "names") return names_task(s.text, s.context, seed, vocabulary);
  return text_task(s.text,
                   s.vocabulary == "bytes" ? Alphabet::bytes
                   : s.vocabulary == "bpe" ? Alphabet::pairs
                                           : Alphabet::characters,
                   s.context, seed, vocabulary, s.tokenizer);
}

hilt::TransformerConfig model_config(const Settings& s, Index symbols) {
  hilt::TransformerConfig c;
  c.layers = s.layers, c.heads = s.heads, c.width = s.width, c.context = s.context, c.vocab = symbols;
  // Scores begin as far apart as in a model of GPT-2's width. Nearly equal ones lengthen the
  // plateau before a story's last recall.
  if (s.task == "stories") c.deviation *= std::sqrt(768.0 / static_cast<double>(s.width));
  c.pattern = program::pattern_of(s.pattern, s.context);
  c.order = program::order_of(s.order, hilt::behind_prefix(c.pattern, s.context));
  if (!s.pattern_odd.empty()) c.pattern_odd = program::pattern_of(s.pattern_odd, s.context, "--pattern-odd");
  c.dilation_mode = hilt::parse_dilation_mode(s.dilation_mode);
  c.causality = s.on_grid() ? hilt::Causality::none : hilt::Causality::token;
  c.positions = hilt::parse_positions(s.positions);
  c.terms = program::terms_of(s, s.heads);
  c.backward = hilt::parse_backward(s.backward);
  c.dropout = s.dropout, c.checkpointing = s.checkpointing, c.tie_weights = !s.on_grid();
  if (s.like == "microgpt")
    c.norm = hilt::NormKind::plain, c.activation = hilt::Activation::relu, c.bias = c.tie_weights = false,
    c.deviation = 0.08;
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
