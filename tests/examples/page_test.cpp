// Pages: what their data and their pictures are as text.
#include "../../examples/program/report/report.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <nlohmann/json.hpp>

namespace {

using report::Json;

TEST(Page, ItsDataNeverEndsTheScript) {
  const Json data{{"t", "<b title=\"&\"></script><script>"}, {"x", std::numeric_limits<double>::infinity()}};
  const std::string script = report::page("<script>{{{}}}</script>", data);
  EXPECT_EQ(script.find('<', 1), script.rfind("</script>")) << script;
  EXPECT_EQ(Json::parse(script.substr(8, script.size() - 17)), (Json{{"t", data["t"]}, {"x", nullptr}}));
}

TEST(Pictures, EveryCellOfAFrameHasAPlaceOfItsOwn) {
  const std::vector<std::vector<report::Frame>> all{{{64, 64, 4096}},       {{8, 8, 64}, {8, 8, 64}, {8, 8, 64}},
                                                    {{4096, 1, 4096}},      {{1, 300, 300}, {5, 4, 17}},
                                                    {{2, 2, 4}, {1, 1, 1}}, std::vector<report::Frame>(4000, {1, 1, 1}),
                                                    {{512, 256, 512 * 256}}};
  for (const auto& frames : all) {
    const report::Sheet sheet(frames);
    std::vector<std::size_t> frame_of;
    for (std::size_t f = 0; f < frames.size(); ++f)
      frame_of.insert(frame_of.end(), static_cast<std::size_t>(frames[f].cells), f);
    ASSERT_EQ(sheet.cell.size(), frame_of.size());
    EXPECT_LE(sheet.columns * sheet.rows, report::Sheet::kMostCells);
    EXPECT_LE(std::max(sheet.columns, sheet.rows), 4 * std::min(sheet.columns, sheet.rows) + 8);
    EXPECT_GE(4 * sheet.columns * sheet.rows * sheet.pool * sheet.pool, std::ssize(sheet.cell)) << "room for all";
    std::map<std::size_t, std::size_t> frame_at;
    for (std::size_t i = 0; i < frame_of.size(); ++i) {
      ASSERT_LT(sheet.cell[i], static_cast<std::size_t>(sheet.columns * sheet.rows));
      EXPECT_TRUE(frame_at.try_emplace(sheet.cell[i], frame_of[i]).second || sheet.pool > 1);
    }
    const auto columns = static_cast<std::size_t>(sheet.columns);
    for (const auto& [at, frame] : frame_at)  // another frame is a cell apart
      for (const std::size_t beside : {at % columns + 1 < columns ? at + 1 : at, at + columns})
        if (const auto found = frame_at.find(beside); found != frame_at.end() && sheet.pool == 1) {
          EXPECT_EQ(found->second, frame);
        }
  }
  // 3 frames of 2 x 2: two on a shelf, one below; the last of 3 cells.
  const report::Sheet three(std::vector<report::Frame>{{2, 2, 4}, {2, 2, 4}, {2, 2, 3}});
  EXPECT_EQ(three.columns, 5);
  EXPECT_EQ(three.rows, 5);
  EXPECT_EQ(three.cell, (std::vector<std::size_t>{0, 1, 5, 6, 3, 4, 8, 9, 15, 16, 20}));
}

TEST(Pictures, LevelsAsText) {
  const std::vector<std::uint8_t> levels{0, 7, 3, 4, 6};
  EXPECT_EQ(report::packed(levels), (std::string{63 + 7, 63 + 28, 63 + 48}));
}

}  // namespace
