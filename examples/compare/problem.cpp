// From the options to a plan and random q, k, v and dO. What would not fit in memory, or would take
// more than a minute to judge, is refused before anything is drawn: the exact loops visit every
// attended pair of a query and a key, three times over, and keep a list of them. Neither rows nor
// columns could be sampled instead: the gradient of one key needs the softmax of its rows.
#include <set>
#include "lesson.h"

namespace compare {
namespace {

constexpr double kMostJudged = 6e9;  // a minute or so

/// Attended pairs of a sequence, over all heads, and those of the sets that differ.
struct Pairs {
  double all = 0, listed = 0;
};
Pairs pairs_of(const hilt::Plan& plan) {
  const double a_tiling =
      static_cast<double>(plan.stats().pairs) / static_cast<double>(plan.parts().at(0).tilings.size());
  std::set<std::vector<std::int32_t>> known;
  Pairs pairs;
  for (Index h = 0; h < plan.heads(); ++h) {
    const auto tilings = plan.tilings_of(h);
    const double n = a_tiling * static_cast<double>(tilings.size());
    pairs.all += n;
    if (known.emplace(tilings.begin(), tilings.end()).second) pairs.listed += n;
  }
  return pairs;
}

bool fits_pattern(const hilt::PlanSpec& spec) try {
  return hilt::make_plan(spec) != nullptr;
} catch (const hilt::Error&) { return false; }

void require(double bytes, const Settings& s, const char* what) {
  program::require_memory("--length (" + std::to_string(s.length) + "): " + what, bytes,
                          "use a smaller --length, --heads, --head-dim or --batch");
}

void require_inputs_fit(const Settings& s, Index kv_heads, hilt::DType dtype) {
  // q, k, v, d_o and the first result of every mode in the type itself; in f64 the inputs, three
  // results of the judge, what a pass of it converts, and each mode's deviations.
  const double modes = static_cast<double>(s.modes.size()), size = static_cast<double>(hilt::size_of(dtype));
  const double numbers = 2 * static_cast<double>(s.batch * s.length) * static_cast<double>(s.heads + kv_heads) *
                         static_cast<double>(s.head_dim);
  require(numbers * (size * (1 + modes) + sizeof(double) * (6 + modes)), s, "the inputs and what judges them");
}

void require_judge_fits(const Settings& s, Index kv_heads, const hilt::PlanSpec& spec) {
  // How long judging takes, in products of the exact loops one after the other: each pair costs
  // about as much as so many features more, and terms are added up by one thread.
  constexpr double kPair = 32;
  const Index lanes =
      program::terms_in_words(s).empty() ? std::min<Index>(hilt::info().threads, s.batch * kv_heads) : 1;
  const double a_pair = (static_cast<double>(s.head_dim) + kPair) * static_cast<double>(s.batch);
  constexpr double kListed = 4 * sizeof(std::int32_t);  // rows that grow
  std::string fitting;
  Pairs pairs;
  const auto require_time = [&](const hilt::PlanSpec& asked) {
    pairs = pairs_of(*hilt::make_plan(asked));
    hilt::check(pairs.all * a_pair / static_cast<double>(lanes) <= kMostJudged, "--length (", s.length,
                "): judging every pair of a query and a key by exact loops would take more than a minute; ", fitting,
                "use a sparser --pattern, or a smaller --heads, --head-dim or --batch");
    if (asked.length < s.length) fitting = "--length " + std::to_string(asked.length) + " would fit, or ";
  };
  // A long plan takes long too: shorter ones first, as far as the order has them.
  for (Index length = 512; length < s.length && s.documents.empty() && s.order.find(':') == s.order.npos; length *= 2) {
    hilt::PlanSpec shorter = spec;
    shorter.length = length, shorter.order.grid = {};
    if (!fits_pattern(shorter)) break;  // a list of blocks, say, has no shorter version
    require_time(shorter);
  }
  require_time(spec);
  require(kListed * pairs.listed, s, "the list of attended pairs");
}

}  // namespace

Problem make_problem(const Settings& s) {
  const Index kv_heads = s.kv_heads == 0 ? s.heads : s.kv_heads;
  hilt::check(s.heads % kv_heads == 0, "--kv-heads (", kv_heads, "): must divide --heads, ", s.heads);
  const hilt::PlanSpec spec = program::spec_of(s, s.length, s.heads);
  hilt::check(spec.documents.size() <= 1, "--documents (", program::brief(s.documents), "): ", spec.documents.size(),
              " lists for as many rows, but one set is shown; give one list, which is for all rows");
  const hilt::TermConfig terms = program::terms_of(s, s.heads);
  Problem p;
  p.dtype = program::dtype_of(s.dtype);
  const hilt::Device device = program::device_of(s.device, p.dtype);
  hilt::check(p.dtype != hilt::DType::f64 || device.is_cpu(), "--dtype (f64): only the CPU has it; leave --device ",
              s.device, " out");
  require_inputs_fit(s, kv_heads, p.dtype);
  require_judge_fits(s, kv_heads, spec);
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
