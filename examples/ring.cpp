// The same attention over several ranks and on one: errors, bytes, memory and time.
//
//   ring --ranks 4 --comm threads --length 4096 --pattern segment:2048
//
//   {
//     "ranks": 4,
//     "max_error_vs_one_rank": {"o": 4.8e-07, "dq": ..., "dk": ..., "dv": ...},
//     "bytes_sent_per_rank": [6291456, ..],      forward and backward
//     ...
//
// Exit 1 if a result differs from one rank's by more than rounding, or if another number of bytes
// travelled than the plan says.
#include <hilt/hilt.h>
#include <iostream>
#include <nlohmann/json.hpp>
#include "compare/exact.h"
#include "program/program.h"

using namespace hilt;

namespace {

struct Settings : program::DrawnSettings {
  Settings() { length = 2048, heads = 4; }
  std::string over = "threads";
  std::int64_t ranks = 4;
  bool alone = false;
};

void declare(program::Options& options, Settings& s) {
  s.ranks = program::ranks_started(s.ranks);
  options.integer("--ranks", s.ranks, 1, 1024, "Ranks");
  options.choice("--comm", s.over, {"threads", "mpi", "nccl"},
                 "What joins them: threads of this process; mpi where mpirun or srun started them, which is found; or "
                 "either, with a GPU each");
  program::declare(options, s, {"transport", "shards"});
  program::declare_drawn(options, s, {0, 1 << 28}, 1);
  options.flag("--no-one-rank", s.alone, "Leave out the comparison, which needs the whole on one rank");
}

using Inputs = std::array<Tensor, 4>;  // q, k, v and d_o

/// Rows of a sequence of `length`, the same whoever draws them.
Inputs drawn(const Settings& s, std::int64_t length, std::uint64_t stream, DType dtype, Device device) {
  const auto normal = [&](std::int64_t heads, std::uint64_t which) {
    const RandomKey key{static_cast<std::uint64_t>(s.seed), stream * 4 + which};
    return to(to(randn({s.batch, length, heads, s.head_dim}, key), dtype), device);
  };
  return {normal(s.heads, 0), normal(s.kv_heads, 1), normal(s.kv_heads, 2), normal(s.heads, 3)};
}

std::vector<std::int64_t> of_all(const Comm& comm, std::size_t value) {
  return comm.gather(from_values({static_cast<Index>(value)}, {1})).to_vector<Index>();
}

/// One rank's part of the comparison.
struct Comparison {
  const Settings& s;
  Comm comm;
  Device device;
  DType dtype;
  AttentionOptions options;
  PlanSpec spec;
  ShardPlanPtr shard;

  Comparison(const Settings& settings, const Comm& met) : s(settings), dtype(program::dtype_of(s.dtype)) {
    device = program::device_of(s.over == "nccl" ? "cuda" : s.device, dtype, met.rank());
    comm = s.over == "nccl" ? nccl_ranks(met, device) : met;
    const auto seed = static_cast<std::uint64_t>(s.seed);
    options.dropout = s.dropout, options.key = RandomKey{seed, 1u << 20};
    options.terms = program::drawn_terms(program::terms_of(s, s.heads), s.heads, s.length, dtype, device, seed);
    spec = program::spec_of(s, s.length, s.heads);
    program::plan_from(s.order, s.pattern, [&] {
      shard = make_shard_plan(spec, comm.size(), comm.rank(), parse_transport(s.transport), parse_dealing(s.shards));
    });
    agree_on(*shard, comm, s.batch, s.kv_heads, s.head_dim, dtype, options);
  }

  template <class F> double median_ms(F&& f) const {
    return 1e3 * program::seconds_of(s.repeat, device, f)[static_cast<std::size_t>(s.repeat / 2)];
  }
  program::Named on_all(const Inputs& in) const {
    return program::with_gradients(in, options.terms,
                                   [&] { return ring_attention(in[0], in[1], in[2], shard, comm, options); });
  }

  /// One rank's results and time beside those of many; whether they are the same but for rounding.
  bool against_one(const Inputs& all, const program::Named& many, double ms, nlohmann::ordered_json& out) const {
    const PlanPtr plan = make_plan(spec);
    program::Named one;
    const auto forward = [&] { return attention(all[0], all[1], all[2], plan, options); };
    const auto alone = [&] { one = program::with_gradients(all, options.terms, forward); };
    alone();
    const double one_ms = median_ms(alone);
    static const std::map<DType, double> kRounding{
        {DType::f64, 1e-12}, {DType::f32, 1e-5}, {DType::f16, 4e-3}, {DType::bf16, 3e-2}};
    bool right = true;
    for (std::size_t i = 0; i < one.size(); ++i) {
      const std::vector<double> should = one[i].second.to_vector();
      const double worst = compare::measure(many[i].second.to_vector(), should).max_abs;
      double largest = 1;
      for (const double x : should) largest = std::max(largest, std::abs(x));
      out["max_error_vs_one_rank"][one[i].first] = worst;
      right = right && worst <= kRounding.at(dtype) * largest;
    }
    out["one_rank_ms"] = one_ms;
    out["efficiency"] = one_ms / (ms * comm.size());
    return right;
  }

  int operator()() const {
    Inputs mine, all;
    if (s.alone) {
      mine = drawn(s, shard->length(), static_cast<std::uint64_t>(comm.rank()), dtype, device);
    } else {
      all = drawn(s, s.length, 0, dtype, device);
      for (std::size_t i = 0; i < all.size(); ++i) mine[i] = rows_of_rank(all[i], *shard, comm.rank());
      if (comm.rank() != 0) all = {};
    }
    comm.barrier();
    reset_thread_memory_stats();
    reset_memory_peak(device);
    const std::size_t before = comm.traffic().bytes_sent, held = memory_stats(device).live;
    program::Named part = on_all(mine);
    const std::size_t sent = comm.traffic().bytes_sent - before;
    const std::size_t peak = device.is_cpu() ? thread_memory_stats().peak : memory_stats(device).peak - held;
    const double ms = median_ms([&] {
      part = on_all(mine);
      synchronize(device);
      comm.barrier();
    });
    nlohmann::ordered_json out{{"ranks", comm.size()},
                               {"comm", comm.name()},
                               {"transport", s.transport},
                               {"order", to_string(shard->plan().spec().order)}};
    bool right = true;
    if (!s.alone) {
      const program::Named many = program::of_all_ranks(part, *shard, comm);
      if (comm.rank() == 0) right = against_one(all, many, ms, out);
    }
    const ShardPlan::Bytes bytes = shard->bytes_sent(s.batch, s.kv_heads, s.head_dim, dtype);
    out["bytes_sent_per_rank"] = of_all(comm, sent);
    out["predicted_bytes"] = of_all(comm, bytes.forward + bytes.backward);
    out["peak_bytes_per_rank"] = of_all(comm, peak);
    out["imbalance"] = imbalance(shard->plan(), shard->shards());
    out["ms"] = ms;
    if (comm.rank() == 0) std::cout << out.dump(2) << '\n';
    return right && out["bytes_sent_per_rank"] == out["predicted_bytes"] ? 0 : 1;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const auto work = [&](const program::Options& options, Settings& s) {
    if (s.kv_heads == 0) s.kv_heads = s.heads;
    check(s.heads % s.kv_heads == 0, "--kv-heads (", s.kv_heads, "): must divide --heads, ", s.heads);
    // Before anything is made: the plan, and q, k, v, o and their gradients, whole where compared.
    const bool on_cpu = s.over != "nccl" && program::device_of(s.device, program::dtype_of(s.dtype)).is_cpu();
    const Index inputs = !on_cpu ? 0 : s.alone || program::ranks_started(1) > 1 ? 1 : s.ranks;
    const auto size = static_cast<Index>(size_of(program::dtype_of(s.dtype)));
    program::require_memory(
        "--length (" + std::to_string(s.length) + ")",
        program::product_of({4, inputs, s.batch, s.length, s.heads + s.kv_heads, s.head_dim, size}) +
            program::least_plan_bytes(s.length, program::pattern_of(s.pattern, s.length)),
        "ask for fewer tokens, heads or ranks");
    if (s.over == "nccl") (void)program::device_of("cuda");  // says here and now that there is none
    std::string same = row_order_forced() ? "HILT_FORCE_ORDER = row" : "HILT_FORCE_ORDER = (unset)";
    for (const auto& [key, value, is_text, group, preset] : options.values())
      if (key != "ranks" && key != "device") same += "\n" + key + " = " + value;
    return program::run_as("ring", s.ranks, s.over, [&](Comm& met) {
      met.agree("ring", same);  // what every rank must have been asked
      return Comparison(s, met)();
    });
  };
  return program::run<Settings>("ring", "Attention over several ranks, held against one rank. Prints one JSON object.",
                                argc, argv, declare, work);
}
