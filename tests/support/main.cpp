#include <gtest/gtest.h>

// As gtest_main, but a binary that skipped every test it ran exits 77, by which the build's test
// runner knows a skip.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  constexpr int kSkipped = 77;
  return failed == 0 && all.skipped_test_count() > 0 && all.successful_test_count() == 0 ? kSkipped : failed;
}
