// Codes, messages, overflow of sizes, and devices as text.
#include "core/error.h"
#include <gtest/gtest.h>
#include <limits>
#include "core/shape.h"
#include "core/device.h"
#include "core/tape.h"
#include "tests/support/error_of.h"
#include "tests/support/tiny_ops.h"

namespace hilt {
namespace {

// The exit codes of our programs: scripts depend on them.
static_assert(static_cast<int>(Code::usage) == 2 && static_cast<int>(Code::data) == 3 &&
              static_cast<int>(Code::memory) == 4 && static_cast<int>(Code::gpu) == 5 &&
              static_cast<int>(Code::distributed) == 6 && static_cast<int>(Code::not_a_number) == 7 &&
              static_cast<int>(Code::internal) == 70);

/// Counts how often it is printed.
struct Printed {
  int* times;
  friend std::ostream& operator<<(std::ostream& os, const Printed& p) {
    ++*p.times;
    return os << "printed";
  }
};

TEST(Error, CarriesCodeAndTextOfAllParts) {
  for (Code code :
       {Code::usage, Code::data, Code::memory, Code::gpu, Code::distributed, Code::not_a_number, Code::internal}) {
    try {
      fail_with(code, "op: ", 3, " of ", 2.5, ' ', std::string("parts"));
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "op: 3 of 2.5 parts");
      ASSERT_NE(dynamic_cast<const Error*>(&e), nullptr);
      EXPECT_EQ(dynamic_cast<const Error&>(e).code(), code);
    }
  }
  EXPECT_EQ(error_of([] { fail("op: ", 1); }), "usage: op: 1");
}

TEST(Error, ANulInANameDoesNotEndTheMessage) {
  EXPECT_EQ(error_of([] { fail("op (", std::string("a\0b", 3), "): wrong"); }), "usage: op (a\\x00b): wrong");
}

TEST(Error, CheckFormatsOnlyWhenItFails) {
  int times = 0;
  check(true, Printed{&times});
  EXPECT_EQ(times, 0);
  EXPECT_EQ(error_of([&] { check(false, "op: ", Printed{&times}); }), "usage: op: printed");
  EXPECT_EQ(times, 1);
}

TEST(Error, TakesTextOfAnyLengthAndContent) {
  std::string text(100000, 'x');
  text += "%s%n\n";
  EXPECT_EQ(error_of([&] { fail(text); }), "usage: " + text);
  EXPECT_EQ(error_of([] { fail_with(Code::data, ""); }), "data: ");
}

/// A program's locale that writes 2000 as 2.000 and 1.5 as 1,5.
struct Grouped : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(Error, TextIsTheSameInEveryLocale) {
  struct Global {
    std::locale before = std::locale::global(std::locale(std::locale(), new Grouped));
    ~Global() { std::locale::global(before); }
  } const global;
  std::ostringstream program;  // prints as its locale says; what is ours does not
  program << 2000 << ' ' << Shape{2000, 3} << ' ' << full({1}, 1234.5) << ' ' << Device{Device::Kind::cuda, 1000};
  EXPECT_EQ(program.str(), "2.000 [2000, 3] [1234.5] f32[1] cuda:1000");
  EXPECT_EQ(error_of([] { fail("op: ", 12345, " of ", 1.5, ' ', Shape{2000}); }), "usage: op: 12345 of 1.5 [2000]");
  EXPECT_EQ(to_string(full({2}, 12345, DType::i64)), "[12345, 12345] i64[2]");
  Tape tape;
  const Tensor x = ones({2000});
  tape.watch(x);
  const Tensor y = tiny::square(x);
  program.str("");
  program << tape;
  EXPECT_NE(program.str().find("8000 B, new"), std::string::npos) << program.str();
  EXPECT_NE(program.str().find("1 ops, 8000 B saved"), std::string::npos) << program.str();
}

TEST(Checked, MultipliesAndAddsOrSaysWhatOverflowed) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max(),
                         kMin = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(checked_mul(3037000499, 3037000499), 9223372030926249001);
  EXPECT_EQ(checked_mul(kMax, -1), -kMax);
  EXPECT_EQ(checked_mul(kMax, 0), 0);
  EXPECT_EQ(checked_add(kMax - 1, 1), kMax);
  EXPECT_EQ(checked_add(kMin, kMax), -1);
  EXPECT_EQ(error_of([] { checked_mul(3037000500, 3037000500, "op: size ", 7); }),
            "usage: op: size 7: 3037000500 x 3037000500 overflows 64 bits");
  EXPECT_EQ(error_of([] { checked_mul(kMin, -1, "op"); }), "usage: op: -9223372036854775808 x -1 overflows 64 bits");
  EXPECT_EQ(error_of([] { checked_add(kMax, 1, "op"); }), "usage: op: 9223372036854775807 + 1 overflows 64 bits");
  EXPECT_EQ(error_of([] { checked_add(kMin, -1, "op"); }), "usage: op: -9223372036854775808 + -1 overflows 64 bits");
}

TEST(Device, ComparesAndPrints) {
  const Device cpu, first{Device::Kind::cuda, 0}, second{Device::Kind::cuda, 1};
  std::ostringstream text;
  text << cpu << ' ' << first << ' ' << second;
  EXPECT_EQ(text.str(), "cpu cuda:0 cuda:1");
  EXPECT_TRUE(cpu.is_cpu() && !cpu.is_cuda() && first.is_cuda() && !first.is_cpu());
  EXPECT_TRUE(cpu == Device{} && cpu != first && first != second);
}

}  // namespace
}  // namespace hilt
