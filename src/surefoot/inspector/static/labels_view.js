// The labels of rounds: how well people agree with themselves, each other and the reward model, and where they differ most.

import { getJson, short, visible } from "./api.js";
import { h, show } from "./dom.js";
import { finding } from "./findings_view.js";

const fixed = (x) => x.toFixed(2).replace("-", "−");
const percent = (x) => `${Math.round(100 * x)} %`;
const share = (of) => (of?.of ? `${percent(of.share)} of ${of.of} (${percent(of.low)} to ${percent(of.high)})` : "–");
const COLUMNS = {
  labels: (one) => one.labels, equal: (one) => one.equal, skipped: (one) => one.skipped,
  "seconds each": (one) => (one.seconds === null ? "–" : one.seconds.toFixed(1)),
  "same again": (one) => (one.same_again ? share(one.same_again) : one.repeats ? "too few repeats" : "–"),
  "chose the left": (one) => share(one.left), "chose the longer": (one) => share(one.longer),
};

export function makeLabels(state) {
  const element = h("div", { id: "labels" });

  async function refresh() {
    const run = state.runs.find((one) => one.labelled);
    show(element, (await getJson(`api/runs/${run.number}/labels`)).reverse().map(round));
  }

  function round(of) {
    const agree = Object.entries(of.between).map(([names, one]) => h("p", {}, `${names} agree on ${one.agreed} of ${one.pairs} pairs`
      + (one.kappa === null ? "." : `; κ ${fixed(one.kappa)} (${fixed(one.low)} to ${fixed(one.high)}).`)));
    const row = ([name, one]) => h("tr", {}, h("th", { scope: "row" }, visible(name)), Object.entries(COLUMNS).map(([title, shown]) => h("td", { "data-title": title }, shown(one))));
    return h("section", { "data-round": of.name }, h("h2", {}, of.name.replace("round-", "Round ")), of.findings.map((one) => finding(one)),
      h("table", { class: "people" }, h("thead", {}, h("tr", {}, h("th", {}, ""), Object.keys(COLUMNS).map((title) => h("th", { scope: "col" }, title)))), h("tbody", {}, Object.entries(of.people).map(row))),
      agree, h("p", {}, `The reward model before this round predicted ${share(of.model)} of the labelled pairs, which it had not seen.`),
      of.differ.length ? [h("h3", {}, "Where it differs most"), h("p", { class: "hint" }, "Pairs of which the reward model prefers the answer that people did not choose, by its largest margins."), of.differ.map(pair)] : null);
  }

  const pair = (one) => h("article", { class: "differ" }, h("p", { class: "prompt" }, visible(one.prompt)),
    h("div", { class: "answers" }, h("div", {}, h("span", { class: "hint" }, `chosen by ${visible(one.who)}`), h("p", {}, visible(one.chosen))),
      h("div", {}, h("span", { class: "hint" }, `preferred by the model, by ${short(-one.margin)}`), h("p", {}, visible(one.other)))));

  refresh();
  return { element, refresh };
}
