// From the options to a plan and random q, k, v and dO; refuses what would not fit.
#include <cmath>

#include "../program/program.h"
#include "lesson.h"

namespace compare {
namespace {

hilt::DType parse_dtype(const std::string& text) {
  for (hilt::DType t : {hilt::DType::f64, hilt::DType::f32, hilt::DType::bf16, hilt::DType::f16})
    if (text == name_of(t)) return t;
  hilt::fail("--dtype (", text, "): must be one of f64, f32, bf16, f16");
}

}  // namespace

Problem make_problem(const Settings& s) {
  const Index kv_heads = s.kv_heads == 0 ? s.heads : s.kv_heads;
  hilt::check(s.heads % kv_heads == 0, "--kv-heads (", kv_heads, "): must divide --heads, ", s.heads);
  const hilt::PlanSpec spec{.length = s.length,
                            .heads = s.heads,
                            .order = program::order_of(s.order, s.length),
                            .pattern = program::pattern_of(s.pattern, s.length),
                            .dilation_mode = hilt::parse_dilation_mode(s.dilation_mode),
                            .causality = hilt::parse_causality(s.causal)};
  Problem p;
  p.dtype = parse_dtype(s.dtype);
  // f64 is the CPU's.
  const hilt::Device device =
      s.device == "auto" && p.dtype == hilt::DType::f64 ? hilt::Device{} : program::device_of(s.device);
  hilt::check(p.dtype != hilt::DType::f64 || device.is_cpu(), "--dtype (f64): only the CPU has it; leave --device ",
              s.device, " out");
  require_inputs_fit(s, kv_heads, p.dtype);
  require_judge_fits(s, kv_heads, spec, p.dtype);
  p.plan = hilt::make_plan(spec);
  const auto seed = static_cast<std::uint64_t>(s.seed);
  // Drawn in f64 and rounded: every --dtype sees the same problem.
  const auto random = [&](Index heads, std::uint64_t stream) {
    const hilt::Tensor exact = hilt::randn({s.batch, s.length, heads, s.head_dim}, {seed, stream}, hilt::DType::f64);
    return hilt::moved(hilt::to(exact, p.dtype), device);
  };
  p.q = random(s.heads, 0), p.k = random(kv_heads, 1), p.v = random(kv_heads, 2), p.d_o = random(s.heads, 3);
  p.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  p.dropout = s.dropout;
  p.key = {seed, 4};
  return p;
}

}  // namespace compare
