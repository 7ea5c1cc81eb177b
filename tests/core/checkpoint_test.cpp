// checkpoint(fn, inputs) gives the bits of fn(inputs), keeps its inputs alone, and draws the same
// random numbers twice.
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include "core/random.h"
#include "core/tape.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/tiny_ops.h"

namespace hilt {
namespace {
using namespace tiny;

using Numbers = std::vector<double>;
using Inputs = std::span<const Tensor>;

/// Value and gradients of fn(inputs), with and without a checkpoint around it, bit for bit.
void expect_same(const Composite& fn, const std::vector<Tensor>& inputs, const std::vector<Tensor>& watched) {
  Numbers value[2];
  std::vector<Numbers> gradients[2];
  for (const bool with : {false, true}) {
    Tape tape;
    for (const Tensor& t : watched) tape.watch(t);
    std::vector<Tensor> in;
    for (const Tensor& t : inputs) in.push_back(scale(t, 1));  // computed, as in the middle of a model
    const Tensor y = with ? checkpoint(fn, in) : fn(in);
    value[with] = y.to_vector();
    const Gradients g = tape.backward(sum(square(y)));
    for (const Tensor& t : watched) gradients[with].push_back(g.has(t) ? g[t].to_vector() : Numbers{});
  }
  EXPECT_EQ(value[0], value[1]);
  EXPECT_EQ(gradients[0], gradients[1]);
}

TEST(Checkpoint, GivesTheSameValueAndGradientBits) {
  const Tensor x = vec({0.3, -0.2, 0.9}), y = vec({1.1, 0.4, -0.7});
  expect_same([](Inputs in) { return exp(mul(square(in[0]), in[1])); }, {x, y}, {x, y});
  expect_same([](Inputs in) { return exp(mul(square(in[0]), in[1])); }, {x, y}, {x});
  expect_same([](Inputs in) { return add(sum(in[0]), sum(exp(in[0]))); }, {x}, {x});
}

TEST(Checkpoint, KeepsItsInputsAndNothingElse) {
  const Tensor x = vec(Numbers(100, 0.1));
  const auto fn = [](Inputs in) { return exp(exp(exp(square(in[0])))); };
  const std::vector<Tensor> in{x};
  Tape plain;
  plain.watch(x);
  (void)fn(in);
  EXPECT_EQ(plain.saved_bytes(), 3200u);
  Tape tape(Tape::Options{.profile = true});
  tape.watch(x);
  const Tensor y = checkpoint(fn, in);
  EXPECT_EQ(tape.size(), 1u);
  EXPECT_EQ(tape.saved_bytes(), 800u);
  EXPECT_EQ(tape.report()[0].name, "checkpoint");
  EXPECT_EQ(tape.report()[0].output, (Shape{100}));
  EXPECT_EQ(tape.report()[0].inputs, (std::vector<Shape>{{100}}));
  EXPECT_GT(tape.report()[0].forward_ms, 0);
  (void)tape.backward(sum(y));
}

TEST(Checkpoint, WeightsThatItReadsGetTheirGradients) {
  const Tensor x = vec({0.3, -0.2}), w = vec({2, 3}), v = vec({-1, 1}), unwatched = vec({5, 5});
  const auto fn = [&](Inputs in) { return mul(add(mul(in[0], w), mul(w, unwatched)), v); };
  expect_same(fn, {x}, {x, w, v});
  expect_same(fn, {x}, {w});  // the input itself leads nowhere
  Tape tape;
  tape.watch(w);
  const std::vector<Tensor> in{x};
  const Gradients g = tape.backward(sum(checkpoint(fn, in)));
  EXPECT_EQ(g.size(), 1u);
  EXPECT_EQ(g[w].to_vector(), Numbers({-5.3, 4.8}));
}

TEST(Checkpoint, WhatWasComputedBeforeAndIsReadLeadsOn) {
  const Tensor x = vec({0.3}), w = vec({2});
  Tape tape;
  tape.watch(w);
  const Tensor hidden = square(w);  // captured although it is no leaf
  const std::vector<Tensor> in{x};
  const Tensor y = checkpoint([&](Inputs i) { return mul(i[0], exp(hidden)); }, in);
  EXPECT_DOUBLE_EQ(tape.backward(y)[w].item(), 0.3 * std::exp(4.0) * 4);
}

TEST(Checkpoint, OneWeightInManyCheckpoints) {
  const Tensor x = vec({0.3, 0.4}), w = vec({0.9, 1.1});
  Tape tape;
  tape.watch(w);
  Tensor y = x;
  for (int i = 0; i < 5; ++i) y = checkpoint([&](Inputs in) { return mul(in[0], w); }, std::vector<Tensor>{y});
  const Numbers dw = tape.backward(sum(y))[w].to_vector();
  EXPECT_NEAR(dw[0], 0.3 * 5 * std::pow(0.9, 4), 1e-15);
  EXPECT_NEAR(dw[1], 0.4 * 5 * std::pow(1.1, 4), 1e-15);
}

TEST(Checkpoint, TheSameTensorTwice) {
  const Tensor x = vec({3, 4});
  Tape tape;
  tape.watch(x);
  const std::vector<Tensor> in{x, x};
  const Tensor y = checkpoint([&](Inputs i) { return mul(mul(i[0], i[1]), x); }, in);  // and a third time, by itself
  EXPECT_EQ(tape.report()[0].saved_bytes, 16u);
  EXPECT_EQ(tape.backward(sum(y))[x].to_vector(), Numbers({27, 48}));
}

TEST(Checkpoint, AFunctionThatReturnsItsInput) {
  const Tensor x = vec({3}), w = vec({2});
  Tape tape;
  tape.watch(x);
  const std::vector<Tensor> in{x, w};
  EXPECT_EQ(checkpoint([](Inputs i) { return i[0]; }, in).id(), x.id());
  EXPECT_EQ(tape.size(), 0u);
  EXPECT_EQ(checkpoint([](Inputs i) { return i[1]; }, in).id(), w.id());
  EXPECT_EQ(checkpoint(
                [&](Inputs i) {
                  (void)square(i[0]);
                  return x;
                },
                in)
                .id(),
            x.id());
  EXPECT_EQ(tape.backward(square(x))[x].item(), 6);
}

TEST(Checkpoint, WithoutATapeOrUnderPauseItJustRuns) {
  const std::vector<Tensor> in{vec({3})};
  int calls = 0;
  const auto fn = [&](Inputs i) {
    ++calls;
    return square(i[0]);
  };
  EXPECT_EQ(checkpoint(fn, in).item(), 9);
  Tape tape;
  tape.watch(in[0]);
  {
    const Tape::Pause pause;
    EXPECT_EQ(checkpoint(fn, in).item(), 9);
  }
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Checkpoint, OfUnwatchedThingsIsNotKept) {
  const Tensor x = vec({3}), watched = vec({1});
  const std::vector<Tensor> in{x};
  Tape tape;
  tape.watch(watched);
  EXPECT_EQ(checkpoint([](Inputs i) { return square(i[0]); }, in).item(), 9);
  EXPECT_EQ(tape.size(), 0u);
}

TEST(Checkpoint, AnInputThatIsNotReadHasNoGradient) {
  const Tensor x = vec({3}), unread = vec({1});
  Tape tape;
  tape.watch(x);
  tape.watch(unread);
  const std::vector<Tensor> in{x, unread};
  const Gradients g = tape.backward(checkpoint([](Inputs i) { return square(i[0]); }, in));
  EXPECT_TRUE(g.has(x));
  EXPECT_FALSE(g.has(unread));
}

TEST(Checkpoint, RunsOnceForwardAndOnceBackward) {
  const Tensor x = vec({3});
  int calls = 0;
  Tape tape;
  tape.watch(x);
  const Tensor y = checkpoint(
      [&](Inputs i) {
        ++calls;
        return square(i[0]);
      },
      std::vector<Tensor>{x});
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(tape.backward(y)[x].item(), 6);
  EXPECT_EQ(calls, 2);
}

// ---- versions -----------------------------------------------------------------------------------

TEST(Checkpoint, WritingToWhatItReadIsAnError) {
  for (const bool weight : {false, true}) {
    Tensor x = vec({3}), w = vec({2});
    Tape tape;
    tape.watch(w);
    const Tensor y = checkpoint([&](Inputs i) { return mul(i[0], w); }, std::vector<Tensor>{x});
    (weight ? w : x).mutable_data<double>()[0] = 5;
    EXPECT_EQ(error_of([&] { tape.backward(y); }),
              "usage: checkpoint: a tensor saved for backward, f64[1], was written to after the forward pass (version "
              "2, saved at 1); write "
              "before the op runs, or to a clone");
  }
}

// ---- randomness ---------------------------------------------------------------------------------

TEST(Checkpoint, ReplaysTheNumbersItDrew) {
  const Tensor x = vec(Numbers(64, 1.0));
  Generator g(5);
  (void)g.next();
  Tape tape;
  tape.watch(x);
  const Tensor y = checkpoint([&](Inputs in) { return mul(drop(in[0], g), drop(in[0], g)); }, std::vector<Tensor>{x});
  EXPECT_EQ(g.state().stream, 3u);
  (void)g.next();  // drawn after, by something else
  const Numbers dx = tape.backward(sum(y))[x].to_vector(), value = y.to_vector();
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(dx[i], 2 * value[i]);  // 8 where both masks let it through, else 0
  EXPECT_GT(std::count(value.begin(), value.end(), 4.0), 5);
  EXPECT_LT(std::count(value.begin(), value.end(), 4.0), 40);
  EXPECT_EQ(g.state().stream, 4u);  // as if nothing had been replayed
}

TEST(Checkpoint, AReplayThatThrowsLeavesGeneratorsWhereTheyStood) {
  const Tensor x = vec(Numbers(64, 1.0));
  Generator g(5);
  int runs = 0;
  Tape tape;
  tape.watch(x);
  const Tensor y = checkpoint(
      [&](Inputs in) {
        const Tensor dropped = drop(in[0], g);
        check(++runs == 1, "no memory");
        return dropped;
      },
      std::vector<Tensor>{x});
  (void)g.next();
  EXPECT_EQ(error_of([&] { (void)tape.backward(sum(y)); }), "usage: no memory");
  EXPECT_EQ(g.state().stream, 2u);
}

TEST(Checkpoint, DrawsWhatTheSameCodeDrawsWithoutIt) {
  const Tensor x = vec(Numbers(64, 1.0));
  Numbers value[2], gradient[2];
  for (const bool with : {false, true}) {
    Generator a(5), b(6);
    const auto fn = [&](Inputs in) {
      Tensor t = drop(in[0], a);
      t = add(t, drop(in[0], b));
      return mul(t, drop(in[0], a));
    };
    Tape tape;
    tape.watch(x);
    Tensor y = drop(x, b);
    y = with ? checkpoint(fn, std::vector<Tensor>{y}) : fn(std::vector<Tensor>{y});
    y = drop(y, a);
    value[with] = y.to_vector();
    gradient[with] = tape.backward(sum(y))[x].to_vector();
    EXPECT_EQ(a.state().stream, 3u);
    EXPECT_EQ(b.state().stream, 2u);
  }
  EXPECT_EQ(value[0], value[1]);
  EXPECT_EQ(gradient[0], gradient[1]);
}

// ---- checkpoints in checkpoints -----------------------------------------------------------------

TEST(Checkpoint, NestsAndReplaysAllLevels) {
  const Tensor x = vec({0.3, -0.2, 0.5, 0.9}), w = vec({1.5, 0.5, -1, 2}), v = vec({0.1, 0.2, 0.3, 0.4});
  Numbers value[4];
  std::vector<Numbers> gradients[4];
  for (int depth = 0; depth < 4; ++depth) {
    Generator g(9);
    const auto innermost = [&](Inputs in) { return drop(exp(mul(in[0], v)), g); };
    const auto inner = [&](Inputs in) {
      const std::vector<Tensor> t{drop(mul(in[0], w), g)};
      return mul(depth >= 3 ? checkpoint(innermost, t) : innermost(t), v);
    };
    const auto outer = [&](Inputs in) {
      const std::vector<Tensor> t{square(in[0])};
      const Tensor a = depth >= 2 ? checkpoint(inner, t) : inner(t);
      const std::vector<Tensor> u{add(a, w)};
      return drop(depth >= 2 ? checkpoint(inner, u) : inner(u), g);
    };
    Tape tape;
    for (const Tensor& t : {x, w, v}) tape.watch(t);
    const std::vector<Tensor> in{x};
    const Tensor y = depth >= 1 ? checkpoint(outer, in) : outer(in);
    EXPECT_EQ(tape.size() == 1, depth >= 1);
    value[depth] = y.to_vector();
    const Gradients got = tape.backward(sum(y));
    for (const Tensor& t : {x, w, v}) gradients[depth].push_back(got[t].to_vector());
    EXPECT_EQ(g.state().stream, 5u);
    EXPECT_EQ(value[depth], value[0]) << depth;
    for (std::size_t i = 0; i < 3; ++i)
      for (std::size_t e = 0; e < 4; ++e)
        EXPECT_NEAR(gradients[depth][i][e], gradients[0][i][e], 1e-15 + 1e-14 * std::abs(gradients[0][i][e])) << depth;
  }
}

TEST(Checkpoint, AChainOfManyKeepsOneTensorEach) {
  const int n = scaled(2000, 200);
  const Tensor x = vec(Numbers(10, 0.5));
  Tape tape;
  tape.watch(x);
  Tensor y = x;
  for (int i = 0; i < n; ++i)
    y = checkpoint([](Inputs in) { return scale(exp(scale(in[0], 0.5)), 0.5); }, std::vector<Tensor>{y});
  EXPECT_EQ(tape.size(), static_cast<std::size_t>(n));
  EXPECT_EQ(tape.saved_bytes(), static_cast<std::size_t>(n) * 80);
  const Numbers dx = tape.backward(sum(y))[x].to_vector();
  EXPECT_TRUE(std::all_of(dx.begin(), dx.end(), [](double d) { return std::isfinite(d) && d >= 0; }));
}

// ---- failures -----------------------------------------------------------------------------------

TEST(Checkpoint, AFunctionThatThrowsLeavesTheTapeAsItWas) {
  const Tensor x = vec({3});
  Tape tape;
  tape.watch(x);
  const std::vector<Tensor> in{x};
  EXPECT_EQ(error_of([&] {
              (void)checkpoint(
                  [](Inputs i) -> Tensor {
                    (void)square(i[0]);
                    fail("fn: no");
                  },
                  in);
            }),
            "usage: fn: no");
  EXPECT_EQ(Tape::current(), &tape);
  EXPECT_EQ(tape.size(), 0u);
  EXPECT_EQ(tape.backward(square(x))[x].item(), 6);
}

TEST(Checkpoint, OnATapeThatHasPlayedIsNotRecorded) {
  const Tensor x = vec({3});
  Tape tape;
  tape.watch(x);
  (void)tape.backward(square(x));
  EXPECT_EQ(checkpoint([](Inputs i) { return square(i[0]); }, std::vector<Tensor>{x}).item(), 9);
  EXPECT_EQ(tape.size(), 1u);
}

}  // namespace
}  // namespace hilt
