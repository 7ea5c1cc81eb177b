#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>
#include "ops/hilbert/plan/plan.h"
#include "ops/hilbert/terms.h"

// Attention problems that people could have, drawn at random: what the sweeps of CPU and GPU time.

namespace hilt::bench {

struct Problem {
  Index batch = 1, length = 0, heads = 1, kv_heads = 1, dim = 64;
  std::string order = "row", pattern = "dense", dilation_mode = "all_queries", causal = "none", dtype = "bf16";
  double dropout = 0;
  double softcap = 0;
  std::string alibi = "none", relative, bias;  // as read_term() takes them
  bool sink = false;
  std::string documents;  // of every row of the batch
  Index queries = 0;      // the last so many ask; 0: all
};

/// What a draw aims at: `ms` from a floor of low to one of high, on a machine of these rates.
struct Machine {
  double low_ms = 0.02, high_ms = 5;
  double bytes = 4.2e12, flops = 716e12, exps = 3.7e12;  // a second
  double element = 2;                                    // bytes
};

/// Problem i of a seed; depends on these and the machine alone. `base`: no dropout, terms,
/// documents, three axes, unions or parts of queries.
Problem drawn(std::uint64_t seed, std::uint64_t i, bool base, const Machine& machine = {});

/// As `attend` and compare_gradients take it: --batch 1 --length 4096 .. --pattern segment:128 ..
std::string to_string(const Problem& p);
/// Reads that, or a line of a sweep's output, whose "problem" it is.
Problem parse_problem(std::string_view line);
/// The problems of a file, a line each; empty lines and lines of other JSON are passed over.
std::vector<Problem> read_problems(const std::string& path);

PlanSpec spec_of(const Problem& p);
/// Its terms, with numbers drawn from this stream.
ScoreTerms terms_of(const Problem& p, std::uint64_t stream, Device device);

/// What no kernel can do without, of one head: 64 x 64 cells that some pair of a listed tile lies
/// in, and the pairs of those cells.
struct Cells {
  Index cells = 0, pairs = 0;
};
/// Summed over all heads of a plan.
Cells touched_cells(const Plan& plan);

/// The least time by bytes, products and exponentials of the touched cells.
struct Floor {
  double forward_ms = 0, backward_ms = 0;
};
Floor floor_of(const Problem& p, const Plan& plan, const Cells& cells, const Machine& machine, double read_rate);

}  // namespace hilt::bench
