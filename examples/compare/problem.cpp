// From the options to a plan and random q, k, v and dO; refuses what would not fit.
#include "lesson.h"

namespace compare {

Problem make_problem(const Settings& s) {
  const Index kv_heads = s.kv_heads == 0 ? s.heads : s.kv_heads;
  hilt::check(s.heads % kv_heads == 0, "--kv-heads (", kv_heads, "): must divide --heads, ", s.heads);
  const hilt::PlanSpec spec = program::spec_of(s, s.length, s.heads);
  hilt::check(spec.documents.size() <= 1, "--documents (", program::brief(s.documents), "): ", spec.documents.size(),
              " lists for as many rows, but one set is shown; give one list, which is for all rows");
  const hilt::TermConfig terms = program::terms_of(s.terms, s.heads);
  Problem p;
  p.dtype = program::dtype_of(s.dtype);
  // f64 is the CPU's.
  const hilt::Device device =
      s.device == "auto" && p.dtype == hilt::DType::f64 ? hilt::Device{} : program::device_of(s.device);
  hilt::check(p.dtype != hilt::DType::f64 || device.is_cpu(), "--dtype (f64): only the CPU has it; leave --device ",
              s.device, " out");
  require_inputs_fit(s, kv_heads, p.dtype);
  require_judge_fits(s, kv_heads, spec, p.dtype);
  p.plan = hilt::make_plan(spec);
  hilt::check(!p.plan->looks_at_data() || s.batch == 1, "--pattern (", s.pattern,
              "): each sequence chooses blocks of its own, and one set is shown; use --batch 1, not ", s.batch);
  const auto seed = static_cast<std::uint64_t>(s.seed);
  // Drawn in f64 and rounded: every --dtype sees the same problem.
  const auto random = [&](Index heads, std::uint64_t stream) {
    const hilt::Tensor exact = hilt::randn({s.batch, s.length, heads, s.head_dim}, {seed, stream}, hilt::DType::f64);
    return hilt::moved(hilt::to(exact, p.dtype), device);
  };
  p.q = random(s.heads, 0), p.k = random(kv_heads, 1), p.v = random(kv_heads, 2), p.d_o = random(s.heads, 3);
  p.plan = hilt::plan_of_sequence(p.plan, p.q, p.k, 0);
  p.terms = program::drawn_terms(terms, s.heads, s.length, p.dtype, device, seed);
  for (const hilt::BackwardMode& mode : hilt::backward_modes())  // refuses terms that do not fit
    (void)hilt::attention_memory(*p.plan, s.batch, kv_heads, s.head_dim, p.dtype, mode.mode, p.terms);
  p.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  p.dropout = s.dropout;
  p.key = {seed, 4};
  return p;
}

}  // namespace compare
