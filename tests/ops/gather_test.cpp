// embedding, gather and scatter_add: each is the transpose of another, and repeated indices add up.
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

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
const Op kPicking[] = {{"embedding", embedding_cases}, {"gather", gather_cases}, {"scatter_add", scatter_cases}};
INSTANTIATE_TEST_SUITE_P(Gather, OpJudges, testing::ValuesIn(kPicking), op_name);

TEST(Gather, ScatterAddIsItsTranspose) {
  // <gather(x), y> = <x, scatter_add(y)>.
  const Tensor x = random(real({7, 3}), 1), y = random(real({11, 3}), 2),
               index = from_values(random_indices(11, 7), {11});
  EXPECT_NEAR(sum(mul(gather(x, 0, index), y)).item(), sum(mul(x, scatter_add(y, 0, index, 7))).item(), 1e-13);
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
