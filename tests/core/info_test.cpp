// What info() says, that headers of another version are refused, and what HILT_ISA may ask for.
#include "core/device.h"
#include <gtest/gtest.h>
#include <sstream>
#include <algorithm>
#include "core/dispatch.h"
#include "core/parallel.h"
#include "tests/support/child.h"
#include "tests/support/error_of.h"
#include "tests/support/settings.h"

namespace hilt {
namespace {

const std::string kLeast(std::string(kIsaBuilt).substr(0, std::string(kIsaBuilt).find(' '))),
    kAll = kIsas.size() == 1 ? kLeast : "base, avx2, avx512, avx512_bf16 or avx512_amx";

TEST(Info, DescribesBuildAndMachine) {
  const Threads three(3);
  const Info i = info();
  EXPECT_EQ(i.version, kVersion);
  EXPECT_EQ(i.compiler, kCompiler);
  EXPECT_FALSE(i.blas.empty());
  std::ostringstream numbers;
  numbers << kVersionMajor << '.' << kVersionMinor << '.' << kVersionPatch;
  EXPECT_EQ(numbers.str(), kVersion);
  EXPECT_EQ(i.gpu_archs.empty(), !kHasCuda);
  ASSERT_GE(i.devices.size(), 1u);
  EXPECT_TRUE(i.devices[0].starts_with("cpu: "));
  EXPECT_TRUE(i.devices[0].ends_with(" processors"));
  EXPECT_EQ(i.threads, 3);
  std::string built = kIsaBuilt;
  if (built.ends_with("avx512")) built += " avx512_bf16 avx512_amx";
  std::ostringstream listed;
  for (const std::string& isa : i.isa_built) listed << (listed.tellp() > 0 ? " " : "") << isa;
  EXPECT_EQ(listed.str(), built);
  EXPECT_EQ(std::count(i.isa_built.begin(), i.isa_built.end(), i.isa_active), 1);
  EXPECT_GT(i.memory, std::size_t{1} << 27);
  EXPECT_LE(i.memory_available, i.memory);
  EXPECT_GT(i.memory_available, 0u);
}

TEST(Info, HeadersOfAnotherVersionAreRefused) {
  EXPECT_EQ(error_of([] { check_version(); }), "nothing");
  const std::string series = std::to_string(kVersionMajor) + '.' + std::to_string(kVersionMinor);
  EXPECT_EQ(error_of([&] { detail::check_headers((series + ".77").c_str()); }), "nothing");
  EXPECT_EQ(error_of([] { detail::check_headers("0.0.7"); }),
            "usage: hilt: library and header versions differ: the program was compiled for 0.0.7 and loaded " +
                std::string(kVersion) + "; compile it again, or point the loader at the matching libhilt");
}

TEST(Isa, TheEnvironmentLowersIt) {
  if (!in_child({.environment = {"HILT_ISA=" + kLeast}})) return;
  EXPECT_EQ(name_of(active_isa()), kLeast);
  EXPECT_EQ(info().isa_active, kLeast);
}

TEST(Isa, AnUnknownNameIsAnError) {
  if (!in_child({.environment = {"HILT_ISA=sse9"}})) return;
  EXPECT_EQ(error_of([] { active_isa(); }), "usage: HILT_ISA: 'sse9' must be " + kAll);
}

TEST(Isa, NamesAreThoseOfTheEnvironment) {
  EXPECT_EQ(name_of(Isa::base), "base");
  EXPECT_EQ(name_of(Isa::avx2), "avx2");
  EXPECT_EQ(name_of(Isa::avx512), "avx512");
  EXPECT_EQ(name_of(Isa::avx512_bf16), "avx512_bf16");
  EXPECT_EQ(name_of(Isa::avx512_amx), "avx512_amx");
  EXPECT_EQ(name_of(Isa::neon), "neon");
}

}  // namespace
}  // namespace hilt
