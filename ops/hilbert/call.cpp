// A call on its tensors: it is checked, cut into passes of one tiling each, and every pass goes
// through the door of the kernels, kernels/attention.h.
#include "ops/hilbert/call.h"
#include <algorithm>
#include <cmath>
#include <limits>
#include "ops/ops.h"

namespace hilt {

Call checked_call(const char* op, const PlanPtr& plan, const AttentionOptions& options, Index length, const Tensor& q,
                  const Tensor& k, const Tensor& v) {
  for (const Tensor* x : {&q, &k, &v})
    check(bool(*x) && x->rank() == 4, op, ": q, k and v must be [batch, length, heads, dim], got ", q.shape(), ", ",
          k.shape(), ", ", v.shape());
  check(k.shape() == v.shape(), op, ": k ", k.shape(), " and v ", v.shape(), " must have one shape");
  check(q.dim(0) == k.dim(0) && q.dim(1) == k.dim(1) && q.dim(3) == k.dim(3), op, ": q ", q.shape(), " and k ",
        k.shape(), " must agree in batch, length and dim");
  check(q.dtype() == k.dtype() && q.dtype() == v.dtype(), op, ": q is ", q.dtype(), ", k ", k.dtype(), ", v ",
        v.dtype(), "; convert with to()");
  check(q.dim(1) == length, op, ": ", q.dim(1), " tokens, but the plan is for ", length);
  check(q.dim(2) == plan->heads(), op, ": ", q.dim(2), " heads, but the plan is for ", plan->heads());
  check(k.dim(2) >= 1 && q.dim(2) % k.dim(2) == 0, op, ": ", q.dim(2), " query heads cannot share ", k.dim(2),
        " key heads evenly");
  check(q.dim(3) >= 1, op, ": head dim must be at least 1, got ", q.shape());
  check(options.dropout >= 0 && options.dropout < 1, op, ": dropout ", options.dropout, " must be in [0, 1)");
  check(options.dropout == 0 || options.key.has_value(), op, ": dropout ", options.dropout, " needs a RandomKey");
  check(!options.scale || std::isfinite(*options.scale), op, ": scale ", options.scale.value_or(0), " is not finite");
  return {plan,     options, options.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim(3)))), q.dim(0), length,
          k.dim(2), q.dim(3)};
}

kernels::AttentionSizes Call::sizes() const {
  kernels::AttentionSizes s{batch, length, heads(), kv_heads, dim, scale};
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

std::map<std::int32_t, std::vector<std::int32_t>> users(const Plan& plan, Index branch) {
  std::map<std::int32_t, std::vector<std::int32_t>> out;
  for (Index h = 0; h < plan.heads(); ++h) {
    const auto tilings = plan.tilings_of(h);
    for (Index i = 0; i < static_cast<Index>(tilings.size()); ++i)
      if (branch < 0 || i == branch) out[tilings[static_cast<std::size_t>(i)]].push_back(static_cast<std::int32_t>(h));
  }
  return out;
}

// ---- passes
// ----------------------------------------------------------------------------------------
namespace {

constexpr std::size_t kRemembered = 64;

std::vector<AttentionRoute>& routes() {
  thread_local std::vector<AttentionRoute> list;
  return list;
}
void note(std::string_view pass, const kernels::Decision& d) {
  if (routes().size() == kRemembered) routes().erase(routes().begin());
  routes().push_back({pass, kernels::name_of(d.route), d.reason});
}

kernels::Input input(const Tensor& x) { return {x.raw(), x.dtype(), x.stride(0), x.stride(1), x.stride(2)}; }
kernels::Output output(Tensor& x) { return {x.mutable_raw(), x.dtype(), x.stride(0), x.stride(1), x.stride(2)}; }

kernels::AttentionPass pass_of(const Call& call, const Tiling& t, const std::vector<std::int32_t>& heads,
                               const Tensor& q, const Tensor& k, const Tensor& v) {
  return {call.sizes(), &t, heads.data(), static_cast<Index>(heads.size()), input(q), input(k), input(v)};
}

}  // namespace

const std::vector<AttentionRoute>& attention_routes() { return routes(); }
void clear_attention_routes() { routes().clear(); }

// ---- forward
// ---------------------------------------------------------------------------------------

SoftmaxState initial_state(const Call& call, const Tensor& q, std::span<const Tiling> first, bool several_parts) {
  several_parts = several_parts || branch_count(*call.plan) > 1;
  bool fresh =
      branch_count(*call.plan) == 1;  // a branch that every token takes part in writes every row: nothing to prepare
  for (const Tiling& t : first) fresh = fresh && static_cast<Index>(t.q_token.size()) == call.length;
  const DType stat = q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const DType type = size_of(q.dtype()) == 2 && several_parts ? DType::f32 : q.dtype();
  const Shape lse_shape{call.batch, call.heads(), call.length};
  if (fresh) return {empty(q.shape(), type, q.device()), empty(lse_shape, stat, q.device()), true};
  return {zeros(q.shape(), type, q.device()),
          full(lse_shape, -std::numeric_limits<double>::infinity(), stat, q.device()), false};
}

void attend(const Call& call, std::span<const Tiling> tilings, const Tensor& q, const Tensor& k, const Tensor& v,
            SoftmaxState& state) {
  with_device("attention", q, [&](auto where) {
    for (Index branch = 0; branch < branch_count(*call.plan); ++branch)
      for (const auto& [tiling, heads] : users(*call.plan, branch)) {
        const kernels::ForwardPass pass{pass_of(call, tilings[static_cast<std::size_t>(tiling)], heads, q, k, v),
                                        output(state.o), state.lse.mutable_raw(), state.fresh};
        kernels::Decision how;
        if constexpr (is_cuda<decltype(where)>)
          kernels::attention_forward(where, pass, how = kernels::route(where, pass));
        else kernels::attention_forward(where, pass);
        note("forward", how);
      }
  });
  state.fresh = false;
}

AttentionResult kernel_forward(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
  SoftmaxState state = initial_state(call, q, call.plan->tilings(), false);
  attend(call, call.plan->tilings(), q, k, v, state);
  return {to(state.o, q.dtype()), state.lse};
}

// ---- backward
// --------------------------------------------------------------------------------------

BackwardRun decide_backward(const Call& call, std::span<const Tiling> tilings, const BackwardInputs& x, bool whole) {
  BackwardRun run{{}, x.lse.dtype(), true, false};
  for (auto& [tiling, heads] : users(*call.plan, -1)) run.parts.push_back({tiling, std::move(heads), {}});
  whole = whole && tilings.size() == 1 && branch_count(*call.plan) == 1;
  with_device("attention", x.q, [&](auto where) {
    for (BackwardRun::Part& part : run.parts) {
      if constexpr (is_cuda<decltype(where)>) {
        const Tiling& t = tilings[static_cast<std::size_t>(part.tiling)];
        kernels::BackwardPass pass{pass_of(call, t, part.heads, x.q, x.k, x.v)};
        pass.o = input(x.o), pass.d_o = input(x.d_o);
        part.how = kernels::route(where, pass, whole);
        if (part.how.direct) {
          run.type = x.q.dtype();
          run.zeroed = static_cast<Index>(t.q_token.size()) != call.length ||
                       static_cast<Index>(t.k_token.size()) != call.length;
        }
      }
      run.delta = run.delta || part.how.delta;
    }
  });
  return run;
}

void run_backward(const Call& call, std::span<const Tiling> tilings, const BackwardRun& run, BackwardInputs& x,
                  std::array<Tensor, 3>& d) {
  with_device("attention", x.q, [&](auto where) {
    if (run.delta && !x.delta) {
      x.delta = empty({call.batch, call.heads(), call.length}, x.lse.dtype(), x.q.device());
      kernels::attention_delta(where, {call.sizes(), input(x.o), input(x.d_o), x.delta.mutable_raw()});
    }
    for (const BackwardRun::Part& part : run.parts) {
      kernels::BackwardPass pass{
          pass_of(call, tilings[static_cast<std::size_t>(part.tiling)], part.heads, x.q, x.k, x.v)};
      pass.o = input(x.o), pass.d_o = input(x.d_o);
      pass.lse = x.lse.raw(), pass.delta = x.delta ? x.delta.raw() : nullptr;
      pass.dq = output(d[0]), pass.dk = output(d[1]), pass.dv = output(d[2]);
      if constexpr (is_cuda<decltype(where)>) kernels::attention_backward(where, pass, part.how);
      else kernels::attention_backward(where, pass);
      note("backward", part.how);
    }
  });
}

// ---- one op
// ----------------------------------------------------------------------------------------

namespace detail {

Tensor OneOp::forward(const Tensor& q, const Tensor& k, const Tensor& v) {
  const AttentionResult r = kernel_forward(call, q, k, v);
  keep({q, k, v, r.o, r.lse});
  return r.o;
}
Tensor OneOp::forward(const Tensor& qkv) {
  packed = true;
  const auto part = parts(qkv);
  const AttentionResult r = kernel_forward(call, part[0], part[1], part[2]);
  keep({qkv, r.o, r.lse});
  return r.o;
}

void OneOp::keep(std::initializer_list<Tensor> tensors) {
  if (!wants_any()) return;
  for (const Tensor& t : tensors) save(t);
}

std::array<Tensor, 3> OneOp::parts(const Tensor& qkv) {
  std::array<Tensor, 3> out;
  for (Index i = 0; i < 3; ++i)
    out[static_cast<std::size_t>(i)] = as_strided(qkv, {qkv.dim(0), qkv.dim(1), qkv.dim(3), qkv.dim(4)},
                                                  {qkv.stride(0), qkv.stride(1), qkv.stride(3), qkv.stride(4)},
                                                  qkv.offset() + (qkv.numel() > 0 ? i * qkv.stride(2) : 0));
  return out;
}

BackwardInputs OneOp::kept(const Tensor& d_o) const {
  if (!packed) return {saved(0), saved(1), saved(2), saved(3), d_o, saved(4)};
  const auto [q, k, v] = parts(saved(0));
  return {q, k, v, saved(1), d_o, saved(2)};
}

std::vector<Tensor> OneOp::finished(std::vector<Tensor> dx, DType type) const {
  for (std::size_t i = 0; i < dx.size(); ++i) dx[i] = wants(i) ? to(dx[i], type) : Tensor{};
  return dx;
}

std::vector<Tensor> OneOp::fused_backward(const Tensor& cotangent) const {
  BackwardInputs x = kept(in_rows(cotangent));
  const BackwardRun run = decide_backward(call, call.plan->tilings(), x, true);
  std::vector<Tensor> dx;  // laid out as the inputs were
  if (packed) dx = {run.gradient_like(saved(0))};
  else dx = {run.gradient_like(x.q), run.gradient_like(x.k), run.gradient_like(x.v)};
  std::array<Tensor, 3> d = packed ? parts(dx[0]) : std::array<Tensor, 3>{dx[0], dx[1], dx[2]};
  run_backward(call, call.plan->tilings(), run, x, d);
  d = {};  // shares dx, which finished() frees as it converts
  return finished(std::move(dx), x.q.dtype());
}

}  // namespace detail
}  // namespace hilt
