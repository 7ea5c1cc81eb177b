// For every causal configuration: a token changes no bit of an earlier output, and a loss on
// earlier outputs has a gradient of exactly zero in later keys and values.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "ops/hilbert/attention.h"
#include "ops/ops.h"
#include "tests/support/scale.h"

using namespace hilt;

namespace {

constexpr Index kHeads = 2, kDim = 5;

struct Values {
  std::vector<double> o, dq, dk, dv;
};

Values run(const std::array<Tensor, 3>& in, const Tensor& d_o, const PlanPtr& plan, Backward mode) {
  AttentionOptions options;
  options.backward = mode;
  Tape tape;
  for (const Tensor& x : in) tape.watch(x);
  const Tensor o = attention(in[0], in[1], in[2], plan, options);
  const Gradients g = tape.backward(o, d_o);
  return {o.to_vector(), g[in[0]].to_vector(), g[in[1]].to_vector(), g[in[2]].to_vector()};
}

/// x with token t replaced.
Tensor changed(const Tensor& x, Index t, double value) {
  std::vector<float> v = x.to_vector<float>();
  for (Index i = 0; i < kHeads * kDim; ++i) {
    float& e = v[static_cast<std::size_t>(t * kHeads * kDim + i)];
    e = static_cast<float>(std::isnan(value) ? value : value * (1 + e));
  }
  return from_values(v, x.shape(), x.dtype());
}

struct Count {
  Index configurations = 0, perturbations = 0, outputs = 0, gradients = 0, wrong = 0;
};

/// rank: what causality compares; perturbs and cuts the loss at each of `tokens`.
void judge(const PlanSpec& spec, DType dtype, const std::string& where, Count& count) {
  const PlanPtr plan = make_plan(spec);
  const Index length = spec.length;
  const Permutation order = build_permutation(
      spec.order.scope == Order::Scope::per_segment ? with_segment(spec.order, spec.pattern[0].size) : spec.order,
      length);
  const auto rank = [&](Index t) {
    return spec.causality == Causality::curve ? Index{order.position_of[static_cast<std::size_t>(t)]} : t;
  };
  const Shape shape{1, length, kHeads, kDim};
  const std::array<Tensor, 3> in{randn(shape, {1, 1}, dtype), randn(shape, {1, 2}, dtype), randn(shape, {1, 3}, dtype)};
  const Tensor d_o = randn(shape, {1, 4}, dtype);
  ++count.configurations;
  for (const Backward mode : {Backward::taped, Backward::hybrid, Backward::fused}) {
    const Values base = run(in, d_o, plan, mode);
    const Values handed_over =
        mode == Backward::taped ? run(in, d_o, plan, Backward::fused) : base;  // what taped does with NaN
    Index differed = 0;
    for (const Index t : {Index{0}, length / 3, length / 2, length - 2, length - 1}) {
      if (t < 0) continue;
      ++count.perturbations;
      for (const double value : {100.0, std::numeric_limits<double>::quiet_NaN()}) {
        const Values other =
            run({changed(in[0], t, value), changed(in[1], t, value), changed(in[2], t, value)}, d_o, plan, mode);
        const Values& before = std::isnan(value) ? handed_over : base;
        for (Index s = 0; s < length; ++s) {
          bool same = true;
          for (Index i = s * kHeads * kDim; i < (s + 1) * kHeads * kDim; ++i)
            same = same && std::bit_cast<std::uint64_t>(other.o[static_cast<std::size_t>(i)]) ==
                               std::bit_cast<std::uint64_t>(before.o[static_cast<std::size_t>(i)]);
          if (rank(s) < rank(t)) {
            ++count.outputs;
            if (!same) {
              ++count.wrong;
              ADD_FAILURE() << where << ", " << name_of(mode) << ": token " << t << " reaches the output of token "
                            << s;
              return;
            }
          }
          differed += !same;
        }
      }
      // A loss on the outputs up to t.
      std::vector<float> cut = d_o.to_vector<float>();
      for (Index s = 0; s < length; ++s)
        if (rank(s) > rank(t))
          for (Index i = 0; i < kHeads * kDim; ++i) cut[static_cast<std::size_t>(s * kHeads * kDim + i)] = 0;
      const Values g = run(in, from_values(cut, shape, dtype), plan, mode);
      for (Index s = 0; s < length; ++s) {
        if (rank(s) <= rank(t)) continue;
        for (Index i = s * kHeads * kDim; i < (s + 1) * kHeads * kDim; ++i)
          for (const auto* x : {&g.dq, &g.dk, &g.dv}) {
            ++count.gradients;
            if ((*x)[static_cast<std::size_t>(i)] == 0) continue;
            ++count.wrong;
            ADD_FAILURE() << where << ", " << name_of(mode) << ": a loss on tokens up to " << t << " sends "
                          << (*x)[static_cast<std::size_t>(i)] << " to token " << s;
            return;
          }
      }
    }
    // With a key for every query the tokens changed are seen by some; with fewer they may not be.
    if (plan->stats().pairs >= length * kHeads) {
      EXPECT_GT(differed, 0) << where << ": what was changed reaches no output";
    } else if (plan->stats().pairs == 0) {
      EXPECT_EQ(differed, 0) << where << ": there are no pairs";
    }
  }
}

}  // namespace

TEST(Leak, NoCausalConfigurationLeaks) {
  Count count;
  Index drawn = 0;
  for (const Index length : {Index{1}, Index{2}, Index{37}, Index{64}, scaled<Index>(150, 64)})
    for (const char* pattern : {"dense", "segment:16", "segment:16,dilation=3,offset=1", "segment:16,dilation=40",
                                "segment:200", "segment:8+segment:32,dilation=4", "slide:6", "neighborhood:9",
                                "window2d:3x4", "slide2d:1x2", "neighborhood2d:3x5", "blocks"})
      for (const char* order : {"row", "snake", "morton", "tiles:2x3", "hilbert", "hilbert,chunk=24",
                                "hilbert,scope=segment", "hilbert,scope=order-only"})
        for (const DilationMode mode :
             {DilationMode::all_queries, DilationMode::longnet, DilationMode::head_groups, DilationMode::residue})
          for (const Causality causality : {Causality::token, Causality::curve}) {
            PlanSpec s;
            s.length = length;
            s.heads = kHeads;
            s.order = parse_order(order, length);
            s.dilation_mode = mode;
            s.causality = causality;
            if (std::string(pattern) == "blocks") {
              const Index n = (length + 6) / 7;
              s.pattern = {blocks(7, global_local_blocks(n, std::min<Index>(n, 1), 1))};
            } else {
              s.pattern = parse_pattern(pattern);
            }
            const Branch& b = s.pattern[0];
            const Grid grid = token_grid(s.order, length);
            if (b.kind == Branch::Kind::neighborhood && b.size > length) continue;
            if (b.kind == Branch::Kind::neighborhood2d && (b.rows > grid.height || b.columns > grid.width)) continue;
            if (s.order.scope == Order::Scope::per_segment && (b.kind != Branch::Kind::segment || s.pattern.size() > 1))
              continue;
            if (s.order.scope == Order::Scope::order_only && causality == Causality::curve) continue;
            if (mode != DilationMode::all_queries && b.kind != Branch::Kind::segment) continue;
            if (length > 64 && drawn % 4 != 0) {
              ++drawn;
              continue;
            }
            if (drawn++ % scaled(1, 9) != 0) continue;
            const std::string where = std::string(pattern) + ", " + order + ", " + std::string(name_of(mode)) +
                                      ", causal " + std::string(name_of(causality)) + ", " + std::to_string(length) +
                                      " tokens";
            judge(s, drawn % 5 == 0 ? DType::bf16 : DType::f32, where, count);
          }
  std::cout << count.configurations << " causal configurations x 3 modes, " << count.perturbations
            << " tokens changed: " << count.outputs << " earlier outputs bit for bit the same, " << count.gradients
            << " later gradients exactly zero, " << count.wrong << " wrong\n";
  EXPECT_GT(count.configurations, scaled(1000, 100));
}
