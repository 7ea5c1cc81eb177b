// cat and pad: values and gradients, and what they refuse.
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

std::vector<OpCase> cat_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const std::vector<Shape>& shapes, int axis, Traits traits = {}) {
    std::vector<Input> inputs;
    for (const Shape& s : shapes) inputs.push_back(real(s));
    const int from_front = axis < 0 ? axis + shapes[0].rank() : axis;
    traits.rows = from_front > 0 && shapes[0].numel() > 0;
    cases.push_back({text("cat along ", axis), inputs, [=](std::span<const Tensor> in) { return cat(in, axis); },
                     [=]<class T>(const Arrays<T>& in) { return naive::cat(in, from_front); }, traits});
  };
  add_case({{3}}, 0);
  add_case({{3}, {2}}, 0);
  add_case({{2, 3}, {2, 3}}, 0);
  add_case({{2, 3}, {2, 1}, {2, 2}}, 1);
  add_case({{2, 3}, {1, 3}}, -2);
  add_case({{2, 2, 3}, {2, 1, 3}}, 1);
  add_case({{2, 2, 1}, {2, 2, 3}}, -1);
  add_case({{0, 2}, {3, 2}, {0, 2}}, 0);
  add_case({{2, 0}, {2, 0}}, 1);
  add_case({{2, 1, 2, 1, 1, 2}, {2, 1, 2, 1, 3, 2}}, 4);
  add_case({{617, 487}, {617, 13}}, 1, {.large = true});
  add_case({{317, 487}, {300, 487}}, 0, {.large = true});
  return cases;
}

std::vector<OpCase> stack_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, std::size_t parts, int axis, Traits traits = {}) {
    const int at = axis < 0 ? axis + shape.rank() + 1 : axis;
    cases.push_back({text("stack along ", axis), std::vector<Input>(parts, real(shape)),
                     [=](std::span<const Tensor> in) { return stack(in, axis); },
                     [=]<class T>(const Arrays<T>& in) {
                       Shape slab;
                       for (int a = 0; a <= shape.rank(); ++a) {
                         if (a == at) slab.push_back(1);
                         if (a < shape.rank()) slab.push_back(shape[a]);
                       }
                       Arrays<T> slabs;
                       for (const Array<T>& x : in) slabs.push_back(naive::reshape(x, slab));
                       return naive::cat(slabs, at);
                     },
                     traits});
  };
  add_case({}, 3, 0);
  add_case({3}, 2, 0);
  add_case({3}, 2, 1);
  add_case({2, 3}, 3, -1);
  add_case({2, 3}, 1, -2);
  add_case({2, 0}, 2, 1);
  add_case({317, 487}, 2, 1, {.large = true});
  return cases;
}

std::vector<OpCase> pad_cases() {
  std::vector<OpCase> cases;
  const auto add_case = [&](const Shape& shape, int axis, Index before, Index after, double value, Traits traits = {}) {
    const int from_front = axis < 0 ? axis + shape.rank() : axis;
    traits.rows = from_front > 0 && shape.numel() > 0;
    cases.push_back({text("pad axis ", axis, " by ", before, " and ", after, " of ", value),
                     {real(shape)},
                     [=](auto in) { return pad(in[0], axis, before, after, value); },
                     [=]<class T>(const Arrays<T>& in) { return naive::pad(in[0], from_front, before, after, value); },
                     traits});
  };
  add_case({3}, 0, 1, 2, 0);
  add_case({3}, 0, 0, 0, 0);
  add_case({2, 3}, 1, 2, 0, 0.5);
  add_case({2, 3}, 0, 0, 1, -1);
  add_case({2, 3, 2}, -2, 1, 1, 0);
  add_case({0, 2}, 0, 1, 1, 4);
  add_case({2, 1, 2, 1, 3, 2}, 4, 1, 0, 0);
  add_case({617, 487}, 1, 3, 5, 0, {.large = true});
  return cases;
}
const Op kJoining[] = {{"cat", cat_cases}, {"stack", stack_cases}, {"pad", pad_cases}};
INSTANTIATE_TEST_SUITE_P(Cat, OpJudges, testing::ValuesIn(kJoining), op_name);

TEST(Cat, ManyPartsEachWithItsGradient) {
  // wants() of inputs beyond the 63rd share one answer; gradients must not.
  std::vector<Tensor> parts;
  for (int i = 0; i < 100; ++i) parts.push_back(full({1, 2}, i, DType::f64));
  const Tensor dy = random(real({100, 2}), 1);
  for (int watched : {0, 62, 63, 64, 99}) {
    Tape tape;
    tape.watch(parts[static_cast<std::size_t>(watched)]);
    const Gradients g = tape.backward(cat(parts, 0), dy);
    EXPECT_EQ(g.size(), 1u);
    EXPECT_EQ(bits(g[parts[static_cast<std::size_t>(watched)]]), bits(slice(dy, 0, watched, watched + 1))) << watched;
  }
}

TEST(Cat, UndoesSplit) {
  const Tensor x = random(real({3, 8, 2}), 1);
  EXPECT_EQ(bits(cat(split(x, std::array<Index, 4>{1, 4, 0, 3}, 1), 1)), bits(x));
}

TEST(Cat, Refusals) {
  const Tensor x = ones({2, 3});
  EXPECT_TRUE(refuses([&] { cat(std::vector<Tensor>{}, 0); }, "cat", {}));
  EXPECT_TRUE(refuses([&] { cat({x, ones({2, 4})}, 0); }, "cat", {"[2, 3]", "[2, 4]"}));
  EXPECT_TRUE(refuses([&] { cat({x, ones({2})}, 0); }, "cat", {"[2, 3]", "[2]"}));
  EXPECT_TRUE(refuses([&] { cat({x, ones({2, 3}, DType::f64)}, 0); }, "cat", {"f32", "f64"}));
  EXPECT_TRUE(refuses([&] { cat({x, x}, 2); }, "cat", {"axis 2"}));
  EXPECT_TRUE(refuses([&] { cat({ones({}), ones({})}, 0); }, "cat", {"axis 0"}));
  EXPECT_TRUE(refuses([&] { pad(x, 2, 1, 1); }, "pad", {"axis 2"}));
  EXPECT_TRUE(refuses([&] { pad(x, 1, -1, 1); }, "pad", {"-1"}));
  EXPECT_TRUE(refuses([&] { pad(x, 1, 1, -2); }, "pad", {"-2"}));
}

}  // namespace
}  // namespace hilt
