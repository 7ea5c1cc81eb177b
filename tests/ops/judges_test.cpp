// The judges on trial: ops that are wrong in one way each, and the judge that must say so. A judge
// that cannot fail proves nothing when it passes.
#include <limits>
#include "core/parallel.h"
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

using Forward = std::function<Tensor(std::span<const Tensor>)>;
using Backward = std::function<std::vector<Tensor>(const std::vector<Tensor>& in, const Tensor& dy)>;

/// An op made of two lambdas. It keeps its inputs.
struct Made final : Function {
  Forward f;
  Backward b;
  std::size_t inputs = 0;
  std::string_view name() const override { return "made"; }
  Tensor forward(std::span<const Tensor> in) {
    inputs = in.size();
    for (const Tensor& x : in) save(x);
    return f(in);
  }
  std::vector<Tensor> backward(const Tensor& dy) override {
    std::vector<Tensor> in;
    for (std::size_t i = 0; i < inputs; ++i) in.push_back(saved(i));
    return b(in, dy);
  }
};
Composite made(Forward f, Backward b) {
  return [=](std::span<const Tensor> in) {
    Made fn;
    fn.f = f, fn.b = b;
    return hilt::apply(std::move(fn), in);
  };
}

const Reference kSquare = []<class T>(const Arrays<T>& in) {
  return naive::map(in[0], []<class U>(const U& x) { return x * x; });
};
const Reference kProduct = []<class T>(const Arrays<T>& in) {
  return naive::zip(in[0], in[1], []<class U>(const U& a, const U& b) { return a * b; });
};
const Reference kRowSum = []<class T>(const Arrays<T>& in) { return naive::sum(in[0], {1}); };

Tensor squared(std::span<const Tensor> in) { return square(in[0]); }
std::vector<Tensor> square_slope(const std::vector<Tensor>& in, const Tensor& dy) { return {mul(mul(in[0], 2), dy)}; }
OpCase square_case(Forward f, Backward b, Shape shape = {3, 5}) {
  return {"square", {real(shape)}, made(f, b), kSquare, {.rows = true}};
}

void expect_caught(const std::string& verdict, std::string_view because) {
  EXPECT_NE(verdict.find(because), verdict.npos) << (verdict.empty() ? "it passed" : verdict);
}
std::string gradients(const OpCase& c) {
  Tally t;
  return judge_gradients(c, t);
}

TEST(JudgesCatch, NothingWhereNothingIsWrong) {
  const OpCase c = square_case(squared, square_slope);
  Tally t;
  EXPECT_EQ(judge_forward(c), "");
  EXPECT_EQ(judge_gradients(c, t), "");
  EXPECT_GT(t.cases, 10);
  EXPECT_GT(t.derivatives, 150);
  EXPECT_LE(t.worst_ratio, 1);
  EXPECT_FALSE(t.ratio_at.empty());
  EXPECT_EQ(judge_watching(c), "");
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) EXPECT_EQ(judge_precision(c, dtype), "");
  EXPECT_EQ(judge_memory(c), "");
  EXPECT_EQ(judge_rows(c), "");
  EXPECT_EQ(judge_large(square_case(squared, square_slope, {300007}), 2), "");
}

TEST(JudgesCatch, AForgottenTerm) {
  const OpCase c{"mul",
                 {real({2, 3}), real({2, 3})},
                 made([](auto in) { return mul(in[0], in[1]); },
                      [](const auto& in, const Tensor& dy) {
                        return std::vector<Tensor>{mul(dy, in[1]), dy};
                      }),
                 kProduct};
  expect_caught(gradients(c), "input 1");
  // softmax without the inner product: a plain sum as cotangent would not have noticed the other
  // way round.
  const OpCase s{"softmax",
                 {real({2, 3})},
                 made([](auto in) { return softmax(in[0]); },
                      [](const auto& in, const Tensor& dy) { return std::vector<Tensor>{mul(softmax(in[0]), dy)}; }),
                 []<class T>(const Arrays<T>& in) { return naive::softmax(in[0]); }};
  expect_caught(gradients(s), "central differences give");
}

TEST(JudgesCatch, AGradientThatIgnoresWhatComesIn) {
  expect_caught(
      gradients(square_case(squared, [](const auto& in, const Tensor&) { return std::vector<Tensor>{mul(in[0], 2)}; })),
      "central differences give");
}

TEST(JudgesCatch, AnErrorOfOnePartInABillionByDualNumbersAlone) {
  const OpCase c = square_case(squared, [](const auto& in, const Tensor& dy) {
    return std::vector<Tensor>{mul(mul(in[0], 2 * (1 + 1e-9)), dy)};
  });
  Tally t;
  expect_caught(judge_gradients(c, t), "dual numbers");
  EXPECT_LT(t.worst_ratio, 1);  // central differences saw nothing
  EXPECT_GT(t.worst_dual, 1e-11);
}

TEST(JudgesCatch, AGradientOfNan) {
  expect_caught(gradients(square_case(squared,
                                      [](const auto& in, const Tensor& dy) {
                                        return std::vector<Tensor>{mul(mul(in[0], dy), std::nan(""))};
                                      })),
                "nan");
}

TEST(JudgesCatch, AWrongValue) {
  expect_caught(judge_forward(square_case([](auto in) { return mul(square(in[0]), 1 + 1e-14); }, square_slope)),
                "off by");
  expect_caught(judge_forward(square_case([](auto in) { return unsqueeze(square(in[0]), 0); }, square_slope)), "shape");
  expect_caught(judge_forward(square_case([](auto in) { return to(square(in[0]), DType::f32); }, square_slope)),
                "type");
}

/// x's first numel() elements in memory, taken for its elements.
Tensor as_if_dense(const Tensor& x) { return as_strided(x, x.shape(), contiguous_strides(x.shape()), 0); }

TEST(JudgesCatch, AnInputTakenForDense) {
  const OpCase c =
      square_case([](auto in) { return square(as_strided(in[0], in[0].shape(), in[0].strides(), 0)); }, square_slope);
  expect_caught(judge_forward(c), "offset");
  const OpCase d = square_case(
      [](auto in) {
        const bool fits = as_strided(in[0], {}, {}, 0).storage().bytes() >= in[0].bytes();
        return square(fits ? as_if_dense(in[0]) : in[0]);
      },
      square_slope);
  expect_caught(judge_forward(d), "off by");
}

TEST(JudgesCatch, AnIncomingGradientTakenForDense) {
  const OpCase c = square_case(squared, [](const auto& in, const Tensor& dy) {
    const bool fits = dy.storage().bytes() >= dy.bytes();
    return std::vector<Tensor>{mul(mul(in[0], 2), fits ? as_if_dense(dy) : dy)};
  });
  expect_caught(gradients(c), "; dy ");
}

TEST(JudgesCatch, WritingWhereOneMayNot) {
  const auto scribble = [](Tensor x, Index at) { x.mutable_raw()[at] = std::byte{1}; };
  expect_caught(judge_forward(square_case(
                    [=](auto in) {
                      const Tensor y = square(in[0]);
                      scribble(in[0], 0);
                      return y;
                    },
                    square_slope)),
                "written to");
  expect_caught(judge_forward(square_case(
                    [=](auto in) {
                      scribble(in[0], -1);
                      return square(in[0]);
                    },
                    square_slope)),
                "guard zone was written to");
  expect_caught(gradients(square_case(squared,
                                      [=](const auto& in, const Tensor& dy) {
                                        std::vector<Tensor> dx = square_slope(in, dy);
                                        scribble(dy, 0);
                                        return dx;
                                      })),
                "incoming gradient");
}

TEST(JudgesCatch, AnOutputThatIsNotFresh) {
  const OpCase c{"identity",
                 {real({2, 3})},
                 made([](auto in) { return as_strided(in[0], in[0].shape(), in[0].strides(), in[0].offset()); },
                      [](const auto&, const Tensor& dy) { return std::vector<Tensor>{dy}; }),
                 []<class T>(const Arrays<T>& in) { return in[0]; }};
  expect_caught(judge_forward(c), "shares the storage");
}

TEST(JudgesCatch, ATensorGivenTwice) {
  const OpCase c{"mul",
                 {real({2, 3}), real({2, 3})},
                 made([](auto in) { return mul(in[0], in[1]); },
                      [](const auto& in, const Tensor& dy) {
                        const bool same = in[0].id() == in[1].id();  // a shortcut that halves the gradient
                        return std::vector<Tensor>{mul(dy, in[1]), same ? zeros_like(dy) : mul(dy, in[0])};
                      }),
                 kProduct};
  EXPECT_EQ(gradients(c), "");
  Tally t;
  expect_caught(judge_aliases(c, t), "also as 1");
  EXPECT_GT(t.cases, 0);
}

TEST(JudgesCatch, WhatDependsOnWhoWatches) {
  struct Greedy final : Function {
    std::string_view name() const override { return "greedy"; }
    Tensor forward(const Tensor& a, const Tensor& b) {
      if (wants(0)) save(b);
      if (wants(1) && wants(0)) save(a);  // and where only b is watched?
      return mul(a, b);
    }
    std::vector<Tensor> backward(const Tensor& dy) override {
      if (!wants(0)) return {Tensor(), dy};
      return {mul(dy, saved(0)), wants(1) ? mul(dy, saved(1)) : Tensor()};
    }
  };
  const OpCase c{
      "mul", {real({2, 3}), real({2, 3})}, [](auto in) { return hilt::apply(Greedy(), in[0], in[1]); }, kProduct};
  EXPECT_EQ(gradients(c), "");
  expect_caught(judge_watching(c), "watching input 1 alone changes its gradient");
  const OpCase taped{
      "square", {real({2, 3})}, [](auto in) { return mul(square(in[0]), Tape::current() ? 1 + 1e-6 : 1); }, kSquare};
  expect_caught(judge_watching(taped), "when a tape listens");
}

TEST(JudgesCatch, AccumulatingInSixteenBits) {
  const auto narrow = [](std::span<const Tensor> in) {
    const Tensor& x = in[0];
    Tensor y = zeros({x.dim(0)}, x.dtype());
    for (Index i = 0; i < x.dim(1); ++i)
      y = add(y, reshape(slice(x, 1, i, i + 1), {x.dim(0)}));  // each partial sum is stored
    return y;
  };
  const OpCase c{"sum",
                 {real({9, 40})},
                 made(narrow,
                      [](const auto& in, const Tensor& dy) {
                        return std::vector<Tensor>{contiguous(expand(unsqueeze(dy, 1), in[0].shape()))};
                      }),
                 kRowSum};
  EXPECT_EQ(judge_forward(c), "");
  for (DType dtype : {DType::bf16, DType::f16}) expect_caught(judge_precision(c, dtype), "allowed");
}

TEST(JudgesCatch, AFormulaThatCancels) {
  const Reference deviation = []<class T>(const Arrays<T>& in) {
    const Array<T> mean = naive::mean(in[0], {-1}, true);
    return naive::mean(naive::map(naive::zip(in[0], mean, []<class U>(const U& a, const U& m) { return a - m; }),
                                  []<class U>(const U& d) { return d * d; }),
                       {-1});
  };
  const OpCase c{"variance",
                 {between(99, 101, {9, 8})},
                 [](auto in) { return sub(mean(square(in[0]), {-1}), square(mean(in[0], {-1}))); },
                 deviation};
  expect_caught(judge_precision(c, DType::f32), "off by");
}

TEST(JudgesCatch, ThreeTimesTheNaiveErrorThatNoSingleElementShows) {
  // Every element within its bound, all of them worse than the formula: the mean square tells.
  const Reference total = []<class T>(const Arrays<T>& in) { return naive::sum(in[0], {1}); };
  const OpCase c{
      "sum", {between(0.5, 1, {64, 64})}, [](auto in) { return mul(sum(in[0], {1}), 1 + 12 * 0x1p-24); }, total};
  expect_caught(judge_precision(c, DType::f32), "root of squared errors");
}

TEST(JudgesCatch, MemoryLeftAsItWas) {
  const auto but_last = [](std::span<const Tensor> in) {
    Tensor y = empty_like(in[0]), part = reshape(y, {in[0].numel()});
    part = slice(part, 0, 0, in[0].numel() - 1);
    copy(part, slice(reshape(square(in[0]), {in[0].numel()}), 0, 0, in[0].numel() - 1));
    return y;
  };
  expect_caught(judge_memory(square_case(but_last, square_slope)), "what memory held before");
  expect_caught(
      judge_memory(square_case([](auto in) { return add(square(in[0]), mul(empty_like(in[0]), 1)); }, square_slope)),
      "what memory held before");
}

TEST(JudgesCatch, WritingBeyondTheOutput) {
  const auto beyond = [](std::span<const Tensor> in) {
    Tensor y = square(in[0]);
    y.mutable_raw()[y.bytes()] = std::byte{0};  // inside the block, outside the tensor
    return y;
  };
  expect_caught(judge_memory(square_case(beyond, square_slope)), "beyond the output");
  expect_caught(judge_memory(square_case(squared,
                                         [&](const auto& in, const Tensor& dy) {
                                           std::vector<Tensor> dx = square_slope(in, dy);
                                           dx[0].mutable_raw()[dx[0].bytes()] = std::byte{0};
                                           return dx;
                                         })),
                "beyond the gradient");
}

TEST(JudgesCatch, RowsThatSeeEachOther) {
  const OpCase c{"softmax",
                 {real({5, 4})},
                 [](auto in) { return softmax(sub(in[0], detach(max(in[0])))); },  // one maximum for all
                 []<class T>(const Arrays<T>& in) { return naive::softmax(in[0]); },
                 {.rows = true}};
  EXPECT_EQ(gradients(c), "");
  expect_caught(judge_rows(c), "depends on what the other rows hold");
  expect_caught(
      judge_rows(square_case([](auto in) { return in[0].dim(0) == 1 ? mul(square(in[0]), 1 + 1e-6) : square(in[0]); },
                             square_slope)),
      "differs when it is the only one");
}

TEST(JudgesCatch, BitsThatDependOnThreadsOrOnTheDay) {
  const OpCase threads{
      "sum",
      {real({300007})},
      [](auto in) { return mul(sum(in[0]), in[0].dtype() == DType::f32 ? 1 + 1e-6 * thread_count() : 1); },
      []<class T>(const Arrays<T>& in) { return naive::sum(in[0]); },
      {.large = true}};
  expect_caught(judge_large(threads, 2), "other bits with");
  int calls = 0;
  const OpCase moody{
      "square",
      {real({300007})},
      [&](auto in) { return mul(square(in[0]), in[0].dtype() == DType::f32 && ++calls % 7 == 0 ? 1 + 1e-6 : 1); },
      kSquare,
      {.large = true}};
  expect_caught(judge_large(moody, 4), "other bits with");
}

TEST(JudgesCatch, OnePieceOfALargeGradient) {
  const auto slip = [](const std::vector<Tensor>& in, const Tensor& dy) {
    std::vector<Tensor> dx = square_slope(in, dy);
    Tensor last = slice(dx[0], 0, 300000, 300007);
    copy(last, zeros_like(last));
    return dx;
  };
  expect_caught(judge_large(square_case(squared, slip, {300007}), 1), "along a random direction");
}

TEST(JudgesCatch, MessagesThatSayTooLittle) {
  EXPECT_FALSE(refuses([] {}, "add", {}));
  EXPECT_FALSE(refuses([] { fail("add: no"); }, "add", {"f32"}));
  EXPECT_FALSE(refuses([] { fail("sub: f32"); }, "add", {"f32"}));
  EXPECT_FALSE(refuses([] { fail_with(Code::internal, "add: f32"); }, "add", {"f32"}));
  EXPECT_FALSE(refuses([] { throw std::runtime_error("add: f32"); }, "add", {"f32"}));
  EXPECT_TRUE(refuses([] { fail("add: f32"); }, "add", {"f32"}));
}

}  // namespace
}  // namespace hilt
