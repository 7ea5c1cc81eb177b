// Templates of the reports: what a tag stands for, and that no text becomes markup.
#include "../../examples/program/report/fill.h"

#include <gtest/gtest.h>

#include <limits>
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

}  // namespace
