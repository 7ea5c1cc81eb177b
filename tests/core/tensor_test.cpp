// Identity, views, making, converting and printing of tensors.
#include "core/tensor.h"
#include <gtest/gtest.h>
#include <cmath>
#include <iomanip>
#include <limits>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include "core/device.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"

namespace hilt {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
constexpr Index kMax = std::numeric_limits<Index>::max();

using Numbers = std::vector<double>;
template <class T> std::vector<T> list(std::initializer_list<T> v) { return v; }

// ---- identity -----------------------------------------------------------------------------------

TEST(Tensor, UndefinedIsFalseAndSaysSo) {
  Tensor x;
  EXPECT_FALSE(bool(x));
  EXPECT_EQ(x.id(), 0u);
  EXPECT_EQ(x.numel(), 0);
  EXPECT_EQ(x.bytes(), 0u);
  EXPECT_EQ(to_string(x), "undefined");
  EXPECT_EQ(error_of([&] { (void)x.data<float>(); }),
            "usage: Tensor: asked for f32 data of an undefined tensor, type f32");
  EXPECT_EQ(error_of([&] { (void)x.mutable_data<double>(); }),
            "usage: Tensor: asked for f64 data of an undefined tensor, type f32");
  EXPECT_EQ(error_of([&] { (void)x.item(); }), "usage: item: undefined tensor");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {1}, {1}, 0); }), "usage: Tensor: undefined storage");
}

TEST(Tensor, OneThatWasMovedFromIsUndefinedAndSaysSo) {
  Tensor x = zeros({2});
  const Tensor y = std::move(x);
  EXPECT_FALSE(x);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(x.id(), 0u);
  EXPECT_EQ(x.numel(), 0);
  EXPECT_EQ(error_of([&] { (void)x.data<float>(); }),
            "usage: Tensor: asked for f32 data of an undefined tensor, type f32");
  for (const auto& use : std::vector<std::function<void()>>{[&] { (void)x.raw(); }, [&] { (void)x.device(); },
                                                            [&] { (void)x.to_vector(); }, [&] { (void)clone(x); }})
    EXPECT_NE(error_of(use).find("undefined"), std::string::npos) << error_of(use);
}

TEST(Tensor, CopiesKeepTheIdAndEveryNewOneHasItsOwn) {
  const Tensor x = zeros({3});
  const Tensor copy = x;
  EXPECT_TRUE(bool(x));
  EXPECT_EQ(copy.id(), x.id());
  EXPECT_EQ(copy.storage(), x.storage());
  EXPECT_NE(as_strided(x, {3}, {1}, 0).id(), x.id());
  EXPECT_NE(clone(x).id(), x.id());

  std::set<TensorId> ids;
  std::mutex mutex;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t)
      threads.emplace_back([&] {
        std::vector<TensorId> mine;
        for (int i = 0; i < 2000; ++i) mine.push_back(as_strided(x, {}, {}, 0).id());
        const std::lock_guard lock(mutex);
        ids.insert(mine.begin(), mine.end());
      });
  }
  EXPECT_EQ(ids.size(), 16000u);
  EXPECT_FALSE(ids.contains(0));
}

TEST(Tensor, DescribesItself) {
  const Tensor x = zeros({2, 3, 4}, DType::f64);
  EXPECT_EQ(x.rank(), 3);
  EXPECT_EQ(x.dim(1), 3);
  EXPECT_EQ(x.dim(-1), 4);
  EXPECT_EQ(x.numel(), 24);
  EXPECT_EQ(x.bytes(), 192u);
  EXPECT_EQ(x.stride(0), 12);
  EXPECT_EQ(x.stride(-1), 1);
  EXPECT_EQ(x.offset(), 0);
  EXPECT_EQ(x.device(), Device{});
  EXPECT_EQ(x.dtype(), DType::f64);
  EXPECT_EQ(empty_like(x).shape(), x.shape());
  EXPECT_EQ(zeros_like(x).dtype(), DType::f64);
}

TEST(Tensor, DataIsOfItsTypeAlone) {
  Tensor x = zeros({2}, DType::bf16);
  EXPECT_EQ(x.data<bf16>()[0].bits, 0);
  EXPECT_EQ(error_of([&] { (void)x.data<f16>(); }), "usage: Tensor: asked for f16 data of a tensor of type bf16");
  EXPECT_EQ(error_of([&] { (void)x.mutable_data<float>(); }),
            "usage: Tensor: asked for f32 data of a tensor of type bf16");
}

TEST(Tensor, DataBeginsAtTheOffsetAndWritingMarksTheStorage) {
  const Tensor x = arange(10, DType::i32);
  Tensor tail = as_strided(x, {3}, {2}, 5);
  EXPECT_EQ(tail.data<std::int32_t>()[0], 5);
  EXPECT_EQ(tail.raw(), x.raw() + 20);
  const std::uint64_t version = x.storage().version();
  tail.mutable_data<std::int32_t>()[2] = 70;
  EXPECT_EQ(x.storage().version(), version + 1);
  *reinterpret_cast<std::int32_t*>(tail.mutable_raw()) = 50;
  EXPECT_EQ(x.storage().version(), version + 2);
  EXPECT_EQ(x.to_vector<std::int32_t>(), (list<std::int32_t>({0, 1, 2, 3, 4, 50, 6, 70, 8, 9})));
  EXPECT_EQ(x.storage().version(), version + 2);  // looking is not writing
}

// ---- windows ------------------------------------------------------------------------------------

TEST(AsStrided, ShowsExactlyTheElementsThatStridesName) {
  const Tensor x = arange(24, DType::i64);
  EXPECT_EQ(as_strided(x, {4, 6}, {1, 4}, 0).to_vector<std::int64_t>()[7], 1 + 4);
  EXPECT_EQ(as_strided(x, {2, 3}, {12, 2}, 3).to_vector<std::int64_t>(), (list<std::int64_t>({3, 5, 7, 15, 17, 19})));
  EXPECT_EQ(as_strided(x, {3, 2}, {0, 1}, 4).to_vector<std::int64_t>(), (list<std::int64_t>({4, 5, 4, 5, 4, 5})));
  EXPECT_EQ(as_strided(x, {3, 3}, {1, 1}, 0).to_vector<std::int64_t>(),
            (list<std::int64_t>({0, 1, 2, 1, 2, 3, 2, 3, 4})));  // overlapping
  EXPECT_EQ(as_strided(x, {}, {}, 23).item(), 23);
  EXPECT_EQ(as_strided(x, {2}, {23}, 0).to_vector<std::int64_t>(), (list<std::int64_t>({0, 23})));
  const Tensor window = as_strided(as_strided(x, {4}, {2}, 6), {2}, {5}, 1);  // of the storage, not of the view
  EXPECT_EQ(window.to_vector<std::int64_t>(), (list<std::int64_t>({1, 6})));
  EXPECT_EQ(window.storage(), x.storage());
}

TEST(AsStrided, ReachesTheLastElementAndNotOneFurther) {
  const Tensor x = zeros({24}, DType::i64);
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {24}, {1}, 0); }), "nothing");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {24}, {1}, 1); }),
            "usage: Tensor: i64[24] from element 1 on reaches beyond its storage of 24 elements");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {2, 2}, {20, 3}, 0); }), "nothing");
  EXPECT_EQ(error_of([&] {
              (void)as_strided(x, {2, 2}, {20, 4}, 0);
            }),
            "usage: Tensor: i64[2, 2] from element 0 on reaches beyond its storage of 24 elements");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {}, {}, 24); }),
            "usage: Tensor: i64[] from element 24 on reaches beyond its storage of 24 elements");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {1}, {1}, -1); }),
            "usage: Tensor: i64[1] from element -1 on reaches beyond its storage of 24 elements");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {2}, {-1}, 5); }), "usage: Tensor: stride -1 of axis 0 is negative");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {3}, {kMax}, 0); }),
            "usage: Tensor: 2 x 9223372036854775807 overflows 64 bits");
  EXPECT_EQ(error_of([&] {
              (void)as_strided(x, {2, 2}, {kMax, 1}, 0);
            }),
            "usage: Tensor: 9223372036854775807 + 1 overflows 64 bits");
  // Without elements there is nothing to reach, up to the end of the storage.
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {0}, {1}, 24); }), "nothing");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {0, 9}, {100, 100}, 0); }), "nothing");
  EXPECT_EQ(error_of([&] { (void)as_strided(x, {0}, {1}, 25); }),
            "usage: Tensor: i64[0] from element 25 on reaches beyond its storage of 24 elements");
}

TEST(AsStrided, CountsElementsOfItsOwnType) {
  const Storage s = Storage::allocate(15, {});
  EXPECT_EQ(error_of([&] { Tensor(s, {15}, DType::u8); }), "nothing");
  EXPECT_EQ(error_of([&] { Tensor(s, {7}, DType::f16); }), "nothing");
  EXPECT_EQ(error_of([&] { Tensor(s, {8}, DType::f16); }),
            "usage: Tensor: f16[8] from element 0 on reaches beyond its storage of 7 elements");
  EXPECT_EQ(error_of([&] { Tensor(s, {2}, DType::f64); }),
            "usage: Tensor: f64[2] from element 0 on reaches beyond its storage of 1 elements");
}

TEST(Tensor, KnowsWhetherItIsContiguous) {
  const Tensor x = zeros({24});
  const auto is = [&](const Shape& shape, const Strides& strides) {
    return as_strided(x, shape, strides, 0).is_contiguous();
  };
  EXPECT_TRUE(is({2, 3, 4}, {12, 4, 1}));
  EXPECT_TRUE(is({}, {}));
  EXPECT_TRUE(is({1, 3, 1}, {7, 1, 20}));  // an axis of one is never stepped along
  EXPECT_TRUE(is({0, 3}, {9, 9}));
  EXPECT_FALSE(is({2, 3}, {1, 2}));
  EXPECT_FALSE(is({2, 3}, {4, 1}));
  EXPECT_FALSE(is({3}, {2}));
  EXPECT_FALSE(is({3}, {0}));
  EXPECT_FALSE(is({2, 3}, {3, 0}));
  EXPECT_TRUE(as_strided(x, {2, 3}, {3, 1}, 5).is_contiguous());  // wherever it begins
}

TEST(BroadcastTo, RepeatsByStridesOfZero) {
  const Tensor x = from_values(Numbers({1, 2}), {2, 1});
  const Tensor y = broadcast_to("op", x, {3, 2, 2});
  EXPECT_EQ(y.to_vector(), Numbers({1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2}));
  EXPECT_EQ(y.storage(), x.storage());
  EXPECT_EQ(y.strides()[0], 0);
  EXPECT_EQ(y.strides()[2], 0);
  EXPECT_EQ(broadcast_to("op", x, {2, 1}).to_vector(), Numbers({1, 2}));
  EXPECT_EQ(broadcast_to("op", full({}, 4), {2, 0}).numel(), 0);
  const Tensor offset = as_strided(arange(10, DType::f64), {2, 1}, {3, 1}, 4);
  EXPECT_EQ(broadcast_to("op", offset, {2, 2}).to_vector(), Numbers({4, 4, 7, 7}));
  EXPECT_EQ(error_of([&] {
              (void)broadcast_to("op", x, {3, 3});
            }),
            "usage: op: shapes [2, 1] and [3, 3] do not broadcast: axis -2 has 2 and 3");
  EXPECT_EQ(error_of([&] { (void)broadcast_to("op", x, {2}); }), "usage: op: cannot repeat [2, 1] to [2]");
  EXPECT_EQ(error_of([&] { (void)broadcast_to("op", x, {1, 1}); }), "usage: op: cannot repeat [2, 1] to [1, 1]");
}

// ---- making -------------------------------------------------------------------------------------

TEST(Make, FullConvertsToEveryType) {
  for (DType t : kAllDTypes) {
    EXPECT_EQ(full({2, 2}, 3, t).to_vector(), Numbers({3, 3, 3, 3})) << t;
    EXPECT_EQ(zeros({2}, t).to_vector(), Numbers({0, 0})) << t;
    EXPECT_EQ(ones({2}, t).to_vector(), Numbers({1, 1})) << t;
    EXPECT_EQ(full({}, 1, t).dtype(), t);
  }
  EXPECT_EQ(full({}, 300, DType::u8).item(), 255);
  EXPECT_EQ(full({}, -1, DType::u8).item(), 0);
  EXPECT_EQ(full({}, 2.9, DType::i32).item(), 2);
  EXPECT_EQ(full({}, -2.9, DType::i64).item(), -2);
  EXPECT_EQ(full({}, kNan, DType::i32).item(), 0);
  EXPECT_EQ(full({}, kInf, DType::i64).to_vector<std::int64_t>()[0], kMax);
  EXPECT_EQ(full({}, 1e300, DType::f32).item(), kInf);
  EXPECT_EQ(full({}, 65520, DType::f16).item(), kInf);
  EXPECT_TRUE(std::isnan(full({}, kNan, DType::bf16).item()));
}

TEST(Make, FullFillsBeyondOnePiece) {
  const Tensor x = full({200001}, 7, DType::i32);
  const std::vector<std::int32_t> v = x.to_vector<std::int32_t>();
  EXPECT_EQ(std::count(v.begin(), v.end(), 7), 200001);
}

TEST(Make, ArangeCountsFromZero) {
  for (DType t : kAllDTypes) EXPECT_EQ(arange(4, t).to_vector(), Numbers({0, 1, 2, 3})) << t;
  EXPECT_EQ(arange(0).numel(), 0);
  EXPECT_EQ(arange(3).dtype(), DType::i64);
  EXPECT_EQ(error_of([] { (void)arange(-1); }), "usage: Shape: extent -1 of axis 0 is negative");
}

TEST(Make, FromValuesTakesRowMajorOrder) {
  const Tensor x = from_values(Numbers({1, 2, 3, 4, 5, 6}), {2, 3});
  EXPECT_EQ(x.dtype(), DType::f64);
  EXPECT_EQ(x.data<double>()[x.stride(0)], 4);
  EXPECT_EQ(from_values(list<float>({1.5f}), {1}).dtype(), DType::f32);
  EXPECT_EQ(from_values(list<std::int64_t>({kMax}), {1}).to_vector<std::int64_t>()[0], kMax);
  EXPECT_EQ(from_values(list<std::int32_t>({-5}), {1}).item(), -5);
  EXPECT_EQ(from_values(list<std::uint8_t>({200}), {1}).item(), 200);
  EXPECT_EQ(from_values(Numbers({1.5, -2.5}), {2}, DType::i32).to_vector(), Numbers({1, -2}));
  EXPECT_EQ(from_values(std::vector<double>{}, {0, 3}).numel(), 0);
  EXPECT_EQ(error_of([] { (void)from_values(Numbers({1, 2}), {3}); }), "usage: from_values: 2 values for a shape [3]");
  EXPECT_EQ(error_of([] { (void)from_values(std::vector<double>{}, {}); }),
            "usage: from_values: 0 values for a shape []");
  std::vector<double> mine{1, 2};
  const Tensor own = from_values(mine, {2});
  mine[0] = 9;  // it has its own copy
  EXPECT_EQ(own.to_vector(), Numbers({1, 2}));
}

TEST(Make, ItemIsTheOnlyElement) {
  EXPECT_EQ(full({1, 1, 1}, 2.5, DType::f16).item(), 2.5);
  EXPECT_EQ(as_strided(arange(5), {}, {}, 3).item(), 3);
  EXPECT_EQ(error_of([] { (void)zeros({2}).item(); }), "usage: item: needs one element, got shape [2]");
  EXPECT_EQ(error_of([] { (void)zeros({0}).item(); }), "usage: item: needs one element, got shape [0]");
}

TEST(Make, ToVectorConvertsAndFollowsStrides) {
  const Tensor x = as_strided(from_values(Numbers({0.5, 1.5, -2.5, 300.7}), {4}), {2, 2}, {1, 2}, 0);
  EXPECT_EQ(x.to_vector(), Numbers({0.5, -2.5, 1.5, 300.7}));
  EXPECT_EQ(x.to_vector<float>(), list<float>({0.5f, -2.5f, 1.5f, 300.7f}));
  EXPECT_EQ(x.to_vector<std::int64_t>(), list<std::int64_t>({0, -2, 1, 300}));
  EXPECT_EQ(x.to_vector<std::int32_t>(), list<std::int32_t>({0, -2, 1, 300}));
  EXPECT_EQ(x.to_vector<std::uint8_t>(), list<std::uint8_t>({0, 0, 1, 255}));
  EXPECT_TRUE(zeros({3, 0}).to_vector().empty());
  const std::size_t live = memory_stats().live;
  (void)x.to_vector();
  EXPECT_EQ(memory_stats().live, live);
}

TEST(Make, CloneIsDenseAndItsOwn) {
  const Tensor x = as_strided(arange(6, DType::f64), {3, 2}, {1, 3}, 0);
  Tensor y = clone(x);
  EXPECT_TRUE(y.is_contiguous());
  EXPECT_EQ(y.to_vector(), x.to_vector());
  EXPECT_NE(y.storage(), x.storage());
  y.mutable_data<double>()[0] = 100;
  EXPECT_EQ(x.to_vector()[0], 0);
}

TEST(Make, DenseCopiesOnlyWhatIsNot) {
  const Tensor x = arange(6, DType::f64), middle = as_strided(x, {3}, {1}, 2), gaps = as_strided(x, {3}, {2}, 0);
  EXPECT_EQ(dense(x).id(), x.id());
  EXPECT_EQ(dense(middle).id(), middle.id());
  EXPECT_NE(dense(gaps).storage(), x.storage());
  EXPECT_EQ(dense(gaps).to_vector(), Numbers({0, 2, 4}));
}

TEST(Make, NoOtherDeviceIsKnown) {
  if (kHasCuda) GTEST_SKIP() << "built with CUDA";
  const Device gpu{Device::Kind::cuda, 0};
  EXPECT_EQ(error_of([&] { (void)empty({1}, DType::f32, gpu); }),
            "usage: Storage: built without CUDA, asked for cuda:0");
}

// ---- printing -----------------------------------------------------------------------------------

TEST(Print, ScalarsAndVectors) {
  EXPECT_EQ(to_string(full({}, 2.5)), "2.5 f32[]");
  EXPECT_EQ(to_string(from_values(Numbers({1, -0.5, 3e10, 1e-7}), {4})), "[1, -0.5, 3e+10, 1e-07] f64[4]");
  EXPECT_EQ(to_string(arange(3)), "[0, 1, 2] i64[3]");
  EXPECT_EQ(to_string(zeros({0})), "[] f32[0]");
  EXPECT_EQ(to_string(from_values(list<std::uint8_t>({0, 65, 255}), {3})), "[0, 65, 255] u8[3]");
  EXPECT_EQ(to_string(from_values(Numbers({kNan, kInf, -kInf, -0.0}), {4}, DType::f16)), "[nan, inf, -inf, -0] f16[4]");
}

TEST(Print, PrecisionFollowsTheType) {
  EXPECT_EQ(to_string(full({}, 1 / 3., DType::f64)), "0.33333333 f64[]");
  EXPECT_EQ(to_string(full({}, 1 / 3., DType::f32)), "0.333333 f32[]");
  EXPECT_EQ(to_string(full({}, 1 / 3., DType::bf16)), "0.333984 bf16[]");
}

TEST(Print, NestsBracketsByAxis) {
  EXPECT_EQ(to_string(from_values(list<std::int32_t>({1, 2, 3, 4, 5, 6}), {2, 3})),
            "[[1, 2, 3],\n [4, 5, 6]] i32[2, 3]");
  EXPECT_EQ(to_string(arange(8)).size(), to_string(arange(8)).size());
  EXPECT_EQ(to_string(as_strided(arange(8), {2, 2, 2}, {4, 2, 1}, 0)),
            "[[[0, 1],\n  [2, 3]],\n [[4, 5],\n  [6, 7]]] i64[2, 2, 2]");
  EXPECT_EQ(to_string(zeros({2, 0})), "[[],\n []] f32[2, 0]");
  EXPECT_EQ(to_string(zeros({0, 2})), "[] f32[0, 2]");
  EXPECT_EQ(to_string(as_strided(arange(8), {2, 2}, {1, 4}, 1)), "[[1, 5],\n [2, 6]] i64[2, 2]");
  EXPECT_EQ(to_string(as_strided(arange(8), {2, 2}, {0, 3}, 1)), "[[1, 4],\n [1, 4]] i64[2, 2]");
}

TEST(Print, CutsLongAxesOfLargeTensorsToTheirEnds) {
  EXPECT_EQ(to_string(arange(1001)), "[0, 1, 2, .., 998, 999, 1000] i64[1001]");
  const std::string whole = to_string(arange(1000));
  EXPECT_EQ(whole.find(".."), std::string::npos);
  EXPECT_NE(whole.find("499, 500"), std::string::npos);
  const Tensor x = as_strided(arange(1400), {200, 7}, {7, 1}, 0);
  EXPECT_EQ(to_string(x),
            "[[0, 1, 2, .., 4, 5, 6],\n [7, 8, 9, .., 11, 12, 13],\n [14, 15, 16, .., 18, 19, 20],\n ..,\n "
            "[1379, 1380, 1381, .., 1383, 1384, 1385],\n [1386, 1387, 1388, .., 1390, 1391, 1392],\n [1393, 1394, "
            "1395, .., 1397, 1398, 1399]] "
            "i64[200, 7]");
  EXPECT_EQ(to_string(as_strided(arange(1200), {200, 6}, {6, 1}, 0)).substr(0, 21),
            "[[0, 1, 2, 3, 4, 5],\n");  // six are all ends
}

TEST(Print, LeavesTheStreamAsItWas) {
  std::ostringstream os;
  os << std::hex << std::setprecision(2) << std::showpos << arange(17) << ' ' << 255 << ' ' << 1 / 3.;
  EXPECT_EQ(os.str(), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16] i64[17] ff +0.33");
}

}  // namespace
}  // namespace hilt
