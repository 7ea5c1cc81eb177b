// Score terms: what each asks of its tensor, its formula in ops, and what the kernels are told.
#include "ops/hilbert/terms.h"
#include <tuple>
#include "core/io/text.h"
#include "core/recent.h"
#include "ops/hilbert/call.h"
#include "ops/hilbert/modes/groups.h"
#include "ops/ops.h"

namespace hilt {
namespace {

DType stat_of(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

bool distances_on_grid(const Plan& plan) { return std::ranges::any_of(plan.spec().pattern, &Branch::on_grid); }

// ---- blocks of pairs, for taped and hybrid ------------------------------------------------------

/// f(query's site, key's site), each in its document, or of the points there.
template <class F>
Tensor of_sites(const GroupBatch& g, bool on_grid, F&& f, const kernels::Terms& terms = {}, Index rows = 1) {
  return of_pairs(g, rows, [&](std::int32_t query, std::size_t group, Index row) {
    const kernels::Site* const points = terms.points_of(g.row.empty() ? row : g.row[group]);
    const auto site = [&g, on_grid, points, first = g.first[group]](std::int32_t token) {
      return points ? points[token] : kernels::site_of(g.grids, on_grid, token - first);
    };
    return [&f, site, q = site(query)](std::int32_t key) { return f(q, site(key)); };
  });
}
Tensor of_heads(const Tensor& x, int axis, const GroupBatch& g) {
  return g.queries.heads && x.dim(axis) > 1 ? gather(x, axis, g.queries.heads) : x;
}
kernels::Site reach_of(const Tensor& table) {
  std::int32_t r[3]{};
  for (int i = 1; i < table.rank(); ++i) r[3 - table.rank() + i] = narrow(table.dim(i) / 2);
  return {r[0], r[1], r[2]};
}

// ---- the table of terms -------------------------------------------------------------------------

/// x: the term's tensor; s: [B, heads, groups, q, k].
struct Term {
  std::string_view name;
  Tensor ScoreTerms::*tensor;
  void (*check)(const Call&, const Tensor& x);
  Tensor (*add)(const Call&, const GroupBatch&, const Tensor& s, const Tensor& x);
};

void check_per_head(const char* name, const Call& call, const Tensor& x) {
  check(x.rank() == 1 && x.dim(0) == call.heads(), name, ": ", x.shape(), " does not fit [heads ", call.heads(), "]");
}

Tensor add_alibi(const Call& call, const GroupBatch& g, const Tensor& s, const Tensor& slopes) {
  const Tensor apart = of_sites(g, distances_on_grid(*call.plan), kernels::distance);
  return sub(s, mul(reshape(of_heads(slopes, 0, g), {-1, 1, 1, 1}), to(apart, s.dtype())));
}

void check_relative(const Call& call, const Tensor& x) {
  check(x.rank() >= 2 && x.rank() <= 4 && x.dim(0) == call.heads(), "relative: table ", x.shape(),
        " does not fit heads ", call.heads(), "; expected [heads, 2 r + 1], or as many extents as the grid has axes");
  for (int i = 1; i < x.rank(); ++i)
    check(x.dim(i) % 2 == 1, "relative: table ", x.shape(), " has an even extent, ", x.dim(i),
          "; offsets from -r to r are 2 r + 1");
  const PlanSpec& spec = call.plan->spec();
  if (const Tensor& points = call.options.terms.points) {
    const Index rows = spec.length, axes = x.rank() - 1, n = points.numel();
    check(points.dtype() == DType::i32 && points.rank() > 1 && points.dim(-1) == axes &&
              (points.rank() == 2 || points.dim(-2) == rows) && (n == rows * axes || n == call.batch * rows * axes),
          "relative: points are ", points.dtype(), points.shape(), ", the table ", x.shape(), "; expected i32 ",
          Shape{rows, axes}, " or ", Shape{call.batch, rows, axes});
    return check(prefix_of(spec.pattern) == 0, "relative: points do not go with a prefix, as in ",
                 to_string(spec.pattern));
  }
  if (x.rank() == 2) return;
  const auto judge = [&](const Grid& grid, const auto&... where) {
    check(grid != Grid{}, "relative: table ", x.shape(), " is for ", x.rank() - 1, " axes, but ", where...,
          " has no grid; name one, as in row:HxW");
    check(x.rank() == 4 ? grid.has_frames() : grid.frames == 1, "relative: table ", x.shape(), " is for ", x.rank() - 1,
          " axes, but the grid of ", where..., " has ", grid.has_frames() ? 3 : 2);
  };
  for (const DocumentList& row : spec.documents)
    for (const Document& d : row) judge(d.grid, "document ", to_string({DocumentList{d}}));
  if (spec.documents.empty())
    judge(spec.order.grid == call.plan->grid() ? spec.order.grid : Grid{}, "order ", to_string(spec.order));
}
/// A table of the grid as [H, entries], with a 0 more for pairs that are not on it.
Tensor padded_table(const Plan& plan, const Tensor& table) {
  if (table.rank() == 2 || prefix_of(plan.spec().pattern) == 0) return {};
  return cat({reshape(table, {table.dim(0), -1}), zeros({table.dim(0), 1}, table.dtype(), table.device())}, 1);
}
Tensor add_relative(const Call& call, const GroupBatch& g, const Tensor& s, const Tensor& table) {
  kernels::Terms terms = kernel_terms(call);
  const Tensor points = call.points ? moved(call.points, {}) : Tensor();
  if (points) terms.points = reinterpret_cast<const kernels::Site*>(points.raw());
  const auto find = [&](const kernels::Site& q, const kernels::Site& k) {
    return (points ? kernels::entry<Index> : kernels::entry<std::int32_t>)(terms.reach, q, k);
  };
  const Tensor entries = of_sites(g, terms.table_on_grid, find, terms, points && points.dim(0) != 1 ? s.dim(0) : 1);
  const Tensor padded = padded_table(*call.plan, table);
  const Tensor flat = reshape(of_heads(padded ? padded : table, 0, g), {std::ssize(g.heads), -1});
  const Tensor found = gather(flat, 1, reshape(entries, {-1}));
  return add(s, transpose(reshape(found, {std::ssize(g.heads), entries.dim(0), g.groups, g.q, g.k}), 0, 1));
}

void check_bias(const Call& call, const Tensor& x) {
  const Index want[] = {call.batch, call.heads(), call.plan->queries(), call.plan->length()};
  bool fits = x.rank() <= 4;
  for (int i = 1; fits && i <= x.rank(); ++i) fits = x.dim(-i) == 1 || x.dim(-i) == want[4 - i];
  check(fits, "bias: ", x.shape(), " does not broadcast to [batch ", want[0], ", heads ", want[1], ", queries ",
        want[2], ", keys ", want[3], "]");
}
/// b [B', H', Lq', Lk'] at the pairs, what is broadcast staying so; of one row, queries of all.
Tensor add_bias(const Call& call, const GroupBatch& g, const Tensor& s, const Tensor& bias) {
  Tensor b = to(of_heads(bias, 1, g), s.dtype());
  const Index each = b.dim(2), heads = b.dim(1), keys = b.dim(3);
  const bool by_row = !g.row.empty() && b.dim(0) > 1;
  if (by_row) b = permute(b, {1, 0, 2, 3});
  const Index batch = by_row ? 1 : b.dim(0), queries = by_row ? b.dim(1) * each : each;
  if (queries == 1 && keys == 1) return add(s, unsqueeze(b, -1));
  Tensor index = of_pairs(g, 1, [&](Index t, std::size_t group, Index) {
    if (!call.bias_row.empty()) t = call.bias_row[at(t)];
    const Index row = ((by_row ? g.row[group] * each : 0) + (each > 1 ? t : 0)) * keys;
    return [row, keys](std::int32_t u) { return row + (keys > 1 ? u : 0); };
  });
  Index q = g.q, k = g.k;
  if (queries == 1) index = slice(index, 2, 0, q = 1);
  if (keys == 1) index = slice(index, 3, 0, k = 1);
  const Tensor found = gather(reshape(b, {batch, heads, queries * keys}), 2, reshape(contiguous(index), {-1}));
  return add(s, reshape(found, {batch, heads, g.groups, q, k}));
}

constexpr Term kTerms[] = {
    {"softcap", nullptr, nullptr,
     [](const Call& call, const GroupBatch&, const Tensor& s, const Tensor&) {
       const double x = *call.options.terms.softcap;
       return mul(tanh(mul(s, 1 / x)), x);
     }},
    {"alibi", &ScoreTerms::slopes, [](const Call& call, const Tensor& x) { check_per_head("alibi: slopes", call, x); },
     add_alibi},
    {"relative", &ScoreTerms::relative, check_relative, add_relative},
    {"bias", &ScoreTerms::bias, check_bias, add_bias},
    {"sink", &ScoreTerms::sink, [](const Call& call, const Tensor& x) { check_per_head("sink", call, x); }, nullptr},
};

bool is_there(const ScoreTerms& terms, const Term& term) {
  return term.tensor ? bool(terms.*term.tensor) : terms.softcap.has_value();
}

}  // namespace

Tensor alibi_slopes(Index heads, DType dtype, Device device) {
  check(heads >= 1, "alibi_slopes: ", heads, " heads; expected at least 1");
  Index power = 1;
  while (power * 2 <= heads) power *= 2;
  std::vector<double> slopes;
  for (Index h = 0; h < heads; ++h) {
    const Index i = h < power ? 2 * (h + 1) : 2 * (h - power) + 1;  // in halves of a step
    slopes.push_back(std::exp2(-4.0 * static_cast<double>(i) / static_cast<double>(power)));
  }
  return moved(to(from_values(slopes, {heads}), dtype), device);
}

// ---- from a configuration -----------------------------------------------------------------------

void read_term(TermConfig& config, std::string_view name, std::string_view text) {
  const auto wrong = [&](const auto&... why) { fail(name, " (", text, "): ", why...); };
  const auto shape = [&](Index of_whole_row) {
    Shape s;
    for (const std::string_view part : split_text(text, 'x'))
      s.push_back(of_whole_row == 0 && part == "L" ? 0 : read_index(std::string(name).c_str(), part, 1));
    return s;
  };
  constexpr std::array<std::string_view, 3> kAlibi{"none", "published", "learned"};
  if (name == "alibi") {
    config.alibi = static_cast<TermConfig::Alibi>(find_name("alibi", text, kAlibi));
  } else if (name == "relative") {
    config.relative = shape(1);
    if (config.relative.rank() > 3) wrong("has ", config.relative.rank(), " axes; at most 3");
    for (const Index extent : config.relative)
      if (extent % 2 == 0) wrong(extent, " is even; offsets from -r to r are 2 r + 1");
  } else if (name == "bias") {
    config.bias = shape(0);
    if (config.bias.rank() != 4) wrong("has rank ", config.bias.rank(), "; expected [batch, heads, queries, keys]");
    if (config.bias[0] * config.bias[1] == 0) wrong("L is the number of queries or keys, not of sequences or heads");
  }
}

ScoreTerms make_terms(const TermConfig& config, Index heads, Index length, DType dtype) {
  const DType stat = stat_of(dtype);
  ScoreTerms t;
  if (config.softcap != 0) t.softcap = config.softcap;
  t.alibi = config.alibi == TermConfig::Alibi::published;
  if (config.alibi == TermConfig::Alibi::learned) t.slopes = alibi_slopes(heads, stat);
  for (int i = 1; i < 4 && config.bias.rank() == 4; ++i) {
    const Index fits = i == 1 ? heads : length;
    check(config.bias[i] <= 1 || config.bias[i] == fits || fits == 0, "bias: axis ", i,
          " of [batch, heads, queries, keys] is ", config.bias[i], "; it broadcasts where it is 1 or ", fits);
  }
  Shape table{heads}, bias;
  for (const Index extent : config.relative) table.push_back(extent);
  if (table.rank() > 1) t.relative = zeros(table, stat);
  for (const Index extent : config.bias) bias.push_back(extent == 0 ? length : extent);
  if (bias.rank() > 0) t.bias = zeros(bias, stat);
  if (config.sink) t.sink = zeros({heads}, stat);
  return t;
}

void visit_terms(ScoreTerms& terms, const std::function<void(const std::string&, Tensor&)>& f) {
  for (const Term& term : kTerms)
    if (term.tensor && terms.*term.tensor)
      f(term.tensor == &ScoreTerms::slopes ? "slopes" : std::string(term.name), terms.*term.tensor);
}

ScoreTerms fitted_terms(ScoreTerms terms, DType dtype, Index length) {
  visit_terms(terms, [&](const std::string&, Tensor& x) { x = to(x, stat_of(dtype)); });
  for (const int axis : {2, 3})
    if (terms.bias && terms.bias.dim(axis) > length) terms.bias = slice(terms.bias, axis, 0, length);
  return terms;
}

// ---- a call's -----------------------------------------------------------------------------------

/// A GPU's are made once: a step that is recorded brings nothing from the host.
static Tensor published_slopes(Index heads, DType dtype, Device device) {
  if (device.is_cpu()) return alibi_slopes(heads, dtype);
  static auto& known =  // outlives every device
      *new Recent<std::tuple<Index, DType, Device>, Tensor>(std::numeric_limits<std::size_t>::max());
  return known.get({heads, dtype, device}, [&] {
    const Lasting lasting;
    return alibi_slopes(heads, dtype, device);
  });
}

void resolve_terms(Call& call, const Tensor& q) {
  ScoreTerms& x = call.options.terms;
  check(!x.softcap || (std::isfinite(*x.softcap) && *x.softcap > 0), "softcap: ", x.softcap.value_or(0),
        " must be a number above 0");
  const DType stat = stat_of(q.dtype());
  if (x.alibi && !x.slopes) x.slopes = published_slopes(call.heads(), stat, q.device());
  for (const Term& term : kTerms) {
    if (!term.tensor || !(x.*term.tensor)) continue;
    Tensor& tensor = x.*term.tensor;
    check(tensor.dtype() == stat || (term.tensor == &ScoreTerms::bias && tensor.dtype() == q.dtype()), term.name,
          ": is ", tensor.dtype(), ", but with q of ", q.dtype(), " it must be ", stat);
    check(tensor.device() == q.device(), term.name, ": is on ", tensor.device(), ", q on ", q.device());
    check(!call.plan->spec().cross || term.tensor == &ScoreTerms::bias || term.tensor == &ScoreTerms::sink, term.name,
          ": looks at the tokens of both sides, and the ", call.queries,
          " queries are of another sequence; use a bias");
    term.check(call, tensor);
    if (term.tensor != &ScoreTerms::bias) tensor = contiguous(tensor);
    const Tape::Pause pause;
    if (term.tensor == &ScoreTerms::relative) call.table = padded_table(*call.plan, tensor);
  }
  if (Tensor& points = x.points) {
    check(bool(x.relative), "relative: points ", points.shape(), " are for a table, and there is none");
    check(points.device() == q.device(), "relative: points are on ", points.device(), ", q on ", q.device());
    const Index length = call.plan->length(), axes = points.dim(-1);
    points = reshape(points, {points.numel() == length * axes ? 1 : call.batch, length, axes});
    call.points = pad(points, 2, 3 - axes, 0);
  }
  while (x.bias && x.bias.rank() < 4) x.bias = unsqueeze(x.bias, 0);
  const PlanSpec& spec = call.plan->spec();
  if (!x.bias || !spec.queries) return;
  call.bias_row.assign(at(spec.length), 0);
  for (std::size_t i = 0; i < spec.queries->size(); ++i) {
    const std::int32_t row = (*spec.queries)[i];
    const std::int32_t token = spec.in_order ? call.plan->order().token_at[at(row)] : row;
    call.bias_row[at(token)] = narrow(i);
  }
}

TermTensors term_inputs(const ScoreTerms& terms) { return {terms.slopes, terms.relative, terms.bias, terms.sink}; }

bool has_pair_terms(const ScoreTerms& terms) {
  return std::ranges::any_of(kTerms, [&](const Term& term) { return term.add && is_there(terms, term); });
}

Tensor with_terms(const Call& call, const GroupBatch& g, Tensor s) {
  const ScoreTerms& terms = call.options.terms;
  for (const Term& term : kTerms)
    if (term.add && is_there(terms, term)) s = term.add(call, g, s, term.tensor ? terms.*term.tensor : Tensor());
  return s;
}

bool has_nonfinite_terms(const ScoreTerms& terms) {
  const Tape::Pause pause;
  std::vector<Tensor> all;
  for (const Tensor& x : term_inputs(terms))
    if (x) all.push_back(where(equal(x, kMinusInfinity), 0.0, x));
  return !all.empty() && !std::isfinite(global_norm(all));
}

// ---- for kernels --------------------------------------------------------------------------------

template <class Void, class T> static kernels::PairTensor<Void> pair_tensor(T& x, const Call& call, Index first_row) {
  if (!x) return {};
  const Index want[] = {call.batch, call.heads(), call.plan->queries(), call.plan->length()};
  Index stride[4];
  for (int i = 0; i < 4; ++i) stride[i] = x.dim(i) == want[i] ? x.stride(i) : 0;
  const Index before = first_row * stride[0] * static_cast<Index>(size_of(x.dtype()));
  Void* data;
  if constexpr (std::is_const_v<Void>) data = x.raw() + before;
  else data = x.mutable_raw() + before;
  const std::int32_t* const rows = call.bias_row.empty() ? nullptr : call.bias_row.data();
  return {data, x.dtype(), stride[0], stride[1], stride[2], stride[3], rows};
}

kernels::Terms kernel_terms(const Call& call, Index first_row) {
  const ScoreTerms& x = call.options.terms;
  kernels::Terms t;
  t.cap = x.softcap.value_or(0);
  if (x.slopes) t.slopes = x.slopes.raw(), t.slopes_on_grid = distances_on_grid(*call.plan);
  if (x.relative) {
    const Tensor& table = call.table ? call.table : x.relative;
    t.table = table.raw(), t.table_on_grid = x.relative.rank() > 2 && !call.points, t.reach = reach_of(x.relative);
    t.entries = table.numel() / call.heads();
    if (call.points && call.points.dim(0) > 1) t.points_row = call.plan->length();
    if (call.points) t.points = reinterpret_cast<const kernels::Site*>(call.points.raw()) + first_row * t.points_row;
  }
  t.bias = pair_tensor<const void>(x.bias, call, first_row);
  return t;
}

Shape term_sum_shape(const Call& call, std::size_t which) {
  const Tensor x = term_inputs(call.options.terms)[which];
  if (which == kTableTensor && call.table) return call.table.shape();
  if (which != kBiasTensor || (x.dim(2) != 1 && x.dim(3) != 1)) return x.shape();
  // Summed by row or column; the rest is done at the end.
  return {call.batch, call.heads(), x.dim(3) == 1 ? call.plan->queries() : 1, x.dim(3)};
}

TermTensors term_sums(const Call& call, const Wanted& wanted) {
  const auto inputs = term_inputs(call.options.terms);
  TermTensors sums;
  for (std::size_t i = 0; i < kTermTensors; ++i)
    if (wanted[i] && inputs[i] && i != kSinkTensor)
      sums[i] = zeros(term_sum_shape(call, i), stat_of(inputs[i].dtype()), inputs[i].device());
  return sums;
}

kernels::TermGradients kernel_gradients(const Call& call, TermTensors& sums, Index first_row) {
  const auto raw = [](Tensor& x) { return x ? x.mutable_raw() : nullptr; };
  return {raw(sums[0]), raw(sums[1]), pair_tensor<void>(sums[kBiasTensor], call, first_row)};
}

TermTensors finished_terms(const Call& call, TermTensors sums, const Wanted& wanted, const Tensor& lse,
                           const Tensor& delta) {
  const auto inputs = term_inputs(call.options.terms);
  if (wanted[kSinkTensor]) {  // ds = -sum e^(s - L) Delta
    const Tensor s = reshape(inputs[kSinkTensor], {1, call.heads(), 1});
    const Tensor each = where(equal(s, kMinusInfinity), 0.0, mul(exp(sub(s, lse)), delta));
    sums[kSinkTensor] = neg(sum(each, {0, 2}));
  }
  for (std::size_t i = 0; i < kTermTensors; ++i) {
    if (!wanted[i]) continue;
    Tensor& d = sums[i];
    if (!d) d = zeros_like(inputs[i]);  // no pair attends
    if (i == kTableTensor && d.numel() > inputs[i].numel()) d = slice(d, 1, 0, -1);
    for (int axis = 0; i == kBiasTensor && axis < 4; ++axis)
      if (d.dim(axis) != inputs[i].dim(axis)) d = sum(d, {axis}, true);
    d = to(reshape(d, inputs[i].shape()), inputs[i].dtype());
  }
  return sums;
}

}  // namespace hilt
