#pragma once
#include "core/comm/comm.h"
#include "ops/hilbert/attention.h"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/ranks/shards.h"

// Private: one call of attention, checked, and kernels on its tensors; ring_attention() shares it.

namespace hilt {

struct Call {
  PlanPtr plan;
  AttentionOptions options;
  double scale = 1;
  Index batch = 0, queries = 0, kv_heads = 1, dim = 0;
  AttentionResult given = {};  // what its forward pass gave, where that is over
  Tensor out = {};             // where o is to be written
  ShardPlanPtr shard = {};     // of several ranks: what this one computes
  std::optional<Comm> comm = {};
  std::vector<std::int32_t> bias_row;  // of each token's query, where there is a bias and not all ask
  Tensor token_at = {};  // at each position, i32, where kernels follow an order; on a GPU of one row or of all
  bool causal = false;   // and by token, which such a plan leaves to them
  Tensor table = {};     // relative [H, entries] and a 0, where some tokens lie on no grid
  Tensor points = {};    // [1 or B, L] of Site, where relative looks at these

  Index heads() const { return plan->heads(); }
  /// Whether rows of a GPU's batch have an order each, and so passes of their own.
  bool rows_apart() const { return token_at && token_at.device().is_cuda() && options.permutation.rank() == 2; }
  kernels::AttentionSizes sizes() const;
};
/// For q of `queries` rows, k and v of `keys`. Its terms are all there, dense, the bias of rank 4.
Call checked_call(const char* op, const PlanPtr& plan, const AttentionOptions& options, Index queries, Index keys,
                  const Tensor& q, const Tensor& k, const Tensor& v);

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();  // a bias that masks, a sink that is none

/// The last of these that a thread has seen.
template <class X> std::vector<X>& seen() {
  thread_local std::vector<X> list;
  return list;
}
template <class X> void remember(X x) {
  if (seen<X>().size() == 64) seen<X>().erase(seen<X>().begin());
  seen<X>().push_back(std::move(x));
}

/// A list where ops read it.
template <class I> Tensor index_of(const std::vector<I>& list, Device device = {}) {
  return moved(from_values(list, {std::ssize(list)}), device);
}
/// Rows whose elements are neighbours, read in place; else a copy, an op if a tape listens.
Tensor in_rows(const Tensor& x);

/// The most tilings that any head merges.
Index branch_count(const Plan& plan);
/// The heads that use each tiling of a part as their branch number `branch`; negative: as any.
using Heads = detail::List<std::int32_t>;
using Users = std::map<std::int32_t, Heads, std::less<>, detail::Recycled<std::pair<const std::int32_t, Heads>>>;
Users users(const Plan& plan, Index branch);
/// What a kernel goes over at once: a tiling of a part, for the heads that have it as one branch.
struct TilingPass {
  const PlanPart* part;
  const Tiling* tiling;
  Heads heads;
  bool first = true, last = true;    // of the branches that are merged
  bool queries = true, keys = true;  // whose sums it makes: forward and dQ, dK and dV
  /// The row of the batch that it is of; none: of all rows, or where the part's places say.
  std::optional<Index> row = {};
};

// ---- a plan that takes an order (points/given.cpp) ----------------------------------------------

/// How a call brings it: not at all; kernels follow it from row to row; rows gathered along the
/// order, and results brought home; or a plan made with it, where neither is possible.
enum class TakesOrder : unsigned char { no, followed, gathered, in_plan };
TakesOrder order_taken(const Plan& plan, const AttentionOptions& options, Device where);
const Plan& followed_plan(const Plan& plan);  // without causality by token, which the call's order tells
/// The call with its order, checked, for kernels that follow it.
Call following(Call call);

/// Checks AttentionOptions::permutation against a plan, but for what it says.
void check_permutation(const char* op, const Plan& plan, const Tensor& permutation, const Tensor& q);

/// The plan of a row of the batch with its order in it; row -1: of all rows, which have one order.
PlanPtr plan_along(const Call& call, Index row);

/// The order of a call, and back, as indices of rows: of one row, or where `each`, of all rows of
/// the batch one after the other.
struct GivenOrder {
  Tensor token_at, position_of;  // i64
  bool each = false;

  explicit GivenOrder(const Call& call);  // checks what it says
  /// Along the order, and home, by the axis of tokens; ops, each the other's backward. None stays
  /// none.
  Tensor along(const Tensor& x, int axis = 1) const;
  Tensor home(const Tensor& y, int axis = 1) const;
};

// ---- score terms (terms.cpp) --------------------------------------------------------------------

struct GroupBatch;

/// The tensors among the terms of a call, which may be undefined: slopes, relative, bias, sink.
constexpr std::size_t kTermTensors = 4, kTableTensor = 1, kBiasTensor = 2, kSinkTensor = 3;
using TermTensors = std::array<Tensor, kTermTensors>;
TermTensors term_inputs(const ScoreTerms& terms);
/// Checks the terms of a call, and makes them what checked_call says.
void resolve_terms(Call& call, const Tensor& q);
/// Whether there are any but a sink.
bool has_pair_terms(const ScoreTerms& terms);
/// Whether a tensor among them has a NaN, or an infinity other than one that masks.
bool has_nonfinite_terms(const ScoreTerms& terms);
/// S of scores c q . k [B, heads, groups, q, k], op by op.
Tensor with_terms(const Call& call, const GroupBatch& g, Tensor s);

/// For the rows of the batch from this one on, as of those below.
kernels::Terms kernel_terms(const Call& call, Index first_row = 0);
/// Where kernels add up wanted gradients, zeros; a bias's is at most its size. The sink needs none.
using Wanted = std::array<bool, kTermTensors>;
TermTensors term_sums(const Call& call, const Wanted& wanted);
Shape term_sum_shape(const Call& call, std::size_t which);
kernels::TermGradients kernel_gradients(const Call& call, TermTensors& sums, Index first_row = 0);
/// The gradients, each of its tensor's shape and type. delta: less the gradient of lse.
TermTensors finished_terms(const Call& call, TermTensors sums, const Wanted& wanted, const Tensor& lse,
                           const Tensor& delta);

// ---- forward ------------------------------------------------------------------------------------

/// Where an online softmax stands: o [B, Lq, H, D], unrounded where it goes on; lse [B, H, Lq].
struct SoftmaxState {
  Tensor o, lse;
  bool fresh;          // nothing is there yet: the first branch of the first part writes its rows
  Tensor result = {};  // of a chain of branches: where the last one writes o, rounded
};
/// out: where o will lie if it is q's type, and rounding is not put off.
SoftmaxState initial_state(const Call& call, const Tensor& q, std::span<const PlanPart> first, bool goes_on,
                           const Tensor& out = {});
void attend(const Call& call, std::span<const PlanPart> parts, const Tensor& q, const Tensor& k, const Tensor& v,
            SoftmaxState& state);
/// All of it: what hybrid and fused compute.
AttentionResult kernel_forward(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v);
/// The same over ranks, stage by stage (ring.cpp).
AttentionResult ring_forward(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v);

// ---- backward -----------------------------------------------------------------------------------

/// What backward reads: o and d_o as q, lse and delta [B, H, Lq].
struct BackwardInputs {
  Tensor q, k, v, o, d_o, lse;
  Tensor d_lse = {};  // its gradient, if any
  Tensor delta = {};  // d_o . o - d_lse; made where a route wants it and it is not there
  Wanted terms = {};  // whose gradients are wanted
  void make_delta(const kernels::AttentionSizes& sizes);
};
/// Backward over parts as it will run: a route for each tiling, and what these want of memory.
struct BackwardRun {
  struct Pass : TilingPass {
    kernels::Decision how = {};
  };
  detail::List<Pass> passes;
  DType type;          // of dq, dk and dv: that of q, or the accumulator's
  bool zeroed, delta;  // they must be zero before; delta is read
  bool chain = false;  // sums go from pass to pass, the last of which writes dq, dk and dv
};
/// stage: one of several, whose gradients are added up; none: all that the plan has.
BackwardRun decide_backward(const Call& call, const BackwardInputs& x, const ShardPlan::Stage* stage = nullptr);
/// Writes or adds the gradients to d = {dq, dk, dv}, which are as the run wants them; adds those of
/// terms.
void run_backward(const Call& call, const BackwardRun& run, BackwardInputs& x, std::array<Tensor, 3>& d,
                  TermTensors& d_terms);

// ---- one op -------------------------------------------------------------------------------------

namespace detail {

/// Hybrid, fused or over ranks on a tape: the forward kernel, what it keeps, and how it goes back.
/// Inputs: q, k and v, or the three packed, and the terms' tensors. Outputs: o, or o and lse.
struct OneOp final : MultiFunction {
  using GoBack = std::vector<Tensor> (*)(const OneOp& op, std::span<const Tensor> given);
  Call call;
  bool with_lse;
  std::string_view mode;  // lives for ever
  GoBack gradients;
  OneOp(Call its_call, bool lse, std::string_view name, GoBack back)
      : call(std::move(its_call)), with_lse(lse), mode(name), gradients(back) {}
  /// What it is applied to: q, k and v, or these packed, with the terms of the call.
  static std::vector<Tensor> inputs(const Call& call, std::span<const Tensor> in);

  std::string_view name() const override { return mode; }
  std::vector<Tensor> forward(std::span<const Tensor> in);
  std::vector<Tensor> backward_all(std::span<const Tensor> given) override { return gradients(*this, given); }

  /// q, k and v, which may be inside one tensor [B, L, 3, H, D].
  static std::array<Tensor, 3> parts(std::span<const Tensor> in);
  BackwardInputs kept(std::span<const Tensor> given) const;
  /// Where gradients are made, laid out as the inputs were.
  std::vector<Tensor> gradients_like_inputs(const BackwardRun& run) const;
  /// Gradients in the type of the inputs, of those that somebody wants, and those of terms.
  std::vector<Tensor> finished(std::vector<Tensor> dx, DType type, TermTensors terms) const;
  bool packed = false;
};

/// How hybrid and fused go back from what their op keeps (modes/modes.cpp).
std::vector<Tensor> hybrid_backward(const OneOp& op, std::span<const Tensor> given);
std::vector<Tensor> fused_backward(const OneOp& op, std::span<const Tensor> given);

}  // namespace detail

/// One branch, or all: o [B, L, H, D], and lse [B, L, H, 1] where branches merge or a caller asks.
AttentionResult taped(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, bool with_lse);
bool all_finite(std::span<const Tensor> tensors);

}  // namespace hilt
