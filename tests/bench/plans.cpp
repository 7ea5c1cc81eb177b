// What stands before a kernel: milliseconds of one thread of the host for a plan, for what a GPU's
// kernels walk, and for a CPU's lists, as JSON, a line a set. A hash of all these lists tells
// whether another build makes the same.
//
//   hilt_plans [--only TEXT]              the sets whose name has the text; all, and 300 drawn. Of an
//                                         order with the call, a CPU's forward pass beside the plan's
//   hilt_plans --hashes FILE COUNT SEED   hashes alone: of a file of problems, and of so many drawn
//                                         ones of at most 16,384 tokens
//   hilt_plans --drawn COUNT SEED         so many drawn problems: the median, p95 and the worst of a
//                                         plan with all that a GPU's kernels walk of it
//
// Times are of the processor, medians of several runs.
#include <algorithm>
#include <ctime>
#include <iomanip>
#include <iostream>
#include "core/parallel.h"
#include "core/tape.h"
#include "ops/hilbert/attention.h"
#include "ops/hilbert/kernels/compact.h"
#include "ops/hilbert/kernels/hopper/schedule.h"
#include "ops/hilbert/plan/tiles.h"
#include "ops/ops.h"
#include "problems.h"

using namespace hilt;

namespace {

// ---- hashes -------------------------------------------------------------------------------------

class Hash {
 public:
  void add(std::uint64_t x) { sum_ = (sum_ ^ x) * 0x9E3779B97F4A7C15u, sum_ ^= sum_ >> 29; }
  void add(const TokenList& list) { add_all(list); }
  void add(const Tiling& t) {
    for (const TokenList* list : {&t.q_token, &t.k_token, &t.q_name, &t.k_name, &t.q_rank, &t.k_rank}) add(*list);
    add_all(t.q_known), add_all(t.k_known);
    for (const std::vector<Tiling::Range>* list : {&t.q_tile, &t.k_tile})
      for (const Tiling::Range& r : *list) add(r);
    for (const Tiling::Sites& s : t.grids) add_numbers(s.width, s.height, s.frames, s.first, s.begin);
    add_all(t.met.begin), add_number(t.met.full), add_number(t.met.partial);
    for (const Tiling::Run& r : t.met.run) add_numbers(r.begin, r.end, r.partial);
    for (const Tiling::Group& g : t.group) add(g.q), add(g.k);
    add_numbers(t.pairs, t.boxes, t.causal);
    for (const Tiling::Axis& a : t.axis) add_all(a.key), add_all(a.low), add_all(a.high);
  }
  void add(const Compact& c) {
    add(static_cast<const Tiling&>(c));
    add_all(c.keys_begin), add_all(c.share_begin), add_all(c.turns), add_all(c.k_first), add_all(c.pair_begin);
    add_all(c.pair_list), add_number(c.every_key);
    for (const Tiling::Ref& r : c.keys) add_numbers(r.tile, r.partial);
    for (const Compact::Share& s : c.share) add_numbers(s.rows, s.end, s.turn, s.last, s.first);
    for (const Tiling::Range& r : c.runs) add(r);
  }
  void add(const Visits& v) {
    for (const VisitSide* side : {&v.queries, &v.keys}) {
      for (const auto* owners : {&side->owner, &side->part})
        for (const VisitSide::Owner& o : *owners) add(o);
      for (const VisitSide::Visit& x : side->visit) add(x);
      add_numbers(side->parts, side->cells, side->cells_wide, side->made), add_all(side->portion);
    }
    add_all(v.mask), add_numbers(v.pairs, v.mixed, v.one_owner, v.eights);
  }
  void add(const kernels::hopper::Schedule& s, const Visits& v, std::size_t tiles) {
    for (const VisitSide::Owner& o : s.owner) add(o);
    for (const auto& m : s.meeting) {
      add_numbers(m.row, m.rows, m.turn, m.tile);
      for (const auto& cell : m.cell) add_numbers(cell[0], cell[1]);
    }
    add_numbers(s.tiles, v.masked[tiles], v.complete[tiles]);
  }
  std::uint64_t sum() const { return sum_; }

 private:
  void add_number(Index x) { add(static_cast<std::uint64_t>(x)); }
  void add_numbers(auto... x) { (add_number(static_cast<Index>(x)), ...); }
  void add_all(const auto& list) {
    add_number(static_cast<Index>(list.size()));
    for (const auto x : list) add_number(x);
  }
  void add(Tiling::Range r) { add_numbers(r.begin, r.end); }
  void add(const VisitSide::Owner& o) {
    add_numbers(o.row, o.rows, o.first, o.visits, o.steps, o.tile, o.tiles, o.number), add(o.front);
  }
  void add(const VisitSide::Visit& v) { add_numbers(v.row, v.rows, v.cell[0], v.cell[1], v.mask); }
  std::uint64_t sum_ = 1;
};

/// All that is made of a plan, in every way that a kernel asks for.
void add_lists(Hash& hash, const Plan& plan, bool masks_of_all_sizes) {
  for (const PlanPart& part : plan.parts())
    for (const Tiling& t : part.tilings) hash.add(t), hash.add(compact(t, true)), hash.add(compact(t, false));
  for (const PlanPart& part : row_parts(plan)) {
    const auto add = [&](const Tiling& t) {
      hash.add(t), hash.add(visits(t));
      for (const Index queries : {64, 128})
        hash.add(kernels::hopper::schedule_of(visits(t), queries), visits(t), queries == 128);
    };
    for (const Tiling& t : part.tilings) {
      add(t), add(with_ascending_keys(t)), add(with_short_lists(t, false)), add(with_short_lists(t, true));
      for (const std::size_t masks : {0, 16, 2048})
        if (masks_of_all_sizes) hash.add(visits_of(t, masks * 512, 64));
    }
    if (const auto its = plan.tilings_of(0); plan.heads_agree() && its.size() > 1)
      if (const Tiling* const joined = joined_tiling(part.memo, part.tilings, its)) add(*joined);
  }
}

int print_hashes(const std::string& file, std::uint64_t count, std::uint64_t seed) {
  std::vector<bench::Problem> all = bench::read_problems(file);
  for (std::uint64_t i = 0; count > 0; ++i)
    if (const bench::Problem p = bench::drawn(seed, i, false); p.length <= 16384) all.push_back(p), --count;
  for (const bench::Problem& p : all) {
    Hash hash;
    add_lists(hash, Plan(bench::spec_of(p)), p.length <= 4096);
    std::cout << std::hex << std::setfill('0') << std::setw(16) << hash.sum() << std::dec << ' ' << bench::to_string(p)
              << std::endl;
  }
  return 0;
}

// ---- times --------------------------------------------------------------------------------------

double now_ms() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return 1e3 * static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_nsec);
}
double median(std::vector<double> x) {
  std::ranges::sort(x);
  return x[x.size() / 2];
}

/// 58 lengths, no two alike, that fill 65,536 tokens.
DocumentList documents() {
  DocumentList list;
  Index left = 65536;
  for (Index i = 0; i < 57; ++i) list.emplace_back(630 + i * 389 % 1001), left -= list.back().length;
  list.emplace_back(left);
  return list;
}

struct Row {
  const char *set, *order, *pattern;
  Index length;
  Causality causality = Causality::none;
  bool packed = false, cpu = false;
};
constexpr Causality kCausal = Causality::token;
constexpr Row kRows[] = {
    {"58 documents", "row", "dense", 65536, Causality::none, true, false},
    {"58 documents, causal", "row", "dense", 65536, kCausal, true, false},
    {"58 documents", "row", "segment:256", 65536, Causality::none, true, false},
    {"58 documents, causal", "row", "segment:256", 65536, kCausal, true, false},
    {"58 documents", "row", "slide:256", 65536, Causality::none, true, false},
    {"58 documents, causal", "row", "slide:256", 65536, kCausal, true, false},
    {"65,536 tokens", "row", "slide:256", 65536, Causality::none, false, false},
    {"65,536 tokens, causal", "row", "slide:256", 65536, kCausal, false, false},
    {"65,536 tokens", "row", "blocks:64@local:2", 65536, Causality::none, false, false},
    {"128x128, hilbert", "hilbert:128x128", "neighborhood2d:17x17", 16384, Causality::none, false, true},
    {"128x128, row", "row:128x128", "neighborhood2d:17x17", 16384, Causality::none, false, true},
    {"128x128, hilbert", "hilbert:128x128", "neighborhood2d:33x33", 16384, Causality::none, false, true},
    {"128x128, row", "row:128x128", "neighborhood2d:33x33", 16384, Causality::none, false, true},
    {"16x48x48, hilbert", "hilbert:16x48x48", "neighborhood3d:5x9x9", 36864, Causality::none, false, true},
    {"16x48x48, row", "row:16x48x48", "neighborhood3d:5x9x9", 36864, Causality::none, false, true},
    {"1,048,576 tokens", "row", "dense,prefix=4", 1 << 20, Causality::none, false, false},
    {"1,048,576 tokens, hilbert, causal", "hilbert", "dense", 1 << 20, kCausal, false, false},
};

PlanSpec spec_of(const Row& row) {
  PlanSpec spec;
  spec.length = row.length, spec.order = parse_order(row.order, row.length);
  spec.pattern = parse_pattern(row.pattern), spec.causality = row.causality;
  if (row.packed) spec.documents = {documents()};
  return spec;
}

/// f(tiling) of all that a GPU's kernels take.
void each_tiling(const Plan& plan, auto&& f) {
  for (const PlanPart& part : row_parts(plan)) std::ranges::for_each(part.tilings, f);
}

void time_drawn(std::uint64_t count, std::uint64_t seed) {
  std::vector<std::pair<double, std::string>> all;
  for (std::uint64_t i = 0; i < count; ++i) {
    const bench::Problem p = bench::drawn(seed, i, false);
    const PlanSpec spec = bench::spec_of(p);
    std::vector<double> ms;
    for (int run = 0; run < 3; ++run) {
      const double begin = now_ms();
      const Plan plan(spec);
      each_tiling(plan, [](const Tiling& t) { (void)visits(t); });
      if (p.dropout == 0)
        each_tiling(plan, [](const Tiling& t) { (void)with_short_lists(t, false), (void)with_short_lists(t, true); });
      ms.push_back(now_ms() - begin);
    }
    all.emplace_back(median(ms), bench::to_string(p));
  }
  std::ranges::sort(all);
  const auto at = [&](double part) { return all[static_cast<std::size_t>(part * double(all.size() - 1))].first; };
  std::cout << std::setprecision(3) << R"({"set":"drawn problems","count":)" << count << R"(,"seed":)" << seed
            << R"(,"median_ms":)" << at(0.5) << R"(,"p95_ms":)" << at(0.95) << R"(,"worst_ms":)" << at(1)
            << R"(,"worst":")" << all.back().second << "\"}" << std::endl;
}

void time_row(const Row& row) {
  const PlanSpec spec = spec_of(row);
  std::vector<double> plan_ms, visits_ms, short_ms, cpu_ms;
  double begin = 0;
  const auto lap = [&](std::vector<double>& of) { of.push_back(now_ms() - begin), begin = now_ms(); };
  std::uint64_t sum = 0;
  for (double all = 0; plan_ms.size() < 3 || (all < 500 && plan_ms.size() < 25);) {
    const double first = begin = now_ms();
    const Plan plan(spec);
    lap(plan_ms);
    const auto each = [](std::span<const PlanPart> parts, auto&& f) {
      for (const PlanPart& part : parts) std::ranges::for_each(part.tilings, f);
    };
    each(row_parts(plan), [](const Tiling& t) { (void)visits(t); });
    lap(visits_ms);
    each(row_parts(plan), [](const Tiling& t) { (void)with_short_lists(t, false), (void)with_short_lists(t, true); });
    lap(short_ms);
    if (row.cpu) each(plan.parts(), [](const Tiling& t) { (void)compact(t, true); });
    lap(cpu_ms);
    all += now_ms() - first;
    if (sum != 0 || row.length > 65536) continue;
    Hash hash;
    add_lists(hash, plan, false);
    sum = hash.sum();
  }
  std::cout << std::setprecision(3) << R"({"set":")" << row.set << R"(","pattern":")" << row.pattern
            << R"(","plan_ms":)" << median(plan_ms) << R"(,"visits_ms":)" << median(visits_ms) << R"(,"short_ms":)"
            << median(short_ms);
  if (row.cpu) std::cout << R"(,"cpu_ms":)" << median(cpu_ms);
  std::cout << R"(,"hash":")" << std::hex << sum << std::dec << "\"}" << std::endl;
}

/// A CPU's forward pass of a plan with its order, and of that order with the call, a new one each
/// time: what the order costs on the host. f32, one head of 65,536 tokens, head dim 64.
void time_given(const char* pattern, const char* what) {
  const Index length = 65536;
  const auto x = [&](std::uint64_t stream) { return randn({1, length, 1, 64}, {51, stream}, DType::f32); };
  const Tensor q = x(1), k = x(2), v = x(3);
  PlanSpec any;
  any.length = length, any.order = parse_order("given", length), any.pattern = parse_pattern(pattern);
  AttentionOptions options;
  const std::string_view name = what;
  if (name == "causal") any.causality = kCausal;
  if (name == "alibi") options.terms.alibi = true;
  if (name == "dropout") options.dropout = 0.1, options.key = RandomKey{51, 4};
  const PlanPtr plan = make_plan(any);
  std::vector<double> own_ms, call_ms;
  std::uint64_t seed = 51;
  for (int run = -1; run < 5; ++run) {
    PlanSpec fixed = any;
    for (Index i = 0; i < length; ++i) fixed.given.push_back(static_cast<std::int32_t>(i));
    for (Index i = length - 1; i > 0; --i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      std::swap(fixed.given[static_cast<std::size_t>(i)],
                fixed.given[static_cast<std::size_t>((seed >> 33) % static_cast<std::uint64_t>(i + 1))]);
    }
    AttentionOptions given = options;
    given.permutation = from_values(fixed.given, {length});
    const auto timed = [&](std::vector<double>& ms, const PlanPtr& of, const AttentionOptions& how) {
      const double begin = now_ms();
      (void)attention(q, k, v, of, how);
      if (run >= 0) ms.push_back(now_ms() - begin);
    };
    timed(call_ms, plan, given);
    const auto own = std::make_shared<const Plan>(fixed);
    (void)attention(q, k, v, own, options);  // makes its lists
    timed(own_ms, own, options);
  }
  std::cout << std::setprecision(3) << R"({"set":"an order with the call, )" << what << R"(","pattern":")" << pattern
            << R"(","of_plan_ms":)" << median(own_ms) << R"(,"of_call_ms":)" << median(call_ms) << R"(,"ratio":)"
            << median(call_ms) / median(own_ms) << "}" << std::endl;
}

}  // namespace

int main(int count, char** words) {
  const std::vector<std::string> args(words + 1, words + count);
  if (args.size() == 4 && args[0] == "--hashes")
    return print_hashes(args[1], std::stoull(args[2]), std::stoull(args[3]));
  set_thread_count(1);
  if (args.size() == 3 && args[0] == "--drawn") return time_drawn(std::stoull(args[1]), std::stoull(args[2])), 0;
  if (!args.empty() && (args.size() != 2 || args[0] != "--only")) {
    std::cerr << "hilt_plans: error: flags are --only TEXT, --drawn COUNT SEED or --hashes FILE COUNT SEED\n";
    return 2;
  }
  for (const Row& row : kRows)
    if (const std::string name = std::string(row.set) + ' ' + row.pattern;
        args.empty() || name.find(args[1]) != name.npos)
      time_row(row);
  for (const char* pattern : {"segment:256", "segment:64", "slide:64"})
    for (const char* what : {"alibi", "dropout", "causal"})
      if (const std::string name = "an order with the call, " + std::string(what) + ' ' + pattern;
          args.empty() || name.find(args[1]) != name.npos)
        time_given(pattern, what);
  if (args.empty()) time_drawn(300, 51);
}
