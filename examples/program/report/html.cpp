// The page: its style sheet, headings with a table of contents, figures and tables.
#include "html.h"

#include "text.h"

namespace report {
namespace {

// Colors c0..c3 tell modes apart (also by lightness, for those who see hues alike); k0..k5 kinds of
// ops; h0..h5 levels of a heat map; t0..t4 neighbouring tiles. Everything a figure uses is here.
constexpr const char* kStyle = R"css(
:root{--bg:#fff;--ink:#1b1f24;--soft:#59636e;--rule:#d5dae0;--panel:#f5f7f9;--link:#0550ae;--good:#116329;--bad:#b3261e;
--c0:#7a828c;--c1:#c25b00;--c2:#2268c9;--c3:#138a5e;--k0:#2268c9;--k1:#c25b00;--k2:#9a6fc0;--k3:#7a828c;--k4:#138a5e;--k5:#b9a13a;
--h0:#e9eef4;--h1:#c7d9ec;--h2:#97bbdf;--h3:#5c95cc;--h4:#2a6bab;--h5:#0f3f73;--t0:#2f6db5;--t1:#9cc3e8;--t2:#5f9bd6;--t3:#c7dff4;--t4:#7d8fa3;--full:#2268c9;--part:#e0a34a}
@media(prefers-color-scheme:dark){:root{--bg:#12161b;--ink:#e4e8ed;--soft:#9aa5b1;--rule:#333b45;--panel:#1a2027;--link:#7ab7ff;--good:#5fce8b;--bad:#ff8a80;
--c0:#9aa5b1;--c1:#f0954a;--c2:#6fa8f5;--c3:#4cc596;--k0:#6fa8f5;--k1:#f0954a;--k2:#bd9be0;--k3:#9aa5b1;--k4:#4cc596;--k5:#d6c15e;
--h0:#1d2630;--h1:#21415f;--h2:#2b6290;--h3:#4089c2;--h4:#74b2e4;--h5:#c5e2fb;--t0:#84b9ee;--t1:#2d5683;--t2:#4f86bd;--t3:#1f3c5c;--t4:#5f6f80;--full:#6fa8f5;--part:#e0a34a}}
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1020px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 4px;text-wrap:balance}h2{font-size:1.25rem;margin:2.6em 0 .5em;padding-top:.7em;border-top:1px solid var(--rule)}
p,ul,ol{max-width:70ch;margin:.6em 0}li{margin:.25em 0}.sub{color:var(--soft);margin:0 0 1em}a{color:var(--link)}
nav{font-size:.9rem;margin:1em 0}nav a{margin-right:1.1em;white-space:nowrap;display:inline-block}
code,pre{font:.86em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}code{background:var(--panel);padding:.08em .3em;border-radius:3px;overflow-wrap:anywhere}
pre{background:var(--panel);padding:10px 12px;overflow-x:auto;border-radius:4px}pre.wrap{white-space:pre-wrap;overflow-wrap:anywhere}
.cap{font-size:.88rem;color:var(--soft);max-width:none;margin:1.2em 0 .2em}.scroll{overflow-x:auto;margin:0 0 1em}table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:5px 14px 5px 0;text-align:left;vertical-align:top;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{font-weight:600;color:var(--soft)}td.n,th.n{text-align:right}td.w{white-space:normal;min-width:15em}tr:last-child td{border-bottom:0}
figure{margin:0}figcaption{font-size:.88rem;color:var(--soft);margin-top:4px}figcaption b{color:var(--ink)}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:26px 30px;margin:1.2em 0;align-items:start}
.row.small{grid-template-columns:repeat(auto-fit,minmax(min(100%,280px),1fr))}
svg{display:block;width:100%;height:auto;max-width:480px}svg text{font-size:12px;fill:var(--ink);font-family:inherit}svg .soft{fill:var(--soft)}svg .end{text-anchor:end}svg .mid{text-anchor:middle}svg .halo{paint-order:stroke;stroke:var(--bg);stroke-width:4px;stroke-linejoin:round}
.fill{stroke:none}.stroke{fill:none;stroke-width:2}.grid{fill:none;stroke:var(--rule);stroke-width:1}.axis{fill:none;stroke:var(--soft);stroke-width:1}.mark{fill:none;stroke:var(--soft);stroke-width:1;stroke-dasharray:4 3}
.c0.fill{fill:var(--c0)}.c1.fill{fill:var(--c1)}.c2.fill{fill:var(--c2)}.c3.fill{fill:var(--c3)}.c0.stroke{stroke:var(--c0)}.c1.stroke{stroke:var(--c1)}.c2.stroke{stroke:var(--c2)}.c3.stroke{stroke:var(--c3)}
.ink.fill{fill:var(--ink)}.ink.stroke{stroke:var(--ink)}
.k0{fill:var(--k0)}.k1{fill:var(--k1)}.k2{fill:var(--k2)}.k3{fill:var(--k3)}.k4{fill:var(--k4)}.k5{fill:var(--k5)}
.cell{fill:none;stroke-width:1;shape-rendering:crispEdges}.thin{fill:none;stroke:var(--ink);stroke-width:1}.h0{stroke:var(--h0)}.h1{stroke:var(--h1)}.h2{stroke:var(--h2)}.h3{stroke:var(--h3)}.h4{stroke:var(--h4)}.h5{stroke:var(--h5)}.h6{stroke:var(--bad)}
.t0{stroke:var(--t0)}.t1{stroke:var(--t1)}.t2{stroke:var(--t2)}.t3{stroke:var(--t3)}.t4{stroke:var(--t4)}.curve{fill:none;stroke-width:.72;stroke-linecap:square}
.edge{fill:none;stroke:var(--ink);stroke-width:.3;opacity:.5}.outline{fill:none;stroke:var(--c1);stroke-width:1.3}.full{stroke:var(--full)}.part{stroke:var(--part)}.frame{fill:var(--panel);stroke:var(--rule)}
.fill.full{fill:var(--full);stroke:none}.fill.part{fill:var(--part);stroke:none}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.4em}.dot.c0{background:var(--c0)}.dot.c1{background:var(--c1)}.dot.c2{background:var(--c2)}.dot.c3{background:var(--c3)}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}.verdict{padding:10px 14px;border-left:4px solid var(--good);background:var(--panel);margin:1.2em 0;max-width:none}.verdict.no{border-color:var(--bad)}
.quad .row{grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:18px}.key{padding:0 .45em;border-radius:3px;color:var(--bg);white-space:nowrap}.key.full{background:var(--full)}.key.part{background:var(--part);color:#111}
.shades{display:inline-flex;vertical-align:middle;margin:0 .4em}.shades i{width:1.4em;height:.9em}.bar{display:inline-block;height:.62em;border-radius:1px;vertical-align:baseline}.bar.f{background:var(--k0)}.bar.b{background:var(--k1)}
details{margin:.6em 0}summary{cursor:pointer}
@media print{nav{display:none}}
)css";

}  // namespace

Page::Page(const std::string& title, const std::string& subtitle) : title_(title), subtitle_(subtitle) {}

namespace {

// A number and its unit stay on one line.
std::string glued(std::string html) {
  for (std::size_t i = 1; i + 1 < html.size(); ++i) {
    if (html[i] != ' ' || html[i - 1] < '0' || html[i - 1] > '9') continue;
    for (const char* unit : {"%", "B", "kB", "MB", "GB", "ms", "s", "GB/s", "GFLOP/s", "keys", "tokens"})
      if (html.compare(i + 1, std::char_traits<char>::length(unit), unit) == 0) {
        html.replace(i, 1, "\u00a0");
        break;
      }
  }
  return html;
}

}  // namespace

void Page::heading(const std::string& anchor, const std::string& text) {
  body_ += "<h2 id=\"" + anchor + "\">" + text + "</h2>\n";
  contents_ += "<a href=\"#" + anchor + "\">" + text + "</a>\n";
}

void Page::paragraph(const std::string& html) { body_ += "<p>" + glued(html) + "</p>\n"; }

void Page::figure(const std::string& svg, const std::string& caption) { figures({{svg, caption}}); }

void Page::figures(const std::vector<std::pair<std::string, std::string>>& svg_and_caption) {
  body_ += svg_and_caption.size() > 4 ? "<div class=\"row small\">\n" : "<div class=\"row\">\n";
  for (const auto& [svg, caption] : svg_and_caption)
    body_ += "<figure>" + svg + "\n<figcaption>" + caption + "</figcaption></figure>\n";
  body_ += "</div>\n";
}

void Page::table(const std::string& caption, const std::vector<std::vector<std::string>>& rows) {
  const std::string id = "t" + std::to_string(++tables_);
  body_ += "<p class=\"cap\" id=\"" + id + "\">" + glued(caption) +
           "</p>\n<div class=\"scroll\" tabindex=\"0\"><table aria-labelledby=\"" + id + "\">\n";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    body_ += "<tr>";
    for (const std::string& cell : rows[r]) {
      const bool number = cell.starts_with('#'), prose = cell.starts_with('~');
      const std::string tag = r == 0 ? "th" : "td";
      body_ += "<" + tag +
               (number  ? " class=\"n\""
                : prose ? " class=\"w\""
                        : "") +
               (r == 0 ? " scope=\"col\"" : "") + ">" + cell.substr(number || prose) + "</" + tag + ">";
    }
    body_ += "</tr>\n";
  }
  body_ += "</table></div>\n";
}

std::string Page::str() const {
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
         "content=\"width=device-width, initial-scale=1\">\n"
         "<meta name=\"color-scheme\" content=\"light dark\">\n<title>" +
         escape(title_) + "</title>\n<style>" + kStyle + "</style>\n</head>\n<body>\n<main>\n<h1>" + escape(title_) +
         "</h1>\n<p class=\"sub\">" + subtitle_ + "</p>\n" +
         (contents_.empty() ? "" : "<nav aria-label=\"Contents\">\n" + contents_ + "</nav>\n") + body_ +
         "</main>\n</body>\n</html>\n";
}

}  // namespace report
