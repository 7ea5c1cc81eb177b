// The figures of curves.html. The walk of any rectangle is computed here by the rule of ops/hilbert/plan/curve.cpp; a test
// compares it with the program's.
const half = (n, even) => {
  const h = Math.floor(n / 2);
  return even && h % 2 && Math.abs(n) > 2 ? h + Math.sign(n) : h;
};
const far = (n) => n - Math.sign(n);
/** A box {x, y, a: [ax, ay], b: [bx, by]}: first cell, major side, minor side. Its parts in the order of the walk. */
function split({ x, y, a, b }) {
  const times = ([i, j], f) => [f(i), f(j)], minus = (p, q) => [p[0] - q[0], p[1] - q[1]], size = ([i, j]) => Math.abs(i + j);
  const at = (...sides) => ({ x: x + sides.reduce((s, p) => s + p[0], 0), y: y + sides.reduce((s, p) => s + p[1], 0) });
  const even = (n) => half(n, true), floor = (n) => half(n, false), neg = (n) => -n;
  if (2 * size(a) > 3 * size(b)) {
    const a1 = times(a, even);
    return [{ ...at(), a: a1, b }, { ...at(a1), a: minus(a, a1), b }];
  }
  const a1 = times(a, floor), b1 = times(b, even);
  return [{ ...at(), a: b1, b: a1 }, { ...at(b1), a, b: minus(b, b1) },
          { ...at(times(a, far), times(b1, far)), a: times(b1, neg), b: times(minus(a, a1), neg) }];
}
const cells = ({ a, b }) => Math.abs((a[0] + a[1]) * (b[0] + b[1]));
const thin = ({ a, b }) => Math.abs(a[0] + a[1]) === 1 || Math.abs(b[0] + b[1]) === 1;
function whole(height, width) {
  let a = [width, 0], b = [0, height];
  if (height > width) [a, b] = [b, a];
  const n = Math.max(width, height), m = Math.min(width, height);
  if (n % 2 === 1 && m % 2 === 0 && n < 3 * m) [a, b] = [b, a];
  return { x: 0, y: 0, a, b };
}
/** Boxes after so many splits of all. */
function boxes(height, width, splits) {
  let all = [whole(height, width)];
  for (let i = 0; i < splits; i++) all = all.flatMap((box) => (thin(box) ? [box] : split(box).filter((p) => cells(p) > 0)));
  return all;
}
/** The cells in the order of the walk. */
function hilbert(height, width) {
  const out = [];
  const walk = (box) => {
    if (cells(box) === 0) return;
    if (!thin(box)) return split(box).forEach(walk);
    const along = Math.abs(box.b[0] + box.b[1]) === 1 ? box.a : box.b, n = Math.abs(along[0] + along[1]);
    for (let i = 0; i < n; i++) out.push([box.x + i * Math.sign(along[0]), box.y + i * Math.sign(along[1])]);
  };
  walk(whole(height, width));
  return out;
}
const spread = (n) => [...n.toString(2)].reduce((s, bit) => s * 4 + Number(bit), 0);
const orders = {
  row: (h, w) => Array.from({ length: h * w }, (_, i) => [i % w, Math.floor(i / w)]),
  snake: (h, w) => orders.row(h, w).map(([x, y]) => [y % 2 ? w - 1 - x : x, y]),
  morton: (h, w) => orders.row(h, w).sort(([x, y], [u, v]) => spread(x) + 2 * spread(y) - spread(u) - 2 * spread(v)),
  tiles: (h, w) => orders.row(h, w).sort(([x, y], [u, v]) => (y >> 3) - (v >> 3) || (x >> 4) - (u >> 4) || y - v || x - u),
  hilbert,
};
function locality(walk, width, height, tile) {
  const place = new Int32Array(width * height);
  walk.forEach(([x, y], i) => (place[y * width + x] = i));
  let pairs = 0, near = 0, jumps = 0;
  const meet = (t, u) => (pairs++, (near += Math.floor(place[t] / tile) === Math.floor(place[u] / tile)));
  for (let t = 0; t < width * height; t++) {
    if ((t + 1) % width) meet(t, t + 1);
    if (t + width < width * height) meet(t, t + width);
  }
  walk.forEach(([x, y], i) => i && (jumps += Math.abs(x - walk[i - 1][0]) + Math.abs(y - walk[i - 1][1]) !== 1));
  return { near: pairs ? near / pairs : 1, jumps };
}
const pathOf = (walk) => walk.map(([x, y], i) => (i ? "L" : "M") + `${x + 0.5} ${y + 0.5}`).join("");

// The walk to follow by hand, as a table of places.
data.trace = [0, 1, 2, 3, 4, 5, 6, 7].map((y) => [0, 1, 2, 3, 4, 5, 6, 7].map((x) => hilbert(8, 8).findIndex(([u, v]) => u === x && v === y)));
show();
for (const o of data.orders) orderPicture(places("orders"), o);

const number = (id) => {
  const input = document.getElementById(id);
  return Math.min(Math.max(Math.round(Number(input.value)) || 1, Number(input.min)), Number(input.max));
};
/** Calls again() now and when one of the inputs changes. */
function follow(ids, again) {
  for (const id of ids) document.getElementById(id).addEventListener("input", again);
  again();
}
function grid(svg, width, w, h, draw) {
  const scale = (width - 2) / Math.max(w, h);
  const all = make("g", { transform: `translate(1 1) scale(${scale})` });
  all.append(make("rect", { width: w, height: h, class: "frame", "stroke-width": 1 / scale }));
  draw(all, scale);
  svg.append(all);
  return scale * h + 2;
}
const ends = (all, scale, [ax, ay], [bx, by]) => {
  const r = 5 / scale;
  all.append(make("circle", { cx: ax + 0.5, cy: ay + 0.5, r, class: "line" }, make("title", {}, "start")),
             make("rect", { x: bx + 0.5 - r, y: by + 0.5 - r, width: 2 * r, height: 2 * r, class: "line" }, make("title", {}, "end")));
};

follow(["place"], () => {
  const walk = hilbert(8, 8), n = number("place"), host = places("trace");
  document.getElementById("place-words").textContent = `${n}: column ${walk[n][0]}, row ${walk[n][1]}`;
  host.replaceChildren();
  figure(host, "A Hilbert curve through 8 x 8 cells", `Walked from place 0 to place ${n}.`, `Places 0 to ${n}.`, (svg, width) =>
    grid(svg, width, 8, 8, (all, scale) => {
      all.append(make("path", { d: "M4 0v8M0 4h8", class: "edge" }), make("path", { d: pathOf(walk), class: "walk", style: "stroke:var(--rule)" }),
                 make("path", { d: pathOf(walk.slice(0, n + 1)), class: "walk", style: "stroke:var(--hybrid)" }));
      ends(all, scale, walk[0], walk[n]);
    }));
});

follow(["high", "wide", "splits"], () => {
  const h = number("high"), w = number("wide"), n = number("splits"), parts = boxes(h, w, n), host = places("recursion");
  document.getElementById("splits-words").textContent = `${n} splits: ${parts.length} boxes` + (parts.every(thin) ? ", all of them lines: the walk is done" : "");
  host.replaceChildren();
  figure(host, `The recursion on ${h} x ${w} cells after ${n} splits`, `${parts.length} boxes in the order of the walk.`, "", (svg, width) =>
    grid(svg, width, w, h, (all, scale) => {
      const middles = parts.map((p, i) => {
        const [dx, dy] = [p.a[0] + p.b[0], p.a[1] + p.b[1]], x = p.x + (dx < 0 ? dx + 1 : 0), y = p.y + (dy < 0 ? dy + 1 : 0);
        all.append(make("rect", { x, y, width: Math.abs(dx), height: Math.abs(dy), style: `fill:var(--t${i % 5})`, opacity: 0.35 }));
        return [x + Math.abs(dx) / 2 - 0.5, y + Math.abs(dy) / 2 - 0.5];
      });
      all.append(make("path", { d: pathOf(middles), class: "line" }));
      ends(all, scale, middles[0], middles.at(-1));
    }));
});

// The box: [x, y, z] of every place; angles are kept while it is redrawn.
const turned = { a: 0.6, b: 0.5 };
function drawBox(svg, width, walk) {
  const size = Math.min(width, 460), most = [0, 1, 2].map((i) => Math.max(...walk.map((p) => p[i]))), scale = size / (Math.hypot(...most) + 1.2);
  const [ca, sa, cb, sb] = [Math.cos(turned.a), Math.sin(turned.a), Math.cos(turned.b), Math.sin(turned.b)];
  const at = walk.map((p) => {
    const [x, y, z] = p.map((v, i) => v - most[i] / 2), u = x * ca + z * sa, w = z * ca - x * sa;
    return [size / 2 + scale * u, size / 2 + scale * (y * cb - w * sb), w * cb + y * sb];
  });
  const deep = most.reduce((s, m) => s + m, 1);
  at.slice(1).map((q, i) => [at[i], q, i]).sort((s, t) => s[0][2] + s[1][2] - t[0][2] - t[1][2]).forEach(([p, q, i]) =>
    svg.append(make("line", { x1: p[0], y1: p[1], x2: q[0], y2: q[1], "stroke-width": 3, "stroke-linecap": "round", opacity: Math.min(1, 0.55 + (p[2] + q[2]) / deep / 2 + 0.2),
                              style: `stroke:color-mix(in oklab, var(--hybrid), var(--taped) ${Math.round((100 * i) / at.length)}%)` })));
  svg.append(make("circle", { cx: at[0][0], cy: at[0][1], r: 6, class: "line" }));
  return size;
}
choice(document.getElementById("boxes"), data.boxes.map((b) => [b.size.join(" x "), b.size.join(" x ")]), (name) => {
  const { walk } = data.boxes.find((b) => b.size.join(" x ") === name), host = places("box");
  host.replaceChildren();
  const drawn = figure(host, `A Hilbert curve through a box of ${name}`, `${walk.length} cells; drag it, or turn it with the arrow keys.`, "Blue at the start, orange at the end.", (svg, width) => drawBox(svg, width, walk));
  const svg = drawn.querySelector("svg");
  svg.setAttribute("tabindex", 0);
  svg.style.touchAction = "none";
  const turn = (a, b) => {
    (turned.a += a), (turned.b += b);
    for (const line of svg.querySelectorAll("line, circle")) line.remove();
    drawBox(svg, drawn.clientWidth, walk);
  };
  svg.addEventListener("pointermove", (e) => e.buttons && turn(e.movementX / 120, e.movementY / 120));
  svg.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, -0.15], ArrowDown: [0, 0.15] }[e.key];
    if (step) e.preventDefault(), turn(...step);
  });
});

follow(["height", "width", "tile"], () => {
  const h = number("height"), w = number("width"), tile = number("tile"), host = places("any");
  host.replaceChildren();
  for (const [name, order] of Object.entries(orders)) {
    const walk = order(h, w), { near, jumps } = locality(walk, w, h, tile);
    figure(host, `${name} order of ${h} x ${w} cells`, `${jumps} jumps; ${percent(near)} of neighbours in one tile of ${tile}.`, `<b>${name}</b>: ${jumps} jumps, ${percent(near)} of neighbours together`, (svg, width) =>
      grid(svg, width, w, h, (all, scale) => {
        all.append(...walkPaths(walk, tile));
        ends(all, scale, walk[0], walk.at(-1));
      }));
  }
});
