// The device layer on a GPU: names and errors, memory, copies, random numbers. On a machine without
// one: what is said instead.
#include <gtest/gtest.h>
#include <cmath>
#include "core/cuda/context.h"
#include "core/random.h"
#include "core/tape.h"
#include "tests/support/child.h"
#include "tests/support/error_of.h"

namespace hilt {
namespace {

const Device kGpu{Device::Kind::cuda, 0};

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << gpu_descriptions()[0];
  }
};

TEST(WithoutGpu, SaysWhy) {
  if (cuda::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(device_named("auto"), Device{});
  for (const char* name : {"cuda", "cuda:0", "cuda:3"}) {
    const std::string message = error_of([&] { device_named(name); });
    EXPECT_TRUE(message.starts_with("gpu: no usable GPU: driver reports cudaError")) << message;
    EXPECT_TRUE(message.ends_with("; the device 'cpu' always works")) << message;
  }
  EXPECT_EQ(gpu_descriptions().size(), 1u);
}

TEST_F(OnGpu, HasNames) {
  EXPECT_EQ(device_named("auto"), kGpu);
  EXPECT_EQ(device_named("cuda"), kGpu);
  EXPECT_EQ(device_named("cuda:0"), kGpu);
  EXPECT_EQ(error_of([] { device_named("cuda:63"); }).substr(0, 52),
            "gpu: no usable GPU: cuda:63 asked for, the driver sh");
  EXPECT_EQ(error_of([] { device_named("gpu"); }), "usage: device gpu: must be auto, cpu, cuda or cuda:N");
}

TEST_F(OnGpu, CopiesOfEveryTypeAndStride) {
  for (DType from : kAllDTypes)
    for (DType type : kAllDTypes) {
      const Tensor x = from_values(std::vector<double>{0, 1, 2.5, 3, 100, 5, 6, 7, 8, 9, 10, 11}, {2, 3, 2}, from);
      Tensor want = empty(x.shape(), type), there = empty(x.shape(), type, kGpu);
      copy(want, x);
      copy(there, x);  // converts on the way
      EXPECT_EQ(there.to_vector(), want.to_vector()) << from << " to " << type;
      const Tensor gx = moved(x, kGpu);
      Tensor local = empty({2, 2, 3}, type, kGpu), host = empty({2, 2, 3}, type);
      const Tensor turned = as_strided(gx, {2, 2, 3}, {6, 1, 2}, 0),
                   host_turned = as_strided(x, {2, 2, 3}, {6, 1, 2}, 0);
      copy(local, turned);
      copy(host, host_turned);
      EXPECT_EQ(local.to_vector(), host.to_vector()) << from << " to " << type << ", transposed";
    }
  const Tensor big = randn({1 << 20}, {3, 4});
  EXPECT_EQ(moved(moved(big, kGpu), {}).to_vector(), big.to_vector());
}

TEST_F(OnGpu, FillsAndCounts) {
  for (DType type : kAllDTypes) {
    EXPECT_EQ(full({5}, 3, type, kGpu).to_vector(), full({5}, 3, type).to_vector()) << type;
    EXPECT_EQ(zeros({5}, type, kGpu).to_vector(), zeros({5}, type).to_vector()) << type;
    EXPECT_EQ(arange(9, type, kGpu).to_vector(), arange(9, type).to_vector()) << type;
  }
  EXPECT_EQ(full({3}, 2.5, DType::f32, kGpu).to_vector(), std::vector<double>(3, 2.5));
  EXPECT_EQ(to_string(full({2}, 2.5, DType::f32, kGpu)), to_string(full({2}, 2.5, DType::f32)));
}

// Uniform and integer numbers to the bit. Normal ones go through log and cos in f64, which may
// differ in their last bit there, so that an f32 may round the other way: rarely, and by one step.
TEST_F(OnGpu, RandomNumbersAreTheSame) {
  constexpr Index n = 1 << 20;
  const RandomKey key{0x123456789abcdef, 77};
  EXPECT_EQ(rand({n}, key, DType::f32, kGpu).to_vector(), rand({n}, key).to_vector());
  EXPECT_EQ(randint(-7, 1000003, {n}, key, DType::i64, kGpu).to_vector(), randint(-7, 1000003, {n}, key).to_vector());
  const std::vector<float> here = randn({n}, key).to_vector<float>(),
                           there = randn({n}, key, DType::f32, kGpu).to_vector<float>();
  Index differ = 0;
  for (std::size_t i = 0; i < here.size(); ++i)
    if (here[i] != there[i]) {
      ++differ;
      EXPECT_TRUE(there[i] == std::nextafter(here[i], there[i])) << i;
    }
  EXPECT_LE(differ, 4);
}

TEST_F(OnGpu, MemoryIsCountedAndReused) {
  release_pool(kGpu);
  const MemoryStats before = memory_stats(kGpu);
  {
    const Tensor x = empty({1000}, DType::f32, kGpu);
    EXPECT_EQ(memory_stats(kGpu).live, before.live + 4000);
  }
  const MemoryStats once = memory_stats(kGpu);
  EXPECT_EQ(once.live, before.live);
  EXPECT_GT(once.pooled, 0u);
  for (int i = 0; i < 100; ++i) (void)empty({1000}, DType::f32, kGpu);
  EXPECT_EQ(memory_stats(kGpu).from_system, once.from_system);
  release_pool(kGpu);
  EXPECT_EQ(memory_stats(kGpu).pooled, 0u);
}

TEST_F(OnGpu, RunsOutOfMemoryAndGoesOn) {
  const Tensor large = zeros({1 << 20}, DType::f32, kGpu);
  for (int i = 0; i < 100; ++i) {
    const std::string message = error_of([] { (void)empty({Index{1} << 42}, DType::u8, kGpu); });
    EXPECT_TRUE(message.starts_with("memory: out of memory on cuda:0: asked for 4398046511104 bytes with ")) << message;
    EXPECT_NE(message.find("4194304"), std::string::npos) << message;
    EXPECT_EQ(full({7}, 1.5, DType::f32, kGpu).to_vector(), std::vector<double>(7, 1.5));
  }
}

TEST_F(OnGpu, WorkIsAskedForWithoutWaiting) {
  const Tensor x = full({1000}, 2, DType::f32, kGpu);
  synchronize(kGpu);
  const DeviceCounters before = device_counters(kGpu);
  const Tensor y = clone(as_strided(x, {10, 100}, {1, 10}, 0));
  const DeviceCounters after = device_counters(kGpu);
  EXPECT_EQ(after.launches, before.launches + 1);
  EXPECT_EQ(after.host_waits, before.host_waits);
  EXPECT_EQ(y.to_vector()[0], 2);
  EXPECT_EQ(device_counters(kGpu).host_waits, before.host_waits + 1);
}

// Memory that is not the GPU's, read by a kernel: an error that the driver does not recover from,
// so in a process of its own.
TEST_F(OnGpu, ALostDeviceSaysSoAtOnce) {
  if (!in_child({})) return;
  const Tensor before = full({4}, 1, DType::f32, kGpu);
  const Storage nowhere = Storage::borrow(reinterpret_cast<void*>(std::uintptr_t{4096}), 4096, kGpu, nullptr);
  const Tensor x(nowhere, {16, 16}, Strides{1, 16}, 0, DType::f32);
  const std::string first = error_of([&] { (void)clone(x).to_vector(); });
  EXPECT_TRUE(first.starts_with("gpu: device lost: cuda:0: ")) << first;
  EXPECT_NE(first.find("cudaErrorIllegalAddress (700)"), std::string::npos) << first;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(error_of([&] { (void)before.to_vector(); }), first);
    EXPECT_EQ(error_of([&] { (void)full({4}, 2, DType::f32, kGpu); }), first);
    EXPECT_EQ(error_of([&] { synchronize(kGpu); }), first);
  }
  EXPECT_EQ(ones({3}).to_vector(), std::vector<double>(3, 1));  // the CPU goes on
}

}  // namespace
}  // namespace hilt
