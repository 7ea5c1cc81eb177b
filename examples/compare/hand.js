// Four tokens to touch: numbers that can be dragged or typed, the loss as a curve of the chosen one, and the tiles that
// fused goes through. All of it is drawn from attention() of four_tokens.js.
const given = Object.fromEntries(kInputs.map((name) => [name, data.by_hand.matrices[name]]));
const hand = { inputs: structuredClone(given), chosen: ["K", 2, 0], mistake: "none" };
const gradientOf = { Q: "dQ", K: "dK", V: "dV", dO: "O" }, kMostTyped = 9, by_id = (id) => document.getElementById(id);
/** A number of the model with so many digits, or so many decimals; a dash where there is none. */
const minus = (x) => (Number.isFinite(x) ? String(x + 0).replace("-", "−") : "–");
const digits = (x, n = 4) => minus(Number(Number(x.toFixed(10)).toPrecision(n)));
const decimals = (x, n = 2) => minus(Math.abs(x) < 10 ? Number(x.toFixed(n)) : Number(x.toPrecision(3)));
const place = ([name, row, column]) => `${name}[${row}][${column}]`;

/** What comes of the inputs where the chosen number is another one. */
function outcome(value) {
  const [name, row, column] = hand.chosen, inputs = { ...hand.inputs, [name]: hand.inputs[name].map((r) => [...r]) };
  inputs[name][row][column] = value;
  return attention(inputs, data.by_hand.c, hand.mistake);
}

/** The chosen number, the gradient that the code gives it, and the slope that the loss has there. */
function felt() {
  const [name, row, column] = hand.chosen, value = hand.inputs[name][row][column], step = 1e-4, now = outcome(value);
  const gradient = now[gradientOf[name]][row][column];
  const slope = (outcome(value + step).loss - outcome(value - step).loss) / (2 * step);
  return { now, value, gradient, slope, agree: Math.abs(gradient - slope) < 1e-5 * Math.max(1, Math.abs(slope)) };
}

function paintCurve({ value, gradient, slope, agree, now }) {
  const [name, row, column] = hand.chosen, first = given[name][row][column], color = agree ? "good" : "bad";
  const low = Math.floor(Math.min(value, first)) - 2, high = Math.ceil(Math.max(value, first)) + 2;
  const curve = Array.from({ length: 81 }, (_, i) => low + ((high - low) * i) / 80).map((v) => [v, outcome(v).loss]);
  const tangent = [value - 1, value + 1].map((v) => [v, now.loss + gradient * (v - value)]);
  const heights = [...curve, ...tangent].map((p) => p[1]), bottom = Math.min(...heights), top = Math.max(...heights);
  const space = Math.max(0.5, 0.08 * (top - bottom));
  const g = `${place([gradientOf[name], row, column])} = ${digits(gradient)}`;
  places("touched").replaceChildren();
  lineChart(places("touched"), `The loss as ${place(hand.chosen)} moves`,
    `At ${digits(value)} the loss is ${digits(now.loss)}, its slope ${digits(slope)}; ${g}.`, "", {
      x: { label: place(hand.chosen), low, high, format: digits }, height: 250,
      y: { label: "loss = ∑ dO · O", low: bottom - space, high: top + space, format: (v) => digits(v, 3) },
      series: [{ points: curve, color: "soft", dots: false }, { points: tangent, color, dots: false },
               { points: [[value, now.loss]], color, line: false }] });
  by_id("touched-verdict").classList.toggle("no", !agree);
  by_id("touched-verdict").textContent =
    !agree ? `${g}, but the loss has slope ${digits(slope)}: this gradient is wrong.`
    : `${g} is the slope of the loss.` + (hand.mistake === "none" ? "" : " This number does not notice the mistake.");
}

/** All matrices; shaded is what follows the chosen number, framed its gradient. */
function paintMatrices(now) {
  const [name, row, column] = hand.chosen, moved = outcome(hand.inputs[name][row][column] + 0.37);
  for (const drawn of document.querySelectorAll("[data-matrix]")) {
    const of = drawn.dataset.matrix;
    [...drawn.querySelector("table").rows].forEach((r, i) => [...r.cells].forEach((cell, j) => {
      const value = now[of][i][j], field = cell.firstElementChild;
      if (!field) cell.textContent = digits(value);
      else if (field !== document.activeElement) field.value = value;
      if (field) field.tabIndex = of === name && i === row && j === column ? 0 : -1;
      cell.classList.toggle("follows", Math.abs(moved[of][i][j] - value) > 1e-9);
      cell.classList.toggle("slope", of === gradientOf[name] && i === row && j === column);
    }));
  }
  by_id("row-sums").textContent = now.dS.map((r) => digits(r.reduce((a, b) => a + b))).join(", ");
}
function touch() {
  const found = felt();
  paintMatrices(found.now), paintCurve(found), tiles.show();
}

/** A number as a field: type, drag sideways, press up and down. */
function fieldOf(name, i, j) {
  const field = make("input", { type: "number", step: 0.25, min: -kMostTyped, max: kMostTyped,
                                "aria-label": `${name}, row ${i}, column ${j}`, value: given[name][i][j] });
  const set = (value) => {
    if (Number.isNaN(value)) return;
    hand.inputs[name][i][j] = Math.min(kMostTyped, Math.max(-kMostTyped, value)), touch();
    if (field.validity.rangeOverflow || field.validity.rangeUnderflow) field.reportValidity();
  };
  let from;
  field.addEventListener("focus", () => ((hand.chosen = [name, i, j]), touch()));
  field.addEventListener("click", () => field.select());
  field.addEventListener("input", () => set(field.valueAsNumber));
  field.addEventListener("blur", () => (field.value = hand.inputs[name][i][j]));
  field.addEventListener("pointerdown", (e) => {
    from = { x: e.clientX, value: hand.inputs[name][i][j] }, field.setPointerCapture(e.pointerId);
  });
  field.addEventListener("pointermove", (e) => {
    if (!from || Math.abs(e.clientX - from.x) <= 3) return;
    set(Math.round(10 * from.value + (e.clientX - from.x) / 4) / 10), (field.value = hand.inputs[name][i][j]);
  });
  for (const end of ["pointerup", "pointercancel"]) field.addEventListener(end, () => (from = undefined));
  return field;
}
function makeTouchable() {
  const cells = kInputs.flatMap((name) => [...document.querySelectorAll(`[data-matrix="${name}"] tr`)].flatMap((r, i) =>
    [...r.cells].map((cell, j) => ({ cell, field: fieldOf(name, i, j) }))));
  for (const { cell, field } of cells) cell.replaceChildren(field);
  const fields = cells.map((c) => c.field);
  fields.forEach((field, at) => field.addEventListener("keydown", (e) => {
    const to = fields[{ ArrowLeft: at - 1, ArrowRight: at + 1 }[e.key]];
    if (to) e.preventDefault(), to.focus(), to.select();
  }));
  by_id("untouch").addEventListener("click", () => ((hand.inputs = structuredClone(given)), touch()));
}

/** What a step of the tiles does, in words. */
function told_step({ name, q, k, factor }) {
  const shrinks = (t) => k > 0 && factor[t][0] < 1;
  const shrunk = [q, q + 1].filter(shrinks).map((t) => `row ${t} by ${decimals(factor[t][0])}`);
  return {
    start: "A window will go over the scores, two queries and two keys at a time. One tile is masked, and skipped.",
    scores: `Queries ${q} and ${q + 1} meet keys ${k} and ${k + 1}: S = c Q Kᵀ, in the window alone.`,
    rescale: k === 0 ? "m is the largest score of each row so far. l and a are still 0."
      : shrunk.length === 0 ? "m stays: nothing shrinks."
      : `m grows, so l and a shrink by exp(m − m′): ${shrunk.join(", ")}.`,
    sums: "Weights exp(S − m) join l, and times V they join a. A tape keeps such a tile; fused forgets it.",
    divide: "These rows have met all their keys: O = a / l, and L = m + log l is kept.",
    kept: "Between the passes fused has Q, K, V, O and L. A tape has P, one number a pair.",
    weights: "Backward. S again, and from it P = exp(S − L) at once: L is the whole row's. Δ = dO · O.",
    slopes: "dP = dO Vᵀ, and dS = P (dP − Δ).",
    gradients: "The tile gives c dS K to dQ of its queries, c dSᵀ Q to dK and Pᵀ dO to dV of its keys.",
    done: "dQ, dK and dV are complete. Fused never held more than a tile of two matrices.",
  }[name];
}
/** How many numbers of pairs are in memory: the tape adds tile to tile, fused has those of one. */
function held({ name, pass, q, k }) {
  const tile = kTile * kTile, seen = (q + k) / kTile;
  const forward = pass === "before" ? 0 : pass === "forward" ? seen + (name === "sums" || name === "divide") : 3;
  const backward = pass === "backward" ? seen + (name !== "weights") : pass === "after" ? 3 : 0;
  return { taped: tile * (forward + 2 * backward), fused: tile * ({ forward: 1, backward: 2 }[pass] ?? 0) };
}
const kMostHeld = 36;
/** The matrix in the window at each step, and what it reads and writes. */
const windows = { scores: "S", rescale: "S", sums: "W", weights: "P", slopes: "dS", gradients: "dS" };
const reads = { scores: "Q K", sums: "V", weights: "Q K L", slopes: "dO V Δ", gradients: "Q K dO", kept: "Q K V" };
const writes = { rescale: "m l a", sums: "l a", divide: "L O", weights: "Δ", gradients: "dQ dK dV", kept: "L O" };
const running = ["m", "l", "a", "a"], finished = ["L", "", "O", "O"], returning = ["L", "Δ", "dQ", "dQ"];
const goesBack = (step) => step.pass === "backward" || step.pass === "after";

const tiles = {
  frames: [], at: 0, timer: 0, marks: {},
  show() {
    this.frames = [];
    const keep = (step, x) => this.frames.push(structuredClone({ ...x, ...step }));
    attention(hand.inputs, data.by_hand.c, hand.mistake, keep);
    this.paint();
  },
  go(at) {
    this.at = Math.min(this.frames.length - 1, Math.max(0, at));
    if (this.at === this.frames.length - 1) this.play(false);
    this.paint();
  },
  play(on) {
    clearInterval(this.timer);
    if (on && this.at === this.frames.length - 1) this.at = 0;
    this.timer = on ? setInterval(() => this.go(this.at + 1), 1200) : 0;
    by_id("tiles-play").textContent = on ? "Pause" : "Play";
    by_id("tiles-words").setAttribute("aria-live", on ? "off" : "polite");
    this.paint();
  },
  /** Cells, a window and arrows at this width: what has rows beside the scores, what has keys above and below. */
  draw(svg, width) {
    const gap = width < 500 ? 9 : 26, u = Math.min(54, (width - 2 * gap - 6) / 12), h = Math.min(30, 0.9 * u);
    const x = 4 * u + 6 + gap, r = x + 4 * u + gap, y = 4 * h + 30, below = y + 4 * h + 12, second = 2 * h + 8;
    const style = `font-size:${Math.min(13, 0.36 * u).toFixed(1)}px`, cells = [];
    const block = (name, rows, columns, left, top, turned) => {
      for (let i = 0; i < rows * columns; i++) {
        const row = Math.floor(i / columns), column = i % columns, px = left + column * u, py = top + row * h;
        const c = { name, row: turned ? column : row, column: turned ? row : column,
                    box: make("rect", { x: px, y: py, width: u, height: h, class: "cell" }),
                    bar: make("rect", { x: px + 2, y: py + 2, width: 0, height: h - 4, class: "bar" }),
                    text: make("text", { x: px + u / 2, y: py + h / 2 + 4, "text-anchor": "middle", style }) };
        svg.append(c.box, c.bar, c.text), cells.push(c);
      }
    };
    const label = (text, left, top, anchor = "middle") => {
      const e = make("text", { x: left, y: top, "text-anchor": anchor, class: "soft", style }, text);
      svg.append(e);
      return e;
    };
    for (const [name, top] of [["K", 0], ["V", second], ["dK", below], ["dV", below + second]])
      block(name, 2, 4, x, top, true), label(name + "ᵀ", x - 7, top + h + 4, "end");
    for (const [name, left] of [["dO", 0], ["Q", 2 * u + 6]]) block(name, 4, 2, left, y), label(name, left + u, y - 6);
    block("X", 4, 4, x, y), block("R", 4, 4, r, y);
    const frame = make("rect", { width: 2 * u, height: 2 * h, class: "window" });
    const arrows = make("path", { class: "arrows" });
    svg.append(arrows, frame);
    const title = label("", x + 2 * u, y - 6), heads = [0.5, 1.5, 3].map((j) => label("", r + j * u, y - 6));
    this.marks = { cells, u, h, x, y, r, below, second, title, heads, frame, arrows };
    this.paint();
    return below + 4 * h + 12;
  },
  /** What stands in a cell at this step: its matrix and its number, "" where none. */
  found(step, { name, row, column }) {
    const done = step.pass === "between" || row < step.q + (step.name === "divide" ? kTile : 0);
    const inside = Math.floor(row / kTile) * kTile === step.q && Math.floor(column / kTile) * kTile === step.k;
    const of = name === "R" ? (goesBack(step) ? returning : done ? finished : running)[column]
      : name !== "X" ? name : (inside && windows[step.name]) || "";
    if (!of || (/^d[KV]/.test(of) && !goesBack(step))) return [of, ""];
    if (name === "X") return [of, column > row ? -Infinity : step[of][row][column]];
    return [of, step[of][row][name === "R" ? Math.max(0, column - 2) : column]];
  },
  paint() {
    const step = this.frames[this.at], { cells, u, title, heads, frame, x, y, h } = this.marks;
    if (!step || !cells) return;
    const { q = 0, k = 0, name } = step, memory = held(step), on = (table) => (table[name] ?? "-").split(" ");
    const sizes = (of) => this.frames.flatMap((f) => f[of].flat().filter(Number.isFinite).map(Math.abs));
    const most = (of) => Math.max(1e-9, ...sizes(of));
    const tall = { m: most("m"), l: most("l"), a: most("a") };
    for (const { box, bar, text, ...c } of cells) {
      const [of, value] = this.found(step, c), first = /^d?[KV]$/.test(c.name) ? k : q;
      const here = name === "kept" || (c.row >= first && c.row < first + kTile), pair = c.name === "X";
      const visited = Math.floor(c.row / kTile) + Math.floor(c.column / kTile) < memory.taped / (kTile * kTile);
      text.textContent = value === "" ? "" : decimals(value, u < 40 ? 1 : 2);
      const share = of in tall && Number.isFinite(value) ? Math.abs(value) / tall[of] : 0;
      bar.style.width = share * (u - 4) + "px";
      box.classList.toggle("read", !pair && on(reads).includes(of) && here);
      box.classList.toggle("written", !pair && on(writes).includes(of) && here);
      box.classList.toggle("masked", pair && c.column > c.row);
      box.classList.toggle("on-tape", pair && c.column <= c.row && visited);
    }
    title.textContent = { S: "S", W: "exp(S − m)", P: "P", dS: "dS" }[windows[name]] ?? "scores";
    (goesBack(step) ? ["L", "Δ", "dQ"] : ["m, L", "l", "a, O"]).forEach((text, i) => (heads[i].textContent = text));
    frame.style.transform = `translate(${x + k * u}px, ${y + q * h}px)`;
    frame.style.opacity = name in windows ? 1 : 0.25;
    this.paintArrows(name, q, k);
    for (const row of document.querySelectorAll("#tiles [data-held]")) {
      row.querySelector("i").style.width = (memory[row.dataset.held] / kMostHeld) * 100 + "%";
      row.lastElementChild.textContent = memory[row.dataset.held];
    }
    by_id("tiles-words").textContent = told_step(step);
    by_id("tiles-at").max = this.frames.length - 1, by_id("tiles-at").value = this.at;
    by_id("tiles-count").textContent = `${this.at} of ${this.frames.length - 1}`;
  },
  /** From the window to what the tile adds to. */
  paintArrows(name, q, k) {
    const { arrows, u, h, x, y, r, below, second } = this.marks, row = y + (q + 1) * h;
    const right = (to) => `M${x + (k + 2) * u} ${row}H${to}m-6 -5l6 5l-6 5`;
    const down = (at, to) => `M${x + at * u} ${y + (q + 2) * h}V${to}m-5 -6l5 6l5 -6`;
    const back = right(r + 2 * u) + down(k + 0.5, below) + down(k + 1, below + second);
    arrows.setAttribute("d", { gradients: back, sums: right(r + u) }[name] ?? "");
  },
};
makeTouchable();
tiles.show();
figure(places("tiles"), "Tiles over the scores of four tokens",
  "A window of two queries and two keys goes over the scores, forward and back; the words beside it say each step.", "",
  (svg, width) => tiles.draw(svg, width));
const title_of = (name) => data.steps.mistakes.find((m) => m.name === name).title.replace(/^none$/, "as it should be");
choice(by_id("touch-mistakes"), ["none", "no_delta", "scaled_twice", "no_rescale"].map((m) => [m, title_of(m)]),
  (name) => ((hand.mistake = name), touch()));
by_id("tiles-back").addEventListener("click", () => (tiles.play(false), tiles.go(tiles.at - 1)));
by_id("tiles-step").addEventListener("click", () => (tiles.play(false), tiles.go(tiles.at + 1)));
by_id("tiles-play").addEventListener("click", () => tiles.play(!tiles.timer));
by_id("tiles-at").addEventListener("input", (e) => ((tiles.at = e.target.valueAsNumber), tiles.play(false)));
by_id("tiles").addEventListener("keydown", (e) => {
  const to = { ArrowLeft: tiles.at - 1, ArrowRight: tiles.at + 1, Home: 0, End: tiles.frames.length - 1 }[e.key];
  if (to !== undefined && e.target.type !== "range") e.preventDefault(), tiles.play(false), tiles.go(to);
});
