// What compare.html makes of its JSON: rows of tables, then figures.
const { config, page } = data, symbol = (tensor) => ({ o: "O", dq: "dQ", dk: "dK", dv: "dV" })[tensor] ?? tensor;
const element = { f64: 8, f32: 4, bf16: 2, f16: 2 }[config.dtype], tokens = config.batch * config.length;
const q_bytes = tokens * config.heads * config.head_dim * element, all_pairs = config.length * config.length * config.heads;

const shown_ops = (ops) => (ops ?? []).filter((op) => !op.view);
data.ways = Object.entries(data.modes).map(([name, m]) => ({
  ...m, name, ran: !m.skipped, one: m.nodes === 1, listed: shown_ops(m.tape), inside: shown_ops(m.inside_backward), peak: m.peak_bytes + data.input_bytes, total_ms: m.forward_ms + m.backward_ms }));
const ran = data.ways.filter((w) => w.ran), way = Object.fromEntries(ran.map((w) => [w.name, w])), { dense, taped, fused } = way;
page.by_ops = (taped ?? dense)?.name;
/** Two modes: what they keep and need, and products and time of the second, of the first's. */
function compared(a, b) {
  const over = (x, y) => (y > 0 ? x / y : 0);
  return { flops: over(b.forward_flops, a.forward_flops), slower: b.total_ms > a.total_ms, ms: over(b.total_ms, a.total_ms), saved_a: a.saved_bytes, saved_b: b.saved_bytes, peak_a: a.peak, peak_b: b.peak };
}

/** A step with what a tape does, keeps and takes there, and its lines of hybrid and of the kernel that ran. */
function step_of(step) {
  const pass = ["S", "L", "P", "O", "a"].includes(step.id) ? "forward" : "backward", kernel = page.kernels[pass];
  const kept = way[page.by_ops]?.kept_by_symbol ?? {}, symbols = [step.node, ...(step.node === "O" ? ["M P"] : [])];
  const in_parts = step.rule_of_parts && step.node in kept;
  const fused = step[kernel] ?? step[{ cpu_pairs: "cpu", mma: "plain" }[kernel]] ?? null, here = (i) => fused.first + i === fused.line;
  const of_node = data.steps.steps.filter((s) => s.node && s.node === step.node).map((s) => s.id);
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const ops = (way[page.by_ops]?.tape ?? []).filter((op) => op.symbol && symbols.includes(op.symbol));
  const others = pass === "backward" ? of_node.filter((id) => id !== step.id && id !== step.node) : [];
  return {
    ...step, pass, undone: of_node.join(" ") || step.id, hybrid: step.hybrid ?? null,
    ms: sum(ops.map((op) => op[pass + "_ms"])), beside: others.join(", ").replace("Delta", "Δ"),
    rule: (config.dropout > 0 && step.rule_of_dropout) || (in_parts && step.rule_of_parts) || step.rule,
    keeps: pass === "forward" ? sum(symbols.map((s) => kept[s] ?? 0)) : 0,
    fused: fused && { ...fused, lines: fused.lines.map((text, i) => ({ text, here: here(i) })) } };
}
data.steps.list = data.steps.steps.map(step_of);
for (const pass of ["forward", "backward"]) data.steps[pass] = data.steps.list.filter((step) => step.pass === pass);

// Four tokens: the matrices of each part with their formulas.
const named = (...list) => list.map(([name, formula]) => ({ name, formula, rows: data.by_hand.matrices[name] }));
Object.assign(data.by_hand, {
  inputs: named(["Q", ""], ["K", ""], ["V", ""], ["dO", ""]),
  forward: named(["S", "c Q Kᵀ"], ["P", "exp(S − L)"], ["O", "P V"], ["L", "log ∑ exp(S)"]),
  backward: named(["dP", "dO Vᵀ"], ["Δ", "rowsum(dO · O)"], ["dS", "P (dP − Δ)"], ["dQ", "c dS K"], ["dK", "c dSᵀ Q"], ["dV", "Pᵀ dO"]),
});

Object.assign(page, {
  passed: data.verdict === "ok", scale: 1 / Math.sqrt(config.head_dim), product_flops: 2 * config.head_dim, share_of_pairs: page.pairs / all_pairs,
  groups: config.heads === config.kv_heads ? 0 : config.heads / config.kv_heads, all_pairs: data.plan.pattern.split("+").every((branch) => branch.startsWith("dense")),
  short: { bf16: 8, f16: 11 }[config.dtype] ?? 0, short_parts: { bf16: 256, f16: 2048 }[config.dtype], short_length: Math.min(config.length, 1024),
  q_bytes, qkv_bytes: q_bytes * (1 + (2 * config.kv_heads) / config.heads), dense_bytes: all_pairs * config.batch * element, lse_bytes: tokens * config.heads * Math.max(element, 4), row_bytes: q_bytes + tokens * config.heads * Math.max(element, 4),
  on_cpu: config.device === "cpu", device: data.machine.devices.find((d) => d.startsWith(config.device)) ?? config.device,
  threads: data.machine.threads + (data.machine.threads === 1 ? " thread" : " threads"), routes: data.machine.routes.join(", "),
  agreement: Object.entries(data.naive_error).map(([tensor, naive]) => ({
    tensor: symbol(tensor), naive, modes: ran.map((w) => ({ name: w.name, ok: w.error[tensor].verdict === "ok", ...w.error[tensor] })) })),
  mistakes: (data.broken.none ? data.steps.mistakes : []).map((m) => {
    const found = data.broken[m.name], unseen = m.name !== "none" && Object.values(found.error).every((e) => e.verdict === "ok");
    return { ...m, ...found, how: unseen ? "On this problem the mistake changes nothing that the judge can see." : m.how };
  }),
});
page.two_steps = dense && taped && fused && { dense: dense.saved_bytes, taped: taped.saved_bytes, fused: fused.saved_bytes };
page.by_chance = fused && Math.abs(fused.saved_bytes / page.score_bytes - 1) < 0.02;
page.whole_peak = fused && Math.abs(fused.peak_bytes / (page.row_bytes + page.qkv_bytes) - 1) < 0.02;
page.longer = taped && way.hybrid?.backward_ms > taped.backward_ms;
page.right = taped && taped.forward_flops / taped.bytes_moved > data.machine.gemm_gflop_s / data.machine.copy_gb_s;
/** Why times are worth little: of a processor, of a product before or after, or of what it multiplies, the part had. */
function busy({ processor_share, steady, gemm_gflop_s }) {
  const best = Math.max(0, ...ran.flatMap((w) => [w.forward_flops / w.forward_ms, w.backward_flops / w.backward_ms]));
  const reached = best / 1e6 / gemm_gflop_s;
  if (processor_share < 0.7) return `Something else used this machine: this program had ${percent(processor_share)} of a processor.`;
  if (steady < 0.7) return `Something else used this machine: the same product ran at ${percent(steady)} of its speed once.`;
  if (!page.on_cpu || best === 0 || reached >= 0.05) return "";
  return `The best pass reached ${percent(reached)} of what this machine multiplies: it was busy, or the problem is too small to time.`;
}
page.busy = busy(data.machine);
for (const a of data.ways) for (const b of data.ways) if (a.ran && b.ran) page[`${a.name}_${b.name}`] = compared(a, b);
for (const o of data.pictures.orders) {
  o.against_row = o.count.tiles / Math.max(1, data.pictures.orders[0].count.tiles);
  o.better = o.against_row < 0.995, o.worse = o.against_row > 1.005;
}
show();

const modes = Object.entries(data.modes).filter(([, m]) => !m.skipped);
const listed = (of, f) => of.map(([name, m]) => `${name} ${f(m)}`).join("; ") + ".";

/** Bytes alive and bytes held by the tape over time, as [ms, bytes]; where backward begins, and the end. */
function course(m) {
  let t = 0, sum = 0;
  const given = data.input_bytes, points = [[0, given]], held = [[0, 0]], spans = [];
  const step = (ms, live, kept, pass, symbol) => {
    if (pass) spans.push({ pass, symbol: m.tape.length === 1 ? "" : symbol, from: t, to: t + ms });
    points.push([(t += ms), given + live]), held.push([t, (sum += kept)]);
  };
  for (const n of m.tape) step(n.forward_ms, n.forward_live, n.unique_bytes, "forward", n.symbol);
  step(Math.max(0, m.forward_ms - t), m.held_bytes, 0);
  for (const n of m.inside_backward) step(n.backward_ms, n.backward_live, 0);
  if (m.inside_backward.length) held.push([t, (sum = 0)]);
  else
    for (const n of [...m.tape].reverse())
      step(n.backward_ms, n.backward_live, -n.unique_bytes, "backward", n.symbol);
  const end = Math.max(t, m.forward_ms + m.backward_ms), turn = Math.max(points[m.tape.length][0], m.forward_ms);
  points.push([end, points.at(-1)[1]]), held.push([end, sum]);
  return { given, points, held, end, turn, spans };
}
/** The steps that an op of a symbol does in a pass: all of them where the tape has one op. */
function steps_of(m, pass, symbol) {
  const node = symbol === "M P" ? "O" : symbol || "-", does = (s) => m.tape.length === 1 || s.node === node;
  return data.steps[pass].filter(does).map((s) => s.id).join(" ");
}
/** Bytes alive over both passes; above the height of a card also a band for each op, lit by its steps. */
function smallCurve(host, name, m, height, caption) {
  const { given, points, held, end, turn, spans } = course(m), peak = given + m.peak_bytes;
  const words = `Bytes alive, on a scale of its own up to ${bytes(peak)}.`;
  figure(host, `Memory of ${name} over both passes`, words, caption, (svg, width) => {
    const at = ([t, b]) => `${((t / end) * width).toFixed(1)} ${(height - 2 - (b / peak) * (height - 6)).toFixed(1)}`;
    const line = (list) => list.map((p, i) => (i ? `L${at([p[0], list[i - 1][1]])}L` : "M") + at(p)).join("");
    const x = (turn / end) * width;
    svg.style.setProperty("--color", `var(--${name})`);
    for (const { pass, symbol, from, to } of height > 70 ? spans : []) {
      const x = (from / end) * width, wide = Math.max(2, ((to - from) / end) * width);
      svg.append(make("rect", { x, y: 0, width: wide, height, class: "band", "data-of": steps_of(m, pass, symbol) }));
    }
    svg.append(make("path", { d: line([[0, 0], ...points, [end, 0]]) + "z", class: "under", "data-peak": peak }), make("path", { d: line(points), class: "stroke" }),
               make("path", { d: line(held), class: "stroke", style: "--color:var(--ink)" }), make("line", { x1: x, x2: x, y1: 2, y2: height - 2, class: "mark" }));
    return height;
  });
}
/** One step, and all that belongs to it: its formula and what it undoes, the tape's op, the code, memory and time. */
let lit;
function mark() {
  for (const e of document.querySelectorAll("[data-of]"))
    e.classList.toggle("lit", e.dataset.of.split(" ").includes(lit));
}
function light(id) {
  lit = id, mark();
  for (const e of document.querySelectorAll("[data-step]")) e.setAttribute("aria-pressed", e.dataset.step === id);
  for (const e of document.querySelectorAll("[data-panel]")) e.hidden = e.dataset.panel !== id;
  sheet.classList.add("open");
}
const sheet = document.querySelector(".sheet"), shut = () => sheet.classList.remove("open");
document.addEventListener("drawn", mark);
for (const [name, m] of modes) smallCurve(places("card-" + name), name, m, 70, "");

for (const { name, total_ms, peak } of ran.filter((w) => w.name === page.by_ops || w === fused)) {
  const dot = `<span class="dot" style="--color:var(--${name})"></span>`;
  const caption = `${dot}<b>${name}</b>: ${milliseconds(total_ms)}, up to ${bytes(peak)}`;
  smallCurve(places("steps"), name, data.modes[name], 90, caption);
}
for (const e of document.querySelectorAll("[data-step]")) {
  e.addEventListener("click", () => (light(e.dataset.step), e.scrollIntoView({ block: "nearest" })));
  e.addEventListener("focus", () => light(e.dataset.step));
  e.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && light(e.dataset.step));
}
sheet.querySelector("button").addEventListener("click", shut);
document.addEventListener("keydown", (e) => e.key === "Escape" && shut());
if (matchMedia("(min-width: 901px)").matches) light("dV");
const leaves = ([seen]) => seen.isIntersecting || shut();
new IntersectionObserver(leaves).observe(document.querySelector(".walks"));

function memory(zoomed) {
  const host = places("memory");
  host.replaceChildren();
  const most = Math.max(...modes.map(([, m]) => data.input_bytes + m.peak_bytes));
  for (const [name, m] of modes) {
    const { given, points, held, end, turn } = course(m);
    const level = (from, to, at) => ({ points: [[from, at], [to, at]], style: "thin", dots: false });
    lineChart(host, `Live bytes over time, ${name}`,
      `At most ${bytes(given + m.forward_peak_bytes)} forward, ${bytes(given + m.backward_peak_bytes)} backward; the tape keeps ${bytes(m.saved_bytes)}.`,
      `<b>${name}</b>: peak ${bytes(given + m.peak_bytes)}`, {
        x: { label: "time, ms", low: 0, high: end, end: true, format: (ms) => String(Number(ms.toPrecision(3))) },
        y: { label: `${name}: bytes`, format: (v) => (v ? bytes(v) : "0"), low: 0, high: 1.15 * (zoomed ? given + m.peak_bytes : most) },
        series: [level(0, turn, given + m.forward_peak_bytes), level(turn, end, given + m.backward_peak_bytes), { points, color: name, step: true, dots: m.tape.length < 4 && !m.inside_backward.length },
                 { points: held, color: "ink", step: true, dots: false }, { points: [[turn, m.saved_bytes]], color: "ink", line: false }],
        marks: [{ at: turn, text: "backward" }],
        height: 220,
      });
  }
}
memory(true);
const zoom = document.getElementById("zoom");
zoom.addEventListener("click", () => {
  const on = zoom.getAttribute("aria-pressed") !== "true";
  zoom.setAttribute("aria-pressed", on);
  memory(!on);
});

const kinds = [["products", /matmul/], ["softmax", /softmax|logsumexp|^exp$/], ["kernel", /attention|fused/],
               ["moving", /gather|scatter|index|cat|contiguous|reshape|permute|transpose|slice|squeeze|zeros|^to$/], ["arithmetic", /./]];
const kindOf = (name) => kinds.find(([, pattern]) => pattern.test(name))[0];
function time(place, names, caption) {
  const seen = new Set(), bars = [];
  const shown = modes.filter(([n]) => names.includes(n));
  if (!shown.length) return;
  for (const [name, m] of shown)
    for (const pass of ["forward", "backward"]) {
      const total = m[pass + "_ms"];
      let ops = m.tape.map((n) => [n.name, n[pass + "_ms"], steps_of(m, pass, n.symbol)]);
      if (pass === "backward") ops = m.inside_backward.length ? m.inside_backward.map((n) => [n.name + " (library op)", n.backward_ms]) : ops.reverse();
      const parts = ops.filter(([, ms]) => ms > total / 1000).map(([op, size, of]) => ({ size, of, color: kindOf(op), title: `${op}, ${milliseconds(size)}` }));
      parts.forEach((p) => seen.add(p.color));
      bars.push({ label: `${name} ${pass}`, value: milliseconds(total), total, parts });
    }
  barChart(places(place), "Time of each op, " + names.join(", "),
    "Stacked bars, one for each pass of each mode: " + listed(shown, (m) => `${milliseconds(m.forward_ms)} forward and ${milliseconds(m.backward_ms)} backward`),
    caption, bars, kinds.filter(([k]) => seen.has(k)).map(([k]) => [k === "kernel" ? "one kernel" : k, k]));
}
const names = modes.map(([name]) => name);
time("time", names, "All modes.");
if (names.includes("dense") && names.length > 1) time("time", names.filter((n) => n !== "dense"), "Without dense.");
time("step-time", names.filter((n) => n === page.by_ops || n === fused?.name), "The time of the step's ops.");

const pictures = data.pictures;
function heat(place, name, errors, shades) {
  const host = places(place);
  host.replaceChildren();
  for (const [tensor, e] of Object.entries(errors).filter(([tensor]) => tensor in pictures.heat[name]))
    heatMap(host, `Where ${symbol(tensor)} of ${name} errs most`,
      `The largest error of each token: at most ${scientific(e.max_abs)}, allowed ${scientific(e.limit)}.`,
      `<b>${symbol(tensor)}</b>: ${scientific(e.max_abs)} of ${scientific(e.limit)} allowed`, pictures.columns, pictures.rows, pictures.heat[name][tensor], borders(pictures.columns, pictures.rows, (i) => pictures.tiles[i]), shades);
}
choice(document.getElementById("heat-modes"), [...names].reverse().map((n) => [n, n]), (name) => heat("heat", name, data.modes[name].error));
choice(document.getElementById("mistakes"), page.mistakes.map((m) => [m.name, m.title]), (name) => {
  const { error } = data.broken[name], wrong = Object.entries(error).filter(([, e]) => e.verdict !== "ok").map(([tensor]) => symbol(tensor));
  heat("broken", name, error, ["h0", "w1", "w2", "w3", "w4", "w5", "h6"]);
  const words = document.getElementById("mistake-verdict"), { how } = page.mistakes.find((m) => m.name === name);
  words.classList.toggle("no", wrong.length > 0);
  words.textContent = (wrong.length ? `Beyond the limit: ${wrong.join(", ")}. ` : "") + how;
});

function scaling(rows, key, field, format, title, label, caption, marks) {
  if (rows.length < 2) return;
  const series = names.map((name) => ({ name, color: name, points: rows.filter((r) => name in r[field]).map((r) => [r[key], r[field][name]]) }));
  const last = rows.at(-1)[field];
  lineChart(places("scaling"), title, "At the last point: " + Object.keys(last).map((n) => `${n} ${format(last[n])}`).join("; ") + ".", caption, {
    x: { label: key === "keys" ? "keys a row" : "tokens", log: true, format: String }, y: { label, log: true, format }, series: series.filter((s) => s.points.length), marks });
}
scaling(data.by_length, "length", "ms", milliseconds, "Time of forward and backward against length", "forward + backward", "Time of both passes of the same pattern, on logarithmic scales.");
scaling(data.by_length, "length", "saved_bytes", bytes, "Bytes the tape keeps, against length", "kept by the tape", "What the tape keeps. Hybrid keeps what fused keeps: its line lies beneath.");
scaling(data.by_keys, "keys", "saved_bytes", bytes, "Bytes the tape keeps, against keys a row", "kept by the tape", `What it keeps in segments of growing size, at ${page.short_length} tokens.`, [{ at: config.head_dim, text: "head dim" }]);

for (const o of pictures.orders) orderPicture(places("orders"), o);

const roof = modes.filter(([, m]) => m.forward_flops > 0).map(([name, m]) => ({ name, roof: { intensity: m.forward_flops / m.bytes_moved, speed: m.forward_flops / m.forward_ms / 1e6 } }));
if (roof.length) {
  const peak = data.machine.gemm_gflop_s, copy = data.machine.copy_gb_s, bend = peak / copy;
  const low = Math.min(bend / 8, ...roof.map((w) => w.roof.intensity / 2)), high = Math.max(bend * 8, ...roof.map((w) => w.roof.intensity * 2));
  lineChart(places("roofline"), "Forward passes under the measured ceilings",
    `Ceilings: ${copy.toFixed(1)} GB/s copying, ${peak.toFixed(0)} GFLOP/s multiplying. ` + roof.map((w) => `${w.name} ${w.roof.speed.toFixed(0)} GFLOP/s at ${w.roof.intensity.toFixed(1)} FLOP a byte`).join("; ") + ".",
    "Forward passes and ceilings.", {
      x: { label: "FLOP a byte", log: true, low, high }, y: { label: "GFLOP/s", log: true },
      series: [{ points: [[low, low * copy], [bend, peak], [high, peak]], color: "ink", dots: false },
               ...roof.map((w) => ({ name: w.name, color: w.name, line: false, points: [[w.roof.intensity, w.roof.speed]] }))] });
}
