// What surefoot check reports about each run: cause, evidence and remedies. Evidence leads to its curve.

import { getJson, short, steps } from "./api.js";
import { h, show } from "./dom.js";

export function makeFindings(state) {
  const element = h("div", { id: "findings" });
  let latest = 0;

  async function refresh() {
    const number = ++latest;
    const checked = await Promise.all(state.runs.map((run) => getJson(`api/runs/${run.number}/findings`).catch((error) => ({ error: error.message }))));
    if (number === latest) show(element, state.runs.map((run, i) => section(run, i, checked[i])));
  }

  function section(run, i, check) {
    return h("section", { "data-run": run.name }, state.runs.length > 1 ? h("h2", {}, h("span", { class: `dot run-${i % 6}` }), ` ${run.name}`) : null,
      check.error ? h("p", { class: "damage" }, check.error) : [
        check.findings.length ? check.findings.map((one) => finding(one, evidence)) : h("p", { class: "verdict" }, `${check.verdict[0].toUpperCase()}${check.verdict.slice(1)}.`),
        check.changed.length ? h("p", { class: "hint" }, `changed since the checkpoint: ${check.changed.join("; ")}.`) : null]);
  }

  function evidence(one) {
    const [first, last] = [one.first_step, one.last_step];
    const where = first === last ? `step ${steps(first)}` : `steps ${steps(first)} to ${steps(last)}`;
    return h("button", { type: "button", class: "link", title: "show the curve", onclick: () => {
      state.focus = { metric: one.metric, range: last > first ? [first, last] : null };
      location.hash = "curves";
    } }, `${one.metric} ${short(one.value)} (${one.about}, ${where})`);
  }

  show(element, h("p", { class: "hint" }, "checking …"));
  refresh();
  return { element, refresh };
}

export function finding(one, evidence = () => null) {
  const line = (title, items) => (items.length ? h("div", {}, h("dt", {}, title), h("dd", {}, items.length > 1 ? h("ul", {}, items.map((item) => h("li", {}, item))) : items)) : null);
  return h("article", { class: `finding ${one.severity}`, "data-finding": one.name },
    h("h3", {}, h("span", { class: "severity" }, one.severity), ` ${one.what}`),
    h("dl", {}, line("why", one.cause ? [one.cause] : []), line("seen", one.evidence.map(evidence)), line("try", one.advice)));
}
