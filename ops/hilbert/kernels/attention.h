#pragma once
#include "core/dispatch.h"
#include "core/random.h"
#include "ops/hilbert/kernels/terms.h"
#include "ops/hilbert/plan/attends.h"

// The door to the attention kernels. A pass is one struct: what is computed, over which tiles, from
// which rows to which. route() decides from it, once, how it runs.

namespace hilt {
struct Compact;
}
namespace hilt::kernels {

/// Rows of one attention operand, [batch, token, head, dim], strides in elements; that of dim is 1.
template <class T> struct Rows {
  T* data;
  Index batch, token, head;
  [[gnu::always_inline]] constexpr T* at(Index b, Index t, Index h) const {
    return data + b * batch + t * token + h * head;
  }
};

/// The same, with its type told at run time; none where data is null.
template <class Void> struct AnyRows {
  Void* data = nullptr;
  DType type = DType::f32;
  Index batch = 0, token = 0, head = 0;
  template <class T> [[gnu::always_inline]] constexpr Rows<T> rows() const {
    return {static_cast<T*>(data), batch, token, head};
  }
};
using Input = AnyRows<const void>;
using Output = AnyRows<void>;

/// f.operator()<T>() for a float type; it is one of `Types`.
template <class T, class... Types, class F> [[gnu::always_inline]] inline void with_type(DType type, F&& f) {
  if (type == dtype_of<T>) return f.template operator()<T>();
  (void)((type == dtype_of<Types> && (f.template operator()<Types>(), true)) || ...);
}

/// One attention call. Head h reads key head h / (heads / kv_heads). `queries`: rows of q, o, lse.
struct AttentionSizes {
  Index batch, queries, heads, kv_heads, dim;
  double scale;
  std::uint32_t dropout = 0;  // of weights, see drop_rate()
  RandomKey key;              // of the dropout mask, see attention_keeps
  Index first_head = 0;       // of these heads among all: part of the mask's counter
  Index first_batch = 0;
};

/// The bits that decide for the weights of query t and keys u with u / 8 == block: see drop_bits(),
/// by u % 8. The same on every device and in every mode. head = b * heads + h.
[[gnu::always_inline]] constexpr std::array<std::uint32_t, 4> attention_bits(const RandomKey& key, std::uint32_t head,
                                                                             std::uint32_t t, std::uint32_t block) {
  return philox<7>({block, t, head, static_cast<std::uint32_t>(key.stream)}, key.seed ^ (key.stream >> 32) << 32);
}
[[gnu::always_inline]] constexpr bool attention_keeps(const RandomKey& key, std::uint32_t head, std::uint32_t t,
                                                      std::uint32_t u, std::uint32_t rate) {
  return drop_bits(attention_bits(key, head, t, u / 8), u % 8) >= rate;
}

/// Statistics and accumulators: f32, f64 for f64.
template <class T> using Stat = wide_t<T>;

/// What both directions are told: a tiling, where it lies, who uses it. q, k and v are of one type.
struct AttentionPass {
  AttentionSizes sizes;
  const Tiling* tiling;
  const std::int32_t* heads;
  Index n_heads;
  Input q, k, v;
  const Tiling::Places* places = nullptr;  // on a CPU; null: the start of every row, as on a GPU
  const Terms* terms = nullptr;            // of the scores, if any
  /// Where an order came with the call and the tiling stands in row order: the token at each
  /// position, on a CPU of each row of the batch; and whether keys come no later than queries.
  const std::int32_t* along = nullptr;
  bool causal = false;
  const struct OrderedLists* ordered = nullptr;  // on a GPU, once it runs: the tiling's lists along it

  [[gnu::always_inline]] Index place_count() const { return places ? places->count(sizes.batch) : sizes.batch; }
  [[gnu::always_inline]] Tiling::Place place(Index i) const {
    return places ? places->at(i) : Tiling::Place::at(nullptr, 0, true, i);
  }
};

/// o [B, Lq, H, D], of the type of q or of its Stat, and lse [B, H, Lq] hold the state of an online
/// softmax: where `fresh`, rows of q_token are written, (0, -inf) without keys; else they continue
/// from what is there (on a GPU O from `before` alone), which merges this tiling with those before.
struct ForwardPass : AttentionPass {
  Output o;
  void* lse;  // Stat
  bool fresh;
  Input before = {};  // on a GPU what O was so far, f32 and maybe o itself; null: zeros
};

/// delta[b, h, t] = d_o . o
struct DeltaPass {
  AttentionSizes sizes;
  Input o, d_o;
  void* delta;                           // Stat
  const std::int32_t* if_set = nullptr;  // on a GPU: nothing is done where this is zero
};

/// With the final (merged) lse and delta, or none where d_o . o is all of it. dq [B, Lq, H, D],
/// dk and dv [B, L, Hk, D] are added to. A direct route writes them instead: the rows of all listed
/// queries, and of the keys that some query attends to. On a GPU dq, or dk and dv, may be null,
/// where nobody asks for them.
struct BackwardPass : AttentionPass {
  Input o, d_o;
  const void *lse, *delta;  // Stat
  Output dq, dk, dv;
  /// On a GPU the sums so far, f32 and maybe dq, dk, dv themselves; null: there are none, and
  /// listed rows are written. `listed`: only rows that q_known and k_known name have any.
  Input dq_before = {}, dk_before = {}, dv_before = {};
  bool listed = false;
  const TermGradients* d_terms = nullptr;
  bool delta_given = false;  // delta is not d_o . o alone
  bool of_terms = false;     // somebody asks for gradients of terms of pairs
};

/// The kernels there are. hopper_one_owner and hopper_one_pass go back in one pass, the other GPU
/// routes in two over scores. On a CPU most tiles of keys are multiplied whole, or taken pair by
/// pair.
enum class Route : unsigned char { cpu, cpu_pairs, plain, mma, hopper_one_owner, hopper_one_pass, hopper };
/// What people see; HILT_ROUTE names plain, mma or hopper.
constexpr std::string_view name_of(Route route) {
  return std::array{"cpu", "cpu_pairs", "plain", "mma", "hopper", "hopper", "hopper"}[static_cast<std::size_t>(route)];
}

/// How a pass runs, and what it wants of memory.
struct Decision {
  Route route = Route::cpu;
  std::string_view reason;         // why no faster route; lives for ever
  bool direct = false;             // of a backward pass: gradients are written, on a GPU rounded once
  bool delta = true;               // it reads delta
  bool every_key = true;           // where direct, it writes all keys that are listed
  const Compact* lists = nullptr;  // on a CPU: the pass's compact() lists
};
/// Decides from sizes, tiles, types and inputs. `whole`: this pass alone makes all gradients.
Decision route(Cpu, const ForwardPass&);
Decision route(Cpu, const BackwardPass&, bool whole);
Decision route(Cuda, const ForwardPass&);
Decision route(Cuda, const BackwardPass&, bool whole);
/// Bytes of a head's sums of dQ in one pass of a GPU; parts of owners, by side; bytes of masks.
std::array<Index, 4> hopper_sums(const Tiling& t, Index dim);
/// The same set, where ranks that come with a GPU's call say which pairs of it attend. Made once.
const Tiling& with_ranks_of_call(const Tiling& t);

void attention_forward(Cuda, const ForwardPass&, const Decision&);
void attention_delta(Cuda, const DeltaPass&);
void attention_backward(Cuda, const BackwardPass&, const Decision&);

/// The kernels of one place for q of one type, chosen once a call: a pass goes straight to its own.
struct Kernels {
  Decision (*route_forward)(Cuda, const ForwardPass&) = nullptr;
  Decision (*route_backward)(Cuda, const BackwardPass&, bool whole) = nullptr;
  void (*forward)(Cuda, const ForwardPass&, const Decision&) = nullptr;
  void (*delta)(Cuda, const DeltaPass&) = nullptr;
  void (*backward)(Cuda, const BackwardPass&, const Decision&) = nullptr;
  Cuda where = {};  // of a GPU; those of a CPU do not look at it
};
template <Isa I> Kernels kernels_at(CpuAt<I>, DType type);
inline Kernels kernels_at(Cuda where, DType) {
  return {route, route, attention_forward, attention_delta, attention_backward, where};
}

}  // namespace hilt::kernels
