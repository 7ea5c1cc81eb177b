// Templates of the reports: what a tag stands for, and that no text becomes markup.
#include "../../examples/program/report/fill.h"
#include "../../examples/program/report/grid.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace {

using report::fill;
using report::Json;

TEST(Fill, Values) {
  const Json data{{"a", 3}, {"b", {{"c", "x"}}}, {"f", 0.123456}, {"none", nullptr}, {"list", {5, 6}}};
  EXPECT_EQ(fill("{{a}} {{b.c}} {{f}} {{none}} {{list.0}} {{list}}", data), "3 x 0.1235 \u2013 5 [5,6]");
  EXPECT_EQ(fill("{{a|bytes}}, {{a|flops}}, {{f|percent}}, {{f|f2}}, {{f|sci}}, {{none|ms}}", data),
            "3\u00a0B, 3\u00a0FLOP, 12.3\u00a0%, 0.12, 1.2e-01, \u2013");
  EXPECT_EQ(report::number(std::numeric_limits<double>::infinity()), nullptr);
}

TEST(Fill, Sections) {
  const Json data{{"rows", {{{"n", 1}, {"good", true}}, {{"n", 2}, {"good", false}}}},
                  {"empty", Json::array()},
                  {"zero", 0},
                  {"matrix", {{1, 2}, {3, 4}}},
                  {"name", "outer"}};
  EXPECT_EQ(fill("{{#rows}}{{n}}{{#good}}!{{/good}}{{^good}}?{{/good}} {{name}};{{/rows}}", data),
            "1! outer;2? outer;");
  EXPECT_EQ(fill("{{#matrix}}[{{#.}}{{.}},{{/.}}]{{/matrix}}", data), "[1,2,][3,4,]");
  EXPECT_EQ(fill("{{#empty}}a{{/empty}}{{^empty}}b{{/empty}}{{#zero}}c{{/zero}}{{#missing}}{{d}}{{/missing}}e", data),
            "be");
  EXPECT_EQ(fill("{{#rows.0}}{{n}}{{/rows.0}}{{#empty.0}}never{{/empty.0}}", data), "1");
}

TEST(Fill, TextIsNeverMarkup) {
  const Json data{{"t", "<b title=\"&\"></script><script>"}};
  EXPECT_EQ(fill("{{t}}", data), "&lt;b title=&quot;&amp;&quot;&gt;&lt;/script&gt;&lt;script&gt;");
  const std::string script = fill("<script>{{{}}}</script>", data);
  EXPECT_EQ(script.find('<', 1), script.rfind("</script>")) << script;
  EXPECT_EQ(Json::parse(script.substr(8, script.size() - 17)), data);
  EXPECT_EQ(fill("{{t}}", {{"t", "{{t}}"}}), "{{t}}") << "what was filled in is not a template";
}

TEST(Fill, AMistakeInATemplateIsFound) {
  for (const char* page : {"{{a}}", "{{#a}}", "{{#x}}{{/y}}", "{{x", "{{x|miles}}", "{{x.y}}"})
    EXPECT_THROW(fill(page, {{"x", 1}}), std::logic_error) << page;
}

TEST(Fill, AValueIsCutBetweenCharacters) {
  std::string text = "x";
  while (text.size() < 6000) text += "\u0394";
  const std::string shown = fill("{{t}}", {{"t", text}});
  EXPECT_EQ(shown.substr(0, 4999), text.substr(0, 4999));
  EXPECT_EQ(shown.substr(4999), " .. 1.00 kB more");
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
