// Metrics over steps, with all runs in one chart. Raw values are a thin line, or a band if one point represents many iterations;
// the running mean is drawn over them.

import { getJson, short, steps } from "./api.js";
import { h, show } from "./dom.js";
import uPlot from "./vendor/uPlot.esm.js";

const FIRST = ["evaluation_return", "episode_return", "reward", "gold", "held_out_reward", "held_out_gold", "held_out_loss", "held_out_accuracy",
  "held_out_log_likelihood", "kl", "kl_reference_response", "entropy", "clip_active", "ratio_outside", "explained_variance", "value_loss",
  "response_length", "steps_per_second", "tokens_per_second", "cpu_cores", "memory_gb", "gpu_memory_gb", "gpu_percent"];
const POINTS = 400;
const WAIT = 150;
const BUDGET = 8; // ms of the 16 of a frame; the last chart may take longer

export function makeCurves(state) {
  const chosen = { smoothing: 0.02, log: false, range: null, extra: [] };
  const charts = new Map();
  const parts = { training: h("div", { class: "charts" }), machine: h("div", { class: "charts" }) };
  const heading = h("h2", { id: "machine", hidden: true }, "Time and machine");
  const grid = h("div", {}, parts.training, heading, parts.machine);
  const machine = (name) => Boolean(state.metrics[name]?.machine);
  let latest = 0;
  let timer = 0;
  let frame = 0;
  let counted = "";
  const behind = new Set();

  const smooth = h("input", { type: "range", id: "smoothing", min: 0, max: 20, step: 1, value: 4 });
  smooth.addEventListener("input", () => {
    chosen.smoothing = (Number(smooth.value) / 20) ** 2 / 2;
    fetchSoon(0);
  });
  chosen.smoothing = (4 / 20) ** 2 / 2;
  const log = h("input", { type: "checkbox", id: "log" });
  log.addEventListener("change", () => {
    chosen.log = log.checked;
    rebuild();
  });
  const more = h("select", { id: "more" });
  more.addEventListener("change", () => {
    chosen.extra.push(more.value);
    rebuild();
  });
  const back = h("button", { type: "button", id: "whole", onclick: () => look(null), hidden: true }, "Whole run");
  const controls = h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    h("label", {}, h("span", {}, "smoothing"), smooth), h("label", { class: "check" }, log, h("span", {}, "log scale")),
    h("label", {}, h("span", {}, "add a metric"), more), back,
    h("span", { class: "hint" }, "Drag across a curve to zoom in; then press ← → or Shift-drag to pan. Shaded: healthy."));

  const names = () => {
    const known = new Set(state.runs.flatMap((run) => run.metrics));
    return [...FIRST.filter((name) => known.has(name)), ...chosen.extra.filter((name) => known.has(name))];
  };
  const colour = (run) => getComputedStyle(document.documentElement).getPropertyValue(`--run-${run % 6}`).trim();
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function build(name) {
    const about = state.metrics[name] ?? { title: name, meaning: "" };
    const readout = h("span", { class: "readout" });
    const holder = h("div", { class: "plot", role: "img" });
    const note = h("p", { class: "hint unshown" });
    const element = h("section", { class: "chart", "data-metric": name }, h("h3", { title: about.meaning }, about.title), readout, holder, note);
    const one = { name, element, readout, holder, note, plot: null, data: null, seen: true };
    observer.observe(element);
    return one;
  }

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const one = charts.get(entry.target.dataset.metric);
      if (!one) continue;
      one.seen = entry.isIntersecting;
      if (one.seen && one.late) draw(one);
    }
  }, { rootMargin: "20px" });

  function options(one) {
    const series = [{}];
    const bands = [];
    state.runs.forEach((_, run) => {
      const line = colour(run);
      bands.push({ series: [series.length, series.length + 1], fill: `${line}22` });
      series.push({ scale: "y", stroke: `${line}66`, width: 1, points: { show: false }, spanGaps: true });
      series.push({ scale: "y", stroke: `${line}66`, width: 1, points: { show: false }, spanGaps: true });
      series.push({ scale: "y", stroke: line, width: 2, points: { size: 4 }, spanGaps: true });
    });
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    return {
      width: Math.max(280, one.holder.clientWidth), height: 190, legend: { show: false }, series, bands,
      cursor: { sync: { key: "surefoot", scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: (_, low, high) => chosen.range ?? [low, high] }, y: { distr: chosen.log ? 3 : 1 } },
      axes: [{ ...axis, size: 26, label: unit(), labelSize: 16, labelFont: axis.font, values: (_, ticks) => ticks.map((x) => steps(x)) }, { ...axis, size: 62, values: (_, ticks) => ticks.map((x) => (x === null ? "" : short(x))) }],
      hooks: {
        drawClear: [(plot) => shade(plot, one.name)],
        setCursor: [(plot) => read(one, plot.cursor.idx)],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const [low, high] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          look([low, high]);
        }],
      },
    };
  }

  const unit = () => [...new Set(state.runs.map((run) => run.unit).filter(Boolean))].join(" or ");

  const healthy = (name) => {
    const { low, high } = state.metrics[name] ?? {};
    return [low ?? -Infinity, high ?? Infinity];
  };

  // The healthy range of a metric, where its limits are in sight.
  function shade(plot, name) {
    const [low, high] = healthy(name);
    if (low === -Infinity && high === Infinity) return;
    const { left, top, width, height } = plot.bbox;
    const at = (value) => Math.min(top + height, Math.max(top, plot.valToPos(value, "y", true)));
    const [above, below] = [high === Infinity ? top : at(high), low === -Infinity ? top + height : at(low)];
    plot.ctx.save();
    plot.ctx.fillStyle = style("--up-wash");
    plot.ctx.globalAlpha = 0.6;
    plot.ctx.fillRect(left, above, width, Math.max(0, below - above));
    plot.ctx.restore();
  }

  // What a chart shows, for readers who can't see it.
  function spoken(one) {
    const [low, high] = healthy(one.name);
    const range = [low === -Infinity ? "" : `above ${short(low)}`, high === Infinity ? "" : `below ${short(high)}`].filter(Boolean).join(" and ");
    const lines = state.runs.map((run, i) => {
      const known = one.data.points[i].high.filter((x) => x !== null);
      return known.length ? `${run.name}: from ${short(known[0])} to ${short(known.at(-1))}, between ${short(Math.min(...known))} and ${short(Math.max(...known))}` : `${run.name}: no values`;
    });
    return `${state.metrics[one.name]?.title ?? one.name} over ${unit()}. ${lines.join(". ")}.${range ? ` Healthy ${range}.` : ""}`;
  }

  function read(one, at) {
    if (!one.data) return;
    const known = one.data.points;
    const parts = state.runs.map((_, run) => {
      const line = known[run];
      let i = at ?? line.high.length - 1;
      if (at === null || at === undefined) while (i > 0 && line.high[i] === null) i--;
      return h("span", { class: `run-${run % 6}` }, short(line.high[i]));
    });
    show(one.readout, at === null || at === undefined ? [] : h("i", {}, `step ${steps(one.data.steps[at])}`), parts);
  }

  function draw(one) {
    one.late = one.fresh = false;
    if (!one.data) return;
    const positive = (line) => (chosen.log ? line.map((x) => (x !== null && x > 0 ? x : null)) : line);
    const rows = one.data.points.flatMap((line) => {
      const high = positive(line.high);
      return [line.low ? positive(line.low) : high.map(() => null), high, positive(line.smooth)];
    });
    if (one.plot) one.plot.setData([one.data.steps, ...rows]);
    else {
      show(one.holder);
      one.plot = new uPlot(options(one), [one.data.steps, ...rows], one.holder);
      one.plot.over.addEventListener("pointerdown", (event) => event.shiftKey && grab(event, one.plot), true);
      one.plot.over.addEventListener("dblclick", () => look(null));
    }
    read(one, null);
    one.holder.setAttribute("aria-label", spoken(one));
    const unshown = one.data.points.reduce((sum, line) => sum + line.not_positive, 0);
    show(one.note, chosen.log && unshown ? `${steps(unshown)} value${unshown === 1 ? " is" : "s are"} 0 or less, which a log scale can’t show` : []);
  }

  function grab(event, plot) {
    if (!chosen.range) return;
    event.stopImmediatePropagation();
    event.preventDefault();
    const [from, range] = [event.clientX, chosen.range];
    const width = plot.over.clientWidth;
    const move = (now) => shift(range, ((from - now.clientX) / width) * (range[1] - range[0]));
    const stop = () => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", stop);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
  }
  // uPlot starts a selection on mousedown; a pan is not one.
  grid.addEventListener("mousedown", (event) => event.shiftKey && event.stopImmediatePropagation(), true);

  function shift(range, by) {
    look([range[0] + by, range[1] + by]);
  }

  function look(range) {
    chosen.range = range;
    back.hidden = range === null;
    for (const one of charts.values()) {
      if (one.plot && !one.seen) one.late = true;
      else if (one.plot && range) behind.add(one); // charts already waiting keep their position
    }
    work();
    fetchSoon(WAIT);
  }

  function work() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(catchUp);
  }

  // Draw as many charts as fit into a frame; draw the others in the next one, with the range at that time.
  function catchUp() {
    const begun = performance.now();
    for (const one of behind) {
      behind.delete(one);
      if (one.fresh) draw(one);
      else if (one.plot && chosen.range) one.plot.batch(() => one.plot.setScale("x", { min: chosen.range[0], max: chosen.range[1] })); // now, not in a separate task
      if (performance.now() - begun > BUDGET) break;
    }
    window.surefoot.frames.push(performance.now() - begun);
    if (behind.size) work();
    else if (counted) element.dataset.iterations = counted;
  }

  function fetchSoon(wait) {
    clearTimeout(timer);
    timer = setTimeout(refresh, wait);
  }

  async function refresh() {
    const number = ++latest;
    fill();
    const wanted = names();
    const query = new URLSearchParams({ runs: state.runs.map((run) => run.number).join(","), metrics: wanted.join(","), points: POINTS, smoothing: chosen.smoothing });
    if (chosen.range) {
      const room = chosen.range[1] - chosen.range[0]; // a margin, so that panning needs no request
      query.set("from", chosen.range[0] - room / 2);
      query.set("to", chosen.range[1] + room / 2);
      query.set("points", POINTS * 2);
    }
    const curves = await getJson(`api/curves?${query}`);
    if (number !== latest) return;
    for (const name of wanted) {
      const one = charts.get(name);
      if (!one) continue;
      one.data = { steps: curves.steps, points: curves.curves[name] };
      one.fresh = true;
      if (one.seen || !one.plot) behind.add(one);
      else one.late = true;
    }
    counted = curves.iterations.join(",");
    work();
  }

  function fill() {
    const wanted = names();
    for (const [name, one] of charts) if (!wanted.includes(name)) drop(name, one);
    for (const name of wanted) if (!charts.has(name)) charts.set(name, build(name));
    for (const [part, element] of Object.entries(parts)) {
      const these = wanted.filter((name) => machine(name) === (part === "machine")).map((name) => charts.get(name).element);
      if (element.children.length !== these.length || these.some((one, i) => element.children[i] !== one)) show(element, these);
    }
    heading.hidden = !parts.machine.children.length;
    const others = [...new Set(state.runs.flatMap((run) => run.metrics))].filter((name) => !wanted.includes(name) && !["iteration", "steps"].includes(name));
    show(more, h("option", { value: "", selected: true, disabled: true }, "choose"), others.map((name) => h("option", { value: name }, state.metrics[name]?.title ?? name)));
  }

  function drop(name, one) {
    observer.unobserve(one.element);
    one.plot?.destroy();
    behind.delete(one);
    charts.delete(name);
  }

  function rebuild() {
    for (const [name, one] of charts) drop(name, one);
    for (const part of Object.values(parts)) show(part);
    refresh();
  }

  function keys(event) {
    if (!chosen.range || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
    const by = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key];
    if (by) shift(chosen.range, by * (chosen.range[1] - chosen.range[0]));
    if (event.key === "Escape") look(null);
  }
  document.addEventListener("keydown", keys);
  document.addEventListener("themechange", rebuild);
  let width = 0;
  const sizes = new ResizeObserver(() => {
    if (Math.abs(grid.clientWidth - width) < 2) return;
    width = grid.clientWidth;
    for (const one of charts.values()) one.plot?.setSize({ width: Math.max(280, one.holder.clientWidth), height: 190 });
  });
  sizes.observe(grid);

  const element = h("div", { id: "charts" }, controls, grid);
  const focus = state.focus; // evidence of a finding: its metric, over its steps
  delete state.focus;
  if (focus && !FIRST.includes(focus.metric)) chosen.extra.push(focus.metric);
  if (focus?.range) Object.assign(chosen, { range: focus.range });
  back.hidden = chosen.range === null;
  fill();
  if (focus) requestAnimationFrame(() => charts.get(focus.metric)?.element.scrollIntoView({ block: "center" }));
  requestAnimationFrame(refresh);
  return {
    element, refresh,
    close() {
      observer.disconnect();
      sizes.disconnect();
      clearTimeout(timer);
      cancelAnimationFrame(frame);
      document.removeEventListener("keydown", keys);
      document.removeEventListener("themechange", rebuild);
      for (const one of charts.values()) one.plot?.destroy();
    },
  };
}
