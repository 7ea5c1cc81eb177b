// The order of things: what can be refused is refused first; then the directory, the log and steps.
#include "run.h"
#include <signal.h>
#include <unistd.h>
#include <atomic>
#include <exception>
#include <iostream>
#include <sstream>

namespace train {
namespace {

// Asked to end: by a keyboard, a batch system, or a terminal that goes away, which says so twice.
// The first time only sets a flag, which the loop reads after each step; a SIGINT after that ends
// the process.
std::atomic<bool> asked{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a handler may touch nothing else");

void on_signal(int signal) {
  constexpr int kInterrupted = 130;
  if (asked.exchange(true) && signal == SIGINT) ::_exit(kInterrupted);
}

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  struct sigaction hangup {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP})
    if (signal != SIGHUP || hangup.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);  // nohup ignores it
}

using Clock = std::chrono::steady_clock;
using program::seconds_since;

constexpr Index kWarm = 2, kTimed = 6;                   // steps between which --seconds judges the rest
constexpr std::uint64_t kSampleStream = 0x73616d706c65;  // keeps samples' numbers apart from rows'

std::string sample_name(Index step) { return format("sample-%06ld.txt", step); }

class Training {
 public:
  Training(const program::Options& options, Settings& s, const hilt::Comm& met) : options_(options), s_(s), met_(met) {}

  int operator()() {
    if (is_first() && !s_.dry_run && std::filesystem::is_directory(s_.out)) outputs();
    s_.out = met_.gather_text(s_.out)[0];  // without --out each rank would look for a free name
    prepare();
    if (s_.dry_run) {
      if (is_first()) describe(s_, config_, story_.memory);
      return 0;
    }
    if (is_first()) story_.start = measure_start(s_, *task_, config_, device_);
    story_.start.device = (std::ostringstream() << device_).str();
    if (s_.seconds > 0 && !s_.resume) s_.steps = 1'000'000'000;
    const auto seed = static_cast<std::uint64_t>(s_.seed);
    hilt::Transformer model = hilt::make_transformer(config_, seed, program::dtype_of(s_.dtype));
    if (weights_) take_weights(model, *std::exchange(weights_, {}), s_);
    trainer_.emplace(std::move(model), task_, seed, adamw_of(s_), device_, grid_);
    story_.flops = hilt::training_flops(trainer_->model(), s_.batch * s_.accumulate, s_.context);
    if (from_) {
      trainer_->restore(*from_);
      from_.reset();
    }
    met_.agree("train", agreement());
    catch_interrupts();
    if (is_first()) open();
    hilt::reset_memory_peak(device_);
    began_ = Clock::now();
    if (!is_first()) return loop(nullptr), finish(nullptr);
    const Tidy tidy{*this};
    Progress progress(story_.start, first_);
    loop(&progress);
    return finish(&progress);
  }

 private:
  void refuse_if_taken() const {
    if (const std::vector<Index> steps = hilt::checkpoint_steps(s_.out); !steps.empty())
      fail("--out (", s_.out, "): holds a run already, up to ", hilt::checkpoint_name(steps.back()),
           "; go on with --resume, or name another directory");
  }

  void prepare() {
    device_ = program::device_of(s_.device, hilt::DType::f32, met_.rank());
    grid_ =
        hilt::RankGrid(device_.is_cuda() ? hilt::nccl_ranks(met_, device_) : met_, static_cast<int>(s_.sequence_ranks));
    if (s_.resume) {
      from_.emplace(s_.out + '/' + hilt::checkpoint_name(hilt::checkpoint_steps(s_.out).back()));
      first_ = saved_ = tried_ = from_->step();
      remember_best();
      check(first_ < s_.steps || (first_ == s_.steps && lacks_its_end()), "--resume: ", from_->path(),
            " ends a run of ", s_.steps, " steps; there is nothing left to do: --sample-only shows what it learned");
    } else {
      refuse_if_taken();
    }
    std::optional<Vocabulary> vocabulary;
    if (from_) vocabulary = Vocabulary::from_text(from_->get("vocabulary"));
    config_ = model_config(s_, vocabulary ? vocabulary->size() : 2);  // refuses, before a long text is read
    if (from_) check_sizes(config_, *from_);
    if (!s_.from.empty()) weights_ = read_weights(s_);
    task_ = make_task(s_, vocabulary);
    config_ = model_config(s_, task_->vocabulary().size());
    if (!s_.on_grid()) (void)task_->vocabulary().encode(s_.prompt, "--prompt");
    identity_ = identity_of(config_);
    identity_.insert(task_->identity().begin(), task_->identity().end());
    if (from_) check_identity(*from_, identity_);
    if (from_ && config_.dropout > 0 && !from_->file().metadata().contains("noise"))
      fail_with(Code::data, from_->path(), ": dropout (", s_.dropout,
                "): was trained when dropout drew other bits, so it would not go on as it began; begin anew with "
                "another --out, or let sample read it");
    schedule_of(s_);
    // A GPU says so itself, and what holds most of it.
    const double have =
        device_.is_cuda() ? std::numeric_limits<double>::infinity() : static_cast<double>(program::memory_available());
    story_.memory = plan_memory(s_, config_, device_, have);
    if (!s_.dry_run) require_memory(story_.memory, s_, have);
  }

  // Whether a run was killed after its last checkpoint, and before all else was written.
  bool lacks_its_end() const {
    const std::filesystem::path report = s_.out + "/report.html", saved = from_->path();
    return !exists(report) || last_write_time(report) < last_write_time(saved) ||
           !std::filesystem::exists(s_.out + '/' + sample_name(first_));
  }

  // For a resumed run. It forgets a best of a later step, which it will reach again.
  void remember_best() {
    const std::string path = s_.out + '/' + hilt::kBestCheckpoint;
    if (!std::filesystem::exists(path)) return;
    const hilt::Checkpoint best(path);
    if (best.step() > first_) return;
    const std::optional<double> loss = hilt::number_in<double>(best.get("val_loss"));
    if (!loss) fail_with(Code::data, path, ": metadata 'val_loss' should be a number, is '", best.get("val_loss"), "'");
    best_loss_ = *loss, best_ = kept_ = best.step();
  }

  // From the first steps' time: how many fit. From here on the run is one of that many --steps.
  void fit_seconds(double elapsed, double step) {
    // Times are in steps. Evaluations and samples do forward alone, a third of a step.
    const double start = elapsed - step * static_cast<double>(kTimed),
                 tokens = 3 * static_cast<double>(s_.batch * s_.accumulate);
    const double evaluation = static_cast<double>(s_.eval_rows) / tokens,
                 sample = s_.on_grid() ? 0 : static_cast<double>(s_.tokens) / tokens;
    const double beside = evaluation / static_cast<double>(s_.eval_every) +
                          (s_.sample_every > 0 ? sample / static_cast<double>(s_.sample_every) : 0);
    const double steps = ((s_.seconds - start) / step - 5 * evaluation - sample) / (1 + beside);  // the last is long
    s_.steps = std::max({static_cast<Index>(steps), 2 * kTimed, s_.warmup + 1});
  }

  hilt::SafetensorsMetadata metadata() const {
    hilt::SafetensorsMetadata metadata = trainer_->counters();
    for (const auto& [key, value] : decisive(options_, s_)) metadata["config." + key] = value;
    // What --patience decided, and --seconds once it has: a resumed run has as many steps.
    if (s_.seconds == 0 || trainer_->steps() >= kTimed) metadata["config.steps"] = std::to_string(s_.steps);
    metadata.insert(identity_.begin(), identity_.end());
    metadata["ranks"] = std::to_string(met_.size());
    metadata["version"] = hilt::info().version;
    return metadata;
  }

  // A full disk, or a directory that went away, costs the file that f writes and not the run.
  template <class F> bool spare(Progress* progress, const std::string& ending, F&& f) try {
    f();
    return true;
  } catch (const hilt::Error& e) {
    if (e.code() != Code::data) throw;
    if (progress) progress->say("");
    warn(e.what() + ending);
    return false;
  }

  void save(Progress* progress = nullptr) {
    tried_ = trainer_->steps();
    const std::string last = saved_ >= 0 ? hilt::checkpoint_name(saved_) : "none yet",
                      goes_on = progress ? "; training goes on" : "";
    (void)spare(progress, goes_on, [&] { outputs_->commit(); });
    const bool saved = spare(progress, goes_on + ", the last good checkpoint is " + last, [&] {
      outputs_->check_there();
      log_->sync();  // of what a checkpoint says is done, nothing may be missing after a power cut
      hilt::save_checkpoint(s_.out, trainer_->steps(), trainer_->items(), metadata(), s_.keep);
    });
    if (saved) saved_ = trainer_->steps();
  }

  void save_best(Progress& progress) {
    hilt::SafetensorsMetadata with_loss = metadata();
    with_loss["val_loss"] = format("%.17g", best_loss_);
    const bool kept = spare(&progress, "; training goes on", [&] {
      outputs_->check_there();
      hilt::save_best_checkpoint(s_.out, trainer_->steps(), trainer_->items(), with_loss);
    });
    if (kept) kept_ = best_;
  }

  bool write(const std::string& name, const std::string& content, Progress& progress) {
    return spare(&progress, "", [&] { outputs_->write(name, content), outputs_->commit(); });
  }

  void sample(Progress& progress) {
    const Index step = trainer_->steps();
    const std::string sample =
        s_.on_grid()
            ? sample_board(trainer_->model(), *task_, s_, step)
            : sample_text(trainer_->model(), task_->vocabulary(), s_,
                          {static_cast<std::uint64_t>(s_.seed), kSampleStream + static_cast<std::uint64_t>(step)})
                  .text;
    write(sample_name(step), sample + (sample.ends_with('\n') ? "" : "\n"), progress);
    story_.samples.emplace_back(step, sample);
  }

  void loop(Progress* progress) {
    const bool fits = s_.seconds > 0 && !s_.resume;
    if (progress && first_ == s_.steps) sample(*progress), save(progress);  // what a run that was killed then lacks
    while (trainer_->steps() < s_.steps && !stop_) {
      const auto before = Clock::now();
      const auto step = trainer_->step(s_.batch, s_.accumulate, schedule_of(s_)(trainer_->steps()), s_.clip, asked);
      const double seconds = seconds_since(before);
      const Index done = trainer_->steps();
      stop_ = step.stop || (met_.size() == 1 && asked);
      if (fits && done == kWarm) warm_ = Clock::now();
      if (fits && done == kTimed) {
        const std::vector<double> taken =
            grid_.sum(is_first() ? std::vector{seconds_since(began_), seconds_since(warm_)} : std::vector{0.0, 0.0});
        fit_seconds(taken[0], taken[1] / static_cast<double>(kTimed - kWarm));
      }
      bool last = done == s_.steps;
      Line line{step, done};
      line.ms = seconds * 1e3, line.gflops = story_.flops / seconds * 1e-9;
      line.tokens_per_s = static_cast<double>(story_.start.tokens_per_step) / seconds;
      line.bytes = hilt::memory_stats(device_).peak;
      if (progress && done == first_ + 1) {
        story_.measured_bytes = line.bytes;
        progress->say("memory after the first step: " + report::bytes(story_.measured_bytes) + " measured, " +
                      report::bytes(story_.memory.total()) + " planned");
      }
      if (done % s_.eval_every == 0 || last) {
        const Evaluation e = trainer_->evaluate(s_.eval_rows, s_.batch);
        line.val_loss = e.loss;
        if (s_.on_grid()) line.val_right = e.right;
        line.best = std::isfinite(e.loss) && (best_ < 0 || e.loss < best_loss_);
        if (line.best) best_ = done, best_loss_ = e.loss;
        if (s_.patience > 0 && done - best_ >= s_.patience) s_.steps = done, last = true;
      }
      if (!progress) continue;
      if (line.best) save_best(*progress);
      log_->write(line);
      progress->show(line, fits && done < kTimed ? 0 : s_.steps, last || stop_);
      // Its sample first: of what a checkpoint says is done, nothing may be missing after a kill.
      if ((s_.sample_every > 0 && done % s_.sample_every == 0) || last) sample(*progress);
      if (done % s_.save_every == 0 || last || stop_) save(progress);
    }
  }

  // Which weights there are, and what each is worth on the same unseen rows.
  std::string two_losses() const {
    const auto of = [](const char* which, double loss, Index step, bool is_there, const std::string& name) {
      return format("%s: validation loss %.4f at step %ld, ", which, loss, step) +
             (is_there ? "in " + name : "not saved");
    };
    const Line& last = log_->last();
    if (best_ < 0 || last.step == 0) return "";  // their files are gone
    return of("best", best_loss_, best_, kept_ == best_, hilt::kBestCheckpoint) + "; " +
           of("last", last.val_loss, last.step, saved_ == last.step, hilt::checkpoint_name(last.step)) + '\n';
  }

  int finish(Progress* progress) {
    const double took = seconds_since(began_);
    const bool early = trainer_->steps() < s_.steps;
    if (!progress) {
      if (!early) (void)trainer_->evaluate(4 * s_.eval_rows, s_.batch);
      return early ? 130 : 0;
    }
    story_.lines = log_->lines();
    std::string verdict = format("%ld steps in %.1f s", trainer_->steps() - first_, took);
    if (!early) {
      const Index rows = 4 * s_.eval_rows;
      const Evaluation e = trainer_->evaluate(rows, s_.batch);
      const Profile& task = s_.profile();
      const std::string unseen = task.on_grid ? std::string(task.row) + 's' : s_.task;
      verdict += format("; on unseen %s the loss is %.4f nats", unseen.c_str(), e.loss);
      story_.held_out = e.loss;
      const Task::Exact exact = exact_of(*task_, rows);
      story_.exact_val_floor = exact.cost;
      if (exact.cost > 0)
        verdict += format(" a %s, %.1f %% above the %s there, %.4f", task.target, 100 * (e.loss / exact.cost - 1),
                          task.pays, exact.cost);
      if (task.on_grid) verdict += format(", %.3f %% of %ss right", 100 * e.right, task.target);
      if (exact.right > 0) verdict += format(" (the %s: %.3f %%)", task.reader, 100 * exact.right);
    }
    story_.verdict = verdict;
    if (met_.size() == 1 && !early)
      story_.attention = attention_maps(trainer_->model(), *task_, s_.on_grid() ? board_of(s_).width : 0);
    const bool has_report = write("report.html", to_html(story_), *progress);
    std::cout << '\n' << verdict << '\n';
    if (early) {
      std::cerr << "train: interrupted at step " << trainer_->steps() << "; "
                << (saved_ == trainer_->steps() ? "saved " + hilt::checkpoint_name(saved_) : "not saved")
                << "; go on with: " << resume_command(s_) << std::endl;
      return 130;
    }
    const std::string sample = story_.samples.empty() ? "" : story_.samples.back().second;
    std::cout << '\n'
              << for_a_terminal(sample) << (sample.ends_with('\n') ? "" : "\n") << "\nwrote "
              << program::printable(s_.out) << ": log.jsonl, samples, "
              << (saved_ >= 0 ? hilt::checkpoint_name(saved_) : "no checkpoint") << "\nnext:\n"
              << next_commands(s_) << two_losses() << (has_report ? program::printable(s_.out) + "/report.html\n" : "")
              << std::flush;
    outputs_->check_there();
    if (saved_ < trainer_->steps())
      fail_with(Code::data, "--out (", s_.out, "): the run is over and its last checkpoint could not be saved; ",
                saved_ >= 0 ? "the last good one is " + hilt::checkpoint_name(saved_) : "there is none");
    return 0;
  }

  // What it leaves behind: the first rank's, from when it is needed.
  program::Outputs& outputs() {
    if (outputs_) return *outputs_;
    const bool is_named = s_.resume || options_.given("--out");
    while (!outputs_) try {
        if (!is_named) s_.out = next_run();
        outputs_ = std::make_unique<program::Outputs>(s_.out);
      } catch (const hilt::Error&) {  // runs that look at once find the same: one has it
        if (is_named || !std::filesystem::exists(s_.out)) throw;
      }
    if (!s_.resume) refuse_if_taken();  // another run may have come and gone since prepare() looked
    return *outputs_;
  }

  void open() {
    (void)outputs();
    hilt::remove_unfinished_checkpoints(s_.out);
    describe(s_, config_, story_.memory);
    story_.start.out = s_.out;
    log_ = std::make_unique<Log>(*outputs_, options_, story_.start, first_);
    story_.measured_bytes = log_->last().bytes;
  }

  std::string agreement() const {
    std::string lines = "version = " + hilt::info().version + "\nranks = " + std::to_string(met_.size()) +
                        "\nfirst step = " + std::to_string(first_);
    for (const auto& [key, value] : decisive(options_, s_)) lines += "\n" + key + " = " + value;
    for (const auto& [key, value] : identity_) lines += "\n" + key + " = " + value;
    return lines;
  }

  /// The first rank alone writes files and prints.
  bool is_first() const { return met_.rank() == 0; }

  /// Once an exception passes: what was learned stays, in a checkpoint if it has none yet; of a run
  /// that learned nothing, nothing does. No catch: the stack of --debug would end there.
  struct Tidy {
    Training& run;
    int before = std::uncaught_exceptions();
    ~Tidy() {
      if (std::uncaught_exceptions() == before) return;
      if (run.first_ == 0 && run.trainer_->steps() == 0) {
        ::unlink((run.s_.out + "/log.jsonl").c_str());
      } else {
        try {
          const Index steps = run.trainer_->steps();
          if (run.trainer_->is_whole() && run.tried_ < steps) {
            run.save();
            if (run.saved_ == steps) warn("it ends early; what it learned is in " + hilt::checkpoint_name(steps));
          }
          run.outputs_->commit();
        } catch (const std::exception& e) { warn(e.what()); }
      }
    }
  };

  const program::Options& options_;
  Settings& s_;
  Story story_{.settings = s_, .options = options_};
  hilt::Comm met_;  // the ranks of this run
  hilt::RankGrid grid_;
  hilt::Device device_;
  bool stop_ = false;  // all ranks agree
  std::optional<hilt::Checkpoint> from_;
  std::optional<hilt::Transformer> weights_;  // of --from
  std::shared_ptr<const Task> task_;
  hilt::TransformerConfig config_;
  hilt::SafetensorsMetadata identity_;  // of what options do not tell
  std::optional<Trainer> trainer_;
  std::unique_ptr<program::Outputs> outputs_;
  std::unique_ptr<Log> log_;
  // Steps at the start, of the last good checkpoint, and of the last that was to be one.
  Index first_ = 0, saved_ = -1, tried_ = 0;
  // The step of the best evaluation, the step whose weights the file holds, and the best loss.
  Index best_ = -1, kept_ = -1;
  double best_loss_ = 0;
  Clock::time_point began_ = Clock::now(), warm_;
};

}  // namespace

int run(const program::Options& options, Settings s, const hilt::Comm& met) { return Training(options, s, met)(); }
}  // namespace train
