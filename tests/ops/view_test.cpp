// Views and conversions by formula, that they share storage, and what they refuse.
#include <limits>
#include "ops/ops.h"
#include "tests/support/op_cases.h"

namespace hilt {
namespace {
using namespace judge;

// A product behind each view gives backward a gradient that it has to carry, and forward a reason
// to read in place.
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<OpCase> reshape_cases() {
  std::vector<OpCase> cases;
  const std::pair<Shape, Shape> shapes[] = {
      {{}, {1, 1}},    {{6}, {2, 3}},       {{2, 3}, {6}},       {{2, 3, 4}, {4, 6}},  {{4, 6}, {2, 2, 3, 2}},
      {{1}, {}},       {{0, 3}, {3, 0, 2}}, {{2, 1, 3}, {2, 3}}, {{2, 3, 4}, {2, 12}}, {{2, 1, 2, 1, 3, 1}, {4, 3}},
      {{3, 2}, {3, 2}}};
  for (const auto& [from, onto] : shapes)
    cases.push_back({text("reshape to ", onto),
                     {real(from)},
                     [=](auto in) { return reshape(in[0], onto); },
                     [=]<class T>(const Arrays<T>& in) { return naive::reshape(in[0], onto); },
                     {.view = true}});
  return cases;
}

std::vector<OpCase> permute_cases() {
  std::vector<OpCase> cases;
  const std::pair<Shape, std::vector<int>> all[] = {{{}, {}},
                                                    {{5}, {0}},
                                                    {{2, 3}, {1, 0}},
                                                    {{2, 3}, {0, 1}},
                                                    {{2, 3, 4}, {2, 0, 1}},
                                                    {{2, 3, 4}, {1, 2, 0}},
                                                    {{2, 3, 4}, {0, 2, 1}},
                                                    {{2, 1, 3, 2}, {3, 1, 0, 2}},
                                                    {{2, 1, 2, 1, 3, 2}, {5, 3, 1, 4, 2, 0}},
                                                    {{2, 0, 3}, {1, 2, 0}}};
  for (const auto& [shape, axes] : all)
    cases.push_back({text("permute axis 0 from ", axes.empty() ? -1 : axes[0]),
                     {real(shape)},
                     [=](auto in) { return permute(in[0], axes); },
                     [=]<class T>(const Arrays<T>& in) { return naive::permute(in[0], axes); },
                     {.view = true}});
  return cases;
}

std::vector<OpCase> transpose_cases() {
  std::vector<OpCase> cases;
  struct One {
    Shape shape;
    int a, b;
    std::vector<int> axes;
  };
  for (const One& o : {One{{2, 3}, -2, -1, {1, 0}},
                       {{2, 3, 4}, -2, -1, {0, 2, 1}},
                       {{2, 3, 4}, 0, 2, {2, 1, 0}},
                       {{2, 3, 4}, 1, 1, {0, 1, 2}},
                       {{2, 3, 4}, -1, 0, {2, 1, 0}},
                       {{1, 3, 2, 2}, 1, 3, {0, 3, 2, 1}}})
    cases.push_back({text("transpose ", o.a, ' ', o.b),
                     {real(o.shape)},
                     [=](auto in) { return transpose(in[0], o.a, o.b); },
                     [=]<class T>(const Arrays<T>& in) { return naive::permute(in[0], o.axes); },
                     {.view = true}});
  return cases;
}

std::vector<OpCase> slice_cases() {
  std::vector<OpCase> cases;
  struct One {
    Shape shape;
    int axis;
    Index begin, end, step, from, until;
  };  // from, until: begin and end, counted from the front
  for (const One& o : {One{{7}, 0, 2, 5, 1, 2, 5},
                       {{7}, 0, 0, 7, 2, 0, 7},
                       {{7}, 0, 1, 7, 3, 1, 7},
                       {{7}, -1, -3, 7, 1, 4, 7},
                       {{7}, 0, -5, -1, 2, 2, 6},
                       {{7}, 0, 3, 3, 1, 3, 3},
                       {{2, 5}, 1, 1, 4, 1, 1, 4},
                       {{4, 3}, 0, 1, 4, 2, 1, 4},
                       {{2, 5, 2}, -2, 0, 5, 4, 0, 5},
                       {{2, 3, 4}, 2, -1, 4, 1, 3, 4},
                       {{3, 0, 2}, 0, 1, 3, 1, 1, 3},
                       {{2, 1, 2, 1, 3, 4}, 4, 1, 3, 1, 1, 3},
                       {{5}, 0, 0, 5, 100, 0, 5}})
    cases.push_back({text("slice axis ", o.axis, " from ", o.begin, " to ", o.end, " by ", o.step),
                     {real(o.shape)},
                     [=](auto in) { return slice(in[0], o.axis, o.begin, o.end, o.step); },
                     [=]<class T>(const Arrays<T>& in) {
                       return naive::slice(in[0], o.axis < 0 ? o.axis + o.shape.rank() : o.axis, o.from, o.until,
                                           o.step);
                     },
                     {.view = true}});
  return cases;
}

std::vector<OpCase> expand_cases() {
  std::vector<OpCase> cases;
  const std::pair<Shape, Shape> shapes[] = {{{}, {2, 3}},
                                            {{3}, {2, 3}},
                                            {{1}, {4}},
                                            {{2, 1}, {2, 3}},
                                            {{1, 3}, {2, 3}},
                                            {{2, 3}, {2, 3}},
                                            {{2, 1, 2}, {2, 3, 2}},
                                            {{1, 2, 1}, {2, 3, 2, 4}},
                                            {{1}, {0}},
                                            {{2, 1, 2, 1, 2, 1}, {2, 2, 2, 2, 2, 2}}};
  for (const auto& [from, onto] : shapes)
    cases.push_back({text("expand to ", onto),
                     {real(from)},
                     [=](auto in) { return expand(in[0], onto); },
                     [=]<class T>(const Arrays<T>& in) { return naive::expand(in[0], onto); },
                     {.view = true}});
  return cases;
}

std::vector<OpCase> select_cases() {
  struct One {
    Shape shape;
    int axis;
    Index i;
  };
  std::vector<OpCase> cases;
  for (const One& o : {One{{3}, 0, 1}, {{2, 3}, 0, -1}, {{2, 3}, 1, 0}, {{2, 3, 2}, -2, -3}, {{1, 2}, 0, 0}}) {
    const Index n = o.shape[o.axis], at = o.i < 0 ? o.i + n : o.i;
    const int along = static_cast<int>(o.shape.place(o.axis));
    Shape rest;
    for (int a = 0; a < o.shape.rank(); ++a)
      if (a != along) rest.push_back(o.shape[a]);
    cases.push_back(
        {text("select ", o.axis, " ", o.i),
         {real(o.shape)},
         [=](auto in) { return along == 0 ? in[0][o.i] : select(in[0], o.axis, o.i); },
         [=]<class T>(const Arrays<T>& in) { return naive::reshape(naive::slice(in[0], along, at, at + 1), rest); },
         {.view = true}});
  }
  return cases;
}

std::vector<OpCase> squeeze_cases() {
  std::vector<OpCase> cases;
  struct One {
    Shape shape;
    int axis;
    Shape result;
  };
  for (const One& o :
       {One{{1}, 0, {}}, {{2, 1, 3}, 1, {2, 3}}, {{2, 3, 1}, -1, {2, 3}}, {{1, 0}, 0, {0}}, {{1, 1, 4}, -3, {1, 4}}})
    cases.push_back({text("squeeze ", o.axis),
                     {real(o.shape)},
                     [=](auto in) { return squeeze(in[0], o.axis); },
                     [=]<class T>(const Arrays<T>& in) { return naive::reshape(in[0], o.result); },
                     {.view = true}});
  for (const One& o : {One{{}, 0, {1}},
                       {{2, 3}, 0, {1, 2, 3}},
                       {{2, 3}, 2, {2, 3, 1}},
                       {{2, 3}, -1, {2, 3, 1}},
                       {{2, 3}, -3, {1, 2, 3}},
                       {{2, 3}, 1, {2, 1, 3}}})
    cases.push_back({text("unsqueeze ", o.axis),
                     {real(o.shape)},
                     [=](auto in) { return unsqueeze(in[0], o.axis); },
                     [=]<class T>(const Arrays<T>& in) { return naive::reshape(in[0], o.result); },
                     {.view = true}});
  return cases;
}

std::vector<OpCase> split_cases() {
  std::vector<OpCase> cases;
  struct One {
    Shape shape;
    int axis;
    std::vector<Index> extents;
  };
  for (const One& o : {One{{6}, 0, {1, 2, 3}},
                       {{2, 5}, 1, {3, 2}},
                       {{4, 3}, -2, {1, 0, 3}},
                       {{2, 3, 2}, 1, {3}},
                       {{2, 1, 4, 1, 2, 1}, 2, {2, 2}}}) {
    Index from = 0;
    for (std::size_t i = 0; i < o.extents.size(); from += o.extents[i++]) {
      cases.push_back({text("split axis ", o.axis, " part ", i),
                       {real(o.shape)},
                       [=](auto in) { return split(in[0], o.extents, o.axis)[i]; },
                       [=]<class T>(const Arrays<T>& in) {
                         return naive::slice(in[0], o.axis < 0 ? o.axis + o.shape.rank() : o.axis, from,
                                             from + o.extents[i]);
                       },
                       {.view = true}});
    }
  }
  // All parts at once: their gradients meet in x.
  cases.push_back({"product of the halves of a split",
                   {real({2, 6})},
                   [](auto in) {
                     const std::vector<Tensor> half = split(in[0], std::array<Index, 2>{3, 3}, 1);
                     return mul(half[0], half[1]);
                   },
                   []<class T>(const Arrays<T>& in) {
                     return naive::zip(naive::slice(in[0], 1, 0, 3), naive::slice(in[0], 1, 3, 6),
                                       [](const T& a, const T& b) { return a * b; });
                   }});
  return cases;
}

std::vector<OpCase> contiguous_cases() {
  std::vector<OpCase> cases;
  for (const Shape& shape : {Shape{}, {5}, {2, 3}, {0, 2}, {2, 3, 4}, {2, 1, 2, 1, 3, 2}})
    cases.push_back({"contiguous",
                     {real(shape)},
                     [](auto in) { return contiguous(in[0]); },
                     []<class T>(const Arrays<T>& in) { return in[0]; },
                     {.view = true}});
  cases.push_back({"contiguous of a transpose",
                   {real({617, 487})},
                   [](auto in) { return contiguous(transpose(in[0])); },
                   []<class T>(const Arrays<T>& in) {
                     return naive::permute(in[0], {1, 0});
                   },
                   {.view = true, .large = true}});
  return cases;
}

std::vector<OpCase> view_chain_cases() {
  // Views of views of views, read by an op that wants rows.
  return {
      {"softmax of a slice of a transpose of a reshape",
       {real({4, 6})},
       [](auto in) {
         return softmax(slice(transpose(reshape(in[0], {2, 3, 4}), 0, 2), 0, 1, 4, 2));
       },
       []<class T>(const Arrays<T>& in) {
         return naive::softmax(naive::slice(naive::permute(naive::reshape(in[0], {2, 3, 4}), {2, 1, 0}), 0, 1, 4, 2));
       }},
      {"product of an expanded and a permuted view",
       {real({3, 1}), real({2, 3})},
       [](auto in) {
         return mul(expand(in[0], {3, 2}), permute(in[1], {1, 0}));
       },
       []<class T>(const Arrays<T>& in) {
         return naive::zip(naive::expand(in[0], {3, 2}), naive::permute(in[1], {1, 0}),
                           [](const T& a, const T& b) { return a * b; });
       }},
      {"reshape of an expanded view",
       {real({3, 1})},
       [](auto in) {
         return reshape(expand(in[0], {3, 4}), {2, 6});
       },
       []<class T>(const Arrays<T>& in) {
         return naive::reshape(naive::expand(in[0], {3, 4}), {2, 6});
       },
       {.view = true}}};  // of equal rows, no copy is needed
}

const Op kViews[] = {{"reshape", reshape_cases},      {"permute", permute_cases}, {"transpose", transpose_cases},
                     {"slice", slice_cases},          {"expand", expand_cases},   {"select", select_cases},
                     {"squeeze", squeeze_cases},      {"split", split_cases},     {"contiguous", contiguous_cases},
                     {"view_chain", view_chain_cases}};
INSTANTIATE_TEST_SUITE_P(View, OpJudges, testing::ValuesIn(kViews), op_name);

TEST(View, SharesStorageUnlessStridesForbid) {
  const Tensor x = random(real({4, 6}), 1);
  EXPECT_EQ(reshape(x, {2, 12}).storage(), x.storage());
  EXPECT_EQ(reshape(transpose(x), {6, 2, 2}).storage(), x.storage());  // splitting an axis never needs a copy
  EXPECT_NE(reshape(transpose(x), {24}).storage(), x.storage());
  EXPECT_EQ(reshape(slice(x, 1, 0, 6, 2), {12}).storage(), x.storage());  // evenly strided all through
  for (const Tensor& y : {transpose(x), permute(x, {1, 0}), slice(x, 0, 1, 3), expand(slice(x, 0, 0, 1), {5, 6}),
                          unsqueeze(x, 0), detach(x)})
    EXPECT_EQ(y.storage(), x.storage());
  for (const Tensor& part : split(x, std::array<Index, 2>{1, 3}, 0)) EXPECT_EQ(part.storage(), x.storage());
  EXPECT_TRUE(contiguous(transpose(x)).is_contiguous());
  EXPECT_EQ(expand(slice(x, 0, 0, 1), {5, 6}).stride(0), 0);
}

TEST(View, WorksOnEveryType) {
  for (DType dtype : kAllDTypes) {
    const Tensor x = from_values(std::vector<double>{0, 1, 2, 3, 4, 5}, {2, 3}, dtype);
    const std::vector<double> across{0, 3, 1, 4, 2, 5};
    EXPECT_EQ(transpose(x).to_vector(), across) << dtype;
    EXPECT_EQ(contiguous(transpose(x)).to_vector(), across) << dtype;
    EXPECT_EQ(reshape(transpose(x), {6}).to_vector(), across) << dtype;
    EXPECT_EQ(slice(x, 1, 1, 3).to_vector(), (std::vector<double>{1, 2, 4, 5})) << dtype;
  }
}

TEST(View, OfNothing) {
  // Where there is no element there is no address either; every window on it is empty.
  const Tensor none = empty({3, 0, 2});
  EXPECT_EQ(slice(none, 0, 1, 3).shape(), (Shape{2, 0, 2}));
  EXPECT_EQ(slice(none, 2, 1, 2).shape(), (Shape{3, 0, 1}));
  EXPECT_EQ(slice(ones({4}), 0, 4, 4).numel(), 0);
  EXPECT_EQ(slice(ones({4, 2}), 0, 4, 4).shape(), (Shape{0, 2}));
  EXPECT_EQ(split(none, std::array<Index, 2>{1, 2}, 0)[1].shape(), (Shape{2, 0, 2}));
  EXPECT_EQ(split(ones({2, 2}), std::array<Index, 3>{1, 1, 0}, 1)[2].shape(), (Shape{2, 0}));
  EXPECT_EQ(slice(slice(none, 0, 2, 3), 2, 1, 2).shape(), (Shape{1, 0, 1}));
  EXPECT_EQ(reshape(none, {0, 7}).shape(), (Shape{0, 7}));
  EXPECT_EQ(expand(empty({1, 0}), {4, 0}).shape(), (Shape{4, 0}));
}

TEST(View, DetachIsAConstant) {
  const Tensor x = values({1, 2, 3});
  Tape tape;
  tape.watch(x);
  const Tensor y = detach(x);
  EXPECT_FALSE(tape.knows(y));
  EXPECT_NE(y.id(), x.id());
  const Gradients g = tape.backward(mul(x, y), values({1, 1, 1}));
  EXPECT_EQ(g[x].to_vector(), x.to_vector());
}

TEST(View, ConversionRoundsAndItsGradientConvertsBack) {
  const std::vector<DType> floats{DType::f64, DType::f32, DType::bf16, DType::f16};
  for (DType from : floats)
    for (DType onto : floats) {
      const Tensor x = random(real({3, 5}), 1, from), dy = random(real({3, 5}), 2, onto);
      const Played p = play([=](auto in) { return to(in[0], onto); }, {{x}}, dy);
      EXPECT_EQ(p.y.dtype(), onto);
      EXPECT_EQ(p.dx[0].dtype(), from);
      EXPECT_EQ(bits(p.y), bits(from_values(x.to_vector(), x.shape(), onto))) << from << " to " << onto;
      EXPECT_EQ(bits(p.dx[0]), bits(from_values(dy.to_vector(), dy.shape(), from))) << onto << " back to " << from;
    }
  const Tensor x = transpose(random(real({3, 5}), 3));
  EXPECT_EQ(to(x, DType::f32).to_vector(), from_values(x.to_vector(), x.shape(), DType::f32).to_vector());
  EXPECT_EQ(to(values({1.9, -1.9, kNan, 300}), DType::i32).to_vector(), (std::vector<double>{1, -1, 0, 300}));
  EXPECT_EQ(to(ids({3, 4}), DType::f16).to_vector(), (std::vector<double>{3, 4}));
  EXPECT_EQ(to(x, Device{}).to_vector(), x.to_vector());
  Tape tape;  // integers have no gradient
  tape.watch(x);
  EXPECT_FALSE(tape.knows(to(x, DType::i64)));
}

TEST(View, OneExtentFollowsFromTheOthers) {
  const Tensor x = random(real({4, 6}), 1);
  EXPECT_EQ(reshape(x, {-1}).shape(), (Shape{24}));
  EXPECT_EQ(reshape(x, -1).shape(), (Shape{24}));
  EXPECT_EQ(reshape(x, 24).shape(), (Shape{24}));
  EXPECT_EQ(reshape(x, {2, -1, 3}).shape(), (Shape{2, 4, 3}));
  EXPECT_EQ(reshape(x, {24, -1}).shape(), (Shape{24, 1}));
  EXPECT_EQ(reshape(ones({1}), {}).shape(), (Shape{}));
  EXPECT_EQ(reshape(ones({0, 3}), {-1, 3}).shape(), (Shape{0, 3}));
  EXPECT_TRUE(refuses([&] { reshape(x, {-1, -1}); }, "reshape", {"two extents"}));
  EXPECT_TRUE(refuses([&] { reshape(x, {5, -1}); }, "reshape", {"[4, 6]", "24", "5"}));
  EXPECT_TRUE(refuses([&] { reshape(ones({0, 3}), {0, -1}); }, "reshape", {"[0, 3]"}));
  EXPECT_TRUE(refuses([&] { reshape(x, {-2, -1}); }, "", {"-2"}));
}

TEST(View, Refusals) {
  EXPECT_TRUE(refuses([&] { select(ones({2, 3}), 1, 3); }, "select", {"3", "axis 1"}));
  EXPECT_TRUE(refuses([&] { ones({})[0]; }, "select", {"axis 0"}));
  const Tensor x = ones({2, 3});
  EXPECT_TRUE(refuses([&] { reshape(x, {4, 2}); }, "reshape", {"[2, 3]", "[4, 2]"}));
  EXPECT_TRUE(refuses([&] { permute(x, {0}); }, "permute", {"1", "2"}));
  EXPECT_TRUE(refuses([&] { permute(x, {0, 0}); }, "permute", {"0"}));
  EXPECT_TRUE(refuses([&] { permute(x, {0, 2}); }, "permute", {"2"}));
  EXPECT_TRUE(refuses([&] { transpose(x, 0, 2); }, "transpose", {"axis 2"}));
  EXPECT_TRUE(refuses([&] { transpose(ones({3})); }, "transpose", {"axis -2"}));
  EXPECT_TRUE(refuses([&] { slice(x, 2, 0, 1); }, "slice", {"axis 2"}));
  EXPECT_TRUE(refuses([&] { slice(x, 1, 0, 4); }, "slice", {"4", "3"}));
  EXPECT_TRUE(refuses([&] { slice(x, 1, -4, 3); }, "slice", {"-4", "3"}));
  EXPECT_TRUE(refuses([&] { slice(x, 1, 2, 1); }, "slice", {"2", "1"}));
  EXPECT_TRUE(refuses([&] { slice(x, 1, 0, 3, 0); }, "slice", {"step", "0"}));
  EXPECT_TRUE(refuses([&] { slice(x, 1, 0, 3, -1); }, "slice", {"step", "-1"}));
  EXPECT_TRUE(refuses([&] { expand(x, {2, 4}); }, "expand", {"[2, 3]", "[2, 4]"}));
  EXPECT_TRUE(refuses([&] { expand(x, {3}); }, "expand", {"[2, 3]", "[3]"}));
  EXPECT_TRUE(refuses([&] { squeeze(x, 0); }, "squeeze", {"0", "2"}));
  EXPECT_TRUE(refuses([&] { squeeze(x, 2); }, "squeeze", {"axis 2"}));
  EXPECT_TRUE(refuses([&] { unsqueeze(x, 4); }, "unsqueeze", {"axis 4"}));
  EXPECT_TRUE(refuses([&] { unsqueeze(ones({1, 1, 1, 1, 1, 1}), 0); }, "", {"rank", "6"}));
  EXPECT_TRUE(refuses([&] { split(x, std::array<Index, 2>{1, 1}, 1); }, "split", {"2", "3"}));
  EXPECT_TRUE(refuses([&] { split(x, std::array<Index, 2>{4, -1}, 1); }, "split", {"-1"}));
  EXPECT_TRUE(refuses([&] { split(x, std::array<Index, 1>{2}, 5); }, "split", {"axis 5"}));
}

}  // namespace
}  // namespace hilt
