// Two charts of results: the β frontier, and the curves of the ladder.

import { h, s } from "./dom.js";
import { short } from "./surrogate.js";

const WIDTH = matchMedia("(max-width: 700px)").matches ? 380 : 640; // text keeps its size on a phone
const HEIGHT = 300;
const EDGE = { left: 48, right: 14, top: 14, bottom: 38 };

function ticks(low, high, count = WIDTH < 500 ? 4 : 5) {
  const raw = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

function frame(xs, ys, xName, yName) {
  const bounds = (values) => [Math.min(...values), Math.max(...values)];
  const [x0, x1] = bounds(xs);
  const [low, high] = bounds(ys);
  const pad = (high - low) * 0.06 || 1;
  const [y0, y1] = [low - pad, high + pad];
  const x = (value) => EDGE.left + ((value - x0) / (x1 - x0 || 1)) * (WIDTH - EDGE.left - EDGE.right);
  const y = (value) => EDGE.top + ((y1 - value) / (y1 - y0)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const floor = HEIGHT - EDGE.bottom;
  const axes = [
    ticks(y0, y1).map((value) => [s("line", { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: y(value), y2: y(value), class: "hair" }),
      s("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value))]),
    ticks(x0, x1).map((value) => s("text", { x: x(value), y: floor + 16, "text-anchor": "middle" }, value >= 1000 ? `${short(value / 1000)}k` : short(value))),
    s("line", { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: floor, y2: floor, class: "axis" }),
    s("text", { x: WIDTH - EDGE.right, y: HEIGHT - 5, "text-anchor": "end", class: "name" }, xName),
    s("text", { x: EDGE.left + 4, y: EDGE.top + 10, class: "name" }, yName),
  ];
  return { x, y, axes };
}

const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)},${b.toFixed(1)}`).join("");
const count = (seeds) => `${seeds} ${seeds === 1 ? "seed" : "seeds"}`;
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function key(entries) {
  return h("p", { class: "legend" }, entries.map(([kind, text]) => h("span", { class: "entry" }, h("span", { class: `swatch ${kind}` }), h("span", {}, text))));
}

// groups: [{label, points: [{kl, gold, reward}]}], in the order of their KL.
export function makeFrontier(groups) {
  const all = groups.flatMap((group) => group.points);
  const { x, y, axes } = frame(all.map((point) => Math.sqrt(point.kl)), all.flatMap((point) => [point.gold, point.reward]), "√KL (nats per response)", "score");
  const series = [["gold", "gold"], ["reward", "proxy"]].map(([name, kind]) => [
    s("path", { class: `line ${kind}`, d: path(groups.map((group) => [x(mean(group.points.map((point) => Math.sqrt(point.kl)))), y(mean(group.points.map((point) => point[name])))])) }),
    groups.map((group) => group.points.map((point) =>
      s("circle", { r: 4, class: `dot ${kind}`, cx: x(Math.sqrt(point.kl)), cy: y(point[name]), "data-score": name, "data-label": group.label, "data-kl": point.kl, "data-value": point[name] },
        s("title", {}, `${group.label}: ${kind} ${short(point[name])} at KL ${short(point.kl)}`)))),
  ]);
  const ends = []; // of each line of labels, where its last label ends
  const names = groups.map((group) => {
    const half = group.label.length * 4;
    const at = Math.max(EDGE.left + half, x(mean(group.points.map((point) => Math.sqrt(point.kl))))); // beside the axis' numbers
    const line = [...ends, -Infinity].findIndex((end) => end < at - half);
    ends[line] = at + half;
    return s("text", { x: at, y: HEIGHT - EDGE.bottom - 6 - 14 * line, "text-anchor": "middle", class: "beta" }, group.label);
  });
  return h("figure", { id: "frontier" }, s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}` }, axes, series, names),
    key([["gold", "gold: the true score"], ["proxy", "proxy: the learned reward"]]),
    h("figcaption", {}, `${groups.map((group) => `${group.label}: ${count(group.points.length)}`).join("; ")}. Lines join the means.`));
}

// tasks: {name: [{rung, seeds, steps, mean, low, high}]}
export function makeLadder(tasks) {
  const names = Object.keys(tasks);
  if (!names.length) return h("p", { class: "hint", id: "ladder" }, "No cell of this experiment is finished yet: python benchmarks/ledger.py run E7");
  return h("div", { class: "pair", id: "ladder" }, names.map((task) => {
    const rungs = tasks[task];
    const { x, y, axes } = frame(rungs.flatMap((rung) => [0, ...rung.steps]), rungs.flatMap((rung) => [...rung.low, ...rung.high]), "environment steps", "return");
    const lines = rungs.map((rung) => [
      s("path", { class: `spread rung${rung.number}`, d: `${path(rung.steps.map((at, i) => [x(at), y(rung.high[i])]))}L${path(rung.steps.map((at, i) => [x(at), y(rung.low[i])]).reverse()).slice(1)}Z` }),
      s("path", { class: `line rung${rung.number}`, d: path(rung.steps.map((at, i) => [x(at), y(rung.mean[i])])), "data-rung": rung.name, "data-last": rung.mean.at(-1) }),
    ]);
    return h("figure", {}, h("h3", {}, task), s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}` }, axes, lines),
      key(rungs.map((rung) => [`rung${rung.number}`, `${rung.number} ${rung.name} (${count(rung.seeds)})`])));
  }));
}
