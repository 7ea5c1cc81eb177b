// Memory lent to and borrowed from a library that this file plays: shared, never copied without
// need, given back exactly once.
#include "core/io/dlpack.h"
#include <gtest/gtest.h>
#include <atomic>
#include <limits>
#include <thread>
#include "core/device.h"
#include "core/tape.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/tiny_ops.h"

namespace hilt {
namespace {
using namespace dlpack;

using Numbers = std::vector<double>;

// The layout of dlpack.h.
static_assert(sizeof(void*) == 8 && sizeof(DLDevice) == 8 && sizeof(DLDataType) == 4);
static_assert(std::is_standard_layout_v<DLManagedTensor> && std::is_standard_layout_v<DLManagedTensorVersioned>);
static_assert(offsetof(DLTensor, data) == 0 && offsetof(DLTensor, device) == 8 && offsetof(DLTensor, ndim) == 16 &&
              offsetof(DLTensor, dtype) == 20 && offsetof(DLTensor, shape) == 24 && offsetof(DLTensor, strides) == 32 &&
              offsetof(DLTensor, byte_offset) == 40 && sizeof(DLTensor) == 48);
static_assert(offsetof(DLManagedTensor, manager_ctx) == 48 && offsetof(DLManagedTensor, deleter) == 56 &&
              sizeof(DLManagedTensor) == 64);
static_assert(offsetof(DLManagedTensorVersioned, manager_ctx) == 8 &&
              offsetof(DLManagedTensorVersioned, deleter) == 16 && offsetof(DLManagedTensorVersioned, flags) == 24 &&
              offsetof(DLManagedTensorVersioned, dl_tensor) == 32 && sizeof(DLManagedTensorVersioned) == 80);

/// Another library: lends memory, and counts how often it gets it back.
struct Lender {
  std::vector<Index> shape, strides;
  DLManagedTensorVersioned versioned{};
  DLManagedTensor legacy{};
  std::atomic<int> returned{0};

  template <class T>
  Lender(std::vector<T>& memory, std::vector<Index> s, std::vector<Index> st = {})
      : shape(std::move(s)), strides(std::move(st)) {
    DLTensor t{};
    t.data = memory.data();
    t.device = {kCpu, 0};
    t.ndim = static_cast<std::int32_t>(shape.size());
    t.dtype = {std::is_floating_point_v<T> ? kFloat : std::is_signed_v<T> ? kInt : kUInt, 8 * sizeof(T), 1};
    t.shape = shape.data();
    t.strides = strides.empty() ? nullptr : strides.data();
    versioned = {
        {1, 0}, this, [](DLManagedTensorVersioned* m) { ++static_cast<Lender*>(m->manager_ctx)->returned; }, 0, t};
    legacy = {t, this, [](DLManagedTensor* m) { ++static_cast<Lender*>(m->manager_ctx)->returned; }};
  }
  DLTensor& t() { return versioned.dl_tensor; }
};

// ---- out ----------------------------------------------------------------------------------------

TEST(ToDlpack, LendsElementsShapeAndStrides) {
  const Tensor x = arange(24, DType::f32), view = as_strided(x, {2, 3}, {1, 8}, 5);
  const auto m = to_dlpack(view);
  EXPECT_EQ(m->version.major, 1u);
  EXPECT_EQ(m->flags, kReadOnly);
  const DLTensor& t = m->dl_tensor;
  EXPECT_EQ(static_cast<std::byte*>(t.data) + t.byte_offset, view.raw());
  EXPECT_EQ(t.device.device_type, kCpu);
  EXPECT_EQ(t.device.device_id, 0);
  ASSERT_EQ(t.ndim, 2);
  EXPECT_EQ(t.shape[0], 2);
  EXPECT_EQ(t.shape[1], 3);
  ASSERT_NE(t.strides, nullptr);
  EXPECT_EQ(t.strides[0], 1);
  EXPECT_EQ(t.strides[1], 8);
  EXPECT_EQ(static_cast<float*>(t.data)[t.strides[0] + 2 * t.strides[1]], 22);
}

TEST(ToDlpack, NamesEveryType) {
  const struct {
    DType dtype;
    int code, bits;
  } types[] = {{DType::f64, 2, 64}, {DType::f32, 2, 32}, {DType::bf16, 4, 16}, {DType::f16, 2, 16},
               {DType::i64, 0, 64}, {DType::i32, 0, 32}, {DType::u8, 1, 8}};
  for (const auto& type : types) {
    const auto m = to_dlpack(zeros({2}, type.dtype));
    EXPECT_EQ(m->dl_tensor.dtype.code, type.code) << type.dtype;
    EXPECT_EQ(m->dl_tensor.dtype.bits, type.bits) << type.dtype;
    EXPECT_EQ(m->dl_tensor.dtype.lanes, 1) << type.dtype;
  }
}

TEST(ToDlpack, KeepsTheMemoryUntilItsDeleterRuns) {
  const std::size_t before = memory_stats().live;
  DLManagedTensorVersioned* m = nullptr;
  DLManagedTensor* legacy = nullptr;
  {
    const Tensor x = full({100}, 3, DType::f64);
    m = to_dlpack(x).release();
    legacy = to_dlpack_legacy(x).release();
  }
  EXPECT_EQ(memory_stats().live, before + 800);
  EXPECT_EQ(static_cast<double*>(m->dl_tensor.data)[99], 3);
  std::jthread([&] { m->deleter(m); }).join();  // on any thread
  EXPECT_EQ(memory_stats().live, before + 800);
  legacy->deleter(legacy);
  EXPECT_EQ(memory_stats().live, before);
}

TEST(ToDlpack, WhatNobodyTakesIsGivenBack) {
  const std::size_t before = memory_stats().live;
  {
    const auto m = to_dlpack(zeros({100}));
    const auto legacy = to_dlpack_legacy(zeros({100}));
    EXPECT_EQ(memory_stats().live, before + 800);
  }
  EXPECT_EQ(memory_stats().live, before);
}

TEST(ToDlpack, ScalarsAndEmptyTensors) {
  const auto scalar = to_dlpack(full({}, 2.5));
  EXPECT_EQ(scalar->dl_tensor.ndim, 0);
  EXPECT_EQ(*static_cast<float*>(scalar->dl_tensor.data), 2.5f);
  const auto none = to_dlpack(zeros({3, 0}));
  EXPECT_EQ(none->dl_tensor.data, nullptr);  // as DLPack asks
  EXPECT_EQ(none->dl_tensor.shape[1], 0);
  EXPECT_EQ(error_of([] { (void)to_dlpack({}); }), "usage: to_dlpack: undefined tensor");
}

TEST(ToDlpack, WriteAccessCountsAsAWriteAndReadAccessDoesNot) {
  const auto outcome = [](auto lend) {
    const Tensor x = full({1}, 3, DType::f64);
    Tape tape;
    tape.watch(x);
    const Tensor y = tiny::square(x);
    lend(x);
    return error_of([&] { EXPECT_EQ(tape.backward(y)[x].item(), 6); }).substr(0, 42);
  };
  EXPECT_EQ(outcome([](const Tensor& x) { (void)to_dlpack(x); }), "nothing");
  EXPECT_EQ(outcome([](const Tensor& x) { EXPECT_EQ(to_dlpack(x, Access::write)->flags, 0u); }),
            "usage: square: a tensor saved for backward");
  EXPECT_EQ(outcome([](const Tensor& x) { (void)to_dlpack_legacy(x); }), "usage: square: a tensor saved for backward");
}

// ---- in -----------------------------------------------------------------------------------------

TEST(FromDlpack, SharesMemoryBothWays) {
  std::vector<float> memory{1, 2, 3, 4, 5, 6};
  Lender lender(memory, {2, 3});
  {
    Tensor x = from_dlpack(&lender.versioned);
    EXPECT_EQ(x.dtype(), DType::f32);
    EXPECT_EQ(x.shape(), (Shape{2, 3}));
    EXPECT_TRUE(x.is_contiguous());  // no strides: dense
    EXPECT_EQ(x.data<float>(), memory.data());
    memory[4] = 50;
    EXPECT_EQ(x.to_vector(), Numbers({1, 2, 3, 4, 50, 6}));
    x.mutable_data<float>()[0] = 10;
    EXPECT_EQ(memory[0], 10);
    EXPECT_EQ(lender.returned, 0);
  }
  EXPECT_EQ(lender.returned, 1);
}

TEST(FromDlpack, ReturnsOnceAfterTheLastTensor) {
  for (int round = 0; round < scaled(100, 20); ++round) {
    std::vector<double> memory{1, 2, 3, 4};
    Lender lender(memory, {4});
    const std::size_t before = memory_stats().live;
    {
      Tensor view;
      {
        const Tensor x = from_dlpack(&lender.legacy), copy = x;
        EXPECT_EQ(memory_stats().live, before + 32);
        view = as_strided(x, {2}, {2}, 1);
      }
      EXPECT_EQ(lender.returned, 0);
      EXPECT_EQ(view.to_vector(), Numbers({2, 4}));
      std::vector<std::jthread> threads;
      for (int t = 0; t < 4; ++t) threads.emplace_back([copy = view] {});
      view = {};
    }
    ASSERT_EQ(lender.returned, 1);
    ASSERT_EQ(memory_stats().live, before);
  }
}

TEST(FromDlpack, FollowsStridesAndByteOffset) {
  std::vector<std::int64_t> memory{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  Lender lender(memory, {2, 3}, {1, 4});
  lender.t().byte_offset = 8;
  const Tensor x = from_dlpack(&lender.versioned);
  EXPECT_EQ(x.to_vector(), Numbers({1, 5, 9, 2, 6, 10}));
  EXPECT_EQ(x.data<std::int64_t>(), memory.data() + 1);
  EXPECT_EQ(x.storage().bytes(), 80u);  // to the last element it shows, and no further
  Lender repeated(memory, {3, 2}, {0, 5});
  EXPECT_EQ(from_dlpack(&repeated.versioned).to_vector(), Numbers({0, 5, 0, 5, 0, 5}));
}

TEST(FromDlpack, IgnoresStridesThatAreNeverStepped) {
  std::vector<float> memory{1, 2, 3};
  Lender lender(memory, {1, 3, 1}, {-7, 1, std::numeric_limits<Index>::max()});
  EXPECT_EQ(from_dlpack(&lender.versioned).to_vector(), Numbers({1, 2, 3}));
  Lender none(memory, {0, 3}, {-1, -1});
  EXPECT_EQ(from_dlpack(&none.versioned).shape(), (Shape{0, 3}));
  EXPECT_EQ(none.returned, 1);
  none.t().data = nullptr;
  EXPECT_EQ(from_dlpack(&none.versioned).numel(), 0);
  Lender scalar(memory, {});
  scalar.t().shape = nullptr;
  EXPECT_EQ(from_dlpack(&scalar.versioned).item(), 1);
}

TEST(FromDlpack, KnowsEveryType) {
  std::vector<std::int64_t> memory(4);
  for (DType type : kAllDTypes) {
    Lender lender(memory, {2});
    lender.t().dtype = to_dlpack(zeros({1}, type))->dl_tensor.dtype;
    EXPECT_EQ(from_dlpack(&lender.versioned).dtype(), type);
  }
}

TEST(FromDlpack, CopiesWhatIsReadOnlyAndReturnsItAtOnce) {
  std::vector<float> memory{1, 2, 3, 4};
  Lender lender(memory, {2, 2}, {1, 2});
  lender.versioned.flags = kReadOnly;
  Tensor x = from_dlpack(&lender.versioned);
  EXPECT_EQ(lender.returned, 1);
  EXPECT_EQ(x.to_vector(), Numbers({1, 3, 2, 4}));
  x.mutable_data<float>()[0] = 9;
  EXPECT_EQ(memory[0], 1);
  lender.versioned.flags = 6;  // a copy already, sub-byte padding: neither matters here
  EXPECT_EQ(from_dlpack(&lender.versioned).data<float>(), memory.data());
}

TEST(FromDlpack, NeedsNoDeleter) {
  std::vector<float> memory{1, 2};
  Lender lender(memory, {2});
  lender.versioned.deleter = nullptr;
  lender.legacy.deleter = nullptr;
  EXPECT_EQ(from_dlpack(&lender.versioned).numel(), 2);
  EXPECT_EQ(from_dlpack(&lender.legacy).numel(), 2);
  lender.versioned.flags = kReadOnly;
  EXPECT_EQ(from_dlpack(&lender.versioned).numel(), 2);
}

TEST(FromDlpack, TakesPinnedMemoryAsMemory) {
  std::vector<float> memory{1, 2};
  Lender lender(memory, {2});
  lender.t().device = {kCudaHost, 3};
  EXPECT_EQ(from_dlpack(&lender.versioned).device(), Device{});
}

/// The error of importing after a change to a good tensor; the lender keeps what was refused.
template <class F> std::string refused(F change) {
  std::vector<double> memory{1, 2, 3, 4, 5, 6};
  Lender lender(memory, {2, 3}, {3, 1});
  change(lender);
  const std::size_t before = memory_stats().live;
  const std::string error = error_of([&] { (void)from_dlpack(&lender.versioned); });
  EXPECT_EQ(lender.returned, 0);
  EXPECT_EQ(memory_stats().live, before);
  return error;
}

TEST(FromDlpack, RefusesWhatItCannotHold) {
  constexpr Index kMax = std::numeric_limits<Index>::max();
  EXPECT_EQ(refused([](Lender& l) { l.versioned.version = {2, 1}; }), "usage: from_dlpack: DLPack 2.1; expected 1.x");
  EXPECT_EQ(refused([](Lender& l) { l.versioned.version = {0, 8}; }), "usage: from_dlpack: DLPack 0.8; expected 1.x");
  const std::string expected = "; expected f64 f32 bf16 f16 i64 i32 or u8, one lane";
  EXPECT_EQ(refused([](Lender& l) {
              l.t().dtype = {5, 64, 1};
            }),
            "usage: from_dlpack: elements of code 5, 64 bits, 1 lanes" + expected);
  EXPECT_EQ(refused([](Lender& l) {
              l.t().dtype = {6, 8, 1};
            }),
            "usage: from_dlpack: elements of code 6, 8 bits, 1 lanes" + expected);
  EXPECT_EQ(refused([](Lender& l) {
              l.t().dtype = {2, 32, 4};
            }),
            "usage: from_dlpack: elements of code 2, 32 bits, 4 lanes" + expected);
  EXPECT_EQ(refused([](Lender& l) {
              l.t().dtype = {4, 32, 1};
            }),
            "usage: from_dlpack: elements of code 4, 32 bits, 1 lanes" + expected);
  EXPECT_EQ(refused([](Lender& l) {
              l.t().device = {8, 0};
            }),
            "usage: from_dlpack: device type 8; expected CPU (1), pinned CPU (3) or CUDA (2) memory; copy it to the "
            "CPU first");
  if (!kHasCuda) {
    EXPECT_EQ(refused([](Lender& l) {
                l.t().device = {2, 1};
              }),
              "usage: from_dlpack: memory of cuda:1, built without CUDA; copy it to the CPU first");
  }
  EXPECT_EQ(refused([](Lender& l) { l.t().ndim = 7; }), "usage: from_dlpack: 7 axes; expected 0..6");
  EXPECT_EQ(refused([](Lender& l) { l.t().ndim = -1; }), "usage: from_dlpack: -1 axes; expected 0..6");
  EXPECT_EQ(refused([](Lender& l) { l.t().shape = nullptr; }), "usage: from_dlpack: 2 axes and no shape");
  EXPECT_EQ(refused([](Lender& l) { l.shape[1] = -3; }), "usage: Shape: extent -3 of axis 1 is negative");
  EXPECT_EQ(refused([](Lender& l) {
              l.shape = {kMax, 2};
              l.t().shape = l.shape.data();
            }),
            "usage: Shape: 9223372036854775807 x 2 overflows 64 bits");
  EXPECT_EQ(refused([](Lender& l) { l.strides[0] = -3; }),
            "usage: from_dlpack: stride -3 of axis 0 is negative; make a dense copy first");
  EXPECT_EQ(refused([](Lender& l) { l.strides[1] = kMax; }),
            "usage: from_dlpack: 2 x 9223372036854775807 overflows 64 bits");
  EXPECT_EQ(refused([](Lender& l) { l.strides[0] = kMax; }),
            "usage: from_dlpack: 9223372036854775807 + 2 overflows 64 bits");
  EXPECT_EQ(refused([](Lender& l) { l.strides[0] = kMax - 2; }),
            "usage: from_dlpack: 9223372036854775807 + 1 overflows 64 bits");
  EXPECT_EQ(refused([](Lender& l) { l.strides[0] = kMax / 4; }),
            "usage: from_dlpack: 2305843009213693954 x 8 overflows 64 bits");
  EXPECT_EQ(refused([](Lender& l) { l.t().data = nullptr; }), "usage: from_dlpack: f64[2, 3] at a null pointer");
  EXPECT_EQ(refused([](Lender& l) { l.t().byte_offset = 4; }),
            "usage: from_dlpack: elements of f64 at an address that is not a multiple of 8; make a copy first");
  EXPECT_EQ(refused([](Lender& l) { l.t().byte_offset = std::numeric_limits<std::uint64_t>::max() - 7; }),
            "usage: from_dlpack: 48 bytes at byte offset 18446744073709551608 reach beyond all memory");
  EXPECT_EQ(error_of([] { (void)from_dlpack(static_cast<DLManagedTensor*>(nullptr)); }),
            "usage: from_dlpack: null pointer");
  EXPECT_EQ(error_of([] { (void)from_dlpack(static_cast<DLManagedTensorVersioned*>(nullptr)); }),
            "usage: from_dlpack: null pointer");
}

TEST(FromDlpack, ARefusalLeavesTheLegacyFormWithItsOwnerToo) {
  std::vector<double> memory{1, 2};
  Lender lender(memory, {2}, {-1});
  EXPECT_EQ(error_of([&] { (void)from_dlpack(&lender.legacy); }),
            "usage: from_dlpack: stride -1 of axis 0 is negative; make a dense copy first");
  EXPECT_EQ(lender.returned, 0);
}

// ---- there and back -----------------------------------------------------------------------------

TEST(Dlpack, RoundTripsEveryTypeAndLayoutWithoutACopy) {
  for (DType type : kAllDTypes) {
    const Tensor x = arange(24, type);
    for (const Tensor& view : {x, as_strided(x, {2, 3}, {1, 8}, 5), as_strided(x, {3, 2}, {0, 1}, 1),
                               as_strided(x, {}, {}, 7), as_strided(x, {0, 2}, {2, 1}, 0)}) {
      const Tensor y = from_dlpack(to_dlpack(view, Access::write).release()),
                   z = from_dlpack(to_dlpack_legacy(view).release());
      for (const Tensor& back : {y, z}) {
        EXPECT_EQ(back.shape(), view.shape());
        EXPECT_EQ(back.dtype(), type);
        EXPECT_EQ(back.to_vector(), view.to_vector());
        EXPECT_TRUE(view.numel() == 0 || back.raw() == view.raw());
        EXPECT_NE(back.id(), view.id());
      }
    }
  }
}

TEST(Dlpack, ARoundTripLeavesNothingAlive) {
  const std::size_t before = memory_stats().live;
  {
    const Tensor x = from_dlpack(to_dlpack(full({50}, 2, DType::f64)).release());  // read-only: a copy
    EXPECT_EQ(memory_stats().live, before + 400);
    const Tensor y = from_dlpack(to_dlpack_legacy(x).release());
    EXPECT_EQ(y.raw(), x.raw());
  }
  EXPECT_EQ(memory_stats().live, before);
}

}  // namespace
}  // namespace hilt
