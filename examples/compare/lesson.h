#pragma once
#include <hilt/hilt.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "arrangement.h"
#include "verdict.h"

// Private to compare_gradients: what it is asked, and everything it finds out. The summary, the
// JSON and the page are views of one Lesson.

namespace compare {

using hilt::Index;

struct Settings {
  std::int64_t batch = 1, length = 4096, heads = 4, kv_heads = 0, head_dim = 64, seed = 1, repeat = 3;
  double dropout = 0;
  std::string order = "hilbert", pattern = "segment:256", dilation_mode = "all_queries", causal = "none";
  std::string dtype = "f32", device = "auto", out = "out/compare";
  std::vector<std::string> modes{"dense", "taped", "hybrid", "fused"};
  bool json = false;
};

/// The four tensors that are judged, in this order everywhere.
inline constexpr std::array<const char*, 4> kTensors{"o", "dq", "dk", "dv"};

/// What is computed, and in which type.
struct Problem {
  hilt::PlanPtr plan;
  hilt::Tensor q, k, v, d_o;
  hilt::DType dtype = hilt::DType::f32;
  double scale = 1, dropout = 0;
  hilt::RandomKey key;  // of the dropout mask

  Index batch() const { return q.dim(0); }
  Index length() const { return q.dim(1); }
  Index heads() const { return q.dim(2); }
  Index kv_heads() const { return k.dim(2); }
  Index dim() const { return q.dim(3); }
};

/// One way to the gradient, measured: medians over the repeats.
struct Mode {
  std::string name;
  std::string skipped;  // why it did not run: "would need 17.2 GB"
  double forward_ms = 0, backward_ms = 0;
  std::size_t saved_bytes = 0;  // by the tape after forward, q, k and v included where it keeps them
  std::size_t held_bytes = 0;   // alive between the passes, beyond the inputs
  std::size_t forward_peak = 0, backward_peak = 0;  // most bytes alive beyond the inputs during each pass
  double forward_flops = 0, backward_flops = 0;     // of matrix products
  double bytes_moved = 0;                           // by the forward pass, see cost.cpp
  std::vector<hilt::NodeReport> tape;               // live bytes are beyond the inputs
  std::array<Error, 4> error{};                     // o, dq, dk, dv
  std::array<std::vector<double>, 4> deviation;     // |x - oracle| of every element
  bool repeatable = true;                           // the same bits in every repeat

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
};

struct Lesson {
  Settings settings;
  Problem problem;
  Machine machine;
  hilt::TileStats tiles;
  Index pairs = 0, longest_row = 0;  // attended pairs a sequence, summed over heads; most keys of a row
  bool same_result_in_any_order = false;
  std::vector<Arrangement> orders;   // row, snake, morton, tiles, hilbert
  std::string oracle, naive, floor;  // in words: what judged
  std::array<Error, 4> naive_error{};
  std::vector<Mode> modes;
  std::vector<Sample> by_length, by_keys;
  bool forward_identical = true;    // hybrid and fused, bit for bit
  std::vector<std::string> notes;   // fallbacks, forced orders, empty rows
  std::vector<std::string> routes;  // of attention's passes, see program::routes_taken
  double seconds = 0;

  const Mode* mode(const std::string& name) const;
  bool passed() const;
};

// ---- the steps, each in a file of its own -------------------------------------------------------
Problem make_problem(const Settings& settings);  // problem.cpp
// budget.cpp: refuse, before anything is drawn, what does not fit in memory, or what it takes more
// than a minute to judge.
void require_inputs_fit(const Settings& settings, Index kv_heads, hilt::DType dtype);
void require_judge_fits(const Settings& settings, Index kv_heads, const hilt::PlanSpec& spec, hilt::DType dtype);
Machine measure_machine(hilt::DType dtype);                              // machine.cpp
void judge_modes(Lesson& lesson);                                        // modes.cpp: runs, measures and judges them
void measure_scaling(Lesson& lesson);                                    // scaling.cpp
void print_summary(const Lesson& lesson, std::ostream& os, bool color);  // summary.cpp
std::string to_json(const Lesson& lesson);                               // json.cpp
std::string chrome_trace(const Lesson& lesson);                          // json.cpp
std::string to_html(const Lesson& lesson);                               // page.cpp

}  // namespace compare
