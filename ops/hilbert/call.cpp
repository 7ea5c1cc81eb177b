// What is checked of every call of attention, and the kernels run on its tensors, branch by branch.
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
  s.dropout = options.dropout;
  s.key = key();
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

SoftmaxState blank_state(const Call& call, const Tensor& q, std::span<const Tiling> first, bool several_parts) {
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
  visit("attention", q, [&]<class T>(auto where) {
    for (Index branch = 0; branch < branch_count(*call.plan); ++branch)
      for (const auto& [tiling, heads] : users(*call.plan, branch)) {
        const auto run = [&]<class O>() {
          kernels::attention_forward(where, call.sizes(), tilings[static_cast<std::size_t>(tiling)], heads.data(),
                                     static_cast<Index>(heads.size()), kernels::rows<T>(q), kernels::rows<T>(k),
                                     kernels::rows<T>(v), kernels::rows<O>(state.o),
                                     state.lse.mutable_data<kernels::Stat<T>>(), state.fresh);
        };
        state.o.dtype() == q.dtype() ? run.template operator()<T>() : run.template operator()<wide_t<T>>();
      }
  });
  state.fresh = false;
}

Tensor delta_of(const Call& call, const Tensor& o, const Tensor& d_o, DType type) {
  Tensor delta = empty({call.batch, call.heads(), call.length}, type, o.device());
  visit("attention", o, [&]<class T>(auto where) {
    kernels::attention_delta(where, call.sizes(), kernels::rows<T>(o), kernels::rows<T>(d_o),
                             delta.mutable_data<kernels::Stat<T>>());
  });
  return delta;
}

void add_gradients(const Call& call, std::span<const Tiling> tilings, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& d_o, const Tensor& lse, const Tensor& delta, std::array<Tensor, 3>& d) {
  visit("attention", q, [&]<class T>(auto where) {
    using S = kernels::Stat<T>;
    for (const auto& [tiling, heads] : users(*call.plan, -1))
      kernels::attention_backward(where, call.sizes(), tilings[static_cast<std::size_t>(tiling)], heads.data(),
                                  static_cast<Index>(heads.size()), kernels::rows<T>(q), kernels::rows<T>(k),
                                  kernels::rows<T>(v), kernels::rows<T>(d_o), lse.data<S>(), delta.data<S>(),
                                  kernels::rows<S>(d[0]), kernels::rows<S>(d[1]), kernels::rows<S>(d[2]));
  });
}

bool gradients_at_once(const Call& call, std::span<const Tiling> tilings, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& o, const Tensor& d_o, const Tensor& lse,
                       const std::function<std::array<Tensor, 3>(bool covers)>& blank) {
  if (q.device().is_cpu() || tilings.size() != 1 || branch_count(*call.plan) != 1) return false;
  const Tiling& t = tilings[0];
  const std::vector<std::int32_t> heads = users(*call.plan, 0)[0];
  bool ran = false;
  visit("attention", q, [&]<class T>(auto where) {
    if constexpr (is_cuda<decltype(where)>) {
      if (!kernels::attention_backward_at_once_serves<T>(where, call.sizes(), t)) return;
      std::array<Tensor, 3> d = blank(static_cast<Index>(t.q_token.size()) == call.length &&
                                      static_cast<Index>(t.k_token.size()) == call.length);
      ran = kernels::attention_backward_at_once(where, call.sizes(), t, heads.data(), static_cast<Index>(heads.size()),
                                                kernels::rows<T>(q), kernels::rows<T>(k), kernels::rows<T>(v),
                                                kernels::rows<T>(o), kernels::rows<T>(d_o), lse.data<float>(),
                                                kernels::rows<T>(d[0]), kernels::rows<T>(d[1]), kernels::rows<T>(d[2]));
    }
  });
  return ran;
}

}  // namespace hilt
