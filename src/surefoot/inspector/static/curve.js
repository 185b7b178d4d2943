// The objective over ρ at one Â, with a point to drag or to move with the arrow keys.

import { h, s, set, show } from "./dom.js";
import { fixed, evaluate, short, signed } from "./surrogate.js";

const WIDTH = 520;
const HEIGHT = 250;
const LEFT = 46;
const BOTTOM = 34;
const TOP = 14;
const RIGHT = 12;

export function makeCurve(move) {
  const drawn = s("g", {});
  const point = s("circle", {
    r: 7, class: "point", tabindex: "0", role: "slider", id: "point", "aria-label": "ratio on the curve",
    "aria-valuemin": "0", "aria-orientation": "horizontal",
  });
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "curve", id: "curve" }, drawn, point);
  let state = null;
  let right = 2.5;
  const x = (ratio) => LEFT + (ratio / right) * (WIDTH - LEFT - RIGHT);

  function draw(next) {
    state = next;
    const { ratio, advantage, rule } = state;
    right = Math.max(2.5, Math.ceil(ratio * 2 + 0.5) / 2, rule.dual === null ? 0 : rule.dual + 1);
    const at = (value) => evaluate(value, advantage, rule);
    const knees = [0, 1 - rule.low, 1 + rule.high, ...(rule.dual === null ? [] : [rule.dual]), right];
    const inside = knees.filter((value) => value >= 0 && value <= right).sort((a, b) => a - b);
    const values = inside.map((value) => at(value).value);
    const reach = Math.max(Math.abs(advantage) * 1.6, 0.2);
    const [lowest, highest] = advantage >= 0 ? [-0.15 * reach, Math.max(...values, reach)] : [Math.min(...values, -reach), 0.15 * reach];
    const y = (value) => TOP + ((highest - value) / (highest - lowest)) * (HEIGHT - TOP - BOTTOM);
    const line = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(2)},${y(b).toFixed(2)}`).join("");
    const floor = HEIGHT - BOTTOM;
    const ticks = [];
    for (let value = 0; value <= right + 1e-9; value += 0.5) ticks.push(value);
    const cut = (value) => Math.min(Math.max(value, lowest), highest);
    const end = advantage === 0 ? right : Math.min(right, Math.abs((advantage > 0 ? highest : lowest) / advantage));
    show(
      drawn,
      s("rect", { x: x(1 - rule.low), y: TOP, width: x(1 + rule.high) - x(1 - rule.low), height: floor - TOP, class: "band" }),
      s("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(0), y2: y(0), class: "axis" }),
      s("line", { x1: x(1), x2: x(1), y1: TOP, y2: floor, class: "hair" }),
      ticks.map((value) => s("text", { x: x(value), y: floor + 15, class: "tick", "text-anchor": "middle" }, short(value))),
      s("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, class: "tick name", "text-anchor": "end" }, "ratio ρ"),
      [highest, lowest].filter((value) => Math.abs(value) > 0.3 * reach).map((value) =>
        s("text", { x: LEFT - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, fixed(value, 1))),
      s("text", { x: LEFT - 6, y: y(0) + 4, class: "tick", "text-anchor": "end" }, "0"),
      s("text", { x: LEFT - 6, y: TOP + (y(0) > HEIGHT / 2 ? 20 : 60), class: "tick name", "text-anchor": "end" }, "J"),
      s("path", { d: line([[0, 0], [end, end * advantage]]), class: "unclipped" }),
      s("path", { d: line(inside.map((value, i) => [value, values[i]])), class: "objective" }),
    );
    const here = at(ratio);
    set(point, {
      cx: x(ratio), cy: y(cut(here.value)), "aria-valuemax": String(right), "aria-valuenow": fixed(ratio, 4),
      "aria-valuetext": `ratio ${fixed(ratio)}, advantage ${signed(advantage)}: objective ${fixed(here.value)}`,
    });
    point.classList.toggle("still", !here.flows);
  }

  function drag(event) {
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * WIDTH;
    const ratio = ((inside - LEFT) / (WIDTH - LEFT - RIGHT)) * right;
    move({ ratio: Math.round(Math.min(Math.max(ratio, 0), right) * 100) / 100 });
  }
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    drag(event);
  });
  svg.addEventListener("pointermove", (event) => svg.hasPointerCapture(event.pointerId) && drag(event));
  point.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? 0.1 : 0.01;
    const by = { ArrowRight: step, ArrowUp: step, ArrowLeft: -step, ArrowDown: -step }[event.key];
    const to = by === undefined ? { Home: 0, End: right }[event.key] : state.ratio + by;
    if (to === undefined) return;
    event.preventDefault();
    move({ ratio: Math.max(0, Math.round(to * 100) / 100) });
  });
  const caption = h("figcaption", {}, "The objective over ρ at this Â. Dashed: without the clip. Shaded: the band.");
  return { element: h("figure", {}, svg, caption), draw };
}
