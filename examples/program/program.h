#pragma once
#include <hilt/hilt.h>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <initializer_list>
#include <numeric>
#include "options.h"

// Private to examples/: what programs do around their work.

namespace program {

/// The exit status of `program` doing `work`: what work returns, or, once its exception has become
/// one line on stderr, its code: 4 for memory, 70 for everything nobody foresaw. After --debug a
/// stack of where it was thrown follows.
int run(const std::string& program, const std::function<int()>& work);

/// From here on an error that begins with an option's name or value says which option. They stay.
void remember(const Options& options);

/// The same of a program with options: declare() binds them to its settings, then it works.
template <class Settings, class Declare, class Work>
int run(const std::string& program, const std::string& what_it_does, int argc, char** argv, Declare&& declare,
        Work&& work) {
  return run(program, [&] {
    static Settings settings{};
    static Options options(program, what_it_does);
    remember(options);
    declare(options, settings);
    return options.parse(argc, argv) ? work(options, settings) : 0;
  });
}

/// The exception that is being handled, whatever it is, as one of ours.
hilt::Error error_in_flight();

/// How many ranks mpirun or srun has started, by what MPI's environment says; else `otherwise`.
std::int64_t ranks_started(std::int64_t otherwise);
bool is_first_started();  // whether this process is the first of them, or alone
/// Runs work(comm) as `ranks` ranks: where mpirun or srun started this process it is one of them,
/// else they are threads of this process. The exit status once all have ended. What work throws is
/// told to all ranks and thrown; run() then says it. A thread that does not end is left behind:
/// then the process ends here.
int run_as(const std::string& program, std::int64_t ranks, const std::string& over,
           const std::function<int(hilt::Comm&)>& work);

/// What hilt::attention_routes() tells of this thread, each line once: "forward on mma: the GPU is
/// no Hopper". After --debug, run() prints them on stderr.
std::vector<std::string> routes_taken();

/// In which other mode attention ran on this thread than was asked for, and why, each once.
std::vector<std::string> fallbacks_taken();
/// What of a plan nobody may have meant, a sentence each: a forced order, rows without keys,
/// dilations that leave one.
std::vector<std::string> oddities_of(const hilt::Plan& plan, const std::string& option = "--pattern");

/// `text` fit for a line of a terminal or a page: what is no character, or one that moves or colors
/// instead of being seen, as \xNN; those of `keep` stay.
std::string printable(std::string_view text, std::string_view keep = "");

/// `text` in lines of so many columns where its words allow it, continued under `indent` spaces.
std::string wrapped(const std::string& text, std::size_t columns, std::size_t indent = 0);
std::string joined(const std::vector<std::string>& words, const std::string& between);

/// A value as a message repeats it: of a long one the beginning, and how long it is.
std::string brief(const std::string& text);

/// What --device auto, cpu, cuda or cuda:N names; throws Code::gpu where there is no such GPU. auto
/// is the CPU for f64, which is its own. Unless one is named, GPUs are dealt out by rank.
hilt::Device device_of(const std::string& text, hilt::DType dtype = hilt::DType::f32, int rank = 0);

/// What --order and --pattern mean for so many tokens. Errors name the option.
hilt::Order order_of(const std::string& text, hilt::Index length);
hilt::Pattern pattern_of(const std::string& text, hilt::Index length, const std::string& option = "--pattern");
/// An attention on inputs that the program draws.
struct DrawnSettings : hilt::AttentionSettings {
  std::int64_t batch = 1, kv_heads = 0, head_dim = 64, repeat = 3;
  std::string dtype = "f32", device = "auto";
};
/// For all of it, with so many tokens and runs.
void declare_drawn(Options& options, DrawnSettings& settings, std::array<hilt::Index, 2> tokens,
                   hilt::Index least_runs);
/// Options for these settings of an attention, as hilt::attention_settings() has them; `more` joins
/// the help.
void declare(Options& options, hilt::AttentionSettings& settings, std::initializer_list<const char*> names,
             const std::string& more = "");
/// For its score terms, by name and size: of a program that makes their tensors itself.
void declare_terms(Options& options, hilt::AttentionSettings& settings);
hilt::PlanSpec spec_of(const hilt::AttentionSettings& settings, hilt::Index length, hilt::Index heads);
/// What --grid says, with at most so many cells a side.
hilt::Grid grid_of(const std::string& text, hilt::Index most);
hilt::DType dtype_of(const std::string& text);
hilt::TermConfig terms_of(const hilt::AttentionSettings& settings, hilt::Index heads);
/// Their tensors for a call with q of this type; all but slopes are random.
hilt::ScoreTerms drawn_terms(const hilt::TermConfig& config, hilt::Index heads, hilt::Index length, hilt::DType dtype,
                             hilt::Device device, std::uint64_t seed);
/// ", softcap 5, alibi learned", for a sentence.
std::string terms_in_words(const hilt::AttentionSettings& settings);
/// f(), which makes a plan of these; its errors then name the options, --order if there is one.
void plan_from(const std::string& order, const std::string& pattern, const std::function<void()>& f,
               const std::string& option = "--pattern");

using Named = std::vector<std::pair<std::string, hilt::Tensor>>;
/// o, which forward() gives of q, k, v (and d_o), and its gradients: dq, dk, dv, and d_slopes .. of
/// the terms' tensors.
Named with_gradients(const std::array<hilt::Tensor, 4>& inputs, const hilt::ScoreTerms& terms,
                     const std::function<hilt::Tensor()>& forward);
/// The same of ranks that have the rows of a shard each: rows of all, and the sum of each term's.
Named of_all_ranks(Named results, const hilt::ShardPlan& shard, const hilt::Comm& comm);

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Seconds of a few runs, ascending: the first is what the device can do when nothing else runs.
template <class F> std::vector<double> seconds_of(std::int64_t runs, hilt::Device device, F&& f) {
  std::vector<double> all;
  for (std::int64_t i = 0; i < runs; ++i) {
    hilt::synchronize(device);
    const auto start = std::chrono::steady_clock::now();
    f();
    hilt::synchronize(device);
    all.push_back(seconds_since(start));
  }
  std::ranges::sort(all);
  return all;
}

/// GFLOP/s of a square product, the best of ten; a CPU multiplies 16-bit types in f32.
double product_gflops(hilt::Device device, hilt::DType dtype, hilt::Index side);

/// Bytes that this program can still get: of the machine, and of `ulimit -v` and `-d`.
std::size_t memory_available();
/// Throws Code::memory where `what`, in short, needs more than that.
void require_memory(const std::string& what, double bytes, const std::string& advice);
/// What a plan takes at least, known before the time is spent to make it.
double least_plan_bytes(hilt::Index length, const hilt::Pattern& pattern);
/// Sizes that anybody may have asked for, multiplied: the product may lie beyond where 64 bits end.
inline double product_of(std::initializer_list<hilt::Index> factors) {
  return std::accumulate(factors.begin(), factors.end(), 1.0, std::multiplies<double>());
}

/// Where the first number of x stands that is NaN or infinite, as "nan at [0, 3]"; nothing where
/// there is none. -inf may pass: it is the lse of a row that attends to nothing.
std::optional<std::string> not_finite(const hilt::Tensor& x, bool minus_infinity_too = true);

/// A directory to write to, for one program at a time. Files take their names only in commit();
/// until then there is nothing.
class Outputs {
 public:
  /// Makes the directory if it is missing; throws if another program writes to it, or none can.
  /// What killed programs left of their files goes.
  explicit Outputs(const std::string& directory);
  ~Outputs();
  Outputs(Outputs&&) = delete;  // nor copied

  const std::string& directory() const { return directory_; }
  /// Where to write what will be called `name`: nobody looks there before it is whole.
  std::string stage(const std::string& name);
  void write(const std::string& name, const std::string& content);
  void commit();
  void check_there() const { lock_->check_there(); }

 private:
  void unmake() const;
  std::string directory_;
  std::vector<std::filesystem::path> made_;                  // directories that were not there, the innermost first
  std::optional<hilt::DirectoryLock> lock_;                  // while this lives
  std::vector<std::pair<std::string, std::string>> staged_;  // temporary path, final path
};

}  // namespace program
