// embedding, gather and scatter_add: each is the transpose of another, and repeated indices add up.
#include <limits>
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor indices(const std::vector<Index>& v, const Shape& shape, std::size_t which) {
  return from_values(v, shape, which % 2 ? DType::i32 : DType::i64);
}
std::vector<Index> random_indices(Index n, Index below) { return randint(0, below, {n}, {21, 0}).to_vector<Index>(); }

std::vector<OpCase> embedding_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& table, const Shape& shape, std::vector<Index> v, Traits traits = {}) {
    const Tensor t = indices(v, shape, cases.size());
    cases.push_back({text("embedding of ids ", shape, ' ', t.dtype()),
                     {real(table)},
                     [=](auto in) { return embedding(in[0], moved(t, in[0].device())); },
                     [=]<class T>(const Arrays<T>& in) { return naive::embedding(in[0], v, shape); },
                     traits});
  };
  add_case({4, 3}, {5}, {0, 3, 3, 1, 3});  // one id three times, one never
  add_case({4, 3}, {}, {2});
  add_case({4, 3}, {2, 3}, {0, 1, 2, 3, 0, 0});
  add_case({1, 2}, {4}, {0, 0, 0, 0});
  add_case({5, 1}, {2, 1, 2}, {4, 3, 2, 1});
  add_case({3, 2}, {0}, {});
  add_case({3, 0}, {2}, {0, 1});
  add_case({6, 2}, {1, 2, 1, 2, 1}, {5, 5, 0, 2});
  add_case({5, 8}, {7}, {4, 0, 0, 2, 4, 4, 0});  // rows of whole accesses
  add_case({1000, 129}, {2401}, random_indices(2401, 1000), {.large = true});
  add_case({7, 67}, {4501}, random_indices(4501, 7), {.large = true});  // many rows onto few
  return cases;
}

std::vector<OpCase> gather_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, int axis, std::vector<Index> v, Traits traits = {}) {
    const Tensor t = indices(v, {static_cast<Index>(v.size())}, cases.size());
    cases.push_back(
        {text("gather of ", v.size(), " along ", axis),
         {real(shape)},
         [=](auto in) { return gather(in[0], axis, moved(t, in[0].device())); },
         [=]<class T>(const Arrays<T>& in) { return naive::gather(in[0], axis < 0 ? axis + shape.rank() : axis, v); },
         traits});
  };
  add_case({5}, 0, {4, 0, 0, 2});
  add_case({4, 3}, 0, {3, 1});
  add_case({4, 3}, 1, {2, 2, 0, 1, 0});
  add_case({2, 3, 4}, 1, {2, 0, 2});
  add_case({2, 3, 4}, -1, {3, 1});
  add_case({2, 3, 4}, 0, {1, 0, 1});
  add_case({2, 1, 3}, 1, {0, 0});
  add_case({3, 2}, 0, {});
  add_case({2, 1, 2, 3, 1, 2}, 3, {2, 0});
  add_case({2, 0}, 0, {1, 1, 0});
  add_case({617, 487}, 0, random_indices(600, 617), {.large = true});
  add_case({617, 487}, 1, random_indices(490, 487), {.rows = true, .large = true});
  return cases;
}

std::vector<OpCase> scatter_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, int axis, std::vector<Index> v, Index extent, Traits traits = {}) {
    const Tensor t = indices(v, {static_cast<Index>(v.size())}, cases.size());
    cases.push_back({text("scatter_add of ", v.size(), " along ", axis, " into ", extent),
                     {real(shape)},
                     [=](auto in) { return scatter_add(in[0], axis, moved(t, in[0].device()), extent); },
                     [=]<class T>(const Arrays<T>& in) {
                       return naive::scatter_add(in[0], axis < 0 ? axis + shape.rank() : axis, v, extent);
                     },
                     traits});
  };
  add_case({4}, 0, {2, 0, 2, 2}, 5);
  add_case({3, 2}, 0, {1, 1, 0}, 3);
  add_case({3, 4}, 1, {3, 3, 0, 1}, 4);
  add_case({2, 3, 2}, 1, {0, 5, 0}, 6);
  add_case({2, 3, 2}, -1, {1, 0}, 2);
  add_case({2, 1, 3}, 1, {2}, 4);
  add_case({0, 2}, 0, {}, 3);
  add_case({2, 1, 2, 3, 1, 2}, 3, {1, 0, 1}, 2);
  add_case({617, 487}, 0, random_indices(617, 50), 50, {.large = true});
  add_case({617, 487}, 1, random_indices(487, 600), 600, {.rows = true, .large = true});
  return cases;
}
std::vector<OpCase> take_along_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, int axis, Index many, Traits traits = {}) {
    const int along = axis < 0 ? axis + shape.rank() : axis;
    const Shape of_index = shape.with(along, many);
    const std::vector<Index> v = random_indices(of_index.numel(), std::max<Index>(1, shape[along]));
    const Tensor t = indices(v, of_index, cases.size());
    cases.push_back({text("take_along ", axis, " of ", many),
                     {real(shape)},
                     [=](auto in) { return take_along(in[0], axis, moved(t, in[0].device())); },
                     [=]<class T>(const Arrays<T>& in) { return naive::take_along(in[0], along, v, of_index); },
                     traits});
  };
  add_case({5}, 0, 4);
  add_case({4, 3}, 0, 6);
  add_case({4, 3}, 1, 2);
  add_case({2, 3, 4}, 1, 3);
  add_case({2, 3, 4}, -1, 1);
  add_case({2, 3, 4}, 0, 0);
  add_case({2, 1, 2, 3, 1, 2}, 3, 2);
  add_case({0, 3}, 1, 2);
  add_case({311, 217}, 1, 200, {.large = true});
  add_case({311, 217}, 0, 50, {.large = true});
  return cases;
}

std::vector<OpCase> tril_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, Index diagonal, Traits traits = {}) {
    cases.push_back({text("tril ", diagonal),
                     {real(shape)},
                     [=](auto in) { return tril(in[0], diagonal); },
                     [=]<class T>(const Arrays<T>& in) {
                       Array<T> y(shape);
                       naive::each(shape, [&](const naive::Position& p, Index n) {
                         y[n] = p[shape.rank() - 1] > p[shape.rank() - 2] + diagonal ? T(0) : in[0][n];
                       });
                       return y;
                     },
                     traits});
  };
  for (Index diagonal : {-4, -1, 0, 1, 5}) {
    add_case({3, 4}, diagonal);
    add_case({2, 4, 3}, diagonal);
  }
  add_case({1, 1}, 0);
  add_case({2, 0, 3}, 0);
  add_case({617, 487}, 3, {.large = true});
  return cases;
}

std::vector<OpCase> masked_fill_cases() {
  const Tensor mask = randint(0, 2, {2, 3}, {4, 0}, DType::u8);
  const std::vector<double> masked = mask.to_vector();
  return {{"masked_fill",
           {real({2, 3})},
           [=](auto in) { return masked_fill(in[0], moved(mask, in[0].device()), -1.5); },
           [=]<class T>(const Arrays<T>& in) {
             Array<T> y = in[0];
             for (std::size_t i = 0; i < masked.size(); ++i)
               if (masked[i] == 1) y.values[i] = T(-1.5);
             return y;
           }}};
}

std::vector<OpCase> repeat_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, int axis, Index times, Traits traits = {}) {
    const int along = axis < 0 ? axis + shape.rank() : axis;
    std::vector<Index> index;
    for (Index t = 0; t < times; ++t)
      for (Index i = 0; i < shape[along]; ++i) index.push_back(i);
    traits.view = true;  // one time
    cases.push_back({text("repeat ", axis, " x ", times),
                     {real(shape)},
                     [=](auto in) { return repeat(in[0], axis, times); },
                     [=]<class T>(const Arrays<T>& in) { return naive::gather(in[0], along, index); },
                     traits});
  };
  add_case({3}, 0, 2);
  add_case({2, 3}, 0, 3);
  add_case({2, 3}, -1, 2);
  add_case({2, 3, 2}, 1, 1);
  add_case({2, 3, 2}, 1, 0);
  add_case({0, 3}, 0, 2);
  add_case({2, 1, 2, 1, 3, 2}, 4, 2);
  add_case({311, 217}, 1, 5, {.rows = true, .large = true});
  return cases;
}
std::vector<OpCase> flip_cases() {
  std::vector<OpCase> cases;
  const std::pair<Shape, std::vector<int>> all[] = {
      {{5}, {0}},          {{2, 3}, {1}},    {{2, 3}, {0, 1}}, {{2, 3}, {}}, {{2, 3, 4}, {-1, 0}},
      {{2, 1, 3, 2}, {1}}, {{2, 0, 3}, {2}}, {{}, {}},         {{1}, {0}},   {{2, 1, 2, 1, 3, 2}, {0, 2, 5}}};
  for (const auto& [shape, axes] : all)
    cases.push_back({text("flip ", axes.size(), " axes"),
                     {real(shape)},
                     [=](auto in) { return flip(in[0], Axes(axes.begin(), axes.end())); },
                     [=]<class T>(const Arrays<T>& in) {
                       Array<T> y = in[0];
                       for (int axis : axes) {
                         std::vector<Index> index;
                         for (Index i = shape[axis]; i-- > 0;) index.push_back(i);
                         y = naive::gather(y, axis < 0 ? axis + shape.rank() : axis, index);
                       }
                       return y;
                     },
                     {.view = true}});
  return cases;
}
const Op kPicking[] = {{"embedding", embedding_cases},     {"gather", gather_cases}, {"scatter_add", scatter_cases},
                       {"take_along", take_along_cases},   {"tril", tril_cases},     {"repeat", repeat_cases},
                       {"masked_fill", masked_fill_cases}, {"flip", flip_cases}};
INSTANTIATE_TEST_SUITE_P(Gather, OpJudges, testing::ValuesIn(kPicking), op_name);

TEST(Gather, ScatterAddIsItsTranspose) {
  // <gather(x), y> = <x, scatter_add(y)>.
  const Tensor x = random(real({7, 3}), 1), y = random(real({11, 3}), 2),
               index = from_values(random_indices(11, 7), {11});
  EXPECT_NEAR(sum(mul(gather(x, 0, index), y)).item(), sum(mul(x, scatter_add(y, 0, index, 7))).item(), 1e-13);
}

TEST(Gather, OneHot) {
  const Tensor y = one_hot(ids({2, 0, -100, 3}), 3);
  EXPECT_EQ(y.dtype(), DType::f32);
  EXPECT_EQ(y.shape(), (Shape{4, 3}));
  EXPECT_EQ(y.to_vector(), (std::vector<double>{0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(one_hot(ids({1}, DType::i32), 2, DType::i64).to_vector(), (std::vector<double>{0, 1}));
  EXPECT_EQ(one_hot(zeros({2, 0}, DType::i64), 5).shape(), (Shape{2, 0, 5}));
  EXPECT_TRUE(refuses([] { one_hot(ones({2}), 3); }, "one_hot", {"f32"}));
}

TEST(Gather, WhatTrilLeavesOutDoesNotLeak) {
  const Tensor x = reshape(values({1, kNan, 2, 3}), {2, 2});
  const Played p = play([](auto in) { return tril(in[0]); }, {{x}}, reshape(values({1, kNan, 2, 3}), {2, 2}));
  EXPECT_EQ(p.y.to_vector(), (std::vector<double>{1, 0, 2, 3}));
  EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{1, 0, 2, 3}));
  EXPECT_EQ(tril(full({2, 2}, 5, DType::i32), -1).to_vector(), (std::vector<double>{0, 0, 5, 0}));
  EXPECT_TRUE(refuses([] { tril(ones({3})); }, "tril", {"[3]"}));
}

TEST(Gather, TakeAlongRefuses) {
  const Tensor x = ones({2, 3});
  EXPECT_TRUE(refuses([&] { take_along(x, 1, zeros({3, 1}, DType::i64)); }, "take_along", {"[2, 3]", "[3, 1]", "1"}));
  EXPECT_TRUE(refuses([&] { take_along(x, 1, zeros({2}, DType::i64)); }, "take_along", {"[2, 3]", "[2]"}));
  EXPECT_TRUE(refuses([&] { take_along(x, 2, zeros({2, 3}, DType::i64)); }, "take_along", {"axis 2"}));
  EXPECT_TRUE(refuses([&] { take_along(x, 1, full({2, 1}, 3, DType::i64)); }, "take_along", {"3", "0..2"}));
  EXPECT_TRUE(refuses([&] { take_along(x, 1, zeros({2, 1}, DType::f32)); }, "take_along", {"f32"}));
  EXPECT_TRUE(refuses([&] { flip(x, {2}); }, "flip", {"axis 2", "-2..1"}));
  EXPECT_TRUE(refuses([&] { repeat(x, 1, -1); }, "repeat", {"-1"}));
  EXPECT_TRUE(refuses([&] { repeat(x, 2, 1); }, "repeat", {"axis 2"}));
}

TEST(Gather, AWrongIndexOnTheGpuGivesNan) {
  const Device gpu = device_named("auto");
  if (gpu.is_cpu()) return;  // the CPU refuses it
  const Tensor at = moved(reshape(ids({0, 3, -1, 2}), {2, 2}), gpu);
  const std::vector<double> y = take_along(moved(ones({2, 3}), gpu), 1, at).to_vector();
  EXPECT_TRUE(y[0] == 1 && std::isnan(y[1]) && std::isnan(y[2]) && y[3] == 1);
}

TEST(Gather, RepeatedIdsAddUpInMoreThanSixteenBits) {
  constexpr Index kTimes = 4096;
  for (DType dtype : {DType::bf16, DType::f16}) {
    const Tensor zero_ids = zeros({kTimes}, DType::i64);
    const Played p =
        play([&](auto in) { return embedding(in[0], zero_ids); }, {{ones({2, 3}, dtype)}}, ones({kTimes, 3}, dtype));
    EXPECT_EQ(p.dx[0].to_vector(), (std::vector<double>{kTimes, kTimes, kTimes, 0, 0, 0})) << dtype;
    EXPECT_EQ(scatter_add(ones({kTimes, 2}, dtype), 0, zero_ids, 1).to_vector(), (std::vector<double>{kTimes, kTimes}))
        << dtype;
    const Played q =
        play([&](auto in) { return gather(in[0], 0, zero_ids); }, {{ones({2}, dtype)}}, ones({kTimes}, dtype));
    EXPECT_EQ(q.dx[0].to_vector(), (std::vector<double>{kTimes, 0})) << dtype;
  }
}

TEST(Gather, AFrequentPlaceOnTheGpuAddsUpExactly) {
  // No order of sums rounds small integers. Every third row goes to place 3, some places have none.
  constexpr Index kOuter = 2, kRows = 20'011, kPlaces = 900;
  const Device gpu = device_named("auto");
  std::vector<Index> at = random_indices(kRows, kPlaces / 2);
  for (std::size_t i = 0; i < at.size(); i += 3) at[i] = 3;
  const Tensor index = from_values(at, {kRows});
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (Index inner : {24, 23, 1})     // whole accesses and others
      for (Index offset : {0, 4, 1}) {  // aligned by chance alone
        const Index n = kOuter * kRows * inner;
        const Tensor all = to(randint(-2, 3, {offset + n}, {22, 0}), dtype);
        const auto sums = [&](const Device& device) {
          const Tensor x = reshape(slice(moved(all, device), 0, offset, offset + n), {kOuter, kRows, inner});
          return bits(moved(scatter_add(x, 1, moved(index, device), kPlaces), {}));
        };
        const auto there = sums(gpu);
        EXPECT_EQ(there, sums({})) << dtype << ' ' << inner << ' ' << offset;
        EXPECT_EQ(there, sums(gpu)) << dtype << ' ' << inner << ' ' << offset;
      }
}

TEST(Gather, IndicesOfAnyStride) {
  const Tensor table = random(real({9, 2}), 1);
  const Tensor wide = ids({8, 0, 3, 1, 5, 2, 7, 4});
  const Tensor every_second = slice(wide, 0, 0, 8, 2), across = transpose(reshape(wide, {2, 4}));
  EXPECT_EQ(bits(embedding(table, every_second)), bits(embedding(table, ids({8, 3, 5, 7}))));
  EXPECT_EQ(bits(embedding(table, across)), bits(embedding(table, contiguous(across))));
  EXPECT_EQ(bits(gather(table, 0, every_second)), bits(gather(table, 0, ids({8, 3, 5, 7}))));
  EXPECT_EQ(bits(scatter_add(slice(table, 0, 0, 4), 0, every_second, 9)),
            bits(scatter_add(slice(table, 0, 0, 4), 0, ids({8, 3, 5, 7}), 9)));
  EXPECT_EQ(bits(embedding(table, expand(ids({3}), {5}))), bits(embedding(table, ids({3, 3, 3, 3, 3}))));
}

TEST(Gather, Refusals) {
  const Tensor table = ones({4, 3});
  EXPECT_TRUE(refuses([&] { embedding(table, ids({0, 1, 4})); }, "embedding", {"4", "2"}));  // id 4 at position 2
  EXPECT_TRUE(refuses(
      [&] {
        embedding(table, ids({0, -1}));
      },
      "embedding", {"-1", "1", "0..3"}));  // id, position, rows
  EXPECT_TRUE(refuses([&] { embedding(table, ids({7}, DType::i32)); }, "embedding", {"7", "0", "0..3"}));
  EXPECT_TRUE(refuses([&] { embedding(table, ones({2})); }, "embedding", {"i32", "i64", "f32"}));
  EXPECT_TRUE(refuses([&] { embedding(ones({3}), ids({0})); }, "embedding", {"[3]"}));
  EXPECT_TRUE(refuses([&] { gather(table, 2, ids({0})); }, "gather", {"axis 2"}));
  EXPECT_TRUE(refuses([&] { gather(table, 1, ids({0, 3})); }, "gather", {"3", "1"}));
  EXPECT_TRUE(refuses([&] { gather(table, 1, ids({-1})); }, "gather", {"-1", "0", "0..2"}));
  EXPECT_TRUE(refuses([&] { gather(table, 1, ones({2})); }, "gather", {"i32", "i64", "f32"}));
  EXPECT_TRUE(refuses([&] { gather(table, 0, reshape(ids({0, 1}), {1, 2})); }, "gather", {"[1, 2]"}));
  EXPECT_TRUE(refuses([&] { scatter_add(table, 0, ids({0, 1, 2, 5}), 5); }, "scatter_add", {"5", "3"}));
  EXPECT_TRUE(refuses([&] { scatter_add(table, 0, ids({0, 1}), 5); }, "scatter_add", {"2", "4"}));
  EXPECT_TRUE(refuses([&] { scatter_add(table, 0, ids({0, 1, 2, 3}), -1); }, "scatter_add", {"-1"}));
}

}  // namespace
}  // namespace hilt
