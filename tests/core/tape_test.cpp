// What a tape records, how it adds gradients up, how it is misused, nests and reports; random
// graphs against gradients pushed back by hand.
#include "core/tape.h"
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <sstream>
#include <thread>
#include "tests/support/child.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/settings.h"
#include "tests/support/tiny_ops.h"

namespace hilt {
namespace {
using namespace tiny;

using Numbers = std::vector<double>;

// ---- a user's op, as a user would write it ------------------------------------------------------

/// Huber's loss of each element: x^2 / 2 within delta of zero, a line beyond.
class Huber final : public Function {
 public:
  explicit Huber(double delta) : delta_(delta) {}
  std::string_view name() const override { return "huber"; }
  Tensor forward(const Tensor& x) {
    check(delta_ > 0, "huber: delta ", delta_, " must be above 0");
    if (wants(0)) save(x);
    std::vector<double> y = x.to_vector();
    for (double& e : y) e = std::abs(e) <= delta_ ? e * e / 2 : delta_ * (std::abs(e) - delta_ / 2);
    return from_values(y, x.shape(), x.dtype());
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    const Tensor& x = saved(0);
    Tensor dx = empty_like(x);
    const double* const in = x.data<double>();
    double* const out = dx.mutable_data<double>();
    const std::vector<double> d = dy.to_vector();
    for (std::size_t i = 0; i < d.size(); ++i) out[i] = d[i] * std::clamp(in[i], -delta_, delta_);
    return {dx};
  }

 private:
  double delta_;
};
Tensor huber(const Tensor& x, double delta) { return apply(Huber(delta), x); }

TEST(Tape, DifferentiatesAUsersOpLikeOneOfOurs) {
  const Tensor x = vec({-3, -0.5, 0.25, 2});
  Tape tape;
  tape.watch(x);
  const Tensor loss = sum(huber(scale(x, 2), 1));
  EXPECT_DOUBLE_EQ(loss.item(), 5.5 + 0.5 + 0.125 + 3.5);
  EXPECT_EQ(tape.backward(loss)[x].to_vector(), Numbers({-2, -2, 1, 2}));
  EXPECT_EQ(error_of([&] { (void)huber(x, 0); }), "usage: huber: delta 0 must be above 0");
}

// ---- gradients of small expressions -------------------------------------------------------------

TEST(Tape, SumOfProducts) {
  const Tensor a = vec({1, 2, 3}), b = vec({5, 7, 11});
  Tape tape;
  tape.watch(a);
  tape.watch(b);
  const Gradients g = tape.backward(sum(add(mul(a, b), a)));
  EXPECT_EQ(g[a].to_vector(), Numbers({6, 8, 12}));
  EXPECT_EQ(g[b].to_vector(), Numbers({1, 2, 3}));
  EXPECT_EQ(g.size(), 2u);
}

TEST(Tape, ACotangentWeighsTheOutputs) {
  const Tensor x = vec({1, 2, 3});
  Tape tape;
  tape.watch(x);
  const Tensor y = square(x);
  EXPECT_EQ(tape.backward(y, vec({1, 10, 100}))[x].to_vector(), Numbers({2, 40, 600}));
}

TEST(Tape, AScalarOfAnyShapeStartsFromOne) {
  for (const Shape& shape : {Shape{}, {1}, {1, 1, 1}}) {
    const Tensor x = full(shape, 3, DType::f32);
    Tape tape;
    tape.watch(x);
    const Tensor dx = tape.backward(square(x))[x];
    EXPECT_EQ(dx.item(), 6);
    EXPECT_EQ(dx.shape(), shape);
    EXPECT_EQ(dx.dtype(), DType::f32);
  }
}

TEST(Tape, AWatchedTensorIsItsOwnLoss) {
  const Tensor x = vec({4});
  Tape tape;
  tape.watch(x);
  EXPECT_EQ(tape.backward(x)[x].item(), 1);
}

TEST(Tape, WatchingTwiceIsWatchingOnce) {
  const Tensor x = vec({4});
  Tape tape;
  tape.watch(x);
  tape.watch(x);
  const Gradients g = tape.backward(square(x));
  EXPECT_EQ(g.size(), 1u);
  EXPECT_EQ(g[x].item(), 8);
}

TEST(Tape, ATensorAndAnotherOnItsMemoryAreDifferentVariables) {
  const Tensor x = vec({2, 3}), same_memory = as_strided(x, {2}, {1}, 0);
  Tape tape;
  tape.watch(x);
  const Gradients g = tape.backward(sum(mul(x, same_memory)));
  EXPECT_EQ(g[x].to_vector(), Numbers({2, 3}));
  EXPECT_FALSE(g.has(same_memory));
}

// ---- one tensor used more than once -------------------------------------------------------------

TEST(TapeFanOut, TheSameTensorTwiceInOneOp) {
  const Tensor x = vec({2, 3});
  Tape tape;
  tape.watch(x);
  EXPECT_EQ(tape.backward(sum(mul(x, x)))[x].to_vector(), Numbers({4, 6}));
}

TEST(TapeFanOut, OneGradientHandedToBothInputs) {
  const Tensor x = vec({2, 3});
  Tape tape;
  tape.watch(x);
  const Tensor dy = vec({10, 20});
  EXPECT_EQ(tape.backward(add(x, x), dy)[x].to_vector(), Numbers({20, 40}));
  EXPECT_EQ(dy.to_vector(), Numbers({10, 20}));
}

TEST(TapeFanOut, ASumSharedWithAnotherInputIsNotWrittenTo) {
  // w = (a + b) + a: backward hands dy to the inner sum and to a, the inner sum hands the same on
  // to a and b, and then a's two parts are added up. In place, that would change b's.
  const Tensor a = vec({1}), b = vec({1}), dy = vec({1});
  Tape tape;
  tape.watch(a);
  tape.watch(b);
  const Gradients g = tape.backward(add(add(a, b), a), dy);
  EXPECT_EQ(g[a].item(), 2);
  EXPECT_EQ(g[b].item(), 1);
  EXPECT_EQ(dy.item(), 1);
}

TEST(TapeFanOut, WhatAnOpKeepsIsNotWrittenTo) {
  const Tensor x = vec({1, 2}), w = vec({10, 20});
  Tape tape;
  tape.watch(x);
  const Tensor loss = add(add(dot(x, w), dot(x, w)), dot(x, w));  // each hands out w itself
  EXPECT_EQ(tape.backward(loss)[x].to_vector(), Numbers({30, 60}));
  EXPECT_EQ(w.to_vector(), Numbers({10, 20}));
}

TEST(TapeFanOut, RepeatedAndTransposedGradientsAddUp) {
  const Tensor x = from_values(Numbers{1, 2, 3, 4, 5, 6}, {2, 3});
  Tape tape;
  tape.watch(x);
  const Tensor c = from_values(Numbers{1, 2, 3, 4, 5, 6}, {3, 2});
  const Tensor t = transpose(x);
  const Tensor loss = add(add(sum(x), sum(mul(t, c))), add(sum(transpose(t)), sum(x)));
  EXPECT_EQ(tape.backward(loss)[x].to_vector(), Numbers({4, 6, 8, 5, 7, 9}));
}

TEST(TapeFanOut, ManyUsesInOneOp) {
  const Tensor x = vec({1}), y = vec({5});
  Tape tape;
  tape.watch(x);
  const std::vector<Tensor> in{x, y, x, x, y};
  EXPECT_EQ(tape.backward(total(in))[x].item(), 3);
}

TEST(TapeFanOut, SixteenBitSumsRoundOncePerAddition) {
  for (DType t : {DType::f16, DType::bf16, DType::f32}) {
    const Tensor x = full({3}, 1, t);
    Tape tape;
    tape.watch(x);
    const Gradients g = tape.backward(sum(add(scale(x, 1.5), scale(x, 0.25))));
    EXPECT_EQ(g[x].to_vector(), Numbers({1.75, 1.75, 1.75})) << t;
    EXPECT_EQ(g[x].dtype(), t);
  }
}

/// Random graphs of the tiny ops, beside the same graphs on plain vectors with gradients pushed
/// back by hand.
class RandomGraph {
 public:
  explicit RandomGraph(unsigned seed) : random_(seed) {}

  void check() {
    constexpr std::size_t kSize = 6;  // [2, 3]
    const int leaves = 2 + pick(3), ops = 3 + pick(25);
    std::vector<Tensor> t;
    std::vector<Node> nodes;
    Tape tape;
    for (int i = 0; i < leaves; ++i) {
      Numbers v(kSize);
      for (double& e : v) e = std::uniform_real_distribution(-1.0, 1.0)(random_);
      t.push_back(from_values(v, {2, 3}));
      nodes.push_back({kLeaf, 0, 0, 0, v, Numbers(kSize)});
      if (i == 0 || pick(3)) tape.watch(t.back());
      nodes.back().watched = tape.knows(t.back());
    }
    for (int i = 0; i < ops; ++i) {
      const auto kind = static_cast<Kind>(1 + pick(4));
      const auto a = static_cast<std::size_t>(pick(static_cast<int>(t.size()))),
                 b = static_cast<std::size_t>(pick(static_cast<int>(t.size())));
      const double c = 0.25 * (pick(9) - 4);
      Node n{kind, a, b, c, Numbers(kSize), Numbers(kSize)};
      const Numbers &x = nodes[a].value, &y = nodes[b].value;
      for (std::size_t e = 0; e < kSize; ++e)
        n.value[e] = kind == kAdd ? x[e] + y[e] : kind == kMul ? x[e] * y[e] : kind == kScale ? c * x[e] : x[e];
      nodes.push_back(n);
      t.push_back(kind == kAdd     ? add(t[a], t[b])
                  : kind == kMul   ? mul(t[a], t[b])
                  : kind == kScale ? scale(t[a], c)
                                   : transpose(transpose(t[a])));
      nodes.back().watched = nodes[a].watched || ((kind == kAdd || kind == kMul) && nodes[b].watched);
      ASSERT_EQ(tape.knows(t.back()), nodes.back().watched);
    }
    std::size_t out = t.size() - 1;
    while (!nodes[out].watched) --out;
    Numbers dy(kSize);
    for (double& e : dy) e = std::uniform_real_distribution(-1.0, 1.0)(random_);
    const Tensor cotangent = from_values(dy, {2, 3});
    const Gradients g = tape.backward(t[out], cotangent);

    nodes[out].grad = dy;
    nodes[out].reached = true;
    for (std::size_t n = out + 1; n-- > 0;) {
      const Node& node = nodes[n];
      if (!node.reached || node.kind == kLeaf) continue;
      for (std::size_t e = 0; e < kSize; ++e) {
        Node &a = nodes[node.a], &b = nodes[node.b];
        const double d = node.grad[e], x = a.value[e], y = b.value[e];
        a.grad[e] += node.kind == kMul ? d * y : node.kind == kScale ? node.c * d : d;
        if (node.kind == kAdd) b.grad[e] += d;
        if (node.kind == kMul) b.grad[e] += d * x;
      }
      nodes[node.a].reached = true;
      if (node.kind == kAdd || node.kind == kMul) nodes[node.b].reached = true;
    }
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      ASSERT_EQ(t[n].to_vector(), nodes[n].value) << "the tensors themselves are as they were";
      const bool leaf = nodes[n].kind == kLeaf;
      ASSERT_EQ(g.has(t[n]), leaf && nodes[n].watched && nodes[n].reached);
      if (!g.has(t[n])) continue;
      const Numbers got = g[t[n]].to_vector();
      for (std::size_t e = 0; e < kSize; ++e)
        ASSERT_NEAR(got[e], nodes[n].grad[e], 1e-11 * (1 + std::abs(nodes[n].grad[e])));
    }
    ASSERT_EQ(cotangent.to_vector(), dy);
  }

 private:
  enum Kind { kLeaf, kAdd, kMul, kScale, kTranspose };
  struct Node {
    Kind kind;
    std::size_t a, b;
    double c;
    Numbers value, grad;
    bool watched = false, reached = false;
  };
  int pick(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  std::mt19937 random_;
};

TEST(TapeFanOut, RandomGraphsAgreeWithGradientsPushedBackByHand) {
  for (unsigned seed = 0; seed < scaled(2000u, 200u); ++seed) {
    RandomGraph(seed).check();
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
  }
}

// ---- what is recorded ---------------------------------------------------------------------------

TEST(TapeRecording, UnwatchedWorkIsNotKept) {
  const Tensor x = vec({1, 2}), w = vec({3, 4});
  Tape tape;
  (void)square(x);
  EXPECT_EQ(tape.size(), 0u);
  tape.watch(w);
  const Tensor y = exp(square(mul(x, x)));
  EXPECT_EQ(tape.size(), 0u);
  EXPECT_FALSE(tape.knows(y));
  const Tensor z = mul(y, w);
  EXPECT_TRUE(tape.knows(z));
  EXPECT_EQ(tape.size(), 1u);
  EXPECT_EQ(tape.saved_bytes(), 16u);  // y alone: w's value is not asked for
}

TEST(TapeRecording, WithoutATapeOpsAreFunctions) {
  EXPECT_EQ(Tape::current(), nullptr);
  EXPECT_EQ(square(vec({3})).item(), 9);
}

TEST(TapeRecording, WhatIsWatchedTooLateHasNoPast) {
  const Tensor x = vec({1});
  Tape tape;
  const Tensor y = square(x);
  tape.watch(x);
  EXPECT_FALSE(tape.knows(y));
  EXPECT_TRUE(tape.knows(x));
}

/// Keeps what wants() said.
struct Wants final : Function {
  std::vector<bool>* said;
  explicit Wants(std::vector<bool>* s) : said(s) {}
  std::string_view name() const override { return "wants"; }
  Tensor forward(std::span<const Tensor> in) {
    said->assign(1, wants_any());
    for (std::size_t i = 0; i < in.size(); ++i) said->push_back(wants(i));
    return clone(in[0]);
  }
  std::vector<Tensor> backward(const Tensor&) override { return {}; }
};

TEST(TapeRecording, WantsIsKnownBeforeForward) {
  std::vector<Tensor> in;
  for (int i = 0; i < 70; ++i) in.push_back(vec({1}));
  std::vector<bool> said;
  const auto wanted = [&](const std::vector<std::size_t>& watched) {
    Tape tape;
    for (std::size_t i : watched) tape.watch(in[i]);
    (void)hilt::apply(Wants(&said), std::span<const Tensor>(in));
    return said;
  };
  EXPECT_EQ(std::count(said.begin(), said.end(), true), 0);
  std::vector<bool> expected(71);
  EXPECT_EQ(wanted({}), expected);
  expected[0] = expected[1] = expected[63] = true;  // any, 0 and 62
  EXPECT_EQ(wanted({0, 62}), expected);
  expected.assign(71, false);
  expected[0] = true;
  for (std::size_t i = 63; i < 70; ++i) expected[i + 1] = true;  // beyond the 63rd they share one answer
  EXPECT_EQ(wanted({69}), expected);
  EXPECT_EQ(wanted({63}), expected);
  (void)hilt::apply(Wants(&said), std::span<const Tensor>(in));
  EXPECT_EQ(std::count(said.begin(), said.end(), true), 0);
}

/// Computes x^4 by ops of its own; what they do is its own business.
struct Fourth final : Function {
  std::string_view name() const override { return "fourth"; }
  Tensor forward(const Tensor& x) {
    EXPECT_EQ(Tape::current(), nullptr);
    save(x);
    return square(square(x));
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    EXPECT_EQ(Tape::current(), nullptr);
    const Tensor& x = saved(0);
    return {scale(mul(dy, mul(x, mul(x, x))), 4)};
  }
};

TEST(TapeRecording, AnOpOfOpsIsOneNode) {
  const Tensor x = vec({2});
  Tape tape;
  tape.watch(x);
  const Tensor y = apply(Fourth{}, x);
  EXPECT_EQ(tape.size(), 1u);
  EXPECT_EQ(Tape::current(), &tape);
  EXPECT_EQ(tape.backward(y)[x].item(), 32);
  EXPECT_EQ(Tape::current(), nullptr);
}

TEST(TapeRecording, ForwardMustReturnATensorOfItsOwn) {
  struct Same final : Function {
    std::string_view name() const override { return "same"; }
    Tensor forward(const Tensor& x) { return x; }
    std::vector<Tensor> backward(const Tensor& dy) override { return {dy}; }
  };
  struct Nothing final : Function {
    std::string_view name() const override { return "nothing"; }
    Tensor forward(const Tensor&) { return {}; }
    std::vector<Tensor> backward(const Tensor& dy) override { return {dy}; }
  };
  const Tensor x = vec({2});
  Tape tape;
  tape.watch(x);
  EXPECT_EQ(error_of([&] { (void)apply(Same{}, x); }),
            "usage: same: forward must return a tensor of its own, not one of its inputs");
  EXPECT_EQ(error_of([&] { (void)apply(Nothing{}, x); }), "usage: nothing: forward returned an undefined tensor");
  EXPECT_EQ(tape.size(), 0u);
}

TEST(TapeRecording, AForwardThatThrowsLeavesTheTapeAsItWas) {
  struct Throws final : Function {
    std::string_view name() const override { return "throws"; }
    Tensor forward(const Tensor& x) {
      save(x);
      fail("throws: no");
    }
    std::vector<Tensor> backward(const Tensor& dy) override { return {dy}; }
  };
  const Tensor x = vec({2});
  Tape tape;
  tape.watch(x);
  const Tensor y = scale(x, 3);
  EXPECT_EQ(error_of([&] { (void)apply(Throws{}, y); }), "usage: throws: no");
  EXPECT_EQ(Tape::current(), &tape);
  EXPECT_EQ(tape.size(), 1u);
  EXPECT_EQ(tape.backward(scale(y, 5))[x].item(), 15);
}

// ---- misuse -------------------------------------------------------------------------------------

TEST(TapeMisuse, WatchingWhatHasNoGradient) {
  Tape tape;
  EXPECT_EQ(error_of([&] { tape.watch({}); }), "usage: Tape: watch of an undefined tensor");
  for (DType t : {DType::i64, DType::i32, DType::u8})
    EXPECT_EQ(error_of([&] { tape.watch(zeros({1}, t)); }),
              "usage: Tape: watch of a tensor of type " + std::string(name_of(t)) + "; only floats have gradients");
}

TEST(TapeMisuse, ALossThatIsNoScalar) {
  const Tensor x = vec({1, 2});
  Tape tape;
  tape.watch(x);
  const Tensor y = square(x);
  EXPECT_EQ(error_of([&] { tape.backward(y); }),
            "usage: Tape: backward of [2], which is no scalar; take its sum() or mean(), or name a gradient to start "
            "from: backward(y, dy)");
  EXPECT_EQ(tape.backward(sum(y))[x].to_vector(), Numbers({2, 4}));  // no harm done
}

TEST(TapeMisuse, ALossThatReachesNothing) {
  const Tensor x = vec({1});
  Tape tape;
  tape.watch(x);
  const Tensor before = square(vec({2}));
  Tensor paused;
  {
    const Tape::Pause pause;
    paused = square(x);
  }
  for (const Tensor& loss : {before, paused, vec({3})})
    EXPECT_EQ(error_of([&] { tape.backward(loss); }),
              "usage: Tape: [1] does not depend on a watched tensor; watch() before computing it, and compute it with "
              "ops (not under Pause, "
              "not from copied-out numbers)");
  EXPECT_EQ(error_of([&] { tape.backward(sum(before)); }).substr(0, 42), "usage: Tape: a scalar does not depend on a");
  EXPECT_EQ(tape.backward(square(x))[x].item(), 2);
}

TEST(TapeMisuse, ASecondDerivativeIsRefusedByName) {
  const Tensor x = vec({1, 2}), w = vec({3, 4});
  const auto gradient_within = [&](Tape& outer, const Tensor& of) {
    outer.watch(x);
    Tape inner;
    inner.watch(of);
    return inner.backward(sum(mul(square(of), of)))[of];
  };
  Tape outer;
  const Tensor g = gradient_within(outer, x);
  EXPECT_EQ(g.to_vector(), Numbers({3, 12}));
  EXPECT_EQ(error_of([&] { outer.backward(sum(square(g))); }),
            "usage: Tape: this asks for a second derivative, the gradient of a gradient, which no tape computes; "
            "detach() the gradient if it is to count as a constant");
  Tape first;
  EXPECT_EQ(first.size(), 0u);
  const Tensor again = clone(gradient_within(first, x));
  EXPECT_EQ(first.backward(sum(mul(again, x)))[x].to_vector(), Numbers({3, 12}));
  Tape other;  // knows nothing of w
  EXPECT_EQ(other.backward(sum(mul(gradient_within(other, w), x)))[x].to_vector(), Numbers({27, 48}));
  Tape twice;  // of two tensors with one gradient
  twice.watch(x), twice.watch(w);
  Gradients both;
  {
    Tape inner;
    inner.watch(x), inner.watch(w);
    both = inner.backward(sum(add(x, w)));
  }
  EXPECT_EQ(twice.backward(add(sum(mul(x, w)), sum(clone(both[x]))))[w].to_vector(), Numbers({1, 2}));
}

TEST(TapeMisuse, WhatATapeWithinRecordsAloneIsNeverLost) {
  const Tensor x = vec({2}), w = vec({5});
  const auto refused = [&](const std::function<Tensor()>& part) {
    Tape outer;
    outer.watch(w);
    const Tensor y = part();
    return error_of([&] { outer.backward(add(sum(y), sum(w))); }).substr(0, 41);
  };
  const auto inner_gradient = [&](const Tensor& of, const Tensor& by) {
    Tape inner;
    inner.watch(of);
    return inner.backward(sum(square(mul(of, by))))[of];
  };
  const auto within = [&](const auto& f) {
    Tape inner;
    inner.watch(x);
    return f();
  };
  const auto lost = [&](const auto& f) { return refused([&] { return within(f); }); };
  EXPECT_EQ(refused([&] { return inner_gradient(x, w); }), "usage: Tape: this asks for a second deriv");
  EXPECT_EQ(refused([&] { return inner_gradient(x, clone(w)); }), "nothing");  // nothing of w in it
  EXPECT_EQ(lost([&] { return mul(x, w); }), "usage: Tape: a tape within this one alone");
  EXPECT_EQ(lost([&] { return square(w); }), "usage: Tape: a tape within this one alone");
  EXPECT_EQ(lost([&] {
              const Tensor in[] = {w};
              return checkpoint([](std::span<const Tensor> t) { return square(t[0]); }, in);
            }),
            "usage: Tape: a tape within this one alone");
  EXPECT_EQ(lost([&] { return clone(square(w)); }), "nothing");
  EXPECT_EQ(lost([&] { return square(x); }), "nothing");
  Tape outer;  // of three, the outermost
  outer.watch(w);
  const Tensor y = within([&] { return within([&] { return mul(x, w); }); });
  EXPECT_NE(error_of([&] { outer.backward(sum(add(y, w))); }), "nothing");
}

TEST(TapeMisuse, ACotangentOfAnotherShapeOrType) {
  const Tensor x = vec({1, 2});
  Tape tape;
  tape.watch(x);
  const Tensor y = square(x);
  EXPECT_EQ(error_of([&] { tape.backward(y, vec({1})); }), "usage: Tape: a gradient f64[1] for an output f64[2]");
  EXPECT_EQ(error_of([&] { tape.backward(y, ones({2})); }), "usage: Tape: a gradient f32[2] for an output f64[2]");
  EXPECT_EQ(tape.backward(y, vec({1, 1}))[x].to_vector(), Numbers({2, 4}));
}

TEST(TapeMisuse, BackwardTwiceAndRecordingAfterwards) {
  const char* const kTwice =
      "usage: Tape: backward twice; a tape plays once and then no longer listens, so record on a new one";
  const Tensor x = vec({1});
  Tape tape;
  tape.watch(x);
  const Tensor y = square(x);
  tape.backward(y);
  EXPECT_EQ(error_of([&] { tape.backward(y); }), kTwice);
  const Tensor later = square(x);  // it listens no more: neither an error nor recorded
  EXPECT_EQ(later.item(), 1);
  EXPECT_FALSE(tape.knows(later));
  EXPECT_EQ(tape.size(), 1u);
  EXPECT_EQ(error_of([&] { tape.backward(later); }), kTwice);
}

TEST(TapeMisuse, AnotherThread) {
  const Tensor x = vec({1});
  Tape tape;
  tape.watch(x);
  const Tensor y = square(x);
  std::string watching, playing;
  std::jthread([&] {
    EXPECT_EQ(Tape::current(), nullptr);
    EXPECT_EQ(square(x).item(), 1);  // not recorded
    watching = error_of([&] { tape.watch(y); });
    playing = error_of([&] { tape.backward(y); });
  }).join();
  EXPECT_EQ(watching, "usage: Tape: used from another thread than it was made on; a tape is one thread's");
  EXPECT_EQ(playing, watching);
  EXPECT_EQ(tape.size(), 1u);
  EXPECT_EQ(tape.backward(y)[x].item(), 2);
}

TEST(TapeMisuse, WritingToWhatWasSaved) {
  Tensor x = vec({1, 2, 3});
  Tape tape;
  tape.watch(x);
  const Tensor y = sum(square(x));
  Tensor view = as_strided(x, {1}, {1}, 2);
  view.mutable_data<double>()[0] = 5;
  EXPECT_EQ(error_of([&] { tape.backward(y); }),
            "usage: square: a tensor saved for backward, f64[3], was written to after the forward pass (version 2, "
            "saved at 1); write before "
            "the op runs, or to a clone");
}

TEST(TapeMisuse, WritingBeforeTheOpOrToACloneIsFine) {
  Tensor x = vec({1, 2, 3});
  Tape tape;
  tape.watch(x);
  x.mutable_data<double>()[0] = 4;
  const Tensor y = sum(square(x));
  clone(x).mutable_data<double>()[0] = 100;
  EXPECT_EQ(tape.backward(y)[x].to_vector(), Numbers({8, 4, 6}));
  x.mutable_data<double>()[0] = 7;  // and afterwards nobody minds
}

TEST(TapeMisuse, WritingToWhatNobodySavedIsFine) {
  Tensor x = vec({1, 2});
  Tape tape;
  tape.watch(x);
  const Tensor y = sum(scale(x, 3));
  x.mutable_data<double>()[0] = 9;
  EXPECT_EQ(tape.backward(y)[x].to_vector(), Numbers({3, 3}));
}

/// Returns what it is told to.
struct Returns final : Function {
  std::vector<Tensor> gradients;
  explicit Returns(std::vector<Tensor> g) : gradients(std::move(g)) {}
  std::string_view name() const override { return "returns"; }
  Tensor forward(const Tensor& a, const Tensor&) { return clone(a); }
  std::vector<Tensor> backward(const Tensor&) override { return gradients; }
};

std::string error_of_returning(std::vector<Tensor> gradients, bool watch_second = true) {
  const Tensor a = vec({1, 2}), b = vec({1, 2, 3}, DType::f32);
  Tape tape;
  tape.watch(a);
  if (watch_second) tape.watch(b);
  const Tensor y = apply(Returns(std::move(gradients)), a, b);
  return error_of([&] {
    const Gradients g = tape.backward(y, vec({1, 1}));
    EXPECT_EQ(g.size(), watch_second ? 2u : 1u);
  });
}

TEST(TapeMisuse, ABackwardThatReturnsTheWrongThing) {
  const Tensor da = vec({1, 2}), db = vec({1, 2, 3}, DType::f32);
  EXPECT_EQ(error_of_returning({da, db}), "nothing");
  EXPECT_EQ(error_of_returning({}), "usage: returns: backward returned 0 gradients for 2 inputs");
  EXPECT_EQ(error_of_returning({da}), "usage: returns: backward returned 1 gradients for 2 inputs");
  EXPECT_EQ(error_of_returning({da, db, db}), "usage: returns: backward returned 3 gradients for 2 inputs");
  EXPECT_EQ(error_of_returning({Tensor{}, db}),
            "usage: returns: backward returned no gradient for input 0, which is f64[2] and wanted");
  EXPECT_EQ(error_of_returning({da, Tensor{}}),
            "usage: returns: backward returned no gradient for input 1, which is f32[3] and wanted");
  EXPECT_EQ(error_of_returning({db, da}),
            "usage: returns: backward returned the wrong shape or type for input 0, which is f64[2] and wanted");
  EXPECT_EQ(error_of_returning({da, vec({1, 2, 3})}),
            "usage: returns: backward returned the wrong shape or type for input 1, which is f32[3] and wanted");
  EXPECT_EQ(error_of_returning({from_values(Numbers{1, 2}, {2, 1}), db}),
            "usage: returns: backward returned the wrong shape or type for input 0, which is f64[2] and wanted");
  // What nobody asked for may be anything.
  EXPECT_EQ(error_of_returning({da, Tensor{}}, false), "nothing");
  EXPECT_EQ(error_of_returning({da, da}, false), "nothing");
}

TEST(TapeMisuse, AskingForMoreThanWasSaved) {
  struct Asks final : Function {
    std::string_view name() const override { return "asks"; }
    Tensor forward(const Tensor& x) {
      save(x);
      return clone(x);
    }
    std::vector<Tensor> backward(const Tensor&) override { return {saved(1)}; }
  };
  const Tensor x = vec({1});
  Tape tape;
  tape.watch(x);
  const Tensor y = apply(Asks{}, x);
  EXPECT_EQ(error_of([&] { tape.backward(y); }), "usage: asks: saved(1) of 1 saved tensors");
}

TEST(TapeMisuse, ABackwardThatThrowsEndsTheTapeAndLeaksNothing) {
  const MemoryStats before = memory_stats();
  {
    Tensor x = vec(Numbers(1000, 1.0));
    Tape tape;
    tape.watch(x);
    Tensor y = square(x), z = y;
    for (int i = 0; i < 5; ++i) z = exp(scale(z, 0.1));
    y.mutable_data<double>();  // not saved: fine
    x.mutable_data<double>();  // saved by the first node, which plays last
    EXPECT_EQ(error_of([&] { tape.backward(sum(z)); }).substr(0, 38), "usage: square: a tensor saved for back");
    EXPECT_EQ(Tape::current(), nullptr);
    EXPECT_EQ(error_of([&] { tape.backward(z); }).substr(0, 20), "usage: Tape: backwar");
    EXPECT_EQ(tape.saved_bytes(), 0u);
    std::ostringstream text;
    text << tape;
  }
  EXPECT_EQ(memory_stats().live, before.live);
}

// ---- which tape listens -------------------------------------------------------------------------

TEST(TapeNesting, TheInnermostTapeListens) {
  const Tensor x = vec({3});
  Tape outer;
  outer.watch(x);
  Tensor inner_gradient;
  {
    Tape inner;
    EXPECT_EQ(Tape::current(), &inner);
    inner.watch(x);
    const Tensor y = square(x);
    EXPECT_EQ(inner.size(), 1u);
    EXPECT_EQ(outer.size(), 0u);
    EXPECT_TRUE(outer.knows(y));  // and that it cannot play through it
    inner_gradient = inner.backward(y)[x];
  }
  EXPECT_EQ(Tape::current(), &outer);
  EXPECT_EQ(inner_gradient.item(), 6);
  const Tensor z = mul(x, clone(inner_gradient));  // a number for the outer tape
  EXPECT_EQ(outer.backward(z)[x].item(), 6);
}

TEST(TapeNesting, OneThatWasPlayedNoLongerStandsBeforeTheOuter) {
  const Tensor x = vec({3});
  Tape outer;
  outer.watch(x);
  Tape inner;
  inner.watch(x);
  const Tensor slope = clone(inner.backward(square(x))[x]);
  EXPECT_EQ(Tape::current(), &outer);  // though inner is alive
  const Tensor z = mul(x, slope);
  EXPECT_FALSE(inner.knows(z));
  EXPECT_EQ(outer.backward(z)[x].item(), 6);
  EXPECT_EQ(Tape::current(), nullptr);
}

TEST(TapeNesting, PauseStopsRecordingAndNests) {
  const Tensor x = vec({3});
  Tape tape;
  tape.watch(x);
  {
    const Tape::Pause pause;
    EXPECT_EQ(Tape::current(), nullptr);
    (void)square(x);
    {
      const Tape::Pause again;
      (void)square(x);
    }
    EXPECT_EQ(Tape::current(), nullptr);
    {
      Tape fresh;  // listens although its surroundings are paused
      fresh.watch(x);
      EXPECT_EQ(fresh.backward(square(x))[x].item(), 6);
    }
    EXPECT_EQ(Tape::current(), nullptr);
  }
  EXPECT_EQ(Tape::current(), &tape);
  EXPECT_EQ(tape.size(), 0u);
}

TEST(TapeNesting, TapesMayDieInAnyOrder) {
  const Tensor x = vec({3});
  const std::vector<std::vector<std::size_t>> orders{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    std::vector<std::unique_ptr<Tape>> tapes;
    for (int i = 0; i < 3; ++i) tapes.push_back(std::make_unique<Tape>());
    for (std::size_t dies : order) {
      tapes[dies].reset();
      const auto last = std::find_if(tapes.rbegin(), tapes.rend(), [](const auto& t) { return t != nullptr; });
      ASSERT_EQ(Tape::current(), last == tapes.rend() ? nullptr : last->get());
      if (!Tape::current()) continue;
      Tape::current()->watch(x);
      ASSERT_TRUE(Tape::current()->knows(square(x)));
    }
  }
}

TEST(TapeNesting, ATapeMayDieOnAnotherThread) {
  const Tensor x = ones({3}, DType::f64);
  const auto dies_elsewhere = [](std::unique_ptr<Tape>& tape) { std::jthread([&] { tape.reset(); }); };
  auto alone = std::make_unique<Tape>();
  alone->watch(x);
  dies_elsewhere(alone);
  EXPECT_EQ(Tape::current(), nullptr);
  (void)square(x);  // reads whichever tape listens

  Tape outer;
  outer.watch(x);
  auto inner = std::make_unique<Tape>();
  {
    const Tape::Pause pause;  // remembers a tape that is gone when it ends
    dies_elsewhere(inner);
  }
  EXPECT_EQ(Tape::current(), &outer);
  const Tensor y = square(x);
  EXPECT_TRUE(outer.knows(y));

  std::unique_ptr<Tape> orphan;  // and after the thread that it was made on
  std::jthread([&] { orphan = std::make_unique<Tape>(); }).join();
  orphan.reset();
  EXPECT_EQ(Tape::current(), &outer);
}

TEST(TapeNesting, ThreadsHaveTheirOwn) {
  Tape tape;
  const Tensor x = vec({3});
  tape.watch(x);
  std::jthread([&] {
    EXPECT_EQ(Tape::current(), nullptr);
    Tape mine;
    mine.watch(x);
    EXPECT_EQ(mine.backward(square(x))[x].item(), 6);
  }).join();
  EXPECT_EQ(Tape::current(), &tape);
  EXPECT_EQ(tape.size(), 0u);
}

// ---- gradients as values ------------------------------------------------------------------------

Gradients gradients_of(const Tensor& x, double factor) {
  Tape tape;
  tape.watch(x);
  return tape.backward(sum(scale(x, factor)));
}

TEST(Gradients, KnowWhatTheyHave) {
  const Tensor x = vec({1, 2}), y = vec({1, 2}), unused = vec({1});
  Tape tape;
  for (const Tensor& t : {x, y, unused}) tape.watch(t);
  const Tensor middle = square(x);
  const Gradients g = tape.backward(sum(add(middle, y)));
  EXPECT_EQ(g.size(), 2u);
  EXPECT_TRUE(g.has(x) && g.has(y) && !g.has(unused) && !g.has(middle) && !g.has({}));
  EXPECT_EQ(error_of([&] { (void)g[unused]; }),
            "usage: Gradients: [1] was not watched, or the loss does not depend on it");
  EXPECT_EQ(error_of([&] { (void)g[middle]; }),
            "usage: Gradients: [2] was not watched, or the loss does not depend on it");
  EXPECT_EQ(Gradients{}.size(), 0u);
}

TEST(Gradients, AddUpWithoutTouchingTheirSources) {
  const Tensor x = vec({1, 2}), y = vec({3});
  const Gradients a = gradients_of(x, 2), b = gradients_of(x, 5), c = gradients_of(y, 7);
  Gradients total = a;
  total += b;
  total += c;
  EXPECT_EQ(total[x].to_vector(), Numbers({7, 7}));
  EXPECT_EQ(total[y].item(), 7);
  EXPECT_EQ((a + b + b)[x].to_vector(), Numbers({12, 12}));
  EXPECT_EQ((a + a)[x].to_vector(), Numbers({4, 4}));
  EXPECT_EQ(a[x].to_vector(), Numbers({2, 2}));
  EXPECT_EQ(b[x].to_vector(), Numbers({5, 5}));
  Gradients from_nothing;
  from_nothing += a;
  from_nothing += b;  // must not add in place to what a holds too
  EXPECT_EQ(from_nothing[x].to_vector(), Numbers({7, 7}));
  EXPECT_EQ(a[x].to_vector(), Numbers({2, 2}));
}

TEST(Gradients, SetReplacesAndChecksTheShape) {
  const Tensor x = vec({1, 2}), y = vec({1});
  Gradients g = gradients_of(x, 2);
  const Gradients kept = g;
  g.set(x, vec({8, 9}));
  EXPECT_EQ(g[x].to_vector(), Numbers({8, 9}));
  EXPECT_EQ(kept[x].to_vector(), Numbers({2, 2}));
  g.set(y, vec({4}));
  EXPECT_EQ(g.size(), 2u);
  EXPECT_EQ(error_of([&] { g.set(x, vec({1})); }), "usage: Gradients: a gradient [1] for a tensor [2]");
}

TEST(Gradients, MicroBatchesAddUpToTheWhole) {
  const Tensor w = vec({0.5, -1, 2, 3});
  Gradients parts;
  for (double c : {1.0, 0.25, 4.0}) {
    Tape tape;
    tape.watch(w);
    parts += tape.backward(sum(scale(square(w), c)));
  }
  Tape tape;
  tape.watch(w);
  const Tensor s = square(w);
  EXPECT_EQ(tape.backward(sum(add(add(s, scale(s, 0.25)), scale(s, 4))))[w].to_vector(), parts[w].to_vector());
}

// ---- looking at a tape --------------------------------------------------------------------------

TEST(TapeReport, CountsEachStorageOnce) {
  const Tensor x = vec(Numbers(100, 1.0)), half = as_strided(x, {50}, {1}, 0);
  Tape tape;
  tape.watch(x);
  tape.watch(half);
  const Tensor a = mul(x, x);     // keeps x twice
  const Tensor b = square(x);     // keeps it again
  const Tensor c = square(half);  // and as a view
  const Tensor d = exp(b);        // keeps its own output
  const std::vector<NodeReport> report = tape.report();
  ASSERT_EQ(report.size(), 4u);
  const std::size_t saved[] = {800, 800, 800, 800}, unique[] = {800, 0, 0, 800};
  const char* names[] = {"mul", "square", "square", "exp"};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(report[i].name, names[i]);
    EXPECT_EQ(report[i].saved_bytes, saved[i]) << i;
    EXPECT_EQ(report[i].unique_bytes, unique[i]) << i;
    EXPECT_EQ(report[i].dtype, DType::f64);
    EXPECT_EQ(report[i].forward_ms, 0);
  }
  EXPECT_EQ(report[2].output, (Shape{50}));
  EXPECT_EQ(tape.saved_bytes(), 1600u);
  (void)a, (void)c, (void)d;
}

TEST(TapeReport, PrintsOneLineANodeAndTheSum) {
  const Tensor x = ones({2, 3}), w = ones({2, 3});
  Tape tape;
  tape.watch(x);
  tape.watch(w);
  const Tensor loss = sum(mul(x, w));
  std::ostringstream text;
  text << tape;
  EXPECT_EQ(text.str(),
            "mul                          -> f32[2, 3]                saves           48 B, new           48 B\n"
            "sum                          -> f32[]                    saves            0 B, new            0 B\n"
            "2 ops, 48 B saved\n");
  tape.backward(loss);
  EXPECT_TRUE(tape.report().empty());  // a tape that does not profile forgets
  EXPECT_EQ(tape.saved_bytes(), 0u);
}

TEST(TapeReport, AProfileKnowsTimesShapesAndMemoryOfBothPasses) {
  const Tensor x = vec(Numbers(1000, 1.0)), w = vec(Numbers(1000, 2.0));
  Tape tape(Tape::Options{.profile = true});
  tape.watch(x);
  const Tensor y = mul(x, w);
  const std::size_t live_after_mul = memory_stats().live;
  const Tensor loss = sum(exp(y));
  std::vector<NodeReport> before = tape.report();
  ASSERT_EQ(before.size(), 3u);
  EXPECT_EQ(before[0].inputs, (std::vector<Shape>{{1000}, {1000}}));
  EXPECT_EQ(before[0].forward_live, live_after_mul);
  EXPECT_EQ(before[2].inputs, (std::vector<Shape>{{1000}}));
  for (const NodeReport& n : before) {
    EXPECT_GT(n.forward_ms, 0);
    EXPECT_EQ(n.backward_ms, 0);
  }
  EXPECT_EQ(tape.saved_bytes(), 16000u);
  tape.backward(loss);
  const std::vector<NodeReport> after = tape.report();
  ASSERT_EQ(after.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(after[i].name, before[i].name);
    EXPECT_EQ(after[i].saved_bytes, before[i].saved_bytes);
    EXPECT_EQ(after[i].unique_bytes, before[i].unique_bytes);
    EXPECT_EQ(after[i].forward_ms, before[i].forward_ms);
    EXPECT_GT(after[i].backward_ms, 0);
    EXPECT_GT(after[i].backward_live, 0u);
  }
  EXPECT_EQ(tape.saved_bytes(), 0u);
  std::ostringstream text;
  text << tape;
  EXPECT_NE(text.str().find(" ms  backward "), std::string::npos);
  EXPECT_NE(text.str().find("3 ops, 16000 B saved until backward played\n"), std::string::npos);
}

TEST(TapeReport, ANodeThatIsNotReachedHasNoBackwardTime) {
  const Tensor x = vec({1});
  Tape tape(Tape::Options{.profile = true});
  tape.watch(x);
  const Tensor loss = square(x), aside = exp(x);
  tape.backward(loss);
  EXPECT_GT(tape.report()[0].backward_ms, 0);
  EXPECT_EQ(tape.report()[1].backward_ms, 0);
  (void)aside;
}

TEST(TapeReport, WhatANodeSavedIsFreeOnceItHasPlayed) {
  /// Notes what is alive when its turn comes.
  struct Notes final : Function {
    std::vector<std::size_t>* kept;
    explicit Notes(std::vector<std::size_t>* k) : kept(k) {}
    std::string_view name() const override { return "notes"; }
    Tensor forward(const Tensor& x) {
      save(clone(x));
      return clone(x);
    }
    std::vector<Tensor> backward(const Tensor& dy) override {
      kept->push_back(memory_stats().live);
      return {dy};
    }
  };
  std::vector<std::size_t> kept;
  const Tensor x = vec(Numbers(125, 1.0));
  Tape tape;
  tape.watch(x);
  Tensor y = x;
  for (int i = 0; i < 4; ++i) y = apply(Notes(&kept), y);
  const Tensor dy = vec(Numbers(125, 1.0));
  tape.backward(y, dy);
  const std::size_t last = memory_stats().live + 1000;
  EXPECT_EQ(kept, (std::vector<std::size_t>{last + 3000, last + 2000, last + 1000, last}));
}

TEST(TapeReport, NodesTheLossDoesNotNeedAreFreedToo) {
  const Tensor x = vec(Numbers(100, 1.0));
  Tape tape;
  tape.watch(x);
  const std::size_t before = memory_stats().live;
  const Tensor aside = square(exp(x));  // of which 800 bytes are kept for backward, and 800 here
  const Tensor loss = sum(scale(x, 2));
  EXPECT_EQ(memory_stats().live, before + 1600 + loss.bytes());
  const Gradients g = tape.backward(loss);
  EXPECT_EQ(memory_stats().live, before + 800 + loss.bytes() + g[x].bytes());
  (void)aside;
}

// ---- large and many -----------------------------------------------------------------------------

/// y = x: as cheap as an op can be.
struct Step final : Function {
  std::string_view name() const override { return "step"; }
  Tensor forward(const Tensor& x) { return as_strided(x, x.shape(), x.strides(), x.offset()); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {dy}; }
};

TEST(TapeScale, AMillionNodesInASmallStack) {
  if (!in_child({.stack = 256 << 10})) return;
  const int n = scaled(1000000, 100000);
  const Tensor x = vec({1}), half = vec({0.5});
  const std::size_t live = memory_stats().live;
  {
    Tape tape;
    tape.watch(x);
    Tensor y = x;
    for (int i = 0; i < n; ++i)
      y = i % 1000 == 0 ? add(scale(square(y), 0.5), half) : apply(Step{}, y);  // stays at 1, and so does the slope
    EXPECT_EQ(tape.size(), static_cast<std::size_t>(n + n / 1000 * 2));
    EXPECT_EQ(tape.backward(y)[x].item(), 1);
  }
  {
    Tape tape;  // one that is destroyed without being played
    tape.watch(x);
    Tensor y = x;
    for (int i = 0; i < n; ++i) y = i % 100 ? apply(Step{}, y) : exp(scale(y, 1e-3));
  }
  EXPECT_EQ(memory_stats().live, live);
}

TEST(TapeScale, AChainMultipliesItsFactors) {
  const Tensor x = vec({1});
  Tape tape;
  tape.watch(x);
  Tensor y = x;
  for (int i = 0; i < 1000; ++i) y = scale(y, i % 2 ? 2 : 0.5);
  y = scale(y, 3);
  EXPECT_EQ(tape.backward(y)[x].item(), 3);
}

TEST(TapeScale, OneTensorUsedAThousandTimes) {
  const Tensor x = vec({1, 2});
  Tape tape;
  tape.watch(x);
  Tensor y = scale(x, 0);
  for (int i = 1; i <= 1000; ++i) y = add(y, scale(x, i));
  EXPECT_EQ(tape.backward(sum(y))[x].to_vector(), Numbers({500500, 500500}));
}

TEST(TapeScale, EightThreadsOfAThousandGraphs) {
  const MemoryStats before = memory_stats();
  const Tensor shared = vec({0.5, -1, 2});
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < scaled(1000, 100); ++i) {
          const Tensor mine = vec({1.0 + t, 2, 3.0 + i});
          Tape tape(Tape::Options{.profile = i % 10 == 0});
          tape.watch(mine);
          tape.watch(shared);  // read by all, saved by all
          const std::vector<Tensor> in{mine};
          const Tensor part = checkpoint([&](std::span<const Tensor> x) { return mul(square(x[0]), shared); }, in);
          const Tensor loss = sum(add(part, mul(shared, shared)));
          const Gradients g = tape.backward(loss);
          const Numbers m = mine.to_vector(), s = shared.to_vector(), dm = g[mine].to_vector(),
                        ds = g[shared].to_vector();
          for (std::size_t e = 0; e < 3; ++e) wrong += dm[e] != 2 * m[e] * s[e] || ds[e] != m[e] * m[e] + 2 * s[e];
        }
      });
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(memory_stats().live, before.live + shared.bytes());
}

TEST(TapeScale, TenThousandStepsDoNotGrow) {
  const PoolLimit limit(std::size_t{64} << 20);
  const Tensor w = vec(Numbers(200, 0.5));
  const auto step = [&] {
    Tape tape;
    tape.watch(w);
    (void)tape.backward(sum(exp(mul(square(w), w))));
  };
  step();
  const MemoryStats before = memory_stats();
  for (int i = 0; i < scaled(10000, 300); ++i) step();
  const MemoryStats after = memory_stats();
  EXPECT_EQ(after.live, before.live);
  EXPECT_EQ(after.pooled, before.pooled);
  EXPECT_EQ(after.from_system, before.from_system);
}

// ---- hooks --------------------------------------------------------------------------------------
TEST(OpHook, SeesEveryOpWithAndWithoutATapeAndNothingOfItsOwn) {
  std::vector<std::string> seen;
  std::vector<double> values;
  struct Off {
    ~Off() { set_op_hook({}); }
  } const off;
  set_op_hook([&](std::string_view name, const Tensor& y) {
    seen.emplace_back(name);
    values.push_back(sum(y).item());  // an op
  });
  const Tensor x = vec({3});
  (void)square(x);
  Tape tape;
  tape.watch(x);
  const Tensor y = square(x);
  EXPECT_EQ(seen, (std::vector<std::string>{"square", "square"}));
  EXPECT_EQ(values, (Numbers{9, 9}));
  EXPECT_EQ(tape.size(), 1u);
  set_op_hook([](std::string_view name, const Tensor&) { fail(name, " was seen"); });
  EXPECT_EQ(error_of([&] { (void)square(y); }), "usage: square was seen");
  set_op_hook({});
  (void)square(x);
  EXPECT_EQ(seen.size(), 2u);
}

// ---- what strangers try -------------------------------------------------------------------------
struct Scale3 final : Function {
  std::string_view name() const override { return "scale3"; }
  Tensor forward(std::span<const Tensor> in) { return save(in[1]), clone(in[0]); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {saved(0) ? saved(0) : dy, Tensor{}}; }
};
TEST(Tape, GradientsAddToThemselves) {
  const Tensor x = from_values(std::vector{1.0, 2.0}, {2});
  Tape tape;
  tape.watch(x);
  Gradients g = tape.backward(square(x), ones({2}, DType::f64));
  const std::vector<double> once = g[x].to_vector();
  g += g;
  EXPECT_EQ(g[x].to_vector(), (std::vector<double>{2 * once[0], 2 * once[1]}));
}
TEST(Tape, AnInputThatIsLeftOutMayBeSaved) {
  const std::vector<Tensor> in{from_values(std::vector{1.0, 2.0}, {2}), Tensor{}};
  Tape tape;
  tape.watch(in[0]);
  const Tensor y = apply(Scale3{}, std::span<const Tensor>(in));  // unqualified, as users write it
  EXPECT_EQ(tape.backward(y, ones({2}, DType::f64))[in[0]].to_vector(), (std::vector{1.0, 1.0}));
  Tape again;
  again.watch(in[0]);
  const Tensor z = checkpoint([](std::span<const Tensor> inside) { return apply(Scale3{}, inside); }, in);
  EXPECT_EQ(again.backward(z, ones({2}, DType::f64))[in[0]].to_vector(), (std::vector{1.0, 1.0}));
}
TEST(Tape, UndefinedTensorsAreErrorsNotCrashes) {
  const Tensor u;
  for (const auto& call : std::vector<std::function<void()>>{[&] { (void)clone(u); }, [&] { (void)moved(u, {}); },
                                                             [&] { (void)zeros_like(u); }, [&] { (void)u.to_vector(); },
                                                             [&] { (void)u.device(); }, [&] { (void)u.raw(); },
                                                             [&] {
                                                               Tape t;
                                                               (void)t.backward(u);
                                                             }})
    EXPECT_NE(error_of(call).find("undefined"), std::string::npos) << error_of(call);
}
TEST(Tape, WatchingWhatWasComputedIsRefused) {
  const Tensor x = ones({2}, DType::f64);
  Tape tape;
  tape.watch(x);
  tape.watch(x);
  const Tensor y = square(x);
  EXPECT_EQ(
      error_of([&] { tape.watch(y); }),
      "usage: Tape: watch of [2], which was computed on this tape; watch what it was computed from, or detach() it");
}

/// y[0] = a b, y[1] = a + b, y[2] = 2 a, by element. It notes which gradients it was given.
struct Three final : MultiFunction {
  std::string* asked;
  explicit Three(std::string* s) : asked(s) {}
  std::string_view name() const override { return "three"; }
  std::array<Tensor, 3> forward(const Tensor& a, const Tensor& b) {
    if (wants_any()) save(a), save(b);
    return {mul(a, b), add(a, b), scale(a, 2)};
  }
  std::vector<Tensor> backward_all(std::span<const Tensor> dy) override {
    Tensor da = zeros_like(saved(0)), db = zeros_like(saved(1));
    for (const Tensor& d : dy) *asked += d ? '1' : '0';
    if (dy[0]) accumulate(da, mul(dy[0], saved(1))), accumulate(db, mul(dy[0], saved(0)));
    if (dy[1]) accumulate(da, dy[1]), accumulate(db, dy[1]);
    if (dy[2]) accumulate(da, scale(dy[2], 2));
    return {da, db};
  }
};

TEST(TapeOutputs, EachOfSeveralHasItsGradient) {
  for (int used = 1; used < 8; ++used) {
    std::string asked, expected;
    const Tensor a = vec({2, -3}), b = vec({5, 7});
    Tape tape;
    tape.watch(a);
    tape.watch(b);
    const std::array<Tensor, 3> y = apply(Three(&asked), a, b);
    EXPECT_EQ(y[1].to_vector(), Numbers({7, 4}));
    Tensor loss = full({}, 0, DType::f64);
    Numbers da(2), db(2);
    for (std::size_t i = 0; i < 3; ++i) {
      expected += used >> i & 1 ? '1' : '0';
      if (!(used >> i & 1)) continue;
      loss = add(loss, scale(sum(y[i]), 10 + static_cast<double>(i)));
      const Numbers of_a[]{{50, 70}, {11, 11}, {24, 24}}, of_b[]{{20, -30}, {11, 11}, {0, 0}};
      for (std::size_t k = 0; k < 2; ++k) da[k] += of_a[i][k], db[k] += of_b[i][k];
    }
    const Gradients g = tape.backward(loss);
    EXPECT_EQ(asked, expected);  // once, when the gradients of all three were there
    EXPECT_EQ(g[a].to_vector(), da) << expected;
    EXPECT_EQ(g[b].to_vector(), db) << expected;
  }
}

TEST(TapeOutputs, WhatIsUsedTwiceAddsUpAndNobodysNodeIsSkipped) {
  std::string first, second, unused;
  const Tensor a = vec({2, -3}), b = vec({5, 7});
  Tape tape;
  tape.watch(a);
  const auto [p, q, r] = apply(Three(&first), a, b);
  const auto [u, v, w] = apply(Three(&second), r, p);  // u = 2 a a b, v = 2 a + a b
  (void)apply(Three(&unused), q, w);
  EXPECT_TRUE(tape.knows(p) && tape.knows(q) && tape.knows(r) && tape.knows(w));
  EXPECT_EQ(tape.report().size(), 3u);
  const Gradients g = tape.backward(add(u, v), vec({1, 1}));
  EXPECT_EQ(g[a].to_vector(), Numbers({4 * 2 * 5 + 2 + 5, 4 * -3 * 7 + 2 + 7}));
  EXPECT_EQ(first + second + unused, "101110");
}

TEST(TapeOutputs, InACheckpointAndWithoutATape) {
  std::string asked;
  const Tensor a = vec({2, -3}), b = vec({5, 7});
  EXPECT_EQ(apply(Three(&asked), a, b)[2].to_vector(), Numbers({4, -6}));
  Tape tape;
  tape.watch(b);
  const std::vector<Tensor> in{a, b};
  const auto f = [&](std::span<const Tensor> x) {
    const auto [p, q, r] = apply(Three(&asked), x[0], x[1]);
    return add(p, r);
  };
  EXPECT_EQ(tape.backward(sum(checkpoint(f, in)))[b].to_vector(), Numbers({2, -3}));
  EXPECT_EQ(asked, "101");
}

/// As many outputs as it is told, all the same or undefined.
struct Some final : MultiFunction {
  std::vector<Tensor> given;
  explicit Some(std::vector<Tensor> g) : given(std::move(g)) {}
  std::string_view name() const override { return "some"; }
  std::vector<Tensor> forward(const Tensor&) { return given; }
  std::vector<Tensor> backward_all(std::span<const Tensor> dy) override { return {dy.begin(), dy.end()}; }
};

TEST(TapeOutputs, WhatIsNoListOfTensorsIsRefused) {
  const Tensor x = vec({1}), y = vec({2}), z = vec({3});
  Tape tape;
  tape.watch(x);
  const auto error = [&](std::vector<Tensor> given) {
    return error_of([&] { (void)apply(Some(std::move(given)), x); });
  };
  EXPECT_EQ(error({}), "usage: some: forward returned no tensor");
  EXPECT_EQ(error({y, {}}), "usage: some: forward returned an undefined tensor");
  EXPECT_EQ(error({y, x}), "usage: some: forward must return a tensor of its own, not one of its inputs");
  EXPECT_EQ(error({y, z, y}), "usage: some: forward returned one tensor twice");
  EXPECT_EQ(tape.size(), 0u);
  EXPECT_FALSE(tape.knows(y) || tape.knows(z));  // as if it had not run
  EXPECT_EQ(error({y, z}), "nothing");
  EXPECT_EQ(error_of([&] { tape.backward(add(y, z)); }), "usage: some: backward returned 2 gradients for 1 inputs");
}

TEST(TapeOutputs, AHookAndACheckForNumbersSeeAll) {
  const Tensor x = vec({1}), y = vec({2}), z = vec({std::numeric_limits<double>::infinity()});
  std::vector<TensorId> seen;
  set_op_hook([&](std::string_view, const Tensor& t) { seen.push_back(t.id()); });
  Tape tape({.check_finite = true});
  tape.watch(x);
  EXPECT_EQ(error_of([&] {
              (void)apply(Some({y, z}), x);
            }).substr(0, 42),
            "not_a_number: op 0, some: its result [1] i");
  set_op_hook({});
  EXPECT_EQ(seen, (std::vector{y.id(), z.id()}));
}

}  // namespace
}  // namespace hilt
