// The samples of a run over the plane of ratio and advantage, iteration by iteration and pass by pass, and the six counters.
// A source is {runs: [{name, traces: [{steps, iteration, passes, rule}], start}], load(run, trace, pass) -> Promise of {ratios,
// advantages, total}}; pass −1 means all.

import { h, s, set, show } from "./dom.js";
import { count, short, signed } from "./surrogate.js";

const WIDTH = 520;
const HEIGHT = 300;
const LEFT = 46;
const BOTTOM = 34;
const [ACROSS, DOWN] = [96, 50];

export function makeDensity(source, table) {
  const chosen = { run: 0, trace: 0, pass: -1 };
  let samples = { ratios: [], advantages: [], total: 0 };
  let range = { left: 0.5, right: 1.5, top: 3 };
  let latest = 0;
  const canvas = h("canvas", { width: ACROSS * 4, height: DOWN * 4, "aria-hidden": "true" });
  const marks = s("g", {});
  const point = s("circle", { r: 6, class: "point" });
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, id: "plane", role: "img", "aria-label": "samples by ratio and advantage" },
    s("defs", {}, s("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch" }))), marks, point);
  const counters = h("div", { id: "counters", "aria-live": "polite" });
  const x = (ratio) => LEFT + ((ratio - range.left) / (range.right - range.left)) * (WIDTH - LEFT);
  const y = (advantage) => ((range.top - advantage) / (2 * range.top)) * (HEIGHT - BOTTOM);

  const run = h("select", { id: "run", onchange: () => pick({ run: Number(run.value), trace: source.runs[Number(run.value)].start ?? 0, pass: -1 }) },
    source.runs.map((one, i) => h("option", { value: i }, one.name)));
  const slider = (id, take) => h("input", { type: "range", id, min: 0, value: 0, oninput: (event) => take(Number(event.target.value)) });
  const trace = slider("trace", (value) => pick({ trace: value }));
  const pass = slider("pass", (value) => pick({ pass: value - 1 }));
  const outputs = { trace: h("output", { for: "trace" }), pass: h("output", { for: "pass" }) };

  const now = () => source.runs[chosen.run].traces[chosen.trace];

  async function pick(next) {
    const before = { ...chosen };
    Object.assign(chosen, next);
    const traces = source.runs[chosen.run].traces;
    chosen.trace = Math.min(chosen.trace, traces.length - 1);
    chosen.pass = Math.min(chosen.pass, now().passes - 1);
    set(trace, { max: traces.length - 1 });
    set(pass, { max: now().passes });
    [trace.value, pass.value] = [chosen.trace, chosen.pass + 1];
    const labels = { trace: `iteration ${now().iteration}, step ${now().steps.toLocaleString("en")}`,
      pass: chosen.pass < 0 ? `all ${now().passes} passes` : `pass ${chosen.pass + 1} of ${now().passes}` };
    for (const name of ["trace", "pass"]) {
      show(outputs[name], labels[name]);
      (name === "trace" ? trace : pass).setAttribute("aria-valuetext", labels[name]);
    }
    const number = ++latest;
    const found = await source.load(chosen.run, chosen.trace, chosen.pass);
    if (number !== latest) return;
    samples = found;
    const rule = now().rule;
    if (rule && (next.run !== undefined || next.trace !== undefined || before.trace !== chosen.trace)) table.change({ rule });
    fit();
    draw();
  }

  // The visible range: the band with a margin, and all samples but the outermost half percent at each end.
  function fit() {
    const sorted = Float64Array.from(samples.ratios).sort();
    const at = (share) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 1);
    const { low, high } = table.state.rule;
    const sizes = Float64Array.from(samples.advantages, Math.abs).sort();
    range = {
      left: Math.max(0, Math.min(1 - 1.6 * low, at(0.005) - 0.02)), right: Math.max(1 + 1.6 * high, at(0.995) + 0.02),
      top: Math.max(0.01, 1.1 * (sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.998 * sizes.length))] : 3)),
    };
  }

  function draw() {
    const { rule, ratio, advantage } = table.state;
    const [below, above, floor] = [x(1 - rule.low), x(1 + rule.high), HEIGHT - BOTTOM];
    const side = (from, to, top, bottom) => s("rect", {
      x: Math.max(LEFT, from), y: top, width: Math.max(0, Math.min(WIDTH, to) - Math.max(LEFT, from)), height: Math.max(0, bottom - top),
      fill: "url(#hatch)" });
    show(marks,
      side(above, WIDTH, 0, y(0)), side(LEFT, below, y(0), floor),
      rule.dual === null ? null : side(x(rule.dual), WIDTH, y(0), floor),
      [below, above].map((at) => s("line", { x1: at, x2: at, y1: 0, y2: floor, class: "edge" })),
      s("line", { x1: LEFT, x2: WIDTH, y1: y(0), y2: y(0), class: "axis" }),
      [range.left, 1 - rule.low, 1, 1 + rule.high, range.right].map((value, i, all) =>
        i && i < 4 || Math.abs(value - all[i ? 3 : 1]) > 0.12 * (range.right - range.left)
          ? s("text", { x: Math.min(Math.max(x(value), LEFT + 12), WIDTH - 14), y: floor + 15, class: "tick", "text-anchor": "middle" }, short(Number(value.toFixed(2)))) : null),
      [range.top, 0, -range.top].map((value, i) => s("text", { x: LEFT - 6, y: [12, y(0) + 4, floor][i], class: "tick", "text-anchor": "end" }, signed(Number(value.toPrecision(2))))),
      s("text", { x: WIDTH, y: HEIGHT - 4, class: "tick name", "text-anchor": "end" }, "ratio ρ"),
      s("text", { x: LEFT - 6, y: 34, class: "tick name", "text-anchor": "end" }, "Â"));
    const within = ratio >= range.left && ratio <= range.right && Math.abs(advantage) <= range.top;
    set(point, { cx: within ? x(ratio) : -50, cy: within ? y(advantage) : -50 });
    shade();
    show(counters, counted(count(samples.ratios, samples.advantages, rule), samples, rule));
  }

  function shade() {
    const bins = new Uint32Array(ACROSS * DOWN);
    let most = 0;
    for (let i = 0; i < samples.ratios.length; i++) {
      const column = Math.floor(((samples.ratios[i] - range.left) / (range.right - range.left)) * ACROSS);
      const row = Math.floor(((range.top - samples.advantages[i]) / (2 * range.top)) * DOWN);
      if (column >= 0 && column < ACROSS && row >= 0 && row < DOWN) most = Math.max(most, ++bins[row * ACROSS + column]);
    }
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = getComputedStyle(canvas).color;
    for (let i = 0; i < bins.length; i++) {
      if (!bins[i]) continue;
      pen.globalAlpha = 0.15 + (0.85 * Math.log1p(bins[i])) / Math.log1p(most);
      pen.fillRect((i % ACROSS) * 4, Math.floor(i / ACROSS) * 4, 4, 4);
    }
  }

  function drag(event) {
    const box = svg.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * WIDTH;
    const down = ((event.clientY - box.top) / box.height) * HEIGHT;
    const ratio = range.left + ((across - LEFT) / (WIDTH - LEFT)) * (range.right - range.left);
    const advantage = range.top - (down / (HEIGHT - BOTTOM)) * 2 * range.top;
    const tidy = (value, low, high) => Math.round(Math.min(Math.max(value, low), high) * 100) / 100;
    table.change({ ratio: tidy(ratio, range.left, range.right), advantage: tidy(advantage, -range.top, range.top) });
  }
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    drag(event);
  });
  svg.addEventListener("pointermove", (event) => svg.hasPointerCapture(event.pointerId) && drag(event));
  document.addEventListener("themechange", draw);
  table.follow(() => samples.total && draw());

  const element = h("section", { class: "density" },
    h("h2", {}, "How often does the clip act?"),
    h("form", { class: "controls wide", onsubmit: (event) => event.preventDefault() },
      h("label", {}, h("span", {}, "run"), run), h("label", {}, h("span", {}, "iteration"), trace, outputs.trace),
      h("label", {}, h("span", {}, "pass"), pass, outputs.pass)),
    h("div", { class: "halves" },
      h("figure", {}, h("div", { class: "plane" }, canvas, svg),
        h("figcaption", {}, "Each sample of the loss, by ρ and Â. Darker: more samples. Hatched: no gradient.")),
      counters));
  const ready = pick({ run: 0, trace: source.runs[0].start ?? 0 });
  return { element, ready, pick };
}

function counted(found, samples, rule) {
  const all = samples.ratios.length;
  const share = (n) => (all ? `${((100 * n) / all).toFixed(1)} %` : "–");
  const cell = (name, n, still) => h("td", { "data-counter": name, class: still ? "still" : "" },
    h("b", {}, n.toLocaleString("en")), h("span", {}, share(n)), h("i", {}, still ? "no gradient" : ""));
  const outside = found.good.below + found.good.above + found.bad.below + found.bad.above;
  return [
    h("table", { class: "counters" },
      h("thead", {}, h("tr", {}, h("th"), h("th", { scope: "col" }, `ρ < ${short(1 - rule.low)}`), h("th", { scope: "col" }, "inside"),
        h("th", { scope: "col" }, `ρ > ${short(1 + rule.high)}`))),
      h("tbody", {},
        h("tr", {}, h("th", { scope: "row" }, "Â > 0"), cell("good-below", found.good.below, false), cell("good-inside", found.good.inside, false),
          cell("good-above", found.good.above, true)),
        h("tr", {}, h("th", { scope: "row" }, "Â < 0"), cell("bad-below", found.bad.below, true), cell("bad-inside", found.bad.inside, false),
          cell("bad-above", found.bad.above, false)))),
    h("p", { class: "why", id: "verdict" }, `${share(outside)} of the samples are outside the band; the clip removes the gradient of ${share(found.clippedAway)}.`),
    h("p", { class: "hint" }, all < samples.total ? `${all.toLocaleString("en")} of ${samples.total.toLocaleString("en")} samples, evenly spaced.`
      : `${all.toLocaleString("en")} samples.`, found.zero ? ` Â = 0 in ${found.zero.toLocaleString("en")}.` : ""),
  ];
}

// Decode samples: base64 of little-endian float32.
export function floats(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}
