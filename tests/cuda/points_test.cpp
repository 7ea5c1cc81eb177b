// Orders of points on a GPU: those of the CPU, to the last entry.
#include "ops/hilbert/points/points.h"
#include <gtest/gtest.h>
#include <cmath>
#include <limits>
#include "core/cuda/context.h"
#include "core/random.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"

namespace hilt {
namespace {

const Device kGpu{Device::Kind::cuda, 0};
using Rows = std::vector<std::int64_t>;

class PointsOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << gpu_descriptions()[0];
  }
};

Rows rows(const Tensor& x) { return x.to_vector<std::int64_t>(); }

void expect_same(const Tensor& points, const char* kind, int bits, const std::vector<Index>& documents) {
  const PointOrder want = order_of_points(points, kind, bits, documents),
                   got = order_of_points(moved(points, kGpu), kind, bits, documents);
  EXPECT_EQ(got.token_at.device(), kGpu);
  const auto where = [&] {
    return testing::Message() << kind << ", " << bits << " bits, " << points.dtype() << points.shape() << ", "
                              << documents.size() << " documents";
  };
  EXPECT_EQ(rows(got.token_at), rows(want.token_at)) << where();
  EXPECT_EQ(rows(got.position_of), rows(want.position_of)) << where();
}

TEST_F(PointsOnGpu, AreThoseOfTheCpu) {
  for (const int axes : {2, 3})
    for (const char* kind : {"hilbert", "hilbert-trans", "morton", "morton-trans"})
      for (const int bits : {1, 3, 7, 16, axes == 2 ? 30 : 20})
        for (const Index n : {0, 1, 33, 5000, 20001}) {
          const Tensor x = add(mul(rand({n, axes}, {1, static_cast<std::uint64_t>(n)}), 37), -5);
          const std::vector<Index> three = n < 33 ? std::vector<Index>{} : std::vector<Index>{1, n / 3, n - n / 3 - 1};
          for (const auto& documents : {std::vector<Index>{}, three}) {
            expect_same(x, kind, bits, documents);
            if (bits == 7)  // ties
              for (const DType type : {DType::bf16, DType::f16, DType::f64})
                expect_same(to(x, type), kind, bits, documents);
          }
          if (bits < 7) continue;
          const Tensor cells = mul(rand({n, axes}, {2, 1}), 100);
          for (const DType type : {DType::i64, DType::i32, DType::u8}) expect_same(to(cells, type), kind, bits, three);
        }
}

TEST_F(PointsOnGpu, AMillionOfThemInManyDocuments) {
  const std::vector<Index> documents(1000, 1000);
  for (const int axes : {2, 3}) {
    const Tensor x = randn({1'000'000, axes}, {3, 3});
    expect_same(x, "hilbert", 16, {});
    expect_same(x, "hilbert", 16, documents);
    expect_same(zeros({1'000'000, axes}), "morton", 16, documents);  // no cube at all
  }
}

// Nobody waits to look: such rows come last in their document, and as no row.
TEST_F(PointsOnGpu, RowsWithoutACellAreNone) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const std::vector<double> x{0.2, 0.1, nan, 0, 0.9, 0.9, 0.1, 0.1, /**/ 0.5, 0.5, 0, inf, 0.1, 0};
  const PointOrder got = order_of_points(moved(from_values(x, {7, 2}, DType::f32), kGpu), "morton", 4, {4, 3});
  EXPECT_EQ(rows(got.token_at), (Rows{3, 0, 2, -1, 6, 4, -1}));
  EXPECT_EQ(rows(got.position_of), (Rows{1, -1, 2, 0, 5, -1, 4}));
  const Tensor picked = gather(moved(ones({7, 1}), kGpu), 0, got.token_at);
  const std::vector<double> values = picked.to_vector();
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(std::isnan(values[i]), i == 3 || i == 6) << i;
  const PointOrder behind = order_of_points(moved(from_values(x, {7, 2}, DType::f32), kGpu), "morton", 4, {4, 1});
  EXPECT_EQ(rows(behind.token_at), (Rows{3, 0, 2, -1, 4, 5, 6}));
  EXPECT_EQ(rows(behind.position_of), (Rows{1, -1, 2, 0, 4, 5, 6}));
  const PointOrder cells = order_of_points(moved(from_values(Rows{3, 4, 1, 0}, {2, 2}), kGpu), "morton", 2);
  EXPECT_EQ(rows(cells.token_at), (Rows{1, -1}));
}

TEST_F(PointsOnGpu, NobodyWaits) {
  const Tensor x = moved(rand({5000, 3}, {1, 2}), kGpu);
  (void)order_of_points(x);  // memory comes from the pool from here on
  const std::uint64_t before = device_counters(kGpu).host_waits;
  const PointOrder order = order_of_points(x, "hilbert", 16, {2000, 3000});
  EXPECT_EQ(device_counters(kGpu).host_waits, before);
}

TEST_F(PointsOnGpu, KeysThatAreTooLongAreRefused) {
  const Tensor x = moved(zeros({40, 2}), kGpu);
  EXPECT_EQ(error_of([&] { (void)order_of_points(x, "hilbert", 31, std::vector<Index>(40, 1)); }),
            "usage: order_of_points: 40 documents of 31 bits on 2 axes do not fit one key of a GPU; take fewer bits");
}

}  // namespace
}  // namespace hilt
