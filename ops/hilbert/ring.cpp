// Attention over ranks: each stage is one part of an online softmax, and while it is computed the
// rows of the next one travel, each straight from its owner; backward, dK and dV return in f32.
#include "ops/hilbert/ring.h"
#include <iomanip>
#include <utility>
#include "core/device.h"
#include "ops/hilbert/call.h"
#include "ops/ops.h"

namespace hilt {
namespace {

/// Keys and values, or their gradients: [B, rows, Hk, D] each.
struct Pair {
  Tensor k, v;
};

Tensor index_of(const std::vector<std::int32_t>& rows, Device device) {
  return moved(from_values(rows, {std::ssize(rows)}), device);
}

Tensor parcel_of(const Tensor& x, const ShardPlan::Parcel& p) {
  return p.rows.empty() ? dense(x) : gather(x, 1, index_of(p.rows, x.device()));
}

Tensor blank_parcel(const ShardPlan::Parcel& p, const Tensor& like, DType type) {
  return empty(like.shape().with(1, p.count), type, like.device());
}

struct Incoming {
  Transfer transfer;
  std::vector<Tensor> k, v;  // a parcel each

  Pair wait(const Pair& own) {
    transfer.wait();
    if (k.empty()) return {slice(own.k, 1, 0, 0), slice(own.v, 1, 0, 0)};
    return {k.size() == 1 ? k[0] : cat(k, 1), v.size() == 1 ? v[0] : cat(v, 1)};
  }
};
Incoming post(const ShardPlan& shard, const Comm& comm, const Pair& own, std::size_t stage, std::string_view op) {
  const ShardPlan::Stage& s = shard.stages()[stage];
  Incoming incoming;
  std::vector<Message> out, in;
  for (const ShardPlan::Parcel& p : s.send)
    out.push_back({p.peer, parcel_of(own.k, p)}), out.push_back({p.peer, parcel_of(own.v, p)});
  for (const ShardPlan::Parcel& p : s.receive) {
    incoming.k.push_back(blank_parcel(p, own.k, own.k.dtype()));
    incoming.v.push_back(blank_parcel(p, own.v, own.v.dtype()));
    in.push_back({p.peer, incoming.k.back()}), in.push_back({p.peer, incoming.v.back()});
  }
  incoming.transfer = comm.exchange(std::move(out), std::move(in), {op, static_cast<Index>(stage)});
  return incoming;
}

/// Gradients of keys that return to their owners, and those of our keys from who attended to them.
struct GradientReturn {
  Transfer transfer;
  std::vector<ShardPlan::Parcel> parcels;  // of our rows
  std::vector<Pair> gradients;             // theirs, in the same order

  void wait(Pair& total) {
    transfer.wait();
    for (std::size_t i = 0; i < parcels.size(); ++i) {
      const auto add = [&](Tensor& sum, const Tensor& part) {
        if (parcels[i].rows.empty()) accumulate(sum, part);
        else accumulate(sum, scatter_add(part, 1, index_of(parcels[i].rows, part.device()), sum.dim(1)));
      };
      add(total.k, gradients[i].k), add(total.v, gradients[i].v);
    }
    *this = {};
  }
};
GradientReturn return_gradients(const ShardPlan& shard, const Comm& comm, const Pair& theirs, const Tensor& like,
                                std::size_t stage) {
  const ShardPlan::Stage& s = shard.stages()[stage];
  GradientReturn returned;
  std::vector<Message> out, in;
  Index row = 0;
  for (const ShardPlan::Parcel& p : s.receive) {
    out.push_back({p.peer, dense(slice(theirs.k, 1, row, row + p.count))}),
        out.push_back({p.peer, dense(slice(theirs.v, 1, row, row + p.count))});
    row += p.count;
  }
  for (const ShardPlan::Parcel& p : s.send) {
    returned.parcels.push_back(p);
    returned.gradients.push_back({blank_parcel(p, like, theirs.k.dtype()), blank_parcel(p, like, theirs.k.dtype())});
    in.push_back({p.peer, returned.gradients.back().k}), in.push_back({p.peer, returned.gradients.back().v});
  }
  returned.transfer =
      comm.exchange(std::move(out), std::move(in), {"ring backward, gradients", static_cast<Index>(stage)});
  return returned;
}

struct Ring final : Function {
  Call call;
  ShardPlanPtr shard;
  Comm comm;

  std::string_view name() const override { return "attention (ring)"; }

  bool any_stage(std::vector<ShardPlan::Parcel> ShardPlan::Stage::*parcels) const {
    return std::ranges::any_of(shard->stages(), [&](const ShardPlan::Stage& s) { return !(s.*parcels).empty(); });
  }
  bool receives() const { return any_stage(&ShardPlan::Stage::receive); }

  AttentionResult run(const Tensor& q, const Tensor& k, const Tensor& v) const {
    const auto& stages = shard->stages();
    const Pair own{k, v};
    SoftmaxState state = initial_state(call, q, stages[0].parts, receives());
    Pair keys = own;
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      Incoming next;
      if (stage + 1 < stages.size()) next = post(*shard, comm, own, stage + 1, "ring forward");
      if (stages[stage].keys > 0 || stage == 0) attend(call, stages[stage].parts, q, keys.k, keys.v, state);
      if (stage + 1 < stages.size()) keys = next.wait(own);
    }
    return {to(state.o, q.dtype()), state.lse};
  }

  Tensor forward(std::span<const Tensor> in) {
    const AttentionResult r = run(in[0], in[1], in[2]);
    if (!wants_any()) return r.o;
    for (const Tensor& t : in) save(t);
    save(r.o), save(r.lse);
    return r.o;
  }

  std::vector<Tensor> backward(const Tensor& cotangent) override {
    constexpr std::size_t n = 3 + kTermTensors;
    BackwardInputs x{saved(0), saved(1), saved(2), saved(n), in_rows(cotangent), saved(n + 1)};
    for (std::size_t i = 0; i < kTermTensors; ++i) x.terms[i] = bool(saved(3 + i)) && wants(3 + i);
    TermTensors terms = term_sums(call, x.terms);
    const Tensor& q = x.q;
    const Pair own{saved(1), saved(2)};
    const auto& stages = shard->stages();
    const DType type = x.lse.dtype();
    if (!receives() && !any_stage(&ShardPlan::Stage::send)) {  // nothing to add up
      const BackwardRun run = decide_backward(call, stages[0].parts, x, true);
      std::array<Tensor, 3> d{run.gradient_like(x.q), run.gradient_like(x.k), run.gradient_like(x.v)};
      run_backward(call, run, x, d, terms);
      return finished({std::move(d[0]), std::move(d[1]), std::move(d[2])}, x, std::move(terms));
    }
    Tensor dq = zeros(q.shape(), type, q.device());
    Pair total, keys = own;
    GradientReturn returned;
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      Incoming next;
      if (stage + 1 < stages.size()) next = post(*shard, comm, own, stage + 1, "ring backward");
      std::array<Tensor, 3> d{dq, zeros(keys.k.shape(), type, q.device()), zeros(keys.v.shape(), type, q.device())};
      if (stages[stage].keys > 0) {
        x.k = keys.k, x.v = keys.v;
        run_backward(call, decide_backward(call, stages[stage].parts, x, false), x, d, terms);
        x.k = x.v = {};  // the next ones are on their way
      }
      if (stage == 0) {
        total = {std::move(d[1]), std::move(d[2])};
      } else {
        if (stage > 1) returned.wait(total);
        returned = return_gradients(*shard, comm, {std::move(d[1]), std::move(d[2])}, own.k, stage);
      }
      if (stage + 1 < stages.size()) keys = next.wait(own);
    }
    if (stages.size() > 1) returned.wait(total);
    return finished({std::move(dq), std::move(total.k), std::move(total.v)}, x, std::move(terms));
  }
  std::vector<Tensor> finished(std::vector<Tensor> dx, BackwardInputs& x, TermTensors terms) const {
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] = wants(i) ? to(dx[i], x.q.dtype()) : Tensor{};
    if (x.terms[kSinkTensor] && !x.delta) x.make_delta(call.sizes());  // no stage had keys
    for (Tensor& d : finished_terms(call, std::move(terms), x.terms, x.lse, x.delta)) dx.push_back(std::move(d));
    return dx;
  }
};

Ring ring_of(const Tensor& q, const Tensor& k, const Tensor& v, const ShardPlanPtr& shard, const Comm& comm,
             const AttentionOptions& options) {
  check(shard != nullptr, "ring_attention: no ShardPlan");
  check(comm.size() == shard->shards().ranks && comm.rank() == shard->rank(), "ring_attention: rank ", comm.rank(),
        " of ", comm.size(), ", but the plan is for rank ", shard->rank(), " of ", shard->shards().ranks);
  check(options.backward == Backward::fused, "ring_attention: backward ", name_of(options.backward),
        " is not for several ranks; use fused");
  Ring ring;
  ring.call = checked_call("ring_attention", std::shared_ptr<const Plan>(shard, &shard->plan()), options,
                           shard->length(), shard->length(), q, k, v);
  const kernels::Terms terms = kernel_terms(ring.call);
  check(shard->plan().spec().documents.empty() || !(terms.slopes_on_grid || terms.table_on_grid),
        "ring_attention: alibi and relative on the grids of documents are not for several ranks, and these are ",
        to_string(shard->plan().spec().documents));
  ring.shard = shard;
  ring.comm = comm;
  return ring;
}

}  // namespace

Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v, const ShardPlanPtr& shard, const Comm& comm,
                      const AttentionOptions& options) {
  Ring ring = ring_of(q, k, v, shard, comm, options);
  std::vector<Tensor> in{in_rows(q), in_rows(k), in_rows(v)};
  std::ranges::copy(term_inputs(ring.call.options.terms), std::back_inserter(in));
  return apply(std::move(ring), std::span<const Tensor>(in));
}

AttentionResult ring_attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const ShardPlanPtr& shard,
                                        const Comm& comm, const AttentionOptions& options) {
  const Tape::Pause pause;
  return ring_of(q, k, v, shard, comm, options).run(in_rows(q), in_rows(k), in_rows(v));
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
  Tensor padded = zeros(rows.shape().with(1, longest), rows.dtype(), rows.device()),
         filled = slice(padded, 1, 0, rows.dim(1));
  copy(filled, rows);
  std::vector<Tensor> all;
  const Tensor gathered = comm.gather(padded, {"whole_of_rows"});  // [ranks, B, longest, ...]
  for (int r = 0; r < comm.size(); ++r) all.push_back(squeeze(slice(gathered, 0, r, r + 1), 0));
  std::vector<std::int32_t> from(static_cast<std::size_t>(shard.plan().length()));  // by token
  for (int r = 0; r < comm.size(); ++r) {
    const std::vector<std::int32_t> tokens = shard.tokens_of(r);
    for (std::size_t i = 0; i < tokens.size(); ++i)
      from[static_cast<std::size_t>(tokens[i])] = static_cast<std::int32_t>(r * longest + static_cast<Index>(i));
  }
  return hilt::gather(cat(all, 1), 1, index_of(from, rows.device()));
}

}  // namespace hilt
