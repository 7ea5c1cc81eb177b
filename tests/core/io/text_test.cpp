// Splitting, numbers, and which names are proposed for a misspelt one.
#include "core/io/text.h"
#include <gtest/gtest.h>
#include "tests/support/error_of.h"

namespace hilt {
namespace {

using Parts = std::vector<std::string_view>;

std::string_view nearest_name(std::string_view name, std::span<const std::string_view> names) {
  const Parts near = near_names(name, names);
  return near.empty() ? "" : near[0];
}

TEST(Text, SplitsAtEverySeparator) {
  EXPECT_EQ(split_text("a,b,,c", ','), (Parts{"a", "b", "", "c"}));
  EXPECT_EQ(split_text("", ','), (Parts{""}));
  EXPECT_EQ(split_text(",", ','), (Parts{"", ""}));
  EXPECT_EQ(split_text("abc", ','), (Parts{"abc"}));
}

TEST(Text, FindsANameOrProposesTheNearest) {
  constexpr std::string_view names[] = {"taped", "hybrid", "fused"};
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(find_name("mode", names[i], names), i);
  EXPECT_EQ(error_of([&] { find_name("mode", "fsued", names); }),
            "usage: mode: 'fsued' is not one of taped, hybrid, fused; did you mean fused?");
  EXPECT_EQ(error_of([&] { find_name("mode", "", names); }), "usage: mode: '' is not one of taped, hybrid, fused");
  EXPECT_EQ(error_of([&] { find_name("mode", "sideways", names); }),
            "usage: mode: 'sideways' is not one of taped, hybrid, fused");
  EXPECT_EQ(error_of([&] { find_name("mode", "FUSED", names); }),
            "usage: mode: 'FUSED' is not one of taped, hybrid, fused; did you mean fused?");
}

TEST(Text, NearestCountsInsertionsDeletionsAndSubstitutions) {
  constexpr std::string_view names[] = {"segment", "slide", "dense"};
  EXPECT_EQ(nearest_name("segmnt", names), "segment");
  EXPECT_EQ(nearest_name("segmentt", names), "segment");
  EXPECT_EQ(nearest_name("slime", names), "slide");
  EXPECT_EQ(nearest_name("tense", names), "dense");
  EXPECT_EQ(nearest_name("glide", names), "slide");
}

TEST(Text, ProposesOnlyWhatIsNear) {
  constexpr std::string_view names[] = {"text", "keep", "d-o", "dtype", "device", "q"};
  EXPECT_EQ(nearest_name("segmnt", names), "");
  EXPECT_EQ(nearest_name("x", names), "");
  EXPECT_EQ(nearest_name("", names), "");
  EXPECT_EQ(did_you_mean("segmnt", names), "");
  EXPECT_EQ(did_you_mean("tekst", names), "; did you mean text?");
  // What a name begins comes before what is fewer edits away.
  EXPECT_EQ(near_names("d", names), (Parts{"d-o", "dtype", "device"}));
  EXPECT_EQ(did_you_mean("D", names, "--"), "; did you mean --d-o, --dtype or --device?");
  EXPECT_EQ(did_you_mean("dt", names, "--"), "; did you mean --dtype?");
  EXPECT_EQ(near_names("devices", names), Parts{"device"});
  // A long name may be off by a third.
  constexpr std::string_view long_names[] = {"neighborhood2d"};
  EXPECT_EQ(nearest_name("neighbourhod2D", long_names), "neighborhood2d");
  EXPECT_EQ(nearest_name("nabrhood2d", long_names), "");
}

TEST(Text, ReadsWholeNumbersAndNothingElse) {
  EXPECT_EQ(read_index("size", "0", 0), 0);
  EXPECT_EQ(read_index("size", "9223372036854775807", 1), 9223372036854775807);
  for (const char* bad : {"", "x", "1x", " 1", "1 ", "+1", "1.0", "0x10", "9223372036854775808", "--1"})
    EXPECT_EQ(error_of([&] { read_index("size", bad, 0); }),
              "usage: size: '" + std::string(bad) + "' is not a whole number");
  EXPECT_EQ(error_of([] { read_index("size", "3", 4); }), "usage: size: 3 must be at least 4");
  EXPECT_EQ(error_of([] { read_index("size", "-1", 0); }), "usage: size: -1 must be at least 0");
}

}  // namespace
}  // namespace hilt
