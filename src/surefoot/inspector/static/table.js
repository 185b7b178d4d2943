// The clip table: a grid of ratios × advantages with the objective of each cell, and the curve at one advantage.

import { makeCurve } from "./curve.js";
import { h, set, show } from "./dom.js";
import { fixed, evaluate, gradientText, reason, short, signed } from "./surrogate.js";

export const RATIOS = [0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3.5];
export const ADVANTAGES = [2, 1.5, 1, 0.5, 0, -0.5, -0.8, -1, -2];
const MARKS = { 1: "↑", 0: "", "-1": "↓" };
const KINDS = { 1: "raise", 0: "still", "-1": "lower" };

export function makeTable() {
  const state = { ratio: 1.5, advantage: 1.5, rule: { low: 0.2, high: 0.2, dual: null } };
  const followers = [];
  const grid = h("table", { role: "grid", class: "cells", id: "cells", "aria-label": "objective by ratio and advantage" });
  const chain = h("div", { id: "chain", class: "chain", "aria-live": "polite" });
  const inputs = {};
  const cells = [];
  const curve = makeCurve(change);

  function change(next) {
    Object.assign(state, next);
    draw();
  }

  function number(name, label, value, limits, take) {
    inputs[name] = h("input", { type: "number", id: name, value, ...limits });
    inputs[name].addEventListener("input", () => {
      const typed = inputs[name].valueAsNumber;
      const fits = Number.isFinite(typed) && typed >= limits.min && typed <= limits.max;
      inputs[name].setAttribute("aria-invalid", String(!fits));
      if (fits) take(typed);
    });
    return h("label", {}, h("span", {}, label), inputs[name]);
  }
  const rule = (next) => change({ rule: { ...state.rule, ...next } });
  const dual = h("input", { type: "checkbox", id: "dual-on" });
  const bound = number("dual", "c", 3, { min: 1.01, max: 100, step: 0.5 }, (x) => dual.checked && rule({ dual: x }));
  inputs.dual.disabled = true;
  dual.addEventListener("change", () => {
    inputs.dual.disabled = !dual.checked;
    rule({ dual: dual.checked ? inputs.dual.valueAsNumber || 3 : null });
  });
  const controls = h(
    "form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    number("ratio", "ρ", 1.5, { min: 0, max: 1000, step: 0.01 }, (ratio) => change({ ratio })),
    number("advantage", "Â", 1.5, { min: -1000, max: 1000, step: 0.1 }, (advantage) => change({ advantage })),
    number("low", "ε below", 0.2, { min: 0, max: 1, step: 0.01 }, (low) => rule({ low })),
    number("high", "ε above", 0.2, { min: 0, max: 100, step: 0.01 }, (high) => rule({ high })),
    h("label", { class: "check" }, dual, h("span", {}, "dual clip")), bound,
  );

  show(
    grid,
    h("thead", {}, h("tr", { role: "row" },
      h("th", { scope: "col", class: "corner" }, "Â ╲ ρ"),
      RATIOS.map((ratio) => h("th", { scope: "col", role: "columnheader" }, short(ratio))))),
    h("tbody", {}, ADVANTAGES.map((advantage, row) => {
      const line = RATIOS.map((ratio, column) => h("td", {
        role: "gridcell", tabindex: "-1", "data-ratio": ratio, "data-advantage": advantage,
        onclick: (event) => event.currentTarget.focus(),
        onfocus: () => change({ ratio, advantage }),
        onkeydown: (event) => moveFocus(event, row, column),
      }));
      cells.push(line);
      return h("tr", { role: "row" }, h("th", { scope: "row", role: "rowheader" }, signed(advantage)), line);
    })),
  );

  function moveFocus(event, row, column) {
    const last = [ADVANTAGES.length - 1, RATIOS.length - 1];
    const to = {
      ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
      Home: [event.ctrlKey ? 0 : row, 0], End: [event.ctrlKey ? last[0] : row, last[1]],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    cells[Math.min(Math.max(to[0], 0), last[0])][Math.min(Math.max(to[1], 0), last[1])].focus();
  }

  function draw() {
    const chosen = cells.flat().find((cell) => Number(cell.dataset.ratio) === state.ratio && Number(cell.dataset.advantage) === state.advantage);
    for (const cell of cells.flat()) {
      const it = evaluate(Number(cell.dataset.ratio), Number(cell.dataset.advantage), state.rule);
      cell.className = KINDS[it.direction];
      set(cell, {
        "data-branch": it.branch, "data-value": it.value, "data-flows": it.flows, "data-unclipped": it.unclipped, "data-clipped": it.clipped,
        "aria-selected": String(cell === chosen), tabindex: cell === (chosen || cells[0][0]) ? "0" : "-1",
        "aria-label": `ratio ${short(it.ratio)}, advantage ${signed(it.advantage)}: ${it.branch.replace("_", " ")}, `
          + `objective ${fixed(it.value)}, gradient ${gradientText(it)}`,
      });
      show(cell, h("b", {}, fixed(it.value)), h("i", { "aria-hidden": "true" }, MARKS[it.direction]));
    }
    for (const [name, value] of Object.entries({ ratio: state.ratio, advantage: state.advantage, low: state.rule.low, high: state.rule.high }))
      if (document.activeElement !== inputs[name]) inputs[name].value = String(value);
    dual.checked = state.rule.dual !== null;
    inputs.dual.disabled = !dual.checked;
    if (dual.checked && document.activeElement !== inputs.dual) inputs.dual.value = String(state.rule.dual);
    show(chain, written(evaluate(state.ratio, state.advantage, state.rule), state.rule));
    curve.draw(state);
    for (const follow of followers) follow(state);
  }

  const legend = h(
    "p", { class: "legend" },
    h("span", { class: "swatch raise" }), "gradient raises π(a|s)", h("span", { class: "swatch lower" }), "lowers it",
    h("span", { class: "swatch still" }), "is zero",
  );
  const element = h(
    "section", { class: "clip" }, controls,
    h("div", { class: "halves" },
      h("div", {}, h("div", { class: "scroll" }, grid), legend,
        h("p", { class: "hint" }, "Click a cell, or move with the arrow keys. Drag the point on the curve.")),
      h("div", {}, chain, curve.element)),
  );
  draw();
  return { element, change, state, follow: (call) => { followers.push(call); call(state); } };
}

// The arithmetic of one sample, line by line.
export function written(it, rule) {
  const line = (name, formula, value, taken) =>
    h("div", { class: taken ? "taken" : "", "data-term": name }, h("dt", {}, name), h("dd", {}, formula, " = ", h("b", {}, fixed(value))),
      h("dd", { class: "mark" }, taken ? "taken" : ""));
  const [ratio, advantage] = [short(it.ratio), it.advantage < 0 ? `(${short(it.advantage)})` : short(it.advantage)];
  const held = `clip(${ratio}, ${short(1 - rule.low)}, ${short(1 + rule.high)}) · ${advantage} = ${short(it.held)} · ${advantage}`;
  const least = `min(${fixed(it.unclipped)}, ${fixed(it.clipped)})`;
  const whole = it.bound === null ? least : `max(${least}, ${fixed(it.bound)})`;
  return [
    h("dl", {},
      line("unclipped", `ρÂ = ${ratio} · ${advantage}`, it.unclipped, it.branch === "unclipped"),
      line("clipped", held, it.clipped, it.branch === "clipped"),
      it.bound === null ? null : line("dual clip", `cÂ = ${short(rule.dual)} · ${advantage}`, it.bound, it.branch === "dual_clip"),
      line("objective", `J = ${whole}`, it.value, false),
      h("div", { "data-term": "gradient" }, h("dt", {}, "gradient"), h("dd", {}, h("b", { class: KINDS[it.direction] }, gradientText(it))), h("dd"))),
    h("p", { class: "why" }, reason(it, rule)),
  ];
}
