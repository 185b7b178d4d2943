// One update of TRPO beside PPO's on the same batch: surrogate and KL around θ_old, in the plane of gradient and full step.

import { h, s } from "./dom.js";
import { short } from "./surrogate.js";

const WIDTH = 640;
const HEIGHT = 400; // the vertical axis is stretched: rings are narrow

export function makeStep(step) {
  const [[x0, x1], [y0, y1]] = [step.across, step.up];
  const x = (value) => ((value - x0) / (x1 - x0)) * WIDTH;
  const y = (value) => ((y1 - value) / (y1 - y0)) * HEIGHT;
  const point = ([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`;
  const most = Math.max(...step.gains.flat().map(Math.abs));
  const [wide, high] = [WIDTH / (step.gains[0].length - 1), HEIGHT / (step.gains.length - 1)];
  const ground = step.gains.flatMap((row, j) => row.map((gain, i) =>
    s("rect", { x: (i - 0.5) * wide, y: HEIGHT - (j + 0.5) * high, width: wide, height: high, "shape-rendering": "crispEdges", class: gain > 0 ? "up" : "down", opacity: (0.5 * Math.sqrt(Math.abs(gain) / most)).toFixed(3) })));
  const rings = step.contours.map(({ kl, lines }) => {
    const low = lines.flat().reduce((best, at) => (at[1] < best[1] ? at : best));
    return [lines.map((line) => s("path", { class: kl === step.delta ? "ring bound" : "ring", d: `M${line.map(point).join("L")}`, "data-kl": kl })),
      s("text", { x: Math.min(WIDTH - 40, Math.max(44, x(low[0]))), y: Math.min(HEIGHT - 6, y(low[1]) + 15), "text-anchor": "middle" }, kl === step.delta ? `KL = δ = ${short(kl)}` : `KL ${short(kl)}`)];
  });
  const arrow = (to, kind) => s("line", { x1: x(0), y1: y(0), x2: x(to[0]), y2: y(to[1]), class: `way ${kind}`, "marker-end": `url(#${kind}-head)` });
  const head = (kind) => s("marker", { id: `${kind}-head`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 10, markerHeight: 10, markerUnits: "userSpaceOnUse", orient: "auto" }, s("path", { d: "M0,0L8,4L0,8z", class: kind }));
  const slope = step.gradient.map((part) => 0.2 * part);
  const last = step.epochs.at(-1);
  const times = step.curvature.gradient / step.curvature.full;
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "plane",
    "aria-label": `Surrogate and KL around the old policy. The full step of TRPO has KL ${short(step.tries[0].kl)}; the line search accepts try ${step.tries.length}. PPO ends at KL ${short(last.kl)}.` },
    s("defs", {}, head("gradient"), head("natural")), ground, rings, arrow(slope, "gradient"), arrow([1, 0], "natural"),
    s("path", { class: "ppo", d: `M${[[0, 0], ...step.epochs.map((at) => [at.x, at.y])].map(point).join("L")}` }),
    step.epochs.map((at, i) => s("circle", { cx: x(at.x), cy: y(at.y), r: 3.5, class: "ppo", "data-epoch": i + 1 })),
    step.tries.map((at, i) => s("circle", { cx: x(at.length), cy: y(0), r: at.accepted ? 7 : 5, class: at.accepted ? "try accepted" : "try", "data-try": i + 1, "data-kl": at.kl })),
    s("circle", { cx: x(0), cy: y(0), r: 5, class: "old" }), s("text", { x: x(0) - 10, y: y(0) + 18, "text-anchor": "end", class: "name" }, "θ_old"));
  const cells = (...texts) => h("tr", {}, texts.map((text) => h("td", {}, text)));
  const body = [
    ...step.tries.map((at, i) => cells(`TRPO, try ${i + 1}`, short(at.length), short(at.kl), short(at.gain), at.accepted ? "accepted" : "KL above δ")),
    ...[0, step.epochs.length - 1].map((i) => cells(`PPO, epoch ${i + 1}`, short(step.epochs[i].length), short(step.epochs[i].kl), short(step.epochs[i].gain), "")),
  ];
  return h("figure", { id: "trust" }, h("div", { class: "halves" }, picture, h("div", { class: "chain" },
    h("h3", {}, "What the picture shows"),
    h("ul", {},
      h("li", {}, "Colour: how much the surrogate Σ ρÂ gains (green) or loses. The gradient is its steepest way up."),
      h("li", {}, `Rings: equal KL to the old policy. They are narrow along the gradient, where the KL is curved ${short(times)} times as much as along TRPO’s way. So the same KL buys a longer step there.`),
      h("li", {}, "TRPO: conjugate gradient solves H x = g for the natural direction x and scales it to KL = δ as if the KL were quadratic. The line search shortens the step by 0.8 until the true KL fits and the surrogate gains."),
      h("li", {}, `${step.ppo}. No direction is solved for and no KL is computed. Most of its way is outside this plane: the dots are its shadow.`)),
    h("div", { class: "scroll" }, h("table", { class: "visits" }, h("thead", {}, h("tr", {}, ["", "length", "KL", "gain", ""].map((title) => h("th", { scope: "col" }, title)))), h("tbody", {}, body))),
    h("p", { class: "hint" }, "Lengths are in units of TRPO’s full step; the picture’s vertical axis is stretched."))));
}
