// Attention of a few tokens and its gradients, in tiles of two queries and two keys, as fused goes about them. The page
// draws its matrices, the loss, the tangent and the tiles from this alone; a test compares it with the library.
const kInputs = ["Q", "K", "V", "dO"], kTile = 2;

/** Every matrix for inputs {Q, K, V, dO} and the factor c: of the formulas, or with a mistake of steps.json. at(step,
    matrices) is called at each step of each tile: {pass, name, q, k}, with what is there by then. */
function attention({ Q, K, V, dO }, c, mistake = "none", at = () => {}) {
  const n = Q.length, dim = V[0].length, dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
  const filled = (columns, value) => Array.from({ length: n }, () => Array(columns).fill(value));
  const add = (row, factor, other) => other.forEach((x, i) => (row[i] += factor * x));
  const x = { Q, K, V, dO, S: filled(n, -Infinity), m: filled(1, -Infinity), factor: filled(1, 0), l: filled(1, 0),
              a: filled(dim, 0), W: filled(n, 0), O: filled(dim, 0), L: filled(1, 0), P: filled(n, 0),
              dP: filled(n, NaN), Δ: filled(1, 0), dS: filled(n, 0), dQ: filled(dim, 0), dK: filled(dim, 0),
              dV: filled(dim, 0), loss: 0 };
  const pairs = (q, k, f) => {  // of a tile, as far as token t sees u
    for (let t = q; t < q + kTile; t++) for (let u = k; u < Math.min(k + kTile, t + 1); u++) f(t, u);
  };
  const rows = (q, f) => { for (let t = q; t < q + kTile; t++) f(t); };
  at({ pass: "before", name: "start" }, x);
  for (let q = 0; q < n; q += kTile) {
    for (let k = 0; k <= q; k += kTile) {
      const step = (name) => at({ pass: "forward", name, q, k }, x);
      pairs(q, k, (t, u) => (x.S[t][u] = c * dot(Q[t], K[u])));
      step("scores");
      rows(q, (t) => {
        const before = x.m[t][0];
        x.m[t][0] = Math.max(before, ...x.S[t].slice(k, k + kTile));
        x.factor[t][0] = Math.exp(before - x.m[t][0]);
        if (mistake === "no_rescale") return;
        x.l[t][0] *= x.factor[t][0], x.a[t] = x.a[t].map((v) => v * x.factor[t][0]);
      });
      step("rescale");
      pairs(q, k, (t, u) => {
        x.W[t][u] = Math.exp(x.S[t][u] - x.m[t][0]);
        x.l[t][0] += x.W[t][u], add(x.a[t], x.W[t][u], V[u]);
      });
      step("sums");
    }
    rows(q, (t) => (x.O[t] = x.a[t].map((v) => v / x.l[t][0]), x.L[t][0] = x.m[t][0] + Math.log(x.l[t][0])));
    at({ pass: "forward", name: "divide", q, k: q }, x);
  }
  at({ pass: "between", name: "kept" }, x);
  const twice = mistake === "scaled_twice" ? c * c : c;
  for (let q = 0; q < n; q += kTile) {
    rows(q, (t) => (x.Δ[t][0] = dot(dO[t], x.O[t]), x.loss += x.Δ[t][0]));
    for (let k = 0; k <= q; k += kTile) {
      const step = (name) => at({ pass: "backward", name, q, k }, x);
      pairs(q, k, (t, u) => (x.P[t][u] = Math.exp(x.S[t][u] - x.L[t][0])));
      step("weights");
      pairs(q, k, (t, u) => {
        x.dP[t][u] = dot(dO[t], V[u]);
        x.dS[t][u] = x.P[t][u] * (x.dP[t][u] - (mistake === "no_delta" ? 0 : x.Δ[t][0]));
      });
      step("slopes");
      pairs(q, k, (t, u) => {
        add(x.dV[u], x.P[t][u], dO[t]), add(x.dK[u], twice * x.dS[t][u], Q[t]), add(x.dQ[t], twice * x.dS[t][u], K[u]);
      });
      step("gradients");
    }
  }
  at({ pass: "after", name: "done" }, x);
  return x;
}
