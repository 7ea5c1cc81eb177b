// Attention over ranks: each stage is one part of an online softmax, and while it is computed the
// rows of the next one travel, each straight from its owner; backward, dK and dV return in f32.
#include "ops/hilbert/ring.h"
#include <iomanip>
#include "core/device.h"
#include "ops/hilbert/call.h"
#include "ops/ops.h"

namespace hilt {
namespace {

using Parcel = ShardPlan::Parcel;

/// Keys and values, or their gradients: [B, rows, Hk, D] each.
using KeysValues = std::array<Tensor, 2>;

/// f(tensor) of both.
template <class F> KeysValues of_both(const KeysValues& x, const F& f) { return {f(x[0]), f(x[1])}; }

/// What comes of a stage, a parcel each, and from whom.
struct Incoming {
  Transfer transfer;
  std::span<const Parcel> parcels;
  std::vector<KeysValues> rows;

  /// The keys and values of a stage, once they are here.
  KeysValues keys(const KeysValues& own) {
    transfer.wait();
    if (rows.empty()) return of_both(own, [](const Tensor& x) { return slice(x, 1, 0, 0); });
    KeysValues all;
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::vector<Tensor> parts;
      for (const KeysValues& x : rows) parts.push_back(x[i]);
      all[i] = parts.size() == 1 ? parts[0] : cat(parts, 1);
    }
    return all;
  }
  /// Adds gradients of our keys and values, which those who attended to them return.
  void add_to(KeysValues& total) {
    transfer.wait();
    for (std::size_t p = 0; p < parcels.size(); ++p)
      for (std::size_t i = 0; i < total.size(); ++i) {
        const Tensor& part = rows[p][i];
        if (parcels[p].rows.empty()) accumulate(total[i], part);
        else accumulate(total[i], scatter_add(part, 1, index_of(parcels[p].rows, part.device()), total[i].dim(1)));
      }
    *this = {};
  }
};
/// Sends what rows_of() has of each parcel of `out`, and makes room like `like` for those of `in`.
template <class RowsOf>
Incoming exchange(const Comm& comm, const Round& round, std::span<const Parcel> out, const RowsOf& rows_of,
                  std::span<const Parcel> in, const Tensor& like) {
  Incoming incoming{{}, in, {}};
  std::vector<Message> sent, received;
  for (const Parcel& p : out)
    for (Tensor& x : rows_of(p)) sent.push_back({p.peer, std::move(x)});
  for (const Parcel& p : in)
    for (Tensor& x : incoming.rows.emplace_back()) {
      x = empty(like.shape().with(1, p.count), like.dtype(), like.device());
      received.push_back({p.peer, x});
    }
  incoming.transfer = comm.exchange(std::move(sent), std::move(received), round);
  return incoming;
}
/// The keys and values of a stage set out for those who attend to them.
Incoming post(const Call& call, const KeysValues& own, std::size_t stage, std::string_view op) {
  const ShardPlan::Stage& s = call.shard->stages()[stage];
  const auto rows_of = [&](const Parcel& p) {
    return of_both(
        own, [&](const Tensor& x) { return p.rows.empty() ? dense(x) : gather(x, 1, index_of(p.rows, x.device())); });
  };
  return exchange(*call.comm, {op, static_cast<Index>(stage)}, s.send, rows_of, s.receive, own[0]);
}
/// f(number, its keys and values) of each stage, while those of the next one are on their way.
template <class F> void each_stage(const Call& call, const KeysValues& own, std::string_view op, const F& f) {
  const std::size_t stages = call.shard->stages().size();
  KeysValues keys = own;
  for (std::size_t stage = 0; stage < stages; ++stage) {
    Incoming next;
    if (stage + 1 < stages) next = post(call, own, stage + 1, op);
    f(stage, keys);
    if (stage + 1 < stages) keys = next.keys(own);
  }
}
/// Gradients of keys and values return to their owners.
Incoming return_gradients(const Call& call, const KeysValues& theirs, std::size_t stage) {
  const ShardPlan::Stage& s = call.shard->stages()[stage];
  Index row = 0;
  const auto rows_of = [&](const Parcel& p) {
    const Index first = std::exchange(row, row + p.count);
    return of_both(theirs, [&](const Tensor& x) { return dense(slice(x, 1, first, row)); });
  };
  return exchange(*call.comm, {"ring backward, gradients", static_cast<Index>(stage)}, s.receive, rows_of, s.send,
                  theirs[0]);
}

bool any_stage(const Call& call, std::vector<Parcel> ShardPlan::Stage::*parcels) {
  return std::ranges::any_of(call.shard->stages(), [&](const ShardPlan::Stage& s) { return !(s.*parcels).empty(); });
}

std::vector<Tensor> ring_backward(const detail::OneOp& op, std::span<const Tensor> given) {
  const Call& call = op.call;
  const bool receives = any_stage(call, &ShardPlan::Stage::receive);
  if (!receives && !any_stage(call, &ShardPlan::Stage::send)) return fused_backward(op, given);  // nothing to add up
  BackwardInputs x = op.kept(given);
  x.d_o = in_rows(x.d_o);
  TermTensors terms = term_sums(call, x.terms);
  const KeysValues own{x.k, x.v};
  const auto& stages = call.shard->stages();
  const auto zeros_of = [&](const Tensor& like) { return zeros(like.shape(), x.lse.dtype(), like.device()); };
  const Tensor dq = zeros_of(x.q);
  KeysValues total;
  Incoming returned;
  each_stage(call, own, "ring backward", [&](std::size_t stage, const KeysValues& keys) {
    std::array<Tensor, 3> d{dq, zeros_of(keys[0]), zeros_of(keys[1])};
    if (stages[stage].keys > 0) {
      x.k = keys[0], x.v = keys[1];
      run_backward(call, decide_backward(call, x, &stages[stage]), x, d, terms);
      x.k = x.v = {};  // the next ones are on their way
    }
    if (stage == 0) {
      total = {std::move(d[1]), std::move(d[2])};
    } else {
      if (stage > 1) returned.add_to(total);
      returned = return_gradients(call, {std::move(d[1]), std::move(d[2])}, stage);
    }
  });
  if (stages.size() > 1) returned.add_to(total);
  if (x.terms[kSinkTensor] && !x.delta) x.make_delta(call.sizes());  // no stage had keys
  return op.finished({dq, std::move(total[0]), std::move(total[1])}, x.q.dtype(),
                     finished_terms(call, std::move(terms), x.terms, x.lse, x.delta));
}

AttentionResult run(std::array<Tensor, 3> in, const ShardPlanPtr& shard, const Comm& comm,
                    const AttentionOptions& options, bool with_lse) {
  check(shard != nullptr, "ring_attention: no ShardPlan");
  check(comm.size() == shard->shards().ranks && comm.rank() == shard->rank(), "ring_attention: rank ", comm.rank(),
        " of ", comm.size(), ", but the plan is for rank ", shard->rank(), " of ", shard->shards().ranks);
  check(options.backward == Backward::fused, "ring_attention: backward ", name_of(options.backward),
        " is not for several ranks; use fused");
  Call call = checked_call("ring_attention", std::shared_ptr<const Plan>(shard, &shard->plan()), options,
                           shard->length(), shard->length(), in[0], in[1], in[2]);
  check(!call.points, "ring_attention: relative by points is not for several ranks");
  const kernels::Terms terms = kernel_terms(call);
  check(shard->plan().spec().documents.empty() || !(terms.slopes_on_grid || terms.table_on_grid),
        "ring_attention: alibi and relative on the grids of documents are not for several ranks, and these are ",
        to_string(shard->plan().spec().documents));
  call.shard = shard, call.comm = comm;
  const std::vector<Tensor> inputs = detail::OneOp::inputs(call, in);
  const std::vector<Tensor> y = hilt::apply<detail::OneOp, std::span<const Tensor>>(
      {std::move(call), with_lse, "attention (ring)", ring_backward}, inputs);
  return {y[0], with_lse ? y[1] : Tensor()};
}

}  // namespace

AttentionResult ring_forward(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto& stages = call.shard->stages();
  SoftmaxState state = initial_state(call, q, stages[0].parts, any_stage(call, &ShardPlan::Stage::receive));
  each_stage(call, {k, v}, "ring forward", [&](std::size_t stage, const KeysValues& keys) {
    if (stages[stage].keys > 0 || stage == 0) attend(call, stages[stage].parts, q, keys[0], keys[1], state);
  });
  return {to(state.o, q.dtype()), state.lse};
}

Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v, const ShardPlanPtr& shard, const Comm& comm,
                      const AttentionOptions& options) {
  return run({q, k, v}, shard, comm, options, false).o;
}

AttentionResult ring_attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const ShardPlanPtr& shard,
                                        const Comm& comm, const AttentionOptions& options) {
  const Tape::Pause pause;
  return run({q, k, v}, shard, comm, options, true);
}

void agree_on(const ShardPlan& shard, const Comm& comm, Index batch, Index kv_heads, Index dim, DType dtype,
              const AttentionOptions& options) {
  const PlanSpec& s = shard.plan().spec();
  std::ostringstream text;
  text << std::setprecision(17) << "version = " << kVersion << "\nranks = " << shard.shards().ranks
       << "\nlength = " << s.length << "\nheads = " << s.heads << "\nkv_heads = " << kv_heads << "\nbatch = " << batch
       << "\nhead_dim = " << dim << "\ndtype = " << dtype << "\norder = " << to_string(s.order)
       << "\npattern = " << to_string(s.pattern) << "\ndilation_mode = " << name_of(s.dilation_mode)
       << "\ncausal = " << name_of(s.causality) << "\ndocuments = " << to_string(s.documents)
       << "\ntransport = " << name_of(shard.transport()) << "\nscale = " << options.scale.value_or(0)
       << "\ndropout = " << options.dropout << "\nseed = " << (options.key ? options.key->seed : 0)
       << "\nstream = " << (options.key ? options.key->stream : 0);
  for (const Branch& b : s.pattern)
    for (const auto& [i, j] : b.pairs) text << "\nblock = " << i << ", " << j;
  for (std::size_t i = 0; i < shard.shards().owner.size(); ++i)
    text << "\nchunk = " << shard.shards().cut[i] << ".." << shard.shards().cut[i + 1] << " of rank "
         << shard.shards().owner[i];
  comm.agree("ring_attention", text.str());
}

Tensor rows_of_rank(const Tensor& whole, const ShardPlan& shard, int rank) {
  check(whole.rank() >= 2 && whole.dim(1) == shard.plan().length(), "rows_of_rank: ", whole.shape(),
        " must be [batch, ", shard.plan().length(), " tokens, ...]");
  return gather(whole, 1, index_of(shard.tokens_of(rank), whole.device()));
}

Tensor whole_of_rows(const Tensor& rows, const ShardPlan& shard, const Comm& comm) {
  check(rows.rank() >= 2 && rows.dim(1) == shard.length(), "whole_of_rows: ", rows.shape(), " must be [batch, ",
        shard.length(), " rows, ...]");
  const Tape::Pause pause;
  Index longest = 0;
  for (int r = 0; r < comm.size(); ++r) longest = std::max(longest, shard.shards().rows(r));
  const Tensor gathered = comm.gather(pad(rows, 1, 0, longest - rows.dim(1)), {"whole_of_rows"});  // [ranks, B, ..]
  std::vector<std::int32_t> from(at(shard.plan().length()));                                       // by token
  for (int r = 0; r < comm.size(); ++r) {
    const std::vector<std::int32_t> tokens = shard.tokens_of(r);
    for (std::size_t i = 0; i < tokens.size(); ++i) from[at(tokens[i])] = narrow(r * longest + static_cast<Index>(i));
  }
  const Shape all = rows.shape().with(1, comm.size() * longest);
  return hilt::gather(reshape(transpose(gathered, 0, 1), all), 1, index_of(from, rows.device()));
}

}  // namespace hilt
