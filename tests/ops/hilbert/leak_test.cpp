// For every causal configuration: a token changes no bit of an earlier output, and a loss on
// earlier outputs has a gradient of exactly zero in later keys and values.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <iostream>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "ops/hilbert/attention.h"
#include "ops/hilbert/make_attention.h"
#include "ops/ops.h"
#include "tests/support/same_bits.h"
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
    for (const char* pattern : {"dense",
                                "segment:16",
                                "segment:16,dilation=3,offset=1",
                                "segment:16,dilation=40",
                                "segment:200",
                                "segment:8+segment:32,dilation=4",
                                "slide:6",
                                "neighborhood:9",
                                "window2d:3x4",
                                "slide2d:1x2",
                                "neighborhood2d:3x5",
                                "blocks",
                                "segment:16,shift=5",
                                "segment:28,tail=borrow",
                                "slide:3,dilation=5,stride=4",
                                "neighborhood:3,dilation=2,stride=6",
                                "slide2d:2x1,dilation=1x2,stride=3",
                                "neighborhood2d:3x1,dilation=2,causal=1x0",
                                "window3d:2x3x2,shift=1",
                                "blocks:8@global_local:1:0|slide:4",
                                "window2d:2x4|segment:16,dilation=5",
                                "slide3d:1x1x1,stride=2",
                                "neighborhood3d:1x3x3,stride=3"})
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
            if (b.on_grid() && length != 1 && length != 64) continue;  // a fold that is no full square
            if (b.axes[0].dilation > 1 && length < 10) continue;
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

// ---- by name ------------------------------------------------------------------------------------
namespace {

using Config = std::map<std::string, std::string>;

/// Every name that runs on one rank, with every rule for blocks, on every order worth a name.
std::vector<Config> named() {
  std::vector<Config> out;
  for (const char* order : {"row", "hilbert", "tiles:2x3", "auto"}) {
    for (const char* type : {"standard", "improved", "hilbert"})
      for (const char* rates : {"1,1", "1,3"})
        out.push_back(
            {{"attention_type", type}, {"order", order}, {"segment_lengths", "8,24"}, {"dilation_rates", rates}});
    for (const char* rule : {"local:1", "dilated:1+3", "global_local:1:0", "top:2", "top:9"})
      out.push_back({{"attention_type", "block_sparse"}, {"order", order}, {"block_size", "7"}, {"blocks", rule}});
  }
  return out;
}
std::string text_of(const Config& config) {
  std::string text;
  for (const auto& [key, value] : config) text += key + " = " + value + ' ';
  return text;
}
/// o and the gradients of q, k and v.
std::vector<std::vector<double>> play(const NamedAttention& a, const std::array<Tensor, 3>& in, const Tensor& d_o) {
  Tape tape;
  for (const Tensor& x : in) tape.watch(x);
  const Tensor o = a(in[0], in[1], in[2]);
  const Gradients g = tape.backward(o, d_o);
  return {o.to_vector(), g[in[0]].to_vector(), g[in[1]].to_vector(), g[in[2]].to_vector()};
}

}  // namespace

TEST(Leak, NoNamedAttentionLeaks) {
  Index judged = 0;
  for (Config config : named()) {
    const bool looks = text_of(config).find("top:") != std::string::npos;
    for (const char* causal : {"token", "curve"}) {
      config["causal"] = causal;
      const NamedAttention a = make_attention(config);
      constexpr Index length = 50;
      const Shape shape{1, length, kHeads, kDim};
      const std::array<Tensor, 3> in{randn(shape, {2, 1}), randn(shape, {2, 2}), randn(shape, {2, 3})};
      if (looks) {
        EXPECT_THROW((void)a(in[0], in[1], in[2]), Error) << text_of(config);
        continue;
      }
      const PlanPtr plan = a.plan(in[0]);
      const std::vector<double> before = a(in[0], in[1], in[2]).to_vector();
      for (const Index t : {Index{3}, length / 2, length - 1}) {
        std::array<Tensor, 3> other;
        for (std::size_t i = 0; i < 3; ++i) other[i] = changed(in[i], t, 100);
        const std::vector<double> after = a(other[0], other[1], other[2]).to_vector();
        const auto rank = [&](Index s) {
          return std::string(causal) == "token" ? s : Index{plan->order().position_of[static_cast<std::size_t>(s)]};
        };
        for (Index s = 0; s < length; ++s) {
          if (rank(s) >= rank(t)) continue;
          const auto row = [&](const std::vector<double>& o) {
            return std::vector<double>(o.begin() + s * kHeads * kDim, o.begin() + (s + 1) * kHeads * kDim);
          };
          ASSERT_TRUE(same_bits(row(before), row(after)))
              << text_of(config) << ": token " << t << " reaches the output of token " << s;
        }
        ++judged;
      }
    }
  }
  EXPECT_GT(judged, 100);
}

TEST(Leak, NoSequenceOrHeadMovesAnother) {
  constexpr Index batch = 3, length = 41, heads = 4, kv_heads = 2;
  const Shape q_shape{batch, length, heads, kDim}, k_shape{batch, length, kv_heads, kDim};
  const std::array<Tensor, 3> in{randn(q_shape, {3, 1}), randn(k_shape, {3, 2}), randn(k_shape, {3, 3})};
  const Tensor d_o = randn(q_shape, {3, 4});
  const auto part = [](const std::array<Tensor, 3>& x, int axis, Index begin, Index end) {
    std::array<Tensor, 3> out;
    for (std::size_t i = 0; i < 3; ++i) {
      const Index scale = axis == 2 && i == 0 ? heads / kv_heads : 1;  // of q, the heads of a key head
      out[i] = clone(slice(x[i], axis, scale * begin, scale * end));
    }
    return out;
  };
  const auto slices = [&](const std::vector<double>& x, Index rows, int axis, Index begin, Index end) {
    const Tensor t = from_values(x, {batch, length, rows, kDim}, DType::f64);
    return clone(slice(t, axis, begin, end)).to_vector();
  };
  for (Config config : named())
    for (const char* backward : {"taped", "hybrid", "fused"}) {
      config["backward"] = backward;
      const NamedAttention a = make_attention(config);
      const auto all = play(a, in, d_o);
      // A sequence alone, and beside others that hold other things.
      std::array<Tensor, 3> louder = in;
      for (Tensor& x : louder) x = mul(x, from_values<float>({-30, 1, 7}, {batch, 1, 1, 1}));
      const auto other = play(a, louder, d_o);
      const auto alone = play(a, part(in, 0, 1, 2), clone(slice(d_o, 0, 1, 2)));
      for (std::size_t i = 0; i < 4; ++i) {
        const Index rows = i < 2 ? heads : kv_heads;
        const std::vector<double> mine = slices(all[i], rows, 0, 1, 2);
        EXPECT_TRUE(same_bits(mine, slices(other[i], rows, 0, 1, 2)))
            << text_of(config) << ": other sequences move result " << i;
        EXPECT_TRUE(same_bits(mine, alone[i])) << text_of(config) << ": alone result " << i << " is another";
      }
      // A key head and its query heads, beside others.
      if (config["attention_type"] == "improved") continue;  // its heads have sets by their number
      const auto head = play(a, part(in, 2, 1, 2), clone(slice(d_o, 2, 2, 4)));
      for (std::size_t i = 0; i < 4; ++i) {
        const Index rows = i < 2 ? heads : kv_heads, begin = i < 2 ? 2 : 1;
        const std::vector<double> mine = slices(all[i], rows, 2, begin, rows);
        ASSERT_EQ(mine.size(), head[i].size());
        for (std::size_t j = 0; j < mine.size(); ++j)
          ASSERT_NEAR(mine[j], head[i][j], 1e-5)
              << text_of(config) << ": alone result " << i << " of a head is another";
      }
    }
}
