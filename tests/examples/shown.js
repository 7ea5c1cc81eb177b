// node shown.js PAGE.html: what a reader sees of a page: its template, filled from its JSON by its own script.
// node shown.js --test figures.js: what a tag of a template stands for, and that no text becomes markup.
"use strict";
const fs = require("fs"), vm = require("vm"), assert = require("assert");
const show = (text) => fs.writeSync(1, text);
const [what, file] = process.argv.slice(2);

function scripts(html) {
  const script = (id) => html.match(new RegExp(`<script type="[^"]*" id="${id}">([^]*?)</script>`))[1];
  const document = { getElementById: (id) => ({ textContent: script(id), insertAdjacentHTML: (_, text) => (show(text), process.exit(0)) }) };
  vm.runInNewContext(html.match(/<script>([^]*?)<\/script>/)[1], { document });
}

function test(figures) {
  const context = vm.createContext({ document: { getElementById: () => ({ textContent: "{}" }) } });
  vm.runInContext(figures, context);
  const fill = vm.runInContext("fill", context), is = (text, data, filled) => assert.strictEqual(fill(text, data), filled);
  // Values.
  const values = { a: 3, b: { c: "x" }, f: 0.123456, none: null, list: [5, 6] };
  is("{{a}} {{b.c}} {{f}} {{none}} {{list.0}} {{list}}", values, "3 x 0.1235 – 5 [5,6]");
  is("{{a|bytes}}, {{a|flops}}, {{f|percent}}, {{f|f2}}, {{f|sci}}, {{none|ms}}", values, "3\u00a0B, 3\u00a0FLOP, 12.3\u00a0%, 0.12, 1.2e-1, –");
  // Sections.
  const rows = { rows: [{ n: 1, good: true }, { n: 2, good: false }], empty: [], zero: 0, matrix: [[1, 2], [3, 4]], name: "outer" };
  is("{{#rows}}{{n}}{{#good}}!{{/good}}{{^good}}?{{/good}} {{name}};{{/rows}}", rows, "1! outer;2? outer;");
  is("{{#matrix}}[{{#.}}{{.}},{{/.}}]{{/matrix}}", rows, "[1,2,][3,4,]");
  is("{{#empty}}a{{/empty}}{{^empty}}b{{/empty}}{{#zero}}c{{/zero}}{{#missing}}{{d}}{{/missing}}e", rows, "be");
  is("{{#rows.0}}{{n}}{{/rows.0}}{{#empty.0}}never{{/empty.0}}", rows, "1");
  // Text is never markup, and what was filled in is no template.
  is("{{t}}", { t: '<b title="&"></script>' }, "&lt;b title=&quot;&amp;&quot;&gt;&lt;/script&gt;");
  is("{{t}}", { t: "{{t}}" }, "{{t}}");
  is("{{#one}}{{t}}{{/one}}", { one: true, t: "$& $1" }, "$&amp; $1");
  // A mistake in a template is found.
  for (const text of ["{{a}}", "{{#a}}", "{{#x}}{{/y}}", "{{x|miles}}", "{{x.y}}"]) assert.throws(() => fill(text, { x: 1 }), /template/, text);
  // A value is cut between characters.
  is("{{t}}", { t: "😀".repeat(6000) }, "😀".repeat(5000) + " .. 1.00 k more");
}

if (what === "--test") test(fs.readFileSync(file, "utf8"));
else scripts(fs.readFileSync(what, "utf8"));
