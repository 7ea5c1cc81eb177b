// A plan: its spec checked, a part a ground, a tiling a set; its counts, and the plans in use.
#include "ops/hilbert/plan/plan.h"
#include "core/error.h"
#include "core/recent.h"
#include "ops/hilbert/plan/tiles.h"

namespace hilt {
namespace {

using Kind = Branch::Kind;

// ---- the definitions ----------------------------------------------------------------------------

/// What tells heads' sets apart in a branch and those joined to it: the offset, or the chosen list.
std::vector<Index> variant_of(const PlanSpec& spec, std::size_t branch, Index head) {
  std::vector<Index> variant;
  for (std::size_t i = branch; i < end_of_union(spec.pattern, branch); ++i) {
    const auto lists = std::ssize(spec.pattern[i].chosen);
    variant.push_back(lists > 0 ? head / (spec.heads / lists) : offset_of(spec, i, head));
  }
  return variant;
}

/// Whether this head takes part in this branch: all do, but for head_groups.
bool serves(const PlanSpec& spec, std::size_t branch, Index head) {
  if (spec.dilation_mode != DilationMode::head_groups) return true;
  const Index groups = union_of(spec.pattern, spec.pattern.size() - 1) + 1, i = union_of(spec.pattern, branch);
  const Index size = spec.heads / groups, longer = spec.heads % groups;  // the first `longer` groups have one head more
  const Index begin = i * size + std::min(i, longer);
  return head >= begin && head < begin + size + (i < longer ? 1 : 0);
}

bool branch_attends(const Ground& g, std::size_t branch, Index head, Index t, Index u) {
  const Branch& b = g.spec.pattern[branch];
  if (!serves(g.spec, branch, head)) return false;
  if (g.spec.cross) return true;
  if (g.spec.causality == Causality::token && u > t) return false;
  if (g.spec.causality == Causality::curve && g.along_order(u) > g.along_order(t)) return false;
  const Index p = g.position(t), q = g.position(u);
  if (b.kind == Kind::segment && !b.axes[0].borrows) {
    const Index a = p + b.axes[0].shift, c = q + b.axes[0].shift;
    if (a / b.size != c / b.size) return false;
    const Index from = a % b.size % b.dilation, to = c % b.size % b.dilation;
    if (g.spec.dilation_mode == DilationMode::residue) return from == to;
    const Index offset = offset_of(g.spec, branch, head);
    return to == offset && (!only_active_ask(g.spec.dilation_mode) || from == offset);
  }
  if (b.kind == Kind::blocks)
    return std::ranges::binary_search(b.pairs_of(head, g.spec.heads),
                                      std::pair(narrow(p / b.size), narrow(q / b.size)));
  for (std::size_t axis = 0; axis < b.dimensions(); ++axis) {
    const AxisRule rule(b, axis, g.cells(b, axis));
    if (!rule.keys_of(g.cell(b, axis, t)).has(rule.number(g.cell(b, axis, u)))) return false;
  }
  return true;
}

/// How a message about a branch begins: its text is made when there is one.
struct Said {
  const Branch& b;
  friend std::ostream& operator<<(std::ostream& os, const Said& s) { return os << "plan: " << to_string({s.b}); }
};

/// Makes the lists of a branch of blocks: by its rule, sorted, each pair once.
void check_blocks(const PlanSpec& spec, Branch& b) {
  const Index length = spec.length - spec.outside(), n = (length + b.size - 1) / b.size;
  using Lists = Branch::Lists;
  check(b.lists == Lists::given || b.numbers.size() == (b.lists == Lists::global_local ? 2U : 1U) ||
            (b.lists == Lists::dilated && !b.numbers.empty()),
        "plan: blocks of ", b.size, ": the rule has ", b.numbers.size(),
        " numbers; local, dilated and top take one, dilated more, global_local two");
  check(b.lists != Lists::top || spec.causality == Causality::none, Said{b},
        " chooses the keys of a block of queries by all of them, later ones too, so causal ", name_of(spec.causality),
        " would leak; use causal none, or local, dilated or global_local");
  check(b.chosen.empty() || spec.heads % std::ssize(b.chosen) == 0, Said{b}, ": ", b.chosen.size(),
        " lists cannot serve ", spec.heads, " heads evenly");
  const auto finish = [&](BlockPairs& pairs) {
    for (const auto& [i, j] : pairs)
      check(i >= 0 && i < n && j >= 0 && j < n, "plan: block (", i, ", ", j, ") is outside the ", n, " x ", n,
            " blocks of ", b.size, " that ", length, " tokens make");
    if (!std::ranges::is_sorted(pairs)) std::ranges::sort(pairs);
    pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  };
  b.pairs = built_blocks(b, n);
  finish(b.pairs);
  std::ranges::for_each(b.chosen, finish);
}

void check_axis(const Branch& b, std::size_t i) {
  const Branch::Axis& axis = b.axes[i];
  const bool shifts = b.is_window() || b.kind == Kind::segment, slides = b.slides();
  const bool is_there = i < b.dimensions(), centers = is_there && !b.is_window();
  const Said where{b};
  check(!is_there || b.extent(i) >= !slides, where,
        slides ? ": radius must not be negative" : ": sides must be at least 1");
  check(!centers || slides || axis.causal || b.extent(i) % 2 == 1, where,
        ": the number of keys must be odd, so that the query is in the middle; any number where causal=1");
  check(axis.dilation >= 1 && axis.stride >= 1, where, ": dilation ", axis.dilation, " and stride ", axis.stride,
        " must be at least 1");
  check(centers || (axis.dilation == 1 && axis.stride == 1), where,
        ": axes of slides and neighborhoods alone take dilation and stride");
  check(is_there || !axis.causal, where, ": axes of slides, neighborhoods and windows alone are causal");
  check(!axis.borrows || (i == 0 && b.kind == Kind::segment && b.dilation == 1 && !axis.causal), where,
        ": segments alone borrow, neither dilated nor causal");
  const Index side = is_there ? b.extent(i) : b.size;
  check(axis.shift == 0 || (shifts && (is_there || i == 0)), where, ": windows and segments alone shift");
  check(axis.shift >= 0 && (axis.shift == 0 || axis.shift < side), where, ": shift ", axis.shift,
        " must be from 0 and below the size, ", side);
}

/// What only the grid can tell.
void check_ground(const Ground& g, const Branch& b) {
  if (b.on_grid()) {
    const Grid& grid = g.grid;
    check(b.dimensions() == 3 || grid.frames == 1, Said{b}, " looks at one frame, the grid has ", grid.frames,
          "; use the 3-D kind");
    const bool named = !g.spec.order.folds() && g.spec.order.grid == grid;
    const char* const sides = b.dimensions() == 3 ? "row:TxHxW or hilbert:TxHxW" : "row:HxW or hilbert:HxW";
    check(named || g.length() == 0 || (grid.cells() == g.length() && grid.width == grid.height), Said{b},
          " compares places on a grid, and ", g.length(), " tokens fold to ", grid.height, " rows of ", grid.width,
          ", which is no full square; name the grid with the order, as in ", sides);
  }
  for (std::size_t i = 0; i < b.dimensions(); ++i) {
    const bool neighbors = !b.slides() && !b.is_window();
    const Index cells = g.cells(b, i), smallest = std::max<Index>(1, cells / b.axes[i].dilation);
    check(!neighbors || g.length() == 0 || b.axes[i].dilation == 1 || b.extent(i) <= smallest, Said{b}, ": ",
          b.extent(i), " keys do not fit the smallest class of an axis, ", smallest, " of ", cells, " cells");
  }
}

void check_queries(const PlanSpec& spec) {
  std::int32_t next = 0;
  for (const std::int32_t row : *spec.queries) {
    check(row >= next, "plan: queries: row ", row, row < 0 ? " is none" : " comes twice or late",
          "; rows are named once, ascending, and count from 0");
    check(row < spec.length, "plan: queries: row ", row, " is not among the ", spec.length, " of the keys");
    next = row + 1;
  }
  for (const Branch& b : spec.pattern)
    check(!b.looks_at_data(), Said{b}, " chooses by the queries of all ", spec.length, " tokens, and ",
          spec.queries->size(), " of them are there; use another rule");
}

void check_spec(PlanSpec& spec) {
  check(spec.length >= 0 && spec.length <= std::numeric_limits<std::int32_t>::max(), "plan: length ", spec.length,
        " must be 0..2147483647");
  check(spec.heads >= 1 && spec.heads <= spec.kMostHeads, "plan: heads ", spec.heads, " must be 1..", spec.kMostHeads);
  check(!spec.pattern.empty(), "plan: the pattern has no branch");
  check(!spec.pattern[0].joined, "plan: the first branch, ", to_string({spec.pattern[0]}),
        ", has no other to be joined to");
  for (const Branch& b : spec.pattern)
    check(b.prefix >= 0 && (b.prefix == 0 || &b == &spec.pattern.back()), "plan: ", to_string({b}),
          ": a prefix is of the whole pattern: its last branch has it, and no other");
  if (spec.queries) check_queries(spec);
  if (spec.cross) {
    check(*spec.cross >= 0 && *spec.cross <= std::numeric_limits<std::int32_t>::max(), "plan: cross ", *spec.cross,
          " must be 0..2147483647 queries");
    check(std::ranges::all_of(spec.pattern, [](const Branch& b) { return b.kind == Kind::dense; }),
          "plan: queries of another sequence know dense alone, got ", to_string(spec.pattern));
    check(spec.causality == Causality::none && !spec.queries && !spec.in_order && spec.documents.empty() &&
              spec.outside() == 0,
          "plan: queries of another sequence have no place among the ", spec.length,
          " tokens, so neither causal, queries, in_order, documents nor prefix go with cross");
  }
  const Index unions = union_of(spec.pattern, spec.pattern.size() - 1) + 1;
  check(spec.dilation_mode != DilationMode::head_groups || unions <= spec.heads,
        "plan: head_groups needs a head for each of the ", unions, " branches, got ", spec.heads);
  for (Branch& b : spec.pattern) {
    check(b.dilation >= 1 && b.offset >= 0 && b.offset < b.dilation, "plan: offset ", b.offset,
          " must be below the dilation, ", b.dilation);
    if (b.kind == Kind::segment || b.kind == Kind::blocks) check(b.size >= 1, Said{b}, ": size must be at least 1");
    for (std::size_t i = 0; i < b.axes.size(); ++i) check_axis(b, i);
    if (b.kind == Kind::blocks) check_blocks(spec, b);
  }
}

/// What must hold where the order is given: sets along positions alone do not ask for a grid.
void check_given(const PlanSpec& spec) {
  if (spec.order.kind != Order::Kind::given)
    return check(spec.given.empty(), "plan: an order of ", spec.given.size(), " tokens is given, and the order is ",
                 to_string(spec.order), "; ask for order=given");
  check(spec.order == Order{.kind = Order::Kind::given}, "plan: order=given takes no grid, scope or chunk");
  check(!spec.cross && (!spec.in_order || !spec.given.empty()), "plan: order=given is of queries that are tokens and ",
        "stand as such, so neither cross nor, before the order is there, in_order goes with it");
  check(prefix_of(spec.pattern) == 0, "plan: ", to_string(spec.pattern), ": order=given is of all tokens of a row, so ",
        "no prefix goes with it; place these tokens by the order");
  for (const Branch& b : spec.pattern) {
    check(!b.on_grid(), Said{b}, " looks at a grid, and order=given has none; name an order of the grid");
    check(b.lists != Branch::Lists::top, Said{b},
          " chooses by what lies at each position, which order=given tells no sooner than the call; use another rule");
  }
  if (spec.given.empty()) return;
  check(std::ssize(spec.given) == spec.length, "plan: the order given is of ", spec.given.size(), " tokens, a row has ",
        spec.length);
  for (std::size_t row = 0; row < std::max<std::size_t>(spec.documents.size(), 1); ++row)
    (void)inverse_within(spec.given, spec.documents.empty() ? DocumentList{} : spec.documents[row], narrow(row));
}

/// The order, with scope per_segment made that of the pattern's segment, and auto what it chooses.
Order resolved_order(const PlanSpec& spec) {
  if (spec.order.kind == Order::Kind::automatic) return choose_order(spec).order;
  if (spec.order.scope != Order::Scope::per_segment) return spec.order;
  Index size = 0;
  for (const Branch& b : spec.pattern)
    if (b.kind == Kind::segment) {
      check(size == 0 || size == b.size, "plan: scope=segment needs one segment size, got ", size, " and ", b.size,
            "; name one with chunk=N");
      size = b.size;
    }
  check(size > 0, "plan: scope=segment needs a segment pattern, got ", to_string(spec.pattern));
  return with_segment(spec.order, size);
}

/// Null where tokens stand as they come.
std::shared_ptr<const Permutation> order_of(const PlanSpec& spec, bool forced) {
  const bool given = spec.order.kind == Order::Kind::given;
  if (forced || spec.order.kind == Order::Kind::row || (given && spec.given.empty())) return nullptr;
  return given ? std::make_shared<const Permutation>(make_permutation(spec.given))
               : permutation(spec.order, behind_prefix(spec.pattern, spec.length));
}
Grid grid_of(const PlanSpec& spec) { return token_grid(spec.order, behind_prefix(spec.pattern, spec.length)); }
Ground ground_of(const PlanSpec& spec, const Permutation* order, Grid grid, bool met = false) {
  return {spec, order, grid, spec.order.scope == Order::Scope::order_only, met && spec.outside() > 0};
}

void become(PlanSpec& spec, const Document& document, std::vector<std::int32_t> given) {
  spec.documents.clear();
  spec.given = std::move(given);
  spec.length = document.length;
  spec.order.grid = document.grid;
}

}  // namespace

Plan::Plan(PlanSpec spec) : spec_(std::move(spec)) {
  in_memory(spec_.length, [&] { build(); });
}

void Plan::build() {
  check_spec(spec_);
  spec_.order = resolved_order(spec_);
  forced_ = row_order_forced();
  // The number of the tiling of a branch and its offsets or lists.
  std::map<std::pair<std::size_t, std::vector<Index>>, std::int32_t> number;
  std::vector<std::pair<std::size_t, Index>> asked;  // of a tiling: branch, and a head that it is for
  for (Index head = 0; head < spec_.heads; ++head) {
    std::vector<std::int32_t>& its = head_tilings_.emplace_back();
    for (std::size_t branch = 0; branch < spec_.pattern.size(); ++branch) {
      if (spec_.pattern[branch].joined || !serves(spec_, branch, head)) continue;
      const auto [entry, fresh] =
          number.try_emplace({branch, variant_of(spec_, branch, head)}, narrow(std::ssize(asked)));
      if (fresh) asked.emplace_back(branch, head);
      its.push_back(entry->second);
    }
    std::ranges::stable_sort(its, std::greater<>(),
                             [&](std::int32_t i) { return spec_.pattern[asked[at(i)].first].dilation; });
    agree_ = agree_ && its == head_tilings_[0];
  }

  for (DocumentList& row : spec_.documents)
    for (Document& d : row)  // one named by its grid has the prefix besides
      if (!d.folds() && d.grid.cells() == d.length) d.length += prefix_of(spec_.pattern);
  if (!spec_.documents.empty()) check_documents(spec_);
  check_given(spec_);
  PlanSpec one = spec_;
  for (PlacedDocument& placed : placed_documents(spec_)) {
    become(one, placed.document, std::move(placed.given));
    one.queries = std::move(placed.queries);
    const Grid grid = grid_of(one);
    const auto order = order_of(one, forced_);
    for (const Branch& b : one.pattern) check_ground(ground_of(one, order.get(), grid), b);
    PlanPart& part = parts_.emplace_back(one.length, one.rows_of_q());
    part.places = std::move(placed.places);
    for (const auto& [branch, head] : asked) {  // of those that a head merges, the last meets the prefix
      const auto last = asked[at(head_tilings_[at(head)].back())].first;
      part.tilings.push_back(tiling_of(ground_of(one, order.get(), grid, branch == last), branch, head));
    }
    if (one.order.grid == grid || std::ranges::any_of(one.pattern, &Branch::on_grid))
      for (Tiling& t : part.tilings) t.grids = {{grid, narrow(one.outside())}};
    if (spec_.documents.empty()) order_ = order, grid_ = grid;
  }
  for (PlanPart& part : parts_) mark_known_rows(*this, part);
}

void mark_known_rows(const Plan& plan, PlanPart& part) {
  const std::span<const std::int32_t> its = plan.tilings_of(0);
  if (!plan.heads_agree() || its.size() < 2) return;
  for (const auto& [list, known] : {std::pair(kQueries.token, kQueries.known), {kKeys.token, kKeys.known}}) {
    std::vector<std::int32_t> before(at(std::max(part.length, part.queries)), 0);
    for (const std::int32_t i : its) {
      Tiling& t = part.tilings[at(i)];
      for (const std::int32_t row : t.*list) (t.*known).push_back(before[at(row)]);
      if (std::ranges::find(t.*known, 0) == (t.*known).end() || i == its[0]) t.*known = {};
      for (const std::int32_t row : t.*list) before[at(row)] = 1;
    }
  }
}

bool Plan::looks_at_data() const { return std::ranges::any_of(spec_.pattern, &Branch::looks_at_data); }

const Permutation& Plan::order() const {
  check(spec_.documents.empty(), "plan: each of its documents, ", to_string(spec_.documents),
        ", has an order of its own");
  const auto n = narrow(spec_.outside());
  if (order_ && n == 0) return *order_;
  return *memo_.get<std::shared_ptr<const Permutation>>({}, [&] {
    if (!order_) return permutation(Order{}, spec_.length);
    std::vector<std::int32_t> token_at = query_run(0, n);
    for (const std::int32_t t : order_->token_at) token_at.push_back(n + t);
    return std::make_shared<const Permutation>(make_permutation(std::move(token_at)));
  });
}

const std::vector<Tiling>& Plan::tilings() const {
  check(spec_.documents.empty(), "plan: each of its documents, ", to_string(spec_.documents),
        ", has tilings of its own: see parts()");
  return parts_[0].tilings;
}

std::span<const std::int32_t> Plan::tilings_of(Index head) const {
  check(head >= 0 && head < spec_.heads, "plan: head ", head, " of ", spec_.heads);
  return head_tilings_[at(head)];
}

Index Plan::attends(Index head, Index t, Index u, Index batch) const {
  check(!looks_at_data(), "plan: ", to_string(spec_.pattern), " has a set for each sequence; see plan_of_sequence");
  const auto times = [&](const PlanSpec& spec, const Permutation* order, Grid grid) {
    const Ground ground = ground_of(spec, order, grid);
    const Index before = spec.outside();
    if (std::min(t, u) < before) return Index{spec.causality == Causality::none || u <= t};
    Index n = 0;
    for (std::size_t branch = 0, end = 0; branch < spec.pattern.size(); branch = end) {
      bool any = false;
      for (end = end_of_union(spec.pattern, branch); branch < end && !any; ++branch)
        any = branch_attends(ground, branch, head, t - before, u - before);
      n += any;
    }
    return n;
  };
  if (spec_.documents.empty()) {
    if (spec_.in_order && order_) t = order().token_at[at(t)], u = order().token_at[at(u)];
    return times(spec_, order_.get(), grid_);
  }
  Index first = 0;
  for (const Document& d : spec_.documents[spec_.documents.size() == 1 ? 0 : at(batch)]) {
    if (t < d.length) {
      PlanSpec one = spec_;
      become(one, d, given_from(spec_, first, d.length));
      if (u < 0 || u >= d.length) return 0;
      return times(one, order_of(one, forced_).get(), grid_of(one));
    }
    t -= d.length, u -= d.length, first += d.length;
  }
  return 0;
}

Index Plan::empty_rows() const {
  Index rows = queries() * std::max<Index>(1, std::ssize(spec_.documents));
  for (const PlanPart& part : parts_) {
    std::vector<Index> having(at(part.queries));  // for how many heads a query has a key
    for (Index head = 0; head < heads(); ++head)
      for (const std::int32_t index : tilings_of(head)) {
        const Tiling& t = part.tilings[at(index)];
        PairBits bits(t);
        for (std::size_t i = 0; i < t.q_tile.size(); ++i)
          for (std::int32_t q = t.q_tile[i].begin; q < t.q_tile[i].end; ++q) {
            Index& its = having[at(t.q_token[at(q)])];
            for (const Tiling::Ref ref : t.met.of(i))
              if (its == head)  // else it has a key, or lacked one before
                its += !ref.partial || bits.count({q, q + 1}, t.k_tile[at(ref.tile)], 1) > 0;
          }
      }
    rows -= part.places.count(1) * std::ranges::count(having, heads());
  }
  return rows;
}

TileStats Plan::stats() const {
  TileStats s;
  for (const PlanPart& part : parts_)
    for (const Tiling& t : part.tilings) {
      const Index times = part.places.count(1);
      s.full += times * t.met.full;
      s.partial += times * t.met.partial;
      s.total += times * static_cast<Index>(t.q_tile.size() * t.k_tile.size());
      s.pairs += times * t.pairs;
      for (std::size_t i = 0; i < t.q_tile.size(); ++i)
        s.tile_pairs += times * Index{t.q_tile[i].end - t.q_tile[i].begin} * t.keys_of(i);
    }
  return s;
}

std::size_t Plan::bytes() const {
  std::size_t n = sizeof(Plan) + (order_ ? 2 * at(spec_.length) * sizeof(std::int32_t) : 0);
  const auto add = [&](const auto&... lists) { ((n += lists.capacity() * sizeof lists[0]), ...); };
  if (spec_.queries) add(*spec_.queries);
  for (const DocumentList& list : spec_.documents) n += sizeof list, add(list);
  for (const PlanPart& part : parts_) {
    n += sizeof part;
    add(part.places.list, part.tilings);
    for (const Tiling& t : part.tilings) {
      for (const Side& s : {kQueries, kKeys})
        n += (t.*s.token).bytes() + (t.*s.name).bytes() + (t.*s.rank).bytes(), add(t.*s.known, t.*s.tile);
      for (const Tiling::Axis& axis : t.axis) add(axis.key, axis.low, axis.high);
      add(t.grids, t.met.begin, t.met.run, t.group);
    }
  }
  return n;
}

// ---- plans in use -------------------------------------------------------------------------------
PlanPtr make_plan(const PlanSpec& spec) {
  static Recent<std::pair<PlanSpec, bool>, PlanPtr> recent(16);
  return in_memory(spec.length, [&] {
    return recent.get({spec, row_order_forced()}, [&] { return std::make_shared<const Plan>(spec); });
  });
}

std::vector<std::int32_t> query_run(Index first, Index count) {
  check(first >= 0 && count >= 0 && first + count <= std::numeric_limits<std::int32_t>::max(), "queries: ", count,
        " from ", first, " on must be rows from 0 to 2147483646");
  std::vector<std::int32_t> rows(at(count));
  std::iota(rows.begin(), rows.end(), narrow(first));
  return rows;
}

OrderChoice choose_order(PlanSpec spec) {
  using OrderKind = Order::Kind;
  if (spec.order.kind == OrderKind::automatic) spec.order.kind = OrderKind::row;
  spec.queries.reset();  // some of them are to find the order of all
  OrderChoice choice{spec.order, {}};
  const bool free = std::ranges::all_of(spec.pattern, &Branch::is_order_only) && spec.causality != Causality::curve;
  const auto walks_all = [&](OrderKind kind) {
    return walks(kind, spec.order.grid) && std::ranges::all_of(spec.documents, [&](const DocumentList& list) {
             return std::ranges::all_of(list, [&](const Document& d) { return walks(kind, d.grid); });
           });
  };
  double best = 2;
  for (OrderKind kind : {OrderKind::row, OrderKind::snake, OrderKind::morton, OrderKind::tiles, OrderKind::hilbert}) {
    if (kind != spec.order.kind && (!free || !walks_all(kind))) continue;
    PlanSpec candidate = spec;
    candidate.order.kind = kind;
    if (kind != OrderKind::hilbert) candidate.order.steps = Steps::near;
    const TileStats stats = Plan(candidate).stats();
    choice.considered.emplace_back(candidate.order, stats);
    if (stats.touched() < best) best = stats.touched(), choice.order = candidate.order;
  }
  return choice;
}

}  // namespace hilt
