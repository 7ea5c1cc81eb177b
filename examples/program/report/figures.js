// What the pages share: numbers in words, the page filled from its template and the JSON, and figures drawn at the width
// they have. Every mark carries its number as data-value (or data-x and data-y), so that a reader's tools, and our tests, can
// read it back.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

const prefixed = (n, unit) => {
  let i = 0;
  while (Math.abs(n) >= 999.5 && i < 5) (n /= 1000), i++;
  const digits = i === 0 && Number.isInteger(n) ? 0 : Math.abs(n) < 9.995 ? 2 : Math.abs(n) < 99.95 ? 1 : 0;
  return (n.toFixed(digits) + " " + ["", "k", "M", "G", "T", "P"][i] + unit).trim();
};
const bytes = (n) => prefixed(n, "B");
const count = (n) => prefixed(n, "");
const milliseconds = (ms) =>
  ms >= 999.5 ? (ms / 1000).toFixed(2) + " s" : ms.toFixed(ms < 0.9995 ? 3 : ms < 9.995 ? 2 : ms < 99.95 ? 1 : 0) + " ms";
const percent = (x) => (100 * x).toFixed(x >= 0.9995 || x === 0 ? 0 : x < 0.1 ? 2 : 1) + " %";
const scientific = (x) => (x === null ? "–" : x === 0 ? "0" : x.toExponential(1));
const short = (x) => String(Number.isInteger(x) && Math.abs(x) < 1e6 ? x : Number(x.toPrecision(4)));

/* Templates. A path is a.b.c, looked for in the innermost object first; list.0 is the first element, {{.}} the thing itself:
     {{path}}                a value, its first 5,000 characters; markup in it becomes text. {{path|unit}}: a number as bytes,
                             ms, percent, sci (scientific), count, flops, f0 .. f9 (decimals); one that is null is a dash
     {{#path}} .. {{/path}}  once for each element of a list, or once inside what is there, unless false or empty
     {{^path}} .. {{/path}}  where the list is empty or the value false, null, 0, "" or missing
   A path that is to be printed and is not in the data is an error. */
const kMostPrinted = 5000;
const units = { bytes, count, percent, ms: milliseconds, sci: scientific, flops: (n) => prefixed(n, "FLOP") };
const lookup = (scopes, path) => {
  if (path === ".") return scopes.at(-1);
  const [first, ...rest] = path.split("."), has = (value, name) => value !== null && typeof value === "object" && Object.hasOwn(value, name);
  const scope = scopes.findLast((s) => !Array.isArray(s) && has(s, first));
  return rest.reduce((value, name) => (has(value, name) ? value[name] : undefined), scope?.[first]);
};
const holds = (value) => (value !== null && typeof value === "object" ? Object.keys(value).length > 0 : Boolean(value));
function printed(value, unit, tag) {
  if (value === undefined) throw new Error(`template: ${tag} is not in the data`);
  const decimals = /^f(\d)$/.exec(unit ?? ""), is_number = typeof value === "number";
  if (unit && !decimals && !units[unit]) throw new Error(`template: no unit as in ${tag}`);
  let text = typeof value === "object" ? JSON.stringify(value) : String(value);
  if (value === null) text = "–";
  else if (is_number && unit) text = decimals ? value.toFixed(decimals[1]) : units[unit](value);
  else if (is_number && !Number.isInteger(value)) text = String(Number(value.toPrecision(4)));
  const letters = [...text];
  if (letters.length > kMostPrinted) text = `${letters.slice(0, kMostPrinted).join("")} .. ${count(letters.length - kMostPrinted)} more`;
  if (unit) text = text.replaceAll(" ", "\u00a0");  // a number and its unit stay on one line
  return text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}
const fill = (text, ...scopes) =>
  text.replace(/{{([#^])(.+?)}}([^]*?){{\/\2}}|{{(.*?)}}/g, (tag, kind, path, inside, name) => {
    if (!kind) return printed(lookup(scopes, name.split("|")[0]), name.split("|")[1], tag);
    const value = lookup(scopes, path);
    if (kind === "^") return holds(value) ? "" : fill(inside, ...scopes);
    return (Array.isArray(value) ? value : holds(value) ? [value] : []).map((one) => fill(inside, ...scopes, one)).join("");
  });
/** Fills the page, before anything is drawn into it. */
function show() {
  const template = document.getElementById("page");
  template.insertAdjacentHTML("afterend", fill(template.textContent, data));
  // On narrow screens the rows of these tables are cards; each cell then says what its column says.
  for (const table of document.querySelectorAll("table.stack"))
    for (const row of table.tBodies[0].rows)
      [...row.cells].forEach((cell, i) => cell.colSpan === 1 && (cell.dataset.label = table.tHead.rows[0].cells[table.tHead.rows[0].cells.length - row.cells.length + i].textContent));
  document.querySelector(".theme").addEventListener("click", () => {
    const style = document.documentElement.style;
    const dark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    style.colorScheme = dark ? "light" : "dark";
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((e) => (e.open = true)));
}

/** An element, HTML or SVG, with attributes and children. */
function make(tag, attributes = {}, ...children) {
  const vector = "svg g path line rect circle text title desc".split(" ").includes(tag);
  const e = vector ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) e.setAttribute(name, value);
  e.append(...children.filter((c) => c !== undefined));
  return e;
}
const places = (name) => document.querySelector(`[data-figures="${name}"]`);

/** A figure with its title and description, drawn by draw(svg, width) and again whenever its width changes. */
function figure(into, title, description, caption, draw, ratio) {
  const svg = make("svg", { role: "img", "aria-label": title + ". " + description });
  const words = make("figcaption");
  words.innerHTML = caption;
  const whole = make("figure", {}, svg, words);
  into.append(whole);
  let drawn = 0;
  const redraw = () => {
    const width = Math.floor(whole.clientWidth);
    if (!width || width === drawn) return;
    drawn = width;
    svg.replaceChildren(make("title", {}, title), make("desc", {}, description));
    const height = draw(svg, width) || width * ratio;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.dispatchEvent(new Event("drawn", { bubbles: true }));
  };
  redraw();
  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(whole);
  return whole;
}

function ticks(low, high, log, room, round) {
  const out = [];
  if (log && round && high / low <= 300) {  // 1, 2, 5, 10, .. instead of powers of two
    for (let t = 10 ** Math.floor(Math.log10(low)); t <= high * 1.0001; t *= 10) out.push(...[t, 2 * t, 5 * t].filter((v) => v >= low && v <= high));
    return out.length > room ? out.filter((t) => String(t.toExponential(0))[0] === "1") : out;
  }
  if (log) {
    const base = high / low > 300 ? 10 : high / low > 17 ? 4 : 2;
    for (let t = base ** Math.ceil(Math.log(low) / Math.log(base) - 1e-9); t <= high * 1.0001; t *= base) out.push(t);
    while (out.length > room) for (let i = 1; i < out.length; i++) out.splice(i, 1);
    return out;
  }
  const rough = (high - low) / Math.max(2, room - 1), power = 10 ** Math.floor(Math.log10(rough)), part = rough / power;
  const steps = [0.5, 1, 2, 5, 10].map((s) => s * power), fitting = part <= 1 ? 1 : part <= 2 ? 2 : part <= 5 ? 3 : 4;
  const step = steps[(high - low) / steps[fitting] < 2 ? fitting - 1 : fitting];  // two at least, beside that at 0
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) out.push(i * step);
  return out;
}

function axis(given, values) {
  values = values.filter((v) => Number.isFinite(v) && (!given.log || v > 0));
  if (!values.length) values = [1, 2];
  const low = Math.min(...values), high = Math.max(...values);
  const out = { format: short, low: given.log ? low / 1.3 : Math.min(0, low), high: given.log ? high * 1.3 : high * 1.05, ...given };
  if (out.high <= out.low) out.high = out.low + 1;
  return out;
}

function legend(svg, names, x, y, width) {
  const left = x;
  for (const [name, color] of names) {
    const wide = 26 + 6.6 * name.length;
    if (x + wide > width && x > left) (x = left), (y += 16);
    svg.append(make("rect", { x, y: y - 9, width: 10, height: 10, style: `fill:var(--${color})` }), make("text", { x: x + 14, y }, name));
    x += wide;
  }
  return y;
}

/** Lines and dots. chart: {x, y: {label, log, format, low, high; of x also end: the last tick stands there}, series: [{name, color, points, step, dots, line, style}],
    marks: [{at, text, horizontal}], height}; a series without a name is not in the legend. */
function lineChart(into, title, description, caption, chart) {
  return figure(into, title, description, caption, (svg, width) => {
    const { series, marks = [], height = 280 } = chart, points = series.flatMap((s) => s.points);
    const x = axis(chart.x, points.map((p) => p[0]).concat(marks.filter((m) => !m.horizontal).map((m) => m.at)));
    const y = axis(chart.y, points.map((p) => p[1]).concat(marks.filter((m) => m.horizontal).map((m) => m.at)));
    const names = series.filter((s) => s.name).map((s) => [s.name, s.color]);
    const left = 70, right = width - 14, bottom = height - 42;
    const top = (names.length ? legend(svg, names, left, 12, right) + 12 : 8) + 18;
    const scale = (a, from, to) => (v) =>
      from + (to - from) * (a.log ? Math.log(v / a.low) / Math.log(a.high / a.low) : (v - a.low) / (a.high - a.low));
    const sx = scale(x, left, right), sy = scale(y, bottom, top);
    for (const t of ticks(y.low, y.high, y.log, 6, true))
      svg.append(make("line", { x1: left, x2: right, y1: sy(t), y2: sy(t), class: "grid" }),
                 make("text", { x: left - 6, y: sy(t) + 4, "text-anchor": "end" }, y.format(t)));
    const below = ticks(x.low, x.high, x.log, Math.max(3, Math.floor((right - left) / 62)));
    if (x.end) below.splice(0, below.length, ...below.filter((t) => sx(t) < right - 50), x.high);
    for (const t of below)
      svg.append(make("line", { x1: sx(t), x2: sx(t), y1: bottom, y2: bottom + 4, class: "axis" }),
                 make("text", { x: sx(t), y: bottom + 17, "text-anchor": "middle" }, x.format(t)));
    svg.append(make("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }),
               make("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle", class: "soft" }, x.label),
               make("text", { x: 4, y: top - 10, class: "soft" }, y.label));
    for (const m of marks)
      svg.append(m.horizontal ? make("line", { x1: left, x2: right, y1: sy(m.at), y2: sy(m.at), class: "mark", "data-y": m.at })
                              : make("line", { x1: sx(m.at), x2: sx(m.at), y1: top, y2: bottom, class: "mark", "data-x": m.at }));
    for (const s of series) {
      const seen = s.points.filter(([px, py]) => (!x.log || px > 0) && (!y.log || py > 0) && py !== null);
      const style = s.style ? undefined : `--color:var(--${s.color})`;
      let path = "", before;
      for (const [px, py] of seen) {
        path += (path ? "L" + (s.step ? `${sx(px).toFixed(1)} ${sy(before).toFixed(1)}L` : "") : "M") + `${sx(px).toFixed(1)} ${sy(py).toFixed(1)}`;
        before = py;
      }
      if (s.line !== false) svg.append(make("path", { d: path, class: s.style || "stroke", style }));
      if (s.dots !== false)
        for (const [px, py] of seen)
          svg.append(make("circle", { cx: sx(px), cy: sy(py), r: s.line === false ? 5 : 3, class: "fill", style, "data-x": px, "data-y": py },
                          make("title", {}, `${s.name || title}: ${x.format(px)}, ${y.format(py)}`)));
    }
    const taken = [];
    for (const m of marks) {
      const wide = 6.6 * m.text.length;
      if (m.horizontal) {
        const at = taken.some((t) => Math.abs(t - sy(m.at) + 5) < 13) ? sy(m.at) + 13 : sy(m.at) - 5;
        taken.push(at);
        svg.append(make("text", { x: right - 2, y: at, "text-anchor": "end", class: "soft halo" }, m.text));
      } else {
        const back = sx(m.at) + wide > right;
        svg.append(make("text", { x: sx(m.at) + (back ? -5 : 5), y: top + 11, "text-anchor": back ? "end" : "start", class: "soft halo" }, m.text));
      }
    }
    return height;
  });
}

/** Horizontal bars of parts laid end to end. bars: [{label, value, total, parts: [{size, color, title, of: the steps it does}]}] */
function barChart(into, title, description, caption, bars, names) {
  return figure(into, title, description, caption, (svg, width) => {
    const left = 118, right = width - 66, most = Math.max(...bars.map((b) => b.total), 1e-9);
    let y = legend(svg, names, 0, 12, width) + 14;
    for (const bar of bars) {
      let x = left;
      svg.append(make("text", { x: left - 8, y: y + 13, "text-anchor": "end" }, bar.label),
                 make("rect", { x, y: y + 0.5, width: (bar.total / most) * (right - left), height: 16, class: "frame", "data-value": bar.total }));
      for (const part of bar.parts) {
        const wide = (part.size / most) * (right - left);
        svg.append(make("rect", { x, y, width: wide, height: 17, class: "part", style: `fill:var(--${part.color})`, "data-value": part.size, "data-of": part.of }, make("title", {}, part.title)));
        x += wide;
      }
      svg.append(make("text", { x: left + (bar.total / most) * (right - left) + 6, y: y + 13 }, bar.value));
      y += 26;
    }
    return y + 2;
  });
}

/** Levels 0 .. 7 of cells out of a packed text, as report/grid.h makes it: two to a character. */
const levels = (text) => [...text].flatMap((c) => [(c.charCodeAt(0) - 63) >> 3, (c.charCodeAt(0) - 63) & 7]);
/** A path for each color but undefined ones: the cells of level 0, 1, .. in runs along their rows. */
const cellPaths = (columns, rows, text, colors) => {
  const level = levels(text), d = colors.map(() => "");
  for (let y = 0; y < rows; y++)
    for (let x = 0, begin = 0; x < columns; begin = x) {
      const now = level[y * columns + x];
      while (x < columns && level[y * columns + x] === now) x++;
      if (colors[now]) d[now] += `M${begin} ${y}.5h${x - begin}`;
    }
  return colors.flatMap((color, i) => (d[i] ? [make("path", { d: d[i], class: "cells", style: `stroke:var(--${color})` })] : []));
};
/** A walk through cells [x, y], toned by tiles of so many; the line breaks where it goes to no neighbour. */
function walkPaths(walk, tile) {
  const near = ([x, y], [u, v]) => Math.abs(x - u) <= 1 && Math.abs(y - v) <= 1, d = ["", "", "", "", ""];
  walk.forEach((at, i) => (d[Math.floor(i / tile) % 5] += (i % tile && near(at, walk[i - 1]) ? "L" : "M") + `${at[0] + 0.5} ${at[1] + 0.5}` + (near(at, walk[i + 1] ?? [-9]) ? "" : "h0")));
  return d.map((path, tone) => make("path", { d: path, class: "walk", style: `stroke:var(--t${tone})` }));
}
/** Lines between cells of different labels; what is outside has none, -1. */
function borders(columns, rows, label) {
  const at = (x, y) => (x < 0 || y < 0 || x >= columns || y >= rows ? -1 : label(y * columns + x));
  let d = "";
  for (let y = 0; y <= rows; y++)
    for (let x = 0; x <= columns; x++) {
      if (x < columns && at(x, y) !== at(x, y - 1)) d += `M${x} ${y}h1`;
      if (y < rows && at(x, y) !== at(x - 1, y)) d += `M${x} ${y}v1`;
    }
  return d;
}

/** Cells in the colors of their levels, h0 .. h6 unless told, with a path of lines over them; of tokens by tokens also
    what these are, before the rows and above the columns. */
function heatMap(into, title, description, caption, columns, rows, text, lines, colors = ["h0", "h1", "h2", "h3", "h4", "h5", "h6"], labels = []) {
  const longest = Math.max(0, ...labels.map((label) => label.length)), room = longest && 6 + 7 * longest;
  return figure(into, title, description, caption, (svg, width) => {
    const side = (width - room) / Math.max(columns, rows), style = `font-size:${Math.min(11, side).toFixed(1)}px`;
    const all = make("g", { transform: `translate(${room} ${room}) scale(${side})`, "data-cells": columns * rows });
    all.append(...cellPaths(columns, rows, text, colors), make("path", { d: lines, class: "edge" }));
    svg.append(all);
    labels.forEach((label, i) => {
      const at = room + (i + 0.5) * side, turn = longest > 1 ? `rotate(-90 ${at + 3} ${room - 4})` : undefined;
      svg.append(make("text", { x: room - 4, y: at + 3, "text-anchor": "end", style }, label),
                 make("text", { x: at + (turn ? 3 : 0), y: room - 4, "text-anchor": turn ? "start" : "middle", transform: turn, style }, label));
    });
    return side * rows + room;
  });
}

/** An order: left the walk over the grid, right the tiles of scores. */
function orderPicture(into, o) {
  const c = o.count, text = `Left, the tokens on their grid, walked in ${o.order} order and toned by tiles of 128, with the keys of token ${o.token} outlined. Right, the scores in tiles: ${c.full} full, ${c.partial} partial, ${c.total - c.tiles} empty.`;
  return figure(into, o.order + " order", text, `<b>${o.order}</b>: ${c.tiles} of ${c.total} tiles, ${percent(c.touched)}; ${percent(c.neighbours)} of neighbours together`, (svg, width) => {
    const side = (width - 14) / 2, scale = side / Math.max(o.columns, o.rows), keys = levels(o.keys), place = (cell) => [cell % o.columns, Math.floor(cell / o.columns)];
    const grid = make("g", { transform: `translate(1 1) scale(${scale})` });
    if (o.tones) grid.append(...cellPaths(o.columns, o.rows, o.tones, ["t0", "t1", "t2", "t3", "t4"]));
    if (o.walk) grid.append(...walkPaths(o.walk.match(/../g).map((c) => place(94 * (c.charCodeAt(0) - 33) + c.charCodeAt(1) - 33)), 128));
    grid.append(make("path", { d: borders(o.columns, o.rows, (i) => keys[i] || -1), class: "outline" }));
    const r = 4 / scale, [ax, ay] = place(o.first), [bx, by] = place(o.last);
    grid.append(make("circle", { cx: ax + 0.5, cy: ay + 0.5, r, class: "line" }, make("title", {}, "start")),
                make("rect", { x: bx + 0.5 - r, y: by + 0.5 - r, width: 2 * r, height: 2 * r, class: "line" }, make("title", {}, "end")));
    const { columns, rows, cells } = o.tiles, most = Math.max(columns, rows, 1);
    const tiles = make("g", { transform: `translate(${side + 13} 1) scale(${side / most})` });
    tiles.append(make("rect", { width: columns, height: rows, class: "frame", "stroke-width": most / side }), ...cellPaths(columns, rows, cells, [undefined, "part", "full"]));
    svg.append(grid, tiles);
    return side + 2;
  });
}

/** Buttons of which one is pressed; chosen(value) at the start and at every change. */
function choice(into, options, chosen) {
  if (!into) return;
  const choose = (value) => {
    for (const b of into.children) b.setAttribute("aria-pressed", b.dataset.value === value);
    chosen(value);
  };
  for (const [value, text] of options) {
    const button = make("button", { type: "button", "data-value": value }, text);
    button.addEventListener("click", () => choose(value));
    into.append(button);
  }
  if (options.length) choose(options[0][0]);
}
