#pragma once
#include <nlohmann/json.hpp>
#include "../program/program.h"
#include "arrangement.h"

// Private to compare_gradients: what it is asked, and everything it finds out. The summary, the
// JSON and the page are views of one Lesson.

namespace compare {

using hilt::Tensor;
using report::format, report::Json;

inline const std::string kDense = "dense", kTaped{name_of(hilt::Backward::taped)},
                         kHybrid{name_of(hilt::Backward::hybrid)}, kFused{name_of(hilt::Backward::fused)};

struct Settings : program::DrawnSettings {
  Settings() {
    order = "hilbert", pattern = "window2d:16x16", length = 4096, heads = 4, seed = 1;
    for (const hilt::BackwardMode& mode : hilt::backward_modes()) modes.emplace_back(mode.name);
  }
  std::string out = "out/compare";
  std::vector<std::string> modes{kDense};
  bool json = false;
  Index exercise = 0, answer = 0;  // 1 .. kLines
  std::string check;
};
inline constexpr const char* kExercises = "Exercises";  // heading of the last three
inline constexpr Index kLines = 6;

/// by_hand.cpp: where an exercise is asked for, python3 takes this process over and writes, judges
/// or answers it.
void do_exercise(const program::Options& options, const Settings& settings);

/// The tensors that are judged, in this order everywhere; the last four where their term is. The
/// first kOfTokens have rows for tokens.
inline constexpr std::array<const char*, 8> kTensors{"o",        "dq",         "dk",     "dv",
                                                     "d_slopes", "d_relative", "d_bias", "d_sink"};
inline constexpr std::size_t kOfTokens = 4;

/// What is computed, and in which type.
struct Problem {
  hilt::PlanPtr plan;
  hilt::Tensor q, k, v, d_o;
  hilt::DType dtype = hilt::DType::f32;
  double scale = 1, dropout = 0;
  hilt::RandomKey key;  // of the dropout mask
  hilt::ScoreTerms terms;

  /// What the i-th tensor has the shape of, and from 1 on is the gradient of; undefined without.
  const hilt::Tensor& input(std::size_t i) const {
    const hilt::Tensor* const all[] = {&q, &q, &k, &v, &terms.slopes, &terms.relative, &terms.bias, &terms.sink};
    return *all[i];
  }
  /// The bytes of q, k, v, dO, which is as large as q, and the tensors of terms.
  std::size_t input_bytes() const {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < kTensors.size(); ++i) sum += input(i) ? input(i).bytes() : 0;
    return sum;
  }
  /// Whether a score has more to it than q . k.
  bool scored() const { return terms.softcap || terms.alibi || terms.relative || terms.bias; }
  Index batch() const { return q.dim(0); }
  Index length() const { return q.dim(1); }
  Index heads() const { return q.dim(2); }
  Index kv_heads() const { return k.dim(2); }
  Index dim() const { return q.dim(3); }
};

/// One way to the gradient: everything of the one run whose time is the median of the repeats.
struct Mode {
  std::string name;
  Json facts;                                              // as in compare.json; "skipped": why it did not run
  std::array<Error, kTensors.size()> error{};              // ok where there is no such tensor
  std::array<std::vector<double>, kOfTokens> deviation{};  // |x - oracle| of every element
  bool repeatable = true;                                  // the same bits in every repeat

  bool ran() const { return !facts.contains("skipped"); }
  bool ok() const { return !ran() || (repeatable && std::ranges::all_of(error, &Error::ok)); }
  double number(const char* fact) const { return facts[fact].get<double>(); }
  double ms() const { return number("forward_ms") + number("backward_ms"); }
};

struct Lesson {
  Settings settings;
  const program::Options& options;
  Problem problem;
  Json machine{};                     // with two ceilings, measured in this process, and the routes of the passes
  Index pairs = 0, longest_row = 0;   // attended pairs a sequence, summed over heads; most keys of a row
  std::vector<Arrangement> orders{};  // row, snake, morton, tiles, hilbert, where they walk the grid
  Json naive_error{};
  std::vector<Mode> modes{};
  Json by_length = Json::array(), by_keys = Json::array();  // time and memory at so many tokens, and keys a row
  // What the derivations claim, on rows of this run.
  Json checks{{"rows", 0}, {"weights_sum", 0.0}, {"delta", 0.0}, {"slopes_sum", 0.0}};
  std::vector<Broken> broken{};      // empty where that would take long
  bool forward_identical = true;     // hybrid and fused, bit for bit
  std::vector<std::string> notes{};  // fallbacks, forced orders, empty rows
  double seconds = 0;

  /// The mode of that name, if it ran.
  const Mode* mode(const std::string& name) const {
    const auto found = std::ranges::find(modes, name, &Mode::name);
    return found == modes.end() || !found->ran() ? nullptr : &*found;
  }
  bool passed() const { return forward_identical && std::ranges::all_of(modes, &Mode::ok); }
};

/// One forward and backward pass of a mode, under a profiling tape.
struct Trial {
  double forward_ms = 0, backward_ms = 0;
  std::size_t saved_bytes = 0;  // by the tape after forward, each block once, with q, k and v where it keeps them
  std::size_t held_bytes = 0;   // alive between the passes, beyond the inputs: what it costs to be able to go back
  std::size_t forward_peak = 0, backward_peak = 0;  // most bytes alive beyond the inputs during each pass
  std::vector<hilt::NodeReport> tape{};             // live bytes are beyond the inputs
  std::vector<hilt::NodeReport> inside{};           // the ops of the backward pass, where the tape has one op
  std::array<Tensor, kTensors.size()> result{};     // on the CPU

  double ms() const { return forward_ms + backward_ms; }
};
/// run.cpp: what runs a mode of this problem, once each time; the sets are the dense baseline's.
std::function<Trial()> pass_of(const Problem& problem, const std::string& mode, const AttendedSets& sets);

// ---- the steps, each in a file of its own -------------------------------------------------------
Problem make_problem(const Settings& settings);  // problem.cpp
Json measure_machine(const Problem& problem);    // scaling.cpp: before the modes,
void measure_machine_again(Lesson& lesson);      // and after them: were both the same?
void judge_modes(Lesson& lesson);                // modes.cpp: runs, measures and judges them
void measure_scaling(Lesson& lesson);            // scaling.cpp
/// by_hand.cpp: attention of four tokens with two features, small enough for a pencil, token t
/// seeing tokens 0 .. t, and c = ln 2, so that e^S is a power of two: every matrix.
Json by_hand();
struct Files {
  std::string json, html;
  Json words;  // that the page and the summary share, every figure in them this run's
};
Files files_of(const Lesson& lesson);                                                       // files.cpp
void print_summary(const Lesson& lesson, const Json& words, std::ostream& os, bool color);  // summary.cpp

/// An error as in compare.json, with where the worst element of that shape stands.
Json error_of(const Error& e, const hilt::Shape& shape);  // modes.cpp
/// The kernel that did a pass: the word before the colon of "forward on cpu: why". Hopper's ways
/// back in one pass are told by their why: one owner has none, and parts that are added up say so.
std::string route_of(const Lesson& lesson, const std::string& pass);  // modes.cpp
/// Products of fused on the way back: 5, or 7 by a kernel that goes through the scores twice.
int products_back(const Lesson& lesson);  // modes.cpp
/// f(tiling, how often) of all that the heads of one row attend by.
template <class F> void each_tiling(const hilt::Plan& plan, F&& f) {
  for (Index h = 0; h < plan.heads(); ++h)
    for (const std::int32_t index : plan.tilings_of(h))
      for (const hilt::PlanPart& part : plan.parts())
        f(part.tilings[at(index)], static_cast<double>(part.places.count(1)));
}

}  // namespace compare
