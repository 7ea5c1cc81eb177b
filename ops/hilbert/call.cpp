// A call on its tensors: checked, cut into passes of one tiling each, through kernels/attention.h.
#include "ops/hilbert/call.h"
#include "ops/hilbert/plan/tiles.h"
#include "ops/hilbert/kernels/compact.h"
#include "ops/ops.h"

namespace hilt {

Call checked_call(const char* op, const PlanPtr& plan, const AttentionOptions& options, Index queries, Index keys,
                  const Tensor& q, const Tensor& k, const Tensor& v) {
  for (const Tensor* x : {&q, &k, &v})
    check(bool(*x) && x->rank() == 4, op, ": q, k and v must be [batch, length, heads, dim], got ", q.shape(), ", ",
          k.shape(), ", ", v.shape());
  check(k.shape() == v.shape(), op, ": k ", k.shape(), " and v ", v.shape(), " must have one shape",
        k.dim(3) == v.dim(3) ? "" : "; pad the narrower head dim with zeros, and name the scale");
  check(q.dim(0) == k.dim(0) && (q.dim(1) == k.dim(1) || queries != keys) && q.dim(3) == k.dim(3), op, ": q ",
        q.shape(), " and k ", k.shape(), " must agree in batch, length and dim");
  check(q.dtype() == k.dtype() && q.dtype() == v.dtype(), op, ": q is ", q.dtype(), ", k ", k.dtype(), ", v ",
        v.dtype(), "; convert with to()");
  const bool heads_first = q.dim(1) == plan->heads() && q.dim(2) == queries;
  check(q.dim(1) == queries, op, ": ", q.dim(1), queries == keys ? " tokens" : " queries", ", but the plan is for ",
        queries,
        heads_first ? "; this looks like [batch, heads, length, dim]: transpose(x, 1, 2) is the layout here" : "");
  check(k.dim(1) == keys, op, ": ", k.dim(1), " keys, but the plan is for ", keys);
  if (const auto rows = std::ssize(plan->spec().documents); rows > 1)
    check(q.dim(0) == rows, op, ": a batch of ", q.dim(0), ", but the plan has documents for ", rows, " rows");
  check(q.dim(2) == plan->heads(), op, ": ", q.dim(2), " heads, but the plan is for heads=", plan->heads());
  check(k.dim(2) >= 1 && q.dim(2) % k.dim(2) == 0, op, ": ", q.dim(2), " query heads cannot share ", k.dim(2),
        " key heads evenly");
  check(q.dim(3) >= 1, op, ": head dim must be at least 1, got ", q.shape());
  check(options.dropout >= 0 && options.dropout < 1, op, ": dropout ", options.dropout, " must be in [0, 1)");
  check(options.dropout == 0 || options.key.has_value(), op, ": dropout ", options.dropout, " needs a RandomKey");
  check_permutation(op, *plan, options.permutation, q);
  check(!options.scale || std::isfinite(*options.scale), op, ": scale ", options.scale.value_or(0), " is not finite");
  Call call{plan,     options, options.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim(3)))),
            q.dim(0), queries, k.dim(2),
            q.dim(3), {}};
  resolve_terms(call, q);
  return call;
}

kernels::AttentionSizes Call::sizes() const {
  kernels::AttentionSizes s{batch, queries, heads(), kv_heads, dim, scale};
  s.dropout = drop_rate(options.dropout);
  s.key = options.key.value_or(RandomKey{});
  s.first_batch = options.first_batch;
  return s;
}

Tensor in_rows(const Tensor& x) { return x.stride(-1) == 1 || x.dim(-1) <= 1 ? x : contiguous(x); }

Index branch_count(const Plan& plan) {
  std::size_t n = 0;
  for (Index h = 0; h < plan.heads(); ++h) n = std::max(n, plan.tilings_of(h).size());
  return static_cast<Index>(n);
}

Users users(const Plan& plan, Index branch) {
  Users out;
  for (Index h = 0; h < plan.heads(); ++h) {
    const auto tilings = plan.tilings_of(h);
    for (Index i = 0; i < std::ssize(tilings); ++i)
      if (branch < 0 || i == branch) out[tilings[at(i)]].push_back(narrow(h));
  }
  return out;
}

// ---- passes -------------------------------------------------------------------------------------
namespace {

/// Where a row of the batch begins, in bytes.
Index begin_of(const Tensor& x, Index row) { return row * x.stride(0) * static_cast<Index>(size_of(x.dtype())); }
/// From a row of the batch on.
kernels::Input input(const Tensor& x, Index row = 0) {
  return {x.raw() + begin_of(x, row), x.dtype(), x.stride(0), x.stride(1), x.stride(2)};
}
kernels::Output output(Tensor& x, Index row = 0) {
  return {x.mutable_raw() + begin_of(x, row), x.dtype(), x.stride(0), x.stride(1), x.stride(2)};
}

kernels::Kernels kernels_of(const Tensor& q) {
  return with_device("attention", q, [&](auto where) { return kernels::kernels_at(where, q.dtype()); });
}
kernels::AttentionPass pass_of(const Call& call, const TilingPass& p, const Tensor& q, const Tensor& k, const Tensor& v,
                               const kernels::Terms& terms) {
  const Index row = p.row.value_or(0);
  kernels::AttentionPass pass{call.sizes(),  p.tiling,      p.heads.data(), std::ssize(p.heads),
                              input(q, row), input(k, row), input(v, row)};
  if (p.row) pass.sizes.batch = 1, pass.sizes.first_batch += row;
  if (q.device().is_cpu()) pass.places = &p.part->places;
  if (has_pair_terms(call.options.terms)) pass.terms = &terms;
  if (!call.token_at) return pass;
  pass.along = call.token_at.data<std::int32_t>() + (call.rows_apart() ? row * call.queries : 0);
  pass.causal = call.causal;
  if (call.causal && q.device().is_cuda()) pass.tiling = &kernels::with_ranks_of_call(*p.tiling);
  return pass;
}
/// Branch by branch, as the online softmax merges them. Where all branches of a chain have one
/// tiling that joins them, that makes what is of queries.
detail::List<TilingPass> passes_over(const Call& call, std::span<const PlanPart> parts, const Tensor& q, bool chain) {
  detail::List<TilingPass> passes;
  const Tiling* const joined =
      chain ? joined_tiling(parts[0].memo, parts[0].tilings, call.plan->tilings_of(0)) : nullptr;
  if (joined)
    passes.push_back(
        {.part = &parts[0], .tiling = joined, .heads = users(*call.plan, 0).begin()->second, .keys = false});
  const Index branches = branch_count(*call.plan);
  for (Index branch = 0; branch < branches; ++branch)
    for (const auto& [tiling, heads] : users(*call.plan, branch))
      for (const PlanPart& part : parts)
        for (Index row = 0; row < (call.rows_apart() && part.places.each_row ? call.batch : 1); ++row) {
          passes.push_back({&part, &part.tilings[at(tiling)], heads, branch == 0, branch + 1 == branches, !joined});
          if (call.rows_apart() || (q.device().is_cuda() && !part.places.each_row))
            passes.back().row = part.places.each_row ? row : part.places.list[0].row;
        }
  return passes;
}

/// Whether these parts list every row of q with one tiling of each, or every row of k. Each is in
/// one part alone.
bool lists_all(const Call& call, std::span<const PlanPart> parts, std::int32_t tiling, bool keys) {
  Index n = 0;
  for (const PlanPart& part : parts) {
    const Tiling& t = part.tilings[at(tiling)];
    n += part.places.count(call.batch) * std::ssize(keys ? t.k_token : t.q_token);
  }
  return n == call.batch * (keys ? call.plan->length() : call.queries);
}

/// The parts that kernels take one after the other: those of a GPU know whole rows.
std::span<const PlanPart> parts_for(const Call& call, const Tensor& q) {
  if (call.shard) return call.shard->stages()[0].parts;
  return q.device().is_cuda() ? row_parts(*call.plan) : call.plan->parts();
}

/// Several tilings, the same for all heads, of which the last one lists every row, in the memory of
/// a GPU: sums of 32 bits go on from one to the next, and the last writes the result.
bool is_chain(const Call& call, std::span<const PlanPart> parts, const Tensor& q) {
  const std::span<const std::int32_t> its = call.plan->tilings_of(0);
  return q.device().is_cuda() && size_of(q.dtype()) == 2 && parts.size() == 1 && !call.rows_apart() &&
         !has_pair_terms(call.options.terms) && its.size() > 1 && call.plan->heads_agree() &&
         lists_all(call, parts, its.back(), false) && lists_all(call, parts, its.back(), true);
}

}  // namespace

const std::vector<AttentionRoute>& attention_routes() { return seen<AttentionRoute>(); }
void clear_attention_routes() { seen<AttentionRoute>().clear(); }

// ---- forward ------------------------------------------------------------------------------------

SoftmaxState initial_state(const Call& call, const Tensor& q, std::span<const PlanPart> first, bool goes_on,
                           const Tensor& out) {
  goes_on = goes_on || branch_count(*call.plan) > 1;
  // A row is written first by the first branch of its head; if that has all, nothing is prepared.
  bool whole = !first.empty();
  for (Index h = 0; whole && h < call.heads(); ++h) {
    const auto its = call.plan->tilings_of(h);
    whole = !its.empty() && lists_all(call, first, its[0], false);
  }
  const DType stat = q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const DType type = size_of(q.dtype()) == 2 && goes_on ? DType::f32 : q.dtype();
  const Shape lse_shape{call.batch, call.heads(), call.queries};
  const Tensor& sink = call.options.terms.sink;
  // Nobody on a GPU reads O of 16 bits.
  const bool cleared = !whole || (sink && (q.device().is_cpu() || size_of(type) != 2));
  const Tensor o = cleared                      ? zeros(q.shape(), type, q.device())
                   : out && out.dtype() == type ? out
                                                : empty(q.shape(), type, q.device());
  // A sink is a key with this score and value 0, met before all others. Kernels write to its copy.
  if (sink) return {o, clone(expand(reshape(sink, {1, call.heads(), 1}), lse_shape)), false};
  if (whole) return {o, empty(lse_shape, stat, q.device()), true};
  return {o, full(lse_shape, kMinusInfinity, stat, q.device()), true};
}

void attend(const Call& call, std::span<const PlanPart> parts, const Tensor& q, const Tensor& k, const Tensor& v,
            SoftmaxState& state) {
  const kernels::Kernels on = kernels_of(q);
  for (const TilingPass& p : passes_over(call, parts, q, bool(state.result))) {
    if (!p.queries) continue;
    const Index row = p.row.value_or(0);
    const kernels::Terms terms = kernel_terms(call, row);
    kernels::ForwardPass pass{pass_of(call, p, q, k, v, terms),
                              output(state.result && p.last ? state.result : state.o, row),
                              state.lse.mutable_raw() + begin_of(state.lse, row), state.fresh && p.first};
    if (!pass.fresh && state.o.dtype() == DType::f32) pass.before = input(state.o, row);
    const kernels::Decision how = on.route_forward(on.where, pass);
    on.forward(on.where, pass, how);
    remember(AttentionRoute{"forward", kernels::name_of(how.route), how.reason});
  }
  state.fresh = false;
}

AttentionResult kernel_forward(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
  Tensor out = call.out;
  const std::span<const PlanPart> parts = parts_for(call, q);
  // A GPU stores 16 bytes at a time where it can, so into what lies as memory of ours would.
  const bool fits =
      out && (q.device().is_cpu() || (out.is_contiguous() && reinterpret_cast<std::uintptr_t>(out.raw()) % 16 == 0));
  const Tensor given = fits ? out : Tensor();
  SoftmaxState state = initial_state(call, q, parts, false, given);
  if (is_chain(call, parts, q)) state.result = given ? given : empty(q.shape(), q.dtype(), q.device());
  attend(call, parts, q, k, v, state);
  const Tensor o = state.result ? state.result : to(state.o, q.dtype());
  if (out && o.id() != out.id()) copy(out, o);
  return {o, state.lse};
}

// ---- backward -----------------------------------------------------------------------------------

BackwardRun decide_backward(const Call& call, const BackwardInputs& x, const ShardPlan::Stage* stage) {
  const bool whole = !stage;
  const std::span<const PlanPart> parts = whole ? parts_for(call, x.q) : stage->parts;
  const kernels::Terms terms = kernel_terms(call);
  BackwardRun run{{}, x.lse.dtype(), true, bool(x.d_lse) || x.terms[kSinkTensor]};
  run.chain = whole && is_chain(call, parts, x.q);
  // Gradients are written where no head's are added up, and by a GPU rounded once. There parts of
  // a row each, which share none, do not count together.
  std::map<std::pair<Index, std::int32_t>, Index> passes_of;
  for (TilingPass& p : passes_over(call, parts, x.q, run.chain)) {
    Heads kv_heads = p.heads;
    for (std::int32_t& h : kv_heads) h = narrow(h / (call.heads() / call.kv_heads));
    kv_heads.erase(std::ranges::unique(kv_heads).begin(), kv_heads.end());
    for (const std::int32_t h : kv_heads) ++passes_of[{p.row.value_or(-1), h}];
    run.passes.push_back({std::move(p)});
  }
  bool direct = whole && std::ranges::all_of(passes_of, [](const auto& of) { return of.second == 1; });
  const kernels::Kernels on = kernels_of(x.q);
  const auto decide = [&] {
    for (BackwardRun::Pass& p : run.passes) {
      kernels::BackwardPass pass{pass_of(call, p, x.q, x.k, x.v, terms)};
      pass.o = input(x.o), pass.d_o = input(x.d_o), pass.delta_given = bool(x.d_lse);
      pass.of_terms = x.terms[0] || x.terms[1] || x.terms[kBiasTensor];
      p.how = on.route_backward(on.where, pass, direct);
    }
    return std::ranges::all_of(run.passes, [](const auto& p) { return p.how.direct; });
  };
  if (!decide() && direct) direct = false, decide();
  bool all_written = true;
  for (const auto& [tiling, heads] : users(*call.plan, -1))
    all_written = all_written && lists_all(call, parts, tiling, false) && lists_all(call, parts, tiling, true);
  for (const BackwardRun::Pass& p : run.passes) {
    run.delta = run.delta || p.how.delta;
    all_written = all_written && p.how.every_key;
  }
  if (direct || run.chain) run.zeroed = !run.chain && !all_written;
  if ((direct || run.chain) && x.q.device().is_cuda()) run.type = x.q.dtype();
  return run;
}

void BackwardInputs::make_delta(const kernels::AttentionSizes& sizes) {
  delta = empty(lse.shape(), lse.dtype(), q.device());
  const kernels::Kernels on = kernels_of(q);
  on.delta(on.where, {sizes, input(o), input(d_o), delta.mutable_raw()});
  if (d_lse) delta = sub(delta, d_lse);
}

void run_backward(const Call& call, const BackwardRun& run, BackwardInputs& x, std::array<Tensor, 3>& d,
                  TermTensors& d_terms) {
  if (run.delta && !x.delta) x.make_delta(call.sizes());
  std::array<Tensor, 3> sums = d;  // where those of 32 bits stand
  if (run.chain)
    for (std::size_t i = run.passes[0].keys ? 0 : 1; i < 3; ++i)
      sums[i] = empty(d[i].shape(), DType::f32, d[i].device());
  std::array<bool, 3> any{!run.chain, !run.chain, !run.chain};
  const kernels::Kernels on = kernels_of(x.q);
  for (const BackwardRun::Pass& p : run.passes) {
    const Index row = p.row.value_or(0);
    const kernels::Terms terms = kernel_terms(call, row);
    const kernels::TermGradients gradients = kernel_gradients(call, d_terms, row);
    kernels::BackwardPass pass{pass_of(call, p, x.q, x.k, x.v, terms)};
    pass.o = input(x.o, row), pass.d_o = input(x.d_o, row);
    pass.lse = x.lse.raw() + begin_of(x.lse, row);
    pass.delta = x.delta ? x.delta.raw() + begin_of(x.delta, row) : nullptr;
    pass.listed = run.chain;
    const std::array wanted{p.queries, p.keys, p.keys};
    const std::array to{&pass.dq, &pass.dk, &pass.dv};
    const std::array before{&pass.dq_before, &pass.dk_before, &pass.dv_before};
    for (std::size_t i = 0; i < 3; ++i) {
      if (!wanted[i]) continue;
      *to[i] = output(!run.chain || p.last ? d[i] : sums[i], row);
      if (any[i] && sums[i].dtype() == DType::f32) *before[i] = input(sums[i], row);
      any[i] = true;
    }
    if (pass.terms) pass.d_terms = &gradients;
    on.backward(on.where, pass, p.how);
    remember(AttentionRoute{"backward", kernels::name_of(p.how.route), p.how.reason});
  }
}

// ---- one op -------------------------------------------------------------------------------------

namespace detail {

std::vector<Tensor> OneOp::forward(std::span<const Tensor> in) {
  packed = in.size() == 1 + kTermTensors;
  const auto [q, k, v] = parts(in);
  const AttentionResult r = call.given.o ? call.given
                            : call.shard ? ring_forward(call, q, k, v)
                                         : kernel_forward(call, q, k, v);
  if (wants_any())
    for (const Tensor& x : in) save(x);
  if (wants_any()) save(r.o), save(r.lse);
  return with_lse ? std::vector{r.o, r.lse} : std::vector{r.o};
}

std::vector<Tensor> OneOp::inputs(const Call& call, std::span<const Tensor> in) {
  std::vector<Tensor> all;
  std::ranges::transform(in, std::back_inserter(all), in_rows);
  std::ranges::copy(term_inputs(call.options.terms), std::back_inserter(all));
  return all;
}

std::array<Tensor, 3> OneOp::parts(std::span<const Tensor> in) {
  if (in[0].rank() < 5) return {in[0], in[1], in[2]};
  const Tensor& qkv = in[0];
  std::array<Tensor, 3> out;
  for (Index i = 0; i < 3; ++i)
    out[at(i)] = as_strided(qkv, {qkv.dim(0), qkv.dim(1), qkv.dim(3), qkv.dim(4)},
                            {qkv.stride(0), qkv.stride(1), qkv.stride(3), qkv.stride(4)},
                            qkv.offset() + (qkv.numel() > 0 ? i * qkv.stride(2) : 0));
  return out;
}

BackwardInputs OneOp::kept(std::span<const Tensor> given) const {
  const std::size_t inputs = packed ? 1 : 3, n = inputs + kTermTensors;
  const auto [q, k, v] = parts(std::array{saved(0), saved(1), saved(2)});
  BackwardInputs x{q, k, v, saved(n), given[0] ? given[0] : zeros_like(saved(n)), saved(n + 1)};
  if (with_lse) x.d_lse = given[1];
  for (std::size_t i = 0; i < kTermTensors; ++i) x.terms[i] = bool(saved(inputs + i)) && wants(inputs + i);
  return x;
}

std::vector<Tensor> OneOp::gradients_like_inputs(const BackwardRun& run) const {
  std::vector<Tensor> out;
  for (std::size_t i = 0; i < (packed ? 1 : 3); ++i)
    out.push_back((run.zeroed ? zeros : empty)(saved(i).shape(), run.type, saved(i).device()));
  return out;
}

std::vector<Tensor> OneOp::finished(std::vector<Tensor> dx, DType type, TermTensors terms) const {
  for (std::size_t i = 0; i < dx.size(); ++i) dx[i] = wants(i) ? to(dx[i], type) : Tensor{};
  for (Tensor& d : terms) dx.push_back(std::move(d));
  return dx;
}

}  // namespace detail
}  // namespace hilt
