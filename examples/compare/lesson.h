#pragma once
#include "../program/program.h"
#include "arrangement.h"
#include "broken.h"

// Private to compare_gradients: what it is asked, and everything it finds out. The summary, the
// JSON and the page are views of one Lesson.

namespace compare {

using hilt::Tensor;
using report::format, report::Json;

inline const std::string kDense = "dense", kTaped{name_of(hilt::Backward::taped)},
                         kHybrid{name_of(hilt::Backward::hybrid)}, kFused{name_of(hilt::Backward::fused)};

struct Settings : program::DrawnSettings {
  Settings() {
    pattern = "window2d:16x16", length = 4096, heads = 4, seed = 1;
    for (const hilt::BackwardMode& mode : hilt::backward_modes()) modes.emplace_back(mode.name);
  }
  std::string out = "out/compare";
  std::vector<std::string> modes{kDense};
  bool json = false;
  Index exercise = 0, answer = 0;  // 1 .. kLines
  std::string check;
};
inline constexpr const char* kExercises = "Exercises";  // heading of the last three
inline constexpr Index kLines = 5;

/// exercise.cpp: where an exercise is asked for, python3 takes this process over and writes, judges
/// or answers it.
void do_exercise(const Settings& settings);

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

/// Matrix products alone, 2 m n k each; and bytes of the forward pass, as if nothing stayed in a
/// cache from one use to the next.
struct Cost {
  double forward_flops = 0, backward_flops = 0, bytes_moved = 0;
};

/// One run of a mode.
struct Measured {
  double forward_ms = 0, backward_ms = 0;
  std::size_t saved_bytes = 0;  // by the tape after forward, each block once, with q, k and v where it keeps them
  std::size_t held_bytes = 0;   // alive between the passes, beyond the inputs: what it costs to be able to go back
  std::size_t forward_peak = 0, backward_peak = 0;  // most bytes alive beyond the inputs during each pass
  std::vector<hilt::NodeReport> tape{};             // live bytes are beyond the inputs
  std::vector<hilt::NodeReport> inside{};           // the ops of the backward pass, where the tape has one op
};

/// One way to the gradient: everything of the one run whose time is the median of the repeats.
struct Mode : Measured, Cost {
  std::string name;
  std::string skipped{};                                   // why it did not run: "would need 17.2 GB"
  std::array<Error, kTensors.size()> error{};              // ok where there is no such tensor
  std::array<std::vector<double>, kOfTokens> deviation{};  // |x - oracle| of every element
  bool repeatable = true;                                  // the same bits in every repeat

  std::size_t peak() const { return forward_peak > backward_peak ? forward_peak : backward_peak; }
  bool ran() const { return skipped.empty(); }
  bool ok() const;
};

/// One length of the scaling figure, or one number of keys a row.
struct Sample {
  Index x = 0;
  std::map<std::string, double> ms, saved_bytes;  // by mode
};

struct Machine {
  hilt::Info info;
  double copy_gb_s = 0, gemm_gflop_s = 0;  // the two ceilings, measured in this process
  bool measured_twice = false;             // a mode exceeded them: the machine was busy
};

/// What the derivations claim, on the rows of this run: each number is 0 but for rounding.
struct Checks {
  Index rows = 0;
  double weights_sum = 0;  // largest |sum e^(S - L) - 1|
  double delta = 0;        // largest |sum P dP - dO . O|, against the largest of its terms
  double slopes_sum = 0;   // largest |sum dS|, likewise
};

struct Lesson {
  Settings settings;
  const program::Options& options;
  Problem problem;
  Machine machine;
  hilt::TileStats tiles;
  Index pairs = 0, longest_row = 0;  // attended pairs a sequence, summed over heads; most keys of a row
  bool same_result_in_any_order = false;
  std::vector<Arrangement> orders;   // row, snake, morton, tiles, hilbert, where they walk the grid
  std::string oracle, naive, floor;  // in words: what judged
  std::array<Error, kTensors.size()> naive_error{};
  std::vector<Mode> modes;
  std::vector<Sample> by_length, by_keys;
  Checks checks;
  std::vector<Broken> broken;       // empty where that would take long
  bool forward_identical = true;    // hybrid and fused, bit for bit
  std::vector<std::string> notes;   // fallbacks, forced orders, empty rows
  std::vector<std::string> routes;  // of attention's passes, see program::routes_taken
  double seconds = 0;

  const Mode* mode(const std::string& name) const;
  bool passed() const;
};

// ---- one pass of a mode, or of the dense baseline, under a profiling tape -----------------------
/// The attention everyone writes first. L x L scores, a mask, a softmax, a product: no plan, no
/// tiles; the tape differentiates it. The mask is made once, before.
class Dense {
 public:
  Dense(const Problem& problem, const AttendedSets& sets);
  Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v) const;

 private:
  Index kv_heads_;
  double scale_;
  // By key head, or once for all heads.
  Tensor bias_;     // [.., L, L]: log of how often a key is listed, 0 where once, -inf where not
  Tensor present_;  // [.., L, 1]: 0 for rows without keys, undefined if there are none
  Tensor dropout_;  // multipliers; undefined without dropout
  hilt::ScoreTerms terms_;
  Tensor apart_;  // [L, L]: minus the distance, for slopes
  Tensor entry_;  // [L * L], of relative
};

struct Run : Measured {
  std::array<Tensor, kTensors.size()> result;  // on the CPU
};

/// run.cpp; `dense` is the baseline if that is the mode, else null.
Run run_once(const Problem& problem, const std::string& mode, const Dense* dense);

// ---- the steps, each in a file of its own -------------------------------------------------------
Problem make_problem(const Settings& settings);   // problem.cpp
Machine measure_machine(const Problem& problem);  // scaling.cpp
/// Measures the ceilings again if a mode came out above them: the machine was busy the first time,
/// or is now.
void measure_machine_again(Lesson& lesson);  // scaling.cpp
void judge_modes(Lesson& lesson);            // modes.cpp: runs, measures and judges them
/// Equations of the derivation on rows of this run, with o of one of the modes.
Checks check_rows(const Problem& problem, const ExactProblem& exact, const AttendedSets& sets,
                  const std::vector<double>& o);                         // checks.cpp
void measure_scaling(Lesson& lesson);                                    // scaling.cpp
void print_summary(const Lesson& lesson, std::ostream& os, bool color);  // summary.cpp
/// by_hand.cpp: attention of four tokens with two features, small enough for a pencil, token t
/// seeing tokens 0 .. t, and c = ln 2, so that e^S is a power of two: every matrix, and a finite
/// difference. The page makes tiles and the running softmax of them.
Json by_hand();
Json to_json(const Lesson& lesson);  // json.cpp
struct Files {
  std::string json, html;
};
Files files_of(const Lesson& lesson);  // page.cpp

// ---- cost.cpp: what a mode has to compute and to move, by formula -------------------------------
/// An op-by-op tape: every matmul, backward two more each; every op that is not a view reads its
/// inputs and writes its output.
Cost cost_of_tape(const std::vector<hilt::NodeReport>& tape);
/// The kernels: 4 D flops for every pair of a touched tile forward. Backward 2 D a product: the
/// scores again, then dP, dQ, dK, dV; the hybrid does so for every pair of a group. Bytes: each
/// query tile reads q, writes o and L, and reads k and v of every tile it touches.
Cost cost_of_kernel(const Problem& problem, const std::string& mode, int products_back);
/// f(tiling, how often) of all that the heads of one row attend by.
template <class F> void each_tiling(const hilt::Plan& plan, F&& f) {
  for (Index h = 0; h < plan.heads(); ++h)
    for (const std::int32_t index : plan.tilings_of(h))
      for (const hilt::PlanPart& part : plan.parts())
        f(part.tilings[static_cast<std::size_t>(index)], static_cast<double>(part.places.count(1)));
}
/// Whether an op moves no data.
bool is_view(const std::string& op);
/// What each node of an op-by-op tape computes, in the page's symbols: S, P, M P, O, L; "" for
/// views and what only carries rows to their places.
std::vector<std::string> symbols_of(const std::vector<hilt::NodeReport>& tape);
/// The most bytes the dense baseline needs at once.
std::size_t dense_peak(const Problem& problem);

// ---- summary.cpp: plain text that the page shares, every figure in it this run's ---------------
std::string sizes_text(const Lesson& lesson);  // batch 1, length 4096 (64x64), heads 4, ..
/// "1 thread", "2 threads".
std::string threads_text(const Lesson& lesson);
/// What fused keeps against what taped keeps: "2.1 times less"; "as much, within 5 %".
std::string kept_in_words(const Mode& taped, const Mode& fused);
/// What the orders' tiles say; of a set that is cut along the order, that they say nothing.
std::string order_verdict(const Lesson& lesson);
/// The kernel that did a pass: the word before the colon of "forward on cpu: why". Hopper's ways
/// back in one pass are told by their why: one owner has none, and parts that are added up say so.
std::string route_of(const Lesson& lesson, const std::string& pass);
/// Products of fused on the way back: 5, or 7 by a kernel that goes through the scores twice.
int products_back(const Lesson& lesson);
/// Whether another order would have changed the result or only the work.
std::string order_and_result(const Lesson& lesson);
/// Keys a row from which taped keeps more than fused, between two measured sizes; 0 if they do not
/// cross there.
double crossover_in_keys(const Lesson& lesson);

}  // namespace compare
