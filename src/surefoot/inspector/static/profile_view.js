// Where the seconds of an iteration went: sections and their parts, as surefoot train --profile measured them.

import { getJson, short, steps } from "./api.js";
import { h, show } from "./dom.js";

const percent = (x) => `${(100 * x).toFixed(1)} %`;

export function makeProfile(state) {
  const element = h("div", { id: "profile" });
  let latest = 0;

  async function refresh() {
    const number = ++latest;
    const runs = state.runs.filter((run) => run.profiled);
    const found = await Promise.all(runs.map((run) => getJson(`api/runs/${run.number}/profile`).catch((error) => ({ error: error.message }))));
    if (number === latest) show(element, runs.map((run, i) => section(run, found[i])));
  }

  function section(run, profile) {
    const title = state.runs.length > 1 ? h("h2", {}, h("span", { class: `dot run-${state.runs.indexOf(run) % 6}` }), ` ${run.name}`) : null;
    if (profile.error) return h("section", { "data-run": run.name }, title, h("p", { class: "damage" }, profile.error));
    const several = profile.counted < profile.iterations;
    return h("section", { "data-run": run.name }, title,
      h("p", { class: "hint" }, `${short(profile.seconds)} s an iteration: ${several ? `the mean of ${steps(profile.counted)} of ${steps(profile.iterations)} iterations, without the first, which loads and compiles, and the traced one` : "the first, with start-up"}.`),
      h("div", { class: "scroll" }, h("table", { class: "profile" },
        h("thead", {}, h("tr", {}, ["section", "share", "seconds", "calls", "first"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, profile.sections.map((row) => line(row, profile.seconds))))),
      profile.traces.length ? h("p", { class: "hint" }, "Operations of the second iteration, for chrome://tracing or ui.perfetto.dev: ", profile.traces.map((file) => h("code", {}, file))) : null);
  }

  function line(row, total) {
    const share = total > 0 ? row.seconds / total : 0;
    const name = row.path[row.path.length - 1];
    const fill = h("span", { class: "fill" }); // the page allows no style attributes
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    return h("tr", { "data-section": row.path.join("/"), class: row.path.length === 1 ? "outer" : name === "other" ? "rest" : null },
      h("th", { scope: "row", class: `depth-${Math.min(3, row.path.length)}` }, name),
      h("td", { class: "bar" }, fill, h("span", {}, percent(share))),
      h("td", {}, row.seconds.toFixed(4)), h("td", {}, row.calls === null ? "" : short(row.calls)), h("td", {}, row.first.toFixed(4)));
  }

  refresh();
  return { element, refresh };
}
